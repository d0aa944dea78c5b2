"""One prefill and one decode worker behind Dynamo's own prefill router: as one worker, token for
token.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import MODEL, Stack, Worker, running_stack, wait_for
from front_door_process import Door
from processor_requests import KEY, PATIENT, THIRD_PARTIES, chat, send, with_third_parties
from scored_completions import PROMPTS, computed, scored
from test_processors_e2e import BUILT_INS

from adapters.client import logits_processors, processor
from worker.engines.embedded import Engine
from worker.processors.smoke import SMOKE_VARIABLES
from worker.sampling import SamplingParams

COMMON = ("--device", "cpu", "--numerics", "exact", "--max-num-seqs", "16")
ENGINE = (*COMMON, "--dtype", "float32")


def start_pair(
    stack: Stack, *arguments: str, engine: tuple[str, ...] = ENGINE, **environ: str
) -> tuple[Worker, Worker]:
    """A prefill and a decode worker; the model is listed once both are there."""
    prefill = stack.start_worker(*engine, *arguments, "--disaggregation-mode", "prefill", wait=False, **environ)  # type: ignore[arg-type]
    stack.wait_endpoint(prefill)
    decode = stack.start_worker(*engine, *arguments, "--disaggregation-mode", "decode", wait=False, **environ)  # type: ignore[arg-type]
    for worker in (prefill, decode):
        stack.wait_registered(worker)
    wait_for(lambda: stack.post("completions", prompt="ready?", max_tokens=8)[0] == 200, "the pair")
    settled(prefill, decode)  # the answers count a lease when it ends, which may be later
    return prefill, decode


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Worker, Worker]]:
    with running_stack(tmp_path_factory.mktemp("disagg"), tiny_model) as stack:
        stack.start_frontend()
        yield stack, *start_pair(stack)


def settled(prefill: Worker, decode: Worker) -> None:
    """Every prompt that was held has been taken, and nobody is in flight."""
    for worker in (prefill, decode):
        wait_for(lambda worker=worker: worker.metric("dlw_in_flight_requests") == 0, "no request in flight")
    wait_for(lambda: prefill.metric("dlw_kv_leased_prompts") == 0, "no prompt held")


def complete(stack: Stack, **body: Any) -> dict[str, Any]:
    status, text = stack.post("completions", **body)
    assert status == 200, text
    return dict(json.loads(text))


def test_a_prompt_is_computed_in_one_and_answered_by_the_other(pair: tuple[Stack, Worker, Worker]) -> None:
    stack, prefill, decode = pair
    before = decode.metric("dlw_kv_transfers_total", outcome="received")
    answer = complete(stack, prompt="one two three four five six seven eight nine ten", max_tokens=20)
    assert answer["usage"]["completion_tokens"] == 20 or answer["choices"][0]["finish_reason"] == "stop"
    settled(prefill, decode)
    assert decode.metric("dlw_kv_transfers_total", outcome="received") == before + 1
    assert decode.metric("dlw_kv_received_bytes_total") > 0
    assert prefill.metric("dlw_kv_transfers_total", outcome="timed_out") == 0
    assert prefill.metric("dlw_tokens_total", kind="generated") == 0


def test_a_refusal_of_the_decode_worker_ends_the_lease(pair: tuple[Stack, Worker, Worker]) -> None:
    """The prefill worker takes a text that is longer than the answer may be."""
    stack, prefill, decode = pair
    timed_out = prefill.metric("dlw_kv_transfers_total", outcome="timed_out")
    released = prefill.metric("dlw_kv_transfers_total", outcome="released")
    forced = {"name": "forced_sequence", "args": {"token_ids": list(range(300, 320))}}
    reply = chat(stack, forced, max_tokens=4)
    assert reply.status == 400, reply
    settled(prefill, decode)
    assert prefill.metric("dlw_kv_transfers_total", outcome="released") == released + 1
    assert prefill.metric("dlw_kv_transfers_total", outcome="timed_out") == timed_out


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_has_passed_is_an_empty_answer(pair: tuple[Stack, Worker, Worker], stream: bool) -> None:
    """As of one worker; the prompt's KV is let go, not held until its lease times out."""
    stack, prefill, decode = pair
    timed_out, released = (prefill.metric("dlw_kv_transfers_total", outcome=end) for end in ("timed_out", "released"))
    reply = chat(stack, stream=stream, **logits_processors(deadline=1000000000))
    assert (reply.status, reply.finish_reason, reply.content) == (200, "length", ""), reply.text
    settled(prefill, decode)
    assert prefill.metric("dlw_kv_transfers_total", outcome="released") == released + 1
    assert prefill.metric("dlw_kv_transfers_total", outcome="timed_out") == timed_out


