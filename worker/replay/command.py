"""The command line, and the replay of one request that is alone in its engine.

``python -m worker replay RECEIPT.json --prompt-file FILE --model-path DIR [--position N]``, with
any option of the worker. Exit 0 if the tokens are those that were recorded, 1 if they are not, 2 if
that could not be found out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from adapters import create_trtllm_adapters
from adapters.catalog import Selection
from worker.arguments import Arguments, StrictParser, parse_arguments
from worker.build import check_model, embedded_config, with_checkpoint
from worker.engines import EngineInfo
from worker.engines.embedded.admission import admit
from worker.engines.embedded.host import limit_threads
from worker.engines.embedded.plan import Output, Request
from worker.engines.embedded.serving import load
from worker.engines.embedded.step import Stepper
from worker.errors import ConfigurationError, InvalidRequest, ServingError
from worker.processors.builder import ServedChainBuilder, make_chain_builder
from worker.replay.position import PositionTap
from worker.replay.prompt import read_prompt
from worker.replay.recorded import Recorded, RecordedReceipt, as_recorded, read_receipt, selection_of
from worker.requests.receipts import Server, TokenDigest

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_TROUBLE = 0, 1, 2


@dataclass(slots=True)
class Replayed:
    """One answer, made again.

    Attributes:
        token_ids: At most as many as were recorded.
        error: Why there are fewer, if a processor failed.
        effects: Lines about the position that was asked for.
    """

    token_ids: list[int]
    error: str | None
    effects: list[str]


def main(argv: Sequence[str]) -> int:
    """The exit status; trouble is one line on stderr."""
    try:
        options, arguments = _parse(argv)
        recorded = read_receipt(options.receipt)
        arguments = as_recorded(arguments, recorded.receipt)
        check_model(arguments)
        arguments = with_checkpoint(arguments)
        return asyncio.run(_main(options, arguments, recorded))
    except ServingError as error:
        print(f"worker replay: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_TROUBLE


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Arguments]:
    parser = StrictParser(
        prog="python -m worker replay RECEIPT.json",
        allow_abbrev=False,
        description="Make one answer again from its receipt, and compare its tokens with those that were recorded.",
        epilog="The worker's own options may follow: --model-path is needed, and --processor-policy and "
        "--logits-processor where the worker had them.",
    )
    parser.add_argument("--prompt-file", required=True, type=Path, help="token ids (JSON), a request body, or text")
    parser.add_argument("--position", type=int, help="show what each processor did there; absolute, as in receipts")
    if not argv or argv[0].startswith("-"):
        parser.parse_args([*argv[:1], "--prompt-file", ""])  # --help
        raise ConfigurationError("the first argument must be the receipt's file")
    options, rest = parser.parse_known_args(argv[1:])
    options.receipt = Path(argv[0])
    return options, parse_arguments(rest)


async def _main(options: argparse.Namespace, arguments: Arguments, recorded: Recorded) -> int:
    receipt = recorded.receipt
    _check_position(options.position, receipt)
    config = embedded_config(arguments)
    limit_threads(config.model_path, config.local_workers)  # as a worker does: how torch computes depends on it
    stepper, info = load(config)
    server = Server.of(info, arguments)
    _check_model_digest(server, receipt)
    chains = make_chain_builder(arguments, info, CollectorRegistry())
    try:
        tokenizer = chains.facts.vocabulary.tokenizer
        prompt = read_prompt(options.prompt_file, receipt, tokenizer)
        selection = selection_of(recorded, arguments.processor_policy, chains.catalog)
        request = await _request(recorded, prompt, selection, chains, stepper, info)
        tap = None
        if options.position is not None:
            copy = await _request(recorded, prompt, selection, chains, stepper, info)
            tap = PositionTap(request, copy, options.position, stepper.model.undecodable_ids, tokenizer)
        replayed = replay(stepper, request, receipt.generated_tokens, tap)
    except InvalidRequest as error:
        raise ConfigurationError(f"request: {error}") from None
    finally:
        await chains.close()
    print(*_notes(server, receipt), _verdict(replayed, receipt), *replayed.effects, sep="\n")
    return EXIT_EQUAL if is_equal(replayed, receipt) else EXIT_DIFFERENT


def _check_position(position: int | None, receipt: RecordedReceipt) -> None:
    end = receipt.prompt_length + receipt.generated_tokens
    if position is not None and not receipt.prompt_length <= position < end:
        raise ConfigurationError(
            f"--position must be one of the answer's, {receipt.prompt_length} to {end - 1}, got {position}"
        )


def _check_model_digest(server: Server, receipt: RecordedReceipt) -> None:
    if receipt.model.digest is not None and server.model_digest != receipt.model.digest:
        raise ConfigurationError(
            f"model.digest: the receipt is of a checkpoint with {receipt.model.digest}, "
            f"--model-path has {server.model_digest}"
        )


async def _request(
    recorded: Recorded,
    prompt: list[int],
    selection: Selection,
    chains: ServedChainBuilder,
    stepper: Stepper,
    info: EngineInfo,
) -> Request:
    params, choice = recorded.params, recorded.request.choice
    budget = info.context_length - len(prompt) if params.max_tokens is None else params.max_tokens
    seed = recorded.receipt.seed
    chain = await chains.build(selection, prompt, params.end_token_ids, seed, budget, choice=choice)
    processors: list[Callable[..., None]] = (
        [] if chain is None else list(create_trtllm_adapters([chain], end_id=params.end_id))
    )
    own = replace(params, logits_processor=processors or None)
    return admit("replay", 0, prompt, own, stepper.model, info.context_length, choice=choice)


def replay(stepper: Stepper, request: Request, num_tokens: int, tap: PositionTap | None = None) -> Replayed:
    """Decode ``num_tokens`` tokens, the end token among them, of the engine's only request."""
    request.tap = tap
    stepper.add(request)
    tokens: list[int] = []
    last = Output(request.id)
    while len(tokens) < num_tokens and last.finish_reason is None:
        for last in stepper.step():  # nothing where the step computed a chunk of the prompt
            tokens += _sampled(last)
    if last.finish_reason is None:
        stepper.abort(request.id)
    return Replayed(tokens, last.error, [] if tap is None else tap.table(tokens))


