"""The trial of a tiling: whether a GEMM on this machine is batch-invariant in it."""

from __future__ import annotations

import torch

from worker.engines.embedded.model.linear import NUM_TRIAL_ROWS, Linear
from worker.engines.embedded.model.tiling import GemmTiling


def is_invariant(layer: Linear, tiling: GemmTiling) -> bool:
    """Whether a row's result has the same bits in all tiles of `tiling`, at any index in them.

    Args:
        layer: A layer whose GEMM backend is chosen.
        tiling: The tiling.

    Raises:
        ValueError: `tiling` is not bounded, so that not all tiles can be tried.
    """
    if tiling.most is None:
        raise ValueError("only a bounded number of shapes can be tried")
    generator = torch.Generator().manual_seed(0)
    num_rows = max((tiling.most, *tiling.blocks))

    rows = torch.randn(num_rows, layer.in_features, generator=generator).to(layer.dtype)
    if layer.sample is not None:
        count = min(num_rows, NUM_TRIAL_ROWS)
        rows[:count] = cancelling_rows(layer.sample, layer.bias, count)
    epilogues = [epilogue for epilogue in ("none", layer.activation) if epilogue]
    return all(_has_same_bits(layer, tiling, tiling.most, rows, epilogue) for epilogue in epilogues)


def _has_same_bits(layer: Linear, tiling: GemmTiling, most: int, rows: torch.Tensor, epilogue: str) -> bool:
    def multiply(start: int, stop: int) -> torch.Tensor:
        return layer.gemm(rows[start:stop], epilogue)

    expected = torch.cat([multiply(start, start + most) for start in range(0, len(rows), most)])
    if not all(torch.equal(multiply(0, block), expected[:block]) for block in tiling.blocks):
        return False
    return all(
        torch.equal(multiply(start, start + count), expected[start : start + count])
        for count in range(tiling.step, most + 1, tiling.step)
        for start in {0, (most - count) // 2, most - count}
    )


def cancelling_rows(weight: torch.Tensor, bias: torch.Tensor | None, count: int) -> torch.Tensor:
    """Rows whose products with the weights of a column nearly cancel: the order of a float32 sum is
    told by its rounding errors, which a result in bfloat16 would otherwise round away.

    Args:
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        count: Number of rows.

    Returns:
        ``[count, K]`` in the weight's data type; row i cancels with column ``i % N``.
    """
    generator = torch.Generator().manual_seed(1)
    columns = torch.arange(count) % weight.shape[0]
    factors = weight[columns].double()
    rows = torch.randn(count, weight.shape[1], generator=generator).to(weight.dtype).double()
    start = torch.zeros(count, dtype=torch.float64) if bias is None else bias[columns].double()
    for place in factors.abs().argsort(dim=1, descending=True)[:, :3].T[:, :, None]:  # each cancels what is left
        rows.scatter_(1, place, 0.0)
        rest = start + (rows * factors).sum(1)
        last = -rest[:, None] / factors.gather(1, place)
        rows.scatter_(1, place, last.nan_to_num(0.0, 0.0, 0.0).to(weight.dtype).double())
    return rows.to(weight.dtype)
