"""Threads: one for a small checkpoint, and no more than the cores that this worker may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from worker.engines.embedded.host import threads
from worker.engines.embedded.host.threads import SMALL_CHECKPOINT, cpu_quota, limit_threads


@pytest.fixture(autouse=True)
def threads_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(threads, "CGROUPS", tmp_path / "no control groups")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def checkpoint(path: Path, *sizes: int) -> Path:
    """Files of zeros, which take no place."""
    for number, size in enumerate(sizes):
        with (path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("sizes", "environ", "expected"),
    [
        ((SMALL_CHECKPOINT,), {}, 1),
        ((SMALL_CHECKPOINT,), {"OMP_NUM_THREADS": ""}, 1),
        ((SMALL_CHECKPOINT,), {"OMP_NUM_THREADS": "2"}, 2),
        ((SMALL_CHECKPOINT, 1), {}, 2),
    ],
)
def test_threads(tmp_path: Path, sizes: tuple[int, ...], environ: dict[str, str], expected: int) -> None:
    limit_threads(checkpoint(tmp_path, *sizes), environ=environ)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(
    ("quota", "local_workers", "expected"),
    [
        (None, 1, 8),
        (None, 2, 4),
        (None, 3, 2),
        (None, 99, 1),
        (0.5, 1, 1),
        (1.0, 1, 1),
        (1.5, 1, 1),
        (2.0, 1, 2),
        (6.5, 1, 6),
        (6.5, 2, 3),
        (64.0, 1, 8),
    ],
)
def test_threads_are_whole_cores_that_this_worker_has(
    tmp_path: Path, quota: float | None, local_workers: int, expected: int
) -> None:
    torch.set_num_threads(8)
    limit_threads(checkpoint(tmp_path, 2 * SMALL_CHECKPOINT), local_workers, {}, quota)
    assert torch.get_num_threads() == expected
    torch.set_num_threads(8)
    limit_threads(tmp_path, local_workers, {"OMP_NUM_THREADS": "8"}, quota)
    assert torch.get_num_threads() == 8


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("cores", [0.5, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_quotas_of_containers(tmp_path: Path, cores: float, folder: str) -> None:
    quota = str(int(100_000 * cores))
    second = write(tmp_path / "2", {"cpu.max": f"{quota} 100000\n"})
    first = write(tmp_path / "1", {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"})
    assert cpu_quota(second, tmp_path / "none") == cpu_quota(first, tmp_path / "none") == cores


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000\n"},
        {"cpu.max": "\n"},
        {"cpu.max": "100000 0\n"},
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
        {"cpu/cpu.cfs_quota_us": "100000"},
    ],
)
def test_no_quota(tmp_path: Path, files: dict[str, str]) -> None:
    assert cpu_quota(write(tmp_path, files), tmp_path / "none") is None


def test_the_strictest_group_above_counts(tmp_path: Path) -> None:
    groups = {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "50000 100000"}
    root = write(tmp_path / "2", groups)
    own = write(tmp_path, {"own": "0::/a/b\n"}) / "own"
    assert cpu_quota(root, own) == 3.0
    old = {"cpu,cpuacct/a/cpu.cfs_quota_us": "150000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}
    root = write(tmp_path / "1", old)
    own.write_text("5:memory:/other\n4:cpu,cpuacct:/a/b\n")
    assert cpu_quota(root, own) == 1.5


def test_the_quota_limits_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CGROUPS", write(tmp_path, {"cpu.max": "150000 100000"}))
    limit_threads(checkpoint(tmp_path, 2 * SMALL_CHECKPOINT), environ={})
    assert torch.get_num_threads() == 1
