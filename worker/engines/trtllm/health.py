"""Whether TensorRT-LLM's executor lives: its own health check, and a canary where nothing else is heard of it.

A failed request says nothing: one processor that raises fails every request of its batch with the same error. What is
not a request's error shuts the executor down, and a dead one may leave requests waiting for ever.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

from worker.engines.trtllm.capabilities import Package
from worker.errors import EngineBroken, InvalidRequest, RequestFailed, ServingError

logger = logging.getLogger(__name__)


def submission_error(error: Exception, package: Package) -> ServingError:
    """What an exception out of ``generate_async`` means. Nothing was queued: only this request is concerned."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (AttributeError, pickle.PicklingError)) or "pickle" in text:
        return InvalidRequest("sampling_params.logits_processor", f"cannot be sent to the engine's process: {text}")
    if isinstance(error, package.request_error):
        return InvalidRequest("request", text)
    if isinstance(error, (ValueError, TypeError, NotImplementedError, AssertionError)):
        return InvalidRequest("request", text)
    return EngineBroken(f"TensorRT-LLM takes no requests: {text}")


def result_error(error: Exception, package: Package) -> ServingError:
    """What an exception out of a result means. Anything but a request's own error ends the executor."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, package.request_error):
        return RequestFailed(text)
    return EngineBroken(f"TensorRT-LLM: {type(error).__name__}: {text}")


class Watch:
    """Looks after the executor.

    Args:
        healthy: Its own health check, None where the version has none.
        canary: Runs a request of one token.
        package: For the class of its errors.
        interval_s: Seconds between looks; a canary is sent when nothing was `heard` in between.
        timeout_s: Seconds that the canary may take.
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

    def heard(self) -> None:
        """The executor answered something."""
        self._heard = True

    def suspect(self) -> None:
        """A request failed in the executor: look now."""
        self._suspicious.set()

    async def run(self) -> None:
        """Look until the executor is found dead, or this task is cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._suspicious.wait(), self._interval_s)
            except asyncio.TimeoutError:
                pass
            else:
                self._heard = False
            self._suspicious.clear()
            problem = await self._look()
            if problem is not None:
                self._broken(problem)
                return

    def _is_healthy(self) -> bool:
        if self._healthy is None:
            return True
        try:
            return bool(self._healthy())
        except Exception:  # the engine's boundary: a check that raises has failed
            logger.exception("TensorRT-LLM's own health check")
            return False

    async def _look(self) -> str | None:
        if not self._is_healthy():
            return "TensorRT-LLM's own health check fails"
        if self._heard:
            self._heard = False
            return None
        try:
            await asyncio.wait_for(self._canary(), self._timeout_s)
        except asyncio.TimeoutError:
            return None if self._heard else f"TensorRT-LLM did not answer a canary within {self._timeout_s:g} s"
        except self._package.request_error as error:
            logger.warning("the canary was refused: %s", error)  # it was answered
        except Exception as error:  # whatever else it is, it is not a request's
            return str(result_error(error, self._package))
        return None
