"""A second process with a KV store of its own: holds prompts for the tests, told what to do line by line."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from base64 import b64decode, b64encode
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from worker.engines.embedded.kv_layout import KvLayout
from worker.engines.embedded.transfer import KvHandle, KvPort

LAYOUT = KvLayout("tiny", "float32", layers=3, kv_heads=2, head_dim=4, block_size=4, segment_size=16)
NUM_SEGMENTS = 12


def store(layout: KvLayout, num_segments: int, seed: int | None) -> list[torch.Tensor]:
    """Keys of each layer, then values of each layer; zeros without a seed."""
    shape = (num_segments, layout.kv_heads, layout.segment_size, layout.head_dim)
    dtype = getattr(torch, layout.dtype)
    if seed is None:
        return [torch.zeros(shape, dtype=dtype) for _ in range(2 * layout.layers)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator).to(dtype) for _ in range(2 * layout.layers)]


class Peer:
    """The process of a holder, by its end of a pipe."""

    def __init__(self, layout: KvLayout = LAYOUT, num_segments: int = NUM_SEGMENTS, seed: int = 1) -> None:
        self.tensors = store(layout, num_segments, seed)  # the same numbers that the process has
        given = json.dumps({"layout": asdict(layout), "num_segments": num_segments, "seed": seed})
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, given]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have the process do something; its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def hold(self, segments: list[int]) -> KvHandle:
        data = self.ask("hold", segments=segments)
        layout = KvLayout(**data.pop("layout"))
        data["metadata"] = b64decode(data["metadata"])
        data["bases"], data["segments"] = tuple(data["bases"]), tuple(data["segments"])
        return KvHandle(layout=layout, **data)

    def wait_note(self) -> int:
        """The next ticket that a reader sends back."""
        return int(self.ask("wait_note"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the peer has died"
        return json.loads(line)


def serve(port: KvPort, tensors: list[torch.Tensor]) -> None:
    """Do what is asked, one line after the other, and poll between them: a real holder's step thread does so too."""
    held: dict[int, KvHandle] = {}
    notes: list[int] = []
    ready = selectors.DefaultSelector()
    ready.register(sys.stdin, selectors.EVENT_READ)

    def answer(data: Any) -> None:
        sys.stdout.write(json.dumps(data) + "\n")
        sys.stdout.flush()

    answer("ready")
    waiting = False
    while True:
        notes += port.notes()
        if waiting and notes:
            answer(notes.pop(0))
            waiting = False
        if not ready.select(0.0005):
            continue
        line = sys.stdin.readline()
        if not line:
            return
        given = json.loads(line)
        if given["what"] == "hold":
            handle = port.publish(given["segments"])
            assert handle is not None
            held[handle.ticket] = handle
            data = asdict(replace(handle, metadata=b""))
            answer(data | {"metadata": b64encode(handle.metadata).decode()})
        elif given["what"] == "withdraw":
            port.withdraw(held.pop(given["ticket"]))
            for tensor in tensors:
                tensor.fill_(-1)
            answer("withdrawn")
        elif given["what"] == "wait_note":
            waiting = True


def main() -> None:
    given = json.loads(sys.argv[1])
    layout = KvLayout(**given["layout"])
    tensors = store(layout, given["num_segments"], given["seed"])
    serve(KvPort(tensors, layout), tensors)


if __name__ == "__main__":
    main()
