"""vLLM's engine with the project's processors, and what its model's own logits were."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from random_checkpoints import GEMMA, ids_of, write
from vllm import LLM, SamplingParams
from vllm_stand_in import _Ended

from adapters.chain import ProcessorFailed, apply_chain
from adapters.vllm.model import ServedModel, model_of
from adapters.vllm.processors import Processors
from adapters.vllm.requests import chain_of, read
from adapters.vllm.rows import end
from worker.models import model_cache, prepare_default_model
from worker.tiny_model import write_tiny_model

Raw = dict[str, dict[int, torch.Tensor]]
"""vLLM's logits by the request's report name and position of the token; the newest of several."""


class Recording(Processors):
    """The processors; records the logits before them, the seeds that were drawn, the most rows of a
    step, and who was preempted with a part of the answer.
    """

    raw: ClassVar[Raw] = defaultdict(dict)
    seeds: ClassVar[dict[str, int]] = {}
    resumed: ClassVar[set[str]] = set()
    most_rows: ClassVar[int] = 0

    def update_state(self, batch_update: Any) -> None:
        for _, asked, _, output in batch_update.added if batch_update else ():
            report = (asked.extra_args or {}).get("logits_processors_report")
            if output and report is not None:
                self.resumed.add(report)
        super().update_state(batch_update)

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        Recording.most_rows = max(Recording.most_rows, len(self._indexed.requests))
        for index, request in self._indexed.requests.items():
            length = len(request.prompt) + len(request.output)
            if request.row._report is not None:
                self.raw[request.row._report][length] = logits[index].clone()
        found = super().apply(logits, ctx)
        for request in self._indexed.requests.values():
            if request.row._report is not None and request.row.chain is not None:
                self.seeds[request.row._report] = request.row.chain.context.seed
        return found


_shared = ExitStack()
_kept: list[LLM] = []


def shared() -> LLM:
    """SmolLM2 in an engine that tests share until another one is started: the parallel groups of
    one process go with the first engine that ends.
    """
    if not _kept:
        _kept.append(_shared.enter_context(running(default_model())))
    return _kept[0]


def close_shared() -> None:
    """End the engine that tests share, if there is one."""
    _kept.clear()
    _shared.close()


@contextmanager
def running(model: Path, **options: Any) -> Iterator[LLM]:
    """The only engine in this process, freed afterwards."""
    close_shared()
    settings = {"max_model_len": 512, "max_num_seqs": 16, "block_size": 32, "dtype": "bfloat16"}
    llm = LLM(
        str(model),
        logits_processors=[Recording],
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
        **settings | options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        Recording.raw.clear()


def facts_of(llm: LLM) -> ServedModel:
    """The served model of an engine in this process."""
    return model_of(llm.llm_engine.vllm_config)


def selected(*processors: dict[str, Any], **more: Any) -> dict[str, Any]:
    """``extra_args`` that name processors."""
    return {"logits_processors": json.dumps({"version": 1, "processors": processors, **more})}


def params(*processors: dict[str, Any], report: str | None = None, **fields: Any) -> SamplingParams:
    """Sampling parameters with processors."""
    named = {} if report is None else {"logits_processors_report": report}
    return SamplingParams(**fields, extra_args=selected(*processors) | named)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], asked: Sequence[SamplingParams]) -> list[list[int]]:
    """Token ids of the answers, all asked for at once."""
    given: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(given, list(asked), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def replayed(
    model: ServedModel,
    prompt: Sequence[int],
    asked: SamplingParams,
    answer: Sequence[int],
    report: str,
) -> list[int]:
    """The tokens that a fresh chain and sampler choose from recorded logits."""
    raw = Recording.raw[report]
    read_once = read(asked, model, Recording.seeds[report])
    assert read_once is not None
    chain, _ = chain_of(read_once, asked, model)
    has_failed, found = False, []
    ended: Any = _Ended(min(model.context.vocabulary.eos_token_ids))
    chain.start(prompt)
    for number, token_id in enumerate(answer):
        row = raw[len(prompt) + number].clone()
        row[model.never_ids] = -torch.inf
        try:
            if not has_failed:
                apply_chain(chain, row)
        except ProcessorFailed:
            has_failed = True
        if has_failed:
            end(row[None], 0, ended)
        found.append(int(row.argmax()))
        if not has_failed:
            chain.accept(token_id, chain.position)
    return found


def num_preemptions(llm: LLM) -> int:
    """Preemptions since the engine began."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


@cache
def default_model() -> Path:
    """SmolLM2, as pip has fetched it."""
    return prepare_default_model(model_cache(os.environ), lambda line: None)


def tiny(directory: Path, model_type: str) -> Path:
    """A random checkpoint whose heads have 64 elements: vLLM's CPU attention refuses 16."""
    tokenizer = write_tiny_model(directory / "tokenizer")
    path = directory / model_type
    heads = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    settings = heads | (GEMMA | {"query_pre_attn_scalar": 64} if model_type.startswith("gemma") else {})
    write(path, model_type, settings | ids_of(tokenizer))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, path / name)
    return path
