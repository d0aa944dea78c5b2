"""Declarations of sampling controls, each once, beside its field of `SamplingParams`.

A field is declared by `control` (served), `refused` (no engine serves it, with the reason) or
`about_text` (no effect on token ids). Request parsing, admission of both engines, the logits
processors of fields and the documents read the declarations with `sampling_controls`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, ParamSpec, TypeVar, cast

from adapters.contract import Processor, Stage
from worker.errors import shown

P = ParamSpec("P")
T = TypeVar("T")

ClientForm = Literal["forwarded", "processor", "derived"]
"""Form in which a client of OpenAI's API sets a control: a field of its name that Dynamo's frontend
forwards, one that the frontend does not know and the front door sends as its processor, or fields
of another form, which the front door and batches read one by one (guides, log probabilities).
"""

_KEY = "control"
NEVER = object()
"""No value: equal to none that a request can give."""


@dataclass(frozen=True, slots=True)
class Number:
    """Finite numbers from ``low`` to ``high``.

    Attributes:
        low: Lowest, -inf for none.
        high: Highest, inf for none.
        above_low: ``low`` itself is excluded.
    """

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False

    def check(self, value: Any) -> float:
        """``value`` as a float.

        Raises:
            ValueError: it is not one of them; the message says what was expected.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"must be a number, got {shown(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not self.low <= number <= self.high or (self.above_low and number == self.low):
            raise ValueError(f"must be {self}, got {shown(value)}")
        return number

    @property
    def json_schema(self) -> dict[str, Any]:
        """JSON Schema of them."""
        low = {"exclusiveMinimum" if self.above_low else "minimum": self.low} if math.isfinite(self.low) else {}
        high = {"maximum": self.high} if math.isfinite(self.high) else {}
        return {"type": "number", **low, **high}

    def __str__(self) -> str:
        if math.isinf(self.low) and math.isinf(self.high):
            return "a finite number"
        low = f"{'above' if self.above_low else 'at least'} {self.low:g}" if math.isfinite(self.low) else "a number"
        return f"{low} and at most {self.high:g}" if math.isfinite(self.high) else f"{low} and finite"


@dataclass(frozen=True, slots=True)
class Integer:
    """Integers from ``low`` to ``high``, None for no highest one."""

    low: int
    high: int | None = None

    def check(self, value: Any) -> int:
        """``value``.

        Raises:
            ValueError: it is not one of them; the message says what was expected.
        """
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be an integer, got {shown(value)}")
        if value < self.low or (self.high is not None and value > self.high):
            raise ValueError(f"must be {self}, got {shown(value)}")
        return value

    @property
    def json_schema(self) -> dict[str, Any]:
        """JSON Schema of them."""
        return {"type": "integer", "minimum": self.low, **({} if self.high is None else {"maximum": self.high})}

    def __str__(self) -> str:
        return f"at least {self.low}" if self.high is None else f"between {self.low} and {self.high}"


