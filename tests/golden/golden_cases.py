"""What the golden matrix asks for: every processor of the catalogue, with arguments that act.

The arguments are the examples of the conformance kit, and where those may do nothing to the text of
the model at hand, further ones made of its own plain answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from adapters.client import ANNOTATION, processor, selection
from adapters.testing.kit_model import KEY_ID
from adapters.vocabulary import Vocabulary

sys.path.append(str(Path(__file__).resolve().parents[1] / "adapters" / "conformance"))
from builtin_examples import EXAMPLES

Sampling = Literal["greedy", "seeded"]
SAMPLINGS: tuple[Sampling, ...] = ("greedy", "seeded")

Arguments = Mapping[str, Any]

TEXT = (
    "Once upon a time the quick brown fox met the lazy dog near the river. The dog said: no. "
    "What did the fox say? Answer yes or no, and tell me why."
)
"""Long enough for a prompt of several KV blocks and several chunks."""

SHORT_TEXT = "Some random words about the quick brown fox and the lazy dog: river, fox, lazy, quick, dog, moss,"
"""The same for a model whose prompts take long: more than one KV block, and many tokens are likely
to follow, so that truncation and penalties change texts of a few tokens.
"""

THINKING = "<think>"
"""Opens a thinking section at the end of the prompt, for processors that act in one."""

SEED = 20_261_122

THIRD_PARTIES = {
    "dynamo/fatigue": "golden_processors:Fatigue",
    "huggingface/repetition_penalty": "transformers:RepetitionPenaltyLogitsProcessor",
    "huggingface/synthid": "transformers:SynthIDTextWatermarkLogitsProcessor",
}
"""Third-party processors by the name that the operator gives them. All three count as stateful; the
state of the first is made of logits, that of the last of the calls made to it.
"""

_THIRD_PARTY_ARGUMENTS: dict[str, list[Arguments]] = {
    "dynamo/fatigue": [{}],
    "huggingface/repetition_penalty": [{"penalty": 1.8}],
    "huggingface/synthid": [
        {
            "ngram_len": 3,
            "keys": [654, 400, 836, 123],
            "sampling_table_size": 65_536,
            "sampling_table_seed": 0,
            "context_history_size": 64,
        }
    ],
}


NO_PROCESSOR = "(no processor)"
NEUTRAL = "(neutral late processor)"
"""Row whose texts are compared with those of the fields alone: beside a processor of truncation
that asks for nothing they are processors too, and must do what the sampler does with them.
"""

FIELDS: dict[str, Arguments] = {
    NO_PROCESSOR: {},
    "(truncation fields)": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "(penalty fields)": {"frequency_penalty": 0.9, "presence_penalty": 0.6, "repetition_penalty": 1.3},
    "(min_tokens field)": {"min_tokens": 7},
    NEUTRAL: {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
"""Rows without a processor by name: what the request sets in fields."""

_STOP_CONDITIONS = ("min_tokens",)
"""Of the fields, those that are not among the sampling options."""


@dataclass(frozen=True, eq=False)
class Case:
    """One request of the matrix: a processor with arguments, or fields, greedy or with a seed.

    Attributes:
        row: Name of the processor, or a key of `FIELDS`.
        arguments: Of the processor as JSON data, or the fields.
        sampling: How tokens are drawn.
        prompt: Token ids.
        max_tokens: Of the answer.
        beside: Processors that make it act: one that calls for an end token, which it forbids.
    """

    row: str
    arguments: Arguments
    sampling: Sampling
    prompt: tuple[int, ...]
    max_tokens: int
    beside: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.row} {dict(self.arguments)} {self.sampling}"

    @property
    def processors(self) -> list[dict[str, Any]]:
        """The selection of the request."""
        own = [] if self.row in FIELDS else [processor(self.row, **self.arguments)]
        return [*self.beside, *own]

    @property
    def plain(self) -> Case:
        """The same request without the processor or the fields."""
        return replace(self, row=NO_PROCESSOR, arguments={})

    @property
    def reference(self) -> Case:
        """The request whose text this one must have, of a worker that has nothing else to do."""
        return replace(self, beside=()) if self.row == NEUTRAL else self

    @property
    def sampling_options(self) -> dict[str, Any]:
        """Fields of the request. A control that a processor sets is not set by a field too."""
        if self.row == "temperature":
            return {"top_p": 1.0, "seed": SEED}
        fields = self._fields(lambda name: name not in _STOP_CONDITIONS)
        temperature = 0.0 if self.sampling == "greedy" else fields.get("temperature", 1.0)
        return {**fields, "temperature": temperature, "seed": SEED}

    @property
    def stop_conditions(self) -> dict[str, Any]:
        """The same of the fields that say when an answer ends."""
        return {"max_tokens": self.max_tokens, **self._fields(lambda name: name in _STOP_CONDITIONS)}

    def _fields(self, is_wanted: Callable[[str], bool]) -> dict[str, Any]:
        given = self.arguments if self.row in FIELDS else {}
        return {name: value for name, value in given.items() if is_wanted(name)}

    def raw(self, cache_salt: str | None = None, choice: int = 0) -> dict[str, Any]:
        """The request as Dynamo's frontend delivers it.

        Args:
            cache_salt: Makes sure that no KV is shared with other requests.
            choice: Which of several answers it is for, as the front door asks for each of them.
        """
        raw: dict[str, Any] = {
            "token_ids": list(self.prompt),
            "sampling_options": self.sampling_options,
            "stop_conditions": self.stop_conditions,
            "annotations": self._annotations(choice),
        }
        return raw if cache_salt is None else {**raw, "routing": {"cache_salt": cache_salt}}

    def _annotations(self, choice: int) -> list[str]:
        if not self.processors and not choice:
            return []
        chosen = json.loads(selection(*self.processors))
        return [ANNOTATION + json.dumps({**chosen, "choice": choice} if choice else chosen)]


class Cases:
    """Makes the cases of one model.

    Args:
        vocabulary: Of the model.
        max_tokens: Tokens of each answer at most.
        text: The prompt.
        is_short: One set of arguments per processor, the one that most likely acts.
    """

    def __init__(self, vocabulary: Vocabulary, max_tokens: int, *, text: str = TEXT, is_short: bool = False) -> None:
        self._vocabulary = vocabulary
        self._text = text
        self._max_tokens = max_tokens
        self._is_short = is_short

    def plain(self) -> Case:
        """The model's own greedy answer, of which arguments are made."""
        return Case(NO_PROCESSOR, {}, "greedy", self._prompt(""), self._max_tokens)

    def all(self, plain: Sequence[int]) -> list[Case]:
        """Every case.

        Args:
            plain: The answer to `plain`, six tokens at least.
        """
        acting = _acting(list(plain), min(self._vocabulary.eos_token_ids))
        phrase = self._phrase_in(plain)
        if phrase is not None:
            acting["phrase_ban"] = [({"phrases": [phrase]}, ())]
        fields = {name: [] if name == NEUTRAL else [one] for name, one in FIELDS.items()}
        names = {**fields, **EXAMPLES, **_THIRD_PARTY_ARGUMENTS}
        return [case for name in names for case in self._of(name, names[name], acting.get(name, []))]  # type: ignore[arg-type]

    def _phrase_in(self, plain: Sequence[int]) -> str | None:
        """The first three tokens that are whole characters: the last one takes the others back."""
        for start in range(1, len(plain) - 2):
            text = self._vocabulary.tokenizer.decode(list(plain[start : start + 3]))  # type: ignore[union-attr]
            if "\N{REPLACEMENT CHARACTER}" not in text:
                return text
        return None

    def _of(self, name: str, examples: Sequence[Arguments], acting: Sequence[Acting]) -> list[Case]:
        found = []
        for sampling in SAMPLINGS:
            wanted = [*acting, *((one, ()) for one in examples)]
            wanted = [one for one in wanted if _is_sampled_so(name, one[0], sampling)]
            for arguments, beside in wanted[:1] if self._is_short else wanted:
                found.append(Case(name, arguments, sampling, self._prompt(name), self._max_tokens, tuple(beside)))
        return found

    def _prompt(self, name: str) -> tuple[int, ...]:
        return tuple(self._vocabulary.encode(self._text + (THINKING if name == "thinking_budget" else "")))


