"""The controller's public members one by one: which facts of Megatron-Core's hold here, and
which faults do not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_doubles import ScriptedModel

from worker.engines.embedded import Engine
from worker.engines.embedded.controller.controller import NO_TOKEN, TextGenerationController
from worker.engines.embedded.controller.types import (
    InferenceParams,
    InferenceRequest,
    MaxSequenceLengthOverflowError,
    TokenStream,
    TopN,
)
from worker.engines.embedded.plan import Samples
from worker.engines.embedded.sampling import Sampler

EOD = 99


class WordTokenizer:
    """Token i is the text ``<i>``."""

    bos: int | None = 0
    eod = EOD

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(f"<{one}>" for one in ids)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        return [len(self.detokenize(ids[:place])) for place in range(len(ids))]


class SkippingTokenizer(WordTokenizer):
    """Takes `skip_special_tokens`; ids above 90 are special."""

    def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"<{one}>" for one in ids if one <= 90 or not skip_special_tokens)


def make(tokenizer: Any = None) -> TextGenerationController:
    engine = Engine("no-checkpoint", model=ScriptedModel(), max_num_seqs=8)  # type: ignore[arg-type]
    return TextGenerationController(engine, tokenizer or WordTokenizer())


CONTROLLER = make()


@pytest.mark.parametrize(("add", "expected"), [(True, [0, 5, 0, 6]), (False, [5, 0, 6])])
def test_every_leading_bos_goes_and_one_comes(add: bool, expected: list[int]) -> None:
    assert TextGenerationController.tokenize_prompt(WordTokenizer(), "0 0 5 0 6", add) == expected


def test_no_bos() -> None:
    tokenizer = WordTokenizer()
    tokenizer.bos = None
    assert TextGenerationController.tokenize_prompt(tokenizer, "0 5") == [0, 5]
    with pytest.raises(ValueError, match="add_BOS"):
        TextGenerationController.tokenize_prompt(tokenizer, "0 5", True)


def test_eod_at_the_end_goes() -> None:
    detokenize = TextGenerationController.detokenize
    assert detokenize(WordTokenizer(), [1, EOD, EOD, EOD]) == "<1>"
    assert detokenize(WordTokenizer(), [1, EOD], remove_EOD=False) == "<1><99>"
    assert detokenize(WordTokenizer(), [EOD, 1, EOD, 2, EOD]) == "<99><1><99><2>"
    tokens = [1, EOD]
    detokenize(WordTokenizer(), tokens)
    assert tokens == [1, EOD]


def test_skip_special_tokens_goes_to_tokenizers_that_take_it() -> None:
    detokenize = TextGenerationController.detokenize
    assert detokenize(WordTokenizer(), [95, 1]) == "<95><1>"
    assert detokenize(SkippingTokenizer(), [95, 1]) == "<1>"
    assert detokenize(SkippingTokenizer(), [95, 1], skip_special_tokens=False) == "<95><1>"


def test_segments() -> None:
    tokens = torch.tensor([1, 22, 3])
    assert CONTROLLER.detokenize_generations(tokens, torch.tensor(3), False) == ("<1><22><3>", None)
    assert CONTROLLER.detokenize_generations(tokens, torch.tensor(3), True) == ("<1><22><3>", [["<1>", "<22>", "<3>"]])
    assert CONTROLLER.detokenize_generations(torch.tensor([1, EOD]), 2, True) == ("<1>", [["<1>", ""]])
    assert CONTROLLER.detokenize_generations(tokens, 2, True) == ("<1><22>", [["<1>", "<22>"]])
    assert CONTROLLER.detokenize_generations(tokens, 0, True) == ("", [[]])


# Sampling


def sample(rows: torch.Tensor, params: Any, **arguments: Any) -> list[int]:
    return CONTROLLER.sample_from_logits(rows, params, **arguments).tolist()


def test_the_sampler_gets_rows_that_lie_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their memory is like: kernels of a GPU read them so."""
    given: list[torch.Tensor] = []
    sampled = Sampler.sample

    def noted(sampler: Sampler, logits: torch.Tensor, *rest: Any) -> Samples:
        given.append(logits)
        return sampled(sampler, logits, *rest)

    monkeypatch.setattr(Sampler, "sample", noted)
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(4))
    for rows in (logits.T, logits.T[:, ::2], logits[:, :1].T.expand(2, -1), logits.T.double()):
        expected = sample(rows.contiguous(), InferenceParams(seed=1))
        assert sample(rows, InferenceParams(seed=1)) == expected
    assert all(each.is_contiguous() for each in given)


