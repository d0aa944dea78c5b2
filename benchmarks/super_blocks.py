"""Rounding of float32 weights to GGUF's types: ours, and llama.cpp's, on the same cores in turns.

    benchmarks/peers.sh llama  # once
    .venv/bin/python benchmarks/super_blocks.py [--llama .venv-llama/bin/python] [--threads 2]

Seconds per 100 million weights, the least of five turns, since others may use the machine; and
whether the bytes are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind

from worker.engines.embedded.native.gguf_types import rounding_of
from worker.models.quantised import Codes, unpack_blocks

ROWS, INNER, TURNS = 8192, 1536, 5
_PER = 100_000_000 / (ROWS * INNER)
KINDS = (Kind.Q4_K, Kind.Q6_K, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1)


def digest_of(found: Codes) -> str:
    """A digest of codes, scales and offsets."""
    parts = [found.codes, found.scales, *([] if found.offsets is None else [found.offsets])]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def ours(rows: torch.Tensor, kind: Kind) -> tuple[float, str]:
    """Seconds, and a digest of the result."""
    began = time.perf_counter()
    found = rounding_of(kind.name, rows).rounded
    seconds = time.perf_counter() - began
    return seconds, digest_of(Codes(*(part.numpy() for part in found if part is not None)))


def llamas(python: str, source: Path, kind: Kind, threads: int) -> tuple[float, str]:
    """The same of ``ggml_quantize_chunk``, in its own environment."""
    program = Path(__file__).with_name("super_blocks_llama.py")
    target = source.with_suffix(".blocks")
    command = [python, str(program), str(source), str(target), str(int(kind)), str(INNER), str(threads)]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    blocks = np.fromfile(target, np.uint8).reshape(ROWS, -1)
    return told["seconds"], digest_of(unpack_blocks(blocks, kind))


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="Python of llama.cpp's environment")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = torch.randn(ROWS, INNER, generator=torch.Generator().manual_seed(0)) * 0.02
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "rows"
        rows.numpy().tofile(source)
        for kind in KINDS:
            found: dict[str, list[tuple[float, str]]] = {"ours": [], "llama.cpp": []}
            for _ in range(TURNS):
                found["ours"].append(ours(rows, kind))
                if arguments.llama:
                    found["llama.cpp"].append(llamas(arguments.llama, source, kind, arguments.threads))
            told: dict[str, float | bool] = {
                name: round(min(each)[0] * _PER, 3) for name, each in found.items() if each
            }
            if arguments.llama:
                told["same_bits"] = len({digest for each in found.values() for _, digest in each}) == 1
            print(json.dumps({"type": kind.name, **told}))
    print(json.dumps({"threads": arguments.threads, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
