"""The plots of `docs/scale.md`, from what the benchmarks kept in `results/*.json`.

    .venv/bin/python benchmarks/plots.py

Writes `docs/scale-workers.svg` (a frontend with many workers), `docs/scale-first-token.svg` (first
token over the rate of requests, from a simulation) and `docs/scale-parts.svg` (what a request of
128 tokens takes of each part).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from fleet_model import ANSWER, BY_PREFIX, IN_TURN, OF_TWO, Fleet, Load, Worker
from fleet_plan import figures
from open_loop import quantiles

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 360, 70, 30, 200, 50

Line = tuple[str, list[tuple[float, float]]]


def picture(lines: Sequence[Line], x_name: str, y_name: str, *, logarithmic: bool) -> str:
    """Lines over a linear or logarithmic x and a logarithmic y, as SVG."""
    points = [point for _, line in lines for point in line]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y = 10 ** math.floor(math.log10(min(y for _, y in points)))
    high_y = 10 ** math.ceil(math.log10(max(y for _, y in points)))

    def x_of(x: float) -> float:
        share = math.log(x / low_x) / math.log(high_x / low_x) if logarithmic else (x - low_x) / (high_x - low_x)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - math.log(y / low_y) / math.log(high_y / low_y) * (HEIGHT - BOTTOM - TOP)

    shapes = []
    for power in range(round(math.log10(low_y)), round(math.log10(high_y)) + 1):
        y = y_of(10**power)
        shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power:,g}</text>')
    for x in sorted({x for x, _ in points}):
        shapes.append(f'<text x="{x_of(x):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x:,g}</text>')
    for number, (name, line) in enumerate(lines):
        colour, row = COLOURS[number % len(COLOURS)], TOP + 14 + 18 * number
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        shapes.append(f'<circle cx="{WIDTH - RIGHT + 16}" cy="{row - 4}" r="4" fill="{colour}"/>')
        shapes.append(f'<text x="{WIDTH - RIGHT + 26}" y="{row}">{name}</text>')
    shapes.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{x_name}</text>')
    shapes.append(f'<text x="{LEFT}" y="{TOP - 12}" text-anchor="middle">{y_name}</text>')
    return _svg(shapes)


def bars(rows: Sequence[tuple[str, float]], name: str) -> str:
    """Horizontal bars with their values, as SVG."""
    longest = max(value for _, value in rows)
    shapes = [f'<text x="{LEFT + 150}" y="{TOP - 8}">{name}</text>']
    for number, (label, value) in enumerate(rows):
        y, width = TOP + 6 + 40 * number, value / longest * (WIDTH - LEFT - 300)
        shapes.append(f'<text x="{LEFT + 142}" y="{y + 18}" text-anchor="end">{label}</text>')
        shapes.append(f'<rect x="{LEFT + 150}" y="{y}" width="{width:.1f}" height="26" fill="{COLOURS[0]}"/>')
        shapes.append(f'<text x="{LEFT + 156 + width:.1f}" y="{y + 18}">{value:,.0f}</text>')
    return _svg(shapes)


def _svg(shapes: Sequence[str]) -> str:
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def many_workers() -> str:
    """p99 of the first token at the highest measured rate, over the registered workers."""
    rows = json.loads((HERE / "results" / "registrations.json").read_text(encoding="utf-8")).values()
    names = {"file": "files", "etcd": "etcd", "nats": "etcd, requests by NATS"}
    lines: list[Line] = [
        (name, [(row["workers"], row["loads"][-1][0]["first_ms"][1]) for row in rows if row["discovery"] == kind])
        for kind, name in names.items()
    ]
    return picture(lines, "registered workers", "first token p99, ms", logarithmic=True)


def first_tokens() -> str:
    """p99 of the first token over the rate, of 32 workers; half of each prompt is shared."""
    lines: list[Line] = []
    for router, name in ((IN_TURN, "in turn"), (OF_TWO, "fewer requests of two"), (BY_PREFIX, "KV router")):
        line = []
        for rate in (100, 200, 250, 300, 330, 350, 370):
            load = Load(rate, 30, shared=0.5, groups=1000)
            answered = Fleet(32, Worker(), router, load.shared).run(list(load.requests(3)))
            line.append((float(rate), quantiles([one.first_s - one.at_s for one in answered])[1] * 1e3))
        lines.append((name, line))
    return picture(lines, "requests a second, 32 workers", "first token p99, ms", logarithmic=False)


def parts() -> str:
    """Microseconds of a core for a request of 128 tokens."""
    costs = figures()["parts"].items()
    rows = [(name, one["request_us"] + ANSWER * one["token_us"]) for name, one in costs]
    return bars(rows, f"µs of a core for a request of {ANSWER} tokens")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, draw in (("workers", many_workers), ("first-token", first_tokens), ("parts", parts)):
        path = DOCS / f"scale-{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(f"written to {path.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
