"""The gate for ``config.json``: each key that is served has its type and range, or is refused by
name, before transformers reads the file.

What transformers does with a value of a wrong type depends on the key: an error without its name, a
loop without end, or a model that computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from adapters.first_problem import first_problem
from adapters.strict_json import read_object
from worker.models.geometry import BOUNDS, Geometry, GeometryError, check_fit
from worker.models.model_table import TABLE
from worker.models.model_types import MODEL_TYPES, SOFTCAPS
from worker.models.problems import ModelFileError, shown

CONFIG, GENERATION = "config.json", "generation_config.json"

_MOST_BYTES = 64 * 2**20
"""Size of a JSON file beside the weights at most; tokenizers are read elsewhere."""

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Data types that a checkpoint may name."""

_ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python", "gelu_accurate"),
    *("quick_gelu", "relu", "relu2", "relu6", "leaky_relu", "mish", "sigmoid", "tanh", "linear", "laplace"),
)
_RopeType = Literal["default", "linear", "yarn", "llama3", "proportional", "dynamic", "longrope"]
_LayerType = Literal["full_attention", "sliding_attention"]

Schema = TypeVar("Schema", bound=BaseModel)

_LEFT_OUT: Any = None
"""Default of a key that may be left out, but not null."""

_OTHER_NAMES = {"num_experts": "num_local_experts"}
_ONLY = {
    **dict.fromkeys(("is_causal", "return_dict"), True),
    **dict.fromkeys(("use_bidirectional_attention", "is_encoder_decoder", "alibi", "add_cross_attention"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), False),
}
"""The values of keys with which a model neither attends both ways nor returns something else."""

_UNSCALED = (None, "default")

_TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_Positive = Annotated[float, Field(gt=0, le=1e30)]
_Factor = Annotated[float, Field(ge=1e-3, le=1e6)]
_Factors = Annotated[list[_Factor], Field(min_length=1, max_length=2**16)]
_Count = Annotated[int, Field(ge=1, le=2**31)]


def _size(key: str) -> Any:
    """A size of `BOUNDS`, which may be left out."""
    least, most = BOUNDS[key]
    return Field(default=None, ge=least, le=most)


class _Strict(BaseModel):
    model_config = ConfigDict(defer_build=True, strict=True, extra="ignore", allow_inf_nan=False)


class _Rope(_Strict):
    """RoPE parameters, of all layers or of one type of layer."""

    rope_type: _RopeType | None = None
    type: _RopeType | None = None
    rope_theta: Annotated[float, Field(gt=1, le=1e30)] = _LEFT_OUT
    factor: _Factor = _LEFT_OUT
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = _LEFT_OUT
    original_max_position_embeddings: _Count = _LEFT_OUT
    low_freq_factor: _Factor = _LEFT_OUT
    high_freq_factor: _Factor = _LEFT_OUT
    short_factor: _Factors = _LEFT_OUT
    long_factor: _Factors = _LEFT_OUT
    attention_factor: _Factor | None = None
    beta_fast: _Factor | None = None
    beta_slow: _Factor | None = None
    mscale: _Factor | None = None
    mscale_all_dim: Annotated[float, Field(ge=0, le=1e6)] | None = None
    truncate: bool = True
    alpha: _Factor | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.low_freq_factor is not None and self.low_freq_factor == self.high_freq_factor:
            raise ValueError("low_freq_factor and high_freq_factor must differ")
        if "longrope" in (self.rope_type, self.type) and not (self.short_factor and self.long_factor):
            raise ValueError("short_factor and long_factor must be lists beside rope_type 'longrope'")
        if self.original_max_position_embeddings == 1 and "longrope" in (self.rope_type, self.type):
            raise ValueError("original_max_position_embeddings must be above 1 beside rope_type 'longrope'")
        return self


class _RopeByLayer(_Rope):
    """RoPE parameters, which may stand below a type of layer each."""

    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None


