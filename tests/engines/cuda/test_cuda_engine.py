"""Exact numerics on a GPU: how a request ran changes no bit, and answers are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_runs import greedy_answers, last_logits
from random_checkpoints import EVERY_TYPE

from adapters.chain import ProcessorChain
from adapters.contract import Allow, Ban, Bias, Context, Edit, Force, Reads, Scale, Stage, SteeringProcessor
from adapters.vocabulary import Vocabulary
from worker.engines.embedded import EmbeddedConfig, Engine
from worker.engines.embedded.attention import AttentionSizes
from worker.engines.embedded.attention.triton_backend import TritonAttention
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.cuda_graphs import ROWS
from worker.engines.embedded.plan import Chunk, Edits, Plan, Request
from worker.engines.embedded.sampling.sampler import Sampler
from worker.engines.embedded.step import plan_edits
from worker.errors import StartupError
from worker.sampling import SamplingParams

PROMPTS = [[(7 * row + 3 * at) % 290 + 5 for at in range(length)] for row, length in enumerate((1, 5, 33, 64, 130))]
CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 0.8, "min_p": 0.05, "seed": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.7, "seed": 6},
]
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "PAGE_TOKENS", 32)  # so that prompts take several, and preempt each other


def loaded(path: Path, dtype: str, **changes: Any) -> HfModel:
    model = load_model(
        EmbeddedConfig(model_path=path, **{"device": "cuda", "dtype": dtype, "numerics": "exact"} | changes)
    )
    model.allocate_kv(24, 32)
    return model


def run(path: Path, dtype: str, **changes: Any) -> list[Any]:
    """Answers with all their log probabilities, once with an empty cache and once more."""
    engine = Engine(str(path), device="cuda", dtype=dtype, **{"numerics": "exact"} | changes)
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=3, **controls)
        for controls in CONTROLS
    ]
    results = [engine.generate(PROMPTS, params) for _ in range(2)]
    assert [each.token_ids for each in results[0]] == [each.token_ids for each in results[1]]
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in results[0] + results[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", EVERY_TYPE)
def test_how_it_ran_changes_no_bit(arch: str, dtype: str, every_checkpoint: dict[str, Path]) -> None:
    """Alone, in a batch, in chunks, preempted, drafted for, from the prefix cache."""
    path = every_checkpoint[arch]
    alone = run(path, dtype, max_num_seqs=1)
    assert run(path, dtype, max_num_seqs=5, max_num_batched_tokens=7) == alone
    assert run(path, dtype, max_num_seqs=5, context_length=192, kv_blocks=13) == alone
    assert (
        run(path, dtype, max_num_seqs=5, speculative_config='{"method": "ngram", "num_speculative_tokens": 4}') == alone
    )
    model = loaded(path, dtype)
    assert torch.equal(last_logits(model, (0, 7, 40, 41, 90))[-1:], last_logits(model))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gemma3_text"])
def test_a_graph_has_the_bits_of_its_kernels(arch: str, dtype: str, every_checkpoint: dict[str, Path]) -> None:
    model = loaded(every_checkpoint[arch], dtype)
    tokens = torch.randint(5, 290, (23, 40), generator=torch.Generator().manual_seed(2)).tolist()
    for count in (1, 2, 3, 9, 17, 23):
        rows = tuple(
            Request("", 0, SamplingParams(), list(one), len(one), 999, frozenset(), 0, pages=[row, 23])
            for row, one in enumerate(tokens[:count])
        )
        for row, request in enumerate(rows):
            request.tokens = request.tokens[: 20 + row % 10]
        plan = Plan(rows, (), rows)
        assert model._graphs is not None
        by_graph = model.forward(plan).clone()
        assert model._graphs._graphs, "no graph was captured"
        graphs, model._graphs = model._graphs, None
        assert torch.equal(model.forward(plan), by_graph), count
        model._graphs = graphs
    assert max(key[0] for key in graphs._graphs) in ROWS


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("arch", EVERY_TYPE)
def test_cuda_answers_as_the_cpu_does(arch: str, kernels: str, every_checkpoint: dict[str, Path]) -> None:
    answers = []
    for changes in ({"device": "cuda", "kernels": kernels}, {"device": "cpu"}):
        model = loaded(every_checkpoint[arch], "float32", numerics="auto", **changes)
        answers.append(greedy_answers(model, PROMPTS, 16, budget=64, together=3))
    assert answers[0] == answers[1]


def test_sampled_tokens_are_those_of_the_cpu(every_checkpoint: dict[str, Path]) -> None:
    """Of the same logits: with each control, those that are searched on the device among them."""
    generator = torch.Generator().manual_seed(9)
    for width in (1000, 32_000, 151_936):
        logits = torch.randn(12, width, generator=generator) * 3
        logits[3] = logits[3].round()  # ties
        logits[4, 5:9] = 40.0
        never = (17, width - 1)
        for temperature in (0.0, 0.3, 1.0, 3.0):
            for controls in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 300, "top_p": 0.5}):
                params = SamplingParams(temperature=temperature, seed=1, **controls)
                requests = tuple(
                    Request(str(row), row, params, [1, 2, 3], 3, 99, frozenset(), 11 + row)
                    for row in range(len(logits))
                )
                plan = Plan(requests, (), requests)
                found = [
                    Sampler(width, never).sample(logits.clone().to(device), Edits(), plan).token_ids
                    for device in ("cpu", "cuda")
                ]
                assert found[0] == found[1], (width, temperature, controls)


class OneEdit(SteeringProcessor):
    name, stage, reads = "one_edit", Stage.MASK, Reads.NOTHING

    def __init__(self, edit: Edit) -> None:
        self.own = edit
        stages = {Bias: Stage.BIAS, Scale: Stage.PENALTY, Force: Stage.FORCE}
        self.stage = stages.get(type(edit), Stage.MASK)  # type: ignore[misc]

    def edit(self) -> Edit:
        return self.own


def edited_requests(width: int, params: SamplingParams) -> tuple[Request, ...]:
    """New ones with all kinds of edits, one of which cannot be met."""
    some = list(range(3, width, 7))
    chains: list[list[Edit]] = [
        [Bias.of(some, [2.5] * len(some))],
        [Scale.of(some, [1.3] * len(some)), Bias.of([5, 9], [-1.0, 4.0])],
        [Ban.of(some), Allow.of(list(range(2, width, 2)), width)],
        [Force(11)],
        [Force(17)],
        [Allow.of([17], width)],
    ]
    requests = tuple(
        Request(str(row), row, params, [1, 2, 3], 3, 99, frozenset(), 11 + row) for row in range(len(chains) + 1)
    )
    for one, edits in zip(requests, chains, strict=False):
        one.chain = ProcessorChain([OneEdit(edit) for edit in edits], Context(Vocabulary(width), frozenset({0})))
        one.chain.start(one.tokens)
    return requests


def test_edits_on_the_device_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(9)
    for width in (1000, 50_257):
        logits = torch.randn(7, width, generator=generator) * 3
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=1.0, seed=1),
            SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=1),
        ):
            found = []
            for device in ("cpu", "cuda"):
                requests = edited_requests(width, params)
                plan = Plan(requests, (), requests)
                found.append(Sampler(width, (17,)).sample(logits.clone().to(device), plan_edits(plan), plan))
            assert found[0].token_ids == found[1].token_ids
            assert found[0].errors == found[1].errors
            assert found[1].errors.keys() == {4, 5}


def test_rows_that_are_not_finite_are_errors_on_the_device() -> None:
    logits = torch.randn(4, 500)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1)
        requests = tuple(Request(str(row), row, params, [1], 1, 99, frozenset(), row) for row in range(4))
        plan = Plan(requests, (), requests)
        found = [Sampler(500, ()).sample(logits.clone().to(device), Edits(), plan) for device in ("cpu", "cuda")]
        assert found[0].errors == found[1].errors
        assert set(found[1].errors) == {1, 2}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_forward_pass_waits_for_nothing(every_checkpoint: dict[str, Path]) -> None:
    """Neither a decode step, which is a graph, nor a prompt: each wait would be an error here."""
    model = loaded(every_checkpoint["llama"], "bfloat16")
    request = Request("", 0, SamplingParams(), [5] * 40, 40, 999, frozenset(), 0, pages=[3, 4])
    decode = Plan((request,), (), (request,))
    prompt = Plan((), (Chunk(request, 0, 40),), (request,))
    for plan in (prompt, decode):
        model.forward(plan)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.forward(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_what_is_too_wide() -> None:
    sizes = AttentionSizes(4, 2, 256, None, 32, torch.float32, torch.device("cuda"))
    assert not TritonAttention.supports(sizes)


def test_exact_is_refused_where_torch_computes(every_checkpoint: dict[str, Path]) -> None:
    for changes in ({"kernels": "torch"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int16"}):
        with pytest.raises(StartupError, match="--numerics exact: on cuda"):
            loaded(every_checkpoint["llama"], "float32", **changes)
