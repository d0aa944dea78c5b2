"""Models with quantised weights: served packed, dequantised, or refused by name."""

from __future__ import annotations

import json
import logging
import resource
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from effort import grid
from model_runs import greedy_answers, last_logits, load_native
from random_checkpoints import EVERY_TYPE
from safetensors.torch import load_file, save_file

from worker.__main__ import main
from worker.engines.embedded import native
from worker.engines.embedded.config import EmbeddedConfig
from worker.engines.embedded.model import load_model
from worker.engines.embedded.model.linear import linears
from worker.engines.embedded.model.quantisation import GROUP, QuantisedGemm
from worker.errors import StartupError
from worker.quantize.output import write_quantised

UP = "model.layers.1.mlp.up_proj.weight"

PATHS = [path for path in native.PATHS if native.unavailable(torch.float32, path) is None]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.native]


load = partial(load_native, dtype="float32")


@pytest.fixture(scope="module")
def quantised(every_checkpoint: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of architectures that are written quantised, in int4."""
    root = tmp_path_factory.mktemp("quantised")
    for arch in ("llama", "mistral", "qwen2", "qwen3"):
        write_quantised(every_checkpoint[arch], "int4", root / arch)
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("arch", "dtype", "activation_dtype"), grid(product(EVERY_TYPE, ("float32", "bfloat16"), ("none", "int8")), fast=5)
)
def test_int8_has_one_answer_on_every_path_and_in_any_chunks(
    arch: str, dtype: str, activation_dtype: str, every_checkpoint: dict[str, Path]
) -> None:
    """Where AMX attends in bfloat16, it has an order of its own; integers have none."""
    expected: dict[bool, torch.Tensor] = {}
    settings = {"dtype": dtype, "quantization": "int8", "activation_dtype": activation_dtype}
    computed = getattr(torch, dtype)
    for path in PATHS:
        if native.unavailable(computed, path) is None:
            model = load(every_checkpoint[arch], kernels=f"native-{path}", **settings)
            is_as_others = native.sums_as_others(computed, path)
            kernels = "native" if is_as_others else f"native-{path} and native"
            made_by = f"exact, {kernels} kernels, int8 weights"
            if activation_dtype == "int8":
                made_by += ", int8 activations in spans but outliers"
                made_by += ", int16 KV cache" if dtype == "float32" else ""
            assert model.made_by == made_by
            found = last_logits(model)
            assert torch.equal(found, expected.setdefault(is_as_others, found))
            assert torch.equal(last_logits(model, (0, 33, 34, 89, 90))[-1:], found)
    for logits in expected.values():
        assert (logits - expected[True]).norm() / expected[True].norm() < 0.05


def test_predictions_are_near_those_of_the_whole_weights(every_checkpoint: dict[str, Path]) -> None:
    """Random weights, whose attention is all or nothing, make some ten times of each error."""
    truth, *found = (
        last_logits(load(every_checkpoint["llama"], quantization=each)) for each in ("auto", "int8", "int4")
    )
    in_8, in_4 = ((one - truth).norm() / truth.norm() for one in found)
    assert in_8 < 0.2
    assert 3 * in_8 < in_4 < 1.0


def test_activations_are_rounded_by_default(quantised: dict[str, Path], every_checkpoint: dict[str, Path]) -> None:
    """Random weights, whose attention is all or nothing, make some ten times of each error."""
    truth, found, default = (
        last_logits(load(quantised["llama"], activation_dtype=each)) for each in ("none", "int8", "auto")
    )
    assert 0 < (found - truth).norm() / truth.norm() < 0.2
    assert torch.equal(default, found)
    for settings in ({"quantization": "none"}, {"kernels": "torch", "numerics": "fast"}):
        assert "activations" not in load(quantised["llama"], activation_dtype="auto", **settings).made_by
    assert "activations" not in load(every_checkpoint["llama"], activation_dtype="auto").made_by


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_quantised_checkpoint_is_served_as_what_it_holds(
    arch: str, quantised: dict[str, Path], every_checkpoint: dict[str, Path]
) -> None:
    """As the same weights rounded at start; and, bit by bit, as its dequantised weights."""
    model = load(quantised[arch])
    packed = [layer for layer in linears(model._network) if isinstance(layer.gemm, QuantisedGemm)]
    assert len(packed) == len(list(linears(model._network)))
    assert model.made_by == "exact, native kernels, int4 weights"
    expected = last_logits(model)
    assert torch.equal(last_logits(load(every_checkpoint[arch], quantization="int4")), expected)
    dequantised = load(quantised[arch], quantization="none")
    assert not any(isinstance(layer.gemm, QuantisedGemm) for layer in linears(dequantised._network))
    assert torch.equal(last_logits(dequantised), expected)


def test_other_kernels_dequantise_and_say_so(quantised: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    expected = last_logits(load(quantised["llama"]))
    with caplog.at_level(logging.INFO):
        model = load(quantised["llama"], kernels="torch", numerics="fast")
    assert "weights in int4 are dequantised: torch kernels do not read them" in caplog.text
    assert "weights: float32" in caplog.text
    torch.testing.assert_close(last_logits(model), expected, atol=2e-4, rtol=2e-4)


def test_weights_take_less_memory(every_checkpoint: dict[str, Path]) -> None:
    sizes = {
        each: sum(layer.num_bytes for layer in linears(load(every_checkpoint["llama"], quantization=each)._network))
        for each in ("none", "int8", "int4")
    }
    assert sizes["int8"] < 0.3 * sizes["none"]
    assert sizes["int4"] < sizes["int8"]


@pytest.mark.parametrize("activation_dtype", ["none", "int8"])
def test_answers_do_not_depend_on_the_batch(activation_dtype: str, every_checkpoint: dict[str, Path]) -> None:
    def answers(max_num_seqs: int, budget: int) -> list[list[int]]:
        model = load_model(
            EmbeddedConfig(
                model_path=every_checkpoint["qwen3"],
                device="cpu",
                kernels="native",
                quantization="int4",
                activation_dtype=activation_dtype,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
            )
        )
        prompts = [
            [(7 * which + 3 * at) % 290 + 3 for at in range(length)] for which, length in enumerate((1, 5, 70, 300))
        ]
        return greedy_answers(model, prompts, 6, budget=budget, together=max_num_seqs)

    assert answers(4, 90) == answers(1, 512)


def test_rows_that_are_no_whole_groups_have_8_bits(every_checkpoint: dict[str, Path]) -> None:
    """The down projection of a mixture's experts, whose 40 columns are no multiple of 32; the
    router is not quantised.
    """
    model = load(every_checkpoint["qwen3_moe"], quantization="int4")
    bits = {
        layer.in_features: {part.bits for part in layer.gemm.packed.parts}
        for layer in linears(model._network)
        if isinstance(layer.gemm, QuantisedGemm)
    }
    assert bits[40] == {8}
    routers = [layer for layer in linears(model._network) if layer.out_features == 5]
    assert routers
    assert not any(isinstance(layer.gemm, QuantisedGemm) for layer in routers)
    assert 40 % GROUP


class TestRefusals:
    def test_kernels_that_do_not_read_them(
        self, every_checkpoint: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(StartupError, match="--quantization int8 needs the native kernels, not --kernels torch"):
            load(every_checkpoint["llama"], quantization="int8", kernels="torch")
        monkeypatch.setattr(native, "unavailable", lambda dtype, path=None: "there is no compiler")
        with pytest.raises(StartupError, match="--quantization int4 needs the native kernels: there is no compiler"):
            load(every_checkpoint["llama"], quantization="int4", kernels="auto")

    def test_activations_without_what_they_need(
        self, every_checkpoint: dict[str, Path], quantised: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        needed = "--activation-dtype int8 needs quantised weights"
        with pytest.raises(StartupError, match=needed):
            load(every_checkpoint["llama"], activation_dtype="int8")
        with pytest.raises(StartupError, match=needed):
            load(quantised["llama"], activation_dtype="int8", quantization="none")
        with pytest.raises(StartupError, match="int8 needs the native kernels, not --kernels torch"):
            load(quantised["llama"], activation_dtype="int8", kernels="torch")
        with pytest.raises(
            StartupError, match="--activation-dtype must be one of auto, none, int8, bfloat16, got 'int4'"
        ):
            EmbeddedConfig(model_path="", activation_dtype="int4").check()
        monkeypatch.setattr(native, "unavailable", lambda dtype, path=None: "there is no compiler")
        with pytest.raises(
            StartupError, match="--activation-dtype int8 needs the native kernels: there is no compiler"
        ):
            load(quantised["llama"], activation_dtype="int8", kernels="auto")

    def test_a_format_that_is_unknown(self, every_checkpoint: dict[str, Path]) -> None:
        with pytest.raises(StartupError, match="--quantization must be one of auto, none, int8, int4, got 'int3'"):
            EmbeddedConfig(model_path="", quantization="int3").check()

    def test_quantised_twice(self, quantised: dict[str, Path]) -> None:
        with pytest.raises(StartupError, match=r"--quantization int8: .* is quantised already \(int4\)"):
            load(quantised["llama"], quantization="int8")

    def test_other_architectures(self, quantised: dict[str, Path], tmp_path: Path) -> None:
        changed = changed_config(quantised["llama"], tmp_path, model_type="gemma")
        with pytest.raises(StartupError, match="quantised checkpoints of model type 'gemma' are not served"):
            load(changed)

    @pytest.mark.parametrize(
        ("name", "change", "reason"),
        [
            ("model.norm.weight", None, "weights are incomplete, tensor model.norm.weight of"),
            (
                "model.layers.0.mlp.up_proj.weight.codes",
                torch.zeros(3, 32, dtype=torch.uint8),
                "must be of shape",
            ),
            ("model.layers.0.mlp.up_proj.weight.scales", torch.full((128, 2), torch.nan).half(), "infinite or not a"),
            ("model.unknown.weight", torch.zeros(3), "has no place in the model"),
            (
                "model.layers.0.mlp.up_proj.weight.codes",
                torch.zeros(64, dtype=torch.int8),
                "must be of shape",
            ),
            (
                "model.layers.0.mlp.up_proj.weight.codes",
                torch.tensor(1, dtype=torch.int8),
                "must be of shape",
            ),
            ("model.layers.0.mlp.up_proj.weight.codes", torch.zeros(128, 64, 2, dtype=torch.int8), "must be of shape"),
            ("model.layers.0.mlp.up_proj.weight.codes", torch.zeros(128, 32), "must be of type I8 or U8"),
            ("model.layers.0.mlp.up_proj.weight.scales", torch.zeros(128, 0).half(), "is in no format"),
            ("model.layers.0.mlp.up_proj.weight.scales", torch.tensor(1.0), "is in no format"),
            ("model.layers.0.mlp.up_proj.weight.scales", torch.zeros(128, 3).half(), "is in no format"),
            ("model.layers.0.mlp.up_proj.weight.offsets", torch.zeros(128, 2, 1).half(), "is in no format"),
        ],
    )
    def test_damaged(
        self, name: str, change: torch.Tensor | None, reason: str, quantised: dict[str, Path], tmp_path: Path
    ) -> None:
        copied = tmp_path / "copied"
        shutil.copytree(quantised["llama"], copied)
        tensors = load_file(copied / "model.safetensors")
        if change is None:
            del tensors[name]
        else:
            tensors[name] = change
        save_file(tensors, copied / "model.safetensors")
        with pytest.raises(StartupError, match=reason):
            load(copied)

    @pytest.mark.parametrize(
        ("field", "value"), [("hidden_size", "64"), ("num_attention_heads", 0), ("num_key_value_heads", [1])]
    )
    @pytest.mark.parametrize("is_quantised", [True, False])
    def test_settings_that_make_no_model(
        self,
        field: str,
        value: object,
        is_quantised: bool,
        quantised: dict[str, Path],
        every_checkpoint: dict[str, Path],
        tmp_path: Path,
    ) -> None:
        source = (quantised if is_quantised else every_checkpoint)["llama"]
        changed = changed_config(source, tmp_path, **{field: value})
        with pytest.raises(StartupError, match=f"--model-path {changed}"):
            load(changed)

    def test_a_head_that_is_tied_and_there(self, quantised: dict[str, Path], tmp_path: Path) -> None:
        """It is taken where it differs from the embedding, as transformers does."""
        changed = changed_config(quantised["llama"], tmp_path, tie_word_embeddings=True)
        found = last_logits(load(changed))
        assert torch.equal(found, last_logits(load(quantised["llama"])))
        tensors = load_file(changed / "model.safetensors")
        without = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
        assert len(without) < len(tensors)
        save_file(without, changed / "model.safetensors")
        tied = last_logits(load(changed))
        assert not torch.equal(tied, found)
        embedding = "model.embed_tokens"
        same = {
            name.replace(embedding, "lm_head"): part.clone()
            for name, part in without.items()
            if name.startswith(embedding)
        }
        save_file(without | same, changed / "model.safetensors")
        assert torch.equal(tied, last_logits(load(changed)))


def changed_config(source: Path, directory: Path, **changes: object) -> Path:
    copied = directory / "copied"
    shutil.copytree(source, copied)
    settings = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(settings | changes))
    return copied


class TestCommand:
    def test_reports_and_writes_nothing(self, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
        before = sorted(checkpoints["llama"].iterdir())
        source = str(checkpoints["llama"])
        assert main(["quantize", source, "--to", "int8", "--activation-dtype", "none", "--report"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("perplexity on ")
        assert lines[1].startswith("the same likeliest token: ")
        assert float(lines[1].split()[4].rstrip("%")) > 90
        assert sorted(checkpoints["llama"].iterdir()) == before

    def test_reports_on_rounded_activations(
        self, checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = str(checkpoints["llama"])
        assert main(["quantize", source, "--to", "int8", "--report"]) == 0  # as it is served
        first, second = capsys.readouterr().out.splitlines()
        assert "int8, int8 activations (" in first
        assert float(second.split()[4].rstrip("%")) > 80
        for wrong in (("--report", "--kv-cache-dtype", "int8"), ("--to", "int8", "--output", "none")):
            with pytest.raises(SystemExit):
                main(["quantize", source, "--activation-dtype", "int8", *wrong])
            assert "--activation-dtype is of a report on quantised weights" in capsys.readouterr().err

    def test_writes(self, checkpoints: dict[str, Path], tmp_path: Path) -> None:
        target = tmp_path / "written"
        assert main(["quantize", str(checkpoints["qwen3"]), "--to", "int8", "--output", str(target)]) == 0
        assert torch.equal(last_logits(load(target)), last_logits(load(checkpoints["qwen3"], quantization="int8")))
        assert (target / "tokenizer.json").is_file()

    def test_refusals(self, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = str(checkpoints["llama"])
        for arguments, reason in (
            ((str(tmp_path / "none"), "--to", "int8", "--report"), "no such directory"),
            ((str(tmp_path), "--to", "int8", "--report"), "no config.json"),
            ((source, "--to", "int8", "--output", str(tmp_path)), "it is there already"),
        ):
            assert main(["quantize", *arguments]) == 1
            [line] = capsys.readouterr().err.splitlines()
            assert reason in line
        (tmp_path / "config.json").write_text("[]")
        assert main(["quantize", str(tmp_path), "--to", "int8", "--output", str(tmp_path / "new")]) == 1
        assert "config.json: must be a JSON object, got list" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["quantize", source, "--to", "int8"])
        assert "give --report, --output DIR, or both" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("damage", "reason"),
        [
            ("nan", f"tensor {UP} holds a number that is infinite or not a number"),
            ("missing", f"weights are incomplete, tensor {UP} of shape [128, 64] is missing"),
            ("codes", f"tensor {UP} must be of type F32, F16, BF16, F64, got 'I8'"),
            ("dynamic", "config.json: rope_parameters: rope type 'dynamic' is not served"),
            ("cut off", "model.safetensors: "),
            ("none", "it has no safetensors weights"),
        ],
    )
    def test_what_cannot_be_written_whole_is_not_written(
        self, damage: str, reason: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source, target = tmp_path / "source", tmp_path / "written"
        shutil.copytree(checkpoints["llama"], source)
        weights = source / "model.safetensors"
        if damage in ("nan", "missing", "codes"):
            tensors = load_file(weights)
            up = tensors.pop(UP)
            up[3, 5] = torch.nan if damage == "nan" else 0.0
            save_file(tensors | {"nan": {UP: up}, "codes": {UP: up.to(torch.int8)}}.get(damage, {}), weights)
        elif damage == "dynamic":
            config = json.loads((source / "config.json").read_text())
            config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
            (source / "config.json").write_text(json.dumps(config))
        elif damage == "cut off":
            weights.write_bytes(weights.read_bytes()[:-1])
        else:
            weights.rename(source / "model.bin")
        assert main(["quantize", str(source), "--to", "int8", "--output", str(target)]) == 1
        assert reason in capsys.readouterr().err
        assert [each.name for each in tmp_path.iterdir()] == ["source"]

    def test_a_full_disk_is_one_line_that_names_the_file(
        self, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "written"
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            status = main(["quantize", str(checkpoints["llama"]), "--to", "int8", "--output", str(target)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        [line] = capsys.readouterr().err.splitlines()
        assert status == 1
        assert "error: model.safetensors: " in line
        assert "File too large" in line
        assert not list(tmp_path.iterdir())
