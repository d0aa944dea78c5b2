"""The int8 KV cache: what a row is, and that how a request runs changes nothing with it either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from effort import grid
from engine_doubles import Drafting
from hypothesis import given
from hypothesis import strategies as st
from model_runs import last_logits
from random_checkpoints import EVERY_TYPE
from speculation_runs import PLAIN, outcome

from worker.__main__ import main
from worker.arguments import parse_arguments
from worker.build import embedded_config
from worker.engines import EngineRequest, KeepKv, ReadKv, TokenDelta
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine, Engine, Request, native
from worker.engines.embedded.admission import admit
from worker.engines.embedded.kv_cache import Int8Rows, KvStore
from worker.engines.embedded.kv_cache import budget as kv_budget
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.plan import PageCopy
from worker.engines.embedded.speculation import SpeculativeConfig, Speculator
from worker.engines.embedded.step import make_stepper
from worker.errors import InvalidRequest, StartupError
from worker.sampling import SamplingParams

DTYPES = (torch.float32, torch.bfloat16)

# Rows


@given(
    head_dim=st.integers(1, 300),
    exponent=st.integers(-100, 100),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_element_is_off_by_half_a_scale_at_most(head_dim: int, exponent: int, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(seed)).mul(2.0**exponent).to(dtype)
    int8_rows = Int8Rows(head_dim, dtype)
    rows = int8_rows.quantise(x)
    assert rows.shape == (5, 3, int8_rows.num_bytes)
    assert head_dim + 4 <= int8_rows.num_bytes < head_dim + 12
    codes, scale = rows[..., :head_dim], rows[..., -4:].view(torch.float32)
    assert (codes.int().abs().amax(-1) == 127).all()
    error = ((codes * scale.double()) - x.double()).abs()
    assert (error <= scale.double() * (0.5 + 2.0**-16)).all()
    assert torch.equal(int8_rows.dequantise(rows), (codes * scale).to(dtype))
    assert not rows[..., head_dim:-4].any()


@given(head_dim=st.integers(1, 70), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1))
def test_a_row_depends_on_itself_alone(head_dim: int, dtype: torch.dtype, seed: int) -> None:
    """And is read in place, of any slice of the store."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, head_dim, generator=generator).to(dtype)
    x[1] *= 1000
    x[2, 0] = torch.nan
    int8_rows = Int8Rows(head_dim, dtype)
    rows = int8_rows.quantise(x)
    for one in range(4):
        for head in range(6):
            assert torch.equal(int8_rows.quantise(x[one, head]), rows[one, head])
    assert torch.equal(int8_rows.quantise(x.transpose(0, 1)), rows.transpose(0, 1))
    whole = int8_rows.dequantise(rows)
    torch.testing.assert_close(int8_rows.dequantise(rows[1:4:2, 2:5]), whole[1:4:2, 2:5], rtol=0, atol=0)
    assert whole[2, 0].isnan().all()
    assert whole.isnan().sum() == head_dim


def test_ties_go_to_the_even_code() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    assert Int8Rows(7, torch.float32).quantise(x)[:7].tolist() == [127, 0, 2, 2, 0, -2, 126]


@pytest.mark.parametrize("size", [0.0, 2.0**-149, 2.0**-126])
def test_what_has_no_scale_is_0(size: float) -> None:
    int8_rows = Int8Rows(6, torch.float32)
    rows = int8_rows.quantise(torch.full((2, 6), size))
    assert not rows.any()
    assert not int8_rows.dequantise(rows).any()


