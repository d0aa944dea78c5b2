"""Builders of entries of a selection: a function for each processor of the worker's catalogue.

Written by ``scripts/generate_clients.py`` of dynamo-logits-worker; do not edit. An argument that is
not given, or equals its default, is not sent. The server checks the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

__all__ = [
    "allowed_tokens",
    "bad_words",
    "ban_scripts",
    "banned_tokens",
    "cfg",
    "choice",
    "cite_from_prompt",
    "contrastive",
    "dry",
    "dynamic_temperature",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length",
    "force_last_phrase",
    "forced_prefix",
    "forced_sequence",
    "frequency_penalty",
    "gen_length",
    "grammar",
    "json_schema",
    "logit_bias",
    "loop_stop",
    "min_p",
    "min_tokens",
    "mirostat",
    "multiple_choice",
    "no_repeat_ngram",
    "phrase_ban",
    "presence_penalty",
    "regex",
    "repetition_penalty",
    "sequence_bias",
    "structural_tag",
    "synthid",
    "temperature",
    "thinking_budget",
    "tool_calls",
    "top_a",
    "top_k",
    "top_n_sigma",
    "top_p",
    "trigger_phrase",
    "typical_p",
    "watermark",
    "xtc",
]


class _BiasedSequence(TypedDict):
    bias: float


class BiasedSequence(_BiasedSequence, total=False):
    """A phrase and its bias.

    Attributes:
        text: The phrase as text (text of 1 to 4096 characters).
        token_ids: The phrase as token ids (list of 1 to 4096 integers 0 to 2147483647).
        bias: Added to the logit of the token that completes the sequence (number -100 to 100).
    """

    text: str | None
    token_ids: Sequence[int] | None


class _JsonContent(TypedDict):
    type: Literal["json_schema"]
    json_schema: Mapping[str, Any] | bool


class JsonContent(_JsonContent, total=False):
    """Compact JSON that a JSON Schema describes.

    Attributes:
        json_schema: A JSON Schema; true allows any JSON (object or true or false).
    """


class _RegexContent(TypedDict):
    type: Literal["regex"]
    pattern: str


class RegexContent(_RegexContent, total=False):
    """Text that a regular expression matches as a whole.

    Attributes:
        pattern: Regular expression in the syntax of Rust's regex crate (text of 1 to 1048576
            characters).
    """


class _Tag(TypedDict):
    begin: str
    content: JsonContent | RegexContent
    end: str


class Tag(_Tag, total=False):
    """One section: its beginning, its content and its end.

    Attributes:
        begin: Begins with one of the triggers (text of 1 to 256 characters).
        content: JsonContent or RegexContent.
        end: Text behind the content; may be empty (text of 0 to 256 characters).
    """

    type: Literal["tag"]


class _TriggeredTags(TypedDict):
    type: Literal["triggered_tags"]
    triggers: Sequence[str]
    tags: Sequence[Tag]


class TriggeredTags(_TriggeredTags, total=False):
    """Free text with tags in it.

    Attributes:
        triggers: Texts that start a tag (list of 1 to 32 texts of 1 to 256 characters).
        tags: The tags (list of 1 to 128 Tag).
        at_least_one: The answer begins with a tag.
        stop_after_first: The answer ends behind the first tag.
    """

    at_least_one: bool
    stop_after_first: bool


class _Tool(TypedDict):
    name: str


class Tool(_Tool, total=False):
    """A function that the model may call.

    Attributes:
        name: Name of the function (text like ^[A-Za-z0-9_.-]{1,64}$ of 0 to 64 characters).
        parameters: JSON Schema of its arguments (object or true or false).
    """

    parameters: Mapping[str, Any] | bool


def cfg(
    *,
    scale: float,
    negative_prompt: str | None = None,
    negative_token_ids: Sequence[int] | None = None,
    scope: Literal["all"] = "all",
) -> dict[str, Any]:
    """Moves the answer towards its prompt, and away from a negative one (classifier-free guidance).

    Args:
        scale: Guidance scale; 1 would change nothing (number > 1 and ≤ 100).
        negative_prompt: The negative prompt as text (text of 1 to 4096 characters).
        negative_token_ids: The same as token ids (list of 1 to 4096 integers 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "cfg",
        {"scale": scale},
        negative_prompt=(negative_prompt, None),
        negative_token_ids=(negative_token_ids, None),
        scope=(scope, "all"),
    )


