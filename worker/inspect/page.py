"""The recordings as one HTML page that loads nothing.

Every text goes through `html.escape`, and the page's own policy lets nothing run or load but its
one script and one style sheet, by their digests: a token's text cannot become markup, nor would
markup that got through do anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from worker import __version__
from worker.inspect.comparison import first_difference, shared_places, summary
from worker.inspect.recording import VERDICTS, Recording, printable, verdict_of
from worker.inspect.terminal import described, rank_of
from worker.replay.position import Candidate, Position, Stage

_BAR_WIDTH = 40
"""Pixels of a probability of 1."""

_NOWHERE = ("base-uri 'none'", "form-action 'none'")

_FILTERS = (
    ("all", "all steps"),
    ("acted", "where processors changed the likeliest token"),
    ("failed", "where the request failed"),
    ("differs", "where A and B differ"),
)


def page(notes: Sequence[str], recordings: Sequence[Recording]) -> str:
    """The page.

    Args:
        notes: Lines about the model.
        recordings: One or two.
    """
    here = Path(__file__).parent
    style = (here / "page.css").read_text(encoding="utf-8")
    script = (here / "page.js").read_text(encoding="utf-8")
    policy = "; ".join(
        ("default-src 'none'", f"style-src {_digest(style)}", f"script-src {_digest(script)}", *_NOWHERE)
    )
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="dynamo-logits-worker {escape(__version__)}">',
            f"<title>Token inspector</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>Token inspector</h1>",
            *(f'<p class="notes">{_shown(line)}</p>' for line in notes),
            _legend(is_compared=len(recordings) > 1),
            *_timelines(recordings),
            _bar(is_compared=len(recordings) > 1),
            *_steps(recordings),
            f"<script>{script}</script>\n</body>\n</html>\n",
        )
    )


def _digest(text: str) -> str:
    """A source of a content security policy: the digest of an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _shown(text: str) -> str:
    return escape(printable(text))


def _bar(*, is_compared: bool) -> str:
    options = "".join(
        f'<option value="{value}">{label}</option>' for value, label in _FILTERS if value != "differs" or is_compared
    )
    return (
        '<div class="bar"><input id="search" type="search" placeholder="Search tokens, ids, processors ( / )" '
        f'aria-label="Search"><select id="show" aria-label="Show">{options}</select>'
        '<span id="count" role="status"></span><span class="notes">j, k: next and previous step</span></div>'
    )


def _legend(*, is_compared: bool) -> str:
    """Colours of tokens by their verdicts; only ``forced`` is in the playground, too."""
    entries = [
        f'<li><span class="word {verdict}">{verdict}</span> {meaning}</li>' for verdict, meaning in VERDICTS.items()
    ]
    if is_compared:
        entries.append('<li><span class="differs">underlined</span> A and B differ</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _timelines(recordings: Sequence[Recording]) -> Iterator[str]:
    for recording, shared in zip(recordings, shared_places(recordings), strict=True):
        yield f'<section><h2>{escape(recording.name)}</h2><p class="facts">{escape(described(recording))}</p>'
        chips = (_chip(recording, place, each, place in shared) for place, each in enumerate(recording.positions))
        yield f'<ol class="timeline">{"".join(chips)}</ol>'
        if recording.error is not None:
            yield f'<p class="failed">ended early: {_shown(recording.error)}</p>'
        yield "</section>"
    said = summary(recordings)
    if said is not None:
        place = first_difference(recordings)
        link = "" if place is None else f' <a href="#step-{place + 1}">show it</a>'
        yield f'<p id="summary">{escape(said)}{link}</p>'


def _chip(recording: Recording, place: int, position: Position, is_shared: bool) -> str:
    text = "∎" if position.token_id is None else recording.texts[position.token_id]
    kind = verdict_of(position) + ("" if is_shared else " differs")
    return (
        f'<li><a class="{kind}" href="#step-{place + 1}" data-step="step-{place + 1}" '
        f'title="position {position.position}">{escape(text)}</a></li>'
    )


def _steps(recordings: Sequence[Recording]) -> Iterator[str]:
    for step, positions in enumerate(zip_longest(*(each.positions for each in recordings)), 1):
        found = [(recording, each) for recording, each in zip(recordings, positions, strict=True) if each is not None]
        kinds = [verdict_of(each) for _, each in found]
        kind = next((one for one in ("failed", "forced", "changed") if one in kinds), "kept")
        differs = len({None if each is None else each.token_id for each in positions}) > 1
        yield f'<article id="step-{step}" data-kind="{kind}" data-differs="{"yes" if differs else "no"}">'
        word = ' <span class="word differs-word">A and B differ</span>' if differs else ""
        yield f'<h2>Step {step}, position {found[0][1].position}{word}</h2><div class="runs">'
        for recording, each in found:
            yield from _position(recording, each, named=len(recordings) > 1)
        yield "</div></article>"


def _position(recording: Recording, position: Position, *, named: bool) -> Iterator[str]:
    kind = verdict_of(position)
    taken = "the request ended" if position.token_id is None else f"took {_token(recording, position.token_id)}"
    name = f"{escape(recording.name)}: " if named else ""
    yield f'<div class="scroll"><p>{name}{taken} <span class="word {kind}">{kind}</span></p>'
    yield "<table><thead><tr><th>after</th><th>left</th><th>taken</th><th>likeliest tokens</th></tr></thead><tbody>"
    for stage in position.stages:
        yield f"<tr><td>{escape(stage.name)}</td>{_cells(recording, stage, position.token_id)}</tr>"
    yield "</tbody></table></div>"


def _cells(recording: Recording, stage: Stage, taken: int | None) -> str:
    if stage.failure is not None:
        return f'<td></td><td></td><td class="candidates failed">failed: {_shown(stage.failure)}</td>'
    candidates = " ".join(_candidate(recording, one, one.token_id == taken) for one in stage.candidates)
    return (
        f'<td class="number">{stage.num_left}</td><td class="number">{escape(rank_of(stage))}</td>'
        f'<td class="candidates">{candidates}</td>'
    )


def _candidate(recording: Recording, one: Candidate, is_taken: bool) -> str:
    width = max(1, round(_BAR_WIDTH * one.probability))
    bar = f'<svg width="{width}" height="8" aria-hidden="true"><rect width="{width}" height="8"/></svg>'
    kind = "candidate taken" if is_taken else "candidate"
    return f'<span class="{kind}">{_token(recording, one.token_id)} {one.probability:.1%} {bar}</span>'


def _token(recording: Recording, token_id: int) -> str:
    return f"{token_id} <code>{escape(recording.texts[token_id])}</code>"
