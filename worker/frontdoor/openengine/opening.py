"""The frontend before workers behind OpenEngine, as the options of the front door ask for it."""

from __future__ import annotations

import time
from pathlib import Path

from worker.arguments import keys_in
from worker.errors import StartupError
from worker.frontdoor.openengine.exchange import Engines
from worker.frontdoor.openengine.frontend import EngineFrontend
from worker.frontdoor.openengine.prompts import Prompts
from worker.frontdoor.openengine.thinking import PARSERS
from worker.frontdoor.openengine.workers import Access, EngineWorker, Workers
from worker.frontdoor.options import Options


def open_engines(options: Options) -> EngineFrontend:
    """The frontend of ``options``; nothing has been sent.

    Raises:
        StartupError: a file cannot be read, or the parser of reasoning is none of `PARSERS`.
    """
    assert options.model_path is not None, "parse_options has checked it"
    parser, template = options.dyn_reasoning_parser, options.custom_jinja_template
    if parser is not None and parser not in PARSERS:
        known = ", ".join(sorted(PARSERS))
        raise StartupError(f"--dyn-reasoning-parser must be one of {known} with an --upstream of grpc://, got {parser}")
    tokens = keys_in(options.upstream_token_file, "--upstream-token-file")
    access = Access(_certificates(options.upstream_ca_file), tokens[0] if tokens else None)
    prompts = Prompts.load(Path(options.model_path), None if template is None else Path(template))
    workers = Workers([EngineWorker(address, access, prompts.vocabulary.digest) for address in options.engines])
    return EngineFrontend(Engines(workers, prompts, None if parser is None else PARSERS[parser], int(time.time())))


def _certificates(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"--upstream-ca-file {path}: {error.strerror or error}") from None
