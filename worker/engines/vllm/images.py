"""`Images`: reads the pictures of requests with vLLM's own loader."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Sequence
from typing import Any

from adapters.chain import ProcessorChain
from worker.engines.images import FIELD, ImageInput, ImageSources, file_of
from worker.errors import InvalidRequest, StartupError, one_line

_PROCESSORS = "vllm.multimodal"
"""Package of vLLM in which prompts get the tokens of their pictures."""


class Images:
    """Reads pictures.

    Args:
        sources: Places that they may come from.
        model_config: vLLM's ``ModelConfig``.
        version: Version of vLLM, for messages.

    Raises:
        StartupError: the model takes no pictures, or this vLLM cannot read them.
    """

    def __init__(self, sources: ImageSources, model_config: Any, version: str) -> None:
        if not model_config.is_multimodal_model:
            raise StartupError("--modality multimodal: the model takes text alone")
        try:
            connector = importlib.import_module("vllm.multimodal.media").MediaConnector
        except (ImportError, AttributeError) as error:
            raise StartupError(f"--modality multimodal: vLLM {version} reads no pictures: {one_line(error)}") from error
        directory = "" if sources.directory is None else str(sources.directory)
        self._sources = sources
        self._loader = connector(allowed_local_media_path=directory, allowed_media_domains=sorted(sources.hosts))

    async def load(self, images: Sequence[ImageInput]) -> list[Any]:
        """See `ImageSources.load`."""
        return await self._sources.load(images, self._load)

    async def _load(self, url: str) -> Any:
        file = file_of(url)  # whose host, this machine, is part of the path to vLLM's loader
        return await self._loader.fetch_image_async(url if file is None else file.as_uri())


def check_room(chain: ProcessorChain | None, max_tokens: int | None, num_prompt_tokens: int, context: int) -> None:
    """Refuse processors that count down to an end of the answer beyond that of the context: they do
    not know how many tokens the pictures became.

    Args:
        chain: Processors of the request, None without any.
        max_tokens: Most tokens of the answer that they know of.
        num_prompt_tokens: Tokens of the prompt, with those of its pictures.
        context: Longest prompt + answer, tokens.

    Raises:
        InvalidRequest: the answer may end before they expect it.
    """
    names = [] if chain is None else [member.name for member in chain.members if member.processor.counts_down]
    room = context - num_prompt_tokens
    if names and (max_tokens is None or max_tokens > room):
        problem = f"must be at most {room}: {', '.join(names)} counts down to it, and the prompt with its pictures"
        raise InvalidRequest("stop_conditions.max_tokens", f"{problem} leaves no more of the context of {context}")


def processor_refusal(error: BaseException) -> InvalidRequest | None:
    """The refusal of a prompt and its pictures by the model's processor in vLLM, None for another
    error.

    It fails with exceptions of every class where there are more pictures than places, for one.
    """
    cause = error.__cause__ or error
    places = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(cause.__traceback__))
    if not any(str(name).startswith(_PROCESSORS) for name in places):
        return None
    return InvalidRequest(FIELD, f"the model's processor refuses the prompt: {one_line(cause)}")
