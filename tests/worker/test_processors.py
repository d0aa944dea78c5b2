"""The chain builder: selections, policy and fields to chains; what is refused; deadlines;
metrics and breakers.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prometheus_client import CollectorRegistry

from adapters.catalog import Catalog, Entry, Policy, PolicyError, model_context
from adapters.chain import ProcessorFailed, ProcessorRecord, Receipt
from adapters.contract import Context, is_allowed
from adapters.processors.masks import BannedTokens
from adapters.vocabulary import Vocabulary, thinking_tags
from adapters.vocabulary.thinking_tags import KNOWN_TAGS
from worker.engines import EngineRequest, TokenDelta
from worker.engines.embedded.admission import SAMPLED
from worker.errors import InvalidRequest, ProcessorUnavailable
from worker.processors.builder import NUM_BUILDERS, ServedChainBuilder
from worker.requests.deadline import until
from worker.requests.request import GenerationRequest
from worker.sampling import GuidedDecodingParams, SamplingParams
from worker.sampling.field_processors import with_field_processors
from worker.tiny_model import write_tiny_model

END = frozenset({2})

TAG = {"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ";"}
TAGS = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Context:
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_model(directory)
    return model_context(Vocabulary.from_pretrained(str(directory), 1024, (1,)))


def make(facts: Context, policy: Policy | None = None, catalog: Catalog | None = None) -> ServedChainBuilder:
    registry = CollectorRegistry()
    return ServedChainBuilder(catalog or Catalog.default(), policy or Policy(), "tiny", facts, registry)


def request(*annotations: str, require_reasoning: bool = False, **controls: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=20, **controls)
    return GenerationRequest(
        prompt_token_ids=[5, 6, 7], params=params, annotations=annotations, require_reasoning=require_reasoning
    )


def channel(processors: str, rest: str = "") -> str:
    return f'logits_processors:{{"version": 1, "processors": [{processors}]{rest}}}'


async def build(chains: ServedChainBuilder, made: GenerationRequest, metadata: dict[str, str] | None = None) -> Any:
    selection = chains.select(made, metadata or {})
    params = replace(made.params, stop_token_ids=sorted(END))
    asked = EngineRequest("", made.prompt_token_ids, params, seed=1)
    return (await chains.prepare(asked, selection, made.params.max_tokens)).chain


def names(chain: Any) -> list[str]:
    return [member.name for member in chain.members]


async def test_nothing_asked_is_no_chain(facts: Context) -> None:
    assert await build(make(facts), request("formatted_prompt")) is None


class InterruptsWhenBuilt(BannedTokens):
    """Raises as at Ctrl-C."""

    name = "acme/interrupts"

    def __init__(self, args: Any, context: Context) -> None:
        raise KeyboardInterrupt


async def test_a_processor_that_interrupts_is_refused(facts: Context) -> None:
    """Raised in the event loop it would end the worker."""
    entry = Entry("acme/interrupts", InterruptsWhenBuilt, "test")
    chains = make(facts, catalog=Catalog([*Catalog.default().entries, entry]))
    with pytest.raises(InvalidRequest, match="acme/interrupts raised KeyboardInterrupt when it was built"):
        await build(chains, request(channel('{"name": "acme/interrupts", "args": {"token_ids": [3]}}')))


class HangsWhenBuilt(BannedTokens):
    """Waits for what never comes."""

    name = "acme/hangs"
    until = threading.Event()
    begun: ClassVar[list[object]] = []

    def __init__(self, args: Any, context: Context) -> None:
        self.hang()

    def hang(self) -> None:
        self.begun.append(self)
        self.until.wait()


class HangsOnThePrompt(HangsWhenBuilt):
    """The same, once it is built."""

    def __init__(self, args: Any, context: Context) -> None:
        BannedTokens.__init__(self, args, context)

    def reset(self) -> None:
        self.hang()


@pytest.mark.parametrize("kind", [HangsWhenBuilt, HangsOnThePrompt])
async def test_a_processor_that_hangs_takes_no_builder_away(facts: Context, kind: type[HangsWhenBuilt]) -> None:
    catalog = Catalog([*Catalog.default().entries, Entry("acme/hangs", kind, "test")])
    registry = CollectorRegistry()
    chains = ServedChainBuilder(catalog, Policy(), "tiny", facts, registry, build_limit_s=0.2)
    good = '{"name": "min_tokens", "args": {"n": 3}}'
    hanging = request(channel(good + ', {"name": "acme/hangs", "args": {"token_ids": [3]}}'))
    try:
        tasks = [asyncio.create_task(build(chains, hanging)) for _ in range(5)]
        while len(kind.begun) < NUM_BUILDERS:
            await asyncio.sleep(0.001)
        tasks[0].cancel()  # whose thread hangs on
        assert names(await asyncio.wait_for(build(chains, request(channel(good))), 30)) == ["min_tokens"]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, InvalidRequest) for error in found[1:])
        assert "logits_processors: acme/hangs took more than 0.2 s to be built" in str(found[1])
        assert chains.breaker.open_names() == ["acme/hangs"]
        labels = {"processor": "acme/hangs", "reason": "budget"}
        assert registry.get_sample_value("dlw_processor_errors_total", labels) == 5
    finally:
        HangsWhenBuilt.until.set()
        HangsWhenBuilt.until = threading.Event()
        HangsWhenBuilt.begun.clear()
        await chains.close()


async def test_built_ins_may_take_their_time(facts: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a long prompt on a slow machine: none of them hangs."""
    chains = ServedChainBuilder(Catalog.default(), Policy(), "tiny", facts, CollectorRegistry(), build_limit_s=1e-9)
    prepare, may_end = chains._prepare, threading.Event()

    def slow(*given: Any) -> EngineRequest:
        may_end.wait()
        return prepare(*given)

    monkeypatch.setattr(chains, "_prepare", slow)
    task = asyncio.create_task(build(chains, request(channel('{"name": "min_tokens", "args": {"n": 3}}'))))
    try:
        await asyncio.sleep(0.05)
        may_end.set()
        assert names(await task) == ["min_tokens"]
    finally:
        may_end.set()
        await chains.close()


