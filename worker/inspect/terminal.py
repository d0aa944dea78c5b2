"""The recordings as tables in the terminal, and as a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from worker.inspect.comparison import shared_places, summary
from worker.inspect.recording import VERDICTS, Recording, printable, verdict_of
from worker.replay.position import Candidate, Position, Stage

STYLES = {"kept": "", "changed": "magenta", "forced": "cyan", "failed": "bold red"}
"""Style of each verdict of `verdict_of`."""

_SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, monospace; line-height: {line_height}px }}
.{unique_id}-title {{ font: bold 18px sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""Rich's own picture of a terminal, without the font that it fetches."""


def show(console: Console, notes: Sequence[str], recordings: Sequence[Recording]) -> None:
    """Print everything.

    Args:
        console: Console to print on.
        notes: Lines about the model.
        recordings: One or two.
    """
    for line in notes:
        console.print(Text(printable(line), style="dim"))
    legend = Text("tokens: ", style="dim")
    for verdict, style in STYLES.items():
        legend.append(verdict, style=f"not dim {style}").append(f": {VERDICTS[verdict]}; ")
    console.print(legend[:-2])
    for recording, shared in zip(recordings, shared_places(recordings), strict=True):
        console.print(answer(recording, shared))
    said = summary(recordings)
    if said is not None:
        console.print(Text(said, style="bold"))
    for step, pair in enumerate(zip_longest(*(each.positions for each in recordings)), 1):
        for recording, position in zip(recordings, pair, strict=True):
            if position is not None:
                console.print(steps_table(recording, position, step, named=len(recordings) > 1))
    for recording in recordings:
        if recording.error is not None:
            console.print(Text(f"{recording.name} ended early: {printable(recording.error)}", style="bold red"))


def as_svg(console: Console) -> str:
    """Picture of the output of a recording console, without external resources."""
    return console.export_svg(title="python -m worker inspect", code_format=_SVG, unique_id="terminal")


def answer(recording: Recording, shared: set[int]) -> Text:
    """Head line, and the answer's tokens in the colours of `STYLES`."""
    text = Text(f"{recording.name}: {described(recording)}\n", style="bold")
    for place, position in enumerate(recording.positions):
        if position.token_id is not None:
            style = STYLES[verdict_of(position)] + ("" if place in shared else " underline")
            text.append(recording.texts[position.token_id], style="not bold " + style)
    return text.append("\n")


def described(recording: Recording) -> str:
    """Seed, sampler and processors of an answer, in one line."""
    names = ", ".join(recording.processors) or "no processors"
    return f"seed {recording.seed}, {recording.sampler}; {names}; {len(recording.token_ids)} tokens"


def steps_table(recording: Recording, position: Position, step: int, *, named: bool) -> Table:
    """The stages of one position, a line each."""
    verdict = verdict_of(position)
    name = f"{recording.name}, " if named else ""
    title = Text(f"{name}step {step}, position {position.position}: ")
    taken = "the request ended" if position.token_id is None else _token(recording, position.token_id)
    title.append(taken, style="bold").append(f"  {verdict}", style=STYLES[verdict])
    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("after", no_wrap=True)
    table.add_column("left", justify="right")
    table.add_column("taken", justify="right", no_wrap=True)
    for place in range(max(len(stage.candidates) for stage in position.stages)):
        table.add_column("likeliest tokens" if place == 0 else "")
    for stage in position.stages:
        if stage.failure is None:
            shown = (_candidate(recording, one, one.token_id == position.token_id) for one in stage.candidates)
            table.add_row(stage.name, f"{stage.num_left}", rank_of(stage), *shown)
        else:
            table.add_row(stage.name, "", "", Text(f"failed: {printable(stage.failure)}", style=STYLES["failed"]))
    return table


def rank_of(stage: Stage) -> str:
    """Rank and probability of the token that was taken, at one stage."""
    if stage.taken_probability is None:
        return ""
    return "masked" if stage.taken_rank is None else f"#{stage.taken_rank} {stage.taken_probability:.1%}"


def _candidate(recording: Recording, one: Candidate, is_taken: bool) -> Text:
    text = Text(_token(recording, one.token_id), style="bold" if is_taken else "")
    return text.append(f" {one.probability:.1%}", style="not bold dim")


def _token(recording: Recording, token_id: int) -> str:
    return f"{token_id} '{recording.texts[token_id]}'"
