"""Every field of vLLM's beside every processor: joins the chain, is left to vLLM, or is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from effort import grid
from vllm_stand_in import Params, served_model

from adapters.catalog import ModelPolicy, SelectionError
from adapters.chain import ProcessorChain
from adapters.contract import Stage
from adapters.vllm.requests import Asked, chain_of, read

sys.path.append(str(Path(__file__).resolve().parents[1] / "conformance"))
from builtin_examples import EMBEDDED_ONLY, EXAMPLES

RUNNERS = {"first": served_model(penalises_first=False), "second": served_model(penalises_first=True)}

FIELDS: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "temperature": 0.7,
    "min_p": 0.05,
    "top_k": 20,
    "top_p": 0.9,
}
PENALTIES = tuple(FIELDS)[:3]
LATE = tuple(FIELDS)[3:]
BEFORE: dict[str, Any] = {
    "min_tokens": 3,
    "logit_bias": {5: 2.0},
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["fox"],
}
"""Fields that vLLM applies before processors; all of the law's stages before theirs, or masks."""


def ask(name: str, runner: str, **fields: Any) -> tuple[list[str], bool]:
    """Names of the chain's members, and whether it draws."""
    return joined({"name": name, "args": EXAMPLES[name][0]}, runner, **fields)


def joined(processor: dict[str, Any], runner: str, **fields: Any) -> tuple[list[str], bool]:
    selection = json.dumps({"version": 1, "processors": [processor]})
    chain, draws = chain_with(Params(**fields, extra_args={"logits_processors": selection}), runner)
    return [member.name for member in chain.members], draws


def chain_with(params: Params, runner: str) -> tuple[ProcessorChain, bool]:
    asked = read(params, RUNNERS[runner])
    assert asked is not None
    return chain_of(asked, params, RUNNERS[runner])


@cache
def stage(name: str) -> Stage:
    """The stage of a processor; some have one that depends on their arguments."""
    selection = {"version": 1, "processors": [{"name": name, "args": EXAMPLES.get(name, [{}])[0]}]}
    chain, _ = chain_with(Params(extra_args={"logits_processors": selection}), "first")
    return chain.members[0].stage


def expected(name: str, runner: str, field: str, seed: int | None) -> str:
    """``refused at`` a path, ``joins`` or ``left``: the order law, in the words of this test."""
    is_drawn_after = seed is not None or stage(name) >= Stage.TEMPERATURE
    if field in LATE:
        return "joins" if is_drawn_after and field != name else "left"
    if field not in PENALTIES:
        return "left"
    if field == name:  # one of the two would be lost
        return f"refused at {field}"
    if runner == "second":  # vLLM has applied it by then
        return f"refused at {field}" if stage(name) < Stage.PENALTY else "left"
    is_in_the_middle = Stage.PENALTY <= stage(name) <= Stage.SOFT
    return "joins" if is_drawn_after or is_in_the_middle else "left"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", grid([name for name in EXAMPLES if name not in EMBEDDED_ONLY], fast=4))
def test_each_field_joins_is_left_or_is_refused(name: str, runner: str) -> None:
    for seed in (None, 11):
        for field, value in {**FIELDS, **BEFORE}.items():
            try:
                members, draws = ask(name, runner, seed=seed, **{field: value})
                found = "joins" if field in members and field != name else "left"
            except SelectionError as error:
                found, draws = f"refused at {error.path}", False
            assert found == expected(name, runner, field, seed), (field, seed)
            if found == "joins":
                assert draws
                assert members[-1] == "seeded_sampler"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", grid([name for name in EXAMPLES if name not in EMBEDDED_ONLY], fast=4))
def test_a_chain_draws_where_vllms_later_steps_are_too_late(name: str, runner: str) -> None:
    late = stage(name) >= Stage.TEMPERATURE
    for fields, draws in (({}, late), ({"seed": 3}, True), ({"temperature": 0.0}, late)):
        members, found = ask(name, runner, **fields)
        assert found == draws, fields
        assert ("seeded_sampler" in members) == draws


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_greedy_request_joins_temperature_alone(runner: str) -> None:
    members, draws = ask("xtc", runner, temperature=0.0, top_k=5, top_p=0.5, min_p=0.1)
    assert draws
    assert members == ["temperature", "xtc", "seeded_sampler"]


def test_a_state_made_of_logits_draws_in_the_second_runner() -> None:
    for runner, draws in (("first", False), ("second", True)):
        assert joined({"name": "acme/fatigue"}, runner, temperature=0.0)[1] == draws


