"""XTC and mirostat against their formulas, and their states under rewinding, replay and
pickling.
"""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from adapters.chain import ProcessorChain, apply_chain, apply_edits, apply_late, plan_rows, replay
from adapters.contract import Context, Force, ProcessorArgs, Reads, Stage, SteeringProcessor, uniform
from adapters.processors.stochastic import XTC, Mirostat, Xtc
from adapters.vocabulary import Vocabulary

V = 24
few = settings(max_examples=examples(50), deadline=None)
seeds = st.integers(0, 2**32 - 1)


def row_of(seed, masked=0):
    random = np.random.default_rng(seed)
    values = random.normal(0, 2, V)
    values[random.permutation(V)[:masked]] = -np.inf
    return torch.tensor(values, dtype=torch.float32)


def xtc(threshold, probability, *, seed=0, choice=0):
    return Xtc(Xtc.Args(threshold=threshold, probability=probability), Context(Vocabulary(V), seed=seed, choice=choice))


def mirostat(tau=2.0, eta=0.2):
    return Mirostat(Mirostat.Args(tau=tau, eta=eta), Context(Vocabulary(V)))


def chain_of(*processors, prompt=(1, 2)):
    chain = ProcessorChain(processors, Context(Vocabulary(V)))
    chain.start(prompt)
    return chain


def apply_all(chains, logits):
    """One step of several chains, batched: the rows after it, and how rows failed at the late
    stages.
    """
    logits = logits.clone()
    planned, failures = plan_rows(list(enumerate(chains)))
    assert not failures
    assert not apply_edits(logits, planned)
    return logits, apply_late(logits, planned)


def shape_all(chains, logits):
    """One step of several chains, batched; the rows after it."""
    rows, failures = apply_all(chains, logits)
    assert not failures
    return rows


def kept(row):
    return set(torch.nonzero(row > -torch.inf).flatten().tolist())


# XTC


def xtc_reference(row, threshold):
    p = np.exp(row.double().numpy() - float(row.max()))
    p /= p.sum()
    choices = [i for i in range(V) if p[i] >= threshold and row[i] > -math.inf]
    if not choices:
        return kept(row)
    least = min(float(row[i]) for i in choices)
    return kept(row) - {i for i in choices if float(row[i]) > least}


@few
@given(st.builds(row_of, seeds, masked=st.integers(0, V - 1)), st.floats(0, 1), st.booleans())
def test_xtc_is_the_formula(row, threshold, tied) -> None:
    if tied:
        row = row.round()
    (result,) = shape_all([chain_of(xtc(threshold, 1.0))], row.unsqueeze(0))
    assert kept(result) == xtc_reference(row, threshold)
    assert torch.equal(result[sorted(kept(result))], row[sorted(kept(result))])


def test_xtc_keeps_the_least_likely_of_the_top_choices() -> None:
    row = torch.tensor([0.4, 0.05, 0.3, 0.25]).log()
    (result,) = shape_all([chain_of(xtc(0.1, 1.0))], row.unsqueeze(0))
    assert kept(result) == {1, 3}


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_the_coin_is_a_function_of_seed_choice_and_position(probability) -> None:
    row = torch.tensor([0.4, 0.05, 0.3, 0.25] + [0.0] * (V - 4)).log()
    for seed, choice in ((7, 0), (7, 1), (8, 0)):
        chain = chain_of(xtc(0.1, probability, seed=seed, choice=choice))
        for step in range(60):
            (result,) = shape_all([chain], row.unsqueeze(0))
            (again,) = shape_all([chain], row.unsqueeze(0))
            assert torch.equal(result, again)
            excluded = uniform(seed, choice, 2 + step, XTC) < probability
            assert kept(result) == ({1, 3} if excluded else {0, 1, 2, 3})
            chain.accept(3, chain.position)


def test_random_numbers_of_two_scopes_follow_absolute_positions() -> None:
    think, answer = V - 1, V - 2
    facts = Context(Vocabulary(V), seed=7, think_start=(think,), think_end=(answer,))
    row = torch.tensor([0.4, 0.05, 0.3, 0.25] + [0.0] * (V - 4)).log()
    both = [xtc(0.1, 0.5, seed=7), xtc(0.1, 0.5, seed=7)]
    chain = ProcessorChain(both, facts, scopes=["thinking", "answer"])
    chain.start([1, 2, think])
    excluded = []
    for token in [3] * 20 + [answer] + [3] * 20:
        (result,) = shape_all([chain], row.unsqueeze(0))
        excluded.append(kept(result) == {1, 3})
        assert excluded[-1] == (uniform(7, 0, chain.position, XTC) < 0.5)
        chain.accept(token, chain.position)
    assert excluded[:20] != excluded[21:]
    chain.rewind(3 + 25)
    (result,) = shape_all([chain], row.unsqueeze(0))
    assert (kept(result) == {1, 3}) == excluded[25]


