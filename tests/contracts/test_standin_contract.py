"""The stand-in for TensorRT-LLM against the facts in `trtllm.json`, field by field."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from worker.engines.trtllm.lora import MODULES

Ask = Callable[[str], Any]

FIELDS = """
import dataclasses
def shown(field):
    if field.default_factory is not dataclasses.MISSING:
        default = f"{field.default_factory()} (factory)"
    else:
        default = None if field.default is dataclasses.MISSING else repr(field.default)
    return [field.name, str(field.type), default] + ([] if field.init else ["init=False"])
def table(cls):
    return [shown(field) for field in dataclasses.fields(cls)]
"""


def same(found: list[Any], expected: list[Any]) -> None:
    """Field by field; types are compared without the modules that they are spelled with."""
    assert [row[0] for row in found] == [row[0] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[3:] == theirs[3:], ours
        assert plain(ours[2]) == plain(theirs[2]), ours
        assert plain(ours[1]) == plain(theirs[1]), ours


def plain(text: str | None) -> str | None:
    if text is None:
        return None
    enum = re.fullmatch(r"<(\w+\.\w+): .*>", text)
    text = enum[1] if enum else text
    return re.sub(r"\btyping\.|\btllm?e?\.|\btorch\.", "", text).replace('"', "'")


def without(rows: list[Any], names: list[str], version: str) -> list[Any]:
    return [row for row in rows if version != "1.2" or row[0] not in names]


def test_sampling_params(contract: Any, version: str, ask: Ask) -> None:
    facts = contract["sampling_params"]
    found = ask(f"{FIELDS}\nfrom tensorrt_llm import SamplingParams\nanswer = table(SamplingParams)")
    same(found, without(facts["fields"], facts["not_in_1.2"], version))
    shape = ask(
        "from tensorrt_llm import SamplingParams\nmade = SamplingParams()\nanswer = []\n"
        "for attempt in (lambda: SamplingParams(3), lambda: SamplingParams(topk=1), lambda: setattr(made, 'x', 1)):\n"
        "    try:\n        attempt(); answer.append('taken')\n"
        "    except (TypeError, AttributeError) as error:\n        answer.append(type(error).__name__)\n"
    )
    assert shape == ["TypeError", "TypeError", "AttributeError"]


REFUSED: dict[str, list[dict[str, Any]]] = {
    "top_p": [{"top_p": -0.1}, {"top_p": 1.1}],
    "top_k": [{"top_k": -1}],
    "temperature": [{"temperature": -1.0}],
    "min_p": [{"min_p": -0.1}, {"min_p": 1.1}],
    "top_p_decay": [{"top_p_decay": 0.0}, {"top_p_decay": 1.5}],
    "top_p_min": [{"top_p_min": 0.0}],
    "top_p_reset_ids": [{"top_p_reset_ids": -1}],
    "best_of": [{"n": 2, "best_of": 1, "temperature": 1.0}, {"n": 2}, {"best_of": 3, "top_k": 1}],
    "logprobs_mode": [{"logprobs_mode": "both"}],
    "truncate_prompt_tokens": [{"truncate_prompt_tokens": 0}],
    "thinking_token_budget": [{"thinking_token_budget": True}, {"thinking_token_budget": -2}],
    "logprobs|prompt_logprobs": [{"logprobs": -1}, {"logprobs": 101}, {"prompt_logprobs": 101}],
    "logprobs_simple_format": [{"logprobs_simple_format": True, "logprobs": 2}],
    "prompt_logprobs_simple_format": [{"prompt_logprobs_simple_format": True, "prompt_logprobs": 1}],
}
TAKEN = [
    {"max_tokens": 0},
    {"n": 0, "best_of": 1},
    {"seed": -1},
    {"seed": 2**64},
    {"min_tokens": -1},
    {"repetition_penalty": -1.0},
    {"stop": ""},
    {"logits_processor": 3},
    {"top_k": 0},
]


def test_what_sampling_params_refuse(contract: Any, version: str, ask: Ask) -> None:
    raises = {name for name, _, error in contract["sampling_params"]["raises"][version]} - {"guided_decoding"}
    assert raises <= set(REFUSED)
    cases = [(name, case) for name, rows in REFUSED.items() for case in rows]
    known = {row[0] for row in contract["sampling_params"]["fields"]}
    if version == "1.2":
        known -= set(contract["sampling_params"]["not_in_1.2"])
    cases = [(name, case) for name, case in cases if set(case) <= known]
    answers = ask(
        "from tensorrt_llm import SamplingParams\nanswer = []\n"
        f"for case in {[case for _, case in cases] + TAKEN!r}:\n"
        "    try:\n        SamplingParams(**case); answer.append(None)\n"
        "    except Exception as error:\n        answer.append(type(error).__name__)\n"
    )
    for (name, case), got in zip(cases, answers, strict=False):
        assert got == ("ValueError" if name in raises else None), (name, case)
    assert answers[len(cases) :] == [None] * len(TAKEN)


def test_normalisation(contract: Any, version: str, ask: Ask) -> None:
    answer = ask(
        "from tensorrt_llm import SamplingParams as S\n"
        "import torch\nbias = torch.ones(2)\nkept = S(embedding_bias=bias).embedding_bias\n"
        "answer = [S(end_id=4).pad_id, S(n=2, temperature=1.0).best_of, S(logprobs=True).logprobs,"
        " S(logprobs=False).logprobs, S(embedding_bias=[1, 2]).embedding_bias.dtype == torch.float32, kept is bias]"
    )
    assert answer == [4, 2, *([1, False] if version == "1.2" else [0, None]), True, False]


def test_guided_decoding_params(contract: Any, ask: Ask) -> None:
    found = ask(
        f"{FIELDS}\nfrom tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams\n"
        "two = GuidedDecodingParams(json='{}', regex='a')\n"
        "try:\n    SamplingParams(guided_decoding=two); error = None\n"
        "except ValueError:\n    error = 'ValueError'\n"
        "answer = [table(GuidedDecodingParams), error]"
    )
    same(found[0], contract["guided_decoding_params"])
    assert found[1] == "ValueError"


def test_logits_processor(contract: Any, ask: Ask) -> None:
    found = ask(
        "import inspect\nfrom tensorrt_llm.sampling_params import LogitsProcessor, LogprobMode\n"
        "answer = [list(inspect.signature(LogitsProcessor.__call__).parameters)[1:],"
        " {each.name: each.value for each in LogprobMode}, inspect.isabstract(LogitsProcessor)]"
    )
    assert found == [contract["logits_processor_call"], contract["logprob_mode"], True]


def test_disaggregated_params(contract: Any, version: str, ask: Ask) -> None:
    facts = contract["disaggregated_params"]
    found = ask(
        f"{FIELDS}\nfrom tensorrt_llm.disaggregated_params import DisaggregatedParams, DisaggScheduleStyle\n"
        "try:\n    DisaggregatedParams(request_type='both'); error = None\n"
        "except ValueError:\n    error = 'ValueError'\n"
        "answer = [table(DisaggregatedParams), error, {each.name: each.value for each in DisaggScheduleStyle},"
        f" [DisaggregatedParams(request_type=each.upper()).request_type for each in {facts['request_types']!r}]]"
    )
    same(found[0], without(facts["fields"], facts["not_in_1.2"], version))
    assert found[1:] == ["ValueError", facts["schedule_style"], facts["request_types"]]


LIFECYCLE = """
import dataclasses, importlib
from tensorrt_llm import standin_switches, disaggregated_params
plain = standin_switches.SWITCHES
standin_switches.SWITCHES = dataclasses.replace(plain, lifecycle=True)
try:
    made = importlib.reload(disaggregated_params).DisaggregatedParams
