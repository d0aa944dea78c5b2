"""Log probabilities for a trainer: the embedded engine's values, torch's gradients.

With ``numerics="exact"`` a row of the engine's logits has the same bits in any batch. So a trainer
that asks the same kernels for a rollout's tokens, all at once, gets the numbers that the rollout
had token by token, in another process too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from worker.engines import EngineRequest
from worker.engines.embedded.admission import admit
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.host import in_own_thread
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.model import HfModel
from worker.engines.embedded.model.checkpoint_files import read_settings
from worker.engines.embedded.model.kernels import choose_kernels
from worker.engines.embedded.model.model_facts import ModelFacts
from worker.engines.embedded.model.network import Network
from worker.engines.embedded.plan import Request
from worker.engines.embedded.sampling.logprobs import text_logprobs, weight_logprobs
from worker.engines.embedded.sampling.truncation import Controls, group_rows, truncate_and_sample
from worker.engines.embedded.serving import load
from worker.errors import InvalidRequest, StartupError
from worker.models.quantised import format_of
from worker.sampling import SamplingParams

_COMPILED = "_orig_mod."
"""Part of the names of tensors in modules that ``torch.compile`` has wrapped."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt and a sampled answer.

    Attributes:
        prompt_token_ids: Token ids of the prompt; at least one.
        token_ids: Token ids of the answer, at least one; with the end token, if it is to be learnt.
    """

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]


class ExactLogprobs:
    """Differentiable log probabilities of rollouts, which equal the rollouts' own bit for bit.

    Values are those of an engine that packs the policy's weights anew for each call: so give it the
    rollouts of a step together. Gradients are those of the same formula as transformers and torch
    compute it, from the policy's own weights: they agree with the values up to rounding.

    Args:
        policy: transformers' causal language model, on the CPU, without dropout, and with adapters
            merged into its weights; it may be compiled.
        model_path: Directory of the checkpoint that it was loaded from, for its geometry and its
            tokenizer.
        settings: Further fields of `EmbeddedConfig`, as of the worker that makes the rollouts; its
            `dtype` must be the policy's, and its weights are not quantised.

    Raises:
        StartupError: the engine does not serve the checkpoint with these settings, or the policy
            has other tensors than the checkpoint's model, such as adapters; those of a module
            beside it, such as a value head, do not count.

    Attributes:
        made_by: Description of the kernels that compute the values, as a receipt has it: that of
            the rollouts must be the same.
    """

    def __init__(self, policy: Any, model_path: str | Path, **settings: Any) -> None:
        own: dict[str, Any] = {
            "device": "cpu",
            "dtype": str(policy.dtype).removeprefix("torch."),
            "quantization": "none",
        }
        self._policy = policy
        self._config = EmbeddedConfig(model_path=Path(model_path), **own, **({"numerics": "exact"} | settings))
        self._kernels = choose_kernels(self._config.kernels, torch.device("cpu"), policy.dtype)
        network, facts = self._first_network()
        self._num_positions = facts.context_length
        self._model = HfModel(
            *(network, facts, torch.device("cpu"), self._config.numerics, self._kernels),
            self._config.kv_cache_dtype,
        )
        self._stepper, info = load(self._config, self._model)
        self.made_by, self._context_length = info.made_by, info.context_length

    def __call__(self, rollouts: Sequence[Rollout], controls: Controls | None = None) -> list[torch.Tensor]:
        """Log probability of each token of the answers, float64 ``[len(token_ids)]`` each.

        Args:
            rollouts: Rollouts; those with one prompt share its KV.
            controls: Temperature and truncation that the tokens were sampled with, for log
                probabilities after them (``processed``); None for the model's own (``raw``).

        Raises:
            InvalidRequest: a token is not in the vocabulary, a text is too long, or `controls` has
                a value that no request may have.
            StartupError: the policy has other tensors than the checkpoint's model by now.
            RuntimeError: the logits of a token are not finite.
        """
        if not rollouts:
            return []
        taps = self._score(rollouts, controls)
        found = []
        for tap, logits in zip(taps, self._logits(rollouts), strict=True):
            if controls is not None:
                logits = logits / controls.divisor
            logprobs = tap.mask(logits).log_softmax(-1)
            chosen = logprobs.gather(-1, torch.tensor(tap.token_ids)[:, None])[:, 0]
            found.append(_with_values(chosen, torch.tensor(tap.logprobs, dtype=torch.float64)))
        return found

    def values(self, rollouts: Sequence[Rollout], controls: Controls | None = None) -> list[list[float]]:
        """The same log probabilities without gradients, in a fraction of the time."""
        return [tap.logprobs for tap in self._score(rollouts, controls)]

    def _first_network(self) -> tuple[Network, ModelFacts]:
        from worker.engines.embedded.model.checkpoint_gate import read_checked  # imports transformers
        from worker.engines.embedded.model.transformers_checkpoint import facts_of, tensor_shapes

        directory, dtype = Path(self._config.model_path), self._policy.dtype
        settings = read_settings(directory)
        if (form := format_of(settings)) is not None:
            raise StartupError(
                f"--model-path {directory}: its weights are in a form of this worker's ({form}), for which "
                "transformers makes up random ones; train on the checkpoint that it was made of, on what python -m "
                "worker.models makes of a GGUF file, or on the default model of launch/agg.sh --quantization none"
            )
        config, geometry = read_checked(directory, settings, dtype)
        self._shapes = tensor_shapes(config)
        self._check_tensors()
        network = self._network(geometry.max_position_embeddings if geometry is not None else 0)
        return network, facts_of(config, network, geometry, dtype, directory, settings, None)

    def _network(self, num_positions: int) -> Network:
        """The engine's network of the policy's weights, some of which it may share."""
        from worker.engines.embedded.model.transformers_checkpoint import packed  # imports transformers

        parameters = {id(each): each for each in self._policy.parameters()}
        modules = copy.deepcopy(self._policy, parameters).eval()  # of which `packed` leaves nothing
        return in_own_thread(lambda: packed(modules, self._kernels, num_positions, self._config.context_length))

    def _check_tensors(self) -> None:
        """Raises `StartupError` for a tensor that the engine would leave out, or misread."""
        parts = {name.partition(".")[0] for name in self._shapes}  # beside which there may be a value head
        every = {name.replace(_COMPILED, ""): value.shape for name, value in self._policy.state_dict().items()}
        found = {name: shape for name, shape in every.items() if name.partition(".")[0] in parts}
        for name in sorted(found.keys() | self._shapes.keys()):
            shape, expected = (None if name not in each else list(each[name]) for each in (found, self._shapes))
            if shape != expected:
                raise StartupError(
                    f"policy: tensor {name} must be of shape {expected or 'none'}, as in {self._config.model_path}, "
                    f"got {shape or 'none'}; merge adapters into the weights"
                )

    def _score(self, rollouts: Sequence[Rollout], controls: Controls | None) -> list[_AnswerTap]:
        try:
            SamplingParams(**({} if controls is None else asdict(controls)))
        except ValueError as error:
            raise InvalidRequest("controls", str(error)) from None
        requests = [self._request(number, rollout, controls) for number, rollout in enumerate(rollouts)]
        self._check_tensors()
        for left in list(self._stepper.scheduler.queues.live):  # by a call that was interrupted
            self._stepper.abort(left.id)
        self._stepper.drop_kv()
        if self._model.has_network:  # else the call before was interrupted here
            self._model.drop_network()
        self._model.replace_network(self._model.settled(self._network(self._num_positions)))
        for request in requests:  # those with one prompt wait for the first one's KV
            self._stepper.add(request)
        errors = []
        while not self._stepper.scheduler.is_idle:
            errors += [output for output in self._stepper.step() if output.error is not None]
        if errors:
            raise RuntimeError(f"rollouts[{errors[0].request_id}]: {errors[0].error}")
        return [request.tap for request in requests if isinstance(request.tap, _AnswerTap)]

    def _request(self, number: int, rollout: Rollout, controls: Controls | None) -> Request:
        """The request that computes the logits of an answer's tokens, all at once."""
        prompt, answer, model = list(rollout.prompt_token_ids), list(rollout.token_ids), self._stepper.model
        if not prompt or not answer:
            name = "token_ids" if prompt else "prompt_token_ids"
            raise InvalidRequest(f"rollouts[{number}].{name}", "must hold at least one token")
        asked = EngineRequest(str(number), prompt + answer, SamplingParams(max_tokens=1))
        try:
            request = admit(asked, number, model, self._context_length + 1)
        except InvalidRequest as error:
            raise InvalidRequest(f"rollouts[{number}]", error.problem) from None
        request.tokens.pop()  # nothing follows the last token
        request.prompt_length -= 1
        request.tap = _AnswerTap(len(prompt), answer, model.undecodable_ids, controls)
        return request

    def _logits(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """torch's logits of the answers' tokens, float32 ``[len(token_ids), V]`` each."""
        texts = [[*one.prompt_token_ids, *one.token_ids[:-1]] for one in rollouts]
        longest, most = max(map(len, texts)), max(len(one.token_ids) for one in rollouts)
        # padded on the left, so that the answers' rows are the last ones
        ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        output = self._policy(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=most
        )
        rows: torch.Tensor = output.logits.float()
        return [row[most - len(one.token_ids) :] for row, one in zip(rows, rollouts, strict=True)]


class _AnswerTap(LogitsTap):
    """A `LogitsTap` that keeps the log probability of each token of an answer.

    Args:
        first: Position of the answer's first token.
        token_ids: Token ids of the answer.
        never: Ids that are never sampled.
        controls: See `ExactLogprobs`.

    Attributes:
        logprobs: Log probabilities of the tokens whose logits have been seen.
        token_ids: The same.
    """

    def __init__(self, first: int, token_ids: list[int], never: Sequence[int], controls: Controls | None) -> None:
        self.token_ids = token_ids
        self.logprobs: list[float] = []
        self.first_wanted = first - 1
        self._never = list(never)
        self._controls = controls
        self._kept: list[torch.Tensor] = []  # bool [n, V] each: tokens that truncation keeps

    @property
    def wants_prompt(self) -> bool:
        """Whether the logits of a token have not been seen."""
        return len(self.logprobs) < len(self.token_ids)

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Take rows ``[n, V]`` of the tokens from `start` on; rows seen before are skipped."""
        seen = self.first_wanted + len(self.logprobs) - start
        rows = logits[seen:].float()
        followed = self.token_ids[len(self.logprobs) :][: len(rows)]
        found = text_logprobs(rows, followed, 0, self.first_wanted + 1 + len(self.logprobs))
        if self._controls is not None:
            weights = self._weights(rows.clone(), self._controls)
            self._kept.append(weights > 0)
            found = weight_logprobs(weights, followed, [0] * len(followed))
        self.logprobs += [one[0].logprob for one in found]

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` ``[n, V]`` of all tokens, with -inf for tokens that could not be sampled."""
        return logits.masked_fill(~torch.cat(self._kept), -torch.inf) if self._kept else logits

    def _weights(self, rows: torch.Tensor, controls: Controls) -> torch.Tensor:
        """The sampler's own weights of each row, int64 ``[n, V]``."""
        rows[:, self._never] = -torch.inf
        every = range(len(rows))
        groups = group_rows(dict.fromkeys(every, controls), rows.shape[1])
        _, found = truncate_and_sample(rows, groups, dict.fromkeys(every, 0.0), wanted=frozenset(every))
        return torch.stack([found[row] for row in every])


class _WithValues(torch.autograd.Function):
    """Log probabilities that torch computed, with the engine's values in their place."""

    @staticmethod
    def forward(ctx: Any, logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.dtype = logprobs.dtype
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.dtype), None


_with_values: Any = _WithValues.apply