def test_rows_are_copied_and_zeroed_whole() -> None:
    int8_rows = Int8Rows(6, torch.float32)
    store = KvStore(*([torch.full((3, 2, 4, int8_rows.num_bytes), -1, dtype=torch.int8)] for _ in range(2)), int8_rows)  # type: ignore[arg-type, call-arg]
    assert int8_rows.dequantise(store.keys[0]).isnan().all()  # what memory may hold before it is zeroed
    written = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    store.zero([0, 2])
    store.write(0, (torch.zeros(4, dtype=torch.int64), torch.arange(4)), written, -written)
    store.copy([PageCopy(source=0, target=1, num_tokens=3)])
    expected = int8_rows.dequantise(int8_rows.quantise(written)).transpose(0, 1)
    keys, values = int8_rows.dequantise(store.keys[0]), int8_rows.dequantise(store.values[0])
    assert torch.equal(keys[0], expected)
    assert torch.equal(values[0], -expected)
    assert torch.equal(keys[1, :, :3], expected[:, :3])
    assert not keys[1, :, 3:].any()
    assert not keys[2].any()


# Models


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "PAGE_TOKENS", 32)


def load(path: Path, **given: Any) -> HfModel:
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "int8", **given}
    model = load_model(EmbeddedConfig(model_path=path, **settings))
    model.allocate_kv(8, 32)
    return model


@pytest.mark.parametrize(("arch", "dtype"), grid(product(EVERY_TYPE, DTYPES), fast=3), ids=str)
@pytest.mark.usefixtures("one_thread")
def test_every_path_has_the_same_logits(arch: str, dtype: torch.dtype, every_checkpoint: dict[str, Path]) -> None:
    """`test_embedded_numerics` cuts and mixes batches. AMX sums bfloat16 in an order of its own."""
    expected: dict[bool, torch.Tensor] = {}
    name = str(dtype).removeprefix("torch.")
    for path in native.PATHS:
        if native.unavailable(dtype, path) is None:
            model = load(every_checkpoint[arch], kernels=f"native-{path}", dtype=name, numerics="exact")
            assert model.numerics == "exact"
            assert model.made_by.endswith(" kernels, int8 KV cache")
            found = last_logits(model)
            as_others = expected.setdefault(native.sums_as_others(dtype, path), found)
            assert torch.equal(found, as_others)
            assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], found)
    for logits in expected.values():
        assert (logits - expected[True]).norm() / expected[True].norm() < 0.05


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=pytest.mark.native), "torch"])
@pytest.mark.parametrize("arch", EVERY_TYPE)
@pytest.mark.usefixtures("one_thread")
def test_predictions_are_near_those_of_elements(arch: str, kernels: str, every_checkpoint: dict[str, Path]) -> None:
    """Random weights, whose attention is all or nothing, make some ten times of each error."""
    truth = last_logits(load(every_checkpoint[arch], kernels=kernels, kv_cache_dtype="auto"))
    found = last_logits(load(every_checkpoint[arch], kernels=kernels))
    assert not torch.equal(found, truth)
    assert (found - truth).norm() / truth.norm() < 0.2


def test_a_token_takes_a_byte_an_element_and_the_scales(checkpoints: dict[str, Path]) -> None:
    sizes = {each: load(checkpoints["llama"], kv_cache_dtype=each) for each in ("auto", "int8")}
    assert sizes["auto"].kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
    assert sizes["int8"].kv_bytes_per_token == 2 * 2 * 2 * 24  # 16 codes and a scale, in whole words of 8 bytes
    for model in sizes.values():
        assert sum(each.nbytes for each in model.kv_store.tensors) == 8 * 32 * model.kv_bytes_per_token


