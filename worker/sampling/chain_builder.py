"""Builds the logits processor chain of a request, served or offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adapters.catalog import Catalog, ModelPolicy, Selection
from adapters.chain import ProcessorChain
from adapters.contract import Context, Scope
from adapters.processors.characters import split_characters
from adapters.processors.grammar import grammar_cache
from adapters.vocabulary import Vocabulary, byte_index, thinking_tags
from worker.sampling.field_processors import field_values, refuse_twice
from worker.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Facts:
    """What chains need to know of the model.

    Attributes:
        vocabulary: Its ids and tokenizer.
        think_start: Ids of the tag that opens a thinking section, empty if it has none.
        think_end: Ids of the tag that closes it.
    """

    vocabulary: Vocabulary
    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()

    @classmethod
    def load(cls, model_path: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Facts:
        """Read the checkpoint's tokenizer, and derive what takes long.

        Raises:
            OSError, ValueError: there is none that can be read.
        """
        facts = cls.of(Vocabulary.from_pretrained(model_path, vocab_size, eos_token_ids))
        facts.precompute()
        return facts

    @classmethod
    def of(cls, vocabulary: Vocabulary, think_start: str | None = None, think_end: str | None = None) -> Facts:
        """Those of a model with this vocabulary.

        Args:
            vocabulary: Of the model.
            think_start: Text of the opening tag; by default the model's own, if it has a known one.
            think_end: Text of the closing tag.

        Raises:
            ValueError: only one tag is given, or the model's tokens cannot write one.
        """
        return cls(vocabulary, *thinking_tags(vocabulary, think_start, think_end))

    def precompute(self) -> None:
        """Derive from the tokenizer what takes long: seconds for a large vocabulary.

        Raises:
            ValueError: llguidance cannot read the tokenizer.
        """
        byte_index(self.vocabulary)
        split_characters(self.vocabulary)
        grammar_cache(self.vocabulary)


@dataclass(frozen=True, slots=True)
class ChainBuilder:
    """Builds the logits processor chains of requests to one model.

    Attributes:
        catalog: Every processor that may be named.
        facts: Of the model.
        policy: The operator's, for this model.
        watermark_keys: The operator's, by id.
        step_budget_s: Most CPU time that a third-party processor may take for one step, seconds.
    """

    catalog: Catalog
    facts: Facts
    policy: ModelPolicy = field(default_factory=ModelPolicy)
    watermark_keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    step_budget_s: float | None = None

    def select(
        self, named: Selection, params: SamplingParams, *, served: bool = False, after_thinking: bool = False
    ) -> Selection:
        """What a request asks for by name and by field, and what the operator adds.

        Fields that an engine serves itself are compared with the policy and are not part of it.

        Args:
            named: The processors that the request names.
            params: Its fields.
            served: Errors name the field of the request, not that of `SamplingParams`.
            after_thinking: A grammar begins after the thinking, if the model has thinking tags.

        Raises:
            SelectionError: a control is given twice, or the policy forbids it.
        """
        scope: Scope = "answer" if after_thinking and self.facts.think_start else "all"
        fields = field_values(params, served=served, guide_scope=scope)
        refuse_twice({requested.name for requested in named.processors}, fields)
        selection = self.policy.apply(named, self.catalog, [value for _, value in fields])
        return selection.with_processors(
            *(value.requested for control, value in fields if control.refused is not None and not value.is_neutral)
        )

    def context(self, end_token_ids: frozenset[int], seed: int, max_tokens: int | None, choice: int = 0) -> Context:
        """What the processors of one choice of a request may know."""
        return Context(
            self.facts.vocabulary,
            end_token_ids,
            seed,
            choice,
            max_tokens=max_tokens,
            watermark_keys=self.watermark_keys,
            think_start=self.facts.think_start,
            think_end=self.facts.think_end,
        )

    def build(self, selection: Selection, context: Context) -> ProcessorChain:
        """The chain of a selection, not begun yet.

        Raises:
            SelectionError: a processor is unknown, or its arguments cannot be honoured.
        """
        return self.catalog.build_chain(selection, context, step_budget_s=self.step_budget_s)
