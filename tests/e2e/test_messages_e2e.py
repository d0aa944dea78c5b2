"""Anthropic's Messages API through the real front door, frontend and worker: thoughts, calls, stop
sequences, and prompts; answers are forced where what they say matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e_stack import running_stack
from front_door_process import Door
from tokenizers import Tokenizer

from worker.frontdoor.field_checks import is_before_1_6

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ':' + message.content }}"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}"
    "{% for call in message.tool_calls or () %}({{ call.function.name }}{{ call.id }}){% endfor %}"
    "{% if not loop.last or add_generation_prompt %}<|im_end|>{% endif %}{% endfor %}"
    "{% if enable_thinking is defined %}{{ 'thinks' if enable_thinking else 'does not think' }}{% endif %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "get", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}
CALL = '<tool_call>\n{"name": "get", "arguments": {"a":"%s"}}\n</tool_call>'
THINKS = "<think>I see</think>Yes END more"


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Door]:
    directory = tmp_path_factory.mktemp("messages")
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    parsers = ("--dyn-reasoning-parser", "qwen3", "--dyn-tool-call-parser", "hermes")
    with running_stack(directory, tiny_model) as stack:
        stack.start_frontend()
        stack.start_worker(
            *("--device", "cpu", "--dtype", "float32", "--custom-jinja-template", str(template)), *parsers
        )
        yield Door(stack, "--", *parsers)


def ask(door: Door, text: str | None = None, **fields: Any) -> Any:
    """The message, whose text is forced to be ``text``; that of the stream is the same."""
    forced = [] if text is None else [{"name": "forced_sequence", "args": {"text": text}}]
    asked = {"messages": HELLO, "max_tokens": 120, "logits_processors": forced, **fields}
    status, whole = door.post("messages", **asked)
    assert status == 200, whole
    status, streamed = door.post("messages", **asked, stream=True)
    assert status == 200, streamed
    message = json.loads(whole)
    assert comparable(of_stream(streamed)) == comparable(message)
    return message


def of_stream(text: str) -> Any:
    """The message that a client puts together of the events."""
    message: Any = {}
    for event in (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")):
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            name = delta["type"].removesuffix("_delta")
            value = delta.get("partial_json", delta.get(name))
            block["json" if name == "input_json" else name] += value
        elif event["type"] == "content_block_stop":
            text = message["content"][event["index"]].pop("json")
            if text:
                message["content"][event["index"]]["input"] = json.loads(text)
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def comparable(message: Any) -> Any:
    """A message without ids, which differ, and without what the prefix cache had."""
    blocks = [{**each, "id": None} for each in message["content"]]
    return [message[name] for name in ("stop_reason", "stop_sequence", "model")], blocks, total(message["usage"])


def total(usage: Any) -> tuple[int, int]:
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]


def counted(door: Door, **fields: Any) -> int:
    status, text = door.post("messages/count_tokens", **{"messages": HELLO, **fields})
    assert status == 200, text
    return int(json.loads(text)["input_tokens"])


def blocks(message: Any) -> list[Any]:
    """Each block's type and value."""
    return [
        (each["type"], each.get("text") or each.get("input") or each.get("thinking")) for each in message["content"]
    ]


def test_thoughts_are_blocks(door: Door) -> None:
    message = ask(door, "<think>I see</think>Yes")
    assert blocks(message) == [("thinking", "I see"), ("text", "Yes")]
    assert message["content"][0]["signature"]
    assert message["stop_reason"] == "end_turn"


def test_usage_has_the_tokens_of_thoughts(door: Door, tiny_model: Path) -> None:
    """However many tokens come at once: four answers share the steps."""
    text = "<think>" + "I see, I see. " * 9 + "</think>" + "Yes. " * 9
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    count = len(tokenizer.encode("I see, I see. " * 9).ids)
    asked = {"max_tokens": 200, "logits_processors": [{"name": "forced_sequence", "args": {"text": text}}]}

    def usage(path: str, **fields: Any) -> Any:
        status, whole = door.post(path, **asked, **fields)
        assert status == 200, whole
        return json.loads(whole)["usage"]

    with ThreadPoolExecutor() as threads:
        message = threads.submit(usage, "messages", messages=HELLO)
        chat = threads.submit(usage, "chat/completions", messages=HELLO)
        choices = threads.submit(usage, "chat/completions", messages=HELLO, n=2)
    assert message.result()["output_tokens_details"] == {"thinking_tokens": count}
    assert chat.result()["completion_tokens_details"]["reasoning_tokens"] == count
    assert choices.result()["completion_tokens_details"]["reasoning_tokens"] == 2 * count
    asked["max_output_tokens"] = asked.pop("max_tokens")
    assert usage("responses", input="Hello")["output_tokens_details"]["reasoning_tokens"] == count


@pytest.mark.parametrize(
    ("stops", "expected", "found"),
    [
        (["END"], [("thinking", "I see"), ("text", "Yes ")], "END"),
        (["D mo", " END m"], [("thinking", "I see"), ("text", "Yes")], " END m"),
        (["see"], [("thinking", "I ")], "see"),
        (["nowhere"], [("thinking", "I see"), ("text", "Yes END more")], None),
    ],
)
def test_the_stop_sequence_is_named(door: Door, stops: list[str], expected: Any, found: str | None) -> None:
    message = ask(door, THINKS, stop_sequences=stops)
    assert (blocks(message), message["stop_sequence"]) == (expected, found)
    assert message["stop_reason"] == ("end_turn" if found is None else "stop_sequence")


