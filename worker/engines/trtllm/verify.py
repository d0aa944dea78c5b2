"""``python -m worker.engines.trtllm.verify REPORT``: the checklist of `docs/tensorrt-llm.md`.

Takes a file for the report, in Markdown, and the worker's own options; exits with 1 if a check
fails. The report does not go to standard output because TensorRT-LLM, its executor and MPI print
there, from the import on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from adapters import create_trtllm_adapters
from adapters.chain import ProcessorChain
from adapters.contract import Context, Processor
from adapters.processors.forcing import ForcedPrefix
from adapters.processors.masks import BannedTokens
from adapters.processors.penalties import RepetitionPenalty
from adapters.vocabulary import Vocabulary
from worker.arguments import parse_arguments
from worker.engines import EngineInfo, EngineRequest, TokenDelta
from worker.engines.trtllm.capabilities import read_package
from worker.engines.trtllm.engine import TrtllmEngine
from worker.engines.trtllm.settings import config_from
from worker.errors import ConfigurationError, InvalidRequest, RequestFailed, ServingError
from worker.models import hub_checkpoint, is_hub_id
from worker.sampling import SamplingParams
from worker.standard_error import say

PROMPT = [9, 30, 41, 77, 12]
NUM_TOKENS = 24
NUM_OTHERS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: The claim.
        ok: Whether it holds.
        found: The observation.
    """

    name: str
    ok: bool
    found: str


class _Raises:
    """A faulty third-party processor."""

    def __call__(self, input_ids: Sequence[int], logits: torch.Tensor) -> None:
        raise RuntimeError("a fault for the checklist")


