"""Whole batches through the controller: static and dynamic, streamed, stopped, suspended,
scored.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_names import Counted
from engine_doubles import END, ScriptedModel
from transformers import AutoModelForCausalLM

from worker.engines.embedded import Engine
from worker.engines.embedded.controller.controller import TextGenerationController
from worker.engines.embedded.controller.types import (
    DynamicStep,
    InferenceParams,
    InferenceRequest,
    MaxSequenceLengthOverflowError,
    Status,
    TokenStream,
)
from worker.engines.embedded.speculation import Speculator
from worker.errors import InvalidRequest

PROMPTS = ["Once upon a time", "What is", "def add(left: int, right: int)", "Yes"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine(checkpoints: dict[str, Path]) -> Engine:
    return Engine(checkpoints["llama"], max_num_seqs=12, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def controller(engine: Engine) -> TextGenerationController:
    return TextGenerationController(engine)


def batch(**params: Any) -> dict[int, InferenceRequest]:
    made = InferenceParams(**{"num_tokens_to_generate": 10, "termination_id": -1, **params})
    return {
        place: InferenceRequest(request_id=place, prompt=text, sampling_params=made)
        for place, text in enumerate(PROMPTS)
    }


def run_dynamic(
    controller: TextGenerationController,
    requests: dict[int, InferenceRequest],
    between: Callable[[int], None] = lambda step: None,
) -> list[DynamicStep]:
    for request in requests.values():
        controller.add_request(request)
    steps: list[DynamicStep] = []
    while (step := controller.generate_output_tokens_dynamic_batch()) is not None:
        steps.append(step)
        between(len(steps))
    return steps


def test_a_static_batch(controller: TextGenerationController) -> None:
    requests = batch(return_log_probs=True, top_n_logprobs=5, top_k=1, return_segments=True)
    prompts = {key: controller.tokenizer.tokenize(one.prompt or "") for key, one in requests.items()}
    for key, one in requests.items():
        one.prompt_tokens = list(prompts[key])
    assert controller.generate_all_output_tokens_static_batch(requests) is requests
    for key, one in requests.items():
        assert (one.status, one.finish_reason) == (Status.COMPLETED, "length")
        assert one.prompt_tokens == prompts[key]
        assert one.generated_length == len(one.generated_tokens) == len(one.tpot) == 10
        assert all(seconds >= 0 for seconds in one.tpot)
        assert len(one.prompt_log_probs or ()) == len(one.prompt_top_n_logprobs or ()) == len(prompts[key]) - 1
        assert len(one.generated_log_probs or ()) == len(one.generated_top_n_logprobs or ()) == 10
        found = zip(
            one.generated_tokens, one.generated_log_probs or (), one.generated_top_n_logprobs or (), strict=True
        )
        for token_id, logprob, top in found:
            assert logprob == pytest.approx(top[token_id], rel=1e-12)
        assert one.text == PROMPTS[key] + (one.generated_text or "")
        assert len(one.segments or ()) == len(one.prompt_log_probs or ()) + len(one.generated_log_probs or ()) + 1
        assert "".join(one.segments or ()) == one.text.rstrip("\ufffd")


def test_static_equals_dynamic_equals_alone(controller: TextGenerationController) -> None:
    def results(requests: dict[int, InferenceRequest]) -> list[tuple[Any, ...]]:
        return [(one.generated_tokens, one.generated_text, one.finish_reason) for one in requests.values()]

    kinds: list[dict[str, Any]] = [
        {"seed": 3},
        {"top_k": 1},
        {"seed": 4, "top_k": 5, "top_p": 0.7, "repetition_penalty": 1.3},
        {"seed": 5, "temperature": 2.0, "min_p": 0.05, "min_tokens": 3, "termination_id": None},
    ]

    def mixed() -> dict[int, InferenceRequest]:
        made = batch()
        for one, kind in zip(made.values(), kinds, strict=True):
            one.sampling_params = InferenceParams(**{"num_tokens_to_generate": 8, "termination_id": -1, **kind})
        return made

    static = mixed()
    controller.generate_all_output_tokens_static_batch(static)
    dynamic = mixed()
    run_dynamic(controller, dynamic)
    alone = mixed()
    for key, one in alone.items():
        controller.generate_all_output_tokens_static_batch({key: one})
    assert results(static) == results(dynamic) == results(alone)


def test_log_probs_against_transformers(controller: TextGenerationController, checkpoints: dict[str, Path]) -> None:
    requests = batch(return_log_probs=True, seed=1)
    controller.generate_all_output_tokens_static_batch(requests)
    network: Any = AutoModelForCausalLM.from_pretrained(checkpoints["llama"], dtype=torch.float32)
    sequences = [(one.prompt_tokens or []) + one.generated_tokens for one in requests.values()]
    padded = controller.pad_input_prompt_tokens(sequences, 4, max(map(len, sequences)))
    whole = {key: InferenceRequest(request_id=key, prompt_tokens=tokens) for key, tokens in enumerate(sequences)}
    inputs = controller.prep_inference_input(padded, whole, use_attention_mask=True)
    mask, positions = inputs["attention_mask"], inputs["position_ids"]
    assert mask is not None
    with torch.no_grad():
        logits = network(
            input_ids=padded,
            position_ids=positions,
            attention_mask=torch.zeros(mask.shape).masked_fill(mask, torch.finfo(torch.float32).min),
        ).logits.double()
    for key, tokens in enumerate(sequences):
        expected = logits[key, : len(tokens) - 1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        found = [*(requests[key].prompt_log_probs or ()), *(requests[key].generated_log_probs or ())]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, atol=3e-4, rtol=0)


def test_a_batch_that_scores_prompts_alone(controller: TextGenerationController) -> None:
    def scored(requests: dict[int, InferenceRequest]) -> dict[int, InferenceRequest]:
        controller.generate_all_output_tokens_static_batch(requests)
        return requests

    together = scored(batch(num_tokens_to_generate=0, return_log_probs=True, top_n_logprobs=2))
    for key, request in batch(num_tokens_to_generate=0, return_log_probs=True, top_n_logprobs=2).items():
        (single,) = scored({key: request}).values()
        other = together[key]
        assert (single.generated_tokens, single.generated_text, single.tpot, single.text) == ([], "", [], PROMPTS[key])
        assert single.generated_log_probs == []
        assert single.status is Status.COMPLETED
        assert single.prompt_log_probs == pytest.approx(other.prompt_log_probs, abs=1e-4)
        tops = zip(single.prompt_top_n_logprobs or (), other.prompt_top_n_logprobs or (), strict=True)
        assert all(list(one) == list(two) for one, two in tops)


def test_ids_of_many_requests_are_not_compared_with_each_other(controller: TextGenerationController) -> None:
    """Each new one was compared with all pairs of those that wait."""
    Counted.num_comparisons = 0
    ids = [Counted(f"rollout {number}") for number in range(60)]
    for request_id in ids:
        controller.add_request(InferenceRequest(request_id=request_id, prompt_tokens=[5]))
    assert Counted.num_comparisons < 20 * len(ids)
    with pytest.raises(ValueError, match="id 'rollout 7' is taken"):
        controller.add_request(InferenceRequest(request_id=ids[7], prompt_tokens=[5]))
    for request_id in ids:
        controller.abort_request(request_id)


def test_limits_of_a_static_batch(controller: TextGenerationController) -> None:
    with pytest.raises(MaxSequenceLengthOverflowError, match="2048"):
        controller.generate_all_output_tokens_static_batch(batch(num_tokens_to_generate=4096))
    many = {place: InferenceRequest(request_id=place, prompt_tokens=[5]) for place in range(13)}
    with pytest.raises(ValueError, match="batch size 13 exceeds the maximum, 12"):
        controller.generate_all_output_tokens_static_batch(many)
    with pytest.raises(ValueError, match="batch size 16"):
        controller.generate_all_output_tokens_static_batch(batch(n=2, best_of=4))
    controller.add_request(InferenceRequest(request_id="x", prompt_tokens=[5]))
    with pytest.raises(ValueError, match="dynamic batch are unfinished"):
        controller.generate_all_output_tokens_static_batch(batch())
    with pytest.raises(ValueError, match="id 'x' is taken"):
        controller.add_request(InferenceRequest(request_id="x", prompt_tokens=[5]))
    controller.abort_request("x")
    controller.abort_request("x")
    with pytest.raises(ValueError, match="neither prompt nor prompt_tokens"):
        controller.add_request(InferenceRequest(request_id="x"))
    assert controller.generate_output_tokens_dynamic_batch() is None


def test_a_refused_request_leaves_nothing_behind(controller: TextGenerationController) -> None:
    requests = batch()
    requests[2].prompt_tokens = [10**6]
    stream = TokenStream(0)
    with pytest.raises(InvalidRequest, match=r"prompts\[2\]"):
        controller.generate_all_output_tokens_static_batch(requests, {0: stream})
    assert stream.finished
    assert [one.status for one in requests.values()] == [Status.WAITING_IN_QUEUE] * 4
    assert controller.generate_output_tokens_dynamic_batch() is None


def test_what_a_dynamic_step_reports(controller: TextGenerationController) -> None:
    prompts = {0: [5, 6, 7, 8], 1: [9, 10, 11, 12, 13, 14], 2: [15, 16, 17, 18, 19], 3: [20, 21, 22, 23, 24, 25, 26]}
    skips = {0: False, 1: True, 2: False, 3: True}
    requests = {
        key: InferenceRequest(
            request_id=key,
            prompt_tokens=tokens,
            sampling_params=InferenceParams(
                num_tokens_to_generate=3,
                termination_id=-1,
                return_log_probs=True,
                top_n_logprobs=5,
                skip_prompt_log_probs=skips[key],
                top_k=1,
            ),
        )
        for key, tokens in prompts.items()
    }
    first, second, third = run_dynamic(controller, requests)
    assert first["active_request_ids"] == [0, 1, 2, 3]
    assert [len(one or ()) for one in first["log_probs"]] == [4, 1, 5, 1]
    assert {place: len(one) for place, one in (first["top_n_logprobs"] or {}).items()} == {0: 4, 1: 1, 2: 5, 3: 1}
    assert all(len(entry) == 5 for one in (first["top_n_logprobs"] or {}).values() for entry in one)
    assert [len(one or ()) for one in second["log_probs"]] == [1] * 4
    assert third["finished_request_ids"] == [0, 1, 2, 3]
    assert first["accepted_tokens"] is first["cuda_graph_request_count"] is None
    samples = torch.stack([step["sample"] for step in (first, second, third)])
    assert samples.dtype == torch.int64
    for key, one in requests.items():
        assert one.generated_tokens == samples[:, key].tolist()
        together = [logprob for step in (first, second, third) for logprob in step["log_probs"][key] or ()]
        assert together == [*(one.prompt_log_probs or ()), *(one.generated_log_probs or ())]
        assert (one.prompt_log_probs is None) == skips[key]


def test_accepted_drafts_are_reported(controller: TextGenerationController) -> None:
    controller.engine.session.stepper.speculator = Speculator(clock=lambda: 0.0)  # whatever steps take here
    forced = [40, 41, 42, 43, 44]
    processors = [{"name": "forced_sequence", "args": {"token_ids": forced}}]
    params = InferenceParams(num_tokens_to_generate=5, return_log_probs=True, processors=processors)
    requests = {
        0: InferenceRequest(request_id=0, prompt_tokens=[5, 6, 7], sampling_params=params),
        1: InferenceRequest(
            request_id=1, prompt_tokens=[8, 9], sampling_params=InferenceParams(num_tokens_to_generate=3, top_k=1)
        ),
    }
    first, second, *_ = run_dynamic(controller, requests)
    assert (first["sample"][0].item(), first["accepted_tokens"]) == (40, None)
    assert second["accepted_tokens"] is not None
    assert second["accepted_tokens"].tolist() == [[41, 42, 43], [-1, -1, -1]]
    assert (second["sample"][0].item(), second["finished_request_ids"]) == (44, [0])
    assert len(second["log_probs"][0] or ()) == 4
    assert requests[0].generated_tokens == forced
    assert len(requests[0].generated_log_probs or ()) == 5


def test_a_stop_word_callback_sees_every_token_as_the_newest(controller: TextGenerationController) -> None:
    processors = [{"name": "forced_sequence", "args": {"token_ids": [40, 41, 42, 43]}}]
    params = InferenceParams(num_tokens_to_generate=4, processors=processors)
    request = InferenceRequest(request_id=0, prompt_tokens=[5, 6, 7], sampling_params=params)
    controller.set_stop_word_finished_ids_callback(
        lambda ids: [one for one in ids if request.generated_tokens[-1:] == [42]]
    )
    run_dynamic(controller, {0: request})
    controller.set_stop_word_finished_ids_callback(None)
    assert request.generated_tokens == [40, 41, 42]


def test_skipping_prompt_log_probs_beside_a_suspended_request(controller: TextGenerationController) -> None:
    def request(key: int, skip: bool) -> InferenceRequest:
        params = InferenceParams(
            num_tokens_to_generate=2, termination_id=-1, top_n_logprobs=2, skip_prompt_log_probs=skip
        )
        return InferenceRequest(request_id=key, prompt_tokens=[5, 6, 7], sampling_params=params)

    requests = [request(0, True), request(1, False), request(2, True)]
    controller.add_request(requests[0])
    controller.generate_output_tokens_dynamic_batch()
    controller.suspend_request(0)
    assert requests[0].status is Status.SUSPENDED
    for one in requests[1:]:
        controller.add_request(one)
    step = controller.generate_output_tokens_dynamic_batch()
    assert step is not None
    assert step["newly_paused_request_ids"] == [0]
    assert step["active_request_ids"] == [1, 2]
    assert {place: len(one) for place, one in (step["top_n_logprobs"] or {}).items()} == {0: 3, 1: 1}
    controller.resume_request(0)
    while controller.generate_output_tokens_dynamic_batch() is not None:
        pass
    assert [one.status for one in requests] == [Status.COMPLETED] * 3
    assert [one.generated_length for one in requests] == [2] * 3
    assert [one.prompt_top_n_logprobs is None for one in requests] == [True, False, True]
    with pytest.raises(KeyError):
        controller.suspend_request(0)


def test_suspended_at_random_changes_nothing(controller: TextGenerationController) -> None:
    expected = batch(seed=6, presence_penalty=0.3)
    controller.generate_all_output_tokens_static_batch(expected)
    source = random.Random(0)
    suspended: set[int] = set()

    def between(step: int) -> None:
        running = [key for key, one in found.items() if one.status is Status.ACTIVE]
        for key in [one for one in sorted(suspended) if source.random() < 0.5 or not running]:
            suspended.remove(key)
            controller.resume_request(key)
        if len(running) > 1:
            suspended.add(source.choice(running))
            for key in suspended:
                controller.suspend_request(key)

    found = batch(seed=6, presence_penalty=0.3)
    run_dynamic(controller, found, between)
    while suspended:
        controller.resume_request(suspended.pop())
        while controller.generate_output_tokens_dynamic_batch() is not None:
            pass
    assert [one.generated_tokens for one in found.values()] == [one.generated_tokens for one in expected.values()]


async def test_the_dynamic_batch_beside_an_event_loop(controller: TextGenerationController) -> None:
    assert await controller.async_generate_output_tokens_dynamic_batch() is None
    requests = batch(num_tokens_to_generate=4, seed=2)
    streams = {key: TokenStream(key) for key in requests}
    for key, one in requests.items():
        controller.add_request(one, streams[key])

    async def consume(key: int) -> list[list[int]]:
        return [item.generated_tokens async for item in streams[key].generator()]

    consumers = [asyncio.create_task(consume(key)) for key in requests]
    while await controller.async_generate_output_tokens_dynamic_batch() is not None:
        pass
    for key, seen in zip(requests, await asyncio.gather(*consumers), strict=True):
        tokens = requests[key].generated_tokens
        assert seen[-1] == tokens
        assert all(one == tokens[: len(one)] for one in seen)  # a token that ends inside a character waits
        assert 1 < len(seen) <= len(tokens) == 4


def test_streams_of_a_static_batch_hold_stop_words_back(controller: TextGenerationController) -> None:
    (full,) = controller.generate_all_output_tokens_static_batch(
        {0: InferenceRequest(request_id=0, prompt=PROMPTS[0], sampling_params=batch(top_k=1)[0].sampling_params)}
    ).values()
    assert full.generated_text is not None
    stop = full.generated_text[5:9]
    requests = batch(top_k=1, stop_words=[stop], return_log_probs=True, return_segments=True)
    stream = TokenStream(0)
    controller.generate_all_output_tokens_static_batch(requests, {0: stream})
    items = list(stream._items)
    final = requests[0]
    assert (final.finish_reason, final.stop_reason) == ("stop", stop)
    assert final.generated_text == full.generated_text[:5]
    assert len(final.generated_log_probs or ()) == final.generated_length < full.generated_length
    assert stream.finished
    assert items[-1].generated_text == final.generated_text
    assert items[-1].generated_tokens == final.generated_tokens
    assert items[-1].generated_log_probs == final.generated_log_probs
    assert all((final.generated_text or "").startswith(item.generated_text or "") for item in items)
    assert all(len(item.generated_segments or ()) == item.generated_length for item in items)
    kept = batch(top_k=1, stop_words=[stop], detokenize_stop_sequence=True)
    controller.generate_all_output_tokens_static_batch(kept)
    assert kept[0].generated_text == full.generated_text[:9]


def test_a_static_batch_may_be_suspended_and_nothing_joins_it(controller: TextGenerationController) -> None:
    expected = batch(top_k=1)
    controller.generate_all_output_tokens_static_batch(expected)
    requests = batch(top_k=1)
    problems: list[str] = []

    def callback(active: list[Any]) -> set[Any]:
        if requests[0].generated_length == 2:
            for key in (0, 1, 2):
                controller.suspend_request(key)
            controller.abort_request(3)
            threading.Thread(target=lambda: [controller.resume_request(key) for key in (0, 1, 2)]).start()  # type: ignore[func-returns-value]
            try:
                controller.add_request(InferenceRequest(request_id="x", prompt_tokens=[5]))
            except ValueError as error:
                problems.append(str(error))
        return set()

    controller.set_stop_word_finished_ids_callback(callback)
    try:
        controller.generate_all_output_tokens_static_batch(requests)
    finally:
        controller.set_stop_word_finished_ids_callback(None)
    assert problems == ["a static batch is unfinished; requests cannot join it"]
    for key in (0, 1, 2):
        assert requests[key].generated_tokens == expected[key].generated_tokens
        assert len(requests[key].tpot) == requests[key].generated_length == 10
    assert requests[3].status is Status.CANCELLED
    assert requests[3].generated_tokens == expected[3].generated_tokens[:2]


async def test_a_consumer_that_leaves_cancels(controller: TextGenerationController) -> None:
    params = InferenceParams(termination_id=-1, num_tokens_to_generate=50, top_k=1)  # whole characters come first
    request = InferenceRequest(request_id="a", prompt=PROMPTS[0], sampling_params=params)
    stream = TokenStream("a", controller.abort_request)
    controller.add_request(request, stream)
    await controller.async_generate_output_tokens_dynamic_batch()
    generator = stream.generator()
    assert (await anext(generator)).generated_length == 1
    await generator.aclose()
    assert request.status is Status.CANCELLED
    assert request.generated_length == 1
    assert stream.finished


async def test_a_stream_fails_with_what_went_wrong() -> None:
    stream = TokenStream(0)
    stream.put(InferenceRequest(request_id=0))
    stream.finish(RuntimeError("broken"))
    stream.finish()
    stream.put(InferenceRequest(request_id=1))
    items = stream.generator()
    assert (await anext(items)).request_id == 0
    with pytest.raises(RuntimeError, match="broken"):
        await anext(items)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_stop_word_callback_ends_requests_in_this_step(controller: TextGenerationController, kind: str) -> None:
    expected = batch(top_k=1)
    controller.generate_all_output_tokens_static_batch(expected)
    requests = batch(top_k=1)
    seen: list[list[Any]] = []

    def callback(active: list[Any]) -> set[Any]:
        seen.append(active)
        return {key for key in active if requests[key].generated_length == 3 + key}

    controller.set_stop_word_finished_ids_callback(callback)
    try:
        if kind == "static":
            controller.generate_all_output_tokens_static_batch(requests)
        else:
            run_dynamic(controller, requests)
    finally:
        controller.set_stop_word_finished_ids_callback(None)
    assert {one.finish_reason for one in requests.values()} == {"stop"}
    for key, one in requests.items():
        assert one.generated_tokens == expected[key].generated_tokens[: 3 + key]
    assert [len(active) for active in seen] == [4, 4, 4, 3, 2, 1]


def test_the_stop_word_callback_may_name_active_requests_alone(controller: TextGenerationController) -> None:
    controller.set_stop_word_finished_ids_callback(lambda active: ["nobody"])
    try:
        with pytest.raises(ValueError, match="nobody"):
            controller.generate_all_output_tokens_static_batch(batch())
    finally:
        controller.set_stop_word_finished_ids_callback(None)
    assert controller.generate_output_tokens_dynamic_batch() is None


def test_a_callback_that_raises_loses_no_request(controller: TextGenerationController) -> None:
    """The step has been done: what ended in it is complete, and leaves the batch."""
    short = replace(batch(top_k=1)[0], request_id="short")
    short.sampling_params = replace(short.sampling_params, num_tokens_to_generate=2)
    long = replace(batch(top_k=1)[1], request_id="long")
    stream = TokenStream("short")
    controller.add_request(short, stream)
    controller.add_request(long)

    def callback(active: list[Any]) -> list[Any]:
        if long.generated_length == 2:
            raise ZeroDivisionError
        return []

    controller.set_stop_word_finished_ids_callback(callback)
    try:
        with pytest.raises(ZeroDivisionError):
            run_dynamic(controller, {})
    finally:
        controller.set_stop_word_finished_ids_callback(None)
    assert (short.status, short.finish_reason, short.generated_length) == (Status.COMPLETED, "length", 2)
    assert stream.finished
    assert stream._items[-1].generated_tokens == short.generated_tokens
    assert (long.status, long.generated_length) == (Status.ACTIVE, 2)
    controller.abort_request("long")
    controller.generate_all_output_tokens_static_batch(batch())


async def test_a_static_batch_that_breaks_tells_its_streams(controller: TextGenerationController) -> None:
    controller.set_stop_word_finished_ids_callback(lambda active: ["nobody"])
    stream = TokenStream(0)
    try:
        with pytest.raises(ValueError, match="nobody"):
            controller.generate_all_output_tokens_static_batch(batch(), {0: stream})
    finally:
        controller.set_stop_word_finished_ids_callback(None)
    with pytest.raises(ValueError, match="nobody"):
        _ = [item async for item in stream.generator()]


def test_a_streamed_answer_is_not_decoded_at_each_token(
    controller: TextGenerationController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text grows in the engine: decoding it as a whole each time would take the square."""
    decoded: list[int] = []
    plain = controller.tokenizer.detokenize

    def detokenize(ids: Sequence[int], skip_special_tokens: bool = True) -> Any:
        decoded.append(len(ids))
        return plain(ids, skip_special_tokens)

    monkeypatch.setattr(controller.tokenizer, "detokenize", detokenize)
    stream, requests = TokenStream(0), batch(top_k=1)
    controller.generate_all_output_tokens_static_batch(requests, {0: stream})
    assert decoded == []
    assert stream._items[-1].generated_text == requests[0].generated_text


