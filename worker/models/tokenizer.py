"""A GGUF file's tokenizer and chat template as Hugging Face's files.

The file has the vocabulary, the merges and a name for how text is split before them; what llama.cpp
does for that name is said here. A name that is not known is refused: another split gives other ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from worker.models.gguf_file import GgufError, Metadata
from worker.models.problems import shown
from worker.models.splits import splits

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens, as llama.cpp numbers them."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = _CONTRACTIONS + r"|\p{N}{1,3}" + _REST
_QWEN_2 = _CONTRACTIONS + r"|\p{N}" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """The way in which a byte-level vocabulary splits text.

    Attributes:
        regexes: Patterns of a piece, each of which splits what those before it left; none for
            GPT-2's own.
        by_digit: Digits stand alone before that.
        adds_bos: Whether a text begins with the BOS token unless the file says otherwise.
        ignores_merges: Whether a piece that is in the vocabulary is one token whatever the merges.
        is_composed: Whether text is normalised to NFC.
    """

    regexes: tuple[str, ...]
    by_digit: bool = False
    adds_bos: bool = False
    ignores_merges: bool = False
    is_composed: bool = False


_LLAMA_3_SPLIT = _Split((_LLAMA_3,), adds_bos=True, ignores_merges=True)
_QWEN_2_SPLIT = _Split((_QWEN_2,), is_composed=True)
_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CASED + r"|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CASED + r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SAME_WITHOUT_BOS = _Split((_LLAMA_3,))
_CASED_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
"""Code points that DeepSeek LLM's tokenizer takes for letters: those with case, of Latin, Greek,
Cyrillic and such, but not all of Unicode's.
"""


def _class(ranges: str) -> str:
    """A character class of code points in hexadecimal."""
    ends = (each.split("-") for each in ranges.split())
    return "[" + "".join("-".join(rf"\x{{{end}}}" for end in each) for each in ends) + "]"


_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?" + _class(_CASED_LETTERS) + "+",
    r"\s?" + _class("21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002") + "+",
    r"\s+$",
    _class("4e00-9fa5 800-4e00 ac00-d7ff") + "+",
    r"\p{N}",
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    _class("4e00-9fa5 3040-309f 30a0-30ff") + "+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS = {
    "chatglm-bpe": _SAME_WITHOUT_BOS,
    "dbrx": _SAME_WITHOUT_BOS,
    "deepseek-llm": _Split(_DEEPSEEK_LLM),
    "deepseek-r1-qwen": _QWEN_2_SPLIT,
    "deepseek-v3": _Split(_DEEPSEEK_3),
    "glm4": _SAME_WITHOUT_BOS,
    "gpt-2": _Split(()),
    "gpt-4o": _Split((_GPT_4O,)),
    "llama-bpe": _LLAMA_3_SPLIT,
    "llama-v3": _LLAMA_3_SPLIT,
    "llama3": _LLAMA_3_SPLIT,
    "olmo": _Split((), is_composed=True),
    "qwen2": _QWEN_2_SPLIT,
    "refact": _Split((), by_digit=True),
    "smaug-bpe": _SAME_WITHOUT_BOS,
    "smollm": _Split((), by_digit=True),
    "tekken": _Split((_TEKKEN,), adds_bos=True, ignores_merges=True),
}
"""Splits by ``tokenizer.ggml.pre``; regular expressions as in llama.cpp's ``llama-vocab.cpp``."""

_END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"),
)
"""Control tokens that end an answer whatever the file calls its EOS, as in llama.cpp."""

