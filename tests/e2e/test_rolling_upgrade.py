"""Workers of this version, and of the one before, in one pool: an answer that moves between them is
the one that never moved, and an upgrade under load loses nothing.

A change of a format that the two exchange needs another version number of it, and then refusals
here, by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from e2e_stack import REPOSITORY, Stack, Worker, running_stack, wait_for
from test_migration_e2e import EXACT, KINDS, Reply, ask, ask_all

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(900)]

PREVIOUS = "9a99b6dc"
"""Commit of the version before; of a release its tag."""

OLDER = "2d64cf0504"
"""Commit of one whose KV transfers are of another version."""

KILLS = 5
"""Workers that are killed at most until requests have moved."""

RUNS_IT = """
import runpy, sys
sys.argv[0] = "worker"
runpy.run_module("worker", run_name="__main__", alter_sys=True)
"""


def built(commit: str, directory: Path) -> Path:
    """The sources of a version, with its kernels built."""
    archive = subprocess.run(["git", "archive", commit], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x"], cwd=directory, check=True, input=archive.stdout)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=directory, check=True, capture_output=True)
    (directory / "run_worker.py").write_text(RUNS_IT, encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(PREVIOUS, tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(OLDER, tmp_path_factory.mktemp("older"))


@contextlib.contextmanager
def empty_pool(directory: Path, model: Path) -> Iterator[Stack]:
    """A frontend that migrates, without workers."""
    with running_stack(directory, model, warm=False) as stack:
        stack.start_frontend("--migration-limit", "3")
        yield stack


@pytest.fixture
def pool(tmp_path: Path, tiny_model: Path) -> Iterator[Stack]:
    with empty_pool(tmp_path / "pool", tiny_model) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Reply]:
    """The answers of one worker of this version."""
    with empty_pool(tmp_path_factory.mktemp("one"), tiny_model) as stack:
        start(stack, None)
        return asyncio.run(ask_all(stack))


def start(stack: Stack, previous: Path | None, *arguments: str, wait: bool = True) -> Worker:
    """A worker of the version before, or of this one for None."""
    options = (*EXACT, "--migration", "on", "--boundary-store", f"file:{stack.directory / 'boundaries'}", *arguments)
    if previous is None:
        return stack.start_worker(*options, wait=wait)
    return stack.start_worker(*options, script=previous / "run_worker.py", wait=wait, PYTHONPATH=str(previous))


def same(replies: dict[str, Reply]) -> dict[str, tuple[object, ...]]:
    return {name: reply.same() for name, reply in replies.items()}


@pytest.mark.parametrize("newer_first", [True, False])
async def test_an_answer_moves_between_versions(
    pool: Stack, previous: Path, expected: dict[str, Reply], newer_first: bool
) -> None:
    dying, living = (None, previous) if newer_first else (previous, None)
    survivor = await asyncio.to_thread(start, pool, living)
    for _ in range(KILLS):  # where this process gets little time, all may be answered before it kills
        dies = await asyncio.to_thread(start, pool, dying)
        found = await ask_all(pool, kills=dies)
        assert same(found) == same(expected)
        if moved := [reply for reply in found.values() if reply.receipt["replayed_tokens"]]:
            break
    assert len(moved) == survivor.metric("dlw_continued_requests_total") > 0


async def start_pair(pool: Stack, prefill: Path | None, decode: Path | None) -> Worker:
    """A prefill and a decode worker of these versions; the latter."""

    options = ("--kv-block-size", "4", "--max-local-prefills", "32", "--disaggregation-mode")

    def start_role(role: str, version: Path | None) -> Worker:
        worker = start(pool, version, *options, role, wait=False)
        pool.wait_endpoint(worker)
        return worker

    await asyncio.to_thread(start_role, "prefill", prefill)
    decodes = await asyncio.to_thread(start_role, "decode", decode)
    ready = partial(pool.post, "completions", prompt="a", max_tokens=1)
    await asyncio.to_thread(wait_for, lambda: ready()[0] == 200, "the pair")
    return decodes


@pytest.mark.parametrize("newer_prefills", [True, False])
async def test_kv_goes_between_versions(
    pool: Stack, previous: Path, expected: dict[str, Reply], newer_prefills: bool
) -> None:
    decode = await start_pair(pool, *((None, previous) if newer_prefills else (previous, None)))
    assert same(await ask_all(pool)) == same(expected)
    received, cached = (decode.metric("dlw_kv_transfers_total", outcome=name) for name in ("received", "cached"))
    assert received > 0
    assert received + cached >= len(expected)


async def test_prompts_of_another_format_are_computed_again(
    pool: Stack, older: Path, expected: dict[str, Reply]
) -> None:
    """As `docs/operations.md` says: the decode workers are upgraded first."""
    decode = await start_pair(pool, older, None)
    assert same(await ask_all(pool)) == same(expected)
    assert decode.metric("dlw_local_prefills_total", reason="version") >= len(expected)
    assert decode.metric("dlw_kv_transfers_total", outcome="received") == 0


async def test_an_upgrade_under_load_loses_nothing(pool: Stack, previous: Path, expected: dict[str, Reply]) -> None:
    old = [await asyncio.to_thread(start, pool, previous) for _ in range(2)]
    ends, wrong, num_answers = asyncio.Event(), [], 0

    async def keep_asking(number: int, name: str) -> None:
        nonlocal num_answers
        async with pool.async_client() as client:
            while not ends.is_set():
                reply = await ask(client, number, asyncio.Event(), **KINDS[name.rpartition(" ")[0]])
                num_answers += 1
                if reply.same() != expected[name].same():
                    wrong.append((name, reply, expected[name]))

    chosen = list(enumerate(expected))[::3]  # one of each kind
    asking = [asyncio.create_task(keep_asking(number, name)) for number, name in chosen]
    for worker in old:
        await asyncio.to_thread(start, pool, None)
        worker.signal(signal.SIGTERM)
        assert await asyncio.to_thread(worker.wait) == 0
    ends.set()
    await asyncio.gather(*asking)
    assert not wrong, wrong[0]
    assert num_answers > len(chosen)
