"""`PreparedGrammars`: grammars that vLLM's processes compile before the requests that need them."""

from __future__ import annotations

import asyncio
import hashlib
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
    """The grammars that vLLM's processes have compiled, as far as they were asked. Bounded.

    Their digests are kept, and not the grammars: one may have megabytes.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, grammar: str) -> bool:
        return _digest(grammar) in self._digests

    def note(self, grammars: Sequence[str]) -> None:
        """Remember that vLLM's processes have compiled these."""
        for digest in map(_digest, grammars):
            self._digests[digest] = None
            self._digests.move_to_end(digest)
        while len(self._digests) > MAX_PREPARED:
            self._digests.popitem(last=False)

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


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