Acting = tuple[Arguments, Sequence[dict[str, Any]]]
"""Arguments, and the processors beside."""


def _is_sampled_so(name: str, arguments: Arguments, sampling: Sampling) -> bool:
    """The processor `temperature` says itself whether a request is greedy."""
    return name != "temperature" or (arguments["value"] == 0) == (sampling == "greedy")


def _acting(plain: list[int], end_id: int) -> dict[str, list[Acting]]:
    """Arguments that change the plain answer of any model, or nearly any."""
    again = [processor("logit_bias", bias={str(plain[0]): 100.0})]
    ends = [processor("logit_bias", bias={str(end_id): 100.0})]
    return {
        "contrastive": [({"beta": 1.5, "amateur_temperature": 0.5}, ())],
        "logit_bias": [({"bias": {str(plain[2]): -100.0, str(plain[5]): 4.0}}, ())],
        "sequence_bias": [({"sequences": [{"token_ids": plain[2:4], "bias": -50.0}]}, ())],
        "repetition_penalty": [({"penalty": 1.8}, ())],
        "frequency_penalty": [({"penalty": 1.5}, ())],
        "dry": [({"multiplier": 60.0, "allowed_length": 1, "breakers": []}, again)],
        "banned_tokens": [({"token_ids": sorted({plain[1], plain[4]})}, ())],
        "ban_scripts": [({"scripts": ["Latin"]}, ())],
        "bad_words": [({"token_ids": [plain[2:4], plain[5:6]]}, ())],
        "no_repeat_ngram": [({"n": 3, "over": "generated"}, again)],
        "loop_stop": [({"max_period": 1, "copies": 5}, again)],
        "min_tokens": [({"n": 7}, ends)],
        "(min_tokens field)": [(FIELDS["(min_tokens field)"], ends)],
        NEUTRAL: [
            (FIELDS[NEUTRAL], [processor("typical_p", p=1.0)]),
            (FIELDS[NEUTRAL], [processor("xtc", probability=0.0), processor("top_a", a=0.0)]),
            ({"top_p": 0.5}, [processor("epsilon_cutoff", epsilon=0.0)]),
        ],
        "gen_length": [({"boost": 20.0, "power": 2.0}, ())],
        "exponential_decay_length": [({"start": 3, "factor": 2.5}, ())],
        "structural_tag": [(EXAMPLES["structural_tag"][1], ())],
        "tool_calls": [(EXAMPLES["tool_calls"][1], ())],
        "thinking_budget": [
            ({"tokens": 3, "start": THINKING, "end": "</think>"}, ()),
            ({"tokens": 3}, [processor("choice", choices=["yes", "no"], scope="answer")]),
        ],
        "trigger_phrase": [({"text": " Wait, let me think.", "after_tokens": 3}, ())],
        "temperature": [({"value": 0.7}, ()), ({"value": 0.0}, ())],
        "watermark": [({"key_id": KEY_ID, "context": 1}, ())],
    }
