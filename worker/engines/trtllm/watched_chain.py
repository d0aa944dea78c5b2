"""The worker's copy of a grammar that TensorRT-LLM enforces itself."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.chain import Mode, ProcessorChain, ProcessorFailed
from adapters.trtllm import Step
from worker.engines import TokenDelta


@dataclass(slots=True, eq=False)
class WatchedChain:
    """A chain of one grammar, which takes the tokens and checks that each continues it.

    The library's own matcher decides what is sampled; a token that does not match ends the request,
    so that no answer is sent which the guide forbids.

    Attributes:
        chain: The chain, begun after the prompt.
    """

    chain: ProcessorChain
    fails_open = False
    has_logprobs = False

    def note_mode(self, mode: Mode) -> None:
        """Say in the receipt where the prompt was computed."""
        self.chain.receipt.mode = mode

    def note_step(self, step: Step) -> None:
        """Ignore a report: no callable of this chain runs in the process of the engine."""

    def first_logprobs(self) -> None:
        """Return None: log probabilities are not reported."""

    def confirm(self, delta: TokenDelta) -> ProcessorFailed | None:
        """Take the delta's tokens.

        Returns:
            The failure, where one does not match the grammar, or the answer ends before its text is
            complete; the delta is void then.
        """
        (member,) = self.chain.members
        for token_id in delta.sampled_ids:
            self.chain.accept(token_id, self.chain.position)
            member.processor.catch_up()
            if member.processor.is_violated:  # type: ignore[attr-defined]  # a GrammarProcessor
                message = f"the token {token_id} at position {self.chain.position - 1} does not match the grammar"
                return self.chain.fail(member.name, "unsatisfiable", f"{message}, and TensorRT-LLM sampled it")
        return None
