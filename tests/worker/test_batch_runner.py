"""Batches from their validation to their end, with answers that a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from batch_services import (
    CHAT,
    LIMITS,
    OWNER,
    WAIT_S,
    begun,
    content_of,
    echo,
    ended,
    jsonl,
    line,
    results_of,
    said,
    service,
    uploaded,
)
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engines.weights import ABORTED
from worker.frontdoor.batches import BatchService, runner, running_batch
from worker.frontdoor.batches.objects import StoredBatch
from worker.frontdoor.batches.requests import WINDOWS_S, NewBatch, batch_listing, new_batch
from worker.frontdoor.batches.stored_batches import StoredBatches
from worker.frontdoor.errors import Refused
from worker.requests.continuation import CANNOT_GO_ON


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "POLL_S"):
        monkeypatch.setattr(runner, name, 0.01)
    for name in ("FIRST_WAIT_S", "LONGEST_WAIT_S"):
        monkeypatch.setattr(running_batch, name, 0.001)


class Scripted:
    """Answers that are given once the test lets them; what was asked is in `asked`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.open = asyncio.Semaphore(0)
        self.came = asyncio.Event()
        self.under_way = self.most_under_way = 0

    async def __call__(self, owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        text = said(body)
        self.asked.append(text)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.came.set()
        try:
            await self.open.acquire()
        finally:
            self.under_way -= 1
        return 200, json.dumps({"said": text}).encode()


async def waits_for_its_turn(at: BatchService, owner: str) -> None:
    """Until lines of a client's batch have been read, and wait for a place."""
    async with asyncio.timeout(WAIT_S):
        while owner not in at._runner._turns._waiting:
            await asyncio.sleep(0.001)


async def test_each_line_has_its_answer(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        batch = await begun(at, jsonl(line(f"r{n}") for n in range(200)), metadata={"a": "b"})
        assert (batch.status, batch.as_json()["metadata"]) == ("validating", {"a": "b"})
        done = await ended(at, batch)
        assert (done.status, done.total, done.completed, done.failed) == ("completed", 200, 200, 0)
        assert done.error_file_id is None
        lines = await content_of(at, done.output_file_id)
        assert [each["custom_id"] for each in lines] == [f"r{n}" for n in range(200)]
        for each in lines:
            response = each["response"]
            assert (each["error"], response["status_code"]) == (None, 200)
            assert response["body"] == {"said": each["custom_id"]}
        assert len({each["id"] for each in lines} | {each["response"]["request_id"] for each in lines}) == 400


async def test_errors_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        text = said(body)
        return (400, b'{"error": {"message":\n"no"}}') if text == "bad" else (200, b"{}")

    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl([line("a"), line("bad"), line("c")])))
        assert (done.status, done.completed, done.failed) == ("completed", 2, 1)
        (error,) = await content_of(at, done.error_file_id)
        assert (error["custom_id"], error["error"]) == ("bad", None)
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"] == {"error": {"message": "no"}}
        assert [each["custom_id"] for each in await content_of(at, done.output_file_id)] == ["a", "c"]


