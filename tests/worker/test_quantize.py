"""``python -m worker quantize``: what it writes is served as the checkpoint that it is made of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_checkpoint import load, logits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.models.chat_template import read_chat_template
from worker.quantize import command, main
from worker.tiny_model import write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
WEIGHTS = "model.safetensors"


def quantised_logits(source: Path) -> torch.Tensor:
    """Logits of the checkpoint that is written of a source."""
    target = source.with_name(f"{source.name}-int8")
    assert main([str(source), "--to", "int8", "--output", str(target)]) == 0
    return logits(load(target))


def test_tensors_without_a_place_are_no_obstacle(tmp_path: Path) -> None:
    """Older checkpoints have the frequencies of RoPE for each layer."""
    plain, older = (write_tiny_model(tmp_path / name) for name in ("plain", "older"))
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file(load_file(older / WEIGHTS) | frequencies, older / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(*map(quantised_logits, (plain, older)))


def test_names_of_a_model_without_a_head(tmp_path: Path) -> None:
    plain, short = (write_tiny_model(tmp_path / name, arch="qwen3") for name in ("plain", "short"))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(short / WEIGHTS).items()}
    save_file(tensors, short / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(*map(quantised_logits, (plain, short)))


def test_all_chat_templates_are_kept(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert main([str(source), "--to", "int8", "--output", str(tmp_path / "int8")]) == 0
    templates = [read_chat_template(path).template for path in (source, tmp_path / "int8")]
    assert [sorted(each.sources) for each in templates if each is not None] == [["default", "tool_use"]] * 2


def test_a_tokenizer_of_another_model_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_model(tmp_path / "source")
    letters = {letter: 2000 + number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    assert main([str(source), "--to", "int8", "--report"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("worker quantize: error: prompts[0].")


def test_what_is_wrong_is_told_before_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, there = write_tiny_model(tmp_path / "model"), tmp_path / "there"
    there.mkdir()
    assert main([str(model), "--to", "int8", "--report", "--output", str(there)]) == 1
    assert main([str(tmp_path / "none"), "--to", "int8", "--report"]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines() == [
        f"worker quantize: error: --output {there}: it is there already",
        f"worker quantize: error: {tmp_path / 'none'}: no such directory",
    ]


def test_a_report_that_nobody_reads_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write_tiny_model(tmp_path / "source"), tmp_path / "int8"
    monkeypatch.setattr(command, "report", lambda *options: ["one line", "another"])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main([str(source), "--to", "int8", "--report", "--output", str(target)]) == 0
    assert (target / WEIGHTS).is_file()


def test_the_handler_of_a_signal_is_that_of_before(tmp_path: Path) -> None:
    """In a process that quantises on its way."""
    earlier = signal.getsignal(signal.SIGTERM)
    for name, status in (("none", 1), ("source", 0)):
        write_tiny_model(tmp_path / "source")
        assert main([str(tmp_path / name), "--to", "int8", "--output", str(tmp_path / f"{name}-int8")]) == status
        assert signal.getsignal(signal.SIGTERM) is earlier


def test_a_signal_leaves_nothing_half_done(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source")
    program = (
        "import os, signal, sys, time\n"
        "from worker.quantize import main, output\n"
        "output.shutil.copyfile = lambda *paths: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60))\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", program, str(source), "--to", "int8", "--output", str(tmp_path / "int8")]
    ended = subprocess.run(command, cwd=REPOSITORY, timeout=60, check=False)
    assert (ended.returncode, [path.name for path in tmp_path.iterdir()]) == (143, ["source"])
