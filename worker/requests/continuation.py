"""The part of an answer that a request already has from another worker, as its client says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from worker.errors import InvalidRequest, shown

CONTINUES = (
    "The last `generated_tokens` of token_ids are the answer's so far: it goes on as on the worker that generated "
    "them, with `seed` and the budgets of the whole answer; refused where `numerics`, `kv_dtype`, or the digests "
    "`weights` and `adapter` (absent for weights as they were at the start, and for no adapter) are others than this "
    "worker's; or where `controls` (absent where they are not known) are, the digests of what a worker adds to a "
    "request's controls. Clients of OpenEngine send it; Dynamo's frontend does not."
)
"""Effect of the field ``continues``, a row of `docs/request.md`."""


COMPUTED_WITH = "computed_with"
"""Annotation, and key in ``engine_data``: the digests that the newest token of a chunk was computed
with, the fields `Continuation.weights` and `Continuation.adapter`, and in an answer's first chunk
with tokens `Continuation.controls`; absent where all are empty."""

CANNOT_GO_ON = "its answer cannot go on here"
"""Part of the refusal of a request whose answer another worker began, which computes otherwise. The
same request under another id is served.
"""

_BETWEEN = "/"
"""Stands between the parts of `ControlDigests` as text."""


@dataclasses.dataclass(frozen=True, slots=True)
class ControlDigests:
    """Digests of a worker's part in the controls of one request; both are empty where it is not
    known. `worker.requests.control_digests` makes them.

    Attributes:
        added_controls: Digest of what the operator's policy, ``generation_config.json``, the
            model's end tokens, its thinking tags and, behind OpenEngine, its context add to it.
        processor_versions: Digest of the versions of the processors that the request has, by name
            or by field, those that are added among them.
    """

    added_controls: str = ""
    processor_versions: str = ""

    def __str__(self) -> str:
        return f"{self.added_controls}{_BETWEEN}{self.processor_versions}" if self.added_controls else ""

    @classmethod
    def from_text(cls, text: str) -> ControlDigests:
        """The digests in a text; those that are not known where it is of another form."""
        parts = text.split(_BETWEEN)
        return cls(*parts) if len(parts) == 2 and all(parts) else cls()

    def difference(self, there: ControlDigests) -> tuple[str, str, str] | None:
        """The first of the digests that differs from one of another worker's.

        Returns:
            The name of the digest, and its value here and there; None if both are the same, or if
            those of a worker are not known.
        """
        if self.added_controls and there.added_controls:
            for field in dataclasses.fields(self):
                values = getattr(self, field.name), getattr(there, field.name)
                if values[0] != values[1]:
                    return field.name, *values
        return None


NO_DIGESTS = ControlDigests()
"""Digests that are not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """Part of an answer that another worker generated, at the end of ``token_ids``.

    Attributes:
        generated_tokens: Number of its tokens, at least one.
        numerics: Numerics of that worker; see `EngineInfo.made_by`.
        kv_dtype: KV type of that worker; see `EngineInfo.kv_dtype`.
        weights: Digest of the weights of its newest token, empty for those of the start; see
            `worker.engines.weights.WeightVersion`.
        adapter: See `worker.requests.request.GenerationRequest.beside_model`.
        controls: `ControlDigests` of that worker as text, empty where they are not known.
    """

    generated_tokens: int
    numerics: str
    kv_dtype: str
    weights: str = ""
    adapter: str = ""
    controls: str = ""

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
        self._compare(numerics=numerics, kv_dtype=kv_dtype)

    def check_digests(self, weights: str, adapter: str) -> None:
        """Raises `InvalidRequest` where the answer would go on with other weights.

        Args:
            weights: Digest of the weights of the worker that is to go on, empty for those of the
                start.
            adapter: `GenerationRequest.beside_model` of this request there.
        """
        self._compare(weights=weights, adapter=adapter)

    def check_controls(self, controls: ControlDigests) -> None:
        """Raises `InvalidRequest` where the answer would go on under other controls.

        Args:
            controls: Digests of this request on the worker that is to go on.
        """
        difference = controls.difference(ControlDigests.from_text(self.controls))
        if difference is not None:
            name, here, there = difference
            raise InvalidRequest("continues.controls", f"{name} must be {here!r}, this worker's, got {shown(there)}")

    def _compare(self, **ours: str) -> None:
        for name, here in ours.items():
            there = getattr(self, name)
            if there != here:
                raise InvalidRequest(f"continues.{name}", f"must be {here!r}, this worker's, got {shown(there)}")


_NAMES = [each.name for each in dataclasses.fields(Continuation)]
_NEEDED = {each.name for each in dataclasses.fields(Continuation) if each.default is dataclasses.MISSING}


def continuation(path: str, value: Any) -> Continuation:
    """The continuation that a field of a request says. Raises `InvalidRequest`."""
    if not isinstance(value, Mapping) or not _NEEDED <= set(value) <= set(_NAMES):
        needed = ", ".join(name for name in _NAMES if name in _NEEDED)
        others = ", ".join(name for name in _NAMES if name not in _NEEDED)
        raise InvalidRequest(path, f"must be an object of {needed}, and perhaps {others}, got {shown(value)}")
    number = value["generated_tokens"]
    if type(number) is not int or number < 1:
        raise InvalidRequest(f"{path}.generated_tokens", f"must be an integer of at least 1, got {shown(number)}")
    for name in _NAMES[1:]:
        if not isinstance(value.get(name, ""), str):
            raise InvalidRequest(f"{path}.{name}", f"must be a text, got {shown(value[name])}")
    return Continuation(**value)
