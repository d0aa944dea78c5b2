"""``python -m worker inspect``: each processor at each position, in the terminal and as a page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import quickjs
from rich.console import Console
from served_worker import Answer, Client, serving

from adapters.client import processor, selection
from worker.__main__ import main
from worker.arguments import Arguments, parse_arguments
from worker.inspect.page import page
from worker.inspect.recording import VERDICTS, Recording, inspected_request, printable, record
from worker.inspect.terminal import show
from worker.models import DEFAULT_MODEL, model_cache
from worker.models.checkpoint import FORMAT
from worker.models.default_model import _GGUF_SHA256
from worker.replay.position import Candidate, Position, Stage
from worker.replay.run import LoadedModel, loaded, with_named_model
from worker.tiny_model import write_tiny_model

PROMPT = [9, 30, 41, 77, 30, 41, 12, 9, 30, 500]
BIAS = {"name": "logit_bias", "args": {"bias": {"37": 100}}}
BAN = {"name": "banned_tokens", "args": {"token_ids": [37]}}
SAMPLING = {"temperature": 0.9, "top_k": 40, "repetition_penalty": 1.3}

VOID = {"meta", "input"}
REPOSITORY = Path(__file__).resolve().parents[2]
TAGS = {
    *(
        "html",
        "head",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "p",
        "section",
        "ol",
        "ul",
        "li",
        "a",
        "div",
        "select",
        "option",
    ),
    *("span", "article", "table", "thead", "tbody", "tr", "th", "td", "code", "svg", "rect", "script", *VOID),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


class Element:
    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes, self.texts = tag, attributes, list[str]()

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Page(HTMLParser):
    """What a browser's parser makes of a page: its elements, with their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.texts.append(data)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = attributes.items()
        return [each for each in self.elements if each.tag == tag and wanted <= each.attributes.items()]


def inspect(model: Path, *argv: str) -> int:
    fixed = ["--device", "cpu", "--dtype", "float32", "--numerics", "exact", "--kernels", "torch"]
    return main(["inspect", str(model), *argv, *fixed])


def test_every_stage_of_every_step(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "Hello there", "--max-tokens", "4", "--processors", json.dumps([BIAS, BAN])]
    assert inspect(model, *options, "--sampling", json.dumps(SAMPLING), "--top", "3") == 0
    shown = capsys.readouterr().out
    steps = re.split(r"^step \d+, position (\d+): (\d+) '.*?'  (\w+)", shown, flags=re.MULTILINE)[1:]
    positions, taken, verdicts, tables = (steps[place::4] for place in range(4))
    assert positions == [str(int(positions[0]) + place) for place in range(4)]
    assert "37" not in taken
    assert set(verdicts) <= {"kept", "changed"}
    for table in tables:
        rows = [line.split() for line in table.splitlines() if re.match(r" \w", line)]
        assert [row[0] for row in rows[1:]] == [
            *("model", "logit_bias", "repetition_penalty", "banned_tokens", "sampler"),
        ]
        left = [int(row[1]) for row in rows[1:]]
        assert left == [1000, 1000, 1000, 999, 40]
        assert rows[2][4:6] == ["37", "'A'"]  # biased to the first place
        assert "#" in rows[5][2]


async def _recorded(model: Path, processors: list[Any], sampling: dict[str, Any]) -> tuple[LoadedModel, Recording, Any]:
    given = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32", "--numerics", "exact"]
    given += ["--speculative-config", json.dumps({"model": str(model)})]
    async with loaded(parse_arguments(given, {})) as one:
        text = json.dumps({"version": 1, "processors": processors})
        asked = inspected_request(one, PROMPT, sampling, text, 3, 8)
        recording = await record(one, asked, 5)
        asked.params.logprobs, asked.params.logprobs_mode = 0, "processed"
        request = await one.request("again", PROMPT, asked.params, asked.selection)
        one.stepper.add(request)
        outputs = []  # type: ignore[var-annotated]
        while not outputs or outputs[-1].finish_reason is None:
            outputs += one.stepper.step()
    return one, recording, outputs


