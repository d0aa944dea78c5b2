"""``python -m worker replay``: from a served answer's receipt to the same tokens, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest
import pytest_asyncio
from failing_processor import FailsAt
from served_worker import Answer, Client, serving

from adapters.catalog import Selection
from adapters.catalog.selection import MAX_DEPTH
from adapters.client import processor, selection
from adapters.contract import MAX_LIST
from worker.__main__ import main
from worker.arguments import parse_arguments
from worker.engines import EngineRequest, TokenDelta
from worker.errors import ConfigurationError
from worker.models import DEFAULT_MODEL, model_cache
from worker.models.checkpoint import FORMAT
from worker.models.default_model import _GGUF_SHA256
from worker.replay import on_vllm
from worker.replay.prompt import read_prompt
from worker.replay.recorded import RecordedAdapter, RecordedModel, RecordedReceipt, RecordedWeights
from worker.replay.verdict import check_model_digest
from worker.requests.receipts import ServerRecord, TokenDigest
from worker.sampling import SamplingParams
from worker.tiny_model import CONTEXT_LENGTH, write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, 500]
DRAWN = {"temperature": 0.9}
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    (directory / "key").write_text(KEY.hex())
    (directory / "policy.yaml").write_text(
        f"keys:\n  house: {{file: {directory / 'key'}}}\n"
        "models:\n  model:\n    mandatory:\n      - {name: watermark, args: {key_id: house}}\n"
    )
    return directory / "policy.yaml"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model: Path, policy: Path) -> AsyncIterator[Client]:
    """A worker that computes prompts in chunks, with pages for some of its requests only."""
    small = ["--context-length", "512", "--kv-blocks", "64", "--max-num-seqs", "6", "--max-num-batched-tokens", "24"]
    small += ["--max-mixed-chunk", "24"]  # not as long as steps take: whether some are preempted would depend on it
    async with serving(model, *small, "--processor-policy", str(policy), "--drain-timeout-s", "0") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(model: Path) -> AsyncIterator[Client]:
    """A worker without a policy."""
    async with serving(model, *amateur_of(model)) as client:
        yield client


def amateur_of(model: Path) -> list[str]:
    """Options of a worker whose draft model is the model itself."""
    return ["--speculative-config", json.dumps({"model": str(model)})]


@pytest.fixture
def files(tmp_path: Path, model: Path) -> Files:
    return Files(tmp_path, model)


class Files:
    """A receipt and a prompt in files, and the command on them."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.receipt = directory / "receipt.json"
        self.prompt = directory / "prompt.json"
        self.model = model
        self.extra: list[str] = []

    async def replay(self, receipt: Any, prompt: Any, *argv: str) -> int:
        self.receipt.write_text(json.dumps(receipt))
        self.prompt.write_text(prompt if isinstance(prompt, str) else json.dumps(prompt))
        fixed = ["--prompt-file", str(self.prompt), "--model-path", str(self.model), "--device", "cpu"]
        return await asyncio.to_thread(main, ["replay", str(self.receipt), *fixed, *self.extra, *argv])


GRAMMAR = processor("regex", pattern="[a-z ]{8,30}\\.")
ASKED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "drawn": ([], DRAWN),
    "greedy": ([], {}),
    "truncated": ([], {"temperature": 0.699999988079071, "top_k": 40, "top_p": 0.9, "min_p": 0.01}),
    "penalties": (
        [processor("no_repeat_ngram", n=2)],
        {**DRAWN, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    ),
    "grammar": ([GRAMMAR], DRAWN),
    "state made of logits": ([processor("mirostat", tau=3.1), processor("xtc", probability=0.5)], DRAWN),
    "bias and bans": (
        [processor("logit_bias", bias={"37": 2.3}), processor("banned_tokens", token_ids=[5, 6])],
        {**DRAWN, "seed": -3},
    ),
    "guidance": ([processor("cfg", scale=2.5, negative_token_ids=[37, 38, 39])], DRAWN),
    "contrast": ([processor("contrastive", beta=1.5, amateur_temperature=2.0)], DRAWN),
}


