"""The part of an answer that a request already has from another worker, as its client says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from worker.errors import InvalidRequest, shown

CONTINUES = (
    "The last `generated_tokens` of token_ids are the answer's so far: it goes on as on the worker that generated "
    "them, with `seed` and the budgets of the whole answer; refused where `numerics` or `kv_dtype` are others than "
    "this worker's. Clients of OpenEngine send it; Dynamo's frontend does not."
)
"""Effect of the field ``continues``, a row of `docs/request.md`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """Part of an answer that another worker generated, at the end of ``token_ids``.

    Attributes:
        generated_tokens: Number of its tokens, at least one.
        numerics: Numerics of that worker; see `EngineInfo.made_by`.
        kv_dtype: KV type of that worker; see `EngineInfo.kv_dtype`.
    """

    generated_tokens: int
    numerics: str
    kv_dtype: str

    def check(self, num_tokens: int, seed: int | None, numerics: str, kv_dtype: str) -> None:
        """Raises `InvalidRequest` where the answer would not go on as it began.

        Args:
            num_tokens: Tokens of prompt and answer.
            seed: Seed of the request.
            numerics: Numerics of the worker that is to go on.
            kv_dtype: KV type of it.
        """
        if self.generated_tokens >= num_tokens:
            problem = f"must leave a prompt of the {num_tokens} token_ids, got {self.generated_tokens}"
            raise InvalidRequest("continues.generated_tokens", problem)
        if seed is None:
            raise InvalidRequest("sampling_options.seed", "must be that of the answer so far")
        for name, here in (("numerics", numerics), ("kv_dtype", kv_dtype)):
            there = getattr(self, name)
            if there != here:
                raise InvalidRequest(f"continues.{name}", f"must be {here!r}, this worker's, got {shown(there)}")


_NAMES = [each.name for each in dataclasses.fields(Continuation)]


def continuation(path: str, value: Any) -> Continuation:
    """The continuation that a field of a request says. Raises `InvalidRequest`."""
    if not isinstance(value, Mapping) or set(value) != set(_NAMES):
        raise InvalidRequest(path, f"must be an object of {', '.join(_NAMES)}, got {shown(value)}")
    number, *names = (value[name] for name in _NAMES)
    if type(number) is not int or number < 1:
        raise InvalidRequest(f"{path}.generated_tokens", f"must be an integer of at least 1, got {shown(number)}")
    for name, each in zip(_NAMES[1:], names, strict=True):
        if not isinstance(each, str):
            raise InvalidRequest(f"{path}.{name}", f"must be a text, got {shown(each)}")
    return Continuation(number, *names)
