"""Every path that is served, by which methods, and by whom; all others are refused by name.

A frontend has more paths than those that generate text: its ``POST /busy_threshold`` makes a router
shed other clients' requests. So a path passes only if it has a row here. `docs/front-door.md` shows
the table, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from adapters.catalog import Catalog
from worker import __version__
from worker.frontdoor.elsewhere import ELSEWHERE, instead_of
from worker.frontdoor.error_forms import ErrorForm
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT, COMPLETIONS, TABLES, ClientField
from worker.frontdoor.values import printable

By = Literal["checked", "frontend", "health", "metrics", "document", "handler"]

CATALOGUE = "/v1/logits_processors"
OPENAPI = "/openapi.json"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
FILES = "/v1/files"
BATCHES = "/v1/batches"
_READ = ("GET", "HEAD")
_NAME = r"[A-Za-z0-9._~%:@+-]+"
"""A part of a model's name in a path."""
_STAYS = r"(?!.*(?:/|%2[Ff])(?:\.|%2[Ee]){1,2}(?:/|%2[Ff]|$))"
"""Begins the pattern of a path with names, none of which leads elsewhere: a proxy before the
frontend may decode a path, and follow its dots.
"""
_BETA = ("beta",)
"""Parameter that Anthropic's clients send with every request of their beta; it changes nothing."""
_ID = r"[A-Za-z0-9_-]{1,128}"


@dataclass(frozen=True, slots=True)
class Route:
    """One path.

    Attributes:
        path: Path in OpenAPI's form: ``{model}`` stands for a model's name.
        methods: HTTP methods that it takes.
        by: ``checked``: the frontend, once every field is; ``frontend``: it alone; ``health`` and
            ``metrics``: the frontend, and the answer is made anew; ``document``: the front door;
            ``handler``: a coroutine of `handlers`.
        summary: One sentence for the table of `docs/front-door.md`.
        needs_key: False for what a probe reads.
        pattern: Matches the path, if it stands for several.
        errors: Form of the bodies of errors.
        takes_uploads: Whether the body of a POST goes to the disk as it comes, and may be larger.
        query: Parameters of the query, None where the handler or the frontend reads them.
    """

    path: str
    methods: tuple[str, ...]
    by: By
    summary: str
    needs_key: bool = True
    pattern: re.Pattern[str] | None = None
    errors: ErrorForm = "openai"
    takes_uploads: bool = False
    query: tuple[str, ...] | None = None

    def names(self, path: str) -> Mapping[str, str]:
        """The values that ``path`` has for the placeholders of the route's path."""
        found = self.pattern.fullmatch(path) if self.pattern is not None else None
        return {} if found is None else found.groupdict()


def handled(
    path: str,
    methods: tuple[str, ...],
    summary: str,
    errors: ErrorForm = "openai",
    *,
    needs_key: bool = True,
    takes_uploads: bool = False,
    query: tuple[str, ...] | None = None,
) -> Route:
    """The route of a path that a handler answers; ``{name}`` in it stands for an id."""
    pattern = re.compile(re.sub(r"\{(\w+)\}", rf"(?P<\1>{_ID})", path)) if "{" in path else None
    return Route(path, methods, "handler", summary, needs_key, pattern, errors, takes_uploads, query)


ROUTES: tuple[Route, ...] = (
    Route(CHAT, ("POST",), "checked", "Chat, as OpenAI's; every field is honoured or refused.", query=()),
    Route(COMPLETIONS, ("POST",), "checked", "Completion, as OpenAI's; every field is honoured or refused.", query=()),
    handled("/v1/responses", ("POST",), "Responses, as OpenAI's ([responses](responses.md)).", query=()),
    handled("/v1/responses/input_tokens", ("POST",), "The number of tokens of a response's prompt.", query=()),
    handled("/v1/responses/{id}", ("GET", "DELETE"), "A stored response."),
    handled("/v1/responses/{id}/cancel", ("POST",), "Ends a background response."),
    handled("/v1/responses/{id}/input_items", ("GET",), "The items before a stored response's output."),
    handled(
        MESSAGES,
        ("POST",),
        "Chat, as Anthropic's Messages; every field is honoured or refused.",
        errors="anthropic",
        query=_BETA,
    ),
    handled(COUNT_TOKENS, ("POST",), "Tokens of the prompt of such a request.", errors="anthropic", query=_BETA),
    Route("/v1/models", _READ, "frontend", "The models that are served."),
    Route(
        "/v1/models/{model}",
        _READ,
        "frontend",
        "One of them, or `/ready` behind it: whether it can answer.",
        pattern=re.compile(rf"{_STAYS}/v1/models(?:/{_NAME})+"),
    ),
    Route(
        CATALOGUE, _READ, "document", "The processors that requests may name, with a JSON Schema of their arguments."
    ),
    handled(
        FILES,
        ("GET", "POST"),
        "The files of the client; POST uploads one, as OpenAI's, with the requests of a batch.",
        takes_uploads=True,
    ),
    handled(f"{FILES}/{{id}}", ("GET", "DELETE"), "One of them; DELETE deletes it."),
    handled(f"{FILES}/{{id}}/content", ("GET",), "Its content."),
    handled(
        BATCHES, ("GET", "POST"), "The batches of the client; POST begins one, as OpenAI's, of the requests in a file."
    ),
    handled(f"{BATCHES}/{{id}}", ("GET",), "One of them: how far it is."),
    handled(f"{BATCHES}/{{id}}/cancel", ("POST",), "Ends it early, with the results that there are."),
    handled(
        "/generate",
        ("POST",),
        "Token ids or text to token ids, as SGLang's ([rollouts](request.md#rollouts)).",
        query=(),
    ),
    handled("/inference/v1/generate", ("POST",), "Token ids to token ids, as vLLM's.", query=()),
    handled("/tokenize", ("POST",), "The token ids of a prompt or of a chat's messages, as vLLM's.", query=()),
    handled("/detokenize", ("POST",), "The text of token ids, at most 1,000,000 of them, as vLLM's.", query=()),
    handled("/version", ("GET",), "The version of this server, as vLLM's.", query=()),
    handled("/ping", ("GET", "POST"), "An empty 200 where models are served.", needs_key=False, query=()),
    Route("/health", _READ, "health", "Whether models are served: the frontend's status.", needs_key=False),
    Route("/live", _READ, "frontend", "Whether the frontend lives.", needs_key=False),
    Route(
        "/metrics",
        _READ,
        "metrics",
        "Prometheus metrics of the frontend, and of workers that `--worker-metrics` names.",
    ),
    Route(OPENAPI, _READ, "document", "This table, and the fields of requests, as OpenAPI."),
)