def refusal(
    runner: str = "first", extra: dict[str, Any] | None = None, report: str | None = None, **fields: Any
) -> SelectionError:
    processors = [{"name": "json_schema", "args": {"schema": True}}]
    given = {"logits_processors": json.dumps({"version": 1, "processors": processors, **(extra or {})})}
    given |= {} if report is None else {"logits_processors_report": report}
    params = Params(**{"extra_args": given, **fields})
    with pytest.raises(SelectionError) as caught:
        chain_with(params, runner)
    return caught.value


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("receipt", {"extra": {"receipt": True}}),
        ("deadline", {"extra": {"deadline": 1790000000.5}}),
        ("deadline", {"extra": {"deadline": 1790000000.5}, "report": "mine"}),
        ("thinking_token_budget", {"thinking_token_budget": 5}),
        ("structured_outputs", {"structured_outputs": SimpleNamespace(regex="a+")}),
        ("trace_decode_token_ids", {"trace_decode_token_ids": [1]}),
        ("", {"extra_args": {"logits_processors": 5}}),
        ("", {"extra_args": {"logits_processors": "["}}),
        ("", {"extra_args": {"logits_processors": {"version": float("nan")}}}),
        ("logits_processors_report", {"extra_args": {"logits_processors_report": 5}}),
        ("extra_args.logits_processor", {"extra_args": {"logits_processor": "{}"}}),
        ("extra_args.logits_processors_reports", {"extra_args": {"logits_processors_reports": "mine"}}),
        (
            "processors",
            {
                "extra_args": {
                    "logits_processors": {
                        "version": 1,
                        "processors": [{"name": "phrase_ban", "args": {"phrases": ["e"]}}],
                    }
                }
            },
        ),
        (
            "processors",
            {
                "extra_args": {
                    "logits_processors": {"version": 1, "processors": [{"name": "cfg", "args": {"scale": 2}}]}
                }
            },
        ),
        (
            "processors[0].name",
            {"extra_args": {"logits_processors": {"version": 1, "processors": [{"name": "nope"}]}}},
        ),
    ],
)
def test_what_vllm_cannot_keep_is_refused_with_its_path(path: str, asked: dict[str, Any]) -> None:
    assert refusal(**asked).path == path


@pytest.mark.parametrize("runner", RUNNERS)
def test_an_end_token_outside_the_row_is_refused(runner: str) -> None:
    """A processor of the end tokens would write to the logits of another request."""
    size = RUNNERS[runner].facts.vocab_size
    for token_id in (-1, size, 10**9):
        error = refusal(runner, stop_token_ids=[5, token_id])
        assert (error.path, error.problem) == (
            "stop_token_ids",
            f"expected token ids between 0 and {size - 1}, got {token_id}",
        )
    members, _ = ask("min_tokens", runner, stop_token_ids=[0, size - 1])
    assert members == ["min_tokens"]
    assert read(Params(stop_token_ids=[size]), RUNNERS[runner]) is None  # nothing of ours writes there


def test_a_selection_may_be_an_object_too() -> None:
    processors = [{"name": "top_k", "args": {"k": 3}}]
    texts = [{"version": 1, "processors": processors}, json.dumps({"version": 1, "processors": processors})]
    found = [read(Params(extra_args={"logits_processors": each}), RUNNERS["first"], 0) for each in texts]
    assert isinstance(found[0], Asked)
    assert found[0] == found[1]


def test_a_request_that_asks_for_nothing_has_no_chain() -> None:
    for extra in (None, {}, {"logits_processors": {"version": 1, "processors": []}}, {"other": 5}):
        assert read(Params(extra_args=extra), RUNNERS["first"]) is None


@pytest.mark.parametrize(
    ("forbidden", "path", "fields"),
    [
        ("top_k", "top_k", {"top_k": 5}),
        ("min_tokens", "min_tokens", {"min_tokens": 5}),
        ("logit_bias", "logit_bias", {"logit_bias": {1: 2.0}}),
        ("allowed_tokens", "allowed_token_ids", {"allowed_token_ids": [1]}),
        ("bad_words", "bad_words", {"bad_words": ["fox"]}),
        ("regex", "structured_outputs.regex", {"structured_outputs": SimpleNamespace(regex="a+")}),
    ],
)
def test_the_operator_forbids_fields_as_processors(forbidden: str, path: str, fields: dict[str, Any]) -> None:
    model = served_model(penalises_first=False, policy=ModelPolicy(forbidden=frozenset({forbidden})))
    assert read(Params(), model) is None
    with pytest.raises(SelectionError) as caught:
        read(Params(**fields), model)
    assert caught.value.path == path


@pytest.mark.parametrize("fields", [{"logprobs": 0}, {"logprob_token_ids": [5]}])
def test_processed_log_probabilities_of_a_drawn_row_are_refused(fields: dict[str, Any]) -> None:
    """One token is left of it: they would say that it was certain."""
    model = RUNNERS["first"]
    processed = replace(model, facts=replace(model.facts, reports_processed=True))
    extra = {"logits_processors": {"version": 1, "processors": [{"name": "min_tokens", "args": {"n": 2}}]}}
    for seed, is_drawn in ((None, False), (3, True)):
        params = Params(seed=seed, extra_args=extra)
        for name, value in fields.items():
            setattr(params, name, value)
        asked = read(params, processed)
        assert asked is not None
        if is_drawn:
            with pytest.raises(SelectionError) as caught:
                chain_of(asked, params, processed)
            assert caught.value.path == next(iter(fields))
        else:
            chain_of(asked, params, processed)
