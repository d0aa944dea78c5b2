"""llama.cpp in `super_blocks.py`, in its own environment: ``python super_blocks_llama.py ROWS
BLOCKS TYPE INNER THREADS``. As its own quantiser, each thread calls ``ggml_quantize_chunk``.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp
import numpy as np

ROWS_AT_ONCE = 64


def main() -> None:
    """Write the blocks, and print the seconds as JSON."""
    source, target, kind, inner, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    quantise, row_size = library.ggml_quantize_chunk, library.ggml_row_size
    row_size.argtypes, row_size.restype = (ctypes.c_int, ctypes.c_int64), ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    quantise.argtypes = (ctypes.c_int, pointer, pointer, number, number, number, pointer)
    quantise.restype = ctypes.c_size_t
    rows = np.fromfile(source, np.float32).reshape(-1, inner)
    blocks = np.zeros(len(rows) * row_size(kind, inner), np.uint8)

    def part(first: int) -> None:
        count = min(ROWS_AT_ONCE, len(rows) - first)
        quantise(kind, rows.ctypes.data, blocks.ctypes.data, first * inner, count, inner, None)

    part(0)  # which makes tables, once
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(part, range(0, len(rows), ROWS_AT_ONCE)))
        seconds = time.perf_counter() - began
    blocks.tofile(target)
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
