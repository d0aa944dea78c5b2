"""The parameters of a KV transfer: what they say, and that nothing else is taken for them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalog import Requested, Selection
from worker.engines.embedded.transfer import params
from worker.engines.embedded.transfer.fingerprint import fingerprint
from worker.engines.embedded.transfer.handle import KvHandle, handle_as_json, handle_from_json
from worker.engines.embedded.transfer.host_copy import HostProcess
from worker.engines.embedded.transfer.layout import KvLayout
from worker.errors import KV_TRANSFER_FIELD, InvalidRequest, StartupError

LAYOUT = KvLayout("f00d", "float32", layers=2, kv_heads=2, head_dim=4, block_size=4, page_size=16)
HANDLE = KvHandle(
    "dlw-1", b"\x00meta\xff", "DRAM", 0, (16, 32, 48, 64), LAYOUT, (3, 1), 4096, 99, HostProcess("here", 7)
)
PROMPT = list(range(5, 30))
CHOSEN = Selection((Requested("banned_tokens", {"token_ids": [7, 8]}), Requested("min_tokens", {"n": 3}, "answer")))


def over_the_wire(data: Any) -> Any:
    return json.loads(json.dumps(data))


def payload() -> dict[str, Any]:
    written = params.write(PROMPT, CHOSEN, handle_as_json(HANDLE), 16)
    return dict(over_the_wire(written))


def test_what_was_written_is_read() -> None:
    found = params.read(payload(), PROMPT, CHOSEN)
    assert found.num_cached_tokens == 16
    assert found.prompt_length == len(PROMPT)
    assert handle_from_json(found.kv, LAYOUT, len(PROMPT)) == HANDLE


def refused(data: Any, prompt: list[int] = PROMPT, selection: Selection = CHOSEN) -> str:
    with pytest.raises(InvalidRequest) as error:
        params.read(data, prompt, selection)
    return str(error.value)


@pytest.mark.parametrize(
    "foreign",
    [None, {}, [], "text", 3, {"sample_handle": "b917", "completed_tokens": [1]}, {"format": "other", "version": 1}],
)
def test_a_foreign_one_is_refused_by_name(foreign: Any) -> None:
    assert refused(foreign).startswith(f"prefill_result.disaggregated_params: must be of format {params.FORMAT}")


def test_another_version_is_refused_with_both() -> None:
    assert "version: must be 3, got 1" in refused(payload() | {"version": 1})


def test_names_are_complete_and_known() -> None:
    assert "chain_digest: is missing" in refused({k: v for k, v in payload().items() if k != "chain_digest"})
    assert "unknown field" in refused(payload() | {"first_token": 3})
    assert "kv: must be a mapping" in refused(payload() | {"kv": 3})
    assert "num_cached_tokens: must be an integer" in refused(payload() | {"num_cached_tokens": -1})
    assert "num_cached_tokens: must be an integer" in refused(payload() | {"num_cached_tokens": len(PROMPT) + 1})
    every = params.read(payload() | {"num_cached_tokens": len(PROMPT)}, PROMPT, CHOSEN)
    assert every.num_cached_tokens == len(PROMPT)


@pytest.mark.parametrize("prompt", [PROMPT[:-1], [*PROMPT, 4], [6, *PROMPT[1:]], PROMPT[::-1]])
def test_one_for_another_prompt_is_refused(prompt: list[int]) -> None:
    assert "was made for another prompt" in refused(payload(), prompt=prompt)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(CHOSEN.processors[:1]),
        Selection(CHOSEN.processors[::-1]),
        Selection((Requested("banned_tokens", {"token_ids": [7, 9]}), CHOSEN.processors[1])),
        Selection((CHOSEN.processors[0], Requested("min_tokens", {"n": 3}))),
        replace(CHOSEN, order=("top_k", "temperature")),
    ],
)
def test_one_for_other_processors_is_refused(selection: Selection) -> None:
    assert "was made for other processors" in refused(payload(), selection=selection)


@pytest.mark.parametrize(("theirs", "ours"), [("d", "e"), ("d", None), (None, "e")])
def test_one_for_another_adapter_is_refused(theirs: str | None, ours: str | None) -> None:
    written = dict(over_the_wire(params.write(PROMPT, CHOSEN, handle_as_json(HANDLE), 16, theirs)))
    assert params.read(written, PROMPT, CHOSEN, theirs).adapter == theirs
    with pytest.raises(InvalidRequest, match="adapter: was made for another LoRA adapter"):
        params.read(written, PROMPT, CHOSEN, ours)


def test_the_order_of_arguments_does_not_matter() -> None:
    args = {"scale": 2.0, "negative_token_ids": [3]}
    one, other = (Selection((Requested("cfg", dict(each)),)) for each in (args.items(), [*args.items()][::-1]))
    assert params.digest_selection(one) == params.digest_selection(other)


def test_where_processors_were_asked_for_does_not_matter() -> None:
    elsewhere = Selection(tuple(replace(one, path="policy") for one in CHOSEN.processors), receipt="debug")
    assert params.read(payload(), PROMPT, elsewhere).prompt_length == len(PROMPT)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "beef"),
        ("dtype", "bfloat16"),
        ("layers", 3),
        ("kv_heads", 4),
        ("head_dim", 8),
        ("block_size", 8),
        ("numerics", "exact, native kernels"),
    ],
)
def test_another_layout_is_refused_with_both_values(field: str, value: object) -> None:
    data = handle_as_json(replace(HANDLE, layout=replace(LAYOUT, **{field: value})))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as error:
        handle_from_json(over_the_wire(data), LAYOUT, len(PROMPT))
    said = str(error.value)
    assert f"{field} is {value!r} on the prefill worker and {getattr(LAYOUT, field)!r}" in said


BROKEN: dict[str, list[Any]] = {
    "agent": [3, "", "x" * 1000, None],
    "metadata": ["*", 3, "a" * (3 * 2**20), None],
    "memory": ["dram", 3, None],
    "device": [-1, 1.5, True, 2**20, None],
    "bases": [[1], [1, 2, 3, -4], [1, 2, 3, "4"], 7, [1, 2, 3, 2**70], None],
    "layout": [3, {}, {"model": "f00d"}, None],
    "pages": [[3], [3, 1, 2], [3, -1], [3, True], "31", None],
    "token_address": [-1, "0", 2**64, None],
    "token": [-1, 2**63, 0.5, None],
    "process": [3, {}, {"host": "", "number": 1}, {"host": "h", "number": -1}, {"host": "h", "number": 1, "x": 1}],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in BROKEN for value in BROKEN[name]])
def test_a_broken_handle_is_refused_by_name(field: str, value: Any) -> None:
    data = handle_as_json(HANDLE) | {field: value}
    with pytest.raises(InvalidRequest, match=f"kv.{field}"):
        handle_from_json(data, LAYOUT, len(PROMPT))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*payload(), "other"]), JSON), JSON)
def test_anything_else_is_refused_and_nothing_else_is_raised(changes: dict[str, Any], kv: Any) -> None:
    for data in (kv, payload() | changes, payload() | {"kv": kv}):
        field = KV_TRANSFER_FIELD
        try:
            found = params.read(data, PROMPT, CHOSEN)
            handle_from_json(found.kv, LAYOUT, len(PROMPT))
        except InvalidRequest as error:
            field = error.field
        assert field.startswith("prefill_result.disaggregated_params")


@given(st.lists(st.integers(0, 2**40)), st.lists(st.integers(0, 2**40)))
def test_prompts_have_their_own_digests(one: list[int], other: list[int]) -> None:
    assert (params.digest_prompt(one) == params.digest_prompt(other)) == (one == other)


def test_a_fingerprint_knows_the_weights_and_not_the_place(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    here = checkpoints["llama"]
    copied = shutil.copytree(here, tmp_path / "elsewhere")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_version": "0.0"}))
    assert fingerprint(copied) == fingerprint(here)
    (copied / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert fingerprint(copied) != fingerprint(here)
    (copied / "config.json").write_text(json.dumps(config))
    weights = next(iter(copied.glob("*.safetensors")))
    content = bytearray(weights.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start] ^= 1
    weights.write_bytes(content)
    assert fingerprint(copied) != fingerprint(here)
    weights.unlink()
    (copied / "config.json").unlink()
    with pytest.raises(StartupError, match="No such file"):
        fingerprint(copied)
