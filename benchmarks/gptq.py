"""Decoding with a GPTQ checkpoint, beside the same model in Q4_1 and dequantised.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/gptq.py  # three minutes

The default model, whose linear layers are rounded to 4 bits in GPTQ's format, in symmetric groups
of 32, and in groups of 128 with zero points. Beside them are its GGUF file in Q4_1, and the
first of the GPTQ checkpoints with ``--quantization none``. All compute in float32 with native
kernels on one thread; what is compared is processor time of 48 greedy tokens behind a prompt of 64,
of one row and of eight. Rounds are interleaved; the fastest one of each counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from worker.engines.embedded import Engine
from worker.models import model_cache
from worker.models.default_model import prepare_default_model
from worker.sampling import SamplingParams

NEW, PROMPT = 48, 64


def write_gptq(source: Path, directory: Path, group: int, is_symmetric: bool) -> Path:
    """The dense checkpoint `source` with linear layers in GPTQ's second format."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*", ".packed"))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            tensors |= {module + end: part for end, part in _rounded(tensor.float(), group, is_symmetric).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": is_symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq_v2",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _rounded(weight: torch.Tensor, group: int, is_symmetric: bool) -> dict[str, torch.Tensor]:
    columns = weight.shape[1]
    index = torch.arange(columns) // group
    groups = torch.nn.functional.pad(weight, (0, -columns % group)).view(len(weight), -1, group)
    least, most = groups.amin(2), groups.amax(2)
    if is_symmetric:
        scales = (groups.abs().amax(2) / 7).half()
        zeros = torch.full(scales.shape, 8)
    else:
        scales = ((most - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(0, 15).long()
    codes = (weight / scales.float()[:, index] + zeros[:, index]).round().clamp(0, 15).long()
    return {
        ".qweight": _words(codes).T.contiguous(),
        ".qzeros": _words(zeros.T),
        ".scales": scales.T.contiguous(),
        ".g_idx": index.int(),
    }


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[n, m]``, eight to an int32, the first one lowest."""
    parts = codes.reshape(len(codes), -1, 8) << 4 * torch.arange(8)
    words: torch.Tensor = parts.sum(-1).to(torch.uint32).view(torch.int32)
    return words


def tokens_per_second(engine: Engine, rows: int) -> float:
    """Tokens that `rows` requests decode in a second of processor time, after their prompts."""
    prompts = [[(31 * row + 7 * at) % 49_000 for at in range(PROMPT)] for row in range(rows)]
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=0.0))
    began, decoded = 0.0, 0
    while engine.unfinished:
        events = engine.session.step()
        if began:
            decoded += len(events)
        elif len(events) == rows:
            began = time.process_time()
    return decoded / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    dense = prepare_default_model(model_cache(), print)
    blocks = prepare_default_model(model_cache(), print, keeps_blocks=True)
    with tempfile.TemporaryDirectory() as work:
        paths = {
            f"GPTQ, groups of {group}{'' if is_symmetric else ', zero points'}": write_gptq(
                dense, Path(work, f"{group}-{is_symmetric}"), group, is_symmetric
            )
            for group, is_symmetric in ((32, True), (128, False))
        }
        of: dict[str, tuple[Path, str]] = {name: (path, "auto") for name, path in paths.items()}
        of |= {"Q4_1": (blocks, "auto"), "GPTQ, dequantised": (next(iter(paths.values())), "none")}
        settings: dict[str, Any] = {"context_length": 256, "speculative_config": {"method": "none"}}
        engines = {
            name: Engine(path, device="cpu", dtype="float32", quantization=each, packed_copy="off", **settings)
            for name, (path, each) in of.items()
        }
        best: dict[tuple[str, int], float] = {}
        for _ in range(rounds):
            for name, engine in engines.items():
                for rows in (1, 8):
                    best[name, rows] = max(best.get((name, rows), 0.0), tokens_per_second(engine, rows))
    print("| weights | 1 row | 8 rows |\n| --- | --- | --- |")
    for name in engines:
        print(f"| {name} | {best[name, 1]:.0f} | {best[name, 8]:.0f} |")


if __name__ == "__main__":
    main()
