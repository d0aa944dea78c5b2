"""A chat or completion request on its way to the frontend: refused, left as it is, or rewritten."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adapters.catalog import ANNOTATION, MAX_CHOICES, Catalog, Selection, SelectionError, parse_selection
from adapters.catalog.selection import MAX_BYTES
from adapters.strict_json import LoneSurrogate, RepeatedKey, read_object
from worker.errors import InvalidRequest
from worker.frontdoor import structured_outputs
from worker.frontdoor.client_names import METADATA_HEADER, SELECTION_FIELD, Naming, selection_names, worker_names
from worker.frontdoor.encoding import encoded
from worker.frontdoor.errors import FieldRefused, Refused
from worker.frontdoor.field_checks import Body
from worker.frontdoor.field_processors import FieldProcessor, bias_as_processor, controls_as_processors
from worker.frontdoor.field_types import is_one_of
from worker.frontdoor.fields import CHAT, ClientField, instead_of, tables
from worker.frontdoor.guides import guide_as_processor
from worker.frontdoor.nvext import annotations_of
from worker.frontdoor.tool_choice import allowed_places, with_allowed_tools
from worker.frontdoor.tool_texts import write_tools_as_text
from worker.frontdoor.tools import (
    ToolCallSettings,
    check_without_format,
    structural_tag_as_processor,
    take_moot_format,
    tools_as_processor,
)
from worker.frontdoor.values import printable, shown
from worker.requests.fields import client_annotations
from worker.runtimes.direct.contents import normalised
from worker.sampling import SamplingParams

_NO_SELECTION: tuple[Any, ...] = ([], {})
_ROOM_OF_OTHERS = 64
"""Bytes of a selection beside what it has and the text of a prediction: names, and the choice."""

TOO_DEEP = "the body is nested too deep"
HALF_A_PAIR = "the body has half of a surrogate pair"

_SIGNED = 2**63

_MARK_BITS = 256
"""Bits of a random number that no client can have written into its request."""


def rewritten_fields(
    path: str,
    fields: Body,
    headers: Mapping[bytes, bytes],
    catalog: Catalog,
    calls: ToolCallSettings | None = None,
    body: bytes | None = None,
    *,
    carries_guides: bool = False,
    max_bytes: int | None = None,
    record: type[SamplingParams] = SamplingParams,
) -> tuple[bytes, ...]:
    """The bodies to send on, one per choice: ``body`` itself if there is nothing to change.

    Args:
        path: A key of `TABLES`.
        fields: The client's fields, which are changed.
        headers: Headers of the request, names in lower case.
        catalog: The processors that requests may name.
        calls: Settings of the models' tool calls, None if their format is not known.
        body: Encoding of the fields, which is sent on as it is if nothing is changed.
        carries_guides: Guides become processors, so that the frontend migrates the request.
        max_bytes: Limit for the bodies of several choices together.
        record: Class whose controls are fields of requests.

    Raises:
        Refused: 400, naming the field, for what would be dropped or would fail behind; 413 beyond
            ``max_bytes``.
    """
    try:
        _check(path, tables(record)[path], fields, catalog)
        own_path, changes = _in_usual_forms(fields)
        guided = carries_guides and METADATA_HEADER not in headers
        try:
            changed = _rewrite(tables(record)[path], fields, headers, catalog, calls, guided)
        except FieldRefused as refused:
            param = None if refused.param is None else own_path(refused.param)
            if param == refused.param:
                raise
            raise refused.renamed(param) from None
        changed |= changes or "n" in fields
        num_choices = fields.pop("n", 1)
        first = _encoded(fields) if changed or body is None else body
        if num_choices == 1:
            return (first,)
        if METADATA_HEADER in headers:
            raise FieldRefused("n", f"cannot be given beside the header {METADATA_HEADER.decode()}")
        if max_bytes is not None and len(first) * num_choices > max_bytes:  # before they are made
            raise Refused(413, f"n: {num_choices} choices make more than {max_bytes} bytes of requests", "n")
        return (first, *_other_choices(fields, num_choices))
    except RecursionError:
        raise Refused(400, TOO_DEEP) from None


_TOOL = re.compile(r"tools\[(\d+)\](.*)", re.DOTALL)


def _in_usual_forms(fields: Body) -> tuple[Naming, bool]:
    """Put what a client says in a form of its own into the usual one: allowed tools, a guide of
    ``structured_outputs``, a format that concerns nothing.

    Args:
        fields: The client's fields, which are changed.

    Returns:
        Function from a path in the changed fields to that of the client's; whether they changed.

    Raises:
        FieldRefused: see `allowed_places`.
    """
    allowed = allowed_places(fields)
    if allowed is not None:
        fields.update(with_allowed_tools(fields))
    guides, is_moot = structured_outputs.take(fields), take_moot_format(fields)

    def own_path(path: str) -> str:
        found = _TOOL.fullmatch(path)
        if allowed is not None and found is not None:
            return f"tools[{allowed[int(found[1])]}]{found[2]}"
        return guides.get(path, path)

    return own_path, allowed is not None or bool(guides) or is_moot


def _rewrite(
    table: Mapping[str, ClientField],
    fields: Body,
    headers: Mapping[bytes, bytes],
    catalog: Catalog,
    calls: ToolCallSettings | None,
    carries_guides: bool,
) -> bool:
    """Make ``fields`` those of the frontend; whether that changed them."""
    num_fields = len(fields)
    given = _with_known_messages(fields)
    choice = fields.get("tool_choice")
    processors = _as_processors(table, fields, calls, carries_guides)
    if calls is not None and calls.support is not None:
        given |= write_tools_as_text(fields, calls.support, choice)
    given |= _with_selection(fields, processors, headers, catalog)
    given |= _without_idle_fields(table, fields)
    given |= _with_whole_stream_options(fields)
    given |= _with_signed_seed(fields)
    return given or len(fields) != num_fields


def names_of(
    path: str,
    fields: Body,
    headers: Mapping[bytes, bytes],
    calls: ToolCallSettings | None = None,
    *,
    carries_guides: bool = False,
) -> Naming:
    """Function from a path in an error of the worker to that of the client's field.

    Args:
        path: A key of `TABLES`.
        fields: The client's fields, which `rewritten_fields` takes.
        headers: See `rewritten_fields`.
        calls: See `rewritten_fields`.
        carries_guides: See `rewritten_fields`.
    """
    chosen = fields.get(SELECTION_FIELD)
    selection = _selection_in(_places_in(fields), chosen)
    carries_guides = carries_guides and METADATA_HEADER not in headers
    fields = dict(fields)
    own_path, _ = _in_usual_forms(fields)
    made = _as_processors(tables(SamplingParams)[path], dict(fields), calls, carries_guides)
    named = worker_names(path, fields, selection_names(selection.get("processors", ()), made, chosen))
    return lambda worker_path: own_path(named(worker_path))


def deadline_of(fields: Body, headers: Mapping[bytes, bytes]) -> float | None:
    """Time at which the answer to a request ends at the latest, seconds since 1970; None without.

    Args:
        fields: The client's fields, which `rewritten_fields` takes.
        headers: See `rewritten_fields`.
    """
    if METADATA_HEADER in headers:
        selection: dict[str, Any] = json.loads(headers[METADATA_HEADER].decode("latin-1"))
    else:
        selection = _selection_in(_places_in(fields), fields.get(SELECTION_FIELD))
    return selection.get("deadline")


def _as_processors(
    table: Mapping[str, ClientField], fields: Body, calls: ToolCallSettings | None, carries_guides: bool
) -> list[FieldProcessor]:
    """The processors of ``fields``; what the frontend no longer needs of them is taken out."""
    if calls is None:
        check_without_format(fields)
        if fields.get("tools") and fields.get("tool_choice") == "none":
            del fields["tools"], fields["tool_choice"]  # a call that the prompt suggests would be text
    found = [
        *controls_as_processors(fields, table),
        bias_as_processor(fields.pop("logit_bias", None)),
        structural_tag_as_processor(fields),
        None if calls is None else tools_as_processor(fields, calls),
        guide_as_processor(fields) if carries_guides else None,
    ]
    return [one for one in found if one is not None]


def parsed(body: bytes) -> Body:
    """The object that ``body`` is.

    Raises:
        Refused: it is no JSON object, or one that two parsers may read in two ways.
    """
    try:
        return read_object(body)
    except RepeatedKey as error:
        raise FieldRefused(error.path, "occurs twice in one object") from None
    except LoneSurrogate as error:
        raise FieldRefused(error.path, "has half of a surrogate pair") from None
    except ValueError as error:
        raise Refused(400, f"the body {error}") from None


def _encoded(fields: Body) -> bytes:
    try:
        return encoded(fields)
    except UnicodeEncodeError:
        raise Refused(400, HALF_A_PAIR) from None


def _check(path: str, table: Mapping[str, ClientField], fields: Body, catalog: Catalog) -> None:
    """Raises `FieldRefused` for fields and values that the endpoint's table refuses."""
    for name, value in fields.items():
        field = table.get(name)
        if field is None:
            hint = instead_of(name, table, catalog.names)
            raise FieldRefused(printable(name), f"is not a field of {path}{hint}", code="unknown_parameter")
        if field.fate == "refused" and not field.asks_for_nothing(value):
            raise FieldRefused(name, field.why, code="unsupported_parameter")
        if field.check is not None and value is not None:
            field.check(value, fields)
    for name in ("model", "messages" if path == CHAT else "prompt"):
        if fields.get(name) is None:
            raise FieldRefused(name, "must be given", code="missing_required_parameter")


