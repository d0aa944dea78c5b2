"""Errors of log probabilities in float32 against float64: ours, and those of transformers.

    .venv/bin/python benchmarks/logprob_errors.py  # the default model; ten minutes
    .venv/bin/python benchmarks/logprob_errors.py --model DIR --tokens 128 --windows 1

All three have the same weights, and score each token of windows of Python's language reference from
those before it. `exact_forward` is transformers' own code with every number in float64: `double()`
alone is not that, since norms, RoPE's angles and softmax are computed in float32 there.

Below, what each operation brings: the forward pass in float64, in which that operation alone is
computed in float32, from inputs rounded to float32, by torch's kernels and by ours.
"""

from __future__ import annotations

import argparse
import copy
import os
import pydoc_data.topics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Operation = Callable[[torch.Tensor], torch.Tensor]


class InFloat64(TorchFunctionMode):
    """Makes float64 of every float32 that a model's code asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        named = {key: _wider(value) for key, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "float":
            return args[0].double()
        return func(*map(_wider, args), **named)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.inference_mode()
def exact_forward(policy: Any, ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities of ``ids[1:]``, float64 ``[n - 1]``, computed in float64 throughout.

    Args:
        policy: transformers' causal language model with weights in float64.
        ids: Token ids of a text.
    """
    with InFloat64():
        return plain_forward(policy, ids)


@torch.inference_mode()
def plain_forward(policy: Any, ids: Sequence[int]) -> torch.Tensor:
    """The same as transformers computes them with the model's own data type, softmax in float64."""
    text = torch.tensor([list(ids)])
    logits: torch.Tensor = policy(input_ids=text, use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, text[0, 1:, None])[:, 0]


@contextmanager
def replaced(policy: Any, kind: str, kernels: str) -> Iterator[None]:
    """One kind of operation of a model in float64 is computed in float32, by torch or by ``ours``.

    Args:
        policy: transformers' causal language model with weights in float64.
        kind: One of `KINDS`.
        kernels: ``torch`` or ``ours``.
    """
    before = {}
    try:
        for name, module in policy.named_modules():
            if KINDS[kind](name, module):
                before[module] = module.forward
                module.forward = _in_float32(copy.deepcopy(module).float(), kernels)
        yield
    finally:
        for module, forward in before.items():
            module.forward = forward


def _is_linear(name: str, module: Any) -> bool:
    return isinstance(module, torch.nn.Linear)


KINDS: dict[str, Callable[[str, Any], bool]] = {
    "linear layers of attention": lambda name, module: _is_linear(name, module) and ".self_attn." in name,
    "gate and up projections": lambda name, module: (
        _is_linear(name, module) and name.endswith(("gate_proj", "up_proj"))
    ),
    "down projections": lambda name, module: _is_linear(name, module) and name.endswith("down_proj"),
    "LM head": lambda name, module: _is_linear(name, module) and name == "lm_head",
    "norms": lambda name, module: type(module).__name__.endswith("RMSNorm"),
    "RoPE": lambda name, module: type(module).__name__.endswith("RotaryEmbedding"),
    "activations": lambda name, module: type(module).__name__.startswith("SiLU"),
}
"""Kinds of operations, by which modules compute them."""


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _wide(value: Any) -> Any:
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value.double()


def _in_float32(module: Any, kernels: str) -> Operation:
    """What a module computes in float32 of float64, also within `InFloat64`."""
    compute: Operation = module
    if kernels == "ours":
        from worker.engines.embedded.model.kernels import choose_kernels

        ours = choose_kernels("native", torch.device("cpu"), torch.float32)
        if isinstance(module, torch.nn.Linear):
            gemm = ours.gemm(module.weight.detach(), None if module.bias is None else module.bias.detach())

            def compute(x: torch.Tensor) -> torch.Tensor:
                return gemm(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

        elif hasattr(module, "variance_epsilon"):

            def compute(x: torch.Tensor) -> torch.Tensor:
                return ours.rms_norm(x, module.weight.detach(), module.variance_epsilon)

    def outside(*args: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return _wide(compute(*map(_narrow, args), **named))

    return outside


def ours_can(kind: str) -> bool:
    """Whether a kernel of ours computes that kind alone."""
    return kind not in ("RoPE", "activations")


def windows_of(tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """The first windows of a text of the standard library."""
    ids = tokenizer("\n".join(pydoc_data.topics.topics.values()), add_special_tokens=False).input_ids
    return [ids[start : start + length] for start in range(0, count * length, length)]


def row(name: str, errors: torch.Tensor) -> str:
    """A line of a table: the largest, the mean and the root mean square error."""
    size = errors.abs()
    return f"{name:34} {size.max():9.2e} {size.mean():9.2e} {errors.square().mean().sqrt():9.2e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a checkpoint; the default model's, dequantised")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=4, help="number of windows")
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from worker.engines.embedded.training import ExactLogprobs, Rollout
    from worker.models import model_cache, prepare_default_model

    path = options.model or prepare_default_model(model_cache(os.environ), print, keeps_blocks=False)
    maker: Any = AutoModelForCausalLM
    policy = maker.from_pretrained(path, dtype=torch.float32).eval()
    windows = windows_of(AutoTokenizer.from_pretrained(path), options.tokens, options.windows)
    double = copy.deepcopy(policy).double()
    truth = torch.cat([exact_forward(double, ids) for ids in windows])
    ours = ExactLogprobs(policy, path).values([Rollout(ids[:1], ids[1:]) for ids in windows])
    mine = torch.cat([torch.tensor(each, dtype=torch.float64) for each in ours])
    theirs = torch.cat([plain_forward(policy, ids) for ids in windows])
    half = torch.cat([plain_forward(double, ids) for ids in windows])
    print(f"{path.name}, {len(truth)} log probabilities\n{'':34} {'largest':>9} {'mean':>9} {'rms':>9}")
    print(row("ours - float64", mine - truth))
    print(row("transformers - float64", theirs - truth))
    print(row("ours - transformers", mine - theirs))
    print(row("transformers' double() - float64", half - truth))
    for kind in KINDS:
        for kernels in ("torch", "ours") if ours_can(kind) else ("torch",):
            with replaced(double, kind, kernels):
                found = torch.cat([exact_forward(double, ids) for ids in windows])
            print(row(f"{kind}, {kernels}", found - truth), flush=True)


if __name__ == "__main__":
    main()
