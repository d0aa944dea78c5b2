"""What memory a container leaves, from control groups of both versions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker.engines import free_memory as of_the_host
from worker.engines.embedded.kv_cache.budget import free_memory
from worker.engines.free_memory import free_in_container


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 300\nactive_file 7\n"
    root = write(tmp_path, {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": stat})
    assert free_in_container(root, tmp_path / "none") == 700


def test_version_1(tmp_path: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 50\n"
    files = {"memory.limit_in_bytes": "1000\n", "memory.usage_in_bytes": "990\n", "memory.stat": stat}
    root = write(tmp_path, {f"memory/{name}": text for name, text in files.items()})
    assert free_in_container(root, tmp_path / "none") == 60


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"memory.max": "max\n", "memory.current": "600\n", "memory.stat": "inactive_file 300\n"},
        {"memory.max": "unlike a number\n", "memory.current": "?\n", "memory.stat": ""},
    ],
    ids=["no control groups", "no limit", "unreadable"],
)
def test_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert free_in_container(write(tmp_path, files), tmp_path / "none") is None


def test_the_strictest_group_above_counts(tmp_path: Path) -> None:
    """As a service of the system has it, which is in no container."""
    groups = {"a": ("3000", "100"), "a/b": ("max", "0"), "a/b/c": ("1", "0")}
    files: dict[str, str] = {}
    for name, (limit, used) in groups.items():
        files |= {f"{name}/memory.max": limit, f"{name}/memory.current": used, f"{name}/memory.stat": ""}
    root, own = write(tmp_path / "2", files), write(tmp_path, {"own": "0::/a/b\n"}) / "own"
    assert free_in_container(root, own) == 2900
    own.write_text("5:cpu:/a/b/c\n4:memory:/a\n0::/\n")
    assert free_in_container(root, own) is None
    old = {"a/memory.limit_in_bytes": "1000", "a/memory.usage_in_bytes": "10", "a/memory.stat": ""}
    root = write(tmp_path / "1", {f"memory/{name}": text for name, text in old.items()})
    assert free_in_container(root, own) == 990


def test_a_limit_of_addresses_counts() -> None:
    limit = 2**42
    program = (
        f"import resource, torch; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))\n"
        "from worker.engines import free_memory\n"
        "from worker.engines.embedded.kv_cache import budget\n"
        "free_memory._free_on_machine = lambda: 2**50\n"
        "print(budget.free_memory(torch.device('cpu')))"
    )
    found = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert limit - 2**38 < found < limit


def test_the_stricter_of_machine_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": "4096\n", "memory.current": "96\n", "memory.stat": "inactive_file 0\n"}
    monkeypatch.setattr(of_the_host, "CGROUPS", write(tmp_path, files))
    assert free_memory(torch.device("cpu")) == 4000
    monkeypatch.setattr(of_the_host, "CGROUPS", tmp_path / "nothing")
    machine = free_memory(torch.device("cpu"))
    assert machine is None or machine > 4000
