"""JSON from clients is read in one way, or refused with the place."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from effort import examples
from growth import peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.strict_json import LoneSurrogate, RepeatedKey, read_object

_TEXTS = st.text(st.characters(codec=None, categories=None) | st.sampled_from("\ud83d\ude00\\u"), max_size=6)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_TEXTS, _VALUES, max_size=4))
@settings(max_examples=examples(500))
def test_every_text_is_unicode_or_the_object_is_refused(value: dict[str, Any]) -> None:
    written = json.dumps(value)
    expected = json.loads(written)  # two escapes that make a pair are one character
    try:
        json.dumps(expected, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(LoneSurrogate, match="half of a surrogate pair in ") as raised:
            read_object(written.encode())
        raised.value.path.encode()
    else:
        assert read_object(written.encode()) == expected


@pytest.mark.parametrize(
    ("written", "path"),
    [
        (r'{"a": "\ud800"}', "a"),
        (r'{"a": [1, {"b": "x\uDFFF"}]}', "a[1].b"),
        (r'{"a": {"\ud800": 1}}', "a key of a"),
        (r'{"\udc00\ud800": "\ud800"}', "a key"),
    ],
)
def test_the_place_is_named(written: str, path: str) -> None:
    with pytest.raises(LoneSurrogate) as raised:
        read_object(written.encode())
    assert raised.value.path == path


def test_an_integer_that_python_does_not_read() -> None:
    with pytest.raises(ValueError, match=r"^has an integer of more than 4300 digits$"):
        read_object(b'{"a": ' + b"9" * 5000 + b"}")


@given(st.lists(st.integers(0, 2) | st.text("abc .\n", min_size=1, max_size=4), max_size=5), st.sampled_from(["", "]"]))
def test_a_repeated_key_is_named_with_its_path(steps: list[int | str], behind: str) -> None:
    """Whatever is around it, and by its name alone where the text ends before it is JSON."""
    written, path = '{"x": 1, "y": {"x": 2}, "x": 3}', "x"
    for step in reversed(steps):
        if isinstance(step, int):
            written, path = f"[{'0, ' * step}{written}, 1]", f"[{step}]{'' if path[:1] == '[' else '.'}{path}"
        else:
            written, path = (
                f'{{"z": [], {json.dumps(step)}: {written}}}',
                f"{step}{'' if path[:1] == '[' else '.'}{path}",
            )
    outside = f'{{"all": {written}{behind}}}'
    with pytest.raises(RepeatedKey, match='the key "x" occurs twice') as raised:
        read_object(outside.encode())
    whole = f"all{'' if path[:1] == '[' else '.'}{path}"
    shown = "".join(each if each.isprintable() else "?" for each in whole[:60])
    assert raised.value.path == (shown if not behind else "x")


@pytest.mark.parametrize("written", ['"r": {"a": 1, "a": 2}', r'"r": "\ud83d\ude00"'], ids=["repeated", "pair"])
def test_a_long_key_is_not_written_for_each_item(written: str) -> None:
    def read(count: int) -> None:
        read_object(f'{{{written}, "{"k" * count}": [{"0, " * count}0]}}'.encode())

    small, large = (peak_bytes(partial(read, count)) for count in (2000, 4000))
    assert large < 3 * small
