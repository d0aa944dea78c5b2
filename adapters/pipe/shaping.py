"""Shaping processors (`adapters.contract.processor.ShapingProcessor`) in a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from pydantic import ValidationError

from adapters.contract import Context, Reads, ShapingProcessor
from adapters.pipe.op import Op, ParameterizedOp
from adapters.pipe.parameters import check_length
from adapters.pipe.processors import LogitsProcessor
from adapters.pipe.rows import check_highest, checked_rows
from adapters.pipe.types import TaggedTensor, TensorType
from adapters.vocabulary import Vocabulary


class Shaping(LogitsProcessor):
    """A class of shaping processors as a processor of logits: ``Shaping(TypicalP, p=0.9)``.

    In the call of the pipe an argument is called like the processor if it has only that one
    (``typical_p=0.8``), and ``<processor>_<argument>`` otherwise (``xtc_threshold=0.1``). An
    argument is a value for all rows, or a 1-D tensor with one per row. If the class reads its
    history or position, pass the processors themselves, one started instance per row, under the
    name of the processor: ``pipe(logits, mirostat=[first, second])``.

    Args:
        shaping: The class.
        context: Context of the processor; by default a vocabulary as wide as the rows, without a
            tokenizer.
        **args: Arguments of the class.

    Raises:
        TypeError: it is no such class, or does not have one of the arguments.
    """

    def __init__(self, shaping: type[ShapingProcessor], context: Context | None = None, **args: Any) -> None:
        if not isinstance(shaping, type) or not issubclass(shaping, ShapingProcessor):
            raise TypeError(f"expected a class of shaping processors, got {shaping!r}")
        super().__init__(**args)
        self.shaping = shaping
        self.context = context
        unknown = sorted(set(args) - set(shaping.Args.model_fields))
        if unknown:
            raise TypeError(f"{shaping.name} has no argument '{unknown[0]}'")

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type is not TensorType.LOGITS:
            raise ValueError(f"{self.shaping.name} can only be applied to LOGITS, got {input_type}")
        return [ShapingOp(self.shaping, self.context, **self.params)]

    def __repr__(self) -> str:
        args = "".join(f", {name}={value}" for name, value in self.params.items())
        return f"Shaping({self.shaping.__name__}{args})"


def as_processor(item: LogitsProcessor | type[ShapingProcessor]) -> LogitsProcessor:
    """``item``, a class of shaping processors as `Shaping`.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(item, type) and issubclass(item, ShapingProcessor):
        return Shaping(item)
    if not isinstance(item, LogitsProcessor):
        raise TypeError(f"expected LogitsProcessor objects or classes of shaping processors, got {item!r}")
    return item


class ShapingOp(ParameterizedOp):
    """Shapes rows of logits by one processor each.

    Raises:
        ValueError: the rows or the arguments are unusable; the class needs a history and none was
            given.
    """

    IN: ClassVar[TensorType] = TensorType.LOGITS
    OUT: ClassVar[TensorType] = TensorType.LOGITS

    def __init__(self, shaping: type[ShapingProcessor], context: Context | None = None, **args: Any) -> None:
        super().__init__(**args)
        self.shaping = shaping
        self.context = context
        fields = list(shaping.Args.model_fields)
        self._fields = {f"{shaping.name}_{field}": field for field in fields}
        if len(fields) == 1:
            self._fields = {shaping.name: fields[0]}

    def names_taken(self) -> frozenset[str]:
        return frozenset(self._fields) | {self.shaping.name}

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        output_type = self._validate_input_type(tensor)
        logits = checked_rows(tensor.data, tensor.type).detach().clone()  # processors edit rows in place
        if len(logits):
            self.shaping.shape_rows(self._processors(logits, kwargs), logits)
            check_highest(logits, TensorType.LOGITS)
        return TaggedTensor(logits, output_type)

    def _processors(self, logits: torch.Tensor, kwargs: dict[str, Any]) -> list[Any]:
        given = kwargs.get(self.shaping.name)
        if isinstance(given, (list, tuple)) and given and isinstance(given[0], ShapingProcessor):
            return self._checked(list(given), len(logits))
        if given is not None and self.shaping.name not in self._fields:
            raise ValueError(f"{self.shaping.name} takes one started {self.shaping.__name__} per row")
        args = dict(self.default_params)
        args.update({field: kwargs[name] for name, field in self._fields.items() if name in kwargs})
        context = self.context or Context(Vocabulary(logits.shape[1]))
        built = [self._build(row, context) for row in _per_row(args, len(logits))]
        return built if len(built) == len(logits) else built * len(logits)

    def _checked(self, processors: list[ShapingProcessor], num_rows: int) -> list[ShapingProcessor]:
        if len(processors) != num_rows or not all(type(p) is self.shaping for p in processors):
            raise ValueError(f"{self.shaping.name} takes one started {self.shaping.__name__} per row, of {num_rows}")
        return processors

    def _build(self, args: dict[str, Any], context: Context) -> ShapingProcessor:
        if self.shaping.reads is not Reads.NOTHING:
            raise _needs_history(self.shaping)
        try:
            typed = self.shaping.Args(**args)
        except ValidationError as error:
            raise ValueError(self._problem(error)) from None
        processor = self.shaping(typed, context)
        processor._tokens = _NoHistory(self.shaping)
        return processor

    def _problem(self, error: ValidationError) -> str:
        """The first problem of arguments, under the name that the call of the pipe has for it."""
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        name = next((name for name, own in self._fields.items() if own == field), self.shaping.name)
        if first["type"] == "missing":
            return f"Required parameter '{name}' not provided for {self.shaping.name}"
        return f"{name}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {first['input']!r}"


class _NoHistory(list[int]):
    """Stands in for a history that was not given: reading it is an error, not an empty list."""

    def __init__(self, shaping: type[ShapingProcessor]) -> None:
        super().__init__()
        self._shaping = shaping

    def _refuse(self, *_: Any) -> Any:
        raise _needs_history(self._shaping)

    __len__ = __getitem__ = __iter__ = __bool__ = _refuse


def _needs_history(shaping: type[ShapingProcessor]) -> ValueError:
    name = shaping.name
    return ValueError(f"{name} depends on its history: give one started {shaping.__name__} per row as '{name}'")


def _per_row(args: dict[str, Any], num_rows: int) -> Iterator[dict[str, Any]]:
    """The arguments of each row; once if they are the same for all."""
    tensors = {name: value for name, value in args.items() if isinstance(value, torch.Tensor)}
    for value in tensors.values():
        check_length(value, num_rows)
    columns = {name: value.tolist() for name, value in tensors.items()}
    for row in range(num_rows if columns else 1):
        yield {**args, **{name: column[row] for name, column in columns.items()}}
