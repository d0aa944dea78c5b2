"""Capabilities of ``GetModelInfo`` against what a worker does: all that is listed is answered, and
all that is not is refused by its name.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from colour_model import PLACEHOLDER, data_url, write_colour_model
from openengine_workers import OpenEngineClient, connected, serving
from running_workers import taking_requests

from worker.arguments import parse_arguments
from worker.build import Built, make_engine
from worker.runtimes.openengine import wire
from worker.runtimes.openengine.runtime import OpenEngineWorker
from worker.sampling import MAX_LOGPROBS

pytestmark = pytest.mark.asyncio(loop_scope="module")

DRAFTS = ("--override-engine-args", '{"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}}')
BACKEND = "--guided-decoding-backend"
POLICY = "models:\n  tiny: {forbidden: [regex, structural_tag, min_p, phrase_ban]}\n"
MODES = wire.GuidedDecodingMode
EMBEDDED = "embedded"


@dataclass(frozen=True)
class Variant:
    """A worker: the embedded engine, or the stand-in for TensorRT-LLM in some version."""

    engine: str
    options: tuple[str, ...] = ()
    switches: dict[str, Any] = field(default_factory=dict)
    sees: bool = False


VARIANTS = {
    "embedded": Variant(EMBEDDED),
    "embedded with a policy": Variant(EMBEDDED, ("--processor-policy", "POLICY")),
    "TensorRT-LLM": Variant("trtllm"),
    "TensorRT-LLM 1.2": Variant("trtllm", switches={"version": "1.2.0"}),
    "few log probabilities": Variant("trtllm", switches={"max_logprobs": 20}),
    "pictures": Variant("trtllm", ("--modality", "multimodal"), sees=True),
    "drafts": Variant("trtllm", DRAFTS),
    "drafts and XGrammar": Variant("trtllm", (*DRAFTS, BACKEND, "xgrammar")),
    "drafts and llguidance": Variant("trtllm", (*DRAFTS, BACKEND, "llguidance")),
}
Served = tuple[OpenEngineClient, wire.ModelInfo]


@contextlib.contextmanager
def stand_in(**switches: Any) -> Any:
    """Makes ``tensorrt_llm`` importable, and forgets it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRTLLM_STANDIN", json.dumps(switches))
        patch.setenv("TRTLLM_STANDIN_FORKS", "yes")
        patch.syspath_prepend(str(Path(__file__).parents[1] / "trtllm_standin"))
        yield
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


@contextlib.asynccontextmanager
async def served_as(variant: Variant, directory: Path, tiny_model: Path) -> AsyncIterator[OpenEngineClient]:
    if variant.engine == EMBEDDED:
        (directory / "policy.yaml").write_text(POLICY)
        options = [str(directory / "policy.yaml") if each == "POLICY" else each for each in variant.options]
        async with serving(tiny_model, *options) as client:
            yield client
        return
    model = write_colour_model(directory / "model") if variant.sees else tiny_model
    given = ["--engine", "trtllm", "--runtime", "openengine", "--grpc-port", "0", "--served-model-name", "tiny"]
    arguments = parse_arguments([*given, "--model-path", str(model), "--max-num-seqs", "8", *variant.options], {})
    with stand_in(**variant.switches):
        worker = OpenEngineWorker(Built(make_engine(arguments), arguments, None, smoke=False))
        async with taking_requests(worker), connected(worker.port) as client:
            yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=VARIANTS)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> AsyncIterator[Served]:
    async with served_as(VARIANTS[request.param], tmp_path_factory.mktemp("worker"), tiny_model) as client:
        yield client, await client.call("Control.GetModelInfo", wire.GetModelInfoRequest())


@dataclass(frozen=True)
class Capability:
    """A field of ``ModelInfo``, a request that needs it, and the field that refuses that.

    Attributes:
        is_listed: Whether a model's description has it.
        asked: The request's fields.
        named: Beginning of the refusal where it is not listed.
        metadata: Metadata of the call.
    """

    is_listed: Callable[[wire.ModelInfo], bool]
    asked: dict[str, Any]
    named: str
    metadata: tuple[tuple[str, str], ...] = ()


IDS = {"token_ids": {"ids": [9, 30, 41, 77]}}
SCHEMA = '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],"additionalProperties":false}'
CALL = {"begin": "<call>", "content": {"type": "regex", "pattern": "x"}, "end": "</call>"}
TAG = {"format": {"type": "triggered_tags", "triggers": ["<call"], "tags": [CALL], "at_least_one": True}}
GUIDES: dict[str, dict[str, Any]] = {
    "JSON_SCHEMA": {"json_schema": SCHEMA},
    "REGEX": {"regex": "(yes|no)"},
    "EBNF_GRAMMAR": {"ebnf_grammar": 'start: "yes" | "no"'},
    "STRUCTURAL_TAG": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})},
    "CHOICE": {"choice": {"choices": ["yes", "no"]}},
    "JSON_OBJECT": {"json_object": {}},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "(yes|no)"},
    "choice": {"choices": ["yes", "no"]},
    "grammar": {"lark": 'start: "yes" | "no"'},
    "json_schema": {"schema": json.loads(SCHEMA)},
    "structural_tag": TAG,
    "allowed_tokens": {"token_ids": [30, 41]},
    "forced_prefix": {"text": "yes"},
    "no_repeat_ngram": {"n": 2},
    "min_p": {"p": 0.2},
    "phrase_ban": {"phrases": ["the end"]},
    "cfg": {"scale": 1.5, "negative_prompt": "No"},
    "contrastive": {},
}


def guided(name: str) -> Capability:
    mode = MODES.Value(f"GUIDED_DECODING_MODE_{name}")
    asked = {"guided": GUIDES[name], "stopping": {"max_tokens": 40}, "sampling": {"temperature": 0}}
    return Capability(lambda info: mode in info.generation.guided_decoding.modes, asked, "guided")


