"""Third-party logits processors, run unchanged as shaping processors.

Three calling conventions are recognised by the signature of ``__call__``, never by import::

    dynamo       (input_ids, logits[V])                                 in place
    huggingface  (input_ids int64 [1, n], scores [1, V]) -> scores      transformers' own
    trtllm       (req_id, logits[1, 1, V], ids [[...]], stream, client) in place; NVIDIA's zoo

Such processors assume an engine that calls once per token, and many count their calls. So each one
observes exactly one call per position: its state is saved before a call, and a repeated call, or
one after a rewind, starts from the state of that position. After a migration a new instance is
replayed on the model's logits.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast

import torch

from adapters.contract import (
    ArgumentError,
    Context,
    Processor,
    ProcessorArgs,
    Reads,
    ShapingProcessor,
    Stage,
)
from adapters.third_party.arguments import END_TOKENS, args_model, constructor_parameters, from_context

ThirdPartyProtocol = Literal["dynamo", "huggingface", "trtllm"]

NUM_KEPT_STATES = 32
"""Positions that a stateful third-party processor can be rewound."""

_MAX_MESSAGE = 300


class ThirdPartyShaping(ShapingProcessor):
    """Base of third-party processors: shows them one list of ids that grows and shrinks in place.

    A copy at every step would cost O(history). The list belongs to this processor alone: if it
    keeps the list, it sees it grow; if it writes to it, no other processor is affected.
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

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        del self._ids[len(self._ids) - len(token_ids) :]
        return True

    def shown_ids(self) -> list[int]:
        """The list; a new one if the processor has changed the length of the last one."""
        if len(self._ids) != len(self._tokens):
            self._ids = list(self._tokens)
        return self._ids


class ThirdPartyProcessor(ThirdPartyShaping):
    """A third-party processor of one choice.

    Args:
        make: Factory of instances in the state before the first token. Called at least twice;
            pickled.
        name: Name in receipts and errors; that of the third-party class by default.
        stage: Position in the order law.
        version: Of the third-party processor.
        stateful: False promises that a call depends on its arguments only: no state is saved or
            replayed.
        takes_device: ``make`` takes ``device``, that of the logits; the CPU before the first row.

    Raises:
        TypeError: ``make`` returns something that cannot be called or, if stateful, copied.
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
        self._wrapped = _checked(self._fresh(), stateful)
        self._before: dict[int, Any] = {}  # number of generated tokens at a call -> state before it, ascending
        self._forgotten = -1  # newest call whose state has been dropped
        name = name or name_of(self._wrapped)
        # Class attributes of other processors are instance attributes here: one wrapper serves many
        # processors.
        vars(self).update(name=name, stage=stage, version=version, observes_logits=stateful)

    @abstractmethod
    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        """Call ``wrapped`` once on ``row`` (float32 ``[V]``) and leave the result there.

        Raises:
            TypeError: it returned a value of the wrong type.
            ValueError: it returned another shape or dtype.
        """

    def _fresh(self) -> Any:
        return self._make() if self._device is None else self._make(device=self._device)

    def reset(self) -> None:
        super().reset()
        self._wrapped = self._fresh()
        self._before.clear()
        self._forgotten = -1

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        self._drop_calls(self._consumed - self._prompt_length - len(token_ids))
        return super().rewind_state(token_ids)

    def _drop_calls(self, index: int) -> None:
        """Return to the state before the first call after ``index`` generated tokens or more."""
        undone = [called for called in self._before if called >= index]
        if undone:
            self._wrapped = self._before[undone[0]]
        for called in undone:
            del self._before[called]
        if index <= self._forgotten:
            self.lose(f"the state at generated token {index} is not kept any more")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy with the same factory; it shares the saved states, which are never called."""
        made = copy.copy(self)
        made._ids, made._tokens = list(self._ids), list(self._tokens)
        made._before = dict(self._before)
        made._wrapped = _copied(self._wrapped)
        return made

    def shape(self, logits: torch.Tensor) -> None:
        if self._device is not None and self._device != logits.device:
            self._device = logits.device  # known from the first row on: requests may be admitted in another process
            self._wrapped = self._fresh()
        if self.observes_logits:
            self._keep(self.num_generated)
        ids = self.shown_ids()
        self.call(self._wrapped, logits)
        if len(ids) != len(self._tokens):
            raise ValueError("the processor changed its list of input ids")

    def _keep(self, index: int) -> None:
        """Keep the state before the call at ``index``, or return to it in a repeated call."""
        kept = self._before.get(index)
        if kept is None:
            newest = next(reversed(self._before.values()), None)
            self._before[index] = _copied(self._wrapped, like=newest)
        else:
            self._wrapped = _copied(kept)
        if len(self._before) > NUM_KEPT_STATES:
            self._forgotten = next(iter(self._before))
            del self._before[self._forgotten]


class DynamoProcessor(ThirdPartyProcessor):
    """Runs a Dynamo `BaseLogitsProcessor`: ``(input_ids, logits[V]) -> None``, in place."""

    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        _check_in_place(wrapped(self._ids, row), row)


class ZooProcessor(ThirdPartyProcessor):
    """Runs a TensorRT-LLM logits processor, such as NVIDIA's logits-processor-zoo.

    Called with ``(0, logits[1, 1, V], [ids], None, None)`` on the current stream: with one beam the
    layouts ``[beam, 1, V]`` and ``[1, beam, V]`` coincide.
    """

    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        _check_in_place(wrapped(0, row.view(1, 1, -1), [self._ids], None, None), row)


