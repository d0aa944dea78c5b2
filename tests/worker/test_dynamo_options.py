"""Options and variables of Dynamo's own workers: every one of the installed version has a row, and
is what its row says.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from worker.arguments import OPTIONS, Arguments, parse_arguments
from worker.arguments.dynamo import Row, rows_for
from worker.arguments.dynamo.row import ByVariable, NoEffect, Only, ToOption, ToSetting
from worker.arguments.dynamo.shared import SHARED
from worker.arguments.dynamo.trtllm import TRTLLM
from worker.arguments.dynamo.vllm import VLLM
from worker.errors import ConfigurationError

ENGINES = ("trtllm", "vllm")
OWN = {option.flag: option for option in OPTIONS}
ROUTING = {flag for row in SHARED if not row.env for flag in row.spellings}
"""Flags whose variables are the frontend's too."""
DOCUMENTS = Path(__file__).parents[2] / "docs" / "migrating"


def parse(engine: str, *argv: str, **environ: str) -> Arguments:
    model = [] if "--model" in argv or "--model-path" in argv else ["--model-path", "/m"]
    return parse_arguments(["--engine", engine, *model, *argv], environ)


def refusal(engine: str, *argv: str, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        parse(engine, *argv, **environ)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Every option has a row


@cache
def installed(engine: str) -> dict[str, Any]:
    """What the installed Dynamo's own parser of this worker takes."""
    program = Path(__file__).with_name("dynamos_options.py")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(program), engine],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_every_option_of_dynamos_worker_has_a_row(engine: str) -> None:
    rows = {flag: row for row in rows_for(engine) for flag in row.spellings}
    options = installed(engine)["options"]
    assert len(options) > 50
    for option in options:
        for flag in option["flags"]:
            row = rows.get(flag)
            assert row is not None or flag in OWN, f"{flag} of dynamo.{engine} has no row in worker/arguments/dynamo/"
            variables = {OWN[flag].env} if row is None else set(row.env)
            assert flag in ROUTING or set(option["variables"]) <= variables, flag
            if row is not None and row.flags[0] not in OWN:
                assert row.takes == option["takes"], flag


@pytest.mark.parametrize("engine", ENGINES)
def test_every_variable_of_dynamos_worker_has_a_row(engine: str) -> None:
    known = {variable for row in rows_for(engine) for variable in row.env}
    assert set(installed(engine)["variables"]) - {f"DYN_{engine.upper()}_"} <= known


def test_flags_and_variables_have_one_row() -> None:
    for rows in (SHARED + TRTLLM, SHARED + VLLM):
        flags = [flag for row in rows for flag in row.spellings]
        variables = [variable for row in rows for variable in row.env]
        assert len(flags) == len(set(flags))
        assert len(variables) == len(set(variables))
        for row in rows:
            if isinstance(row.meaning, ToOption):
                assert row.meaning.name in {option.name for option in OPTIONS}


# Every row is followed

SAMPLES = {  # texts that an option takes, other than its default
    "--model": "/other",
    "--extra-engine-args": "/f.yaml",
    "--override-engine-args": "{}",
    "--disaggregation-mode": "agg",
    "--endpoint-types": "chat",
    "--free-gpu-memory-fraction": "0.5",
    "--load-format": "dummy",
    "--guided-decoding-backend": "xgrammar",
    "--enable-attention-dp": "true",
    "--modality": "multimodal",
    "--publish-kv-events": "false",
}
CASES = [(engine, row) for engine in ENGINES for row in rows_for(engine)]


NEEDS = {"--allowed-local-media-path": ["--modality", "multimodal"]}
"""Options that others need."""


def given(row: Row, text: str) -> list[str]:
    flag = row.flags[-1]
    if row.takes != "switch":
        return [flag, text]
    return [flag if text == "true" else "--no-" + flag.removeprefix("--")]


