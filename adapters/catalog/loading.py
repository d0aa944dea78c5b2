"""Loading of third-party processors: from entry points and from the operator's options."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

import torch

from adapters import lean_torch, torch_at_use
from adapters.catalog.entry import BUILT_IN, DECLARED, Entry
from adapters.catalog.selection import NAME
from adapters.contract import Processor, ProcessorArgs, ShapingProcessor, SteeringProcessor
from adapters.contract.context import check_strict
from adapters.interrupts import is_interrupt
from adapters.third_party import wrap_third_party

GROUP = "logits_processors"
"""Entry-point group of third-party processors."""


class CatalogError(ValueError):
    """The operator's list of processors cannot be honoured."""


def offered_entries(allow: Sequence[str]) -> list[Entry]:
    """The entries ``allow`` of installed distributions; no other entry point is imported.

    Raises:
        CatalogError: a name is not offered, or its class is missing or unfit.
    """
    offered = [_entry_of(point) for point in entry_points(group=GROUP) if point.name in allow]
    missing = set(allow) - {entry.name for entry in offered}
    if missing:
        raise CatalogError(f"no installed distribution offers the logits processor {', '.join(sorted(missing))}")
    return offered


def is_offered(name: str) -> bool:
    """Whether an installed distribution offers a processor of this name, allowed or not."""
    return name in entry_points(group=GROUP).names


def _entry_of(point: EntryPoint) -> Entry:
    distribution = point.dist.name if point.dist is not None else "unknown distribution"
    return _third_party(point.name, point.value, f"{distribution} ({point.value})")


def entry_of_option(option: str) -> Entry:
    """The entry of an operator's option ``NAME=module:Class``.

    Raises:
        CatalogError: it is malformed, or the class is missing or unfit.
    """
    name, separator, target = option.partition("=")
    if not separator or not name or not target:
        raise CatalogError(f"--logits-processor {option}: expected NAME=module:Class")
    return _third_party(name, target, f"--logits-processor {option}")


def _third_party(name: str, target: str, source: str) -> Entry:
    loaded = load_class(target, source)
    if issubclass(loaded, Processor):
        return Entry(name, loaded, source)
    try:
        return Entry(name, wrap_third_party(loaded, name), source)
    except Exception as error:  # the processor boundary: third-party code
        raise CatalogError(f"{source}: {error}") from error


def load_class(target: str, source: str) -> type:
    """The class that ``module:Class`` names.

    Raises:
        CatalogError: there is none; the message starts with ``source``.
    """
    module, separator, attribute = target.partition(":")
    if not separator or not module or not attribute:
        raise CatalogError(f"{source}: expected module:Class, got {target!r}")
    if "/" in module or module.endswith(".py"):
        raise CatalogError(f"{source}: expected the module as import names it, not a path, got {module!r}")
    torch_at_use.complete()
    lean_torch.complete()  # third-party code may use all of torch
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    try:
        loaded: object = importlib.import_module(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except (ImportError, AttributeError) as error:
        raise CatalogError(f"{source}: {error}") from error
    except BaseException as error:  # the processor boundary: third-party code, which may exit
        if is_interrupt(error):
            raise
        raise CatalogError(f"{source}: raised {type(error).__name__} when it was imported: {error}") from error
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)
        raise _shared("default data type", source)
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)
        raise _shared("default device", source)
    if not isinstance(loaded, type):
        raise CatalogError(f"{source}: {attribute} is not a class")
    return loaded


def _shared(setting: str, source: str) -> CatalogError:
    return CatalogError(f"{source}: changed torch's {setting} when it was imported, which all requests share")


def check_entry(entry: Entry) -> None:
    """Raise `CatalogError` if the name is malformed, or the class does not keep the contract."""
    processor = entry.processor
    if not NAME.fullmatch(entry.name):
        raise CatalogError(f"{entry.source}: {entry.name!r} is not a name; expected {NAME.pattern}")
    if inspect.isabstract(processor) or not issubclass(processor, SteeringProcessor | ShapingProcessor):
        raise CatalogError(f"{entry.source}: {processor.__name__} is neither a steering nor a shaping processor")
    missing = [name for name in ("name", "stage") if not hasattr(processor, name)]
    if missing:
        raise CatalogError(f"{entry.source}: {processor.__name__} lacks {', '.join(missing)}")
    if processor.name != entry.name:
        raise CatalogError(f"{entry.source}: {processor.__name__} names itself {processor.name}, not {entry.name}")
    for name, kind in DECLARED.items():
        value = getattr(processor, name)
        if not isinstance(value, kind):
            where = f"{entry.source}: {processor.__name__}.{name}"
            raise CatalogError(f"{where} must be of type {kind.__name__}, got {value!r:.60}")
    if not issubclass(processor.Args, ProcessorArgs):
        raise CatalogError(f"{entry.source}: {processor.__name__}.Args must be a subclass of ProcessorArgs")
    if "scope" in processor.Args.model_fields:
        raise CatalogError(
            f"{entry.source}: scope is an argument of every processor, {processor.__name__} redefines it"
        )
    if entry.source != BUILT_IN:
        try:
            json.dumps(entry.as_json(), allow_nan=False)
        except Exception as error:  # of pydantic, or of types of the third party
            raise CatalogError(f"{entry.source}: the arguments have no JSON Schema: {error}") from error
        try:
            check_strict(processor.Args)  # its parts may have been defined after it
        except TypeError as error:
            raise CatalogError(f"{entry.source}: {error}") from error
