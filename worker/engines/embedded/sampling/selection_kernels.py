"""Chooses how prefixes are selected on a device: the Triton kernel if verified, else sorting."""

from __future__ import annotations

import logging
import subprocess
from functools import lru_cache

import torch

from adapters.sampling.prefixes import Select, select_by_sorting

logger = logging.getLogger(__name__)


@lru_cache
def choose_select(device: torch.device) -> Select:
    """The fastest function verified on `device`.

    The kernel is compiled and compared with sorting here, once per device and process, so that a
    machine without a compiler, or with a deviating Triton, is slower but never wrong.
    """
    if device.type != "cuda":
        return select_by_sorting
    try:
        from triton.errors import TritonError

        from worker.engines.embedded.sampling.triton_select import select_by_digits
    except ImportError as error:
        logger.info("prefixes are found by sorting: %s", error)
        return select_by_sorting
    try:
        agrees = agree(select_by_digits, select_by_sorting, device)
    except (TritonError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("prefixes are found by sorting: the Triton kernel does not run: %s", error)
        return select_by_sorting
    if not agrees:
        logger.error("prefixes are found by sorting: the Triton kernel gives other results")
        return select_by_sorting
    return select_by_digits


def agree(one: Select, other: Select, device: torch.device) -> bool:
    """Whether two functions select the same prefixes, on rows with ties, masks and both signs."""
    width = 9008  # divisible by 16, as vocabularies are: Triton specialises kernels on it
    generator = torch.Generator().manual_seed(1)
    keys = (torch.randn(4, width, generator=generator) * 3).to(device)
    keys[1] = (keys[1] * 2).round() / 2
    keys[2, 5:] = -torch.inf
    keys[3] = 0.0
    masses = ((keys - keys.amax(-1, keepdim=True)).double().exp() * 2.0**44).to(torch.int64)
    totals = masses.sum(-1, keepdim=True)
    cases: list[tuple[torch.Tensor | None, torch.Tensor]] = [(masses, totals), (masses, (totals * 0.9).to(torch.int64))]
    cases += [(None, torch.full_like(totals, count)) for count in (1, 5, width)]
    for given, targets in cases:
        if not all(map(torch.equal, one(keys, given, targets), other(keys, given, targets))):
            return False
    return True
