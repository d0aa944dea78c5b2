"""`Streams`: the unfinished requests of an asynchronous engine, and the pace of its decoding."""

from __future__ import annotations

from worker.engines.embedded.plan import Output
from worker.engines.embedded.serving.outbox import MIN_AHEAD, RUN_AHEAD
from worker.engines.embedded.serving.step_thread import StepThread
from worker.engines.embedded.serving.stream import Stream
from worker.engines.request_table import RequestTable


class Streams(RequestTable[Stream]):
    """The streams of unfinished requests, which stay until the step thread has freed their slots.

    Decoding pauses while most consumers are behind; a few slow ones do not slow the rest.

    Attributes:
        thread: Computes the steps; None before the engine has started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread: StepThread | None = None
        self._behind: set[Stream] = set()  # those whose consumers are behind

    def is_first_of(self, client: str | None) -> bool:
        """Whether a labelled client has no unfinished request."""
        return client is not None and all(stream.request.client != client for stream in self._by_id.values())

    def deliver(self, outputs: list[Output]) -> None:
        """Give the outputs of a step to their streams."""
        limit = max(MIN_AHEAD, RUN_AHEAD // max(1, len(self._by_id)))
        for output in outputs:
            stream = self._by_id.get(output.request_id)
            if stream is None:
                continue  # ended by `end_all`
            stream.push(output)
            if stream.done:
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

    def release(self, request: Stream) -> None:
        """The consumer of a stream takes no more; an unfinished request is aborted."""
        self.caught_up(request)
        if self._by_id.get(request.request_id) is request:
            request.leave()

    def abort_all(self) -> None:
        """End every request; their streams end as ``abort``, behind what has been sampled."""
        for stream in self.unfinished:
            stream.abort("abort")

    def _pace(self) -> None:
        if self.thread is not None:
            self.thread.hold(2 * len(self._behind) > len(self._by_id))
