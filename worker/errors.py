"""Errors of serving, one class per row of the failure contract (`docs/failures.md`).

The engines and the request parser raise these; a runtime (`worker/runtimes/`) maps them to its own
errors.
"""

import re
from collections.abc import Mapping
from typing import Any

KV_TRANSFER_FIELD = "prefill_result.disaggregated_params"
"""The field of a request in which a KV transfer is offered to the decode worker."""


PROMPT_TOO_LONG = "prompt is too long:"
"""Begins the problem of a prompt beyond the context. Clients of Anthropic's API know it by these
words, those of OpenAI's by "maximum context length", and then ask again with less.
"""

MAX_PATH = 200
"""Characters of a field's path in an error: its keys may be a client's, of any length."""


class ServingError(Exception):
    """Base of every error that the worker raises on purpose."""


class InvalidRequest(ServingError):
    """The caller's fault. The message names the field and what was expected.

    Args:
        field: Path of the field in the request, for example ``sampling_options.top_p``.
        problem: The expected value and the given one: ``must be between 0 and 1, got 7``.
    """

    def __init__(self, field: str, problem: str) -> None:
        if len(field) > MAX_PATH:
            field = field[: MAX_PATH - 3] + "..."
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class RequestFailed(ServingError):
    """This request failed while it ran, for example because its logits processor raised; no
    other one is touched.
    """


class RequestAborted(RequestFailed):
    """An operator or a trainer has ended this request, and its client gets no token ids that it
    could go on from.
    """


class Overloaded(ServingError):
    """The queue is full; the request was refused at once and may be retried elsewhere."""


class Draining(ServingError):
    """The worker is shutting down and hands its requests to another one."""


class EngineBroken(ServingError):
    """The engine cannot serve any more; the worker leaves with a non-zero status."""


class ConfigurationError(ServingError):
    """An argument, an environment variable or a file of options is wrong; the message is one
    line for the operator.
    """


class StartupError(ServingError):
    """The worker cannot start; the message is the one line that the operator sees."""


class GrammarsUnavailable(ServingError):
    """The process that compiles grammars cannot be started; requests without one are served."""


class ProcessorUnavailable(ServingError):
    """A third-party processor has failed too often; requests that name it are refused for a while.

    Args:
        processor: Name of the processor.
        wait_s: Seconds until it is tried again.
    """

    def __init__(self, processor: str, wait_s: float) -> None:
        super().__init__(f"logits processor {processor} has failed too often; try again in {wait_s:.0f} s")
        self.processor = processor


class PoisonRequest(InvalidRequest):
    """The request was in flight in several workers that died; it is not tried again.

    Args:
        num_crashes: Workers that died.
    """

    def __init__(self, num_crashes: int) -> None:
        super().__init__("request id", f"was in flight in {num_crashes} workers that died; it is not tried again")


class BoundaryStoreUnavailable(ServingError):
    """The boundary store cannot be reached, and what could not migrate is not accepted."""


def one_line(error: BaseException) -> str:
    """An error's whole message in one line, or the name of its class if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def log_text(text: str) -> str:
    """``text``, in which names may be a client's, with what would end a line of a log, or what a
    terminal would obey, as escapes.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def shown_id(request_id: str) -> str:
    """A request's id for a line of a log: it may be a client's, of any length."""
    return log_text(request_id[:MAX_PATH])


def path_within(path: str, name: str) -> str | None:
    """The part of a field's path behind `name`, None if it is the path of another field."""
    rest = path.removeprefix(name)
    return rest if rest != path and (not rest or rest[0] in ".[") else None


def without_user(address: str) -> str:
    """``address`` without the user, password or token that its URLs may have: messages show it."""
    return re.sub(r"(?<=//)[^/,]*@", "", address)


def shown(value: Any) -> str:
    """``value`` for an error message: short, never all of a long text that a client sent."""
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, (Mapping, bytes)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    written = repr(value)
    return written if len(written) <= 60 else written[:57] + "..."