def test_end_tokens_are_not_counted() -> None:
    class Ids:
        bos = None
        eod = END

        def tokenize(self, text: str) -> list[int]:
            return [int(word) for word in text.split()]

        def detokenize(self, ids: list[int]) -> str:
            return "".join(f"<{one}>" for one in ids)

        def offsets(self, ids: list[int], text: str) -> list[int]:
            return [len(self.detokenize(ids[:place])) for place in range(len(ids))]

    model = ScriptedModel()
    controller = TextGenerationController(Engine("no-checkpoint", model=model, max_num_seqs=4), Ids())  # type: ignore[arg-type]
    answer = model.greedy([3, 4], 8)
    place = answer.index(answer[5])

    def run(**params: Any) -> InferenceRequest:
        made = InferenceParams(num_tokens_to_generate=8, top_k=1, return_log_probs=True, **params)
        request = InferenceRequest(request_id=0, prompt_tokens=[3, 4], sampling_params=made)
        controller.generate_all_output_tokens_static_batch({0: request})
        return request

    ended = run(termination_id=answer[5])
    assert (ended.generated_tokens, ended.stop_reason, ended.finish_reason) == (answer[:place], answer[5], "stop")
    assert len(ended.generated_log_probs or ()) == len(ended.tpot) == place
    assert run(termination_id=answer[5], detokenize_stop_sequence=True).generated_tokens == answer[: place + 1]
    assert run(termination_id=-1).generated_tokens == answer
    assert run(stop_token_ids=[answer[5]]).generated_tokens == answer[:place]
    total = InferenceParams(num_tokens_total=5, top_k=1, termination_id=-1)
    request = InferenceRequest(request_id=0, prompt_tokens=[3, 4], sampling_params=total)
    controller.generate_all_output_tokens_static_batch({0: request})
    assert request.generated_tokens == answer[:3]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_several_answers_and_logits(controller: TextGenerationController, kind: str) -> None:
    params = InferenceParams(
        num_tokens_to_generate=5,
        termination_id=-1,
        seed=8,
        n=2,
        best_of=3,
        return_logits=True,
        return_prompt_logits=True,
        return_log_probs=True,
        processors=[{"name": "min_tokens", "args": {"n": 2}}],
    )
    request = InferenceRequest(request_id=0, prompt="Hello there", sampling_params=params)
    if kind == "static":
        controller.generate_all_output_tokens_static_batch({0: request})
    else:
        steps = run_dynamic(controller, {0: request})
        assert {choice for step in steps for choice in step["choices"]} == {0, 1, 2}
        assert sum(len(step["active_request_ids"]) for step in steps) == 15
    first, second = request.completions
    assert request.generated_tokens == first.token_ids != second.token_ids
    assert (first.cumulative_logprob or 0.0) >= (second.cumulative_logprob or 0.0)
    assert request.generated_log_probs is not None
    assert sum(request.generated_log_probs) == pytest.approx(first.cumulative_logprob)
    assert request.generated_logits is not None
    assert request.generated_logits.shape == (5, controller.engine.info.vocab_size)
    assert request.prompt_logits is not None
    assert request.prompt_logits.shape == (len(request.prompt_tokens or ()), controller.engine.info.vocab_size)


