"""Small tokenizers for tests, made in memory."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def sentencepiece(**options: Any) -> Any:
    """Pieces with spaces, and bytes for what has no piece; `options` are of the class."""
    pieces = ["▁", "▁the", "▁fox", "the", "qu", "ick", "и", "中", *"abcdefghijklmnopqrstuvwxyz"]
    scored = [("<unk>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    scored += [(piece, -float(len(pieces) - len(piece))) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **options)
