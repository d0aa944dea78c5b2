"""The conversation that a request belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ConversationParams:
    conversation_id: str

    def __post_init__(self) -> None:
        conversation_id = "" if self.conversation_id is None else str(self.conversation_id).strip()
        if not conversation_id:
            raise ValueError("conversation_id must be non-empty")
        self.conversation_id = conversation_id
