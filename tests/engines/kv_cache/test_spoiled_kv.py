"""A token that is not finite in the model fails its own request, and no other one, ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from effort import examples
from engine_doubles import Drafting
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from worker.engines.embedded import Engine, Plan, Request
from worker.engines.embedded.blocks import Block
from worker.engines.embedded.kv_cache import BlocksRemoved, BlocksStored, KvCache, budget
from worker.engines.embedded.offline.results import Result
from worker.engines.weights import WeightVersion
from worker.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
BAD = (40, 41)
"""Tokens whose embedding is NaN, and infinite."""


class Damaged:
    """An embedding in which the tokens `BAD` are not finite.

    It is damaged once the model is loaded: a checkpoint that holds such numbers is refused.
    """

    def __init__(self, sound: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._sound = sound

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._sound(ids).clone()
        rows[ids == BAD[0]] = torch.nan
        rows[ids == BAD[1], 3] = torch.inf
        return rows


def without_bad_answers(source: Path, target: Path) -> Path:
    """A copy of a checkpoint that never generates the tokens `BAD`."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = weights.get("lm_head.weight", embedding.clone())
    weights["lm_head.weight"][list(BAD)] = 0
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = (target / "config.json").read_text()
    (target / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return target


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_bad_answers(checkpoints["llama"], tmp_path_factory.mktemp("spoiled") / "llama")


def engine(checkpoint: Path, **changes: object) -> Engine:
    options = {
        "device": "cpu",
        "dtype": "float32",
        "numerics": "exact",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "context_length": 128,
        "kv_block_size": BLOCK,
        "kv_blocks": 160,
        "packed_copy": "off",
    }
    made = Engine(checkpoint, **(options | changes))  # type: ignore[arg-type]
    network = made.session.stepper.model._network  # type: ignore[attr-defined]
    network._embed = Damaged(network._embed)
    return made


@pytest.fixture(scope="module", params=["native", "torch"])
def served(request: pytest.FixtureRequest, checkpoint: Path) -> Engine:
    return small(checkpoint, request.param)


def small(checkpoint: Path, kernels: str) -> Engine:
    """One with pages of two blocks, and too few of them for four long requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "PAGE_TOKENS", 2 * BLOCK)
        return engine(checkpoint, kernels=kernels, context_length=64, kv_blocks=40)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def answer(result: Result) -> tuple[str | None, list[int]]:
    (one,) = result.outputs
    return one.finish_reason, one.token_ids


def cache_of(served: Engine) -> KvCache:
    return served.session.stepper.scheduler.cache


def check_finite(served: Engine) -> None:
    """Every cached block is finite, and has no bad token in it."""
    for block in cache_of(served)._index.blocks.values():
        assert not set(BAD) & set(block.tokens)
        for number in block.pages:
            assert all(bool(tensor.isfinite().all()) for tensor in kv_of(served, block, number))


def check_cached(served: Engine) -> None:
    """The same, and nothing is owned by anybody."""
    check_finite(served)
    cache_of(served).check_blocks()
    cache_of(served).check_integrity([])


GOOD = [7 + each for each in range(20)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_failed_prompt_leaves_nothing_that_others_read(checkpoint: Path, kernels: str, tokens: int, bad: int) -> None:
    one = engine(checkpoint, kernels=kernels, max_num_batched_tokens=tokens)
    wanted = answer(engine(checkpoint, kernels=kernels).generate([*GOOD, 9, 9], greedy(6))[0])
    assert wanted[0] == "length"
    (failed,) = one.generate([*GOOD, bad, 5, 6, 7, 8], greedy(6))
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].error is not None
    assert failed.outputs[0].token_ids == []
    check_cached(one)
    assert answer(one.generate([*GOOD, 9, 9], greedy(6))[0]) == wanted
    check_cached(one)


def test_routers_know_the_blocks_that_a_failed_step_leaves(checkpoint: Path) -> None:
    one = engine(checkpoint, max_num_batched_tokens=8)
    cache = cache_of(one)
    cache.record_events()
    one.generate([*GOOD, BAD[0], 5, 6, 7], greedy(2))
    known: set[int] = set()
    for event in cache.drain_events():
        if isinstance(event, BlocksStored):
            known.update(event.block_hashes)
        if isinstance(event, BlocksRemoved):
            known.difference_update(event.block_hashes)
    assert known == set(cache._index.blocks)
    assert len(known) == 16 // BLOCK  # two steps of 8 tokens; the third one had the bad one


def test_requests_that_share_a_failing_ones_prefix_are_unharmed(served: Engine) -> None:
    prompts = [[*GOOD, 9], [*GOOD, BAD[0], 9], [*GOOD, BAD[1]], [*GOOD, 9, 10]]
    fresh = [answer(engine_result) for engine_result in served.generate(prompts[::3], greedy(5))]
    cache_of(served).clear()
    found = [answer(result) for result in served.generate(prompts, greedy(5))]
    assert found == [fresh[0], ("error", []), ("error", []), fresh[1]]
    check_cached(served)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("length", [1, 3])
def test_a_drafted_token_that_is_not_finite_changes_no_answer(checkpoint: Path, kernels: str, length: int) -> None:
    one = engine(checkpoint, kernels=kernels)
    plain = [answer(result) for result in one.generate([GOOD, GOOD[:9]], greedy(20))]
    cache_of(one).clear()

    def draft(request: Request) -> Sequence[int]:
        count = len(request.tokens) - request.prompt_length
        right = plain[0][1] if request.prompt_length == len(GOOD) else plain[1][1]
        return [*right[count : count + length], BAD[count % 2], 5] if count % 5 == 2 else []

    stepper = one.session.stepper
    speculator, stepper.speculator = stepper.speculator, Drafting(draft)
    found = [answer(result) for result in one.generate([GOOD, GOOD[:9]], greedy(20))]
    stepper.speculator = speculator
    assert found == plain
    assert stepper.scheduler.queues.num_preemptions
    check_cached(one)


def test_a_token_that_is_not_finite_is_found_in_every_step(served: Engine) -> None:
    """Also where no row of logits of the step shows it, as in the middle of a prompt."""
    stepper = served.session.stepper
    cache_of(served).clear()
    group = served.session.prepare([[*GOOD, BAD[0], *GOOD, *GOOD]], [greedy(2)], [[]])
    served.session.add(group[0])
    seen: list[tuple[Plan, bool]] = []
    forward = stepper.model.forward

    def recorded(plan: Plan) -> torch.Tensor:
        logits = forward(plan)
        seen.append((plan, bool(stepper.model.spoiled(plan))))
        return logits

    stepper.model.forward = recorded  # type: ignore[method-assign]
    while not served.session.is_idle:
        served.session.step()
        check_finite(served)
    stepper.model.forward = forward  # type: ignore[method-assign]
    spans = [(chunk.start, chunk.stop, spoiled) for plan, spoiled in seen for chunk in plan.chunks]
    assert [spoiled for start, stop, spoiled in spans if stop <= len(GOOD)] == [False] * (len(GOOD) // 16)
    assert all(spoiled for start, stop, spoiled in spans if start <= len(GOOD) < stop)


def test_other_weights_may_be_finite(checkpoint: Path) -> None:
    """A prompt that is under way while the weights change is computed with the new ones alone."""
    one = engine(checkpoint, max_num_batched_tokens=8)
    stepper, prompt = one.session.stepper, [*GOOD, BAD[0], *GOOD]
    network = stepper.model._network  # type: ignore[attr-defined]
    network._embed, damaged = network._embed._sound, network._embed
    expected = answer(one.generate([prompt], greedy(5))[0])
    network._embed = damaged
    cache_of(one).clear()
    stepper.weights = WeightVersion()
    one.add(prompt, greedy(5))
    while not stepper.scheduler.queues.running or not stepper.scheduler.queues.running[0].is_spoiled:
        assert one.step() == []

    def change() -> None:
        network._embed = damaged._sound

    stepper.change_weights(change, WeightVersion(1))
    results: list[Result] = []
    while one.unfinished:
        results += one.step()
    assert [answer(result) for result in results] == [expected]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_what_lies_behind_a_page_that_is_taken_over_is_not_read(checkpoint: Path, kernels: str) -> None:
    """The only page that there is holds sound blocks, and behind them what is not finite."""
    one = engine(checkpoint, kernels=kernels, max_num_batched_tokens=8, kv_blocks=128 // BLOCK)
    assert cache_of(one).num_pages == 1
    wanted = answer(one.generate([[*GOOD, 9, 9]], greedy(6))[0])
    cache_of(one).clear()
    (failed,) = one.generate([[*GOOD, *[BAD[0]] * 20]], greedy(6))
    assert failed.outputs[0].finish_reason == "error"
    (found,) = one.generate([[*GOOD, 9, 9]], greedy(6))
    assert found.outputs[0].num_cached_tokens == 16
    assert answer(found) == wanted


class Reference:
    """KV of tokens as an engine computes it that has never seen anything else."""

    def __init__(self, checkpoint: Path, kernels: str) -> None:
        self._engine = small(checkpoint, kernels)

    def check(self, served: Engine) -> None:
        """Every cached block of an engine has the KV of its tokens, bit for bit."""
        cache = cache_of(served)
        parents = {id(block.parent) for block in cache._index.blocks.values()}
        for block in [one for one in cache._index.blocks.values() if id(one) not in parents]:
            chain = [block]
            while chain[-1].parent is not None:
                chain.append(chain[-1].parent)
            tokens = [token for one in reversed(chain) for token in one.tokens]
            fresh = cache_of(self._engine)
            fresh.clear()
            self._engine.generate([*tokens, 9], greedy(1), progress=False)
            for one in chain:
                own = fresh._index.blocks[one.hash]
                for number in one.pages:
                    for theirs, ours in zip(kv_of(served, one, number), kv_of(self._engine, own), strict=True):
                        assert torch.equal(theirs, ours)


def kv_of(served: Engine, block: Block, number: int | None = None) -> list[torch.Tensor]:
    """Keys and values of a block, where page `number` holds it."""
    number = block.pages[0] if number is None else number
    first = cache_of(served)._index._pages[number].blocks.index(block) * BLOCK
    store = served.session.stepper.model.kv_store  # type: ignore[attr-defined]
    return [tensor[number, :, first : first + BLOCK] for tensor in store.tensors]


@pytest.fixture(scope="module")
def reference(served: Engine, checkpoint: Path) -> Reference:
    return Reference(checkpoint, str(served.config.kernels))


prompts = st.builds(
    lambda family, shared, own: [3 + family * 7 + each for each in range(shared)] + own,
    st.integers(0, 1),
    st.integers(1, 30),
    st.lists(st.one_of(st.integers(3, 39), st.sampled_from(BAD)), min_size=1, max_size=12),
)


@settings(max_examples=examples(60), deadline=None)
@given(batches=st.lists(st.lists(prompts, min_size=1, max_size=5), min_size=1, max_size=3), data=st.data())
def test_the_cache_serves_sound_blocks_alone(
    served: Engine, batches: list[list[list[int]]], data: st.DataObject
) -> None:
    """Whatever fails beside and before a request, it is answered as by a fresh engine."""
    cache = cache_of(served)
    asked = [prompt for batch in batches for prompt in batch]
    served.session.stepper.scheduler.max_num_batched_tokens = data.draw(st.sampled_from([4, 7, 16, 64]))
    fresh = []
    for prompt in asked:
        cache.clear()
        fresh.append(answer(served.generate(prompt, greedy(4))[0]))
    cache.clear()
    found = []
    for batch in batches:
        found += [answer(result) for result in served.generate(batch, greedy(4))]
        check_cached(served)
    assert found == fresh
    failed = [reason == "error" for reason, _ in found]
    assert failed == [bool(set(BAD) & set(prompt)) for prompt in asked]


@settings(max_examples=examples(60), deadline=None)
@given(
    arrivals=st.lists(st.tuples(prompts, st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=8),
    tokens=st.sampled_from([4, 7, 16]),
    data=st.data(),
)
def test_any_interleaving(
    served: Engine,
    reference: Reference,
    arrivals: list[tuple[list[int], int, int]],
    tokens: int,
    data: st.DataObject,
) -> None:
    """Requests come, end, fail, are aborted, preempted and drafted for, with bad tokens too."""
    session, stepper, cache = served.session, served.session.stepper, cache_of(served)
    stepper.scheduler.max_num_batched_tokens = tokens
    fresh = []
    for prompt, _, count in arrivals:
        cache.clear()
        fresh.append(answer(served.generate(prompt, greedy(count), progress=False)[0]))
    cache.clear()
    bad = data.draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*BAD, 7])), min_size=1, max_size=5))

    def draft(request: Request) -> Sequence[int]:
        wanted, token = bad[len(request.tokens) % len(bad)]
        own = next(
            ids for (prompt, _, _), (_, ids) in zip(arrivals, fresh, strict=True) if prompt == prompt_of(request)
        )
        count = len(request.tokens) - request.prompt_length
        return [*own[count : count + wanted], token, 5]

    speculator, stepper.speculator = stepper.speculator, Drafting(draft)
    try:
        groups, aborted = [], set()
        for prompt, steps, count in arrivals:
            (group,) = session.prepare([prompt], [greedy(count)], [[]])
            session.add(group)
            groups.append(group)
            for _ in range(steps):
                session.step()
                check_finite(served)
            if steps == 3:
                session.abort(group.id)
                aborted.add(group.id)
        while not session.is_idle:
            session.step()
            check_finite(served)
    finally:
        stepper.speculator = speculator
        for group_id in session.group_ids:
            session.abort(group_id)
    found = [answer(group.result()) for group in groups]
    for group, mine, theirs in zip(groups, found, fresh, strict=True):
        assert mine == theirs or (
            group.id in aborted and mine[0] == "cancelled" and mine[1] == theirs[1][: len(mine[1])]
        )
    check_cached(served)
    reference.check(served)


def prompt_of(request: Request) -> list[int]:
    return request.tokens[: request.prompt_length]