@pytest.mark.parametrize(
    ("engine", "row"), [one for one in CASES if one[1].flags], ids=lambda one: getattr(one, "name", one)
)
def test_a_flag_is_what_its_row_says(engine: str, row: Row) -> None:
    meaning = row.meaning
    text = SAMPLES.get(row.flags[0], "true" if row.takes == "switch" else "8")
    argv = ["--model-path", "/m"] * (row.flags[0] != "--model") + NEEDS.get(row.flags[0], [])
    if isinstance(meaning, ToOption):
        same = parse_arguments(["--engine", engine, *argv, *_own(meaning, text)], {})
        assert parse(engine, *given(row, text), *NEEDS.get(row.flags[0], [])) == same
        for refused, reason in meaning.refused.items():
            assert refusal(engine, *given(row, refused)) == f"{row.flags[-1]} {refused} is refused: {reason}"
    elif isinstance(meaning, ToSetting):
        (setting,) = parse(engine, *given(row, text)).engine_settings
        assert (".".join(setting.path), setting.value) == (meaning.path, meaning.parse(text))
        assert row.flags[-1] in setting.source
    elif isinstance(meaning, ByVariable):
        assert refusal(engine, *given(row, text)).endswith(f"set {row.env[0]}, which Dynamo's runtime reads")
    elif isinstance(meaning, NoEffect):
        assert parse(engine, *given(row, text)) == parse(engine)
    elif isinstance(meaning, Only):
        for value in meaning.values:
            assert parse(engine, *given(row, value)) == parse(engine)
        wrong = next(each for each in (text, "true", "false") if each not in meaning.values)
        said = refusal(engine, *given(row, wrong))
        assert said.startswith(given(row, wrong)[0])
        assert said.endswith(f"is refused: {meaning.reason}")


def _own(meaning: ToOption, text: str) -> list[str]:
    (option,) = (each for each in OPTIONS if each.name == meaning.name)
    return [option.flag, meaning.values.get(text, text)]


@pytest.mark.parametrize(
    ("engine", "row", "variable"),
    [(engine, row, variable) for engine, row in CASES for variable in row.env],
    ids=lambda one: getattr(one, "name", one),
)
def test_a_variable_is_what_its_row_says(engine: str, row: Row, variable: str) -> None:
    text = SAMPLES.get(row.name, "true" if row.takes == "switch" else "8")
    assert parse(engine, **{variable: ""}) == parse(engine)
    if isinstance(row.meaning, Only):
        for value in row.meaning.values:
            assert parse(engine, **{variable: value}) == parse(engine)
        wrong = next(each for each in (text, "true", "false") if each not in row.meaning.values)
        assert refusal(engine, **{variable: wrong}) == f"{variable} {wrong} is refused: {row.meaning.reason}"
    elif isinstance(row.meaning, (ByVariable, NoEffect)):
        assert parse(engine, **{variable: text}) == parse(engine)
    elif isinstance(row.meaning, ToOption):
        environ = {variable: text}
        by_variable = parse_arguments(
            ["--engine", engine, *([] if row.name == "--model" else ["--model-path", "/m"]), *NEEDS.get(row.name, [])],
            environ,
        )
        assert by_variable == parse(engine, *given(row, text), *NEEDS.get(row.name, []))
    else:
        (setting,) = parse(engine, **{variable: text}).engine_settings
        assert (".".join(setting.path), setting.source) == (row.meaning.path, variable)


def test_a_deployment_of_dynamos_is_taken_as_it_is() -> None:
    made = parse(
        "trtllm",
        *("--model-path", "/models/qwen3", "--served-model-name", "Qwen/Qwen3-0.6B", "--modality", "text"),
        *("--max-batch-size", "16", "--max-num-tokens", "8192", "--max-seq-len", "4096", "--connector", "none"),
        *("--disaggregation-mode", "pd", "--publish-events-and-metrics", "--dyn-endpoint-types", "chat"),
        *("--encode-endpoint", "", "--no-enable-attention-dp", "--expert-parallel-size", "2"),
        *("--trtllm.kv_cache_config.free_gpu_memory_fraction", "0.5", "--trtllm.print_iter_log", "true"),
        DYN_TRTLLM_TENSOR_PARALLEL_SIZE="2",
        DYN_TRTLLM_PIPELINE_PARALLEL_SIZE="2",
    )
    assert (made.model_path, made.served_model_name) == ("/models/qwen3", "Qwen/Qwen3-0.6B")
    assert (made.max_num_seqs, made.max_num_batched_tokens, made.context_length) == (16, 8192, 4096)
    assert (made.disaggregation_mode, made.enable_kv_routing, made.endpoint_types) == ("aggregated", True, "chat")
    assert (made.tensor_parallel_size, made.pipeline_parallel_size) == (2, 2)
    assert [(".".join(each.path), each.value) for each in made.engine_settings] == [
        ("moe_expert_parallel_size", 2),
        ("enable_attention_dp", False),
        ("kv_cache_config.free_gpu_memory_fraction", 0.5),
        ("print_iter_log", True),
    ]


