"""The command line: an answer made again, and compared with the recorded one.

``python -m worker replay RECEIPT.json --prompt-file FILE --model-path MODEL [--position N |
--answer-file FILE]``, with any option of the worker; a model is a path, or a name of
`worker.models.named`. Exit 0 if the tokens are those that were recorded, or allowed by the
processors where each decision is made again, 1 if they are not, 2 if that could not be found out.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.catalog import Selection
from worker.arguments import Arguments, StrictParser, parse_arguments
from worker.engines.embedded.plan import Request
from worker.errors import ConfigurationError, ServingError, one_line
from worker.processors.builder import ServedChainBuilder
from worker.replay.decisions import decisions, hold, lines, read_answer
from worker.replay.on_vllm import started
from worker.replay.output import standard_output
from worker.replay.position import PositionTap, table
from worker.replay.prompt import read_prompt
from worker.replay.recorded import Recorded, RecordedReceipt, as_recorded, read_receipt, selection_of
from worker.replay.run import Replayed, loaded, replay, with_named_model
from worker.replay.verdict import check_adapter, check_model_digest, check_weights, is_equal, notes, verdict
from worker.requests.receipts import ServerRecord
from worker.sampling import SamplingParams
from worker.standard_error import say

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_TROUBLE = 0, 1, 2


def main(argv: Sequence[str]) -> int:
    """The exit status; trouble is one line on stderr."""
    try:
        options, arguments = _parse(argv)
        recorded = read_receipt(options.receipt)
        arguments = with_named_model(as_recorded(arguments, recorded.receipt), _say)
        return asyncio.run(_main(options, arguments, recorded))
    except ServingError as error:
        say(f"worker replay: error: {one_line(error)}")
        return EXIT_TROUBLE


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Arguments]:
    parser = StrictParser(
        prog="python -m worker replay RECEIPT.json",
        allow_abbrev=False,
        description="Make one answer again from its receipt, and compare its tokens with those that were recorded.",
        epilog="The worker's own options may follow: --model-path is needed, of which default and tiny are the launch "
        "scripts' models, and --processor-policy and --logits-processor where the worker had them.",
    )
    parser.add_argument("--prompt-file", required=True, type=Path, help="token ids (JSON), a request body, or text")
    way = parser.add_mutually_exclusive_group()
    told = "the answer's token ids: make each decision again after them, instead of the answer"
    way.add_argument("--answer-file", type=Path, help=told)
    way.add_argument("--position", type=int, help="show what each processor did there; absolute, as in receipts")
    if not argv or argv[0].startswith("-"):
        if {"-h", "--help"}.intersection(argv):
            parser.parse_args(["--help"])
        raise ConfigurationError("the first argument must be the receipt's file")
    options, rest = parser.parse_known_args(argv[1:])
    options.receipt = Path(argv[0])
    return options, parse_arguments(rest)


def _say(line: str) -> None:
    say(f"worker replay: {line}")


async def _main(options: argparse.Namespace, arguments: Arguments, recorded: Recorded) -> int:
    receipt = recorded.receipt
    _check_position(options.position, receipt)
    on_vllm = arguments.engine == "vllm" and options.position is None and options.answer_file is None
    check_adapter(receipt, dict(arguments.lora_modules))
    lora_name = None if receipt.model.adapter is None else receipt.model.adapter.name
    if on_vllm:
        check_weights(receipt, None)
        async with started(arguments) as engine:
            asked = _asked(options, arguments, recorded, engine.server, engine.chains)
            replayed = await engine.replay(*asked, receipt.generated_tokens, lora_name)
            return _tell(replayed, engine.server, receipt, engine.chains)
    async with loaded(arguments, lora_name) as model:
        check_weights(receipt, model.weights_digest)
        asked = _asked(options, arguments, recorded, model.server, model.chains)
        if options.answer_file is not None:
            ends = recorded.params.end_token_ids.union(model.info.eos_token_ids)
            answer = read_answer(options.answer_file, receipt, ends)
            found = await decisions(model, *asked, answer)
            with standard_output():
                print(
                    *notes(model.server, receipt, model.chains.catalog),
                    *lines(found, receipt, model.tokenizer),
                    sep="\n",
                )
            return EXIT_EQUAL if hold(found, receipt) else EXIT_DIFFERENT
        hidden = recorded.request.hidden_end_ids
        request, tap = await model.request("replay", *asked, hidden), None
        if options.position is not None:
            copy = await model.request("replay", *asked, hidden)
            tap = model.tap(request, copy, positions=(options.position,))
        replayed = replay(model.stepper, request, receipt.generated_tokens, tap)
        effects = [] if tap is None else _effects(tap, options.position, request, model.tokenizer)
    return _tell(replayed, model.server, receipt, model.chains, effects)


def _asked(
    options: argparse.Namespace,
    arguments: Arguments,
    recorded: Recorded,
    server: ServerRecord,
    chains: ServedChainBuilder,
) -> tuple[list[int], SamplingParams, Selection, int]:
    """Prompt, sampling parameters, processors and choice of the recorded request."""
    check_model_digest(server, recorded.receipt)
    prompt = read_prompt(options.prompt_file, recorded.receipt, chains.vocabulary.tokenizer, arguments)
    selection = selection_of(recorded, arguments.processor_policy, chains.catalog)
    return prompt, recorded.params, selection, recorded.request.choice


def _tell(
    replayed: Replayed,
    server: ServerRecord,
    receipt: RecordedReceipt,
    chains: ServedChainBuilder,
    effects: Sequence[str] = (),
) -> int:
    """Print the result; the exit status."""
    with standard_output():
        print(*notes(server, receipt, chains.catalog), verdict(replayed, receipt), *effects, sep="\n")
    return EXIT_EQUAL if is_equal(replayed, receipt) else EXIT_DIFFERENT


def _effects(tap: PositionTap, position: int, request: Request, tokenizer: Any) -> list[str]:
    if not tap.positions:
        return [f"position {position}: the replay ended before it"]
    return table(tap.positions[0], request.prompt_length, request.params, tokenizer)


def _check_position(position: int | None, receipt: RecordedReceipt) -> None:
    end = receipt.prompt_length + receipt.generated_tokens
    if position is not None and not receipt.prompt_length <= position < end:
        raise ConfigurationError(
            f"--position must be one of the answer's, {receipt.prompt_length} to {end - 1}, got {position}"
        )