@pytest.mark.parametrize("name", ASKED)
async def test_the_tokens_are_those_that_were_recorded(
    name: str, plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    processors, options = ASKED[name]
    asked = {"sampling_options": options, "stop_conditions": {"max_tokens": 40}}
    answer = await plain.ask(PROMPT, *processors, **asked)  # type: ignore[arg-type]
    files.extra = amateur_of(files.model)
    assert await files.replay(answer.receipt, PROMPT) == 0, capsys.readouterr()
    number = answer.receipt["generated_tokens"]
    assert f"answer: {number} tokens, equal to those recorded" in capsys.readouterr().out
    if name == "drawn":
        assert await files.replay({**answer.receipt, "seed": answer.receipt["seed"] ^ 1}, PROMPT) == 1


async def test_hidden_end_tokens_are_recorded(plain: Client, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of one is none of the answer, though another end token is shown."""
    (end,) = plain.worker.server.chains.vocabulary.encode(" fox")
    banned = [processor("logit_bias", bias={str(end): 100.0}), processor("phrase_ban", phrases=[" fox"])]
    ends = {"max_tokens": 4, "stop_token_ids_hidden": [end], "stop_token_ids_visible": [5]}
    answer = await plain.ask(PROMPT, *banned, sampling_options={}, stop_conditions=ends)
    assert answer.receipt["generated_tokens"] == 1
    assert await files.replay(answer.receipt, PROMPT) == 0, capsys.readouterr()


async def test_contrast_is_replayed_with_its_draft_model_alone(
    plain: Client, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contrast, options = ASKED["contrast"]
    answer = await plain.ask(PROMPT, *contrast, sampling_options=options, stop_conditions={"max_tokens": 8})
    for extra, told in (([], "none"), (amateur_of(write_tiny_model(tmp_path / "other", seed=1)), "")):
        files.extra = extra
        assert await files.replay(answer.receipt, PROMPT) == 2
        assert f"--speculative-config has {told}" in capsys.readouterr().err


async def test_a_processor_of_another_version_is_told(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await plain.ask(PROMPT, GRAMMAR, sampling_options=DRAWN, stop_conditions={"max_tokens": 8})
    (record,) = answer.receipt["processors"]
    assert await files.replay(answer.receipt, PROMPT) == 0
    assert "of version" not in capsys.readouterr().out
    for version in (record["version"] - 1, "new", None):
        older = {**answer.receipt, "processors": [{**record, "version": version}, {"name": [], "version": 1}]}
        assert await files.replay(older, PROMPT) == 0
        told = f"note: processors[0].version: regex was of version {version} and is of version {record['version']} here"
        assert told in capsys.readouterr().out


@pytest.mark.native
async def test_what_is_quantised_is_recorded(model: Path, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"quantization": "int8", "activation_dtype": "int8", "kv_cache_dtype": "int8"}
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    async with serving(model, *flags) as client:
        answer = await client.ask(PROMPT, sampling_options=DRAWN, stop_conditions={"max_tokens": 40})
    assert options.items() <= answer.receipt["engine"]["options"].items()
    assert await files.replay(answer.receipt, PROMPT) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "int8 weights, int8 activations in spans but outliers, int8 KV cache" in said
    assert "tokens may differ" not in said


async def test_a_choice_beside_the_first_is_replayed(plain: Client, files: Files) -> None:
    annotation = "logits_processors:" + selection(processor("xtc", probability=0.5), receipt=True)
    raw = {
        "token_ids": PROMPT,
        "annotations": [annotation],
        "sampling_options": {**DRAWN, "seed": 5},
        "stop_conditions": {"max_tokens": 30},
    }
    answers = []
    for choice in range(2):
        answers.append(Answer([chunk async for chunk in plain.worker.server.serve(plain.id(), raw, {}, choice)]))
    assert answers[0].token_ids != answers[1].token_ids
    assert await files.replay(answers[1].receipt, PROMPT) == 0


async def test_a_response_of_several_choices_has_several_receipts(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = await plain.ask(PROMPT, sampling_options=DRAWN, stop_conditions={"max_tokens": 3})
    extensions = [{"engine_data": {"logits_processors": answer.receipt}}] * 2
    assert await files.replay({"choices": [], "nvext": {"choices": extensions}}, PROMPT) == 2
    assert "holds the receipts of 2 choices: give one of nvext.choices in a file of its own" in capsys.readouterr().err
    assert await files.replay(extensions[0], PROMPT) == 0


async def test_a_deep_schema_of_a_field_is_replayed(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deeper than the channel of processors may be."""
    schema: dict[str, Any] = {"enum": ["a\0b", "b"]}
    for _ in range(MAX_DEPTH):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    guide, stop = {"guided_decoding": {"json": schema}}, {"max_tokens": 8}
    answer = await plain.ask(PROMPT, sampling_options=guide, stop_conditions=stop)
    assert await files.replay(answer.receipt, PROMPT) == 0, capsys.readouterr()


async def test_an_order_is_recorded(plain: Client, files: Files) -> None:
    asked = {"sampling_options": {"temperature": 3.0, "min_p": 0.9, "seed": 5}, "stop_conditions": {"max_tokens": 40}}
    answer = await plain.ask(PROMPT, order=["min_p", "temperature"], **asked)
    assert answer.token_ids != (await plain.ask(PROMPT, **asked)).token_ids  # type: ignore[arg-type]
    assert await files.replay(answer.receipt, PROMPT) == 0


async def test_a_preempted_watermarked_answer_of_a_batch_is_replayed(
    served: Client, policy: Path, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [[(place * 7 + which) % 900 + 5 for place in range(240)] for which in range(5)]
    asked = {"sampling_options": DRAWN, "stop_conditions": {"max_tokens": 60, "ignore_eos": True}}
    chosen = [processor("frequency_penalty", penalty=0.3), processor("no_repeat_ngram", n=3)]
    answers = await asyncio.gather(*(served.ask(prompt, *chosen, **asked) for prompt in prompts))  # type: ignore[arg-type]
    preempted = [answer.receipt["preemptions"] for answer in answers]
    assert sum(preempted) > 0
    place = preempted.index(max(preempted))
    receipt = answers[place].receipt
    assert KEY.hex() not in json.dumps(receipt)
    assert "house" not in json.dumps(receipt)
    assert await files.replay(receipt, prompts[place]) == 2
    said = capsys.readouterr().err
    assert "request.processors[0]: watermark is the operator's (mandatory) and not in the policy of model" in said
    assert await files.replay(receipt, prompts[place], "--processor-policy", str(policy)) == 0, capsys.readouterr()


async def test_an_end_token_that_is_not_shown_is_replayed_too(plain: Client, files: Files) -> None:
    whole = await plain.ask(PROMPT, stop_conditions={"max_tokens": 12})
    end = whole.token_ids[7]
    answer = await plain.ask(PROMPT, stop_conditions={"max_tokens": 12, "stop_token_ids_hidden": [end]})
    number = whole.token_ids.index(end)
    assert (answer.finish_reason, len(answer.token_ids)) == ("stop", number)
    assert answer.receipt["generated_tokens"] == number + 1
    assert answer.receipt["answer_digest"] == str(TokenDigest([*answer.token_ids, end]))
    assert await files.replay(answer.receipt, PROMPT) == 0


async def test_a_cut_off_answer_is_replayed_as_far_as_it_went(plain: Client, files: Files) -> None:
    asked = {"sampling_options": DRAWN, "stop_conditions": {"max_tokens": 500, "ignore_eos": True}}
    answer = await plain.ask(PROMPT, GRAMMAR, sampling_options=DRAWN, stop_conditions={"max_tokens": 50})
    raw = {"token_ids": PROMPT, "annotations": ['logits_processors:{"version": 1, "receipt": true}'], **asked}
    stream = plain.worker.generate(raw, plain)
    chunks = [await anext(stream) for _ in range(3)]
    await stream.aclose()
    cut = chunks[-1]["engine_data"]["logits_processors"]
    assert 3 <= cut["generated_tokens"] < 500
    assert await files.replay(cut, PROMPT) == 0
    for receipt in answer.receipts:
        assert receipt["seed"] == answer.receipt["seed"] < 2**53


async def test_a_position_shows_each_processor_s_effect_and_the_token(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**DRAWN, "repetition_penalty": 1.5}
    chosen = [processor("logit_bias", bias={"37": 100}), processor("banned_tokens", token_ids=[37])]
    asked = {"sampling_options": options, "stop_conditions": {"max_tokens": 8, "ignore_eos": True}}
    answer = await plain.ask(PROMPT, *chosen, **asked)  # type: ignore[arg-type]
    position = len(PROMPT) + 4
    assert await files.replay(answer.receipt, PROMPT, "--position", str(position)) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"position {position}, token 5 of the answer")
    names = [line.split()[0] for line in lines[start + 1 :]]
    assert names == ["after", "model", "logit_bias", "repetition_penalty", "banned_tokens", "sampler"]
    model_row, biased, _, banned, last = lines[start + 2 :]
    assert " 37 'A' " not in model_row
    assert biased.split(maxsplit=1)[1].startswith("37 'A' 100.0%")
    assert " 37 'A' " not in banned
    assert f"temperature 0.9: took {answer.token_ids[4]} " in last


async def test_a_position_of_processors_whose_state_is_made_of_logits(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """mirostat keeps a number of tokens that depends on all earlier rows: at the position it leaves
    one or a few, and the one that was taken is among them.
    """
    asked = {"sampling_options": {"temperature": 1.0}, "stop_conditions": {"max_tokens": 20, "ignore_eos": True}}
    answer = await plain.ask(PROMPT, processor("mirostat", tau=0.5, eta=1.0), **asked)  # type: ignore[arg-type]
    for place in (3, 19):
        assert await files.replay(answer.receipt, PROMPT, "--position", str(len(PROMPT) + place)) == 0
        lines = capsys.readouterr().out.splitlines()
        left = next(line for line in lines if line.startswith("mirostat"))
        assert f" {answer.token_ids[place]} " in left


async def test_prompts_as_text_and_as_a_request_body(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.model)
    messages = [{"role": "user", "content": "Hello there"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = await plain.ask(prompt, sampling_options=DRAWN, stop_conditions={"max_tokens": 5})
    response = {"id": "x", "choices": [], "nvext": {"engine_data": {"logits_processors": answer.receipt}}}
    assert await files.replay(response, {"model": "tiny", "messages": messages}) == 0
    assert await files.replay({"logits_processors": answer.receipt}, {"prompt": text}) == 0
    assert await files.replay(answer.receipt, text) == 0
    assert await files.replay(answer.receipt, "Hello you") == 2
    assert "error: prompt_digest: the receipt is of another prompt" in capsys.readouterr().err


TEMPLATE_VARIABLES = (
    *("style", "a", "reasoning_effort", "thinking", "enable_thinking", "thinking_mode", "add_generation_prompt"),
)
VARIABLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kwargs": ({"chat_template_kwargs": {"style": "terse"}}, {"style": "terse"}),
    "args": ({"chat_template_args": {"style": "terse"}}, {"style": "terse"}),
    "effort": ({"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}, {"a": 1, "reasoning_effort": "low"}),
    "no thinking": (
        {"thinking": {"type": "disabled"}},
        {"thinking": False, "enable_thinking": False, "thinking_mode": "disabled"},
    ),
    "thinking": ({"thinking": True}, {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}),
    "adaptive": ({"thinking": {"type": "adaptive"}}, {"thinking_mode": "adaptive"}),
    "no answer begins": ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    "no answer, as a variable": (
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"add_generation_prompt": False},
    ),
    "continued": ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
}


@pytest.mark.parametrize("name", VARIABLES)
async def test_a_body_is_rendered_with_the_variables_of_its_request(
    name: str, receipt: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    from transformers import AutoTokenizer

    fields, variables = VARIABLES[name]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "".join(f"{name}={{{{ {name} | default('unset') }}}} " for name in TEMPLATE_VARIABLES)
        + "{{ messages[0].content }}"
    )
    messages = [{"role": "user", "content": "Hello there"}]
    asked = {"add_generation_prompt": True, **variables}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **asked)
    assert not any(f"{variable}=unset" in text for variable in variables if variable in TEMPLATE_VARIABLES)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    (tmp_path / "body.json").write_text(json.dumps({"messages": messages, **fields}))
    record = RecordedReceipt.model_validate({**receipt, "prompt_digest": str(TokenDigest(prompt))})
    assert read_prompt(tmp_path / "body.json", record, tokenizer) == prompt


async def test_a_body_is_rendered_as_frontends_give_it_to_a_template(
    receipt: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    """Parts of a message are one text, and arguments of calls objects."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each.content }}"
        "{% for call in each.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (tmp_path / "body.json").write_text(json.dumps({"messages": messages}))
    prompt = tokenizer.encode('Hello\nthere{"a": 1}', add_special_tokens=False)
    record = RecordedReceipt.model_validate({**receipt, "prompt_digest": str(TokenDigest(prompt))})
    assert read_prompt(tmp_path / "body.json", record, tokenizer) == prompt


@pytest.mark.parametrize("saved", ["", "\n", "\r\n"])
async def test_a_text_keeps_the_ends_of_its_lines(
    saved: str, receipt: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    """An editor may have added one at its end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("one\r\ntwo\rthree", "one\ntwo"):
        (tmp_path / "prompt.txt").write_bytes((text + saved).encode())
        prompt = tokenizer.encode(text, add_special_tokens=False)
        record = RecordedReceipt.model_validate({**receipt, "prompt_digest": str(TokenDigest(prompt))})
        assert read_prompt(tmp_path / "prompt.txt", record, tokenizer) == prompt


async def test_a_call_without_a_text_has_an_empty_one(receipt: dict[str, Any], tmp_path: Path, model: Path) -> None:
    """As the front door gives it to a template that joins role and text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for each in messages %}{{ each.role + ': ' + each.content }} {% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for message in ({"content": None}, {}):
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "tool_calls": [call], **message}]
        (tmp_path / "body.json").write_text(json.dumps({"messages": messages}))
        prompt = tokenizer.encode("user: Hello assistant:  ", add_special_tokens=False)
        record = RecordedReceipt.model_validate({**receipt, "prompt_digest": str(TokenDigest(prompt))})
        assert read_prompt(tmp_path / "body.json", record, tokenizer) == prompt


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({}, {"thinking": False, "enable_thinking": False, "thinking_mode": "disabled"}),
        ({"reasoning_effort": "low"}, {"thinking": False, "enable_thinking": False, "reasoning_effort": "low"}),
        ({"chat_template_args": {"enable_thinking": True}}, {"enable_thinking": True}),
        ({"thinking": True}, {"thinking": True, "enable_thinking": True, "thinking_mode": "enabled"}),
    ],
)
async def test_a_body_is_rendered_with_the_workers_thinking(
    body: dict[str, Any], variables: dict[str, Any], receipt: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    names = "thinking", "enable_thinking", "thinking_mode", "reasoning_effort"
    tokenizer.chat_template = "".join(f"{name}={{{{ {name} | default('unset') }}}} " for name in names)
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    (tmp_path / "body.json").write_text(json.dumps({"messages": messages, **body}))
    record = RecordedReceipt.model_validate({**receipt, "prompt_digest": str(TokenDigest(prompt))})
    given = parse_arguments(["--model-path", str(model), "--dyn-default-thinking-mode", "disabled"], {})
    assert read_prompt(tmp_path / "body.json", record, tokenizer, given) == prompt


async def test_a_body_is_rendered_by_the_workers_template(
    plain: Client, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.model)
    prompt = tokenizer.encode("only this: Hello", add_special_tokens=False)
    answer = await plain.ask(prompt, stop_conditions={"max_tokens": 3})
    template, body = tmp_path / "template.jinja", {"messages": [{"role": "user", "content": "Hello"}]}
    template.write_text("only this: {{ messages[0].content }}")
    assert await files.replay(answer.receipt, body, "--custom-jinja-template", str(template)) == 0
    assert await files.replay(answer.receipt, body) == 2
    template.write_bytes(b"\xff")
    capsys.readouterr()
    assert await files.replay(answer.receipt, body, "--custom-jinja-template", str(template)) == 2
    assert f"--custom-jinja-template {template}: 'utf-8' codec can't decode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": "Hello"}, "messages must be a list of messages, got 'Hello'"),
        ({"messages": {"role": "user"}}, "messages must be a list of messages, got a dict of 1"),
        ({"prompt": ["a", "b"]}, "prompt must be a text or a list of token ids, got a list of 2"),
    ],
)
async def test_a_body_without_a_prompt_names_the_field(
    body: dict[str, Any], said: str, receipt: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    """Unless the file is the text itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    (tmp_path / "body.json").write_text(json.dumps(body))
    with pytest.raises(ConfigurationError, match=f"--prompt-file {tmp_path}/body.json: {said}"):
        read_prompt(tmp_path / "body.json", RecordedReceipt.model_validate(receipt), tokenizer)
    prompt = tokenizer.encode(json.dumps(body), add_special_tokens=False)
    record = RecordedReceipt.model_validate({**receipt, "prompt_digest": str(TokenDigest(prompt))})
    assert read_prompt(tmp_path / "body.json", record, tokenizer) == prompt


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tools", 5, "tools must be a list of tools, got 5"),
        ("chat_template_kwargs", "x", "chat_template_kwargs must be an object, got 'x'"),
        ("chat_template_args", [1], "chat_template_args must be an object, got a list of 1"),
        ("thinking", "enabled", "thinking must be true, false or an object, got 'enabled'"),
        ("thinking", [1], "thinking must be true, false or an object, got a list of 1"),
    ],
)
async def test_a_body_names_the_field_of_the_template(
    field: str, value: Any, said: str, receipt: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    (tmp_path / "body.json").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}], field: value}))
    with pytest.raises(ConfigurationError, match=f"--prompt-file: {said}"):
        read_prompt(tmp_path / "body.json", RecordedReceipt.model_validate(receipt), tokenizer)


