"""Requests wait for their grammars in a middleware of vLLM's server; admission hardly waits."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from growth import kept_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from vllm_stand_in import Params, served_model

from adapters.catalog import ModelPolicy, Requested, SelectionError
from adapters.grammars.cache import FAST_S, GrammarCache
from adapters.grammars.compile_threads import Compiled
from adapters.grammars.compiler import GrammarRefused
from adapters.grammars.sandbox import SandboxBusy
from adapters.processors.grammar import grammar_cache
from adapters.vllm import admission, grammars, middleware
from adapters.vllm.grammars import STEP_S, WAIT_S, NotApplied, NotCompiled, wait_compiled
from adapters.vllm.middleware import Middleware, _Held
from adapters.vllm.model import ServedModel
from adapters.vllm.prepared import MAX_PREPARED, PreparedGrammars
from adapters.vllm.requests import selection_of
from adapters.vocabulary import Vocabulary

GRAMMAR = {"name": "json_schema", "args": {"schema": {"type": "integer"}}}
SELECTED = json.dumps({"version": 1, "processors": [GRAMMAR]})
BODY = json.dumps({"prompt": "x", "vllm_xargs": {"logits_processors": SELECTED}}).encode()
ARGUMENT = "processors[0].args.schema"


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[Future[Compiled]]:
    """The futures of all grammars that are asked for; a test settles them."""
    found: list[Future[Compiled]] = []

    def request(cache: GrammarCache, grammar: str, client: object = None) -> Future[Compiled]:
        found.append(Future())
        return found[-1]

    monkeypatch.setattr(GrammarCache, "request", request)
    return found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """The kit's model, which compiles in this process, and which the middleware serves."""
    monkeypatch.setattr(ServedModel, "guard_grammars", lambda self: None)
    found = served_model(penalises_first=False)
    for module in (middleware, admission):
        monkeypatch.setattr(module, "model_of", lambda config: found)
        monkeypatch.setattr(module, "publish", lambda config: None)
    return found


def compiled(cpu_s: float = 0.0) -> Compiled:
    return Compiled(None, 0, cpu_s)  # type: ignore[arg-type]


class Engine:
    """An engine's client: says that its processes have compiled a grammar at the third question."""

    def __init__(self, extension: str = "adapters.vllm.extension.Extension") -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=extension))
        self.asked: list[list[str]] = []

    async def collective_rpc(self, method: str, args: tuple[list[str]]) -> list[bool]:
        assert method == "prepare_grammars"
        self.asked.append(args[0])
        return [True, len(self.asked) > 2]


class Server:
    """A middleware around an application that reads a body; what it saw, and when."""

    def __init__(self, engine: Engine | None = None, *, is_authentic: bool = True) -> None:
        self.engine, self.bodies, self.is_authentic = engine or Engine(), list[bytes](), is_authentic
        self.app = Middleware(self._serve)

    async def _serve(self, scope: Any, receive: Callable[[], Any], send: Any) -> None:
        body, more = b"", self.is_authentic
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message.get("more_body", False)
        self.bodies.append(body)

    def ask(self, *messages: dict[str, Any], kind: bytes = b"application/json") -> asyncio.Task[None]:
        """A request whose messages come at once; the client stays unless the last one says so."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for message in messages:
            queue.put_nowait(message)
        state = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine))
        scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind)], "app": state}
        return asyncio.create_task(self.app(scope, queue.get, None))  # type: ignore[arg-type]


def body_of(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "http.request", "body": data, **more}


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


def test_one_request_waits_and_others_do_not(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    async def story() -> None:
        server = Server()
        waiting = server.ask(body_of(BODY))
        await until(lambda: compiling)
        await server.ask(body_of(b"{}"))
        assert server.bodies == [b"{}"]
        assert not waiting.done()
        compiling[0].set_result(compiled())
        await waiting
        assert server.bodies == [b"{}", BODY]
        assert not server.engine.asked

    asyncio.run(story())


@pytest.mark.parametrize("error", [GrammarRefused("no"), SandboxBusy("busy")])
def test_a_refused_grammar_is_left_to_admission(
    model: ServedModel, compiling: list[Future[Compiled]], error: Exception
) -> None:
    async def story() -> None:
        server = Server()
        waiting = server.ask(body_of(BODY))
        await until(lambda: compiling)
        compiling[0].set_exception(error)
        await waiting
        assert server.bodies == [BODY]

    asyncio.run(story())


def test_a_slow_grammar_waits_for_every_process(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    async def story() -> None:
        server = Server()
        waiting = server.ask(body_of(BODY))
        await until(lambda: compiling)
        compiling[0].set_result(compiled(2 * FAST_S))
        await waiting
        assert len(server.engine.asked) == 3
        assert server.engine.asked[0][0] in model.prepared

    asyncio.run(story())


def test_without_the_extension_no_engine_is_asked(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    async def story() -> None:
        server = Server(Engine(extension=""))
        waiting = server.ask(body_of(BODY))
        await until(lambda: compiling)
        compiling[0].set_result(compiled(2 * FAST_S))
        await waiting
        assert not server.engine.asked

    asyncio.run(story())


def test_an_engine_that_cannot_is_no_error(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    class Broken(Engine):
        async def collective_rpc(self, method: str, args: tuple[list[str]]) -> list[bool]:
            raise AttributeError(method)

    async def story() -> None:
        server = Server(Broken())
        waiting = server.ask(body_of(BODY))
        await until(lambda: compiling)
        compiling[0].set_result(compiled(2 * FAST_S))
        await waiting
        assert server.bodies == [BODY]
        assert not len(model.prepared)

    asyncio.run(story())


def test_a_client_that_leaves_compiles_no_more(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    async def story() -> None:
        server = Server()
        await server.ask(body_of(BODY), {"type": "http.disconnect"})
        assert not server.bodies
        await until(lambda: all(each.cancelled() for each in compiling))

    asyncio.run(story())


def test_what_is_not_authentic_compiles_nothing(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    """The application answers without the body: vLLM's authentication is inside of a middleware."""

    async def story() -> None:
        server = Server(is_authentic=False)
        await server.ask(body_of(BODY))
        assert not compiling

    asyncio.run(story())


