"""Forms of an error's body: that of OpenAI's API, and that of Anthropic's on its paths."""

from __future__ import annotations

import json
from typing import Any, Literal

from worker.frontdoor.errors import Refused

ErrorForm = Literal["openai", "anthropic"]

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types of errors of Anthropic's API by HTTP status; another 4xx is an invalid request."""


def error_content(refused: Refused, form: ErrorForm, request_id: str) -> dict[str, Any]:
    """The JSON object of an error.

    Args:
        refused: The error.
        form: Name of the API that the client speaks.
        request_id: Id of the request.
    """
    if form == "openai":
        return refused.content()
    kind = _ANTHROPIC_TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": refused.message}
    if refused.code is not None:
        error["details"] = {"error_code": refused.code}
    return {"type": "error", "error": error, "request_id": request_id}


def error_body(refused: Refused, form: ErrorForm, request_id: str) -> bytes:
    """`error_content`, encoded."""
    return json.dumps(error_content(refused, form, request_id), separators=(",", ":")).encode()
