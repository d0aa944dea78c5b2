"""The command line of the token inspector.

``python -m worker inspect MODEL --prompt TEXT [--processors JSON]``, or with ``--receipt FILE
--prompt-file FILE`` the answer of a served request; any option of the worker may follow. Exit 0,
or 1 if an answer of a receipt is not the recorded one, 2 if nothing could be shown.
"""

from __future__ import annotations

import argparse
import asyncio
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from adapters.catalog import SelectionError, parse_selection
from adapters.strict_json import has_half_a_pair
from adapters.whole_files import write_whole
from worker.arguments import Arguments, StrictParser, parse_arguments
from worker.arguments.json_text import json_object
from worker.errors import ConfigurationError, ServingError, one_line
from worker.inspect.page import page
from worker.inspect.recording import InspectedRequest, Recording, inspected_request, record
from worker.inspect.terminal import as_svg, show
from worker.models.named import DEFAULT, TINY
from worker.replay.output import standard_output
from worker.replay.position import NUM_CANDIDATES
from worker.replay.prompt import default_thinking, read_prompt, read_template
from worker.replay.recorded import Recorded, as_recorded, read_receipt, selection_of
from worker.replay.run import LoadedModel, Replayed, loaded, with_named_model
from worker.replay.verdict import check_adapter, check_model_digest, check_weights, is_equal, notes, verdict
from worker.standard_error import say

EXIT_SHOWN, EXIT_DIFFERENT, EXIT_TROUBLE = 0, 1, 2

COMPARED = "B"
"""Name of the answer that ``--compare`` asks for."""

MAX_SEED = 2**64
WIDTH = 110
"""Columns of the picture."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Result of a command.

    Attributes:
        notes: Lines about the model and, of a receipt, the verdict.
        recordings: One or two.
        status: Exit status.
    """

    notes: list[str]
    recordings: list[Recording]
    status: int


class _Console(Console):
    """A console that leaves the exit status to its caller."""

    def on_broken_pipe(self) -> None:
        """Raises `BrokenPipeError`; rich would end the process with 1."""
        raise BrokenPipeError


def main(argv: Sequence[str]) -> int:
    """The exit status; trouble is one line on stderr."""
    try:
        options, arguments = _parse(argv)
        recorded = None if options.receipt is None else read_receipt(options.receipt)
        if recorded is not None:
            arguments = as_recorded(arguments, recorded.receipt)
        arguments = with_named_model(arguments, _say)
        arguments = replace(arguments, disaggregation_mode="aggregated", max_num_seqs=2)
        shown = asyncio.run(_shown(options, arguments, recorded))
        _write(options, shown)
    except ServingError as error:
        say(f"worker inspect: error: {one_line(error)}")
        return EXIT_TROUBLE
    return shown.status


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Arguments]:
    parser = StrictParser(
        prog="python -m worker inspect",
        usage="%(prog)s MODEL --prompt TEXT [options] [options of the worker]",
        allow_abbrev=False,
        description="Show what each logits processor did at every position of an answer.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"directory of a checkpoint, its id, a GGUF file, {DEFAULT} or {TINY}"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text of the prompt")
    parser.add_argument("--chat", action="store_true", help="--prompt is a user's message, for the chat template")
    parser.add_argument("--processors", metavar="JSON", help="a list of processors, or a selection as in requests")
    parser.add_argument("--sampling", metavar="JSON", default="{}", help='as in requests: {"temperature": 0.8}')
    parser.add_argument("--seed", type=_seed, default=0, help="of the random numbers (default: 0)")
    parser.add_argument("--max-tokens", type=_count, default=32, help="of the answer (default: 32)")
    parser.add_argument("--receipt", metavar="FILE", type=Path, help="of a served answer, instead of --prompt")
    parser.add_argument("--prompt-file", metavar="FILE", type=Path, help="prompt of the receipt, as for replay")
    parser.add_argument("--compare", metavar="JSON", help="a second answer: other processors, or an integer as seed")
    parser.add_argument("--top", type=_count, default=NUM_CANDIDATES, help="candidates shown (default: 5)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page instead of tables")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="also write the tables as a picture")
    options, rest = parser.parse_known_args(argv)
    arguments = parse_arguments(["--model-path", options.model, *rest])  # a misspelt flag is named first of all
    _refuse_contradictions(options, argv)
    return options, arguments


def _seed(text: str) -> int:
    return _integer(text, 0, MAX_SEED - 1)


def _count(text: str) -> int:
    return _integer(text, 1, 100_000)


def _integer(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"must be an integer from {least} to {most}, got {text!r}")
    return int(text)


def _refuse_contradictions(options: argparse.Namespace, argv: Sequence[str]) -> None:
    if (options.prompt is None) == (options.receipt is None):
        raise ConfigurationError("give either --prompt, or --receipt with --prompt-file")
    if (options.receipt is None) != (options.prompt_file is None):
        raise ConfigurationError("--receipt and --prompt-file go together")
    if options.receipt is not None:
        own = ("--chat", "--processors", "--sampling", "--seed", "--max-tokens")
        given = [each for each in own if any(one == each or one.startswith(each + "=") for one in argv)]
        if given:
            raise ConfigurationError(f"{given[0]}: a receipt has its own; give --compare for another answer")


