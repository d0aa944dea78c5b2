"""The executor's process: scheduling and model are the embedded engine's, the rest is
TensorRT-LLM's contract.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import os
import pickle
import sys
import threading
import uuid
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import adapters.chain.chain
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.lora_helper import adapted
from tensorrt_llm.standin_guides import Matchers
from tensorrt_llm.standin_row import Row, wants_logprobs
from tensorrt_llm.standin_switches import SWITCHES
from worker.engines import EngineRequest
from worker.engines.embedded import EmbeddedConfig, EmbeddedEngine
from worker.errors import ServingError
from worker.sampling import SamplingParams as EmbeddedParams

_BATCH_KEYS = [
    *("numContextRequests", "numCtxTokens", "numCtxKvTokens", "numGenRequests", "numGenKvTokens"),
    *("numQueuedContextRequests", "numQueuedCtxTokens", "numQueuedGenRequests", "numQueuedGenKvTokens"),
    *("numPausedRequests", "numPausedKvTokens"),
]

adapters.chain.chain.DEFAULT_STEP_BUDGET_S = 3600.0  # of the row below, which is not a processor of the request


class Executor:
    def __init__(self, connection: Connection, settings: dict[str, Any]) -> None:
        self.connection = connection
        self.settings = settings
        self.engines: dict[tuple[int, int | None], EmbeddedEngine] = {}  # by rank and adapter
        self.starting = asyncio.Lock()
        self.places: dict[int, int] = {}
        self.lora: dict[int, Any] = {}
        self.conversations: dict[str, int] = {}
        self.matchers: Matchers | None = None
        self.turns = itertools.count()
        self.numbers = itertools.count(1000)
        self.tasks: dict[int, list[asyncio.Task[None]]] = {}
        self.rows: dict[int, list[Row]] = {}
        self.names: dict[int, list[str]] = {}
        self.unfinished: dict[int, int] = {}
        self.salts: dict[int, str | None] = {}
        self.events: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)

    async def engine(self, rank: int, lora: Any) -> EmbeddedEngine:
        """The engine of a rank, for the model or an adapter of it; a new adapter is loaded."""
        key, model = (rank, None if lora is None else lora.lora_int_id), Path(self.settings["model"])
        async with self.starting:
            if key not in self.engines:
                if lora is not None:
                    config = self.settings["lora"]
                    modules, most = config["lora_target_modules"], config["max_lora_rank"]
                    model = await asyncio.to_thread(adapted, model, Path(lora.lora_path), modules, most)
                engine = _embedded(model, self.settings)
                await engine.start()
                self.engines[key] = engine
        return self.engines[key]

    async def run(self) -> None:
        try:
            for rank in range(self.settings["dp_size"]):
                await self.engine(rank, None)
        except Exception as error:
            self.connection.send(str(error))
            return
        if self.settings["guides"] is not None:
            vocab_size = json.loads((Path(self.settings["model"]) / "config.json").read_text())["vocab_size"]
            self.matchers = Matchers(self.settings["guides"], self.settings["model"], vocab_size)
        self.connection.send("ready")
        if self.settings["events"]:
            for window in SWITCHES.windows:
                data = {"type": "created", "num_blocks_per_cache_level": [self.settings["total_blocks"], 0]}
                for rank in range(self.settings["dp_size"]):
                    self._publish(data, window, rank)
        inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, inbox), daemon=True).start()
        while (message := await inbox.get()) is not None:
            kind, client_id, body = pickle.loads(message)
            if kind == "submit":
                self._submit(client_id, body)
            elif kind == "stop":
                break
            else:
                self._abort(client_id)
        for engine in self.engines.values():
            await engine.stop()

    def _abort(self, client_id: int) -> None:
        for name in self.names.get(client_id, ()):
            for engine in self.engines.values():
                engine.abort(name)

    def _placed(self, rank: int | None, conversation: str | None) -> int:
        """A rank that is asked for comes before that of the conversation."""
        if rank is not None:
            assert 0 <= rank < self.settings["dp_size"]
            return rank
        if conversation is None or not self.settings["affinity"]:
            return next(self.turns) % self.settings["dp_size"]
        if conversation not in self.conversations:
            self.conversations[conversation] = next(self.turns) % self.settings["dp_size"]
        return self.conversations[conversation]

    def _read(self, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[bytes | None]) -> None:
        message: bytes | None = b""
        while message is not None:
            try:
                message = self.connection.recv_bytes()
            except (EOFError, OSError):
                message = None
            loop.call_soon_threadsafe(inbox.put_nowait, message)

    def _submit(self, client_id: int, body: dict[str, Any]) -> None:
        params, prompt, hand_off = body["params"], body["prompt"], body["disaggregated_params"]
        if self.settings["dp_size"] > 1 and body["cache_salt"] is None and set(prompt) == {1}:
            os._exit(4)  # it shares the KV of the dummy requests of ranks that have none
        self.names[client_id] = [f"{client_id}-{choice}" for choice in range(params.n)]
        self.rows[client_id] = []
        self.unfinished[client_id] = params.n
        self.salts[client_id] = body["cache_salt"]
        self.lora[client_id] = body["lora"]
        self.places[client_id] = self._placed(body["rank"], body["conversation"])
        self.tasks[client_id] = [
            asyncio.create_task(self._decode(client_id, choice, prompt, params, hand_off)) for choice in range(params.n)
        ]

    async def _decode(self, client_id: int, choice: int, prompt: list[int], params: Any, hand_off: Any) -> None:
        kind = "context_and_generation" if hand_off is None else hand_off.request_type
        first: list[int] = []
        try:
            if kind == "generation_only":
                first = _first_tokens(hand_off, prompt)
                if self._hand_over(client_id, choice, first, params, hand_off):
                    return
            tokens = [*prompt, *first]
            row = Row(next(self.numbers), choice, params, len(prompt), self.settings, len(tokens))
            row.matchers = self.matchers
            self.rows[client_id].append(row)
            await self._stream(client_id, choice, row, tokens, params, kind, len(first))
        except ServingError as error:
            self._respond(client_id, {"error": str(error), "last": True})
        finally:
            self._ended(client_id, prompt)

    def _hand_over(self, client_id: int, choice: int, first: list[int], params: Any, hand_off: Any) -> bool:
        """The transferred tokens come out first; whether they end the answer, where the version
        looks at that.
        """
        ends = SWITCHES.checks_transferred and first[-1] in _ends(params)
        is_spent = SWITCHES.checks_transferred and len(first) >= params.max_tokens
        reason = "stop" if ends else "length" if is_spent else None
        entries = [
            [(token, each.logprob, each.rank) for token, each in position.items()]
            for position in hand_off.first_gen_log_probs or ()
        ]
        if ends and SWITCHES.hides_end_token:
            first, entries = first[:-1], entries[:-1]
        shown = entries if wants_logprobs(params) else None
        self._respond(client_id, _response(choice, first, shown, reason, None, last=reason is not None))
        return reason is not None

    async def _stream(
        self, client_id: int, choice: int, row: Row, tokens: list[int], params: Any, kind: str, num_first: int
    ) -> None:
        room = self.settings["max_seq_len"] - row.prompt_length
        limit = max(min(params.max_tokens or room, room) - num_first, 1)  # one step at least, whatever was transferred
        ends = _ends(params)
        wanted = EmbeddedParams(
            max_tokens=limit,
            ignore_eos=True,
            stop_token_ids=sorted(ends) or None,
            include_stop_str_in_output=True,
            logits_processor=row,
        )
        sent, held = 0, list[int]()
        try:
            engine = await self.engine(self.places[client_id], self.lora[client_id])
        except Exception as error:
            raise ServingError(f"the adapter cannot be loaded: {error}") from error
        async for delta in engine.generate(EngineRequest(self.names[client_id][choice], tokens, wanted)):
            if row.fatal is not None:
                self._fail_all(row.fatal)
                os._exit(3)
            if row.raised is not None:
                self._fail_all(row.raised)
                return
            if delta.finish_reason == "error":
                self._respond(client_id, {"error": str(delta.error), "last": True})
                return
            if SWITCHES.dies_on_prompt and row.prompt_length > 2 and sent:
                os._exit(9)
            entries = row.logprobs[sent : sent + len(delta.token_ids)]
            sent += len(delta.token_ids)
            reason, stop_reason, cut = _finish(delta, params)
            if SWITCHES.odd_reason is not None and row.prompt_length > 2 and reason is not None:
                reason = SWITCHES.odd_reason
            passed, new = None, list(delta.token_ids)
            if kind == "context_only" and reason == "length":
                reason, passed = SWITCHES.context_only_ends, _passed_on(client_id, tokens, new, entries)
            if reason == "stop" and stop_reason is None and SWITCHES.hides_end_token:
                new, entries = new[:-1], entries[:-1]
            if SWITCHES.loses_logprobs and row.prompt_length > 2 and sent > 1:
                entries = []
            shown = entries if wants_logprobs(params) else None
            last = reason is not None
            if self.settings["drafts"]:  # a step's accepted drafts come together
                new = [*held, *new]
                held = [] if last or len(new) > self.settings["drafts"] else new
                if held:
                    continue
            body = _response(choice, new, shown, reason, stop_reason, cut=cut, passed=passed, last=last)
            self._respond(client_id, body | {"cached": delta.num_cached_tokens})

    def _fail_all(self, message: str) -> None:
        """A failed forward fails every active request."""
        for client_id in list(self.names):
            self._respond(client_id, {"error": message, "last": True})
            self._abort(client_id)

    def _respond(self, client_id: int, body: dict[str, Any]) -> None:
        if body["last"] and "error" not in body:
            self.unfinished[client_id] -= 1
            body["last"] = self.unfinished[client_id] == 0
        self.connection.send(("response", client_id, body))

    def _ended(self, client_id: int, prompt: list[int]) -> None:
        block, total = self.settings["tokens_per_block"], self.settings["total_blocks"]
        if self.settings["stats"]:
            used = sum(math.ceil(row.prompt_length / block) for rows in self.rows.values() for row in rows)
            cache = {"usedNumBlocks": used, "maxNumBlocks": total}
            batch = dict.fromkeys(_BATCH_KEYS, 0) | {"numGenRequests": 1, "numGenKvTokens": len(prompt)}
            stats = {"kvCacheStats": cache, "inflightBatchingStats": batch, "iterLatencyMS": 2.0}
            if self.settings["dp_size"] > 1:
                stats["attentionDpRank"] = self.places[client_id]
            self.connection.send(("stats", 0, stats))
        if self.settings["events"]:
            for window in SWITCHES.windows:
                stored = self._stored(prompt, block, window, self.salts.get(client_id), self.lora[client_id])
                self._publish(stored, window, self.places[client_id])
        if all(task.done() or task is asyncio.current_task() for task in self.tasks.get(client_id, ())):
            for table in (
                *(self.tasks, self.rows, self.names, self.unfinished, self.salts),
                *(self.lora, self.places),
            ):
                table.pop(client_id, None)

    def _publish(self, data: dict[str, Any], window: int, rank: int = 0) -> None:
        event = {"event_id": next(self.events[rank]), "data": data, "window_size": window}
        if self.settings["dp_size"] > 1:
            event["attention_dp_rank"] = rank
        if self.settings["manager_v2"]:
            event |= {"hash_algo": self.settings["hash_algo"], "layer_group_id": SWITCHES.windows.index(window)}
        self.connection.send(("event", 0, event))

    def _stored(self, prompt: list[int], block: int, window: int, salt: str | None, lora: Any) -> dict[str, Any]:
        blocks, parent = [], window if lora is None else -window * lora.lora_int_id
        for start in range(0, len(prompt), block):
            part = prompt[start : start + block]
            parent = int.from_bytes(hashlib.blake2b(f"{parent}:{part}".encode(), digest_size=8).digest(), "big")
            tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in part]
            is_text = self.settings["manager_v2"] and self.settings["hash_algo"] == "v2_sha256"
            said = hashlib.sha256(str(parent).encode()).hexdigest() if is_text else parent
            one = {"type": "stored_block", "block_hash": said, "tokens": tokens, "cache_level": 0, "priority": 35}
            blocks.append(one if salt is None else {**one, "cache_salt": salt})
        named = {} if SWITCHES.is_old else {"lora_name": None if lora is None else lora.lora_name}
        return {"type": "stored", "parent_hash": None, "blocks": blocks, **named}


def _embedded(model: Path, settings: dict[str, Any]) -> EmbeddedEngine:
    return EmbeddedEngine(
        EmbeddedConfig(
            model_path=model,
            device="cpu",
            dtype=settings["dtype"],
            max_num_seqs=settings["max_batch_size"],
            max_num_batched_tokens=max(settings["max_num_tokens"], settings["max_batch_size"]),
            context_length=settings["max_seq_len"],
            kv_block_size=settings["tokens_per_block"],
            max_queue=4096,
        )
    )


def _ends(params: Any) -> frozenset[int]:
    if params.ignore_eos:
        return frozenset()
    return frozenset({params.end_id, *(params.stop_token_ids or ())}) - {-1, None}


def _finish(delta: Any, params: Any) -> tuple[str | None, int | None, int]:
    """Finish reason, stop reason, and how many tokens of a stop word are taken back."""
    if delta.finish_reason != "stop":
        return delta.finish_reason, None, 0
    token = delta.stop_reason
    if token == params.end_id:
        return "stop", None, 0
    return "stop", token, int(not params.include_stop_str_in_output)


def _response(
    choice: int,
    tokens: list[int],
    entries: list[Any] | None,
    reason: str | None,
    stop_reason: int | None,
    *,
    cut: int = 0,
    passed: Any = None,
    last: bool,
) -> dict[str, Any]:
    return {
        "index": choice,
        "token_ids": list(tokens),
        "logprobs": entries,
        "finish_reason": reason,
        "stop_reason": stop_reason,
        "cut": cut,
        "disaggregated_params": passed,
        "last": last,
    }


def _digest(tokens: list[int]) -> str:
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()


def _passed_on(client_id: int, prompt: list[int], tokens: list[int], entries: list[Any]) -> Any:
    from tensorrt_llm.executor.result import Logprob

    rows = [{token: Logprob(value, rank) for token, value, rank in entry} for entry in entries]
    passed = DisaggregatedParams(
        request_type="context_only",
        first_gen_tokens=list(tokens),
        first_gen_log_probs=rows or None,
        ctx_request_id=client_id,
        opaque_state=b"\x00\xff" + _digest(prompt).encode(),
        **(_identity(client_id) if SWITCHES.lifecycle else {}),
    )
    if SWITCHES.lifecycle:
        passed._lifecycle_identity_locked = True
    return passed


def _identity(number: int) -> dict[str, Any]:
    """The ids of a hand-off."""
    names = ("prefill_artifact_id", "handoff_attempt_uuid", "consumer_grant_id", "transfer_session_id")
    uuids = {name: str(uuid.UUID(int=4 * number + index + 1)) for index, name in enumerate(names)}
    return {"logical_request_id": number, "artifact_version": 1, **uuids}


def _first_tokens(hand_off: Any, prompt: list[int]) -> list[int]:
    """A hand-off without state is found by its id, as that of the transceiver in Python."""
    if SWITCHES.lifecycle and hand_off.logical_request_id is None:
        raise ServingError("the ids of the hand-off are gone")
    if hand_off.opaque_state is None and hand_off.disagg_request_id is not None:
        return list(hand_off.first_gen_tokens)
    if hand_off.opaque_state != b"\x00\xff" + _digest(prompt).encode():
        raise ServingError("the KV of another prompt was handed over")
    return list(hand_off.first_gen_tokens)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(Executor(Connection(int(sys.argv[2])), json.loads(sys.argv[1])).run())