def test_a_budget_closes_the_thoughts(door: Door) -> None:
    opened = {"processors": [{"name": "forced_prefix", "args": {"text": "<think>"}}], "receipt": True}
    thinking = {"type": "enabled", "budget_tokens": 5}
    message = ask(door, thinking=thinking, logits_processors=opened, max_tokens=20)
    assert [each["type"] for each in message["content"]] == ["thinking", "text"]
    done = message["nvext"]["engine_data"]["logits_processors"]["processors"]
    assert [each["name"] for each in done] == ["forced_prefix", "thinking_budget"]
    omitted = ask(door, thinking={**thinking, "display": "omitted"}, logits_processors=opened, max_tokens=20)
    assert omitted["content"][0]["thinking"] == ""
    thought, answer = message["content"]
    assert omitted["content"][1] == answer
    texts = []
    for block in (thought, omitted["content"][0]):
        back = [*HELLO, {"role": "assistant", "content": [block, answer]}, *HELLO]
        texts.append(counted(door, messages=back))
    assert texts[0] == texts[1] > counted(door, messages=[*HELLO, {"role": "assistant", "content": [answer]}, *HELLO])


def test_disabled_thinking_has_no_thoughts(door: Door) -> None:
    opened = [{"name": "forced_prefix", "args": {"text": "<think>"}}]
    message = ask(door, thinking={"type": "disabled"}, logits_processors=opened, max_tokens=8)
    assert [each["type"] for each in message["content"]] == ["text"]


def test_the_template_is_told_about_thinking_and_effort(door: Door) -> None:
    plain = counted(door)
    on = counted(door, thinking={"type": "adaptive"})
    off = counted(door, thinking={"type": "disabled"})
    assert plain < on < off
    assert counted(door, thinking={"type": "enabled", "budget_tokens": 1024}) == on
    efforts = [counted(door, output_config={"effort": effort}) for effort in ("low", "medium", "high", "xhigh", "max")]
    assert min(efforts) > plain


def test_calls_are_blocks(door: Door) -> None:
    message = ask(door, "hi " + CALL % "x END", tools=[TOOL])
    assert blocks(message) == [("text", "hi "), ("tool_use", {"a": "x END"})]
    assert message["stop_reason"] == "tool_use"
    message = ask(door, CALL % "x" + "\n" + CALL % "y", tools=[TOOL])
    calls = [each for each in message["content"] if each["type"] == "tool_use"]
    assert [each["input"] for each in calls] == [{"a": "x"}, {"a": "y"}]
    assert len({each["id"] for each in calls}) == 2


def test_a_single_call_ends_the_turn(door: Door) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    properties = {"a": {"type": "string", "maxLength": 8}}  # random weights end no text by themselves
    tool = {**TOOL, "input_schema": {"type": "object", "properties": properties, "required": ["a"]}}
    message = ask(door, tools=[tool], tool_choice=choice, max_tokens=200, seed=1, temperature=1.0)
    assert [each["type"] for each in message["content"]] == ["tool_use"]
    assert message["stop_reason"] == "tool_use"


def test_the_prompt_has_calls_and_results(door: Door) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "get", "input": {"a": "b"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    messages = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]}]
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    function = {"id": "t1", "type": "function", "function": {"name": "get", "arguments": '{"a": "b"}'}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "I look.", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]
    count = counted(door, messages=messages, system="Be brief.")
    status, text = door.post("chat/completions", messages=chat, max_tokens=1)
    assert (status, json.loads(text)["usage"]["prompt_tokens"]) == (200, count)
    assert total(ask(door, messages=messages, system="Be brief.", max_tokens=1)["usage"]) == (count, 1)


def test_the_end_of_the_context_is_named(door: Door) -> None:
    free: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
    assert ask(door, max_tokens=5, **free)["stop_reason"] == "max_tokens"
    long = [{"role": "user", "content": "a " * 980}]
    assert ask(door, messages=long, max_tokens=4000, **free)["stop_reason"] == "model_context_window_exceeded"


def test_a_last_message_is_continued_where_it_can_be(door: Door) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    status, text = door.post("messages", messages=messages, max_tokens=4)
    if is_before_1_6():
        assert (status, json.loads(text)["error"]["message"].partition(":")[0]) == (400, "messages[1].role")
        return
    assert status == 200, text
    closed = total(ask(door, messages=[*messages, *HELLO], max_tokens=4)["usage"])[0]
    assert total(json.loads(text)["usage"])[0] < closed


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": 9}, "emperature"),
        ({"model": "nowhere"}, "odel"),
        ({"stop_sequences": ["a"], "ignore_eos": True}, "stop_sequences: "),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: "),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: "),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, " context "),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"logits_processors": [{"name": "choice", "args": {"choices": []}}]}, "logits_processors[0].args.choices: "),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_name_what_the_client_wrote(door: Door, fields: dict[str, Any], said: str, stream: bool) -> None:
    status, text = door.post("messages", **{"messages": HELLO, "max_tokens": 9, "stream": stream, **fields})
    body = json.loads(text)
    assert 400 <= status < 500
    assert body["type"] == "error"
    assert said in body["error"]["message"]