class HuggingFaceProcessor(ThirdPartyProcessor):
    """Runs a transformers `LogitsProcessor`: ``(input_ids [1, n], scores [1, V]) -> scores``."""

    def __init__(self, make: Callable[[], Any], **options: Any) -> None:
        super().__init__(make, **options)
        self._id_tensor = _IdTensor()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = super().__deepcopy__(memo)
        made._id_tensor = _IdTensor()
        return made

    def rewind_state(self, token_ids: Sequence[int]) -> bool:
        super().rewind_state(token_ids)
        self._id_tensor.rewind(len(self._ids))
        return True

    def reset(self) -> None:
        super().reset()
        self._id_tensor.rewind(0)

    def call(self, wrapped: Any, row: torch.Tensor) -> None:
        scores = row.unsqueeze(0)
        result = wrapped(self._id_tensor.of(self._ids, row.device), scores)
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

    def rewind(self, length: int) -> None:
        """Drop the ids from ``length`` on."""
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
    """A class for the catalogue that runs a third-party processor.

    Requests may set the constructor arguments that are JSON data (numbers, texts, booleans, lists
    of them), within generic bounds. By their names, ``tokenizer``, ``vocab_size`` (the width of a
    row) and ``device`` (of the logits) come from the model, never from the request;
    ``eos_token_id`` and ``eos_token_ids`` default to the request's end tokens: all of them where
    the annotation has a list, else the model's own.

    Args:
        target: A third-party class, an instance (each choice gets a copy of it), or a function.
        name: Name in the catalogue; the target's own by default.
        stage: Position in the order law.
        version: Of the third-party processor.
        stateful: Whether calls depend on earlier calls; by default all but plain functions are
            taken to be stateful.
        protocol: Its calling convention, if the signature is ambiguous.
        arguments: Arguments of the constructor that requests cannot set.

    Raises:
        TypeError: the target follows none of the conventions, or its constructor requires an
            argument that neither a request nor ``arguments`` can give.
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
    """A third-party processor for one chain; arguments as `wrap_third_party`.

    Args:
        tokenizer: Given to a constructor that has a parameter of this name.

    Raises:
        TypeError: the target follows none of the conventions, cannot be copied, or needs a
            tokenizer and there is none.
    """
    wrapper = _WRAPPERS[protocol or protocol_of(target)]
    arguments = dict(arguments or {})
    makes_on = isinstance(target, type) and "device" in constructor_parameters(target) and "device" not in arguments
    make = _factory(target, arguments, tokenizer)
    stateful = _is_stateful(target) if stateful is None else stateful
    name = name or name_of(target)
    return wrapper(make, name=name, stage=stage, version=version, stateful=stateful, takes_device=makes_on)


def protocol_of(target: Any) -> ThirdPartyProtocol:
    """The calling convention of a third-party class, instance or function, by its signature.

    Raises:
        TypeError: none of the three, or ambiguous.
    """
    parameters = _call_parameters(target)
    names = [parameter.name for parameter in parameters]
    required = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
    if required <= 5 <= len(names) and names[1] == "logits" and not names[0].endswith("s"):
        return "trtllm"
    if required <= 2 <= len(names):
        ids = str(
            parameters[0].annotation
        ).lower()  # types first, since Dynamo's examples also name their logits scores
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
        # Looked up in the class dictionaries: a class's own __call__ attribute is its metaclass's,
        # which makes instances.
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


def _checked(wrapped: Any, stateful: bool) -> Any:
    if isinstance(wrapped, type) or not callable(wrapped):
        raise TypeError(f"the factory must make a callable, not a class; it made {wrapped!r}")
    if stateful:
        try:
            _copied(wrapped)
        except Exception as error:  # the processor boundary: third-party code
            raise TypeError(f"{name_of(wrapped)} has a state that cannot be copied: {error}") from error
    return wrapped


def _copied(wrapped: Any, like: Any = None) -> Any:
    """A deep copy that shares the tokenizer, since copying one takes longer than a step.

    Args:
        wrapped: What to copy.
        like: An earlier copy that will not be called again. Large tensors that are still equal are
            shared with it, so that tables of megabytes are not saved once per position.
    """
    attributes, known = getattr(wrapped, "__dict__", {}), getattr(like, "__dict__", {})
    shared: dict[int, Any] = {}
    for name, value in attributes.items():
        if hasattr(value, "encode") and hasattr(value, "decode"):
            shared[id(value)] = value
        elif isinstance(value, torch.Generator):
            shared[id(value)] = value.clone_state()
        elif _is_same_table(value, known.get(name)):
            shared[id(value)] = known[name]
    return copy.deepcopy(wrapped, shared)


_LARGE_BYTES = 65536


def _is_same_table(value: Any, other: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    alike = value.dtype == other.dtype and value.device == other.device and value.shape == other.shape
    return alike and value.numel() * value.element_size() >= _LARGE_BYTES and torch.equal(value, other)


def _check_in_place(result: Any, row: torch.Tensor) -> None:
    """Raise for a returned tensor, an edit that would be lost."""
    if result is not None and not (isinstance(result, torch.Tensor) and result.data_ptr() == row.data_ptr()):
        raise TypeError(f"the processor must edit the logits in place, it returned {type(result).__name__}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"
