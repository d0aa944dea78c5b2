"""Requests with logits processors through the frontend, and what comes back, streamed or whole."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from e2e_stack import DYNAMO, MODEL, Stack, Worker, running_stack

from adapters.client import logits_processors

PROMPT = "Hello there"
LETTER_A, LETTER_B = 37, 38
"""Ids of two one-letter tokens of the tiny tokenizer; `test_the_letters` says so."""

KEY = bytes(range(32))
THIRD_PARTIES = ["acme/one=third_party_e2e:OneToken", "acme/poisons=third_party_e2e:Poisons"]
PATIENT = ["--processor-step-budget-s", "60"]
"""Whether a processor is over its budget must not depend on how busy the machine is."""

PREFIX = "token_id:"


@dataclass
class Reply:
    """One answer.

    Attributes:
        events: Data of every event of a stream, the one body of a whole answer.
    """

    status: int
    text: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def content(self) -> str:
        parts = (_part(choice) for choice in self.choices)
        return "".join(part or "" for part in parts)

    @property
    def finish_reason(self) -> str | None:
        reasons = [choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")]
        return reasons[-1] if reasons else None

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        """One entry per generated token of a chat."""
        found = [choice["logprobs"]["content"] for choice in self.choices if choice.get("logprobs")]
        return [entry for content in found for entry in content or ()]

    @property
    def token_ids(self) -> list[int]:
        found = [choice["logprobs"] for choice in self.choices if choice.get("logprobs")]
        texts = [one.get("tokens") or [entry["token"] for entry in one.get("content") or ()] for one in found]
        return [int(text.removeprefix(PREFIX)) for each in texts for text in each]

    @property
    def receipts(self) -> list[dict[str, Any] | None]:
        """The receipt in each event that has a choice."""
        data = [(event.get("nvext") or {}).get("engine_data") for event in self.events if event.get("choices")]
        return [None if one is None else one["logits_processors"] for one in data]

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refused or failed request, wherever it stands."""
        for event in self.events:
            found = event.get("error", event)
            if isinstance(found, dict) and "code" in found:
                return found
        raise AssertionError(f"no error in {self.text!r}")


def _part(choice: Mapping[str, Any]) -> str | None:
    if "text" in choice:
        return str(choice["text"])
    content = choice.get("delta", choice.get("message", {})).get("content")
    return None if content is None else str(content)


def send(stack: Stack, path: str, body: Mapping[str, Any], headers: Any = None, timeout_s: float = 60) -> Reply:
    """POST ``body`` to ``/v1/path``."""
    url = f"{stack.url}/v1/{path}"
    answer = httpx.post(url, json={"model": MODEL, **body}, headers=headers, timeout=timeout_s)
    return parse(answer)


def parse(answer: httpx.Response) -> Reply:
    text = answer.text
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return Reply(answer.status_code, text, [json.loads(line) for line in lines if line != "[DONE]"])
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return Reply(answer.status_code, text, [data] if isinstance(data, dict) else [])


def chat(
    stack: Stack,
    *processors: Mapping[str, Any],
    stream: bool = False,
    receipt: Any = False,
    content: str = PROMPT,
    headers: Any = None,
    order: Sequence[str] = (),
    speculation: bool = True,
    prediction: str = "",
    timeout_s: float = 60,
    **body: Any,
) -> Reply:
    """A chat with ``processors`` in its annotation, none if there are none, and with ids as its
    log probabilities.
    """
    selected = (
        logits_processors(*processors, receipt=receipt, order=order, speculation=speculation, prediction=prediction)
        if processors or receipt or order or prediction or not speculation
        else {}
    )
    fields = {"max_tokens": 16, "logprobs": True, "top_logprobs": 5, "return_tokens_as_token_ids": True}
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "stream": stream, **fields, **selected, **body}
    return send(stack, "chat/completions", body, headers, timeout_s)


def complete(stack: Stack, *processors: Mapping[str, Any], prompt: str = PROMPT, **body: Any) -> Reply:
    """A completion, as `chat` otherwise; the prompt is taken as it is."""
    selected = logits_processors(*processors) if processors else {}
    fields = {"prompt": prompt, "max_tokens": 16, "logprobs": 1, "return_tokens_as_token_ids": True}
    return send(stack, "completions", {**fields, **selected, **body})


def check_refused(reply: Reply, message: str, *, stream: bool = False, completions: bool = False) -> None:
    """Refused before the first token, with ``message`` as far as the installed frontend lets it
    through.
    """
    assert not reply.choices, reply.text
    if DYNAMO < (1, 6) and (stream or completions):
        assert reply.status == (200 if stream else 500)
        assert reply.error["code"] == 500
        return
    assert reply.status == (200 if stream else 400), reply.text
    assert reply.error["code"] == 400
    assert message in reply.error["message"]


def check_failed(reply: Reply, message: str, *, stream: bool = False) -> None:
    """Failed while it ran. 1.4.2 shows the message only if the failure is the first thing that
    it hears.
    """
    assert reply.finish_reason is None, reply.text
    if DYNAMO < (1, 6):
        assert reply.status in ({200} if stream else {400, 500}), reply.text
        if reply.status != 400:
            assert reply.error["code"] in (400, 500)
            return
    assert reply.status == (200 if stream else 400), reply.text
    assert reply.error["code"] == 400
    assert message in reply.error["message"]


def annotation(text: str) -> dict[str, Any]:
    return {"nvext": {"annotations": ["logits_processors:" + text]}}


def of(*processors: dict[str, Any], receipt: bool = False) -> dict[str, Any]:
    return logits_processors(*processors, receipt=receipt)


def with_third_parties(stack: Stack, *names: str) -> list[str]:
    """Arguments of a worker; ``names`` are ``NAME=module:Class``."""
    stack.environ["PYTHONPATH"] += f":{Path(__file__).parent}"
    return [part for name in names for part in ("--logits-processor", name)]


@contextlib.contextmanager
def serving(directory: Path, model_path: Path) -> Iterator[tuple[Stack, Worker]]:
    """One frontend, and one worker with an operator's watermark key and third parties'
    processors.
    """
    (directory / "key").write_text(KEY.hex())
    policy = directory / "policy.yaml"
    policy.write_text(f"keys:\n  house: {{file: {directory / 'key'}}}\n")
    with running_stack(directory / "stack", model_path) as stack:
        stack.start_frontend()
        options = with_third_parties(stack, *THIRD_PARTIES)
        arguments = ["--device", "cpu", "--dtype", "float32", "--processor-policy", str(policy), "--log-requests"]
        yield stack, stack.start_worker(*arguments, *PATIENT, *options)