@pytest.fixture(scope="module")
def recorded() -> list[Any]:
    return []


@pytest_asyncio.fixture(loop_scope="module")
async def receipt(plain: Client, recorded: list[Any]) -> dict[str, Any]:
    if not recorded:
        answer = await plain.ask(PROMPT, GRAMMAR, sampling_options=DRAWN, stop_conditions={"max_tokens": 6})
        recorded.append(answer.receipt)
    return json.loads(json.dumps(recorded[0]))


def request_of(receipt: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**receipt, "request": json.dumps({**json.loads(receipt["request"]), **changes})}


async def test_bad_receipts_name_the_field(
    receipt: dict[str, Any], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    without_seed = {name: value for name, value in receipt.items() if name != "seed"}
    without_request = {name: value for name, value in receipt.items() if name != "request"}
    sampling = json.loads(receipt["request"])["sampling"]
    other = [{"name": "nobody", "scope": "all", "args": {}}]
    outside = [{"name": "min_tokens", "scope": "all", "args": {"n": -1}}]
    engine = {**receipt["engine"], "options": {"dtype": "float7"}}
    cases: list[tuple[Any, str]] = [
        ([], "holds no receipt: a request gets one"),
        (without_seed, "seed: Field required"),
        ({**receipt, "seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({**receipt, "extra": 1}, "extra: Extra inputs are not permitted"),
        ({**receipt, "version": 2}, "version: Input should be 1"),
        ({**receipt, "images": 1}, "images: the prompt has pictures, which no receipt has"),
        (without_request, "request: is not in this chunk's receipt"),
        ({**receipt, "request": "{"}, "request: is not JSON"),
        (request_of(receipt, choice=-1), "request: choice: Input should be greater than or equal to 0"),
        (request_of(receipt, choice=2**64), "request: choice: Input should be less than 18446744073709551616"),
        (request_of(receipt, smoke_test=True), "request: smoke_test: Input should be False"),
        (request_of(receipt, sampling={**sampling, "top_p": 2}), "request.sampling: top_p must be"),
        (request_of(receipt, sampling={**sampling, "heat": 2}), "request.sampling: "),
        (request_of(receipt, sampling={**sampling, "stop_token_ids": 5}), "request.sampling: stop_token_ids: "),
        (request_of(receipt, sampling={**sampling, "stop_token_ids": [[5]]}), "request.sampling: stop_token_ids.0: "),
        (request_of(receipt, sampling={**sampling, "end_id": []}), "request.sampling: end_id: "),
        (request_of(receipt, sampling={**sampling, "ignore_eos": "no"}), "request.sampling: ignore_eos: "),
        (request_of(receipt, processors=other), 'request.processors[0].name: unknown logits processor "nobody"'),
        (request_of(receipt, processors=outside), "request.processors[0].args.n: "),
        ({**receipt, "engine": engine}, "engine.options.dtype must be one of"),
        ({**receipt, "model": {"name": "m", "digest": "0"}}, "model.digest: the receipt is of a checkpoint with 0"),
    ]
    for data, message in cases:
        assert await files.replay(data, PROMPT) == 2, message
        assert message in capsys.readouterr().err


async def test_bad_command_lines(receipt: dict[str, Any], files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert await files.replay(receipt, PROMPT, "--position", "3") == 2
    assert f"--position must be one of the answer's, {len(PROMPT)} to " in capsys.readouterr().err
    for prompt in ({"messages": [{"role": "user", "content": "\ud800"}]}, {"prompt": "\udc00"}):
        assert await files.replay(receipt, prompt) == 2
        assert "a text has half of a surrogate pair" in capsys.readouterr().err
    assert await files.replay(receipt, PROMPT, "--max-num-seqs", "0") == 2
    assert "--max-num-seqs must be an integer of at least 1" in capsys.readouterr().err
    for early in ([], ["--prompt-file", "x", str(files.receipt)], ["--model-path", "y", str(files.receipt)]):
        assert main(["replay", *early]) == 2
        assert "the first argument must be the receipt's file" in capsys.readouterr().err
    assert main(["replay", str(files.receipt.with_name("none")), "--prompt-file", "x", "--model-path", "y"]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err
    deep = files.receipt.with_name("deep.json")
    deep.write_text("[" * 100_000)
    assert main(["replay", str(deep), "--prompt-file", "x", "--model-path", "y"]) == 2
    assert "deep.json: is not JSON: " in capsys.readouterr().err
    assert main(["replay", str(files.receipt), "--model-path", "y"]) == 2
    assert "--prompt-file" in capsys.readouterr().err


async def test_a_receipt_of_vllm_is_replayed_there_or_as_asked(
    receipt: dict[str, Any], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM is in an environment of its own; `tests/vllm/test_engine_e2e.py` replays in it."""
    engine = {"name": "vllm", "version": "0.32.0", "computed_by": "vLLM, float32, cpu", "options": {"dtype": "auto"}}
    vllms = {**receipt, "engine": engine, "numerics": "fast"}
    assert await files.replay(vllms, PROMPT) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--engine vllm: vllm is not installed; run this in the environment that has it" in line
    assert "or give --engine embedded" in line
    assert await files.replay(vllms, PROMPT, "--position", str(len(PROMPT))) == 2
    assert "--engine vllm: shows no logits; give --engine embedded" in capsys.readouterr().err
    assert await files.replay(vllms, PROMPT, "--engine", "embedded", "--dtype", "float32") == 0
    said = capsys.readouterr().out
    assert "note: the answer was made with fast numerics: equal tokens are likely, and not promised" in said
    assert "note: engine.name was 'vllm' and is 'embedded' here: tokens may differ" in said


async def decided(
    answer: Answer, files: Files, capsys: pytest.CaptureFixture[str], token_ids: list[int] | None = None
) -> tuple[int, list[str]]:
    """Exit status and lines for the decisions of an answer, which may have other tokens instead."""
    digest = {} if token_ids is None else {"answer_digest": str(TokenDigest(token_ids))}
    receipt = {**answer.receipt, **digest}
    path = files.receipt.with_name("answer.json")
    path.write_text(json.dumps(token_ids or answer.token_ids))
    status = await files.replay(receipt, PROMPT, "--answer-file", str(path))
    return status, [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("engine", "note"))]


@pytest.mark.parametrize("name", ASKED)
async def test_decisions_are_made_again_after_the_recorded_tokens(
    name: str, plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    processors, options = ASKED[name]
    answer = await plain.ask(PROMPT, *processors, sampling_options=options, stop_conditions={"max_tokens": 12})
    files.extra = amateur_of(files.model)
    number = answer.receipt["generated_tokens"]
    said = f"decisions: {number} of {number} tokens are allowed by the processors, {number} are chosen again"
    assert await decided(answer, files, capsys) == (0, [said])


async def test_another_token_is_another_decision(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = processor("banned_tokens", token_ids=[7, 8])
    answer = await plain.ask(PROMPT, chosen, stop_conditions={"max_tokens": 6, "ignore_eos": True})
    last, position = answer.token_ids[-1], len(PROMPT) + 5
    status, lines = await decided(answer, files, capsys, [*answer.token_ids[:-1], last + 1])
    assert status == 0
    assert lines[0] == "decisions: 6 of 6 tokens are allowed by the processors, 5 are chosen again"
    assert lines[1].startswith(f"position {position}: {last + 1} ")
    assert f"was taken, here {last} " in lines[1]
    status, lines = await decided(answer, files, capsys, [*answer.token_ids[:-1], 7])
    assert status == 1
    assert lines[0] == "decisions: 5 of 6 tokens are allowed by the processors, 5 are chosen again"
    assert lines[1].startswith(f"position {position}: 7 ")
    assert lines[1].endswith("was taken, RULED OUT by banned_tokens")


async def test_a_token_behind_which_nothing_can_be_decided(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """A grammar ends there; the token is what is wrong."""
    answer = await plain.ask(PROMPT, GRAMMAR, sampling_options=DRAWN, stop_conditions={"max_tokens": 6})
    tokens = [*answer.token_ids[:2], 65, *answer.token_ids[3:]]
    status, lines = await decided(answer, files, capsys, tokens)
    assert status == 1
    assert lines[1].startswith(f"position {len(PROMPT) + 2}: 65 ']' was taken, RULED OUT by regex")


async def test_decisions_that_a_processor_cannot_make(
    model: Path, files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is no answer to whether the tokens were allowed."""
    third = ["--logits-processor", "acme/fails=failing_processor:FailsAt"]
    async with serving(model, *third) as client:
        answer = await client.ask(PROMPT, processor("acme/fails"), stop_conditions={"max_tokens": 6})
    files.extra = third
    assert (await decided(answer, files, capsys))[0] == 0
    monkeypatch.setattr(FailsAt, "length", len(PROMPT) + 3)
    path = files.receipt.with_name("answer.json")
    assert await files.replay(answer.receipt, PROMPT, "--answer-file", str(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("worker replay: error: --answer-file: the decision after 3 tokens cannot be made: ")
    assert "acme/fails" in line


async def test_the_tokens_of_an_answer_come_from_its_response(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """An end token that the response does not show is found by the digest."""
    whole = await plain.ask(PROMPT, stop_conditions={"max_tokens": 12})
    end = whole.token_ids[7]
    answer = await plain.ask(PROMPT, stop_conditions={"max_tokens": 12, "stop_token_ids_hidden": [end]})
    content = [{"token": f"token_id:{token_id}"} for token_id in answer.token_ids]
    response: dict[str, Any] = {
        "choices": [{"logprobs": {"content": content}}],
        "nvext": {"engine_data": {"logits_processors": answer.receipt}},
    }
    assert await files.replay(response, PROMPT, "--answer-file", str(files.receipt)) == 0, capsys.readouterr()
    number = len(content) + 1
    assert f"{number} tokens are allowed by the processors, {number} are chosen again" in capsys.readouterr().out
    other = [{"logprobs": {"content": content[::-1]}}, {"logprobs": None}, {"message": {}}]
    several = {**response, "choices": [*other, *response["choices"]]}
    assert await files.replay(several, PROMPT, "--answer-file", str(files.receipt)) == 0, capsys.readouterr()
    capsys.readouterr()
    for data, message in (
        ([1, 2], "answer_digest: the receipt is of another answer"),
        ({"choices": []}, "expected a JSON list of token ids, or a response with logprobs"),
        (
            {"choices": [{"logprobs": {"content": [{"token": "Hello"}]}}]},
            "expected a JSON list of token ids, or a response with logprobs",
        ),
        ([1.5], "expected a JSON list of token ids"),
        (
            {"choices": [{"logprobs": {"content": [{"token": f"token_id:{10**22}"}]}}]},
            "expected a JSON list of token ids",
        ),
    ):
        path = files.receipt.with_name("other.json")
        path.write_text(json.dumps(data))
        assert await files.replay(response, PROMPT, "--answer-file", str(path)) == 2
        assert message in capsys.readouterr().err


async def test_decisions_of_a_long_answer_are_made_again(
    plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has more tokens than a list in a client's request."""
    answer = await plain.ask(PROMPT, stop_conditions={"max_tokens": 1, "ignore_eos": True})
    number = MAX_LIST + 1
    answer.receipt["generated_tokens"] = number
    _, lines = await decided(answer, files, capsys, [answer.token_ids[0]] * number)
    made = CONTEXT_LENGTH - len(PROMPT)  # the model can go no further
    assert lines[0].startswith(f"decisions: {made} of {number} tokens are allowed by the processors, ")


async def test_an_answer_that_differs_from_the_record_is_reported(
    receipt: dict[str, Any], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await files.replay({**receipt, "answer_digest": "0" * 32}, PROMPT) == 1
    assert "answer: DIFFERENT: 6 tokens of another digest" in capsys.readouterr().out
    attributed = [{"position": len(PROMPT), "token_id": 1023, "processor": "regex", "did": "masked"}]
    assert await files.replay({**receipt, "answer_digest": "0" * 32, "tokens": attributed}, PROMPT) == 1
    assert f"the first known one at position {len(PROMPT)}" in capsys.readouterr().out


@pytest.mark.parametrize("nvext", [{}, {"nvext": None}, {"nvext": {"engine_data": None}}, {"nvext": {"timing": {}}}])
async def test_an_answer_without_a_receipt(
    nvext: dict[str, Any], files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"id": "chatcmpl-1", "model": "m", "object": "chat.completion", "choices": [], "usage": None, **nvext}
    assert await files.replay(answer, PROMPT) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"worker replay: error: {files.receipt}: holds no receipt: a request gets one with its answer"
    )


async def test_models_by_name(
    receipt: dict[str, Any], files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model is the one that answered; the default one is in the cache."""
    cache = files.receipt.parent / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    files.model = Path("tiny")
    assert await files.replay(receipt, PROMPT) == 0, capsys.readouterr()
    other = model_cache() / f"{_GGUF_SHA256[:16]}-{FORMAT}-quantised" / DEFAULT_MODEL
    other.parent.mkdir(parents=True)
    write_tiny_model(other)
    files.model = Path("default")
    assert await files.replay(receipt, PROMPT) == 0, capsys.readouterr()


async def test_a_receipt_ends_with_the_token_of_a_stop_string(plain: Client) -> None:
    """A step gives more of a forced text than the answer has."""
    stops = {"max_tokens": 40, "stop": ["the"]}
    text = "Yes, the fox. And the lazy dog"
    answer = await plain.ask(PROMPT, processor("forced_sequence", text=text), receipt="debug", stop_conditions=stops)
    number = len(answer.token_ids)
    record = answer.receipt["processors"][0]
    assert answer.finish_reason == "stop"
    assert (record["tokens_forced"], record["last_position"]) == (number, len(PROMPT) + number - 1)
    assert [one["token_id"] for one in answer.receipt["tokens"]] == answer.token_ids


@pytest.mark.parametrize("stop", ["e", "fox", "And the la"])
async def test_a_forced_text_is_replayed_up_to_its_stop_string(
    stop: str, plain: Client, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, too, a step gives more than the answer has."""
    forced = processor("forced_sequence", text="Yes, the fox. And the lazy dog")
    answer = await plain.ask(PROMPT, forced, stop_conditions={"max_tokens": 40, "stop": [stop]})
    assert answer.finish_reason == "stop"
    assert await files.replay(answer.receipt, PROMPT) == 0, capsys.readouterr().out
    end = len(PROMPT) + answer.receipt["generated_tokens"] - 1
    assert await files.replay(answer.receipt, PROMPT, "--position", str(end)) == 0
    assert f"took {answer.token_ids[-1]} " in capsys.readouterr().out
    argv = ["inspect", str(files.model), "--receipt", str(files.receipt), "--prompt-file", str(files.prompt)]
    assert await asyncio.to_thread(main, [*argv, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert f"position {end}:" in shown
    assert f"position {end + 1}:" not in shown


@pytest.fixture
def unread() -> Iterator[TextIO]:
    """A pipe whose reader has read enough."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        yield pipe


@pytest.mark.parametrize("command", ["replay", "inspect"])
async def test_the_status_is_the_answers_where_nobody_reads(
    command: str,
    receipt: dict[str, Any],
    files: Files,
    unread: TextIO,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await files.replay(receipt, PROMPT) == 0
    named = {
        "replay": [str(files.receipt), "--model-path", str(files.model)],
        "inspect": [str(files.model), "--receipt", str(files.receipt)],
    }
    argv = [command, *named[command], "--prompt-file", str(files.prompt), "--device", "cpu"]
    capsys.readouterr()
    for stdout in (unread, None):  # closed by its reader, or by who started the command
        monkeypatch.setattr(sys, "stdout", stdout)
        assert await asyncio.to_thread(main, argv) == 0
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert await asyncio.to_thread(main, argv) == 2
    assert f"worker {command}: error: standard output: No space left on device" in capsys.readouterr().err


async def test_deltas_of_vllm_are_replayed_up_to_the_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        async def generate(self, request: EngineRequest) -> AsyncIterator[TokenDelta]:
            yield TokenDelta([5, 6])
            yield TokenDelta([7, 8, 9])

    async def prepared(*_: Any) -> EngineRequest:
        return EngineRequest("replay", PROMPT, SamplingParams(seed=1), seed=1)

    monkeypatch.setattr(on_vllm, "prepared", prepared)
    engine: Any = on_vllm.StartedEngine(Engine(), *[None] * 3)  # type: ignore[arg-type]
    for number in range(1, 6):
        replayed = await engine.replay(PROMPT, SamplingParams(seed=1), Selection(), 0, number)
        assert replayed.token_ids == [5, 6, 7, 8, 9][:number]


async def test_an_adapter_of_updated_weights_is_compared() -> None:
    """Only the checkpoint has another digest than the one that the worker began with."""
    weights = [RecordedWeights(version="1", from_token=0, digest="aa")]
    model = RecordedModel(name="m", digest="of the start", adapter=RecordedAdapter(name="mine", digest="one"))
    receipt = RecordedReceipt.model_construct(model=model, weights=weights)
    server = ServerRecord("embedded", "1", "cpu", {}, "m", "of the update", {"mine": "one"}, "")
    check_model_digest(server, receipt)
    with pytest.raises(ConfigurationError, match=r"^model\.adapter\.digest: the receipt is of an adapter with one, "):
        check_model_digest(replace(server, adapters={"mine": "another"}), receipt)
