"""Tokens that a processor may still take back are not sent yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engines.embedded.plan import Output, Request


@dataclass(slots=True)
class _Held:
    """What is held back of one request.

    Attributes:
        request: The request.
        position: Of the next token that is sampled.
        outputs: Those not passed on, with the position of the token of each.
    """

    request: Request
    position: int
    outputs: list[tuple[int, Output]] = field(default_factory=list)

    def take(self, output: Output) -> None:
        """Add the next output, or drop those of tokens that were taken back."""
        if output.rolled_back_to is None:
            self.outputs.append((self.position, output))
            self.position += 1
            return
        self.position = output.rolled_back_to
        self.outputs = [one for one in self.outputs if one[0] < self.position]

    def pass_on(self, end: int) -> list[Output]:
        """Outputs of tokens before `end`, which are held no longer."""
        passed = [output for position, output in self.outputs if position < end]
        del self.outputs[: len(passed)]
        return passed


class HeldOutputs:
    """Holds back outputs of requests whose chain may take tokens back; passes on all others."""

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
            held = self._held.setdefault(request.id, _Held(request, request.first_new))
            held.take(output)
            if output.finish_reason is not None:
                passed += held.pass_on(held.position)
                del self._held[request.id]
        for request in backtracking.values():
            if request.id in self._held:
                assert request.chain is not None
                start = request.chain.held_from
                passed += self._held[request.id].pass_on(len(request.tokens) if start is None else start)
        return passed

    def forget(self, request_id: str, block_size: int) -> None:
        """A request is taken out: drop its outputs, and their tokens, which nobody was sent.

        So it may go on later where its client has stopped.
        """
        held = self._held.pop(request_id, None)
        if held is not None and held.outputs:
            position = held.outputs[0][0]
            if held.request.chain is not None:
                held.request.chain.rewind(position)
            held.request.cut_off(position, block_size)