_CONTROL = "As SGLang's, passed on to all workers ([rollouts](recipes/rollouts.md#slime-and-verl))."
CONTROLS: tuple[Route, ...] = (
    *(
        handled(path, ("GET",), _CONTROL, query=())
        for path in ("/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info")
    ),
    handled("/get_weight_version", ("GET",), _CONTROL, query=()),
    handled("/v1/loads", ("GET",), _CONTROL, query=("include",)),
    handled("/flush_cache", ("GET", "POST"), _CONTROL, query=()),
    *(
        handled(path, ("POST",), _CONTROL, query=())
        for path in (
            *("/abort_request", "/pause_generation", "/continue_generation"),
            *("/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk"),
        )
    ),
)
"""Routes of a front door that has ``--engine-url``."""


class Routes:
    """The routes of one front door.

    Args:
        documents: Paths of further documents of its own, which are served without a key.
        has_controls: Whether `CONTROLS` are among them.
    """

    def __init__(self, documents: Sequence[str] = (), *, has_controls: bool = False) -> None:
        own = [Route(path, _READ, "document", "A file of the playground.", needs_key=False) for path in documents]
        self.table = (*ROUTES, *(CONTROLS if has_controls else ()), *own)
        self._exact = {route.path: route for route in self.table if route.pattern is None}
        self._patterns = [route for route in self.table if route.pattern is not None]

    def at(self, path: str) -> Route | None:
        """The route of a path, None if it is not served."""
        found = self._exact.get(path)
        if found is None and path not in ELSEWHERE:
            matches = (each for each in self._patterns if each.pattern is not None and each.pattern.fullmatch(path))
            found = next(matches, None)
        return found

    def check(self, route: Route | None, method: str, path: str) -> Route:
        """``route``, if it may be asked for with ``method``.

        Raises:
            Refused: 404 or 405, with the path's name.
        """
        if route is None:
            instead = instead_of(path)
            reason = "" if instead is None else f": {instead}"
            problem = f"{printable(path)} is not served here{reason}; {OPENAPI} lists what is"
            raise Refused(404, problem, code="unsupported_endpoint")
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            raise Refused(
                405,
                f"{printable(path)} is not served for {printable(method)}; use {allowed}",
                code="unsupported_method",
                headers=b"allow: %b\r\n" % allowed.encode(),
            )
        return route


def openapi(routes: Routes, catalog: Catalog) -> dict[str, Any]:
    """The OpenAPI document of what is served."""
    paths = {
        route.path: {method.lower(): _operation(route, catalog) for method in route.methods if method != "HEAD"}
        for route in routes.table
    }
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dynamo-logits-worker front door",
            "version": __version__,
            "description": "Every field of a request is honoured, or refused with a 400 that names it.",
        },
        "paths": paths,
        "components": {"securitySchemes": {"key": key}, "schemas": {"Error": _ERROR}},
    }


def _operation(route: Route, catalog: Catalog) -> dict[str, Any]:
    failed = {"description": "An error", "content": _json({"$ref": "#/components/schemas/Error"})}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "responses": {"200": {"description": "The answer"}, "default": failed},
        "security": [{"key": []}, {}] if route.needs_key else [{}],
    }
    names = re.findall(r"\{(\w+)\}", route.path)
    if names:
        text = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    if route.by == "checked":
        operation["requestBody"] = {"required": True, "content": _json(_body(route.path, catalog))}
    return operation


def _body(path: str, catalog: Catalog) -> dict[str, Any]:
    properties = {field.name: dict(_property(field)) for field in TABLES[path].values()}
    properties["logits_processors"]["x-processors"] = list(catalog.names)
    prompts = ("messages", "prompt") if path == CHAT else ("prompt",)  # a chat's may be token ids
    return {
        "type": "object",
        "properties": properties,
        "required": ["model"],
        "anyOf": [{"required": [name]} for name in prompts],
        "additionalProperties": False,
    }


def _property(field: ClientField) -> Iterator[tuple[str, Any]]:
    if field.fate != "refused":
        yield "description", field.why
        return
    yield "description", f"Refused: {field.why}."
    yield "enum", [None, *field.neutral]


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}