def _with_known_messages(fields: Body) -> bool:
    """Make the messages those that chat templates know; whether that changed ``fields``.

    Clients send calls back without ``content``, or with null, and the frontend drops null: a chat
    template that joins role and content then fails, and the answer would be a 500.
    """
    given = fields.get("messages")
    messages = normalised(given)
    if messages == given:
        return False
    fields["messages"] = messages
    return True


def _without_idle_fields(table: Mapping[str, ClientField], fields: Body) -> bool:
    """Take out fields that ask for nothing, and may be unknown to the frontend; whether it did."""
    idle = [name for name, value in fields.items() if table[name].removed or table[name].asks_for_nothing(value)]
    for name in idle:
        del fields[name]
    return bool(idle)


def _with_signed_seed(fields: Body) -> bool:
    """Make a seed the integer of 64 bits with a sign that it equals modulo 2^64: Dynamo's frontend
    reads no other; whether that changed ``fields``.
    """
    seed = fields.get("seed")
    if seed is None or seed < _SIGNED:
        return False
    fields["seed"] = seed - 2 * _SIGNED
    return True


def _with_whole_stream_options(fields: Body) -> bool:
    """Take out null and `include_obfuscation` from ``stream_options``, and give it the usage that
    the frontend does not read it without; whether that changed ``fields``.
    """
    options = fields.get("stream_options")
    if not isinstance(options, dict):
        return False
    asked = {name: value for name, value in options.items() if value is not None and name != "include_obfuscation"}
    whole = {"include_usage": False, **asked} if asked else {}
    fields["stream_options"] = whole
    if not whole:
        del fields["stream_options"]
    return whole != options


