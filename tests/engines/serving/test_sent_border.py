"""Tokens that were sent stay, whatever happens to a request that takes tokens back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from backtracking_world import Spelled
from effort import examples
from engine_doubles import END, PADDING, WIDTH, Drafting, ScriptedModel, stepper
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapters.chain import ProcessorChain
from adapters.contract import BacktrackingProcessor, Context, Processor, Reads, Stage
from adapters.processors.masks import AllowedTokens
from adapters.processors.phrase_ban import PhraseBan
from adapters.processors.stochastic import Mirostat
from adapters.third_party import third_party_processor
from adapters.vocabulary import Vocabulary
from worker.engines import EngineRequest
from worker.engines.embedded.admission import admit
from worker.engines.embedded.plan import Request
from worker.engines.embedded.sampling import LogitsCollector
from worker.engines.weights import WeightVersion
from worker.sampling import SamplingParams

NEW_TOKENS = 18
PROMPT = [10, 11, 12]
WORD_END = 3

# few tokens have text, and those are sampled
PIECES: list[str | bytes] = ["", "", "", "g", *"inst abcdef", "st", "in", "é", b"\xc3", b"\xa9", b"\xe4\xb8", "  "]
LETTERS = range(WORD_END + 1, len(PIECES))
SPELLED = [piece.encode() if isinstance(piece, str) else piece for piece in PIECES]
VOCABULARY = Vocabulary(WIDTH, Spelled(SPELLED + [b""] * (WIDTH - PADDING - len(PIECES))), [END])  # type: ignore[arg-type]


def text_of(token_ids: Sequence[int]) -> str:
    return b"".join(SPELLED[token_id] for token_id in token_ids).decode(errors="replace")


class SumsLogits:
    """A Dynamo processor: what it adds depends on all that it has been shown."""

    def __init__(self) -> None:
        self.sum = 0.0

    def __call__(self, input_ids: Sequence[int], logits: object) -> None:
        row: object = logits.softmax(-1)[4:9].sum()  # type: ignore[attr-defined]
        self.sum += float(row)  # type: ignore[arg-type]
        logits[9] += self.sum  # type: ignore[index]


def processors(context: Context, phrases: Sequence[Sequence[str]], *, observed: bool = False) -> list[Processor]:
    found: list[Processor] = [PhraseBan(PhraseBan.Args(phrases=list(each)), context) for each in phrases]
    found.append(AllowedTokens(AllowedTokens.Args(token_ids=list(LETTERS)), context))
    if observed:
        found.append(Mirostat(Mirostat.Args(tau=1.0, eta=1.0), context))
        found.append(third_party_processor(SumsLogits, stage=Stage.TRUNCATION))
    return found


@dataclass
class Run:
    """One request under way in an engine of its own.

    Attributes:
        sent: Its tokens so far, as its client has them.
    """

    model: ScriptedModel
    seed: int
    phrases: Sequence[Sequence[str]]
    observed: bool = False
    generated: Sequence[int] = ()
    members: list[Processor] | None = None
    speculator: Drafting | None = None
    sent: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        ends = frozenset({END, WORD_END})
        context = Context(VOCABULARY, ends, self.seed)
        members = self.members or processors(context, self.phrases, observed=self.observed)
        chain = ProcessorChain(members, context)
        chain.start(PROMPT)
        params = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=None if self.observed else 1.5,
            seed=self.seed,
            stop_token_ids=[WORD_END],
            include_stop_str_in_output=bool(self.seed % 2),
        )
        self.stepper = stepper(self.model, kv_block_size=4)
        if self.speculator is not None:
            self.stepper.speculator = self.speculator
        length = self.model.context_length
        asked = EngineRequest("one", PROMPT, params, chain, generated_token_ids=self.generated)
        self.request = admit(asked, 0, self.model, length)  # type: ignore[arg-type]
        self.stepper.add(self.request)
        self.sent = list(self.generated)

    @property
    def chain(self) -> ProcessorChain:
        assert self.request.chain is not None
        return self.request.chain

    @property
    def taken_back(self) -> list[int]:
        return [record.rollbacks or 0 for record in self.chain.receipt.records]

    def step(self) -> None:
        for output in self.stepper.step():
            self.sent += [] if output.token_id is None else [output.token_id]
            self.finish_reason, self.error = output.finish_reason, output.error
        assert self.request.tokens[len(PROMPT) :][: len(self.sent)] == self.sent
        self.stepper.scheduler.check_integrity()

    def suspend(self) -> None:
        self.stepper.abort("one")
        assert self.request.tokens[len(PROMPT) :] == self.chain.tokens[len(PROMPT) :] == self.sent
        self.request.num_computed = 0
        self.stepper.add(self.request)

    def end(self, suspended: Sequence[int] = (), preempted: Sequence[int] = ()) -> Run:
        for number in range(10_000):
            if self.finish_reason is not None:
                return self
            if number in suspended:
                self.suspend()
            if number in preempted and self.stepper.scheduler.queues.decoding:
                self.stepper.scheduler.queues.preempt(self.stepper.scheduler.queues.decoding[0])
            self.step()
        raise AssertionError("the answer does not end")

    def check(self) -> None:
        assert self.error is None
        assert len(self.sent) <= NEW_TOKENS
        shown = text_of(self.sent).casefold()
        assert not any(phrase.casefold() in shown for each in self.phrases for phrase in each), shown


PHRASES = {
    "of the issue": [["in", "st"]],
    "in two processors": [["in", "ab"], ["st", "nt"]],
    "that begin anywhere": [["ins", "nst", "t ", "b", "AbC", " i", "é"]],
    "of no characters": [["\ufffd", "é "]],
    "that an end token completes": [["g", "ST "]],
}


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.mark.parametrize("name", PHRASES)
def test_sent_tokens_stay_and_no_phrase_is_among_them(model: ScriptedModel, name: str) -> None:
    rewinds = 0
    for seed in range(60):
        run = Run(model, seed, PHRASES[name]).end()
        run.check()
        rewinds += sum(run.taken_back)
    assert rewinds


def of_letters(request: Request) -> Sequence[int]:
    """A draft that is sometimes right."""
    model, tokens = ScriptedModel(), list(request.tokens)
    for _ in range(3):
        row = model.row(tokens)
        tokens.append(max(LETTERS, key=lambda token_id: float(row[token_id])))
    return tokens[len(request.tokens) :]


@settings(max_examples=examples(20))
@given(
    st.integers(0, 10**6),
    st.sampled_from(list(PHRASES)),
    st.booleans(),
    st.lists(st.integers(0, 60), max_size=4),
    st.lists(st.integers(0, 60), max_size=4),
)
@example(13, "that begin anywhere", False, list(range(0, 60, 3)), [])  # taken back again behind each suspension
def test_an_answer_is_the_same_however_it_is_decoded(
    seed: int, name: str, observed: bool, suspended: list[int], preempted: list[int]
) -> None:
    model, phrases = ScriptedModel(), PHRASES[name]
    plain = Run(model, seed, phrases, observed).end()
    plain.check()
    disturbed = Run(model, seed, phrases, observed).end(suspended, preempted)
    drafted = Run(model, seed, phrases, observed, speculator=Drafting(of_letters)).end(suspended, preempted)
    assert disturbed.sent == drafted.sent == plain.sent
    assert disturbed.taken_back == drafted.taken_back == plain.taken_back
    for cut in range(1, len(plain.sent)):
        continued = Run(model, seed, phrases, observed, plain.sent[:cut]).end()
        assert (continued.sent, continued.finish_reason) == (plain.sent, plain.finish_reason), cut


def begun(model: ScriptedModel, seed: int) -> Run:
    """A request that scores its prompt, with its first token; the engine's weights may change."""
    run = Run(model, seed, PHRASES["of the issue"])
    run.stepper.weights = run.request.weights = WeightVersion()
    run.request.tap = LogitsCollector(PROMPT, top_n=1)
    while len(run.request.tokens) == len(PROMPT):
        run.step()
    return run


