"""With exact numerics a request's logits are the same, bit by bit, whatever runs beside it and
however it is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from effort import examples, grid
from engine_doubles import EveryToken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from random_checkpoints import EVERY_TYPE

from worker.engines import EngineRequest
from worker.engines.embedded import native
from worker.engines.embedded.admission import admit
from worker.engines.embedded.attention import AttentionBackend, NativeAttention, TorchAttention
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import HfModel, load_model
from worker.engines.embedded.model.gemm import GemmBackend, NativeGemm, OneDnnGemm
from worker.engines.embedded.model.kernels import TORCH
from worker.engines.embedded.model.linear import Linear
from worker.engines.embedded.model.numerics import Numerics
from worker.engines.embedded.model.tiling import GemmTiling, LayerShape
from worker.engines.embedded.plan import Chunk, PageCopy, Plan, Request
from worker.sampling import SamplingParams

PAGE = 32
SLOTS = 1024
LENGTHS = (1, 3, 31, 33, 45, 70, 140)
"""Of the sequences that are computed again and again; in tokens."""

PAGE_SIZES = (7, 24, 32, 48, 64, 100, 256)
THREADS = (1, 2, 3, 5)

pytestmark = pytest.mark.usefixtures("one_thread")


class Loaded:
    """A model and the logits of every token of some sequences, each computed alone and in one
    piece, in pages of `PAGE` tokens and by the threads of the moment.
    """

    def __init__(self, path: Path, dtype: str, kernels: str = "auto", kv_cache_dtype: str = "auto") -> None:
        config = EmbeddedConfig(
            model_path=path,
            device="cpu",
            dtype=dtype,
            numerics="exact",
            kernels=kernels,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.model: HfModel = load_model(config)
        self.allocate(PAGE)
        generator = torch.Generator().manual_seed(3)
        width = self.model.vocab_size
        self.tokens = [torch.randint(width, (length,), generator=generator).tolist() for length in LENGTHS]
        self.tokens[-2][:PAGE] = self.tokens[-3][:PAGE]
        self.expected = [self.alone(tokens) for tokens in self.tokens]

    def allocate(self, page_size: int) -> None:
        """From now on in pages of that size; numerics are chosen again, for the threads of now."""
        self.page_size = page_size
        self.num_pages = SLOTS // page_size
        self.model.allocate_kv(self.num_pages, page_size)
        assert self.model.numerics == "exact"

    def alone(self, tokens: list[int]) -> torch.Tensor:
        request = make_request(tokens, list(range(-(-len(tokens) // self.page_size))))
        tap = request.tap = EveryToken()
        self.model.forward(step(chunks=[Chunk(request, 0, len(tokens))]))
        return torch.cat(tap.seen)


def make_request(tokens: list[int], pages: list[int]) -> Request:
    return Request("", 0, SamplingParams(), list(tokens), len(tokens), 999, frozenset(), 0, pages=pages)


def step(
    decode: list[Request] | None = None, chunks: list[Chunk] | None = None, copies: tuple[PageCopy, ...] = ()
) -> Plan:
    rows = tuple(decode or ())
    pieces = tuple(chunks or ())
    return Plan(rows, pieces, rows + tuple(chunk.request for chunk in pieces if chunk.is_last), copies)


@pytest.fixture(scope="module")
def loaded() -> dict[tuple[object, ...], Loaded]:
    return {}


def check_run(loaded: Loaded, data: st.DataObject) -> None:
    """Compute all sequences again, cut and mixed as `data` says, and compare each row of logits
    on the way.
    """
    page_size = loaded.page_size
    free = data.draw(st.permutations(range(loaded.num_pages)))
    rows = data.draw(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=5, unique=True))
    if sum(-(-LENGTHS[which] // page_size) for which in rows) > len(free):
        rows = rows[:1]  # of long pages there are few
    requests: dict[int, Request] = {}
    copies: tuple[PageCopy, ...] = ()
    for which in rows:
        count = -(-LENGTHS[which] // page_size)
        requests[which] = make_request([], [free.pop() for _ in range(count)])
    done = dict.fromkeys(rows, 0)
    while any(done[which] < LENGTHS[which] for which in rows):
        decode: list[int] = []
        chunks: dict[int, int] = {}
        for which in rows:
            left = LENGTHS[which] - done[which]
            if left and data.draw(st.integers(0, 3)):
                if data.draw(st.integers(0, 2)):
                    decode.append(which)
                else:
                    chunks[which] = data.draw(st.integers(min(left, 7), left))
        if not decode and not chunks:
            continue
        for which in decode:
            requests[which].tokens = loaded.tokens[which][: done[which] + 1]
        for which, count in chunks.items():
            requests[which].tokens = loaded.tokens[which][: done[which] + count]
        plan = step(
            [requests[which] for which in decode],
            [Chunk(requests[which], done[which], done[which] + count) for which, count in chunks.items()],
            copies,
        )
        copies = ()
        logits = loaded.model.forward(plan)
        for row, which in enumerate([*decode, *chunks]):
            done[which] += chunks.get(which, 1)
            expected = loaded.expected[which][done[which] - 1]
            assert torch.equal(logits[row], expected), f"sequence {which}, token {done[which] - 1}"
        for which in rows:
            if done[which] > 1 and free and data.draw(st.integers(0, 9)) == 0:
                if data.draw(st.booleans()):
                    done[which] = 0  # preempted: everything is computed again
                else:  # as after a preemption that found its blocks in the cache: the tail is copied elsewhere
                    last = (done[which] - 1) // page_size
                    held = requests[which].pages
                    kept = done[which] - last * page_size
                    copies = (*copies, PageCopy(held[last], free[-1], kept))
                    held[last] = free.pop()


def same_bits(
    arch: str,
    dtype: str,
    kernels: str,
    kv_cache_dtype: str,
    threads: int,
    data: st.DataObject,
    every_checkpoint: dict[str, Path],
    loaded: dict[tuple[object, ...], Loaded],
) -> None:
    torch.set_num_threads(threads)
    try:
        case = (arch, dtype, kernels, kv_cache_dtype, threads)
        if case not in loaded:
            loaded[case] = Loaded(every_checkpoint[arch], dtype, kernels, kv_cache_dtype)
        if kernels == "native":  # whose bits depend on neither
            torch.set_num_threads(data.draw(st.sampled_from(THREADS)))
            loaded[case].allocate(data.draw(st.sampled_from(PAGE_SIZES)))
        check_run(loaded[case], data)
    finally:
        torch.set_num_threads(1)


DTYPES = (("float32", torch.float32), ("bfloat16", torch.bfloat16))
NATIVE = [(name, "native") for name, dtype in DTYPES if native.unavailable(dtype) is None]
COMPUTED = [("float32", "torch"), ("bfloat16", "torch"), *NATIVE]
KINDS = [(arch, *computed, "auto", 1) for arch in EVERY_TYPE for computed in COMPUTED]
WITH_MORE_THREADS = [
    *((arch, "bfloat16", "torch", 2) for arch in ("llama", "qwen3_moe")),
    *((arch, "float32", "torch", threads) for arch, threads in (("gemma3_text", 3), ("qwen3_moe", 5))),
]
WITH_MORE_THREADS = [(*case[:3], "auto", case[3]) for case in WITH_MORE_THREADS]  # type: ignore[misc]
"""Threads of torch's kernels, whose bits depend on their number."""
IN_CODES = [
    *((arch, *computed, "int8", 1) for arch in EVERY_TYPE for computed in NATIVE),
    *((arch, *computed, "int8", threads) for arch, threads in (("llama", 2), ("gemma2", 1)) for computed in COMPUTED),
    *((arch, *computed, "int16", 1) for arch in EVERY_TYPE for computed in NATIVE if "float32" in computed),
    *((arch, "float32", "torch", "int16", threads) for arch, threads in (("llama", 2), ("gemma2", 1))),
]
"""With a quantised KV cache; gemma2 has windows and soft-capped scores."""


