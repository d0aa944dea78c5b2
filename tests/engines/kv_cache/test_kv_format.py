"""What keys and values are held in, as options say it; and reports of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker.__main__ import main
from worker.arguments import parse_arguments
from worker.build import embedded_config
from worker.engines.embedded import EmbeddedConfig
from worker.engines.embedded.attention import NativeAttention
from worker.engines.embedded.model import HfModel, load_model, reload_network
from worker.errors import StartupError
from worker.quantize.output import write_quantised
from worker.quantize.report import Predictions, report

QUANTISED = {"kernels": "native", "quantization": "int8"}
INT8, INT16 = "int8 of float32", "int16 of float32"


def settings(**given: Any) -> dict[str, Any]:
    return {"device": "cpu", "dtype": "float32", "numerics": "fast", **given}


def load(path: Path, **given: Any) -> HfModel:
    model = load_model(EmbeddedConfig(model_path=path, **settings(**given)))
    model.allocate_kv(8, 32)
    return model


# Options


def test_the_variable_reaches_the_engine() -> None:
    arguments = parse_arguments(["--model-path", "x"], {"WORKER_KV_CACHE_DTYPE": "int8"})
    assert embedded_config(arguments).kv_cache_dtype == "int8"


def test_a_dtype_that_is_unknown() -> None:
    with pytest.raises(StartupError, match="--kv-cache-dtype must be one of auto, none, int8, int16, got 'fp8'"):
        EmbeddedConfig(model_path="", kv_cache_dtype="fp8").check()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int16_of_bfloat16_is_refused(kernels: str, checkpoints: dict[str, Path]) -> None:
    said = "--kv-cache-dtype int16 needs --dtype float32: elements of bfloat16 take as much memory; use none"
    with pytest.raises(StartupError, match=said):
        load(checkpoints["llama"], kv_cache_dtype="int16", dtype="bfloat16", kernels=kernels)


# What is chosen


CHOSEN: list[tuple[str, dict[str, Any], str]] = [
    ("auto", QUANTISED, INT16),
    ("auto", {**QUANTISED, "quantization": "int4"}, INT16),
    ("auto", {**QUANTISED, "activation_dtype": "int8"}, INT16),
    ("auto", {**QUANTISED, "activation_dtype": "none"}, "float32"),
    ("auto", {**QUANTISED, "dtype": "bfloat16"}, "bfloat16"),
    ("auto", {"kernels": "native"}, "float32"),
    ("auto", {"kernels": "torch"}, "float32"),
    ("none", QUANTISED, "float32"),
    ("none", {"kernels": "torch"}, "float32"),
    ("int8", QUANTISED, INT8),
    ("int8", {"kernels": "torch", "dtype": "bfloat16"}, "int8 of bfloat16"),
    ("int16", QUANTISED, INT16),
    ("int16", {"kernels": "native"}, INT16),
    ("int16", {"kernels": "torch"}, INT16),
]


@pytest.mark.native
@pytest.mark.parametrize(("kv", "changes", "expected"), CHOSEN)
def test_the_format_follows_from_the_rest(
    kv: str, changes: dict[str, Any], expected: str, checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """And the log at start names it, as `made_by` does if it is not that of elements."""
    with caplog.at_level("INFO"):
        model = load(checkpoints["llama"], kv_cache_dtype=kv, **changes)
    assert model.kv_store.dtype_name == expected
    held_in, _, of = expected.partition(" of ")
    [line] = [line for line in caplog.messages if line.startswith("numerics: ")]
    assert line.endswith(f"; KV cache: {held_in}")
    assert (f", {held_in} KV cache" in model.made_by) == bool(of)
    assert ("KV cache" in model.made_by) == bool(of)


@pytest.mark.native
def test_auto_is_elements_where_torch_attends(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does for heads that the native kernels do not take."""
    monkeypatch.setattr(NativeAttention, "supports", lambda sizes: False)
    model = load(checkpoints["llama"], kv_cache_dtype="auto", **QUANTISED)
    assert model.kernel_backend.rounds_to == "int8"
    assert model.kv_store.dtype_name == "float32"


@pytest.mark.native
def test_a_kept_quantised_checkpoint_has_int16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """And elements where its weights are dequantised: nothing is rounded then."""
    write_quantised(checkpoints["llama"], "int4", tmp_path / "four")
    found = {}
    for kernels in ("native", "torch"):
        model = load(tmp_path / "four", kv_cache_dtype="auto", kernels=kernels)
        found[kernels] = model.kv_store.dtype_name
    assert found == {"native": INT16, "torch": "float32"}


@pytest.mark.native
def test_another_network_leaves_the_format(checkpoints: dict[str, Path]) -> None:
    config = EmbeddedConfig(model_path=checkpoints["llama"], **settings(**QUANTISED))
    model = load_model(config)
    model.allocate_kv(8, 32)
    tensors = model.kv_store.tensors
    model.replace_network(reload_network(config, model))
    assert model.kv_store.dtype_name == INT16
    assert all(one is other for one, other in zip(model.kv_store.tensors, tensors, strict=True))
    with model.spare_store():
        assert model.kv_store.dtype_name == INT16


# The report


@pytest.mark.parametrize("kv", ["int8", "int16"])
def test_a_report_of_the_kv_cache(kv: str, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    source = str(checkpoints["llama"])
    assert main(["quantize", source, "--kv-cache-dtype", kv, "--report", "--dtype", "float32"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert " unquantised, " in first
    assert f" {kv} KV cache (" in first
    assert float(second.split()[4].rstrip("%")) > 90


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--report"], "give --to; a report is also of --kv-cache-dtype int8 or int16 alone"),
        (["--report", "--kv-cache-dtype", "none"], "give --to"),
        (["--kv-cache-dtype", "int8", "--output", "x"], "give --to"),
        (["--to", "int8", "--kv-cache-dtype", "int8", "--output", "x"], "--kv-cache-dtype is of a report"),
    ],
)
def test_a_report_that_is_of_nothing(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", "x", *arguments])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("kv", ["auto", "none"])
def test_a_report_of_weights_has_kv_of_elements(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def predict(path: Path, *settings: str) -> Predictions:
        asked.append(settings)
        return Predictions([-1.0], [7])

    monkeypatch.setattr("worker.quantize.report.predict", predict)
    [line, _] = report(Path("x"), "int8", "auto", kv, "float32")
    assert asked[-1] == ("float32", "int8", "auto", "none")
    assert "int8, int8 activations (" in line
