"""Settings of a LoRA adapter: peft's ``adapter_config.json``, of which all that changes what an
adapter means is either computed or refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from worker.models.problems import shown

Number = TypeVar("Number", int, float)

_MAX_PATTERN = 256
_PLAIN_PATTERN = re.compile(r"(?:[\w.|()^$-]|\\[.d]|\[0-9\]|[*+](?!\)*[*+]))*")
_MAX_REPEATS = 2
"""Repetitions in a pattern; with more, or with nested ones, matching takes exponential time."""

_SAY_NOTHING = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("exclude_modules", "lora_dropout", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config"),
        *("eva_config", "runtime_config", "qalora_group_size", "tie_word_embeddings"),
    }
)
"""Settings of training, and of which layers have matrices, which the matrices themselves say."""

_INITIAL = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the weights of the base model as they are."""

_COMPUTED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"),
        "fan_in_fan_out",
    }
)

_WHY = {
    "use_dora": "DoRA is not served",
    "modules_to_save": "an adapter changes linear layers by LoRA alone",
    "trainable_token_indices": "an adapter changes linear layers by LoRA alone",
    "target_parameters": "an adapter changes linear layers by LoRA alone",
    "layer_replication": "an adapter must not change the number of layers",
    "lora_bias": "biases are not adapted",
    "alora_invocation_tokens": "an adapter must hold for all tokens",
}


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Settings of an adapter that its result depends on.

    Attributes:
        r: Rank of layers without one of their own.
        lora_alpha: Alpha of layers without one of their own.
        use_rslora: Whether alpha is divided by the square root of the rank, not by the rank.
        target_modules: Names of layers or of the last parts of theirs; or one pattern of whole
            names.
        rank_pattern: Ranks by pattern of names.
        alpha_pattern: Alphas by pattern of names.
        fan_in_fan_out: Whether the layers' weights are ``[K, N]``.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    fan_in_fan_out: bool = False

    def targets(self, layer: str) -> bool:
        """Whether the adapter says that it changes a layer."""
        targets = self.target_modules
        if isinstance(targets, str):
            return targets == "all-linear" or re.fullmatch(targets, layer) is not None
        return any(layer == one or layer.endswith(f".{one}") for one in targets)

    def rank(self, layer: str) -> int:
        """Rank of a layer."""
        return _of_layer(self.rank_pattern, layer, self.r)

    def alpha(self, layer: str) -> float:
        """Alpha of a layer."""
        return _of_layer(self.alpha_pattern, layer, self.lora_alpha)

    def scale(self, layer: str) -> float:
        """Factor of ``B @ A`` of a layer."""
        rank = self.rank(layer)
        return self.alpha(layer) / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(config: Mapping[str, Any]) -> LoraConfig:
    """The settings in a ``adapter_config.json``.

    Raises:
        ValueError: it is no LoRA adapter's, a setting has no sense, or one is not served.
    """
    if config.get("peft_type") != "LORA":
        raise ValueError(f"peft_type must be LORA, got {shown(config.get('peft_type'))}")
    _check_neutral(config)
    rank_pattern, alpha_pattern = (_numbers(config, name) for name in ("rank_pattern", "alpha_pattern"))
    return LoraConfig(
        _rank("r", config.get("r")),
        _number("lora_alpha", config.get("lora_alpha")),
        _flag(config, "use_rslora"),
        _targets(config.get("target_modules")),
        {pattern: _rank(f"rank_pattern.{pattern}", value) for pattern, value in rank_pattern.items()},
        {pattern: _number(f"alpha_pattern.{pattern}", value) for pattern, value in alpha_pattern.items()},
        _flag(config, "fan_in_fan_out"),
    )


def _check_neutral(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        if name in _SAY_NOTHING or name in _COMPUTED:
            continue
        if name == "init_lora_weights":
            if value not in _INITIAL:
                known = ", ".join(map(str, _INITIAL))
                raise ValueError(f"{name} must be one of {known}: others change the base, got {shown(value)}")
        elif name == "bias":
            if value not in (None, "none"):
                raise ValueError(f"bias must be none: biases are not adapted, got {shown(value)}")
        elif value not in (None, False, [], {}):
            why = _WHY.get(name, "it is not served")
            raise ValueError(f"{name} must be null or false: {why}, got {shown(value)}")


def _rank(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be an integer from 1, got {shown(value)}")
    return value


def _number(name: str, value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a finite number, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def _numbers(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object of numbers by pattern, got {shown(value)}")
    for pattern in value:
        _check_pattern(name, pattern)
    return value


def _targets(value: object) -> tuple[str, ...] | str:
    if isinstance(value, str):
        if value != "all-linear":
            _check_pattern("target_modules", value)
        return value
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise ValueError(f"target_modules must be a list of names or a pattern, got {shown(value)}")
    return tuple(value)


def _check_pattern(name: str, pattern: str) -> None:
    repeats = sum(pattern.count(each) for each in "*+")
    is_simple = _PLAIN_PATTERN.fullmatch(pattern) is not None and ")*" not in pattern and ")+" not in pattern
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{name}: {shown(pattern)} is no pattern: {error}") from None
    if len(pattern) > _MAX_PATTERN or repeats > _MAX_REPEATS or not is_simple:
        raise ValueError(f"{name}: {shown(pattern)} must be names, alternatives and {_MAX_REPEATS} repetitions at most")


def _of_layer(patterns: Mapping[str, Number], layer: str, default: Number) -> Number:
    """The value of the first pattern that matches the end of a layer's name, as peft has it."""
    matching = (value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return next(matching, default)