def drawn(row: Sequence[float], **controls: Any) -> set[int]:
    """What comes up in 400 draws."""
    logits = torch.tensor([list(row)] * 400)
    return set(sample(logits, InferenceParams(seed=1, **controls)))


def test_logits_stay_as_they_are() -> None:
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample(logits, InferenceParams(temperature=0.5, top_k=3))
    assert torch.equal(logits, before)


def test_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert sample(logits, InferenceParams(top_k=1, temperature=7.0)) == [1]
    assert sample(logits, InferenceParams(temperature=0.0)) == [1]


def test_ties_at_k_are_kept() -> None:
    assert drawn([1, 1, 1, 0], top_k=2) == {0, 1, 2}


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {0}), (0.75, {0, 1}), (0.76, {0, 1, 2}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_shortest_prefix(top_p: float, kept: set[int]) -> None:
    assert drawn([math.log(one) for one in (0.5, 0.25, 0.125, 0.125)], top_p=top_p) == kept


def test_top_k_and_top_p_together() -> None:
    row = [math.log(one) for one in (0.4, 0.3, 0.2, 0.1)]
    assert drawn(row, top_k=2, top_p=0.5) == {0}
    assert drawn(row, top_k=2, top_p=0.6) == {0, 1}


def test_off_is_the_whole_vocabulary_even_where_k_is_its_size() -> None:
    assert drawn([0.0] * 8) == drawn([0.0] * 8, top_k=8) == drawn([0.0] * 8, top_k=50) == set(range(8))


def test_mixed_parameters_in_one_step() -> None:
    logits = torch.arange(100.0).repeat(12, 1)
    kinds = [
        (InferenceParams(temperature=0.1, top_p=0.01), [9, 6, 10], 99),
        (InferenceParams(temperature=5.0, top_k=15), [0, 3, 2], 85),
        (InferenceParams(top_p=0.8), [4, 1, 7], 97),
        (InferenceParams(temperature=10.0, top_k=5), [11, 5, 8], 95),
    ]
    params = [InferenceParams()] * 12
    least = [0] * 12
    for one, rows, lowest in kinds:
        for row in rows:
            params[row], least[row] = one, lowest
    for position in range(20):
        tokens = sample(logits, params, positions=[position] * 12)
        assert all(token >= lowest for token, lowest in zip(tokens, least, strict=True))


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(6, 50)
    params = [InferenceParams(seed=row) for row in range(6)]
    together = sample(logits, params, positions=range(6))
    changed = logits.clone()
    changed[3] = float("nan")
    changed[5] = torch.randn(50)
    again = sample(changed, params, positions=range(6))
    assert again[:3] + again[4:5] == together[:3] + together[4:5]
    assert again[3] == NO_TOKEN
    assert list(CONTROLLER.sampling_errors) == [3]
    assert "NaN" in CONTROLLER.sampling_errors[3]
    assert sample(logits, params, positions=range(6)) == together
    assert CONTROLLER.sampling_errors == {}


def test_rows_without_a_token() -> None:
    logits = torch.tensor([[1.0, math.inf], [-math.inf, -math.inf], [0.0, 1.0]])
    assert sample(logits, InferenceParams(temperature=0.0)) == [NO_TOKEN, NO_TOKEN, 1]


def test_without_a_seed_calls_differ() -> None:
    logits = torch.zeros(8, 1000)
    assert sample(logits, InferenceParams()) != sample(logits, InferenceParams())
    assert sample(logits, InferenceParams(seed=4)) == sample(logits, InferenceParams(seed=4))
    assert sample(logits, InferenceParams(seed=4)) != sample(logits, InferenceParams(seed=4), positions=[1] * 8)


def test_padding_is_never_sampled() -> None:
    logits = torch.arange(10.0).repeat(50, 1)
    assert max(sample(logits, InferenceParams(temperature=100.0, seed=0), vocab_size=7)) <= 6
    with pytest.raises(ValueError, match="vocab_size"):
        sample(logits, InferenceParams(), vocab_size=11)


def test_frequencies_are_the_probabilities() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = torch.tensor(sample(chances.log().repeat(4000, 1), InferenceParams(seed=2)))
    found = torch.bincount(tokens, minlength=4) / len(tokens)
    assert float((found - chances).abs().max()) < 0.03


def test_top_n() -> None:
    found: dict[int, list[TopN]] = {}
    logits = (torch.arange(100.0) / 10).repeat(2, 1)
    params = InferenceParams(top_k=2, top_n_logprobs=3, seed=1)
    tokens = sample(logits, params, generation_started=[True, True], top_n_logprobs_dict=found)
    assert min(tokens) >= 98
    for row in (0, 1):
        (entry,) = found[row]
        assert list(entry) == [99, 98, 97]
        assert list(entry.values()) == pytest.approx([-2.3521, -2.4521, -2.5521], abs=1e-4)


def test_top_n_skips_prompts_on_request() -> None:
    logits, started = torch.randn(3, 20), torch.tensor([True, False, True])
    skipping: dict[int, list[TopN]] = {}
    params = InferenceParams(top_n_logprobs=2, skip_prompt_log_probs=True)
    sample(logits, params, generation_started=started, top_n_logprobs_dict=skipping)
    assert {row: len(entries) for row, entries in skipping.items()} == {0: 1, 2: 1}
    every: dict[int, list[TopN]] = {}
    params = InferenceParams(top_n_logprobs=2)
    sample(logits, params, generation_started=started, top_n_logprobs_dict=every)
    assert {row: len(entries) for row, entries in every.items()} == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("by_training", [False, True])
def test_top_n_of_whole_prompts(by_training: bool) -> None:
    found: dict[int, list[TopN]] = {}
    whole = torch.randn(4, 7, 20, requires_grad=by_training)
    params = [InferenceParams(top_n_logprobs=count) for count in (1, 2, 3, 0)]
    sample(whole[:, -1], params, generation_started=[True] * 4, top_n_logprobs_dict=found, logits=whole)
    assert {row: [len(one) for one in entries] for row, entries in found.items()} == {
        0: [1] * 7,
        1: [2] * 7,
        2: [3] * 7,
    }
    expected = whole.double().log_softmax(-1).topk(3)
    for place, entry in enumerate(found[2]):
        assert list(entry) == expected.indices[2, place].tolist()
        assert list(entry.values()) == pytest.approx(expected.values[2, place].tolist(), abs=1e-12)


def test_top_n_are_of_the_mode_that_is_asked_for() -> None:
    """Past its prompt a row's are of what was sampled from; others are raw in any mode."""
    logits, found = torch.randn(2, 20, generator=torch.Generator().manual_seed(5)), dict[int, list[TopN]]()
    params = InferenceParams(top_k=2, temperature=0.5, top_n_logprobs=3, seed=1, logprobs_mode="processed")
    sample(logits, params, generation_started=[True, False], top_n_logprobs_dict=found)
    kept = (logits[0].double() / 0.5).topk(2)
    (entry,) = found[0]
    assert list(entry) == kept.indices.tolist()
    assert list(entry.values()) == pytest.approx(kept.values.log_softmax(-1).tolist(), abs=1e-6)
    (entry,) = found[1]
    assert list(entry.values()) == pytest.approx(logits[1].double().log_softmax(-1).topk(3).values.tolist(), abs=1e-12)


@pytest.mark.parametrize("is_prompt", [True, False])
def test_padding_is_not_among_the_top_n(is_prompt: bool) -> None:
    """It is part of the whole."""
    logits, found = (torch.arange(20.0) / 10).repeat(1, 4, 1), dict[int, list[TopN]]()
    whole = logits if is_prompt else None
    params = InferenceParams(top_n_logprobs=2, seed=1)
    sample(logits[:, -1], params, vocab_size=15, generation_started=[True], top_n_logprobs_dict=found, logits=whole)
    assert len(found[0]) == (4 if is_prompt else 1)
    expected = logits[0, 0].double().log_softmax(-1)[[14, 13]].tolist()
    for entry in found[0]:
        assert list(entry) == [14, 13]
        assert list(entry.values()) == pytest.approx(expected, abs=1e-12)


def test_ids_of_equal_text_are_two_entries() -> None:
    class Same(WordTokenizer):
        def detokenize(self, ids: Sequence[int]) -> str:
            return "x" * len(ids)

    found: dict[int, list[TopN]] = {}
    make(Same()).sample_from_logits(torch.arange(10.0)[None], InferenceParams(top_n_logprobs=4), None, [True], found)
    assert len(found[0][0]) == 4


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"top_n_logprobs_dict": {}}, "needs generation_started"),
        ({"generation_started": [True]}, "needs generation_started and top_n_logprobs_dict"),
        (
            {"generation_started": [True], "top_n_logprobs_dict": {}, "logits": torch.zeros(1, 2, 20)},
            "skip_prompt_log_probs is set",
        ),
    ],
)
def test_top_n_errors(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sample(torch.zeros(1, 20), InferenceParams(top_n_logprobs=1, skip_prompt_log_probs=True), **arguments)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"top_k": -3}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_n_logprobs": -1, "return_log_probs": True}, "top_n_logprobs"),
        ({"top_n_logprobs": -1}, "top_n_logprobs"),
        ({"top_n_logprobs": True}, "top_n_logprobs"),
        ({"num_tokens_to_generate": 1, "num_tokens_total": 1}, "num_tokens_total"),
        ({"num_tokens_to_generate": -1}, "num_tokens_to_generate"),
        ({"num_tokens_total": True}, "num_tokens_total"),
        ({"stop_words": "stop"}, "stop_words"),
        ({"stop_words": 5}, "stop_words"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"logits_processor": print}, "logits_processor must be a list of callables"),
        ({"processors": {"name": "min_tokens"}}, "processors must be a list of processors by name"),
        ({"n": 0}, "n must"),
        ({"n": 2, "temperature": 0.0}, "n must be 1"),
        ({"best_of": 2, "temperature": 0.0}, "best_of must be 1"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        InferenceParams(**values)


def test_what_needs_a_history_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match=r"^presence_penalty needs the history"):
        sample(torch.zeros(1, 20), InferenceParams(presence_penalty=1.0))
    with pytest.raises(ValueError, match=r"^logits processors need the history"):
        sample(torch.zeros(1, 20), InferenceParams(processors=[{"name": "min_tokens", "args": {"n": 1}}]))
    with pytest.raises(ValueError, match="1 rows, 2 sampling_params"):
        sample(torch.zeros(1, 20), [InferenceParams()] * 2)


