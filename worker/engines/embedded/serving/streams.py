"""`Streams`: the unfinished requests of an asynchronous engine, and the pace of its decoding."""

from __future__ import annotations

from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.serving.outbox import MIN_AHEAD, RUN_AHEAD
from worker.engines.embedded.serving.step_thread import Abort, StepThread
from worker.engines.embedded.serving.stream import Stream
from worker.errors import ServingError


class Streams:
    """The streams of unfinished requests. For one event loop.

    Decoding pauses while most consumers are behind; a few slow ones do not slow the rest.

    Attributes:
        thread: Computes the steps; None before the engine has started.
        refusal: Reason why no more requests are taken, the first ever given; None while they are.
    """

    def __init__(self) -> None:
        self.thread: StepThread | None = None
        self.refusal: ServingError | None = None
        self._by_id: dict[str, Stream] = {}
        self._behind: set[Stream] = set()  # those whose consumers are behind

    def __repr__(self) -> str:
        return f"Streams({len(self)} unfinished, {self.refusal!r})"

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def is_first_of(self, client: str | None) -> bool:
        """Whether a labelled client has no unfinished request."""
        return client is not None and all(stream.client != client for stream in self._by_id.values())

    def open(self, request: Request) -> Stream:
        """The stream of a request that has been admitted."""
        stream = self._by_id[request.id] = Stream(request)
        return stream

    def deliver(self, outputs: list[Output]) -> None:
        """Give the outputs of a step to their streams."""
        limit = max(MIN_AHEAD, RUN_AHEAD // max(1, len(self._by_id)))
        for output in outputs:
            stream = self._by_id.get(output.request_id)
            if stream is None:
                continue  # ended by `end_all`
            stream.push(output)
            if stream.finished:
                del self._by_id[output.request_id]
                self._behind.discard(stream)
            elif stream.num_pending >= limit:
                self._behind.add(stream)
        self._pace()

    def caught_up(self, stream: Stream) -> None:
        """The consumer of a stream has taken all of its tokens, or takes no more."""
        if stream in self._behind:
            self._behind.remove(stream)
            self._pace()

    def leave(self, stream: Stream) -> None:
        """The consumer of a stream takes no more; an unfinished request is aborted."""
        self.caught_up(stream)
        if self._by_id.get(stream.request_id) is stream and self.thread is not None:
            self.thread.tell(Abort(stream.request_id))

    def keep_alive(self) -> None:
        """Give an empty delta to each stream that has had none since the last call."""
        for stream in self._by_id.values():
            stream.keep_alive()

    def end_all(self, failure: ServingError) -> int:
        """Fail every stream, and refuse new requests; returns how many streams there were."""
        self.refusal = self.refusal or failure
        streams, self._by_id = self._by_id, {}
        self._behind.clear()
        for stream in streams.values():
            stream.fail(failure)
            if self.thread is not None:
                self.thread.tell(Abort(stream.request_id))
        return len(streams)

    def _pace(self) -> None:
        if self.thread is not None:
            self.thread.hold(2 * len(self._behind) > len(self._by_id))
