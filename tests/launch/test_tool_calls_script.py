"""Tool calls through ``launch/agg.sh`` with the stock client: streamed or not, the same."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import pytest
from launched_script import LaunchedScript, launched, tiny_model
from tokenizers import AddedToken, Tokenizer
from written_calls import Call, written

from worker.tiny_model import write_tiny_model

MESSAGES: Any = [{"role": "user", "content": "What is the weather like?"}]
PARIS, OSLO = Call("get_weather", {"city": "Paris", "days": 2}), Call("get_weather", {"city": "Tromsø 😀", "days": 1})
CITIES: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
}
CITIES |= {"required": ["city", "days"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": CITIES}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
NAMED = {"type": "function", "function": {"name": "now"}}


MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools|tojson }}{% endif -%}
{%- for message in messages %}{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id|length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments|tojson }}, "id": "{{ call.id }}"}
{%- if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ message.role }}: {{ message.content }}
{% endif %}{% endfor %}"""
HERMES = """{%- if tools %}<|im_start|>system
{{ tools|tojson }}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or () %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments|tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKS = ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")


def with_template(directory: Path, template: str) -> Path:
    """A model with a chat template that knows tools, and whose marks are special tokens if they are
    Mistral's.
    """
    write_tiny_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = [mark for mark in MARKS if mark in template]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(str(directory / "tokenizer.json"))
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text())
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    config["added_tokens_decoder"] |= {str(tokenizer.token_to_id(mark)): {"content": mark, **plain} for mark in marks}
    file.write_text(json.dumps({**config, "chat_template": template}))
    return directory


PARSERS = ("--dyn-tool-call-parser", "hermes", "--dyn-reasoning-parser", "qwen3")


@pytest.fixture(scope="module", params=["neutral", "hermes", "mistral"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The format that is found for a template without tools, one that a parser of the workers
    names, and one whose marks are special tokens.
    """
    directory = tmp_path_factory.mktemp("tools")
    template = {"hermes": HERMES, "mistral": MISTRAL}.get(request.param)
    path = tiny_model() if template is None else with_template(directory / f"tiny-{request.param}", template)
    arguments = PARSERS if request.param == "hermes" else ()
    with launched(directory, *arguments, variables={"MODEL_PATH": str(path)}) as script:
        script.wait_until_ready()
        yield Served(script, request.param)


class Served:
    """A model that says what a test wants, to the stock client."""

    def __init__(self, script: LaunchedScript, spelling: str) -> None:
        self.script = script
        self.spelling = spelling

    @property
    def thinks(self) -> bool:
        """Whether the frontend takes thinking out of the text."""
        return self.spelling == "hermes"

    def fields(self, text: str | None, **fields: Any) -> dict[str, Any]:
        """Fields of a request whose answer is ``text``, or what the model makes of it."""
        processors = [] if text is None else [{"name": "forced_sequence", "args": {"text": text}}]
        if text is None and self.thinks:
            processors = [{"name": "forced_prefix", "args": {"text": "<think></think>"}}]
        extra = {"logits_processors": {"processors": processors, "receipt": True}}
        common = {"model": self.script.model, "messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 300}
        return {**common, "extra_body": extra, **fields}

    def whole(self, text: str | None, **fields: Any) -> Any:
        """The choice of a whole answer, which is the same as the streamed one."""
        asked = self.fields(text, **fields)
        with self.script.client() as client:
            answer = client.chat.completions.create(**asked)
            chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        (choice,) = answer.choices
        tokens = None if choice.logprobs is None else [(one.token, one.logprob) for one in choice.logprobs.content]
        assert put_together(chunks) == (
            choice.finish_reason,
            choice.message.content,
            getattr(choice.message, "reasoning_content", None),
            [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()],
            tokens,
            answer.usage.completion_tokens,
        )
        return choice


def put_together(chunks: list[Any]) -> tuple[Any, ...]:
    """What the chunks of a stream say."""
    reasons, calls, tokens = [], list[list[str]](), list[Any]()
    text, thinking = "", ""
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        reasons += [choice.finish_reason] * (choice.finish_reason is not None)
        text += choice.delta.content or ""
        thinking += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        tokens += [(one.token, one.logprob) for one in choice.logprobs.content] if choice.logprobs else ()
    assert chunks[-1].choices == []
    (reason,) = reasons
    return reason, text or None, thinking or None, calls, tokens or None, chunks[-1].usage.completion_tokens


def calls_of(choice: Any) -> list[Call]:
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [Call(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("calls", [(PARIS,), (PARIS, OSLO)], ids=["single", "parallel"])
@pytest.mark.parametrize("before", ["", "Let me see. "])
def test_calls_and_text(stack: Served, before: str, calls: tuple[Call, ...]) -> None:
    choice = stack.whole(before + written(stack.spelling, *calls))
    assert calls_of(choice) == list(calls)
    assert all(len(call.id) == (9 if stack.spelling == "mistral" else 29) for call in choice.message.tool_calls)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", before or None)


def test_thinking_before_calls(stack: Served) -> None:
    """A call that is thought of is none where a parser of thoughts takes it out."""
    thought = "I call it."
    choice = stack.whole(f"<think>{thought}</think>" + written(stack.spelling, PARIS))
    assert calls_of(choice) == [PARIS]
    if stack.thinks:
        assert (choice.message.reasoning_content, choice.message.content) == (thought, None)
    else:
        assert choice.message.content == f"<think>{thought}</think>"


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"get_weather", "now"}), (NAMED, {"now"})], ids=["any", "one"]
)
def test_a_call_that_must_come(stack: Served, choice: Any, names: set[str]) -> None:
    """By the model itself, at random."""
    for seed in range(3):
        found = stack.whole(None, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=seed)
        (call,) = calls_of(found)
        assert call.name in names
        assert found.finish_reason == "tool_calls"


