"""Tries the loaded engine with two short requests: whether logits processors work in it.

They run in another process, in a class that vLLM loads by name and a version may call differently.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.masks import BannedTokens
from adapters.vocabulary import Vocabulary
from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.errors import ServingError, StartupError
from worker.sampling import SamplingParams

Generate = Callable[[EngineRequest], AsyncGenerator[TokenDelta, None]]

NUM_TOKENS = 3


async def check_processors(generate: Generate, info: EngineInfo) -> None:
    """Check that processors edit tokens, and that failures and receipts come back.

    Args:
        generate: The engine's ``generate``.
        info: Description of the engine.

    Raises:
        StartupError: they do not.
    """
    others = [token_id for token_id in range(info.vocab_size) if token_id not in info.eos_token_ids]
    forced = [others[1], others[0], others[1]]
    answer = await _answer(generate, info, (ForcedPrefix, {"token_ids": forced}))
    if answer.token_ids != forced:
        problem = f"forced {forced}, got {answer.token_ids}"
        raise StartupError(f"edits of logits processors do not reach vLLM {info.version}'s sampler: {problem}")
    records = [] if answer.receipt is None else answer.receipt.records
    if [record.tokens_forced for record in records] != [NUM_TOKENS]:
        raise StartupError(f"receipts of logits processors do not come back from vLLM {info.version}")
    impossible = (ForcedPrefix, {"token_ids": forced}), (BannedTokens, {"token_ids": forced})
    failed = await _answer(generate, info, *impossible)
    if failed.failure is None or failed.failure.reason != "unsatisfiable":
        raise StartupError(f"failures of logits processors do not come back from vLLM {info.version}")


async def _answer(generate: Generate, info: EngineInfo, *wanted: tuple[type[Processor], dict[str, Any]]) -> TokenDelta:
    """The whole answer to a prompt of one token, with its chain's receipt."""
    context = Context(Vocabulary(info.vocab_size), frozenset(info.eos_token_ids))
    built = [part for kind, args in wanted for part in kind.build(kind.Args.model_validate(args), context)]
    chain = ProcessorChain(built, context, step_budget_s=60.0)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    whole = TokenDelta()
    try:
        async with contextlib.aclosing(generate(EngineRequest("probe", [0], params, chain))) as deltas:
            async for delta in deltas:
                whole.token_ids += delta.token_ids
                whole.receipt, whole.failure = delta.receipt, delta.failure
    except ServingError as error:
        raise StartupError(f"vLLM {info.version} failed on its first request: {error}") from error
    return whole
