"""A model's vocabulary: token bytes, indices and text, computed once and shared by all requests.

`vocabulary` is passed to processors; `token_bytes` has the bytes of every token, `byte_index` an
index over them; `exact_text` turns a text into token ids that add exactly that text to an answer;
`text_match` matches a text in a history however its tokens split it; `thinking_tags` are the
model's, and `reasoning_tokens` counts what is between them; `tokenizer` is the part of
transformers' tokenizer that is used, and `copied_tokenizer` one that loads faster.
"""

from adapters.vocabulary.byte_index import ByteIndex
from adapters.vocabulary.copied_tokenizer import CopiedTokenizer
from adapters.vocabulary.reasoning_tokens import ReasoningTokens
from adapters.vocabulary.thinking_tags import thinking_tags
from adapters.vocabulary.token_bytes import num_ids, token_bytes
from adapters.vocabulary.tokenizer import Tokenizer
from adapters.vocabulary.vocabulary import Address, Vocabulary, byte_index, vocabulary_at

__all__ = [
    "Address",
    "ByteIndex",
    "CopiedTokenizer",
    "ReasoningTokens",
    "Tokenizer",
    "Vocabulary",
    "byte_index",
    "num_ids",
    "thinking_tags",
    "token_bytes",
    "vocabulary_at",
]