def contrastive(
    *, alpha: float = 0.1, beta: float = 0.5, amateur_temperature: float = 1.0, scope: Literal["all"] = "all"
) -> dict[str, Any]:
    """Moves the answer away from what a weaker model, the worker's draft model, would say
    (contrastive decoding).

    Args:
        alpha: Tokens less likely than this times the most likely one are banned (number > 0 and ≤
            1).
        beta: Strength of the contrast (number > 0 and ≤ 100).
        amateur_temperature: Temperature of the draft model's distribution (number 0.01 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "contrastive",
        {},
        alpha=(alpha, 0.1),
        beta=(beta, 0.5),
        amateur_temperature=(amateur_temperature, 1.0),
        scope=(scope, "all"),
    )


def logit_bias(*, bias: Mapping[str, float], scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Adds a fixed bias to the logits of some tokens.

    Args:
        bias: Bias by token id; ids are decimal without sign or leading zeros (object of 1 to 4096
            numbers -100 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry("logit_bias", {"bias": bias}, scope=(scope, "all"))


def sequence_bias(
    *, sequences: Sequence[BiasedSequence], scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Adds a bias to tokens that would complete a given sequence of tokens.

    Args:
        sequences: The sequences, each at most once (list of 1 to 1024 BiasedSequence).
        scope: Part of the generation that it applies to.
    """
    return _entry("sequence_bias", {"sequences": sequences}, scope=(scope, "all"))


