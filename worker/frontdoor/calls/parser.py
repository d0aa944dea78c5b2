"""Incremental parser of answers with tool calls, for every format of `adapters.calls`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from adapters.calls import WHITE_SPACE, CallFormat, Opening
from worker.frontdoor.calls.arguments import Kinds, arguments
from worker.frontdoor.calls.marks import Marks, openings_by_mark
from worker.frontdoor.calls.pieces import CallArguments, CallBegin, Piece, TextPiece, ThinkingPiece, joined
from worker.frontdoor.calls.reader import Cut, Mismatch, Reading, TextReader


class CallParser:
    """Parser of one answer, whose text comes in parts.

    However the text is split, the pieces put together are the same. Text that may be the beginning
    of a call is held back as long as it may; arguments are handed on as they come, never up to the
    middle of an escape, a number or a word. White space between calls is no text.

    Args:
        format: Spelling of calls.
        tools: For each tool's name, the types of its arguments, which the notation ``xml`` needs. A
            call of anything else is text.
        enforced: Whether a grammar holds the answer to ``format``. Otherwise a call is handed on
            once it is complete, and stays text if it is not one; a call that is cut by the end of
            the answer is what came of it if the answer was too long, and text otherwise.
        only_calls: Whether the answer is calls alone: what may be the beginning of one at its end
            is no text.
        hidden: Texts of special tokens, which are left out of the text.

    Attributes:
        num_calls: Calls that have begun.
        is_complete: Whether the last of them is complete.
    """

    def __init__(
        self,
        format: CallFormat,
        tools: Mapping[str, Kinds],
        *,
        enforced: bool = True,
        only_calls: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        self._format = format
        self._tools = tools
        self._enforced = enforced
        self._only_calls = only_calls
        self._first = openings_by_mark(format, tools, anywhere=False)
        self._openings = openings_by_mark(format, tools, anywhere=True)
        channels = format.channels
        self._channel_marks = {channels.start, channels.channel, channels.end} if channels else set()
        spelled = {*self._channel_marks, *format.special}
        self._marks = Marks([*self._channel_marks, *self._openings, *(text for text in hidden if text not in spelled)])
        self._reader = TextReader()
        self._pieces: list[Piece] = []
        self._held: list[Piece] | None = None  # pieces of a block that may turn out to be text
        self._blank: str | None = ""  # white space that begins a text, None behind other characters
        self._thinks = False
        self._was_cut_by_length = False
        self.num_calls = 0
        self.is_complete = True
        self._running = self._answer()
        next(self._running)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that the next part of the answer makes certain."""
        self._reader.add(text)
        return self._go_on()

    def end(self, finish_reason: str | None = "stop") -> list[Piece]:
        """The last pieces, at the end of the answer; ``finish_reason``: why it ends."""
        self._was_cut_by_length = finish_reason == "length"
        self._reader.ended = True
        pieces = self._go_on()
        if self._blank and not self.num_calls:
            pieces = joined([*pieces, TextPiece(self._blank)])
        return pieces

    def _go_on(self) -> list[Piece]:
        next(self._running, None)
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def _answer(self) -> Reading[None]:
        yield  # before the first text
        try:
            yield from self._beginning()
            yield from self._text()
        except Cut:  # within a call
            pass

    def _beginning(self) -> Reading[None]:
        """White space, and what may stand only behind it, or before free text."""
        reader, marks = self._reader, Marks(self._first)
        while True:
            ahead = reader.ahead.lstrip(WHITE_SPACE)
            if mark := marks.at_start_of(ahead):
                self._say(reader.take(len(reader.ahead) - len(ahead)))
                yield from self._block_or_text(mark, self._first[mark])
                return
            if not self._first or not marks.may_begin(ahead):
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
            found = self._marks.first_in(reader.ahead)
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
        """What begins with a mark, which stands here."""
        reader, channels = self._reader, self._format.channels
        if mark in self._openings:
            yield from self._block_or_text(mark, self._openings[mark])
        elif channels is not None and mark == channels.channel:
            calls = [text for text in self._openings if text.startswith(mark)]
            following = yield from self._first_of([*calls, mark])
            if following != mark:
                yield from self._block_or_text(following, self._openings[following])
                return
            if reader.ended and any(text.startswith(reader.ahead) for text in calls):
                raise Cut
            reader.take(len(mark))
            with suppress(Mismatch):  # another channel is text
                name = yield from reader.one_of([channels.thinking, *channels.text])
                self._thinks = name == channels.thinking
                yield from reader.one_of([channels.message])
        else:
            reader.take(len(mark))
            self._thinks = self._thinks and mark not in self._channel_marks

    def _first_of(self, texts: list[str]) -> Reading[str]:
        """The first of ``texts`` that follows, which stays unread; the last one follows anyway."""
        found = yield from self._reader.one_of(texts)
        self._reader.position -= len(found)
        return found

    def _block_or_text(self, mark: str, opening: Opening) -> Reading[None]:
        """The calls of a block; if it is none, its mark is text."""
        reader = self._reader
        start, blank, num_calls, is_complete = reader.position, self._blank, self.num_calls, self.is_complete
        self._held = None if self._enforced else []
        try:
            yield from self._block(opening)
        except (Mismatch, Cut) as problem:
            is_cut = isinstance(problem, Cut)
            has_call = self.num_calls > num_calls
            if is_cut and (self._enforced or (has_call and self._was_cut_by_length)):
                self._release()
                raise
            if has_call and self._enforced:
                return  # what has been handed on stays; the rest is text
            self._held = None
            reader.position, self._blank, self.num_calls, self.is_complete = start, blank, num_calls, is_complete
            if mark in self._openings:
                self._say(reader.take(1))
        self._release()

    def _release(self) -> None:
        """Hand on what has been held back."""
        self._pieces += self._held or ()
        self._held = None

    def _block(self, opening: Opening) -> Reading[None]:
        """The calls of one block. Raises `Mismatch`, `Cut`."""
        reader, format = self._reader, self._format
        yield from reader.one_of([opening.text])
        while True:
            yield from self._call()
            if format.between is None:
                break
            following = yield from self._first_of([format.between + format.name_prefix, format.closing])
            if following == format.closing:
                break
            reader.take(len(format.between))
        yield from reader.one_of([format.closing])
        self.is_complete = True

    def _call(self) -> Reading[None]:
        """One call."""
        reader, format = self._reader, self._format
        yield from reader.one_of([format.name_prefix])
        called = yield from reader.one_of([name + format.name_suffix for name in self._tools])
        name = called.removesuffix(format.name_suffix)
        index, self._blank = self.num_calls, ""
        self.num_calls += 1
        self.is_complete = False
        self._emit(CallBegin(index, name))
        emit = partial(self._argue, index)
        yield from arguments(format.arguments, reader, emit, format.call_suffix, self._tools[name])
        self.is_complete = True
        ends = (
            [format.call_suffix, ""] if format.may_end and not (yield from self._has_more()) else [format.call_suffix]
        )
        yield from reader.one_of(ends)

    def _has_more(self) -> Reading[bool]:
        try:
            yield from self._reader.peek()
        except Cut:
            return False
        return True

    def _argue(self, index: int, text: str) -> None:
        if text:
            self._emit(CallArguments(index, text))
        if self._enforced:
            self._reader.forget()

    def _emit(self, piece: Piece) -> None:
        (self._pieces if self._held is None else self._held).append(piece)

    def _say(self, text: str) -> None:
        """Hand on free text; white space that begins it waits for the rest.

        Where calls end an answer, what follows one is the beginning of another one that was cut.
        """
        if not text or (self._enforced and self._format.ends and self.num_calls):
            return
        if self._thinks:
            self._pieces.append(ThinkingPiece(text))
            return
        if self._blank is not None:
            text = self._blank + text
            self._blank = None if text.strip(WHITE_SPACE) else text
            if self._blank is not None:
                return
        self._pieces.append(TextPiece(text))
