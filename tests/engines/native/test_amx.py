"""The native kernels with AMX, emulated where the processor has none: that it computes, and in its
order of summation.

What holds for all paths is tested in `test_native_kernels` and `test_quantised_kernels`.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import amx_emulation
import pytest
import torch
from chosen_paths import kept_choices

from worker.engines.embedded import native
from worker.engines.embedded.kv_cache import SequenceSlice
from worker.engines.embedded.model.quantisation import QuantisedGemm, QuantisedWeight
from worker.engines.embedded.native import libraries

pytestmark = pytest.mark.native


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    found: torch.dtype = request.param
    if reason := amx_emulation.reason_against(found):
        pytest.skip(reason)
    with kept_choices(), amx_emulation.amx():
        native.choose_path(found, "amx")
        yield found


def tile_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x [n, K]`` times ``weight [N, K]`` in the order of TDPBF16PS, float32 ``[n, N]``.

    A product of bfloat16 and its sum with a float32 of about its size are exact in float64.
    """
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], 32):
        parts = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(begin, min(begin + 32, x.shape[1])):
            product = x[:, k, None].double() * weight[None, :, k].double()
            parts[k % 2] = (parts[k % 2].double() + product).float()
        total = total + (parts[0] + parts[1])
    return total


@pytest.mark.parametrize("dtype", [torch.bfloat16], indirect=True)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 193])
def test_sums_are_in_the_documented_order(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for columns, inner in itertools.product([5, 64], [2, 30, 32, 34, 2112]):
        if rows * inner > 50_000 and columns > 5:
            continue
        x, weight = (torch.randn(n, inner, generator=generator).to(dtype) for n in (rows, columns))
        found = native.linear(x, native.Gemm(native.PackedWeight.of(weight)), is_unrounded=True)
        assert torch.equal(found, tile_order(x, weight))


IN_A_PROCESS = """
import amx_emulation, test_amx, torch
from worker.engines.embedded import native

with amx_emulation.amx(emulates=True):
    native.choose_path({dtype}, "amx")
    test_amx.check_instructions({dtype})
"""


def test_it_computes(dtype: torch.dtype) -> None:
    """In a process of its own, where the emulator counts instructions of any processor."""
    folders = [*map(str, (Path(__file__).parent, Path(amx_emulation.__file__).parent))]
    path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", IN_A_PROCESS.format(dtype=dtype)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def check_instructions(dtype: torch.dtype) -> None:
    """In bfloat16 GEMMs of any rows, and attention; in float32 those on many rounded rows."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def count(of: Callable[[], torch.Tensor]) -> int:
        before = amx_emulation.emulated_instructions()
        of()
        return amx_emulation.emulated_instructions() - before

    packed, rows = native.Gemm(native.PackedWeight.of(randn(64, 64))), randn(1, 64)
    pages = randn(2, 1, 64, 64)
    tiles = native.Tiles([SequenceSlice([0, 1], 0, 70)], 1)
    codes = torch.randint(-128, 128, (40, 2112), dtype=torch.int8, generator=generator)
    gemm = QuantisedGemm(QuantisedWeight(codes, torch.ones(40, 66).half(), None), None, rounds_to="int8")
    is_bfloat16 = dtype == torch.bfloat16
    native.library(dtype)  # which is tested when it is opened
    assert bool(count(lambda: native.linear(rows, packed))) == is_bfloat16
    assert bool(count(lambda: native.attend(randn(70, 1, 64), pages, pages, tiles, 1.0, 0, None))) == is_bfloat16
    if not is_bfloat16:
        assert not count(lambda: gemm(randn(16, 2112)))
        assert count(lambda: gemm(randn(17, 2112))) > 2 * 2 * 2 * 33 * 2 * 3
        unpacked = QuantisedGemm(QuantisedWeight(codes, torch.ones(40, 66).half(), None), None, rounds_to="bfloat16")
        assert count(lambda: unpacked(randn(1, 2112))) > 2 * 66 * 4


@pytest.mark.parametrize("dtype", [torch.float32], indirect=True)
@pytest.mark.parametrize(("rows", "blocks"), [(17, 1), (40, 5), (50, 9), (61, 12), (33, 33), (145, 68), (600, 9)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_many_rows_and_wide_ones_have_the_bits_of_few(
    dtype: torch.dtype, rows: int, blocks: int, bits: int, has_offsets: bool
) -> None:
    """Few are computed without AMX. Rows are wider than a part of a panel, and more than share one;
    those with outliers have them where what is unpacked of a panel is kept in one place.
    """
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (70, 4 * bits * blocks), dtype=torch.int8, generator=generator)
    scales, offsets = torch.randn(2, 70, blocks, generator=generator).half()
    weight = QuantisedWeight(codes if bits == 8 else codes.view(torch.uint8), scales, offsets if has_offsets else None)
    layer = QuantisedGemm(weight, None, rounds_to="int8")
    x = torch.randn(rows, 32 * blocks, generator=generator)
    x[::2, 5::127] *= 100
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


PROGRAM = """
#include <sys/syscall.h>
#include <unistd.h>
#include "amx.h"
int main(void)
{
#ifdef ASK_FOR_TILES
    if (syscall(SYS_arch_prctl, 0x1023, 18))
        return 1;
#endif
    tile_config_t config = {.palette = 1};
    for (int tile = 0; tile < 3; tile++)
        config.rows[tile] = 4, config.row_bytes[tile] = 16;
    %s
    configure_tiles(&config);
    ADD_BFLOAT16(0, 1, 2);
    %s
    release_tiles();
    return 0;
}
"""


OF_LDTILECFG = ("a tile has up to 16 rows of up to 64 bytes, or neither", "palette is not 1")
"""What LDTILECFG refuses, which a processor that has it computes itself."""


@pytest.mark.parametrize(
    ("configuration", "more", "why"),
    [
        ("", "", None),
        ("config.rows[1] = 3;", "", "the sizes of a product's tiles do not fit"),
        ("config.row_bytes[2] = 60;", "", "the sizes of a product's tiles do not fit"),
        ("config.rows[1] = 17;", "", "a tile has up to 16 rows of up to 64 bytes, or neither"),
        ("config.palette = 0;", "", "palette is not 1"),
        ("", "ADD_BFLOAT16(0, 1, 3);", "a tile that is not configured"),
        ("", "release_tiles(); ZERO_TILE(0);", "no configuration"),
    ],
)
@pytest.mark.parametrize("is_emulated", [True, False], ids=["emulated", "by the processor"])
def test_the_emulator_is_as_strict_as_a_processor(
    is_emulated: bool, configuration: str, more: str, why: str | None, tmp_path: Path
) -> None:
    """A processor's own exceptions have no message."""
    if reason := amx_emulation.reason_against(torch.float32):
        pytest.skip(reason)
    if not is_emulated and not amx_emulation.IS_REAL:
        pytest.skip("this processor has no AMX")
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(PROGRAM % (configuration, more))
    command = ["cc", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", f"-I{libraries.FOLDER}", str(source)]
    if is_emulated:
        emulator = amx_emulation.build_emulator()
        command += [f"-Wl,-rpath,{emulator.parent},--no-as-needed", str(emulator), "-lm"]
    else:
        command += ["-DASK_FOR_TILES=1"]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    if is_emulated:
        assert (done.returncode == 0) == (why is None), done.stderr
        has_message = why is not None and not (amx_emulation.IS_REAL and why in OF_LDTILECFG)
        assert not has_message or str(why) in done.stderr
    else:
        assert done.returncode in ((0,) if why is None else (-signal.SIGILL, -signal.SIGSEGV))
