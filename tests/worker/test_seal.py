"""Hand-offs are signed: what is not of this pool is refused, whatever it says, and says why."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.disaggregation.seal import CLOCK_SKEW_S, MAX_BODY, MIN_SECRET, SECRET, SECRET_FILE, Seal, take_seal
from worker.errors import KV_TRANSFER_FIELD, ConfigurationError, InvalidRequest

POOL = "a secret of this pool, and of no other"
BODY = {"kv": {"metadata": "AAEC", "bases": [2**63 + 5], "token": 7}, "prompt_length": 3, "logprob": -0.1}


def over_the_wire(data: Any) -> Any:
    return json.loads(json.dumps(data))


def refused(seal: Seal, data: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        seal.open(data)
    assert error.value.field.startswith(KV_TRANSFER_FIELD)
    return str(error.value)


def test_what_was_closed_is_opened() -> None:
    opened = Seal(POOL).open(over_the_wire(Seal(POOL).close(BODY, 30.0)))
    assert opened.body == BODY
    assert not opened.is_late


def test_another_pool_is_refused_by_name() -> None:
    said = refused(Seal(POOL), Seal(POOL + ".").close(BODY, 30.0))
    assert f"{KV_TRANSFER_FIELD}.mac: is not of this pool: the prefill worker has another {SECRET}" in said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["format", "version", "expires", "body", "mac", "other"]), JSON), JSON)
def test_any_change_of_a_seal_is_refused_with_no_other_error(changes: dict[str, Any], whole: Any) -> None:
    seal = Seal(POOL)
    genuine = seal.close(BODY, 30.0)
    refused(seal, whole)
    if genuine | changes != genuine:
        refused(seal, genuine | changes)
    for name in genuine:
        refused(seal, {key: value for key, value in genuine.items() if key != name})


@given(st.integers(min_value=0), st.sampled_from(string.printable))
def test_one_character_of_what_was_signed_cannot_be_changed(place: int, character: str) -> None:
    seal = Seal(POOL)
    genuine = seal.close(BODY, 30.0)
    for name in ("body", "mac"):
        text = genuine[name]
        place %= len(text)
        changed = text[:place] + character + text[place + 1 :]
        if changed != text:
            refused(seal, genuine | {name: changed})


def test_a_longer_lease_cannot_be_forged() -> None:
    seal = Seal(POOL)
    genuine = seal.close(BODY, 30.0)
    assert "is not of this pool" in refused(seal, genuine | {"expires": genuine["expires"] + 1})


@pytest.mark.parametrize("began", [1e9, 1e9 + 0.5])
@pytest.mark.parametrize(("after", "is_late"), [(0, False), (30 + CLOCK_SKEW_S, False), (32 + CLOCK_SKEW_S, True)])
def test_a_lease_that_has_timed_out_is_late(after: float, is_late: bool, began: float) -> None:
    now = [began]
    seal = Seal(POOL, clock=lambda: now[0])
    genuine = seal.close(BODY, 30.0)
    now[0] += after
    assert seal.open(genuine).is_late is is_late


def test_the_secret_is_nowhere_to_be_read() -> None:
    seal = Seal(POOL)
    assert POOL not in repr(seal)
    assert POOL not in json.dumps(seal.close(BODY, 30.0))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prefill_and_decode_workers_need_a_secret(role: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--disaggregation-mode {role} needs {SECRET} or {SECRET_FILE}: "):
        take_seal(role, {SECRET: ""})
    assert take_seal("aggregated", {}) is None


def test_a_short_secret_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigurationError) as error:
        take_seal("prefill", {SECRET: "too short"})
    assert str(error.value) == f"{SECRET} must be at least 32 characters, got 9"


def test_parameters_that_are_too_long_are_not_signed_again() -> None:
    seal = Seal(POOL)
    long = seal.close(BODY, 30.0) | {"body": " " * (MAX_BODY + 1)}
    assert f"{KV_TRANSFER_FIELD}.body: must be a text of up to {MAX_BODY} characters" in refused(seal, long)


@pytest.mark.parametrize("secret", ["a" * MIN_SECRET, "\udcff" * MIN_SECRET])
def test_any_text_that_is_long_enough_is_a_secret(secret: str) -> None:
    """Also one that is no UTF-8, as the environment has it."""
    prefill, decode = (take_seal(role, {SECRET: secret, SECRET_FILE: ""}) for role in ("prefill", "decode"))
    assert prefill is not None
    assert decode is not None
    assert decode.open(prefill.close(BODY, 1.0)).body == BODY


def test_a_secret_comes_from_one_place(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"\n{POOL}\n")
    with pytest.raises(ConfigurationError, match=f"{SECRET} and {SECRET_FILE} are both set"):
        take_seal("decode", {SECRET: POOL, SECRET_FILE: str(file)})
    from_file = take_seal("decode", {SECRET_FILE: str(file)})
    from_variable = take_seal("prefill", {SECRET: POOL})
    assert from_file is not None
    assert from_variable is not None
    assert from_file.open(from_variable.close(BODY, 1.0)).body == BODY


@pytest.mark.parametrize("content", [None, b"\xff\xfe" * 40, b"short"])
def test_a_file_without_a_secret_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"{SECRET_FILE} {file}"):
        take_seal("decode", {SECRET_FILE: str(file)})


@pytest.mark.parametrize("role", ["aggregated", "prefill"])
def test_no_child_process_inherits_the_secret(role: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(POOL)
    for secret in ({SECRET: POOL}, {SECRET_FILE: str(file)}):
        environ = {**secret, "PATH": "/bin"}
        take_seal(role, environ)
        assert environ == {"PATH": "/bin"}