MIROSTAT = {"name": "mirostat", "args": {"tau": 1.5, "eta": 1.0}}
PHRASES = {"name": "phrase_ban", "args": {"phrases": ["e", "a", "th", "in"]}}
RUNS: list[tuple[list[Any], dict[str, Any]]] = [
    ([BIAS, BAN], SAMPLING),
    ([BIAS, BAN], {"temperature": 0.7, "top_p": 0.6, "min_p": 0.05}),
    ([BIAS, BAN], {}),
    ([MIROSTAT], {"temperature": 1.0}),
    ([PHRASES, MIROSTAT], {"temperature": 1.0}),
    ([BAN, {"name": "cfg", "args": {"scale": 2.5}}], {"temperature": 1.0}),
    ([BAN, {"name": "contrastive", "args": {"amateur_temperature": 2.0}}], {"temperature": 1.0}),
]


@pytest.mark.parametrize(("processors", "sampling"), RUNS)
def test_the_last_stage_is_what_the_sampler_samples_from(
    model: Path, processors: list[Any], sampling: dict[str, Any]
) -> None:
    """Its probability of the token is that of the engine's own processed logprobs; also after a
    processor whose state is made of all rows before.
    """
    _, recording, outputs = asyncio.run(_recorded(model, processors, sampling))
    outputs = [output for output in outputs if output.token_id is not None]
    assert [output.token_id for output in outputs] == recording.token_ids[: len(outputs)]
    assert len(outputs) > 3
    for output, position in zip(outputs, recording.positions, strict=False):
        found = position.stages[-1].taken_probability
        wanted = math.exp(output.logprobs[0].logprob) if sampling else 1.0  # greedy takes the likeliest, surely
        assert found == pytest.approx(wanted, rel=1e-4)


def test_a_step_that_fails_is_the_last_one(model: Path, tmp_path: Path) -> None:
    forced = {"name": "forced_prefix", "args": {"token_ids": [60, 61, 60, 61]}}
    chosen = json.dumps([forced, {"name": "no_repeat_ngram", "args": {"n": 2}}])
    file = tmp_path / "page.html"
    assert inspect(model, "--prompt", "Hello", "--processors", chosen, "--html", str(file)) == 0
    found = Page(file.read_text())
    assert [each.attributes["class"] for each in found.all("a") if "title" in each.attributes] == [
        *("forced",) * 3,
        "failed",
    ]
    assert "forces token 61, which another processor forbids" in found.all("p", **{"class": "failed"})[0].text
    assert [each.attributes["data-kind"] for each in found.all("article")] == [*("forced",) * 3, "failed"]


@pytest.fixture(scope="module")
def compared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A page of two answers that differ in their seed."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    options = ["--prompt", "Hello there", "--sampling", '{"temperature": 0.8}', "--max-tokens", "12"]
    assert inspect(model, *options, "--processors", json.dumps([BAN]), "--compare", "8", "--html", str(file)) == 0
    return Page(file.read_text())


def custom_properties(page: str, name: str) -> list[str]:
    """Values of a colour in a style sheet, of light pages and of dark ones."""
    text = (REPOSITORY / "worker" / page).read_text()
    pair = re.search(rf"--{name}: light-dark\((.+?), (.+?)\)", text)
    return list(pair.groups()) if pair else re.findall(rf"--{name}: (.+?);", text)


def test_a_colour_means_the_same_here_and_in_the_playground() -> None:
    """``forced`` is on both pages; what one page alone has is in no colour of the other."""
    here, there = "inspect/page.css", "frontdoor/playground/style.css"
    assert custom_properties(here, "forced") == custom_properties(there, "forced") != []
    assert custom_properties(here, "forced-paper") == custom_properties(there, "forced-paper") != []
    others = {colour for did in ("masked", "biased", "shaped") for colour in custom_properties(there, did)}
    assert len(others) == 6
    assert not others & {colour for verdict in ("changed", "differs") for colour in custom_properties(here, verdict)}


