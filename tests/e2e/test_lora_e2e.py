"""LoRA adapters of the embedded engine behind Dynamo's frontend: chosen by model, loaded and
unloaded under traffic, and their answers go on in another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from e2e_stack import MODEL, Stack, http, running_stack, wait_for
from lora_adapters import ALL_TARGETS, write_adapter
from ports import free_port

from worker.engines.embedded.offline import Engine
from worker.runtimes.file_discovery import CHECK_S
from worker.sampling import SamplingParams

KEY = "an operator's key"
EXACT = ["--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--context-length", "512"]
NUM_TOKENS = 120
PROMPT = list(range(40, 60))
NAMES = ("one", "two")


@pytest.fixture
def pool(tmp_path: Path, tiny_model: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, tiny_model) as stack:
        stack.start_frontend("--migration-limit", "3")
        yield stack


@pytest.fixture
def adapters(tmp_path: Path, tiny_model: Path) -> dict[str, Path]:
    folder = tmp_path / "adapters"
    return {
        "one": write_adapter(folder / "one", tiny_model, seed=1),
        "two": write_adapter(folder / "two", tiny_model, seed=2, targets=ALL_TARGETS, size=0.05, rank=4),
        "late": write_adapter(folder / "late", tiny_model, seed=3, targets=("down_proj", "k_proj")),
    }


def references(model: Path, adapters: dict[str, Path]) -> dict[str, str]:
    """Answers of an engine without a worker around it, by model."""
    modules = tuple((name, str(path)) for name, path in adapters.items())
    engine = Engine(model, dtype="float32", numerics="exact", context_length=512, lora_modules=modules)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=7)
    found = {}
    for name in (None, *adapters):
        [result] = engine.generate([PROMPT], params, progress=False, adapter=name)
        found[name or MODEL] = (result.outputs[0].text or "").rstrip("\ufffd")
    assert len(set(found.values())) == len(found)
    return found


async def answer(client: openai.AsyncOpenAI, model: str, begun: asyncio.Event) -> str:
    text = ""
    try:
        stream = await client.completions.create(
            model=model,
            prompt=PROMPT,
            stream=True,
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=7,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text if chunk.choices else ""
            if len(text) > 3:
                begun.set()
    finally:
        begun.set()
    return text.rstrip("\ufffd")  # half a character, which the frontend keeps


def models(stack: Stack) -> set[str]:
    return {each["id"] for each in json.loads(http(f"{stack.url}/v1/models")[1])["data"]}


@contextlib.contextmanager
def asking(stack: Stack, endpoint: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Asks an endpoint beside the one that generates."""
    program = str(Path(__file__).with_name("ask_worker.py"))
    command = [sys.executable, program, f"dynamo.backend.{endpoint}"]
    with subprocess.Popen(
        command, env=stack.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        to, back = child.stdin, child.stdout

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            to.write(json.dumps(request) + "\n")
            to.flush()
            found: dict[str, Any] = json.loads(back.readline())
            return found

        try:
            yield ask
        finally:
            child.kill()


def operate(port: int, route: str, key: str = KEY, **fields: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{route}", json.dumps(fields).encode(), headers)
    try:
        with urllib.request.urlopen(request) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.campaign
async def test_adapters_under_traffic_and_kills(pool: Stack, tiny_model: Path, adapters: dict[str, Path]) -> None:
    expected = references(tiny_model, adapters)
    keys = pool.directory / "keys.txt"
    keys.write_text(KEY)
    modules = ["--lora-modules", ",".join(f"{name}={adapters[name]}" for name in NAMES)]
    migration = ["--migration", "on", "--boundary-store", f"file:{pool.directory / 'boundaries'}"]
    ports = [free_port(), free_port()]
    workers = [
        pool.start_worker(
            *EXACT, *modules, *migration, "--engine-port", str(port), "--engine-key-file", str(keys), wait=False
        )
        for port in ports
    ]
    for worker in workers:
        pool.wait_registered(worker)
    wait_for(lambda: models(pool) == {MODEL, *NAMES}, "the adapters in the frontend")
    async with openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="-", max_retries=0) as client:
        chosen = [MODEL, *NAMES] * 3
        begun = [asyncio.Event() for _ in chosen]
        asked = [asyncio.create_task(answer(client, *each)) for each in zip(chosen, begun, strict=True)]
        await asyncio.gather(*(each.wait() for each in begun))
        workers[0].signal(signal.SIGKILL)
        for name, tokens in zip(chosen, await asyncio.gather(*asked), strict=True):
            assert tokens == expected[name], name
        survivor, seen = ports[1], workers[1].log.count("entries of discovery")
        path = str(adapters["late"])
        assert operate(survivor, "/v1/load_lora_adapter", key="wrong", lora_name="late", lora_path=path)[0] == 401
        status, refused = operate(survivor, "/v1/load_lora_adapter", lora_name="bad", lora_path=str(tiny_model))
        assert (status, refused["message"][:57]) == (400, "LoRA adapter bad: adapter_config.json cannot be read: No ")
        loading = asyncio.to_thread(operate, survivor, "/v1/load_lora_adapter", lora_name="late", lora_path=path)
        others = [asyncio.create_task(answer(client, name, asyncio.Event())) for name in (MODEL, *NAMES)]
        status, loaded = await loading
        assert (status, loaded["lora_name"]) == (200, "late"), loaded
        assert operate(survivor, "/v1/load_lora_adapter", lora_name="late", lora_path=path)[0] == 400
        await asyncio.to_thread(
            wait_for, lambda: models(pool) == {MODEL, *NAMES, "late"}, "the adapter in the frontend"
        )
        guarded = "a guard of its entry"
        await asyncio.to_thread(wait_for, lambda: workers[1].log.count("entries of discovery") > seen, guarded)
        started = asyncio.Event()
        late = asyncio.create_task(answer(client, "late", started))
        await started.wait()
        assert (await asyncio.to_thread(operate, survivor, "/v1/unload_lora_adapter", lora_name="late"))[0] == 200
        assert await late == expected["late"]
        assert await asyncio.gather(*others) == [expected[name] for name in (MODEL, *NAMES)]
    assert operate(survivor, "/v1/unload_lora_adapter", lora_name="late")[0] == 404
    wait_for(lambda: models(pool) == {MODEL, *NAMES}, "the adapter out of the frontend")
    assert operate(survivor, "/engine/lora_adapters")[1]["adapters"].keys() == {*NAMES}
    assert pool.post("completions", model="late", prompt="a", max_tokens=2)[0] == 404
    time.sleep(3 * CHECK_S)  # what was unloaded is not registered again
    assert models(pool) == {MODEL, *NAMES}


@pytest.mark.campaign
async def test_an_adapter_computes_prefill_and_decode(pool: Stack, tiny_model: Path, adapters: dict[str, Path]) -> None:
    expected = references(tiny_model, adapters)
    modules = ["--lora-modules", ",".join(f"{name}={adapters[name]}" for name in NAMES)]
    both = [*EXACT, *modules]
    prefill = pool.start_worker(*both, "--disaggregation-mode", "prefill", wait=False)
    pool.wait_endpoint(prefill)
    decode = pool.start_worker(*both, "--disaggregation-mode", "decode", wait=False)
    for worker in (prefill, decode):
        pool.wait_registered(worker)
    wait_for(lambda: models(pool) == {MODEL, *NAMES}, "the adapters in the frontend")
    async with openai.AsyncOpenAI(base_url=f"{pool.url}/v1", api_key="-", max_retries=0) as client:
        chosen = [MODEL, *NAMES]
        for _ in range(2):
            found = await asyncio.gather(*(answer(client, name, asyncio.Event()) for name in chosen))
            assert found == [expected[name] for name in chosen]
    assert decode.metric("dlw_kv_transfers_total", outcome="received") == 3
    assert decode.metric("dlw_local_prefills_total") == 0


@pytest.mark.campaign
def test_dynamos_endpoints_load_adapters(pool: Stack, adapters: dict[str, Path]) -> None:
    pool.start_worker(*EXACT, DYN_LORA_ENABLED="true")
    source = {"uri": f"file://{adapters['late']}"}
    with asking(pool, "load_lora") as load:
        for _ in range(2):  # once more is no error
            [loaded] = load({"lora_name": "late", "source": source})["chunks"]
            assert (loaded["status"], loaded["lora_name"]) == ("success", "late")
        [refused] = load({"lora_name": "x", "source": {"uri": "s3://bucket/x"}})["chunks"]
        assert (refused["status"], refused["message"][:34]) == ("error", "source.uri must be file:// and a d")
    wait_for(lambda: models(pool) == {MODEL, "late"}, "the adapter in the frontend")
    with asking(pool, "list_loras") as listing:
        [found] = listing({})["chunks"]
        assert (found["count"], list(found["loras"])) == (1, ["late"])
    with asking(pool, "unload_lora") as unload:
        states = [unload({"lora_name": "late"})["chunks"][0]["status"] for _ in range(2)]
        assert states == ["success", "error"]
    wait_for(lambda: models(pool) == {MODEL}, "the adapter out of the frontend")
