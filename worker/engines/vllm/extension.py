"""`WorkerExtension`: what the worker asks of vLLM's processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adapters.processors.grammar import grammar_cache
from adapters.vllm.extension import Extension
from adapters.vocabulary import vocabulary_at


class WorkerExtension(Extension):
    """`Extension`, for chains that the worker has built: their vocabulary has an address."""

    def prepare_grammars_at(self, address: Sequence[Any], grammars: list[str]) -> bool:
        """Start to compile grammars in this process; whether all of them are compiled, or refused.

        Args:
            address: `Vocabulary.address` of the processors that have the grammars; vLLM makes lists
                of its tuples.
            grammars: Grammars in llguidance's JSON form.
        """
        path, size, ends = address
        return grammar_cache(vocabulary_at(path, size, None if ends is None else tuple(ends))).prepare(grammars)