def test_wrong_arguments_are_named() -> None:
    logits = torch.zeros(2, 20)
    with pytest.raises(ValueError, match=r"^last_token_logits must have shape \[B, V\], got \[20\]"):
        sample(logits[0], InferenceParams())
    with pytest.raises(ValueError, match=r"^positions must be integers of at least 0, got \[3, -1\]"):
        sample(logits, InferenceParams(), positions=[3, -1])
    with pytest.raises(ValueError, match=r"^positions must be a list of integers, got Tensor"):
        sample(logits, InferenceParams(), positions=torch.tensor([3, 4]))
    request = InferenceRequest(request_id=0, prompt_tokens=[5])
    with pytest.raises(ValueError, match=r"^active_streams has \[7\], which are no keys of active_requests"):
        CONTROLLER.generate_all_output_tokens_static_batch({0: request}, {7: TokenStream(7)})
    with pytest.raises(ValueError, match=r"^prompt of request 0 must be a text, got 5"):
        CONTROLLER.add_request(InferenceRequest(request_id=0, prompt=5))  # type: ignore[arg-type]


def test_a_prompt_that_fills_the_context_is_too_long() -> None:
    """Even to be scored: one token is sampled then, and dropped."""
    full = [3] * CONTROLLER.engine.info.context_length
    for most in (0, None, 1):
        request = InferenceRequest(
            request_id=0, prompt_tokens=full, sampling_params=InferenceParams(num_tokens_to_generate=most)
        )
        with pytest.raises(MaxSequenceLengthOverflowError):
            CONTROLLER.add_request(request)


