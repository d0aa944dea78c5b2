"""The table of model types: what serves a causal language model of transformers, or why nothing
does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from worker.models.problems import shown

_FILE = Path(__file__).with_name("model_table.toml")

Network = Literal["llama", "native", "transformers"]


@dataclass(frozen=True, slots=True)
class Row:
    """A model type.

    Attributes:
        name: ``model_type`` of ``config.json``.
        network: The network that computes it: ``llama`` (`LlamaNetwork`), ``native``
            (`DecoderNetwork` where native kernels compute all of the model, else
            `TransformersNetwork`) or ``transformers`` (`TransformersNetwork`); None if it is
            refused.
        features: Parts of attention and layers that Llama's do not have.
        refused: The reason why it is not served; None if it is.
    """

    name: str
    network: Network | None = None
    features: tuple[str, ...] = ()
    refused: str | None = None


def _read() -> Iterator[Row]:
    for name, found in tomllib.loads(_FILE.read_text(encoding="utf-8")).items():
        row = Row(name, found.get("network"), tuple(found.get("features", ())), found.get("refused"))
        if (row.network in get_args(Network)) == bool(row.refused):
            raise ValueError(
                f"{_FILE.name}: {name} must have either network, {', '.join(get_args(Network))}, or refused"
            )
        yield row


TABLE = {row.name: row for row in _read()}
"""Rows by model type."""

SERVED = tuple(row.name for row in TABLE.values() if row.network is not None)
"""Model types that the embedded engine serves."""

LLAMA_LIKE = tuple(row.name for row in TABLE.values() if row.network == "llama")
"""Model types that `LlamaNetwork` computes."""


def refusal_of(model_type: object) -> str | None:
    """The reason why a model type is not served; None if it is."""
    row = TABLE.get(model_type) if isinstance(model_type, str) else None
    if row is None:
        return f"model_type {shown(model_type)} is not known to the embedded engine, which knows {', '.join(SERVED)}"
    if row.refused is None:
        return None
    return f"model_type {shown(model_type)} is not served by the embedded engine: {row.refused}"


def markdown() -> str:
    """The table as docs/models.md has it."""
    served = (
        f"| `{row.name}` | {'transformers' if row.network == 'transformers' else 'native'} | "
        f"{', '.join(row.features)} |"
        for row in TABLE.values()
        if row.refused is None
    )
    reasons: dict[str, list[str]] = {}
    for row in TABLE.values():
        if row.refused is not None:
            reasons.setdefault(row.refused, []).append(f"`{row.name}`")
    refused = (f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items()))
    return "\n".join(
        ("| served | layers | |", "| --- | --- | --- |", *served, "", "| refused for | |", "| --- | --- |", *refused)
    )