def test_the_log_at_start_says_so(checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        load(checkpoints["llama"])
        load(checkpoints["llama"], kv_cache_dtype="auto", dtype="bfloat16")
    lines = [line for line in caplog.messages if line.startswith("numerics: ")]
    assert [line.rpartition("; ")[2] for line in lines] == ["KV cache: int8", "KV cache: bfloat16"]


def test_the_variable_reaches_the_engine() -> None:
    arguments = parse_arguments(["--model-path", "x"], {"WORKER_KV_CACHE_DTYPE": "int8"})
    assert embedded_config(arguments).kv_cache_dtype == "int8"


def test_a_dtype_that_is_unknown() -> None:
    with pytest.raises(StartupError, match="--kv-cache-dtype must be one of auto, int8, got 'fp8'"):
        EmbeddedConfig(model_path="", kv_cache_dtype="fp8").check()


# Ways to run


LENGTHS = (1, 7, 33, 64, 130)
NEW_TOKENS = 20
PROMPTS = [[(11 * which + 5 * at * at) % 290 + 3 for at in range(length)] for which, length in enumerate(LENGTHS)]


def answers(
    model: HfModel,
    *,
    budget: int = 4096,
    num_seqs: int = 8,
    num_pages: int = 32,
    rounds: int = 1,
    after_step: Callable[[Any], None] = lambda scheduler: None,
) -> list[list[int]]:
    """Seeded answers to prompts of several lengths, of the last of some rounds."""
    config = EmbeddedConfig(model_path="", max_num_seqs=num_seqs, max_num_batched_tokens=max(budget, num_seqs))
    driver = make_stepper(config, model, num_kv_blocks=num_pages * 2)
    requests: list[Request] = []
    for _ in range(rounds):
        requests = []
        for which, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=which)
            requests.append(admit(EngineRequest(str(which), prompt, params), which, model, 512))
            driver.add(requests[-1])
        while not driver.scheduler.is_idle:
            assert all(output.error is None for output in driver.step())
            driver.scheduler.check_integrity()
            after_step(driver.scheduler)
    return [one.tokens[one.prompt_length :] for one in requests]


def preempt_all(scheduler: Any) -> None:
    for one in (*scheduler.queues.decoding, *scheduler.queues.prefilling):
        scheduler.queues.preempt(one)
    if scheduler.queues.num_preemptions % 2:
        scheduler.cache.clear()


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request: pytest.FixtureRequest, every_checkpoint: dict[str, Path]) -> HfModel:
    config = EmbeddedConfig(
        model_path=every_checkpoint[request.param],
        device="cpu",
        dtype="float32",
        numerics="exact",
        kv_cache_dtype="int8",
    )
    return load_model(config)


