"""`docs/comparison.md`: what is said of this worker names tests that exist, what is said of others
has a source.
"""

from __future__ import annotations

import re

from document_pages import ROOT, text_of

from worker.frontdoor.routes import ROUTES
from worker.models.model_table import SERVED

PAGE = text_of("docs/comparison.md")
ROWS = re.findall(
    r"^\| (this worker|Dynamo's worker[^|]*|vLLM[^|]*|SGLang|TensorRT-LLM) \| (.+) \| (.*)\|$", PAGE, re.MULTILINE
)
FEATURES = PAGE.split("\n## ")[1:-1]


def test_every_feature_has_a_row_of_each_system() -> None:
    for feature in FEATURES:
        for system in ("this worker", "Dynamo's worker", "vLLM", "SGLang", "TensorRT-LLM"):
            assert re.search(rf"^\| [^|]*{system}", feature, re.MULTILINE), (feature.partition("\n")[0], system)


def test_what_is_said_of_this_worker_names_tests_that_exist() -> None:
    own = [source for system, _, source in ROWS if system == "this worker"]
    assert len(own) == len(FEATURES)
    for source in own:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", source)
        assert tests
        for file, test in tests:
            assert re.search(rf"^ *(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), (
                test
            )


def test_what_is_said_of_others_has_a_source() -> None:
    for system, claim, source in ROWS:
        if system != "this worker" and not claim.startswith(("not documented", "as ", "no migration")):
            assert source.strip(), (system, claim)
    assert re.search(r"Looked up on \d{4}-\d{2}-\d{2}", PAGE)


def test_what_is_missing_here_is_not_served() -> None:
    missing = PAGE.split("\n## ")[-1]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", missing, re.MULTILINE)
    assert dict(rows)["model types"].startswith(f"{len(SERVED)} ")
    assert not [route.path for route in ROUTES if any(f"`{route.path}`" in feature for feature, _ in rows)]
