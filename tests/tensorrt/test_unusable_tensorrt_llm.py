"""TensorRT-LLM installed on a machine without a GPU's driver: one line for ``--engine trtllm``, and
nothing for everything else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in import forgotten

from worker.engines.trtllm.capabilities import read_package
from worker.errors import StartupError

NO_LIBCUDA = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')"
NO_NVML = """
class NVMLError_LibraryNotFound(Exception):
    pass
raise NVMLError_LibraryNotFound('NVML Shared\\nLibrary Not Found')
"""
NO_MPI = "raise RuntimeError('MPI is not usable')"
FAULTS = {
    NO_LIBCUDA: "ImportError: libcuda.so.1: cannot open",
    NO_NVML: "NVMLError_LibraryNotFound: NVML Shared Library Not Found",
    NO_MPI: "RuntimeError: MPI is not usable",
}


def unusable(directory: Path, code: str) -> Path:
    """A folder for the search path, with a ``tensorrt_llm`` whose import runs ``code``."""
    (directory / "tensorrt_llm").mkdir()
    (directory / "tensorrt_llm" / "__init__.py").write_text(code)
    return directory


def python(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path]), "DYN_LOG": "error"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environ, timeout=100)


@pytest.mark.parametrize("code", FAULTS, ids=FAULTS.values())
def test_one_line_for_the_engine(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(unusable(tmp_path, code)))
    with forgotten(), pytest.raises(StartupError) as refused:
        read_package()
    assert str(refused.value).startswith(f"--engine trtllm: tensorrt_llm cannot be used: {FAULTS[code]}")
    assert "\n" not in str(refused.value)


def test_one_line_for_the_operator(tmp_path: Path, model: Path) -> None:
    path = unusable(tmp_path, NO_LIBCUDA)
    options = ["--engine", "trtllm", "--model-path", str(model), "--discovery-backend", "mem"]
    done = python(path, "-m", "worker", *options)
    said = f"worker: error: --engine trtllm: tensorrt_llm cannot be used: ImportError: {LIBCUDA}\n"
    assert (done.returncode, done.stderr) == (1, said)


LIBCUDA = "libcuda.so.1: cannot open shared object file: No such file or directory"


def test_nothing_for_the_rest(tmp_path: Path) -> None:
    """No module of ours imports it, but `read_package`."""
    path = unusable(tmp_path, NO_LIBCUDA)
    code = """
import pickle
import adapters.client, adapters.testing, worker.server, worker.runtimes.dynamo_engine
import worker.engines.embedded, worker.engines.trtllm, worker.engines.trtllm.verify
from adapters import TemperatureProcessor, create_trtllm_adapters
(adapter,) = create_trtllm_adapters([TemperatureProcessor()])
assert type(pickle.loads(pickle.dumps(adapter))) is type(adapter)
"""
    done = python(path, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
