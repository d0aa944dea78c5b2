"""The TensorRT-LLM calling contract, against calls shaped like the PyTorch backend's."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import textwrap
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from adapters import Failure, ForcedSequenceProcessor, TemperatureProcessor, create_trtllm_adapters
from adapters.chain import ProcessorChain
from adapters.contract import Context, ProcessorArgs, Reads, Scale, Stage, SteeringProcessor
from adapters.processors.masks import BannedTokens
from adapters.processors.seeded_sampler import SeededSampler
from adapters.trtllm import ChainAdapter, Step
from adapters.vocabulary import Vocabulary

VOCAB = 16
END = 3


class Recorder:
    """Picklable report target."""

    def __init__(self) -> None:
        self.failures: list[Failure] = []

    def __call__(self, failure: Failure) -> None:
        self.failures.append(failure)


def call(adapter, logits, token_ids=None, stream=None):
    """As `_execute_logit_post_processors` does: client id always None."""
    return adapter(7, logits, [[1, 2]] if token_ids is None else token_ids, stream, None)


def row() -> torch.Tensor:
    return torch.linspace(-1, 1, VOCAB).view(1, 1, VOCAB).clone()


def test_edits_in_place_with_the_row_view_and_the_flat_history() -> None:
    seen = {}

    def processor(input_ids, logits):
        seen["ids"], seen["shape"] = input_ids, tuple(logits.shape)
        logits[5] += 10

    batch = torch.zeros(4, VOCAB)
    (adapter,) = create_trtllm_adapters([processor], end_id=END)
    result = call(adapter, batch[2].view(1, 1, -1), [[4, 5, 6]])
    assert result is None
    assert seen == {"ids": [4, 5, 6], "shape": (VOCAB,)}
    assert batch[2, 5] == 10
    assert batch.sum() == 10


def test_an_edit_of_the_ids_reaches_no_other_processor() -> None:
    def sorts(input_ids, logits):
        input_ids.sort()
        input_ids.pop()

    def adds_at_the_newest(input_ids, logits):
        logits[input_ids[-1]] += 10

    logits, ids = row(), [[9, 5, 4]]
    for adapter in create_trtllm_adapters([sorts, adds_at_the_newest]):
        call(adapter, logits, ids)
    assert ids == [[9, 5, 4]]
    assert torch.equal((logits - row()).nonzero(), torch.tensor([[0, 0, 4]]))


class Overflows(SteeringProcessor):
    """Divides by a number so small that the row becomes infinite."""

    name = "overflows"
    stage = Stage.PENALTY
    reads = Reads.NOTHING
    Args = ProcessorArgs

    def edit(self):
        return Scale.of([5, VOCAB - 1], [1.0, 1e-39])


@pytest.mark.parametrize("end_id", [None, END])
def test_edits_of_a_third_party_leave_no_infinite_row(end_id) -> None:
    """TensorRT-LLM's sampler would fail every request with it."""
    chain = ProcessorChain([Overflows(None, Context(Vocabulary(VOCAB)))], Context(Vocabulary(VOCAB)))
    chain.start([1, 2])
    (adapter,) = create_trtllm_adapters([chain], end_id=end_id)
    logits = row()
    call(adapter, logits)
    assert adapter.failure is not None
    assert (adapter.failure.processor, adapter.failure.reason) == ("overflows", "infinite")
    if end_id is None:
        assert torch.equal(logits, row())
    else:
        assert logits.isfinite().nonzero()[:, 2].tolist() == [END]


