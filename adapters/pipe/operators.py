"""The built-in ops: each checks its rows and parameters, then calls one kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch

from adapters.pipe.kernels import Kernels, kernels_for
from adapters.pipe.op import ParameterizedOp
from adapters.pipe.parameters import PerRow, flag, generator_of, min_ps, row_indices, temperatures, top_ks, top_ps
from adapters.pipe.rows import checked_rows
from adapters.pipe.types import TaggedTensor, TensorType

_DRAW = frozenset({"indices", "generator"})


class BuiltinOp(ParameterizedOp):
    """A built-in op. It computes in float32 (float64 for float64 rows).

    Class attributes:
        run_time_names: Parameters of a call; they may be given to the constructor as well.
        compile_time_names: Parameters that only the constructor takes.

    Raises:
        TypeError: the constructor was given a parameter that the op does not have.
        ValueError: a flag is neither True nor False; in a call, the rows or the parameters are
            unusable.
    """

    run_time_names: ClassVar[frozenset[str]] = frozenset()
    compile_time_names: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **default_params: Any) -> None:
        super().__init__(**default_params)
        check_names(type(self).__name__, default_params, self.run_time_names | self.compile_time_names)
        check_flags(default_params)

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        output_type = self._validate_input_type(tensor)
        rows = checked_rows(tensor.data, tensor.type)
        return TaggedTensor(self._run(rows, kernels_for(rows), kwargs), output_type)

    @abstractmethod
    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        """The result for checked rows ``[B, V]``."""

    def _temperature(self, rows: torch.Tensor, kwargs: dict[str, Any]) -> PerRow:
        return temperatures(self._get_param("temperature", kwargs), len(rows))

    def _top_k(self, rows: torch.Tensor, kwargs: dict[str, Any]) -> PerRow:
        return top_ks(self._get_param("top_k", kwargs), len(rows))

    def _top_p(self, rows: torch.Tensor, kwargs: dict[str, Any]) -> PerRow:
        return top_ps(self._get_param("top_p", kwargs), len(rows))

    def _min_p(self, rows: torch.Tensor, kwargs: dict[str, Any]) -> PerRow:
        return min_ps(self._get_param("min_p", kwargs), len(rows))

    def _is_deterministic(self, kwargs: dict[str, Any]) -> bool:
        given = self._get_param("is_deterministic", kwargs, required=False)
        return False if given is None else flag("is_deterministic", given)

    def _sampling_arguments(self, rows: torch.Tensor, kwargs: dict[str, Any]) -> tuple[Any, bool, Any]:
        """Row index of each sample, whether the kernel is deterministic, generator."""
        indices = row_indices(self._get_param("indices", kwargs, required=False), len(rows))
        generator = generator_of(self._get_param("generator", kwargs, required=False))
        return indices, self.default_params.get("deterministic", True), generator


class TemperatureOp(BuiltinOp):
    """z / T."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS
    run_time_names = frozenset({"temperature"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.scale(rows, self._temperature(rows, kwargs))


class SoftmaxOp(BuiltinOp):
    """Probabilities of the logits."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS
    compile_time_names = frozenset({"enable_pdl"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.softmax(rows, None, self.default_params.get("enable_pdl"))


class ProbsTopKOp(BuiltinOp):
    """The k highest probabilities, renormalised."""

    IN, OUT = TensorType.PROBS, TensorType.PROBS
    run_time_names = frozenset({"top_k"})
    compile_time_names = frozenset({"joint_topk_topp"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.top_k_renorm(rows, self._top_k(rows, kwargs))


class LogitsTopKOp(BuiltinOp):
    """The k highest logits; the others become -inf."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS
    run_time_names = frozenset({"top_k"})
    compile_time_names = frozenset({"joint_topk_topp"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.top_k_mask(rows, self._top_k(rows, kwargs))


class TopPOp(BuiltinOp):
    """The shortest prefix with a mass of at least p, renormalised."""

    IN, OUT = TensorType.PROBS, TensorType.PROBS
    run_time_names = frozenset({"top_p", "is_deterministic"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        top_p = self._top_p(rows, kwargs)
        return kernels.top_p_renorm(rows, top_p, self._is_deterministic(kwargs))


class MinPOp(BuiltinOp):
    """The probabilities of at least min_p times the highest, renormalised."""

    IN, OUT = TensorType.PROBS, TensorType.PROBS
    run_time_names = frozenset({"min_p"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.min_p_renorm(rows, self._min_p(rows, kwargs))


class ProbsSampleOp(BuiltinOp):
    """One token for each row, or for each of ``indices``."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES
    run_time_names = _DRAW
    compile_time_names = frozenset({"deterministic"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.sample_probs(rows, *self._sampling_arguments(rows, kwargs))


class LogitsSampleOp(BuiltinOp):
    """One token for each row of logits, or for each of ``indices``."""

    IN, OUT = TensorType.LOGITS, TensorType.INDICES
    run_time_names = _DRAW
    compile_time_names = frozenset({"deterministic"})

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.sample_logits(rows, *self._sampling_arguments(rows, kwargs))


class FusedTemperatureSoftmaxOp(BuiltinOp):
    """`TemperatureOp`, `SoftmaxOp`."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS
    run_time_names = TemperatureOp.run_time_names
    compile_time_names = SoftmaxOp.compile_time_names

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.softmax(rows, self._temperature(rows, kwargs), self.default_params.get("enable_pdl"))


class FusedProbsTopKSampleOp(BuiltinOp):
    """`ProbsTopKOp`, `ProbsSampleOp`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES
    run_time_names = ProbsTopKOp.run_time_names | _DRAW
    compile_time_names = ProbsTopKOp.compile_time_names | ProbsSampleOp.compile_time_names

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.top_k_sample(rows, self._top_k(rows, kwargs), *self._sampling_arguments(rows, kwargs))


class FusedProbsTopPSampleOp(BuiltinOp):
    """`TopPOp`, `ProbsSampleOp`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES
    run_time_names = TopPOp.run_time_names | _DRAW
    compile_time_names = ProbsSampleOp.compile_time_names

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        top_p = self._top_p(rows, kwargs)
        indices, deterministic, generator = self._sampling_arguments(rows, kwargs)
        return kernels.top_p_sample(rows, top_p, indices, deterministic or self._is_deterministic(kwargs), generator)


class FusedProbsMinPSampleOp(BuiltinOp):
    """`MinPOp`, `ProbsSampleOp`."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES
    run_time_names = MinPOp.run_time_names | _DRAW
    compile_time_names = ProbsSampleOp.compile_time_names

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        return kernels.min_p_sample(rows, self._min_p(rows, kwargs), *self._sampling_arguments(rows, kwargs))


class FusedProbsTopKTopPSampleOp(BuiltinOp):
    """`ProbsTopKOp`, `TopPOp`, `ProbsSampleOp`, both tests made on the same distribution."""

    IN, OUT = TensorType.PROBS, TensorType.INDICES
    run_time_names = ProbsTopKOp.run_time_names | TopPOp.run_time_names | _DRAW
    compile_time_names = ProbsTopKOp.compile_time_names | ProbsSampleOp.compile_time_names

    def _run(self, rows: torch.Tensor, kernels: Kernels, kwargs: dict[str, Any]) -> torch.Tensor:
        top_k, top_p = self._top_k(rows, kwargs), self._top_p(rows, kwargs)
        indices, deterministic, generator = self._sampling_arguments(rows, kwargs)
        deterministic = deterministic or self._is_deterministic(kwargs)
        return kernels.top_k_top_p_sample(rows, top_k, top_p, indices, deterministic, generator)


def check_names(owner: str, given: dict[str, Any], known: frozenset[str]) -> None:
    """Raises `TypeError` for a parameter that ``owner`` does not have."""
    for name in given:
        if name not in known:
            takes = ", ".join(sorted(known)) or "none"
            raise TypeError(f"{owner} has no parameter '{name}'; its parameters: {takes}")


def check_flags(given: dict[str, Any]) -> None:
    """Raises `ValueError` for a flag that is neither True nor False."""
    for name in ("deterministic", "is_deterministic", "joint_topk_topp"):
        if name in given:
            flag(name, given[name])
    if given.get("enable_pdl") is not None:
        flag("enable_pdl", given["enable_pdl"])
