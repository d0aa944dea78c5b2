"""`PreparedGrammars`: grammars that vLLM's processes compile before the requests that need them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Time between questions whether grammars are compiled, seconds."""

WAIT_S = 60.0
"""Time for which a request waits for its grammars, seconds; then the step waits for them."""

MAX_PREPARED = 4096
"""Grammars of which it is remembered that vLLM's processes have compiled them."""


class PreparedGrammars:
    """The grammars that vLLM's processes have compiled, as far as they were asked. Bounded."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grammars)

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._grammars

    def note(self, grammars: Sequence[str]) -> None:
        """Remember that vLLM's processes have compiled these."""
        for grammar in grammars:
            self._grammars[grammar] = None
            self._grammars.move_to_end(grammar)
        while len(self._grammars) > MAX_PREPARED:
            self._grammars.popitem(last=False)

    async def compile_ahead(self, grammars: Sequence[str], ask: Callable[[], Awaitable[Sequence[bool]]]) -> None:
        """Return once vLLM's processes have compiled grammars, or cannot be asked.

        Args:
            grammars: Grammars in llguidance's JSON form.
            ask: Lets each process start to compile them; answers whether it is done, per process.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    if all(await ask()):
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            logger.warning("vLLM's process has not compiled a grammar within %g s", WAIT_S)
        except Exception as error:  # of vLLM's, of any class: no such method, or a dead engine, noticed elsewhere
            logger.warning("vLLM's process compiled no grammar ahead: %s (%s)", error, type(error).__name__)
        else:
            self.note(grammars)
