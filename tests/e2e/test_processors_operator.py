"""What the operator adds and takes away: third parties' processors, policies, deadlines; and
what he can see.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from e2e_stack import DYNAMO, MODEL, Stack, Worker, http, wait_for
from processor_requests import (
    KEY,
    LETTER_A,
    LETTER_B,
    PATIENT,
    THIRD_PARTIES,
    chat,
    check_failed,
    check_refused,
    send,
    serving,
    with_third_parties,
)

from adapters.catalog import Catalog
from adapters.client import logits_processors, processor

Shared = tuple[Stack, Worker]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Shared]:
    with serving(tmp_path_factory.mktemp("served"), tiny_model) as running:
        yield running


# Third parties


def test_a_third_partys_processor(served: Shared) -> None:
    """Dynamo's own class, stateful, with an argument of its constructor."""
    reply = chat(served[0], processor("acme/one", token_id=LETTER_A, other=LETTER_B), max_tokens=24, receipt=True)
    assert reply.content == "AAAAAAAAAB" * 2 + "AAAA"
    assert reply.receipts[-1] is not None
    record = reply.receipts[-1]["processors"][0]
    assert (record["name"], record["steps_active"]) == ("acme/one", 24)
    check_refused(chat(served[0], processor("acme/one", letter=3)), "processors[0].args.letter: unknown argument")


async def test_every_request_has_a_third_partys_processor_of_its_own(served: Shared) -> None:
    async with served[0].async_client() as client:

        async def ask(number: int) -> str:
            body = logits_processors(processor("acme/one", token_id=LETTER_A, other=LETTER_B))
            answer = await client.completions.create(
                model=MODEL, prompt=f"number {number}", max_tokens=20 + number, extra_body=body
            )
            return answer.choices[0].text

        answers = await asyncio.gather(*map(ask, range(8)))
    assert answers == [("AAAAAAAAAB" * 3)[: 20 + number] for number in range(8)]


def test_nan_names_its_processor(served: Shared) -> None:
    stack, worker = served
    before = worker.metric("dlw_processor_errors_total", processor="acme/poisons", reason="nan")
    for stream in (False, True):
        check_failed(
            chat(stack, processor("acme/poisons"), stream=stream),
            "logits processor acme/poisons: left NaN in the logits at position",
            stream=stream,
        )
    assert worker.metric("dlw_processor_errors_total", processor="acme/poisons", reason="nan") == before + 2


async def test_one_that_raises_fails_alone_and_is_then_refused(stack: Stack) -> None:
    stack.start_frontend()
    options = with_third_parties(stack, "acme/raises=third_party_e2e:Raises")
    worker = stack.start_worker("--device", "cpu", *PATIENT, *options)
    alone = chat(stack, max_tokens=1500, ignore_eos=True).content
    async with stack.async_client() as client:

        async def mate() -> str | None:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello there"}],
                max_tokens=1500,
                extra_body={"ignore_eos": True},
            )
            return answer.choices[0].message.content

        mates = [asyncio.create_task(mate()) for _ in range(4)]
        await asyncio.to_thread(wait_for, lambda: worker.metric("dlw_in_flight_requests") == 4, "in flight")
        for number in range(5):
            stream = number % 2 == 1
            reply = await asyncio.to_thread(chat, stack, processor("acme/raises"), stream=stream)
            check_failed(reply, "logits processor acme/raises: raised RuntimeError at position", stream=stream)
            assert "secret" not in reply.text
        assert worker.metric("dlw_processor_breakers_open") == 1
        await asyncio.to_thread(check_unavailable, stack)
        assert await asyncio.gather(*mates) == [alone] * 4
    assert worker.metric("dlw_processor_errors_total", processor="acme/raises", reason="raised") == 5
    assert "logits processor acme/raises has failed too often: refused for 30 s" in worker.log
    assert worker.metric("dlw_requests_total", outcome="unavailable") == 3
    assert chat(stack, processor("choice", choices=["ok"])).content == "ok"
    assert worker.running


def check_unavailable(stack: Stack) -> None:
    """Both frontends pass the status on where they can, and put a text of their own in place of
    ours.
    """
    whole = chat(stack, processor("acme/raises"))
    assert (whole.status, whole.error["code"]) == (503, 503)
    streamed = chat(stack, processor("acme/raises"), stream=True)
    assert streamed.status == 200
    assert streamed.error["code"] == (500 if DYNAMO < (1, 6) else 503)
    body = {"prompt": "x", "max_tokens": 4, **logits_processors(processor("acme/raises"))}
    completions = send(stack, "completions", body)
    assert completions.status == (500 if DYNAMO < (1, 6) else 503)


