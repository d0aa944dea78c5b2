"""`SamplingDefaults`: values of sampling controls that a request does not set, from the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from worker.arguments import Arguments
from worker.errors import StartupError
from worker.models.config_json import GENERATION, read_generation_config
from worker.models.problems import ModelFileError
from worker.sampling import SamplingParams
from worker.sampling.control import NEVER, Control, cached
from worker.sampling.field_processors import late_controls, processor_controls

FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Controls that ``generation_config.json`` gives a value: those that vLLM takes from it."""

SAME_CONTROL = {"temperature": ("temperature", "dynamic_temperature")}
"""Processors that stand for a field beside the one of its name."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of the fields that a request leaves unset.

    Attributes:
        values: Values by field of `SamplingParams`; without any, a request that sets nothing is
            greedy.
    """

    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, arguments: Arguments) -> SamplingDefaults:
        """The defaults of a worker with these options.

        Raises:
            StartupError: ``generation_config.json`` cannot be read, or a value in it is none that
                a request could have.
        """
        if arguments.default_sampling == "greedy":
            return cls()
        try:
            return cls(model_values(read_generation_config(Path(arguments.model_path))))
        except (ModelFileError, ValueError) as error:
            problem = f"{error}; --default-sampling greedy does not use it"
            raise StartupError(f"--model-path {arguments.model_path}: {problem}") from None

    def fill(self, params: SamplingParams, processors: Collection[str]) -> tuple[SamplingParams, frozenset[str]]:
        """A request's parameters with the defaults in its unset fields, and names of the fields
        that have one.

        A request that says greedy stays so, and a named processor, the client's or the operator's,
        takes the place of the default of the same control.

        Args:
            params: Parameters of the request; None is unset.
            processors: Names of the request's processors.
        """
        late = late_controls(type(params))
        is_greedy = any(one.greedy is not NEVER and getattr(params, one.name) == one.greedy for one in late)
        names = {one.name for one in late} if is_greedy else set()
        filled: dict[str, Any] = {}
        for name, value in self.values.items():
            if getattr(params, name) is None and name not in names:
                filled[name] = value
        replaced = [name for name in filled if not same_control(name).isdisjoint(processors)]
        taken = {name: filled.pop(name) for name in replaced}
        given = frozenset(filled)
        if "temperature" in taken:  # the request samples, with the processor's temperature
            filled["temperature"] = 1.0
        return (replace(params, **filled) if filled else params), given


def model_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a ``generation_config.json`` gives to controls.

    ``do_sample`` decides, as in transformers, whether temperature and truncation count at all: a
    model that does not set it is greedy. A model that samples without a temperature has 1.

    Raises:
        ValueError: a value is out of its control's range; the message names the key.
    """
    samples = config.get("do_sample")
    if samples not in (None, False, True):
        raise ValueError(f"{GENERATION}: do_sample must be true or false, got {samples!r:.60}")
    late = {one.name for one in late_controls(SamplingParams)}
    found = {}
    for name, control in _controls(SamplingParams).items():
        value = config.get(name)
        if value is None and samples and name == "temperature":
            value = 1.0
        if value is None or (name in late and not samples):
            continue
        try:
            found[name] = control.field_value(value)
        except ValueError as error:
            raise ValueError(f"{GENERATION}: {name} {error}") from None
    return found


@cached
def _controls(record: type[SamplingParams]) -> dict[str, Control]:
    found = {one.name: one for one in processor_controls(record)}
    return {name: found[name] for name in FROM_MODEL}


def same_control(name: str) -> set[str]:
    """Names of the processors that are the same control as a field."""
    return {name, *SAME_CONTROL.get(name, ())}
