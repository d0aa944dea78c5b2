"""A model's vocabulary: token bytes, indices and text, computed once and shared by all requests.

`vocabulary` is passed to processors; `token_bytes` has the bytes of every token, and an index over
them; `exact_text` turns a text into token ids that add exactly that text to an answer; `text_match`
matches a text in a history however its tokens split it; `thinking_tags` are the model's;
`copied_tokenizer` stands for transformers' tokenizer, which takes long to load.
"""

from adapters.vocabulary.copied_tokenizer import CopiedTokenizer
from adapters.vocabulary.thinking_tags import thinking_tags
from adapters.vocabulary.token_bytes import ByteIndex, byte_index, num_ids, token_bytes
from adapters.vocabulary.vocabulary import Address, Tokenizer, Vocabulary, vocabulary_at

__all__ = [
    "Address",
    "ByteIndex",
    "CopiedTokenizer",
    "Tokenizer",
    "Vocabulary",
    "byte_index",
    "num_ids",
    "thinking_tags",
    "token_bytes",
    "vocabulary_at",
]