def test_the_best_of_several_answers_is_not_streamed(controller: TextGenerationController) -> None:
    """Another one's tokens were streamed than those that the request has at its end."""
    params = InferenceParams(num_tokens_to_generate=4, seed=1, best_of=3)
    request, stream = InferenceRequest(request_id="one", prompt="Hello", sampling_params=params), TokenStream("one")
    with pytest.raises(ValueError, match=r"^best_of of request 'one' must be n"):
        controller.add_request(request, stream)
    with pytest.raises(ValueError, match=r"^best_of of request 'one' must be n"):
        controller.generate_all_output_tokens_static_batch({0: request}, {0: stream})
    assert controller.generate_output_tokens_dynamic_batch() is None


def test_a_request_that_fails_says_so(controller: TextGenerationController) -> None:
    def breaks(*arguments: Any) -> None:
        raise RuntimeError("no")

    requests = batch(top_k=1)
    requests[1].sampling_params = InferenceParams(num_tokens_to_generate=10, logits_processor=[breaks], top_k=1)
    controller.generate_all_output_tokens_static_batch(requests)
    assert [one.status for one in requests.values()].count(Status.FAILED) == 1
    assert (requests[1].finish_reason, requests[1].generated_tokens) == ("error", [])
    assert "RuntimeError" in (requests[1].error or "")
    expected = batch(top_k=1)
    controller.generate_all_output_tokens_static_batch(expected)
    for key in (0, 2, 3):
        assert requests[key].generated_tokens == expected[key].generated_tokens


def test_a_bos_before_a_text(controller: TextGenerationController) -> None:
    request = InferenceRequest(
        request_id=0, prompt="Hello", sampling_params=InferenceParams(num_tokens_to_generate=1, add_BOS=True)
    )
    controller.generate_all_output_tokens_static_batch({0: request})
    assert request.prompt_tokens == [controller.tokenizer.bos, *controller.tokenizer.tokenize("Hello")]