def test_a_page_of_two_answers(compared: Page) -> None:
    timelines = compared.all("ol", **{"class": "timeline"})
    assert len(timelines) == 2
    steps = compared.all("article")
    differing = [each.attributes["data-differs"] == "yes" for each in steps]
    assert any(differing)
    (legend,) = compared.all("ul", **{"class": "legend"})
    assert all(f"{verdict} {meaning}" in legend.text for verdict, meaning in VERDICTS.items())
    assert "underlined A and B differ" in legend.text
    text = compared.all("p", id="summary")[0].text
    assert f"step {differing.index(True) + 1}" in text
    for step in steps:
        taken = re.findall(r"([AB]): took (\d+) ", step.text)
        assert (step.attributes["data-differs"] == "yes") == (len({token for _, token in taken}) > 1 or len(taken) < 2)
    ids = {step.attributes["id"] for step in steps}
    assert {each.attributes["href"][1:] for each in compared.all("a")} <= ids


DOM = """
const make = (text) => ({text, hidden: false, value: "", classes: new Set(), dataset: {}, listeners: {},
  addEventListener(kind, call) { this.listeners[kind] = call; },
  classList: null, set textContent(text) { this.text = text; }, get textContent() { return this.text; },
  focus() { focused = this; }});
const element = (one) => { const made = Object.assign(make(one.text), {id: one.id, dataset: one.dataset});
  made.classList = {toggle: (name, on) => on ? made.classes.add(name) : made.classes.delete(name)}; return made; };
let focused = null;
const found = {"article": steps.map(element), ".timeline a": chips.map(element)};
const named = {search: make(""), show: make("all"), count: make("")};
named.show.value = "all";
const document = Object.assign(make(""), {querySelectorAll: (selector) => found[selector],
  getElementById: (id) => named[id]});
const window = make("");
const location = {fragment: "", get hash() { return this.fragment; }, set hash(id) { this.fragment = "#" + id; }};
"""
"""As much of a document as the page's script touches."""


class Script:
    """The page's own script, on what the parser found in the page."""

    def __init__(self, found: Page) -> None:
        self._context = quickjs.Context()
        chips = [each for each in found.all("a") if "data-step" in each.attributes]
        for name, elements in (("steps", found.all("article")), ("chips", chips)):
            self.run(f"const {name} = {json.dumps([_as_dom(each) for each in elements])}")
        self.run(DOM + found.all("script")[0].text)

    def run(self, code: str) -> Any:
        return self._context.eval(code)

    def filter(self, query: str = "", show: str = "all") -> list[int]:
        """Places of the steps that are left."""
        self.run(f"named.search.value = {json.dumps(query)}; named.search.listeners.input();")
        self.run(f"named.show.value = {json.dumps(show)}; named.show.listeners.change();")
        shown = self.run("JSON.stringify(found['article'].map((each) => !each.hidden))")
        return [place for place, is_shown in enumerate(json.loads(shown)) if is_shown]

    def press(self, key: str) -> str:
        """The fragment of the address after a key."""
        self.run(
            f"document.listeners.keydown({{key: {json.dumps(key)}, preventDefault() {{}}}});"
            "window.listeners.hashchange();"
        )
        return str(self.run("location.hash"))


def _as_dom(element: Element) -> dict[str, Any]:
    data = {name[5:]: value for name, value in element.attributes.items() if name.startswith("data-")}
    return {"text": element.text, "id": element.attributes.get("id", ""), "dataset": data}


def test_the_page_searches_and_filters(compared: Page) -> None:
    script, steps = Script(compared), compared.all("article")
    everything = list(range(len(steps)))
    assert script.filter() == everything
    differing = [place for place, each in enumerate(steps) if each.attributes["data-differs"] == "yes"]
    assert script.filter(show="differs") == differing
    assert script.run("named.count.textContent") == f"{len(differing)} of {len(steps)} steps"
    assert script.filter(show="failed") == []
    assert script.press("j") == ""
    wanted = [place for place, each in enumerate(steps) if "the" in each.text.lower()]
    assert script.filter("THE") == wanted
    dim = json.loads(script.run("JSON.stringify(found['.timeline a'].map((each) => each.classes.has('dim')))"))
    chips = [int(each.attributes["data-step"][5:]) - 1 for each in compared.all("a") if "data-step" in each.attributes]
    assert dim == [place not in wanted for place in chips]
    assert script.filter("banned_tokens") == everything