class Checklist:
    """Runs the checks on one started engine."""

    def __init__(self, engine: TrtllmEngine, info: EngineInfo) -> None:
        self.engine = engine
        self.info = info
        self._num_requests = 0

    async def run(self) -> list[Finding]:
        """Every check, in order. One that raises has failed."""
        checks: tuple[Callable[[], Awaitable[Finding]], ...] = (
            self.repeatable,
            self.forced,
            self.banned,
            self.penalised,
            self.ended_late,
            self.seeded,
            self.undisturbed,
            self.chunked,
            self.faulty,
            self.logprobs,
            self.several,
            self.aborted,
            self.speed,
        )
        return [await self._guarded(check) for check in checks]

    async def _guarded(self, check: Callable[[], Awaitable[Finding]]) -> Finding:
        try:
            async with asyncio.timeout(300):
                return await check()
        except Exception as error:  # the check boundary: any error goes into the report
            return Finding(check.__name__, False, f"{type(error).__name__}: {error}")

    async def repeatable(self) -> Finding:
        answers = [await self._tokens() for _ in range(3)]
        return Finding("greedy answers repeat", answers[0] == answers[1] == answers[2], f"{answers[0][:8]} ...")

    async def forced(self) -> Finding:
        wanted = [40, 41, 42, 40, 41]
        found = (await self._tokens(self._chain(ForcedPrefix, token_ids=wanted)))[: len(wanted)]
        return Finding("forced tokens come out", found == wanted, str(found))

    async def banned(self) -> Finding:
        plain = await self._tokens()
        found = await self._tokens(self._chain(BannedTokens, token_ids=plain[:4]))
        return Finding(
            "banned tokens do not", not set(found) & set(plain[:4]), f"banned {plain[:4]}, got {found[:8]} ..."
        )

    async def penalised(self) -> Finding:
        found = await self._tokens(self._chain(RepetitionPenalty, penalty=90.0))
        return Finding(
            "a penalty sees every token", len(set(found)) == len(found), f"{len(set(found))} of {len(found)} differ"
        )

    async def ended_late(self) -> Finding:
        ends = sorted(set(range(0, self.info.vocab_size, 2)))[:1000]
        found = await self._answer(min_tokens=10, stop_token_ids=ends)
        ok = len(found.token_ids) >= 10 and not set(found.token_ids) & set(ends)
        return Finding("no stop token ends an answer before min_tokens", ok, f"{len(found.token_ids)} tokens")

    async def seeded(self) -> Finding:
        async def sampled(seed: int) -> list[int]:
            return await self._tokens(temperature=1.0, seed=seed)

        alone = await sampled(7)
        _, together = await asyncio.gather(self._others(), sampled(7))
        other = await sampled(8)
        return Finding("a seed fixes the sampled tokens in any batch", alone == together != other, f"{alone[:8]} ...")

    async def undisturbed(self) -> Finding:
        alone = await self._tokens(self._chain(ForcedPrefix, token_ids=[40, 41, 42]))
        others, together = await asyncio.gather(
            self._others(), self._tokens(self._chain(ForcedPrefix, token_ids=[40, 41, 42]))
        )
        same = sum(a == b for a, b in zip(alone, together, strict=False))
        ok = together[:3] == [40, 41, 42] and len(set(map(tuple, others))) == NUM_OTHERS
        return Finding(
            "other requests in a batch keep their own processors", ok, f"{same} of {len(alone)} tokens as alone"
        )

    async def chunked(self) -> Finding:
        length = min(self.info.max_num_batched_tokens * 2 + 3, self.info.context_length - NUM_TOKENS - 1)
        prompt = [20 + (7 * index) % 200 for index in range(length)]
        try:
            found = await self._tokens(self._chain(ForcedPrefix, prompt, token_ids=[40, 41, 42]), prompt=prompt)
        except InvalidRequest as error:
            ok = self.engine.config.history == "lagged"
            return Finding("a prompt of several chunks", ok, f"refused: {error}")
        return Finding("a prompt of several chunks", found[:3] == [40, 41, 42], f"{length} tokens, {found[:3]}")

    async def faulty(self) -> Finding:
        broken = create_trtllm_adapters([_Raises()], end_id=0)
        _, failed = await asyncio.gather(self._others(), self._answer(callables=broken))
        after = await self._answer()
        ok = failed.finish_reason == "error" and after.finish_reason in ("stop", "length")
        return Finding("a faulty processor fails its request alone", ok, str(failed.error))

    async def logprobs(self) -> Finding:
        plain = await self._answer(logprobs=2)
        beside = await self._answer(self._chain(BannedTokens, token_ids=[3]), logprobs=2)
        entries = [*(plain.logprobs or ()), *(beside.logprobs or ())]
        ok = len(entries) == len(plain.token_ids) + len(beside.token_ids) and all(len(each) == 3 for each in entries)
        off = [
            abs(a[0].logprob - b[0].logprob) for a, b in zip(plain.logprobs or (), beside.logprobs or (), strict=False)
        ]
        return Finding(
            "log probabilities with and without processors", ok, f"they differ by {max(off, default=0):.2g} at most"
        )

    async def several(self) -> Finding:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, n=2, temperature=1.0)
        answers: dict[int, TokenDelta] = {}
        async for delta in self.engine.generate(EngineRequest("several", PROMPT, params)):
            whole = answers.setdefault(delta.index, TokenDelta())
            whole.token_ids += delta.token_ids
            whole.finish_reason = delta.finish_reason
        found = [(len(each.token_ids), each.finish_reason) for each in answers.values()]
        return Finding("two answers of one prompt both end", found == [(NUM_TOKENS, "length")] * 2, str(found))

    async def aborted(self) -> Finding:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        stream = self.engine.generate(EngineRequest("abort", PROMPT, params))
        await anext(stream)
        self.engine.abort("abort")
        last = [delta async for delta in stream][-1]
        return Finding("an abort ends a request", last.finish_reason == "cancelled", str(last.finish_reason))

    async def speed(self) -> Finding:
        async def rate(make: Callable[[], Any]) -> float:
            began = time.perf_counter()
            found = await asyncio.gather(
                *(self._tokens(make(), max_tokens=128, ignore_eos=True) for _ in range(NUM_OTHERS))
            )
            return sum(map(len, found)) / (time.perf_counter() - began)

        plain = await rate(lambda: None)
        masked = await rate(lambda: self._chain(BannedTokens, token_ids=[3]))
        return Finding(
            "speed (no claim)", True, f"{plain:.0f} tokens/s, {masked:.0f} with a processor each, {NUM_OTHERS} requests"
        )

    async def _others(self) -> list[list[int]]:
        return await asyncio.gather(
            *(self._tokens(self._chain(ForcedPrefix, token_ids=[50 + i] * 4)) for i in range(NUM_OTHERS))
        )

    def _chain(self, kind: type[Processor], prompt: Sequence[int] = PROMPT, **args: Any) -> ProcessorChain:
        context = Context(Vocabulary(self.info.vocab_size), frozenset(self.info.eos_token_ids))
        made = ProcessorChain(kind.build(kind.Args(**args), context), context, step_budget_s=60.0)
        made.start(prompt)
        return made

    async def _tokens(self, chain: ProcessorChain | None = None, **fields: Any) -> list[int]:
        delta = await self._answer(chain, **{"ignore_eos": "stop_token_ids" not in fields, **fields})
        if delta.finish_reason == "error":
            raise RequestFailed(str(delta.error))
        return delta.token_ids

    async def _answer(
        self,
        chain: ProcessorChain | None = None,
        *,
        prompt: Sequence[int] = PROMPT,
        callables: Any = None,
        **fields: Any,
    ) -> TokenDelta:
        self._num_requests += 1
        params = SamplingParams(**{"max_tokens": NUM_TOKENS, "logits_processor": callables, **fields})
        whole = TokenDelta(logprobs=[])
        async for delta in self.engine.generate(EngineRequest(f"verify-{self._num_requests}", prompt, params, chain)):
            whole.token_ids += delta.token_ids
            whole.logprobs = [*(whole.logprobs or ()), *(delta.logprobs or ())]
            whole.finish_reason, whole.error = delta.finish_reason, delta.error
        return whole


