"""Fields of a chat or completion request that are sent on as logits processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.client import from_openai_logit_bias
from adapters.contract import MAX_LIST
from worker.frontdoor.errors import FieldRefused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.fields import ClientField
from worker.frontdoor.values import shown
from worker.sampling import Control


@dataclass(frozen=True, slots=True)
class FieldProcessor:
    """A logits processor that stands for a field of the request.

    Attributes:
        entry: JSON data for the selection's list of processors.
        client_path: Path in the entry, such as ``.args.tools[1].name`` → path in the client's
            request.
        is_control: Whether it is a sampling control, which the selection may not name too.
    """

    entry: Mapping[str, Any]
    client_path: Callable[[str], str]
    is_control: bool = False

    def refuse_named_too(self, listed: Sequence[Any]) -> None:
        """Raises `FieldRefused` if ``listed``, the client's selection, has the same control."""
        name = self.entry["name"]
        if self.is_control and any(isinstance(one, Mapping) and one.get("name") == name for one in listed):
            problem = f"is set, and the processor {name} is named too; give one of them"
            raise FieldRefused(self.client_path(""), problem)


def stands_for(name: str, entry: Mapping[str, Any], *, is_control: bool = False) -> FieldProcessor:
    """The processor of a field that errors name as a whole."""
    return FieldProcessor(entry, lambda path: name, is_control)


def bias_as_processor(bias: Any) -> FieldProcessor | None:
    """The processor of a value of ``logit_bias``, None if it asks for nothing.

    Raises:
        FieldRefused: it is no object of numbers, or too large.
    """
    if bias is None or bias == {}:
        return None
    if not isinstance(bias, dict):
        raise FieldRefused("logit_bias", f"must be an object of token ids and numbers, got {shown(bias)}")
    if len(bias) > MAX_LIST:  # before processors are made of them
        raise FieldRefused("logit_bias", f"must have at most {MAX_LIST} entries, got {len(bias)}")
    try:
        return stands_for("logit_bias", from_openai_logit_bias(bias))
    except ValueError as error:
        raise FieldRefused("logit_bias", str(error).removeprefix("logit_bias: ")) from None


def controls_as_processors(fields: Body, table: Mapping[str, ClientField]) -> Iterator[FieldProcessor]:
    """The processors of the controls in checked ``fields`` that Dynamo's frontend does not know."""
    for name, value in fields.items():
        control = table[name].control
        if control is not None and value is not None:
            entry = _entry(control, value)
            if entry is not None:
                yield stands_for(name, entry, is_control=True)


def _entry(control: Control, value: Any) -> Mapping[str, Any] | None:
    if control.from_client is not None:
        value = control.from_client(value)
    (runs_as,) = control.runs_as
    argument = runs_as.value_of(value)
    if argument is None or argument == control.neutral:
        return None
    return {"name": runs_as.processor.name, "args": {runs_as.argument: argument, **runs_as.fixed}}
