"""The watermark: the distribution stays, who has the key sees it, repeated contexts and
rewinding are exact.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import pickle

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from adapters.chain import ProcessorChain, apply_edits, apply_late, plan_rows
from adapters.contract import ArgumentError, Context, uniforms, uniforms_at
from adapters.processors.detection import add_detect_command
from adapters.processors.truncation import Temperature, TopK
from adapters.processors.watermark import Watermark, detect, noise_key, read_key
from adapters.vocabulary import Vocabulary

V = 32
KEY = bytes(range(32))
few = settings(max_examples=examples(50), deadline=None)


def context_of(key=KEY):
    return Context(Vocabulary(V), watermark_keys={"k": key})


def mark(key=KEY, context=2):
    return Watermark(Watermark.Args(key_id="k", context=context), context_of(key))


def chain_of(*processors, prompt=(1, 2, 3)):
    chain = ProcessorChain(processors, context_of())
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
    rows, failures = apply_all(chains, logits)
    assert not failures
    return rows


def kept(row):
    return torch.nonzero(row > -torch.inf).flatten().tolist()


def random_row(random, spread=2.0, width=V):
    return torch.tensor(random.normal(0, spread, width), dtype=torch.float32)


def generate(processor, count, *, seed=0, prompt=(1, 2, 3), width=V, spread=1.0):
    """Decode ``count`` tokens over random rows; what the watermark leaves open is drawn from the
    row.
    """
    random = np.random.default_rng(seed)
    chain = ProcessorChain([processor] if processor else [], context_of())
    chain.start(prompt)
    for _ in range(count):
        (row,) = shape_all([chain], random_row(random, spread, width).unsqueeze(0))
        p = torch.softmax(row.double(), -1).numpy()
        chain.accept(int(random.choice(width, p=p / p.sum())), chain.position)
    return chain.tokens[len(prompt) :]


def test_the_choice_is_the_formula() -> None:
    random = np.random.default_rng(0)
    chain = chain_of(mark())
    for _ in range(40):
        row = random_row(random)
        (result,) = shape_all([chain], row.unsqueeze(0))
        context = chain.tokens[-2:]
        earlier = [chain.tokens[i - 2 : i] for i in range(3, chain.position)]
        data = b"".join(token.to_bytes(8, "little") for token in context)
        key = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=KEY).digest(), "little")
        gumbel = [-math.log(-math.log(float(u))) for u in uniforms(key, V)]
        best = max(range(V), key=lambda i: float(row[i]) + gumbel[i])
        if context in earlier:
            assert torch.equal(result, row)
            best = int(random.integers(V))
        else:
            assert kept(result) == [best]
            assert result[best] == row[best]
        chain.accept(best, chain.position)


def test_over_random_keys_the_token_is_distributed_as_the_row() -> None:
    row = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03, 0.0]).log()
    processor, count, draws = mark(), np.zeros(6), 6000
    processor.start([1, 2, 3])
    for i in range(draws):
        processor.key = hashlib.blake2b(i.to_bytes(8, "little"), digest_size=32).digest()
        result = row.clone()
        processor.shape(result)
        count[kept(result)] += 1
    expected = draws * torch.softmax(row.double(), -1).numpy()
    assert count[5] == 0
    chi_square = ((count - expected)[:5] ** 2 / expected[:5]).sum()
    assert chi_square < 18.5  # 0.999 quantile with 4 degrees of freedom; the keys are fixed


def test_two_tokens_in_a_row_are_independent_over_random_keys() -> None:
    row = torch.tensor([0.6, 0.4]).log()
    pairs, draws = np.zeros((2, 2)), 3000
    processor = mark(context=1)
    for i in range(draws):
        processor.key = hashlib.blake2b(i.to_bytes(8, "little"), digest_size=32).digest()
        processor.start([9])
        chosen = []
        for position in (1, 2):
            result = row.clone()
            processor.shape(result)
            chosen.append(kept(result)[0])
            processor.accept(chosen[-1], position)
        pairs[tuple(chosen)] += 1
    expected = draws * np.outer([0.6, 0.4], [0.6, 0.4])
    assert ((pairs - expected) ** 2 / expected).sum() < 16.3  # 0.999 quantile, 3 degrees of freedom


def test_the_key_decides_the_seed_does_not() -> None:
    row = random_row(np.random.default_rng(3))
    contexts = [Context(Vocabulary(V), seed=seed, watermark_keys={"k": KEY}) for seed in (0, 1)]
    chains = [chain_of(Watermark(Watermark.Args(key_id="k", context=2), c)) for c in contexts]
    first, second = shape_all(chains, torch.stack([row, row]))
    assert torch.equal(first, second)
    others = {tuple(kept(shape_all([chain_of(mark(bytes([i]) * 16))], row.unsqueeze(0))[0])) for i in range(30)}
    assert len(others) > 1


def test_it_comes_after_temperature_and_truncation() -> None:
    row = random_row(np.random.default_rng(4))
    cold = Temperature(Temperature.Args(value=0.0), context_of())
    for i in range(20):
        (greedy,) = shape_all([chain_of(mark(bytes([i]) * 16), cold)], row.unsqueeze(0))
        assert kept(greedy) == [int(row.argmax())]
        top = TopK(TopK.Args(k=3), context_of())
        (result,) = shape_all([chain_of(mark(bytes([i]) * 16), top)], row.unsqueeze(0))
        assert set(kept(result)) <= set(row.topk(3).indices.tolist())


def test_a_repeated_context_is_left_to_the_draw() -> None:
    row = random_row(np.random.default_rng(5))
    chain = chain_of(mark(context=2), prompt=(7, 8))
    for token in (7, 8):
        assert len(kept(shape_all([chain], row.unsqueeze(0))[0])) == 1
        chain.accept(token, chain.position)
    (result,) = shape_all([chain], row.unsqueeze(0))
    assert torch.equal(result, row)  # the context is 7, 8 again
    chain.accept(9, chain.position)
    assert len(kept(shape_all([chain], row.unsqueeze(0))[0])) == 1


@few
@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 3), st.data())
def test_state_is_a_function_of_history(tokens, context, data) -> None:
    """Step by step, at once, and after rewinding anywhere: the same contexts count as repeated."""
    processor = mark(context=context)
    processor.start([0, 1])
    for position, token in enumerate(tokens, 2):
        processor.accept(token, position)
        history = [0, 1, *tokens[: position - 1]]
        used = {tuple(history[max(0, i - context) : i]) for i in range(2, len(history))}
        assert processor.is_repeated == (tuple(history[-context:]) in used)
    cut = data.draw(st.integers(0, len(tokens)))
    processor.rewind(2 + cut)
    fresh = mark(context=context)
    fresh.start([0, 1])
    for position, token in enumerate(tokens[:cut], 2):
        fresh.accept(token, position)
    assert vars(processor) == vars(fresh)


def test_replayed_chains_choose_the_same() -> None:
    tokens = generate(mark(), 30)
    row = random_row(np.random.default_rng(9))
    stepwise, replayed = chain_of(mark()), ProcessorChain([mark()], context_of())
    for k in range(len(tokens)):
        replayed.start([1, 2, 3], tokens[:k], mode="migrated")
        copy = pickle.loads(pickle.dumps(stepwise))
        rows = shape_all([stepwise, replayed, copy], torch.stack([row, row, row]))
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])
        stepwise.accept(tokens[k], stepwise.position)


@few
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_rows_do_not_depend_on_their_batch_mates(seed, count) -> None:
    random = np.random.default_rng(seed)
    batch = torch.stack([random_row(random) for _ in range(count)])
    batch[:, random.permutation(V)[: V // 2]] = -torch.inf
    chains = [chain_of(mark(), prompt=(i, 1, i)) for i in range(count)]
    alone = [shape_all([chain], row.unsqueeze(0))[0] for chain, row in zip(chains, batch, strict=True)]
    assert torch.equal(shape_all(chains, batch), torch.stack(alone))


def test_rows_with_nothing_one_token_or_nan() -> None:
    empty = torch.full((V,), -torch.inf)
    rows, failures = apply_all([chain_of(mark())], empty.unsqueeze(0))
    assert torch.equal(rows[0], empty)
    assert failures[0].reason == "unsatisfiable"
    single = empty.clone()
    single[5] = -3.0
    assert torch.equal(shape_all([chain_of(mark())], single.unsqueeze(0))[0], single)
    row = random_row(np.random.default_rng(0))
    row[3] = torch.nan
    assert bool(shape_all([chain_of(mark())], row.unsqueeze(0))[0].isnan().any())


# The detector


def test_marked_text_is_found_only_with_its_key_and_context() -> None:
    tokens = generate(mark(context=2), 200, width=1000, spread=1.5)
    score = detect(tokens, KEY, 1000, 2)
    assert score.p_value < 1e-12
    assert score.num_scored == 198
    assert detect(tokens[60:], KEY, 1000, 2).p_value < 1e-8
    assert detect(tokens, b"another key that is long enough", 1000, 2).p_value > 0.01
    assert detect(tokens, KEY, 1000, 3).p_value > 0.01


def test_the_p_value_is_uniform_for_unmarked_text() -> None:
    values = sorted(detect(generate(None, 40, seed=seed), KEY, V, 1).p_value for seed in range(300))
    distance = max(abs(value - (i + 0.5) / 300) for i, value in enumerate(values))
    assert distance < 1.95 / math.sqrt(300)  # Kolmogorov-Smirnov, 0.001


def test_each_context_is_scored_once() -> None:
    assert detect([1, 2] * 50, KEY, V, 2).num_scored == 2
    assert detect([1, 2], KEY, V, 2) == detect([], KEY, V, 2)
    assert detect([], KEY, V, 2).p_value == 1.0


def test_the_score_is_the_gamma_tail() -> None:
    u = float(uniforms_at(noise_key(KEY, (4,)), torch.tensor([6])))
    assert detect([4, 6], KEY, V, 1).p_value == pytest.approx(1 - u)


@pytest.mark.parametrize(
    ("ids", "key", "context", "message"),
    [
        ([V], KEY, 2, "token ids"),
        ([-1], KEY, 2, "token ids"),
        ([1], b"short", 2, "16 to 64 bytes"),
        ([1], KEY, 0, "context"),
        ([1], KEY, 65, "context"),
    ],
)
def test_detect_refuses(ids, key, context, message) -> None:
    with pytest.raises(ValueError, match=message):
        detect(ids, key, V, context)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 299)))
def test_noise_at_some_ids_is_that_of_the_whole_vocabulary(key, ids) -> None:
    assert torch.equal(uniforms_at(key, torch.tensor(ids, dtype=torch.int64)), uniforms(key, 300)[ids])


def run_command(*arguments):
    parser = argparse.ArgumentParser()
    add_detect_command(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["detect", *map(str, arguments)])
    return parsed.run(parsed)


def test_the_command_prints_the_score(tmp_path, capsys) -> None:
    tokens = generate(mark(context=2), 120, width=1000, spread=1.5)
    (tmp_path / "ids.json").write_text(json.dumps(tokens))
    (tmp_path / "key").write_text(KEY.hex() + "\n")
    assert run_command(tmp_path / "ids.json", "--key-file", tmp_path / "key", "--context", 2) == 0
    printed = json.loads(capsys.readouterr().out)
    score = detect(tokens, KEY, 1000, 2)
    assert printed == {"p_value": score.p_value, "num_scored": score.num_scored}
    assert printed["p_value"] < 1e-6


def test_the_command_encodes_text(tmp_path, capsys) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text("a b c a c")
    (tmp_path / "key").write_text(KEY.hex())
    arguments = ("--key-file", tmp_path / "key", "--context", 1, "--tokenizer", tmp_path / "model")
    assert run_command(tmp_path / "text", *arguments) == 0
    score = detect([1, 2, 3, 1, 3], KEY, 4, 1)
    assert json.loads(capsys.readouterr().out) == {"p_value": score.p_value, "num_scored": 3}


@pytest.mark.parametrize(
    ("ids", "key", "problem"),
    [
        ("[1, true]", KEY.hex(), "JSON list"),
        ("{}", KEY.hex(), "JSON list"),
        ("a b", KEY.hex(), "JSON list of token ids; for text give --tokenizer"),
        ("[" * 100_000, KEY.hex(), "JSON list"),
        ("[1]", "xyz", "hexadecimal"),
        ("[1]", "00", "16 to 64"),
        ("[-1]", KEY.hex(), "token ids"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, capsys, ids, key, problem) -> None:
    (tmp_path / "ids").write_text(ids)
    (tmp_path / "key").write_text(key)
    assert run_command(tmp_path / "ids", "--key-file", tmp_path / "key") == 2
    assert problem in capsys.readouterr().err


def test_the_command_looks_for_no_model_elsewhere(tmp_path, capsys) -> None:
    (tmp_path / "text").write_text("a b")
    (tmp_path / "key").write_text(KEY.hex())
    assert run_command(tmp_path / "text", "--key-file", tmp_path / "key", "--tokenizer", "owner/model") == 2
    assert capsys.readouterr().err == "detect: --tokenizer owner/model: no such directory\n"


def test_the_command_names_a_directory_without_tokenizer(tmp_path, capsys) -> None:
    (tmp_path / "text").write_text("a b")
    (tmp_path / "key").write_text(KEY.hex())
    assert run_command(tmp_path / "text", "--key-file", tmp_path / "key", "--tokenizer", tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"detect: --tokenizer {tmp_path}: ")


def test_the_command_needs_its_files(tmp_path, capsys) -> None:
    assert run_command(tmp_path / "none", "--key-file", tmp_path / "key") == 2
    assert "No such file" in capsys.readouterr().err


def test_a_key_is_never_shown_in_an_error(tmp_path) -> None:
    (tmp_path / "key").write_text("secret words")
    with pytest.raises(ValueError) as caught:
        read_key(tmp_path / "key")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


# Arguments


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"key_id": ""},
        {"key_id": "k" * 129},
        {"key_id": 1},
        {"key_id": "k", "context": 0},
        {"key_id": "k", "context": 65},
        {"key_id": "k", "context": 2.0},
        {"key_id": "k", "key": "00"},
    ],
)
def test_arguments_out_of_bounds(arguments) -> None:
    with pytest.raises(ValidationError):
        Watermark.Args(**arguments)


def test_an_unknown_key_is_the_callers_fault() -> None:
    with pytest.raises(ArgumentError, match="no watermark key 'other'") as caught:
        Watermark(Watermark.Args(key_id="other"), context_of())
    assert caught.value.argument == "key_id"


@pytest.mark.parametrize("key", [b"", b"k" * 15, b"k" * 65])
def test_a_key_of_the_wrong_length(key) -> None:
    with pytest.raises(ArgumentError, match="16 to 64 bytes"):
        mark(key)
