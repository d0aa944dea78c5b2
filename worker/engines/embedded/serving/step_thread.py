"""The step thread: messages come in between steps, outputs go to the event loop."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from worker.engines import KvEventSink
from worker.engines.embedded.blocks import ROOT
from worker.engines.embedded.host import Watchdog
from worker.engines.embedded.kv_cache import BlocksRemoved, BlocksStored, is_out_of_memory
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.step import Stepper
from worker.engines.embedded.transfer import KvHandle

logger = logging.getLogger(__name__)

RUN_AHEAD = 16
"""Tokens of all requests together that may wait for their consumers, and steps that may wait for
the event loop. A model faster than its consumers would otherwise take processor and interpreter
from the threads that pass chunks on."""

MIN_AHEAD = 2
"""Tokens of each request that may wait all the same: one step is computed while another is
consumed.
"""

MAX_PAUSE_S = 0.01
"""Longest that a step is held back for consumers, so that those that hang slow decoding but
never stop it.
"""

GATHER_S = 0.001
"""How long decoding waits after a request came in for the next one, whose prompt is computed at
once. So requests that come together start together, and their first tokens do not queue behind the
many tokens of a fast model."""

BURST_S = 0.005
"""The same after a request that came as soon as that after another: as long as first tokens need
to be on their way.
"""

MAX_GATHER_S = 0.03
"""Longest that decoding waits while requests keep coming; it then goes on for as long before it
may wait again.
"""


@dataclass(frozen=True, slots=True)
class Submit:
    """To the step thread: a new request, with the handle of its prompt's KV if that is remote."""

    request: Request
    kv: KvHandle | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """To the step thread: free what a request holds."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Listen:
    """To the step thread: who is told of the cache's blocks."""

    sink: KvEventSink


@dataclass(frozen=True, slots=True)
class Go:
    """To the step thread: the consumers have caught up."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To the step thread: leave."""


Message = Submit | Abort | Listen | Go | Stop


