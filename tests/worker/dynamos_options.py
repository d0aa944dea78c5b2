"""Prints the options of one of Dynamo's workers as JSON: ``python dynamos_options.py trtllm|vllm``.

Run in a process of its own: neither package can be imported without its engine, so that their
modules of options are, by themselves, with a double of what they ask TensorRT-LLM for.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SIZES = ("max_batch_size", "max_num_tokens", "max_seq_len", "max_beam_width")
"""Options whose defaults are TensorRT-LLM's."""


def package(name: str) -> Path:
    """The folder of ``dynamo.NAME``, whose modules can now be imported without its own code."""
    spec = importlib.util.find_spec(f"dynamo.{name}")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    module = ModuleType(f"dynamo.{name}")
    module.__path__ = list(spec.submodule_search_locations)
    module.__dict__["__version__"] = "0"
    sys.modules[module.__name__] = module
    return Path(module.__path__[0])


def described(action: argparse.Action) -> dict[str, Any]:
    return {
        "flags": action.option_strings,
        "variables": re.findall(r"^env var: (\w+)", action.help or "", re.MULTILINE),
        "takes": "switch" if action.nargs == 0 else "value" if action.nargs in (None, "?") else "values",
        "choices": [str(each) for each in action.choices or ()],
    }


def main(name: str) -> None:
    llmapi = ModuleType("tensorrt_llm.llmapi")
    sizes = {each: SimpleNamespace(default=None) for each in SIZES}
    llmapi.__dict__["BuildConfig"] = SimpleNamespace(model_fields=sizes)
    sys.modules |= {"tensorrt_llm": ModuleType("tensorrt_llm"), "tensorrt_llm.llmapi": llmapi}
    folder = package(name)
    shared = importlib.import_module("dynamo.common.configuration.groups.runtime_args")
    router = importlib.import_module("dynamo.common.configuration.groups.router_args")
    own = importlib.import_module(f"dynamo.{name}.backend_args")
    parser = argparse.ArgumentParser(add_help=False)
    shared.DynamoRuntimeArgGroup().add_arguments(parser)
    (own.DynamoTrtllmArgGroup if name == "trtllm" else own.DynamoVllmArgGroup)().add_arguments(parser)
    if hasattr(router, "add_worker_router_arguments"):  # since 1.6
        routing = argparse.ArgumentParser(add_help=False)
        router.add_worker_router_arguments(routing)
        parser._actions += routing._actions
    options = [described(each) for each in parser._actions if each.option_strings != ["--version"]]
    sources = "".join(
        each.read_text(encoding="utf-8")
        for each in sorted(set(folder.rglob("*.py")) - set(folder.rglob("tests/**/*.py")))
    )
    variables = sorted(set(re.findall(rf"\bDYN_{name.upper()}_[A-Z0-9_]+\b", sources)))
    sys.stdout.write(json.dumps({"options": options, "variables": variables}))


if __name__ == "__main__":
    main(sys.argv[1])