def report(engine: TrtllmEngine, info: EngineInfo, checks: Sequence[Finding], start_s: float) -> str:
    """The report in Markdown."""
    package = read_package()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    facts = {
        "TensorRT-LLM": info.version,
        "torch": torch.__version__,
        "GPU": device,
        "model": engine.config.model_path,
        "start": f"{start_s:.1f} s",
        "context, vocabulary": f"{info.context_length}, {info.vocab_size}",
        "KV blocks": f"{info.total_kv_blocks} of {info.kv_block_size} tokens",
        "history": engine.config.history,
        "honoured natively": ", ".join(engine.honoured) or "nothing",
        "fields of SamplingParams": ", ".join(sorted(package.sampling_fields)),
        "arguments of LLM": ", ".join(sorted(package.llm_fields)),
        "arguments of generate_async": ", ".join(sorted(package.generate_arguments)),
    }
    lines = ["# TensorRT-LLM checklist", "", "| fact | value |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in facts.items()]
    lines += ["", "| check | result | found |", "| --- | --- | --- |"]
    lines += [f"| {each.name} | {'pass' if each.ok else 'FAIL'} | {_cell(each.found)} |" for each in checks]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


async def verify(argv: Sequence[str], write: Callable[[str], object]) -> bool:
    """Write the report; returns whether every check passed.

    Raises:
        ServingError: the engine does not start. There is no report then.
    """
    arguments = parse_arguments(["--engine", "trtllm", *argv])
    if is_hub_id(arguments.model_path):
        path = hub_checkpoint(arguments.model_path, arguments.revision, lambda line: say(f"verify: {line}"))
        arguments = replace(arguments, model_path=str(path))
    engine = TrtllmEngine(config_from(arguments))
    began = time.perf_counter()
    try:
        info = await engine.start()
        start_s = time.perf_counter() - began
        checks = await Checklist(engine, info).run()
        write(report(engine, info, checks, start_s) + "\n")
        return all(check.ok for check in checks)
    finally:
        await engine.stop()


def _check_writable(path: Path) -> None:
    """Fail early if the report cannot be written. Raises `ConfigurationError`."""
    try:
        path.write_text("")
    except OSError as error:
        raise ConfigurationError(f"no report can be written: {error}") from error


def main() -> int:
    """Exit status."""
    path, *options = sys.argv[1:] or [""]
    try:
        if not path or path.startswith("-"):
            raise ConfigurationError("the first argument must be a file for the report")
        _check_writable(Path(path))
        return 0 if asyncio.run(verify(options, Path(path).write_text)) else 1
    except ServingError as error:
        say(f"verify: error: {error}")
        return 2


if __name__ == "__main__":
    from worker.engines.trtllm import verify as module  # the engine's process must find `_Raises` by this module's name

    status = module.main()
    sys.stderr.flush()
    os._exit(status)  # Python's own exit would wait for what TensorRT-LLM has of a dead executor