def test_a_call_that_is_cut(stack: Served) -> None:
    """It ends where the whole one goes on, and no token is lost."""
    drawn: Any = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1,
        "seed": 3,
        "logprobs": True,
    }
    full = stack.whole(None, **drawn)
    (call,) = full.message.tool_calls
    num_tokens = len(full.logprobs.content)
    for max_tokens in range(5, num_tokens, 4):
        cut = stack.whole(None, max_tokens=max_tokens, **drawn)
        assert (cut.finish_reason, cut.message.content) == ("length", None)
        assert cut.logprobs.content == full.logprobs.content[:max_tokens]
        begun = cut.message.tool_calls or []
        assert [each.function.name for each in begun] == [call.function.name] * len(begun)
        assert all(call.function.arguments.startswith(each.function.arguments) for each in begun)
    assert begun


def test_no_token_s_log_probability_is_lost(stack: Served) -> None:
    text = "See: " + written(stack.spelling, PARIS, OSLO) + "\n"
    choice = stack.whole(text, logprobs=True, top_logprobs=2)
    found = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content).decode()
    if tuple(map(int, version("ai-dynamo").split(".")[:2])) >= (1, 6):  # it says U+FFFD for part of a character
        found, text = (re.sub(r"[^ -~\n]+", "?", one) for one in (found, text))
    assert found == text
    assert all(len(one.top_logprobs) >= 2 for one in choice.logprobs.content)


def test_the_prompt_has_the_tools(stack: Served) -> None:
    """Also where the frontend is told not to parse calls."""
    with stack.script.client() as client:
        lengths = [
            client.chat.completions.create(**stack.fields("Hi.", **fields)).usage.prompt_tokens
            for fields in ({"tools": openai.omit}, {}, {"parallel_tool_calls": False})
        ]
    assert lengths[0] + 50 < min(lengths[1:])


def test_none_may_be_called(stack: Served) -> None:
    choice = stack.whole("No <tool_cal", tool_choice="none")
    assert (calls_of(choice), choice.message.content) == ([], "No <tool_cal")


def test_several_choices(stack: Served) -> None:
    """Each with its calls, ids and receipt."""
    asked = stack.fields(written(stack.spelling, PARIS), n=3)
    with stack.script.client() as client:
        answer = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [calls_of(choice) for choice in answer.choices] == [[PARIS]] * 3
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3
    assert len(answer.nvext["choices"]) == 3
    ends = {chunk.choices[0].index: chunk.choices[0].finish_reason for chunk in chunks}
    assert ends == dict.fromkeys(range(3), "tool_calls")
    assert all(chunk.usage is None for chunk in chunks)


def test_a_result_comes_back(stack: Served) -> None:
    """The next turn, with the call that was answered and its result."""
    called = stack.whole(written(stack.spelling, PARIS)).message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "rain"}
    turn = [*MESSAGES, called.model_dump(exclude_none=True), result]
    choice = stack.whole("It rains.", messages=turn)
    assert (choice.message.content, choice.finish_reason) == ("It rains.", "stop")


def test_json_answers_that_look_like_calls(stack: Served) -> None:
    """Dynamo's parser would take them for calls, whether or not there are tools."""
    schema = {"type": "object", "properties": {"name": {"const": "Ann"}}, "required": ["name"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}
    for tools in ({"tools": openai.omit}, {"tool_choice": "none"}, {}):
        text = None if tools else '{"name":"Ann"}'
        choice = stack.whole(text, response_format=wanted, **tools)
        assert json.loads(choice.message.content) == {"name": "Ann"}


def test_a_refusal_has_a_status_in_a_stream(stack: Served) -> None:
    wrong = {**WEATHER, "function": {**WEATHER["function"], "parameters": {"type": "array"}}}  # type: ignore[dict-item]
    for stream in (False, True):
        with stack.script.client() as client, pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**stack.fields(None, tools=[wrong], stream=stream))
        assert "get_weather" in str(caught.value)


def test_the_client_s_own_reader_of_streams(stack: Served) -> None:
    with stack.script.client() as client:
        with client.chat.completions.stream(**stack.fields("So: " + written(stack.spelling, PARIS, OSLO))) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        (choice,) = stream.get_final_completion().choices
    assert [(each.name, json.loads(each.arguments)) for each in done] == [tuple(PARIS), tuple(OSLO)]
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or ()] == [
        PARIS.arguments,
        OSLO.arguments,
    ]


async def test_many_clients_at_once(stack: Served) -> None:
    """Each gets its own calls; some leave in the middle."""
    calls = [Call("get_weather", {"city": f"City {number}", "days": 1 + number % 2}) for number in range(20)]

    async def ask(number: int) -> None:
        asked = stack.fields(f"{number}: " + written(stack.spelling, calls[number]), stream=True)
        async with openai.AsyncOpenAI(base_url=stack.script.url, api_key=f"k{number}", timeout=60) as client:
            text, arguments = "", ""
            async with await client.chat.completions.create(**asked) as stream:
                async for chunk in stream:
                    delta = chunk.choices[0].delta
                    text += delta.content or ""
                    arguments += "".join(call.function.arguments for call in delta.tool_calls or ())
                    if number % 4 == 3 and arguments:
                        return
        assert (text, json.loads(arguments)) == (f"{number}: ", calls[number].arguments)

    await asyncio.gather(*map(ask, range(20)))
    assert calls_of(stack.whole(written(stack.spelling, PARIS))) == [PARIS]
