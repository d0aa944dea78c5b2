"""The parameters of a KV transfer, from a prefill worker to a decode worker: a small JSON object.

They say for which prompt and which processors the KV was computed, so that parameters that went
astray are refused, and where the KV is. No state of processors crosses: decode samples the first
token itself.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import Any

from adapters.catalog import Selection, shown
from worker.engines.embedded.transfer.handle import check_integer, check_names
from worker.errors import KV_TRANSFER_FIELD, InvalidRequest

FORMAT = "dynamo-logits-worker/kv"
VERSION = 3

_MADE_FOR = (
    ("prompt_length", "another prompt"),
    ("prompt_digest", "another prompt"),
    ("chain_digest", "other processors"),
    ("adapter", "another LoRA adapter or draft model"),
)
_DIGEST_BYTES = 16


class OtherVersion(InvalidRequest):
    """The parameters are of another version of this format."""


@dataclass(frozen=True, slots=True)
class KvTransferParams:
    """The parameters of one KV transfer.

    Attributes:
        prompt_length: Tokens of the prompt.
        prompt_digest: See `digest_prompt`.
        chain_digest: See `digest_selection`.
        adapter: `GenerationRequest.beside_model` of the request, None for the model alone.
        kv: Handle of the KV from the engine of the prefill worker; see
            `handle.handle_as_json`.
        num_cached_tokens: Prompt tokens that the prefill worker did not have to compute.
        version: Version of this format.
    """

    prompt_length: int
    prompt_digest: str
    chain_digest: str
    adapter: str | None
    kv: Mapping[str, Any]
    num_cached_tokens: int = 0
    version: int = VERSION

    def as_json(self) -> dict[str, Any]:
        """Content of ``disaggregated_params`` in a prefill worker's only chunk, once sealed."""
        return {"format": FORMAT, **{field.name: getattr(self, field.name) for field in fields(self)}}


def write(
    prompt: Sequence[int],
    selection: Selection,
    kv: Mapping[str, Any],
    num_cached_tokens: int,
    adapter: str | None = None,
) -> dict[str, Any]:
    """The parameters for a prompt that was computed; see `KvTransferParams`."""
    digests = digest_prompt(prompt), digest_selection(selection)
    return KvTransferParams(len(prompt), *digests, adapter, kv, num_cached_tokens).as_json()


def read(data: object, prompt: Sequence[int], selection: Selection, adapter: str | None = None) -> KvTransferParams:
    """Check the parameters that came with a request.

    Raises:
        OtherVersion: it is of another version.
        InvalidRequest: it is malformed, or it was made for another prompt, other processors or
            another LoRA adapter.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else data
        raise InvalidRequest(KV_TRANSFER_FIELD, f"must be of format {FORMAT}, got {shown(found)}")
    if data.get("version") != VERSION:
        raise OtherVersion(f"{KV_TRANSFER_FIELD}.version", f"must be {VERSION}, got {shown(data.get('version'))}")
    names = {field.name for field in fields(KvTransferParams)}
    check_names(KV_TRANSFER_FIELD, data, names | {"format"})
    found = KvTransferParams(**{name: data[name] for name in names})
    expected = KvTransferParams(len(prompt), digest_prompt(prompt), digest_selection(selection), adapter, {})
    for name, whose in _MADE_FOR:
        if getattr(found, name) != getattr(expected, name):
            theirs, ours = shown(getattr(found, name)), getattr(expected, name)
            raise InvalidRequest(f"{KV_TRANSFER_FIELD}.{name}", f"was made for {whose}: {theirs}, and here {ours!r}")
    if not isinstance(found.kv, Mapping):
        raise InvalidRequest(f"{KV_TRANSFER_FIELD}.kv", f"must be a mapping, got {shown(found.kv)}")
    check_integer(f"{KV_TRANSFER_FIELD}.num_cached_tokens", found.num_cached_tokens, len(prompt) + 1)
    return found


def digest_prompt(prompt: Sequence[int]) -> str:
    """128 bits of the token ids, as hexadecimal digits; the same on every machine."""
    ids = array("q", prompt)
    assert ids.itemsize == 8
    return blake2b(ids.tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


def digest_selection(selection: Selection) -> str:
    """128 bits of the selected processors, their arguments and scopes, and of their order."""
    chosen: list[Any] = [[one.name, one.scope, one.args] for one in selection.processors]
    if selection.order:
        chosen.append(selection.order)
    text = json.dumps(chosen, sort_keys=True, separators=(",", ":"), default=_plain)
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    assert isinstance(value, (tuple, frozenset, set)), f"{type(value).__name__} is no JSON data"
    return sorted(value) if isinstance(value, (frozenset, set)) else list(value)