def test_scores_of_a_prompt_have_its_first_tokens_weights() -> None:
    """A token that is held while the weights change is sampled again, with the new ones."""
    seed = next(seed for seed in range(60) if not begun(ScriptedModel(), seed).sent)
    model, changed = ScriptedModel(), ScriptedModel()
    changed.by_token = model.by_token.flip(0)
    run, fresh = begun(model, seed), begun(changed, seed).end()

    def change() -> None:
        model.by_token = changed.by_token

    run.stepper.change_weights(change, WeightVersion(1))
    run.end()
    taps = [one.request.tap for one in (run, fresh)]
    assert run.sent == fresh.sent
    assert all(isinstance(tap, LogitsCollector) for tap in taps)
    assert taps[0].prompt_logprobs == taps[1].prompt_logprobs  # type: ignore[union-attr]


class HoldsNothing(BacktrackingProcessor):
    """Takes the first token back when there are three, and has not held it."""

    name = "holds_nothing"
    reads = Reads.GENERATED

    @property
    def held_from(self) -> int | None:
        return None

    @property
    def rewinds_to(self) -> int | None:
        return 0 if self.num_generated == 3 else None


def test_one_that_would_take_back_a_sent_token_fails_its_request(model: ScriptedModel) -> None:
    run = Run(model, 1, (), members=[HoldsNothing(None, Context(VOCABULARY))]).end()
    assert run.error == (
        "logits processor holds_nothing: takes back generated token 0, which was sent since held_from did not hold it, "
        "at position 6"
    )
    assert len(run.sent) == 2


def test_the_engine_itself_rewinds_no_sent_token(model: ScriptedModel) -> None:
    run = Run(model, 4, PHRASES["of the issue"])
    while not run.sent:
        run.step()
    assert run.request.num_sent == len(PROMPT) + len(run.sent)
    with pytest.raises(AssertionError, match=f"one: position 3 of {run.request.num_sent} sent ones"):
        run.request.rewind(3, 4)


def test_a_draft_ends_where_a_token_of_it_is_taken_back() -> None:
    """Though the token before it is the one that was drafted next: its logits are of another
    history.
    """
    model, (a, b, c) = ScriptedModel(), map(PIECES.index, "abc")
    model.by_token[a, b] = model.by_token[b, a] = 50.0
    for place in range(model.context_length):
        model.by_position[place, a if place % 4 < 2 else c] = 20.0
    plain = Run(model, 1, [["ba"]]).end()
    plain.check()
    drafting = Drafting(lambda one: [b, a, a] if one.tokens[-1] == a else [])
    drafted = Run(model, 1, [["ba"]], speculator=drafting).end()
    assert drafted.sent == plain.sent
    assert sum(drafted.taken_back) == sum(plain.taken_back) > 0
    assert sum(drafting.accepted) > 0
