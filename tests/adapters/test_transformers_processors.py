"""transformers' own processors, selected by the operator as they are: each equals calling it
directly.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor

from adapters.catalog import Catalog, Entry, Requested, Selection
from adapters.chain import ProcessorChain, ProcessorFailed, apply_chain, replay
from adapters.contract import ArgumentError, Context, Stage
from adapters.third_party import ThirdPartyProcessor, wrap_third_party
from adapters.vocabulary import Vocabulary

V = 96
PROMPT = [5, 6, 7, 8]
ENDS = frozenset({2, 9})
CONTEXT = Context(Vocabulary(V, eos_token_ids=(9,)), ENDS)
WATERMARK = {"greenlist_ratio": 0.5, "bias": 3.0, "hashing_key": 15_485_863, "context_width": 2}
SYNTHID = {
    "ngram_len": 3,
    "keys": [654, 400, 836, 123],
    "sampling_table_size": 65_536,
    "sampling_table_seed": 0,
    "context_history_size": 64,
}
BIASES = [[[5], 4.0], [[40, 41], 9.0], [[7, 8, 50], 9.0], [[3], -6.5]]

CASES: dict[str, tuple[str, dict[str, Any], Callable[[], Any]]] = {
    "watermark": (
        "WatermarkLogitsProcessor",
        WATERMARK,
        lambda: transformers.WatermarkLogitsProcessor(vocab_size=V, device="cpu", **WATERMARK),  # type: ignore[arg-type]
    ),
    "selfhash": (
        "WatermarkLogitsProcessor",
        {"seeding_scheme": "selfhash"},
        lambda: transformers.WatermarkLogitsProcessor(vocab_size=V, device="cpu", seeding_scheme="selfhash"),
    ),
    "synthid": (
        "SynthIDTextWatermarkLogitsProcessor",
        SYNTHID,
        lambda: transformers.SynthIDTextWatermarkLogitsProcessor(device=torch.device("cpu"), **SYNTHID),  # type: ignore[arg-type]
    ),
    "min_length": (
        "MinLengthLogitsProcessor",
        {"min_length": 9},
        lambda: transformers.MinLengthLogitsProcessor(9, [2, 9]),
    ),
    "sequence_bias": (
        "SequenceBiasLogitsProcessor",
        {"sequence_bias": BIASES},
        lambda: transformers.SequenceBiasLogitsProcessor([list(one) for one in BIASES]),  # type: ignore[arg-type]
    ),
    "no_bad_words": (
        "NoBadWordsLogitsProcessor",
        {"bad_words_ids": [[40], [41, 42], [9]]},
        lambda: transformers.NoBadWordsLogitsProcessor([[40], [41, 42], [9]], eos_token_id=[2, 9]),
    ),
    "forced_eos": (
        "ForcedEOSTokenLogitsProcessor",
        {"max_length": 8},
        lambda: transformers.ForcedEOSTokenLogitsProcessor(8, [2, 9]),
    ),
}
every = pytest.mark.parametrize("case", list(CASES))


def chain_of(case: str) -> ProcessorChain:
    """As the worker builds it: named on the command line, arguments as JSON."""
    target, arguments, _ = CASES[case]
    catalog = Catalog.load(options=[f"hf/{case}=transformers:{target}"])
    selection = Selection((Requested(f"hf/{case}", arguments, path="processors[0]"),))
    return catalog.build_chain(selection, CONTEXT, step_budget_s=60)


def started(case: str) -> ProcessorChain:
    chain = chain_of(case)
    chain.start(PROMPT)
    return chain


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    rows = 3 * torch.randn(count, V, generator=torch.Generator().manual_seed(seed))
    rows[:, 7] = -torch.inf  # as a mask before it leaves it
    return rows


def direct(case: str, rows: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """The processor called as `generate` calls it; each row's likeliest token is the next."""
    processor: LogitsProcessor = CASES[case][2]()
    ids, shaped = list(PROMPT), []
    for row in rows.clone():
        shaped.append(processor(torch.tensor([ids]), row[None])[0])
        ids.append(int(shaped[-1].argmax()))
    return shaped, ids


def decode(chain: ProcessorChain, rows: torch.Tensor) -> list[torch.Tensor]:
    shaped = []
    for row in rows.clone():
        apply_chain(chain, row)
        shaped.append(row)
        chain.accept(int(row.argmax()), chain.position)
    return shaped


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every
def test_it_equals_calling_it_directly(case: str) -> None:
    rows = rows_of(24)
    expected, ids = direct(case, rows)
    chain = started(case)
    assert equal(decode(chain, rows), expected)
    assert chain.tokens == ids
    assert any(not torch.equal(a, b) for a, b in zip(expected, rows, strict=True))


LATE = [stage for stage in Stage if stage >= Stage.MASK and stage != Stage.FORCE]


@pytest.mark.parametrize("stage", LATE)
@pytest.mark.parametrize("case", ["synthid", "forced_eos"])
def test_what_is_masked_before_it_stays_masked(case: str, stage: Stage) -> None:
    """SynthID's class writes the lowest float over -inf, and a forced token may be a masked one."""
    target, arguments, _ = CASES[case]
    name = f"hf/{case}"
    kind = wrap_third_party(getattr(transformers, target), name, stage=stage)
    catalog = Catalog([*Catalog.default().entries, Entry(name, kind, "test")])
    masked = [2, 3, 9]
    asked = Requested("banned_tokens", {"token_ids": masked}), Requested(name, arguments)
    chain = catalog.build_chain(Selection(asked), CONTEXT, step_budget_s=60)
    rows = rows_of(8)
    rows[:, masked] = -torch.inf
    expected, ids = direct(case, rows)
    chain.start(PROMPT)
    for row, shaped, token_id in zip(rows_of(8), expected, ids[len(PROMPT) :], strict=True):
        shaped[masked] = -torch.inf
        shaped[7] = -torch.inf
        if bool((shaped == -torch.inf).all()):
            with pytest.raises(ProcessorFailed, match="left no token that can be sampled") as failed:
                apply_chain(chain, row)
            assert failed.value.reason == "unsatisfiable"
            assert case == "forced_eos"
            return
        apply_chain(chain, row)
        assert torch.equal(row, shaped)
        chain.accept(token_id, chain.position)
    assert case == "synthid"