_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""The same of GPT-OSS, in whose answers ``<|end|>`` is the end of a part."""


class GgufTokenizer:
    """The tokenizer of a file's metadata. Raises `GgufError` if it is incomplete or not supported.

    Args:
        metadata: Metadata of the file.
        vocab_size: Rows of its embedding; None where they are not known.

    Attributes:
        special_ids: Ids for ``config.json`` and ``generation_config.json``.
    """

    def __init__(self, metadata: Mapping[str, Any], vocab_size: int | None = None) -> None:
        self._metadata = metadata = Metadata(metadata)
        self._tokens = metadata.texts("tokenizer.ggml.tokens")
        if vocab_size is not None and len(self._tokens) > vocab_size:
            raise GgufError(
                f"tokenizer.ggml.tokens has {len(self._tokens)} tokens, tensor token_embd.weight {vocab_size} rows"
            )
        self._types = metadata.integers("tokenizer.ggml.token_type") if "tokenizer.ggml.token_type" in metadata else []
        if self._types and len(self._types) != len(self._tokens):
            raise GgufError("tokenizer.ggml.token_type has another length than tokenizer.ggml.tokens")
        self._adds_bos = False
        self._tokenizer = self._build()
        self.special_ids = self._special_ids()

    def files(self, context_length: int) -> dict[str, str]:
        """``tokenizer.json`` and ``tokenizer_config.json``."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(token_id): {
                    "content": self._tokens[token_id],
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": self._types[token_id] == _CONTROL,
                }
                for token_id in self._ids_of(_CONTROL, _USER_DEFINED)
            },
            "bos_token": self._token("bos_token_id"),
            "eos_token": self._token("eos_token_id"),
            "pad_token": self._token("padding_token_id"),
            "unk_token": self._token("unknown_token_id"),
            "add_bos_token": self._adds_bos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_length,
        }
        if "tokenizer.chat_template" in self._metadata:
            config["chat_template"] = self._metadata.text("tokenizer.chat_template")
        return {
            "tokenizer.json": self._tokenizer.to_str() + "\n",
            "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        }

    def _build(self) -> Tokenizer:
        kind = self._metadata.one_of("tokenizer.ggml.model", ("gpt2", "llama"))
        tokenizer = self._byte_level() if kind == "gpt2" else self._sentencepiece()
        for kinds, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            tokenizer.add_tokens(
                [AddedToken(self._tokens[i], special=special, normalized=False) for i in self._ids_of(kinds)]
            )
        bos = self._token("bos_token_id")
        if self._adds_bos and bos is not None:
            self._refuse_odd_bos(bos)
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, self._id("bos_token_id"))],
            )
        return tokenizer

    def _refuse_odd_bos(self, bos: str) -> None:
        """Raises `GgufError` for a BOS token that the templates of tokenizers read as something
        else.
        """
        if not bos or bos.startswith("$") or ":" in bos or any(character.isspace() for character in bos):
            raise GgufError(
                "tokenizer.ggml.bos_token_id must name a token without spaces and colons, not a variable, as every "
                f"text begins with it, got {shown(bos)}"
            )

    def _byte_level(self) -> Tokenizer:
        split = SPLITS[self._metadata.one_of("tokenizer.ggml.pre", SPLITS)]
        self._adds_bos = self._metadata.flag("tokenizer.ggml.add_bos_token", split.adds_bos)
        merges = [_pair(merge) for merge in self._metadata.texts("tokenizer.ggml.merges")]
        tokenizer = self._bpe(merges, ignore_merges=split.ignores_merges)
        if split.is_composed:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.by_digit else []
        steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.regexes]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.regexes))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece(self) -> Tokenizer:
        self._adds_bos = self._metadata.flag("tokenizer.ggml.add_bos_token", True)
        has_prefix = self._metadata.flag("tokenizer.ggml.add_space_prefix", True)
        unknown = self._token("unknown_token_id")
        tokenizer = self._bpe(self._score_merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        prefix = [normalizers.Prepend("▁")] if has_prefix else []
        tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _bpe(self, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
        unused = set(self._ids_of(_UNUSED))
        vocabulary = {token: number for number, token in enumerate(self._tokens) if number not in unused}
        try:
            return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise GgufError(f"its tokenizer is damaged ({error})") from None

    def _score_merges(self) -> list[tuple[str, str]]:
        """SentencePiece joins the two neighbours whose piece has the highest score; as merges, in
        that order.
        """
        scores = self._metadata.numbers("tokenizer.ggml.scores")
        if len(scores) != len(self._tokens):
            raise GgufError("tokenizer.ggml.scores has another length than tokenizer.ggml.tokens")
        kept = self._ids_of(_NORMAL, _USER_DEFINED) if self._types else range(len(self._tokens))
        ranks = {self._tokens[number]: (-scores[number], number) for number in kept}
        pairs = [(ranks[piece], ranks[left], ranks[right], left, right) for piece, left, right in splits(ranks)]
        return [(left, right) for *_, left, right in sorted(pairs)]

    def _special_ids(self) -> dict[str, Any]:
        ends = {self._id(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")} - {None}
        names = {self._tokens[number]: number for number in self._ids_of(_CONTROL)}
        known = _HARMONY_ENDS if set(_HARMONY_ENDS) <= set(names) else _END_TOKENS
        ends |= {number for name, number in names.items() if name in known}
        if not ends:
            raise GgufError("it names no token that ends an answer: tokenizer.ggml.eos_token_id")
        found = {"eos_token_id": sorted(number for number in ends if number is not None)}
        others = {"bos_token_id": self._id("bos_token_id"), "pad_token_id": self._id("padding_token_id")}
        return found | {key: number for key, number in others.items() if number is not None}

    def _ids_of(self, *kinds: int) -> list[int]:
        return [number for number, kind in enumerate(self._types) if kind in kinds]

    def _id(self, key: str) -> int | None:
        found = self._metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            return None
        if type(found) is not int or not 0 <= found < len(self._tokens):
            raise GgufError(f"tokenizer.ggml.{key} must be the id of a token, got {shown(found)}")
        return found

    def _token(self, key: str) -> str | None:
        number = self._id(key)
        return None if number is None else self._tokens[number]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise GgufError(f"tokenizer.ggml.merges: {shown(merge)} is not two pieces")
    return left, right
