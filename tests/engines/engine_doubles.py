"""A model without a network, and short ways to drive an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import torch

from worker.engines import EngineRequest, TokenDelta
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, Plan, Request
from worker.engines.embedded.admission import admit
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.scored_rows import show_scored
from worker.engines.embedded.speculation import Speculator
from worker.engines.embedded.step import Stepper, make_stepper
from worker.sampling import SamplingParams

StartEngine = Callable[..., Awaitable[EmbeddedEngine]]

Draft = Callable[[Request], Sequence[int]]

WIDTH = 96
PADDING = 6
END = 2


class EveryToken(LogitsTap):
    """Keeps the logits of all prompt tokens."""

    wants_prompt = True

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        assert start == sum(map(len, self.seen))
        self.seen.append(logits.clone())

    def start_over(self) -> None:
        raise AssertionError("no weights change")

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing was asked for")


class ScriptedModel:
    """Logits are a fixed function of a row's last token and position, bit by bit the same in any
    batch.

    ``hook`` runs before each forward, on the step thread: it may block, raise, or edit the logits
        it is given.
    """

    vocab_size = WIDTH
    context_length = 256
    eos_token_ids = (END,)
    undecodable_ids = tuple(range(WIDTH - PADDING, WIDTH))
    device = torch.device("cpu")
    kv_bytes_per_token = 0
    wants_dense_kv = True
    numerics = "exact"

    def __init__(self, hook: Callable[[Plan, torch.Tensor], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.by_token = torch.randn(WIDTH, WIDTH, generator=generator)
        self.by_position = torch.randn(self.context_length, WIDTH, generator=generator)
        self.hook = hook
        self.num_kv_tokens = 0
        self.plans: list[Plan] = []

    def allocate_kv(self, num_pages: int, page_size: int) -> None:
        self.num_kv_tokens = num_pages * page_size

    def row(self, tokens: Sequence[int]) -> torch.Tensor:
        return 2 * (self.by_token[tokens[-1]] + self.by_position[len(tokens) - 1])

    def forward(self, plan: Plan) -> torch.Tensor:
        self.plans.append(plan)
        if plan.scored:
            self.show_scored(plan)
        rows = [self.row(tokens) for tokens in histories(plan)]
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        if self.hook is not None:
            self.hook(plan, logits)
        self.was_finite = logits.isfinite().all(-1).tolist()
        self.left_out = logits.clone()
        return logits[[*plan.places()]]

    def late_logits(self, rows: Sequence[int]) -> torch.Tensor:
        return self.left_out[list(rows)]

    def spoiled(self, plan: Plan) -> list[Request]:
        """Those with a drafted row that is not finite: what else is not is the head's doing."""
        rows = (one for one, tokens in plan.decode_tokens() for _ in tokens)
        drafted = {id(one) for one, draft in zip(plan.decode, plan.drafts, strict=False) if draft}
        found = {id(one): one for one, finite in zip(rows, self.was_finite, strict=False) if not finite}
        return [one for key, one in found.items() if key in drafted]

    def show_scored(self, plan: Plan) -> None:
        places = [
            (token, len(one.tokens) - 1 + index)
            for one, tokens in plan.decode_tokens()
            for index, token in enumerate(tokens)
        ]
        spans = [(chunk.request, chunk.start, chunk.stop) for chunk in plan.chunks]
        places += [(one.tokens[position], position) for one, start, stop in spans for position in range(start, stop)]
        show_scored(
            plan, torch.tensor(places), lambda some: 2 * (self.by_token[some[:, 0]] + self.by_position[some[:, 1]])
        )

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What a greedy answer of `count` tokens is, END included."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.row(tokens)[: WIDTH - PADDING].argmax()))
        return tokens[len(prompt) :]


class Drafting(Speculator):
    """Drafts what it is told, however badly that does. In every second row it promises that all of
    it is forced.
    """

    def __init__(self, draft: Draft) -> None:
        super().__init__()
        self._draft = draft
        self.accepted: list[int] = []

    def draft(self, plan: Plan) -> list[Sequence[int]]:
        return [() if one.is_companion else self._draft(one) for one in plan.decode]

    def _is_forced(self, row: int) -> bool:
        return row % 2 == 0

    def learn(self, plan: Plan, accepted: Sequence[int]) -> None:
        self.accepted += accepted


def histories(plan: Plan) -> list[list[int]]:
    """The tokens that each row of logits of a step is made of, drafted ones too."""
    decoded = [
        [*one.tokens[:-1], *tokens[: index + 1]] for one, tokens in plan.decode_tokens() for index in range(len(tokens))
    ]
    return decoded + [one.tokens for one in plan.sampled[len(plan.decode) :]]


def config(**changes: object) -> EmbeddedConfig:
    settings: dict[str, object] = {"model_path": "unused", "device": "cpu", "max_num_seqs": 4, "max_queue": 4}
    settings |= {"max_mixed_chunk": 64, "speculative_config": {"method": "none"}}  # neither depends on times
    return EmbeddedConfig(**(settings | changes))  # type: ignore[arg-type]


def stepper(model: ScriptedModel, **changes: object) -> Stepper:
    settings = config(**changes)
    blocks = settings.max_num_seqs * -(-model.context_length // settings.kv_block_size)
    return make_stepper(settings, model, blocks)  # type: ignore[arg-type]


def request(model: ScriptedModel, name: str, prompt: Sequence[int], params: SamplingParams) -> Request:
    return admit(EngineRequest(name, prompt, params), 0, model, model.context_length)  # type: ignore[arg-type]


def run_alone(model: ScriptedModel, prompt: Sequence[int], params: SamplingParams) -> TokenDelta:
    """The whole answer to one request, as one delta, decoded with nothing beside it."""
    return run_together(model, {"alone": (prompt, params)})["alone"]


def run_together(
    model: ScriptedModel, wanted: dict[str, tuple[Sequence[int], SamplingParams]]
) -> dict[str, TokenDelta]:
    """The whole answers to several requests, decoded at once."""
    driver = stepper(model, max_num_seqs=max(4, len(wanted)))
    for name, (prompt, params) in wanted.items():
        driver.add(request(model, name, prompt, params))
    answers = {name: TokenDelta() for name in wanted}
    while not driver.scheduler.is_idle:
        for output in driver.step():
            answer = answers[output.request_id]
            if output.token_id is not None:
                answer.token_ids.append(output.token_id)
            if output.logprobs is not None:
                answer.logprobs = [*(answer.logprobs or ()), output.logprobs]
            answer.finish_reason, answer.stop_reason, answer.error = (
                output.finish_reason,
                output.stop_reason,
                output.error,
            )
        driver.scheduler.check_integrity()
    return answers


async def collect(
    engine: EmbeddedEngine, name: str, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], TokenDelta]:
    """All tokens of one stream, and its last delta."""
    tokens: list[int] = []
    delta = TokenDelta()
    async for delta in engine.generate(EngineRequest(name, prompt, params)):
        tokens += delta.token_ids
    return tokens, delta