# The operator's policy

POLICY = f"""
keys:
  house: {{env: HOUSE_KEY}}
models:
  {MODEL}:
    mandatory:
      - {{name: banned_tokens, args: {{token_ids: [{LETTER_A}]}}}}
    default:
      - {{name: loop_stop, args: {{max_period: 1, copies: 3}}}}
    forbidden: [mirostat, acme/one]
"""


def test_one_that_hangs_ends_the_worker(stack: Stack) -> None:
    """A hung step: its requests fail at once, and whoever restarts workers sees a broken one."""
    stack.start_frontend()
    options = with_third_parties(stack, "acme/hangs=third_party_e2e:Hangs")
    worker = stack.start_worker("--device", "cpu", *PATIENT, "--step-timeout-s", "3", *options)
    selected = logits_processors(processor("acme/hangs"))
    with stack.client().completions.create(
        model=MODEL, prompt="Hello", max_tokens=20, stream=True, extra_body=selected
    ) as stream:
        next(iter(stream))
        assert worker.wait() == 1
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
    assert "engine broken: a step has taken more than 3 s" in worker.log


def test_the_operators_policy(stack: Stack) -> None:
    (stack.directory / "policy.yaml").write_text(POLICY)
    stack.start_frontend()
    options = with_third_parties(stack, *THIRD_PARTIES)
    path = str(stack.directory / "policy.yaml")
    stack.start_worker("--device", "cpu", "--processor-policy", path, *PATIENT, *options, HOUSE_KEY=KEY.hex())
    likes = processor("logit_bias", bias={str(LETTER_A): 100, str(LETTER_B): 60})
    assert chat(stack, likes).content == "BBB"  # without the mandatory one it were A, without the default one endless
    assert chat(stack, likes, processor("loop_stop", max_period=1, copies=5)).content == "BBBBB"
    assert chat(stack, likes, processor("banned_tokens", token_ids=[LETTER_A])).content == "BBB"
    assert chat(stack, likes, guided_regex="[AB]{2}").content == "BB"
    reply = chat(stack, receipt=True)
    assert reply.receipts[-1] is not None
    assert [one["name"] for one in reply.receipts[-1]["processors"]] == ["banned_tokens", "loop_stop"]
    check_refused(
        chat(stack, likes, processor("banned_tokens", token_ids=[LETTER_B])),
        "processors[1]: the logits processor banned_tokens is set by the operator and cannot be changed",
    )
    for name in ("mirostat", "acme/one"):
        refused = chat(stack, processor(name))
        check_refused(refused, f"processors[0].name: the logits processor {name} is not allowed for this model")


