"""Foreign processors: their calling shapes, their state under repeats, rewinds and migration,
and what is refused.
"""

from __future__ import annotations

import functools
import json
import pickle
import sys
import typing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from adapters.basic import TemperatureProcessor
from adapters.chain import ProcessorChain, apply_chain, apply_edits, apply_late, plan_rows, replay
from adapters.contract import ArgumentError, Bias, Context, Force, ProcessorArgs, Reads, Stage, SteeringProcessor
from adapters.third_party import (
    NUM_KEPT_STATES,
    DynamoProcessor,
    HuggingFaceProcessor,
    ZooProcessor,
    protocol_of,
    third_party_processor,
    wrap_third_party,
)
from adapters.vocabulary import Vocabulary

V = 12
few = settings(max_examples=examples(50), deadline=None)


class Characters:
    """A tokenizer that refuses to be copied, as a big one should not be."""

    eos_token_id = 2

    def encode(self, text, *, add_special_tokens=True):
        return [3 + ord(c) % 8 for c in text]

    def decode(self, ids, **kwargs):
        return "x" * len(ids)

    def convert_ids_to_tokens(self, ids):
        return ["x"] * len(ids)

    def __len__(self):
        return V

    def __deepcopy__(self, memo):
        raise AssertionError("the tokenizer was copied")


# Stand-ins with the calling shapes of others


class CountingBoost:
    """Dynamo's shape. Counts its calls, and remembers the highest logit it ever saw: state from
    calls and logits.
    """

    def __init__(self, step: float = 0.5) -> None:
        self.step, self.calls, self.peak = step, 0, 0.0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.peak = max(self.peak, float(logits.max()))
        logits[len(input_ids) % V] += self.calls * self.step + self.peak
        self.calls += 1


