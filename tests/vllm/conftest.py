"""Settings of vLLM's engine, which runs in this process; only where vLLM is installed."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path += [
    str(TESTS / folder)
    for folder in ("golden", "engines", "adapters/vllm", "adapters/conformance", "e2e", "launch", "clients")
]

POLICY = Path(tempfile.mkdtemp(prefix="vllm-policy-")) / "policy.yaml"
POLICY.write_text("keys: {kit: {env: KIT_KEY}}\n", encoding="utf-8")

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "KIT_KEY": "00112233445566778899aabbccddeeff",
    "DLW_PROCESSOR_POLICY": str(POLICY),
    "DLW_LOGITS_PROCESSOR": ",".join(
        [
            "dynamo/fatigue=vllm_stand_in:Fatigue",
            "huggingface/repetition_penalty=transformers:RepetitionPenaltyLogitsProcessor",
            "huggingface/synthid=transformers:SynthIDTextWatermarkLogitsProcessor",
            "acme/raises=third_parties:RaisesAtTheThird",
            "acme/fixed=third_parties:Fixed",
        ]
    ),
}

with warnings.catch_warnings(action="ignore"):  # vLLM's own, and of what it imports
    from engine import close_shared, shared
    from vllm import LLM

    import adapters.vllm.processors  # noqa: F401


@pytest.fixture
def llm() -> LLM:
    """SmolLM2 in the engine that tests share."""
    return shared()


@pytest.fixture(scope="session", autouse=True)
def _ended() -> Iterator[None]:
    yield
    close_shared()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))
