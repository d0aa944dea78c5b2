"""Logits processors inside stock vLLM: ``vllm serve --logits-processors adapters.vllm:Processors``.

`processors` has the class that vLLM loads; `admission` refuses what cannot be kept, in vLLM's
frontend; `rows` applies the chains to a batch, in its engine's process, which `indexed` and `slots`
find in its first and second model runner; `requests` reads what a request asks for and
decides who draws its tokens; `model` is what all requests to a model share;
`reports` keeps failures and receipts for `Extension`, a worker extension. `Middleware` lets
requests wait for their grammars in vLLM's server, before `admission`; `grammars` has both's limits,
and `prepared` asks vLLM's processes to compile ahead.

Only `processors` needs vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adapters.vllm.extension import Extension
    from adapters.vllm.middleware import Middleware
    from adapters.vllm.processors import Processors

__all__ = ["Extension", "Middleware", "Processors"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"adapters.vllm.{name.lower()}"), name)
