"""Native kernels for CPUs: GEMM, RMSNorm, RoPE, and attention over the paged KV cache; and the
weights that tokens are sampled with (`weights`).

They are built with the package where there is a C compiler, once for each path of instructions:
AMX, AVX-512, AVX2 or NEON, and plain C. They are batch-invariant: every sum runs in an order that
depends on the token alone, and that is the same in all paths but AMX in bfloat16, so that
processors that take different ones compute the same bits. And they compute few rows at the speed at
which weights and keys are read. Tensors are passed by address: whatever is passed must be
contiguous, but for the strides that are named. All tensors of a call are of one data type, bfloat16
or float32, but for pages of codes, in int8 or int16.
"""

from worker.engines.embedded.native.attention import Projections, Tiles, attend, rotate_and_store, supports_heads
from worker.engines.embedded.native.gemm import ACTIVATIONS, EPILOGUES, WITH_OTHER, Gemm, GemmAdapters, linear
from worker.engines.embedded.native.libraries import PATHS, cpu_flags
from worker.engines.embedded.native.packed import COLUMNS, PackedWeight, pack, supports_weight
from worker.engines.embedded.native.paths import (
    choose_path,
    chosen_path,
    is_torch_faster,
    library,
    no_bfloat16_rows,
    sums_as_others,
    unavailable,
)
from worker.engines.embedded.native.rows import rms_norm, soft_cap

__all__ = [
    "ACTIVATIONS",
    "COLUMNS",
    "EPILOGUES",
    "PATHS",
    "WITH_OTHER",
    "Gemm",
    "GemmAdapters",
    "PackedWeight",
    "Projections",
    "Tiles",
    "attend",
    "choose_path",
    "chosen_path",
    "cpu_flags",
    "is_torch_faster",
    "library",
    "linear",
    "no_bfloat16_rows",
    "pack",
    "rms_norm",
    "rotate_and_store",
    "soft_cap",
    "sums_as_others",
    "supports_heads",
    "supports_weight",
    "unavailable",
]