# Sources


def test_the_command_line_wins_over_the_environment() -> None:
    made = parse(
        "trtllm",
        "--max-batch-size",
        "4",
        "--load-format",
        "auto",
        DYN_TRTLLM_MAX_BATCH_SIZE="8",
        DYN_TRTLLM_LOAD_FORMAT="dummy",
    )
    assert made.max_num_seqs == 4
    assert [each.value for each in made.engine_settings] == ["auto"]
    assert parse("trtllm", "--max-num-seqs", "4", DYN_TRTLLM_MAX_BATCH_SIZE="8").max_num_seqs == 4
    assert parse("trtllm", "--max-batch-size", "4", WORKER_MAX_NUM_SEQS="8").max_num_seqs == 4


@pytest.mark.parametrize(
    ("engine", "argv", "environ", "message"),
    [
        (
            "trtllm",
            ["--max-batch-size", "8", "--max-num-seqs", "9"],
            {},
            "--max-batch-size says 8, but --max-num-seqs says 9; give one of them",
        ),
        (
            "trtllm",
            [],
            {"DYN_TRTLLM_TENSOR_PARALLEL_SIZE": "2", "WORKER_TENSOR_PARALLEL_SIZE": "4"},
            "DYN_TRTLLM_TENSOR_PARALLEL_SIZE says 2, but WORKER_TENSOR_PARALLEL_SIZE says 4; give one of them",
        ),
        (
            "trtllm",
            ["--load-format", "auto", "--trtllm.load_format", "dummy"],
            {},
            "--trtllm.load_format says dummy, but --load-format says auto; give one of them",
        ),
        ("trtllm", [], {"DYN_TRTLLM_TP_SIZE": "2"}, "unknown environment variable DYN_TRTLLM_TP_SIZE"),
        ("vllm", [], {"DYN_VLLM_TP_SIZE": "2"}, "unknown environment variable DYN_VLLM_TP_SIZE"),
        (
            "embedded",
            [],
            {"DYN_TRTLLM_TENSOR_PARALLEL_SIZE": "2"},
            "DYN_TRTLLM_TENSOR_PARALLEL_SIZE needs --engine trtllm, but the engine is embedded",
        ),
        ("trtllm", [], {"DYN_VLLM_HEADLESS": "0"}, "DYN_VLLM_HEADLESS needs --engine vllm, but the engine is trtllm"),
        (
            "embedded",
            ["--free-gpu-memory-fraction", "0.5"],
            {},
            "--free-gpu-memory-fraction 0.5 is refused: it needs --engine trtllm",
        ),
        (
            "trtllm",
            ["--free-gpu-memory-fraction", "1.5"],
            {},
            "--free-gpu-memory-fraction must be a fraction above 0, of at most 1, got '1.5'",
        ),
        (
            "trtllm",
            [],
            {"DYN_TRTLLM_ENABLE_ATTENTION_DP": "maybe"},
            "DYN_TRTLLM_ENABLE_ATTENTION_DP must be true or false, got 'maybe'",
        ),
        ("trtllm", ["--max-batch-size"], {}, "argument --max-batch-size: expected one argument"),
        ("trtllm", ["--trtllm.load_format"], {}, "argument --trtllm.load_format: expected one argument"),
        (
            "trtllm",
            ["--trtllm.kv_cache_config.", "1"],
            {},
            "--trtllm.kv_cache_config.: must name an argument, and keys in it, separated by dots",
        ),
        ("embedded", ["--trtllm.load_format", "auto"], {}, "unrecognized arguments: --trtllm.load_format auto"),
        ("trtllm", ["--max-model-len", "8"], {}, "unrecognized arguments: --max-model-len 8"),
    ],
)
def test_refusals(engine: str, argv: list[str], environ: dict[str, str], message: str) -> None:
    assert refusal(engine, *argv, **environ) == message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("0.5", 0.5),
        ("1e-3", 0.001),
        ("True", True),
        ("false", False),
        ("null", None),
        ("-1", -1),
        ("a b", "a b"),
    ],
)
def test_values_of_dotted_flags(text: str, value: object) -> None:
    (setting,) = parse("trtllm", "--trtllm.model_kwargs.a", text).engine_settings
    assert (setting.path, setting.source) == (("model_kwargs", "a"), "--trtllm.model_kwargs.a")
    assert setting.value == value
    assert type(setting.value) is type(value)