@pytest.mark.parametrize(
    "body",
    [
        b"logits_processors",
        b'["logits_processors"]',
        b'{"vllm_xargs": "logits_processors"}',
        b'{"vllm_xargs": {"logits_processors": 5}}',
        b'{"vllm_xargs": {"logits_processors": "["}}',
        BODY.replace(b"json_schema", b"nonsense"),
        BODY.replace(b"integer", b"nonsense"),
        b"[" * 5000 + b'"logits_processors"',
    ],
)
def test_what_cannot_be_read_is_left_to_admission(
    model: ServedModel, compiling: list[Future[Compiled]], body: bytes
) -> None:
    async def story() -> None:
        server = Server()
        await server.ask(body_of(body))
        assert server.bodies == [body]
        assert not compiling

    asyncio.run(story())


class HTTPException(Exception):
    """Stands in for FastAPI's."""


@pytest.mark.parametrize("processor", [GRAMMAR, {"name": "banned_tokens", "args": {"token_ids": [9]}}])
def test_beam_search_with_processors_is_refused(
    model: ServedModel,
    compiling: list[Future[Compiled]],
    monkeypatch: pytest.MonkeyPatch,
    processor: dict[str, Any],
) -> None:
    """vLLM's steps of it are requests that nobody's processors come with."""
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=HTTPException))
    selected = json.dumps({"version": 1, "processors": [processor]})
    named = {"use_beam_search": True, "vllm_xargs": {"logits_processors": selected}}

    async def story() -> None:
        server = Server()
        with pytest.raises(HTTPException, match=f"use_beam_search: .* has {processor['name']}"):
            await server.ask(body_of(json.dumps(named).encode()))
        for body in ({"use_beam_search": True}, {"use_beam_search": False, "prompt": "logits_processors"}):
            await server.ask(body_of(json.dumps(body).encode()))
        assert len(server.bodies) == 2
        assert not compiling

    asyncio.run(story())


@pytest.mark.parametrize(
    ("path", "place", "body"),
    [
        ("logits_processors", "vllm_xargs", {"logits_processors": {}}),
        ("nvext.logits_processors", "vllm_xargs", {"nvext": {"logits_processors": {}}}),
        ("extra_args.logits_processors", "vllm_xargs", {"vllm_xargs": {}, "extra_args": {"logits_processors": "{}"}}),
        (
            "vllm_xargs.logits_processors",
            "sampling_params.extra_args",
            {"sampling_params": {}, "vllm_xargs": {"logits_processors": "{}"}},
        ),
        (
            "sampling_params.logits_processors",
            "sampling_params.extra_args",
            {"sampling_params": {"logits_processors": {}}},
        ),
    ],
)
def test_a_selection_that_vllm_ignores_is_refused(
    model: ServedModel,
    compiling: list[Future[Compiled]],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    place: str,
    body: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=HTTPException))

    async def story() -> None:
        server = Server()
        with pytest.raises(HTTPException) as refused:
            await server.ask(body_of(json.dumps(body).encode()))
        assert refused.value.args[1] == f"{path}: vLLM looks for it in {place} alone, and would answer without it"
        text = json.dumps({"prompt": "logits_processors", "logits_processors": None}).encode()
        await server.ask(body_of(text))
        assert server.bodies == [text]

    asyncio.run(story())


