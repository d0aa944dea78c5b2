"""Two workers under all that happens to them at once: every request ends once, with the tokens of
the weights that it names, wherever its prompt was computed; and every page comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import torch
from connector_doubles import BLOCK, CONTEXT, Side, TensorRecallModel
from effort import examples
from engine_doubles import Drafting
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from kv_doubles import END, FIRST, WIDTH, answer, recall_request
from test_stepper_properties import one_hot

from adapters.catalog import Catalog, Requested, Selection
from adapters.contract import Context
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.chain_builder import ChainBuilder
from worker.engines.embedded.admission import admit
from worker.engines.embedded.logits_tap import LogitsTap
from worker.engines.embedded.plan import Plan, Request
from worker.engines.embedded.scored_rows import show_scored
from worker.engines.embedded.transfer.handle import KvHandle, handle_from_json
from worker.engines.embedded.transfer.transport import KvRead
from worker.engines.weights import WeightVersion
from worker.errors import InvalidRequest
from worker.sampling import SamplingParams

PAGE, LEASE_S = 16, 60.0
KINDS = ("plain", "guided", "scored")
BUILDER = ChainBuilder(Catalog.default(), Context(Vocabulary(WIDTH)))
TRANSPORT, DECODE = "worker.engines.embedded.transfer.transport.", "worker.engines.embedded.transfer.decode_side."


class NoAgent:
    """In the place of a NIXL agent: the workers are one process, whose memory needs none."""

    name, metadata = "none", b""

    def __init__(self, *arguments: object) -> None:
        pass

    def poll(self) -> None:
        pass

    def disconnect(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


class Scores(LogitsTap):
    """A tap that keeps the most likely token behind each one from `first_wanted` on."""

    def __init__(self, first: int, stop: int) -> None:
        self.first_wanted, self.stop = first, stop
        self.found: list[int] = []

    @property
    def wants_prompt(self) -> bool:
        return self.first_wanted + len(self.found) < self.stop

    def see_prompt(self, start: int, logits: torch.Tensor) -> None:
        known = self.first_wanted + len(self.found)
        assert self.first_wanted <= start <= known
        self.found += logits.argmax(-1).tolist()[known - start : self.stop - start]

    def start_over(self) -> None:
        self.found = []

    def see_generated(self, position: int, logits: torch.Tensor) -> None:
        raise AssertionError("nothing was asked for")


class ScoringModel(TensorRecallModel):
    """Scores prompts, too."""

    def forward(self, plan: Plan) -> torch.Tensor:
        logits = super().forward(plan)
        if plan.scored:
            show_scored(plan, torch.tensor(self.computed), one_hot)
        return logits


class Reads:
    """Reads of a worker that may go on writing where they have been given up."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.is_writing = False
        self.under_way: dict[int, tuple[KvRead, list[int], int, int]] = {}
        self._read, self._release = side.connector.transport.read, KvRead.release

    def begin(self, handle: object, pages: Sequence[int], start: int, stop: int) -> KvRead:
        read = self._read(handle, pages, start, stop)  # type: ignore[arg-type]
        self.under_way[id(read)] = read, list(pages), start, stop
        return read

    def release(self, read: KvRead) -> bool:
        if self.is_writing:
            return False
        self.under_way.pop(id(read), None)
        return self._release(read)

    def write(self) -> None:
        """What a read that was given up may do."""
        for read, _ in self.side.connector._decode.abandoned._reads:
            _, pages, start, stop = self.under_way[id(read)]
            for position in range(start, stop):
                self.side.model.keys[pages[position // PAGE], 0, position % PAGE, 0] = -9


class Transfers(RuleBasedStateMachine):
    """Prompts are computed here and answered there, while weights change and memory is short."""

    @initialize(pages=st.integers(12, 20), rows=st.integers(2, 4), drafts=st.booleans(), seed=st.integers(0, 2**16))
    def begin(self, pages: int, rows: int, drafts: bool, seed: int) -> None:
        self.source, self.now_s = random.Random(seed), 0.0
        self.patches = ExitStack()
        for name, value in (
            ("connector_doubles.TensorRecallModel", ScoringModel),
            ("worker.engines.embedded.kv_cache.budget.PAGE_TOKENS", PAGE),
            (TRANSPORT + "NixlAgent", NoAgent),
            (TRANSPORT + "SLICE_BYTES", 64),
            (TRANSPORT + "PIECE_BYTES", 8 * PAGE),
            (DECODE + "IDLE_BUDGET_S", 0.0),
            (DECODE + "BUSY_BUDGET_S", 0.0),
        ):
            self.patches.enter_context(patch(name, value))
        sizes: dict[str, Any] = {"kv_blocks": pages * PAGE // BLOCK, "max_num_seqs": rows, "max_num_batched_tokens": 24}
        self.prefill = Side(lease_s=LEASE_S, clock=lambda: self.now_s, **sizes)
        self.decode = Side(**sizes)
        self.sides = self.prefill, self.decode
        for side in self.sides:
            side.stepper.weights = WeightVersion(0, "0", "recall")
        if drafts:
            self.decode.stepper.speculator = Drafting(self.often_right)
        self.reads = Reads(self.decode)
        self.patches.enter_context(patch.object(self.decode.connector.transport, "read", self.reads.begin))
        self.patches.enter_context(patch.object(KvRead, "release", lambda read: self.reads.release(read)))
        self.prompts: dict[str, list[int]] = {}
        self.asked: dict[str, tuple[str, int, Request]] = {}  # of the decode worker
        self.num_handles = 0
        self.gone: set[str] = set()

    def often_right(self, one: Request) -> list[int]:
        length, count = one.prompt_length, len(one.tokens) - one.prompt_length
        right = answer(one.tokens[:length], count + self.source.randrange(5), self.decode.model.first)[count:]
        return right + [self.source.randrange(3, WIDTH) for _ in range(self.source.randrange(3))]

    @property
    def live(self) -> list[str]:
        return [name for name in self.asked if name not in self.gone and self.decode.finished(name) is None]

    @rule(family=st.integers(0, 1), shared=st.integers(0, 60), own=st.integers(1, 12), number=st.integers(1, 4))
    def compute(self, family: int, shared: int, own: int, number: int) -> None:
        for _ in range(number):
            name = str(len(self.prompts))
            source = random.Random(name)
            prompt = [3 + (family + position * position) % 80 for position in range(shared)]
            self.prompts[name] = prompt + [source.randrange(6, 90) for _ in range(own)]
            self.prefill.prefill(name, self.prompts[name])

    @precondition(lambda self: any(name not in self.asked for name in self.prompts))
    @rule(kind=st.sampled_from(KINDS), count=st.integers(1, 20), client=st.sampled_from([None, "a"]))
    def ask_all(self, kind: str, count: int, client: str | None) -> None:
        """All that can be computed there is answered here."""
        self.prefill.stepper.open_gate()
        for _ in range(30):
            self.step_once([self.prefill])
        for name in self.prompts:
            if name not in self.asked and self.prefill.finished(name) == "length":
                kv = self.prefill.outputs[name][-1].kv
                assert kv is not None
                handle = None
                with suppress(InvalidRequest):  # KV of other weights
                    handle = handle_from_json(kv, self.decode.connector.layout, len(self.prompts[name]))
                self.ask(name, kind, count, client, handle)

    @precondition(lambda self: any(name not in self.asked for name in self.prompts))
    @rule(kind=st.sampled_from(KINDS), count=st.integers(1, 20), client=st.sampled_from([None, "a"]))
    def ask_here(self, kind: str, count: int, client: str | None) -> None:
        """A prompt is computed here, too."""
        self.ask(next(name for name in self.prompts if name not in self.asked), kind, count, client, None)

    def ask(self, name: str, kind: str, count: int, client: str | None, handle: KvHandle | None) -> None:
        request = self.request(name, kind, self.prompts[name], count)
        request.client = client
        self.asked[name] = kind, count, request
        self.num_handles += handle is not None
        self.decode.stepper.add(request, handle)

    def request(self, name: str, kind: str, prompt: list[int], count: int) -> Request:
        if kind != "guided":
            request = recall_request(self.decode.model, name, prompt, count)
            request.tap = Scores(self.source.randrange(len(prompt)), len(prompt)) if kind == "scored" else None
            return request
        guidance = Requested("cfg", {"scale": 2.0, "negative_token_ids": prompt[-7:]})
        asked = EngineRequest(name, prompt, SamplingParams(max_tokens=count))
        asked = BUILDER.prepare(asked, Selection((guidance,)), BUILDER.context(frozenset({END}), 0, count))
        return admit(asked, 0, self.decode.model, CONTEXT)  # type: ignore[arg-type]

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 99))
    def abort(self, number: int) -> None:
        name = self.live[number % len(self.live)]
        output = self.decode.stepper.abort(name)
        assert output is not None
        assert (output.request_id, output.finish_reason) == (name, "cancelled")
        assert self.decode.stepper.abort(name) is None
        self.gone.add(name)

    @precondition(lambda self: self.decode.stepper.scheduler.queues.running)
    @rule(number=st.integers(0, 99))
    def preempt(self, number: int) -> None:
        queues = self.decode.stepper.scheduler.queues
        queues.preempt(queues.running[number % len(queues.running)])

    @rule(steps=st.integers(1, 8), order=st.sampled_from(["pd", "p", "d"]))
    def step(self, steps: int, order: str) -> None:
        for _ in range(steps):
            self.step_once([side for key, side in zip("pd", self.sides, strict=True) if key in order])

    @rule(seconds=st.sampled_from([1.0, 1.0, LEASE_S / 2]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(side=st.sampled_from([0, 1, 1]), what=st.sampled_from(["pause", "shut", "open", "open", "drop", "weights"]))
    def change_state(self, side: int, what: str) -> None:
        one = self.sides[side]
        actions: dict[str, Callable[[], None]] = {
            "pause": lambda: setattr(one.stepper, "is_paused", True),
            "shut": one.stepper.shut_gate,
            "open": one.stepper.open_gate,
            "drop": one.stepper.drop_kv,
            "weights": lambda: self.change_weights(one),
        }
        actions[what]()

    def change_weights(self, side: Side) -> None:
        assert side.stepper.weights is not None
        version = side.stepper.weights.number + 1

        def change() -> None:
            side.model.first = FIRST + version

        side.stepper.change_weights(change, WeightVersion(version, str(version), f"v{version}"))

    @rule()
    def write_on(self) -> None:
        """Reads that are given up from now on, or were, cannot be cancelled, or can be again."""
        self.reads.is_writing = not self.reads.is_writing

    def step_once(self, sides: Sequence[Side]) -> None:
        self.reads.write()
        for side in sides:
            if side.stepper.wait_s is not None:
                side.step()
                side.stepper.scheduler.cache.check_blocks()
        received = self.decode.connector._decode
        most = self.decode.stepper.scheduler.queues.max_num_seqs
        assert len(received._reading) + len(received._ready) <= most, "pages that no row has are hoarded"

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        with self.patches:
            self.end()
            for name in self.asked:
                self.check_answer(name)

    def end(self) -> None:
        self.reads.is_writing = False
        for side in self.sides:
            side.stepper.open_gate()
        for _ in range(20_000):
            if not self.live and all(side.is_empty for side in self.sides):
                break
            assert self.decode.stepper.wait_s is not None or not self.live, "it is not woken"
            self.step_once(self.sides)
            self.now_s += 0.1
        assert not self.live, f"not ended: {self.decode.connector!r} {self.decode.stepper.scheduler!r}"
        assert all(side.is_empty for side in self.sides), f"left behind: {[side.connector for side in self.sides]}"
        counts = self.prefill.connector.counts
        assert counts["leased"] == counts["released"] + counts["timed_out"]
        ended = self.decode.connector.counts
        found = {name: ended[name] for name in ("received", "cached", "expired", "lost", "cancelled")}
        assert sum(found.values()) == self.num_handles, f"a transfer has not one outcome: {found}"
        assert self.decode.stepper.num_waiting == self.decode.connector.num_waiting == 0
        for side in self.sides:
            side.close()

    def check_answer(self, name: str) -> None:
        (kind, count, request), prompt = self.asked[name], self.prompts[name]
        said, tokens = self.decode.outputs.get(name, []), self.decode.tokens(name)
        ends = [output.finish_reason for output in said if output.finish_reason is not None]
        assert len(ends) == (name not in self.gone), f"request {name} ended {len(ends)} times"
        assert not any(output.error for output in said)
        named = [output.weights for output in said if output.weights is not None]
        assert not tokens or named[0][0] == 0
        stops = [*[first for first, _ in named], len(tokens)][1:]
        for (first, version), stop in zip(named, stops, strict=True):
            wanted = answer(prompt + tokens[:first], count - first, FIRST + version.number)
            assert tokens[first:stop] == wanted[: stop - first]
        if ends:
            assert stops[-1] - named[-1][0] == len(wanted), f"request {name} is too short"
        if kind == "scored" and tokens:
            assert isinstance(request.tap, Scores)
            first_of_all, of_tap = FIRST + named[0][1].number, range(request.tap.first_wanted, len(prompt))
            assert request.tap.found == [answer(prompt[: end + 1], 1, first_of_all)[0] for end in of_tap]


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
