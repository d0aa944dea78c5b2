"""A small real byte-level BPE tokenizer, trained in memory, and ways to run one processor as an
engine would.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from adapters.chain import ProcessorChain, RowPlan, apply_edits, apply_late, plan_rows
from adapters.contract import Context, Processor
from adapters.vocabulary import Vocabulary

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the fox sleeps.\n",
    "Answer: the answer is B.\n\nHowever, 中文 and 日本語 and русский are here too.\n",
    "A. hair dryer\nB. toothbrush\nC. spoon\nthinking </ think > <think> about it\n",
] * 4


@lru_cache
def tokenizer() -> PreTrainedTokenizerFast:
    """``<|end|>`` is special, ``<think>`` and ``</think>`` are added tokens with text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


END = 0
PADDING = 5


@lru_cache
def vocabulary() -> Vocabulary:
    """The tokenizer's ids and five of padding."""
    return Vocabulary(len(tokenizer()) + PADDING, tokenizer(), [END])  # type: ignore[arg-type]


def context(**changes: object) -> Context:
    ids = vocabulary().encode
    facts = {
        "vocabulary": vocabulary(),
        "end_token_ids": frozenset([END]),
        "think_start": tuple(ids("<think>")),
        "think_end": tuple(ids("</think>")),
    }
    return Context(**(facts | changes))  # type: ignore[arg-type]


def plan_after(
    processors: Sequence[Processor], facts: Context, prompt: Sequence[int], generated: Sequence[int]
) -> RowPlan:
    """What a new chain asks for after a history."""
    chain = ProcessorChain(processors, facts)
    chain.start(prompt, generated)
    return chain.plan()


def run_row(chain: ProcessorChain, row: torch.Tensor) -> torch.Tensor:
    """The row after every edit of the chain; all but the forced token are -inf where one is
    forced.
    """
    logits = torch.stack([torch.zeros_like(row), row])
    planned, failures = plan_rows([(1, chain)])
    failures |= apply_edits(logits, planned)
    failures |= apply_late(logits, planned)
    for failure in failures.values():
        raise failure
    assert not logits[0].any(), "another row was touched"
    for _, _, plan in planned:
        if plan.force is not None:
            logits[1] = -torch.inf
            logits[1, plan.force] = 0.0
    return logits[1]


def step_by_step(
    processors: Sequence[Processor], facts: Context, prompt: Sequence[int], generated: Sequence[int], row: torch.Tensor
) -> list[torch.Tensor]:
    """Rows before each generated token and after the last, by one chain that accepts token by
    token.

    On the way the chain is asked twice, shown tokens twice, rewound and led astray; none of it may
    matter.
    """
    chain = ProcessorChain([pickle.loads(pickle.dumps(processor)) for processor in processors], facts)
    chain.start(prompt)
    rows = []
    for index in range(len(generated) + 1):
        rows.append(run_row(chain, row))
        assert torch.equal(run_row(chain, row), rows[-1])
        if index < len(generated):
            position = len(prompt) + index
            chain.accept((generated[index] + 1) % len(row), position)
            chain.accept(generated[index], position)
            chain.accept(generated[index], position)
            if index % 5 == 4:
                chain.rewind(position - 2)
                for again in (position - 2, position - 1, position):
                    chain.accept(generated[again - len(prompt)], again)
    return rows


def replayed(
    processors: Sequence[Processor], facts: Context, prompt: Sequence[int], generated: Sequence[int], row: torch.Tensor
) -> list[torch.Tensor]:
    """The same rows, each by a chain that replays the whole history at once."""
    rows = []
    for index in range(len(generated) + 1):
        chain = ProcessorChain(processors, facts)
        chain.start(prompt, generated[:index])
        rows.append(run_row(chain, row))
    return rows


def assert_rows_equal(rows: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for index, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        assert torch.equal(row, wanted), f"after {index} generated tokens"


def after_rewinding(
    processors: Sequence[Processor], facts: Context, prompt: Sequence[int], generated: Sequence[int], row: torch.Tensor
) -> list[torch.Tensor]:
    """The same rows, by one chain whose state takes every token, then gives back one and the
    others at once.
    """
    chain = ProcessorChain(processors, facts)
    rows = []
    for index in range(len(generated) + 1):
        chain.start(prompt)
        for token_id in generated:
            chain.accept(token_id, chain.position)
            for member in chain.members:
                member.processor.catch_up()
        chain.rewind(max(len(prompt) + index, chain.position - 1))
        chain.rewind(len(prompt) + index)
        rows.append(run_row(chain, row))
    return rows
