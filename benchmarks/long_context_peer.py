"""A peer of `long_context.py`: ``python long_context_peer.py CHECKPOINT KV_TYPE TOKENS``.

Decodes behind prompts of up to ``TOKENS``, one at a time, with keys and values in ``KV_TYPE``:
`none` or `int8` of ours, `f16`, `bf16` or `q8_0` of llama.cpp. A task that is repeated goes on
behind the prompt that is still in the KV cache: ours by its prefix cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from workload import Reply, Task, serve

OURS = ("none", "int8")
COMPUTED = 8192
"""Tokens of a prompt whose keys and values llama.cpp computes; it would compute 128 k for hours, so
the others' are copies of these.
"""


def ours(checkpoint: Path, kv_type: str, tokens: int) -> Callable[[Task], Reply]:
    """The embedded engine."""
    import decode_ours

    from worker.engines.embedded import Engine

    plain = decode_ours.NO_DRAFTS
    engine = Engine(
        checkpoint,
        max_num_seqs=1,
        context_length=tokens,
        kv_cache_dtype=kv_type,
        speculative_config=plain,
        device="cpu",
    )
    print(f"long_context_peer.py: {decode_ours.made_by(engine)}", file=sys.stderr)
    return lambda task: decode_ours.answer(engine, task)


def llama(checkpoint: Path, kv_type: str, tokens: int) -> Callable[[Task], Reply]:
    """llama.cpp, on the checkpoint in GGUF."""
    import gguf
    from decode_llama import Llama, convert

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        convert(checkpoint, path)
        kind = int(gguf.GGMLQuantizationType[kv_type.upper()])
        model = Llama(path, int(os.environ["OMP_NUM_THREADS"]), tokens + COMPUTED, 2, kind, unified=True)
    held: tuple[Task, list[int]] | None = None

    def answer(task: Task) -> Reply:
        nonlocal held
        if held is None or held[0] != task:
            held = task, model.prefill_long(task.prompts()[0], COMPUTED)
        model.forget_from(task.prompt)
        return model.go_on(task, held[1])

    return answer


def main() -> None:
    checkpoint, kv_type, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    make = ours if kv_type in OURS else llama
    serve(lambda: make(checkpoint, kv_type, tokens))


if __name__ == "__main__":
    main()