def _with_selection(
    fields: Body, made: Sequence[FieldProcessor], headers: Mapping[bytes, bytes], catalog: Catalog
) -> bool:
    """Turn ``logits_processors``, ``made`` and ``prediction`` into the annotation that the worker
    reads; whether there is anything to turn.

    The selection is checked as far as that needs no model, wherever it came from.
    """
    prediction = _predicted_text(fields.pop("prediction", None))
    chosen = fields.pop(SELECTION_FIELD, None)
    places = _places_in(fields)
    header = headers.get(METADATA_HEADER)
    if len(places) + (header is not None) + (not is_one_of(chosen, _NO_SELECTION)) > 1:
        raise FieldRefused(
            SELECTION_FIELD, "processors are selected more than once; give one field, annotation or header"
        )
    if header is not None and made:
        raise FieldRefused(made[0].client_path(""), f"cannot be given beside the header {METADATA_HEADER.decode()}")
    if places:
        _checked(places[0][len(ANNOTATION) :], catalog, selection_names([], [], None))
    if header is not None and not header.isascii():
        raise FieldRefused(METADATA_HEADER.decode(), "must be ASCII: Dynamo's frontend drops any other value")
    if header is not None:
        _checked(header.decode("latin-1"), catalog, lambda path: f"{METADATA_HEADER.decode()}: {path}")
    if header is not None or (is_one_of(chosen, _NO_SELECTION) and not made and not prediction):
        return False

    selection = _selection_in(places, chosen)
    listed = list(selection.get("processors", ()))
    for each in made:
        each.refuse_named_too(listed)
    selection["processors"] = listed + [each.entry for each in made]
    if prediction and "prediction" not in selection:
        _predict(selection, prediction)
    text = json.dumps(selection, separators=(",", ":"))
    name = selection_names(listed, made, chosen)
    receipt = _checked(text, catalog, name).receipt
    _annotate(fields, places, ANNOTATION + text, bool(receipt), name)
    return True


