"""The gate that a checkpoint passes before transformers allocates anything for it.

A packed copy is made of what has passed, and its own tensors are compared with the same `Geometry`.
Importing transformers takes long, so this module is imported where there is no packed copy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from worker.engines.embedded.model.longrope import check_factors
from worker.errors import StartupError, one_line
from worker.models.config_json import CONFIG, check_bounds, geometry_of
from worker.models.geometry import Geometry
from worker.models.model_types import MODEL_TYPES
from worker.models.problems import ModelFileError, shown
from worker.models.quantised import CODES, OFFSETS, SCALES, format_of
from worker.models.quantization_config import quantization_of
from worker.models.weight_files import WeightFiles

UNREADABLE = (
    *(OSError, ValueError, LookupError, ArithmeticError, AttributeError, TypeError, RuntimeError, AssertionError),
    *(SafetensorError, StrictDataclassError, NameError),
)
"""Errors of transformers and its libraries for a checkpoint that is damaged, or whose config.json
makes no model.
"""

_LARGEST_CODE = 128.0
"""The largest code of quantised weights, as a factor of the scale."""

_HEAD = "lm_head.weight"
_FIELDS = tuple(Geometry.__dataclass_fields__)


def read_checked(directory: Path, settings: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, Geometry | None]:
    """transformers' configuration of a checkpoint whose files fit it, and its geometry; None for a
    model type of which transformers alone knows the tensors, and compares them when it loads them.

    Args:
        directory: Directory of the checkpoint.
        settings: ``config.json``, which `check_config` has accepted.
        dtype: Data type that the weights will be held in.

    Raises:
        StartupError: sizes do not fit each other or the weights, or a weight is not a finite
            number of `dtype`; the message names file and key or tensor.
    """
    try:
        config = configuration(directory)
        quantization = quantization_of(settings)
        if quantization is not None:
            del config.quantization_config  # transformers would quantise its modules
        found = {name: getattr(config, name, None) for name in _FIELDS}
        files = WeightFiles(directory, format_of(settings) is not None, quantization)
        geometry = None
        names: Iterable[str] = files.plain
        if settings["model_type"] in MODEL_TYPES:
            stored = geometry = geometry_of(found, settings)
            if files.holds(_HEAD):  # which may be computed with although embeddings are to be tied
                stored = replace(geometry, tie_word_embeddings=False)
            files.check(stored)
            names = files.names(stored)
        else:
            check_bounds(found)
            files.check_types()
        check_finite(files, names, dtype)
    except ModelFileError as error:
        raise StartupError(f"--model-path {directory}: {error}") from None
    return config, geometry


def configuration(directory: Path) -> Any:
    """transformers' configuration of a checkpoint. Raises `ModelFileError`."""
    try:
        found = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise ModelFileError(f"{CONFIG}: {one_line(error)}") from error
    found._attn_implementation = found._experts_implementation = None  # none of it runs, and it may be code to fetch
    check_factors(found)
    _check_windows(found)
    _check_groups(found)
    return found


def _check_groups(config: Any) -> None:
    """Raises `ModelFileError` unless each group of experts has as many: transformers would make
    groups of several tokens' experts, or fail, as their number is.
    """
    groups = getattr(config, "n_group", None)
    key = "n_routed_experts" if hasattr(config, "n_routed_experts") else "num_experts"
    experts = getattr(config, key, None)
    if type(groups) is int and type(experts) is int and groups > 0 and experts % groups:
        raise ModelFileError(f"{CONFIG}: {key} must be a multiple of n_group {groups}, got {experts}")


def _check_windows(config: Any) -> None:
    """Raises `ModelFileError` unless layers that are to have a window are told how wide it is:
    transformers computes nothing then, or with a window in masks alone.
    """
    kind = type(config)
    if not hasattr(kind, "layer_types") or "sliding_attention" not in (config.layer_types or ()):
        return
    if hasattr(kind, "use_sliding_window") and not config.use_sliding_window:
        raise ModelFileError(f"{CONFIG}: use_sliding_window must be true where layer_types has sliding_attention")
    if (config.sliding_window or 0) < 1:
        raise ModelFileError(
            f"{CONFIG}: sliding_window must be at least 1 where layer_types has sliding_attention, got "
            f"{shown(config.sliding_window)}"
        )


def check_finite(files: WeightFiles, names: Iterable[str], dtype: torch.dtype) -> None:
    """Raises `ModelFileError` naming one of these weights that holds infinity, NaN, or what `dtype`
    cannot hold; reads all of them once.
    """
    placed: dict[str, list[str]] = {file: [] for file in files.files}
    for name in names:
        placed[files.tensors[name].file].append(name)
    for file, names in placed.items():
        try:
            with safe_open(files.directory / file, framework="pt") as opened:
                for name in names:
                    _check_tensor(file, name, opened.get_tensor(name), dtype)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: {one_line(error)}") from error


def _check_tensor(file: str, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if name.endswith(CODES) or not tensor.numel() or not tensor.is_floating_point():
        return
    least, most = (float(each) for each in torch.aminmax(tensor))  # NaN if there is one
    highest = max(-least, most)
    if not highest < float("inf"):
        raise ModelFileError(f"{file}: tensor {name} holds a number that is infinite or not a number")
    if name.endswith((SCALES, OFFSETS)):
        highest *= 2 * _LARGEST_CODE
    if highest > torch.finfo(dtype).max:
        wanted = str(dtype).removeprefix("torch.")
        raise ModelFileError(f"{file}: tensor {name} holds {highest:g}, which {wanted} cannot; choose another --dtype")
