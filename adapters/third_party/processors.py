"""Other systems' logits processors, run unchanged as shaping processors.

Three calling shapes are known, and recognised by the signature of ``__call__``, never by import::

    dynamo       (input_ids, logits[V])                                 in place
    huggingface  (input_ids int64 [1, n], scores [1, V]) -> scores      transformers' own
    trtllm       (req_id, logits[1, 1, V], ids [[...]], stream, client) in place; NVIDIA's zoo

All of them were written for an engine that calls once per token, and many count their calls. So
each one is called exactly once per position as far as it can tell: before a call its state is kept,
and a repeated call, or one after a rewind, begins from the state of that position. After a
migration a fresh one is replayed on the real logits.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch

from adapters.contract import ArgumentError, Context, Processor, ProcessorArgs, Reads, ShapingProcessor, Stage
from adapters.third_party.arguments import END_TOKENS, args_model, constructor_parameters, from_context

ThirdPartyProtocol = Literal["dynamo", "huggingface", "trtllm"]

NUM_KEPT_STATES = 32
"""How many positions a stateful foreign processor can be rewound."""

_MAX_MESSAGE = 300


class StateLost(RuntimeError):
    """A stateful foreign processor was rewound further than its states are kept."""


class ThirdPartyShaping(ShapingProcessor):
    """Base of third-party processors: shows them one list of ids that grows and shrinks in place.

    A copy at every step would cost a step in proportion to the history. The list is the third
    party's alone: whoever keeps it sees it grow, and whoever writes to it misleads nobody else.
    """

    reads = Reads.PROMPT_AND_GENERATED
    wraps_third_party = True
    Args = ProcessorArgs

    def __init__(self) -> None:
        self._ids: list[int] = []

    def reset(self) -> None:
        self._ids = list(self.prompt)

    def advance(self, token_id: int, index: int) -> None:
        self._ids.append(token_id)

    def retract(self, token_ids: Sequence[int]) -> bool:
        del self._ids[len(self._ids) - len(token_ids) :]
        return True

    def shown_ids(self) -> list[int]:
        """The list; a new one where the third party has added to the last one or taken from it."""
        if len(self._ids) != len(self._tokens):
            self._ids = list(self._tokens)
        return self._ids


class ThirdPartyProcessor(ThirdPartyShaping):
    """A foreign processor of one choice.

    Args:
        make: Makes a fresh one, in the state before the first token. Called at least twice. It is
            pickled.
        name: Name in receipts and errors; that of the foreign class by default.
        stage: Place in the order law.
        version: Of the foreign processor.
        stateful: False promises that a call depends on its arguments only: nothing is kept then,
            nothing replayed.
        takes_device: ``make`` is called with ``device``, that of the logits; on the CPU before the
            first of them.

    Raises:
        TypeError: ``make`` makes something that cannot be called or, if it has a state, copied.
    """

    stage = Stage.SOFT
    observes_logits = True

    def __init__(
        self,
        make: Callable[..., Any],
        *,
        name: str | None = None,
        stage: Stage = Stage.SOFT,
        version: int = 1,
        stateful: bool = True,
        takes_device: bool = False,
    ) -> None:
        super().__init__()
        self._make = make
        self._device = torch.device("cpu") if takes_device else None
        self._foreign = _checked(self._fresh(), stateful)
        self._before: dict[int, Any] = {}  # generated tokens at a call -> state before it, ascending
        self._forgotten = -1  # newest call whose state is no longer kept
        name = name or name_of(self._foreign)
        # What is said of the class elsewhere is said of the instance here: one wrapper serves many
        # processors.
        vars(self).update(name=name, stage=stage, version=version, observes_logits=stateful)

    @abstractmethod
    def call(self, foreign: Any, row: torch.Tensor) -> None:
        """Call ``foreign`` once on ``row`` (float32 ``[V]``) and leave the result there.

        Raises:
            TypeError: it returned what it should not.
            ValueError: it returned another shape or dtype.
        """

    def _fresh(self) -> Any:
        return self._make() if self._device is None else self._make(device=self._device)

    def reset(self) -> None:
        super().reset()
        self._foreign = self._fresh()
        self._before.clear()
        self._forgotten = -1

    def shape(self, logits: torch.Tensor) -> None:
        if self._device is not None and self._device != logits.device:
            self._device = logits.device  # known by the first row only: requests are admitted in another process
            self._foreign = self._fresh()
        if self.observes_logits:
            self._return_to(self.num_generated)
        ids = self.shown_ids()
        self.call(self._foreign, logits)
        if len(ids) != len(self._tokens):
            raise ValueError("the processor changed its list of input ids")

    def _return_to(self, index: int) -> None:
        """Restore the state before the first call at ``index`` or later, and keep it."""
        if index <= self._forgotten:
            raise StateLost(f"the state at generated token {index} is no longer kept")
        undone = [called for called in self._before if called >= index]
        if undone:
            kept = self._before[undone[0]]
            for called in undone:
                del self._before[called]
            self._foreign = _copied(kept)
        else:
            newest = next(reversed(self._before.values()), None)
            kept = _copied(self._foreign, like=newest)
        self._before[index] = kept
        if len(self._before) > NUM_KEPT_STATES:
            self._forgotten = next(iter(self._before))
            del self._before[self._forgotten]


class DynamoProcessor(ThirdPartyProcessor):
    """Runs a Dynamo `BaseLogitsProcessor`: ``(input_ids, logits[V]) -> None``, in place."""

    def call(self, foreign: Any, row: torch.Tensor) -> None:
        _check_in_place(foreign(self._ids, row), row)


class ZooProcessor(ThirdPartyProcessor):
    """Runs a TensorRT-LLM logits processor, such as NVIDIA's logits-processor-zoo.

    It is called with ``(0, logits[1, 1, V], [ids], None, None)``: one beam, so that the layouts
    ``[beam, 1, V]`` and ``[1, beam, V]`` are the same, and the current stream.
    """

    def call(self, foreign: Any, row: torch.Tensor) -> None:
        _check_in_place(foreign(0, row.view(1, 1, -1), [self._ids], None, None), row)


class HuggingFaceProcessor(ThirdPartyProcessor):
    """Runs a transformers `LogitsProcessor`: ``(input_ids [1, n], scores [1, V]) -> scores``."""

    def __init__(self, make: Callable[[], Any], **options: Any) -> None:
        super().__init__(make, **options)
        self._id_tensor = _IdTensor()

    def retract(self, token_ids: Sequence[int]) -> bool:
        super().retract(token_ids)
        self._id_tensor.truncate(len(self._ids))
        return True

    def reset(self) -> None:
        super().reset()
        self._id_tensor.truncate(0)

    def call(self, foreign: Any, row: torch.Tensor) -> None:
        scores = row.unsqueeze(0)
        result = foreign(self._id_tensor.of(self._ids, row.device), scores)
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"a Hugging Face logits processor returns scores, got {type(result).__name__}")
        if result.shape != scores.shape or result.dtype != scores.dtype:
            expected, got = _describe(scores), _describe(result)
            raise ValueError(f"a Hugging Face logits processor returns scores {expected}, got {got}")
        if result is not scores:
            row.copy_(result[0])


class _IdTensor:
    """A growing list of ids as a tensor; each id is copied once."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.int64)
        self._filled = 0

    def truncate(self, length: int) -> None:
        """Forget the ids from ``length`` on."""
        self._filled = min(self._filled, length)

    def of(self, ids: Sequence[int], device: torch.device) -> torch.Tensor:
        """int64 ``[1, n]`` on ``device``."""
        length = len(ids)
        if self._buffer.device != device or len(self._buffer) < length:
            grown = torch.empty(max(64, 2 * length), dtype=torch.int64, device=device)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        if self._filled < length:
            self._buffer[self._filled : length] = torch.tensor(ids[self._filled :], dtype=torch.int64)
            self._filled = length
        return self._buffer[:length].unsqueeze(0)


