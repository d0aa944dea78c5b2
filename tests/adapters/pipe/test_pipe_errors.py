"""Every error of a pipe, by its text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adapters.pipe import (
    CompileError,
    Compiler,
    LegalizationError,
    LogitsPipe,
    LogitsProcessor,
    MinP,
    Op,
    ParameterizedOp,
    Sample,
    Shaping,
    Softmax,
    TaggedTensor,
    Temperature,
    TensorType,
    TopK,
    TopP,
    compile_pipeline,
    legalize_processors,
)
from adapters.pipe.legalization import infer_initial_type, validate_processor_chain
from adapters.pipe.operators import LogitsSampleOp, MinPOp, ProbsSampleOp, SoftmaxOp, TemperatureOp, TopPOp
from adapters.pipe.validators import validate_pipeline

LOGITS, PROBS = TensorType.LOGITS, TensorType.PROBS
X = torch.zeros(2, 4)
UNIFORM = torch.full((2, 4), 0.25)


def test_no_processors() -> None:
    with pytest.raises(ValueError, match=r"^Pipeline cannot be empty$"):
        LogitsPipe([])
    with pytest.raises(LegalizationError, match=r"^Cannot legalize empty processor list$"):
        legalize_processors([])
    with pytest.raises(LegalizationError, match=r"^Processor chain cannot be empty$"):
        validate_processor_chain([])
    with pytest.raises(CompileError, match=r"^Cannot compile empty operator list$"):
        compile_pipeline([])
    with pytest.raises(CompileError, match=r"^Pipeline cannot be empty$"):
        validate_pipeline([])


@pytest.mark.parametrize("first", [TopK(), Sample()])
def test_the_input_type_cannot_be_inferred(first: LogitsProcessor) -> None:
    with pytest.raises(ValueError) as raised:
        LogitsPipe([first])
    assert str(raised.value) == (
        f"Pipeline creation failed: Cannot infer input type: {type(first).__name__} can accept both LOGITS and PROBS. "
        "Please specify input_type explicitly when creating the LogitsPipe."
    )
    assert isinstance(raised.value.__cause__, LegalizationError)


class Nowhere(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        raise ValueError("nowhere")


class NoOps(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        return []


class Broken(LogitsProcessor):
    def legalize(self, input_type: TensorType) -> list[Op]:
        raise TypeError("broken")


FAILED = "Pipeline creation failed: Failed to legalize processor"
ORDERS: list[tuple[list[LogitsProcessor], TensorType | None, str]] = [
    ([TopK(), TopP()], LOGITS, f"{FAILED} 1 (TopP): TopP can only be applied to PROBS, got LOGITS"),
    ([TopK(), MinP()], LOGITS, f"{FAILED} 1 (MinP): MinP can only be applied to PROBS, got LOGITS"),
    ([Softmax(), Softmax()], None, f"{FAILED} 1 (Softmax): Softmax can only be applied to LOGITS, got PROBS"),
    (
        [Softmax(), Temperature()],
        None,
        f"{FAILED} 1 (Temperature): Temperature can only be applied to LOGITS, got PROBS",
    ),
    ([Softmax(), Sample(), TopK()], None, f"{FAILED} 2 (TopK): TopK cannot be applied to INDICES"),
    ([Softmax(), Sample(), Sample()], None, f"{FAILED} 2 (Sample): Sampling cannot be applied to INDICES"),
    ([Softmax(), Sample(), TopP()], None, f"{FAILED} 2 (TopP): TopP can only be applied to PROBS, got INDICES"),
    ([Softmax(), NoOps()], None, f"{FAILED} 1 (NoOps): Processor NoOps produced no ops"),
    ([Temperature(), Broken()], None, f"{FAILED} 1 (Broken): broken"),
    (
        [Nowhere()],
        None,
        "Pipeline creation failed: Processor Nowhere cannot accept standard pipeline inputs (LOGITS or PROBS)",
    ),
]


@pytest.mark.parametrize(("processors", "input_type", "message"), ORDERS)
def test_chains_that_do_not_fit(processors: list[LogitsProcessor], input_type: TensorType | None, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        LogitsPipe(processors, input_type=input_type)
    assert str(raised.value) == message
    assert isinstance(raised.value.__cause__, LegalizationError)


def test_a_processors_own_error_in_type_inference_is_unchanged() -> None:
    with pytest.raises(TypeError, match=r"^broken$"):
        LogitsPipe([Broken()])
    assert infer_initial_type([]) is LOGITS
    validate_processor_chain([Softmax(), TopP()])


class FromIndices(Op):
    IN, OUT = TensorType.INDICES, TensorType.INDICES

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return tensor


class AfterSampling(FromIndices):
    """Takes what sampling returns."""


def test_types_of_ops_that_do_not_fit() -> None:
    with pytest.raises(CompileError) as raised:
        compile_pipeline([SoftmaxOp(), SoftmaxOp()])
    assert str(raised.value) == (
        "Type mismatch at operator 1 (SoftmaxOp). Expected input type: PROBS, but operator accepts: LOGITS. "
        "Previous operator output: PROBS"
    )
    with pytest.raises(CompileError) as raised:
        Compiler().compile([FromIndices()])
    assert str(raised.value) == (
        "First operator (FromIndices) cannot accept standard pipeline inputs. Expected LOGITS or PROBS, "
        "but operator accepts: INDICES"
    )


class Unsoftmax(Op):
    IN, OUT = PROBS, LOGITS

    def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
        return TaggedTensor.logits(tensor.data.log())


def test_validity_checks() -> None:
    with pytest.raises(CompileError) as raised:
        compile_pipeline([SoftmaxOp(), Unsoftmax(), SoftmaxOp()])
    assert str(raised.value) == "Multiple Softmax operators found. Only one Softmax is allowed per pipeline."
    with pytest.raises(CompileError) as raised:
        compile_pipeline([LogitsSampleOp(), AfterSampling()])
    assert str(raised.value) == (
        "No operator may follow one that outputs Indices. Found AfterSampling after LogitsSampleOp which outputs "
        "Indices."
    )
    with pytest.raises(CompileError, match="No operator may follow"):
        validate_pipeline([ProbsSampleOp(), AfterSampling()])
    validate_pipeline([SoftmaxOp(), TopPOp()], [lambda ops: None])


def test_an_op_without_types() -> None:
    class Untyped(ParameterizedOp):
        def __call__(self, tensor: TaggedTensor, **kwargs: Any) -> TaggedTensor:
            return tensor

    with pytest.raises(ValueError, match=r"^Operator Untyped must define IN and OUT tensor types$"):
        Untyped()


def run_error(processors: list[LogitsProcessor], x: Any, input_type: TensorType | None = None, **call: Any) -> str:
    """The text of the error, which is the same with and without compilation but for the op."""
    with pytest.raises(ValueError) as raised:
        LogitsPipe(processors, input_type=input_type)(x, **call)
    return str(raised.value)


def test_a_wrong_tag() -> None:
    assert run_error([Softmax()], TaggedTensor.probs(X)) == (
        "Error executing operator 0 (SoftmaxOp): Operator SoftmaxOp cannot accept input type PROBS. Expected: LOGITS"
    )


@pytest.mark.parametrize(
    ("processor", "x", "op", "name"),
    [
        (Temperature(), X, "TemperatureOp", "temperature"),
        (TopK(), UNIFORM, "ProbsTopKOp", "top_k"),
        (TopP(), UNIFORM, "TopPOp", "top_p"),
        (MinP(), UNIFORM, "MinPOp", "min_p"),
    ],
)
def test_a_missing_parameter(processor: LogitsProcessor, x: torch.Tensor, op: str, name: str) -> None:
    input_type = PROBS if x is UNIFORM else None
    expected = f"Error executing operator 0 ({op}): Required parameter '{name}' not provided for {op}"
    assert run_error([processor], x, input_type) == expected
    fused = run_error([Temperature(), Softmax()], X)
    assert fused.endswith("Required parameter 'temperature' not provided for FusedTemperatureSoftmaxOp")


NAN, INF = float("nan"), float("inf")
BAD_SCALARS: dict[str, tuple[type[LogitsProcessor], list[Any], str]] = {
    "temperature": (
        Temperature,
        [0, 0.0, -1.0, NAN, INF, True, None, "a", 1j],
        "Temperature must be positive float or a tensor array",
    ),
    "top_k": (TopK, [0, -1, 1.0, True, None, "a"], "top_k must be a positive integer or a tensor array"),
    "top_p": (TopP, [0, -0.1, 1.1, NAN, True, None, "a"], "top_p must be float in (0, 1] or a tensor array"),
    "min_p": (MinP, [0, -0.1, 1.1, NAN, True, None, "a"], "min_p must be float in (0, 1] or a tensor array"),
}


@pytest.mark.parametrize("name", BAD_SCALARS)
def test_scalars_out_of_range(name: str) -> None:
    processor, values, message = BAD_SCALARS[name]
    input_type = LOGITS if processor is Temperature else PROBS
    x = X if processor is Temperature else UNIFORM
    for value in values:
        pipe = LogitsPipe([processor()], input_type=input_type)
        with pytest.raises(ValueError) as raised:
            pipe(x, **{name: value})
        assert str(raised.value).endswith(f"Op): {message}"), value
        assert str(raised.value.__cause__) == message


BAD_TENSORS: dict[str, tuple[type[LogitsProcessor], list[torch.Tensor]]] = {
    "temperature": (Temperature, [torch.tensor([1.0, 0.0]), torch.tensor([1.0, NAN]), torch.tensor([1.0, -INF])]),
    "top_k": (TopK, [torch.tensor([1, 0])]),
    "top_p": (TopP, [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.5]), torch.tensor([1.0, NAN])]),
    "min_p": (MinP, [torch.tensor([1.0, -0.5]), torch.tensor([1.0, 1.5]), torch.tensor([1.0, NAN])]),
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_are_checked_as_well(name: str) -> None:
    processor, values = BAD_TENSORS[name]
    input_type = LOGITS if processor is Temperature else PROBS
    x = X if processor is Temperature else UNIFORM
    pipe = LogitsPipe([processor()], input_type=input_type)
    message = BAD_SCALARS[name][2]
    for value in values:
        with pytest.raises(ValueError) as raised:
            pipe(x, **{name: value})
        assert str(raised.value.__cause__) == f"{message}, got {value[1].item()} for row 1"
    with pytest.raises(ValueError, match=r"got a tensor of torch\.bool"):
        pipe(x, **{name: torch.tensor([True, True])})
    shapes = {
        (): "Expected a 1D tensor of shape (batch_size,) or scalar for the sampling parameter, "
        "but got a 0-dimensional tensor.",
        (2, 4): "Expected a 1D tensor or scalar for the sampling parameter, but got a 2D tensor.",
        (3,): "Sampling parameter tensor batch size mismatch: expected length 2 to match the reference tensor batch "
        "size, but got length 3.",
    }
    for shape, text in shapes.items():
        with pytest.raises(ValueError) as raised:
            pipe(x, **{name: torch.ones(shape, dtype=torch.int32)})
        assert str(raised.value.__cause__) == text


def test_top_k_in_floats() -> None:
    message = run_error([TopK()], UNIFORM, PROBS, top_k=torch.tensor([1.0, 2.0]))
    assert message.endswith("top_k must be a positive integer or a tensor array, got a tensor of torch.float32")


def test_min_p_may_be_off_for_some_rows() -> None:
    kept = LogitsPipe([MinP()])(torch.tensor([[0.9, 0.1]] * 2), min_p=torch.tensor([0.0, 0.5]))
    assert kept.tolist() == [[pytest.approx(0.9), pytest.approx(0.1)], [1.0, 0.0]]


@pytest.mark.parametrize("compile_", [True, False])
def test_names_that_no_op_takes(compile_: bool) -> None:
    pipe = LogitsPipe([Temperature(), Softmax(), TopP(top_p=0.5)], compile=compile_)
    with pytest.raises(ValueError) as raised:
        pipe(X, temperature=1.0, top_k=3)
    assert str(raised.value) == (
        "Unknown run-time parameter 'top_k'; the operators of this pipe take: is_deterministic, temperature, top_p"
    )
    assert pipe(X, temperature=1.0, is_deterministic=True).shape == X.shape
    with pytest.raises(ValueError, match="is_deterministic must be True or False, got 1"):
        pipe(X, temperature=1.0, is_deterministic=1)
    with pytest.raises(ValueError, match="take: none"):
        LogitsPipe([Softmax()])(X, temperature=1.0)


def test_names_that_no_processor_has() -> None:
    with pytest.raises(TypeError, match=r"^Temperature has no parameter 'temprature'; its parameters: temperature$"):
        Temperature(temprature=1.0)
    with pytest.raises(TypeError, match="TopPOp has no parameter 'p'"):
        TopPOp(p=0.5)
    with pytest.raises(TypeError, match="Softmax has no parameter 'temperature'; its parameters: enable_pdl"):
        Softmax(temperature=1.0)
    with pytest.raises(ValueError, match="deterministic must be True or False, got 'yes'"):
        Sample(deterministic="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable_pdl must be True or False, got 2"):
        SoftmaxOp(enable_pdl=2)
    with pytest.raises(TypeError, match="expected LogitsProcessor objects or classes of shaping processors"):
        LogitsPipe([TemperatureOp()])  # type: ignore[list-item]
    for wrong in (int, 3):
        with pytest.raises(TypeError, match="expected a class of shaping processors, got "):
            Shaping(wrong)  # type: ignore[arg-type]


def test_a_type_of_the_input_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"^input_type: expected TensorType.LOGITS or TensorType.PROBS, got 'logits'$"):
        LogitsPipe([Temperature()], input_type="logits")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [TensorType.LOGITS, TensorType.PROBS])
@pytest.mark.parametrize("last", [TopK(top_k=2), TopP(top_p=0.5), MinP(min_p=0.1), Sample()])
def test_rows_without_a_vocabulary(last: LogitsProcessor, kind: TensorType) -> None:
    first = [Temperature(temperature=0.5), Softmax()] if kind is TensorType.LOGITS else []
    pipe = LogitsPipe([*first, last], input_type=kind)
    with pytest.raises(ValueError, match=r"expected a vocabulary of at least one token, got \[2, 0\]"):
        pipe(torch.zeros(2, 0))


@pytest.mark.parametrize(
    ("processors", "input_type"),
    [
        ([Temperature(temperature=1.0)], LOGITS),
        ([Softmax()], LOGITS),
        ([TopK(top_k=2)], LOGITS),
        ([TopK(top_k=2)], PROBS),
        ([TopP(top_p=0.5)], PROBS),
        ([MinP(min_p=0.5)], PROBS),
        ([Sample()], LOGITS),
        ([Sample()], PROBS),
        ([TopK(top_k=2, joint_topk_topp=True), TopP(top_p=0.5), Sample()], PROBS),
    ],
)
def test_rows_that_are_refused(processors: list[LogitsProcessor], input_type: TensorType) -> None:
    nothing = -INF if input_type is LOGITS else 0.0
    for bad, text in ((NAN, "row 1 holds NaN"), (INF, "row 1 "), (nothing, "row 1 has no token left")):
        x = UNIFORM.clone()
        x[1] = bad if bad == nothing else torch.tensor([0.2, bad, 0.2, 0.2])
        for compile_ in (True, False):
            with pytest.raises(ValueError, match=text):
                LogitsPipe(processors, compile_, input_type)(x)


def test_a_quotient_out_of_range() -> None:
    x = torch.tensor([[1.0, 2.0], [3e38, 1.0]])
    for pipe in (LogitsPipe([Temperature()]), LogitsPipe([Temperature(), Softmax()])):
        with pytest.raises(ValueError, match="row 1 holds inf"):
            pipe(x, temperature=0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compile_", [True, False])
def test_a_result_beyond_half_precision(dtype: torch.dtype, compile_: bool) -> None:
    """An infinite logit would be sampled for sure, or make NaN of its row."""
    logits = torch.tensor([[1.0, -2.0, -60.0], [1.0, 66.0, 2.0]], dtype=dtype)
    low = LogitsPipe([Temperature()], compile_)
    assert bool(low(logits, temperature=0.01).isfinite().all())
    temperature = 0.001 if dtype == torch.float16 else 1.941e-37
    with pytest.raises(ValueError, match=rf"^row 1 is beyond {dtype}"):
        low(logits, temperature=temperature)
    logits[1] = -66.0  # no token would be left
    with pytest.raises(ValueError, match=rf"^row 1 is beyond {dtype}"):
        low(logits, temperature=temperature)


@pytest.mark.parametrize("temperature", [1e39, torch.tensor([1e300], dtype=torch.float64)])
def test_a_temperature_beyond_float32_leaves_masks(temperature: Any) -> None:
    x = torch.tensor([[3.0, -torch.inf, -2.0]])
    assert LogitsPipe([Temperature(), Softmax()])(x, temperature=temperature).tolist() == [[0.5, 0.0, 0.5]]
    assert LogitsPipe([Temperature()])(x, temperature=temperature)[0, 1] == -torch.inf


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(1, 2, 4), torch.zeros(2, 4, dtype=torch.int64)])
def test_tensors_that_are_no_rows(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected a floating-point tensor \\[batch, vocabulary\\], got"):
        LogitsPipe([Softmax()])(x)


def test_indices_and_generator() -> None:
    for bad, text in (
        (torch.tensor([0, 2]), "indices must be rows from 0 to 1, got 0 to 2"),
        (torch.tensor([-1]), "indices must be rows from 0 to 1, got -1 to -1"),
        (torch.tensor([0.0]), "indices must be a 1D tensor of int32 or int64, got a 1D tensor of torch.float32"),
        (torch.tensor([[0]]), "indices must be a 1D tensor of int32 or int64, got a 2D tensor of torch.int64"),
        ([0], "indices must be a 1D tensor of int32 or int64, got list"),
    ):
        assert run_error([Sample()], X, LOGITS, indices=bad).endswith(text)
    assert run_error([MinP(min_p=0.1), Sample()], X + 1, generator=7).endswith(
        "Error executing operator 0 (FusedProbsMinPSampleOp): generator must be a torch.Generator, got int"
    )


def test_the_place_of_a_failing_op_and_its_cause() -> None:
    with pytest.raises(ValueError) as raised:
        LogitsPipe([Softmax(), TopK(), MinP()])(X, top_k=2, min_p=2.0)
    assert str(raised.value).startswith("Error executing operator 2 (MinPOp): min_p must be")
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(ValueError, match="min_p must be"):
        MinPOp(min_p=2.0)(TaggedTensor.probs(UNIFORM))


@pytest.mark.parametrize("rows", [[[1.0, 2.0]], X.numpy()])
def test_rows_that_are_no_tensor(rows: Any) -> None:
    expected = rf"expected a floating-point tensor \[batch, vocabulary\], got {type(rows).__name__}$"
    with pytest.raises(ValueError, match=expected):
        LogitsPipe([Softmax(), Sample()])(rows)
