"""The golden matrix as JSON, as text for a terminal, and as the table of docs/exactness.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]
"""One matrix as JSON data; see `golden_matrix.Matrix.as_json`."""

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "exactness.json"
"""The runs that docs/exactness.md shows, by name."""

REFUSED = "refused: "


def write(path: Path, name: str, run: Run) -> None:
    """Put one run into a file of several, in the place of an earlier one of this name."""
    runs = read(path) if path.exists() else {}
    runs[name] = run
    path.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Run]:
    """The runs in a file, by name."""
    runs: dict[str, Run] = json.loads(path.read_text(encoding="utf-8"))
    return runs


def terminal(run: Run) -> str:
    """The matrix, a line per processor; reasons follow."""
    rows, reasons = _table([run])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_notes(reasons)])


def markdown(runs: Iterable[Run]) -> str:
    """The same as a table, of all runs together: a cell holds for every one of them."""
    rows, reasons = _table(list(runs))
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    notes = [f"{line}  " for line in _notes(reasons)]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body, "", *notes]).rstrip()


def overview(runs: Mapping[str, Run]) -> str:
    """A table of the runs: what computed them, and how many texts are equal."""
    rows = [
        f"| {name} | {run['computed_by']} | {sum(run['texts'].values())} | {run['texts'].get('migrated', 0)} |"
        for name, run in runs.items()
    ]
    head = "| run | computed by | equal texts | of these in column *migrated* |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def _table(runs: Sequence[Run]) -> tuple[list[list[str]], list[str]]:
    """Rows of cells, the first one the head, and the reasons that cells refer to."""
    modes = list(dict.fromkeys(mode for run in runs for mode in run["modes"]))
    names = list(dict.fromkeys(name for run in runs for name in run["cells"]))
    reasons: list[str] = []
    rows = [
        [name, *(_cell([run["cells"].get(name, {}).get(mode, {}) for run in runs], reasons) for mode in modes)]
        for name in names
    ]
    return [["processor", *modes], *rows], reasons


def _cell(found: Sequence[Mapping[str, str]], reasons: list[str]) -> str:
    """What one cell says of several runs, each greedy and seeded."""
    outcomes = list(dict.fromkeys(outcome for cells in found for outcome in cells.values()))
    texts = []
    for outcome in outcomes:
        who = dict.fromkeys(sampling for cells in found for sampling, one in cells.items() if one == outcome)
        text = outcome
        if outcome.startswith(REFUSED):
            reason = outcome.removeprefix(REFUSED)
            if reason not in reasons:
                reasons.append(reason)
            text = f"refused [{reasons.index(reason) + 1}]"
        texts.append(text if len(outcomes) == 1 else f"{' and '.join(who)} {text}")
    return ", ".join(texts) or "-"


def _notes(reasons: Sequence[str]) -> list[str]:
    return [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