def test_a_plain_request_waits_for_the_operators_grammar(
    model: ServedModel, compiling: list[Future[Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (requested,) = selection_of(SELECTED).processors
    strict = replace(model, policy=ModelPolicy(mandatory=(requested,)))
    monkeypatch.setattr(middleware, "model_of", lambda config: strict)
    monkeypatch.setenv("DLW_PROCESSOR_POLICY", "policy.yaml")

    async def story() -> None:
        server = Server()
        waiting = server.ask(body_of(b"{}"))
        await until(lambda: compiling)
        compiling[0].set_result(compiled(2 * FAST_S))
        await waiting
        assert server.engine.asked[0][0] in strict.prepared

    asyncio.run(story())


def test_beam_search_is_refused_where_the_operator_asks(model: ServedModel) -> None:
    mandatory = Requested("banned_tokens", {"token_ids": [9]}, origin="mandatory")
    strict = replace(model, policy=ModelPolicy(mandatory=(mandatory,)))
    asked = {"use_beam_search": True}
    grammars.check_beams(asked, model)
    with pytest.raises(NotApplied, match="banned_tokens"):
        grammars.check_beams(asked, strict)


def test_bodies_that_are_not_json_are_not_read(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    async def story() -> None:
        server = Server()
        await server.ask(body_of(BODY), kind=b"multipart/form-data; boundary=x")
        assert server.bodies == [BODY]
        assert not compiling

    asyncio.run(story())


def test_grammars_in_vllms_own_bodies_are_found(model: ServedModel) -> None:
    own = {"sampling_params": {"extra_args": {"logits_processors": SELECTED}}}
    assert [path for path, _ in grammars.grammars_in(own, model)] == [ARGUMENT]
    assert grammars.grammars_in(own, model) == grammars.grammars_in(json.loads(BODY), model)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=5), min_size=1, max_size=6), st.booleans())
def test_messages_come_as_they_were_sent(parts: list[bytes], leaves: bool) -> None:
    async def story() -> None:
        sent = [body_of(part, more_body=number < len(parts) - 1) for number, part in enumerate(parts)]
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for message in sent:
            queue.put_nowait(message)
        prepared: list[bytes] = []

        async def prepare(body: bytes) -> None:
            await asyncio.sleep(0)
            prepared.append(body)

        held = _Held(queue.get, prepare)
        assert [await held.receive() for _ in sent] == sent
        assert prepared == [b"".join(parts)]
        queue.put_nowait({"type": "http.disconnect"})
        assert await held.receive() == {"type": "http.disconnect"}

    asyncio.run(story())


# Admission


def wanted(model: ServedModel) -> grammars.Wanted:
    return grammars.grammars_in(json.loads(BODY), model)


def test_admission_waits_for_a_bounded_time(model: ServedModel, compiling: list[Future[Compiled]]) -> None:
    began = time.monotonic()
    with pytest.raises(NotCompiled, match=r"logits_processors\.processors\[0\]\.args\.schema: is still being compiled"):
        wait_compiled([*wanted(model), *wanted(model)], model, holds_others=True)
    assert WAIT_S <= time.monotonic() - began < WAIT_S + 5
    assert not any(each.cancelled() for each in compiling)  # a request that is sent again finds it


def test_admission_waits_for_no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded with the sandbox, before the time for a grammar begins."""
    served = served_model(penalises_first=False)
    known = served.context.vocabulary
    context = replace(served.context, vocabulary=Vocabulary(known.size, known.tokenizer, sorted(known.eos_token_ids)))
    model = ServedModel(served.facts, context, served.catalog, served.policy)
    cache = grammar_cache(context.vocabulary)
    load = cache._load

    def load_slowly() -> LLTokenizer:
        time.sleep(2 * WAIT_S)
        return load()

    monkeypatch.setattr(cache, "_load", load_slowly)
    found = wanted(model)
    sandbox = cache.sandbox
    assert sandbox is not None
    monkeypatch.setattr(cache, "sandbox", None)  # what it would add to the wait is none of the tokenizer's
    try:
        assert len(wait_compiled(found, model, holds_others=True)) == 1
    finally:
        sandbox.close()


def test_nobody_waits_for_an_offline_request(
    model: ServedModel, compiling: list[Future[Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = compiled(2 * STEP_S)
    monkeypatch.setattr(Future, "result", lambda self, timeout=None: slow if timeout is None else None)
    assert wait_compiled(wanted(model), model, holds_others=False) == [slow]


def test_admission_refuses_what_a_step_would_wait_for(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Future[Compiled] = Future()
    done.set_result(compiled(2 * STEP_S))
    monkeypatch.setattr(GrammarCache, "request", lambda *_: done)
    with pytest.raises(SelectionError, match=r"args\.schema: takes 2\.0 s to compile, over the 1 s .* --middleware"):
        wait_compiled(wanted(model), model, holds_others=True)
    model.prepared.note([grammar for _, grammar in wanted(model)])
    assert wait_compiled(wanted(model), model, holds_others=True) == [done.result()]


@pytest.mark.parametrize(
    ("error", "raised"), [(GrammarRefused("no"), SelectionError), (SandboxBusy("it waits"), NotCompiled)]
)
def test_admission_tells_why(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    done: Future[Compiled] = Future()
    done.set_exception(error)
    monkeypatch.setattr(GrammarCache, "request", lambda *_: done)
    with pytest.raises(raised, match=str(error)):
        wait_compiled(wanted(model), model, holds_others=True)


@pytest.fixture
def caller(model: ServedModel) -> Callable[[Params], None]:
    """Admission as vLLM's ``InputProcessor`` asks for it."""

    class InputProcessor:
        vllm_config = SimpleNamespace(instance_id="test")

        def validate(self, params: Params) -> None:
            admission.check(params)

    return InputProcessor().validate


def test_in_an_event_loop_admission_holds_others(
    caller: Callable[[Params], None], compiling: list[Future[Compiled]]
) -> None:
    async def serve() -> None:
        caller(Params(extra_args={"logits_processors": SELECTED}))

    with pytest.raises(NotCompiled):
        asyncio.run(serve())


def test_admission_names_fields_and_paths_in_the_selection(caller: Callable[[Params], None]) -> None:
    penalty: dict[str, Any] = {"version": 1, "processors": [{"name": "repetition_penalty", "args": {"penalty": 2.0}}]}
    with pytest.raises(ValueError, match=r"^repetition_penalty: "):
        caller(Params(repetition_penalty=1.5, extra_args={"logits_processors": json.dumps(penalty)}))
    penalty["processors"] = [{"name": "repetition_penalties"}]
    with pytest.raises(ValueError, match=r"^logits_processors\.processors\[0\]\.name: unknown logits processor"):
        caller(Params(extra_args={"logits_processors": json.dumps(penalty)}))


def test_outside_of_an_event_loop_admission_compiles(caller: Callable[[Params], None]) -> None:
    caller(Params(extra_args={"logits_processors": SELECTED}))
    with pytest.raises(ValueError, match=r"logits_processors\.processors\[0\]\.args\.schema"):
        caller(Params(extra_args={"logits_processors": SELECTED.replace("integer", "nonsense")}))


def test_the_engine_compiles_and_says_when_it_has(model: ServedModel) -> None:
    own = [grammar for _, grammar in wanted(model)]
    began = time.monotonic()
    while not model.has_compiled(own):
        assert time.monotonic() < began + 30
        time.sleep(0.001)
    assert model.has_compiled([])


def test_the_operators_grammars_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedModel, "guard_grammars", lambda self: None)
    plain = served_model(penalises_first=False)
    (requested,) = selection_of(SELECTED).processors
    forced = served_model(penalises_first=False, policy=ModelPolicy(mandatory=(requested,)))
    empty = b'{"vllm_xargs": {"logits_processors": {"version": 1, "processors": []}}}'
    assert not grammars.grammars_in(json.loads(empty), plain)
    assert len(grammars.grammars_in(json.loads(empty), forced)) == 1


def test_prepared_grammars_are_known_by_their_digests() -> None:
    prepared, large = PreparedGrammars(), "a" * 2**16

    def note() -> None:
        for number in range(64):
            prepared.note([f"{large}{number}", f"{number}\ud800"])

    assert kept_bytes(note) < len(large)
    assert f"{large}63" in prepared
    assert "63\ud800" in prepared
    assert large not in prepared
    prepared.note([str(number) for number in range(MAX_PREPARED)])
    assert len(prepared) == MAX_PREPARED
    assert f"{large}63" not in prepared
