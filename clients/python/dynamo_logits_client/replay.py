"""Input of ``python -m worker replay``, which makes an answer again from its receipt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dynamo_logits_client.receipts import receipt_of

RECEIPT, PROMPT = "receipt.json", "prompt.json"
"""Names of the two files."""


def digest(token_ids: Sequence[int]) -> str:
    """128 bits of BLAKE2b of token ids as little-endian 64-bit integers, as in receipts."""
    data = b"".join(each.to_bytes(8, "little", signed=True) for each in token_ids)
    return blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class ReplayRequest:
    """One answer to be made again.

    Attributes:
        receipt: Receipt as it came.
        prompt: Token ids of the prompt, or the fields of the request that its text is made of.
    """

    receipt: Mapping[str, Any]
    prompt: Sequence[int] | Mapping[str, Any]

    def save(self, directory: str | Path) -> list[str]:
        """Write the two files; the arguments of ``python -m worker`` that read them.

        ``--model-path`` is still to be added, and what else the receipt cannot have
        (docs/debugging.md of dynamo-logits-worker).
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((RECEIPT, self.receipt), (PROMPT, self.prompt)):
            (folder / name).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        return ["replay", str(folder / RECEIPT), "--prompt-file", str(folder / PROMPT)]


_FIELDS = (
    *("messages", "tools", "chat_template_args", "chat_template_kwargs", "thinking", "reasoning_effort"),
    *("add_generation_prompt", "continue_final_message", "prompt"),
)
"""Fields of a body that its prompt is made of."""


def replay_request(answer: Any, prompt: str | Sequence[int] | Mapping[str, Any], choice: int = 0) -> ReplayRequest:
    """The replay of one choice of an answer.

    Args:
        answer: Whole answer with a receipt, or the last chunk of a stream that has one.
        prompt: Token ids, the text of a completion's prompt, or the body of the request, of which
            ``prompt``, or ``messages`` and what else the prompt is made of, are taken.
        choice: Index of the choice.

    Raises:
        ValueError: there is no receipt, it is not the last one of its answer, it is of another
            prompt than these token ids, or the body has no prompt of a chat or completion.
    """
    receipt = receipt_of(answer, choice)
    if receipt is None:
        raise ValueError("the answer has no receipt: ask for one with receipt=True")
    if receipt.request is None:
        raise ValueError("the receipt has no request: it comes with the chunk that has the finish reason")
    if isinstance(prompt, str):
        return ReplayRequest(receipt.raw, {"prompt": prompt})
    if isinstance(prompt, Mapping):
        fields = {name: prompt[name] for name in _FIELDS if prompt.get(name) is not None}
        if "messages" not in fields and "prompt" not in fields:
            raise ValueError("the body has neither messages nor a prompt: give the prompt's token ids")
        return ReplayRequest(receipt.raw, fields)
    if digest(prompt) != receipt.prompt_digest:
        raise ValueError(
            f"the receipt is of another prompt: it had {receipt.prompt_length} tokens of digest "
            f"{receipt.prompt_digest}, these are {len(prompt)} tokens of {digest(prompt)}"
        )
    return ReplayRequest(receipt.raw, list(prompt))
