"""Every built-in keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builtin_examples import EXAMPLES

from adapters.processors import BUILTINS

pytestmark = [pytest.mark.logits_processor(builtin, EXAMPLES.get(builtin.name, ())) for builtin in BUILTINS]


def test_builtin(processor_check: Callable[[], None]) -> None:
    processor_check()


def test_every_builtin_has_an_example() -> None:
    names = {builtin.name for builtin in BUILTINS}
    assert names <= EXAMPLES.keys()