FIELDS_POLICY = f"""
models:
  {MODEL}:
    mandatory:
      - {{name: min_tokens, args: {{n: 3}}}}
    default:
      - {{name: temperature, args: {{value: 0.5}}}}
      - {{name: min_p, args: {{p: 0.5}}}}
      - {{name: repetition_penalty, args: {{penalty: 2.0}}}}
      - {{name: thinking_budget, args: {{tokens: 3}}}}
      - {{name: loop_stop, args: {{max_period: 1, copies: 3}}}}
    forbidden: [json_schema]
"""
NEUTRAL = {"temperature": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def test_the_policy_goes_by_fields_too(stack: Stack, served: Shared) -> None:
    """Fields over defaults, neutral ones too, give what they give where there is no policy."""
    (stack.directory / "policy.yaml").write_text(FIELDS_POLICY)
    stack.start_frontend()
    path = str(stack.directory / "policy.yaml")
    worker = stack.start_worker("--device", "cpu", "--dtype", "float32", "--processor-policy", path, *PATIENT)
    thinking = {"nvext": {"max_thinking_tokens": 50}}
    drawn = {"seed": 7, "max_tokens": 24, "min_tokens": 3, "ignore_eos": True, **thinking}
    for fields in (NEUTRAL, {"temperature": 1.5, "min_p": 0.001, "repetition_penalty": 1.2}):
        mine, plain = chat(stack, **drawn, **fields), chat(served[0], **drawn, **fields)  # type: ignore[arg-type]
        assert mine.status == plain.status == 200, mine.text
        assert mine.token_ids == plain.token_ids
    assert (
        chat(stack, **drawn, temperature=1.0).token_ids != chat(stack, **drawn, **NEUTRAL).token_ids  # type: ignore[arg-type]
    )  # min_p is there
    greedy = {"repetition_penalty": 1.0, "min_tokens": 3, **thinking}
    assert chat(stack, **greedy).token_ids == chat(served[0], **greedy).token_ids  # type: ignore[arg-type]  # and at 0.5 it would be drawn
    refused = "sampling_options.guided_decoding: asks for the logits processor json_schema, which is not allowed"
    schema = {"type": "object"}
    check_refused(chat(stack, guided_json=schema), refused)
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    check_refused(chat(stack, response_format=named), refused)
    assert set(chat(stack, guided_regex="[abc]+").content) <= set("abc")
    changed = "stop_conditions.min_tokens: the logits processor min_tokens is set by the operator and cannot be changed"
    check_refused(chat(stack, min_tokens=0), changed)
    assert worker.metric("dlw_refused_fields_total", field="stop_conditions.min_tokens") == 1


def test_a_mandatory_processor_that_ignore_eos_rules_out(stack: Stack) -> None:
    policy = stack.directory / "policy.yaml"
    policy.write_text(f"models:\n  {MODEL}:\n    mandatory: [{{name: loop_stop}}]\n")
    stack.start_frontend()
    stack.start_worker("--device", "cpu", "--processor-policy", str(policy), *PATIENT)
    message = "stop_conditions.ignore_eos: must not be true: the operator requires the logits processor loop_stop"
    check_refused(chat(stack, ignore_eos=True), message)
    assert chat(stack).status == 200


STARTUP_FAILURES: dict[str, tuple[list[str], str]] = {
    "no policy file": (["--processor-policy", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
    "unknown module": (["--logits-processor", "acme=nowhere:Class"], "No module named 'nowhere'"),
}


@pytest.mark.parametrize("name", STARTUP_FAILURES)
def test_what_the_operator_asks_for_must_be_there(stack: Stack, name: str) -> None:
    arguments, message = STARTUP_FAILURES[name]
    with_third_parties(stack)
    worker = stack.start_worker("--device", "cpu", *arguments, wait=False)
    assert worker.wait(60) == 1
    assert message in worker.complaint
    assert stack.registered() == []


# The operator's view


def test_the_catalogue_on_the_system_port(served: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = served
    status, text = http(f"http://127.0.0.1:{worker.port}/engine/control/logits_processors", {})
    assert status == 200, text
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert json.loads(text) == {
        "status": "ok",
        "history": "exact",
        **Catalog.load(options=THIRD_PARTIES).as_json(),
    }


def test_metrics(served: Shared) -> None:
    stack, worker = served
    by = {"processor": "forced_prefix"}
    names = ("requests_total", "steps_total", "forced_tokens_total", "step_seconds_total")
    before = [worker.metric(f"dlw_processor_{name}", **by) for name in names]
    masked = worker.metric("dlw_processor_masked_tokens_total", processor="banned_tokens")
    chosen = [processor("forced_prefix", token_ids=[LETTER_A] * 3), processor("banned_tokens", token_ids=[5, 6])]
    assert chat(stack, *chosen, max_tokens=8, ignore_eos=True).status == 200
    after = [worker.metric(f"dlw_processor_{name}", **by) for name in names]
    assert [new - old for new, old in zip(after[:3], before[:3], strict=True)] == [1, 3, 3]
    assert after[3] > before[3]
    assert worker.metric("dlw_processor_masked_tokens_total", processor="banned_tokens") == masked + 16
    assert worker.metric("dlw_processor_breakers_open") == 0


# Deadlines


def test_a_deadline_in_the_past_is_an_empty_answer(served: Shared) -> None:
    for stream in (False, True):
        reply = chat(served[0], stream=stream, **logits_processors(deadline=1000000000))
        assert reply.status == 200, reply.text
        assert reply.finish_reason == "length"
        assert reply.content == ""
    wait_for(lambda: served[1].metric("dlw_in_flight_requests") == 0, "freed")


def test_a_deadline_ends_an_answer_where_it_is(stack: Stack) -> None:
    """The scripted engine writes for half an hour."""
    stack.start_frontend()
    worker = stack.start_worker(scripted=True, SCRIPT_STEP_S="1")
    for stream in (False, True):
        selected = logits_processors(deadline=time.time() + 2)
        body = {"prompt": "z", "max_tokens": 1800, "stream": stream, **selected}
        reply = send(stack, "completions", body)
        assert reply.status == 200, reply.text
        assert reply.finish_reason == "length"
        assert set(reply.content) <= {"x"}
    wait_for(lambda: worker.metric("dlw_in_flight_requests") == 0, "freed")
    assert worker.metric("dlw_requests_total", outcome="length") == 2