def test_keys_go_from_step_to_step(compared: Page) -> None:
    script = Script(compared)
    differing = script.filter(show="differs")
    assert [script.press("j"), script.press("j"), script.press("k")] == [
        f"#step-{differing[place] + 1}" for place in (0, 1, 0)
    ]
    assert [script.press("k"), script.press("x")] == [f"#step-{differing[0] + 1}"] * 2
    script.press("/")
    assert script.run("focused === named.search")


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg/onload=alert(1)>",
    "</style></code></article>&lt;b&gt;<!--",
    "\x1b]0;title\x07\x1b[31mred",
    "\u202edesrever\u2066\u0000\ud800",
    "[bold red]markup[/]",
)


def hostile() -> list[Recording]:
    """Two answers of which every text is hostile, also the names of processors."""
    texts = {place: printable(text) for place, text in enumerate(HOSTILE)}
    candidates = [Candidate(place, 1 / len(texts)) for place in texts]
    stages = [Stage("model", candidates, 7, None, 1, 0.5), Stage(HOSTILE[0], failure=HOSTILE[4] + HOSTILE[5])]
    positions = [Position(9 + place, stages, place) for place in texts]
    return [
        Recording(name, 0, "greedy", (HOSTILE[2],), 9, positions, list(texts), texts, HOSTILE[3] + HOSTILE[5])
        for name in "AB"
    ]


def test_hostile_texts_stay_texts_in_the_page() -> None:
    text = page(HOSTILE, hostile())
    found = Page(text)
    assert {each.tag for each in found.elements} == TAGS
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    chips = [each.text for each in found.all("a") if "title" in each.attributes]
    assert chips == [printable(one) for one in HOSTILE] * 2
    assert [each.text for each in found.all("p", **{"class": "notes"})] == [printable(one) for one in HOSTILE]
    text.encode()  # no half of a surrogate pair


def test_a_page_loads_nothing_and_runs_its_own_script_only(compared: Page) -> None:
    for element in compared.elements:
        assert not {"src", "srcset", "style", "action"} & element.attributes.keys()
        assert not any(name.startswith("on") for name in element.attributes)
        assert element.attributes.get("href", "#").startswith("#")
    policy = compared.all("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    sources = dict(each.split(" ", 1) for each in policy.split("; "))
    assert sources.pop("default-src") == "'none'"
    for name, tag in (("style-src", "style"), ("script-src", "script")):
        (only,) = compared.all(tag)
        digest = base64.b64encode(hashlib.sha256(only.text.encode()).digest()).decode()
        assert sources.pop(name) == f"'sha256-{digest}'"
        assert "url(" not in only.text
        assert "@import" not in only.text
    assert set(sources.values()) == {"'none'"}


def test_hostile_texts_stay_texts_in_the_terminal() -> None:
    output = StringIO()
    show(Console(file=output, width=200, color_system=None), HOSTILE, hostile())
    shown = output.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\u2066]", shown)
    assert "[bold red]markup[/]" in shown


