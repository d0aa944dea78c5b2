"""`ServedModel`: what all requests to the model that vLLM serves share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any
from weakref import ReferenceType, ref

from adapters.catalog import Catalog, ModelPolicy, Policy, model_context, precompute
from adapters.contract import Context
from adapters.grammars.sandbox import GrammarSandbox
from adapters.processors.grammar import grammar_cache, tokenizer_tables
from adapters.vllm.prepared import PreparedGrammars
from adapters.vocabulary import Vocabulary

POLICY = "DLW_PROCESSOR_POLICY"
"""Environment variable: YAML file of mandatory, default and forbidden processors."""

THIRD_PARTY = "DLW_LOGITS_PROCESSOR"
"""Environment variable: third-party processors, ``NAME=module:Class``, separated by commas."""

ALLOWED = "DLW_ALLOW_LOGITS_PROCESSORS"
"""Environment variable: installed third-party processors that may be named, with commas between."""

GRAMMAR_TIMEOUT_S = 10.0
"""Processor time that a grammar may take to compile, seconds."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model in vLLM's configuration.

    Attributes:
        tokenizer: Directory or name of the tokenizer, None where the engine has none.
        vocab_size: Width of a row of logits.
        eos_token_ids: End tokens of the generation configuration.
        name: Served name, which selects the operator's policy.
        reports_processed: Whether log probabilities are those after all controls.
        penalises_first: Whether vLLM applies its penalties before processors, and drafts may be
            verified: the second model runner.
    """

    tokenizer: str | None
    vocab_size: int
    eos_token_ids: frozenset[int]
    name: str
    reports_processed: bool = False
    penalises_first: bool = False

    @classmethod
    def of(cls, config: Any) -> ModelFacts:
        """The facts in a ``VllmConfig``."""
        model = config.model_config
        ends = (model.try_get_generation_config() or {}).get("eos_token_id")
        if ends is None:
            ends = getattr(model.hf_text_config, "eos_token_id", None)
        told = () if ends is None else (ends,) if isinstance(ends, int) else ends
        served, vocab_size = model.served_model_name, model.get_vocab_size()
        return cls(
            tokenizer=None if model.skip_tokenizer_init else _directory(model),
            vocab_size=vocab_size,
            eos_token_ids=frozenset(each for each in told if 0 <= each < vocab_size),
            name=str(served[0] if isinstance(served, list) else served or model.model),
            reports_processed=str(model.logprobs_mode).startswith("processed"),
            penalises_first=bool(config.use_v2_model_runner),
        )


@dataclass(frozen=True)
class ServedModel:
    """Catalogue, policy and context of the processors of one model.

    Attributes:
        facts: Facts about the model in vLLM's configuration.
        context: Context that all its requests share.
        catalog: Every processor that may be named.
        policy: The operator's policy for it.
    """

    facts: ModelFacts
    context: Context = field(repr=False)
    catalog: Catalog = field(repr=False)
    policy: ModelPolicy
    prepared: PreparedGrammars = field(default_factory=PreparedGrammars, init=False, repr=False, compare=False)

    @classmethod
    def load(cls, facts: ModelFacts, environ: Mapping[str, str] = os.environ) -> ServedModel:
        """Load the tokenizer, the third-party processors and the policy.

        Raises:
            OSError, ValueError: the tokenizer, a processor or the policy cannot be used; the
                message says which.
        """
        vocabulary = _vocabulary(facts)
        catalog = Catalog.load(allow=_names(environ, ALLOWED), options=_names(environ, THIRD_PARTY))
        path = environ.get(POLICY)
        policy = Policy.load(path, catalog, environ) if path else Policy()
        context = replace(model_context(vocabulary), watermark_keys=policy.watermark_keys)
        policy.check(facts.name, catalog, replace(context, end_token_ids=vocabulary.eos_token_ids))
        return cls(facts, context, catalog, policy.for_model(facts.name))

    @cached_property
    def never_ids(self) -> list[int]:
        """Ids of a row that are no token, and that end no answer."""
        return list(self.context.vocabulary.never_ids)

    def guard_grammars(self) -> None:
        """Compile grammars in a sandbox process from now on, so that one that explodes is refused.

        Needed where requests are admitted. The engine's process compiles what passed there. The
        first call waits for the process, and for the tokenizer of this one, which takes seconds:
        admission waits for grammars for a moment only.

        Raises:
            SandboxUnavailable: the process cannot be started.
        """
        cache = grammar_cache(self.context.vocabulary)
        with _guarding:
            if cache.sandbox is None:
                cache.tokenizer()
                sandbox = GrammarSandbox(lambda: tokenizer_tables(self.context.vocabulary), timeout_s=GRAMMAR_TIMEOUT_S)
                sandbox.start()
                cache.sandbox = sandbox
                sandbox.wait_ready()

    def has_compiled(self, grammars: Sequence[str]) -> bool:
        """Start to compile grammars in this process; whether all are compiled, or refused."""
        return grammar_cache(self.context.vocabulary).prepare(grammars)

    def warm_up(self) -> None:
        """Derive from the tokenizer what takes long: no step should wait for it."""
        if self.context.vocabulary.tokenizer is not None:
            precompute(self.context.vocabulary)


@lru_cache(4)
def served_model(facts: ModelFacts) -> ServedModel:
    """`ServedModel.load`, once per process; the caller holds `_loading` where there are threads."""
    return ServedModel.load(facts)


_loading, _guarding = Lock(), Lock()
_facts: list[tuple[ReferenceType[Any], ModelFacts]] = []


def model_of(config: Any) -> ServedModel:
    """The served model of a ``VllmConfig``, whose facts take milliseconds to find out once."""
    with _loading:
        for known, facts in _facts:
            if known() is config:
                return served_model(facts)
        _facts[:] = [each for each in _facts if each[0]() is not None]
        facts = ModelFacts.of(config)
        _facts.append((ref(config), facts))
        return served_model(facts)


def _vocabulary(facts: ModelFacts) -> Vocabulary:
    if facts.tokenizer is None:
        return Vocabulary(facts.vocab_size, eos_token_ids=sorted(facts.eos_token_ids))
    own = Vocabulary.from_pretrained(facts.tokenizer, facts.vocab_size)
    ends = sorted(own.eos_token_ids | facts.eos_token_ids)
    return Vocabulary(facts.vocab_size, own.tokenizer, ends, path=facts.tokenizer)


def _names(environ: Mapping[str, str], variable: str) -> list[str]:
    return [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]


def _directory(model: Any) -> str:
    """Directory of the tokenizer of a ``ModelConfig``; the id on the Hugging Face Hub of one that
    vLLM has downloaded in no revision of its own.
    """
    name, revision = str(model.tokenizer or model.model), model.tokenizer_revision
    if revision is None or os.path.exists(name):
        return name
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, revision=revision, local_files_only=True))