# Status and padding


def test_generation_status() -> None:
    tokens = torch.tensor([[5, 99], [5, 3], [5, 99]])
    started = torch.tensor([True, True, False])
    before, lengths = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int32)
    done, counts = CONTROLLER.update_generation_status(tokens, started, 1, before, lengths)
    assert done.tolist() == [True, False, False]
    assert (counts.tolist(), counts.dtype) == ([0, 1, 0], torch.int32)
    assert not before.any()
    assert not lengths.any()
    done, counts = CONTROLLER.update_generation_status(tokens, started, 1, done, counts, termination_id=-1)
    assert (done.tolist(), counts.tolist()) == ([True, False, False], [0, 2, 0])
    each = torch.tensor([-1, 3, 99])
    assert CONTROLLER.update_generation_status(tokens, started, 1, before, lengths, each)[0].tolist() == [
        False,
        True,
        False,
    ]


def test_padding() -> None:
    prompts = [[1, 2], [3]]
    before = copy.deepcopy(prompts)
    padded = CONTROLLER.pad_input_prompt_tokens(prompts, 3, 4)
    assert padded.tolist() == [[1, 2, EOD, EOD], [3, EOD, EOD, EOD], [EOD] * 4]
    assert prompts == before
    assert CONTROLLER.unpad_input_prompt_tokens(padded, 2).tolist() == padded[:2].tolist()
    with pytest.raises(ValueError, match="do not fit"):
        CONTROLLER.pad_input_prompt_tokens(prompts, 1, 4)
    with pytest.raises(ValueError, match="do not fit"):
        CONTROLLER.pad_input_prompt_tokens(prompts, 3, 1)