def selected(name: str) -> Capability:
    extra = {"logits_processors": [{"name": name, "args": PROCESSORS[name]}]}
    return Capability(lambda info: name in list(info.extra["logits_processors"]), {"extra": extra}, "extra.logits_pro")


def scored(of: str, count: int) -> Capability:
    def is_listed(info: wire.ModelInfo) -> bool:
        found = getattr(info.generation, f"{of}_logprobs")
        modes = [wire.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N]
        assert list(found.candidate_selection_modes) == (modes if found.supported else [])
        return bool(found.supported and count <= found.max_top_n)

    return Capability(is_listed, {"response": {f"{of}_candidates": {"top_n": count}}}, f"response.{of}_candidates")


def choices(count: int) -> Capability:
    asked = {"sampling": {"num_sequences": count, "temperature": 1.0}, "stopping": {"max_tokens": 1}}
    return Capability(lambda info: count <= info.generation.max_num_sequences, asked, "sampling.num_sequences")


def generation(name: str, named: str, metadata: Any = (), **asked: Any) -> Capability:
    return Capability(lambda info: bool(getattr(info.generation, name)), asked, named, metadata)


STOPPED = {"stopping": {"max_tokens": 3, "include_stop_in_output": True, "conditions": [{"stop_token_id": 41}]}}
PICTURE = {"modality": wire.MODALITY_IMAGE, "data_uri": data_url((252, 0, 0))}
CAPABILITIES: dict[str, Capability] = {
    **{f"guided_decoding.{name}": guided(name) for name in GUIDES},
    **{f"extra.logits_processors.{name}": selected(name) for name in PROCESSORS},
    **{
        f"{of}_logprobs.{count}": scored(of, count)
        for of in ("prompt", "output")
        for count in (0, 1, 20, 21, MAX_LOGPROBS, MAX_LOGPROBS + 1)
    },
    **{f"max_num_sequences.{count}": choices(count) for count in (1, 2, 128, 129)},
    "supports_priority": generation("supports_priority", "openengine-priority", (("openengine-priority", "3"),)),
    "supports_stop_in_output": generation("supports_stop_in_output", "stopping.include_stop_in_output", **STOPPED),
    "supports_cache_salt": generation("supports_cache_salt", "kv.cache_salt", kv={"cache_salt": "a"}),
    "supports_prefix_cache_bypass": generation("supports_prefix_cache_bypass", "kv.", kv={"bypass_prefix_cache": True}),
    "supports_text_input": Capability(lambda info: info.supports_text_input, {"prompt": "Hello"}, "prompt"),
    "supports_token_ids_input": Capability(lambda info: info.supports_token_ids_input, {}, "token_ids"),
    "supports_multimodal": Capability(lambda info: info.supports_multimodal, {"media": [PICTURE]}, "media"),
}
ELSEWHERE = {
    "guided_decoding": "by mode",
    "supports_lora": "test_openengine_control.py loads and chooses adapters",
    **dict.fromkeys(("model_id", "served_model_name", "served_model_aliases", "extra"), "names"),
    **dict.fromkeys(("max_context_length", "max_output_tokens"), "test_openengine_generate.py"),
    **dict.fromkeys(("tokenizer_modes", "reasoning_parser", "tool_call_parser"), "never told"),
    "generation": "its fields",
}


async def test_every_capability_of_the_protocol_is_tried() -> None:
    names = {one.name for kind in (wire.ModelInfo, wire.GenerationCapabilities) for one in kind.DESCRIPTOR.fields}
    assert names == {name.partition(".")[0] for name in CAPABILITIES if "extra" not in name} | set(ELSEWHERE)
    assert set(GUIDES) == {name.removeprefix("GUIDED_DECODING_MODE_") for name in MODES.keys()[1:]}


@pytest.mark.parametrize("name", CAPABILITIES)
async def test_it_is_answered_exactly_where_it_is_listed(served: Served, name: str) -> None:
    client, info = served
    one = CAPABILITIES[name]
    asked: dict[str, Any] = {"stopping": {"max_tokens": 3}, **({} if "prompt" in one.asked else IDS), **one.asked}
    if "media" in asked:  # in the place of the first token
        asked["token_ids"] = {"ids": [PLACEHOLDER_ID, *IDS["token_ids"]["ids"]]}
    if one.is_listed(info):
        answer = await client.answer(one.metadata, **asked)
        assert answer.kinds[-1] == "finished", answer.events
        return
    error = await client.refusal(one.metadata, **asked)
    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert str(error.details()).startswith(one.named), error.details()


PLACEHOLDER_ID = 2
assert PLACEHOLDER == "<|pad|>"


async def test_a_worker_beside_drafts_lists_no_more_than_it_does(tmp_path: Path, tiny_model: Path) -> None:
    """What it lists, in words: a client chooses by it before it asks."""
    for name, guides in (
        ("drafts", []),
        ("drafts and XGrammar", ["REGEX", "CHOICE"]),
        ("drafts and llguidance", list(GUIDES)),
    ):
        async with served_as(VARIANTS[name], tmp_path, tiny_model) as client:
            info = await client.call("Control.GetModelInfo", wire.GetModelInfoRequest())
        found = info.generation.guided_decoding
        assert [MODES.Name(mode).removeprefix("GUIDED_DECODING_MODE_") for mode in found.modes] == guides
        assert found.supported == bool(guides)
        assert not info.generation.output_logprobs.supported
        assert not info.generation.prompt_logprobs.supported
        assert {"logit_bias", "forced_prefix"}.isdisjoint(info.extra["logits_processors"])