def test_the_coin_falls_as_often_as_asked() -> None:
    processor = xtc(0.1, 0.3, seed=123)
    processor.start([0])
    count = 0
    for position in range(1, 4001):
        count += processor.excludes
        processor.accept(0, position)
    assert abs(count / 4000 - 0.3) < 0.03


@few
@given(st.data(), st.integers(1, 5))
def test_xtc_rows_do_not_depend_on_their_batch_mates(data, count) -> None:
    batch = torch.stack([row_of(data.draw(seeds), data.draw(st.integers(0, V - 1))) for _ in range(count)])
    chains = [chain_of(xtc(data.draw(st.floats(0, 0.5)), 0.5, seed=data.draw(seeds))) for _ in range(count)]
    alone = [shape_all([chain], row.unsqueeze(0))[0] for chain, row in zip(chains, batch, strict=True)]
    assert torch.equal(shape_all(chains, batch), torch.stack(alone))


# Mirostat


class MirostatReference:
    """Algorithm 2 in float64, straight from the definition."""

    def __init__(self, tau, eta) -> None:
        self.tau, self.eta, self.mu = tau, eta, 2 * tau

    def step(self, row, pick):
        """Allowed ids at this step, after which ``pick`` of them is chosen and mu is updated."""
        z = row.double().numpy()
        p = np.exp(z - z.max())
        p /= p.sum()
        with np.errstate(divide="ignore"):
            surprise = -np.log2(p)
        allowed = [i for i in range(V) if z[i] > -math.inf and (surprise[i] <= self.mu or z[i] == z.max())]
        near = any(abs(surprise[i] - self.mu) < 1e-4 for i in range(V))
        token = allowed[pick % len(allowed)]
        self.mu -= self.eta * (-math.log2(p[token] / p[allowed].sum()) - self.tau)
        return set(allowed), token, near


@few
@given(
    st.lists(st.tuples(seeds, st.integers(0, V - 1), st.integers(0, V)), max_size=12), st.floats(0, 6), st.floats(0, 1)
)
def test_mirostat_is_the_formula_step_by_step(steps, tau, eta) -> None:
    processor, reference = mirostat(tau, eta), MirostatReference(tau, eta)
    chain = chain_of(processor)
    for seed, masked, pick in steps:
        row = row_of(seed, masked)
        (result,) = shape_all([chain], row.unsqueeze(0))
        allowed, token, near = reference.step(row, pick)
        if near:
            return  # a token within rounding of mu may fall on either side
        assert kept(result) == allowed
        chain.accept(token, chain.position)
        chain.plan()
        assert processor.mu == pytest.approx(reference.mu, abs=1e-4)


def run(chain, rows, picks):
    """Decode ``rows``; the tokens chosen, the row before each, and mu before each."""
    tokens, mus, shaped = [], [], []
    for row, pick in zip(rows, picks, strict=True):
        (result,) = shape_all([chain], row.unsqueeze(0))
        mus.append(chain.members[0].processor.mu)
        ids = sorted(kept(result))
        tokens.append(ids[pick % len(ids)])
        shaped.append(result)
        chain.accept(tokens[-1], chain.position)
    return tokens, mus, shaped


@few
@given(seeds, st.integers(1, 10), st.data())
def test_a_replay_on_logits_restores_mu_bit_for_bit(seed, count, data) -> None:
    random = np.random.default_rng(seed)
    rows = [row_of(int(s), 3) for s in random.integers(0, 2**31, count)]
    picks = random.integers(0, V, count).tolist()
    tokens, mus, shaped = run(chain_of(mirostat()), rows, picks)
    k = data.draw(st.integers(0, count))
    fresh = chain_of(mirostat())
    replay(fresh, [1, 2], tokens[:k], torch.stack(rows)[:k].clone())
    rest, mus_after, shaped_after = run(fresh, rows[k:], picks[k:])
    assert (rest, mus_after) == (tokens[k:], mus[k:])
    assert all(torch.equal(a, b) for a, b in zip(shaped[k:], shaped_after, strict=True))


def test_a_history_with_generated_tokens_alone_is_refused() -> None:
    chain = ProcessorChain([mirostat()], Context(Vocabulary(V)))
    with pytest.raises(ValueError, match="replaying on logits"):
        chain.start([1], [2])


def test_rewinding_returns_to_the_mu_of_that_position() -> None:
    rows = [row_of(seed) for seed in range(6)]
    chain = chain_of(mirostat())
    tokens, mus, _ = run(chain, rows, [0, 5, 9, 2, 3, 4])
    chain.rewind(4)
    chain.plan()
    assert chain.members[0].processor.mu == mus[2]
    again, mus_again, _ = run(chain, rows[2:], [9, 2, 3, 4])
    assert (again, mus_again) == (tokens[2:], mus[2:])


