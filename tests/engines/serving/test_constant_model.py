"""The model of ``--engine constant`` has the ids of its tokenizer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from worker.engines.embedded.serving.constant import ConstantModel


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    """Ids above the number of tokens were not in the vocabulary: mostly those of a chat's marks."""
    Tokenizer(WordLevel({"word": 3, "mark": 9}, unk_token="word")).save(str(tmp_path / "tokenizer.json"))
    model = ConstantModel(tmp_path, 0.0, 1e9)
    assert model.vocab_size == 10
    assert int(model.late_logits([0]).argmax()) == 3
