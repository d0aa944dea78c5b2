"""The native modules: kernels, and the watchdog's thread; all else of the build is in
``pyproject.toml``.

They are built where there is a C compiler, one library for each set of instructions that it knows.
A processor chooses among them at start (`worker.engines.embedded.native`); without any the embedded
engine computes with torch's kernels alone.
"""

from __future__ import annotations

import copy
import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "worker/engines/embedded/native"
HEADERS = sorted(str(path) for path in Path(FOLDER).glob("*.h"))

AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
PLAIN_C = ("-DPLAIN_C=1", "-O2")
"""For processors that nothing else is for; ``-O3`` takes GCC twice as long."""
COMPILE = ("-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fopenmp")
"""``-g0``: Python's own flags have ``-g``, with which GCC takes twice as long."""
FLOAT32_ALONE = (
    "blocks",
    "code_attention",
    "dequantised",
    "drawing",
    "integer",
    "masks",
    "packing",
    "prefixes",
    "process_memory",
    "quantised",
    "scoring",
    "super_blocks",
    "weights",
)
"""Sources that compute in float32 whatever the data type of the model."""


def kernels(name: str, *instructions: str, amx: bool = False) -> Extension:
    """The library ``kernels_{name}``, whose data type is in its name."""
    is_float32 = name.endswith("float32")
    sources = ["attention", "experts", "layers", "linear", "lora", "rows", *(FLOAT32_ALONE if is_float32 else ())]
    macros = [("FLOAT32", "1")] * is_float32 + [("WITH_AMX", "1")] * amx
    return Extension(
        f"{FOLDER.replace('/', '.')}.kernels_{name}",
        [f"{FOLDER}/{source}.c" for source in sources],
        depends=HEADERS,
        define_macros=macros,
        extra_compile_args=[*COMPILE, *instructions],
        extra_link_args=["-fopenmp"],
        libraries=["m"],
        optional=True,
    )


WATCHDOG = Extension(
    "worker.engines.embedded.host.beats_thread",
    ["worker/engines/embedded/host/beats_thread.c"],
    extra_compile_args=["-O2"],
    optional=True,
)
"""Not a kernel: it ends a process whose interpreter hangs."""

X86_64 = [
    kernels("amx_bfloat16", *AVX512, "-mavx512bf16", amx=True),
    kernels("avx512_bfloat16", *AVX512, "-mavx512bf16"),
    kernels("avx512_float32", *AVX512),
    kernels("avx2_bfloat16", *AVX2),
    kernels("avx2_float32", *AVX2),
]
AARCH64 = [kernels("neon_bfloat16"), kernels("neon_float32")]
EVERYWHERE = [WATCHDOG, kernels("generic_bfloat16", *PLAIN_C), kernels("generic_float32", *PLAIN_C)]


def modules(platform: str) -> list[Extension]:
    """The modules of a platform as `sysconfig.get_platform` names it."""
    return EVERYWHERE + (AARCH64 if platform.endswith(("aarch64", "arm64")) else X86_64)


MODULES = modules(sysconfig.get_platform())


class BuildKernels(build_ext):
    """Several libraries at a time, each with a directory of its own for objects: they compile the
    same sources in other ways.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        alone = copy.copy(self)
        alone.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(alone, ext)


if __name__ == "__main__":
    setup(ext_modules=MODULES, cmdclass={"build_ext": BuildKernels})
