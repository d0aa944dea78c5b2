"""`GrammarWaits`: a request with a slow grammar reaches vLLM once vLLM's process has compiled it.

The worker has compiled the grammar at admission. vLLM's process compiles it again, and a row whose
grammar is not there yet would hold the step of all others.
"""

from __future__ import annotations

from typing import Any

from adapters.chain import ProcessorChain
from adapters.grammars.cache import FAST_S
from adapters.processors.grammar import GrammarProcessor
from adapters.vllm.prepared import PreparedGrammars


class GrammarWaits:
    """Asks vLLM's processes to compile grammars ahead of their requests. One event loop only.

    Args:
        llm: The library's ``AsyncLLM``, whose workers have `extension.WorkerExtension`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._prepared = PreparedGrammars()

    async def wait(self, chain: ProcessorChain) -> None:
        """Return once the slow grammars of a chain are compiled in vLLM's processes, which are
        asked each time: they drop those that no request uses when others need the room.
        """
        grammars = (one.processor for one in chain.members if isinstance(one.processor, GrammarProcessor))
        slow = [each for each in grammars if each.compile_s > FAST_S]
        if slow:
            address, sources = slow[0].address, [each.source for each in slow]
            await self._prepared.compile_ahead(
                sources, lambda: self._llm.collective_rpc("prepare_grammars_at", args=(address, sources))
            )
