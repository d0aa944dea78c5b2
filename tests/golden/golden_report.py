"""The golden matrix as JSON, as text for a terminal, and as the tables of docs/exactness.md.

``python tests/golden/golden_report.py FILE`` compares the page with the runs in a file; it needs
nothing but Python.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Run = Mapping[str, Any]
"""One matrix as JSON data; see `golden_matrix.Matrix.as_json`."""

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "exactness.md"
"""The page that shows the runs of a release."""

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


def section(name: str) -> str:
    """The part of the page between two marks."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text.partition(f"<!-- {name} -->")[2].partition(f"<!-- /{name} -->")[0].strip()


def documented_runs() -> list[str]:
    """Names of the runs of the page."""
    return [row[0] for row in _parsed(section("runs"))[1:]]


def documented_cells() -> dict[str, dict[str, str]]:
    """Texts of the page's cells, by processor and mode; reasons follow ``refused: ``."""
    matrix = section("matrix")
    reasons = dict(re.findall(r"^\[(\d+)\] (.*?) *$", matrix, re.MULTILINE))
    (_, *modes), *rows = _parsed(matrix)

    def with_reasons(cell: str) -> str:
        return re.sub(r"refused \[(\d+)\]", lambda number: REFUSED + reasons[number[1]], cell)

    return {name: dict(zip(modes, map(with_reasons, cells), strict=True)) for name, *cells in rows}


def differences(run: Run) -> list[str]:
    """Cells of a run that are not as the page shows them."""
    shown = documented_cells()
    found = {(name, mode): _said(cells) for name, row in run["cells"].items() for mode, cells in row.items()}
    return [
        f"{name}, {mode}: {text}; docs/{DOCUMENT.name} has {shown.get(name, {}).get(mode)}"
        for (name, mode), text in found.items()
        if shown.get(name, {}).get(mode) != text
    ]


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
        f"| {name} | {run['computed_by']} | {sum(run['texts'].values())} | {_first_migrated(run['texts'])} |"
        for name, run in runs.items()
    ]
    head = "| run | computed by | equal texts | of these in column *migrated* |"
    return "\n".join([head, "| --- | --- | --- | --- |", *rows])


def _first_migrated(texts: Mapping[str, int]) -> int:
    """Texts of the first column of migrated answers, which all runs but vLLM's call so alone."""
    return next((number for mode, number in texts.items() if mode.startswith("migrated")), 0)


def _parsed(table: str) -> list[list[str]]:
    """Cells of a Markdown table's rows, the first one the head."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    return [row for row in rows if set(row) != {"---"}]


def _said(cells: Mapping[str, str]) -> str:
    """The text of a cell of one run, with its reasons."""
    outcomes = list(dict.fromkeys(cells.values()))
    if len(outcomes) == 1:
        return outcomes[0]
    return ", ".join(f"{sampling} {outcome}" for sampling, outcome in cells.items())


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
    """The text of one cell for several runs, each greedy and seeded."""
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


def main(path: str) -> int:
    """The exit status: 0 if the tables of the page are those of the runs in a file."""
    runs = read(Path(path))
    tables = {"runs": overview(runs), "matrix": markdown(runs.values())}
    different = [name for name, table in tables.items() if table != section(name)]
    for name in different:
        sys.stdout.write(f"docs/{DOCUMENT.name}: section {name} must be\n\n{tables[name]}\n\n")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
