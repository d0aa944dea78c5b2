"""A model's vocabulary: token bytes, indices and text, computed once and shared by all requests.

`vocabulary` is passed to processors; `token_bytes` has the bytes of every token, and an index over
them; `exact_text` turns a text into token ids that add exactly that text to an answer.
"""

from adapters.vocabulary.token_bytes import ByteIndex, byte_index, num_ids, token_bytes
from adapters.vocabulary.vocabulary import Address, Tokenizer, Vocabulary, vocabulary_at

__all__ = ["Address", "ByteIndex", "Tokenizer", "Vocabulary", "byte_index", "num_ids", "token_bytes", "vocabulary_at"]
