from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from launched_script import REPOSITORY, LaunchedScript, is_loopback, launched
from ports import FIRST, free_port

from worker.arguments import OPTIONS, parse_arguments
from worker.errors import ConfigurationError
from worker.tiny_model import write_tiny_model

SCRIPTS = sorted(each.name for each in (REPOSITORY / "launch").glob("*.sh") if os.access(each, os.X_OK))
HELLO = [{"role": "user", "content": "Hello"}]


def chat(script: LaunchedScript, max_tokens: int = 16) -> str | None:
    with script.client() as client:
        answer = client.chat.completions.create(model=script.model, messages=HELLO, max_tokens=max_tokens)  # type: ignore[arg-type]
    return answer.choices[0].message.content


def streamed_chat(script: LaunchedScript, max_tokens: int = 16) -> str:
    with script.client() as client:
        stream = client.chat.completions.create(model=script.model, messages=HELLO, max_tokens=max_tokens, stream=True)  # type: ignore[arg-type]
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)  # type: ignore[union-attr]


def test_serves_on_loopback_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, variables={"MODEL_PATH": "tiny"}) as script:
        script.wait_until_ready()
        assert script.url == f"http://127.0.0.1:{script.port}/v1"
        assert script.model == "tiny-model"
        answer = chat(script)
        assert answer
        assert streamed_chat(script) == answer
        with script.client() as client, pytest.raises(openai.APIStatusError) as refused:
            client.completions.create(model=script.model, prompt="a" * (2 * 2**20 + 1), max_tokens=1)
        assert refused.value.status_code == 413  # a body of that size costs the frontend hundreds of MB
        with urllib.request.urlopen(f"http://127.0.0.1:{script.port}/playground") as page:
            assert b"<title>Playground" in page.read()
        listening = script.listening()
        assert len(listening) >= 2
        assert [address for address in listening if not is_loopback(address)] == []
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        assert f"agg: in a browser: http://127.0.0.1:{script.port}/playground\n" in script.output
        script.assert_nothing_left(children)


def test_the_printed_curl_works(tmp_path: Path) -> None:
    with launched(tmp_path) as script:
        script.wait_until_ready()
        assert '"finish_reason":"length"' in script.run_printed_curl()


def test_a_request_under_way_at_sigterm_finishes(tmp_path: Path) -> None:
    with launched(tmp_path) as script:
        script.wait_until_ready()
        children = script.children()
        with script.client() as client:
            stream = client.completions.create(
                model=script.model,
                prompt="Hello",
                max_tokens=1000,
                stream=True,
                extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
            )
            chunks = iter(stream)
            next(chunks)
            script.process.send_signal(signal.SIGTERM)
            rest = list(chunks)
        assert [c.choices[0].finish_reason for c in rest if c.choices][-1] == "length"
        assert rest[-1].usage is not None
        assert rest[-1].usage.completion_tokens == 1000
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("worker", "worker"),
        pytest.param("dynamo.frontend", "frontend", marks=pytest.mark.campaign),
        pytest.param("worker.frontdoor", "front door", marks=pytest.mark.campaign),
    ],
)
def test_the_death_of_one_stops_the_other(tmp_path: Path, module: str, name: str) -> None:
    with launched(tmp_path) as script:
        script.wait_until_ready()
        children = script.children()
        script.named(module).kill()
        assert script.finish() == 1
        assert f"error: the {name} ended with status 137; stopping" in script.output
        script.assert_nothing_left(children)


def test_nothing_outlives_a_killed_script(tmp_path: Path) -> None:
    with launched(tmp_path) as script:
        script.wait_until_ready()
        processes = [script.named("dynamo.frontend"), script.named("worker")]
        script.process.kill()
        script.process.wait()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert alive == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_nothing_outlives_a_script_ended_while_the_model_loads(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    with launched(tmp_path) as script:
        processes = [script.probe(), *script.children()]
        script.process.send_signal(number)
        assert script.finish() == status, script.output
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert alive == []
        if status > 0:
            script.assert_nothing_left(processes)


@pytest.mark.parametrize("variable", ["DYNAMO_ENABLE_TEST_LOGITS_PROCESSOR", "DYN_ENABLE_TEST_LOGITS_PROCESSOR"])
def test_smoke(tmp_path: Path, variable: str) -> None:
    with launched(tmp_path, variables={variable: "1"}) as script:
        script.wait_until_ready()
        assert chat(script) == "Hello world!"
        assert streamed_chat(script) == "Hello world!"


def test_model_name_and_arguments_reach_the_worker(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "checkpoint")
    variables = {"MODEL_PATH": "checkpoint", "SERVED_MODEL_NAME": "mine", "ENGINE": "embedded"}
    with launched(tmp_path, "--context-length", "40", variables=variables) as script:
        script.wait_until_ready()
        assert script.model == "mine"
        with script.client() as client:
            answer = client.completions.create(model="mine", prompt="a", extra_body={"ignore_eos": True})
        assert answer.usage is not None
        assert answer.usage.total_tokens == 40
        assert not (tmp_path / "cache/dynamo-logits-worker").exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        ((), {"MODEL_PATH": "nowhere"}, "worker: error: --model-path nowhere: no such directory"),
        (("--no-such-option",), {}, "worker: error: unrecognized arguments: --no-such-option"),
        (
            (),
            {"ENGINE": "vroom"},
            "worker: error: --engine must be one of embedded, trtllm, vllm, constant, got 'vroom'",
        ),
    ],
)
def test_a_worker_that_refuses_to_start(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str], line: str
) -> None:
    with launched(tmp_path, *arguments, variables=variables) as script:
        assert script.finish() == 1
        assert line in script.output.splitlines()
        assert "error: the worker ended with status" in script.output
        script.assert_nothing_left([])


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with launched(tmp_path, variables={"HTTP_PORT": port}) as script:
            assert script.finish() == 1
            assert script.output == f"agg: error: port {port} on 127.0.0.1 is taken; set HTTP_PORT to a free one\n"


