"""Offline inference: prompts in, results out, in the caller's own thread."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from adapters.catalog import Catalog
from adapters.vocabulary import CopiedTokenizer, Vocabulary
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.offline.request_builder import Named, RequestBuilder
from worker.engines.embedded.offline.results import RequestGroup, Result
from worker.engines.embedded.offline.session import Session
from worker.engines.embedded.plan import Model
from worker.engines.embedded.serving import load
from worker.errors import InvalidRequest, StartupError, shown
from worker.models import convert_gguf, find_gguf, hub_checkpoint, is_hub_id, model_cache, named_model
from worker.models.named import DEFAULT, DEFAULT_DTYPE
from worker.models.tokenizer_copy import load_vocabulary
from worker.sampling import SamplingParams

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class Engine:
    """Offline engine; calls that compute wait for each other, and any thread may suspend, resume
    and abort meanwhile::

        engine = Engine("/models/tiny", max_num_seqs=8)
        for result in engine.generate(["Once upon", "The end"], SamplingParams(max_tokens=16)):
            print(result.text)

    Args:
        model_path: Directory of the checkpoint, or its id on the Hugging Face Hub, or a GGUF file,
            which is converted once into the cache (`worker.models`); the text ``default`` for the
            model that the launch scripts serve, in float32 unless `settings` say otherwise, or
            ``tiny``. A tokenizer is needed only for text input or output.
        model: A model to use instead of the checkpoint's; the tokenizer is still read from
            `model_path`.
        catalog: Logits processors that may be named; the built-in ones by default.
        settings: Fields of `EmbeddedConfig`; prompts are not chunked for mixed batches unless
            `max_mixed_chunk` is set.

    Raises:
        StartupError: the checkpoint or a setting cannot be served.
        TypeError: a setting is unknown.

    Attributes:
        config: The settings.
        info: Description of the loaded model.
        session: Drives the steps; used by the `TextGenerationController`.
    """

    def __init__(
        self, model_path: str | Path, *, model: Model | None = None, catalog: Catalog | None = None, **settings: Any
    ) -> None:
        if model_path == DEFAULT:
            settings = {"dtype": DEFAULT_DTYPE, **settings}
        model_path = _checkpoint(model_path, settings.get("quantization", "auto"))
        self.config = EmbeddedConfig(model_path=model_path, **settings)
        stepper, self.info = load(self.config, model)
        if self.config.max_mixed_chunk is None:  # offline, throughput matters and latency does not
            stepper.scheduler.mixed = None
        copy = self.config.packed_copy if catalog is None else "off"  # third parties may use more than a copy has
        vocabulary = _vocabulary(model_path, self.info.vocab_size, self.info.eos_token_ids, copy)
        known, draft_model = catalog or Catalog.default(), stepper.draft_model
        builder = RequestBuilder(stepper.model, self.info.context_length, vocabulary, known, draft_model)
        self.session = Session(stepper, self.info, builder)
        self._done: list[Result] = []
        self._computing = threading.RLock()  # held by a thread until it has its results, or all are suspended
        self._generating: set[str] = set()  # prompts of `generate`, whose results are not for `step`

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for group_id in self.session.group_ids:
            self.session.abort(group_id)

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint, None if it has none.

        Prompts and answers are computed by its copy (`worker.models.tokenizer_copy`), where there
        is one; transformers is then imported here, at the first use, which takes seconds.
        """
        used = self.session.builder.tokenizer
        if not isinstance(used, CopiedTokenizer):
            return used
        return _vocabulary(Path(self.config.model_path), self.info.vocab_size, self.info.eos_token_ids, "off").tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
        *,
        processors: Sequence[Named] | Sequence[Sequence[Named]] | None = None,
        speculation: bool = True,
        predictions: str | Sequence[str | None] | None = None,
        adapter: str | None = None,
    ) -> list[Result]:
        """Generate answers; returns one result per prompt, in order.

        An answer that fails ends with ``finish_reason`` ``error``; the others are unaffected.

        Args:
            prompts: Texts or lists of token ids, or a single one.
            sampling_params: One for all prompts, or one for each; `SamplingParams()` by default.
            progress: Show a progress bar if standard error is a terminal.
            processors: Logits processors by name, ``[{"name": "min_tokens", "args": {"n": 8}}]``:
                one list for all prompts, or a list for each. Every answer gets its own instances.
            speculation: False drafts no tokens for these prompts, which changes none of them.
            predictions: Text that much of the answers is likely to be, one for all prompts or one,
                or None, for each: tokens are drafted from it, which changes none of them.
            adapter: LoRA adapter that computes the answers, one of `EmbeddedConfig.lora_modules`.

        Raises:
            InvalidRequest: a prompt cannot be served; no prompt has been started. The field has its
                index.
            ValueError: there are not as many parameters, lists of processors or predictions as
                prompts, or an argument is of another type.
        """
        if not isinstance(speculation, bool):
            raise ValueError(f"speculation must be True or False, got {speculation!r}")
        asked = _prompts(prompts)
        params = _per_prompt(sampling_params, len(asked))
        predicted = _predicted(predictions, len(asked))
        groups = self.session.prepare(asked, params, _named(processors, len(asked)))
        self._adapt(groups, adapter)
        for group, text in zip(groups, predicted, strict=True):
            group.predict(self.session.builder.predicted(text))
        if not speculation:
            for group in groups:
                group.forgo_speculation()
        with self._computing:
            return self._generate(groups, progress)

    def _generate(self, groups: Sequence[RequestGroup], progress: bool) -> list[Result]:
        mine = {group.id for group in groups}
        results: dict[str, Result] = {}
        num_ended: int | None = self.session.num_ended
        self._generating |= mine
        hidden = not (progress and sys.stderr.isatty())
        try:
            for group in groups:
                self.session.add(group)
            with tqdm(total=len(groups), disable=hidden, unit="prompt", dynamic_ncols=True) as bar:
                while len(results) < len(groups):
                    done = self._advance()
                    if not done and self.session.is_idle:  # all prompts are suspended or aborted
                        self._wait()
                        num_ended = None
                    if self.session.num_ended != num_ended:  # another thread has ended some, or computed them
                        num_ended = self.session.num_ended
                        known = results.keys() | {one.request_id for one in done}
                        done += [group.result() for group in groups if group.is_done and group.id not in known]
                    results |= {one.request_id: one for one in done if one.request_id in mine}
                    self._done += [one for one in done if one.request_id not in self._generating]
                    bar.update(sum(one.request_id in mine for one in done))
        finally:
            for group_id in mine - set(results):
                self.session.abort(group_id)
            self._generating -= mine
        return [results[group.id] for group in groups]

    def add(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        processors: Sequence[Named] = (),
        *,
        adapter: str | None = None,
    ) -> str:
        """Queue one prompt for `step`; returns its id.

        Raises:
            InvalidRequest: it cannot be served.
            ValueError: an argument is of another type.
        """
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InvalidRequest("prompts[0]", f"must be a text or a list of token ids, got {shown(prompt)}")
        (group,) = self.session.prepare([prompt], _per_prompt(sampling_params, 1), _named(processors, 1))
        self._adapt([group], adapter)
        self.session.add(group)
        return group.id

    def step(self) -> list[Result]:
        """Compute one step; returns the results that it finished."""
        with self._computing:
            # which may raise: what was done before is then still to be returned
            found = [one for one in self._advance() if one.request_id not in self._generating]
            earlier, self._done = self._done, []
            return earlier + found

    def abort(self, request_id: str) -> Result | None:
        """End a prompt's answers where they are; None if it is done already. Suspended ones may
        be aborted, too.
        """
        group = self.session.abort(request_id)
        return None if group is None else group.result()

    def suspend(self, request_id: str) -> None:
        """Take a prompt out of the engine to make room. Raises `KeyError` if it is not here."""
        self.session.suspend(request_id)

    def resume(self, request_id: str) -> None:
        """Continue a suspended prompt with unchanged results. Raises `KeyError` if it is not."""
        self.session.resume(request_id)

    @property
    def unfinished(self) -> list[str]:
        """Ids of prompts that are not done, suspended ones too."""
        return self.session.group_ids

    def _adapt(self, groups: Sequence[RequestGroup], adapter: str | None) -> None:
        if adapter is None:
            return
        if not isinstance(adapter, str):
            raise ValueError(f"adapter must be a text, got {adapter!r}")
        adapters = self.session.stepper.adapters
        if adapters is None:
            raise InvalidRequest("adapter", "this model's kernels compute no LoRA adapters")
        try:
            named = adapters.named(adapter)
        except InvalidRequest as error:
            raise InvalidRequest("adapter", error.problem) from None
        for group in groups:
            group.compute_with(named)

    def _wait(self) -> None:
        """Let other threads compute, which may resume what this one waits for."""
        self._computing.release()
        try:
            self.session.wait()
        finally:
            self._computing.acquire()

    def _advance(self) -> list[Result]:
        ended = dict.fromkeys(event.group for event in self.session.step())  # several answers may end in one step
        return [group.result() for group in ended if group.is_done]