def _say(line: str) -> None:
    say(f"worker inspect: {line}")


async def _shown(options: argparse.Namespace, arguments: Arguments, recorded: Recorded | None) -> Shown:
    adapter = None if recorded is None else recorded.receipt.model.adapter
    if recorded is not None:
        check_adapter(recorded.receipt, dict(arguments.lora_modules))
    async with loaded(arguments, None if adapter is None else adapter.name) as model:
        if recorded is None:
            requests = _prompt_requests(options, model)
            lines = [f"engine: {model.server.engine} {model.server.version}, computed by {model.server.computed_by}"]
        else:
            requests = _receipt_requests(options, model, recorded)
            lines = notes(model.server, recorded.receipt, model.chains.catalog)
        recordings = [await _recorded(model, each, options.top) for each in requests]
    status = EXIT_SHOWN
    if recorded is not None:
        replayed = Replayed(recordings[0].token_ids, recordings[0].error)
        lines.append(verdict(replayed, recorded.receipt))
        status = EXIT_SHOWN if is_equal(replayed, recorded.receipt) else EXIT_DIFFERENT
    return Shown([f"model: {arguments.served_model_name}", *lines], recordings, status)


async def _recorded(model: LoadedModel, request: InspectedRequest, top: int) -> Recording:
    try:
        return await record(model, request, top)
    except ServingError as error:
        if request.name == COMPARED:
            raise ConfigurationError(f"--compare: {error}") from None
        raise


def _prompt_requests(options: argparse.Namespace, model: LoadedModel) -> list[InspectedRequest]:
    """The answer to a prompt, and the one that it is compared with."""
    prompt, sampling = _prompt(options, model), json_object(options.sampling, "--sampling")
    if "seed" in sampling:
        raise ConfigurationError("--sampling: seed: give it as --seed")
    processors = _selection_text(options.processors or "[]")

    def selecting(selection: str) -> InspectedRequest:
        return inspected_request(model, prompt, sampling, selection, options.seed, options.max_tokens)

    return _with_compared(options, selecting(processors), selecting)


def _prompt(options: argparse.Namespace, model: LoadedModel) -> list[int]:
    text, tokenizer = options.prompt, model.tokenizer
    if has_half_a_pair(text):
        raise ConfigurationError("--prompt: is not UTF-8")
    if options.chat:
        template, variables = read_template(model.arguments), default_thinking(model.arguments)
        try:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False, **variables
            )
        except Exception as error:  # the boundary of the checkpoint's chat template
            raise ConfigurationError(f"--chat: the chat template failed: {error}") from None
    return list(tokenizer.encode(text, add_special_tokens=not options.chat))


def _receipt_requests(options: argparse.Namespace, model: LoadedModel, recorded: Recorded) -> list[InspectedRequest]:
    """The answer of a receipt, and the one that it is compared with."""
    check_weights(recorded.receipt, model.weights_digest)
    check_model_digest(model.server, recorded.receipt)
    prompt = read_prompt(options.prompt_file, recorded.receipt, model.tokenizer, model.arguments)
    selection = selection_of(recorded, model.arguments.processor_policy, model.chains.catalog)
    number, asked = recorded.receipt.generated_tokens, recorded.request
    first = InspectedRequest("A", prompt, recorded.params, selection, number, asked.choice, asked.hidden_end_ids)

    def selecting(selection: str) -> InspectedRequest:
        try:
            other = model.chains.builder.select(parse_selection(selection), first.params, served=True)
        except SelectionError as error:
            raise ConfigurationError(f"--compare: {error}") from None
        return replace(first, selection=other)

    return _with_compared(options, first, selecting)


def _with_compared(
    options: argparse.Namespace, first: InspectedRequest, selecting: Callable[[str], InspectedRequest]
) -> list[InspectedRequest]:
    """A request, and what ``--compare`` asks for: it with another seed, or another selection."""
    text = options.compare
    if text is None:
        return [first]
    if not text.strip().isdecimal():
        return [first, replace(selecting(_selection_text(text)), name=COMPARED)]
    try:
        return [first, first.with_seed(COMPARED, _seed(text.strip()))]
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(f"--compare: {error}") from None


def _selection_text(text: str) -> str:
    """A selection as requests have it; a list stands for its processors."""
    return '{"version":1,"processors":' + text + "}" if text.lstrip().startswith("[") else text


def _write(options: argparse.Namespace, shown: Shown) -> None:
    if options.html is not None:
        _write_file(options.html, page(shown.notes, shown.recordings))
    if options.svg is not None:
        picture = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
        show(picture, shown.notes, shown.recordings)
        _write_file(options.svg, as_svg(picture))
    if options.html is None:
        with standard_output():
            show(_Console(highlight=False), shown.notes, shown.recordings)


def _write_file(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:  # that of a full disk does not name the file
        raise ConfigurationError(f"{path}: {error.strerror}") from None
