"""Asynchronous device-to-host copies."""

from __future__ import annotations

import torch


class HostCopy:
    """Copies of tensors to pinned host memory, with a CUDA event that says when they are done.

    Args:
        *tensors: Tensors on one device, not written to later. On a CPU they are not copied.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = list(tensors)
        if tensors and tensors[0].device.type == "cuda":
            self._values = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
            for value, one in zip(self._values, tensors, strict=True):
                value.copy_(one, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """Wait for the copies; returns the tensors on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
