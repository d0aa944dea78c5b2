"""`WorkerExtension`: what the worker asks of vLLM's processes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from safetensors import safe_open

from adapters.processors.grammar import grammar_cache
from adapters.vllm.extension import Extension
from adapters.vocabulary import vocabulary_at


class WorkerExtension(Extension):
    """`Extension`, for chains that the worker has built: their vocabulary has an address.

    Attributes:
        reload_weights: vLLM's own method of the class that this one extends.
    """

    reload_weights: Callable[..., None]

    def prepare_grammars_at(self, address: Sequence[Any], grammars: list[str]) -> bool:
        """Start to compile grammars in this process; whether all of them are compiled, or refused.

        Args:
            address: `Vocabulary.address` of the processors that have the grammars; vLLM makes lists
                of its tuples.
            grammars: Grammars in llguidance's JSON form.
        """
        path, size, ends = address
        return grammar_cache(vocabulary_at(path, size, None if ends is None else tuple(ends))).prepare(grammars)

    def load_weights_from(self, path: str) -> None:
        """Load the model's weights again, in place, from a safetensors file of all of them."""
        with safe_open(path, framework="pt") as file:
            weights = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
            self.reload_weights(weights_iterator=weights)

    def arm_lease_check(self) -> str | None:
        """Let vLLM's connector begin no pull whose lease is over; why it cannot, if so.

        vLLM has this check for KV that goes back from decode to prefill, with a switch of its own.
        """
        try:
            group = importlib.import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
            puller = group.connector_worker
            if not callable(puller._is_turn2_read_expired) or puller._bidirectional_kv_xfer_enabled not in (
                True,
                False,
            ):
                return "its switch is not a switch"
        except (AttributeError, ImportError) as error:
            return f"{type(error).__name__}: {error}"
        puller._bidirectional_kv_xfer_enabled = True
        return None