def test_with_the_embedded_engine_dynamos_names_count() -> None:
    made = parse("embedded", "--max-batch-size", "8", "--max-num-tokens", "4096", "--no-publish-kv-events")
    assert (made.max_num_seqs, made.max_num_batched_tokens, made.enable_kv_routing) == (8, 4096, False)
    assert parse("embedded", "--model", "/x").model_path == "/x"


def test_flags_of_vllms_own_are_left_for_its_parser() -> None:
    made = parse("vllm", "--max-model-len", "32k", "--quantization", "awq", "--max-num-seqs", "8", "--enforce-eager")
    assert made.engine_flags == ("--max-model-len", "32k", "--quantization", "awq", "--enforce-eager")
    assert (made.max_num_seqs, made.quantization) == (8, "auto")


def runtimes_variables() -> list[str]:
    """Variables that docs/configuration.md leaves to Dynamo's runtime."""
    text = (DOCUMENTS.parent / "configuration.md").read_text(encoding="utf-8")
    section = text.partition("## Variables that the runtime reads\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return re.findall(r"`(\w+)`", "".join(cells))


@pytest.mark.parametrize("engine", ["embedded", *ENGINES])
def test_the_runtimes_variables_are_left_to_it(engine: str) -> None:
    names = runtimes_variables()
    assert {"DYN_SYSTEM_PORT", "DYN_HEALTH_CHECK_PAYLOAD"} <= set(names)
    for name in names:
        assert parse(engine, **{name: "1"}).engine == engine


# The document


def meaning_of(row: Row) -> str:
    """The last column of the document's table."""
    meaning = row.meaning
    if isinstance(meaning, ToOption):
        (option,) = (each for each in OPTIONS if each.name == meaning.name)
        others = [f"`{each}` is `{to}`" for each, to in meaning.values.items()]
        others += [f"`{each}` is refused: {reason}" for each, reason in meaning.refused.items()]
        same = "the same" if option.flag in row.flags else f"`{option.flag}`"
        return "; ".join([same, *others])
    if isinstance(meaning, ToSetting):
        refused = [f"; `{each}` is refused: {reason}" for each, reason in meaning.refused.items()]
        return f"`{meaning.path}` of TensorRT-LLM's arguments{''.join(refused)}"
    if isinstance(meaning, ByVariable):
        return "refused; its variable counts, which Dynamo's runtime reads"
    if isinstance(meaning, NoEffect):
        return f"no effect: {meaning.reason}"
    if not meaning.values:
        return f"refused: {meaning.reason}"
    return f"{' or '.join(f'`{each}`' for each in meaning.values)} alone: {meaning.reason}"


def table(rows: tuple[Row, ...], prefix: str) -> str:
    lines = ["| option of Dynamo's | variable with another name | here |", "| --- | --- | --- |"]
    for said, group in groupby(rows, meaning_of):
        same = list(group)
        flags = ", ".join(f"`{flag}`" for row in same for flag in row.flags)
        usual = {prefix + flag.removeprefix("--").replace("-", "_").upper() for row in same for flag in row.flags}
        variables = ", ".join(f"`{variable}`" for row in same for variable in row.env if variable not in usual)
        lines.append(f"| {flags} | {variables} | {said} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "rows", "document", "prefix"),
    [
        ("trtllm", TRTLLM, "dynamo-trtllm.md", "DYN_TRTLLM_"),
        ("vllm", VLLM, "dynamo-vllm.md", "DYN_VLLM_"),
        ("shared", SHARED, "dynamo-trtllm.md", "DYN_"),
    ],
)
def test_the_documents_show_the_rows(name: str, rows: tuple[Row, ...], document: str, prefix: str) -> None:
    """On failure, paste the left side behind the comment of its name."""
    shown = (DOCUMENTS / document).read_text(encoding="utf-8").partition(f"<!-- {name} -->\n\n")[2]
    assert table(rows, prefix) == shown[: len(table(rows, prefix))]
