"""Facts that pages state beside generated tables are those of the code, and figures those of the
results.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from document_pages import PAGES, ROOT, prose_of, text_of

from adapters.catalog import selection
from adapters.contract import Stage
from worker.arguments import OPTIONS
from worker.engines.embedded import Engine
from worker.engines.embedded.transfer import leases
from worker.engines.images import MAX_IMAGES, MAX_PIXELS
from worker.frontdoor.fields import FIELDS
from worker.frontdoor.openengine import generation
from worker.frontdoor.options import OPTIONS as FRONT_DOOR_OPTIONS
from worker.server.engine_routes import EngineRoutes
from worker.server.sglang_routes import REFUSED, SglangRoutes

CURRENT = [page for page in PAGES if page != "CHANGELOG.md" and not page.startswith("docs/decisions/")]
"""Pages that say what is, not what was."""


def rows_of(page: str, *, first: str) -> Iterator[list[str]]:
    """The cells of each row of the tables whose first column is headed by ``first``."""
    for table in re.findall(r"(?:^\|.*\|\n)+", prose_of(page), re.MULTILINE):
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if cells[0][0] == first:
            yield from cells[2:]


def sources(folder: str) -> Iterator[tuple[str, ast.Module]]:
    """The modules below a folder, by their paths in the repository."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_bytes())


def method_of(route: object) -> ast.AST:
    """The source of a bound method."""
    return ast.parse(textwrap.dedent(inspect.getsource(route.__func__)))  # type: ignore[attr-defined]


