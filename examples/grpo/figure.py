"""Draws the reward and the log probabilities' differences of a run of `grpo.py` as one SVG.

.venv/bin/python examples/grpo/figure.py RUN docs/grpo.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, PLOT = 860, 300, 60, 46, 190
GAP = 440
"""Distance of the two plots' left edges."""

PLOT_WIDTH = 340
COLOURS = {"this worker": "#1a7f37", "transformers": "#9a6700", "vLLM": "#cf222e"}
LOWEST, HIGHEST = -7, -3
"""Powers of ten of the right plot, above the line of exact zero."""


class Drawing:
    """An SVG in the making; y grows upwards from 0 to 1 within a plot."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1.8) -> None:
        """A line through `points` in pixels."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    def dots(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        """A dot at each point in pixels."""
        self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in points]

    def text(self, x: float, y: float, text: str, anchor: str = "start", colour: str = "#57606a") -> None:
        """A text at a point in pixels."""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>')

    def svg(self) -> str:
        """The whole file."""
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        return "\n".join(
            [
                f'{head} font-size="12">',
                f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def across(step: float, steps: int, left: float) -> float:
    """Horizontal pixel of a step."""
    return left + PLOT_WIDTH * step / max(1, steps - 1)


def upwards(share: float) -> float:
    """Vertical pixel of a height from 0 to 1."""
    return TOP + PLOT * (1 - share)


def height_of(difference: float) -> float:
    """Height of a difference: 0 for exact zero, then a logarithmic scale."""
    if difference == 0:
        return 0.0
    power = min(max(math.log10(difference), LOWEST), HIGHEST)
    return 0.15 + 0.85 * (power - LOWEST) / (HIGHEST - LOWEST)


def draw(steps: list[dict[str, float]], differences: dict[str, dict[str, float]]) -> str:
    """The SVG of a run's steps, and of other engines' differences by step."""
    drawing, count = Drawing(), len(steps)
    for left, title in ((LEFT, "mean reward"), (LEFT + GAP, "largest difference of log probabilities, nats")):
        drawing.line([(left, TOP), (left, upwards(0)), (left + PLOT_WIDTH, upwards(0))], "#8c959f", 1)
        drawing.text(left, TOP - 26, title, colour="#24292f")
        for step in range(0, count, max(1, count // 6)):
            drawing.text(across(step, count, left), upwards(0) + 16, str(step), "middle")
        drawing.text(left + PLOT_WIDTH, upwards(0) + 32, "step", "end")
    highest = max(0.1, math.ceil(10 * max(one["reward"] for one in steps)) / 10)
    for quarter in range(5):
        drawing.text(LEFT - 6, upwards(quarter / 4) + 4, f"{highest * quarter / 4:.3g}", "end")
    rewards = [(across(one["step"], count, LEFT), upwards(one["reward"] / highest)) for one in steps]
    drawing.line(rewards, COLOURS["this worker"])
    left = LEFT + GAP
    drawing.text(left - 6, upwards(0) + 4, "0", "end")
    for power in range(LOWEST, HIGHEST + 1):
        height = upwards(height_of(10.0**power))
        drawing.line([(left, height), (left + PLOT_WIDTH, height)], "#d8dee4", 0.6)
        drawing.text(left - 6, height + 4, f"1e{power}", "end")
    found = {"this worker": {str(one["step"]): one["largest_difference"] for one in steps}, **differences}
    for place, (name, values) in enumerate(found.items()):
        points = [(across(int(step), count, left), upwards(height_of(value))) for step, value in values.items()]
        drawing.line(points, COLOURS[name])
        drawing.dots(points, COLOURS[name])
        is_exact = not any(values.values())
        drawing.text(left + 135 * place, TOP - 8, f"● {name}{': exactly 0' * is_exact}", colour=COLOURS[name])
    return drawing.svg()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="--output of grpo.py")
    parser.add_argument("output", type=Path, help="the SVG")
    options = parser.parse_args()
    path = options.run / "differences.json"
    try:
        steps = [json.loads(line) for line in (options.run / "steps.jsonl").read_text().splitlines()]
        differences = json.loads(path.read_text()) if path.exists() else {}
        if not steps:
            raise SystemExit(f"error: {options.run / 'steps.jsonl'} has no step yet")
        options.output.write_text(draw(steps, differences), encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
