"""The paged KV cache.

`cache` is the bookkeeping: who owns which pages, automatic prefix caching, copy-on-write; `blocks`
are the hashed units of prefix caching; `store` holds the tensors of keys and values; `int8_rows` is
what a row of theirs is made of with ``--kv-cache-dtype int8``; `budget` decides how large it is.
"""

from worker.engines.embedded.kv_cache.blocks import ROOT, Block, BlocksRemoved, BlocksStored, hash_blocks
from worker.engines.embedded.kv_cache.budget import choose_kv_blocks, choose_page_size, is_out_of_memory
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.kv_cache.int8_rows import Int8Rows
from worker.engines.embedded.kv_cache.store import KvStore, SequenceSlice, row_shape

__all__ = [
    "ROOT",
    "Block",
    "BlocksRemoved",
    "BlocksStored",
    "Int8Rows",
    "KvCache",
    "KvStore",
    "SequenceSlice",
    "choose_kv_blocks",
    "choose_page_size",
    "hash_blocks",
    "is_out_of_memory",
    "row_shape",
]
