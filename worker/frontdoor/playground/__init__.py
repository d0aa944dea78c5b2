"""The playground: a static web page that chats with the model and shows what processors did.

`index.html` is the page, `style.css` its looks, and `app.js` ties the scripts together: `answer.js`
shows an answer token by token, `processors.js` the processors that were picked. `forms.js` makes
forms from JSON Schemas, of the controls in `controls.js`; `schemas.js` says what the schemas stand
for. `requests.js` makes the request, as a body and as commands to copy, and reads what comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from worker.frontdoor.http import Document

PAGE = "/playground"

POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors", "trusted-types")),
        "require-trusted-types-for 'script'",
    )
)
"""What the page may load and do: its own files, requests to where it comes from, and no markup
from text, so that a model's answer stays text even where the page had a mistake.
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


def documents() -> Mapping[str, Document]:
    """The page and its files, by path."""
    files = (each for each in Path(__file__).parent.iterdir() if each.suffix in _TYPES)
    return {_path(each): Document(_TYPES[each.suffix], each.read_bytes(), _HEADERS) for each in files}


def _path(file: Path) -> str:
    return PAGE if file.name == "index.html" else f"{PAGE}/{file.name}"