def test_a_row_seen_after_another_history_is_no_observation() -> None:
    chain = chain_of(mirostat())
    tokens, mus, _ = run(chain, [row_of(1), row_of(2)], [3, 4])
    chain.plan()
    chain.rewind(2)
    chain.accept((tokens[0] + 1) % V, 2)
    chain.accept(tokens[1], 3)
    chain.plan()
    assert chain.members[0].processor.mu == mus[0]


def test_shaping_a_position_twice_counts_only_the_last_row() -> None:
    once, twice = chain_of(mirostat()), chain_of(mirostat())
    run(once, [row_of(1)], [3])
    shape_all([twice], row_of(99).unsqueeze(0))
    run(twice, [row_of(1)], [3])
    once.plan()
    twice.plan()
    assert once.members[0].processor.mu == twice.members[0].processor.mu != 4.0


def test_a_forced_token_is_no_observation() -> None:
    class ForceAt3(SteeringProcessor):
        name, stage, reads, Args = "force_at_3", Stage.FORCE, Reads.NOTHING, ProcessorArgs

        def edit(self):
            return Force(7) if self.position == 3 else None

    processor = mirostat()
    chain = chain_of(processor, ForceAt3(None, Context(Vocabulary(V))))
    row = row_of(1)
    assert apply_chain(chain, row)
    chain.accept(int(row.argmax()), 2)
    chain.plan()
    before = processor.mu
    row = row_of(2)
    apply_chain(chain, row)
    assert kept(row) == {7}
    chain.accept(7, 3)
    chain.plan()
    assert processor.mu == before != 4.0


def test_a_dropped_token_is_no_observation() -> None:
    processor = mirostat(tau=0.1)
    chain = chain_of(processor)
    (result,) = shape_all([chain], row_of(1).unsqueeze(0))
    dropped = next(i for i in range(V) if i not in kept(result))
    chain.accept(dropped, 2)
    chain.plan()
    assert processor.mu == 0.2


@few
@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_mirostat_rows_do_not_depend_on_their_batch_mates(data, count, num_steps) -> None:
    batched = [chain_of(mirostat(data.draw(st.floats(0, 6)), 0.3)) for _ in range(count)]
    alone = pickle.loads(pickle.dumps(batched))
    for _ in range(num_steps):
        batch = torch.stack([row_of(data.draw(seeds), data.draw(st.integers(0, V - 1))) for _ in range(count)])
        together = shape_all(batched, batch)
        single = [shape_all([chain], row.unsqueeze(0))[0] for chain, row in zip(alone, batch, strict=True)]
        assert torch.equal(together, torch.stack(single))
        for a, b, row in zip(batched, alone, together, strict=True):
            token = int(row.argmax())
            a.accept(token, a.position)
            b.accept(token, b.position)


def test_a_pickle_after_shaping_keeps_the_observation() -> None:
    chains = [chain_of(mirostat()), chain_of(mirostat())]
    result = shape_all(chains, torch.stack([row_of(1), row_of(2)]))
    copy = pickle.loads(pickle.dumps(chains[1]))
    token = int(result[1].argmin()) if result[1].isfinite().all() else max(kept(result[1]))
    for chain in (chains[1], copy):
        chain.accept(token, 2)
        chain.plan()
    assert copy.members[0].processor.mu == chains[1].members[0].processor.mu != 4.0


@pytest.mark.parametrize("processor", [xtc(0.1, 1.0), mirostat()])
def test_rows_with_nothing_one_token_or_nan(processor) -> None:
    empty = torch.full((V,), -torch.inf)
    rows, failures = apply_all([chain_of(processor)], empty.unsqueeze(0))
    assert torch.equal(rows[0], empty)
    assert failures[0].reason == "unsatisfiable"
    single = empty.clone()
    single[5] = -3.0
    assert torch.equal(shape_all([chain_of(processor)], single.unsqueeze(0))[0], single)
    row = row_of(1)
    row[3] = torch.nan
    assert bool(shape_all([chain_of(processor)], row.unsqueeze(0))[0].isnan().any())


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Xtc, {"threshold": -0.1, "probability": 0.5}),
        (Xtc, {"threshold": 1.1, "probability": 0.5}),
        (Xtc, {"threshold": 0.1, "probability": -0.1}),
        (Xtc, {"threshold": 0.1, "probability": 1.1}),
        (Xtc, {"threshold": 0.1}),
        (Xtc, {"threshold": math.nan, "probability": 0.5}),
        (Mirostat, {"tau": -1.0}),
        (Mirostat, {"tau": 101.0}),
        (Mirostat, {"eta": -0.1}),
        (Mirostat, {"eta": 1.1}),
        (Mirostat, {"eta": math.inf}),
        (Mirostat, {"mode": 1}),
    ],
)
def test_arguments_out_of_bounds(kind, arguments) -> None:
    with pytest.raises(ValidationError):
        kind.Args(**arguments)
