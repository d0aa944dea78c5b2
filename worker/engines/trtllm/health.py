"""Liveness of TensorRT-LLM's executor: its health check, and a canary when it is silent.

A failed request proves nothing: one processor that raises fails every request of its batch with the
same error. Other exceptions may come from a dead executor, which can leave requests waiting
forever, or from the library's client side in this process: `Watch.verdict` distinguishes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from worker.engines.daemon_threads import done_in_time
from worker.engines.trtllm.capabilities import Package
from worker.errors import InvalidRequest, ServingError, one_line

logger = logging.getLogger(__name__)


def described(error: Exception) -> str:
    """An exception of TensorRT-LLM in one line."""
    return f"TensorRT-LLM: {type(error).__name__}: {one_line(error)}"


def submission_error(error: Exception, package: Package, fields: Iterable[str] = ()) -> ServingError | None:
    """The refusal that an exception of ``SamplingParams`` or ``generate_async`` means, or None.

    Nothing was queued: only this request is concerned.

    Args:
        error: The exception.
        package: The installed package, for the class of its errors.
        fields: The given fields, of which the refusal names one.
    """
    text = one_line(error)
    if isinstance(error, (AttributeError, pickle.PicklingError)) or "pickle" in text:
        return InvalidRequest("sampling_params.logits_processor", f"cannot be sent to the engine's process: {text}")
    if isinstance(error, (package.request_error, ValueError, TypeError, NotImplementedError, AssertionError)):
        return InvalidRequest(_named_in(text, fields), text)
    return None


def _named_in(text: str, fields: Iterable[str]) -> str:
    """The field that a refusal's text names, if any."""
    words = re.findall(r"\w+", text)
    offsets = {field: words.index(field) for field in fields if field in words}
    return f"sampling_params.{min(offsets, key=offsets.__getitem__)}" if offsets else "request"


def own_check(llm: Any) -> Callable[[], bool] | None:
    """The health check of an ``LLM``, or of its executor; None if the version has neither."""
    for owner, name in ((llm, "_check_health"), (getattr(llm, "_executor", None), "check_health")):
        check = getattr(owner, name, None)
        if callable(check):
            return check  # type: ignore[no-any-return]
    return None


class Watch:
    """Monitors the executor.

    Args:
        healthy: The executor's own health check (`own_check`), None if the version has none. It may
            block: it runs in a thread of its own.
        canary: Runs a request of one token.
        package: The installed package, for the class of its errors.
        interval_s: Seconds between checks; a canary is sent if nothing was `heard` in between.
        timeout_s: Seconds that the check may take, and the canary.
        broken: Called once, with the reason.
    """

    def __init__(
        self,
        healthy: Callable[[], bool] | None,
        canary: Callable[[], Awaitable[Any]],
        package: Package,
        interval_s: float,
        timeout_s: float,
        broken: Callable[[str], None],
    ) -> None:
        self._healthy = healthy
        self._canary = canary
        self._package = package
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._broken = broken
        self._heard = False
        self._suspicious = asyncio.Event()
        self._asking: list[asyncio.Future[str | None]] = []
        self._problem: str | None = None

    def heard(self) -> None:
        """The executor answered something."""
        self._heard = True

    def suspect(self) -> None:
        """A request failed in the executor: check now."""
        self._suspicious.set()

    async def verdict(self) -> str | None:
        """Check now, once for all concurrent callers; the problem, or None if it is alive."""
        if self._problem is not None:
            return self._problem
        asking: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        self.suspect()
        return await asking

    async def run(self) -> None:
        """Check until the executor is found dead, or this task is cancelled."""
        try:
            while self._problem is None:
                await self._wait()
                num_asking = len(self._asking)
                self._problem = await self._look()
                asking, self._asking = self._asking[:num_asking], self._asking[num_asking:]
                _answer(asking, self._problem)
            self._broken(self._problem)
        finally:
            self._problem = self._problem or "TensorRT-LLM is no longer monitored"
            _answer(self._asking, self._problem)

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):  # wait_for loses a cancellation as it wakes up
                await self._suspicious.wait()
            self._heard = False
        self._suspicious.clear()

    async def _own_problem(self) -> str | None:
        """The problem that the executor's own check finds, without blocking the event loop."""
        if self._healthy is None:
            return None
        try:
            is_healthy = await done_in_time("trtllm-health", self._healthy, self._timeout_s)
        except TimeoutError:
            return f"TensorRT-LLM's own health check did not return within {self._timeout_s:g} s"
        except Exception:  # the engine boundary: a check that raises has failed
            logger.exception("TensorRT-LLM's own health check")
            is_healthy = False
        return None if is_healthy else "TensorRT-LLM's own health check fails"

    async def _look(self) -> str | None:
        problem = await self._own_problem()
        if problem is not None:
            return problem
        if self._heard:
            self._heard = False
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._canary()
        except TimeoutError:
            return None if self._heard else f"TensorRT-LLM did not answer a canary within {self._timeout_s:g} s"
        except self._package.request_error as error:
            logger.warning("the canary was refused: %s", error)  # it was answered
        except Exception as error:  # any other exception is not a request error
            return described(error)
        return None


def _answer(asking: Iterable[asyncio.Future[str | None]], problem: str | None) -> None:
    for each in asking:
        if not each.done():
            each.set_result(problem)