WAYS: dict[str, dict[str, Any]] = {
    "in chunks": {"budget": 9},
    "one by one": {"num_seqs": 1},
    "preempted at every step": {"after_step": preempt_all},
    "in a store that is too small": {"num_pages": 16},
    "with cached prefixes": {"rounds": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("small_pages", "one_thread")
def test_answers_are_those_of_one_batch(model: HfModel, way: str) -> None:
    assert answers(model, **WAYS[way]) == answers(model)


@pytest.mark.usefixtures("small_pages", "one_thread")
def test_drafts_change_nothing(checkpoints: dict[str, Path]) -> None:
    """Rejected drafts leave their rows behind, and those that come are written over them."""
    engine = Engine(
        checkpoints["llama"],
        device="cpu",
        dtype="float32",
        numerics="exact",
        kv_cache_dtype="int8",
        context_length=256,
        max_num_seqs=4,
    )
    assert engine.info.computed_by.partition(" kernels, ")[2].startswith("int8 KV cache")
    params = [SamplingParams(max_tokens=60, seed=7, temperature=heat, logprobs=0) for heat in (0.0, 0.8)] * 2
    prompts = [PROMPTS[1], PROMPTS[1], PROMPTS[2], PROMPTS[2]]
    expected = outcome(engine, Speculator(SpeculativeConfig.parse(PLAIN)), prompts, params)
    proposed = 0

    def often_right(one: Request) -> list[int]:
        """The next tokens of the plain answer, and a wrong one behind them."""
        nonlocal proposed
        count = len(one.tokens) - one.prompt_length
        right = expected[one.number % len(expected)][0][count:][: count % 5]
        draft = [*right, (one.tokens[-1] + 1) % engine.info.vocab_size]
        proposed += len(draft)
        return draft

    drafting = Drafting(often_right)
    assert outcome(engine, drafting, prompts, params) == expected
    assert 0 < sum(drafting.accepted) < proposed


# Disaggregated


@pytest_asyncio.fixture
async def start(checkpoints: dict[str, Path]) -> AsyncIterator[Callable[..., Any]]:
    """Starts engines of a role and KV dtype."""
    started: list[EmbeddedEngine] = []

    async def make(role: str, kv_cache_dtype: str, dtype: str = "float32") -> EmbeddedEngine:
        settings = {"device": "cpu", "numerics": "exact", "role": role, "kv_cache_dtype": kv_cache_dtype}
        started.append(EmbeddedEngine(EmbeddedConfig(model_path=checkpoints["llama"], dtype=dtype, **settings)))  # type: ignore[arg-type]
        await started[-1].start()
        return started[-1]

    yield make
    for engine in reversed(started):
        await engine.stop()


async def whole(engine: EmbeddedEngine, *arguments: Any, **named: Any) -> TokenDelta:
    found = TokenDelta()
    async for delta in engine.generate(EngineRequest(*arguments, **named)):
        found = replace(delta, token_ids=found.token_ids + delta.token_ids)
    return found


async def test_prefill_and_decode_make_the_aggregated_answer(start: Callable[..., Any]) -> None:
    prompt = PROMPTS[-1] + PROMPTS[-2]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=3)
    expected = await whole(await start("aggregated", "int8"), "one", prompt, params)
    prefill, decode = await start("prefill", "int8"), await start("decode", "int8")
    leased = await whole(prefill, "one", prompt, SamplingParams(), kv=KeepKv())
    assert leased.kv is not None
    assert leased.kv["layout"]["dtype"] == "int8 of float32"
    found = await whole(decode, "one", prompt, params, kv=ReadKv(leased.kv))
    assert decode.transfers()["received"] == 1
    assert decode.transfers()["bytes"] == (len(prompt) - 1) * 2 * 2 * 2 * 24
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("prefills", "decodes", "names"),
    [
        (("int8", "float32"), ("auto", "float32"), ("'int8 of float32'", "'float32'")),
        (("auto", "float32"), ("int8", "float32"), ("'float32'", "'int8 of float32'")),
        (("int8", "bfloat16"), ("int8", "float32"), ("'int8 of bfloat16'", "'int8 of float32'")),
    ],
)
async def test_kv_of_another_dtype_is_refused(
    start: Callable[..., Any], prefills: tuple[str, str], decodes: tuple[str, str], names: tuple[str, str]
) -> None:
    prefill, decode = await start("prefill", *prefills), await start("decode", *decodes)
    leased = await whole(prefill, "one", PROMPTS[-1], SamplingParams(), kv=KeepKv())
    assert leased.kv is not None
    with pytest.raises(InvalidRequest) as refused:
        await whole(decode, "one", PROMPTS[-1], SamplingParams(max_tokens=2), kv=ReadKv(leased.kv))
    said = f"dtype is {names[0]} on the prefill worker and {names[1]} on this decode worker"
    assert said in str(refused.value)


# The report


def test_a_report_of_the_kv_cache(checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = str(checkpoints["llama"])
    assert main(["quantize", source, "--kv-cache-dtype", "int8", "--report"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert " unquantised, " in first
    assert " int8 KV cache (" in first
    assert float(second.split()[4].rstrip("%")) > 90
    for arguments, said in (
        (["--report"], "give --to; a report is also of --kv-cache-dtype int8 alone"),
        (["--kv-cache-dtype", "int8", "--output", "x"], "give --to"),
        (["--to", "int8", "--kv-cache-dtype", "int8", "--output", "x"], "--kv-cache-dtype is of a report"),
    ):
        with pytest.raises(SystemExit):
            main(["quantize", source, *arguments])
        assert said in capsys.readouterr().err