@every
def test_rewinds_repeats_and_pickling_are_not_seen(case: str) -> None:
    rows = rows_of(16)
    expected, ids = direct(case, rows)
    chain = started(case)
    decode(chain, rows[:10])
    chain.rewind(len(PROMPT) + 4)
    decode(chain, rows_of(3, seed=5))  # a draft that is rejected
    chain.rewind(len(PROMPT) + 2)
    apply_chain(chain, rows_of(1, seed=6)[0])  # a call that is repeated
    assert equal(decode(chain, rows[2:9]), expected[2:9])
    copy = pickle.loads(pickle.dumps(chain))
    assert equal(decode(copy, rows[9:]), expected[9:])
    assert copy.tokens == ids


@every
@pytest.mark.parametrize("k", [0, 1, 7])
def test_a_migration_is_not_seen(case: str, k: int) -> None:
    rows = rows_of(12)
    expected, ids = direct(case, rows)
    chain = chain_of(case)
    replay(chain, PROMPT, ids[len(PROMPT) : len(PROMPT) + k], rows[:k].clone())
    assert equal(decode(chain, rows[k:]), expected[k:])


def test_tables_are_kept_once_and_not_for_every_position() -> None:
    chain = started("watermark")
    decode(chain, rows_of(20))
    processor = chain.members[0].processor
    assert isinstance(processor, ThirdPartyProcessor)
    tables = {state.fixed_table.data_ptr() for state in processor._before.values()}
    assert len(processor._before) == 20
    assert len(tables) == 1
    assert processor._wrapped.fixed_table.data_ptr() not in tables


class Tabulates(LogitsProcessor):
    """Counts in a large table, in place."""

    def __init__(self, vocab_size, device) -> None:  # type: ignore[no-untyped-def]
        self.seen = torch.zeros(vocab_size, 4096, device=device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen[input_ids[0, -1]] += 1
        return scores - self.seen.sum(1)


def test_a_table_that_changes_is_kept_as_it_was() -> None:
    kind = wrap_third_party(Tabulates, "tabulates")
    rows, shaped = rows_of(8), []
    chains = [ProcessorChain(kind.build(kind.Args(), CONTEXT), CONTEXT) for _ in range(2)]
    for chain in chains:
        chain.start(PROMPT)
        shaped.append(decode(chain, rows))
    for back in (5, 2, 6, 1):
        chains[0].rewind(len(PROMPT) + back)
        assert equal(decode(chains[0], rows[back:]), shaped[1][back:])


# What the context gives


class Takes:
    """Keeps what it is given."""

    def __init__(self, vocab_size: int, device: str, eos_token_id: int, eos_token_ids: list[int] | None = None) -> None:
        self.given = (vocab_size, eos_token_id, eos_token_ids)
        self.device = device

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_arguments_filled_by_name_are_the_models_own() -> None:
    kind = wrap_third_party(Takes, "takes")
    assert list(kind.Args.model_fields) == ["eos_token_id", "eos_token_ids"]
    (processor,) = kind.build(kind.Args(), CONTEXT)
    assert isinstance(processor, ThirdPartyProcessor)
    assert processor._wrapped.given == (V, 9, [2, 9])  # of the end tokens the model's own, not the client's
    assert processor._wrapped.device == torch.device("cpu")
    (processor,) = kind.build(kind.Args(eos_token_id=5, eos_token_ids=None), CONTEXT)  # type: ignore[call-arg]
    assert isinstance(processor, ThirdPartyProcessor)
    assert processor._wrapped.given == (V, 5, [2, 9])


def test_a_request_lacking_a_needed_end_token_is_refused() -> None:
    kind = wrap_third_party(Takes, "takes")
    with pytest.raises(ArgumentError, match="eos_token_id: this request has no end token"):
        kind.build(kind.Args(), Context(Vocabulary(V)))
    kind = wrap_third_party(Takes, "takes", arguments={"eos_token_id": 3})
    (processor,) = kind.build(kind.Args(), Context(Vocabulary(V)))
    assert isinstance(processor, ThirdPartyProcessor)
    assert processor._wrapped.given == (V, 3, [])


def test_it_is_made_on_the_device_of_the_logits() -> None:
    kind = wrap_third_party(Takes, "takes")
    (processor,) = kind.build(kind.Args(), CONTEXT)
    assert isinstance(processor, ThirdPartyProcessor)
    processor.start(PROMPT)
    processor.shape(torch.zeros(V, device="meta"))
    assert processor._wrapped.device == torch.device("meta")


def test_what_transformers_refuses_is_the_callers_fault() -> None:
    kind = wrap_third_party(transformers.WatermarkLogitsProcessor, "w")
    with pytest.raises(ArgumentError, match=r"greenlist_ratio: .*between 0.0 and 1.0"):
        kind.build(kind.Args(greenlist_ratio=1.5), CONTEXT)  # type: ignore[call-arg]
