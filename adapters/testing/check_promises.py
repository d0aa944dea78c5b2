"""Checks of what a processor tells in advance: how long an edit stays, what it may take back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from adapters.contract import (
    Allow,
    BacktrackingProcessor,
    Ban,
    Bias,
    Context,
    Edit,
    Force,
    Processor,
    SteeringProcessor,
    Unsatisfiable,
    tells_how_long,
)
from adapters.testing.reference_runs import ReferenceRun, prompt_of, reference_runs
from adapters.testing.registry import check
from adapters.testing.subject import Case, CheckFailed, Subject
from adapters.vocabulary import byte_index

EVERY, FARTHEST = 600, 2**17
"""Tokens ahead at which every position of a promise is tried, and the last one at which any is."""

NUM_WALKED = 600
"""Tokens written to a backtracking processor, for each set of arguments."""

_WAYS = ("random tokens", "the run's own tokens again and again")


@check("same_until", "the edit stays what it is until the position that same_until tells, whatever tokens come")
def same_until(subject: Subject) -> str | None:
    """See `CHECKS`."""
    num_promises = 0
    for run in reference_runs(subject):
        if run.case.scope != "all":
            continue  # it is asked at every position
        for place, processor in enumerate(subject.build(run.case.arguments)):
            if isinstance(processor, SteeringProcessor) and tells_how_long(type(processor)):
                num_promises += _follow_promises(subject, run, place)
    return f"{num_promises} promises" if num_promises else None


def _follow_promises(subject: Subject, run: ReferenceRun, place: int) -> int:
    """Check the promises along a run: of two that are the same, the first."""
    seen: set[tuple[object, int]] = set()
    for index in range(len(run.tokens) + 1):
        processor, history = _begun(subject, run, place, index)
        kept = _shown(processor)
        until = processor.same_until()
        if type(until) is not int:
            raise CheckFailed(f"same_until() returned {until!r}, expected a position, int ({run.at(index)})")
        if until <= len(history) or (kept, until) in seen:
            continue
        seen.add((kept, until))
        told = f"same_until() told that the edit stays until position {until}"
        for what, changed in _broken(subject, run, place, index, until, kept):
            raise CheckFailed(f"{told}, but {what} edit() is {changed} instead of {_told(kept)} ({run.at(index)})")
    return len(seen)


def _begun(subject: Subject, run: ReferenceRun, place: int, index: int) -> tuple[SteeringProcessor, list[int]]:
    """A new processor after some tokens of a run, and its history, which may grow."""
    processor = subject.build(run.case.arguments)[place]
    assert isinstance(processor, SteeringProcessor)
    history = run.history(index)
    processor.start(run.prompt, shared=history)
    return processor, history


def _broken(
    subject: Subject, run: ReferenceRun, place: int, index: int, until: int, kept: object
) -> Iterator[tuple[str, str]]:
    """Histories before ``until`` after which the edit is another one, and that edit."""
    processor, history = _begun(subject, run, place, index)
    now = len(history)
    if until > now + 1:
        for token_id in range(subject.context.vocabulary.num_tokens):
            history.append(token_id)
            if (shown := _shown(processor)) != kept:
                yield f"after token {token_id}", _told(shown)
            history.pop()
    numbers = [each for each in _leaves(_arguments(subject, run.case)) if type(each) is int]
    ahead = _tried(until - now, [number + by - now for number in numbers for by in (0, len(run.prompt))])
    for way in _WAYS:
        processor, history = _begun(subject, run, place, index)
        tokens = _endless(way, subject, run)
        for count in ahead:
            history.extend(next(tokens) for _ in range(now + count - len(history)))
            if (shown := _shown(processor)) != kept:
                yield f"{count} tokens later ({way})", _told(shown)


def _tried(end: int, others: Sequence[int]) -> list[int]:
    """Numbers of tokens ahead, below ``end``, to look at an edit: around ``others``, too."""
    powers = [2**power + by for power in range(9, FARTHEST.bit_length()) for by in (-1, 0, 1)]
    found = {*range(EVERY), *powers, *(other + by for other in others for by in (-1, 0, 1)), end - 1}
    return sorted(count for count in found if 0 <= count < min(end, FARTHEST + 2))


def _endless(way: str, subject: Subject, run: ReferenceRun) -> Iterator[int]:
    source, size = random.Random(run.seed), subject.context.vocabulary.num_tokens
    if way == _WAYS[0] or not run.tokens:
        while True:
            yield source.randrange(size)
    while True:
        yield from run.tokens


def _shown(processor: SteeringProcessor) -> object:
    """An edit as something that can be compared."""
    try:
        return _values(processor.edit())
    except Unsatisfiable as error:
        return "unsatisfiable", str(error)


def _values(edit: Edit | None) -> object:
    if edit is None:
        return None
    if isinstance(edit, Force):
        return "Force", edit.token_id
    if isinstance(edit, Allow):
        return "Allow", _bits(edit.bitmask)
    if isinstance(edit, Ban):
        return "Ban", _bits(edit.token_ids)
    return type(edit).__name__, _bits(edit.token_ids), _bits(edit.values if isinstance(edit, Bias) else edit.factors)


def _bits(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _told(shown: object) -> str:
    return "None" if shown is None else f"another {shown[0]}" if isinstance(shown, tuple) else str(shown)


@check("held_from", "a token is taken back only if held_from has held it ever since it was written")
def held_from(subject: Subject) -> str | None:
    """See `CHECKS`."""
    num_taken = num_asked = 0
    for case in subject.cases:
        for place, processor in enumerate(subject.build(case.arguments)):
            if isinstance(processor, BacktrackingProcessor):
                num_asked += 1
                num_taken += _Walk(subject, case, place).walk()
    if num_asked and not num_taken:
        return "took nothing back, so nothing was tried: give an example whose texts or ids it takes back"
    return f"tokens were taken back {num_taken} times" if num_asked else None


class _Walk:
    """A backtracking processor that is written to, and rewound as an engine does it."""

    def __init__(self, subject: Subject, case: Case, place: int) -> None:
        self._subject, self._case, self._place = subject, case, place
        self._prompt = prompt_of(subject.context, 0)
        self._history = list(self._prompt)
        self._processor = self._new(self._history)
        self._held: list[int | None] = [self._answer("held_from")]
        self._words = _words(subject.context, _arguments(subject, case))
        self._source = random.Random(5)

    def _new(self, history: list[int]) -> BacktrackingProcessor:
        processor: Processor = self._subject.build(self._case.arguments)[self._place]
        assert isinstance(processor, BacktrackingProcessor)
        processor.start(self._prompt, shared=history)
        return processor

    def walk(self) -> int:
        """How often something was taken back.

        Raises:
            CheckFailed: a token that was not held was.
        """
        num_taken, wanted = 0, list[int]()
        for _ in range(NUM_WALKED):
            wanted = wanted or list(self._source.choice(self._words))
            self._write(wanted.pop(0))
            if (index := self._answer("rewinds_to")) is None:
                self._check(self._answer("rewinds_to_at_end"), "if the answer ends here", len(self._held))
                continue
            self._check(index, "now", len(self._held) - 1)
            self._check_again()
            num_taken += 1
            self._rewind(index)
            wanted = []
        return num_taken

    def _write(self, token_id: int) -> None:
        self._history.append(token_id)
        self._processor.catch_up()
        self._held.append(self._answer("held_from"))

    def _rewind(self, index: int) -> None:
        self._processor.rewind_lazily(len(self._prompt) + index)
        del self._history[len(self._prompt) + index :], self._held[index + 1 :]
        self._processor.catch_up()

    def _answer(self, name: str) -> int | None:
        answer = getattr(self._processor, name)
        count = len(self._history) - len(self._prompt)
        if answer is not None and not (type(answer) is int and 0 <= answer < count):
            expected = f"None or an index below {count}, the number of generated tokens"
            raise CheckFailed(f"{name} is {answer!r}, expected {expected} ({self._case})")
        return answer

    def _check(self, index: int | None, when: str, end: int) -> None:
        """Check that the token at ``index`` was held after every number of tokens below ``end``."""
        if index is None:
            return
        for count in range(index + 1, end):
            held = self._held[count]
            if held is None or held > index:
                done = f"takes back generated token {index} {when}, after {len(self._held) - 1} tokens"
                told = "nothing" if held is None else f"tokens from index {held} on"
                newest = self._history[max(len(self._prompt), len(self._history) - 12) :]
                raise CheckFailed(
                    f"{done}; but after {count} of them held_from held {told}, so it may have been sent "
                    f"(the newest tokens are {newest}, {self._case})"
                )

    def _check_again(self) -> None:
        """Check that a new processor tells the same of the same history."""
        history = list(self._history)
        fresh = self._new(history)
        for name in ("held_from", "rewinds_to"):
            if getattr(fresh, name) != getattr(self._processor, name):
                got = f"{getattr(self._processor, name)} after rewinds, {getattr(fresh, name)} without"
                raise CheckFailed(f"{name} is no function of the history: {got} ({self._case})")


def _words(context: Context, arguments: Mapping[str, Any]) -> list[list[int]]:
    """What is written: the arguments' texts in several spellings, their ids, and other tokens."""
    vocabulary = context.vocabulary
    leaves = list(_leaves(arguments))
    ids = [each for each in leaves if type(each) is int and 0 <= each < vocabulary.num_tokens]
    words = [[token_id] for token_id in ids] + [ids] * bool(ids)
    if vocabulary.tokenizer is not None:
        index = byte_index(vocabulary)
        texts = {way(each) for each in leaves if isinstance(each, str) for way in (str, str.swapcase)}
        for text in sorted(texts):
            letters = [index.ids.get(bytes([byte]), [0])[0] for byte in text.encode(errors="replace")]
            words += [letters, letters[:1], letters[: len(letters) // 2], vocabulary.encode(text) if text else [0]]
    source = random.Random(7)
    common = [source.randrange(vocabulary.num_tokens) for _ in range(4)]
    return [word for word in words if word] + [[token_id] for token_id in common] * max(1, len(words) // 16)


def _arguments(subject: Subject, case: Case) -> dict[str, Any]:
    """The arguments with their defaults, which may matter as much."""
    return subject.parse(case.arguments).model_dump()


def _leaves(value: Any) -> Iterator[Any]:
    """Numbers and texts in JSON data; a key counts as what it spells."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
