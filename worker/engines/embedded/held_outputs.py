"""Outputs of requests whose chain backtracks, held back while the chain may still rewind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engines.embedded.plan import Output, Request


@dataclass(slots=True)
class _Held:
    """Outputs of one request that were not sent yet, in order."""

    request: Request
    outputs: list[Output] = field(default_factory=list)

    def take(self, output: Output) -> None:
        """Add the next output, or drop those of rewound tokens."""
        if output.rewound_to is None:
            self.outputs.append(output)
        else:
            del self.outputs[output.rewound_to - self.request.num_sent :]

    def release(self, count: int) -> list[Output]:
        """Remove and return the first `count` outputs, which are sent now."""
        released = self.outputs[:count]
        del self.outputs[:count]
        self.request.num_sent += len(released)
        return released


class HeldOutputs:
    """Holds back outputs of requests whose chain may rewind their tokens; releases all others.

    It alone moves the border `Request.num_sent`, before which nothing is rewound.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def release(self, requests: Sequence[Request], outputs: list[Output]) -> list[Output]:
        """Take the outputs of a step; returns those that may be sent after it, in order.

        Args:
            requests: The requests that the step sampled for.
            outputs: The step's outputs.
        """
        backtracking = {one.id: one for one in requests if one.chain is not None and one.chain.backtracks}
        if not backtracking:
            return outputs
        released: list[Output] = []
        for output in outputs:
            request = backtracking.get(output.request_id)
            if request is None:
                released.append(output)
                continue
            held = self._held.setdefault(request.id, _Held(request))
            held.take(output)
            if output.finish_reason is not None:
                released += self._held.pop(request.id).outputs
        for request in backtracking.values():
            if request.id in self._held:
                assert request.chain is not None
                start = request.chain.held_from
                end = len(request.tokens) if start is None else start
                released += self._held[request.id].release(max(0, end - request.num_sent))
        return released

    def drop(self, request_id: str, block_size: int) -> None:
        """Drop the held outputs of a request, and rewind their tokens.

        They were not sent, so that the request can continue, here or later, from what its client
        has.
        """
        held = self._held.pop(request_id, None)
        if held is not None and held.outputs:
            chain = held.request.chain
            if chain is not None and chain.position > held.request.num_sent:  # a stop string may have cut it already
                chain.rewind(held.request.num_sent)
            held.request.rewind(held.request.num_sent, block_size)
