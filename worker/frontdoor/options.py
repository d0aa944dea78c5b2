"""The front door's options, from the command line and the environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.calls import FORMATS
from adapters.contract import Scope
from worker.arguments import OPTIONS as WORKER_OPTIONS
from worker.arguments import StrictParser
from worker.arguments.kubernetes import without_services
from worker.arguments.option import dashed, from_environment, option, options_of
from worker.arguments.values import host, matching, positive_seconds, text, truth
from worker.errors import ConfigurationError
from worker.frontdoor.call_formats import AUTO, NONE, Model, marks_of_calls, support_of
from worker.frontdoor.engine_address import EngineAddress
from worker.frontdoor.field_checks import is_before_1_6
from worker.frontdoor.tools import ToolCallSettings
from worker.frontdoor.upstreams import Upstream

ENVIRONMENT_PREFIX = "FRONT_DOOR_"


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise ValueError("a port number")
    return int(text)


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise ValueError("an integer of at least 1")
    return int(text)


def _size(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("an integer of at least 0")
    return int(text)


def _rate(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        raise ValueError("a number of KiB per second")
    return float(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9._:-]+", name) for name in names):
        raise ValueError("host names without ports, separated by commas")
    return names


_header = matching(r"[A-Za-z0-9-]+", "the name of a header")


def _servers(text: str) -> tuple[Upstream, ...]:
    try:
        return tuple(Upstream.of(url.strip()) for url in text.split(","))
    except ValueError:
        raise ValueError("http://host:port, several separated by commas") from None


def _upstreams(text: str) -> tuple[Upstream, ...] | tuple[EngineAddress, ...]:
    if not text.startswith("grpc"):
        return _servers(text)
    try:
        return tuple(EngineAddress.of(url.strip()) for url in text.split(","))
    except ValueError:
        raise ValueError("grpc://host:port or grpcs://host:port, several separated by commas") from None


def _call_format(text: str) -> str:
    if text not in (AUTO, NONE, *FORMATS):
        raise ValueError(f"{AUTO}, {NONE} or one of {', '.join(FORMATS)}")
    return text


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip().rstrip("/").lower() for origin in text.split(","))
    if not all(re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:[0-9]{1,5})?|null", origin) for origin in origins):
        raise ValueError("origins such as https://example.com, separated by commas, or *")
    return origins


def _directory(given: str) -> str | None:
    return None if given == "off" else text(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Every option of ``python -m worker.frontdoor``; the table of `docs/front-door.md`."""

    host: str = option("127.0.0.1", "Address to serve on.", parse=host)
    port: int = option(
        8000, "Port to serve on; 0 takes a free one, which the first line of the log names.", parse=_port
    )
    reuse_port: bool = option(
        False,
        "Share the port with other front doors of this user that have this option: the kernel gives each a part of the "
        "connections (SO_REUSEPORT). Needs --response-store-mib 0, and no --batch-dir; true or false.",
        parse=truth,
    )
    upstream: tuple[Upstream, ...] | tuple[EngineAddress, ...] = option(
        (),
        "Dynamo frontends, http://host:port, separated by commas; requests go to them round robin. Or workers of "
        "--runtime openengine, grpc://host:port, or grpcs:// over TLS; requests go to the one that has the fewest. "
        "Required.",
        parse=_upstreams,
    )
    upstream_token_file: str | None = option(
        None, "File whose first line is the token of calls to workers behind OpenEngine.", parse=text
    )
    upstream_ca_file: str | None = option(
        None, "File of root certificates, PEM, of workers at grpcs://; by default those that gRPC brings.", parse=text
    )
    api_key_file: str | None = option(
        None, "File of API keys, one per line; every request needs one, except /health, /live and /ping.", parse=text
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names that Host headers may have beside localhost and the address served on, separated by commas. Without it "
        "Host is checked on loopback without API keys alone.",
        parse=_names,
    )
    client_header: str | None = option(
        None,
        "Header in which a trusted proxy says who a client is; without API keys clients take turns by it, or else by "
        "address.",
        parse=_header,
    )
    body_limit_mib: int = option(8, "Largest body of a request, MiB; a larger one gets a 413.", parse=_count)
    max_connections: int = option(
        4096,
        "Most client connections at a time; one more takes the place of the one that has waited for longest for a "
        "request, a second at least, or gets a 503. Fewer where the process may not have two open files for each "
        "(the hard limit of `ulimit -n`), which its log says then.",
        parse=_count,
    )
    header_timeout_s: float = option(
        10.0, "Seconds in which the head of a request must arrive.", parse=positive_seconds
    )
    body_timeout_s: float = option(60.0, "Seconds in which the body of a request must arrive.", parse=positive_seconds)
    body_rate_kib_s: float = option(
        1.0, "Lowest rate of a body, KiB per second; one that is slower for 10 seconds gets a 408.", parse=_rate
    )
    idle_timeout_s: float = option(75.0, "Seconds that a connection may be idle.", parse=positive_seconds)
    send_timeout_s: float = option(
        60.0,
        "Seconds for which a client may read nothing of its answer; then its request is cancelled.",
        parse=positive_seconds,
    )
    connect_timeout_s: float = option(2.0, "Seconds to wait for a connection to a frontend.", parse=positive_seconds)
    drain_timeout_s: float = option(
        120.0, "Seconds that in-flight answers get to finish after SIGTERM.", parse=positive_seconds
    )
    worker_metrics: tuple[Upstream, ...] = option(
        (),
        "System ports of workers, http://host:port, separated by commas, whose metrics /metrics has beside the "
        "frontend's.",
        parse=_servers,
    )
    engine_url: tuple[Upstream, ...] = option(
        (),
        "Engine ports of all workers, http://host:port, separated by commas, to which SGLang's control routes are "
        "passed on: whoever reaches this server, and has a key of --api-key-file if there is one, then owns the "
        "models.",
        parse=_servers,
    )
    engine_key_file: str | None = option(
        None, "File whose first line is the key for --engine-url; needed with it.", parse=text
    )
    tool_call_format: str = option(
        AUTO,
        f"How the models write tool calls, which are held to their tools: {', '.join(FORMATS)}; {NONE}, which holds "
        f"only forced calls to anything; or {AUTO}: the workers' --dyn-tool-call-parser, or else what the chat "
        "template of --model-path says.",
        parse=_call_format,
    )
    response_store_mib: int = option(
        64,
        "Memory for stored responses of /v1/responses, MiB; the client with most of it loses what it has not used for "
        "longest. 0 stores none.",
        parse=_size,
    )
    model_path: str | None = option(
        None,
        "Directory, GGUF file or id of the model that the workers serve, for its tokenizer and its chat template; by "
        "default the workers' --model-path.",
        parse=text,
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may read answers (CORS), separated by commas, or * for all; none by default.",
        parse=_origins,
    )
    playground: bool = option(
        False, "Serve a web page at /playground to try the model and its processors; true or false.", parse=truth
    )
    batch_dir: str | None = option(
        None,
        "Directory in which files and batches are kept, for one front door at a time; without it, or with off, they "
        "are off.",
        parse=_directory,
    )
    batch_file_limit_mib: int = option(200, "Largest file of a batch, MiB; a larger one gets a 413.", parse=_count)
    batch_storage_mib: int = option(
        4096,
        "MiB of all files together, results among them, beyond which uploads and new batches get a 413.",
        parse=_count,
    )
    batch_concurrency: int = option(8, "Requests of all batches that are under way at a time.", parse=_count)
    revision: str | None = None
    logits_processor: tuple[str, ...] = ()
    allow_logits_processors: tuple[str, ...] = ()
    custom_jinja_template: str | None = None
    dyn_tool_call_parser: str | None = None
    dyn_reasoning_parser: str | None = None
    migration: str = "off"

    @property
    def frontends(self) -> tuple[Upstream, ...]:
        """Dynamo's frontends; none where workers are asked."""
        return tuple(each for each in self.upstream if isinstance(each, Upstream))

    @property
    def engines(self) -> tuple[EngineAddress, ...]:
        """The workers that are asked without Dynamo's frontend; none where frontends are."""
        return tuple(each for each in self.upstream if isinstance(each, EngineAddress))

    @property
    def carries_guides(self) -> bool:
        """Whether grammars go to the workers as processors: Dynamo's frontend does not migrate
        guides. With a reasoning parser they stay guides, because those begin after the thinking.
        """
        return self.migration == "on" and self.dyn_reasoning_parser is None

    @property
    def frontend_misreads(self) -> bool:
        """Whether the frontend takes a JSON answer that is not streamed for a call, if it has a
        text ``name`` at its top: hermes up to 1.4.2, whether or not the request has tools.
        """
        return self.dyn_tool_call_parser == "hermes" and is_before_1_6() and not self.engines

    @property
    def calls(self) -> ToolCallSettings | None:
        """Format in which the models write tool calls, None if calls are not held to anything."""
        wanted = self.tool_call_format
        if wanted == AUTO and self.dyn_tool_call_parser is not None:
            wanted = self.dyn_tool_call_parser if self.dyn_tool_call_parser in FORMATS else NONE
        support = support_of(wanted, Model(self.model_path, self.custom_jinja_template))
        if support is None:
            return None
        has_channels = FORMATS[support.format].channels is not None  # of which one has the thinking
        scope: Scope = "answer" if self.dyn_reasoning_parser and not has_channels else "all"
        left_out = None if support.is_whole else support
        return ToolCallSettings(
            support.format,
            scope,
            frontend_parses=self.dyn_tool_call_parser is not None and not self.engines,
            special_tokens=marks_of_calls(support.format, self.model_path),
            support=left_out,
        )


