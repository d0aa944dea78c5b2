"""Conformance kit: checks that a processor keeps the contract, on any engine and in any batch.

``python -m adapters check module:Class``, or in a test::

    @pytest.mark.logits_processor(MyProcessor, examples=[{"n": 3}])
    def test_conformance(processor_check):
        processor_check()

Needs Hypothesis. Everything runs on the CPU, on a small tokenizer of the kit's own.
"""

# The order of these imports is the order of the checks.
from adapters.testing import check_arguments, check_rows, check_history, check_promises, check_cost  # isort: skip
from adapters.testing.kit_model import kit_context, kit_vocabulary
from adapters.testing.registry import CHECKS, Check
from adapters.testing.report import CheckResult, ConformanceReport, check_processor, run_check
from adapters.testing.subject import Case, CheckFailed, Subject

__all__ = [
    "CHECKS",
    "Case",
    "Check",
    "CheckFailed",
    "CheckResult",
    "ConformanceReport",
    "Subject",
    "check_arguments",
    "check_cost",
    "check_history",
    "check_processor",
    "check_promises",
    "check_rows",
    "kit_context",
    "kit_vocabulary",
    "run_check",
]