finally:
    standin_switches.SWITCHES = plain
    importlib.reload(disaggregated_params)
"""


def test_disaggregated_params_with_the_ids_of_a_hand_off(contract: Any, version: str, ask: Ask) -> None:
    facts = contract["disaggregated_params"]
    ids, last = facts["lifecycle"]["fields"], facts["lifecycle"]["last"]
    found = ask(
        f"{FIELDS}{LIFECYCLE}answer = [table(made), []]\n"
        f"whole = dict.fromkeys({[row[0] for row in ids[:6]]!r}, 'x')\n"
        "for attempt in (lambda: made(artifact_version=1), lambda: setattr(locked, 'artifact_version', 2)):\n"
        "    locked = made(**whole); locked._lifecycle_identity_locked = True\n"
        "    try:\n        attempt(); answer[1].append(None)\n"
        "    except (ValueError, AttributeError) as error:\n        answer[1].append(type(error).__name__)\n"
    )
    rows = without(facts["fields"], facts["not_in_1.2"], version)
    at = [row[0] for row in rows].index(facts["lifecycle"]["before"])
    same(found[0], [*rows[:at], *ids, *rows[at:], last])
    assert found[1] == ["ValueError", "AttributeError"]


def test_llm(contract: Any, version: str, ask: Ask) -> None:
    found = ask(
        "import inspect\nfrom tensorrt_llm import LLM\n"
        "answer = [[[p.name, None if p.default is p.empty else repr(p.default)]"
        " for p in list(inspect.signature(LLM.generate_async).parameters.values())[1:]],"
        f" [name for name in {contract['llm']['1.3']!r} if hasattr(LLM, name)]]"
    )
    if version == "1.2":
        expected = [
            [text.partition("=")[0], text.partition("=")[2] or None] for text in contract["generate_async"]["1.2"]
        ]
        methods = [name for name in contract["llm"]["1.3"] if name not in contract["llm"]["not_in_1.2"]]
    else:
        expected = [[name, default] for name, _, default in contract["generate_async"]["1.3"]]
        expected[-1][1] = "0.5"
        methods = contract["llm"]["1.3"]
    assert found == [expected, methods]


def test_results(contract: Any, ask: Ask) -> None:
    found = ask(
        f"{FIELDS}\nfrom tensorrt_llm.executor.result import CompletionOutput, Logprob, RequestOutput\n"
        "made = RequestOutput(1, [1], 1, print)\n"
        "answer = [[row for row in table(CompletionOutput) if not row[0].startswith('_')], table(Logprob),"
        f" [name for name in {contract['request_output']['attributes']!r} if not hasattr(made, name)],"
        f" [name for name in {contract['request_output']['methods']!r} if not callable(getattr(made, name))],"
        f" [name for name in {contract['completion_output_properties']!r} if not hasattr(made.outputs[0], name)]]"
    )
    assert [[name, default] for name, _, default in found[0]] == [
        [name, default] for name, _, default in contract["completion_output"]
    ]
    same(found[1], contract["logprob"])
    assert found[2:] == [[], [], []]


def test_llm_args(contract: Any, version: str, ask: Ask) -> None:
    found = ask(
        "from pydantic import ValidationError\nfrom tensorrt_llm.llmapi import llm_args as a\n"
        "def defaults(cls):\n"
        "    return {n: f.default if not f.is_required() else None for n, f in cls.model_fields.items()}\n"
        "plain = {n: d for n, d in defaults(a.TorchLlmArgs).items() if not hasattr(d, 'model_fields')}\n"
        "try:\n    a.TorchLlmArgs(model='m', no_such_key=1); error = None\n"
        "except ValidationError:\n    error = 'refused'\n"
        "kv = type(a.TorchLlmArgs(model='m').kv_cache_config)\n"
        "answer = [plain, defaults(kv), defaults(a.CacheTransceiverConfig), error]"
    )
    expected = {**contract["llm_args"], **(contract["llm_args_only_in_1.2"] if version == "1.2" else {})}
    moe = {"moe_expert_parallel_size", "moe_tensor_parallel_size", "moe_cluster_parallel_size"}
    lacking = contract["llm_args_not_in_1.2"] + contract["kv_cache_config_not_in_1.2"] if version == "1.2" else []
    assert {name: value for name, value in found[0].items() if name not in moe} == {
        name: value for name, value in expected.items() if name not in lacking
    }
    assert found[1] == {name: value for name, value in contract["kv_cache_config"].items() if name not in lacking}
    assert found[2] == contract["cache_transceiver_config"]
    assert found[3] == "refused"


@pytest.mark.parametrize(
    ("module", "cls", "section"),
    [
        ("lora_helper", "LoraConfig", "lora_config"),
        ("executor.request", "LoRARequest", "lora_request"),
        ("scheduling_params", "SchedulingParams", "scheduling_params"),
        ("conversation_params", "ConversationParams", "conversation_params"),
    ],
)
def test_records_of_a_submission(contract: Any, ask: Ask, module: str, cls: str, section: str) -> None:
    facts = contract[section]
    found = ask(f"{FIELDS}\nfrom tensorrt_llm.{module} import {cls}\nanswer = table({cls})")
    same(found, facts["fields"] if isinstance(facts, dict) else facts)


def test_names_of_adapted_layers(contract: Any, ask: Ask) -> None:
    found = ask(
        "from tensorrt_llm.lora_helper import get_default_trtllm_modules_to_hf_modules as names\nanswer = names()"
    )
    assert found == contract["lora_config"]["modules"]
    ours = {theirs: name for name, theirs in MODULES.items()}
    assert ours == {name: layer for name, layer in found.items() if not name.startswith("moe_")}


# What the library does, beyond its names: one row per fact in the contract's ``behaviour``.

FED = """
import asyncio
from tensorrt_llm import DisaggregatedParams
from tensorrt_llm.executor.result import RequestOutput