async def test_a_bad_file_fails_its_batch(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        done = await ended(at, await begun(at, jsonl([line("a"), line("a")])))
        assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
        (problem,) = done.as_json()["errors"]["data"]
        assert (problem["code"], problem["line"], problem["param"]) == ("duplicate_custom_id", 2, "custom_id")


async def test_batches_share_the_places_in_turn(tmp_path: Path) -> None:
    script = Scripted()
    async with service(tmp_path, script) as at:
        large = await begun(at, jsonl(line(f"l{n}") for n in range(40)))
        while len(script.asked) < LIMITS.concurrency:
            await asyncio.sleep(0.001)
        small = await begun(at, jsonl([line("s0"), line("s1")]), "owner-b")
        await waits_for_its_turn(at, "owner-b")
        for _ in range(42):
            script.open.release()
            await asyncio.sleep(0.005)
        await ended(at, large)
        await ended(at, small)
    assert script.most_under_way == LIMITS.concurrency
    assert max(script.asked.index("s0"), script.asked.index("s1")) < 20


async def test_clients_share_the_places_in_turn(tmp_path: Path) -> None:
    """However many batches they have."""
    script = Scripted()
    async with service(tmp_path, script) as at:
        large = [await begun(at, jsonl(line(f"l{batch}-{n}") for n in range(4))) for batch in range(20)]
        while len(script.asked) < LIMITS.concurrency:
            await asyncio.sleep(0.001)
        small = await begun(at, jsonl(line(f"s{n}") for n in range(8)), "owner-b")
        await waits_for_its_turn(at, "owner-b")
        for _ in range(88):
            script.open.release()
            await asyncio.sleep(0.005)
        for each in (*large, small):
            await ended(at, each)
    assert script.most_under_way == LIMITS.concurrency
    assert max(script.asked.index(f"s{n}") for n in range(8)) < 40


async def test_a_cancelled_batch_keeps_what_is_done(tmp_path: Path) -> None:
    script = Scripted()
    async with service(tmp_path, script) as at:
        batch = await begun(at, jsonl(line(f"r{n}") for n in range(20)))
        for _ in range(3):
            script.open.release()
        while (await at.batch(OWNER, batch.id)).completed < 3:
            await asyncio.sleep(0.001)
        assert (await at.cancel_batch(OWNER, batch.id)).status == "cancelling"
        done = await ended(at, batch)
        assert script.under_way == 0
        assert (done.status, done.completed, done.failed, done.total) == ("cancelled", 3, 17, 20)
        results = await results_of(at, done)
        assert len(results) == 20
        assert sum(each["error"] is None for each in results.values()) == 3
        assert {each["error"]["code"] for each in results.values() if each["error"]} == {"batch_cancelled"}
        with pytest.raises(Refused, match="cannot be cancelled"):
            await at.cancel_batch(OWNER, batch.id)


async def left_alone(store: Any, method: str, work: Coroutine[Any, Any, Any]) -> None:
    """Let a client leave as the store has done what it asked for, and nobody else knows of it."""
    done, free, original = threading.Event(), threading.Event(), getattr(store, method)

    def slow(*arguments: Any) -> Any:
        result = original(*arguments)
        done.set()
        free.wait()
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store, method, slow)
        asking = asyncio.create_task(work)
        await asyncio.to_thread(done.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        free.set()


async def test_a_batch_runs_whose_client_has_left(tmp_path: Path) -> None:
    """It is in the store, and would wait there until the next start."""
    async with service(tmp_path) as at:
        file = await uploaded(at, jsonl([line("a")]))
        fields = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        await left_alone(at._store.store, "add_batch", at.add_batch(OWNER, new_batch(fields, (CHAT,))))
        (batch,) = (await at.batches(OWNER, batch_listing({}))).items
        assert (await ended(at, batch)).status == "completed"


async def test_a_batch_ends_whose_client_has_left(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def never(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with service(tmp_path, never) as at:
        batch = await begun(at, jsonl([line("a")]))
        await asked.wait()
        await left_alone(at._store.batches, "cancel", at.cancel_batch(OWNER, batch.id))
        assert (await ended(at, batch)).status == "cancelled"


async def test_an_upload_whose_client_has_left_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy, too, which a thread still makes."""
    copying, free, sendfile = threading.Event(), threading.Event(), os.sendfile

    def slow(*arguments: int) -> int:
        copying.set()
        free.wait()
        return sendfile(*arguments)

    monkeypatch.setattr(os, "sendfile", slow)
    async with service(tmp_path) as at:
        asking = asyncio.create_task(uploaded(at, jsonl([line("a")])))
        await asyncio.to_thread(copying.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        free.set()
        async with asyncio.timeout(WAIT_S):
            while list((tmp_path / "files" / "incoming").iterdir()):
                await asyncio.sleep(0.01)


async def test_a_batch_can_be_cancelled_before_its_lines(tmp_path: Path) -> None:
    async def none() -> frozenset[str]:
        return frozenset()

    async with service(tmp_path, models=none) as at:
        batch = await begun(at, jsonl([line("a")]))
        await at.cancel_batch(OWNER, batch.id)
        done = await ended(at, batch)
        assert (done.status, done.total, done.error_file_id) == ("cancelled", 0, None)


async def test_a_batch_expires_with_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Scripted()
    async with service(tmp_path, script) as at:
        monkeypatch.setitem(WINDOWS_S, "24h", 1)
        batch = await begun(at, jsonl(line(f"r{n}") for n in range(5)))
        script.open.release()
        done = await ended(at, batch)
        assert (done.status, done.completed, done.failed) == ("expired", 1, 4)
        assert done.expired_at is not None
        results = await results_of(at, done)
        assert Counter(each["error"] and each["error"]["code"] for each in results.values()) == {
            None: 1,
            "batch_expired": 4,
        }


async def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Scripted()
    async with service(tmp_path, first) as at:
        batch = await begun(at, jsonl(line(f"r{n}") for n in range(10)))
        for _ in range(4):
            first.open.release()
        while (await at.batch(OWNER, batch.id)).completed < 4:
            await asyncio.sleep(0.001)
    again: list[str] = []

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        again.append(said(body))
        return await echo(owner, url, body, request_id)

    async with service(tmp_path, ask) as at:
        done = await ended(at, batch)
        assert (done.status, done.completed) == ("completed", 10)
        assert set(await results_of(at, done)) == {f"r{n}" for n in range(10)}
    assert len(again) == 6
    assert sorted(set(first.asked[:4]) | set(again)) == sorted(f"r{n}" for n in range(10))


@given(stops=st.lists(st.integers(0, 12), max_size=5), cancels=st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_no_restart_loses_or_repeats_a_result(
    stops: list[int], cancels: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Restarts after any number of requests; each line has one result, and is not run after it."""
    directory = tmp_path_factory.mktemp("batches")
    asked: list[str] = []

    async def run() -> None:
        batch = None
        for stop in [*stops, None]:
            stopping = Stopping(stop, asked)
            async with service(directory, stopping) as at:
                batch = batch or await begun(at, jsonl(line(f"r{n}") for n in range(12)))
                if stop is not None:
                    await first_of(ended(at, batch), stopping.over.wait())
                    continue
                if cancels:
                    with contextlib.suppress(Refused):  # it has ended
                        await at.cancel_batch(OWNER, batch.id)
                await check(at, await ended(at, batch))

    async def check(at: BatchService, done: StoredBatch) -> None:
        results = await results_of(at, done)
        assert done.completed == sum(each["error"] is None for each in results.values())
        assert done.completed + done.failed == done.total == len(results)
        # what was under way at a stop is asked again; nothing with a result is
        assert len(asked) - len(set(asked)) <= LIMITS.concurrency * len(stops)
        if done.status == "completed":
            assert set(asked) == set(results) == {f"r{n}" for n in range(12)}
        else:
            assert cancels
            assert done.status == "cancelled"
            assert done.total in (0, 12)

    asyncio.run(run())


class Stopping:
    """Answers as many requests as it may, and then none; what it has answered is in ``asked``."""

    def __init__(self, left: int | None, asked: list[str]) -> None:
        self.left = left
        self.asked = asked
        self.over = asyncio.Event()

    async def __call__(self, owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.over.set()
                await asyncio.sleep(WAIT_S)
        self.asked.append(said(body))
        return await echo(owner, url, body, request_id)


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.create_task(each) for each in coroutines]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("statuses", "expected", "num_asked"),
    [
        ((503, 503, 429, 529, 200), 200, 5),
        ((502, 200), 200, 2),
        ((500, 500, 500, 500, 200), 500, running_batch.MOST_BROKEN),
        ((400, 200), 400, 1),
        ((404, 200), 404, 1),
    ],
)
async def test_a_request_is_sent_again_where_it_may_help(
    tmp_path: Path, statuses: tuple[int, ...], expected: int, num_asked: int
) -> None:
    left = list(statuses)

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return left.pop(0), b"{}"

    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl([line("a")])))
        results = await results_of(at, done)
        assert results["a"]["response"]["status_code"] == expected
    assert len(statuses) - len(left) == num_asked


