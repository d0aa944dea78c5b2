"""Triton kernels for CUDA, in which no row depends on those beside it.

Imported only where a GPU computes: triton comes with torch's CUDA builds alone.
"""

from worker.engines.embedded.cuda.attention import MOST_BYTES, SPLIT, Sequences, attend, split_bytes, tile_tokens
from worker.engines.embedded.cuda.gemm import EPILOGUES, multiply
from worker.engines.embedded.cuda.kv_rows import rotate_and_store, store_kv
from worker.engines.embedded.cuda.rows import rms_norm
from worker.engines.embedded.cuda.weights import sample

__all__ = [
    "EPILOGUES",
    "MOST_BYTES",
    "SPLIT",
    "Sequences",
    "attend",
    "multiply",
    "rms_norm",
    "rotate_and_store",
    "sample",
    "split_bytes",
    "store_kv",
    "tile_tokens",
]
