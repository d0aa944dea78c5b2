"""Writes benchmarks/results/clients.md: runs the clients against ``launch/agg.sh``.

``scripts/clients --report [NAME ...]`` makes their environments first; with names it runs these
rows and renews these alone.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(_REPOSITORY), str(_REPOSITORY / "tests" / "clients")]  # tests/worker is not the worker
sys.path += [str(_REPOSITORY / "tests" / each) for each in ("", "launch")]

from client_checks import CASES, CHECKED, case_of, run_checks  # noqa: E402  # what pytest's conftest finds for tests
from client_environments import REPOSITORY, REQUIREMENTS, version_of  # noqa: E402
from client_page import Program, programs, run_program  # noqa: E402
from launched_script import LaunchedScript, launched  # noqa: E402

from worker.models import model_cache, prepare_default_model  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "clients.md"
WORKER = ("--device", "cpu", "--context-length", "4096")
HEAD = """# Clients

`tests/clients/` runs clients that people have against `launch/agg.sh` as it comes, with the default model
(SmolLM2-135M-Instruct, float32); `scripts/clients --report` makes their environments, runs them, and writes this table.
No client has a patch. The small model seldom calls a tool by itself: checks of automatic calls make it write the call
with forced_prefix, and so prove parsing, streams and protocol. A number is that of checks that pass, "2 of 3" where
one does not; "page" is the client's programs in [docs/clients.md](../../docs/clients.md).
"""


def _tried(what: str, action: Callable[[], object]) -> str:
    """The failures, which are said; empty if nothing went wrong."""
    try:
        action()
    except Exception as error:  # the boundary of a client: the others are run too
        sys.stderr.write(f"clients: {what}: {error}\n")
        return str(error) or repr(error)
    return ""


def cells(client: str, served: LaunchedScript, checkpoint: Path) -> dict[str, str]:
    """The cells of a client's row; the client is run."""
    passed: Counter[str] = Counter()
    total: Counter[str] = Counter()

    def count(case: str, wrong: str) -> None:
        total[case] += 1
        passed[case] += not wrong

    results: dict[str, str] = {}
    if client in CHECKED:
        with tempfile.TemporaryDirectory() as directory:
            ended = _tried(
                client, lambda: results.update(run_checks(client, served.url, served.model, Path(directory)))
            )
        if ended:
            count("plain", ended)
    for name, wrong in results.items():
        count(case_of(name), wrong)
        if wrong:
            sys.stderr.write(f"clients: {client}: {name}: {wrong}\n")
    for program in programs():
        if program.client == client:
            with tempfile.TemporaryDirectory() as directory:

                def runs(directory: str = directory, program: Program = program) -> None:
                    run_program(program, served.url, checkpoint, Path(directory))

                count("page", _tried(f"{client}, docs/clients.md", runs))
    return {
        case: str(total[case]) if passed[case] == total[case] else f"{passed[case]} of {total[case]}" for case in total
    }


TABLE = [*REQUIREMENTS, "curl"]
COLUMNS = {**CASES, "page": "page"}


def written_rows() -> dict[str, str]:
    """Lines of the table as it is, by client."""
    found = re.findall(r"^\| ([\w-]+) \| .*$", RESULTS.read_text(encoding="utf-8"), re.MULTILINE)
    lines = RESULTS.read_text(encoding="utf-8").splitlines()
    return {name: line for name in found for line in lines if line.startswith(f"| {name} |")}


def row_of(client: str, found: dict[str, str]) -> str:
    """The line of a client."""
    version = version_of(client) if client in REQUIREMENTS else ""
    return f"| {client} | {version} | " + " | ".join(found.get(case, "") for case in COLUMNS) + " |"


def table(rows: dict[str, str]) -> str:
    """The table in Markdown, with the lines in the order of the requirements."""
    head = [f"| client | version | {' | '.join(COLUMNS.values())} |", "| --- " * (len(COLUMNS) + 2) + "|"]
    return "\n".join([*head, *(rows[client] for client in TABLE if client in rows)])


def _processor() -> str:
    """Name and number of the processors, and the extensions that the kernels may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    found = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    flags = found.get("flags", "").split()
    kinds = {"avx512_bf16": "AVX-512 BF16", "avx512_vnni": "VNNI", "amx_tile": "AMX"}
    extensions = [("" if flag in flags else "no ") + name for flag, name in kinds.items()]
    return ", ".join([found.get("model name", platform.machine()), f"{os.cpu_count()} cores", *extensions])


def main(wanted: list[str]) -> int:
    """Run the clients, or those named. The exit status: 1 if something failed."""
    model = prepare_default_model(model_cache(os.environ), lambda line: None)
    variables = {"MODEL_PATH": str(model), "WORKER_DTYPE": "float32"}
    with (
        tempfile.TemporaryDirectory() as directory,
        launched(Path(directory), *WORKER, variables=variables) as served,
    ):
        served.wait_until_ready()
        found = {client: cells(client, served, model) for client in wanted or TABLE}
        served.press_ctrl_c()
        served.finish()
    made = {client: row_of(client, row) for client, row in found.items()}
    rows = {**(written_rows() if wanted else {}), **made}
    sys.stdout.write("\n".join(made.values()) + "\n")
    day = datetime.datetime.now(datetime.UTC).date()
    where = f"{day}, ai-dynamo {version('ai-dynamo')}, Python {platform.python_version()}, {_processor()}."
    RESULTS.write_text(f"{HEAD}\n{table(rows)}\n\n{where}\n", encoding="utf-8")
    return int(any("of" in cell for row in found.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