class StepThread:
    """Runs a `Stepper` in its own thread, and hands all outputs of a step over in one go.

    Args:
        stepper: Used by this thread alone from now on.
        deliver: Called on `loop` with outputs, oldest first.
        died: Called on `loop` with a text, if the thread ends without having been told to.
        loop: The event loop of the callers.
        step_timeout_s: Seconds after which a step counts as hung.
    """

    def __init__(
        self,
        stepper: Stepper,
        deliver: Callable[[list[Output]], None],
        died: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        step_timeout_s: float,
    ) -> None:
        self._watchdog = Watchdog(step_timeout_s)
        self._stepper = stepper
        self._deliver = deliver
        self._died = died
        self._loop = loop
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._outbox: list[Output] = []
        self._outbox_lock = threading.Lock()
        self._num_ahead = 0  # steps published since the loop last collected
        self._is_held = False
        self._has_arrivals = False  # since the last step
        self._last_decode_s = -math.inf
        self._last_arrival_s = -math.inf
        self._gathering_since_s = -math.inf
        self._quiet_s = GATHER_S  # time without an arrival after which decoding goes on
        self._sink: KvEventSink | None = None
        self._thread = threading.Thread(target=self._run, name="embedded-step", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._watchdog.start()
        self._thread.start()

    def tell(self, message: Message) -> None:
        """Leave a message, read between steps."""
        self._inbox.put(message)

    def hold(self, wanted: bool) -> None:
        """Compute prompts only while `wanted`; called by the event loop."""
        was_held, self._is_held = self._is_held, wanted
        if was_held and not wanted:
            self.tell(Go())

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()
        self._watchdog.stop()

    def _run(self) -> None:
        try:
            while self._read_messages():
                prompts_first = self._is_pausing() or self._is_gathering()
                self._publish(self._watchdog.watch(partial(self._stepper.step, prompts_first)))
                self._has_arrivals = False
                if not prompts_first:
                    self._last_decode_s = time.monotonic()
                self._report_blocks()
            self._stepper.close()
        except BaseException as error:  # the thread's outermost frame: whatever it was, the engine is broken
            logger.exception("the step thread died")
            reason = "out of memory, as " if is_out_of_memory(error) else ""
            self._call_soon(self._died, f"the step thread died of {reason}{type(error).__name__}: {error}")

    def _read_messages(self) -> bool:
        """Handle all messages, waiting for one while there is nothing to compute; False to stop."""
        while (message := self._next_message()) is not None:
            match message:
                case Submit(request, kv):
                    self._note_arrival()
                    self._stepper.add(request, kv)
                case Abort(request_id):
                    cancelled = self._stepper.abort(request_id)
                    if cancelled is not None:
                        self._publish([cancelled])
                case Listen(sink):
                    self._sink = sink
                    self._stepper.scheduler.cache.record_events()
                    self._report_blocks()
                case Go():
                    pass
                case Stop():
                    return False
        return True

    def _next_message(self) -> Message | None:
        """The next message; None if there is none, and it is time for a step."""
        wait_s = self._wait_s()
        if wait_s == 0 and self._inbox.empty():
            return None
        try:
            return self._inbox.get(timeout=wait_s)
        except Empty:
            return None

    def _wait_s(self) -> float | None:
        """Seconds to wait for a message before the next step; None if nothing is to compute."""
        wait_s, scheduler = self._stepper.wait_s, self._stepper.scheduler
        if wait_s != 0:
            return wait_s
        if self._is_gathering() and not scheduler.has_prompts:
            return max(0.0, self._last_arrival_s + self._quiet_s - time.monotonic())
        if self._is_pausing() and not (scheduler.prefilling or self._has_arrivals):
            return max(0.0, self._last_decode_s + MAX_PAUSE_S - time.monotonic())
        return 0.0

    def _note_arrival(self) -> None:
        now_s = time.monotonic()
        self._quiet_s = BURST_S if now_s - self._last_arrival_s <= self._quiet_s else GATHER_S
        if self._stepper.scheduler.is_idle or now_s - self._gathering_since_s > 2 * MAX_GATHER_S:
            self._gathering_since_s = now_s
        self._last_arrival_s = now_s
        self._has_arrivals = True

    def _is_pausing(self) -> bool:
        """Whether decoding waits for consumers."""
        return self._is_held and time.monotonic() - self._last_decode_s < MAX_PAUSE_S

    def _is_gathering(self) -> bool:
        """Whether requests are coming in one after the other."""
        now_s = time.monotonic()
        return now_s - self._last_arrival_s < self._quiet_s and now_s - self._gathering_since_s < MAX_GATHER_S

    def _report_blocks(self) -> None:
        if self._sink is not None:
            report(self._stepper.scheduler.cache.drain_events(), self._sink)

    def _publish(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        # while the loop is behind, outputs collect here and it is not woken again
        with self._outbox_lock:
            waiting = bool(self._outbox)
            self._outbox += outputs
            self._num_ahead += 1
            if self._num_ahead >= RUN_AHEAD:
                self._is_held = True
        if not waiting:
            self._call_soon(self._collect)

    def _collect(self) -> None:
        with self._outbox_lock:
            outputs, self._outbox = self._outbox, []
            self._num_ahead = 0
        self._deliver(outputs)

    def _call_soon(self, callback: Callable[..., None], *arguments: str) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():  # closed: nobody is left to tell
                raise


def report(events: Sequence[BlocksStored | BlocksRemoved], sink: KvEventSink) -> None:
    """Tell `sink` what has become of blocks, oldest first."""
    for event in events:
        if isinstance(event, BlocksStored):
            parent = None if event.parent_hash == ROOT else event.parent_hash
            sink.stored(parent, event.block_hashes, event.token_ids)
        else:
            sink.removed(event.block_hashes)
