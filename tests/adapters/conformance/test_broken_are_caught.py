"""Each deliberately broken processor is caught, by the check that is about what is broken."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import broken_processors as broken
import numpy as np
import pytest
import torch

from adapters.contract import Processor
from adapters.testing import check_processor
from adapters.testing.settings import shared_settings

pytestmark = pytest.mark.slow

CAUGHT: dict[type[Processor], set[str]] = {
    broken.CountsCalls: {"double_call", "chunked_prefill", "replay"},
    broken.PromisesTooMuch: {"replay", "same_until"},
    broken.PromisesForEver: {"same_until"},
    broken.PromisesUnlessAToken: {"same_until"},
    broken.PromisesUntilItsArgument: {"same_until"},
    broken.HoldsTheNewestOnly: {"held_from"},
    broken.HoldsNothingAtTheEnd: {"held_from"},
    broken.HoldsMoreOnceRewound: {"held_from"},
    broken.ForgetsToReplay: {"rewind"},
    broken.SharesState: {"batch_invariance", "choices"},
    broken.ResurrectsMasked: {"runs", "masked_rows"},
    broken.LeavesNan: {"masked_rows"},
    broken.GrowsWithHistory: {"cost"},
    broken.Unbounded: {"bounds"},
    broken.RaisesOnArguments: {"arguments"},
    broken.TouchesBatchMates: {"row_isolation", "batch_invariance"},
    broken.WritesOutsideItsRow: {"in_place"},
    broken.NotInPlace: {"in_place"},
    broken.ReadsMoreThanItSays: {"reads", "lag"},
    broken.ReadsThePrompt: {"reads"},
    broken.AllowsPadding: {"padding"},
    broken.MasksEverything: {"runs"},
    broken.BiasAtMaskStage: {"edits"},
    broken.TossesGlobalCoins: {"determinism", "double_call"},
    broken.DoesNotPickle: {"pickling"},
    broken.RewindsWrongly: {"rewind"},
    broken.MiscountsOnEdit: {"double_call", "replay"},
    broken.ForcesBlindly: {"banned_tokens", "masked_rows"},
}


@pytest.mark.parametrize("processor", CAUGHT, ids=lambda processor: processor.name)
def test_broken(processor: type[Processor]) -> None:
    report = check_processor(processor, only=CAUGHT[processor])
    assert {result.check.name for result in report.failures} == CAUGHT[processor], str(report)


CHANGES: dict[str, Callable[[], object]] = {
    "torch's default data type, which all requests share, to torch.float64": (
        lambda: torch.set_default_dtype(torch.float64)
    ),
    "torch's precision of products, which all requests share, to medium": (
        lambda: torch.set_float32_matmul_precision("medium")
    ),
    "torch's deterministic mode, which all requests share, to True": lambda: torch.use_deterministic_algorithms(True),
    "torch's flushing of small numbers, which all requests share, to True": lambda: torch.set_flush_denormal(True),
    "numpy's handling of errors, which all requests share, to {'divide': 'raise'": lambda: np.seterr(all="raise"),
    "Python's recursion limit, which all requests share, to 2000": lambda: sys.setrecursionlimit(2000),
    "the working directory, which all requests share, to /": lambda: os.chdir("/"),
}


@pytest.mark.parametrize("told", CHANGES)
@pytest.mark.parametrize("only", [["determinism"], ["runs", "in_place", "determinism"]])
def test_a_changed_setting_is_caught_and_restored(told: str, only: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.ChangesSettings, "change", staticmethod(CHANGES[told]))
    before = shared_settings()
    failures = {one.check.name: str(one.failure) for one in check_processor(broken.ChangesSettings, only=only).failures}
    assert f"changed {told}" in failures["determinism"]
    assert shared_settings() == before


def test_a_changed_default_device_is_caught_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain itself sees it; a changed gradient mode it puts back."""
    monkeypatch.setattr(broken.ChangesSettings, "change", staticmethod(lambda: torch.set_default_device("meta")))
    report = check_processor(broken.ChangesSettings, only=["runs"])
    assert "sets torch's default device to meta" in str(report)
    assert torch.get_default_device() == torch.device("cpu")


@pytest.mark.parametrize("processor", [broken.Steering, broken.Shaping, broken.Takes], ids=lambda each: each.name)
def test_what_they_are_made_from_is_in_order(processor: type[Processor]) -> None:
    report = check_processor(processor)
    assert report.passed, str(report)


def test_the_messages_name_what_lies() -> None:
    report = check_processor(broken.HoldsTheNewestOnly, only=["held_from"])
    assert "takes back generated token" in str(report)
    assert "held_from held tokens from index" in str(report)
    report = check_processor(broken.PromisesForEver, only=["same_until"])
    assert "same_until() told that the edit stays until position" in str(report)
    assert "tokens later (random tokens) edit() is None instead of another Bias" in str(report)


def test_a_backtracking_processor_that_is_not_tried_is_told_so() -> None:
    class TakesNothing(broken.Takes):
        """Takes nothing back."""

        name = "takes_nothing"
        held_from = rewinds_to = None

    (result,) = check_processor(TakesNothing, only=["held_from"]).results
    assert result.remark == "took nothing back, so nothing was tried: give an example whose texts or ids it takes back"
