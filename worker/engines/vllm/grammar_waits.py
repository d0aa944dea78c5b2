"""`GrammarWaits`: a request with a slow grammar reaches vLLM once vLLM's process has compiled it.

The worker has compiled the grammar at admission. vLLM's process compiles it again, and a row whose
grammar is not there yet would hold the step of all others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from adapters.chain import ProcessorChain
from adapters.grammars.cache import FAST_S
from adapters.processors.grammar import GrammarProcessor
from worker.errors import one_line

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Time between questions whether the grammars are compiled, seconds."""

WAIT_S = 60.0
"""Time for which a request waits, seconds; then the step waits for its grammars."""

MAX_PREPARED = 4096
"""Grammars of which it is remembered that vLLM's process has compiled them."""


class GrammarWaits:
    """Asks vLLM's processes to compile grammars ahead of their requests. One event loop only.

    Args:
        llm: The library's ``AsyncLLM``, whose workers have `extension.WorkerExtension`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._prepared: OrderedDict[str, None] = OrderedDict()

    async def wait(self, chain: ProcessorChain) -> None:
        """Return once the slow grammars of a chain are compiled in vLLM's processes."""
        grammars = (one.processor for one in chain.members if isinstance(one.processor, GrammarProcessor))
        slow = [each for each in grammars if each.compile_s > FAST_S and each.source not in self._prepared]
        if not slow:
            return
        address, sources = slow[0].address, [each.source for each in slow]
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    if all(await self._llm.collective_rpc("prepare_grammars_at", args=(address, sources))):
                        break
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            logger.warning("vLLM's process has not compiled a grammar within %g s", WAIT_S)
            return
        except Exception as error:  # of vLLM's, of any class: a dead engine is noticed where the request begins
            logger.warning("vLLM's process compiled no grammar ahead: %s", one_line(error))
            return
        self._note(sources)

    def _note(self, sources: Sequence[str]) -> None:
        for source in sources:
            self._prepared[source] = None
        while len(self._prepared) > MAX_PREPARED:
            self._prepared.popitem(last=False)
