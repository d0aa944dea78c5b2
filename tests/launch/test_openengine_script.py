from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from launched_script import LaunchedScript, is_loopback, launched, tiny_model
from ports import free_port
from transformers import AutoTokenizer

from worker.runtimes.openengine import wire

HELLO = [{"role": "user", "content": "Hello"}]


def chat(script: LaunchedScript, max_tokens: int = 24) -> str:
    with script.client() as client:
        answer = client.chat.completions.create(model=script.model, messages=HELLO, max_tokens=max_tokens)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def generated(port: int, token_ids: list[int], max_tokens: int = 24) -> str:
    """The text of the worker's own answer to a prompt."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            "/openengine.v1.Inference/Generate",
            request_serializer=wire.GenerateRequest.SerializeToString,
            response_deserializer=wire.GenerateResponse.FromString,
        )
        request = wire.GenerateRequest(token_ids={"ids": token_ids}, stopping={"max_tokens": max_tokens})
        return "".join(event.token.text for event in call(request))


def test_the_sidecar_passes_on_what_the_worker_says(tmp_path: Path) -> None:
    port = free_port()
    with launched(tmp_path, script="agg_openengine.sh", variables={"GRPC_PORT": str(port)}) as script:
        script.wait_until_ready()
        assert script.model == "tiny-model"
        tokenizer = AutoTokenizer.from_pretrained(tiny_model())
        prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        assert chat(script) == generated(port, ids)
        assert [address for address in script.listening() if not is_loopback(address)] == []
        children = script.children()
        assert len(children) == 3
        script.press_ctrl_c()
        assert script.finish() == 0, script.output
        script.assert_nothing_left(children)


@pytest.mark.parametrize(("module", "name"), [("worker", "worker"), ("dynamo.trtllm.sidecar", "sidecar")])
def test_the_death_of_one_stops_the_others(tmp_path: Path, module: str, name: str) -> None:
    with launched(tmp_path, script="agg_openengine.sh") as script:
        script.wait_until_ready()
        children = script.children()
        script.named(module).kill()
        assert script.finish() == 1
        assert f"error: the {name} ended with status 137; stopping" in script.output
        script.assert_nothing_left(children)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FRONT_DOOR": "on"}, "FRONT_DOOR=on: the sidecar drops what the front door adds to a request"),
        ({"SERVED_MODEL_NAME": "name"}, "SERVED_MODEL_NAME: the sidecar names the model after MODEL_PATH"),
        ({"DLW_DYNAMO_VENV": "/usr"}, "no dynamo.trtllm.sidecar in /usr; it needs ai-dynamo 1.6.1 or newer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_refuses(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    with launched(tmp_path, script="agg_openengine.sh", variables=variables) as script:
        assert script.finish() == 1
        assert message in script.output