def test_inference_input() -> None:
    requests = {row: InferenceRequest(request_id=row, prompt_tokens=ids) for row, ids in enumerate([[1, 2, 3], [4]])}
    padded = CONTROLLER.pad_input_prompt_tokens([[1, 2, 3], [4]], 2, 3)
    plain = CONTROLLER.prep_inference_input(padded, requests)
    assert plain["attention_mask"] is None
    positions = plain["position_ids"]
    assert positions is not None
    assert positions.tolist() == [[0, 1, 2]] * 2
    mask = CONTROLLER.prep_inference_input(padded, requests, use_attention_mask=True)["attention_mask"]
    assert mask is not None
    assert mask.shape == (2, 1, 3, 3)
    assert (~mask[0, 0]).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (~mask[1, 0]).int().tolist() == [[1, 0, 0]] * 3


def test_the_inference_input_is_where_the_tokens_are() -> None:
    tokens = torch.zeros(2, 3, dtype=torch.int64, device="meta")
    requests = {0: InferenceRequest(request_id=0, prompt_tokens=[1, 2])}
    found = CONTROLLER.prep_inference_input(tokens, requests, use_attention_mask=True)
    assert {name: each.device.type for name, each in found.items() if each is not None} == dict.fromkeys(found, "meta")


def test_stream_tokens() -> None:
    requests = [InferenceRequest(request_id=place, prompt_tokens=[1, 2]) for place in range(4)]
    streams = [TokenStream(place) for place in range(4)]
    streams[2].finish()
    CONTROLLER.stream_tokens(
        InferenceParams(num_tokens_to_generate=3, return_segments=True),
        range(4),
        requests,
        streams,
        torch.tensor([True, False, True, True]),
        [False, False, False, False],
        torch.tensor([[1, 2, 7, 8, 0]] * 4),
        [2] * 4,
        [2, 2, 2, 3],
        [[-1.0, -2.0, -3.0, -4.0]] * 4,
    )
    assert [stream.finished for stream in streams] == [False, False, True, True]
    assert [len(stream._items) for stream in streams] == [1, 0, 0, 1]
    item = streams[0]._items[0]
    assert (item.generated_tokens, item.generated_text, item.generated_segments, item.generated_log_probs) == (
        [7, 8],
        "<7><8>",
        ["<7>", "<8>"],
        [-2.0, -3.0],
    )
    assert item.generated_length == 2
    CONTROLLER.stream_tokens(
        InferenceParams(num_tokens_to_generate=0),
        [0],
        requests[:1],
        streams[:1],
        [True],
        [True],
        [[1, 2]],
        [2],
        [0],
        None,
    )
    assert not streams[0].finished


def test_dummy_forward_does_nothing() -> None:
    controller = make()
    model = controller.engine.session.stepper.model
    assert isinstance(model, ScriptedModel)
    assert controller.dummy_forward() is None
    assert model.plans == []


def test_a_model_without_a_tokenizer_needs_one() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        TextGenerationController(Engine("no-checkpoint", model=ScriptedModel()))  # type: ignore[arg-type]