async def test_a_request_may_forgo_speculation(facts: Context) -> None:
    entry = '{"name": "min_tokens", "args": {"n": 3}}'
    for processors in ("", entry):
        chain = await build(make(facts), request(channel(processors, ', "speculation": false')))
        assert not chain.speculates
    assert (await build(make(facts), request(channel(entry)))).speculates
    assert await build(make(facts), request(channel("", ', "speculation": true'))) is None


async def test_a_prediction_becomes_tokens_without_a_chain(facts: Context) -> None:
    """It changes no token, so it is no reason for a chain; a model without a tokenizer has none."""
    bare = model_context(Vocabulary(1024))
    for chains, expected in ((make(facts), facts.vocabulary.encode("a b")), (make(bare), [])):
        for entries, has_chain in (("", False), ('{"name": "min_tokens", "args": {"n": 3}}', True)):
            made = request(channel(entries, ', "prediction": "a b"'))
            asked = EngineRequest("", made.prompt_token_ids, made.params, seed=1)
            prepared = await chains.prepare(asked, chains.select(made, {}), 9)
            assert (prepared.chain is not None) == has_chain
            assert list(prepared.hints.prediction) == list(expected)


async def test_the_annotation_and_the_header_select(facts: Context) -> None:
    entry = '{"name": "min_tokens", "args": {"n": 3}}'
    chain = await build(make(facts), request(channel(entry, ', "receipt": true')))
    assert names(chain) == ["min_tokens"]
    assert chain.wants_receipt
    assert chain.tokens == [5, 6, 7]
    header = channel(entry).partition(":")[2]
    assert names(await build(make(facts), request(), {"logits-processors": header})) == ["min_tokens"]


async def test_fields_become_processors(facts: Context) -> None:
    made = request(
        allowed_token_ids=[9, 10],
        bad_words_token_ids=[[9, 10], [11]],
        thinking_token_budget=4,
        guided_decoding=GuidedDecodingParams(choice=["yes", "no"]),
    )
    assert sorted(names(await build(make(facts), made))) == [
        "allowed_tokens",
        "bad_words",
        "choice",
        "thinking_budget",
    ]


async def test_the_field_allows_the_listed_tokens_and_no_end_token(facts: Context) -> None:
    chain = await build(make(facts), request(allowed_token_ids=[9, 10]))
    (allow,) = chain.plan().allows
    assert [token_id for token_id in range(facts.vocabulary.size) if is_allowed(allow, token_id)] == [9, 10]
    assert chain.context.end_token_ids == END


