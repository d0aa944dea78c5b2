"""What a prefill worker tells a decode worker: a small JSON object, written by one and checked by
the other.

It says for which prompt and which processors it was made, so that a hand-off that went astray is
refused, and where the prompt's KV lies. It carries no state of processors: decode samples the first
token itself.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from adapters.catalog import Selection, shown
from worker.engines.embedded.transfer.layout import KvLayout
from worker.engines.embedded.transfer.nixl import KvHandle
from worker.errors import HAND_OFF_FIELD, InvalidRequest, StartupError

FORMAT = "dynamo-logits-worker/kv"
VERSION = 1

MAX_METADATA_BYTES = 2**20
MAX_LIST = 2**20
MAX_TEXT = 256

_MADE_FOR = (
    ("prompt_length", "another prompt"),
    ("prompt_digest", "another prompt"),
    ("chain_digest", "other processors"),
)
_DIGEST_BYTES = 16
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_VOLATILE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class HandOff:
    """One hand-off.

    Attributes:
        prompt_length: Tokens of the prompt.
        prompt_digest: See `digest_prompt`.
        chain_digest: See `digest_selection`.
        kv: Where the KV is, as the engine of the prefill worker says; see `handle_as_json`.
        num_cached_tokens: Prompt tokens that the prefill worker did not have to compute.
        version: Of this format.
    """

    prompt_length: int
    prompt_digest: str
    chain_digest: str
    kv: Mapping[str, Any]
    num_cached_tokens: int = 0
    version: int = VERSION

    def as_json(self) -> dict[str, Any]:
        """What the first and only chunk of a prefill worker carries as ``disaggregated_params``,
        sealed.
        """
        return {"format": FORMAT, **{field.name: getattr(self, field.name) for field in fields(self)}}


def write(prompt: Sequence[int], selection: Selection, kv: Mapping[str, Any], num_cached_tokens: int) -> dict[str, Any]:
    """The hand-off of a prompt that was computed; see `HandOff`."""
    return HandOff(len(prompt), digest_prompt(prompt), digest_selection(selection), kv, num_cached_tokens).as_json()


def read(data: object, prompt: Sequence[int], selection: Selection) -> HandOff:
    """Check a hand-off that came with a request.

    Raises:
        InvalidRequest: it is malformed, or it was made for another prompt or other processors.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else data
        raise InvalidRequest(HAND_OFF_FIELD, f"must be of format {FORMAT}, got {shown(found)}")
    if data.get("version") != VERSION:
        raise InvalidRequest(f"{HAND_OFF_FIELD}.version", f"must be {VERSION}, got {shown(data.get('version'))}")
    names = {field.name for field in fields(HandOff)}
    _check_names(HAND_OFF_FIELD, data, names | {"format"})
    found = HandOff(**{name: data[name] for name in names})
    expected = HandOff(len(prompt), digest_prompt(prompt), digest_selection(selection), {})
    for name, whose in _MADE_FOR:
        if getattr(found, name) != getattr(expected, name):
            theirs, ours = shown(getattr(found, name)), getattr(expected, name)
            raise InvalidRequest(f"{HAND_OFF_FIELD}.{name}", f"was made for {whose}: {theirs}, and here {ours!r}")
    if not isinstance(found.kv, Mapping):
        raise InvalidRequest(f"{HAND_OFF_FIELD}.kv", f"must be a mapping, got {shown(found.kv)}")
    _integer(f"{HAND_OFF_FIELD}.num_cached_tokens", found.num_cached_tokens, len(prompt) + 1)
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


def handle_as_json(handle: KvHandle) -> dict[str, Any]:
    """A handle as JSON data."""
    return {**asdict(handle), "metadata": b64encode(handle.metadata).decode("ascii")}


def handle_from_json(data: Mapping[str, Any], layout: KvLayout, prompt_length: int) -> KvHandle:
    """A handle that another worker wrote.

    Args:
        data: What `handle_as_json` made.
        layout: Of the reader's store.
        prompt_length: Tokens that it must cover.

    Raises:
        InvalidRequest: it is malformed, or its layout is not the reader's.
    """
    where = f"{HAND_OFF_FIELD}.kv"
    _check_names(where, data, {field.name for field in fields(KvHandle)})
    theirs = _layout(f"{where}.layout", data["layout"])
    difference = layout.difference(theirs)
    if difference is not None:
        raise InvalidRequest(f"{where}.layout", difference)
    pages = _integers(f"{where}.pages", data["pages"], 2**32)
    if len(pages) != -(-prompt_length // layout.page_size):
        raise InvalidRequest(f"{where}.pages", f"{len(pages)} cannot hold a prompt of {prompt_length} tokens")
    bases = _integers(f"{where}.bases", data["bases"], 2**64)
    if len(bases) != 2 * layout.layers:
        raise InvalidRequest(f"{where}.bases", f"must be {2 * layout.layers} addresses, got {len(bases)}")
    if data["memory"] not in ("DRAM", "VRAM"):
        raise InvalidRequest(f"{where}.memory", f"must be DRAM or VRAM, got {shown(data['memory'])}")
    return KvHandle(
        holder=_text(f"{where}.holder", data["holder"]),
        metadata=_bytes(f"{where}.metadata", data["metadata"]),
        memory=data["memory"],
        device=_integer(f"{where}.device", data["device"], 2**16),
        bases=bases,
        layout=theirs,
        pages=pages,
        ticket_address=_integer(f"{where}.ticket_address", data["ticket_address"], 2**63),
        ticket=_integer(f"{where}.ticket", data["ticket"], 2**63),
    )


def _check_names(where: str, data: Mapping[str, Any], names: set[str]) -> None:
    for name in sorted(names - set(data)):
        raise InvalidRequest(f"{where}.{name}", "is missing")
    for unknown in sorted(map(str, set(data) - names)):
        raise InvalidRequest(f"{where}.{shown(unknown)}", "unknown field")


def _layout(where: str, data: object) -> KvLayout:
    if not isinstance(data, Mapping):
        raise InvalidRequest(where, f"must be a mapping, got {shown(data)}")
    _check_names(where, data, {field.name for field in fields(KvLayout)})

    def number(name: str) -> int:
        return _integer(f"{where}.{name}", data[name], 2**32)

    return KvLayout(
        model=_text(f"{where}.model", data["model"]),
        dtype=_text(f"{where}.dtype", data["dtype"]),
        layers=number("layers"),
        kv_heads=number("kv_heads"),
        head_dim=number("head_dim"),
        block_size=number("block_size"),
        page_size=number("page_size"),
        numerics=_text(f"{where}.numerics", data["numerics"]),
    )


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise InvalidRequest(where, f"must be a text of up to {MAX_TEXT} characters, got {shown(value)}")
    return value


def _integer(where: str, value: object, limit: int) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise InvalidRequest(where, f"must be an integer from 0 to {limit - 1}, got {shown(value)}")
    return value


def _integers(where: str, value: object, limit: int) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST:
        raise InvalidRequest(where, f"must be a list of up to {MAX_LIST} integers, got {shown(value)}")
    return tuple(_integer(f"{where}[{index}]", item, limit) for index, item in enumerate(value))


def _bytes(where: str, value: object) -> bytes:
    if not isinstance(value, str) or len(value) > 2 * MAX_METADATA_BYTES:
        raise InvalidRequest(where, f"must be base64 of up to {MAX_METADATA_BYTES} bytes")
    try:
        return b64decode(value, validate=True)
    except (Base64Error, ValueError):
        raise InvalidRequest(where, "must be base64") from None


def fingerprint(model_path: str | Path) -> str:
    """What tells models apart: the configuration, the names and shapes of the weights, and samples
    of their values.

    Reads some kilobytes of each file. Two copies of a checkpoint have the same one, wherever they
    lie.

    Raises:
        StartupError: the checkpoint cannot be read.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    directory = Path(model_path)
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        for name in _VOLATILE:
            config.pop(name, None)
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in sorted(directory.glob("*.safetensors")):
            _digest_file(digest, path)
    except (OSError, ValueError) as error:
        raise StartupError(f"--model-path {model_path}: {error}") from None
    return digest.hexdigest()


def _digest_file(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}".encode())
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(min(header, 2**24)))
        for sample in range(_SAMPLES):
            file.seek(header + 8 + (size - header - 8) * sample // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