def response(index=0, tokens=(), reason=None, *, last=False, cut=0, logprobs=None):
    return {"index": index, "token_ids": list(tokens), "finish_reason": reason, "stop_reason": None, "cut": cut,
            "logprobs": logprobs, "disaggregated_params": None, "last": last}

async def _fed(n, kind, responses):
    given = None if kind is None else DisaggregatedParams(request_type=kind)
    output = RequestOutput(1, [1], n, print, given)
    for each in responses:
        output._queue.put_nowait(each)
    seen = []
    try:
        async for _ in output:
            seen.append([[list(each.token_ids), each.finish_reason] for each in output.outputs])
    except Exception as error:
        seen.append(f"{type(error).__name__}: {error}")
    return seen

def fed(n, *responses, kind=None):
    return asyncio.run(_fed(n, kind, responses))
"""


def test_every_fact_has_a_test(contract: Any) -> None:
    tests = Path(__file__).resolve().parents[1]
    text = "".join(path.read_text() for folder in ("contracts", "tensorrt") for path in (tests / folder).glob("*.py"))
    for fact, read_in, test in contract["behaviour"]:
        assert f"def {test}(" in text, fact
        assert re.search(r"@[0-9a-f]{8}|pull requests? \d{5}|ai-dynamo \d|Dynamo \d", read_in), fact


def test_when_a_sequence_is_told_why_it_ended(ask: Ask) -> None:
    last = "response(1, [7], 'stop', last=True, cut=1)"
    seen = ask(f"{FED}\nanswer = fed(2, response(0, [5], 'length'), response(1, [6]), {last})")
    assert seen == [
        [[[5], None], [[], None]],
        [[[5], None], [[6], None]],
        [[[5], None], [[6], "stop"]],
    ]
    cancelled = ask(f"{FED}\nanswer = fed(2, response(0, [5], 'cancelled'), response(1, [], 'cancelled', last=True))")
    assert [[reason for _, reason in step] for step in cancelled] == [["cancelled", None], ["cancelled"] * 2]


@pytest.mark.parametrize(
    ("response", "kind", "problem"),
    [
        ("response(0, [5, 6], logprobs=[[(5, -1.0, 1)]])", None, "AssertionError"),
        ("response(0, [5], 'timed out', last=True)", None, "ValueError: Unknown finish reason: timed out"),
        ("response(0, [5], 'not_finished', last=True)", None, "ValueError: Unknown finish reason: not_finished"),
        ("response(0, [5], 'not_finished', last=True)", "context_only", None),
        ("response(0, [5], 'cancelled', last=True, logprobs=[])", None, None),
    ],
)
def test_what_the_clients_side_raises(response: str, kind: str | None, problem: str | None, ask: Ask) -> None:
    (seen,) = ask(f"{FED}\nanswer = fed(1, {response}, kind={kind!r})")
    assert isinstance(seen, list) if problem is None else seen.startswith(problem)


def test_how_many_log_probabilities_may_be_asked_for(version: str, ask: Ask) -> None:
    for limit in (20, 100):
        found = ask(
            "import dataclasses\nfrom tensorrt_llm import SamplingParams, sampling_params\n"
            f"sampling_params.SWITCHES = dataclasses.replace(sampling_params.SWITCHES, max_logprobs={limit})\n"
            "answer = []\n"
            f"for count in ({limit}, {limit + 1}):\n"
            "    try:\n        SamplingParams(logprobs=count); answer.append(None)\n"
            "    except ValueError as error:\n        answer.append(str(error))\n"
        )
        assert found[0] is None
        assert (found[1] is None) if version == "1.2" else "logprobs" in found[1]