def test_a_picture_without_external_resources(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "picture.svg"
    assert inspect(model, "--prompt", "Hello", "--max-tokens", "2", "--svg", str(file)) == 0
    ElementTree.fromstring(file.read_text())
    assert re.findall(r"https?://[^\"]*", file.read_text()) == ["http://www.w3.org/2000/svg"]
    assert "step 2" in capsys.readouterr().out


async def test_the_answer_of_a_receipt(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(model) as client:
        answer = await _ask(client)
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))

    async def shown(receipt: dict[str, Any], *argv: str) -> tuple[int, str]:
        (tmp_path / "receipt.json").write_text(json.dumps(receipt))
        files = ["--receipt", str(tmp_path / "receipt.json"), "--prompt-file", str(tmp_path / "prompt.json")]
        status = await asyncio.to_thread(main, ["inspect", str(model), *files, "--device", "cpu", *argv])
        return status, capsys.readouterr().out

    async def refused(receipt: dict[str, Any], *argv: str) -> str:
        (tmp_path / "receipt.json").write_text(json.dumps(receipt))
        files = ["--receipt", str(tmp_path / "receipt.json"), "--prompt-file", str(tmp_path / "prompt.json")]
        assert await asyncio.to_thread(main, ["inspect", str(model), *files, "--device", "cpu", *argv]) == 2
        return capsys.readouterr().err

    adapter = {"name": "mine", "digest": "aa"}
    assert "model.adapter: the answer is of the LoRA adapter mine" in await refused(
        {**answer.receipt, "model": {**answer.receipt["model"], "adapter": adapter}}
    )
    weights = [{"version": "1", "from_token": 0, "digest": "aa"}]
    assert "weights[0].digest: the answer is of updated weights" in await refused(
        {**answer.receipt, "weights": weights}
    )
    status, text = await shown(answer.receipt)
    assert status == 0, text
    assert "answer: 6 tokens, equal to those recorded" in text
    taken = [int(token_id) for token_id in re.findall(r"^step \d+, position \d+: (\d+) ", text, re.MULTILINE)]
    assert taken == answer.token_ids
    assert (await shown({**answer.receipt, "answer_digest": "0" * 32}))[0] == 1
    seed = answer.receipt["seed"]
    assert "A and B: equal, 6 tokens" in (await shown(answer.receipt, "--compare", str(seed)))[1]
    banned = processor("banned_tokens", token_ids=[answer.token_ids[2]])
    assert "A and B: equal up to position" in (await shown(answer.receipt, "--compare", json.dumps([banned])))[1]


