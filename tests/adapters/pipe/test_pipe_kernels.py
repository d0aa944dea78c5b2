"""Dispatch to FlashInfer's kernels: who is asked, and what the kernels are given. They
themselves need CUDA.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import adapters.pipe
from adapters.pipe import kernels, parameters, torch_kernels

PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 2)
ROWS = torch.tensor([1, 0, 1], dtype=torch.int32)
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[Any, ...], dict[str, Any]]]]:
    """A FlashInfer that writes down what it is asked for and returns its name."""
    recorded: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def record(name: str) -> Any:
        def function(*args: Any, **kwargs: Any) -> str:
            recorded.append((name, args, kwargs))
            return name

        return function

    package, sampling = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    package.__spec__ = importlib.util.spec_from_loader("flashinfer", loader=None)
    package.sampling = sampling  # type: ignore[attr-defined]
    sampling.__getattr__ = record  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", sampling)
    kernels.flashinfer_is_installed.cache_clear()
    yield recorded
    sys.modules.pop("adapters.pipe.flashinfer_kernels", None)
    vars(adapters.pipe).pop("flashinfer_kernels", None)
    kernels.flashinfer_is_installed.cache_clear()


def rows(is_cuda: bool = True, dtype: torch.dtype = torch.float32, num_rows: int = 2) -> Any:
    """What the choice of kernels looks at."""

    class Rows(SimpleNamespace):
        def __len__(self) -> int:
            return num_rows

    return Rows(is_cuda=is_cuda, dtype=dtype)


def test_who_runs_an_op(calls: list[Any]) -> None:
    assert kernels.flashinfer_is_installed()
    assert kernels.kernels_for(rows()).__name__ == "adapters.pipe.flashinfer_kernels"  # type: ignore[attr-defined]
    assert kernels.kernels_for(rows(is_cuda=False)) is torch_kernels
    assert kernels.kernels_for(rows(dtype=torch.float64)) is torch_kernels
    assert kernels.kernels_for(rows(num_rows=0)) is torch_kernels


def test_without_flashinfer_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "flashinfer_is_installed", lambda: False)
    assert kernels.kernels_for(rows()) is torch_kernels
    assert "adapters.pipe.flashinfer_kernels" not in sys.modules


def test_what_the_kernels_are_given(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    kernel = kernels.kernels_for(rows())
    k, p = parameters.top_ks(10**12, 2), parameters.top_ps(0.5, 2)
    draw = (ROWS, False, GENERATOR)
    kernel.softmax(PROBS, None, None)
    kernel.softmax(PROBS, parameters.temperatures(2, 2), True)
    kernel.top_k_mask(PROBS, k)
    kernel.top_k_renorm(PROBS, k)
    kernel.top_p_renorm(PROBS, p, False)
    kernel.top_p_renorm(PROBS, p, True)
    kernel.top_k_sample(PROBS, k, *draw)
    kernel.top_p_sample(PROBS, p, *draw)
    kernel.min_p_sample(PROBS, p, *draw)
    kernel.top_k_top_p_sample(PROBS, k, p, *draw)
    kernel.sample_logits(PROBS, *draw)
    kernel.sample_probs(PROBS, *draw)
    drawn = {"indices": ROWS, "deterministic": False, "generator": GENERATOR}
    expected: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("softmax", (), {"temperature": None, "enable_pdl": None}),
        ("softmax", (), {"temperature": 2.0, "enable_pdl": True}),
        ("top_k_mask_logits", (4,), {}),
        ("top_k_renorm_probs", (4,), {}),
        ("top_p_renorm_probs", (0.5,), {}),
        ("top_p_renorm_probs", (0.5,), {"is_deterministic": True}),
        ("top_k_sampling_from_probs", (4,), drawn),
        ("top_p_sampling_from_probs", (0.5,), drawn),
        ("min_p_sampling_from_probs", (0.5,), drawn),
        ("top_k_top_p_sampling_from_probs", (4, 0.5), {"filter_apply_order": "joint", **drawn}),
        ("sampling_from_logits", (), drawn),
        ("sampling_from_probs", (), drawn),
    ]
    assert [(name, args[1:], kwargs) for name, args, kwargs in calls] == expected
    assert all(args[0] is PROBS for _, args, _ in calls)


def test_tensors_get_the_dtypes_of_the_kernels(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    kernel = kernels.kernels_for(rows())
    kernel.top_k_renorm(PROBS, parameters.top_ks(torch.tensor([1, 2**40]), 2))
    kernel.top_p_renorm(PROBS, parameters.top_ps(torch.tensor([0.5, 1.0], dtype=torch.float64), 2), False)
    given = [args[1] for _, args, _ in calls]
    assert (given[0].dtype, given[0].tolist()) == (torch.int32, [1, 4])
    assert (given[1].dtype, given[1].tolist()) == (torch.float32, [0.5, 1.0])


def test_both_modules_have_every_kernel(calls: list[Any]) -> None:
    names = [name for name in vars(kernels.Kernels) if not name.startswith("_")]
    assert len(names) == 12
    for module in (kernels.kernels_for(rows()), torch_kernels):
        assert all(callable(getattr(module, name)) for name in names)


def test_a_temperature_beyond_float32_is_not_infinite(calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
    """A masked logit divided by it would be NaN."""
    kernel, highest = kernels.kernels_for(rows()), torch.finfo(torch.float32).max
    kernel.softmax(PROBS, parameters.temperatures(1e300, 2), None)
    kernel.softmax(PROBS, parameters.temperatures(torch.tensor([1e300, 1.0], dtype=torch.float64), 2), None)
    given = [kwargs["temperature"] for _, _, kwargs in calls]
    assert given[0] == highest
    assert given[1].tolist() == [highest, 1.0]
