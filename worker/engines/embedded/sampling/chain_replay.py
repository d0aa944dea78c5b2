"""Chains of migrated requests: the answer's tokens so far are replayed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from adapters.chain import ProcessorChain, ProcessorFailed, plan_rows, replay_token
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.plan import Edits, Model, Plan, Request
from worker.engines.embedded.sampling.sampler import Sampler

CHANGED = "its state is made of the logits of weights that have changed since"


def resume(request: Request, model: Model) -> ChainReplay | None:
    """Bring a request's chain to the end of its tokens, prompt and answer so far.

    Args:
        request: Migrated; its chain has begun after the prompt, and may have been given the whole
            answer already.
        model: Model that will compute the logits of the answer again.

    Returns:
        The request's tap, which has to see these logits first, if some state depends on them; else
        None.

    Raises:
        ProcessorFailed: a processor raised.
    """
    chain, tokens, begin = request.chain, request.tokens, request.prompt_length
    if chain is None:
        return None
    if chain.observes_logits:
        return ChainReplay(request, model)
    if chain.receipt.mode != "migrated" or chain.tokens != tokens:
        chain.start(tokens[:begin], tokens[begin:], mode="migrated")
    return None


class ChainReplay(LogitsTap):
    """A `LogitsTap` that replays a chain on the logits that the answer's tokens were sampled from.

    The prefill computes them again. Arguments as `resume`.
    """

    def __init__(self, request: Request, model: Model) -> None:
        assert request.chain is not None
        self._chain = request.chain
        self._tokens = list(request.tokens)
        self._never = list(model.undecodable_ids)
        self._model = model
        self.first_wanted = request.prompt_length - 1
        self._chain.start(self._tokens[: request.prompt_length], mode="migrated")
        # as the request was when it drew the next token to be replayed
        params = replace(request.params, logprobs=None, logprobs_mode="raw")
        self._earlier = replace(request, tokens=self._tokens[: request.prompt_length], params=params)

    @property
    def wants_prompt(self) -> bool:
        """Whether a token is left to replay."""
        return self._chain.position < len(self._tokens)

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Take rows ``[n, V]`` of the tokens from ``start`` on; those seen before are skipped.

        Raises:
            ProcessorFailed: a processor raised.
        """
        for position, row in enumerate(logits, start + 1):
            if self.wants_prompt and position == self._chain.position:
                self._replay(self._tokens[position], row.to("cpu", torch.float32, copy=True))

    def start_over(self) -> None:
        """Raises `ProcessorFailed`: rows of other weights are not those of the answer so far."""
        name = next(one.name for one in self._chain.members if one.processor.observes_logits)
        raise self._chain.fail(name, "raised", CHANGED)

    def _replay(self, token_id: int, row: torch.Tensor) -> None:
        row[self._never] = -torch.inf
        replay_token(self._chain, token_id, row, self._sample, self._never)
        self._earlier.tokens.append(token_id)

    @cached_property
    def _sampler(self) -> Sampler:
        return Sampler(self._model.vocab_size, self._model.undecodable_ids)

    @cached_property
    def _plan(self) -> Plan:
        return Plan((self._earlier,), (), (self._earlier,))

    def _sample(self, chain: ProcessorChain, row: torch.Tensor) -> int:
        """See `adapters.chain.Sample`."""
        planned, failures = plan_rows([(0, chain)])
        for failure in failures.values():
            raise failure
        samples = self._sampler.sample(row.unsqueeze(0), Edits(planned), self._plan)
        if samples.errors:
            known = chain.failure or ProcessorFailed("model", "nan", samples.errors[0])
            raise chain.fail(known.processor, known.reason, known.message)
        return samples.token_ids[0]