async def test_a_choice_beside_the_first_is_shown(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = {
        "token_ids": PROMPT,
        "annotations": ["logits_processors:" + selection(receipt=True)],
        "sampling_options": {"temperature": 0.9, "seed": 5},
        "stop_conditions": {"max_tokens": 6, "ignore_eos": True},
    }
    async with serving(model) as client:
        first, second = [
            Answer([chunk async for chunk in client.worker.server.serve(client.id(), raw, {}, choice)])
            for choice in range(2)
        ]
    assert first.token_ids != second.token_ids
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    (tmp_path / "receipt.json").write_text(json.dumps(second.receipt))
    files = ["--receipt", str(tmp_path / "receipt.json"), "--prompt-file", str(tmp_path / "prompt.json")]
    status = await asyncio.to_thread(main, ["inspect", str(model), *files, "--device", "cpu"])
    assert status == 0, capsys.readouterr().out


async def _ask(client: Client) -> Any:
    chosen = processor("no_repeat_ngram", n=2)
    stop = {"max_tokens": 6, "ignore_eos": True}
    return await client.ask(PROMPT, chosen, sampling_options={"temperature": 0.9}, stop_conditions=stop)


def test_a_chat_is_rendered_as_the_worker_renders_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{% if enable_thinking is false %} does not think{% endif %}")
    options = ["--custom-jinja-template", str(template), "--dyn-default-thinking-mode", "disabled"]
    assert inspect(model, "--chat", "--prompt", "x", "--max-tokens", "1", *options) == 0
    number = len(AutoTokenizer.from_pretrained(model).encode("x does not think", add_special_tokens=False))
    assert f"step 1, position {number}: " in capsys.readouterr().out


def test_a_selection_names_its_choice(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--prompt", "x", "--max-tokens", "8", "--sampling", '{"temperature": 1.5}']
    assert inspect(model, *drawn, "--compare", '{"version": 1}') == 0
    assert "A and B: equal, 8 tokens" in capsys.readouterr().out
    assert inspect(model, *drawn, "--compare", '{"version": 1, "choice": 1}') == 0
    assert "A and B: equal up to position" in capsys.readouterr().out


def test_tiny_is_the_model_of_the_launch_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = named("tiny")
    assert found.model_path == str(tmp_path / "dynamo-logits-worker" / "tiny-model")
    assert (found.served_model_name, found.dtype) == ("tiny-model", "auto")
    assert (tmp_path / "dynamo-logits-worker" / "tiny-model" / "model.safetensors").is_file()


def test_the_default_model_is_as_the_launch_scripts_serve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the cache, its weights packed: nothing is fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WORKER_DTYPE", raising=False)
    packed, plain = (
        model_cache() / f"{_GGUF_SHA256[:16]}-{FORMAT}{form}" / DEFAULT_MODEL for form in ("-quantised", "")
    )
    for path in (packed, plain):
        path.mkdir(parents=True)
    found = named("default")
    assert (found.model_path, found.served_model_name, found.dtype) == (str(packed), DEFAULT_MODEL, "float32")
    assert named("default", "--dtype", "bfloat16").dtype == "bfloat16"
    assert named("default", "--served-model-name", "m").served_model_name == "m"
    assert named("default", "--quantization", "int8").model_path == str(plain)
    monkeypatch.setenv("WORKER_DTYPE", "bfloat16")
    assert named("default").dtype == "bfloat16"
    assert named("/some/where").model_path == "/some/where"


async def test_a_receipt_says_the_type_of_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("WORKER_DTYPE", raising=False)
    packed = model_cache() / f"{_GGUF_SHA256[:16]}-{FORMAT}-quantised" / DEFAULT_MODEL
    packed.parent.mkdir(parents=True)
    write_tiny_model(packed)
    async with serving(packed, "--kernels", "torch", dtype="bfloat16") as client:
        answer = await _ask(client)
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
    (tmp_path / "receipt.json").write_text(json.dumps(answer.receipt))
    files = ["--receipt", str(tmp_path / "receipt.json"), "--prompt-file", str(tmp_path / "prompt.json")]
    status = await asyncio.to_thread(main, ["inspect", "default", *files, "--device", "cpu"])
    assert (status, "computed by cpu, bfloat16" in capsys.readouterr().out) == (0, True)


def named(model: str, *argv: str) -> Arguments:
    return with_named_model(parse_arguments(["--model-path", model, *argv]), lambda line: None)


CASES: list[tuple[list[str], str]] = [
    ([], "give either --prompt, or --receipt with --prompt-file"),
    (["--promt", "x"], "unrecognized arguments: --promt x"),
    (["--prompt", "x", "--receipt", "y"], "give either --prompt, or --receipt with --prompt-file"),
    (["--receipt", "y"], "--receipt and --prompt-file go together"),
    (["--receipt", "y", "--prompt-file", "z", "--seed=3"], "--seed: a receipt has its own"),
    (["--prompt", "x", "--seed", "-1"], "argument --seed: must be an integer from 0 to 18446744073709551615, got '-1'"),
    (["--prompt", "x", "--max-tokens", "0"], "argument --max-tokens: must be an integer from 1 to"),
    (["--prompt", "x", "--nonsense", "3"], "--nonsense"),
]


@pytest.mark.parametrize(("argv", "message"), CASES)
def test_bad_command_lines(argv: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(model), *argv]) == 2
    assert message in capsys.readouterr().err


REFUSED: list[tuple[list[str], str]] = [
    (
        ["--processors", '[{"name": "nobody"}]'],
        'logits_processors.processors[0].name: unknown logits processor "nobody"',
    ),
    (["--processors", "[1]"], "logits_processors.processors[0]: expected an object, got 1"),
    (["--sampling", "[1]"], "--sampling: must be a JSON object, got '[1]'"),
    (["--sampling", "[" * 100_000], "--sampling: is not JSON: "),
    (["--sampling", '{"top_k": 2, "top_k": 3}'], '--sampling: is not JSON: the key "top_k" occurs twice'),
    (["--sampling", '{"heat": 2}'], "sampling_options.heat"),
    (["--sampling", '{"seed": 7}'], "--sampling: seed: give it as --seed"),
    (["--prompt", "\udcff"], "--prompt: is not UTF-8"),  # as Python reads such a byte of a command line
    (["--compare", "99999999999999999999999"], "--compare: must be an integer from 0 to"),
    (["--compare", '[{"name": "nobody"}]'], "error: --compare: logits_processors.processors[0].name: unknown"),
]


@pytest.mark.parametrize("option", ["--html", "--svg"])
def test_a_full_disk_names_the_file(option: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(model, "--prompt", "x", "--max-tokens", "1", option, "/dev/full") == 2
    assert "error: /dev/full: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_refused_requests(argv: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(model, "--prompt", "x", *argv) == 2
    assert message in capsys.readouterr().err