_WRAPPERS: dict[str, type[ThirdPartyProcessor]] = {
    "dynamo": DynamoProcessor,
    "huggingface": HuggingFaceProcessor,
    "trtllm": ZooProcessor,
}


def wrap_third_party(
    target: Any,
    name: str | None = None,
    *,
    stage: Stage = Stage.SOFT,
    version: int = 1,
    stateful: bool | None = None,
    protocol: ThirdPartyProtocol | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> type[ThirdPartyProcessor]:
    """A class for the catalogue that runs a foreign processor.

    Requests may set those arguments of a foreign class's constructor that are JSON data (numbers,
    texts, booleans, lists of them), within general bounds. By their names, ``tokenizer``,
    ``vocab_size`` (the width of a row) and ``device`` (of the logits) are the model's and never the
    request's; ``eos_token_id`` and ``eos_token_ids`` are the request's end tokens unless it sets
    others: all of them where the annotation has a list, else the model's own.

    Args:
        target: A foreign class, an instance (each choice gets a copy of it), or a function.
        name: Name in the catalogue; the target's own by default.
        stage: Place in the order law.
        version: Of the foreign processor.
        stateful: Whether calls depend on earlier calls; by default all but plain functions are
            taken to be stateful.
        protocol: Its calling shape, for a signature that does not tell.
        arguments: Arguments of the constructor that requests cannot set.

    Raises:
        TypeError: the target speaks none of the protocols, or its constructor needs an argument
            that neither a request nor ``arguments`` can give.
    """
    fixed = dict(arguments or {})
    wrapper = _WRAPPERS[protocol or protocol_of(target)]
    name = name or name_of(target)
    model = args_model(target, fixed) if isinstance(target, type) else ProcessorArgs

    def build(cls: type[ThirdPartyProcessor], args: ProcessorArgs, context: Context) -> list[Processor]:
        given = {field: getattr(args, field) for field in args.model_fields_set}
        given = {field: value for field, value in given.items() if field not in END_TOKENS or value is not None}
        options: dict[str, Any] = {"name": name, "stage": stage, "version": version, "stateful": stateful}
        given = fixed | given
        arguments = given | (from_context(target, context, given) if isinstance(target, type) else {})
        tokenizer = context.vocabulary.tokenizer
        try:
            return [
                third_party_processor(target, protocol=protocol, arguments=arguments, tokenizer=tokenizer, **options)
            ]
        except ValueError as error:
            if not args.model_fields_set:
                raise
            raise ArgumentError(", ".join(sorted(args.model_fields_set)), str(error)[:_MAX_MESSAGE]) from error

    summary = (
        " ".join((inspect.getdoc(target) or "").strip().partition("\n\n")[0].split())
        or f"Runs {name_of(target)} unchanged."
    )
    members = {
        "__doc__": summary,
        "__module__": __name__,
        "name": name,
        "stage": stage,
        "version": version,
        "observes_logits": _is_stateful(target) if stateful is None else stateful,
        "Args": model,
        "build": classmethod(build),
    }
    return cast(type[ThirdPartyProcessor], type(wrapper.__name__, (wrapper,), members))


def third_party_processor(
    target: Any,
    *,
    name: str | None = None,
    stage: Stage = Stage.SOFT,
    version: int = 1,
    stateful: bool | None = None,
    protocol: ThirdPartyProtocol | None = None,
    arguments: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> ThirdPartyProcessor:
    """A foreign processor for one chain. Arguments as of `wrap_third_party`.

    Args:
        tokenizer: Given to a constructor that has a parameter of this name.

    Raises:
        TypeError: the target speaks none of the protocols, cannot be copied, or needs a tokenizer
            and there is none.
    """
    wrapper = _WRAPPERS[protocol or protocol_of(target)]
    arguments = dict(arguments or {})
    makes_on = isinstance(target, type) and "device" in constructor_parameters(target) and "device" not in arguments
    make = _factory(target, arguments, tokenizer)
    stateful = _is_stateful(target) if stateful is None else stateful
    name = name or name_of(target)
    return wrapper(make, name=name, stage=stage, version=version, stateful=stateful, takes_device=makes_on)


def protocol_of(target: Any) -> ThirdPartyProtocol:
    """The protocol that a foreign class, instance or function speaks, by the signature of its call.

    Raises:
        TypeError: none of the three, or it does not tell.
    """
    parameters = _call_parameters(target)
    names = [parameter.name for parameter in parameters]
    required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    if required <= 5 <= len(names) and names[1] == "logits" and not names[0].endswith("s"):
        return "trtllm"
    if required <= 2 <= len(names):
        ids = str(parameters[0].annotation).lower()  # Dynamo's examples call their logits scores, too: types come first
        if _is_transformers(target) or "tensor" in ids:
            return "huggingface"
        if names[1] == "logits" or "sequence[" in ids or "list[" in ids:
            return "dynamo"
        if names[1] == "scores":
            return "huggingface"
    shapes = "(input_ids, logits), (input_ids, scores) or (req_id, logits, token_ids, stream_ptr, client_id)"
    raise TypeError(f"{name_of(target)} must be callable as {shapes}; its parameters are ({', '.join(names)})")


def name_of(target: Any) -> str:
    """Name of a class or function, or of an instance's class."""
    named = target if isinstance(target, type) or inspect.isroutine(target) else type(target)
    return str(named.__name__)


def _call_parameters(target: Any) -> list[inspect.Parameter]:
    if inspect.isroutine(target):
        parameters = list(inspect.signature(target).parameters.values())
    else:
        # Looked up by hand: asked for its __call__, a class answers with its metaclass's, which
        # makes instances.
        called = next((vars(base)["__call__"] for base in _mro(target) if "__call__" in vars(base)), None)
        if called is None:
            raise TypeError(f"{name_of(target)} cannot be called")
        parameters = list(inspect.signature(called).parameters.values())[1:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in positional]


def _is_transformers(target: Any) -> bool:
    return any(
        base.__name__ == "LogitsProcessor" and base.__module__.startswith("transformers.") for base in _mro(target)
    )


def _mro(target: Any) -> tuple[type, ...]:
    return target.__mro__ if isinstance(target, type) else type(target).__mro__


def _is_stateful(target: Any) -> bool:
    return not inspect.isroutine(target)


def _factory(target: Any, arguments: dict[str, Any], tokenizer: Any) -> Callable[[], Any]:
    if not isinstance(target, type):
        if arguments:
            raise TypeError(f"{name_of(target)} is not a class, it takes no arguments")
        return functools.partial(_copied, target)
    parameter = constructor_parameters(target).get("tokenizer")
    if parameter is not None and "tokenizer" not in arguments:
        if tokenizer is not None:
            arguments["tokenizer"] = tokenizer
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(f"{target.__name__} needs a tokenizer, and this model was loaded without one")
    return functools.partial(target, **arguments)


def _checked(foreign: Any, stateful: bool) -> Any:
    if isinstance(foreign, type) or not callable(foreign):
        raise TypeError(f"the factory must make a callable, not a class; it made {foreign!r}")
    if stateful:
        try:
            _copied(foreign)
        except Exception as error:  # the processor boundary: third-party code
            raise TypeError(f"{name_of(foreign)} has a state that cannot be copied: {error}") from error
    return foreign


def _copied(foreign: Any, like: Any = None) -> Any:
    """A deep copy that shares the tokenizer, since copying one takes longer than a step.

    Args:
        foreign: What to copy.
        like: An earlier copy, which will not be called again. Its large tensors are shared where
            they are still equal: tables of megabytes would otherwise be kept once for every
            position.
    """
    attributes, known = getattr(foreign, "__dict__", {}), getattr(like, "__dict__", {})
    shared: dict[int, Any] = {}
    for name, value in attributes.items():
        if hasattr(value, "encode") and hasattr(value, "decode"):
            shared[id(value)] = value
        elif isinstance(value, torch.Generator):
            shared[id(value)] = value.clone_state()
        elif _is_same_table(value, known.get(name)):
            shared[id(value)] = known[name]
    return copy.deepcopy(foreign, shared)


_LARGE_BYTES = 65536


def _is_same_table(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    alike = value.dtype == other.dtype and value.device == other.device and value.shape == other.shape
    return alike and value.numel() * value.element_size() >= _LARGE_BYTES and torch.equal(value, other)


def _check_in_place(result: Any, row: torch.Tensor) -> None:
    """A returned tensor would be an edit that nobody sees."""
    if result is not None and not (isinstance(result, torch.Tensor) and result.data_ptr() == row.data_ptr()):
        raise TypeError(f"the processor must edit the logits in place, it returned {type(result).__name__}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
