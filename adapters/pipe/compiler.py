"""The compiler: type check, validity checks, fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from adapters.pipe.fusion_rules import FusionRule, get_default_fusion_rules
from adapters.pipe.legalization import legalize_one
from adapters.pipe.op import Op
from adapters.pipe.processors import LogitsProcessor
from adapters.pipe.types import TensorType
from adapters.pipe.validators import CompileError, ValidityCheck, get_default_validity_checks, type_chain_rule

T = TypeVar("T")


class Compiler:
    """Checks and fuses ops, with the built-in rules and checks and those registered."""

    def __init__(self) -> None:
        self.fusion_rules: list[FusionRule] = []
        self.processor_rules: list[FusionRule] = []
        self.validity_checks: list[ValidityCheck] = get_default_validity_checks()
        for rule in get_default_fusion_rules():
            self.register_fusion_rule(rule)

    def register_fusion_rule(self, rule: FusionRule) -> None:
        """Adds a rule after those of the same priority.

        Raises:
            CompileError: the pattern is empty, or not all of ops or all of processors.
        """
        rules = self.processor_rules if is_of_processors(rule) else self.fusion_rules
        rules.append(rule)
        rules.sort(key=lambda other: -other.prio)

    def register_validity_check(self, check: ValidityCheck) -> None:
        """Adds a check after the others."""
        self.validity_checks.append(check)

    def compile(self, ops: Sequence[Op]) -> list[Op]:
        """The fused ops; the list given stays as it is.

        Raises:
            CompileError: there are no ops, their types do not fit, a check refuses them, the fused
                ops do not fit, or a rule for processors is registered, which ops alone cannot
                match.
        """
        if not ops:
            raise CompileError("Cannot compile empty operator list")
        if self.processor_rules:
            raise CompileError("A fusion rule with a pattern of processors needs the processors: compile a LogitsPipe")
        return self._compile(list(ops))

    def compile_processors(
        self, processors: Sequence[LogitsProcessor], initial_type: TensorType, ops: Sequence[Op]
    ) -> list[Op]:
        """The fused ops of ``processors``, whose legalized ``ops`` the checks are made on.

        Rules for processors are applied first; what follows a processor that was fused is legalized
        for the type that the fused op returns. Raises as `compile`, and what `legalize_processors`
        raises.
        """
        if not self.processor_rules:
            return self.compile(ops)
        self._check(list(ops))
        fused = self._fuse_processors(list(processors), initial_type)
        type_chain_rule(fused)
        return self._fuse_all(fused)

    def _compile(self, ops: list[Op]) -> list[Op]:
        self._check(ops)
        return self._fuse_all(ops)

    def _check(self, ops: list[Op]) -> None:
        type_chain_rule(ops)
        for check in self.validity_checks:
            check(ops)

    def _fuse_all(self, ops: list[Op]) -> list[Op]:
        index = 0
        while index < len(ops):
            rule = self._rule_at(ops, index)
            if rule is None:
                index += 1
                continue
            span = len(rule.pattern)
            ops[index : index + span] = [rule.build(ops[index : index + span])]
            index = index + 1 if span == 1 else max(index - 1, 0)  # a rule that shortens nothing must end
        type_chain_rule(ops)
        return ops

    def _rule_at(self, ops: list[Op], index: int) -> FusionRule | None:
        for rule in self.fusion_rules:
            window = ops[index : index + len(rule.pattern)]
            if _matches(window, rule.pattern) and rule.guard(window):
                return rule
        return None

    def _fuse_processors(self, processors: list[LogitsProcessor], initial_type: TensorType) -> list[Op]:
        ops: list[Op] = []
        index = 0
        while index < len(processors):
            input_type = ops[-1].OUT if ops else initial_type
            span, fused = self._fused_at(processors, index, input_type)
            ops += fused
            index += span
        return ops

    def _fused_at(self, processors: list[LogitsProcessor], index: int, input_type: TensorType) -> tuple[int, list[Op]]:
        """Number of processors that a rule fuses from ``index`` on, and the ops made of them."""
        for rule in self.processor_rules:
            window = processors[index : index + len(rule.pattern)]
            if _matches(window, rule.pattern):
                ops = _legalized(window, index, input_type)
                if rule.guard(list(ops)):
                    return len(window), [rule.build(ops)]
        return 1, legalize_one(index, processors[index], input_type)


def compile_pipeline(
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """Checks and fuses ``ops``; raises `CompileError` as `Compiler.compile`."""
    return _compiler(custom_fusion_rules, custom_validity_checks).compile(ops)


def compile_processors(
    processors: Sequence[LogitsProcessor],
    initial_type: TensorType,
    ops: Sequence[Op],
    custom_fusion_rules: Sequence[FusionRule] | None = None,
    custom_validity_checks: Sequence[ValidityCheck] | None = None,
) -> list[Op]:
    """Compile with processor rules too (`Compiler.compile_processors`); else `compile_pipeline`."""
    compiler = _compiler(custom_fusion_rules, custom_validity_checks)
    return compiler.compile_processors(processors, initial_type, ops)


def is_of_processors(rule: FusionRule) -> bool:
    """Whether the pattern is of processors.

    Raises:
        CompileError: it is empty, or not all of ops or all of processors.
    """
    for kind, answer in ((Op, False), (LogitsProcessor, True)):
        if rule.pattern and all(isinstance(cls, type) and issubclass(cls, kind) for cls in rule.pattern):
            return answer
    names = ", ".join(getattr(cls, "__name__", repr(cls)) for cls in rule.pattern)
    raise CompileError(f"The pattern of a fusion rule must be classes of ops or classes of processors, got ({names})")


def listed_rules(given: Sequence[FusionRule] | None) -> list[FusionRule]:
    """``custom_fusion_rules`` as a list. Raises `TypeError` for what is none."""
    return _listed("custom_fusion_rules", given, "a FusionRule", lambda item: isinstance(item, FusionRule))


def listed_checks(given: Sequence[ValidityCheck] | None) -> list[ValidityCheck]:
    """``custom_validity_checks`` as a list. Raises `TypeError` for what is none."""
    return _listed("custom_validity_checks", given, "a function of the ops", callable)


def _listed(name: str, given: Sequence[T] | None, kind: str, is_right: Callable[[object], bool]) -> list[T]:
    if given is not None and not isinstance(given, Sequence):
        raise TypeError(f"{name} must be a list, got {type(given).__name__}")
    items = list(given or ())
    for index, item in enumerate(items):
        if not is_right(item):
            raise TypeError(f"{name}[{index}] must be {kind}, got {type(item).__name__}")
    return items


def _compiler(rules: Sequence[FusionRule] | None, checks: Sequence[ValidityCheck] | None) -> Compiler:
    compiler = Compiler()
    for rule in listed_rules(rules):
        compiler.register_fusion_rule(rule)
    for check in listed_checks(checks):
        compiler.register_validity_check(check)
    return compiler


def _matches(window: Sequence[object], pattern: tuple[type, ...]) -> bool:
    return len(window) == len(pattern) and all(map(isinstance, window, pattern))


def _legalized(window: list[LogitsProcessor], index: int, input_type: TensorType) -> list[Op]:
    ops: list[Op] = []
    for offset, processor in enumerate(window):
        ops += legalize_one(index + offset, processor, ops[-1].OUT if ops else input_type)
    return ops
