"""Lark grammars of answers that consist of messages in channels, as GPT-OSS writes them."""

from __future__ import annotations

from collections.abc import Sequence

from adapters.calls import CallFormat, Channels
from adapters.grammars.json_schema import literal
from adapters.processors.call_source import Signature
from adapters.processors.structural_source import MarkedText, StructuralSource, without

_ANY = "(?s:.*)"


class ChannelSource:
    """Sources of messages and calls, for the grammar of one answer.

    Messages of thinking and of text may come before the last one, which is a call or the text of
    the final channel.

    Args:
        wanted: Format of the calls, with channels.
        source: The grammar, to which rules are added.
        texts: Writes texts with special tokens in them.
        tools: The tools that may be called.
        parallel: Whether there may be more than one call.
        ends_with_call: Whether the token behind a call ends the answer.
    """

    def __init__(
        self,
        wanted: CallFormat,
        source: StructuralSource,
        texts: MarkedText,
        tools: Sequence[Signature],
        *,
        parallel: bool,
        ends_with_call: bool,
    ) -> None:
        assert wanted.channels is not None
        self._format, self._channels = wanted, wanted.channels
        self._source, self._texts, self._tools = source, texts, tools
        self._parallel, self._suffix = parallel and not ends_with_call, "" if ends_with_call else wanted.call_suffix

    def free_text(self) -> str:
        """Start rule of text without a call."""
        return self._last(self._all(), self._free())

    def calls(self) -> str:
        """Start rule of calls, with nothing before them but thinking."""
        return f"{self._before([self._channels.thinking])} {self._calls()}"

    def text_and_calls(self) -> str:
        """Start rule of text, calls or both."""
        return f"{self.free_text()} | {self._before(self._all())} {self._calls()}"

    def text_before(self, answer: str) -> str:
        """Source of ``answer``, an expression, as the last message, with nothing before it but
        thinking: the text of an answer is that of all its channels of text.
        """
        return self._last([self._channels.thinking], answer)

    def _last(self, names: Sequence[str], text: str) -> str:
        """Source of ``text``, an expression, as the last message, behind some in these channels."""
        return f"{self._before(names)} {self._head(self._channels.text[0])} {text}"

    def _all(self) -> list[str]:
        """Channels of the messages before the last one."""
        return [self._channels.thinking, *self._channels.text[1:]]

    def _head(self, channel: str) -> str:
        channels: Channels = self._channels
        return self._texts.lark(f"{channels.channel}{channel}{channels.message}")

    def _before(self, names: Sequence[str]) -> str:
        """Messages in any of these channels, each with what begins the next one."""
        start = self._texts.lark(self._channels.start)
        options = " | ".join(f"{self._head(name)} {self._to_end()} {start}" for name in names)
        return f"({options})*"

    def _to_end(self) -> str:
        """Source of the text of a message and of its end."""
        end, _ = self._texts.trigger(self._channels.end)
        if end.token:
            return f"{self._free()} {end.token}"
        others = [text for text in self._marks() if text != end.text]
        self._source.add("TO_END", f"/{_ANY}{literal(end.text)}/{without(others)}")
        self._source.add("to_end[lazy]", "TO_END")
        return "to_end"

    def _free(self) -> str:
        self._source.add("FREE", f"/{_ANY}/{without(self._marks())}")
        return "FREE"

    def _marks(self) -> list[str]:
        """Texts that no message holds: those of the format, also where they are special tokens,
        from which who reads the answer cannot tell them.
        """
        return list(self._format.special)

    def _calls(self) -> str:
        (opening,) = self._format.openings
        begun = opening.text + self._format.name_prefix
        options = [
            f"{self._texts.lark(begun + tool.name + self._format.name_suffix)} {tool.arguments}" for tool in self._tools
        ]
        self._source.add("call", " | ".join(f"{option} {self._texts.lark(self._suffix)}" for option in options))
        return f"call ({self._texts.lark(self._format.again)} call)*" if self._parallel else "call"
