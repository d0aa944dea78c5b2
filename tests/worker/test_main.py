"""``python -m worker`` up to the point where it would serve: checks, one line each, and the exit
status.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import worker.__main__ as program
import worker.installation as checks
import worker.models
from worker.arguments import Arguments, parse_arguments
from worker.build import Built, check_model, with_hub_model
from worker.engines.lora_adapters import read_adapters
from worker.errors import ConfigurationError, ServingError, StartupError
from worker.runtimes.dynamo_engine import WorkerEngine
from worker.tiny_model import write_tiny_model


def arguments(*argv: str) -> Arguments:
    return parse_arguments(["--model-path", "/models/tiny", *argv], {})


def test_our_own_adapters_package_is_the_one_that_is_found() -> None:
    checks.check_adapters_package()


@pytest.mark.parametrize("name", ["adapters", "adapter-transformers"])
def test_another_distribution_with_an_adapters_package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = importlib.metadata.distribution

    def distribution(wanted: str) -> importlib.metadata.Distribution:
        return real("pytest") if wanted == name else real(wanted)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    with pytest.raises(ConfigurationError, match=f"distribution '{name}' also installs a package called 'adapters'"):
        checks.check_adapters_package()


def test_a_shadowing_adapters_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("adapters", tmp_path / "adapters" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigurationError, match=f"'adapters' must be the package at .*, found {tmp_path}"):
        checks.check_adapters_package()


def test_trtllm_where_it_is_missing_and_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_engine(arguments())
    with pytest.raises(ConfigurationError, match="tensorrt_llm is not installed"):
        checks.check_engine(arguments("--engine", "trtllm"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin="here"))
    checks.check_engine(arguments("--engine", "trtllm"))


def test_models_that_are_none(tmp_path: Path) -> None:
    def check(*argv: str) -> None:
        check_model(parse_arguments(["--model-path", str(tmp_path / "m"), *argv], {}))

    with pytest.raises(StartupError, match=r"no such directory$"):
        check()
    for name, script in (("tiny", "MODEL_PATH=tiny launch/agg.sh"), ("default", "launch/agg.sh without MODEL_PATH")):
        problem = f"--model-path {name}: no such directory; {script} makes that model"
        with pytest.raises(StartupError, match=re.escape(problem)):
            check_model(parse_arguments(["--model-path", name], {}))
    (tmp_path / "m").mkdir()
    with pytest.raises(StartupError, match=r"no config\.json"):
        check()
    (tmp_path / "m" / "config.json").write_text("{}")
    check()
    with pytest.raises(StartupError, match=r"--custom-jinja-template /nowhere\.jinja: no such file"):
        check("--custom-jinja-template", "/nowhere.jinja")


UNREADABLE = "/tmp/" + 300 * "x"
"""A path at which nobody may look: no file system has names that long."""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model-path", UNREADABLE], f"--model-path {UNREADABLE}: cannot be read: File name too long"),
        (["--custom-jinja-template", UNREADABLE], f"--custom-jinja-template {UNREADABLE}: no such file that can be"),
        (["--lora-modules", f"mine={UNREADABLE}"], "--lora-modules: mine: must be the directory of an adapter, got"),
    ],
)
def test_a_path_at_which_nobody_may_look_is_one_line(argv: list[str], said: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    chosen = parse_arguments([*argv, *([] if "--model-path" in argv else ["--model-path", str(tmp_path)])], {})

    def check() -> None:
        check_model(chosen)
        read_adapters(chosen.lora_modules, str(tmp_path))

    with pytest.raises(ServingError) as caught:
        check()
    assert str(caught.value).startswith(said)


def test_what_the_system_refuses_a_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(argv: object) -> Built:
        raise PermissionError(13, "Permission denied", "/a")

    monkeypatch.setattr(program, "build", refuse)
    assert program.main(["--model-path", "/a"]) == 1
    assert capsys.readouterr().err == "worker: error: [Errno 13] Permission denied: '/a'\n"


def test_a_revision_is_of_an_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []

    def download(name: str, revision: str | None, say: object) -> Path:
        asked.append((name, revision))
        return tmp_path

    monkeypatch.setattr(worker.models, "hub_checkpoint", download)
    with pytest.raises(ConfigurationError, match=r"--revision is of an id .*, but --model-path is /models/tiny"):
        with_hub_model(arguments("--revision", "v1"))
    made = with_hub_model(parse_arguments(["--model", "acme/m-1.5", "--revision", "v1"], {}))
    assert (made.model_path, made.served_model_name) == (str(tmp_path), "acme/m-1.5")
    named = with_hub_model(parse_arguments(["--model", "acme/m-1.5", "--served-model-name", "m"], {}))
    assert named.served_model_name == "m"
    assert asked == [("acme/m-1.5", "v1"), ("acme/m-1.5", None)]


class Serving:
    """Stands for the engine while `runtime.run` is replaced."""

    startup_error: str | None = None
    broken: str | None = None

    @property
    def server(self) -> Serving:
        return self

    def signalled(self) -> None:
        pass


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> Serving:
    engine = Serving()
    built = Built(None, arguments(), None, smoke=False)  # type: ignore[arg-type]
    monkeypatch.setattr(program, "build", lambda argv: built)
    monkeypatch.setattr(WorkerEngine, "of", lambda built: (engine, None))
    return engine


def test_a_clean_end(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program.runtime, "run", lambda engine, config, signalled: None)  # type: ignore[attr-defined]
    assert program.main([]) == 0


def test_a_broken_engine(serving: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    serving.broken = "device lost"
    monkeypatch.setattr(program.runtime, "run", lambda engine, config, signalled: None)  # type: ignore[attr-defined]
    assert program.main([]) == 1
    assert capsys.readouterr().err == "worker: error: engine broken: device lost\n"


@pytest.mark.parametrize(("startup_error", "shown"), [("no weights", "no weights"), (None, "no etcd")])
def test_a_failed_start(
    serving: Serving,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    startup_error: str | None,
    shown: str,
) -> None:
    def run(engine: object, config: object, signalled: object) -> None:
        raise RuntimeError("no\netcd")

    serving.startup_error = startup_error
    monkeypatch.setattr(program.runtime, "run", run)  # type: ignore[attr-defined]
    assert program.main([]) == 1
    assert capsys.readouterr().err == f"worker: error: {shown}\n"


def test_statuses_of_checks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checks.SHUTDOWN_LIMIT, "60")  # or the first of these would set it for good
    assert program.main(["--model-path", "/nowhere", "--engine", "vllm"]) == 2
    assert program.main(["--model-path", "/nowhere"]) == 1
    monkeypatch.setenv("DYN_ENABLE_TEST_LOGITS_PROCESSOR", "maybe")
    assert program.main(["--model-path", "/nowhere"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("worker: error: ") for line in lines)


@pytest.mark.parametrize("value", ["0", "-3", "four", "2,0", "1.5", "999999"])
@pytest.mark.parametrize("command", [[], ["replay"], ["inspect"], ["quantize"]])
def test_a_number_of_threads_that_is_none(
    value: str, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert program.main(command) == 2
    expected = f"worker: error: OMP_NUM_THREADS must be a number of threads, from 1 to 99999, got {value!r}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("value", [None, "", "1", " 4 ", "4,2"])
def test_numbers_of_threads(value: str | None) -> None:
    checks.check_threads({} if value is None else {"OMP_NUM_THREADS": value})