async def test_a_line_that_a_trainer_aborts_is_sent_again(tmp_path: Path) -> None:
    """A pause ends all that is in flight, and a batch has no client that could go on."""
    aborted = json.dumps({"error": {"message": f"InvalidArgument: {ABORTED}"}}).encode()
    answers = [(400, aborted)] * 5 + [(200, b"{}")]

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return answers.pop(0)

    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl([line("a")])))
        assert (done.status, done.completed, answers) == ("completed", 1, [])


@pytest.mark.parametrize("is_killer", [False, True])
async def test_a_line_whose_worker_left_is_sent_again(tmp_path: Path, is_killer: bool) -> None:
    """Where the others have options that are not its own. It may be the line that kills them."""
    reason = f"InvalidArgument: request id: {CANNOT_GO_ON}: numerics is 'fast' on the worker"
    answers = [(400, json.dumps({"error": {"message": reason}}).encode())] * (running_batch.MOST_BROKEN - 1)
    answers += answers[:1] if is_killer else [(200, b"{}")]
    more = [(200, b"{}")]
    left = [*answers, *more]

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return left.pop(0)

    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl([line("a")])))
        assert (done.completed, left) == (int(not is_killer), more)


async def test_a_model_that_is_away_is_waited_for(tmp_path: Path) -> None:
    served: list[frozenset[str]] = [frozenset(), frozenset({"m"})]
    calls = 0

    async def models() -> frozenset[str]:
        return served.pop(0) if len(served) > 1 else served[0]

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        nonlocal calls
        calls += 1
        served[:] = [frozenset()] if calls < 4 else [frozenset({"m"})]
        return (404, b"{}") if calls < 4 else (200, b"{}")

    async with service(tmp_path, ask, models=models) as at:
        done = await ended(at, await begun(at, jsonl([line("a")])))
        assert (done.status, done.completed, calls) == ("completed", 1, 4)


