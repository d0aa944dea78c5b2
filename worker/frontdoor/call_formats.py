"""The format in which the served models write tool calls: named by an option, or found."""

from __future__ import annotations

import logging
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from adapters.calls import FORMATS, NEUTRAL, written_calls
from adapters.calls.detection import ToolSupport, tool_support
from worker.errors import StartupError
from worker.models.chat_template import FoundTemplate, read_chat_template
from worker.models.special_tokens import read_special_tokens

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
"""Values of ``--tool-call-format`` that are no format."""


class Model(NamedTuple):
    """Place of the chat template of the served models.

    Attributes:
        path: Checkpoint or GGUF file, None if it is not known.
        template: File of a template in place of the model's own.
    """

    path: str | None = None
    template: str | None = None


@lru_cache(16)
def support_of(wanted: str, model: Model) -> ToolSupport | None:
    """The format of calls, and what the chat template knows of them; None without a format.

    Args:
        wanted: Name of a format, `AUTO` or `NONE`.
        model: The model; without its template a format that is named is taken to be the template's
            own, and none is found.
    """
    if wanted == NONE:
        return None
    found = None if model.path is None else _read(model.path, model.template)
    if found is None:
        return None if wanted == AUTO else _assumed(wanted)
    support = tool_support(*found, None if wanted == AUTO else wanted)
    logger.info("tool calls are written as %s: %s", support.format, support.evidence)
    return support


@lru_cache(16)
def marks_of_calls(format: str, path: str | None) -> frozenset[str]:
    """Texts of the special tokens of the model at ``path``, if calls are marked by such; none if
    they are not, or cannot be read.

    Some models have special tokens for marks that are plain text in others: Jamba's
    ``<tool_calls>``, or ``<tool_call>`` in some of Hermes' format.
    """
    wanted = FORMATS[format]
    try:
        found = frozenset[str]() if path is None else read_special_tokens(Path(path))
    except (OSError, ValueError, StartupError) as error:
        if wanted.special:
            problem = "special tokens may be in the text beside tool calls: those of %s cannot be read: %s"
            logger.warning(problem, path, error)
        return frozenset()
    spelled = [written_calls(wanted, [("f", {"a": ""})] * 2), *(opening.text for opening in wanted.openings)]
    is_marked = bool(wanted.special) or any(token in text for token in found for text in spelled)
    return found if is_marked else frozenset()


def _read(path: str, template: str | None) -> FoundTemplate | None:
    try:
        return read_chat_template(Path(path), None if template is None else Path(template))
    except (OSError, ValueError, StartupError) as error:
        logger.warning("the format of tool calls is not known: the chat template of %s cannot be read: %s", path, error)
        return None


def _assumed(wanted: str) -> ToolSupport:
    """The support where the template is not known: that of the models that the format is made for.

    No template writes the neutral format.
    """
    knows = wanted != NEUTRAL
    return ToolSupport(format=wanted, evidence="it is named", tools=knows, calls=knows, several=knows, results=knows)