def _places_in(fields: Body) -> list[str]:
    """The annotations that select processors."""
    return [text for text in annotations_of(fields.get("nvext")) if text.startswith(ANNOTATION)]


def _selection_in(places: Sequence[str], chosen: Any) -> dict[str, Any]:
    """The selection of an annotation, or that of the field where there is none."""
    return json.loads(places[0][len(ANNOTATION) :]) if places else _selection_of(chosen)


def _selection_of(chosen: Any) -> dict[str, Any]:
    """The selection that the field stands for: a list is one of processors, an object may leave
    out its version.
    """
    if is_one_of(chosen, _NO_SELECTION):
        return {"version": 1}
    if isinstance(chosen, list):
        return {"version": 1, "processors": chosen}
    if isinstance(chosen, dict) and isinstance(chosen.get("processors", []), list):
        return {"version": 1, **chosen}
    raise FieldRefused(SELECTION_FIELD, "must be a list of processors, or an object that has one as processors")


def _predicted_text(prediction: Mapping[str, Any] | None) -> str:
    """The text of OpenAI's ``prediction``, which has been checked."""
    content = "" if prediction is None else prediction["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _predict(selection: dict[str, Any], text: str) -> None:
    """Add a prediction, as much of its beginning as a selection has room for."""
    room = MAX_BYTES - _ROOM_OF_OTHERS - len(json.dumps(selection))
    text = text[: max(room, 0)]
    while text and (size := len(json.dumps(text))) > room:
        text = text[: len(text) * room // size]
    if text:
        selection["prediction"] = text


def _other_choices(fields: Body, num_choices: int) -> list[bytes]:
    """The bodies for all choices but the first: the selection says which. They differ in a number
    alone, so that the fields, which may be large, are encoded once.
    """
    places = _places_in(fields)
    selection = _selection_in(places, None)
    first = selection.get("choice", 0)
    last = first + num_choices - 1
    if last >= MAX_CHOICES:
        raise FieldRefused("n", f"ends at choice {last}, the highest is {MAX_CHOICES - 1}")
    found, mark = dict(fields), secrets.randbits(_MARK_BITS)  # which stands for the number
    _annotate(found, places, _chosen(selection, last), False, lambda path: SELECTION_FIELD)
    found["nvext"]["annotations"][-1] = _chosen(selection, mark)
    before, _, behind = _encoded(found).partition(b"%d" % mark)
    return [b"%b%d%b" % (before, choice, behind) for choice in range(first + 1, last + 1)]


def _chosen(selection: Mapping[str, Any], choice: int) -> str:
    """The annotation with a selection, for one choice."""
    return ANNOTATION + json.dumps({**selection, "choice": choice}, separators=(",", ":"))


def _checked(text: str, catalog: Catalog, name: Callable[[str], str]) -> Selection:
    try:
        selection = parse_selection(text)
        catalog.check(selection)
    except SelectionError as error:
        raise FieldRefused(name(error.path), error.problem) from None
    return selection


def _annotate(fields: Body, replaced: list[str], annotation: str, receipt: bool, name: Callable[[str], str]) -> None:
    nvext = fields.get("nvext")
    if nvext is not None and not isinstance(nvext, dict):
        raise FieldRefused("nvext", f"must be an object, got {shown(nvext)}")
    nvext = dict(nvext or {})
    others = [text for text in nvext.get("annotations") or () if text not in replaced]
    try:
        nvext["annotations"] = list(client_annotations("", [*others, annotation]))
    except InvalidRequest as error:
        raise FieldRefused(name(""), f"as an annotation, {error.problem}") from None
    if receipt:
        extra = nvext.get("extra_fields") or []
        if not isinstance(extra, list):
            raise FieldRefused("nvext.extra_fields", f"must be a list, got {shown(extra)}")
        nvext["extra_fields"] = [*extra, *(() if "engine_data" in extra else ("engine_data",))]
    fields["nvext"] = nvext
