"""Shaping processors of `adapters.processors` in a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adapters import processors as p
from adapters.contract import Context, Reads, ShapingProcessor
from adapters.pipe import LogitsPipe, Sample, Shaping, Softmax, TensorType, TopK
from adapters.vocabulary import Vocabulary

CONTEXT = Context(Vocabulary(64))
ARGUMENTS = {
    p.Temperature: {"value": [0.0, 0.5, 1.0, 2.0]},
    p.TopK: {"k": [0, 1, 3, 10]},
    p.TopP: {"p": [0.0, 0.3, 0.9, 1.0]},
    p.MinP: {"p": [0.0, 0.1, 0.5, 1.0]},
    p.TypicalP: {"p": [0.1, 0.3, 0.9, 1.0]},
    p.TopNSigma: {"n": [0.5, 1.0, 1.5, 3.0]},
    p.EpsilonCutoff: {"epsilon": [0.0, 0.01, 0.05, 0.2]},
    p.EtaCutoff: {"epsilon": [0.0, 0.01, 0.05, 0.2]},
}


@given(shaping=st.sampled_from(list(ARGUMENTS)), seed=st.integers(0, 1000), data=st.data())
def test_it_does_what_the_processor_does(shaping: type[ShapingProcessor], seed: int, data: st.DataObject) -> None:
    ((argument, values),) = ARGUMENTS[shaping].items()
    given_values = data.draw(st.lists(st.sampled_from(values), min_size=4, max_size=4))
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 3
    expected = logits.clone()
    for value, row in zip(given_values, expected, strict=True):
        shaping(shaping.Args(**{argument: value}), CONTEXT).shape(row)
    before = logits.clone()
    assert torch.equal(LogitsPipe([shaping])(logits, **{shaping.name: torch.tensor(given_values)}), expected)
    assert torch.equal(logits, before)
    first = LogitsPipe([Shaping(shaping, **{argument: given_values[0]})])
    assert torch.equal(first(logits)[0], expected[0])
    assert torch.equal(first(logits, **{shaping.name: given_values[1]})[1], expected[1])


def test_a_whole_chain() -> None:
    logits = torch.randn(3, 64, dtype=torch.float16)
    pipe = LogitsPipe([p.TypicalP, Shaping(p.TopNSigma, n=1.5), Softmax(), TopK(), Sample()])
    tokens = pipe(logits, typical_p=0.9, top_k=2)
    assert tokens.shape == (3,)
    shown = "LogitsPipe([Shaping -> Shaping -> Softmax -> TopK -> Sample], ops=[ShapingOp -> ShapingOp -> "
    assert repr(pipe).startswith(shown)
    assert repr(pipe.processors[1]) == "Shaping(TopNSigma, n=1.5)"
    assert LogitsPipe([p.TypicalP])(torch.empty(0, 64), typical_p=0.5).shape == (0, 64)


def test_processors_with_a_history_are_given_themselves() -> None:
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) * 3
    rows = [p.Mirostat(p.Mirostat.Args(tau=tau), CONTEXT) for tau in (0.5, 3.0)]
    for processor in rows:
        processor.start([1, 2])
    expected = logits.clone()
    reference = [p.Mirostat(p.Mirostat.Args(tau=tau), CONTEXT) for tau in (0.5, 3.0)]
    for processor, row in zip(reference, expected, strict=True):
        processor.start([1, 2])
        processor.shape(row)
    pipe = LogitsPipe([p.Mirostat])
    assert torch.equal(pipe(logits, mirostat=rows), expected)
    for bad in (rows[:1], [*rows[:1], reference]):
        with pytest.raises(ValueError, match="mirostat takes one started Mirostat per row, of 2"):
            pipe(logits, mirostat=bad)


@pytest.mark.parametrize(
    ("shaping", "call", "context"),
    [
        (p.Xtc, {"xtc_probability": 0.5}, None),
        (p.Mirostat, {"mirostat_tau": 3.0}, None),
        (
            p.Watermark,
            {"watermark_key_id": "k"},
            Context(Vocabulary(64), watermark_keys={"k": bytes(range(16))}),
        ),
    ],
)
def test_a_history_that_nobody_gave_is_an_error(
    shaping: type[ShapingProcessor], call: dict[str, object], context: Context | None
) -> None:
    pipe = LogitsPipe([Shaping(shaping, context)])
    with pytest.raises(ValueError, match=f"{shaping.name} depends on its history: give one started"):
        pipe(torch.randn(2, 64), **call)
    with pytest.raises(ValueError, match=f"{shaping.name} takes one started"):
        pipe(torch.randn(2, 64), **{shaping.name: 0.5})


def test_errors() -> None:
    with pytest.raises(TypeError, match="top_p has no argument 'k'"):
        Shaping(p.TopP, k=3)
    with pytest.raises(ValueError, match="typical_p can only be applied to LOGITS, got PROBS"):
        LogitsPipe([p.TypicalP], input_type=TensorType.PROBS)
    with pytest.raises(ValueError, match="batch size mismatch"):
        LogitsPipe([p.TypicalP])(torch.zeros(1, 4), typical_p=torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="row 0 holds NaN"):
        LogitsPipe([p.TypicalP])(torch.full((1, 4), float("nan")), typical_p=0.5)
    with pytest.raises(ValueError, match=r"Unknown run-time parameter 'top_p'; .* take: typical_p"):
        LogitsPipe([p.TypicalP])(torch.zeros(1, 4), top_p=0.5)


class MakesNaN(ShapingProcessor):
    name = "makes_nan"
    reads = Reads.NOTHING
    Args = p.Temperature.Args

    def __init__(self, args: object, context: Context) -> None:
        pass

    def shape(self, logits: torch.Tensor) -> None:
        logits.fill_(float("nan"))


def test_nan_made_by_a_processor_is_refused() -> None:
    with pytest.raises(ValueError, match="row 0 holds NaN"):
        LogitsPipe([MakesNaN])(torch.zeros(1, 4), makes_nan=1.0)


def test_processors_do_not_import_the_pipe() -> None:
    code = "import sys, adapters.catalog.catalog, adapters.processors; sys.exit('adapters.pipe' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "Required parameter 'typical_p' not provided for typical_p"),
        ({"typical_p": 2.0}, "typical_p: input should be less than or equal to 1, got 2.0"),
    ],
)
def test_an_argument_out_of_range_has_its_name_in_the_call(args: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError) as raised:
        LogitsPipe([p.TypicalP, Sample()])(torch.zeros(2, 8), **args)
    assert str(raised.value) == f"Error executing operator 0 (ShapingOp): {problem}"
