"""A checkpoint's chat template, rendered as transformers does, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the templates of a checkpoint that has several: without and with tools."""


class TemplateFailed(ValueError):
    """A chat template cannot be read, or refuses what it is given."""


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks what a model is trained on: its content."""

    tags = {"generation"}  # noqa: RUF012  # the attribute of the class that is extended

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """The templates of one checkpoint.

    Args:
        sources: Sources by name; that of a checkpoint with one is `DEFAULT`.
        tokens: Texts of its special tokens by name, such as ``bos_token``.

    Raises:
        TemplateFailed: one is no template.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _fail, "strftime_now": _now}
        self.sources = dict(sources)
        self._tokens = dict(tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except Exception as error:  # also what Python says of the code that a template becomes
            raise TemplateFailed(f"the chat template cannot be read: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for ``messages``.

        Args:
            messages: A chat.
            tools: Tools as OpenAI's; None if there are none.
            add_generation_prompt: The prompt ends where the answer begins.

        Raises:
            TemplateFailed: the template refuses them.
        """
        name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        template = self._templates.get(name) or next(iter(self._templates.values()))
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise TemplateFailed(f"the chat template fails: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _fail(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
