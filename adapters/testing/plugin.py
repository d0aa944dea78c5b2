"""The pytest plugin: one test for each check of a processor class.

::

    @pytest.mark.logits_processor(MyProcessor, examples=[{"n": 3}])
    def test_conformance(processor_check):
        processor_check()

The mark may be given several times, and takes the arguments of `adapters.testing.Subject`; if no
example is needed, give ``examples=[]``: pytest applies a mark with only a class argument to that
class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from adapters.testing.registry import Check
    from adapters.testing.subject import Subject

MARK = "logits_processor"
FIXTURE = "processor_check"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line(
        "markers",
        f"{MARK}(processor, examples=[], context=None): give the fixture {FIXTURE} each check of a logits processor",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each check of each marked class."""
    if FIXTURE not in metafunc.fixturenames:
        return
    from adapters.testing import CHECKS, Subject  # late: not every test session with this plugin needs torch

    marks = list(reversed(list(metafunc.definition.iter_markers(MARK))))
    if not marks:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} uses {FIXTURE} without @pytest.mark.{MARK}(MyProcessor)")
    subjects = [Subject(*mark.args, **mark.kwargs) for mark in marks]
    metafunc.parametrize(
        "_processor_and_check",
        [
            pytest.param((subject, check), id=f"{_name(subject)}-{check.name}")
            for subject in subjects
            for check in CHECKS
        ],
    )


def _name(subject: Subject) -> str:
    """Name of the processor; that of its class while it has none, which is a check's to report."""
    return str(getattr(subject.processor, "name", subject.original.__name__))


@pytest.fixture
def _processor_and_check() -> tuple[Subject, Check]:
    """Replaced by the parameters; defined so that pytest knows the name."""
    raise pytest.UsageError(f"{FIXTURE} needs @pytest.mark.{MARK}(MyProcessor)")


@pytest.fixture
def processor_check(_processor_and_check: tuple[Subject, Check]) -> Callable[[], None]:
    """Runs one check of one class and fails with its text."""
    subject, check = _processor_and_check

    def run() -> None:
        from adapters.testing import CheckFailed, run_check

        __tracebackhide__ = True
        try:
            run_check(subject, check)
        except CheckFailed as failure:
            pytest.fail(str(failure), pytrace=failure.__cause__ is not None)

    return run
