"""Triton's kernels are chosen where a GPU can run them, and refused with the reason elsewhere."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from worker.engines.embedded.model import kernels
from worker.engines.embedded.model.kernels import TORCH, choose_kernels, no_triton
from worker.errors import StartupError

CUDA = torch.device("cuda")


def test_they_are_refused_on_a_cpu() -> None:
    with pytest.raises(StartupError, match="--kernels triton: they compute on CUDA, not on cpu"):
        choose_kernels("triton", torch.device("cpu"), torch.float32)


def test_whatever_they_lack_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sysconfig, "get_path", lambda kind, scheme: str(tmp_path))
    for compiler in ("gcc", "clang"):
        monkeypatch.setattr(shutil, "which", lambda name, compiler=compiler: name if name == compiler else None)
        monkeypatch.delenv("CC", raising=False)
        assert no_triton(CUDA) == f"triton needs Python's header files, and there is no {tmp_path}/Python.h"
        monkeypatch.setenv("CC", "icx")
        assert no_triton(CUDA) == "triton needs a C compiler, and there is none: icx"
        monkeypatch.setenv("CC", compiler)
        (tmp_path / "Python.h").touch()
        assert no_triton(CUDA) is None
        (tmp_path / "Python.h").unlink()
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "cc" else None)
    assert no_triton(CUDA) == "triton needs a C compiler, and there is none: gcc or clang"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert no_triton(CUDA) == "they need a GPU of compute capability 8.0, not 7.5"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert no_triton(CUDA) == "triton is not installed"


def test_torch_computes_where_they_cannot(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(kernels, "no_triton", lambda device: "triton is not installed")
    assert choose_kernels("auto", CUDA, torch.float32) is TORCH
    assert "torch's kernels compute, which are slower, and not Triton's: triton is not installed" in caplog.text
    with pytest.raises(StartupError, match="--kernels triton: triton is not installed"):
        choose_kernels("triton", CUDA, torch.float32)


def test_they_compute_no_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "no_triton", lambda device: None)
    with pytest.raises(StartupError, match="--kernels triton: --quantization int8 needs the native kernels"):
        choose_kernels("triton", CUDA, torch.float32, "int8")
    with pytest.raises(StartupError, match="needs the native kernels: they compute on a CPU, not on cuda"):
        choose_kernels("auto", CUDA, torch.float32, "int8")
