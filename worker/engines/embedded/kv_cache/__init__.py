"""The paged KV cache.

`cache` keeps the requests' page tables: allocation, automatic prefix caching, copy-on-write. Below
it are `page_pool`, the reference counts and the order of eviction, and `prefix_index`, the cached
blocks, whose changes are `block_events`. `store` holds the tensors of keys and values, `code_rows`
has the formats of their rows where they are quantised, and `budget` decides how large it is.
"""

from worker.engines.embedded.kv_cache.block_events import BlocksRemoved, BlocksStored
from worker.engines.embedded.kv_cache.budget import choose_kv_blocks, choose_page_size, is_out_of_memory
from worker.engines.embedded.kv_cache.cache import KvCache
from worker.engines.embedded.kv_cache.code_rows import CodeRows
from worker.engines.embedded.kv_cache.store import KvStore, SequenceSlice, row_shape

__all__ = [
    "BlocksRemoved",
    "BlocksStored",
    "CodeRows",
    "KvCache",
    "KvStore",
    "SequenceSlice",
    "choose_kv_blocks",
    "choose_page_size",
    "is_out_of_memory",
    "row_shape",
]
