"""Guides that TensorRT-LLM enforces itself, where it calls no logits processors.

With ``guided_decoding_backend: llguidance`` it gets the very grammar that the worker's processor
compiles, whatever kind of guide that is, and both libraries are the one that is installed. XGrammar
reads schemas and grammars in its own way, so it gets regular expressions of one meaning
(`plain_regex`) and choices, and nothing else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLTokenizer

from adapters.chain import ProcessorChain
from adapters.grammars.compiler import is_text
from adapters.grammars.lark import in_one
from adapters.processors.grammar import Choice, Grammar, GrammarProcessor, JsonSchema, Regex
from adapters.processors.structural import StructuralTag
from adapters.processors.tool_calls import ToolCalls
from adapters.vocabulary import Vocabulary
from worker.engines.trtllm.plain_regex import plain_regex
from worker.engines.trtllm.speculation import BACKEND
from worker.errors import InvalidRequest

FIELD = "sampling_options.guided_decoding"
_NAMES = frozenset(each.name for each in (Choice, Grammar, JsonSchema, Regex, StructuralTag, ToolCalls))
_START, _END = "start: /", "/"


@dataclass(frozen=True, slots=True)
class NativeGuides:
    """The library's own guided decoding.

    Attributes:
        backend: ``llguidance`` or ``xgrammar``.
        end_token_id: The one token that may end a complete text, the tokenizer's.
        problem: Reason for which no guide can be exact, None where they can.
    """

    backend: str
    end_token_id: int | None
    problem: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the processors that can be a guide; XGrammar may refuse some expressions."""
        if self.problem is not None:
            return frozenset()
        return _NAMES if self.backend == "llguidance" else frozenset({Regex.name, Choice.name})

    def guide(self, processor: GrammarProcessor) -> dict[str, str]:
        """The argument of ``GuidedDecodingParams`` for the language of a processor.

        Raises:
            InvalidRequest: this backend does not enforce exactly that language.
        """
        if self.problem is not None:
            raise InvalidRequest(FIELD, self.problem)
        if self.backend == "llguidance":
            try:
                return {"grammar": in_one(processor.source)}
            except ValueError as error:
                raise InvalidRequest(FIELD, f"{error}, which cannot be handed to TensorRT-LLM") from error
        if not isinstance(processor, Regex | Choice):
            problem = (
                f"XGrammar does not read {processor.name} as this worker does; start it with {BACKEND}: llguidance"
            )
            raise InvalidRequest(FIELD, problem)
        try:
            return {"regex": plain_regex(_pattern(processor.source))}
        except ValueError as error:
            raise InvalidRequest(FIELD, f"{error}; start the worker with {BACKEND}: llguidance") from error


def _pattern(grammar: str) -> str:
    """The regular expression of a grammar that holds nothing else, without Lark's escapes."""
    (only,) = json.loads(grammar)["grammars"]
    return str(only["lark_grammar"]).removeprefix(_START).removesuffix(_END)


def guide_of(chain: ProcessorChain) -> GrammarProcessor:
    """The grammar of a chain that has nothing else.

    Raises:
        InvalidRequest: it has another processor, or the grammar holds in a part of the generation.
    """
    for member in chain.members:
        if not isinstance(member.processor, GrammarProcessor):
            problem = f"holds {member.name}, and TensorRT-LLM calls no logits processors beside speculative decoding"
            raise InvalidRequest("sampling_params.logits_processor", problem)
        if member.scope != "all":
            problem = "begins after the thinking, and TensorRT-LLM's own begins with the first token"
            raise InvalidRequest(FIELD, f"{problem}; this worker runs with speculative decoding")
    if len(chain.members) != 1:
        raise InvalidRequest(FIELD, "must be one guide: TensorRT-LLM enforces no second one")
    processor: Any = chain.members[0].processor
    return processor  # type: ignore[no-any-return]


def read_guides(backend: str, vocabulary: Vocabulary) -> NativeGuides:
    """The library's guides for a model; looks at every token, which takes a second.

    Args:
        backend: Value of ``guided_decoding_backend``.
        vocabulary: The model's vocabulary, with its tokenizer and end tokens.
    """
    tokenizer: Any = vocabulary.tokenizer
    end = tokenizer.eos_token_id
    if end is None or end not in vocabulary.eos_token_ids:
        return NativeGuides(backend, end, "the tokenizer's end token does not end answers of this model")
    problem = _disagreement(vocabulary, end) if backend == "llguidance" else None
    return NativeGuides(backend, end, problem)


def _disagreement(vocabulary: Vocabulary, end_token_id: int) -> str | None:
    """Problem where llguidance, given the tokenizer's file, takes a token for another text.

    It takes added tokens in angle brackets (``<think>``) for no text, as special ones: the same
    texts can be written without them.
    """
    tokenizer: Any = vocabulary.tokenizer
    added = vocabulary.added_token_ids
    try:
        read = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocabulary.size, eos_token=end_token_id)
    except (AttributeError, ValueError) as error:
        return f"llguidance cannot read this model's tokenizer: {error}"
    for token_id, text in enumerate(vocabulary.token_bytes):
        if read.is_special_token(token_id) and (token_id in added or not is_text(text)):
            continue
        if read.is_special_token(token_id) or read.decode_bytes([token_id]) != text:
            return f"llguidance reads the token {token_id} of this model's tokenizer otherwise than the worker"
    return None
