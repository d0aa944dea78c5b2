"""State of torch that belongs to the thread of a step, which a third party's code may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from adapters.contract import MalformedEdit


@contextmanager
def kept_thread_state() -> Iterator[None]:
    """Leaves the default device, the gradient mode and the inference mode to the code after it as
    they were: tensors of other rows are made next.

    Raises:
        MalformedEdit: the default device was changed.
    """
    device = torch.get_default_device()
    is_inference = torch.is_inference_mode_enabled()
    try:
        with torch.inference_mode() if is_inference else torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        changed = torch.get_default_device()
        if changed != device:
            torch.set_default_device(None if device.type == "cpu" else device)
    if changed != device:
        raise MalformedEdit(f"sets torch's default device to {changed}, which all requests share,")