@dataclass(frozen=True, slots=True)
class RunsAs:
    """The logits processor that a field's value runs as.

    Attributes:
        processor: Class of the processor.
        argument: Argument that takes the value.
        guide: Attribute of the value that this is, for a field with several kinds of values.
        fixed: Further arguments, the same for every request.
        convert: Value of the field → value of the argument, None if it asks for nothing.
    """

    processor: type[Processor]
    argument: str
    guide: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Any], Any] | None = None

    @property
    def is_late(self) -> bool:
        """Whether it is temperature or truncation, which the sampler can apply itself."""
        return self.processor.stage >= Stage.TEMPERATURE

    def value_of(self, value: Any) -> Any:
        """The argument's value for the field's, None if the field does not ask for it."""
        if self.guide is not None:
            value = getattr(value, self.guide)
        return value if value is None or self.convert is None else self.convert(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One field of `SamplingParams`. None is unset in all of them.

    Attributes:
        name: The field.
        bounds: Values that `SamplingParams` takes, None for those that are no numbers.
        client_bounds: Values that a served request may have.
        from_client: Value of a request, within bounds → value of the field.
        paths: Paths in a request to the worker; errors about it name the last one.
        client_form: Form in which a client of OpenAI's API sets it, one of `ClientForm`.
        frontend_bounds: Values that Dynamo's frontend forwards, None for all of `bounds`.
        summary: Effect, for a client; in both tables of ``docs/request.md``, in ``/openapi.json``
            and in the playground.
        neutral: The value that asks for nothing; `NEVER` if every value asks for something.
        greedy: The value that makes the request greedy, whatever the other fields say.
        samples: Values of it that make a request without temperature, top-k and top-p a sampled
            one: all that are set, or those that are not neutral; None if none of them does.
        runs_as: The logits processor of its values, or one for each kind of value.
        refused: Reason why no engine serves the field. With `runs_as`, `ChainBuilder` serves it
            before an engine is asked.
        is_about_text: Whether it has no effect here, because engines take and give token ids.
    """

    name: str = ""
    bounds: Number | Integer | None = None
    client_bounds: Number | Integer | None = None
    from_client: Callable[[Any], Any] | None = None
    paths: tuple[str, ...] = ()
    client_form: ClientForm = "processor"
    frontend_bounds: Number | Integer | None = None
    summary: str = ""
    neutral: Any = NEVER
    greedy: Any = NEVER
    samples: Literal["if set", "if active"] | None = None
    runs_as: tuple[RunsAs, ...] = ()
    refused: str | None = None
    is_about_text: bool = False

    @property
    def path(self) -> str:
        """The field's path in a served request, or that of `SamplingParams` if it has none."""
        return self.paths[-1] if self.paths else self.params_path

    @property
    def is_client_field(self) -> bool:
        """Whether clients of OpenAI's API set it by a field of its name.

        A control that Dynamo's frontend does not know needs a processor to be sent as.
        """
        can_be_sent = self.client_form == "forwarded" or (self.client_form == "processor" and len(self.runs_as) == 1)
        return bool(self.paths) and can_be_sent

    @property
    def params_path(self) -> str:
        """The field's path in errors of engines, which take `SamplingParams`."""
        return f"sampling_params.{self.name}"

    def field_value(self, value: Any) -> Any:
        """The field's value for a client's. Raises `ValueError` if it is out of bounds."""
        assert self.client_bounds is not None, f"{self.name} needs bounds, or a parser of its own"
        checked = self.client_bounds.check(value)
        return checked if self.from_client is None else self.from_client(checked)

    def is_active(self, params: object) -> bool:
        """Whether ``params`` set it to a value that asks for something."""
        value = getattr(params, self.name)
        return value is not None and bool(value != self.neutral)


def control(
    *runs_as: RunsAs,
    default: Any = None,
    bounds: Number | Integer | None = None,
    client: Number | Integer | None = None,
    paths: str | tuple[str, ...] = (),
    **said: Any,
) -> Any:
    """A field that is served: what `dataclasses.field` returns, with a `Control` in it.

    Args:
        runs_as: See `Control`.
        default: Default of the field.
        bounds: See `Control`.
        client: ``client_bounds``, by default ``bounds``.
        paths: See `Control`; one of them may be given as it is.
        said: The other attributes of `Control`.
    """
    made = Control(
        runs_as=runs_as,
        bounds=bounds,
        client_bounds=bounds if client is None else client,
        paths=(paths,) if isinstance(paths, str) else paths,
        **said,
    )
    return field(default=default, metadata={_KEY: made})


def refused(reason: str, default: Any = None, *runs_as: RunsAs, **said: Any) -> Any:
    """A field that no engine serves, for the reason given; see `Control`."""
    return control(*runs_as, default=default, refused=reason, **said)


def about_text(default: Any = None) -> Any:
    """A field about text or padding, which has no effect on token ids."""
    return control(default=default, is_about_text=True)


def cached(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache`, typed for classes whose objects cannot be hashed.

    mypy takes the classes for unhashable too.
    """
    return cast("Callable[P, T]", cache(function))


@cached
def sampling_controls(record: type) -> tuple[Control, ...]:
    """Declarations of the fields of ``record``, `SamplingParams` or a class derived from it."""
    found = ((each.name, each.metadata.get(_KEY)) for each in dataclasses.fields(record))
    return tuple(dataclasses.replace(said, name=name) for name, said in found if said is not None)
