"""Incremental parser of answers with tool calls, for every format of `adapters.calls`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress

from adapters.calls import NUMBER, WHITE_SPACE, CallFormat, Opening
from worker.frontdoor.calls.arguments import Kinds, arguments
from worker.frontdoor.calls.marks import NO_MARKS, Marks, marks_of, openings_by_mark
from worker.frontdoor.calls.output import Output
from worker.frontdoor.calls.pieces import Piece
from worker.frontdoor.calls.reader import Cut, Mismatch, Reading, TextReader


class CallParser:
    """Parser of one answer, whose text comes in parts.

    However the text is split, the pieces put together are the same. Text that may be the beginning
    of a call is held back as long as it may; arguments are handed on as they come, never up to the
    middle of an escape, a number or a word. White space between calls is no text.

    Args:
        format: Spelling of calls.
        tools: Types of the arguments, which notations with tags need, by the tool's name. A call
            of anything else is text.
        enforced: Whether a grammar holds the answer to ``format``. Otherwise a call is handed on
            once it is complete, and stays text if it is not one; a call that is cut by the end of
            the answer is what came of it if the answer was too long, and text otherwise.
        only_calls: Whether the answer is calls alone: what may be the beginning of one at its end
            is no text.
        or_answer: Whether the answer is calls alone or has none: one that does not begin with a
            call, as JSON that was asked for, is text whatever it holds.
        hidden: Texts of special tokens, which are left out of the text.
    """

    def __init__(
        self,
        format: CallFormat,
        tools: Mapping[str, Kinds],
        *,
        enforced: bool = True,
        only_calls: bool = False,
        or_answer: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        self._format = format
        self._tools = tools
        self._enforced = enforced
        self._only_calls = only_calls
        self._or_answer = or_answer
        self._first = openings_by_mark(format, tools, anywhere=False)
        self._openings = openings_by_mark(format, tools, anywhere=True)
        channels = format.channels
        self._channel_marks = {channels.start, channels.channel, channels.end} if channels else set()
        spelled = {*self._channel_marks, *format.special}
        self._marks = marks_of(frozenset(hidden).difference(spelled).union(self._channel_marks, self._openings))
        self._reader = TextReader()
        self._output = Output()
        self._was_cut_by_length = False
        self._running = self._answer()
        next(self._running)

    @property
    def has_complete_calls(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return self._output.num_calls > 0 and self._output.is_complete

    @property
    def is_within_call(self) -> bool:
        """Whether a call has begun whose arguments are not complete."""
        return not self._output.is_complete

    def feed(self, text: str) -> list[Piece]:
        """The pieces that the next part of the answer makes certain."""
        self._reader.add(text)
        next(self._running, None)
        return self._output.taken()

    def end(self, finish_reason: str | None = "stop") -> list[Piece]:
        """The last pieces, at the end of the answer; ``finish_reason``: why it ends."""
        self._was_cut_by_length = finish_reason == "length"
        self._reader.ended = True
        next(self._running, None)
        self._output.end()
        return self._output.taken()

    def _answer(self) -> Reading[None]:
        yield  # before the first text
        try:
            yield from self._beginning()
            if self._or_answer and not self._output.num_calls and self._format.channels is None:
                self._marks = NO_MARKS
            yield from self._text()
        except Cut:  # within a call
            pass

    def _beginning(self) -> Reading[None]:
        """White space, and what may stand only behind it, or before free text."""
        reader, openings = self._reader, {**(self._openings if self._or_answer else {}), **self._first}
        marks = Marks(openings)
        blank = 0  # characters of white space so far, which are looked at once
        while True:
            new = reader.ahead[blank:]
            ahead = new.lstrip(WHITE_SPACE)
            blank += len(new) - len(ahead)
            if mark := marks.at_start_of(ahead):
                self._say(reader.take(blank))
                yield from self._block_or_text(mark, openings[mark])
                return
            if not openings or not marks.may_begin(ahead):
                break
            if reader.ended:
                if self._only_calls:
                    reader.take(len(reader.ahead))
                break
            yield
        while self._format.prose:
            if reader.ahead.startswith(self._format.prose):
                reader.take(len(self._format.prose))
                return
            if reader.ended or not self._format.prose.startswith(reader.ahead):
                return
            yield

    def _text(self) -> Reading[None]:
        """Free text and blocks of calls, to the end of the answer."""
        reader = self._reader
        while True:
            found = reader.search(self._marks.pattern)
            if found is not None:
                start, mark = found
                self._say(reader.take(start))
                yield from self._marked(mark)
                continue
            may_be_text = reader.ended and not self._only_calls
            held = 0 if may_be_text else self._marks.held_back(reader.ahead)
            self._say(reader.take(len(reader.ahead) - held))
            reader.forget()
            if reader.ended:
                return
            yield

    def _marked(self, mark: str) -> Reading[None]:
        """A block or a message that begins with ``mark``, which stands here."""
        reader, channels = self._reader, self._format.channels
        if mark in self._openings:
            yield from self._block_or_text(mark, self._openings[mark])
        elif channels is not None and mark == channels.channel:
            calls = [text for text in self._openings if text.startswith(mark)]
            following = yield from reader.first_of([*calls, mark])
            if following != mark:
                yield from self._block_or_text(following, self._openings[following])
                return
            if reader.ended and any(text.startswith(reader.ahead) for text in calls):
                raise Cut
            reader.take(len(mark))
            with suppress(Mismatch):  # another channel is text
                name = yield from reader.one_of([channels.thinking, *channels.text])
                self._output.thinks = name == channels.thinking
                yield from reader.one_of([channels.message])
                if self._or_answer and name == channels.text[0]:
                    self._marks = NO_MARKS
        else:
            reader.take(len(mark))
            self._output.thinks &= mark not in self._channel_marks

    def _block_or_text(self, mark: str, opening: Opening) -> Reading[None]:
        """The calls of a block; if it is none, its mark is text."""
        reader, output = self._reader, self._output
        start, before = reader.position, output.mark()
        if not self._enforced:
            output.hold()
        try:
            yield from self._block(opening)
        except (Mismatch, Cut) as problem:
            is_cut = isinstance(problem, Cut)
            has_call = output.num_calls > before.num_calls
            if is_cut and (self._enforced or (has_call and self._was_cut_by_length)):
                output.release()
                raise
            if has_call and self._enforced:
                return  # what has been handed on stays; the rest is text
            output.rewind(before)
            reader.position = start
            if mark in self._openings:
                self._say(reader.take(1))
        output.release()

    def _block(self, opening: Opening) -> Reading[None]:
        """The calls of one block. Raises `Mismatch`, `Cut`."""
        reader, format = self._reader, self._format
        yield from reader.one_of([opening.text])
        while True:
            yield from self._call()
            if format.between is None:
                break
            begun = format.name_prefix.partition(NUMBER)[0]
            following = yield from reader.first_of([format.between + begun, format.closing])
            if following == format.closing:
                break
            reader.take(len(format.between))
        yield from reader.one_of([format.closing])

    def _call(self) -> Reading[None]:
        """One call."""
        reader, format = self._reader, self._format
        yield from self._numbered(format.name_prefix)
        suffix, number, rest = format.name_suffix.partition(NUMBER)
        ending = suffix or format.call_suffix[:1]  # of arguments between tags, too: one name may begin another
        called = yield from reader.one_of([name + ending for name in self._tools])
        reader.position -= len(ending) - len(suffix)
        yield from self._numbered(number + rest)
        name = called.removesuffix(ending)
        self._output.begin_call(name)
        yield from arguments(format.arguments, reader, self._argue, format.call_suffix, self._tools[name])
        self._output.is_complete = True
        if not format.may_end or (yield from reader.has_more()):
            yield from reader.one_of([format.call_suffix])

    def _numbered(self, text: str) -> Reading[None]:
        """A text with the number of a call in it."""
        before, number, behind = text.partition(NUMBER)
        yield from self._reader.one_of([before])
        if number:
            yield from self._reader.digits(3)
            yield from self._reader.one_of([behind])

    def _argue(self, text: str) -> None:
        self._output.argue(text)
        if self._enforced:
            self._reader.forget()

    def _say(self, text: str) -> None:
        """Hand on free text.

        Where calls end an answer, what follows one is the beginning of another one that was cut.
        """
        if not (self._enforced and self._format.ends and self._output.num_calls):
            self._output.say(text)
