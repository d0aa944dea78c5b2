"""Text that a processor writes is written whole, or refused: no token of it ends the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import MODELS, vocabulary_like

from adapters.chain import ProcessorChain, apply_edits, plan_rows
from adapters.chain.batch import apply_late
from adapters.contract import ArgumentError, Context
from adapters.processors.forcing import ForcedPrefix, ForcedSequence, ForceLastPhrase
from adapters.processors.multiple_choice import MultipleChoice
from adapters.processors.thinking import ThinkingBudget
from adapters.processors.trigger_phrase import TriggerPhrase

KINDS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "forced_sequence": (ForcedSequence, "text", {}),
    "forced_prefix": (ForcedPrefix, "text", {}),
    "forced_prefix, healed": (ForcedPrefix, "text", {"heal": True}),
    "force_last_phrase": (ForceLastPhrase, "text", {}),
    "trigger_phrase": (TriggerPhrase, "text", {"after_tokens": 2}),
    "thinking_budget": (ThinkingBudget, "message", {"tokens": 0, "start": "%%", "end": "&&"}),
    "multiple_choice": (MultipleChoice, "choices", {}),
}
NAMES = [name for model in MODELS.values() for name in (*model.special, *model.plain)]
TEXTS = st.lists(st.sampled_from([*NAMES, " the", "quick", "\n", "é", "😀", "{"]), min_size=1, max_size=4).map("".join)


def chain_of(context: Context, kind: str, text: str) -> ProcessorChain:
    processor, argument, options = KINDS[kind]
    args = processor.Args.model_validate({argument: [text] if argument == "choices" else text, **options})
    chain = ProcessorChain(list(processor.build(args, context)), context)
    chain.start(context.vocabulary.encode("%%"))
    return chain


def written(chain: ProcessorChain) -> list[int]:
    """What a model writes that prefers an x, then an end, then the highest id."""
    context = chain.context
    (other,) = context.vocabulary.encode("x")
    while chain.position < 400:
        logits = torch.arange(context.vocabulary.size, dtype=torch.float32)[None] / 1000
        logits[0, sorted(context.end_token_ids)] = 4.0 if chain.position - chain.prompt_length > 3 else 2.0
        logits[0, other] = 3.0
        planned, failures = plan_rows([(0, chain)])
        assert not failures, failures
        assert not apply_edits(logits, planned)
        apply_late(logits, planned)
        forced = chain.plan().force
        chain.accept(int(logits[0].argmax()) if forced is None else forced, chain.position)
        if chain.tokens[-1] in context.end_token_ids:
            break
    return chain.tokens[chain.prompt_length :]


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(list(MODELS)), st.sampled_from(list(KINDS)), TEXTS, st.data())
def test_a_text_is_written_whole_or_refused(model: str, kind: str, text: str, data: st.DataObject) -> None:
    vocabulary = vocabulary_like(model)
    tokens = vocabulary.encode(text)
    stops = data.draw(st.lists(st.sampled_from([*tokens, *vocabulary.encode("zv")]), max_size=1))
    context = Context(vocabulary, end_token_ids=vocabulary.eos_token_ids | set(stops))
    last = 1 if kind == "forced_sequence" else 0
    if any(token_id in context.end_token_ids for token_id in tokens[: len(tokens) - last]):
        with pytest.raises(ArgumentError, match="would end the answer there") as caught:
            chain_of(context, kind, text)
        assert caught.value.argument == KINDS[kind][1]
        return
    found = written(chain_of(context, kind, text))
    assert found[-1] in context.end_token_ids
    if kind != "forced_prefix, healed":
        assert any(found[i : i + len(tokens)] == tokens for i in range(len(found)))
    pieces = [vocabulary.token_bytes[token_id] or b"<%d>" % token_id for token_id in tokens]
    assert b"".join(pieces) in b"".join(vocabulary.token_bytes[i] or b"<%d>" % i for i in found)


@pytest.mark.parametrize("end", ["</f><|im_end|>", "<|im_end|></f>"])
def test_an_answer_may_end_behind_but_not_within_the_closing_tag(end: str) -> None:
    vocabulary = vocabulary_like("qwen")
    context = Context(vocabulary, end_token_ids=vocabulary.eos_token_ids)
    args = ThinkingBudget.Args(tokens=0, start="<f>", end=end)
    if end.startswith("<|"):
        with pytest.raises(ArgumentError, match=r"end: token 0, id \d+, would end the answer there"):
            ThinkingBudget(args, context)
    else:
        chain = ProcessorChain([ThinkingBudget(args, context)], context)
        chain.start(vocabulary.encode("<f>"))
        assert written(chain) == vocabulary.encode(end)