def test_what_is_known_is_said_in_usage(pair: tuple[Stack, Worker, Worker]) -> None:
    stack, prefill, decode = pair
    prompt = "a prompt that nobody has sent before, and that is sent twice: " * 3
    first = complete(stack, prompt=prompt, max_tokens=4)["usage"]
    again = complete(stack, prompt=prompt, max_tokens=4)["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 16
    assert again["prompt_tokens_details"]["cached_tokens"] >= again["prompt_tokens"] - 16
    assert decode.metric("dlw_kv_transfers_total", outcome="cached") >= 1
    settled(prefill, decode)


def test_long_prompts_come_in_chunks(pair: tuple[Stack, Worker, Worker]) -> None:
    stack, prefill, decode = pair
    answer = complete(stack, prompt="tell me more " * 30, max_tokens=8)
    assert answer["usage"]["prompt_tokens"] > 100
    settled(prefill, decode)


@pytest.mark.parametrize("stream", [False, True])
def test_invalid_selections_are_refused_on_prefill(pair: tuple[Stack, Worker, Worker], stream: bool) -> None:
    stack, prefill, _ = pair
    before = prefill.metric("dlw_requests_total", outcome="refused")
    reply = chat(stack, {"name": "no_such_processor"}, stream=stream)
    assert reply.status == 400
    assert "no_such_processor" in reply.error["message"]
    assert prefill.metric("dlw_requests_total", outcome="refused") == before + 1


@pytest.mark.parametrize("variable", SMOKE_VARIABLES[:1])
def test_the_smoke_text_is_exact(stack: Stack, variable: str) -> None:
    stack.start_frontend()
    start_pair(stack, **{variable: "1"})  # type: ignore[arg-type]
    for stream in (False, True):
        for content in ("hi", "what is the capital of France? " * 4):
            reply = chat(stack, stream=stream, content=content, temperature=1.3, seed=4, max_tokens=64)
            assert reply.content == "Hello world!"
            assert reply.finish_reason == "stop"


def test_workers_that_do_not_belong_together_say_why(stack: Stack) -> None:
    stack.start_frontend()
    prefill = stack.start_worker(*ENGINE, "--disaggregation-mode", "prefill", "--kv-block-size", "32", wait=False)
    stack.wait_endpoint(prefill)
    decode = stack.start_worker(*ENGINE, "--disaggregation-mode", "decode", wait=False)
    for worker in stack.workers:
        stack.wait_registered(worker)
    status, _ = wait_for(lambda: refusal(stack), "an answer of the pair")
    assert status in (400, 500)
    field = "prefill_result.disaggregated_params.kv.layout"
    assert f"{field}: block_size is 32 on the prefill worker and 16 on this decode worker" in decode.log


def refusal(stack: Stack) -> tuple[int, str] | None:
    """An answer of the workers, None while the frontend still looks for them."""
    status, text = stack.post("completions", prompt="how do you do, and how are you?", max_tokens=2)
    return None if status == 503 else (status, text)


def test_bfloat16_answers_are_those_of_one_engine(stack: Stack, tiny_model: Path) -> None:
    """Where the processor has what they need, with native kernels."""
    stack.start_frontend()
    start_pair(stack, engine=(*COMMON, "--dtype", "bfloat16"))
    source = random.Random(3)
    prompts = [source.choices(range(300, 900), k=length) for length in (5, 16, 33, 90, 200)]
    engine = Engine(tiny_model, device="cpu", dtype="bfloat16", numerics="exact")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=5)
        expected = [result.outputs[0].token_ids for result in engine.generate(prompts, params, progress=False)]
        sampling = {"temperature": temperature, "seed": 5, "max_tokens": 24, "ignore_eos": True}
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = send(
                stack,
                "completions",
                {"prompt": prompt, "logprobs": 1, "return_tokens_as_token_ids": True, **sampling},
            )
            assert answer.status == 200, answer.text
            assert answer.token_ids == list(tokens)


SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"seed": 7}, "seeded": {"temperature": 1.0, "seed": 7}}
"""In place of an example's own; no temperature is greedy, unless the example names a processor
for it.
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[tuple[Stack, Stack]]:
    """An aggregated and a disaggregated stack, with an operator's watermark key."""
    directory = tmp_path_factory.mktemp("both")
    (directory / "key").write_text(KEY.hex())
    policy = directory / "policy.yaml"
    policy.write_text(f"keys:\n  house: {{file: {directory / 'key'}}}\n")
    with (
        running_stack(directory / "alone", tiny_model) as alone,
        running_stack(directory / "pair", tiny_model) as apart,
    ):
        options = []
        for stack in (alone, apart):
            options = [*with_third_parties(stack, *THIRD_PARTIES), "--processor-policy", str(policy), *PATIENT]
            stack.start_frontend()
        alone.start_worker(*ENGINE, *options)
        start_pair(apart, *options)
        yield alone, apart


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", BUILT_INS)
def test_the_same_tokens_as_one_worker(both: tuple[Stack, Stack], name: str, sampling: str) -> None:
    selected, example, _ = BUILT_INS[name]
    body = {key: value for key, value in example.items() if key not in ("temperature", "seed")}
    content = f"{name}, {sampling}: say something long about the sea, the ships and the people there. "
    alone, apart = (
        chat(stack, *selected, **{**body, **SAMPLING[sampling], "content": content, "receipt": True}) for stack in both
    )
    assert (alone.status, apart.status) == (200, 200), apart.text
    assert apart.token_ids == alone.token_ids
    assert apart.content == alone.content
    assert apart.finish_reason == alone.finish_reason
    assert apart.logprobs == alone.logprobs
    assert [mode_of(receipt) for receipt in apart.receipts] == ["disaggregated"] * len(apart.receipts)
    assert [without_mode(receipt) for receipt in apart.receipts] == [without_mode(one) for one in alone.receipts]


def test_guidance_beside_a_last_phrase(both: tuple[Stack, Stack]) -> None:
    """A prefill worker is asked for one token, and took that for the room of the phrase."""
    chosen = processor("cfg", scale=2.0), processor("force_last_phrase", text=" The end.")
    alone, apart = (chat(stack, *chosen, max_tokens=24) for stack in both)
    assert (alone.status, apart.status) == (200, 200), apart.text
    assert apart.content == alone.content
    assert apart.content.endswith(" The end.")


def test_a_mandatory_min_tokens_may_be_asked_for(tmp_path: Path, tiny_model: Path) -> None:
    """A prefill worker is asked for one token, and compared that with the operator's minimum."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"models:\n  {MODEL}:\n    mandatory: [{{name: min_tokens, args: {{n: 5}}}}]\n")
    with running_stack(tmp_path, tiny_model) as stack:
        stack.start_frontend()
        start_pair(stack, "--processor-policy", str(policy))
        named, unnamed = chat(stack, max_tokens=24, min_tokens=5), chat(stack, max_tokens=24)
        assert (named.status, unnamed.status) == (200, 200), named.text
        assert named.token_ids == unnamed.token_ids
        for least in (1, 4):
            refused = chat(stack, max_tokens=24, min_tokens=least)
            assert refused.status == 400
            assert "stop_conditions.min_tokens" in refused.text


def mode_of(receipt: dict[str, Any] | None) -> str:
    assert receipt is not None
    return str(receipt["mode"])


def without_mode(receipt: dict[str, Any] | None) -> dict[str, Any]:
    assert receipt is not None
    return {name: value for name, value in receipt.items() if name != "mode"}


async def test_many_streams_at_once_are_the_same(both: tuple[Stack, Stack]) -> None:
    async def one(stack: Stack, number: int) -> str:
        async with stack.async_client() as client:
            prompt = f"{number} green bottles hanging on the wall, " * (1 + number % 5)
            stream = await client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=24, temperature=0.9, seed=number, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    alone, apart = both
    texts = [await asyncio.gather(*(one(stack, number) for number in range(24))) for stack in (alone, apart)]
    assert texts[0] == texts[1]
    settled(*apart.workers)


async def test_scores_are_those_of_one_worker(both: tuple[Stack, Stack], tiny_model: Path) -> None:
    """Alone, disaggregated, and among twenty clients: no bit differs."""
    engine = Engine(tiny_model, device="cpu", dtype="float32", numerics="exact")
    expected = computed(engine, PROMPTS, 12)
    prefill = both[1].workers[0]
    settled(*both[1].workers)
    before = prefill.metric("dlw_kv_transfers_total", outcome="released")
    for stack in both:
        door = await asyncio.to_thread(Door, stack)
        async with door.async_client() as client:
            first = await scored(client, PROMPTS[0], 12)
            found = await asyncio.gather(*(scored(client, prompt, 12) for prompt in PROMPTS))
        assert found[0] == first
        assert [(one.token_logprobs, one.prompt_logprobs) for one in found] == expected
    settled(*both[1].workers)
    assert prefill.metric("dlw_kv_transfers_total", outcome="released") == before + len(PROMPTS) + 1
