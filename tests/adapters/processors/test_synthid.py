"""SynthID-Text against transformers; the distribution stays, and who has the key sees it."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import SynthIDTextWatermarkLogitsProcessor

from adapters.chain import ProcessorChain, apply_edits, apply_late, plan_rows
from adapters.contract import ArgumentError, Context
from adapters.processors.detection import add_detect_command
from adapters.processors.synthid import SynthId, detect_synthid, round_keys, tournament
from adapters.vocabulary import Vocabulary

V = 32
KEY = bytes(range(32))


def mark(context=4, depth=30, key=KEY, width=V):
    facts = Context(Vocabulary(width), watermark_keys={"k": key})
    return SynthId(SynthId.Args(key_id="k", context=context, depth=depth), facts)


def shaped(chain, row):
    logits = row.clone().unsqueeze(0)
    planned, failures = plan_rows([(0, chain)])
    assert not failures
    assert not apply_edits(logits, planned)
    assert not apply_late(logits, planned)
    return logits[0]


def generate(processor, count, *, seed=0, width=V, spread=1.0):
    """Tokens sampled from random rows, shaped by ``processor``."""
    random = np.random.default_rng(seed)
    chain = ProcessorChain([processor] if processor else [], Context(Vocabulary(width)))
    chain.start([1, 2, 3])
    for _ in range(count):
        row = torch.tensor(random.normal(0, spread, width), dtype=torch.float32)
        p = torch.softmax(shaped(chain, row).double(), -1).numpy()
        chain.accept(int(random.choice(width, p=p / p.sum())), chain.position)
    return chain.tokens[3:]


@pytest.mark.parametrize(("context", "depth"), [(1, 1), (2, 4), (4, 30)])
def test_it_is_that_of_transformers(context, depth) -> None:
    """Its state begins without the prompt, ours with it; so it is given the prompt's end."""
    random = np.random.default_rng(7)
    keys = [int(key) for key in round_keys(KEY, depth)]
    oracle = SynthIDTextWatermarkLogitsProcessor(context + 1, keys, 2**16, 0, 1024, torch.device("cpu"))
    prompt = [5, 9, 30, 2, 4, 17]
    chain = ProcessorChain([mark(context, depth)], Context(Vocabulary(V)))
    chain.start(prompt)
    oracle._init_state(1)
    oracle.state.context = torch.tensor([prompt[-context - 1 : -1]])  # type: ignore[attr-defined]  # the call appends the last
    for _ in range(60):
        row = torch.tensor(random.normal(0, 2, V), dtype=torch.float32)
        wanted = oracle(torch.tensor([chain.tokens]), row.clone().unsqueeze(0))[0]
        result = torch.softmax(shaped(chain, row), -1)
        torch.testing.assert_close(result, torch.softmax(wanted, -1), rtol=1e-3, atol=1e-6)
        chain.accept(int(random.integers(V)), chain.position)


def test_masked_tokens_stay_masked_and_lone_ones_stay() -> None:
    chain = ProcessorChain([mark()], Context(Vocabulary(V)))
    chain.start([1, 2, 3])
    row = torch.full((V,), -torch.inf)
    row[[3, 8, 9]] = torch.tensor([1.0, 0.5, 0.0])
    result = shaped(chain, row)
    assert set(torch.nonzero(result > -torch.inf).flatten().tolist()) <= {3, 8, 9}
    row[[8, 9]] = -torch.inf
    assert torch.equal(shaped(chain, row), row)


def test_a_repeated_context_is_left_alone() -> None:
    chain = ProcessorChain([mark(context=1)], Context(Vocabulary(V)))
    chain.start([1, 2, 3])
    row = torch.linspace(-1, 1, V)
    assert not torch.equal(shaped(chain, row), row)
    chain.accept(3, chain.position)
    assert torch.equal(shaped(chain, row), row)
    chain.rewind(3)
    assert not torch.equal(shaped(chain, row), row)


def test_over_random_keys_the_token_is_distributed_as_the_row() -> None:
    chances = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros(5, dtype=torch.float64)
    for _ in range(4000):
        values = torch.randint(0, 2, (6, 5), generator=generator)
        winners = tournament(chances, values)
        assert abs(float(winners.sum()) - 1) < 1e-9
        total += winners
    torch.testing.assert_close(total / 4000, chances, rtol=0, atol=0.02)


def test_no_chance_falls_below_zero() -> None:
    chances = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)  # adds up to a little more than 1
    values = torch.tensor([[1, 1, 1, 0]] * 64)
    winners = tournament(chances * (1 + 1e-15), values)
    assert bool((winners >= 0).all())
    assert abs(float(winners.sum()) - 1) < 1e-9


def test_who_has_the_key_sees_it() -> None:
    marked = generate(mark(), 200, width=200)
    found = detect_synthid(marked, KEY, 200)
    assert found.p_value < 1e-9
    assert found.num_scored > 150
    assert detect_synthid(marked, bytes(32), 200).p_value > 1e-3
    assert detect_synthid(marked[50:120], KEY, 200).p_value < 1e-3  # a part of it
    plain = generate(None, 200, width=200)
    assert detect_synthid(plain, KEY, 200).p_value > 1e-3


def test_p_values_of_unmarked_text_average_about_one_half() -> None:
    values = [detect_synthid(generate(None, 60, seed=seed), KEY, V, 2, 8).p_value for seed in range(60)]
    assert 0.3 < sum(values) / len(values) < 0.7


def test_detection_has_bounds() -> None:
    assert detect_synthid([1, 2], KEY, V).p_value == 1.0
    for wrong in ({"context": 0}, {"context": 65}, {"depth": 0}, {"depth": 65}):
        with pytest.raises(ValueError, match="context and depth"):
            detect_synthid([1, 2, 3, 4, 5, 6], KEY, V, **wrong)
    with pytest.raises(ValueError, match="token ids must be"):
        detect_synthid([V], KEY, V)


def test_a_depth_out_of_bounds_makes_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.processors.synthid.round_keys", lambda key, depth: pytest.fail(f"made {depth} keys"))
    with pytest.raises(ValueError, match="context and depth"):
        detect_synthid([1, 2, 3, 4, 5, 6], KEY, V, depth=10**12)


def test_refused_arguments() -> None:
    with pytest.raises(ArgumentError, match="key_id: the operator has no watermark key"):
        SynthId(SynthId.Args(key_id="other"), Context(Vocabulary(V)))
    with pytest.raises(ArgumentError, match="16 to 64 bytes"):
        mark(key=b"short")
    for wrong in ({}, {"key_id": "k", "depth": 0}, {"key_id": "k", "depth": 65}, {"key_id": "k", "context": 0}):
        with pytest.raises(ValidationError):
            SynthId.Args(**wrong)  # type: ignore[arg-type]


def test_the_command_tells_the_two_watermarks_apart(tmp_path, capsys) -> None:
    (tmp_path / "key").write_text(KEY.hex())
    (tmp_path / "ids").write_text(json.dumps(generate(mark(), 150, width=200)))
    parser = argparse.ArgumentParser()
    add_detect_command(parser.add_subparsers(required=True))
    scores = {}
    for name in ("synthid", "watermark"):
        command = ["detect", str(tmp_path / "ids"), "--key-file", str(tmp_path / "key"), "--watermark", name]
        arguments = parser.parse_args(command)
        assert arguments.run(arguments) == 0
        scores[name] = json.loads(capsys.readouterr().out)["p_value"]
    assert scores["synthid"] < 1e-6
    assert math.isfinite(scores["watermark"])
    assert scores["watermark"] > 1e-3
