"""A stand-in for TensorRT-LLM on machines without a GPU: its LLM API by name, signature, default
and rule.

It decodes with the worker's embedded engine in a process of its own. `tests/contracts` compares it
with the facts.
"""

import sys

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.standin_switches import SWITCHES

__version__ = SWITCHES.version

__all__ = ["LLM", "DisaggregatedParams", "SamplingParams", "__version__"]

sys.stdout.write(f"[TensorRT-LLM] TensorRT LLM version: {__version__}\n")
sys.stdout.flush()