async def test_a_model_may_be_away_while_others_are_served(tmp_path: Path) -> None:
    served = [frozenset({"other"})] * 3 + [frozenset({"other", "m"})]

    async def models() -> frozenset[str]:
        return served.pop(0) if len(served) > 1 else served[0]

    async with service(tmp_path, models=models) as at:
        assert (await ended(at, await begun(at, jsonl([line("a")])))).status == "completed"


async def test_lines_of_a_model_that_is_away_hold_no_others_up(tmp_path: Path) -> None:
    """An adapter that was unloaded, say: more of its lines wait than are under way at a time."""
    served, asked = {"m", "away"}, Counter[str]()

    async def models() -> frozenset[str]:
        return frozenset(served)

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        model = json.loads(body)["model"]
        asked[model] += 1
        if not asked["m"]:
            served.discard("away")
        return await echo(owner, url, body, request_id) if model in served else (404, b"{}")

    lines = [line(f"away{n}", model="away") for n in range(20)] + [line(f"m{n}") for n in range(9)]
    async with service(tmp_path, ask, models=models) as at:
        batch = await begun(at, jsonl(lines))
        async with asyncio.timeout(5):
            while (await at.batch(OWNER, batch.id)).completed < 9:
                await asyncio.sleep(0.001)
        served.add("away")
        done = await ended(at, batch)
        assert (done.status, done.completed) == ("completed", 29)
        assert len(await results_of(at, done)) == 29
    assert asked["m"] == 9


async def test_a_model_that_is_back_is_asked_within_the_batch(tmp_path: Path) -> None:
    """Long before all lines of other models have been run, which may take hours."""
    served, asked = {"m", "away"}, list[str]()

    async def models() -> frozenset[str]:
        return frozenset(served)

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        text = said(body)
        asked.append(text)
        if text == "away0" and asked.count(text) == 1:
            served.discard("away")
        elif text.startswith("m"):
            await asyncio.sleep(0.005)
            served.add("away")
        return await echo(owner, url, body, request_id) if json.loads(body)["model"] in served else (404, b"{}")

    lines = [each for n in range(30) for each in (line(f"away{n}", model="away"), line(f"m{n}"))]
    async with service(tmp_path, ask, models=models) as at:
        done = await ended(at, await begun(at, jsonl(lines)))
        assert (done.status, done.completed) == ("completed", 60)
    assert asked.index("away29") < asked.index("m29") + 5


