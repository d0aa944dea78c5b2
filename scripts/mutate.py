"""Changes one place of the source at a time, and counts how many changes the tests notice.

A mutant is a copy of the checkout in which one operator, comparison, number, condition or statement
is another one. The tests of its room run on it until the first fails. Prints each mutant that none
of them noticed, and the share of those that one did, by room.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDED = "worker/engines/embedded"


@dataclass(frozen=True)
class Room:
    sources: tuple[str, ...]
    """Packages and modules."""
    tests: str
    """Names of the files of its tests, without ``test_``."""


ROOMS = {
    "chain": Room(
        ("adapters/chain",),
        "chain receipt_rewind receipts logits_state backtracking_border scope foresee malformed_edits",
    ),
    "scheduler": Room(
        tuple(
            f"{EMBEDDED}/{name}.py" for name in ("scheduler", "queues", "admission_order", "prompt_chunks", "pinned")
        ),
        "scheduler_properties embedded_scheduler turns fairness kv_cache spoiled_kv",
    ),
    "kv_cache": Room(
        (f"{EMBEDDED}/kv_cache", f"{EMBEDDED}/blocks.py"),
        "kv_cache kv_budget code_kv_cache scheduler_properties embedded_attention",
    ),
    "sampling": Room(
        (f"{EMBEDDED}/sampling",),
        "embedded_sampler embedded_truncation rejection_sampling processed_logprobs whole_rows"
        " shuffled_batch proposers",
    ),
}
ALWAYS = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not campaign and not slow and not native_build and not browser"]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SHORTEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Mutation:
    line: int
    kind: str
    apply: Callable[[], None]
    """Changes the tree that the mutation was found in."""


def mutations(tree: ast.Module) -> Iterator[Mutation]:
    """All that can be done to a module, in the order of its nodes."""
    passed_over = set(_passed_over(tree))
    for node in ast.walk(tree):
        if id(node) in passed_over:
            continue
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPS:
            yield Mutation(node.lineno, type(node.op).__name__, _setter(node, "op", SWAPS[type(node.op)]()))
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            swapped = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
            yield Mutation(node.lineno, type(node.ops[0]).__name__, _setter(node, "ops", swapped))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            for change in (1, -1):
                yield Mutation(node.lineno, f"{node.value} {change:+d}", _setter(node, "value", node.value + change))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield Mutation(node.lineno, f"not {node.value}", _setter(node, "value", not node.value))
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield Mutation(node.lineno, "negated condition", _setter(node, "test", negated))
        found: Any = getattr(node, "body", None)
        body: list[ast.stmt] = found if isinstance(found, list) else []
        for index, statement in enumerate(body):
            if _may_go(statement) and id(statement) not in passed_over:
                kept = [*body[:index], ast.Pass(), *body[index + 1 :]]
                yield Mutation(statement.lineno, "removed statement", _setter(node, "body", kept))


def _setter(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _may_go(statement: ast.AST) -> bool:
    """Whether a statement does something that the others can do without; not a line of the log."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return "log" not in ast.unparse(statement.value.func).lower()
    return isinstance(statement, (ast.AugAssign, ast.Delete, ast.Continue, ast.Break))


def _passed_over(tree: ast.Module) -> Iterator[int]:
    """Nodes that say nothing about a run: annotations, and what only a type checker reads."""
    for node in ast.walk(tree):
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for skipped in [each for each in annotations if each is not None] + ([node] if is_typing else []):
            yield from map(id, ast.walk(skipped))


@dataclass(frozen=True)
class Mutant:
    room: str
    source: Path
    index: int
    """Index of the mutation among those of its module."""


def every_mutant(root: Path) -> list[Mutant]:
    found = []
    for name, room in ROOMS.items():
        for place in (root / source for source in room.sources):
            for source in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
                count = sum(1 for _ in mutations(ast.parse(source.read_text())))
                found += [Mutant(name, source.relative_to(root), index) for index in range(count)]
    return found


def tests_of(room: str, root: Path) -> list[str]:
    names = {f"test_{name}.py" for name in ROOMS[room].tests.split()}
    return [str(path.relative_to(root)) for path in sorted((root / "tests").rglob("test_*.py")) if path.name in names]


def run_tests(root: Path, tests: list[str], timeout_s: float) -> tuple[str, float]:
    """``passed``, ``failed`` or ``timed out``, and the seconds that it took.

    In a fork of this process, which has imported torch, but nothing of the checkout.
    """
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _run_here(root, tests)
        finally:
            os._exit(1)
    while time.monotonic() < started + timeout_s:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return "passed" if status == 0 else "failed", time.monotonic() - started
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timed out", timeout_s


def _run_here(root: Path, tests: list[str]) -> None:
    """Ends this process with 0 if they pass."""
    os.setsid()
    os.chdir(root)
    os.dup2(os.open(os.environ.get("MUTATE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.path[:0] = [str(root)]
    os.environ["PYTHONPATH"] = str(root)
    import pytest

    os._exit(int(pytest.main([*ALWAYS, *tests])))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants, spread over the rooms (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: 0)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="checkout (default: this one)")
    arguments = parser.parse_args()
    import torch  # noqa: F401

    os.environ |= {"DLW_EFFORT": "fast", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "checkout"
        shutil.copytree(
            arguments.root, root, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache", "shared", "__pycache__")
        )
        mutants = every_mutant(root)
        chosen = random.Random(arguments.seed).sample(mutants, arguments.count)
        limits: dict[str, float] = {}
        for room in ROOMS:
            outcome, seconds = run_tests(root, tests_of(room, root), 1200.0)
            print(f"{room}: {len(tests_of(room, root))} files of tests, {seconds:.0f} s", flush=True)
            if outcome != "passed":
                sys.exit(f"mutate: the tests of {room} {outcome} without a mutation")
            limits[room] = max(SHORTEST_TIMEOUT_S, 5 * seconds)
        killed: dict[str, list[bool]] = {room: [] for room in ROOMS}
        for number, mutant in enumerate(chosen, 1):
            source = root / mutant.source
            text = source.read_text()
            tree = ast.parse(text)
            mutation = list(mutations(tree))[mutant.index]
            mutation.apply()
            source.write_text(ast.unparse(ast.fix_missing_locations(tree)))
            outcome, _ = run_tests(root, tests_of(mutant.room, root), limits[mutant.room])
            source.write_text(text)
            killed[mutant.room].append(outcome != "passed")
            if outcome == "passed":
                line = text.splitlines()[mutation.line - 1].strip()
                print(f"survived: {mutant.source}:{mutation.line}: {mutation.kind}: {line}", flush=True)
            if number % 20 == 0:
                print(f"{number} mutants, {sum(map(sum, killed.values()))} killed", flush=True)
    for room, outcomes in killed.items():
        print(f"{room}: {sum(outcomes)} of {len(outcomes)} killed")
    total = sum(map(len, killed.values()))
    print(f"all: {sum(map(sum, killed.values()))} of {total} killed, {sum(map(sum, killed.values())) / total:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
