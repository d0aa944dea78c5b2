"""The doctor says what a machine lacks before a worker fails for it: on trees that look like
machines, and on this one.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from worker.doctor import main
from worker.doctor.finding import Finding
from worker.doctor.machine import _open_files, inotify_instances, machine
from worker.doctor.packages import packages, pinned, unmet
from worker.doctor.ports import ports

GOOD = {
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: sse\n",
    "proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable:   16000000 kB\n",
    "proc/self/cgroup": "0::/\n",
    "proc/sys/fs/inotify/max_user_instances": "128\n",
    "proc/sys/net/core/somaxconn": "4096\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "dev/shm/x": "",
}


def look(root: Path, changed: dict[str, str | None]) -> dict[str, Finding]:
    """Findings by name on a good machine with these files in place of its own; None is no file."""
    for name, text in (GOOD | changed).items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    return {each.name: each for each in machine(root, {"XDG_CACHE_HOME": str(root)})}


def test_a_good_machine_lacks_nothing(tmp_path: Path) -> None:
    found = look(tmp_path, {})
    of_the_tree = ("cores", "memory", "huge pages", "backlog", "governor", "inotify")
    assert {name: found[name].level for name in of_the_tree} == dict.fromkeys(of_the_tree, "ok")
    assert "Some CPU, no quota" in found["cores"].found
    assert found["memory"].found == "15.3 GiB free"
    assert found["inotify"].found == "128 of 128 instances left"


@pytest.mark.parametrize(
    ("name", "level", "file", "text", "said"),
    [
        ("cores", "note", "sys/fs/cgroup/cpu.max", "150000 100000", "a quota of 1.5"),
        ("cores", "note", "sys/fs/cgroup/cpu.max", "50000 100000", "a quota of 0.5"),
        ("cores", "ok", "sys/fs/cgroup/cpu.max", "200000 100000", "quota 2"),
        ("memory", "lacks", "proc/meminfo", "MemAvailable: 1000 kB\n", "1 MiB free"),
        ("memory", "lacks", "proc/meminfo", "", "0 MiB free"),
        ("huge pages", "note", "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n", "never"),
        ("huge pages", "note", "sys/kernel/mm/transparent_hugepage/enabled", None, "absent"),
        ("/dev/shm", "note", "dev/shm/x", None, "absent"),
        ("backlog", "note", "proc/sys/net/core/somaxconn", "128\n", "128 connections"),
        ("inotify", "note", "proc/sys/fs/inotify/max_user_instances", "12\n", "12 of 12 instances left"),
        ("governor", "note", "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n", "powersave"),
    ],
)
def test_what_lacks_is_said(tmp_path: Path, name: str, level: str, file: str, text: str | None, said: str) -> None:
    found = look(tmp_path, {file: text})[name]
    assert found.level == level
    assert said in found.found
    assert bool(found.mend) == (level != "ok")


@pytest.mark.parametrize("group_of", ["", "system.slice/worker.service/"])
def test_a_containers_limit_counts(group_of: str, tmp_path: Path) -> None:
    group = {"memory.max": str(2**30), "memory.current": "0", "memory.stat": "inactive_file 0\n"}
    files: dict[str, str | None] = {f"sys/fs/cgroup/{group_of}{name}": text for name, text in group.items()}
    found = look(tmp_path, {**files, "proc/self/cgroup": f"0::/{group_of}\n"})["memory"]
    assert (found.level, found.found) == ("lacks", "1.0 GiB free below the container's limit")


def test_a_model_cache_that_cannot_be_looked_for(tmp_path: Path) -> None:
    """As below another user's home, or as here below a name that no directory can have."""
    found = {each.name: each for each in machine(tmp_path, {"XDG_CACHE_HOME": str(tmp_path / ("x" * 300))})}
    assert found["model cache"].found.endswith("free")