OPTIONS = options_of(Options, ENVIRONMENT_PREFIX)


def parse_options(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Options:
    """Read the options: the command line wins over the environment, both over the defaults.

    Arguments after ``--`` are those of the workers behind: which third-party processors they take,
    the front door takes too, their tool-call parser, and whether they migrate. The workers'
    environment variables count as well.

    Raises:
        ConfigurationError: an option is unknown, malformed or missing.
        SystemExit: ``--help`` was given.
    """
    environ = without_services(os.environ if environ is None else environ)
    parser = StrictParser(
        prog="python -m worker.frontdoor",
        description="An OpenAI-compatible endpoint before Dynamo's frontends: every control arrives or is refused.",
        epilog="Arguments after -- are the workers'; those about processors and parsers count here too.",
        allow_abbrev=False,
    )
    for one in OPTIONS:
        one.add_to(parser)
    own, workers = _divided(sys.argv[1:] if argv is None else argv)
    given = vars(parser.parse_args(own))
    values = from_environment(OPTIONS, ENVIRONMENT_PREFIX, environ)
    for one in OPTIONS:
        texts = given[one.name] or []
        if len(texts) > 1:
            raise ConfigurationError(f"{one.flag} is given {len(texts)} times")
        if texts:
            values[one.name] = one.read(texts[0], one.flag)
    if not values.get("upstream"):
        raise ConfigurationError("--upstream is required")
    options = Options(**_of_workers(workers, environ) | values)
    if not options.engines and (options.upstream_token_file or options.upstream_ca_file):
        raise ConfigurationError("--upstream-token-file and --upstream-ca-file are for an --upstream of grpc://")
    if bool(options.engine_url) != bool(options.engine_key_file):
        raise ConfigurationError("--engine-url and --engine-key-file need each other")
    if options.engines and options.model_path is None:
        raise ConfigurationError("--upstream grpc:// needs --model-path, for the tokenizer and the chat template")
    if options.reuse_port and (options.response_store_mib or options.batch_dir is not None):
        raise ConfigurationError(
            "--reuse-port needs --response-store-mib 0 and no --batch-dir: another front door of the port would not "
            "find what this one stores"
        )
    return options


def _divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and behind the first ``--``."""
    arguments = list(argv)
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:place], arguments[place + 1 :]


_WORKERS = (
    "model_path",
    "revision",
    "logits_processor",
    "allow_logits_processors",
    "custom_jinja_template",
    "dyn_tool_call_parser",
    "dyn_reasoning_parser",
    "migration",
)


def _of_workers(workers: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Options of the workers that matter for requests, from their arguments and environment: the
    third-party processors that they take, which models they serve and how those write tool calls
    and thinking, and whether requests migrate.
    """
    options = [one for one in WORKER_OPTIONS if one.name in _WORKERS]
    parser = StrictParser(allow_abbrev=False, add_help=False)
    for one in options:
        parser.add_argument(one.flag, dest=one.name, action="append")
    own = {one.flag for one in options}
    given = vars(parser.parse_known_args(dashed(workers, own))[0])  # the rest is the workers' alone
    found = {}
    for one in options:
        texts = given[one.name] or []
        text = ",".join(texts if one.many else texts[-1:]) or environ.get(one.env)
        if text:
            found[one.name] = one.read(text, one.flag)
    return found
