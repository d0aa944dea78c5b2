"""Processors, as a user puts them into a pipe; each becomes ops for the type that reaches it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from adapters.pipe import operators
from adapters.pipe.op import Op
from adapters.pipe.types import TensorType


class LogitsProcessor(ABC):
    """A transformation of logits or probabilities, kept as parameters until `legalize`.

    Args:
        **params: Parameters of the ops. Those given in the call of the pipe override them.
    """

    def __init__(self, **params: Any) -> None:
        self.params = params

    @abstractmethod
    def legalize(self, input_type: TensorType) -> list[Op]:
        """The ops for an input of this type, at least one.

        Raises:
            ValueError: the processor cannot be applied to it.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.params.items())})"


class BuiltinProcessor(LogitsProcessor):
    """A processor that becomes one built-in op.

    Raises:
        TypeError: no op of the processor has a parameter of this name.
        ValueError: a flag is neither True nor False.
    """

    ops: ClassVar[Mapping[TensorType, type[operators.BuiltinOp]]]

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        known = frozenset[str]().union(*(op.run_time_names | op.compile_time_names for op in self.ops.values()))
        operators.check_names(type(self).__name__, params, known)
        operators.check_flags(params)

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type not in self.ops:
            raise ValueError(self._refusal(input_type))
        return [self.ops[input_type](**self.params)]

    def _refusal(self, input_type: TensorType) -> str:
        (only,) = self.ops
        return f"{type(self).__name__} can only be applied to {only}, got {input_type}"


class Temperature(BuiltinProcessor):
    """Divides logits by ``temperature``: positive, finite, an int or a float, or one per row."""

    ops = MappingProxyType({TensorType.LOGITS: operators.TemperatureOp})


class Softmax(BuiltinProcessor):
    """Logits to probabilities, once in a pipe. ``enable_pdl`` concerns FlashInfer's kernel only."""

    ops = MappingProxyType({TensorType.LOGITS: operators.SoftmaxOp})


class TopK(BuiltinProcessor):
    """Keeps the ``top_k`` highest: others become -inf in logits; probabilities are renormalised.

    Args:
        joint_topk_topp: True makes both tests on the same distribution, on probabilities and
            directly followed by `TopP` and `Sample`. Otherwise top-p comes after top-k and its
            renormalisation.
    """

    ops = MappingProxyType({TensorType.LOGITS: operators.LogitsTopKOp, TensorType.PROBS: operators.ProbsTopKOp})

    def __init__(self, joint_topk_topp: bool = False, **params: Any) -> None:
        super().__init__(joint_topk_topp=joint_topk_topp, **params)

    def _refusal(self, input_type: TensorType) -> str:
        return f"TopK cannot be applied to {input_type}"


class TopP(BuiltinProcessor):
    """Nucleus: keeps the shortest prefix of mass at least ``top_p``, renormalised."""

    ops = MappingProxyType({TensorType.PROBS: operators.TopPOp})


class MinP(BuiltinProcessor):
    """Keeps the probabilities of at least ``min_p`` times the highest, renormalised."""

    ops = MappingProxyType({TensorType.PROBS: operators.MinPOp})


class Sample(BuiltinProcessor):
    """Samples token ids; the end of a pipe.

    A call takes ``generator``, and ``indices``, the row of each sample.

    Args:
        deterministic: Argument of FlashInfer's kernels; torch's are reproducible with either value.
    """

    ops = MappingProxyType({TensorType.LOGITS: operators.LogitsSampleOp, TensorType.PROBS: operators.ProbsSampleOp})

    def __init__(self, deterministic: bool = True, **params: Any) -> None:
        super().__init__(deterministic=deterministic, **params)

    def _refusal(self, input_type: TensorType) -> str:
        return f"Sampling cannot be applied to {input_type}"
