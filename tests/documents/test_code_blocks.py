"""Every fenced block is checked for what it is: programs run, commands are read by the commands'
own parsers, data by what reads it. CONTRIBUTING.md says what a fence's language stands for.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import documented_commands
import httpx
import openai
import pytest
import quickjs
import yaml
from document_pages import BLOCKS, PAGES, ROOT, Block, prose_of, text_of
from documented_commands import Command
from documented_programs import PROGRAMS, RUN_ELSEWHERE, files_in, run_programs, taken_for_granted
from served_tiny_model import CATALOG, ServedTinyModel, selection_of, sent_to_the_worker

from adapters.catalog import Policy, parse_selection
from adapters.client import logits_processors, processor
from worker.engines.embedded import Engine
from worker.frontdoor.error_forms import error_body
from worker.frontdoor.errors import Refused
from worker.frontdoor.fields import CHAT, COMPLETIONS, TABLES
from worker.frontdoor.returned_tokens import Returned
from worker.replay.recorded import RecordedReceipt
from worker.request_log import RequestEntry
from worker.requests.receipts import OPTIONS_OF_BITS
from worker.sampling import SamplingParams

LANGUAGES = {"python", "py", "js", "sh", "console", "json", "yaml", "toml", "text"}


def blocks(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", [one for one in BLOCKS if one.language in languages], ids=str)


def test_every_fence_names_its_language() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_programs_that_run_elsewhere_do() -> None:
    for page, test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def test_the_agent_of_the_quickstart_is_a_client_that_runs() -> None:
    run = [block.text for block in BLOCKS if block.page == "docs/clients.md" and block.language == "python"]
    shown = [block.text for block in BLOCKS if block.page == "docs/quickstart.md" and block.language == "py"]
    assert len(shown) == 1
    assert shown[0] in run


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return Engine(tiny_model, catalog=CATALOG, speculative_config={"model": str(tiny_model)})  # contrastive needs one


@pytest.fixture
def names(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    with httpx.Client(transport=httpx.MockTransport(ServedTinyModel(engine))) as http, files_in(tmp_path, monkeypatch):
        monkeypatch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=http, max_retries=0))  # type: ignore[arg-type]
        yield taken_for_granted()


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_run(page: str, names: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    run_programs(page, names, tiny_model, tmp_path)


@blocks("py")
def test_fragments_are_python(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@blocks("js")
def test_fragments_are_javascript(block: Block) -> None:
    """Their imports are left out; QuickJS reads the rest as the body of a function."""
    body = re.sub(r"^import \{[^}]*\} from \S+;$", "", block.text, flags=re.MULTILINE)
    quickjs.Context().eval(f"async () => {{\n{body}\n}}")


@blocks("sh", "console")
def test_commands_are_parsed(block: Block, engine: Engine) -> None:
    found = documented_commands.commands_of(block)
    assert found
    for command in found:
        documented_commands.check(command)
        if command.arguments[0] == "curl":
            check_request(command, block.text, engine)


def check_request(command: Command, shown: str, engine: Engine) -> None:
    """The front door and the engine would take the body, or refuse it as the page shows."""
    (url,) = (one for one in command.arguments if one.startswith("http"))
    path = httpx.URL(url).path
    given = dict(zip(command.arguments, command.arguments[1:], strict=False))
    if path not in TABLES:
        assert path == "/v1/models"
        return
    try:
        fields = sent_to_the_worker(path, given["-d"].encode())
    except Refused as refused:
        if error_body(refused, "openai", "").decode() not in shown.replace(" \n", " "):  # the page folds long lines
            raise
        return
    check_selection(fields, engine)


OWN_COMMAND = re.compile(
    r"`((?:\.venv/bin/python -m (?:worker|adapters)|(?:\./)?(?:launch|scripts)/[\w.-]+|dlw-batch) [^`]*-[^`]*)`"
)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_commands_in_the_text_are_parsed(page: str) -> None:
    """Those with options; what a sentence leaves out may be given."""
    for text in OWN_COMMAND.findall(prose_of(page)):
        documented_commands.check(Command((*shlex.split(text), "..."), {}))


BARE_PYTHON = re.compile(r"(?:^|[\s`$(])python[\d.]* (?:-m|[\w/]+\.py)", re.MULTILINE)
HISTORY = ("CHANGELOG.md", "docs/decisions/")


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(HISTORY)])
def test_commands_say_which_python(page: str) -> None:
    """The one of the environment that `scripts/install` makes: another has no package of ours."""
    text = re.sub(r"<!--.*?-->", "", text_of(page), flags=re.DOTALL)
    assert BARE_PYTHON.findall(text) == []


@blocks("json")
def test_json_is_what_reads_it_takes(block: Block, engine: Engine) -> None:
    data = json.loads(block.text)
    if "messages" in data or "prompt" in data:
        path = CHAT if "messages" in data else COMPLETIONS
        asked = Returned.of(data).request({"model": "m", **data})
        check_selection(sent_to_the_worker(path, json.dumps(asked).encode()), engine)
    elif "processors" in data and not {"engine", "request_id"} & set(data):
        parse_selection(block.text)
        check_processors(data["processors"], engine)
    elif set(data) == {"name", "args"}:
        check_processors([data], engine)


def test_the_mistake_in_readme_is_answered_as_shown() -> None:
    selected = logits_processors(processor("chioce", choices=["yes", "no"]))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], **selected}
    with pytest.raises(Refused) as refused:
        sent_to_the_worker(CHAT, json.dumps(body).encode())
    assert f"openai.BadRequestError: Error code: 400 - {refused.value}" in text_of("README.md").replace("\n", " ")


def test_the_line_of_a_request_log_has_every_key() -> None:
    (line,) = [block for block in BLOCKS if block.page == "docs/debugging.md" and block.language == "json"]
    assert list(json.loads(line.text)) == list(RequestEntry(request_id="a").as_json())


def test_the_receipt_that_is_shown_has_every_option() -> None:
    (shown,) = [each for each in BLOCKS if each.page == "docs/processors.md" and '"engine": {' in each.text]
    receipt = RecordedReceipt.model_validate(json.loads(shown.text))
    assert tuple(receipt.engine.options) == OPTIONS_OF_BITS


def check_selection(fields: dict[str, Any], engine: Engine) -> None:
    check_processors(selection_of(fields).get("processors", []), engine)


def check_processors(processors: list[dict[str, Any]], engine: Engine) -> None:
    """The engine would take them; of third parties' that are not here only the form is checked."""
    known = [one for one in processors if one["name"] in CATALOG.names or "/" not in one["name"]]
    engine.session.prepare(["Hello"], [SamplingParams(max_tokens=8)], [known])


