"""JSON from clients is read in one way, or refused with the place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.strict_json import LoneSurrogate, read_object

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
