"""The three simple processors, and that neither calls nor history decide anything but position."""

from __future__ import annotations

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from adapters import ForcedSequenceProcessor, HelloWorldProcessor, TemperatureProcessor, create_trtllm_adapters

VOCAB, END = 32, 2


class Characters:
    """A tokenizer with one token per character."""

    eos_token_id: int | None = END

    def encode(self, text, *, add_special_tokens=True):
        return [10 + "Helo wrd!".index(c) for c in text if c in "Helo wrd!"]

    def convert_ids_to_tokens(self, ids):
        return [("." * 10 + "Helo wrd!")[i] for i in ids]

    def decode(self, ids, **_):
        return "".join(self.convert_ids_to_tokens(ids))

    def __len__(self):
        return 19


def forced(processor, history):
    logits = torch.zeros(VOCAB)
    processor(history, logits)
    return logits.isfinite().nonzero().flatten().tolist()


def test_temperature_divides() -> None:
    logits = torch.tensor([1.0, -2.0, 4.0])
    TemperatureProcessor(0.5)([1], logits)
    assert logits.tolist() == [2.0, -4.0, 8.0]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_temperature_out_of_range(value) -> None:
    with pytest.raises(ValueError, match="finite number above 0"):
        TemperatureProcessor(value)


def test_a_forced_sequence_follows_the_position_not_the_calls() -> None:
    processor = ForcedSequenceProcessor([5, 6, 7], END, prompt_length=3)
    prompt = [1, 1, 1]
    answer = [5, 6, 7, END, END]
    order = [0, 0, 3, 1, 2, 1, 4, 0]
    assert [forced(processor, prompt + answer[:i]) for i in order] == [[answer[i]] for i in order]


def test_without_a_prompt_length_the_first_call_is_position_0() -> None:
    processor = ForcedSequenceProcessor([5, 6], END)
    assert [forced(processor, [1, 1, *[5, 6][:i]]) for i in (0, 1, 2)] == [[5], [6], [END]]


def test_a_forced_token_that_was_banned_stays_banned_and_fails() -> None:
    (adapter,) = create_trtllm_adapters([ForcedSequenceProcessor([5], END, prompt_length=1)], end_id=END)
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, 5] = -torch.inf
    adapter(1, logits, [[1]], None, None)
    assert adapter.failure is not None
    assert adapter.failure.reason == "empty"
    assert logits.isfinite().nonzero()[:, 2].tolist() == [END]


def test_a_history_shorter_than_the_prompt_fails_and_never_wraps() -> None:
    (adapter,) = create_trtllm_adapters([ForcedSequenceProcessor([5, 6], END, prompt_length=4)], end_id=END)
    adapter(1, torch.zeros(1, 1, VOCAB), [[1, 2]], None, None)
    assert adapter.failure is not None
    assert adapter.failure.reason == "raised"


@pytest.mark.parametrize("ids", [[-1], [True], [1.5]])
def test_ids_are_integers_of_at_least_zero(ids) -> None:
    with pytest.raises(ValueError, match="integers of at least 0"):
        ForcedSequenceProcessor(ids, END)


def test_hello_world_keeps_no_tokenizer() -> None:
    processor = HelloWorldProcessor(Characters(), prompt_length=0)  # type: ignore[arg-type]
    assert processor.token_ids == [10, 11, 12, 12, 13, 14, 15, 13, 16, 12, 17, 18]
    assert all(not isinstance(value, Characters) for value in vars(processor).values())


@pytest.mark.parametrize("prefix", ["first", "always"])
def test_hello_world_has_no_space_before_it(prefix) -> None:
    pieces = {"<unk>": 0, "</s>": 1, "▁": 2, **{c: 3 + i for i, c in enumerate("Helo▁wrd!") if c != "▁"}}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, [], unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=prefix)
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme=prefix)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    assert tokenizer.encode("Hello", add_special_tokens=False)[0] == 2
    assert tokenizer.convert_ids_to_tokens(HelloWorldProcessor(tokenizer).token_ids) == list("Hello▁world!")  # type: ignore[arg-type]


def test_hello_world_needs_an_end_token() -> None:
    class Endless(Characters):
        eos_token_id = None

    with pytest.raises(ValueError, match="no eos_token_id"):
        HelloWorldProcessor(Endless())  # type: ignore[arg-type]
