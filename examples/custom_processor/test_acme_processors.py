"""test_acme_processors.py"""

import pytest
from acme_processors import DigitLimit


@pytest.mark.logits_processor(DigitLimit, examples=[{}, {"tokens": 2}])
def test_conformance(processor_check):
    processor_check()
