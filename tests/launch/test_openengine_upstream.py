"""``UPSTREAM=grpc launch/agg_openengine.sh``: workers and the front door, without Dynamo."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from launched_script import is_loopback, launched
from ports import free_port

HELLO = [{"role": "user", "content": "Hello"}]
FORCED = {"logits_processors": [{"name": "forced_prefix", "args": {"text": "Yes"}}]}


@pytest.mark.campaign
def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    variables = {"UPSTREAM": "grpc", "WORKERS": "2", "MAX_RESTARTS": "1"}
    with launched(tmp_path, script="agg_openengine.sh", variables=variables) as script:
        script.wait_until_ready()
        assert script.model == "tiny-model"
        children = script.children()
        assert len(children) == 3
        assert [address for address in script.listening() if not is_loopback(address)] == []
        with script.client() as client:

            def asked() -> str | None:
                answer = client.chat.completions.create(
                    model="tiny-model",
                    messages=HELLO,  # type: ignore[arg-type]
                    max_tokens=8,
                    extra_body=FORCED,
                )
                return answer.choices[0].message.content

            before = asked()
            assert before is not None
            assert before.startswith("Yes")
            script.all_named("worker")[0].kill()
            assert [asked() for _ in range(4)] == [before] * 4
            script.read_until("starting it again")
            script.read_until("serves tiny-model")
            script.all_named("worker")[0].terminate()  # in order, which is no restart too many
            script.read_until("ended with status 0; starting it again")
            script.read_until("serves tiny-model")
            assert asked() == before
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        assert "ended with status 137; starting it again" in script.output


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"UPSTREAM": "http"}, "UPSTREAM must be sidecar or grpc, got 'http'"),
        ({"UPSTREAM": "grpc", "FRONT_DOOR": "off"}, "with UPSTREAM=grpc the front door is the frontend"),
        ({"UPSTREAM": "grpc", "WORKERS": "0"}, "WORKERS must be a number from 1 to 99, got '0'"),
        ({"UPSTREAM": "grpc", "MAX_RESTARTS": "x"}, "MAX_RESTARTS must be a number from 0 to 99, got 'x'"),
        ({"UPSTREAM": "grpc", "GRPC_PORT": "x"}, "GRPC_PORT must be a port number, got 'x'"),
        (
            {"UPSTREAM": "grpc", "GRPC_PORT": "65534", "WORKERS": "3"},
            "GRPC_PORT must be a port number, got '65536'",
        ),
    ],
    ids=("upstream", "door", "workers", "restarts", "port", "ports"),
)
def test_what_it_refuses(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    with launched(tmp_path, script="agg_openengine.sh", variables=variables) as script:
        assert script.finish() == 1
        assert message in script.output


def test_no_port_of_several_is_another_s(tmp_path: Path) -> None:
    """The front door would ask what listens there, which may be the worker of another script."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        variables = {"UPSTREAM": "grpc", "GRPC_PORT": str(port - 2), "WORKERS": "3"}
        with launched(tmp_path, script="agg_openengine.sh", variables=variables) as script:
            assert script.finish() == 1
    assert f"port {port} on 127.0.0.1 is taken; set GRPC_PORT to a free one" in script.output
