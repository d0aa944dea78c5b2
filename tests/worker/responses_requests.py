"""Parts of Responses requests for tests, and the chats that requests stand for."""

from __future__ import annotations

from typing import Any

from worker.frontdoor.responses.fields import RESPONSES, check_fields
from worker.frontdoor.responses.items import input_items
from worker.frontdoor.responses.translation import ChatRequest, as_chat

BASE: dict[str, Any] = {"model": "m", "input": "Hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "f", "description": "Does f.", "parameters": SCHEMA, "strict": True}
OTHER = {**TOOL, "name": "g"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"city":"Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
STORED: Any = {
    "msg_9": {
        "id": "msg_9",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "stored"}],
    }
}


def translated(**fields: Any) -> ChatRequest:
    """The chat of a request with these fields beside the required ones."""
    body = {**BASE, **fields}
    check_fields(RESPONSES, body)
    return as_chat(body, [], input_items(body["input"], STORED.get))


def chat(**fields: Any) -> Any:
    return translated(**fields).fields


def messages(*items: Any, **fields: Any) -> Any:
    return chat(input=list(items), **fields)["messages"]


def user(*texts: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in texts]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}
