"""Grammars of requests to a stock vLLM server, compiled before anything waits for them.

vLLM admits requests in the event loop of its server, and applies processors in the step of its
engine: a wait in either holds every client. `Middleware` compiles a request's grammars before that.
Without it admission waits `WAIT_S` at most, and grammars that the engine could not compile within
`STEP_S` are refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from adapters.catalog import Selection, SelectionError
from adapters.contract import Context
from adapters.grammars.cache import FAST_S
from adapters.grammars.compile_threads import Compiled
from adapters.grammars.compiler import GrammarRefused
from adapters.grammars.sandbox import SandboxBusy, SandboxUnavailable
from adapters.processors.grammar import grammar_cache
from adapters.vllm.model import ServedModel
from adapters.vllm.requests import SELECTION, selection_of

WAIT_S = 0.5
"""Wall time for which admission waits for a request's grammars in an event loop, seconds."""

STEP_S = 1.0
"""Processor time, seconds, that a grammar may take to compile where the step may wait for it."""

FLAGS = "--middleware adapters.vllm.Middleware --worker-extension-cls adapters.vllm.extension.Extension"
"""Arguments of a server that lets slow grammars compile while their requests wait."""

BEAMS = "use_beam_search"
"""Field of requests to vLLM's server that ask for beam search."""

Wanted = Sequence[tuple[str, str]]
"""The path of each grammar in the selection, and the grammar in llguidance's JSON form."""


class NotApplied(Exception):
    """A request asks for processors where vLLM applies none."""


class NotCompiled(Exception):
    """A grammar is not compiled yet, or cannot be now: the request may be sent again."""


def wanted_grammars(selection: Selection, context: Context, model: ServedModel) -> Wanted:
    """The grammars of a selection.

    Raises:
        SelectionError: the arguments of one cannot be honoured.
        NotCompiled: none can be compiled.
    """
    if model.context.vocabulary.tokenizer is None or not model.catalog.has_grammars(selection):
        return []
    try:
        model.guard_grammars()
    except SandboxUnavailable as error:
        raise NotCompiled(f"{SELECTION}: no grammar can be compiled: the sandbox {error}") from None
    return model.catalog.grammars(selection, context)


def admitted_grammars(body: bytes, model: ServedModel) -> Wanted:
    """The grammars that the JSON body of a request to vLLM's server names, and the operator's; the
    body is read once, for these checks too.

    Raises:
        NotApplied: as `check_place` and `check_beams`.
        ValueError: it is not JSON, or its selection cannot be honoured.
        NotCompiled: none can be compiled.
    """
    data = json.loads(body)
    check_place(data)
    check_beams(data, model)
    return grammars_in(data, model)


def grammars_in(data: object, model: ServedModel) -> Wanted:
    """The grammars that a request to vLLM's server names, and the operator's.

    Raises:
        ValueError: its selection cannot be honoured.
        NotCompiled: none can be compiled.
    """
    named = selection_of(_extra_args(data).get(SELECTION))
    selection = model.policy.apply(named, model.catalog)
    ends = frozenset(model.context.vocabulary.eos_token_ids)
    return wanted_grammars(selection, replace(model.context, end_token_ids=ends), model)


def check_beams(data: object, model: ServedModel) -> None:
    """Refuse beam search with processors: vLLM asks for each of its steps without any.

    Args:
        data: A request to vLLM's server.
        model: The served model.

    Raises:
        NotApplied: it asks for beam search, and it or the operator names processors.
        ValueError: its selection cannot be honoured.
    """
    if not isinstance(data, dict) or not data.get(BEAMS):
        return
    selection = model.policy.apply(selection_of(_extra_args(data).get(SELECTION)), model.catalog)
    if selection.processors:
        names = ", ".join(each.name for each in selection.processors)
        raise NotApplied(f"{BEAMS}: vLLM's beam search applies no processors, and this request has {names}")


def check_place(data: object) -> None:
    """Refuse a selection where vLLM does not look for one: it ignores fields that it does not know.

    Args:
        data: A request to vLLM's server.

    Raises:
        NotApplied: the selection is a field of the body, or in another object than `_extra_args`.
    """
    if not isinstance(data, dict):
        return
    params = data.get("sampling_params")
    places = [("", data, "vllm_xargs")]
    if isinstance(params, dict):
        places = [("", data, "sampling_params.extra_args"), ("sampling_params.", params, "extra_args")]
    for prefix, fields, place in places:
        objects = [("", fields), *((f"{name}.", value) for name, value in fields.items() if name != place)]
        for name, found in objects:
            if isinstance(found, dict) and found.get(SELECTION) is not None:
                problem = f"vLLM looks for it in {places[0][2]} alone, and would answer without it"
                raise NotApplied(f"{prefix}{name}{SELECTION}: {problem}")


def wait_compiled(wanted: Wanted, model: ServedModel, *, holds_others: bool) -> list[Compiled]:
    """The grammars, compiled, which the cache finds again while they are held.

    Args:
        wanted: Grammars of one request.
        model: The served model.
        holds_others: Whether other requests wait for this call, and for the engine's step.

    Raises:
        SelectionError: one is refused, or too slow.
        NotCompiled: one is not compiled yet.
    """
    cache = grammar_cache(model.context.vocabulary)
    futures = [(path, grammar, cache.request(grammar)) for path, grammar in wanted]
    deadline, found = time.monotonic() + WAIT_S, []
    for path, grammar, future in futures:
        try:
            compiled = future.result(max(0.0, deadline - time.monotonic()) if holds_others else None)
        except TimeoutError:
            problem = f"is still being compiled; send the request again, or start the server with {FLAGS}"
            raise NotCompiled(f"{SELECTION}.{path}: {problem}") from None
        except GrammarRefused as error:
            raise SelectionError(path, str(error)) from None
        except (SandboxBusy, SandboxUnavailable) as error:
            raise NotCompiled(f"{SELECTION}.{path}: {error}; send the request again later") from None
        if holds_others and compiled.cpu_s > STEP_S and grammar not in model.prepared:
            problem = f"takes {compiled.cpu_s:.1f} s to compile, over the {STEP_S:g} s for which others may wait"
            raise SelectionError(path, f"{problem}; start the server with {FLAGS}")
        found.append(compiled)
    return found


def are_slow(compiled: Sequence[object], wanted: Wanted) -> list[str]:
    """The grammars that a step should not wait for, of those that were compiled."""
    pairs = zip(compiled, wanted, strict=True)
    return [grammar for found, (_, grammar) in pairs if isinstance(found, Compiled) and found.cpu_s > FAST_S]


def _extra_args(data: Any) -> dict[str, Any]:
    """``extra_args`` of a request, in the bodies of OpenAI's API or in those of vLLM's own."""
    found: Any = None
    if isinstance(data, dict):
        params = data.get("sampling_params")
        found = params.get("extra_args") if isinstance(params, dict) else data.get("vllm_xargs")
    return found if isinstance(found, dict) else {}
