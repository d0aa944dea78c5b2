"""The model of ``--engine constant`` has the ids of its tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.serving.constant import ConstantModel
from worker.sampling import SamplingParams


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    """Ids above the number of tokens were not in the vocabulary: mostly those of a chat's marks."""
    Tokenizer(WordLevel({"word": 3, "mark": 9}, unk_token="word")).save(str(tmp_path / "tokenizer.json"))
    model = ConstantModel(tmp_path, 0.0, 1e9)
    assert model.vocab_size == 10
    assert int(model.late_logits([0]).argmax()) == 3


def test_rows_that_a_plan_leaves_out_are_left_out(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"word": 3}, unk_token="word")).save(str(tmp_path / "tokenizer.json"))
    rows = (Request("a", 0, SamplingParams(), [3, 3], 1, 9, frozenset(), 0),)
    plan = Plan(rows, (), rows, drafts=((3, 3, 3),), unread={0: 0, 1: 1})
    assert ConstantModel(tmp_path, 0.0, 1e9).forward(plan).shape == (2, 4)
