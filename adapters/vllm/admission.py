"""Admission, in the process of vLLM's frontend: what cannot be kept is refused before it runs."""

from __future__ import annotations

import sys
from asyncio import get_running_loop
from typing import Any

from adapters.catalog import SelectionError
from adapters.vllm.grammars import wait_compiled, wanted_grammars
from adapters.vllm.metrics import publish
from adapters.vllm.model import model_of
from adapters.vllm.requests import REPORT, SELECTION, Params, chain_of, read


def check(params: Params) -> None:
    """Build the chain of a request once, so that every problem is found: grammars are compiled.

    Raises:
        ValueError: the request cannot be kept; the message has the JSON path.
        NotCompiled: a grammar is not compiled yet, and others would wait for it.
    """
    config = _config_of_caller()
    if config is None:
        raise RuntimeError("validate_params was not called by a part of vLLM that has a vllm_config")
    publish(config)
    model = model_of(config)
    try:
        asked = read(params, model, drawn_seed=0)
        if asked is None:
            return
        wanted = wanted_grammars(asked.selection, asked.context, model)
        compiled = wait_compiled(wanted, model, holds_others=_is_in_event_loop())
        chain_of(asked, params, model)
        del compiled  # until here they were in use, so the chain's processors found them in the cache
    except SelectionError as error:
        raise ValueError(_told(error, params)) from None


def _told(error: SelectionError, params: Params) -> str:
    """The error; paths in the selection come with the key of ``extra_args`` that holds it."""
    if error.path.partition(".")[0] in (REPORT, *params.__struct_fields__):
        return str(error)
    return f"{SELECTION}.{error}" if error.path else f"{SELECTION}: {error.problem}"


def _is_in_event_loop() -> bool:
    """Whether this runs in the event loop of a server; `vllm.LLM` has none."""
    try:
        get_running_loop()
    except RuntimeError:
        return False
    return True


def _config_of_caller() -> Any:
    """The configuration of the engine whose frontend validates parameters, None if there is none.

    vLLM calls a class method with the parameters alone; the ``InputProcessor`` that asks, a few
    frames up, has the configuration. One process may hold several engines.
    """
    frame = sys._getframe(1)
    while frame is not None:
        config = getattr(frame.f_locals.get("self"), "vllm_config", None)
        if config is not None:
            return config
        frame = frame.f_back  # type: ignore[assignment]
    return None