@blocks("yaml")
def test_yaml_is_what_reads_it_takes(block: Block, tmp_path: Path) -> None:
    data = yaml.safe_load(block.text)
    if "models" in data:
        key = tmp_path / "key"
        key.write_text("7" * 32)
        text = re.sub(r"/run/secrets/[\w.-]+", str(key), block.text)
        (tmp_path / "policy.yaml").write_text(text, encoding="utf-8")
        Policy.load(tmp_path / "policy.yaml", CATALOG, {})


@blocks("toml")
def test_toml_is_read(block: Block) -> None:
    assert tomllib.loads(block.text)


def test_requests_name_a_model_that_is_served() -> None:
    """The quickstart's two, or another one that the page itself starts."""
    named = re.compile(r"""(?:"model": ?|model=|WorkerClient\.connect\()"([^"]+)\"""")
    unknown = {
        (str(block), name)
        for block in BLOCKS
        if block.language in ("python", "py", "sh", "console", "js") and block.page != "docs/clients.md"
        for name in named.findall(block.text)
        if name not in ("my-model", "SmolLM2-135M-Instruct")
        and not name.isupper()  # which the reader replaces
        and not (name == "tiny-model" and re.search(r"MODEL_PATH=tiny|tiny model", text_of(block.page)))
    }
    assert unknown == set()


def test_what_programs_import_is_exported() -> None:
    """A type checker shows nobody a name that a package has only imported itself."""
    trees = [ast.parse(block.text) for block in BLOCKS if block.language == "python"]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    hidden = set()
    for node in found:
        if node.module is not None and node.module.partition(".")[0] in ("adapters", "worker"):
            module = importlib.import_module(node.module)
            for name in (each.name for each in node.names):
                origin = getattr(getattr(module, name), "__module__", node.module)
                if origin != node.module and name not in getattr(module, "__all__", ()):
                    hidden.add(f"{node.module}.{name}")
    assert hidden == set()
