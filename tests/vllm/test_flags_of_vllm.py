"""vLLM's own flags on the worker's command line, read by the parser of the installed version."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import pytest

from worker.arguments import OPTIONS, parse_arguments
from worker.engines.vllm import config_from
from worker.engines.vllm.settings import REFUSED
from worker.errors import ConfigurationError

OWN = {option.flag for option in OPTIONS}


def options(*argv: str) -> dict[str, Any]:
    return dict(config_from(parse_arguments(["--engine", "vllm", "--model", "/m", *argv], {})).options)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        options(*argv)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def actions() -> list[argparse.Action]:
    parser = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser(add_help=False)
    importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs.add_cli_args(parser, async_args_only=False)
    return [each for each in parser._actions if each.option_strings]


def test_flags_are_read_as_vllm_reads_them() -> None:
    made = options(
        *("--max-model-len", "32k", "--gpu-memory-utilization", "0.5", "--enforce-eager", "-tp", "2"),
        *("--no-enable-prefix-caching", "--quantization", "awq", "--kv-cache-dtype", "fp8", "--block-size", "32"),
        *("--max-num-seqs", "8", "--compilation-config.mode", "3"),
    )
    assert made.pop("compilation_config").mode == 3
    assert made == {
        "max_model_len": 32_000,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": True,
        "tensor_parallel_size": 2,
        "enable_prefix_caching": False,
        "quantization": "awq",
        "kv_cache_dtype": "fp8",
        "block_size": 32,
        "max_num_seqs": 8,
    }


def test_every_switch_is_taken_or_refused_by_name() -> None:
    """Those that the worker has itself are tested with its own options."""
    switches = [each for each in actions() if each.nargs == 0 and each.option_strings[0] not in OWN]
    assert len(switches) > 50
    for action in switches:
        flag = action.option_strings[0]
        if action.dest == "trust_remote_code":  # which a checkpoint without code does not need
            assert options(flag) == {}
        elif action.dest in REFUSED:
            assert refusal(flag) == f"{flag}: cannot be given: {REFUSED[action.dest]}"
        else:
            assert options(flag) == {action.dest: True}


def test_what_is_refused_as_an_argument_is_refused_as_a_flag() -> None:
    """The worker has two of them itself: the model's name, and drafts."""
    valued = [each for each in actions() if each.nargs != 0 and each.option_strings[0] not in {*OWN, "--model"}]
    refused = [each for each in valued if each.dest in REFUSED]
    assert len(refused) > 15
    for action in refused:
        flag = action.option_strings[0]
        said = [refusal(flag, str(text)) for text in [*list(action.choices or [])[:1], "1", "{}"]]
        assert f"{flag}: cannot be given: {REFUSED[action.dest]}" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--max-model-length", "8"],
            "unrecognized arguments: --max-model-length 8 (of the worker, or of vLLM); did you mean --max-model-len?",
        ),
        (
            ["--gpu-memory-utilisation", "0.5"],
            "unrecognized arguments: --gpu-memory-utilisation 0.5 (of the worker, or of vLLM); "
            "did you mean --gpu-memory-utilization?",
        ),
        (
            ["--kv-block-sizes", "8"],
            "unrecognized arguments: --kv-block-sizes 8 (of the worker, or of vLLM); did you mean --kv-block-size?",
        ),
        (["--brightness", "8"], "unrecognized arguments: --brightness 8 (of the worker, or of vLLM)"),
        (
            ["--gpu-memory-utilization", "x"],
            "argument --gpu-memory-utilization/--device-memory-utilization: invalid float value: 'x' "
            "(of the worker, or of vLLM)",
        ),
        (
            ["--served_model_name", "a", "--served-model-name", "b"],
            "--served-model-name is given 2 times",
        ),
        (
            ["--enforce-eager", "--config", "/no/file.yaml"],
            "vLLM cannot read --enforce-eager --config /no/file.yaml: "
            "[Errno 2] No such file or directory: '/no/file.yaml'",
        ),
        (
            ["--config", "settings.json"],
            "vLLM cannot read --config settings.json: Config file must be of a yaml/yml type. json supplied",
        ),
        (
            ["--compilation-config.mode"],
            "vLLM cannot read --compilation-config.mode: list index out of range",
        ),
        (
            ["--block-size", "32", "--kv-block-size", "16"],
            "--kv-block-size asks for block_size: 16, but --block-size says 32; give it in one place",
        ),
        (
            ["--seed", "3", "--engine-args", '{"seed": 4}'],
            "--seed says 3, but --engine-args says seed: 4; give it in one place",
        ),
    ],
)
def test_refusals(argv: list[str], message: str) -> None:
    assert refusal(*argv) == message
