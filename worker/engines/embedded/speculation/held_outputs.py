"""Tokens that a processor may still take back are not sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engines.embedded.plan import Output, Request


@dataclass(slots=True)
class _Held:
    """What is held back of one request: the outputs of its tokens that were not sent, in order."""

    request: Request
    outputs: list[Output] = field(default_factory=list)

    def take(self, output: Output) -> None:
        """Add the next output, or drop those of tokens that were taken back."""
        if output.rewound_to is None:
            self.outputs.append(output)
        else:
            del self.outputs[output.rewound_to - self.request.num_sent :]

    def pass_on(self, count: int) -> list[Output]:
        """The first `count` outputs, which are sent now."""
        passed = self.outputs[:count]
        del self.outputs[:count]
        self.request.num_sent += len(passed)
        return passed


class HeldOutputs:
    """Holds back outputs of requests whose chain may take tokens back; passes on all others.

    It alone moves the border `Request.num_sent`, before which nothing is taken back.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def pass_on(self, requests: Sequence[Request], outputs: list[Output]) -> list[Output]:
        """What may be sent after a step, in order.

        Args:
            requests: Those of the step.
            outputs: Of the step.
        """
        backtracking = {one.id: one for one in requests if one.chain is not None and one.chain.backtracks}
        if not backtracking:
            return outputs
        passed: list[Output] = []
        for output in outputs:
            request = backtracking.get(output.request_id)
            if request is None:
                passed.append(output)
                continue
            held = self._held.setdefault(request.id, _Held(request))
            held.take(output)
            if output.finish_reason is not None:
                passed += self._held.pop(request.id).outputs
        for request in backtracking.values():
            if request.id in self._held:
                assert request.chain is not None
                start = request.chain.held_from
                end = len(request.tokens) if start is None else start
                passed += self._held[request.id].pass_on(max(0, end - request.num_sent))
        return passed

    def forget(self, request_id: str, block_size: int) -> None:
        """A request is taken out: drop its outputs, and their tokens, which nobody was sent.

        So it may go on later where its client has stopped.
        """
        held = self._held.pop(request_id, None)
        if held is not None and held.outputs:
            if held.request.chain is not None:
                held.request.chain.rewind(held.request.num_sent)
            held.request.rewind(held.request.num_sent, block_size)