def bits_test(max_examples: int) -> Callable[..., None]:
    checked = settings(max_examples=examples(max_examples), deadline=None, suppress_health_check=list(HealthCheck))
    test: Callable[..., None] = checked(given(data=st.data())(same_bits))
    cases = sorted({*KINDS, *WITH_MORE_THREADS, *IN_CODES})
    return pytest.mark.parametrize(("arch", "dtype", "kernels", "kv_cache_dtype", "threads"), grid(cases, fast=4))(test)


test_logits_are_the_same_bits = bits_test(6)
test_logits_are_the_same_bits_in_many_runs = pytest.mark.campaign(pytest.mark.timeout(1200)(bits_test(100)))


def test_rows_that_share_a_prefix_have_the_bits_of_rows_alone(checkpoints: dict[str, Path]) -> None:
    one = Loaded(checkpoints["llama"], "bfloat16")
    first, second = one.tokens[-3], one.tokens[-2]
    requests = [make_request(first, [5, 6, 7]), make_request(second, [5, 8, 9, 10])]
    one.model.forward(step(chunks=[Chunk(requests[0], 0, len(first) - 1)]))
    one.model.forward(step(chunks=[Chunk(requests[1], PAGE, len(second) - 1)]))
    logits = one.model.forward(step(decode=requests))
    assert torch.equal(logits[0], one.expected[-3][-1])
    assert torch.equal(logits[1], one.expected[-2][-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "tiling", [GemmTiling(1, 4), GemmTiling(4, 8, (24,)), GemmTiling(2, 4, (24, 12)), GemmTiling(3)]
)
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_tiling_changes_nothing_but_the_shape(dtype: torch.dtype, tiling: GemmTiling, is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=generator).to(dtype)
    bias = torch.randn(24, generator=generator).to(dtype)
    layer = Linear(weight, bias, activation="silu")
    if is_packed:
        layer.pack(TORCH)
    layer.tiling = tiling
    for rows in (1, 3, 8, 33, 70):
        x = torch.randn(rows, 40, generator=generator).to(dtype)
        other = torch.randn(rows, 24, generator=generator).to(dtype)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        tolerance = {"atol": 0.15, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 1e-4, "rtol": 1e-4}
        for result, expected in (
            (layer(x), exact),
            (layer(x[None])[0], exact),
            (layer.activated(x), torch.nn.functional.silu(exact)),
            (layer.add(x, other), exact + other),
            (layer.mul(x, other), exact * other),
        ):
            torch.testing.assert_close(result.double(), expected, **tolerance)  # type: ignore[arg-type]


def test_the_receipt_says_which_ran(checkpoints: dict[str, Path]) -> None:
    config = EmbeddedConfig(model_path=checkpoints["llama"], device="cpu", dtype="bfloat16", numerics="exact")
    model = load_model(config)
    model.allocate_kv(4, PAGE)
    request = admit(EngineRequest("one", [1, 2], SamplingParams(repetition_penalty=1.5, max_tokens=3)), 0, model, 99)
    assert request.chain is not None
    assert request.chain.receipt.as_json()["numerics"] == "exact"


def test_whose_bits_they_are() -> None:
    def made_by(name: str, gemm: type[GemmBackend], attention: AttentionBackend, threads: int = 2) -> str:
        return Numerics(name, {LayerShape(8, 8, gemm): GemmTiling()}, attention, 48, threads).made_by

    of_torch = f"torch {Version(torch.__version__).public}, {torch.backends.cpu.get_cpu_capability()}"
    assert made_by("fast", OneDnnGemm, NativeAttention()) == "fast"
    assert made_by("exact", NativeGemm, NativeAttention()) == "exact, native kernels"
    assert made_by("exact", OneDnnGemm, NativeAttention()) == f"exact, torch and native kernels, {of_torch}, 2 threads"
    pages = "pages of 48 tokens"
    assert made_by("exact", OneDnnGemm, TorchAttention(), 1) == f"exact, torch kernels, {of_torch}, 1 thread, {pages}"
    both = f"exact, torch and native kernels, {of_torch}, 2 threads, {pages}"
    assert made_by("exact", NativeGemm, TorchAttention()) == both


def test_fast_and_auto(checkpoints: dict[str, Path]) -> None:
    def chosen(numerics: str) -> str:
        model = load_model(
            EmbeddedConfig(model_path=checkpoints["llama"], device="cpu", dtype="bfloat16", numerics=numerics)
        )
        model.allocate_kv(4, PAGE)
        return model.numerics

    assert chosen("fast") == "fast"
    assert chosen("exact") == "exact"
    assert chosen("auto") in ("exact", "fast")
