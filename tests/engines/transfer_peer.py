"""A second process with a KV store of its own: holds prompts for the tests or reads theirs, told so line by line."""

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
from worker.engines.embedded.transfer import KvHandle, KvPort, KvRead

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

    def __init__(
        self, layout: KvLayout = LAYOUT, num_segments: int = NUM_SEGMENTS, seed: int | None = 1, **environ_changes: str
    ) -> None:
        self.notes: list[int] = []
        self.tensors = store(layout, num_segments, seed)  # the same numbers that the process has
        given = json.dumps({"layout": asdict(layout), "num_segments": num_segments, "seed": seed})
        environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
        environ |= environ_changes
        command = [sys.executable, __file__, given]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have the process do something; its answer."""
        self.tell(what, **arguments)
        return self._answer()

    def tell(self, what: str, **arguments: Any) -> None:
        """The same without waiting for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer_to(self, port: KvPort) -> Any:
        """The answer to what was told, while `port` does a holder's part of it."""
        ready = selectors.DefaultSelector()
        ready.register(self.process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        while not ready.select(0.0005):
            self.notes += port.notes()
        return self._answer()

    def hold(self, segments: list[int]) -> KvHandle:
        return handle_of(self.ask("hold", segments=segments))

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


def data_of(handle: KvHandle) -> dict[str, Any]:
    data = asdict(replace(handle, metadata=b""))
    return data | {"metadata": b64encode(handle.metadata).decode()}


def handle_of(data: dict[str, Any]) -> KvHandle:
    layout = KvLayout(**data.pop("layout"))
    data["metadata"] = b64decode(data["metadata"])
    data["bases"], data["segments"] = tuple(data["bases"]), tuple(data["segments"])
    return KvHandle(layout=layout, **data)


def begin_to_read(port: KvPort, handle: KvHandle, segments: list[int]) -> tuple[KvRead, str]:
    """A read of which some has come and some has not, if it is `busy`."""
    read = port.read(handle, segments, 0, len(segments) * port.layout.segment_size)
    state = read.poll(0.0)
    while state == "busy" and not any(tensor.any() for tensor in port.tensors):
        state = read.poll(0.0)
    return read, state


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
            answer(data_of(handle))
        elif given["what"] == "withdraw":
            port.withdraw(held.pop(given["ticket"]))
            for tensor in tensors:
                tensor.fill_(-1)
            answer("withdrawn")
        elif given["what"] == "wait_note":
            waiting = True
        elif given["what"] == "begin_to_read":
            for tensor in tensors:
                tensor.zero_()
            read, state = begin_to_read(port, handle_of(given["handle"]), given["segments"])
            answer(state)
        elif given["what"] == "finish_reading":
            answer([read.poll(60.0), [float(tensor.double().mean()) for tensor in tensors]])
            read.release()


def main() -> None:
    given = json.loads(sys.argv[1])
    layout = KvLayout(**given["layout"])
    tensors = store(layout, given["num_segments"], given["seed"])
    serve(KvPort(tensors, layout), tensors)


if __name__ == "__main__":
    main()