@pytest.mark.parametrize(
    ("guide", "name"),
    [
        ({"json": {"type": "integer"}}, "json_schema"),
        ({"regex": "[a-z]+"}, "regex"),
        ({"choice": ["a", "b"]}, "choice"),
        ({"grammar": 'start: "a" | "b"'}, "grammar"),
        ({"structural_tag": TAGS}, "structural_tag"),
    ],
)
async def test_every_guide_is_a_processor(facts: Context, guide: dict[str, Any], name: str) -> None:
    chain = await build(make(facts), request(guided_decoding=GuidedDecodingParams(**guide)))
    assert names(chain) == [name]
    reasoning = await build(make(facts), request(guided_decoding=GuidedDecodingParams(**guide), require_reasoning=True))
    assert [member.scope for member in reasoning.members] == ["answer"]


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (request("logits_processors:[]"), "logits_processors"),
        (request(channel('{"name": "nope"}')), "logits_processors.processors[0].name"),
        (request(channel('{"name": "min_tokens", "args": {"n": -1}}')), "logits_processors.processors[0].args.n"),
        (request(channel('{"name": "banned_tokens", "args": {"token_ids": [5000]}}')), "logits_processors.processors"),
        (request(guided_decoding=GuidedDecodingParams(regex="(")), "sampling_options.guided_decoding.args.pattern"),
        (request(allowed_token_ids=[4000]), "extra_args.sampling_options.allowed_token_ids"),
        (
            request(
                channel('{"name": "choice", "args": {"choices": ["a"]}}'),
                guided_decoding=GuidedDecodingParams(choice=["a"]),
            ),
            "sampling_options.guided_decoding",
        ),
    ],
)
async def test_refusals_name_the_field(facts: Context, made: GenerationRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await build(make(facts), made)
    assert refused.value.field.startswith(field)


async def test_a_model_without_thinking_tags_has_no_budget() -> None:
    with pytest.raises(InvalidRequest, match=r"stop_conditions.max_thinking_tokens"):
        await build(make(Context(Vocabulary(100))), request(thinking_token_budget=3))


async def test_the_operators_policy_cannot_be_dropped(facts: Context, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("models:\n  tiny:\n    mandatory: [{name: min_tokens, args: {n: 2}}]\n    forbidden: [mirostat]\n")
    chains = make(facts, Policy.load(file, Catalog.default()))
    assert names(await build(chains, request())) == ["min_tokens"]
    with pytest.raises(InvalidRequest, match="mirostat is not allowed"):
        await build(chains, request(channel('{"name": "mirostat", "args": {"tau": 3, "eta": 0.1}}')))


def test_a_policy_that_cannot_be_honoured_stops_the_start(facts: Context, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("models:\n  tiny:\n    default: [{name: banned_tokens, args: {token_ids: [5000]}}]\n")
    with pytest.raises(PolicyError, match="token_ids"):
        make(facts, Policy.load(file, Catalog.default()))


class Fails:
    """A third party's processor that cannot be built."""

    def __init__(self) -> None:
        raise RuntimeError("secret")

    def __call__(self, input_ids: Any, logits: Any) -> None:
        logits.add_(0)


async def test_a_third_partys_processor_that_keeps_failing_is_refused(facts: Context) -> None:
    chains = make(facts, catalog=Catalog.load(options=[f"acme={__name__}:Fails"]))
    made = request(channel('{"name": "acme"}'))
    for _ in range(chains.breaker.limit):
        with pytest.raises(InvalidRequest) as refused:
            await build(chains, made)
        assert "secret" not in str(refused.value)
    by = {"processor": "acme", "reason": "raised"}
    assert chains.registry.get_sample_value("dlw_processor_errors_total", by) == chains.breaker.limit
    with pytest.raises(ProcessorUnavailable, match="acme has failed too often"):
        await build(chains, made)
    assert names(await build(chains, request(channel('{"name": "min_tokens", "args": {"n": 1}}')))) == ["min_tokens"]


async def test_a_request_counts_once_for_a_processor_it_has_twice(facts: Context) -> None:
    chains = make(facts)
    biases = ", ".join(f'{{"name": "logit_bias", "args": {{"bias": {{"{token_id}": 1}}}}}}' for token_id in (5, 6))
    chain = await build(chains, request(channel(biases)))
    assert names(chain) == ["logit_bias", "logit_bias"]
    chains.metrics.count(chain.receipt, None)
    assert chains.registry.get_sample_value("dlw_processor_requests_total", {"processor": "logit_bias"}) == 1


def test_metrics_of_a_request_that_ended(facts: Context) -> None:
    chains = make(facts)
    record = ProcessorRecord("choice", 1, steps_active=4, tokens_forced=1, tokens_masked=300)
    chains.metrics.count(Receipt([record], replayed=2), ProcessorFailed("choice", "unsatisfiable", "no"))
    value = chains.registry.get_sample_value
    by = {"processor": "choice"}
    assert value("dlw_processor_steps_total", by) == 4
    assert value("dlw_processor_forced_tokens_total", by) == 1
    assert value("dlw_processor_masked_tokens_total", by) == 300
    assert value("dlw_processor_errors_total", {**by, "reason": "unsatisfiable"}) == 1
    assert value("dlw_processor_unsatisfiable_total", by) == 1
    assert value("dlw_processor_replayed_tokens_total") == 2


# Fields of SamplingParams that are processors


async def fields(facts: Context, params: SamplingParams, made: GenerationRequest) -> tuple[SamplingParams, list[str]]:
    chains = make(facts)
    chain = await build(chains, made)
    context = chains.builder.context(END, 1, 20)
    params, chain = with_field_processors(params, chain, made.prompt_token_ids, context, by_sampler=SAMPLED)
    return params, [] if chain is None else names(chain)


async def test_penalties_join_the_chain(facts: Context) -> None:
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=3, temperature=0.7)
    left, found = await fields(facts, params, request(channel('{"name": "loop_stop"}')))
    assert found == ["repetition_penalty", "frequency_penalty", "min_tokens", "loop_stop"]
    assert left.temperature == 0.7


async def test_truncation_joins_it_where_a_processor_acts_as_late(facts: Context) -> None:
    late = request(channel('{"name": "top_n_sigma", "args": {"n": 1.5}}'))
    left, found = await fields(facts, SamplingParams(temperature=0.7, top_k=5, top_p=0.9), late)
    assert found == ["temperature", "top_k", "top_p", "top_n_sigma"]
    assert (left.temperature, left.top_k, left.top_p, left.is_greedy) == (1.0, None, None, False)


async def test_a_late_processor_means_sampling_unless_temperature_is_0(facts: Context) -> None:
    late = request(channel('{"name": "top_n_sigma", "args": {"n": 1.5}}'))
    left, found = await fields(facts, SamplingParams(), late)
    assert (left.is_greedy, found) == (False, ["top_n_sigma"])
    left, found = await fields(facts, SamplingParams(temperature=0), late)
    assert (left.is_greedy, found) == (True, ["temperature", "top_n_sigma"])


@pytest.mark.parametrize(
    ("params", "processor"),
    [
        (SamplingParams(min_tokens=2), '{"name": "min_tokens", "args": {"n": 3}}'),
        (SamplingParams(temperature=0.5), '{"name": "temperature", "args": {"value": 0.7}}'),
    ],
)
async def test_a_control_given_twice_is_refused(facts: Context, params: SamplingParams, processor: str) -> None:
    with pytest.raises(InvalidRequest, match="is named too"):
        await fields(facts, params, request(channel(processor)))


# Deadlines


async def test_a_deadline_cuts_the_stream_and_frees_it() -> None:
    closed = asyncio.Event()

    async def stream() -> AsyncGenerator[TokenDelta, None]:
        try:
            yield TokenDelta([1])
            await asyncio.Event().wait()
        finally:
            closed.set()

    deltas = [delta async for delta in until(1000.01, stream(), clock=lambda: 1000.0)]
    assert [delta.token_ids for delta in deltas] == [[1], []]
    assert deltas[-1].finish_reason == "length"
    assert closed.is_set()


async def test_a_stream_that_ends_in_time_is_left_alone() -> None:
    async def stream() -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta([1])
        yield TokenDelta([2], finish_reason="stop")

    deltas = [delta async for delta in until(2000.0, stream(), clock=lambda: 1000.0)]
    assert [delta.finish_reason for delta in deltas] == [None, "stop"]


def test_thinking_tags_of_several_tokens(facts: Context) -> None:
    vocabulary = facts.vocabulary
    own = model_context(vocabulary)
    assert (own.think_start, own.think_end) == (
        tuple(vocabulary.encode("<think>")),
        tuple(vocabulary.encode("</think>")),
    )
    given = model_context(vocabulary, "[REASON]", "[/REASON]")
    assert vocabulary.decode(given.think_start) == "[REASON]"
    assert len(given.think_end) > 1
    with pytest.raises(ValueError, match="given together"):
        model_context(vocabulary, "[REASON]")
    other = Vocabulary(1024, vocabulary.tokenizer)
    for start, end in KNOWN_TAGS[1:]:
        tokens = {start: (5,), end: (6,)}
        other.tag = lambda text, tokens=tokens: tokens.get(text, ())  # type: ignore[misc, method-assign]
        assert thinking_tags(other) == ((5,), (6,))


async def test_a_grammar_behind_tags_of_several_tokens(facts: Context) -> None:
    tagged = model_context(facts.vocabulary, "[REASON]", "[/REASON]")
    chain = await build(
        make(tagged), request(guided_decoding=GuidedDecodingParams(choice=["yes"]), require_reasoning=True)
    )
    for token_id in facts.vocabulary.encode("[REASON]yes or no[/REASON]"):
        assert chain.plan().permits(token_id)
        chain.accept(token_id, chain.position)
    yes, no = (facts.vocabulary.encode(text)[0] for text in ("yes", "no"))
    assert [chain.plan().permits(token_id) for token_id in (yes, no)] == [True, False]
