"""Speculation through the front door: the same answers, and what was drafted is counted."""

from __future__ import annotations

import json
from typing import Any

from e2e_stack import Stack, Worker
from processor_requests import LETTER_A, LETTER_B, PROMPT, Reply, chat

from adapters.client import from_openai_logit_bias, processor

SCHEMA = {
    "type": "object",
    "properties": {"customer_identification": {"type": "boolean"}, "preferred_language": {"enum": ["en", "de"]}},
    "required": ["customer_identification", "preferred_language"],
    "additionalProperties": False,
}


def drafted(worker: Worker, proposer: str) -> tuple[float, float]:
    """Drafted tokens that were computed, and those accepted, as its scrape has them."""
    proposed, accepted = (
        worker.metric(f"dlw_speculation_{kind}_tokens_total", proposer=proposer) for kind in ("proposed", "accepted")
    )
    return proposed, accepted


def seen(reply: Reply) -> tuple[Any, ...]:
    """What a client sees of an answer, however many tokens an event has."""
    assert reply.status == 200, reply.text
    return reply.content, reply.finish_reason, reply.logprobs, reply.receipts[-1]


def test_drafts_change_no_answer_and_are_counted(stack: Stack) -> None:
    stack.start_frontend()
    settings = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
    worker = stack.start_worker("--device", "cpu", "--dtype", "float32", "--speculative-config", settings)
    repeats = from_openai_logit_bias({str(LETTER_A): 100})
    either = processor("allowed_tokens", token_ids=[LETTER_A, LETTER_B])
    form = processor("json_schema", schema=SCHEMA)
    for proposer, controls, processors in (
        ("ngram", {"seed": 7}, [repeats]),
        ("ngram", {"temperature": 1.0, "seed": 7}, [either]),
        ("chain", {"temperature": 1.0, "seed": 7}, [form]),
    ):
        for stream in (False, True):
            asked: dict[str, Any] = {"max_tokens": 48, "stream": stream, "receipt": True, **controls}
            before = drafted(worker, proposer)
            plain = chat(stack, *processors, **asked, speculation=False)
            assert drafted(worker, proposer) == before
            assert seen(chat(stack, *processors, **asked)) == seen(plain)
    asked = {"max_tokens": 48, "temperature": 1.0, "seed": 7, "receipt": True, "ignore_eos": True}
    plain = chat(stack, **asked, speculation=False)
    for prediction in (plain.content, plain.content[:20], PROMPT):
        answer = chat(stack, **asked, prediction=prediction)
        assert seen(answer) == seen(plain)
        counted = answer.events[-1]["usage"]["completion_tokens_details"]
        assert counted["accepted_prediction_tokens"] + counted["rejected_prediction_tokens"] > 0
        assert (counted["accepted_prediction_tokens"] > 0) == (prediction != PROMPT)
    for proposer in ("ngram", "chain", "prediction"):
        proposed, accepted = drafted(worker, proposer)
        assert proposed >= accepted > 0
