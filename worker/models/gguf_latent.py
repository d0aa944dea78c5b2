"""DeepSeek's architecture in GGUF files: multi-head latent attention, and routed experts beside
shared ones behind some dense layers.

Older files have the up projection of keys and values as the checkpoint has it; newer ones have it
in two tensors, that of keys transposed, head by head, as llama.cpp computes with latent keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.models.geometry import BOUNDS, Tensor
from worker.models.gguf_file import GgufError, Metadata
from worker.models.gguf_layouts import Layout, Place
from worker.models.numbers import shortest

DEEPSEEK = "deepseek2"
"""Name of the architecture in files."""

_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""

_GROUPS = {(60, 160): (8, 3), (61, 256): (8, 4)}
"""Groups of experts, and those of them that are used, by layers and experts: of DeepSeek V2 and V3,
whose older files do not tell them.
"""

_MOST = BOUNDS["hidden_size"][1]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout(Layout):
    """DeepSeek V2 or V3, which are one architecture of GGUF files.

    Attributes:
        gating: ``expert_gating_func`` of its files.
        has_correction: Whether routers have a bias by which experts are chosen.
    """

    gating: int
    has_correction: bool = False

    @property
    def is_mixture(self) -> bool:
        """Whether MLPs are mixtures of experts, behind the dense ones."""
        return True

    @property
    def keys(self) -> set[str]:
        """Keys of the file, below its architecture's name, that others do not have."""
        return {
            *("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla"),
            *("attention.value_length_mla", "leading_dense_block_count", "expert_shared_count"),
            *("expert_group_count", "expert_group_used_count", "expert_weights_scale", "expert_weights_norm"),
            *("expert_gating_func", "rope.scaling.yarn_log_multiplier"),
        }

    def latent(self, metadata: Metadata, arch: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of ``config.json`` that Llama does not have.

        Args:
            metadata: Metadata of the file.
            arch: The architecture's name, with which its keys begin.
            sizes: The keys that it shares with Llama; ``head_dim`` is the part of a head that RoPE
                rotates.

        Raises:
            GgufError: a key is missing or does not fit the others.
        """

        def size(key: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
            return metadata.integer(f"{arch}.{key}", default, least, most)

        rotated, rank = sizes["head_dim"], size("attention.kv_lora_rank")
        is_split = f"{arch}.attention.key_length_mla" in metadata
        whole = size("attention.key_length_mla" if is_split else "attention.key_length")
        if whole <= rotated:
            key = "attention.key_length_mla" if is_split else "attention.key_length"
            raise GgufError(f"{arch}.{key} must be above {arch}.rope.dimension_count {rotated}, got {whole}")
        found: dict[str, Any] = {
            "q_lora_rank": size("attention.q_lora_rank", 0, 0) or None,
            "kv_lora_rank": rank,
            "qk_nope_head_dim": whole - rotated,
            "qk_rope_head_dim": rotated,
            "v_head_dim": size("attention.value_length_mla" if is_split else "attention.value_length"),
            "attention_bias": False,
            "first_k_dense_replace": size("leading_dense_block_count", 0, 0, sizes["num_hidden_layers"]),
            "moe_intermediate_size": size("expert_feed_forward_length", most=BOUNDS["moe_intermediate_size"][1]),
            "n_shared_experts": size("expert_shared_count"),
            "routed_scaling_factor": shortest(metadata.number(f"{arch}.expert_weights_scale", 1.0, most=1e6)),
            "norm_topk_prob": metadata.flag(f"{arch}.expert_weights_norm", False),
        }
        found |= self._routing(metadata, arch, sizes["num_hidden_layers"])
        if self.gating == _SOFTMAX and found["norm_topk_prob"]:
            raise GgufError(f"{arch}.expert_weights_norm is not supported without {arch}.expert_gating_func {_SIGMOID}")
        return found

    def _routing(self, metadata: Metadata, arch: str, layers: int) -> dict[str, Any]:
        experts = metadata.integer(f"{arch}.expert_count", None, 1, BOUNDS["num_experts"][1])
        used = metadata.integer(f"{arch}.expert_used_count", None, 1, experts)
        groups, kept = _GROUPS.get((layers, experts), (1, 1))
        groups = metadata.integer(f"{arch}.expert_group_count", groups, 1, experts)
        kept = metadata.integer(f"{arch}.expert_group_used_count", kept, 1, groups)
        least = 2 if self.gating == _SIGMOID else 1  # V3 weighs a group by its two best experts
        if experts % groups or experts // groups < least or kept * (experts // groups) < used:
            raise GgufError(
                f"{arch}.expert_group_count {groups} and {arch}.expert_group_used_count {kept} do not fit "
                f"{experts} experts, of which {used} are used"
            )
        method = {} if self.gating == _SIGMOID else {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
        counts = {"n_routed_experts": experts, "num_experts_per_tok": used, "n_group": groups, "topk_group": kept}
        return counts | method

    def yarn_scales(self, metadata: Metadata, arch: str) -> dict[str, float]:
        """Parameters of YaRN that change the scale of attention; llama.cpp, too, takes both for
        equal.
        """
        scale = metadata.number(f"{arch}.rope.scaling.yarn_log_multiplier", most=1e5)
        factor = shortest(10 * shortest(scale))  # the converter writes a tenth
        return {"mscale": factor, "mscale_all_dim": factor}

    def _attention(self, config: Mapping[str, Any], has_biases: bool) -> Iterator[tuple[Tensor, Place]]:
        hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
        rotated, plain, values = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
        queries, latent = heads * (plain + rotated), config["q_lora_rank"]
        shapes = {"kv_a_proj_with_mqa": (rank + rotated, hidden), "kv_a_layernorm": (rank,)}
        theirs = {"kv_a_proj_with_mqa": "kv_a_mqa", "kv_a_layernorm": "kv_a_norm"}
        if latent is None:
            shapes["q_proj"], theirs["q_proj"] = (queries, hidden), "q"
        else:
            shapes |= {"q_a_proj": (latent, hidden), "q_a_layernorm": (latent,), "q_b_proj": (queries, latent)}
            theirs |= {"q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b"}
        shapes["o_proj"], theirs["o_proj"] = (hidden, heads * values), "output"
        for name, shape in shapes.items():
            yield Tensor(f"self_attn.{name}.weight", shape), Place(f"attn_{theirs[name]}.weight")
        both = Tensor("self_attn.kv_b_proj.weight", (heads * (plain + values), rank))
        yield both, Place("attn_kv_b.weight", heads=heads, parts=("attn_k_b.weight", "attn_v_b.weight"), keys=plain)

    def _mlp(self, config: Mapping[str, Any], layer: int) -> Iterator[tuple[Tensor, Place]]:
        hidden, experts = config["hidden_size"], config["n_routed_experts"]
        if layer < config["first_k_dense_replace"]:
            yield from _gated("mlp.", "ffn_{}.weight", hidden, config["intermediate_size"])
            return
        inner = config["moe_intermediate_size"]
        yield Tensor("mlp.gate.weight", (experts, hidden)), Place("ffn_gate_inp.weight")
        if self.has_correction:
            yield Tensor("mlp.gate.e_score_correction_bias", (experts,)), Place("exp_probs_b.bias")
        for expert in range(experts):
            yield from _gated(f"mlp.experts.{expert}.", "ffn_{}_exps.weight", hidden, inner, expert)
        yield from _gated("mlp.shared_experts.", "ffn_{}_shexp.weight", hidden, inner * config["n_shared_experts"])


def _gated(
    ours: str, theirs: str, hidden: int, inner: int, expert: int | None = None
) -> Iterator[tuple[Tensor, Place]]:
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield Tensor(f"{ours}{name}_proj.weight", shape), Place(theirs.format(name), expert)


DEEPSEEK_2 = LatentLayout(name="deepseek_v2", class_name="DeepseekV2ForCausalLM", gating=_SOFTMAX)
DEEPSEEK_3 = LatentLayout(
    name="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    gating=_SIGMOID,
    has_correction=True,
    settings={"rope_interleave": True, "num_nextn_predict_layers": 0},
)


def deepseek(metadata: Metadata) -> LatentLayout:
    """The layout of a file of `DEEPSEEK`; V2's older files tell no function of its gates.

    Raises:
        GgufError: the function is another one.
    """
    gating = metadata.integer(f"{DEEPSEEK}.expert_gating_func", _SOFTMAX, _SOFTMAX, _SIGMOID)
    return DEEPSEEK_3 if gating == _SIGMOID else DEEPSEEK_2
