"""The stream of one request against a list: whatever is sent, in whatever order it is taken."""

from __future__ import annotations

import asyncio

import pytest
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from worker.engines import FinishReason, TokenDelta, TokenLogprob
from worker.engines.delta_stream import DeltaStream
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.serving.stream import Stream
from worker.errors import EngineBroken, ServingError
from worker.sampling import SamplingParams

PUTS: tuple[FinishReason | None, ...] = (None, "length", "stop", "cancelled", "error")

ACTIONS = st.lists(st.sampled_from([*PUTS, "more", "fail", "close", "keep alive", "take"]), max_size=24)


class Consumer:
    """Takes from a stream, and remembers what it waits for."""

    def __init__(self, stream: DeltaStream) -> None:
        self.stream = stream
        self.waiting: asyncio.Task[TokenDelta | ServingError | None] | None = None

    async def _next(self) -> TokenDelta | ServingError | None:
        try:
            return await anext(self.stream, None)
        except ServingError as error:
            return error

    async def take(self, expected: list[TokenDelta | ServingError], *, is_done: bool) -> None:
        """Take, or go on waiting; the stream gives the oldest of `expected`, which is removed."""
        self.waiting = self.waiting or asyncio.create_task(self._next())
        for _ in range(3):
            await asyncio.sleep(0)
        assert self.waiting.done() == bool(expected or is_done)
        if self.waiting.done():
            taken, self.waiting = self.waiting.result(), None
            assert taken is expected.pop(0) if expected else taken is None


async def run(num_choices: int, actions: list[str | None]) -> None:
    stream = DeltaStream()
    stream.num_open = num_choices
    consumer = Consumer(stream)
    sent: list[TokenDelta | ServingError] = []  # and not taken
    is_silent = is_done = False
    for action in actions:
        if action == "take":
            await consumer.take(sent, is_done=is_done)
        elif action == "close":
            stream.close()
            is_done = True
        elif action == "fail":
            error = EngineBroken("of this call")
            stream.fail(error)
            sent += [] if is_done else [error]
            is_done = True
        elif action == "keep alive":
            stream.keep_alive()
            if is_silent and not is_done and not sent:
                empty = stream.untaken
                assert empty is not None
                assert empty.is_empty
                sent.append(empty)
            is_silent = True
        elif action == "more":
            untaken = stream.untaken
            newest = sent[-1] if sent else None
            assert untaken is (newest if isinstance(newest, TokenDelta) and newest.finish_reason is None else None)
            if untaken is not None and not is_done:
                untaken.token_ids.append(1)
                stream.put(untaken)
                is_silent = False
        else:
            delta = TokenDelta([0], finish_reason=action)  # type: ignore[arg-type]
            stream.put(delta)
            if not is_done:
                sent.append(delta)
                is_silent = False
                num_choices -= action is not None
                is_done = num_choices == 0 or action == "error"
        assert stream.done == is_done
        if consumer.waiting is not None:
            await consumer.take(sent, is_done=is_done)
    stream.close()
    while sent or consumer.waiting is not None:
        await consumer.take(sent, is_done=True)
    assert await anext(stream, None) is None


@settings(max_examples=examples(1000), deadline=None)
@example(num_choices=1, actions=["keep alive", None, "take", "keep alive", "take", "keep alive"])
@given(num_choices=st.integers(1, 3), actions=ACTIONS)
def test_a_stream_gives_each_delta_once_and_one_end(num_choices: int, actions: list[str | None]) -> None:
    asyncio.run(run(num_choices, actions))


async def test_a_consumer_that_was_cancelled_may_take_again() -> None:
    stream = DeltaStream()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.001)
    delta = TokenDelta([1], finish_reason="stop")
    stream.put(delta)
    assert [each async for each in stream] == [delta]


def test_log_probabilities_are_not_copied_for_each_token() -> None:
    """An answer that is not taken, as a batch's, copied all of them for each token."""
    request = Request("a", 0, SamplingParams(), [5], 1, 100, frozenset(), 0)
    stream = Stream(request, None)  # type: ignore[arg-type]
    entries = [[TokenLogprob(token_id, -1.0, 1)] for token_id in range(3)]
    stream.push(Output("a", 0, logprobs=entries[0]))
    assert stream.untaken is not None
    kept = stream.untaken.logprobs
    for token_id in (1, 2):
        stream.push(Output("a", token_id, logprobs=entries[token_id]))
    assert stream.untaken.logprobs is kept
    assert kept == entries