def test_a_row_that_is_kept_is_no_longer_the_engines() -> None:
    kept: list[torch.Tensor] = []

    def keeps(_, logits):
        for earlier in kept:
            earlier.as_strided((earlier.untyped_storage().nbytes() // 4,), (1,), 0).fill_(torch.nan)
        kept.append(logits)
        logits[5] += 10

    batch = torch.zeros(2, VOCAB)
    (adapter,) = create_trtllm_adapters([keeps], end_id=END)
    call(adapter, batch[:1].view(1, 1, -1), [[4, 5, 6]])
    call(adapter, batch[1:].view(1, 1, -1), [[4, 5, 6, 5]])
    assert adapter.failure is None
    assert batch.nonzero().tolist() == [[0, 5], [1, 5]]
    assert batch.sum() == 20


def test_several_adapters_share_the_view_in_order() -> None:
    def double(_, logits):
        logits.mul_(2)

    def add_one(_, logits):
        logits.add_(1)

    logits = torch.ones(1, 1, VOCAB)
    for adapter in create_trtllm_adapters([double, add_one]):
        call(adapter, logits)
    assert (logits == 3).all()


def test_the_signature_is_cached_and_has_the_engines_arity() -> None:
    (adapter,) = create_trtllm_adapters([TemperatureProcessor(2.0)])
    signature = inspect.signature(adapter)
    assert 4 <= len(signature.parameters) <= 5
    assert signature is adapter.__signature__
    assert list(signature.parameters) == ["req_id", "logits", "token_ids", "stream_ptr", "client_id"]


@pytest.mark.parametrize("stream", [None, 0, 12345])
def test_a_stream_handle_is_harmless_without_cuda(stream) -> None:
    logits = row()
    (adapter,) = create_trtllm_adapters([TemperatureProcessor(2.0)])
    call(adapter, logits, stream=stream)
    assert torch.equal(logits, row() / 2)


@pytest.mark.parametrize("processor", [3, "x", None, TemperatureProcessor, object()])
def test_what_is_not_a_processor_is_refused_at_creation(processor) -> None:
    with pytest.raises(TypeError, match=r"processors\[1\] must be a callable"):
        create_trtllm_adapters([TemperatureProcessor(), processor])


def raises(_, logits):
    logits[0] = 99.0
    raise RuntimeError("secret prompt text")


def leaves_nan(_, logits):
    logits[4] = float("nan")


def leaves_infinity(_, logits):
    logits[4] = float("inf")


def leaves_nothing(_, logits):
    logits.fill_(-torch.inf)


def wrong_shape(_, logits):
    logits += torch.zeros(VOCAB + 1)


def exits(_, logits):
    logits[0] = 99.0
    sys.exit(3)


class Panic(BaseException):
    """As a panic in Rust comes to Python."""


def panics(_, logits):
    logits[0] = 99.0
    raise Panic


FAULTS = [
    (raises, "raised"),
    (exits, "raised"),
    (panics, "raised"),
    (leaves_nan, "nan"),
    (leaves_infinity, "infinite"),
    (leaves_nothing, "empty"),
    (wrong_shape, "raised"),
]


@pytest.mark.parametrize(("processor", "reason"), FAULTS)
def test_a_failing_processor_is_undone_and_reported(processor, reason) -> None:
    report, logits = Recorder(), row()
    (adapter,) = create_trtllm_adapters([processor], report=report)
    call(adapter, logits)
    assert torch.equal(logits, row())
    (failure,) = report.failures
    assert failure.reason == reason
    assert failure.processor == "function"
    assert failure.position == 2
    assert failure.request_id == "7"
    assert "secret" not in str(failure)
    assert adapter.failure == failure


@pytest.mark.parametrize(("processor", "reason"), FAULTS)
def test_with_an_end_id_the_row_is_forced_to_it_from_then_on(processor, reason) -> None:
    report = Recorder()
    (adapter,) = create_trtllm_adapters([processor], end_id=END, report=report)
    for _ in range(3):
        logits = row()
        call(adapter, logits)
        assert logits.isfinite().nonzero()[:, 2].tolist() == [END]
    assert len(report.failures) == 1


@pytest.mark.parametrize(
    ("shape", "lists"),
    [((2, 1, VOCAB), 2), ((1, 2, VOCAB), 1), ((1, VOCAB), 1), ((1, 1, VOCAB), 2), ((1, 1, VOCAB), 0)],
)
def test_more_than_one_sequence_or_beam_is_refused(shape, lists) -> None:
    report, logits = Recorder(), torch.zeros(shape)
    (adapter,) = create_trtllm_adapters([TemperatureProcessor(2.0)], end_id=END, report=report)
    call(adapter, logits, [[1]] * lists)
    assert report.failures[0].reason == "shape"
    assert "one sequence and one beam" in str(report.failures[0])
    assert (logits[..., END] == 0).all()
    assert logits.isfinite().sum() == logits[..., END].numel()


def test_a_broken_reporter_does_not_reach_the_engine() -> None:
    def broken(failure):
        raise OSError("socket is gone")

    logits = row()
    (adapter,) = create_trtllm_adapters([raises], end_id=END, report=broken)
    call(adapter, logits)
    assert int(logits.argmax()) == END


def test_pickles_into_another_process_with_its_state() -> None:
    adapters = create_trtllm_adapters(
        [TemperatureProcessor(2.0), ForcedSequenceProcessor([5, 6], END, prompt_length=2)],
        end_id=END,
        report=Recorder(),
    )
    code = """
        import pickle, sys, torch
        adapters = pickle.load(sys.stdin.buffer)
        logits = torch.linspace(-1, 1, 16).view(1, 1, 16).clone()
        for adapter in adapters:
            adapter(1, logits, [[1, 2, 5]], None, None)
        print(int(logits.argmax()))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=pickle.dumps(adapters),
        capture_output=True,
        check=True,
        env={"PYTHONPATH": ":".join(["tests/adapters", *sys.path])},
    )
    assert done.stdout.decode().strip() == "6"


@pytest.mark.slow
def test_adapters_subclass_the_engines_own_class_if_installed(tmp_path) -> None:
    package = tmp_path / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sampling_params.py").write_text(
        "from abc import ABC, abstractmethod\n"
        "class LogitsProcessor(ABC):\n"
        "    @abstractmethod\n"
        "    def __call__(self, req_id, logits, token_ids, stream_ptr, client_id): ...\n"
    )
    imports = [
        "from tensorrt_llm.sampling_params import LogitsProcessor\n",
        "from adapters import TemperatureProcessor, create_trtllm_adapters\n",
    ]
    made = "assert isinstance(create_trtllm_adapters([TemperatureProcessor()])[0], LogitsProcessor)\n"
    environ = {"PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    for order in (imports, imports[::-1]):
        subprocess.run([sys.executable, "-c", "".join([*order, made])], check=True, env=environ)


def test_open_adapters_undo_report_once_and_go_on() -> None:
    calls = []

    def sometimes(input_ids, logits):
        calls.append(len(input_ids))
        logits[0] = 99.0
        if len(input_ids) != 3:
            raise RuntimeError("no")

    report = Recorder()
    (adapter,) = create_trtllm_adapters([sometimes], end_id=END, report=report)
    adapter.fails_open = True
    for ids in ([1, 2], [1, 2, 3], [1, 2, 3, 4]):
        logits = row()
        call(adapter, logits, [ids])
        assert torch.equal(logits, row()) is (len(ids) != 3)
    assert calls == [2, 3, 4]
    assert len(report.failures) == 1


def test_a_chain_that_was_not_called_for_a_position_fails() -> None:
    context = Context(Vocabulary(VOCAB))
    chain = ProcessorChain([BannedTokens(BannedTokens.Args(token_ids=[5]), context)], context)
    chain.start([1, 2])
    report = Recorder()
    (adapter,) = create_trtllm_adapters([chain], end_id=END, report=report)
    for ids in ([1, 2], [1, 2], [1, 2, 7], [1, 2, 7]):  # a second chunk, a repeated call
        call(adapter, row(), [ids])
    assert report.failures == []
    call(adapter, row(), [[1, 2, 7, 8, 9]])
    (failure,) = report.failures
    assert failure.reason == "skipped"
    assert failure.processor == "banned_tokens"
    assert failure.message == "were not called for position 4: the engine went on without them"


def test_a_chain_reports_steps_with_logprobs_before_any_edit() -> None:
    context = Context(Vocabulary(VOCAB))
    chain = ProcessorChain([BannedTokens(BannedTokens.Args(token_ids=[15]), context), SeededSampler(None)], context)
    chain.start([1, 2])
    adapter = ChainAdapter(chain, end_id=END)
    steps: list[Step] = []
    adapter.watch, adapter.num_logprobs = steps.append, 2
    logits = row()
    call(adapter, logits)
    assert logits.isfinite().nonzero()[:, 2].tolist() == [14]
    expected = row()[0, 0].double().log_softmax(-1).tolist()
    (step,) = steps
    assert step.logprobs == ((14, expected[14], 2), (15, expected[15], 1), (14, expected[14], 2))
    assert [kind for _, kind, _ in step.edits] == ["masked", "shaped"]


def test_an_interrupt_is_not_the_processors() -> None:
    def interrupted(_, logits):
        raise KeyboardInterrupt

    (adapter,) = create_trtllm_adapters([interrupted], end_id=END)
    with pytest.raises(KeyboardInterrupt):
        call(adapter, row())
    with ThreadPoolExecutor(1) as threads:  # Ctrl-C is raised in the main thread alone
        threads.submit(call, adapter, row()).result()
    assert str(adapter.failure) == "logits processor function: raised KeyboardInterrupt at position 2"


class Local(BannedTokens):
    name = "acme/local"

    def __getstate__(self) -> object:
        raise SystemExit(0)


@pytest.mark.parametrize("in_chain", [True, False])
def test_a_processor_that_cannot_be_sent_is_named(in_chain) -> None:
    context = Context(Vocabulary(VOCAB))
    built = [kind(kind.Args(token_ids=[4]), context) for kind in (BannedTokens, Local)]
    made = ProcessorChain(built, context) if in_chain else lambda input_ids, logits: None
    (adapter,) = create_trtllm_adapters([made])
    expected = "acme/local: SystemExit" if in_chain else r"function: \w+: .*pickle"
    with pytest.raises(pickle.PicklingError, match=f"^{expected}"):
        pickle.dumps(adapter)


class Unloadable(BannedTokens):
    """Cannot be loaded where it is sent to."""

    name = "acme/unloadable"

    def __setstate__(self, state: object) -> None:
        raise SystemExit(0)


def test_a_processor_of_a_chain_that_cannot_be_loaded_is_named() -> None:
    context = Context(Vocabulary(VOCAB))
    built = [kind(kind.Args(token_ids=[4]), context) for kind in (BannedTokens, Unloadable)]
    (adapter,) = create_trtllm_adapters([ProcessorChain(built, context)], end_id=END)
    copy = pickle.loads(pickle.dumps(adapter))
    call(copy, row())
    told = "logits processor acme/unloadable: cannot be loaded in the engine's process (SystemExit)"
    assert str(copy.failure) == told


def test_a_processor_the_engine_process_cannot_load_fails_alone(monkeypatch) -> None:
    module = types.ModuleType("third_party_over_here")
    exec("class Acts:\n    def __call__(self, ids, logits): logits[0] += 1\n", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (adapter,) = create_trtllm_adapters([module.Acts()], end_id=END, report=Recorder())
    data = pickle.dumps(adapter)
    assert pickle.loads(data).name == "Acts"
    monkeypatch.delitem(sys.modules, module.__name__)
    copy = pickle.loads(data)
    logits = row()
    call(copy, logits)
    assert logits.isfinite().nonzero()[:, 2].tolist() == [END]
    (failure,) = copy.report.failures
    assert str(failure) == ("logits processor Acts: cannot be loaded in the engine's process (ModuleNotFoundError)")