class AnyConfig(_Strict):
    """The keys of ``config.json`` that mean the same in every model type.

    One that is left out is transformers' default of that model type.
    """

    model_type: str
    vocab_size: int = _size("vocab_size")
    hidden_size: int = _size("hidden_size")
    num_hidden_layers: int = _size("num_hidden_layers")
    num_attention_heads: int = _size("num_attention_heads")
    num_key_value_heads: int | None = _size("num_key_value_heads")
    head_dim: int | None = _size("head_dim")
    max_position_embeddings: int = _size("max_position_embeddings")
    original_max_position_embeddings: Annotated[int, Field(ge=2, le=2**31)] = _LEFT_OUT
    tie_word_embeddings: bool = False
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    torch_dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    eos_token_id: _TokenId | list[_TokenId] | None = None
    bos_token_id: _TokenId | None = None
    pad_token_id: _TokenId | None = None
    rope_scaling: _RopeByLayer | None = None
    rope_parameters: _RopeByLayer | None = None
    quantization_config: dict[str, Any] | None = None
    transformers_weights: None = None  # names other files than those that are checked
    configuration_files: None = None  # the same
    per_layer_config: dict[str, Any] | None = None
    use_bidirectional_attention: bool | None = False
    is_causal: bool = True
    is_encoder_decoder: bool = False
    return_dict: bool = True
    output_attentions: bool | None = False
    output_hidden_states: bool | None = False

    @model_validator(mode="after")
    def _refuse_variants(self) -> Self:
        """Raises `ValueError` for what is not computed as transformers does."""
        for key, wanted in _ONLY.items():
            if getattr(self, key, None) not in (None, wanted):
                raise ValueError(f"{key} must be {wanted}, got {not wanted}")
        if self.per_layer_config:
            raise ValueError("per_layer_config must be empty: layers that are configured one by one are not served")
        return self


class OtherConfig(AnyConfig):
    """The keys of a model type that transformers' own code computes, which reads all others, too:
    its configuration classes check their types.
    """

    n_layer: int = _size("num_hidden_layers")
    num_layers: int = _size("num_hidden_layers")
    n_head: int = _size("num_attention_heads")
    n_embd: int = _size("hidden_size")
    n_positions: int = _size("max_position_embeddings")
    alibi: bool = False
    add_cross_attention: bool = False
    is_decoder: bool = False
    sliding_window: Annotated[int, Field(ge=0, le=2**31)] | None = None
    use_sliding_window: bool | None = None

    @model_validator(mode="after")
    def _has_no_window_of_others(self) -> Self:
        if self.sliding_window == 0:  # transformers writes it beside `use_sliding_window`
            if self.use_sliding_window is not False:
                raise ValueError("sliding_window must be null or at least 1, or 0 where use_sliding_window is false")
        elif self.sliding_window is not None and "sliding window" not in TABLE[self.model_type].features:
            raise ValueError(
                f"sliding_window must be null in a model of type {self.model_type}, whose layers have none"
            )
        return self


class ModelConfig(AnyConfig):
    """The keys of the model types whose geometry is known before transformers is asked."""

    intermediate_size: int = _size("intermediate_size")
    hidden_act: Literal[_ACTIVATIONS] = "silu"  # type: ignore[valid-type]
    hidden_activation: Literal[_ACTIVATIONS] = "silu"  # type: ignore[valid-type]
    rms_norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    initializer_range: Annotated[float, Field(ge=0, le=1)] = 0.02
    attention_dropout: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    attention_bias: bool = False
    mlp_bias: bool = False
    use_cache: bool = True
    rope_theta: Annotated[float, Field(gt=1, le=1e30)] = _LEFT_OUT
    rope_local_base_freq: Annotated[float, Field(gt=1, le=1e30)] = _LEFT_OUT
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = _LEFT_OUT
    sliding_window: Annotated[int, Field(ge=1, le=2**31)] | None = None
    use_sliding_window: bool = False
    sliding_window_pattern: _Count = _LEFT_OUT
    max_window_layers: Annotated[int, Field(ge=0, le=2**31)] = 28
    layer_types: list[_LayerType] | None = None
    query_pre_attn_scalar: _Count = _LEFT_OUT
    attn_logit_softcapping: _Positive | None = None
    final_logit_softcapping: _Positive | None = None
    num_experts: int = _size("num_experts")
    num_local_experts: int = _size("num_experts")
    num_experts_per_tok: int = _size("num_experts_per_tok")
    moe_intermediate_size: int = _size("moe_intermediate_size")
    decoder_sparse_step: int = _size("decoder_sparse_step")
    mlp_only_layers: list[Annotated[int, Field(ge=0, lt=1024)]] | None = None
    norm_topk_prob: bool = False

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.layer_types is not None and self.num_hidden_layers not in (None, len(self.layer_types)):
            raise ValueError(
                f"layer_types must have an entry for each of num_hidden_layers {self.num_hidden_layers}, "
                f"got {len(self.layer_types)}"
            )
        takes_null = MODEL_TYPES[self.model_type].takes_null_head_dim
        if "head_dim" in self.model_fields_set and self.head_dim is None and not takes_null:
            raise ValueError(f"head_dim must be an integer, or left out, in a model of type {self.model_type}")
        self._refuse_others_keys()
        pad, size = self.pad_token_id, self.vocab_size
        if pad is not None and size is not None and not -size <= pad < size:
            raise ValueError(f"pad_token_id must be below vocab_size {size}, got {pad}")
        return self

    def _refuse_others_keys(self) -> None:
        """Raises `ValueError` for keys of other model types that change what is computed."""
        for key in SOFTCAPS:
            known = [each.name for each in MODEL_TYPES.values() if key in each.softcaps]
            if getattr(self, key) is not None and self.model_type not in known:
                raise ValueError(f"{key} is known of {' and '.join(known)} alone")
        for key in ("rope_scaling", "rope_parameters"):
            rope = getattr(self, key)
            if (
                rope is not None
                and (rope.full_attention or rope.sliding_attention)
                and self.model_type != "gemma3_text"
            ):
                raise ValueError(f"{key}: full_attention and sliding_attention are known of gemma3_text alone")
            factors = (self.partial_rotary_factor, rope.partial_rotary_factor) if rope is not None else ()
            if any(each not in (None, 1.0) for each in factors) and (rope.rope_type or rope.type) not in _UNSCALED:
                raise ValueError(f"{key}: rope_type must be 'default' beside partial_rotary_factor")


