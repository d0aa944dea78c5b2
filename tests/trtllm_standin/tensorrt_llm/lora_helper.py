"""LoRA adapters: the argument of `LLM`, and the checkpoint that an adapter makes of a model."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional  # the contract's own spelling


def get_default_trtllm_modules_to_hf_modules() -> dict[str, str]:
    return {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        "attn_dense": "o_proj",
        "mlp_h_to_4h": "gate_proj",
        "mlp_4h_to_h": "down_proj",
        "mlp_gate": "up_proj",
        "mlp_gate_up": "gate_up_proj",
        "moe_h_to_4h": "w1",
        "moe_4h_to_h": "w2",
        "moe_gate": "w3",
        "moe_router": "gate",
    }


@dataclass
class LoraConfig:
    lora_dir: List[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: List[str] = field(default_factory=list)
    trtllm_modules_to_hf_modules: Dict[str, str] = field(default_factory=dict)
    max_loras: Optional[int] = None
    max_cpu_loras: Optional[int] = None
    swap_gate_up_proj: bool = True

    def __post_init__(self) -> None:
        assert self.lora_ckpt_source in ("hf", "nemo"), "lora_ckpt_source must be one of 'hf' or 'nemo'"


def adapted(model: Path, adapter: Path, target_modules: list[str], max_rank: int) -> Path:
    """The model with the adapter's matrices of the target modules added to its weights, float32.

    Other matrices are skipped with a warning that nobody reads.
    """
    from safetensors.torch import load_file, save_file

    directory = Path(tempfile.mkdtemp(prefix="standin-lora-")) / "model"
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(".packed"))  # which others may write meanwhile
    weights = load_file(directory / "model.safetensors")
    tensors, config = load_file(adapter / "adapter_model.safetensors"), _config(adapter)
    served = {get_default_trtllm_modules_to_hf_modules()[name] for name in target_modules}
    for key, down in tensors.items():
        layer, _, side = key.removeprefix("base_model.model.").partition(".lora_")
        if side != "A.weight" or layer.rpartition(".")[2] not in served:
            continue
        rank = down.shape[0]
        if rank > max_rank:
            raise ValueError(f"rank {rank} of {layer} is above max_lora_rank {max_rank}")
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        up = tensors[key.replace("lora_A", "lora_B")]
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"].float() + scale * (up.float() @ down.float())
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _config(adapter: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((adapter / "adapter_config.json").read_text())
    return found
