"""Arguments and context with which a processor is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from adapters.vocabulary import Vocabulary


class ProcessorArgs(BaseModel):
    """Base of every processor's arguments: strict JSON types, no unknown names, NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if cls.__pydantic_complete__:
            check_strict(cls)


def check_strict(args: type[ProcessorArgs]) -> None:
    """Check that pydantic reads arguments and their parts, at any depth, as strictly as
    `ProcessorArgs`.

    Args:
        args: Class of the arguments, complete: all that its annotations name is defined.

    Raises:
        TypeError: it reads one of them less strictly; the class is named.
    """
    for kind in _lenient(args.__pydantic_core_schema__):
        where = args.__qualname__ if kind is args else f"{args.__qualname__}: its part {kind.__name__}"
        raise TypeError(f"{where} takes unknown names, other types or NaN; derive it from ProcessorArgs as it is")


def _lenient(schema: Any) -> Iterator[type]:
    """The classes in a schema of pydantic-core that are less strict than `ProcessorArgs`."""
    if isinstance(schema, dict):
        if schema.get("type") in ("model", "dataclass", "typed-dict"):
            wanted: dict[str, object] = {"strict": True, "allow_inf_nan": False}
            if not schema.get("root_model"):  # which has no names
                wanted["extra_fields_behavior"] = "forbid"
            config = schema.get("config", {})
            if any(config.get(key) != value for key, value in wanted.items()):
                yield schema["cls"]
        for part in schema.values():
            yield from _lenient(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _lenient(part)


class ArgumentError(ValueError):
    """An argument is well-formed but cannot be honoured for this model or request.

    Args:
        argument: Name of the argument.
        problem: Expected value and the given one.
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Context:
    """Facts about the model and the request, given to a processor when it is built.

    Attributes:
        vocabulary: Width of a row, token bytes and text.
        end_token_ids: Ids that end this request's answer.
        seed: The request's seed, uint64, also of processors' random numbers
            (`adapters.contract.random_numbers`).
        choice: Index of the choice, 0 unless n > 1.
        max_tokens: Most tokens the answer may have, None if only the context bounds it.
        watermark_keys: The operator's keys by id.
        think_start: Ids of the tag that opens a thinking section, empty if the model has none.
        think_end: Ids of the tag that closes it.
    """

    vocabulary: Vocabulary
    end_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    choice: int = 0
    max_tokens: int | None = None
    watermark_keys: Mapping[str, bytes] = field(default_factory=dict)
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()

    @property
    def end_token_id(self) -> int | None:
        """The end token to force: the lowest of the model's own, else of the request's, else None.

        A request's end tokens include its ``stop_token_ids``, which may be any word.
        """
        return min(self.end_token_ids & self.vocabulary.eos_token_ids or self.end_token_ids, default=None)

    def check_ids(self, argument: str, token_ids: Sequence[int]) -> None:
        """Raises `ArgumentError` if an id is outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocabulary.size:
                expected = f"token ids between 0 and {self.vocabulary.size - 1}"
                raise ArgumentError(argument, f"expected {expected}, got {token_id}")
