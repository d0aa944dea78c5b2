"""The step thread: reads messages between steps, and sends outputs to the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from worker.engines import FinishReason, KvEventSink, LoadSink
from worker.engines.embedded.blocks import ROOT
from worker.engines.embedded.host import Watchdog
from worker.engines.embedded.kv_cache import BlocksRemoved, BlocksStored, is_out_of_memory
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.serving.outbox import Outbox
from worker.engines.embedded.serving.pacing import Pacing
from worker.engines.embedded.step import Stepper
from worker.engines.embedded.transfer import KvHandle
from worker.engines.forward_pass import ForwardPassSink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Message: a new request, with the handle of its prompt's KV if that is remote."""

    request: Request
    kv: KvHandle | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Message: end a request for a reason, and free its slot and pages."""

    request_id: str
    reason: FinishReason = "cancelled"


@dataclass(frozen=True, slots=True)
class Listen:
    """Message: report the blocks in the cache to `sink`, and from now on their changes."""

    sink: KvEventSink


@dataclass(frozen=True, slots=True)
class Count:
    """Message: tell `sink`, on the event loop, of the KV blocks in use whenever their number has
    changed.
    """

    sink: LoadSink


@dataclass(frozen=True, slots=True)
class Measure:
    """Message: tell `sink` of each forward pass from now on."""

    sink: ForwardPassSink


@dataclass(frozen=True, slots=True)
class Call:
    """Message: call `work` with the stepper between two steps, and tell `done` the result; not
    before the stepper is drained, if `when_drained`.
    """

    work: Callable[[Stepper], object]
    done: asyncio.Future[Any]
    when_drained: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """Message: the consumers have caught up, so that decoding continues."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Message: end the thread."""


Message = Submit | Abort | Listen | Count | Measure | Call | Wake | Stop


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
        self._died = died
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._pacing = Pacing()
        self._outbox = Outbox(loop, deliver, self._pacing)
        self._sink: KvEventSink | None = None
        self._load_sink: LoadSink | None = None
        self._told_blocks = -1  # in use, as it was told
        self._when_drained: list[Call] = []
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
        was_held, self._pacing.is_held = self._pacing.is_held, wanted
        if was_held and not wanted:
            self.tell(Wake())

    def join(self) -> None:
        """Block until the thread has ended."""
        self._thread.join()
        self._watchdog.stop()

    def _run(self) -> None:
        try:
            while self._read_messages():
                prompts_first = self._pacing.is_prompts_first
                outputs = self._watchdog.watch(partial(self._stepper.step, prompts_first))
                self._report_load()  # before somebody who has heard of a token may ask for it
                self._outbox.publish(outputs)
                self._pacing.note_step(prompts_first=prompts_first)
                self._report_blocks()
            self._stepper.close()
        except BaseException as error:  # the thread's outermost frame: whatever it was, the engine is broken
            logger.exception("the step thread died")
            reason = "out of memory, as " if is_out_of_memory(error) else ""
            self._outbox.call_soon(self._died, f"the step thread died of {reason}{type(error).__name__}: {error}")

    def _read_messages(self) -> bool:
        """Handle all messages, waiting for one while there is nothing to compute; False to stop."""
        while (message := self._next_message()) is not None:
            match message:
                case Submit(request, kv):
                    self._pacing.note_arrival(is_idle=self._stepper.scheduler.is_idle)
                    self._stepper.add(request, kv)
                case Abort(request_id, reason):
                    ended = self._stepper.abort(request_id)
                    if ended is not None:
                        self._outbox.publish([replace(ended, finish_reason=reason)])
                case Listen(sink):
                    self._sink = sink
                    self._stepper.scheduler.cache.record_events()
                    self._report_blocks()
                case Count(load_sink):
                    self._load_sink = load_sink
                case Measure(pass_sink):
                    self._stepper.pass_sink = pass_sink
                case Call(when_drained=True) as call:
                    self._when_drained.append(call)
                case Call() as call:
                    self._carry_out(call)
                case Wake():
                    pass
                case Stop():
                    return False
        return True

    def _carry_out(self, call: Call) -> None:
        self._outbox.call_soon(_tell, call.done, *_called(call.work, self._stepper))
        self._report_blocks()

    def _next_message(self) -> Message | None:
        """The next message; None if there is none, and it is time for a step."""
        while self._when_drained and self._stepper.is_drained:
            call = self._when_drained.pop(0)
            if not call.done.cancelled():  # else its caller has left, and lets requests go on
                self._carry_out(call)
        self._report_load()
        wait_s = self._stepper.wait_s
        if wait_s == 0 and not self._stepper.scheduler.is_idle:  # else KV is to be received, and nothing is decoded
            wait_s = self._pacing.wait_s(self._stepper.scheduler.queues)
        if wait_s == 0 and self._inbox.empty():
            return None
        try:
            return self._inbox.get(timeout=wait_s)
        except Empty:
            return None

    def _report_load(self) -> None:
        cache = self._stepper.scheduler.cache
        if self._load_sink is not None and cache.num_used_blocks != self._told_blocks:
            self._told_blocks = cache.num_used_blocks
            self._outbox.call_soon(self._load_sink, self._told_blocks, cache.num_blocks)

    def _report_blocks(self) -> None:
        if self._sink is not None:
            report(self._stepper.scheduler.cache.drain_events(), self._sink)


def _called(work: Callable[[Stepper], object], stepper: Stepper) -> tuple[object, Exception | None]:
    try:
        return work(stepper), None
    except Exception as error:  # the caller's: it is told, and the thread goes on
        return None, error


def _tell(done: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if done.done():
        return  # its caller is gone
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)


def report(events: Sequence[BlocksStored | BlocksRemoved], sink: KvEventSink) -> None:
    """Report cached and evicted blocks to `sink`, oldest first."""
    for event in events:
        if isinstance(event, BlocksStored):
            parent = None if event.parent_hash == ROOT else event.parent_hash
            sink.stored(parent, event.block_hashes, event.token_ids, event.cache_salt, event.lora_name)
        else:
            sink.removed(event.block_hashes)