def texts_in(tree: ast.AST, called: str) -> set[str]:
    """The texts among the arguments of the calls of a function."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == called]
    found = [each for call in calls for argument in call.args[1:] for each in ast.walk(argument)]
    return {str(each.value) for each in found if isinstance(each, ast.Constant)}


def test_every_status_of_the_front_door_has_a_row() -> None:
    answered = {
        node.args[0].value
        for _, tree in sources("worker/frontdoor")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Refused" and isinstance(node.args[0], ast.Constant)
    }
    listed = {int(status) for row in rows_of("docs/front-door.md", first="status") for status in row[0].split(", ")}
    assert answered | {*generation._STATUS.values()} <= listed


def test_fields_of_engine_routes_have_their_rows() -> None:
    rows = {
        name: row[1]
        for row in rows_of("docs/weights.md", first="route")
        for name in re.findall(r"`/engine/(\w+)`", row[0])
    }
    routes = object.__new__(EngineRoutes)
    for name, method in {
        "update_weights_from_disk": routes._update_from_disk,
        "update_weights": routes._update,
        "pause": routes._pause,
        "abort_request": routes._abort_request,
        "sleep": routes._sleep,
        "load_lora_adapter": routes._load_adapter,
        "unload_lora_adapter": routes._unload_adapter,
    }.items():
        assert {*re.findall(r"`(\w+)`", rows[name])} == texts_in(method_of(method), "check_names"), name


def test_routes_of_sglang_have_rows() -> None:
    routes = SglangRoutes(object.__new__(EngineRoutes))
    table = "".join(row[0] for row in rows_of("docs/recipes/rollouts.md", first="SGLang's route"))
    named = set(re.findall(r"(/[\w/]+)", table))
    assert {*routes.by_path, *REFUSED} - {"/generate"} <= named  # which the front door serves


def test_readme_names_every_page_of_the_site() -> None:
    pages = re.findall(r": ([\w/-]+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)
    own = [page for page in pages if (ROOT / "docs" / page).exists() and not page.startswith("benchmarks/")]
    assert own
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of("README.md"))}
    assert [page for page in own if f"docs/{page}" not in linked] == []


def test_the_decoding_table_of_readme_is_that_of_the_results() -> None:
    rows = [*rows_of("benchmarks/results/decode.md", first="case")]
    measured = {row[0]: row for row in reversed(rows)}  # of the first model
    for row in rows_of("README.md", first="batch"):
        case = "sampled" if ";" in row[0] else row[0]
        ours, _, vllm, transformers, _, llama = measured[case][1:7]
        expected = [ours, vllm] if case == "sampled" else [ours, vllm, transformers, llama]
        assert [one for one in row[1:] if one] == expected, case


def test_sampling_and_forcing_in_readme_are_as_measured() -> None:
    told = {row[0]: row[1] for row in rows_of("README.md", first="on two cores")}
    sampled = next(
        row
        for row in rows_of("benchmarks/results/sampler.md", first="controls")
        if row[:3] == ["temperature, top-k 50, top-p 0.9, min-p", "151,936", "32"]
    )
    ours, theirs = float(sampled[4]), float(sampled[5])
    assert (
        told["sampling with truncation, vocabulary 151,936, 32 rows"] == f"{ours:.1f} ms; transformers {theirs:.0f} ms"
    )
    forced = next(
        row for row in rows_of("benchmarks/results/processors.md", first="what") if row[0].startswith("forcing 32 rows")
    )
    micros = [float(cell.removesuffix(" ms")) * 1000 for cell in forced[1:3]]
    assert told["forcing 32 rows"] == f"{micros[0]:.0f} µs; a dense fill {micros[1]:.0f} µs"


def test_figures_of_adapters_are_those_of_the_results() -> None:
    (told,) = re.findall(r"^- A step without adapters costs.*?\(\[results\]", text_of("docs/models.md"), re.M | re.S)
    rows = {row[0]: row for row in rows_of("benchmarks/results/lora.md", first="model")}
    for model in ("default, Q4_1 and Q8_0, bfloat16", "default, Q4_1 and Q8_0, `--compute float32`"):
        assert rows[model][5] in told
        assert f"{rows[model][6]} times" in told
        assert rows[model][2] in told
    large = rows["4 layers of Llama 3.2 1B's shapes, bfloat16"]
    assert f"take {large[6]} times" in told


def test_arguments_of_the_offline_engine_are_explained() -> None:
    text = text_of("docs/offline.md")
    for name in inspect.signature(Engine.generate).parameters:
        if name not in ("self", "prompts", "sampling_params", "progress"):
            assert re.search(rf"`{name}=", text), name


@pytest.mark.parametrize("page", ["docs/processors.md", "docs/sampling.md", "docs/tensorrt-llm.md"])
def test_the_order_law_begins_with_its_first_stage(page: str) -> None:
    laws = re.findall(r"(\w+)(?: \([^)]*\))?(?:, | → )bias(?:, | → )penalt", prose_of(page), re.IGNORECASE)
    assert {law.upper() for law in laws} == {Stage(0).name}


def test_the_row_of_selections_has_every_key() -> None:
    (row,) = (each for each in FIELDS if each.name == "logits_processors")
    keys = {row[0].strip("`") for row in rows_of("docs/processors.md", first="field") if row[0].startswith("`")}
    assert {*selection._FIELDS} <= keys
    assert [key for key in selection._FIELDS if key not in ("version", "processors") and key not in row.why] == []


def test_limits_in_prose_are_those_of_the_code() -> None:
    assert f"{leases.MAX_LEASES:,} prompts are leased" in text_of("docs/disaggregation.md")
    pixels = MAX_PIXELS.bit_length() - 1
    assert f"{MAX_IMAGES} pictures, of 2^{pixels} pixels together" in text_of("docs/vllm.md")


def test_the_modules_that_import_dynamo_are_named() -> None:
    importing = {
        path
        for path, tree in sources("worker")
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dynamo" and not node.level)
        or (isinstance(node, ast.Import) and any(each.name.partition(".")[0] == "dynamo" for each in node.names))
    }
    (told,) = re.findall(r"experimental: (.*?) are the only modules", text_of("docs/dynamo.md"), re.DOTALL)
    assert {Path(name).name for name in re.findall(r"`([\w./]+\.py)`", told)} == {Path(one).name for one in importing}


def test_parallelism_is_told_of_the_engines_that_have_it() -> None:
    (option,) = (each for each in OPTIONS if each.name == "tensor_parallel_size")
    here = {row[0]: row[1] for row in rows_of("docs/comparison.md", first="feature")}
    told = here["tensor, pipeline, expert parallelism"]
    assert [engine for engine in ("TensorRT-LLM", "vLLM") if engine in option.help and engine not in told] == []


DEFAULT = re.compile(r"`(--[a-z][a-z-]+)` \(([\d.,]+)(?: s| MiB)?\)")


@pytest.mark.parametrize("page", [page for page in CURRENT if not page.startswith("k8s/")])
def test_a_number_behind_an_option_is_its_default(page: str) -> None:
    """Manifests give options values of their own."""
    defaults: dict[str, set[float]] = {}
    for option in (*OPTIONS, *FRONT_DOOR_OPTIONS):
        if isinstance(option.default, int | float):
            defaults.setdefault(option.flag, set()).add(float(option.default))
    for flag, number in DEFAULT.findall(prose_of(page)):
        assert float(number.replace(",", "")) in defaults[flag], (flag, number)


def test_options_of_batches_have_their_defaults() -> None:
    defaults = {option.flag: option.default for option in FRONT_DOOR_OPTIONS}
    for flag, told, _ in rows_of("docs/batches.md", first="option"):
        default = defaults[flag.strip("`")]
        assert told == ("off" if default is None else str(default)), flag


OTHERS_OPTIONS = {
    *("--api-server-count", "--mm-processor-cache-gb"),  # vLLM's
    *("--enable-custom-logit-processor", "--rollout-top-p", "--use-rollout-routing-replay"),  # SGLang's and slime's
    *(
        "--current",
        "--previous",
        "--reuse-values",
        "--hook-type",
        "--inbox-prefix",
    ),  # of kubectl, helm, pre-commit, nats
}
MADE_OF_NAMES = {"--learning-rate", "--prompts", "--nats-inbox-prefix"}
"""Options of our own whose text is in no file."""


@pytest.fixture(scope="module")
def code() -> str:
    """The text of everything that has options or variables."""
    folders = (
        "worker",
        "adapters",
        "launch",
        "scripts",
        "benchmarks",
        "tests/golden",
        "clients",
        "examples",
        "k8s",
        ".ci",
    )
    return "".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and path.suffix in ("", ".py", ".sh", ".yaml", ".tpl")
    )


def test_options_of_pages_exist(code: str) -> None:
    option = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]")
    known = {each.flag for each in (*OPTIONS, *FRONT_DOOR_OPTIONS)} | {*option.findall(code)}
    for page in CURRENT:
        if not page.startswith("docs/migrating/"):  # which have tables of others' options
            assert {*option.findall(prose_of(page))} - known - OTHERS_OPTIONS - MADE_OF_NAMES == set(), page


OTHERS_IN_MESSAGES = {
    *("--migration-limit", "--shm-size", "--ulimit", "--hash"),  # of Dynamo, Docker, pip
    *("--logits-processors", "--middleware", "--worker-extension-cls"),  # vLLM's
    "--vllm",  # of scripts/install
    *("--max-num-queued-reqs", "--max-num-queued-tokens"),
}


def test_options_that_messages_name_exist() -> None:
    """Those of other workers that ours takes too are read from tables, by others' names."""
    option = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
    texts = {
        (path, node.value)
        for folder in ("worker", "adapters")
        for path, tree in sources(folder)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    known = {each.flag for each in (*OPTIONS, *FRONT_DOOR_OPTIONS)} | {text for _, text in texts}
    for path, text in texts:
        if not path.startswith("worker/arguments/dynamo/") and "\n" not in text:
            assert {*option.findall(text)} - known - OTHERS_IN_MESSAGES == set(), path


def test_metrics_of_pages_exist(code: str) -> None:
    listed = {name for row in rows_of("docs/metrics.md", first="metric") for name in re.findall(r"`(dlw_\w+)`", row[0])}
    of_front_doors = set(re.findall(r"\"(dlw_upstream_\w+)\"", code))
    for page in CURRENT:
        named = set(re.findall(r"\bdlw_[a-z][a-z_]*[a-z]\b", text_of(page)))
        assert named - listed - of_front_doors == set(), page


def test_own_variables_of_pages_exist(code: str) -> None:
    known = {option.env for option in (*OPTIONS, *FRONT_DOOR_OPTIONS)}
    known |= {*re.findall(r"\b(?:WORKER|FRONT_DOOR|DLW)_[A-Z0-9_]*[A-Z0-9]\b", code)}
    for page in CURRENT:
        named = set(re.findall(r"\b(?:WORKER|FRONT_DOOR|DLW)_[A-Z0-9_]*[A-Z0-9]\b(?!-)", text_of(page)))
        assert named - known == set(), page
