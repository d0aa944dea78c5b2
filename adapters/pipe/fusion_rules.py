"""Fusion rules: which adjacent ops become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from adapters.pipe import operators as o
from adapters.pipe.op import Op, ParameterizedOp


class FusionRule(NamedTuple):
    """Adjacent ops or processors that become one op.

    Attributes:
        pattern: Classes of the window: all classes of ops, or all classes of processors.
        guard: Whether to fuse, given the ops of the window (of the matched processors).
        build: Makes the fused op of the same window.
        prio: Rules of higher priority are tried first at each position. Built-in rules have 10 or
            100 and precede custom ones of the same priority. Patterns of processors are matched
            before all others.
    """

    pattern: tuple[type, ...]
    guard: Callable[[list[Op]], bool]
    build: Callable[[list[Op]], Op]
    prio: int = 0


def get_default_fusion_rules() -> list[FusionRule]:
    """The built-in rules, by priority."""
    return [
        _rule((o.TemperatureOp, o.SoftmaxOp), o.FusedTemperatureSoftmaxOp, 100),
        joint_rule(),
        _rule((o.ProbsTopKOp, o.ProbsSampleOp), o.FusedProbsTopKSampleOp, 10),
        _rule((o.TopPOp, o.ProbsSampleOp), o.FusedProbsTopPSampleOp, 10),
        _rule((o.MinPOp, o.ProbsSampleOp), o.FusedProbsMinPSampleOp, 10),
    ]


def joint_rule() -> FusionRule:
    """Joint top-k and top-p on one distribution; part of a pipe's meaning, compiled or not."""
    pattern = (o.ProbsTopKOp, o.TopPOp, o.ProbsSampleOp)
    return _rule(
        pattern, o.FusedProbsTopKTopPSampleOp, 100, lambda window: _parameters(window).get("joint_topk_topp", False)
    )


def _rule(
    pattern: tuple[type[o.BuiltinOp], ...],
    fused: type[o.BuiltinOp],
    prio: int,
    condition: Callable[[list[Op]], bool] = lambda window: True,
) -> FusionRule:
    def guard(window: list[Op]) -> bool:
        # A subclass of a built-in op may behave differently, so it is never fused.
        return all(type(op) is cls for op, cls in zip(window, pattern, strict=True)) and condition(window)

    return FusionRule(pattern, guard, lambda window: fused(**_parameters(window)), prio)


def _parameters(window: list[Op]) -> dict[str, Any]:
    """All parameters given to the ops of a window; no two built-in ops of one share a name."""
    merged: dict[str, Any] = {}
    for op in window:
        if isinstance(op, ParameterizedOp):
            merged.update(op.default_params)
    return merged
