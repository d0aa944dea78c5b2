"""Drafts of a smaller model with the same vocabulary, decoded greedily over its own KV cache."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.draft_model import DraftModel
from worker.engines.embedded.kv_cache import choose_page_size
from worker.engines.embedded.model import HfModel, check_first_pass, load_model
from worker.engines.embedded.plan import Chunk, Model, Plan, Request
from worker.engines.embedded.speculation.config import FLAG, SpeculativeConfig
from worker.engines.embedded.speculation.proposer import NO_DRAFT, Draft
from worker.errors import StartupError

MAX_PREFILL = 256
"""Tokens of a prompt that are computed in one step; until they are through nothing is drafted."""


class DraftModelProposer:
    """Implements `Proposer` with a `DraftModel`; its pages are freed with it.

    Args:
        draft_model: The draft model.
        request: Request that it drafts for.
    """

    name = "draft_model"
    is_model = True

    def __init__(self, draft_model: DraftModel, request: Request) -> None:
        self._model = draft_model
        self._own = draft_model.begin_draft(request)
        self._num_known = 0  # tokens that were a history; those behind were drafted
        weakref.finalize(self, draft_model.end_draft, self._own)

    def propose(self, history: Sequence[int], limit: int) -> Draft:
        """See `Proposer.propose`."""
        limit = min(limit, self._model.context_length - len(history))
        if limit < 1 or not self._follow(history, limit):
            return NO_DRAFT
        own = self._own
        stop = min(len(history), own.num_computed + MAX_PREFILL)
        logits = self._model.forward(
            Plan((), (Chunk(own, own.num_computed, stop),), (own,) if stop == len(history) else ())
        )
        own.num_computed = stop
        if stop < len(history):
            return NO_DRAFT
        while True:
            own.tokens.append(int(logits[-1].argmax()))
            if len(own.tokens) == len(history) + limit:
                return Draft(own.tokens[len(history) :])
            logits = self._model.forward(Plan((own,), (), (own,)))
            own.num_computed += 1

    def _follow(self, history: Sequence[int], limit: int) -> bool:
        """Keep what is computed of `history`; False if there are too few pages for a draft."""
        own = self._own
        same = min(self._num_known, len(history))
        if same and own.tokens[same - 1] != history[same - 1]:
            same = 0
        while same < min(len(own.tokens), len(history)) and own.tokens[same] == history[same]:
            same += 1
        own.num_computed = min(own.num_computed, same, len(history) - 1)
        own.tokens = list(history)
        self._num_known = len(history)
        cache = self._model.cache
        if own.pages:
            cache.trim(own)
        while len(own.pages) < cache.count_pages(len(history) + limit):
            if not self._model.append_draft_page(own):
                return False
        return True


def load_draft_model(config: EmbeddedConfig, target: Model) -> HfModel | None:
    """The draft model of ``--speculative-config`` for `target`, which `config` describes, without
    pages; None if it names none.

    It computes with the numerics of `config`.

    Raises:
        StartupError: it cannot be loaded, or has another vocabulary.
    """
    path = SpeculativeConfig.parse(config.speculative_config).model
    if path is None:
        return None
    with _naming(path):
        model = load_model(replace(config, model_path=path))
    if model.vocab_size != target.vocab_size:
        raise StartupError(
            f"{FLAG}: model {path} has a vocabulary of {model.vocab_size} ids, the model that it drafts for has "
            f"{target.vocab_size}"
        )
    if _differ(Path(path) / "tokenizer.json", Path(config.model_path) / "tokenizer.json"):
        raise StartupError(f"{FLAG}: model {path} has another tokenizer than the model that it drafts for")
    return model


def with_pages(config: EmbeddedConfig, model: HfModel, target: Model, num_tokens: int) -> DraftModel:
    """The draft model of `load_draft_model` with its pages.

    Args:
        config: Settings of the engine.
        model: The draft model.
        target: Model that it drafts for.
        num_tokens: Tokens of the target's KV cache.

    Raises:
        StartupError: its first forward pass has logits that are not finite.
    """
    speculative = SpeculativeConfig.parse(config.speculative_config)
    context_length = config.context_length or target.context_length
    draft = DraftModel(
        model,
        num_drafted=config.max_num_seqs if speculative.method == "draft_model" else 0,
        num_companions=config.max_num_seqs // 2,  # each beside its owner
        context_length=context_length,
        page_size=choose_page_size(config.kv_block_size, min(context_length, model.context_length)),
        block_size=config.kv_block_size,
        num_tokens=num_tokens,
    )
    if speculative.model is not None:
        with _naming(speculative.model):
            check_first_pass(model, speculative.model)
    return draft


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Errors name the draft model: the options are those of both models, and one may fit the target
    alone.
    """
    try:
        yield
    except StartupError as error:
        raise StartupError(f"{FLAG}: model {path}: {error}") from error


def _differ(draft: Path, target: Path) -> bool:
    if not (draft.is_file() and target.is_file()):
        return False
    first, second = (Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True) for path in (draft, target))
    return bool(first != second)