def _sampled(output: Output) -> list[int]:
    """The token that was sampled, the end token too where the answer does not show it."""
    token_id = output.stop_reason if output.token_id is None else output.token_id
    return [] if token_id is None else [token_id]


def is_equal(replayed: Replayed, receipt: RecordedReceipt) -> bool:
    """Whether the tokens are those that were recorded."""
    tokens = replayed.token_ids
    return len(tokens) == receipt.generated_tokens and str(TokenDigest(tokens)) == receipt.answer_digest


def _notes(server: Server, receipt: RecordedReceipt) -> list[str]:
    """What was compared, and why tokens may differ though nothing is wrong."""
    was = receipt.engine
    lines = [f"engine: {server.engine} {server.version}, computed by {server.computed_by}"]
    if receipt.numerics != "exact":
        lines.append("note: the answer was made with fast numerics: equal tokens are likely, and not promised")
    for name, then, now in (
        ("engine", was.name, server.engine),
        ("version", was.version, server.version),
        ("computed_by", was.computed_by, server.computed_by),
    ):
        if then != now:
            lines.append(f"note: engine.{name} was {then!r} and is {now!r} here: tokens may differ")
    return lines


def _verdict(replayed: Replayed, receipt: RecordedReceipt) -> str:
    tokens, number = replayed.token_ids, receipt.generated_tokens
    if is_equal(replayed, receipt):
        return f"answer: {number} tokens, equal to those recorded"
    if replayed.error is not None:
        return f"answer: DIFFERENT: failed after {len(tokens)} of {number} tokens: {replayed.error}"
    if len(tokens) != number:
        return f"answer: DIFFERENT: ended after {len(tokens)} of {number} tokens"
    answer = dict(enumerate(tokens, receipt.prompt_length))
    place = next((one.position for one in receipt.tokens if answer.get(one.position) != one.token_id), None)
    known = f", the first known one at position {place}" if place is not None else ""
    return f"answer: DIFFERENT: {number} tokens of another digest{known}"