class _GenerationConfig(_Strict):
    """The keys of ``generation_config.json`` that are read."""

    eos_token_id: _TokenId | list[_TokenId] | None = None


def read_config(directory: Path) -> dict[str, Any] | None:
    """The ``config.json`` of a checkpoint, of which `check_config` is not yet asked; None if there
    is none.

    Raises:
        ModelFileError: it cannot be read, is no JSON object, or names a key twice.
    """
    return _read(directory / CONFIG)


def check_config(settings: Mapping[str, Any]) -> AnyConfig:
    """Raises `ModelFileError` unless each key of this ``config.json`` has a value of its type and
    range.
    """
    if settings.get("model_type") not in MODEL_TYPES:
        return _checked(OtherConfig, settings, CONFIG)
    found = _checked(ModelConfig, settings, CONFIG)
    try:
        check_fit(settings)
    except GeometryError as error:
        raise ModelFileError(f"{CONFIG}: {error}") from None
    return found


def read_generation_config(directory: Path) -> dict[str, Any]:
    """The ``generation_config.json`` of a checkpoint; empty if there is none.

    Raises:
        ModelFileError: it cannot be read, or a key of it has a wrong type.
    """
    found = _read(directory / GENERATION) or {}
    _checked(_GenerationConfig, found, GENERATION)
    return found


def geometry_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Geometry:
    """`Geometry.of` transformers' configuration; errors name the keys of ``config.json`` as
    `settings` has them.

    Raises:
        ModelFileError: see `GeometryError`.
    """
    try:
        return Geometry.of(config)
    except GeometryError as error:
        names = {ours: theirs for ours, theirs in _OTHER_NAMES.items() if theirs in settings}
        raise ModelFileError(f"{CONFIG}: {error.named(names)}") from None


def check_bounds(config: Mapping[str, Any]) -> None:
    """Raises `ModelFileError` for a size of transformers' configuration that is out of `BOUNDS`."""
    for key, (least, most) in BOUNDS.items():
        value = config.get(key)
        if type(value) is int and not least <= value <= most:
            raise ModelFileError(f"{CONFIG}: {key} must be an integer from {least} to {most}, got {shown(value)}")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    if len(content) > _MOST_BYTES:
        raise ModelFileError(f"{path.name}: has more than {_MOST_BYTES // 2**20} MiB")
    try:
        return read_object(content)
    except ValueError as error:
        raise ModelFileError(f"{path.name}: {error}") from None


def _checked(schema: type[Schema], settings: Mapping[str, Any], file: str) -> Schema:
    try:
        return schema.model_validate(settings)
    except ValidationError as error:
        raise ModelFileError(f"{file}: {first_problem(error, shown)}") from None
