"""Runs the checks and reports their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adapters.contract import Context
from adapters.interrupts import is_interrupt
from adapters.testing.registry import CHECKS, Check
from adapters.testing.settings import kept_settings
from adapters.testing.subject import CheckFailed, Subject


@dataclass(frozen=True, slots=True)
class CheckResult:
    """CheckResult of one check.

    Attributes:
        check: The check.
        failure: Reason for which the processor fails the check, None if it passes.
        remark: Information for the author.
    """

    check: Check
    failure: str | None = None
    remark: str | None = None


@dataclass(frozen=True)
class ConformanceReport:
    """Results of all checks of one class."""

    subject: Subject
    results: Sequence[CheckResult]

    @property
    def failures(self) -> list[CheckResult]:
        """Results of the failed checks."""
        return [result for result in self.results if result.failure is not None]

    @property
    def passed(self) -> bool:
        """True if no check failed."""
        return not self.failures

    def __str__(self) -> str:
        lines = [_line(result) for result in self.results]
        number, failed = len(self.results), len(self.failures)
        name = self.subject.original.__qualname__
        verdict = f"{name} passes all {number} checks" if self.passed else f"{name} fails {failed} of {number} checks"
        return "\n".join([*lines, verdict, ""])

    def raise_for_failures(self) -> None:
        """Raises `CheckFailed` with the whole report unless every check passed."""
        if not self.passed:
            raise CheckFailed(str(self))


def checks_named(names: Iterable[str] | None) -> list[Check]:
    """The checks with these names, in the usual order; all of them for None.

    Raises:
        KeyError: there is no such check; the message lists the known ones.
    """
    if names is None:
        return list(CHECKS)
    wanted = set(names)
    known = [check.name for check in CHECKS]
    unknown = wanted - set(known)
    if unknown:
        raise KeyError(f"unknown check {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    return [check for check in CHECKS if check.name in wanted]


def run_check(subject: Subject, check: Check) -> str | None:
    """Run one check; returns its remark.

    Raises:
        CheckFailed: the processor does not pass; anything that it raised is the cause.
    """
    try:
        with kept_settings(), torch.no_grad():  # as in engines
            return check.run(subject)
    except CheckFailed as failure:
        raise CheckFailed(f"{check.name}: {failure}. A processor that passes: {check.meaning}") from failure.__cause__
    except BaseException as error:  # the processor boundary: the code under test, which may exit
        if is_interrupt(error):
            raise
        text = f"{type(error).__name__}: {error}"
        raise CheckFailed(f"{check.name}: raised {text}. A processor that passes: {check.meaning}") from error


def check_processor(
    processor: type,
    examples: Sequence[Mapping[str, Any]] = (),
    *,
    context: Context | None = None,
    only: Iterable[str] | None = None,
) -> ConformanceReport:
    """Check one processor class.

    Args:
        processor: Argument of `Subject`.
        examples: Argument of `Subject`.
        context: Argument of `Subject`.
        only: Names of the checks to run, all by default.

    Raises:
        TypeError: the class is neither a processor nor a third-party one.
        KeyError: ``only`` holds an unknown name.
    """
    checks = checks_named(only)
    subject = Subject(processor, examples, context)
    return ConformanceReport(subject, [_result(subject, check) for check in checks])


def _result(subject: Subject, check: Check) -> CheckResult:
    try:
        return CheckResult(check, remark=run_check(subject, check))
    except CheckFailed as failure:
        return CheckResult(check, failure=str(failure))


def _line(result: CheckResult) -> str:
    if result.failure is not None:
        return f"FAIL  {result.failure}"
    remark = f"  ({result.remark})" if result.remark else ""
    return f"ok    {result.check.name}{remark}"
