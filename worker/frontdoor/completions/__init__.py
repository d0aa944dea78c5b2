"""Completions whose answer has more than Dynamo's frontend says: the prompt again (``echo``), log
probabilities in OpenAI's own form, those of the prompt, and no token at all (``max_tokens: 0``).

`asked` reads the request; `prompt_scores` what the worker says of a prompt, and `openai_logprobs`
is the form in which a completion says it; `prompt_answer` makes the answer to one prompt of the
frontend's chunks; `handler` asks for all prompts; `chat_scores` has the log probabilities of
a chat's prompt.
"""

from worker.frontdoor.completions.handler import answer_completion, whole_completion

__all__ = ["answer_completion", "whole_completion"]
