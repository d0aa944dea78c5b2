"""The front door's options, its start and its end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from worker.arguments import keys_in
from worker.errors import ConfigurationError, StartupError
from worker.frontdoor.options import OPTIONS, parse_options
from worker.frontdoor.process import make_front_door
from worker.frontdoor.tools import ToolCallSettings

UPSTREAM = ("--upstream", "http://127.0.0.1:1, http://[::1]:2/")


def test_the_document_shows_the_options() -> None:
    document = (Path(__file__).parents[2] / "docs" / "front-door.md").read_text()
    shown = re.findall(r"^\| `(--\S+)` \| (\S*) \| (.*) \|$", document, re.MULTILINE)
    written = [(one.flag, "" if one.default in (None, ()) else str(one.default), one.help) for one in OPTIONS]
    assert written == shown


def test_the_command_line_wins_over_the_environment() -> None:
    environ = {"FRONT_DOOR_PORT": "1", "FRONT_DOOR_HOST": "h", "FRONT_DOOR_API_KEY_FILE": "", "FRONT_DOOR": "on"}
    options = parse_options([*UPSTREAM, "--port", "2"], environ)
    assert (options.host, options.port, options.api_key_file) == ("h", 2, None)
    assert [str(upstream) for upstream in options.upstream] == ["http://127.0.0.1:1", "http://[::1]:2"]
    assert options.body_limit_mib == 8


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, False),
        (["--playground"], {}, True),
        ([], {"FRONT_DOOR_PLAYGROUND": "true"}, True),
        ([], {"FRONT_DOOR_PLAYGROUND": "True"}, True),
        (["--playground", "false"], {"FRONT_DOOR_PLAYGROUND": "true"}, False),
    ],
)
def test_the_playground_is_a_switch(argv: list[str], environ: dict[str, str], expected: bool) -> None:
    assert parse_options([*UPSTREAM, *argv], environ).playground is expected


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, None),
        ([], {"FRONT_DOOR_BATCH_DIR": "off"}, None),
        (["--batch-dir", "off", "--reuse-port"], {"FRONT_DOOR_BATCH_DIR": "d"}, None),
        (["--batch-dir", "./off"], {"FRONT_DOOR_BATCH_DIR": "off"}, "./off"),
    ],
)
def test_batches_are_switched_off_by_name(argv: list[str], environ: dict[str, str], expected: str | None) -> None:
    options = parse_options([*UPSTREAM, "--response-store-mib", "0", *argv], environ)
    assert options.batch_dir == expected


def test_third_party_processors_are_the_workers() -> None:
    arguments = ["--engine", "trtllm", "--logits-processor", "a/b=m:C", "--logits-processor=a/d=m:E"]
    options = parse_options([*UPSTREAM, "--", *arguments], {"WORKER_ALLOW_LOGITS_PROCESSORS": "x, y"})
    assert options.logits_processor == ("a/b=m:C", "a/d=m:E")
    assert options.allow_logits_processors == ("x", "y")
    with pytest.raises(StartupError, match="x, y"):
        make_front_door(options)


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {}, None),
        (["--", "--dyn-tool-call-parser", "hermes"], {}, ToolCallSettings("hermes", frontend_parses=True)),
        (["--", "--dyn_tool_call_parser=hermes"], {}, ToolCallSettings("hermes", frontend_parses=True)),
        (
            ["--", "--dyn-tool-call-parser=a", "--dyn-tool-call-parser", "phi4"],
            {},
            ToolCallSettings("phi4", frontend_parses=True),
        ),
        (
            ["--", "--dyn-reasoning-parser=qwen3"],
            {"DYN_TOOL_CALL_PARSER": "hermes"},
            ToolCallSettings("hermes", "answer", frontend_parses=True),
        ),
        (["--", "--dyn-tool-call-parser", "minimax_m2"], {}, None),
        (["--tool-call-format", "harmony", "--", "--dyn-reasoning-parser=gpt_oss"], {}, ToolCallSettings("harmony")),
        (["--tool-call-format", "none", "--", "--dyn-tool-call-parser", "hermes"], {}, None),
        (
            ["--tool-call-format", "mistral"],
            {"DYN_TOOL_CALL_PARSER": "hermes"},
            ToolCallSettings("mistral", frontend_parses=True),
        ),
    ],
)
def test_the_format_of_calls_is_the_workers(
    argv: list[str], environ: dict[str, str], expected: ToolCallSettings | None
) -> None:
    assert parse_options([*UPSTREAM, *argv], environ).calls == expected


def model(path: Path, template: str) -> str:
    path.mkdir()
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(path)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
WITH_TOOLS = "{% if tools %}{{ tools | tojson }} Write functools[...]{% endif %}" + PLAIN


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("token", ["<tool_call>", "</tool_call>", "<|im_end|>"])
def test_marks_of_calls_may_be_special_tokens(tmp_path: Path, token: str, special: bool) -> None:
    """In some models of a format; the frontend leaves them out unless it is asked for them."""
    path = model(tmp_path / "model", PLAIN)
    tokens = [{"content": token, "special": special}, {"content": "</s>", "special": True}]
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    calls = parse_options([*UPSTREAM, "--model-path", path, "--tool-call-format", "hermes"], {}).calls
    assert calls is not None
    assert calls.special_tokens == ({token, "</s>"} if special and "tool_call" in token else frozenset())


def test_the_format_of_calls_is_found_from_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    plain, tools = model(tmp_path / "plain", PLAIN), model(tmp_path / "tools", WITH_TOOLS)

    def found(*argv: str, **environ: str) -> tuple[str, bool] | None:
        calls = parse_options([*UPSTREAM, *argv], environ).calls
        return None if calls is None else (calls.name, calls.support is not None and calls.support.tools)

    assert found("--model-path", plain) == ("neutral", False)
    assert found("--", "--model-path", tools, "--engine", "embedded") == ("phi4", True)
    assert found("--model-path", plain, "--", "--model-path", tools) == ("neutral", False)
    assert found(WORKER_MODEL_PATH=tools) == ("phi4", True)
    assert found("--model-path", plain, "--tool-call-format", "hermes") == ("hermes", False)
    assert found("--model-path", plain, "--tool-call-format", "none") is None
    assert found("--model-path", tools, "--", "--dyn-tool-call-parser", "nemotron_deci") == ("nemotron_deci", True)
    (tmp_path / "own.jinja").write_text(PLAIN)
    own = ("--", "--custom-jinja-template", str(tmp_path / "own.jinja"))
    assert found("--model-path", tools, *own) == ("neutral", False)
    assert found("--tool-call-format", "neutral") == ("neutral", False)
    assert not caplog.records
    assert found("--model-path", str(tmp_path / "missing.gguf")) is None
    assert found("--model-path", model(tmp_path / "broken", "{% if %}")) is None
    assert "broken cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        ([], {}, "--upstream is required"),
        (["--upstream", "https://a:1"], {}, "--upstream must be http://host:port"),
        (["--upstream", "http://a:1/v1"], {}, "--upstream must be"),
        (["--upstream", "http://a..b:1"], {}, "--upstream must be http://host:port"),
        (["--upstream", "http://a,http://" + "b" * 70], {}, "--upstream must be http://host:port"),
        ([*UPSTREAM, "--host", "a..b"], {}, "--host must be an address or the name of a host, got 'a..b'"),
        (["--upstream", "grpc://a"], {}, "--upstream must be grpc://host:port"),
        (["--upstream", "grpc://a..b:1"], {}, "--upstream must be grpc://host:port"),
        (["--upstream", "grpc://a:1,http://a:2"], {}, "--upstream must be grpc://host:port"),
        (["--upstream", "grpc://a:1/path", "--model-path", "/m"], {}, "--upstream must be grpc://host:port"),
        (["--upstream", "grpc://a:1"], {}, "--upstream grpc:// needs --model-path"),
        (["--upstream", "http://a:1", "--upstream-token-file", "/t"], {}, "--upstream-token-file and"),
        ([*UPSTREAM, "--port", "70000"], {}, "--port must be a port number"),
        ([*UPSTREAM, "--body-limit-mib", "0"], {}, "--body-limit-mib must be an integer of at least 1"),
        ([*UPSTREAM, "--body-limit-mib", "1" * 10], {}, "--body-limit-mib must be an integer of at least 1"),
        ([*UPSTREAM, "--max-connections", "1" * 10], {}, "--max-connections must be an integer of at least 1"),
        ([*UPSTREAM, "--send-timeout-s", "0"], {}, "--send-timeout-s must be a number of seconds above 0"),
        ([*UPSTREAM, "--tool-call-format", "yaml"], {}, "--tool-call-format must be auto, none or one of hermes"),
        ([*UPSTREAM, "--playground", "on"], {}, "--playground must be true or false"),
        ([*UPSTREAM, "--reuse-port"], {}, "--reuse-port needs --response-store-mib 0"),
        ([*UPSTREAM, "--reuse-port", "--response-store-mib", "0", "--batch-dir", "/b"], {}, "no --batch-dir"),
        ([*UPSTREAM, "--zzz", "1"], {}, "--zzz"),
        ([*UPSTREAM, "http://c:3"], {}, "unrecognized arguments: http://c:3"),
        ([*UPSTREAM, "--cors-origins", "https://a", "https://b", "--"], {}, "unrecognized arguments: https://b"),
        ([*UPSTREAM, "--upstream", "http://c:3"], {}, "--upstream is given 2 times"),
        (UPSTREAM, {"FRONT_DOOR_ZZZ": "1"}, "unknown environment variable FRONT_DOOR_ZZZ"),
        (UPSTREAM, {"FRONT_DOOR_PORT": "x"}, "FRONT_DOOR_PORT must be"),
    ],
)
def test_wrong_options_are_named(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        parse_options(argv, environ)


def test_api_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of March\nfirst\n\n second \n")
    assert keys_in(str(path), "--api-key-file") == ["first", "second"]
    path.write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")  # as editors of Windows write it
    assert keys_in(str(path), "--api-key-file") == ["first", "second"]
    assert keys_in(None, "--api-key-file") == []
    path.write_text("# none\n")
    for wrong in (path, tmp_path / "missing"):
        with pytest.raises(StartupError, match="--api-key-file"):
            keys_in(str(wrong), "--api-key-file")


def test_hosts_headers_rates_and_workers() -> None:
    options = parse_options(
        [
            *UPSTREAM,
            "--allowed-hosts",
            "api.example, b",
            "--client-header",
            "X-Forwarded-For",
            "--body-rate-kib-s",
            "0",
        ],
        {"FRONT_DOOR_WORKER_METRICS": "http://127.0.0.1:3,http://[::1]:4"},
    )
    assert options.allowed_hosts == ("api.example", "b")
    assert (options.client_header, options.body_rate_kib_s) == ("X-Forwarded-For", 0.0)
    assert [str(each) for each in options.worker_metrics] == ["http://127.0.0.1:3", "http://[::1]:4"]
    for argv in (["--allowed-hosts", "a:b c"], ["--client-header", "a b"], ["--body-rate-kib-s", "-1"]):
        with pytest.raises(ConfigurationError, match=argv[0]):
            parse_options([*UPSTREAM, *argv])


def test_the_process_imports_no_engine() -> None:
    program = (
        "import sys; sys.argv[1:] = ['--upstream', 'none']\n"
        "from worker.frontdoor.__main__ import run\n"
        "assert run() == 2\n"
        "roots = ('worker.engines.embedded', 'transformers', 'torch._meta_registrations', 'torch._dynamo', 'dynamo')\n"
        "print([name for name in roots if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