@pytest.mark.parametrize(("free", "level"), [(2**30, "ok"), (2**30 - 1, "note")])
def test_a_checkpoint_is_served_without_a_model_cache(
    free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    assert look(tmp_path, {})["model cache"].level == level
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert look(tmp_path, {})["model cache"].level == "note"


@pytest.mark.parametrize(("soft", "level"), [(24, "lacks"), (64, "note"), (4096, "ok")])
def test_open_files(soft: int, level: str) -> None:
    assert _open_files(soft, 4096).level == level


@pytest.mark.parametrize(("taken", "level"), [(115, "ok"), (116, "note"), (130, "note")])
def test_inotify_instances_of_this_user_are_counted(tmp_path: Path, taken: int, level: str) -> None:
    """Of all its processes; other open files, and processes that end meanwhile, are none."""
    for number in range(taken):
        files = tmp_path / "proc" / str(7 + number % 3) / "fd"
        files.mkdir(parents=True, exist_ok=True)
        (files / str(number)).symlink_to("anon_inode:inotify")
        (files / f"{1000 + number}").symlink_to("anon_inode:[eventpoll]")
    (tmp_path / "proc" / "11").mkdir(parents=True)
    found = look(tmp_path, {})["inotify"]
    assert found.level == level
    assert found.found.startswith(f"{128 - taken:,} of 128 instances left")
    assert ("max_user_instances=1024" in found.mend) == (level == "note")


def test_inotify_instances_of_this_process_are_seen() -> None:
    """As the kernel shows them in ``/proc``."""
    own, libc = Path("/proc/self"), ctypes.CDLL(None)
    before = inotify_instances(own)
    taken = [libc.inotify_init1(os.O_CLOEXEC) for _ in range(3)]
    try:
        assert inotify_instances(own) == before + 3
    finally:
        for descriptor in taken:
            os.close(descriptor)
    assert inotify_instances(own) == before


@given(st.dictionaries(st.sampled_from(sorted(GOOD)), st.text(max_size=40) | st.from_regex(r"[\w.: \[\]\n]{0,40}")))
def test_any_text_in_proc_is_a_finding(tmp_path_factory: pytest.TempPathFactory, changed: dict[str, str]) -> None:
    for found in look(tmp_path_factory.mktemp("root"), dict(changed)).values():
        assert len(found.line(12).splitlines()) == 1


def test_requirements_are_those_of_the_distribution() -> None:
    assert unmet([Requirement("torch>=2"), Requirement("torch>=999"), Requirement("no-such-package>=1")]) == [
        f"torch>=999 ({version('torch')})",
        "no-such-package>=1 (absent)",
    ]
    found = {each.name: each for each in packages()}
    assert found["packages"].level == "ok"
    assert found["extra trtllm"].level == "note"  # cannot be installed beside the tests
    assert "tensorrt-llm>=" in found["extra trtllm"].found


def test_what_pip_cannot_resolve_has_another_mend() -> None:
    page = (Path(__file__).parents[2] / "docs" / "installation.md").read_text(encoding="utf-8")
    (extra,) = re.findall(r"all but `(\w+)`, which pip cannot resolve", page)
    mends = {each.name: each.mend for each in packages()}
    assert "pip install" not in mends[f"extra {extra}"]


def test_a_checkout_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.doctor.packages.DISTRIBUTION", "of-no-such-name")
    found = {each.name: each for each in packages()}
    assert found["packages"].level == "note"
    assert "of-no-such-name is not installed" in found["packages"].found
    assert "ai-dynamo" in found


def test_other_versions_than_the_pins_are_named() -> None:
    text = "# comment\nhypothesis==0.0.1\nno-such-package==3\ntorch>=2  # any\npytest==1; python_version < '3'\n"
    found = pinned(text)
    assert found.level == "note"
    assert "hypothesis" in found.found
    assert not any(name in found.found for name in ("torch", "no-such-package", "pytest"))


@pytest.mark.parametrize("variable", ["HTTP_HOST", "DYN_HTTP_HOST"])
def test_the_address_of_the_launch_scripts_is_looked_at(variable: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert {each.name: each for each in ports({"HTTP_PORT": port, variable: "127.0.0.2"})}[
            "HTTP port"
        ].level == "lacks"


def test_a_taken_port_lacks() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = {each.name: each for each in ports({"HTTP_PORT": port})}
    assert found["HTTP port"].level == "lacks"
    assert f"127.0.0.1:{port}" in found["HTTP port"].found


@pytest.mark.parametrize("text", ["0", "65536", "eighty", "-1"])
def test_a_port_that_is_none_lacks(text: str) -> None:
    found = {each.name: each for each in ports({"HTTP_PORT": text})}
    assert found["HTTP port"].level == "lacks"


def test_a_name_that_no_host_can_have_lacks() -> None:
    found = {
        each.name: each for each in ports({"HTTP_HOST": "a..b", "DYN_SYSTEM_HOST": "c" * 64, "DYN_SYSTEM_PORT": "9090"})
    }
    assert [found[name].level for name in ("HTTP port", "runtime's ports")] == ["lacks", "lacks"]
    assert "HTTP_PORT: cannot listen on a..b:8000: is no name of a host" in found["HTTP port"].found


def test_ports_are_looked_at_without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    found = {each.name: each for each in ports({"DYN_SYSTEM_HOST": "127.0.0.1", "DYN_SYSTEM_PORT": port})}
    assert found["runtime's ports"].level == "ok"


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    environ = os.environ | {"HTTP_PORT": "no", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "worker", "doctor"]
    asked = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=False)
    levels = {each["name"]: each["level"] for each in json.loads(asked.stdout)}
    assert asked.returncode == 1, asked.stderr
    assert [name for name, level in levels.items() if level == "lacks"] == ["HTTP port"]
    cut = subprocess.run(
        f"{sys.executable} -m worker doctor | true", shell=True, env=environ, capture_output=True, text=True, check=True
    )
    assert cut.stderr == ""
    wrong = subprocess.run([*command, "--jsom"], env=environ, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "--jsom" in wrong.stderr


def test_a_full_disk_is_no_lack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--json"]) == 2
    assert capsys.readouterr().err == "worker doctor: error: standard output: No space left on device\n"


def test_json_is_json_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that the encoding lacks is an escape, which in JSON has four digits."""
    bare = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "\u00fc"))
    monkeypatch.setattr(sys, "stdout", bare)
    main(["--json"])
    found = {each["name"]: each["found"] for each in json.loads(bare.buffer.getvalue())}
    assert found["model cache"].startswith(f"{tmp_path}/\u00fc/")


@pytest.mark.parametrize("command", ["worker doctor", "adapters list"])
def test_commands_need_no_standard_output(command: str) -> None:
    started = ["sh", "-c", f'exec "$0" -m {command} >&-', sys.executable]
    ended = subprocess.run(started, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == ""
