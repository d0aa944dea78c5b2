"""Pictures of requests, in the form that TensorRT-LLM takes them beside a prompt.

It writes a prompt with pictures anew: the token ids become text, and the model's input processor
makes other ids of the text and the pictures. So nothing that runs in the worker knows the prompt
that is computed, and requests with pictures have no logits processors here.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from worker.engines.images import FIELD, ImageInput, ImageSources, data_url, file_of
from worker.engines.request import EngineRequest
from worker.engines.trtllm.capabilities import Package
from worker.engines.trtllm.params import NativeRequest
from worker.errors import InvalidRequest, StartupError, one_line

_MODALITY = "--modality multimodal"


class Images:
    """Reads pictures and makes the library's inputs of them.

    Args:
        sources: Places that they may come from.
        llm: The library's ``LLM``.
        package: The installed package.

    Raises:
        StartupError: the model takes no pictures, or this version cannot read them.
    """

    def __init__(self, sources: ImageSources, llm: Any, package: Package) -> None:
        processor = getattr(llm, "input_processor", None)
        if processor is None or type(processor).__name__ == "DefaultInputProcessor":
            raise StartupError(f"{_MODALITY}: the model takes text alone")
        try:
            self._load = importlib.import_module("tensorrt_llm.inputs.utils").async_load_image
        except (ImportError, AttributeError) as error:
            problem = f"TensorRT-LLM {package.version} reads no pictures: {one_line(error)}"
            raise StartupError(f"{_MODALITY}: {problem}") from error
        self._sources = sources
        self._llm = llm
        self._package = package

    async def inputs(self, request: EngineRequest) -> Any:
        """The ``inputs`` of ``generate_async`` for a request with pictures.

        Raises:
            InvalidRequest: a picture cannot be read, or the model's processor refuses the prompt.
        """
        if request.generated_token_ids:
            problem = "cannot go on after a migration: TensorRT-LLM writes a prompt with pictures anew"
            raise InvalidRequest(FIELD, problem)
        pictures = await self._sources.load(request.images, self._read)
        inputs = {"prompt_token_ids": list(request.prompt_token_ids), "multi_modal_data": {"image": pictures}}
        if not hasattr(self._llm, "preprocess"):
            return inputs
        params = self._package.sampling_params()  # it is changed: text that was ids gets no special tokens
        try:
            return await asyncio.to_thread(self._llm.preprocess, inputs, params)
        except Exception as error:  # the boundary of the model's own processor
            raise InvalidRequest(FIELD, f"the model's processor refuses the prompt: {one_line(error)}") from error

    async def _read(self, url: str) -> Any:
        file = file_of(url)
        if file is not None:
            url = data_url(await asyncio.to_thread(file.read_bytes))
        return await self._load(url, format="pil")


def check_controls(made: NativeRequest, images: Sequence[ImageInput]) -> None:
    """Refuse what needs the tokens of a prompt with pictures, which only the library knows.

    Args:
        made: The request in the library's own fields.
        images: Pictures of the request.

    Raises:
        InvalidRequest: it has a logits processor, or penalties of generated tokens alone.
    """
    if not images:
        return
    names = [] if made.chain is None else [member.name for member in made.chain.members]
    names += [name for name in ("presence_penalty", "frequency_penalty") if name in made.fields]
    if names:
        problem = f"cannot be given beside {', '.join(names)}: TensorRT-LLM writes a prompt with pictures anew, and"
        raise InvalidRequest(FIELD, f"{problem} logits processors would not know it; vLLM serves both")
