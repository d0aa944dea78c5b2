"""Requests of the worker's own: probes of the loaded engine at start, and canaries later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.contract import Context
from adapters.processors.grammar import Choice
from adapters.trtllm import Step
from adapters.trtllm.side_channel import SideChannel
from adapters.vocabulary import Vocabulary
from worker.engines.lora_adapters import FLAG
from worker.engines.trtllm.capabilities import Package
from worker.engines.trtllm.native_guides import NativeGuides
from worker.engines.trtllm.placement import num_dp_ranks, on_rank
from worker.engines.trtllm.probes import (
    NUM_TOKENS,
    CallProbe,
    Calls,
    ProbeRefused,
    find_honoured,
    find_sampling,
    judge_calls,
)
from worker.engines.trtllm.settings import TrtllmConfig
from worker.engines.trtllm.speculation import BACKEND
from worker.errors import StartupError, one_line

PROBE = "probe"
"""Number in reports of the probes' processors."""

PROBE_PROMPT = [5, 6]
PROBE_TOKEN = 7


class ProbeRequests:
    """Runs short requests on a loaded ``LLM``.

    Args:
        llm: The library's ``LLM``.
        package: The installed package.
        channel: Side channel of the processors' reports; it calls `note_step` for `PROBE`.
    """

    def __init__(self, llm: Any, package: Package, channel: SideChannel) -> None:
        self._llm = llm
        self._package = package
        self._channel = channel
        self._steps: list[Step] = []

    def note_step(self, step: Step) -> None:
        """Record a report of a probe's processor."""
        self._steps.append(step)

    async def find_calls(self, config: TrtllmConfig, eos_token_ids: tuple[int, ...]) -> Calls:
        """Probe how logits processors are called, and load the tokenizer in each rank's process.

        Raises:
            StartupError: they cannot be used, or lag where the settings do not accept that.
        """
        calls = await self._call_once(None)
        if calls.lags and config.history == "exact":
            raise StartupError(
                f"TensorRT-LLM {self._package.version} shows logits processors a history that lacks the newest token, "
                "although overlapped scheduling is off; --history lagged accepts that"
            )
        vocabulary = Vocabulary(calls.vocab_size, eos_token_ids=eos_token_ids, path=config.model_path)
        num_ranks = num_dp_ranks(self._llm)
        for dp_rank in range(num_ranks):
            await self._call_once(vocabulary, on_rank(dp_rank, num_ranks))
        return calls

    async def find_honoured(self, vocab_size: int) -> frozenset[str]:
        """Names of the engine-native controls that are exact; see `probes.find_honoured`."""
        return await find_honoured(self._ask, self._package, PROBE_PROMPT, vocab_size)

    async def samples(self) -> bool:
        """Whether the engine samples at a temperature; see `probes.find_sampling`."""
        return await find_sampling(self._ask)

    async def try_guide(self, guides: NativeGuides, vocabulary: Vocabulary) -> None:
        """Generate a text that a guide leaves no choice about.

        Args:
            guides: The library's guided decoding.
            vocabulary: The model's vocabulary.

        Raises:
            StartupError: TensorRT-LLM refuses the guide, or the answer is another text.
        """
        if self._package.guided_decoding_params is None:
            raise StartupError(f"{BACKEND}: TensorRT-LLM {self._package.version} has no guided decoding")
        text = "2048"
        choice = Choice(Choice.Args(choices=[text]), Context(vocabulary, frozenset({guides.end_token_id or 0}), 0))
        guide = self._package.guided_decoding_params(**guides.guide(choice))
        params = self._package.sampling_params(max_tokens=len(text) + 1, detokenize=False, guided_decoding=guide)
        try:
            output = await self._llm.generate_async(list(PROBE_PROMPT), params, streaming=False)
        except Exception as error:  # the start-up boundary
            raise StartupError(f"{BACKEND}: TensorRT-LLM {self._package.version}: {one_line(error)}") from error
        (answer,) = output.outputs
        found = b"".join(vocabulary.token_bytes[token_id] for token_id in answer.token_ids)
        if found != text.encode() or answer.finish_reason != "stop":
            problem = f"answers {found!r} and {answer.finish_reason!r} where a guide leaves {text!r} alone"
            raise StartupError(f"{BACKEND}: TensorRT-LLM {self._package.version} {problem}")

    async def try_adapter(self, name: str, adapter: Any) -> None:
        """Generate one token with a LoRA adapter, which loads it.

        Args:
            name: The adapter's name.
            adapter: The ``LoRARequest`` of it.

        Raises:
            StartupError: TensorRT-LLM refuses it.
        """
        params = self._package.sampling_params(max_tokens=1, ignore_eos=True, detokenize=False)
        try:
            await self._llm.generate_async(list(PROBE_PROMPT), params, lora_request=adapter, streaming=False)
        except Exception as error:  # the start-up boundary
            problem = f"TensorRT-LLM {self._package.version}: {one_line(error)}"
            raise StartupError(f"{FLAG}: {name}: {problem}") from error

    async def send_canary(self) -> None:
        """Generate one token, ahead of requests where the version has priorities."""
        params = self._package.sampling_params(max_tokens=1, ignore_eos=True, detokenize=False)
        urgent = {"priority": 1.0} if "priority" in self._package.generate_arguments else {}
        await self._llm.generate_async(list(PROBE_PROMPT), params, streaming=False, **urgent)

    async def _call_once(self, vocabulary: Vocabulary | None, place: Mapping[str, Any] | None = None) -> Calls:
        self._steps = []
        probe = CallProbe(self._channel.reporter(PROBE), PROBE_TOKEN, vocabulary)
        try:
            output = await self._ask(place, logits_processor=[probe])
        except ProbeRefused as error:
            raise StartupError(f"TensorRT-LLM refuses a logits processor: {error}") from error
        self._channel.poll()
        tokens = list(output.outputs[0].token_ids)
        return judge_calls(self._steps, tokens, PROBE_TOKEN, len(PROBE_PROMPT))

    async def _ask(self, place: Mapping[str, Any] | None = None, **fields: Any) -> Any:
        """Run one short probe request, on a rank. Raises `ProbeRefused` or `StartupError`."""
        unknown = set(fields) - self._package.sampling_fields
        if unknown:
            raise ProbeRefused(", ".join(unknown))
        try:
            params = self._package.sampling_params(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **fields)
            return await self._llm.generate_async(list(PROBE_PROMPT), params, streaming=False, **(place or {}))
        except (self._package.request_error, ValueError, TypeError) as error:
            raise ProbeRefused(one_line(error)) from error
        except Exception as error:  # the start-up boundary
            raise StartupError(f"TensorRT-LLM failed on its first requests: {error}") from error
