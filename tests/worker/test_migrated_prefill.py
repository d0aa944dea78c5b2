"""A prefill worker knows of a migrated request how much of its tokens is prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from worker.arguments import parse_arguments
from worker.errors import PoisonRequest
from worker.migration.boundary_record import EXPIRY_S
from worker.migration.records import BoundaryRecords, records_of
from worker.requests.request import GenerationRequest, RequestLimits, parse_request

PROMPT, ANSWER = [5, 6, 7], [8, 9]
LIMITS = RequestLimits(100, 50, (2,))


def records(store: Path, role: str) -> BoundaryRecords:
    argv = ["--model-path", "/models/tiny", "--disaggregation-mode", role]
    found = records_of(parse_arguments([*argv, "--migration", "on", "--boundary-store", f"file:{store}"], {}))
    assert found is not None
    return found


def request(tokens: list[int], max_tokens: int) -> GenerationRequest:
    stops = {"max_tokens": max_tokens, "min_tokens": min(6, max_tokens)}
    return parse_request({"token_ids": tokens, "stop_conditions": stops}, LIMITS)


async def die(worker: BoundaryRecords, tokens: list[int], max_tokens: int) -> None:
    """A worker takes a request on, and is killed."""
    record = await worker.begin("a", request(tokens, max_tokens))
    record.write(11)
    await record.wait_written()
    record.drop()


async def test_the_decode_workers_record_tells_a_prefill_worker(tmp_path: Path) -> None:
    prefill, decode = records(tmp_path, "prefill"), records(tmp_path, "decode")
    await prefill.open()
    await decode.open()
    first = await prefill.begin("a", request(PROMPT, 1))
    first.write(11)
    await first.wait_written()
    first.settle()  # its part ends before the answer begins
    await die(decode, PROMPT, 20)
    moved = (await prefill.begin("a", request(PROMPT + ANSWER, 1))).request
    assert (moved.prompt_token_ids, moved.generated_token_ids) == (PROMPT, ANSWER)
    assert (moved.params.max_tokens, moved.params.min_tokens, moved.params.seed) == (len(ANSWER) + 1, 6, 11)
    other = (await prefill.begin("a", request([*PROMPT[:-1], 8, *ANSWER], 1))).request
    assert other.generated_token_ids == []
    assert (prefill.num_continued, prefill.num_replayed_tokens) == (1, len(ANSWER))
    await die(decode, PROMPT + ANSWER, 20 - len(ANSWER))
    with pytest.raises(PoisonRequest):
        await prefill.begin("a", request(PROMPT + ANSWER, 1))
    for each in (prefill, decode):
        await each.close()


async def test_a_prefill_worker_reads_its_own_record_again(tmp_path: Path) -> None:
    """The fewest tokens of the answer are more than those that it was asked for."""
    prefill, decode = records(tmp_path, "prefill"), records(tmp_path, "decode")
    await prefill.open()
    await decode.open()
    await die(decode, PROMPT, 20)
    for tokens in (PROMPT + ANSWER, [*PROMPT, *ANSWER, 9]):  # it migrates twice
        record = await prefill.begin("a", request(tokens, 1))
        assert (record.request.generated_token_ids, record.request.params.min_tokens) == (tokens[len(PROMPT) :], 6)
        record.write(11)
        await record.wait_written()
        record.settle()
    for each in (prefill, decode):
        await each.close()


async def test_the_record_of_a_prefill_goes_as_it_ends(tmp_path: Path) -> None:
    """Only an answer can go on behind its end, on a worker that has not sent all of it."""
    prefill = records(tmp_path, "prefill")
    await prefill.open()
    record = await prefill.begin("a", request(PROMPT, 1))
    record.write(11)
    await record.wait_written()
    record.settle()
    async with asyncio.timeout(EXPIRY_S / 2):
        while list(tmp_path.iterdir()):
            await asyncio.sleep(0.001)
    await prefill.close()


async def test_a_cancelled_prefill_leaves_no_record_of_its_own(tmp_path: Path) -> None:
    """The record of the answer that it has read is another worker's."""
    prefill, decode = records(tmp_path, "prefill"), records(tmp_path, "decode")
    await prefill.open()
    await decode.open()
    await die(decode, PROMPT, 20)
    kept = {path.name for path in tmp_path.iterdir()}
    record = await prefill.begin("a", request(PROMPT + ANSWER, 1))
    record.write(11)
    await record.wait_written()
    record.expire()
    await record.close()
    assert {path.name for path in tmp_path.iterdir()} == kept
    for each in (prefill, decode):
        await each.close()
