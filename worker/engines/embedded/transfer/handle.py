"""The handle of a leased KV: where it is and how to reach it, and its JSON form."""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from adapters.catalog import shown
from worker.engines.embedded.transfer.host_copy import HostProcess
from worker.engines.embedded.transfer.layout import KvLayout
from worker.errors import KV_TRANSFER_FIELD, InvalidRequest

MAX_METADATA_BYTES = 2**20
MAX_LIST = 2**20
MAX_TEXT = 256


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Addresses of one prompt's KV in a prefill worker's memory, and of that worker.

    Attributes:
        agent: Name of the prefill worker's NIXL agent.
        metadata: Addresses to connect to, and the memory that the agent has registered.
        memory: ``DRAM`` or ``VRAM``.
        device: Index of its device, 0 for ``DRAM``.
        bases: Address of each layer's keys, then of each layer's values.
        layout: Layout of its store.
        pages: Pages of the prompt, in order.
        token_address: Address of the lease's fencing token, in ``DRAM``.
        token: The fencing token, 63 bits.
        process: The worker's process, None where its memory is read with NIXL alone.
    """

    agent: str
    metadata: bytes
    memory: str
    device: int
    bases: tuple[int, ...]
    layout: KvLayout
    pages: tuple[int, ...]
    token_address: int
    token: int
    process: HostProcess | None = None


def handle_as_json(handle: KvHandle) -> dict[str, Any]:
    """A handle as JSON data."""
    return {**asdict(handle), "metadata": b64encode(handle.metadata).decode("ascii")}


def handle_from_json(data: Mapping[str, Any], layout: KvLayout, prompt_length: int) -> KvHandle:
    """A handle that another worker wrote.

    Args:
        data: Result of `handle_as_json`.
        layout: Layout of the reader's store.
        prompt_length: Tokens that it must cover.

    Raises:
        InvalidRequest: it is malformed, or its layout is not the reader's.
    """
    where = f"{KV_TRANSFER_FIELD}.kv"
    check_names(where, data, {field.name for field in fields(KvHandle)})
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
        agent=_text(f"{where}.agent", data["agent"]),
        metadata=_bytes(f"{where}.metadata", data["metadata"]),
        memory=data["memory"],
        device=check_integer(f"{where}.device", data["device"], 2**16),
        bases=bases,
        layout=theirs,
        pages=pages,
        token_address=check_integer(f"{where}.token_address", data["token_address"], 2**63),
        token=check_integer(f"{where}.token", data["token"], 2**63),
        process=_process(f"{where}.process", data["process"]),
    )


def check_names(where: str, data: Mapping[str, Any], names: set[str]) -> None:
    """Raises `InvalidRequest` if a name is missing from `data`, or unknown."""
    for name in sorted(names - set(data)):
        raise InvalidRequest(f"{where}.{name}", "is missing")
    for unknown in sorted(map(str, set(data) - names)):
        raise InvalidRequest(f"{where}.{shown(unknown)}", "unknown field")


def _layout(where: str, data: object) -> KvLayout:
    if not isinstance(data, Mapping):
        raise InvalidRequest(where, f"must be a mapping, got {shown(data)}")
    check_names(where, data, {field.name for field in fields(KvLayout)})

    def number(name: str) -> int:
        return check_integer(f"{where}.{name}", data[name], 2**32)

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


def _process(where: str, data: object) -> HostProcess | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise InvalidRequest(where, f"must be a mapping or null, got {shown(data)}")
    check_names(where, data, {field.name for field in fields(HostProcess)})
    number = check_integer(f"{where}.number", data["number"], 2**31)
    return HostProcess(_text(f"{where}.host", data["host"]), number)


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise InvalidRequest(where, f"must be a text of up to {MAX_TEXT} characters, got {shown(value)}")
    return value


def check_integer(where: str, value: object, limit: int) -> int:
    """`value`; raises `InvalidRequest` unless it is an integer from 0 to below `limit`."""
    if type(value) is not int or not 0 <= value < limit:
        raise InvalidRequest(where, f"must be an integer from 0 to {limit - 1}, got {shown(value)}")
    return value


def _integers(where: str, value: object, limit: int) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_LIST:
        raise InvalidRequest(where, f"must be a list of up to {MAX_LIST} integers, got {shown(value)}")
    return tuple(check_integer(f"{where}[{index}]", item, limit) for index, item in enumerate(value))


def _bytes(where: str, value: object) -> bytes:
    if not isinstance(value, str) or len(value) > 2 * MAX_METADATA_BYTES:
        raise InvalidRequest(where, f"must be base64 of up to {MAX_METADATA_BYTES} bytes")
    try:
        return b64decode(value, validate=True)
    except (Base64Error, ValueError):
        raise InvalidRequest(where, "must be base64") from None
