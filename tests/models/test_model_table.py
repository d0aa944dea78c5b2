"""The table of model types: complete, and the one in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import load_model
from worker.engines.embedded.model.decoder_layers import TWISTS
from worker.errors import StartupError
from worker.models.model_table import LLAMA_LIKE, SERVED, TABLE, markdown
from worker.models.model_types import MODEL_TYPES

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_causal_model_of_transformers_has_a_row() -> None:
    assert set(TABLE) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert all(row.refused or row.network for row in TABLE.values())
    assert len(SERVED) >= 80
    assert set(LLAMA_LIKE) < set(MODEL_TYPES) < set(SERVED)
    assert {row.name for row in TABLE.values() if row.network in ("llama", "native")} == set(TWISTS)


def test_the_documentation_has_this_table() -> None:
    """If it fails: put `markdown()` between the two headings."""
    assert markdown() in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        *((row.name, f"is not served by the embedded engine: {row.refused}") for row in TABLE.values() if row.refused),
        *((name, "is not known to the embedded engine") for name in ("", "no_such_model", None, 3)),
    ],
)
def test_what_is_not_served_is_refused_with_its_reason(model_type: object, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(StartupError, match=r"config\.json: model_type") as refused:
        load_model(EmbeddedConfig(model_path=tmp_path, device="cpu"))
    assert reason in str(refused.value)
