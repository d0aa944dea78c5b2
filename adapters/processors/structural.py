"""Structural tags: free text in which a trigger starts what a grammar describes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from adapters.contract import ArgumentError, ProcessorArgs
from adapters.processors.grammar import GrammarProcessor
from adapters.processors.structural_source import (
    MAX_TAGS,
    Block,
    JsonContent,
    MarkedText,
    RegexContent,
    StructuralSource,
)
from adapters.vocabulary import Vocabulary

MAX_TRIGGERS = 32

_Mark = Annotated[str, Field(min_length=1, max_length=256)]


class Tag(ProcessorArgs):
    """One section: its beginning, its content and its end."""

    type: Literal["tag"] = "tag"
    begin: _Mark = Field(description="Begins with one of the triggers.")
    content: JsonContent | RegexContent
    end: str = Field(max_length=256, description="Text behind the content; may be empty.")


class TriggeredTags(ProcessorArgs):
    """Free text with tags in it."""

    type: Literal["triggered_tags"]
    triggers: list[_Mark] = Field(min_length=1, max_length=MAX_TRIGGERS, description="Texts that start a tag.")
    tags: list[Tag] = Field(min_length=1, max_length=MAX_TAGS, description="The tags.")
    at_least_one: bool = Field(default=False, description="The answer begins with a tag.")
    stop_after_first: bool = Field(default=False, description="The answer ends behind the first tag.")


def format_of(response_format: Any) -> Any:
    """The ``format`` of `StructuralTag` for data of a ``response_format``, not checked further.

    Args:
        response_format: ``{"type": "structural_tag", "format": {...}}``; its older form with
            ``structures`` (``begin``, ``schema``, ``end``) and ``triggers``; or the format itself.
    """
    if not isinstance(response_format, dict):
        return response_format
    if "format" in response_format:
        return response_format["format"]
    if "structures" not in response_format:
        return response_format
    structures = response_format["structures"]
    tags = [_tag_of(structure) for structure in structures] if isinstance(structures, list) else structures
    return {"type": "triggered_tags", "triggers": response_format.get("triggers", []), "tags": tags}


def _tag_of(structure: Any) -> Any:
    if not isinstance(structure, dict):
        return structure
    content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
    return {"content": content, **{key: value for key, value in structure.items() if key != "schema"}}


class StructuralTag(GrammarProcessor):
    """Lets the model write freely, and holds it to a grammar wherever it starts a tag.

    Source: ``triggered_tags`` of XGrammar's structural tags, enforced by llguidance's lazy lexemes.
    The free text never contains a trigger; where the model has written one, only the tags that
    begin with it can follow, then free text again. A trigger may begin with a special token, which
    then is the whole trigger; other special tokens are masked. A content that is a regular
    expression ends with the first ``end`` that may stand behind it. With ``at_least_one`` the
    answer begins with a tag, without free text before it.
    """

    name = "structural_tag"
    version = 6  # a content that is a regular expression ends with the end of its tag
    argument = "format"

    class Args(ProcessorArgs):
        format: TriggeredTags = Field(description="Triggers and tags, named as XGrammar's structural tags name them.")

    @classmethod
    def grammar(cls, args: Args, vocabulary: Vocabulary) -> str:
        """See `GrammarProcessor.grammar`."""
        wanted = args.format
        source, texts = StructuralSource("format", vocabulary), MarkedText("format", vocabulary)
        blocks = [_block(trigger, wanted.tags, source, texts) for trigger in wanted.triggers]
        started = sum(len(block.options) for block in blocks)
        if started != len(wanted.tags):
            raise ArgumentError("format", "expected the begin of each tag to begin with exactly one of the triggers")
        return source.grammar(blocks, begins=wanted.at_least_one, many=not wanted.stop_after_first)


def _block(trigger: str, tags: Sequence[Tag], source: StructuralSource, texts: MarkedText) -> Block:
    """Block of the tags that begin with ``trigger``."""
    found, rest = texts.trigger(trigger)
    block = Block(found, found.token or texts.lark(trigger))
    for tag in tags:
        if not tag.begin.startswith(trigger):
            continue
        inner = source.content(tag.content, f"the tag {json.dumps(tag.begin)[:40]}", texts.end(tag.end))
        begin = texts.lark(rest + tag.begin[len(trigger) :])
        if texts.starts_special(tag.begin) and not found.token:
            raise ArgumentError("format", "a trigger must not end inside a special token of a tag")
        block.options.append(f"{begin} {inner}".strip())
    if not block.options:
        raise ArgumentError("format", f"no tag begins with the trigger {json.dumps(trigger)[:40]}")
    return block