def repetition_penalty(
    *, penalty: float, window: int = 0, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Scales down the logits of tokens that occur in the prompt or in the answer.

    Args:
        penalty: Factor; 1 changes nothing (number 0.01 to 100).
        window: Most recent tokens that count; 0 counts all (integer 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("repetition_penalty", {"penalty": penalty}, window=(window, 0), scope=(scope, "all"))


def frequency_penalty(
    *, penalty: float, window: int = 0, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Lowers the logits of generated tokens by a penalty for every time they occurred.

    Args:
        penalty: Subtracted per occurrence; 0 changes nothing (number -2 to 2).
        window: Most recent tokens that count; 0 counts all (integer 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("frequency_penalty", {"penalty": penalty}, window=(window, 0), scope=(scope, "all"))


def presence_penalty(
    *, penalty: float, window: int = 0, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Lowers the logits of generated tokens by a penalty, once per distinct token.

    Args:
        penalty: Subtracted once; 0 changes nothing (number -2 to 2).
        window: Most recent tokens that count; 0 counts all (integer 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("presence_penalty", {"penalty": penalty}, window=(window, 0), scope=(scope, "all"))


def dry(
    *,
    multiplier: float = 0.8,
    base: float = 1.75,
    allowed_length: int = 2,
    breakers: Sequence[str] = ("\n", ":", '"', "*"),
    range: int = 0,
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """Penalises tokens that would continue a repeat, exponentially in its length (DRY).

    Args:
        multiplier: Penalty of the shortest repeat; 0 is off (number 0 to 1000).
        base: Growth per token of the repeat (number 1 to 16).
        allowed_length: Shortest repeat that is penalised (integer 1 to 512).
        breakers: Texts across which no repeat is counted (list of 0 to 32 texts of 1 to 64
            characters).
        range: Number of newest tokens to search, 0 for all (integer 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "dry",
        {},
        multiplier=(multiplier, 0.8),
        base=(base, 1.75),
        allowed_length=(allowed_length, 2),
        breakers=(breakers, ["\n", ":", '"', "*"]),
        range=(range, 0),
        scope=(scope, "all"),
    )


def cite_from_prompt(
    *, boost: float = 1.0, conditional_boost: float = 0.0, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Boosts the tokens of the prompt, and those that follow the newest token there.

    Args:
        boost: Added to the logit of every token of the prompt (number -100 to 100).
        conditional_boost: Added to the logit of what follows the newest token in the prompt (number
            -100 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "cite_from_prompt", {}, boost=(boost, 1.0), conditional_boost=(conditional_boost, 0.0), scope=(scope, "all")
    )


def gen_length(
    *,
    boost: float,
    power: float = 2.0,
    complete_sentences: bool = False,
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """Raises the logits of the end tokens as the answer grows; negative boosts lengthen answers.

    Args:
        boost: Added to the logits of the end tokens at 10 tokens (number -1000 to 1000).
        power: Exponent of the number of generated tokens (number 0 to 10).
        complete_sentences: Boost only where a sentence has just ended.
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "gen_length",
        {"boost": boost},
        power=(power, 2.0),
        complete_sentences=(complete_sentences, False),
        scope=(scope, "all"),
    )


def exponential_decay_length(
    *, start: int, factor: float, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Raises the end tokens' logits exponentially once the answer exceeds a start length.

    Args:
        start: Generated tokens after which the end tokens' logits begin to grow (integer 0 to
            2147483647).
        factor: Growth per token; 1 changes nothing (number 1 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry("exponential_decay_length", {"start": start, "factor": factor}, scope=(scope, "all"))


def allowed_tokens(
    *, token_ids: Sequence[int], allow_end: bool = True, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Masks every token but the listed ones and, with ``allow_end``, the end tokens.

    Args:
        token_ids: Ids that may be sampled (list of 1 to 4096 integers 0 to 2147483647).
        allow_end: The request's end tokens may be sampled too.
        scope: Part of the generation that it applies to.
    """
    return _entry("allowed_tokens", {"token_ids": token_ids}, allow_end=(allow_end, True), scope=(scope, "all"))


def banned_tokens(*, token_ids: Sequence[int], scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Masks the listed tokens.

    Args:
        token_ids: Ids that must not be sampled (list of 1 to 4096 integers 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("banned_tokens", {"token_ids": token_ids}, scope=(scope, "all"))


def bad_words(
    *,
    words: Sequence[str] | None = None,
    token_ids: Sequence[Sequence[int]] | None = None,
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """Keeps words out of the answer, given as text or as token ids.

    Args:
        words: Words as text, in every tokenisation; each also with a leading space (list of 1 to
            1024 texts of 1 to 256 characters).
        token_ids: Words as token ids, exactly these sequences (list of 1 to 1024 lists of 1 to 128
            integers 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("bad_words", {}, words=(words, None), token_ids=(token_ids, None), scope=(scope, "all"))


def phrase_ban(*, phrases: Sequence[str], scope: Literal["all"] = "all") -> dict[str, Any]:
    """The answer has none of the phrases, in no tokenization and no case.

    Args:
        phrases: Texts that the answer must not have (list of 1 to 64 texts of 1 to 256 characters).
        scope: Part of the generation that it applies to.
    """
    return _entry("phrase_ban", {"phrases": phrases}, scope=(scope, "all"))


def ban_scripts(*, scripts: Sequence[str], scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Bans every token that writes a character of some Unicode scripts.

    Args:
        scripts: Unicode script names, as Han, Cyrillic or Latn (list of 1 to 64 texts like
            ^[A-Za-z][A-Za-z _-]*$ of 1 to 32 characters).
        scope: Part of the generation that it applies to.
    """
    return _entry("ban_scripts", {"scripts": scripts}, scope=(scope, "all"))


def no_repeat_ngram(
    *,
    n: int,
    over: Literal["prompt_and_generated", "generated"] = "prompt_and_generated",
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """Bans every token that would complete an n-gram for the second time.

    Args:
        n: Length of the n-gram in tokens (integer 1 to 256).
        over: Text in which the first occurrence may be.
        scope: Part of the generation that it applies to.
    """
    return _entry("no_repeat_ngram", {"n": n}, over=(over, "prompt_and_generated"), scope=(scope, "all"))


def min_tokens(*, n: int, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Masks the end tokens until the answer has n tokens.

    Args:
        n: Fewest tokens of the answer, its end token not counted; 0 changes nothing (integer 0 to
            2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("min_tokens", {"n": n}, scope=(scope, "all"))


def multiple_choice(
    *, choices: Sequence[str], boost: float = 0.0, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Restricts the answer to one of the choices, each boosted by its words in the prompt.

    Args:
        choices: The answers to choose from (list of 1 to 256 texts of 1 to 256 characters).
        boost: Weight of the logit of each choice's first word in the prompt (number -100 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry("multiple_choice", {"choices": choices}, boost=(boost, 0.0), scope=(scope, "all"))


def json_schema(
    *, schema: Mapping[str, Any] | bool, compact: bool = True, scope: Literal["all", "answer"] = "all"
) -> dict[str, Any]:
    """Restricts the answer to JSON that a JSON Schema describes.

    Args:
        schema: A JSON Schema; true allows any JSON (object or true or false).
        compact: No whitespace between tokens of the JSON, no fraction of an integer.
        scope: Part of the generation that it applies to.
    """
    return _entry("json_schema", {"schema": schema}, compact=(compact, True), scope=(scope, "all"))


def regex(*, pattern: str, scope: Literal["all", "answer"] = "all") -> dict[str, Any]:
    """Restricts the answer to what a regular expression matches as a whole.

    Args:
        pattern: Matches the whole answer (text of 1 to 1048576 characters).
        scope: Part of the generation that it applies to.
    """
    return _entry("regex", {"pattern": pattern}, scope=(scope, "all"))


def choice(*, choices: Sequence[str], scope: Literal["all", "answer"] = "all") -> dict[str, Any]:
    """Restricts the answer to one of several texts.

    Args:
        choices: The texts; one of them is the whole answer (list of 1 to 4096 texts of 1 to 4096
            characters).
        scope: Part of the generation that it applies to.
    """
    return _entry("choice", {"choices": choices}, scope=(scope, "all"))


def grammar(*, lark: str, scope: Literal["all", "answer"] = "all") -> dict[str, Any]:
    """Restricts the answer to what a context-free grammar describes.

    Args:
        lark: A Lark grammar with a rule named start (text of 1 to 1048576 characters).
        scope: Part of the generation that it applies to.
    """
    return _entry("grammar", {"lark": lark}, scope=(scope, "all"))


def structural_tag(*, format: TriggeredTags, scope: Literal["all", "answer"] = "all") -> dict[str, Any]:
    """Lets the model write freely, and holds it to a grammar wherever it starts a tag.

    Args:
        format: Triggers and tags, named as XGrammar's structural tags name them (TriggeredTags).
        scope: Part of the generation that it applies to.
    """
    return _entry("structural_tag", {"format": format}, scope=(scope, "all"))


def tool_calls(
    *,
    format: Literal[
        "hermes",
        "llama3_json",
        "pythonic",
        "mistral",
        "mistral_args",
        "qwen3_coder",
        "glm45",
        "deepseek_v3",
        "deepseek_v3_1",
        "harmony",
        "phi4",
        "functionary_v3_1",
        "functionary_v3_2",
        "nemotron_deci",
        "granite",
        "granite_3_1",
        "phi4_mini",
        "command_r",
        "exaone4",
        "jamba",
        "glm47",
        "olmo3",
        "cohere2",
        "kimi_k2",
        "neutral",
    ],
    tools: Sequence[Tool],
    choice: Literal["auto", "required", "none"] = "auto",
    tool: str | None = None,
    parallel: bool = True,
    answer: JsonContent | RegexContent | None = None,
    scope: Literal["all", "answer"] = "all",
) -> dict[str, Any]:
    """Holds every tool call to the name of a tool and to the JSON Schema of its parameters.

    Args:
        format: Format in which the model writes calls.
        tools: The functions (list of 1 to 128 Tool).
        choice: Whether the model may or must call.
        tool: The only function that may be called (text of 1 to 64 characters).
        parallel: More than one call is allowed.
        answer: Format of an answer without calls; by default free text (JsonContent or
            RegexContent).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "tool_calls",
        {"format": format, "tools": tools},
        choice=(choice, "auto"),
        tool=(tool, None),
        parallel=(parallel, True),
        answer=(answer, None),
        scope=(scope, "all"),
    )


def forced_sequence(
    *,
    text: str | None = None,
    token_ids: Sequence[int] | None = None,
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """The answer is a given sequence, then the end token.

    Args:
        text: The phrase as text (text of 1 to 4096 characters).
        token_ids: The phrase as token ids (list of 1 to 4096 integers 0 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("forced_sequence", {}, text=(text, None), token_ids=(token_ids, None), scope=(scope, "all"))


def forced_prefix(
    *,
    text: str | None = None,
    token_ids: Sequence[int] | None = None,
    heal: bool = False,
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """The answer begins with a given sequence.

    Args:
        text: The phrase as text (text of 1 to 4096 characters).
        token_ids: The phrase as token ids (list of 1 to 4096 integers 0 to 2147483647).
        heal: The text may end within a token that goes on with it.
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "forced_prefix", {}, text=(text, None), token_ids=(token_ids, None), heal=(heal, False), scope=(scope, "all")
    )


def force_last_phrase(*, text: str, scope: Literal["all", "answer"] = "all") -> dict[str, Any]:
    """The answer ends with a given phrase, always and exactly, right before its end token.

    Args:
        text: The last words of the answer, exactly (text of 1 to 4096 characters).
        scope: Part of the generation that it applies to.
    """
    return _entry("force_last_phrase", {"text": text}, scope=(scope, "all"))


def trigger_phrase(
    *,
    text: str,
    trigger: str | None = None,
    after_tokens: int | None = None,
    times: int = 1,
    scope: Literal["all", "thinking", "answer"] = "all",
) -> dict[str, Any]:
    """Writes a phrase whenever a trigger has been generated, or after a number of tokens.

    Args:
        text: The phrase (text of 1 to 4096 characters).
        trigger: Text after which the phrase is written (text of 1 to 256 characters).
        after_tokens: Tokens after which the phrase is written (integer 1 to 2147483647).
        times: Most phrases in the answer (integer 1 to 4096).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "trigger_phrase",
        {"text": text},
        trigger=(trigger, None),
        after_tokens=(after_tokens, None),
        times=(times, 1),
        scope=(scope, "all"),
    )


def loop_stop(
    *, max_period: int = 64, copies: int = 8, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Ends the answer when it loops: the generated tail is ``copies`` exact copies of a cycle.

    Args:
        max_period: Longest cycle in tokens (integer 1 to 1024).
        copies: Copies in a row that count as a loop (integer 2 to 1024).
        scope: Part of the generation that it applies to.
    """
    return _entry("loop_stop", {}, max_period=(max_period, 64), copies=(copies, 8), scope=(scope, "all"))


def thinking_budget(
    *,
    tokens: int,
    grace: int = 0,
    message: str | None = None,
    start: str | None = None,
    end: str | None = None,
    scope: Literal["all"] = "all",
) -> dict[str, Any]:
    """Closes the thinking section when its token budget is used up.

    Args:
        tokens: Most thinking tokens of the answer; 0 closes a section at once (integer 0 to
            2147483647).
        grace: Additional tokens to reach the end of a line (integer 0 to 2147483647).
        message: Text to write before the closing tag when the budget is used up (text of 1 to 4096
            characters).
        start: Tag that opens a section; the model's own by default (text of 1 to 256 characters).
        end: Tag that closes a section; the model's own by default (text of 1 to 256 characters).
        scope: Part of the generation that it applies to.
    """
    return _entry(
        "thinking_budget",
        {"tokens": tokens},
        grace=(grace, 0),
        message=(message, None),
        start=(start, None),
        end=(end, None),
        scope=(scope, "all"),
    )


def temperature(*, value: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Divides the logits by a temperature; 0 leaves only the most likely token.

    Args:
        value: Temperature; 1 changes nothing, 0 is greedy (number 0 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry("temperature", {"value": value}, scope=(scope, "all"))


def dynamic_temperature(
    *, low: float, high: float, exponent: float = 1.0, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Divides the logits by a temperature that rises with the row's entropy.

    Args:
        low: Temperature of a row that is certain (number 0 to 100).
        high: Temperature of a row whose tokens are equally likely (number 0 to 100).
        exponent: Above 1 the temperature stays low longer (number 0 to 10).
        scope: Part of the generation that it applies to.
    """
    return _entry("dynamic_temperature", {"low": low, "high": high}, exponent=(exponent, 1.0), scope=(scope, "all"))


def top_k(*, k: int, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the k tokens with the highest logits.

    Args:
        k: Number of tokens to keep; 0 or -1 keeps all, 1 is greedy (integer -1 to 2147483647).
        scope: Part of the generation that it applies to.
    """
    return _entry("top_k", {"k": k}, scope=(scope, "all"))


def top_p(*, p: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the nucleus: the most likely tokens, as few as have a probability mass of at least p.

    Args:
        p: Probability mass to keep; 1 keeps all, 0 is greedy (number 0 to 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("top_p", {"p": p}, scope=(scope, "all"))


def min_p(*, p: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the tokens of probability at least p times the highest.

    Args:
        p: Least probability relative to the most likely token's; 0 keeps all (number 0 to 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("min_p", {"p": p}, scope=(scope, "all"))


def top_a(*, a: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the tokens at least a times as likely as the square of the highest probability.

    Args:
        a: Least probability relative to the square of the highest; 0 keeps all (number 0 to 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("top_a", {"a": a}, scope=(scope, "all"))


def typical_p(*, p: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the tokens whose information is closest to the row's entropy, up to a mass of p.

    Args:
        p: Probability mass to keep; 1 keeps all (number > 0 and ≤ 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("typical_p", {"p": p}, scope=(scope, "all"))


def top_n_sigma(*, n: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the logits within n standard deviations of the highest.

    Args:
        n: Standard deviations below the highest logit (number 0 to 100).
        scope: Part of the generation that it applies to.
    """
    return _entry("top_n_sigma", {"n": n}, scope=(scope, "all"))


def epsilon_cutoff(*, epsilon: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the tokens of probability at least epsilon, and always the most likely.

    Args:
        epsilon: Least probability of a token; 0 keeps all (number ≥ 0 and < 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("epsilon_cutoff", {"epsilon": epsilon}, scope=(scope, "all"))


def eta_cutoff(*, epsilon: float, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Keeps the tokens of probability at least eta, which falls with the row's entropy.

    Args:
        epsilon: Highest value of the cutoff eta; 0 keeps all (number ≥ 0 and < 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("eta_cutoff", {"epsilon": epsilon}, scope=(scope, "all"))


def xtc(
    *, threshold: float = 0.1, probability: float, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Excludes the top choices at random: of the tokens above a threshold the least likely stays.

    Args:
        threshold: Least probability of a top choice (number 0 to 1).
        probability: Share of the steps at which the top choices are excluded (number 0 to 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("xtc", {"probability": probability}, threshold=(threshold, 0.1), scope=(scope, "all"))


def mirostat(
    *, tau: float = 5.0, eta: float = 0.1, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Steers the surprisal of the chosen tokens towards tau (mirostat 2.0).

    Args:
        tau: Surprisal to aim for, in bits per token (number 0 to 100).
        eta: Learning rate of mu (number 0 to 1).
        scope: Part of the generation that it applies to.
    """
    return _entry("mirostat", {}, tau=(tau, 5.0), eta=(eta, 0.1), scope=(scope, "all"))


def watermark(*, key_id: str, context: int = 4, scope: Literal["all", "thinking", "answer"] = "all") -> dict[str, Any]:
    """Watermarks the text with an operator's key, so that holders of the key can detect it.

    Args:
        key_id: Name of one of the operator's keys (text of 1 to 128 characters).
        context: Tokens that the noise of a token depends on (integer 1 to 64).
        scope: Part of the generation that it applies to.
    """
    return _entry("watermark", {"key_id": key_id}, context=(context, 4), scope=(scope, "all"))


def synthid(
    *, key_id: str, context: int = 4, depth: int = 30, scope: Literal["all", "thinking", "answer"] = "all"
) -> dict[str, Any]:
    """Watermarks the text with an operator's key by SynthID-Text's tournament, two tokens a round.

    Args:
        key_id: Name of one of the operator's keys (text of 1 to 128 characters).
        context: Tokens before it that a token's g depends on (integer 1 to 64).
        depth: Rounds of the tournament (integer 1 to 64).
        scope: Part of the generation that it applies to.
    """
    return _entry("synthid", {"key_id": key_id}, context=(context, 4), depth=(depth, 30), scope=(scope, "all"))


def _entry(name: str, needed: dict[str, Any], /, **others: tuple[Any, Any]) -> dict[str, Any]:
    """An entry with the needed arguments, and with the others that differ from their defaults."""
    args = dict(needed)
    for key, (value, default) in others.items():
        given = list(value) if isinstance(value, tuple) else value
        if type(given) is not type(default) or given != default:
            args[key] = given
    return {"name": name, "args": args}
