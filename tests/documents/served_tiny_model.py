"""What an OpenAI client of the documents talks to: the front door's own reading of a request, then
the offline engine with the tiny model.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
from document_pages import ROOT
from rewritten_requests import rewritten

from adapters.catalog import ANNOTATION, Catalog, parse_selection
from worker.engines.embedded import Engine
from worker.frontdoor.error_forms import error_body
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT
from worker.frontdoor.tools import ToolCallSettings
from worker.sampling import SamplingParams

MAX_TOKENS = 200
sys.path.append(str(ROOT / "examples" / "custom_processor"))
CATALOG = Catalog.load(options=["acme/digit_limit=acme_processors:DigitLimit"])
CALLS = ToolCallSettings("hermes")


def sent_to_the_worker(path: str, body: bytes) -> dict[str, Any]:
    """The body behind the front door, with guides as processors. Raises `Refused`."""
    fields: dict[str, Any] = json.loads(rewritten(path, body, {}, CATALOG, CALLS, carries_guides=True)[0])
    return fields


def selection_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The selection of processors that the worker reads; empty without one."""
    for annotation in fields.get("nvext", {}).get("annotations", []):
        if annotation.startswith(ANNOTATION):
            parse_selection(annotation.removeprefix(ANNOTATION))
            parsed: dict[str, Any] = json.loads(annotation.removeprefix(ANNOTATION))
            return parsed
    return {}


class ServedTinyModel:
    """An `httpx` handler that answers chats and completions."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "my-model", "object": "model"}]})
        try:
            fields = sent_to_the_worker(request.url.path, request.content)
        except Refused as refused:
            return httpx.Response(refused.status, content=error_body(refused, "openai", ""))
        return httpx.Response(200, json=self._answer(request.url.path, fields))

    def _answer(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        selection = selection_of(fields)
        (result,) = self.engine.generate(
            [self._prompt(path, fields)],
            SamplingParams(max_tokens=fields.get("max_tokens") or MAX_TOKENS, seed=fields.get("seed")),
            progress=False,
            processors=selection.get("processors", []),
        )
        message = {"message": {"role": "assistant", "content": result.text}} if path == CHAT else {"text": result.text}
        answer = {
            "id": "answer",
            "object": "chat.completion" if path == CHAT else "text_completion",
            "created": 0,
            "model": fields["model"],
            "choices": [{"index": 0, "finish_reason": result.finish_reason, **message}],
        }
        receipt = result.outputs[0].receipt  # a served request without processors may have one too
        if receipt is not None and "engine_data" in fields.get("nvext", {}).get("extra_fields", []):
            answer["nvext"] = {"engine_data": {"logits_processors": receipt.as_json()}}
        return answer

    def _prompt(self, path: str, fields: dict[str, Any]) -> Any:
        if path != CHAT:
            return fields["prompt"]
        text = self.engine.tokenizer.apply_chat_template(fields["messages"], tokenize=False, add_generation_prompt=True)
        return self.engine.tokenizer(text, add_special_tokens=False)["input_ids"]
