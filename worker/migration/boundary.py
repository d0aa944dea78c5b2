"""The record of a request in the boundary store: where its prompt ends, and what follows from that.

Pure: no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import blake2b
from typing import Any

from worker.errors import shown
from worker.requests.continuation import NO_DIGESTS, ControlDigests
from worker.requests.receipts import TokenDigest
from worker.requests.request import GenerationRequest

VERSION = 5
"""Version of the format, and of the random numbers that go on from a seed."""

MAX_COUNT = 2**53
"""Tokens and attempts at most: every JSON parser reads it exactly."""

MAX_SEED = 2**64 - 1
MAX_OWNER = 256

_OF = " of "
_WITH = " with "
"""Separators of the parts of an owner's name. Workers of versions that had fewer of them take them
for more of the name, and go on with each other's answers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Record of a request as it was when its first worker received it.

    Attributes:
        prompt_length: Tokens of the prompt.
        prompt_digest: See `worker.requests.receipts.TokenDigest`.
        max_tokens: Most tokens of the whole answer.
        min_tokens: Fewest tokens of the whole answer; None if the client did not say.
        seed: Seed of the random numbers, the client's or one that the first worker chose.
        owner: Name of the last writer: one request in one worker, its part in the controls of the
            request, and the model that it has loaded; see `owner_of`.
        attempts: Workers that have taken the request on and have neither finished nor released it;
            the owner is among them.
        numerics: Numerics that the answer is computed with; see `EngineInfo.made_by`.
        kv_dtype: See `EngineInfo.kv_dtype`.
        weights: Digest of the weights of its newest tokens, where an update has changed them; see
            `worker.engines.weights.WeightVersion`.
        adapter: See `GenerationRequest.beside_model`.
        is_answered: The answer has ended, but the frontend may not have all of it yet.
    """

    prompt_length: int
    prompt_digest: str
    max_tokens: int
    min_tokens: int | None
    seed: int
    owner: str
    attempts: int
    numerics: str = ""
    kv_dtype: str = ""
    weights: str = ""
    adapter: str = ""
    is_answered: bool = False

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        seed: int,
        owner: str,
        attempts: int = 1,
        numerics: str = "",
        kv_dtype: str = "",
        weights: str = "",
    ) -> Boundary:
        """The record of a request that its first worker has received."""
        params = request.params
        assert params.max_tokens is not None, "a parsed request has a limit"
        return cls(
            prompt_length=len(request.prompt_token_ids),
            prompt_digest=str(TokenDigest(request.prompt_token_ids)),
            max_tokens=params.max_tokens,
            min_tokens=None if params.min_tokens is None else min(params.min_tokens, params.max_tokens),
            seed=seed,
            owner=owner,
            attempts=attempts,
            numerics=numerics,
            kv_dtype=kv_dtype,
            weights=weights,
            adapter=request.beside_model,
        )

    def begins(self, token_ids: Sequence[int]) -> bool:
        """Whether tokens begin with the prompt: clients may choose ids, so an id proves nothing."""
        return str(TokenDigest(token_ids[: self.prompt_length])) == self.prompt_digest

    def is_continued_by(self, request: GenerationRequest) -> bool:
        """Whether a request, as parsed, is a continuation: the prompt, and some of the answer.

        The frontend reduces ``max_tokens`` by the length of the answer so far. A client's new
        request with the same id, which begins like the old one, asks for as much as ever.
        """
        tokens, max_tokens = request.prompt_token_ids, request.params.max_tokens
        num_generated = len(tokens) - self.prompt_length
        if num_generated <= 0 or max_tokens is None or max_tokens > self.max_tokens - num_generated:
            return False
        return self.begins(tokens)

    def is_repeated_by(self, request: GenerationRequest) -> bool:
        """Whether a request, as parsed, has this very prompt: nothing was generated yet.

        Behind an answer it is a new request, of a client that gives several the same id.
        """
        return (
            not self.is_answered
            and len(request.prompt_token_ids) == self.prompt_length
            and self.begins(request.prompt_token_ids)
        )

    def difference(
        self,
        numerics: str,
        kv_dtype: str,
        weights: str = "",
        adapter: str = "",
        model: str = "",
        controls: ControlDigests = NO_DIGESTS,
    ) -> str | None:
        """Difference of this worker from the one that began the answer; None if there is none.

        Where they differ, the answer would be one that neither of them gives. Models are those of
        weights that no update has changed; a digest of updated ones says all. Controls are those of
        the request here.
        """
        ours = {"numerics": numerics, "kv_dtype": kv_dtype, "weights": weights, "adapter": adapter}
        theirs = {name: getattr(self, name) for name in ours}
        writer, _, begun_with = self.owner.partition(_OF)
        if model and begun_with and not self.weights:
            ours["model"], theirs["model"] = model, begun_with
        other = controls.difference(ControlDigests.from_text(writer.partition(_WITH)[2]))
        if other is not None:
            name, ours[name], theirs[name] = other
        for name, here in ours.items():
            if (there := theirs[name]) != here:
                return f"{name} is {there!r} on the worker that began the answer and {here!r} on this one"
        return None

    def encode(self) -> bytes:
        """JSON text, with a digest of all of it."""
        values = {"version": VERSION, **asdict(self)}
        return json.dumps({**values, "digest": _digest(values)}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Boundary:
        """The record in ``data``. Raises `ValueError` if it is none of this version, or altered."""
        try:
            found: Any = json.loads(data)
            if not isinstance(found, dict) or found.get("version") != VERSION:
                raise ValueError(f"it is not of version {VERSION}")
            is_whole = found.pop("digest", None) == _digest(found)
        except RecursionError:  # of the reader, or of the writer, which gives up a level earlier
            raise ValueError("it is nested too deeply") from None
        if not is_whole:
            raise ValueError("it was altered")
        del found["version"]
        if set(found) != {field.name for field in fields(cls)}:
            raise ValueError("its fields are not those of this version")
        boundary = cls(**found)
        boundary._check()
        return boundary

    def _check(self) -> None:
        lowest = {"prompt_length": 1, "max_tokens": 1, "min_tokens": 0, "seed": 0, "attempts": 0}
        for name, least in lowest.items():
            value = getattr(self, name)
            if name == "min_tokens" and value is None:
                continue
            most = MAX_SEED if name == "seed" else MAX_COUNT
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} is {shown(value)}")
        if self.min_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens is above max_tokens")
        texts = ("owner", "prompt_digest", "numerics", "kv_dtype", "weights", "adapter")
        if any(not isinstance(getattr(self, name), str) for name in texts) or len(self.owner) > MAX_OWNER:
            raise ValueError(f"{', '.join(texts)} must be short texts")
        if not isinstance(self.is_answered, bool):
            raise ValueError(f"is_answered is {shown(self.is_answered)}")


def owner_of(worker: str, model: str, controls: ControlDigests = NO_DIGESTS) -> str:
    """Name of an owner.

    Args:
        worker: Name of one request in one worker.
        model: Digest of the checkpoint that the worker has loaded, empty if there is none.
        controls: The worker's part in the controls of the request.
    """
    digests = str(controls)
    return worker + (f"{_WITH}{digests}" if digests else "") + (f"{_OF}{model}" if model else "")


def _digest(values: dict[str, Any]) -> str:
    """Digest of a record, against what alters it by accident or by hand."""
    return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()


def continuation(request: GenerationRequest, boundary: Boundary) -> GenerationRequest:
    """The request as its first worker received it, with the answer so far.

    An engine that is given it goes on with the very tokens that the first one would have sampled:
    processors are replayed over the answer, budgets are those of the whole answer, and random
    numbers depend on seed and position.

    Args:
        request: The request as parsed: prompt and answer so far are its prompt, and its budgets are
            what the frontend left of them. `Boundary.is_continued_by` is true of it.
        boundary: The record of the request.
    """
    tokens, length = request.prompt_token_ids, boundary.prompt_length
    params = replace(request.params, max_tokens=boundary.max_tokens, min_tokens=boundary.min_tokens, seed=boundary.seed)
    return replace(request, prompt_token_ids=tokens[:length], generated_token_ids=tokens[length:], params=params)
