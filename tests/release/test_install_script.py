"""`scripts/install` refuses what it cannot do before it fetches anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDED = ("bash", "cat", "cut", "dirname", "flock", "grep", "mkdir", "mktemp", "rm", "sha256sum", "tail")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads, and programs that a machine without Python has, in ``bin``."""
    for pattern in ("pyproject.toml", "setup.py", "constraints.txt", "worker/__init__.py", "scripts/install*"):
        for path in REPOSITORY.glob(pattern):
            target = tmp_path / path.relative_to(REPOSITORY)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    for folder in ("worker/engines/embedded/native", "worker/engines/embedded/host"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    (tmp_path / "bin").mkdir()
    for name in NEEDED:
        program = shutil.which(name)
        assert program is not None
        (tmp_path / "bin" / name).symlink_to(program)
    return tmp_path


def python(checkout: Path, name: str, version: str) -> Path:
    """A program that only says its version, as an interpreter of another one would, if asked."""
    path = checkout / "bin" / name
    path.write_text(f'#!/bin/sh\n[ "$1" = -V ] && echo "Python {version}"\n')
    path.chmod(0o755)
    return path


def refused(checkout: Path, *arguments: str, **environ: str) -> str:
    """The one line that it says."""
    variables = {"PATH": str(checkout / "bin"), "HOME": str(checkout), **environ}
    command = [str(checkout / "scripts/install"), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert not (checkout / ".venv").exists()
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("version", ["2.7.18", "3.10.13", "3.15.0"])
def test_a_python_of_another_version_is_refused(checkout: Path, version: str) -> None:
    given = python(checkout, "other", version)
    expected = f"install: PYTHON must be a Python from 3.11 to 3.14, got {given} (Python {version})"
    assert refused(checkout, PYTHON=str(given)) == expected
    python(checkout, "python3", version)
    assert refused(checkout) == (
        f"install: needs a Python from 3.11 to 3.14, found Python {version}; install one, or set PYTHON to it"
    )


def test_no_python_is_told(checkout: Path) -> None:
    assert (
        refused(checkout)
        == "install: needs a Python from 3.11 to 3.14, found no python3; install one, or set PYTHON to it"
    )


@pytest.mark.parametrize(("ending", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, -1)])
def test_what_an_installation_started_ends_with_it(checkout: Path, ending: signal.Signals, status: int) -> None:
    """pip's processes start compilers, which take minutes."""
    fake = checkout / "bin/python3"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = -c ] || [ "$1" = -V ] || { sleep 300 & echo "$!" > "$HOME/compiler"; wait; }\n'
    )
    fake.chmod(0o755)
    (checkout / "bin/sleep").symlink_to(shutil.which("sleep") or "")
    variables = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}

    def hear_interrupts() -> None:
        """What runs aside ignores them, and a shell that did cannot undo that."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    command = [str(checkout / "scripts/install")]
    with subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, preexec_fn=hear_interrupts) as script:
        try:
            noted = checkout / "compiler"
            while not (noted.is_file() and noted.read_text()):
                assert script.poll() is None
                time.sleep(0.01)
            compiler = psutil.Process(int(noted.read_text()))
            script.send_signal(ending)
            assert script.wait(20) == status
        finally:
            script.kill()
    assert not psutil.wait_procs([compiler], timeout=10)[1]


def test_two_do_not_install_into_one_environment(checkout: Path) -> None:
    """As where ``launch/agg.sh`` and ``scripts/test`` are both started first of all."""
    fake = checkout / "bin/python3"
    makes = 'echo begun >> "$HOME/begun"; read -r line < "$HOME/end"; exit 3'
    fake.write_text(f'#!/bin/sh\n[ "$1" = -c ] || [ "$1" = -V ] || {{ {makes}; }}\n')
    fake.chmod(0o755)
    os.mkfifo(checkout / "end")
    variables = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    command, pipe = [str(checkout / "scripts/install"), "--runtime-only"], subprocess.PIPE
    scripts = [subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    try:
        said = {script.stdout.readline(): script for script in scripts if script.stdout is not None}
        waiting = said.pop("install: waiting for another installation into .venv ...\n")
        ((line, first),) = said.items()
        assert line.startswith("install: new environment in .venv")
        for script in (first, waiting):  # the first one fails, and the other one tries itself
            (checkout / "end").write_text("\n")
            assert script.wait(20) == 1
        assert (checkout / "begun").read_text() == "begun\nbegun\n"
    finally:
        for script in scripts:
            script.terminate()
            script.communicate(timeout=20)


def makes_environments(checkout: Path) -> None:
    """Give it a Python that installs nothing."""
    fake = checkout / "bin/python3"
    made = f'mkdir -p .venv/bin && {shutil.which("cp")} "$0" .venv/bin/python'
    fake.write_text(f'#!/bin/sh\n[ "$2" != venv ] || {{ {made}; }}\n')
    fake.chmod(0o755)


def test_where_there_are_no_locks_it_installs(checkout: Path) -> None:
    makes_environments(checkout)
    (checkout / "bin/flock").unlink()
    (checkout / "bin/flock").write_text("#!/bin/sh\nexit 71\n")
    (checkout / "bin/flock").chmod(0o755)
    command, variables = [str(checkout / "scripts/install")], {"PATH": str(checkout / "bin"), "HOME": str(checkout)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=20)
    assert "waiting" not in done.stdout
    assert (checkout / ".venv/installed").is_file()


def test_an_installation_is_known_through_a_link(checkout: Path) -> None:
    """Launch scripts call it by the path of the files, and others by the one that they know."""
    makes_environments(checkout)
    (checkout / "link").symlink_to(checkout)
    variables, said = {"PATH": str(checkout / "bin"), "HOME": str(checkout)}, []
    for path in (checkout, checkout / "link", checkout):
        command = [str(path / "scripts/install"), "--runtime-only"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=20)
        said.append(done.stdout.splitlines()[-1:])
    assert said[0][0].startswith("install: ready")
    assert said[1:] == [[], []]


def test_unknown_arguments_are_refused(checkout: Path) -> None:
    assert refused(checkout, "--runtime") == "install: unknown argument --runtime (see --help)"
    expected = "install: unknown extra 'disag'; pyproject.toml names them"
    assert refused(checkout, "--runtime-only", "--with=disag") == expected


def test_an_environment_of_ones_own_is_left_alone(checkout: Path) -> None:
    missing = refused(checkout, DLW_VENV=str(checkout / "none"))
    assert missing == f"install: DLW_VENV: no Python at {checkout}/none/bin/python"
    (checkout / "own/bin").mkdir(parents=True)
    python(checkout, "../own/bin/python", "3.12")
    environ = {"PATH": str(checkout / "bin"), "DLW_VENV": str(checkout / "own")}
    assert subprocess.run([str(checkout / "scripts/install")], env=environ).returncode == 0
    environ["DLW_VENV"] = "../own"  # as a launch script takes it: from where it is started
    done = subprocess.run([str(checkout / "scripts/install")], cwd=checkout / "bin", env=environ)
    assert done.returncode == 0
    assert not (checkout / ".venv").exists()
