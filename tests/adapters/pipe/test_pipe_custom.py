"""Custom processors, ops, fusion rules and checks; the module's documented examples in our
words.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.pipe import (
    CompileError,
    Compiler,
    FusionRule,
    LogitsPipe,
    LogitsProcessor,
    Op,
    ParameterizedOp,
    Sample,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
)
from adapters.pipe.operators import (
    FusedProbsTopPSampleOp,
    FusedTemperatureSoftmaxOp,
    ProbsSampleOp,
    ProbsTopKOp,
    SoftmaxOp,
    TemperatureOp,
    TopPOp,
)

X = torch.tensor([[1.0, 2.0, 3.0, 4.0]])


class AddOp(ParameterizedOp):
    """Adds ``amount``; says that it takes it."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS
    run_time_names = frozenset({"amount"})

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor(tensor.data + self._get_param("amount", kwargs), self._validate_input_type(tensor))


class Add(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type is not TensorType.LOGITS:
            raise ValueError("Add is for logits")
        return [AddOp(**self.params)]


class FlipOp(Op):
    """Takes no parameters, and says so by its signature."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor) -> TaggedTensor:
        return TaggedTensor.logits(-tensor.data)


class SilentOp(Op):
    """Written without a word on what it takes."""

    IN, OUT = TensorType.LOGITS, TensorType.LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.logits(tensor.data * kwargs["factor"])


class Ops(LogitsProcessor):
    """A processor of the ops that it is given."""

    def __init__(self, *ops: Op) -> None:
        super().__init__()
        self.given = list(ops)

    def legalize(self, input_type: TensorType) -> list[Op]:
        if input_type is not self.given[0].IN:
            raise ValueError("not the type of the first op")
        return self.given


def test_a_custom_processor() -> None:
    pipe = LogitsPipe([Temperature(), Add(amount=1.0), Softmax()])
    assert torch.equal(pipe(X, temperature=2.0), (X / 2 + 1).softmax(-1))
    assert torch.equal(pipe(X, temperature=2.0, amount=X), (X / 2 + X).softmax(-1))
    assert repr(pipe.processors[1]) == "Add(amount=1.0)"
    with pytest.raises(ValueError, match="Required parameter 'amount' not provided for AddOp"):
        LogitsPipe([Add()])(X)


def test_a_processor_of_several_ops() -> None:
    pipe = LogitsPipe([Ops(TemperatureOp(temperature=2.0), SoftmaxOp()), Sample()])
    assert [type(op) for op in pipe.compiled_ops][:1] == [FusedTemperatureSoftmaxOp]


def test_names_that_custom_ops_take() -> None:
    with pytest.raises(ValueError, match=r"Unknown run-time parameter 'factor'; .* take: amount"):
        LogitsPipe([Add()])(X, amount=1.0, factor=2.0)
    with pytest.raises(ValueError, match="Unknown run-time parameter 'factor'"):
        LogitsPipe([Ops(FlipOp())])(X, factor=2.0)
    assert torch.equal(LogitsPipe([Ops(FlipOp())])(X), -X)
    assert torch.equal(LogitsPipe([Ops(SilentOp())])(X, factor=2.0), 2 * X)


def test_an_op_is_given_what_its_signature_has() -> None:
    """The parameters of a call are those of all ops, and an op without ``**kwargs`` has few."""

    class ShiftOp(Op):
        IN, OUT = TensorType.LOGITS, TensorType.LOGITS

        def __call__(self, tensor: TaggedTensor, shift: float = 0.0) -> TaggedTensor:
            return TaggedTensor.logits(tensor.data + shift)

    pipe = LogitsPipe([Ops(FlipOp(), ShiftOp()), Temperature(), Softmax()])
    assert torch.equal(pipe(X, temperature=2.0), (-X / 2).softmax(-1))
    assert torch.equal(pipe(X, temperature=2.0, shift=1.0), ((1 - X) / 2).softmax(-1))


@pytest.mark.parametrize("compile_", [True, False])
def test_a_top_k_op_of_ones_own_is_not_joint(compile_: bool) -> None:
    """`TopK` gives its op the flag; one that is made without it has none."""
    given = {"top_p": 0.9, "indices": torch.zeros(200, dtype=torch.int64)}
    drawn = [
        LogitsPipe([Softmax(), first, TopP(), Sample()], compile_)(
            X, generator=torch.Generator().manual_seed(3), **given
        )
        for first in (Ops(ProbsTopKOp(top_k=3)), TopK(top_k=3))
    ]
    assert torch.equal(*drawn)
    ops = compile_pipeline([ProbsTopKOp(top_k=3), TopPOp(), ProbsSampleOp()])
    assert [type(op) for op in ops] == [ProbsTopKOp, FusedProbsTopPSampleOp]


def test_nan_made_by_a_custom_op_is_refused_by_the_next() -> None:
    pipe = LogitsPipe([Add(amount=float("nan")), Softmax()])
    with pytest.raises(ValueError, match=r"^Error executing operator 1 \(SoftmaxOp\): row 0 holds NaN$"):
        pipe(X)


def test_legalize_and_compile_without_a_pipe() -> None:
    ops = legalize_processors([Temperature(temperature=2.0), Softmax()])
    (fused,) = compile_pipeline(ops)
    assert torch.equal(fused(TaggedTensor.logits(X)).data, (X / 2).softmax(-1))
    assert [type(op) for op in ops] == [TemperatureOp, SoftmaxOp], "the list given stays as it is"
    assert [type(op) for op in legalize_processors([TopK(top_k=1), Sample()], TensorType.PROBS)] != []


class HalfSoftmaxOp(Op):
    """The fused op of the custom rules: a softmax at temperature 2."""

    IN, OUT = TensorType.LOGITS, TensorType.PROBS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.probs((tensor.data / 2).softmax(-1))


def rule(pattern: tuple[type, ...], prio: int, guard: bool = True, fused: type[Op] = HalfSoftmaxOp) -> FusionRule:
    return FusionRule(pattern=pattern, guard=lambda window: guard, build=lambda window: fused(), prio=prio)


def first_op(*rules: FusionRule) -> type[Op]:
    pipe = LogitsPipe([Temperature(temperature=1.0), Softmax(), Sample()], custom_fusion_rules=list(rules))
    return type(pipe.compiled_ops[0])


def test_a_fusion_rule_needs_more_priority_than_the_built_in_one() -> None:
    pattern = (TemperatureOp, SoftmaxOp)
    assert first_op(rule(pattern, 100)) is FusedTemperatureSoftmaxOp
    assert first_op(rule(pattern, 101)) is HalfSoftmaxOp
    assert first_op(rule(pattern, 101, guard=False)) is FusedTemperatureSoftmaxOp


@pytest.mark.parametrize("prio", [-5, 0, 20, 100])
def test_a_rule_for_processors_always_wins(prio: int) -> None:
    assert first_op(rule((Temperature, Softmax), prio)) is HalfSoftmaxOp
    assert first_op(rule((Temperature, Softmax), prio), rule((TemperatureOp, SoftmaxOp), 1000)) is HalfSoftmaxOp
    assert first_op(rule((Temperature, Softmax), prio, guard=False)) is FusedTemperatureSoftmaxOp


def test_rules_for_processors_by_priority_then_in_order() -> None:
    class OtherOp(HalfSoftmaxOp):
        pass

    pattern = (Temperature, Softmax)
    assert first_op(rule(pattern, 1), rule(pattern, 1, fused=OtherOp)) is HalfSoftmaxOp
    assert first_op(rule(pattern, 1), rule(pattern, 2, fused=OtherOp)) is OtherOp


def test_guard_and_build_see_the_ops_of_the_window() -> None:
    seen = []

    def build(window: list[Op]) -> Op:
        seen.append([(type(op), getattr(op, "default_params", None)) for op in window])
        return HalfSoftmaxOp()

    for pattern, prio in (((Temperature, Softmax), 0), ((TemperatureOp, SoftmaxOp), 101)):
        fusion = FusionRule(pattern, lambda window: len(window) == 2, build, prio)
        pipe = LogitsPipe([Add(amount=1.0), Temperature(temperature=2.0), Softmax()], custom_fusion_rules=[fusion])
        assert [type(op) for op in pipe.compiled_ops] == [AddOp, HalfSoftmaxOp]
        assert torch.equal(pipe(X), ((X + 1) / 2).softmax(-1))
    assert seen == [[(TemperatureOp, {"temperature": 2.0}), (SoftmaxOp, {})]] * 2


def test_built_in_rules_still_fuse_beside_a_rule_for_processors() -> None:
    fusion = rule((Temperature, Softmax), 0)
    pipe = LogitsPipe([Temperature(), Softmax(), TopP(top_p=0.5), Sample()], custom_fusion_rules=[fusion])
    assert [type(op).__name__ for op in pipe.compiled_ops] == ["HalfSoftmaxOp", "FusedProbsTopPSampleOp"]


def test_a_rule_given_to_the_constructor_is_kept_for_later() -> None:
    pattern = (Temperature, Softmax)
    pipe = LogitsPipe([Temperature(), Softmax()], compile=False, custom_fusion_rules=[rule(pattern, 0)])
    pipe.compile()
    assert [type(op) for op in pipe.compiled_ops] == [HalfSoftmaxOp]
    pipe = LogitsPipe([Temperature(), Softmax()], compile=False)
    pipe.compile([rule(pattern, 0)])
    assert [type(op) for op in pipe.compiled_ops] == [HalfSoftmaxOp]


def test_rules_that_cannot_work() -> None:
    with pytest.raises(CompileError, match="needs the processors: compile a LogitsPipe"):
        compile_pipeline([TemperatureOp(), SoftmaxOp()], [rule((Temperature, Softmax), 0)])
    for pattern, names in (((), ""), ((Temperature, SoftmaxOp), "Temperature, SoftmaxOp"), ((int,), "int")):
        with pytest.raises(CompileError, match=rf"classes of ops or classes of processors, got \({names}\)"):
            Compiler().register_fusion_rule(rule(pattern, 0))
    with pytest.raises(ValueError, match="Compilation failed: Type mismatch at operator 1") as raised:
        LogitsPipe([Temperature(), Softmax(), TopP()], custom_fusion_rules=[rule((TemperatureOp,), 101)])
    assert isinstance(raised.value.__cause__, CompileError)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"custom_fusion_rules": [rule((Temperature, Softmax), 0), 3]},
            r"custom_fusion_rules\[1\] must be a FusionRule",
        ),
        ({"custom_fusion_rules": 3}, "custom_fusion_rules must be a list, got int"),
        ({"custom_validity_checks": [3]}, r"custom_validity_checks\[0\] must be a function of the ops, got int"),
        ({"custom_validity_checks": 3}, "custom_validity_checks must be a list, got int"),
    ],
)
def test_what_is_no_rule_or_check_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}"):
        LogitsPipe([Temperature(), Softmax()], compile=False, **given)
    with pytest.raises(TypeError, match=f"^{said}"):
        LogitsPipe([Temperature(), Softmax()]).compile(**given)
    with pytest.raises(TypeError, match=f"^{said}"):
        compile_pipeline([TemperatureOp(), SoftmaxOp()], **given)


def test_a_rule_that_matches_its_own_result_ends() -> None:
    again = FusionRule((FlipOp,), lambda window: True, lambda window: FlipOp(), 200)
    pipe = LogitsPipe([Ops(FlipOp(), FlipOp())], custom_fusion_rules=[again])
    assert torch.equal(pipe(X), X)


def test_a_subclass_of_a_built_in_op_is_not_fused_away() -> None:
    class FloorTopPOp(TopPOp):
        def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
            return super().__call__(tensor, **{**kwargs, "top_p": 0.01})

    pipe = LogitsPipe([Softmax(), Ops(FloorTopPOp()), Sample()])
    assert len(pipe.compiled_ops) == 3
    assert pipe(X).tolist() == [3]


def test_custom_checks() -> None:
    def at_most_two(ops: list[Op]) -> None:
        if len(ops) > 2:
            raise CompileError(f"{len(ops)} operators")

    def broken(ops: list[Op]) -> None:
        raise RuntimeError("not mine")

    chain = [Temperature(temperature=1.0), Softmax(), Sample()]
    with pytest.raises(ValueError, match=r"^Compilation failed: 3 operators$") as raised:
        LogitsPipe(chain, custom_validity_checks=[at_most_two])
    assert isinstance(raised.value.__cause__, CompileError)
    assert len(LogitsPipe(chain[:2], custom_validity_checks=[at_most_two]).compiled_ops) == 1
    with pytest.raises(RuntimeError, match="not mine"):
        LogitsPipe(chain, custom_validity_checks=[broken])
    pipe = LogitsPipe(chain, compile=False, custom_validity_checks=[at_most_two])
    with pytest.raises(ValueError, match="3 operators"):
        pipe.compile()


# The examples of the module's documentation, with other names and values.


def test_documented_pipe() -> None:
    pipe = LogitsPipe([Temperature(), Softmax(), TopP(), Sample()])
    tokens = pipe(torch.randn(8, 1000), temperature=0.7, top_p=0.9)
    assert tokens.shape == (8,)
    assert bool((tokens >= 0).all() and (tokens < 1000).all())


def test_documented_pipe_of_probabilities() -> None:
    probs = torch.randn(4, 32000).softmax(-1)
    tokens = LogitsPipe([TopK(), Sample()], input_type=TensorType.PROBS)(probs, top_k=40)
    kth = probs.topk(40).values[:, -1]
    assert bool((probs.gather(1, tokens.long().unsqueeze(1)).squeeze(1) >= kth).all())


def test_documented_custom_processor() -> None:
    class DocumentedOp(Op):
        IN = TensorType.LOGITS
        OUT = TensorType.LOGITS

        def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
            return tensor

    class DocumentedProcessor(LogitsProcessor):
        def __init__(self, **params: Any) -> None:
            super().__init__(**params)

        def legalize(self, input_type: TensorType) -> list[Op]:
            return [DocumentedOp(**self.params)]

    pipe = LogitsPipe([DocumentedProcessor()], input_type=TensorType.LOGITS)
    assert [type(op) for op in pipe.compiled_ops] == [DocumentedOp]
    # Its rule replaces temperature and softmax by an op from logits to logits: Sample then samples
    # from logits.
    fusion = FusionRule((Temperature, Softmax), lambda window: True, lambda window: DocumentedOp(), prio=20)
    pipe = LogitsPipe([Temperature(), Softmax(), Sample()], custom_fusion_rules=[fusion])
    assert [type(op).__name__ for op in pipe.compiled_ops] == ["DocumentedOp", "LogitsSampleOp"]
    assert pipe(torch.tensor([[0.0, 1e4]]), temperature=0.5).tolist() == [1]


@pytest.mark.parametrize("compile_", [True, False])
@pytest.mark.parametrize("input_type", [TensorType.LOGITS, TensorType.PROBS])
def test_documented_sample_with_a_top_k(input_type: TensorType, compile_: bool) -> None:
    """Its examples draw from two rows, some values of which are below 0, and pass ``top_k`` to a
    lone `Sample`.
    """
    x = torch.tensor([[2.9, 0.1, -0.3, -3.3, 1.1], [0.5, -0.1, -0.2, 0.7, 0.2]])
    pipe = LogitsPipe([Sample(deterministic=True)], compile_, input_type)
    assert pipe(x, top_k=1).tolist() == [0, 3]
    rows = torch.zeros(1000, dtype=torch.int64)
    assert set(pipe(x, top_k=2, indices=rows).tolist()) == {0, 4}
    drawn = pipe(x, top_k=2, generator=torch.Generator().manual_seed(3))
    explicit = LogitsPipe([TopK(), Sample()], compile_, input_type)
    assert torch.equal(drawn, explicit(x, top_k=2, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("compile_", [True, False])
def test_a_top_k_beside_another_truncation_is_an_unknown_name(compile_: bool) -> None:
    pipe = LogitsPipe([Softmax(), TopP(top_p=0.9), Sample()], compile_)
    with pytest.raises(ValueError, match="Unknown run-time parameter 'top_k'"):
        pipe(torch.zeros(2, 4), top_k=3)
    with pytest.raises(ValueError, match="top_k must be a positive integer"):
        LogitsPipe([Softmax(), Sample()], compile_)(torch.zeros(2, 4), top_k=0)