def _checkpoint(model: str | Path, quantization: str) -> Path:
    """The path, or the checkpoint of the model or the GGUF file that it names; see
    `EmbeddedConfig.quantization`.
    """
    keeps_blocks = quantization == "auto"
    named = named_model(model, logger.info, keeps_blocks) if isinstance(model, str) else None
    if named is not None:
        return named
    if isinstance(model, str) and is_hub_id(model):
        return hub_checkpoint(model, None, logger.info)
    file = find_gguf(Path(model))
    return Path(model) if file is None else convert_gguf(file, model_cache(), logger.info, keeps_blocks)


def _vocabulary(path: Path, size: int, eos_token_ids: tuple[int, ...], packed_copy: str) -> Vocabulary:
    if not (path / "tokenizer_config.json").is_file() and not (path / "tokenizer.json").is_file():
        return Vocabulary(size, None, eos_token_ids)
    try:
        return load_vocabulary(path, size, eos_token_ids, packed_copy)
    except ValueError as error:
        raise StartupError(f"--model-path {path}: {error}") from error


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):  # the keys of a dict would be prompts
        raise InvalidRequest("prompts", f"must be texts or lists of token ids, or a single one, got {shown(prompts)}")
    if isinstance(prompts, str) or (len(prompts) and all(type(one) is int for one in prompts)):
        return [prompts]  # type: ignore[list-item]  # mypy does not see that all of them are integers
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, (str, list, tuple)):
            raise InvalidRequest(f"prompts[{index}]", f"must be a text or a list of token ids, got {prompt!r}")
    return list(prompts)  # type: ignore[arg-type]  # as above


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError(f"sampling_params must be SamplingParams, or a list with one for each prompt, got {params!r}")
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
    return list(params)


def _named(processors: Sequence[Named] | Sequence[Sequence[Named]] | None, count: int) -> list[Sequence[Named]]:
    if isinstance(processors, str | Mapping) or not isinstance(processors, Iterable | None):
        raise ValueError(f"processors must be a list of processors by name, got {processors!r}")
    given: list[Any] = list(processors or ())
    if not given or not isinstance(given[0], (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"there are {count} prompts and {len(given)} lists of processors")
    return given


def _predicted(predictions: str | Sequence[str | None] | None, count: int) -> list[str]:
    given = [predictions] * count if predictions is None or isinstance(predictions, str) else predictions
    if not isinstance(given, Sequence) or not all(isinstance(one, str | None) for one in given):
        raise ValueError(f"predictions must be a text, or a list with a text or None for each prompt, got {given!r}")
    if len(given) != count:
        raise ValueError(f"there are {count} prompts and {len(given)} predictions")
    return [one or "" for one in given]