async def test_lines_that_wait_for_a_model_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor have they turns, which lines of other batches wait for."""
    monkeypatch.setattr(running_batch, "LONGEST_WAIT_S", 60.0)
    read, reads, served, num_asked = running_batch.RunningBatch._read, list[int](), {"m"}, 0

    def counted(self: running_batch.RunningBatch, place: running_batch._Place) -> tuple[str, bytes]:
        reads.append(place.number)
        return read(self, place)

    monkeypatch.setattr(running_batch.RunningBatch, "_read", counted)

    async def models() -> frozenset[str]:
        return frozenset(served)

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            served.discard("m")
        elif num_asked == 9:
            served.add("m")
        return await echo(owner, url, body, request_id) if served else (404, b"{}")

    async with service(tmp_path, ask, models=models) as at:
        done = await ended(at, await begun(at, jsonl(line(f"r{n}") for n in range(50))))
        assert (done.status, done.completed) == ("completed", 50)
    begun_at_once = 9 * LIMITS.concurrency  # each time, before the first answer
    assert len(reads) - num_asked <= 50 + begun_at_once  # once each, to know its model


async def test_a_model_that_stays_away_fails_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "AWAY_S", 0.05)
    async with service(tmp_path) as at:
        done = await ended(at, await begun(at, jsonl([line("a", model="other"), line("b")])))
        (problem,) = done.as_json()["errors"]["data"]
        assert (done.status, problem["code"], problem["line"]) == ("failed", "model_not_found", 1)


COUNTS = st.fixed_dictionaries({}, optional=dict.fromkeys(("cached_tokens", "reasoning_tokens"), st.integers(0, 9)))


@given(st.integers(0, 99), st.integers(0, 99), COUNTS, COUNTS)
def test_usage_has_one_meaning_in_all_forms(prompt: int, answer: int, of_prompt: Any, of_answer: Any) -> None:
    counts = running_batch.token_counts(
        {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": answer,
                "prompt_tokens_details": of_prompt,
                "completion_tokens_details": of_answer or None,
            }
        }
    )
    assert counts == running_batch.token_counts(
        {
            "usage": {
                "input_tokens": prompt,
                "output_tokens": answer,
                "input_tokens_details": of_prompt,
                "output_tokens_details": of_answer,
            }
        }
    )
    assert (counts.input_tokens, counts.output_tokens) == (prompt, answer)
    assert counts.cached_tokens == of_prompt.get("cached_tokens", 0)
    assert counts.reasoning_tokens == of_answer.get("reasoning_tokens", 0)


async def test_usage_is_that_of_all_answers(tmp_path: Path) -> None:
    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        text = said(body)
        if text == "bad":
            return 400, b'{"error": {"message": "no"}}'
        return 200, json.dumps({"usage": {"prompt_tokens": len(text), "completion_tokens": 2}}).encode()

    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl([line("a"), line("bad"), line("abc")])))
        assert done.as_json()["usage"] == {
            "input_tokens": 4,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 8,
        }


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_without_its_input_fails(cancelled: bool, tmp_path: Path) -> None:
    ask = Scripted()
    async with service(tmp_path, ask) as at:
        batch = await begun(at, jsonl(line(f"r{n}") for n in range(9)))
        await ask.came.wait()
        (tmp_path / "files" / batch.input_file_id).unlink()
        if cancelled:
            await at.cancel_batch(OWNER, batch.id)
        for _ in range(9):
            ask.open.release()
        done = await ended(at, batch)
        (problem,) = done.as_json()["errors"]["data"]
        assert (done.status, problem["code"]) == ("failed", "input_file_damaged")
        assert batch.input_file_id in problem["message"]


async def test_a_full_disk_holds_a_batch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, failures = StoredBatches.add_result, 3

    def full(self: StoredBatches, *given: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise sqlite3.OperationalError("database or disk is full")
        keep(self, *given)

    monkeypatch.setattr(StoredBatches, "add_result", full)
    async with service(tmp_path) as at:
        done = await ended(at, await begun(at, jsonl(line(f"r{n}") for n in range(6))))
        assert (done.status, done.completed) == ("completed", 6)
        assert len(await results_of(at, done)) == 6


async def test_a_full_disk_holds_the_end_of_a_batch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, failures = StoredBatches.delete_results, 3

    def full(self: StoredBatches, batch_id: str) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OSError(28, "No space left on device")
        end(self, batch_id)

    monkeypatch.setattr(StoredBatches, "delete_results", full)
    async with service(tmp_path) as at:
        done = await ended(at, await begun(at, jsonl([line("a"), line("b")])))
        assert (done.status, set(await results_of(at, done))) == ("completed", {"a", "b"})
    on_disk = {path.name for path in (tmp_path / "files").rglob("*") if path.is_file()}
    assert on_disk == {done.input_file_id, done.output_file_id}


async def test_an_answer_that_is_no_json_is_an_error_of_text(tmp_path: Path) -> None:
    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        return 413, b"too large \xff"

    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl([line("a")])))
        body = (await results_of(at, done))["a"]["response"]["body"]
        assert body["error"]["message"].startswith("too large")


async def test_a_line_with_a_deep_answer_holds_no_others_up(tmp_path: Path) -> None:
    """One that can just be read, and one that cannot; the batch was tried again and again."""

    async def ask(owner: str, url: str, body: bytes, request_id: str) -> tuple[int, bytes]:
        text = said(body)
        return (200, b"[" * int(text) + b"]" * int(text)) if text.isdecimal() else await echo(owner, url, body, "")

    depths = [str(depth) for depth in range(sys.getrecursionlimit() - 40, sys.getrecursionlimit() + 10)]
    async with service(tmp_path, ask) as at:
        done = await ended(at, await begun(at, jsonl(map(line, ["a", *depths, "100000", "b"]))))
        assert (done.status, done.completed) == ("completed", len(depths) + 3)
        assert done.output_file_id is not None
        with await at.open_content(OWNER, done.output_file_id) as file:
            written = [each.partition(b'"custom_id":"')[2].partition(b'"')[0].decode() for each in file]
        assert written == ["a", *depths, "100000", "b"]


async def test_lines_of_an_output_are_lines_to_any_client(tmp_path: Path) -> None:
    """Characters that ``str.splitlines`` takes for line ends are escaped."""
    async with service(tmp_path) as at:
        done = await ended(at, await begun(at, jsonl([line("a\u2028b\x85c\x0bd")])))
        (only,) = await content_of(at, done.output_file_id)
        assert only["response"]["body"]["said"] == "a\u2028b\x85c\x0bd"


async def test_the_input_of_a_running_batch_stays(tmp_path: Path) -> None:
    script = Scripted()
    async with service(tmp_path, script) as at:
        batch = await begun(at, jsonl([line("a")]))
        with pytest.raises(Refused, match="has not ended"):
            await at.delete_file(OWNER, batch.input_file_id)
        script.open.release()
        done = await ended(at, batch)
        await at.delete_file(OWNER, batch.input_file_id)
        assert (await at.batch(OWNER, done.id)).status == "completed"


async def test_results_cannot_be_run_as_requests(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        done = await ended(at, await begun(at, jsonl([line("a")])))
        assert done.output_file_id is not None
        with pytest.raises(Refused, match="has the purpose batch_output"):
            await at.add_batch(OWNER, NewBatch(done.output_file_id, CHAT, "24h", None, 3600))


async def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    async with service(tmp_path) as at:
        with pytest.raises(Refused) as refused:
            await uploaded(at, b"x" * (LIMITS.file + 1))
        assert refused.value.status == 413
        assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []
