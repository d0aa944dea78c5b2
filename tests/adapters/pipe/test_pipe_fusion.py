"""Compiled pipes give what plain ones give, bit for bit, wherever the parameters come from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters.pipe import LogitsPipe, LogitsProcessor, MinP, Sample, Softmax, Temperature, TensorType, TopK, TopP
from adapters.pipe.operators import FusedProbsTopKTopPSampleOp, FusedTemperatureSoftmaxOp

VALUES = {
    "temperature": st.sampled_from([1, 0.25, 0.7, 1.0, 3.5]),
    "top_k": st.integers(1, 40),
    "top_p": st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.01, 0.1, 0.5, 1.0]),
}
DTYPES = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}


@dataclass
class Chain:
    """A pipe to be built, and the parameters of its call."""

    processors: list[LogitsProcessor] = field(default_factory=list)
    call: dict[str, Any] = field(default_factory=dict)


@st.composite
def parameter(draw: st.DrawFn, name: str, num_rows: int) -> Any:
    if draw(st.booleans()):
        return draw(VALUES[name])
    values = draw(st.lists(VALUES[name], min_size=num_rows, max_size=num_rows))
    return torch.tensor(values, dtype=DTYPES[name])


@st.composite
def chains(draw: st.DrawFn, num_rows: int, from_probs: bool) -> Chain:
    chain = Chain()

    def add(cls: type[LogitsProcessor], name: str, **flags: Any) -> None:
        at_construction = {name: draw(parameter(name, num_rows))} if draw(st.booleans()) else {}
        chain.processors.append(cls(**at_construction, **flags))
        if not at_construction or draw(st.booleans()):
            chain.call[name] = draw(parameter(name, num_rows))

    def filters(choices: list[str], most: int) -> None:
        for choice in draw(st.lists(st.sampled_from(choices), max_size=most)):
            if choice == "top_k":
                add(TopK, choice, joint_topk_topp=draw(st.booleans()))
            else:
                add({"temperature": Temperature, "top_p": TopP, "min_p": MinP}[choice], choice)

    if not from_probs:
        filters(["temperature", "top_k"], 3)
    if not from_probs and draw(st.booleans()):
        chain.processors.append(Softmax())
        from_probs = True
    if from_probs:
        filters(["top_k", "top_p", "min_p"], 3)
    if draw(st.booleans()) or not chain.processors:
        chain.processors.append(Sample(deterministic=draw(st.booleans())))
    return chain


@given(data=st.data(), num_rows=st.integers(0, 4), from_probs=st.booleans(), seed=st.integers(0, 2**20))
def test_compiled_equals_plain(data: st.DataObject, num_rows: int, from_probs: bool, seed: int) -> None:
    chain = data.draw(chains(num_rows, from_probs))
    input_type = TensorType.PROBS if from_probs else TensorType.LOGITS
    generator = torch.Generator().manual_seed(seed)
    # Few different values, so that ties are common.
    rows = torch.randint(0, 9, (num_rows, 37), generator=generator).float()
    rows = rows.clamp_min(1) / 37 if from_probs else rows
    outputs = []
    for compile_ in (True, False):
        pipe = LogitsPipe(chain.processors, compile=compile_, input_type=input_type)
        call = dict(chain.call)
        if pipe.ops[-1].OUT is TensorType.INDICES:
            call["generator"] = torch.Generator().manual_seed(seed)
        outputs.append(pipe(rows, **call))
    assert outputs[0].dtype == outputs[1].dtype
    assert torch.equal(*outputs)


SAMPLE_OPS = {
    "temperature, softmax": ([Temperature(), Softmax()], 1),
    "and sample": ([Temperature(), Softmax(), Sample()], 2),
    "and top-k": ([Temperature(), Softmax(), TopK(), Sample()], 2),
    "and top-p": ([Temperature(), Softmax(), TopP(), Sample()], 2),
    "and min-p": ([Temperature(), Softmax(), MinP(), Sample()], 2),
    "sequential": ([Softmax(), TopK(), TopP(), Sample()], 3),
    "joint": ([Softmax(), TopK(joint_topk_topp=True), TopP(), Sample()], 2),
    "joint in the wrong order": ([Softmax(), TopP(), TopK(joint_topk_topp=True), Sample()], 3),
    "joint, not adjacent": ([Softmax(), TopK(joint_topk_topp=True), TopP(), MinP(), Sample()], 4),
    "top-k of logits": ([Temperature(), TopK(), Softmax(), TopP(), Sample()], 4),
}


@pytest.mark.parametrize("case", SAMPLE_OPS)
def test_number_of_compiled_ops(case: str) -> None:
    processors, expected = SAMPLE_OPS[case]
    assert len(LogitsPipe(processors).compiled_ops) == expected  # type: ignore[arg-type]


def test_sampling_from_masked_logits_is_not_fused() -> None:
    assert len(LogitsPipe([TopK(), Sample()], input_type=TensorType.LOGITS).compiled_ops) == 2  # type: ignore[arg-type]


def test_a_fused_op_carries_every_parameter_of_its_window() -> None:
    topk, topp, sample = TopK(joint_topk_topp=True, top_k=3), TopP(top_p=0.5), Sample(deterministic=False)
    (fused,) = LogitsPipe([topk, topp, sample], input_type=TensorType.PROBS).compiled_ops  # type: ignore[misc]
    assert isinstance(fused, FusedProbsTopKTopPSampleOp)
    assert fused.default_params == {"joint_topk_topp": True, "top_k": 3, "top_p": 0.5, "deterministic": False}
    (fused,) = LogitsPipe([Temperature(temperature=2), Softmax(enable_pdl=False)]).compiled_ops  # type: ignore[misc]
    assert isinstance(fused, FusedTemperatureSoftmaxOp)
    assert fused.default_params == {"temperature": 2, "enable_pdl": False}


def test_parameters_of_the_call_win() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    for compile_ in (True, False):
        pipe = LogitsPipe([Temperature(temperature=2.0), Softmax()], compile=compile_)
        assert torch.equal(pipe(logits), (logits / 2.0).softmax(-1))
        assert torch.equal(pipe(logits, temperature=1), logits.softmax(-1))


@pytest.mark.parametrize("compile_", [True, False])
def test_temperature_per_row_divides_rows(compile_: bool) -> None:
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])  # as many rows as columns
    result = LogitsPipe([Temperature()], compile=compile_)(logits, temperature=torch.tensor([1.0, 2.0]))
    assert result.tolist() == [[1.0, 2.0], [0.5, 1.0]]
    wide = torch.ones(3, 5)
    probs = LogitsPipe([Temperature(), Softmax()], compile=compile_)(wide, temperature=torch.tensor([1, 2, 3]))
    assert torch.allclose(probs, torch.full((3, 5), 0.2))


@pytest.mark.parametrize("compile_", [True, False])
def test_joint_and_sequential_differ_as_documented(compile_: bool) -> None:
    """Of .4 .3 .2 .1, top-k 2 and top-p .5: sequentially .571 .429, of which the first is
    enough; jointly not.
    """
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    rows = torch.zeros(400, dtype=torch.int64)
    drawn = {}
    for joint in (True, False):
        chain = [TopK(joint_topk_topp=joint), TopP(), Sample()]
        pipe = LogitsPipe(chain, compile=compile_, input_type=TensorType.PROBS)
        tokens = pipe(probs, top_k=2, top_p=0.5, indices=rows, generator=torch.Generator().manual_seed(0))
        drawn[joint] = set(tokens.tolist())
    assert drawn == {True: {0, 1}, False: {0}}


def test_a_plain_pipe_says_so_and_can_be_compiled_later(caplog: pytest.LogCaptureFixture) -> None:
    pipe = LogitsPipe([Temperature(temperature=1.0), Softmax()], compile=False)
    assert pipe.compiled_ops is None
    with caplog.at_level(logging.WARNING):
        pipe(torch.zeros(1, 4))
        pipe(torch.zeros(1, 4))
    assert [record.getMessage() for record in caplog.records] == ["Pipeline is not compiled, running discrete ops."] * 2
    pipe.compile()
    assert len(pipe.compiled_ops) == 1  # type: ignore[arg-type]


def test_repr_shows_processors_ops_and_compiled_ops() -> None:
    pipe = LogitsPipe([TopK(), Sample()], input_type=TensorType.PROBS)
    expected = "LogitsPipe([TopK -> Sample], ops=[ProbsTopKOp -> ProbsSampleOp], compiled_ops=[FusedProbsTopKSampleOp])"
    assert repr(pipe) == expected
    assert pipe.initial_type is TensorType.PROBS
    assert repr(TopP(top_p=0.5)) == "TopP(top_p=0.5)"
    assert repr(pipe.ops[0]) == "ProbsTopKOp(PROBS -> PROBS)"