def test_ports_behind_the_front_door_are_not_ephemeral_ones() -> None:
    """A frontend takes seconds to begin, in which a connection, or a test's server, may get it."""
    program = f"usage() {{ :; }}; source {REPOSITORY}/launch/lib.sh; python={sys.executable}; free_port"
    for _ in range(5):
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
        assert 10_000 <= int(done.stdout) < FIRST


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_no_port(tmp_path: Path, port: str) -> None:
    with launched(tmp_path, variables={"HTTP_PORT": port}) as script:
        assert script.finish() == 1
        assert script.output == f"agg: error: HTTP_PORT must be a port number, got '{port}'\n"


@pytest.mark.parametrize("limit", ["2.5", "0", "many", "010"])
def test_a_limit_of_bodies_that_is_none(tmp_path: Path, limit: str) -> None:
    with launched(tmp_path, variables={"DYN_HTTP_BODY_LIMIT_MB": limit}) as script:
        assert script.finish() == 1
        said = f"DYN_HTTP_BODY_LIMIT_MB must be a number from 1 to 100000, got '{limit}'"
        assert script.output == f"agg: error: {said}\n"
        script.assert_nothing_left([])


def sourced(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program after what the launch scripts share, with the arguments of a script."""
    command = ["bash", "-c", f"usage() {{ :; }}; source {REPOSITORY}/launch/lib.sh; {program}", "agg.sh", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "variables", "seconds"),
    [
        ((), {}, 135),
        (("--drain-timeout-s", "30.5"), {}, 135),
        (("--drain-timeout-s", "300"), {}, 315),
        (("--drain-timeout-s=08000.5",), {"WORKER_DRAIN_TIMEOUT_S": "600"}, 8015),
        ((), {"WORKER_DRAIN_TIMEOUT_S": "600"}, 615),
        ((), {"FRONT_DOOR_DRAIN_TIMEOUT_S": "200"}, 215),
        (("--drain-timeout-s", "ten"), {}, 135),
        ((), {"WORKER_DRAIN_TIMEOUT_S": "600", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "30"}, 646),
        ((), {"DYN_PREFILL_DRAIN_TIMEOUT_S": "90.5", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "soon"}, 226),
    ],
)
def test_a_worker_has_the_time_of_its_drain(arguments: Any, variables: dict[str, str], seconds: int) -> None:
    """It was killed after two minutes, and with it the requests that it was told to finish."""
    assert sourced("echo $stop_timeout_s", *arguments, **variables).stdout == f"{seconds}\n"


def test_the_variables_of_dynamo_are_known() -> None:
    """A worker on another runtime refuses them, and takes the others, which thus stay set."""
    (named,) = sourced('echo "${dynamos_variables[@]}"').stdout.splitlines()
    refused = {"DYN_NAMESPACE_WORKER_SUFFIX", "DYN_DISCOVERY_BACKEND"}  # the latter means nothing to it
    for option in OPTIONS:
        value = next((one for one in option.choices if one != option.default), "chat")
        try:
            parse_arguments(["--model-path", "/m", "--runtime", "openengine"], {option.env: value})
        except ConfigurationError as error:
            if option.env.startswith("DYN_") and str(error).endswith("needs --runtime dynamo"):
                refused.add(option.env)
    assert refused == set(named.split())


def test_the_workers_own_variable_chooses_the_environment(tmp_path: Path) -> None:
    program = "python=python3; choose_worker_python; echo $worker_python"
    nowhere = str(tmp_path / "none")
    for variable in ("ENGINE", "WORKER_ENGINE"):
        done = sourced(program, DLW_VLLM_VENV=nowhere, **{variable: "vllm"})
        assert f"error: --engine vllm: no Python at {nowhere}/bin/python" in done.stderr
    assert sourced(program, DLW_VLLM_VENV=nowhere).stdout == "python3\n"
    assert sourced(program, DLW_VLLM_VENV=nowhere, ENGINE="embedded", WORKER_ENGINE="vllm").stdout == "python3\n"


def test_the_model_has_one_way_to_be_given(tmp_path: Path) -> None:
    """Before anything is fetched: the worker would be given it twice."""
    flags = ["--model-path", "--model"]  # the second one is vLLM's and TensorRT-LLM's
    for flag, arguments in zip(flags, (["--kv-blocks", "64", "--model-path=/m"], ["--model", "/m"]), strict=True):
        with launched(tmp_path, *arguments) as script:
            assert script.finish() == 1
            assert script.output == f"agg: error: the model is given as MODEL_PATH, not as {flag}\n"
    assert sourced("true", "--model-path-of", "/m", "--model-loader-extra-config", "{}").returncode == 0


def test_a_proxy_is_for_other_machines(tmp_path: Path) -> None:
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"), f"http://127.0.0.1:{free_port()}")
    with launched(tmp_path, variables={**proxies, "no_proxy": "", "NO_PROXY": ""}) as script:
        script.wait_until_ready()
    program = 'prepare_runtime; echo "$no_proxy $NO_PROXY"'
    for given, kept in (("corp.example", "corp.example,127.0.0.1,localhost,::1"), ("*", "*")):
        done = sourced(program, no_proxy="", NO_PROXY=given, TMPDIR=str(tmp_path))
        assert done.stdout == f"{kept} {kept}\n"


def test_without_a_home_there_are_no_batches(tmp_path: Path) -> None:
    program = 'mkdir() { echo "$@" > "$made"; }; HTTP_PORT=1; unset HOME; batch_directory'
    assert sourced(program, XDG_STATE_HOME="", made=str(tmp_path / "made")).stdout == "off\n"
    assert not (tmp_path / "made").exists()
    there = tmp_path / "state/dynamo-logits-worker/batches-1"
    assert sourced("HTTP_PORT=1; batch_directory", XDG_STATE_HOME=str(tmp_path / "state")).stdout == f"{there}\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_link_to_a_script_starts_it(tmp_path: Path, script: str) -> None:
    (tmp_path / script).symlink_to(REPOSITORY / "launch" / script)
    done = subprocess.run(
        [str(tmp_path / script)],
        env=os.environ | {"DLW_VENV": "/nowhere", "HTTP_PORT": str(free_port()), "FRONT_DOOR_BATCH_DIR": "off"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "install: DLW_VENV: no Python at /nowhere/bin/python\n")


def test_help_names_every_variable() -> None:
    command = [str(REPOSITORY / "launch/agg.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    for variable in ("MODEL_PATH", "SERVED_MODEL_NAME", "ENGINE", "HTTP_HOST", "HTTP_PORT", "FRONT_DOOR"):
        assert f"  {variable} " in done.stdout


def test_the_client_example(tmp_path: Path) -> None:
    with launched(tmp_path, variables={"DYN_ENABLE_TEST_LOGITS_PROCESSOR": "1"}) as script:
        script.wait_until_ready()
        command = [sys.executable, str(REPOSITORY / "examples/chat.py"), "Hello", "--url", script.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == ("Hello world!\n", "")


@pytest.mark.campaign
def test_the_engine_is_chosen_by_a_variable(tmp_path: Path) -> None:
    """On the stand-in for TensorRT-LLM, as on a machine that has it."""
    with launched(tmp_path) as embedded:
        embedded.wait_until_ready()
        expected = chat(embedded)
        embedded.press_ctrl_c()
        assert embedded.finish() == 0, embedded.output
    stand_in = REPOSITORY / "tests" / "trtllm_standin"
    with launched(tmp_path, variables={"ENGINE": "trtllm", "PYTHONPATH": str(stand_in)}) as script:
        script.wait_until_ready()
        assert chat(script) == expected
        children = script.children()
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


@pytest.mark.parametrize(("arguments", "variables"), [((), {"ENGINE": "vllm"}), (("--engine", "vllm"), {})])
def test_vllm_needs_its_environment(tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    with launched(tmp_path, *arguments, variables={**variables, "DLW_VLLM_VENV": "/nowhere"}) as script:
        assert script.finish() == 1
        missing = "no Python at /nowhere/bin/python; run scripts/install --vllm"
        assert script.output == f"agg: error: --engine vllm: {missing}\n"


def test_the_checklist_passes_on_the_stand_in(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = subprocess.run(
        [REPOSITORY / "scripts" / "verify-gpu", "--max-num-batched-tokens", "128"],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PYTHONPATH": str(REPOSITORY / "tests" / "trtllm_standin"),
            "MODEL_PATH": str(write_tiny_model(tmp_path / "model")),
            "REPORT": str(report),
        },
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text()
    assert text.startswith("# TensorRT-LLM checklist\n")  # and not with what TensorRT-LLM prints when it is imported
    assert text in done.stdout
    assert "[TensorRT-LLM]" not in done.stdout
    assert "[TensorRT-LLM] TensorRT LLM version" in done.stderr
    lines = text.splitlines()
    assert "| TensorRT-LLM | 1.3.0rc29 |" in lines
    assert sum("| pass |" in line for line in lines) == 13