class ZooLength:
    """NVIDIA's shape: a tokenizer at construction, calls counted, both beam layouts written."""

    def __init__(
        self, tokenizer: Characters, boost_factor: float, p: int = 2, boost_token_str: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.boost_token = tokenizer.eos_token_id
        if boost_token_str is not None:
            self.boost_token = tokenizer.encode(boost_token_str, add_special_tokens=False)[-1]
        self.boost_factor, self.p, self.token_count = boost_factor, p, 0

    def __call__(self, req_id, logits, token_ids, stream_ptr, client_id):
        assert logits.shape == (1, 1, V)
        with torch.cuda.stream(None):
            ids = torch.LongTensor(token_ids)
            logits[:, :, self.boost_token] += self.boost_factor * self.token_count**self.p
            logits[0, 0, ids[0, -1]] -= 1.0
        self.token_count += 1


class ZooCite:
    """NVIDIA's shape: takes the history at its first call for the prompt."""

    def __init__(self, tokenizer: Characters, boost_factor: float = 1.0) -> None:
        self.tokenizer, self.boost_factor, self.prompt = tokenizer, boost_factor, None

    def __call__(self, req_id, logits, ids, stream_ptr, client_id):
        if self.prompt is None:
            self.prompt = list(ids[0])  # type: ignore[assignment]
        logits[:, :, sorted(set(self.prompt))] += self.boost_factor  # type: ignore[call-overload]


class HuggingFaceCounter(LogitsProcessor):
    """Hugging Face's shape with state; returns a new tensor."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.seen += 1
        assert input_ids.dtype == torch.int64
        return scores + input_ids[:, -1:].float() * 0.1 + self.seen  # type: ignore[return-value]


def halve_first(input_ids, logits):
    logits[0] /= 2


class BiasLast(SteeringProcessor):
    name, stage, reads, Args = "bias_last", Stage.BIAS, Reads.GENERATED, ProcessorArgs

    def edit(self):
        return Bias.of([self.last_token], [0.25])  # type: ignore[list-item]


TOKENIZER = Characters()
CONTEXT = Context(Vocabulary(V, TOKENIZER))  # type: ignore[arg-type]

MAKERS = {
    "dynamo": lambda: third_party_processor(CountingBoost),
    "zoo length": lambda: third_party_processor(ZooLength, arguments={"boost_factor": 0.1}, tokenizer=TOKENIZER),
    "zoo cite": lambda: third_party_processor(ZooCite, tokenizer=TOKENIZER),
    "hugging face": lambda: third_party_processor(HuggingFaceCounter),
    "stateless": lambda: third_party_processor(TemperatureProcessor(0.7), stateful=False),
    "function": lambda: third_party_processor(halve_first),
    "transformers": lambda: third_party_processor(RepetitionPenaltyLogitsProcessor, arguments={"penalty": 1.3}),
}
STATEFUL = ["dynamo", "zoo length", "zoo cite", "hugging face", "transformers"]
kinds = pytest.mark.parametrize("kind", list(MAKERS))


def rows_of(count, seed=0):
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed))


def chain_of(*processors, prompt=(1, 2, 3)):
    chain = ProcessorChain(processors, CONTEXT)
    chain.start(prompt)
    return chain


def shape_all(chains, logits):
    logits = logits.clone()
    planned, failures = plan_rows(list(enumerate(chains)))
    assert not failures
    failures = apply_edits(logits, planned) | apply_late(logits, planned)
    return logits, failures


def decode(chain, rows):
    """One token per row, the likeliest; the shaped rows."""
    shaped = []
    for row in rows:
        out, failures = shape_all([chain], row.unsqueeze(0))
        assert not failures
        shaped.append(out[0])
        chain.accept(int(out[0].argmax()), chain.position)
    return shaped


def equal(first, second):
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Calling shapes


def test_each_is_called_as_its_own_engine_calls_it() -> None:
    rows, prompt = rows_of(8), [1, 2, 3]
    for kind, call in {
        "dynamo": lambda p, ids, row: p(ids, row),
        "zoo length": lambda p, ids, row: p(0, row.view(1, 1, V), [ids], None, None),
        "zoo cite": lambda p, ids, row: p(0, row.view(1, 1, V), [ids], None, None),
        "hugging face": lambda p, ids, row: row.copy_(p(torch.tensor([ids]), row.unsqueeze(0))[0]),
        "transformers": lambda p, ids, row: row.copy_(p(torch.tensor([ids]), row.unsqueeze(0))[0]),
        "function": lambda p, ids, row: p(ids, row),
    }.items():
        wrapped = MAKERS[kind]()
        bare, ids, expected = wrapped._make(), list(prompt), []
        for row in rows.clone():
            call(bare, ids, row)
            expected.append(row)
            ids = [*ids, int(row.argmax())]
        assert equal(decode(chain_of(wrapped), rows), expected), kind


@pytest.mark.parametrize(
    ("warper", "arguments"),
    [
        (MinPLogitsWarper, {"min_p": 0.1}),
        (NoRepeatNGramLogitsProcessor, {"ngram_size": 2}),
        (SuppressTokensLogitsProcessor, {"suppress_tokens": [3, 4]}),
    ],
)
def test_transformers_own_processors(warper, arguments) -> None:
    rows, ids, expected = rows_of(10), [1, 2, 3], []
    for row in rows:
        expected.append(warper(**arguments)(torch.tensor([ids]), row.clone().unsqueeze(0))[0])
        ids = [*ids, int(expected[-1].argmax())]
    assert equal(decode(chain_of(third_party_processor(warper, arguments=arguments)), rows), expected)


@pytest.mark.parametrize(
    ("target", "wrapper"),
    [
        *[(CountingBoost, DynamoProcessor), (CountingBoost(), DynamoProcessor), (halve_first, DynamoProcessor)],
        *[(ZooLength, ZooProcessor), (ZooCite(TOKENIZER), ZooProcessor), (HuggingFaceCounter, HuggingFaceProcessor)],
        *[(MinPLogitsWarper(0.1), HuggingFaceProcessor), (lambda input_ids, scores: scores, HuggingFaceProcessor)],
    ],
)
def test_protocols_are_recognised(target, wrapper) -> None:
    assert issubclass(wrap_third_party(target), wrapper)


def test_annotations_tell_where_names_do_not() -> None:
    def tensors(ids: torch.LongTensor, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def lists(input_ids: Sequence[int], scores: torch.Tensor) -> None: ...

    assert protocol_of(tensors) == "huggingface"
    assert protocol_of(lists) == "dynamo"


class Batched:
    def __call__(self, req_ids, logits, token_ids, stream_ptr, client_ids): ...


class VllmV0:
    def __call__(self, prompt_ids, past_ids, scores): ...


class Unclear:
    def __call__(self, a, b): ...


class Anything:
    def __call__(self, *args): ...


class NotCallable:
    pass


@pytest.mark.parametrize("target", [Batched, VllmV0, Unclear, Anything, NotCallable, NotCallable(), Batched(), 5, None])
def test_what_speaks_no_protocol_is_refused(target) -> None:
    with pytest.raises(TypeError, match=r"must be callable as|cannot be called"):
        wrap_third_party(target)


def test_dynamos_own_examples() -> None:
    from dynamo.logits_processing import examples

    names = [name for name in dir(examples) if name.endswith("Processor")]
    assert len(names) >= 3
    assert {protocol_of(getattr(examples, name)) for name in names} == {"dynamo"}


def test_dynamos_forced_sequence_is_exact_on_repeats_and_rewinds() -> None:
    from dynamo.logits_processing.examples import ForcedSequenceLogitsProcessor

    kind = wrap_third_party(ForcedSequenceLogitsProcessor, "forced")
    chain = chain_of(build(kind, token_ids=[5, 6, 7], eos_token_id=2))
    for row in rows_of(4):
        shape_all([chain], row.unsqueeze(0))
        decode(chain, [row])
    assert chain.tokens[3:] == [5, 6, 7, 2]
    chain.rewind(4)
    decode(chain, rows_of(4))
    assert chain.tokens[3:] == [5, 6, 7, 2, 2]


def test_all_of_transformers_processors_are_recognised() -> None:
    found = vars(transformers.generation.logits_process).values()
    classes = [one for one in found if isinstance(one, type) and issubclass(one, LogitsProcessor)]
    assert len(classes) > 20
    assert {protocol_of(one) for one in classes} == {"huggingface"}


def test_a_protocol_can_be_named() -> None:
    assert issubclass(wrap_third_party(Unclear, protocol="dynamo"), DynamoProcessor)


# What they may return


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (lambda input_ids, scores: None, "TypeError"),
        (lambda input_ids, scores: scores[0], "ValueError"),
        (lambda input_ids, scores: scores[:, 1:], "ValueError"),
        (lambda input_ids, scores: scores.double(), "ValueError"),
        (lambda input_ids, scores: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_wrong_result_fails_the_request_and_leaves_the_row(target, error) -> None:
    row = rows_of(1)
    out, failures = shape_all([chain_of(third_party_processor(target, name="theirs"))], row)
    assert torch.equal(out, row)
    assert failures[0].processor == "theirs"
    assert failures[0].message == f"raised {error} at position 3"


def test_editing_in_place_and_returning_the_same_tensor_is_fine() -> None:
    def in_place(input_ids, logits):
        return logits.mul_(2)

    def scores_in_place(input_ids, scores):
        scores *= 2
        return scores

    row = rows_of(1)
    for target in (in_place, scores_in_place):
        out, failures = shape_all([chain_of(third_party_processor(target))], row)
        assert not failures
        assert torch.equal(out, row * 2)


class SortsIds:
    """Sorts the list that it is given, and looks at the highest and the lowest id."""

    def __call__(self, input_ids: list[int], logits: torch.Tensor) -> None:
        input_ids.sort()
        logits[input_ids[-1] % V] += 2.0
        logits[input_ids.pop(0) % V] -= 3.0


class KeepsTheFirstIds:
    """Keeps the first list that it is given, without a copy, and looks at its end."""

    def __init__(self) -> None:
        self.first: Sequence[int] | None = None

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self.first is None:
            self.first = input_ids
        logits[len(self.first)] += 3.0
        logits[self.first[-1] % V] -= 2.0


class ZooKeepsIds:
    """The same in NVIDIA's shape."""

    def __init__(self) -> None:
        self.kept = KeepsTheFirstIds()

    def __call__(self, req_id, logits, token_ids, stream_ptr, client_id) -> None:
        self.kept(token_ids[0], logits[0, 0])


@pytest.mark.parametrize("target", [SortsIds, KeepsTheFirstIds, ZooKeepsIds])
@pytest.mark.parametrize("back", range(6))
def test_ids_may_be_kept_and_written_to_as_where_they_come_from(target, back) -> None:
    """Engines call with a new list for each token."""
    rows, tokens, expected, bare = rows_of(6), [1, 2, 3], [], target()
    for row in rows.clone():
        shown: Any = (list(tokens), row)
        bare(*((0, row.view(1, 1, V), [shown[0]], None, None) if target is ZooKeepsIds else shown))
        expected.append(row)
        tokens.append(int(row.argmax()))
    chain = chain_of(third_party_processor(target))
    assert equal(decode(chain, rows), expected)
    chain.rewind(3 + back)
    shape_all([chain], rows_of(1, seed=9))
    assert equal(decode(chain, rows[back:]), expected[back:])
    assert chain.tokens == tokens


class SortsScoredIds(LogitsProcessor):
    """Writes to the ids that it is given, and keeps the first ones, as a tensor."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            self.first = input_ids
        scores[0, int(input_ids[0, 0]) % V] -= 3.0
        scores[0, int(self.first.sum()) % V] += 2.0
        input_ids[0, 0] += len(input_ids[0])
        return scores


@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("back", range(6))
def test_written_ids_are_those_of_one_call(stateful: bool, back: int) -> None:
    """Of the history nothing is changed: not for the next call, nor after a rewind."""
    rows, tokens, expected, bare = rows_of(6), [1, 2, 3], [], SortsScoredIds()
    for row in rows.clone():
        bare(torch.tensor([tokens]), row.unsqueeze(0))  # type: ignore[arg-type]
        if not stateful:
            bare.first = None
        expected.append(row)
        tokens.append(int(row.argmax()))
    target = SortsScoredIds if stateful else lambda input_ids, scores: SortsScoredIds()(input_ids, scores)
    chain = chain_of(third_party_processor(target))
    assert equal(decode(chain, rows), expected)
    chain.rewind(3 + back)
    shape_all([chain], rows_of(1, seed=9))
    assert equal(decode(chain, rows[back:]), expected[back:])


class EditsInAThread:
    """Lets another thread edit the row."""

    def __call__(self, input_ids: list[int], logits: torch.Tensor) -> None:
        def edit() -> None:
            logits.mul_(2)
            logits.numpy()[0] = 7.0

        with ThreadPoolExecutor(1) as threads:
            threads.submit(edit).result()


def test_another_thread_may_edit_the_row() -> None:
    """Engines compute in inference mode, which is the mode of a thread, and marks its tensors."""
    with torch.inference_mode():
        rows = rows_of(3)
        shaped = decode(chain_of(third_party_processor(EditsInAThread)), rows)
    expected = rows * 2
    expected[:, 0] = 7.0
    assert equal(shaped, list(expected))


def test_scores_whose_data_were_replaced_are_taken() -> None:
    def replaces(input_ids, scores):
        scores.data = scores * 2
        return scores

    def widens(input_ids, scores):
        scores.data = scores.double()
        return scores

    row = rows_of(1)
    out, failures = shape_all([chain_of(third_party_processor(replaces))], row)
    assert not failures
    assert torch.equal(out, row * 2)
    out, failures = shape_all([chain_of(third_party_processor(widens))], row)
    assert failures[0].message == "raised ValueError at position 3"
    assert torch.equal(out, row)


# State


@kinds
def test_a_repeated_call_begins_from_the_same_state(kind) -> None:
    rows, other = rows_of(6), rows_of(6, seed=1)
    expected = decode(chain_of(MAKERS[kind]()), rows)
    chain, shaped = chain_of(MAKERS[kind]()), []
    for row, chunk in zip(rows, other, strict=True):
        shape_all([chain], chunk.unsqueeze(0))  # as for an earlier chunk of the prompt: other logits, then discarded
        shaped += decode(chain, [row])
    assert equal(shaped, expected)


@kinds
@given(data=st.data())
@few
def test_rewinding_and_going_on_is_as_if_it_had_not_happened(kind, data) -> None:
    rows = rows_of(8)
    expected = decode(chain_of(MAKERS[kind]()), rows)
    chain = chain_of(MAKERS[kind]())
    decode(chain, rows[:6])
    back = data.draw(st.integers(0, 6))
    chain.rewind(3 + back)
    if data.draw(st.booleans()):
        decode(chain, rows_of(3, seed=5))  # a draft that is rejected
        chain.rewind(3 + back)
    assert equal(decode(chain, rows[back:]), expected[back:])


@kinds
@pytest.mark.parametrize("k", range(7))
def test_a_migration_at_every_token_is_not_seen(kind, k) -> None:
    rows = rows_of(6)
    chain = chain_of(MAKERS[kind](), BiasLast(None, CONTEXT))
    expected = decode(chain, rows)
    tokens = chain.tokens[3:]
    fresh = ProcessorChain([MAKERS[kind](), BiasLast(None, CONTEXT)], CONTEXT)
    if fresh.observes_logits:
        replay(fresh, [1, 2, 3], tokens[:k], rows[:k].clone())
    else:
        fresh.start([1, 2, 3], tokens[:k], mode="migrated")
    assert equal(decode(fresh, rows[k:]), expected[k:])


@pytest.mark.parametrize("kind", STATEFUL)
def test_stateful_ones_cannot_be_rebuilt_from_ids_alone(kind) -> None:
    chain = ProcessorChain([MAKERS[kind]()], CONTEXT)
    assert chain.observes_logits
    with pytest.raises(ValueError, match="replaying on logits"):
        chain.start([1], [2])


def test_a_rewind_beyond_the_kept_states_fails() -> None:
    chain = chain_of(MAKERS["dynamo"]())
    decode(chain, rows_of(NUM_KEPT_STATES + 3))
    chain.rewind(3 + 3)
    decode(chain, rows_of(1))
    chain.rewind(3 + 2)
    _, failures = plan_rows([(0, chain)])
    assert failures[0].message == "the state at generated token 2 is not kept any more at position 5"


def test_a_forced_position_is_not_a_call() -> None:
    class ForceAt4(SteeringProcessor):
        name, stage, reads, Args = "force_at_4", Stage.FORCE, Reads.NOTHING, ProcessorArgs

        def edit(self):
            return Force(7) if self.position == 4 else None

    processor = MAKERS["dynamo"]()
    chain = chain_of(processor, ForceAt4(None, CONTEXT))
    for row in rows_of(4):
        apply_chain(chain, row)
        chain.accept(int(row.argmax()), chain.position)
    assert chain.tokens[4] == 7
    assert processor._wrapped.calls == 3
    chain.rewind(5)
    apply_chain(chain, rows_of(1)[0])
    assert processor._wrapped.calls == 2


def test_choices_do_not_share_an_instance() -> None:
    shared = CountingBoost()
    first, second = (chain_of(third_party_processor(shared)) for _ in range(2))
    rows = rows_of(4)
    assert equal(decode(first, rows), decode(second, rows))
    assert shared.calls == 0


@kinds
def test_a_row_is_independent_of_batch_mates_even_if_one_raises(kind) -> None:
    def raises(input_ids, logits):
        raise RuntimeError

    def run(with_mates):
        chains = [chain_of(MAKERS[kind]())]
        if with_mates:
            chains += [chain_of(third_party_processor(raises)), chain_of(MAKERS[kind](), prompt=[4])]
            chains += [chain_of(third_party_processor(CountingBoost, name="mate"))]
        shaped = []
        for row in rows_of(4):
            chains[1:2] = [chain_of(third_party_processor(raises))] if with_mates else []
            out, failures = shape_all(chains, row.repeat(len(chains), 1))
            assert set(failures) == ({1} if with_mates else set())
            shaped.append(out[0])
            for chain in chains:
                chain.accept(int(out[0].argmax()), chain.position)
        return shaped

    assert equal(run(True), run(False))


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if not kind.startswith("zoo")])
def test_pickles_in_the_middle_of_a_request(kind) -> None:
    rows = rows_of(6)
    chain = chain_of(MAKERS[kind]())
    decode(chain, rows[:3])
    copy = pickle.loads(pickle.dumps(chain))
    assert equal(decode(copy, rows[3:]), decode(chain, rows[3:]))


def test_zoo_processors_pickle_with_their_tokenizer() -> None:
    chain = chain_of(MAKERS["zoo length"]())
    decode(chain, rows_of(2))
    copy = pickle.loads(pickle.dumps(chain))
    assert equal(decode(copy, rows_of(2, 1)), decode(chain, rows_of(2, 1)))


def test_what_cannot_be_copied_is_refused_unless_it_has_no_state() -> None:
    class Locked:
        def __init__(self) -> None:
            self.lines = (line for line in "ab")

        def __call__(self, input_ids, logits):
            pass

    with pytest.raises(TypeError, match="Locked has a state that cannot be copied"):
        third_party_processor(Locked)
    assert not third_party_processor(Locked, stateful=False).observes_logits


def test_the_stage_is_settable_and_soft_by_default() -> None:
    processor = third_party_processor(CountingBoost)
    assert processor.stage is Stage.SOFT
    late = third_party_processor(CountingBoost, stage=Stage.TRUNCATION)
    assert [m.processor for m in chain_of(late, processor).members] == [processor, late]
    assert late.reads is Reads.PROMPT_AND_GENERATED


def test_a_factory_that_makes_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match="must make a callable"):
        DynamoProcessor(lambda: CountingBoost)


class AddsUp:
    """A Dynamo processor with a large state that it changes in place at every third token."""

    def __init__(self) -> None:
        self.sums = torch.zeros(20_000)
        self.network = torch.nn.Linear(1, 20_000)
        torch.nn.init.zeros_(self.network.weight)

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        if len(input_ids) % 3 == 0:
            self.sums[: len(logits)] += logits
            self.network.weight[: len(logits), 0] += logits
        logits += self.sums[: len(logits)] - 0.5 * self.network.weight[: len(logits), 0]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=2, max_size=4))
@few
@torch.no_grad()
def test_large_states_stay_as_they_were_after_every_rewind(moves) -> None:
    rows = rows_of(8)
    expected = decode(chain_of(third_party_processor(AddsUp)), rows)
    chain = chain_of(third_party_processor(AddsUp))
    for count, other in moves:
        done = chain.position - 3
        decode(chain, rows[done : done + count])
        chain.rewind(3 + min(other, chain.position - 3))
        decode(chain, rows_of(2, seed=3))
        chain.rewind(chain.position - 2)
    done = chain.position - 3
    assert equal(decode(chain, rows[done:]), expected[done:])


class Network:
    """A Dynamo processor with a network, and with a state of its own."""

    def __init__(self) -> None:
        self.network = torch.nn.Linear(V, 4096)
        self.network.register_buffer("table", torch.ones(20_000))
        self.calls = 0

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        self.calls += 1
        logits += float(self.network(logits)[0]) + self.calls


@torch.no_grad()
def test_saved_states_share_the_weights_of_a_network() -> None:
    processor = third_party_processor(Network)
    decode(chain_of(processor), rows_of(8))
    states = list(processor._before.values())
    assert [state.calls for state in states] == list(range(8))
    for part in ("weight", "table"):
        assert len({getattr(state.network, part).data_ptr() for state in states}) == 1
    assert states[0].network is not processor._wrapped.network


# Classes for the catalogue


def build(kind, **arguments):
    (processor,) = kind.build(kind.Args(**arguments), CONTEXT)
    return processor


def test_a_wrapped_class_has_typed_arguments_and_the_tokenizer() -> None:
    kind = wrap_third_party(ZooLength, "acme/length")
    assert (kind.name, kind.stage, kind.observes_logits) == ("acme/length", Stage.SOFT, True)
    assert kind.__doc__ == "NVIDIA's shape: a tokenizer at construction, calls counted, both beam layouts written."
    fields = kind.Args.model_fields
    assert list(fields) == ["boost_factor", "p", "boost_token_str"]
    assert fields["boost_factor"].is_required()
    processor = build(kind, boost_factor=0.5, boost_token_str="a")
    assert type(processor) is ZooProcessor
    assert processor.name == "acme/length"
    assert processor._wrapped.tokenizer is TOKENIZER
    assert processor._wrapped.boost_token == 3 + ord("a") % 8
    assert pickle.loads(pickle.dumps(build(wrap_third_party(CountingBoost, "b"), step=1.0)))._wrapped.step == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        *[{}, {"boost_factor": float("nan")}, {"boost_factor": 1e10}, {"boost_factor": "1"}],
        *[{"boost_factor": 1.0, "p": 2**31}, {"boost_factor": 1.0, "boost_token_str": "x" * 5000}],
        *[{"boost_factor": 1.0, "tokenizer": "x"}, {"boost_factor": 1.0, "more": 1}],
    ],
)
def test_arguments_out_of_bounds(arguments) -> None:
    with pytest.raises(ValidationError):
        wrap_third_party(ZooLength, "x").Args(**arguments)


def test_what_the_operator_fixes_the_request_cannot_set() -> None:
    kind = wrap_third_party(ZooLength, "x", arguments={"p": 3})
    assert "p" not in kind.Args.model_fields
    assert build(kind, boost_factor=1.0)._wrapped.p == 3
    with pytest.raises(TypeError, match="no parameter q"):
        wrap_third_party(ZooLength, "x", arguments={"q": 3})


def test_arguments_come_from_annotations_or_else_from_defaults() -> None:
    class Many:
        def __init__(
            self, ids: list[int], words: list[str] | None = None, rate=1.5, table: dict | None = None, _x: int = 0
        ) -> None:
            pass

        def __call__(self, input_ids, logits): ...

    fields = wrap_third_party(Many, "x").Args.model_fields
    assert list(fields) == ["ids", "words", "rate"]


def test_an_argument_that_nobody_can_give_is_refused() -> None:
    class Needs:
        def __init__(self, table: dict) -> None: ...

        def __call__(self, input_ids, logits): ...

    with pytest.raises(TypeError, match="Needs needs table, which is not JSON data"):
        wrap_third_party(Needs)
    assert not wrap_third_party(Needs, arguments={"table": {}}).Args.model_fields


class ByPosition:
    def __init__(self, penalty: float, /) -> None: ...

    def __call__(self, input_ids, logits): ...


class ByKeyword:
    def __call__(self, input_ids, logits, *, temperature): ...


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (ByPosition, "ByPosition takes penalty by position only"),
        (ByKeyword, "ByKeyword must be callable without the keyword temperature"),
    ],
)
def test_what_cannot_be_called_is_refused_at_start(target, problem) -> None:
    with pytest.raises(TypeError, match=problem):
        wrap_third_party(target)


def test_annotations_that_cannot_be_evaluated_hide_no_others() -> None:
    class Mixed:
        def __init__(self, tokenizer, boost, ids=(), mode=None) -> None: ...

        def __call__(self, input_ids, logits): ...

    hints = {"tokenizer": "OnlyForTypeCheckers", "boost": "float", "ids": typing.List, "mode": "1 / 0"}  # noqa: UP006
    Mixed.__init__.__annotations__.update(hints)
    assert list(wrap_third_party(Mixed).Args.model_fields) == ["boost"]


def test_names_for_type_checkers_alone_are_no_obstacle() -> None:
    """From Python 3.14 on they need no quotes, and fail only where they are asked for."""
    quote = "" if sys.version_info >= (3, 14) else "'"
    names: dict[str, Any] = {}
    exec(
        f"""class Annotated:
    def __init__(self, boost: float, tokenizer: {quote}Tokenizer{quote} = None) -> {quote}Nothing{quote}: ...

    def __call__(self, input_ids: list[int], logits: {quote}Tensor{quote}) -> {quote}Nothing{quote}: ...
""",
        names,
    )
    assert protocol_of(names["Annotated"]) == "dynamo"
    assert list(wrap_third_party(names["Annotated"]).Args.model_fields) == ["boost"]


def test_defaults_that_are_no_json_are_not_published() -> None:
    kind = wrap_third_party(MinPLogitsWarper, "min_p_hf")
    schema = json.dumps(kind.Args.model_json_schema(), allow_nan=False)
    assert json.loads(schema)["properties"]["min_tokens_to_keep"]["default"] == 1
    assert "default" not in json.loads(schema)["properties"]["filter_value"]
    row, processor = rows_of(1)[0], build(kind, min_p=0.5)
    ids: Any = torch.tensor([[1, 2, 3]])
    expected = MinPLogitsWarper(0.5)(ids, row.clone().unsqueeze(0))[0]
    assert equal(decode(chain_of(processor), [row]), [expected])


def test_a_constructors_refusal_names_the_argument() -> None:
    kind = wrap_third_party(MinPLogitsWarper, "min_p_hf")
    with pytest.raises(ArgumentError, match="`min_p` has to be a float") as caught:
        build(kind, min_p=3.0)
    assert caught.value.argument == "min_p"


def test_a_class_that_needs_a_tokenizer_says_so() -> None:
    kind = wrap_third_party(ZooCite, "cite")
    with pytest.raises(TypeError, match="ZooCite needs a tokenizer"):
        kind.build(kind.Args(), Context(Vocabulary(V)))


def test_an_instance_takes_no_arguments() -> None:
    assert not wrap_third_party(CountingBoost()).Args.model_fields
    with pytest.raises(TypeError, match="takes no arguments"):
        third_party_processor(CountingBoost(), arguments={"step": 1.0})


def test_a_partial_factory_runs_as_its_class() -> None:
    processor = DynamoProcessor(functools.partial(CountingBoost, step=2.0), name="theirs", stage=Stage.BIAS)
    bare = third_party_processor(CountingBoost, arguments={"step": 2.0})
    assert equal(decode(chain_of(processor), rows_of(5)), decode(chain_of(bare), rows_of(5)))
