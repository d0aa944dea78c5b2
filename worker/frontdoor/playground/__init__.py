"""The playground: a static web page that chats with the model and shows what processors did.

`index.html` is the page, `style.css` its looks, and `app.js` ties the scripts together: `answer.js`
shows an answer token by token, `processors.js` the processors that were picked. `forms.js` makes
forms from JSON Schemas, of the controls in `controls.js`; `schemas.js` says what the schemas stand
for. `sampling.js` has the schema of the sampling fields, and is made of their declarations here.
`requests.js` makes the request, as a body and as commands to copy, and reads what comes back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.frontdoor.http import Document
from worker.sampling import Control, SamplingParams, sampling_controls
from worker.sampling.control import Integer, Number

PAGE = "/playground"

POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
"""Rules for the page: it loads its own files, sends requests to its own origin, and makes no markup
of text, so that a model's answer stays text even where the page had a mistake.
"""

_HEADERS = "".join(
    f"{name}: {value}\r\n"
    for name, value in (
        ("content-security-policy", POLICY),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-cache"),
    )
).encode()

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".svg": b"image/svg+xml",
}


_STOP = {
    "type": "array",
    "description": "Texts that end the answer.",
    "items": {"type": "string", "minLength": 1},
    "maxItems": 4,
}


def documents(record: type[SamplingParams] = SamplingParams) -> Mapping[str, Document]:
    """The page and its files, by path; it offers the controls of ``record``."""
    files = (each for each in Path(__file__).parent.iterdir() if each.suffix in _TYPES)
    found = {_path(each.name): Document(_TYPES[each.suffix], each.read_bytes(), _HEADERS) for each in files}
    script = f"export const SAMPLING = {json.dumps(sampling_schema(record))};\n"
    return found | {_path("sampling.js"): Document(_TYPES[".js"], script.encode(), _HEADERS)}


def sampling_schema(record: type[SamplingParams]) -> dict[str, Any]:
    """JSON Schema of the sampling fields that the page offers: numbers, then stops and switches.

    Controls that are made processors before an engine sees them are offered as processors.
    """
    defaults = record()
    offered = [one for one in sampling_controls(record) if one.is_client_field and one.refused is None]
    numbers = {one.name: _number(one, one.bounds) for one in offered if one.bounds is not None}
    switches = {
        one.name: {"type": "boolean", "description": one.summary, "default": default}
        for one in offered
        if isinstance(default := getattr(defaults, one.name), bool)
    }
    return {"type": "object", "properties": {**numbers, "stop": _STOP, **switches}}


def _number(control: Control, bounds: Number | Integer) -> dict[str, Any]:
    return {**(control.frontend_bounds or bounds).json_schema, "description": control.summary}


def _path(name: str) -> str:
    return PAGE if name == "index.html" else f"{PAGE}/{name}"
