"""Which function finds the ends of prefixes: the kernel only where it runs and agrees."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from adapters.sampling.prefixes import select_by_sorting
from worker.engines.embedded.sampling import selection_kernels
from worker.engines.embedded.sampling.selection_kernels import agree, choose_select

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


class TritonError(Exception):
    """As Triton has."""


def select_by_digits(
    keys: torch.Tensor, masses: torch.Tensor | None, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    last, before = select_by_sorting(keys, masses, targets)
    return last, before + (before > 2**44)


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("triton", "triton.errors", "worker.engines.embedded.sampling.triton_select"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["triton.errors"].TritonError = TritonError  # type: ignore[attr-defined]
    sys.modules["worker.engines.embedded.sampling.triton_select"].select_by_digits = select_by_digits  # type: ignore[attr-defined]
    choose_select.cache_clear()
    yield
    choose_select.cache_clear()


def test_agreement_is_seen_and_so_is_its_absence() -> None:
    assert agree(select_by_sorting, select_by_sorting, CPU)
    assert not agree(select_by_digits, select_by_sorting, CPU)


def test_the_kernel_is_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_kernels, "agree", lambda *_: True)
    assert choose_select(CPU) is select_by_sorting
    assert choose_select(CUDA) is select_by_digits


def test_a_kernel_that_finds_others_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection_kernels, "agree", lambda *_: False)
    assert choose_select(CUDA) is select_by_sorting


@pytest.mark.parametrize("error", [TritonError("no"), FileNotFoundError("cc"), RuntimeError("no compiler")])
def test_a_kernel_that_does_not_run_is_not_used(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object) -> bool:
        raise error

    monkeypatch.setattr(selection_kernels, "agree", fail)
    assert choose_select(CUDA) is select_by_sorting


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.errors", None)
    assert choose_select(CUDA) is select_by_sorting
