"""Options: one table, three sources, every mistake one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from worker.arguments import OPTIONS, Arguments, Option, parse_arguments
from worker.engines.embedded import config
from worker.errors import ConfigurationError

MODEL = ["--model-path", "/models/tiny"]


def parse(*argv: str, **environ: str) -> Arguments:
    return parse_arguments([*MODEL, *argv], environ)


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigurationError) as refused:
        parse(*argv, **environ)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_defaults() -> None:
    arguments = parse()
    assert (arguments.model_path, arguments.served_model_name) == ("/models/tiny", "tiny")
    assert (arguments.engine, arguments.device, arguments.dtype) == ("embedded", "auto", "auto")
    assert (arguments.namespace, arguments.component, arguments.endpoint) == ("dynamo", "backend", "generate")
    assert (arguments.discovery_backend, arguments.request_plane, arguments.event_plane) == ("etcd", "tcp", None)
    assert (arguments.max_num_seqs, arguments.drain_timeout_s, arguments.enable_kv_routing) == (64, 30.0, True)


@pytest.mark.parametrize(("text", "size"), [("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("64KiB", 2**16), ("0.001KiB", 1)])
def test_sizes_of_the_kv_cache(text: str, size: int, tmp_path: Path) -> None:
    assert parse("--kv-cache-memory", text).kv_cache_memory == size
    path = write(tmp_path, f"kv_cache_memory: {text}\n")
    assert parse("--extra-engine-args", path).kv_cache_memory == size


def test_served_model_name_of_a_relative_path() -> None:
    assert parse_arguments(["--model-path", "models/Some.Name-Q4_0.gguf"], {}).served_model_name == "Some.Name-Q4_0"
    assert parse_arguments(["--model-path", "models/tiny/"], {}).served_model_name == "tiny"


def test_environment_and_command_line() -> None:
    environ = {"WORKER_MAX_NUM_SEQS": "8", "DYN_NAMESPACE": "prod", "DYN_EVENT_PLANE": "nats", "WORKER_DTYPE": ""}
    arguments = parse("--max-num-seqs", "4", **environ)
    assert (arguments.max_num_seqs, arguments.namespace, arguments.event_plane) == (4, "prod", "nats")
    assert arguments.dtype == "auto"


def test_model_path_from_the_environment() -> None:
    assert parse_arguments([], {"WORKER_MODEL_PATH": "/a/b"}).served_model_name == "b"
    with pytest.raises(ConfigurationError, match="--model-path is required"):
        parse_arguments([], {})


def example(option: Option) -> str:
    if option.choices:
        return option.choices[0]
    return {bool: "false", int: "3000", float: "2.5"}.get(type(option.default)) or {
        "context_length": "512",
        "max_mixed_chunk": "32",
        "kv_blocks": "99",
        "kv_cache_memory": "1.5GiB",
        "device": "cuda:1",
        "packed_copy": "/packed",
        "endpoint_types": "chat",
        "boundary_store": "nats:nats://127.0.0.1:4222",
        "otlp_endpoint": "http://collector:4318/v1/traces",
        "nats_reply_prefixes": "_INBOX_app.,_R_.",
        "lora_modules": "one=/one,other=/other",
    }.get(option.name, "word")


RUNTIMES = {
    **dict.fromkeys((option.name for option in OPTIONS if option.name.startswith("nats_")), "nats"),
    **dict.fromkeys(("model_version", "batch", "batch_ack_wait_s", "batch_max_deliver"), "nats"),
    **dict.fromkeys((option.name for option in OPTIONS if option.name.startswith("grpc_")), "openengine"),
    **dict.fromkeys(("metrics_port", "metrics_host"), "openengine"),
}
NEEDED = {
    "nats_tls_cert": ["--nats-tls-key", "k"],
    "nats_tls_key": ["--nats-tls-cert", "c"],
    "grpc_tls_cert": ["--grpc-tls-key", "k"],
    "grpc_tls_key": ["--grpc-tls-cert", "c"],
    "engine_port": ["--engine-key-file", "k"],
    "thinking_start": ["--thinking-end", "e"],
    "thinking_end": ["--thinking-start", "s"],
}
"""Options that go with another one."""

READABLE = [option for option in OPTIONS if option.name != "extra_engine_args"]  # that one is tested with files


@pytest.mark.parametrize("option", READABLE, ids=lambda option: option.name)
def test_every_option_reads_the_same_from_flag_and_environment(option: Option) -> None:
    text = example(option)
    model = [] if option.name == "model_path" else MODEL
    trtllm = (
        *("tensor_parallel_size", "pipeline_parallel_size", "history", "processor_errors"),
        "override_engine_args",
    )
    extra = ["--max-num-batched-tokens", "4000"] if option.name == "max_num_seqs" else []
    extra += ["--engine", "trtllm"] if option.name in trtllm else []
    vllm = ("engine_args", "lora_modules", "modality", "allowed_local_media_path", "allowed_media_domains")
    extra += ["--engine", "vllm"] if option.name in vllm else []
    extra += ["--modality", "multimodal"] if option.name.startswith("allowed_") else []
    extra += ["--engine", "constant"] if option.name.startswith("constant_") else []
    extra += ["--migration", "on"] if option.name == "boundary_store" else []
    extra += ["--runtime", RUNTIMES[option.name]] if option.name in RUNTIMES else []
    extra += NEEDED.get(option.name, [])
    by_flag = parse_arguments([*model, *extra, option.flag, text], {})
    by_environment = parse_arguments([*model, *extra], {option.env: text})
    assert by_flag == by_environment
    assert getattr(by_flag, option.name) == option.parse(text)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-num-seq", "4"], "unrecognized arguments: --max-num-seq 4; did you mean --max-num-seqs?"),
        (["--max-num-sequences=4"], "unrecognized arguments: --max-num-sequences=4; did you mean --max-num-seqs?"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["stray"], "unrecognized arguments: stray"),
        (["--max-num-seqs"], "argument --max-num-seqs: expected one argument"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be an integer of at least 1, got '0'"),
        (["--max-num-seqs", "1e3"], "--max-num-seqs must be an integer of at least 1, got '1e3'"),
        (["--max-num-seqs", "-4"], "--max-num-seqs must be an integer of at least 1, got '-4'"),
        (
            ["--kv-cache-memory", "2GB"],
            "--kv-cache-memory must be a size above 0 with its unit, KiB, MiB or GiB, for example 2GiB, got '2GB'",
        ),
        (
            ["--kv-cache-memory", "0MiB"],
            "--kv-cache-memory must be a size above 0 with its unit, KiB, MiB or GiB, for example 2GiB, got '0MiB'",
        ),
        (
            ["--lora-modules", "one=/a,two=/b,One=/c"],
            "--lora-modules: one and One are both one in Dynamo's discovery",
        ),
        (
            ["--lora-modules", "\u00fc=/a"],
            "--lora-modules: \u00fc has no ASCII letter, digit or - for Dynamo's discovery",
        ),
        (["--nats-url", "nats://a:1"], "--nats-url needs --runtime nats"),
        (["--batch"], "--batch needs --runtime nats"),
        (["--grpc-port", "1"], "--grpc-port needs --runtime openengine"),
        (["--metrics-port", "1"], "--metrics-port needs --runtime nats or openengine"),
        (["--engine-port", "1"], "--engine-port needs --engine-key-file: whoever reaches it changes the model"),
        (["--engine-port", "65536", "--engine-key-file", "k"], "--engine-port must be a port number, got 65536"),
        (["--runtime", "openengine", "--batch"], "--batch needs --runtime nats"),
        (["--runtime", "openengine", "--grpc-port", "65536"], "--grpc-port must be a port number, got 65536"),
        (
            ["--runtime", "openengine", "--grpc-tls-key", "k"],
            "--grpc-tls-cert and --grpc-tls-key belong together; give both",
        ),
        (
            ["--runtime", "openengine", "--disaggregation-mode", "decode"],
            "--disaggregation-mode decode needs --runtime dynamo",
        ),
        (["--runtime", "nats", "--namespace", "a"], "--namespace needs --runtime dynamo"),
        (
            ["--runtime", "nats", "--disaggregation-mode", "decode"],
            "--disaggregation-mode decode needs --runtime dynamo",
        ),
        (
            ["--runtime", "nats", "--nats-token", "t", "--nats-nkey-seed", "s"],
            "--nats-token and --nats-nkey-seed both say who the worker is; give one of them",
        ),
        (
            ["--runtime", "nats", "--nats-tls-cert", "c"],
            "--nats-tls-cert and --nats-tls-key belong together; give both",
        ),
        (
            ["--runtime", "nats", "--model-version", "1.0"],
            "--model-version must be 1 to 64 letters, digits, hyphens and underscores, got '1.0'",
        ),
        (
            ["--kv-cache-memory", "2GiB", "--kv-blocks", "128"],
            "--kv-blocks and --kv-cache-memory both size the KV cache; give one of them",
        ),
        (
            ["--engine", "trtllm", "--kv-cache-memory", "1KiB"],
            "--kv-cache-memory 1024 needs --engine embedded or vllm",
        ),
        (["--local-workers", "0"], "--local-workers must be an integer of at least 1, got '0'"),
        (["--kv-block-size", "0"], "--kv-block-size must be an integer of at least 1, got '0'"),
        (["--max-queue", "-1"], "--max-queue must be an integer of at least 0, got '-1'"),
        (["--context-length", "1"], "--context-length must be at least 2, got 1"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s must be a number of seconds of at least 0, got 'nan'"),
        (["--step-timeout-s", "-1"], "--step-timeout-s must be a number of seconds above 0, got '-1'"),
        (["--step-timeout-s", "0"], "--step-timeout-s must be a number of seconds above 0, got '0'"),
        (["--engine", "sglang"], "--engine must be one of embedded, trtllm, vllm, constant, got 'sglang'"),
        (["--engine-args", "{}"], "--engine-args {} needs --engine vllm"),
        (["--engine", "vllm", "--device", "cpu"], "--engine vllm chooses its devices itself, but --device is cpu"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--dtype", "fp32"], "--dtype must be one of auto, float32, bfloat16, float16, got 'fp32'"),
        (["--enable-kv-routing", "1"], "--enable-kv-routing must be true or false, got '1'"),
        (["--served-model-name", " "], "--served-model-name must be a non-empty text, got ' '"),
        (["--device", "cpu", "--device", "cuda"], "--device is given 2 times"),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "63"],
            "--max-num-batched-tokens (63) must be at least --max-num-seqs (64)",
        ),
        (["--engine", "trtllm", "--device", "cpu"], "--engine trtllm needs CUDA, but --device is cpu"),
        (
            ["--engine", "trtllm", "--device", "cuda:1"],
            "--engine trtllm chooses its devices itself, but --device is cuda:1",
        ),
        (["--history", "lagged"], "--history lagged needs --engine trtllm"),
        (["--processor-errors", "open"], "--processor-errors open needs --engine trtllm"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2 needs --engine trtllm or vllm"),
        (["--engine", "trtllm", "--numerics", "exact"], "--numerics exact needs --engine embedded"),
        (["--engine", "trtllm", "--kv-cache-dtype", "int8"], "--kv-cache-dtype int8 needs --engine embedded"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype must be one of auto, none, int8, int16, got 'fp8'"),
        (["--engine", "trtllm", "--max-mixed-chunk", "64"], "--max-mixed-chunk 64 needs --engine embedded"),
        (["--engine", "trtllm", "--step-timeout-s", "5"], "--step-timeout-s 5.0 needs --engine embedded or vllm"),
        (["--thinking-start", "<t>"], "--thinking-start and --thinking-end belong together; give both"),
        (["--thinking-end", "</t>"], "--thinking-start and --thinking-end belong together; give both"),
        (["--dtype", "float16"], "--dtype float16 needs --engine trtllm or vllm"),
        (["--grpc-host", "a..b"], "--grpc-host must be an address or the name of a host, got 'a..b'"),
        (["--metrics-host", "a..b"], "--metrics-host must be an address or the name of a host, got 'a..b'"),
        (["--engine-host", "a..b"], "--engine-host must be an address or the name of a host, got 'a..b'"),
        (["--endpoint-types", "chat,audio"], "--endpoint-types must be of chat, completions, none, got 'chat,audio'"),
        (
            ["--endpoint", "dyn://a.b"],
            "--endpoint must be a name or dyn://namespace.component.endpoint, got 'dyn://a.b'",
        ),
        (
            ["--endpoint", "dyn://a.b.c", "--component", "x"],
            "--endpoint dyn://a.b.c contradicts --component x",
        ),
    ],
)
def test_refusals(argv: list[str], message: str) -> None:
    assert refusal(*argv) == message


@pytest.mark.parametrize("flag", ["--model-path", "--served-model-name", "--lora-modules"])
def test_a_name_that_is_not_utf_8_is_refused(flag: str) -> None:
    """A worker would start with it, and could tell no client what it serves."""
    text = "one\udcff" if flag != "--lora-modules" else "one\udcff=/a"  # as Python reads such a byte
    given = [] if flag == "--model-path" else ["--model-path", "/m"]
    with pytest.raises(ConfigurationError, match=rf"^{flag} must be UTF-8, got 'one\\udcff"):
        parse_arguments([*given, flag, text], {})
    with pytest.raises(ConfigurationError, match=r"^WORKER_SERVED_MODEL_NAME must be UTF-8, got "):
        parse_arguments(["--model-path", "/m"], {"WORKER_SERVED_MODEL_NAME": "\udcff"})


def test_unknown_environment_names() -> None:
    assert refusal(WORKER_MAX_NUM_SEQ="4") == "unknown environment variable WORKER_MAX_NUM_SEQ"
    assert refusal(WORKER_MAX_NUM_SEQS="x") == "WORKER_MAX_NUM_SEQS must be an integer of at least 1, got 'x'"


def test_full_endpoint() -> None:
    arguments = parse("--endpoint", "dyn://a.b.c", "--namespace", "a")
    assert (arguments.namespace, arguments.component, arguments.endpoint) == ("a", "b", "c")


def test_namespace_suffix() -> None:
    assert parse(DYN_NAMESPACE_WORKER_SUFFIX="two").namespace == "dynamo-two"
    assert parse("--namespace", "a", DYN_NAMESPACE_WORKER_SUFFIX="two").namespace == "a-two"


def test_agg_is_aggregated() -> None:
    assert parse("--disaggregation-mode", "agg").disaggregation_mode == "aggregated"
    assert parse("--disaggregation-mode", "prefill").component == "prefill"
    assert parse("--disaggregation-mode", "prefill", "--component", "own").component == "own"
    assert parse("--disaggregation-mode", "decode").component == "backend"
    assert parse("--disaggregation-mode", "prefill").publishes_kv_events
    assert not parse("--disaggregation-mode", "decode").publishes_kv_events
    assert not parse("--enable-kv-routing", "false").publishes_kv_events


def write(directory: Path, text: str) -> str:
    path = directory / "engine.yaml"
    path.write_text(text)
    return str(path)


def test_engine_options_from_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seqs: 8\nkv_block_size: 32\ndtype: bfloat16\n")
    arguments = parse("--extra-engine-args", path, "--kv-block-size", "32")
    assert (arguments.max_num_seqs, arguments.kv_block_size, arguments.dtype) == (8, 32, "bfloat16")
    assert parse("--extra-engine-args", write(tmp_path, "")).max_num_seqs == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_seqs: 8", "unknown engine option 'max_seqs'; known: "),
        ("namespace: x", "unknown engine option 'namespace'; known: "),
        ("max_num_seqs: 8\nmax_num_seqs: 9", "the key 'max_num_seqs' occurs twice"),
        ("max_num_seqs: [8]", "max_num_seqs must be one value, got [8]"),
        ("max_num_seqs: true", "max_num_seqs must be one value, got True"),
        ("max_num_seqs:", "max_num_seqs must be one value, got None"),
        ("max_num_seqs: 0", "max_num_seqs must be an integer of at least 1, got '0'"),
        ("- 8", "must be a mapping of option names to values"),
        ("a: [", "while parsing"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert refusal("--extra-engine-args", path).startswith(f"--extra-engine-args {path}: {message}")


def test_a_file_may_not_contradict(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seqs: 8")
    expected = f"--max-num-seqs is 9 but {path} says max_num_seqs: 8; give it in one place"
    assert refusal("--extra-engine-args", path, "--max-num-seqs", "9") == expected
    assert refusal("--extra-engine-args", path, WORKER_MAX_NUM_SEQS="9") == expected


def test_missing_file() -> None:
    assert refusal("--extra-engine-args", "/nowhere.yaml").startswith("--extra-engine-args /nowhere.yaml: ")


def test_nothing_heavy_is_imported_before_the_arguments_are_read() -> None:
    code = (
        "import sys, worker.__main__ as m\n"
        "status = m.main(['--max-num-seqs', '0'])\n"
        "heavy = {'torch', 'transformers', 'dynamo', 'prometheus_client'} & set(sys.modules)\n"
        "assert status == 2 and not heavy, (status, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "worker: error: --max-num-seqs must be an integer of at least 1, got '0'\n"


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_version_and_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_arguments([flag], {})
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert "dynamo-logits-worker 0." in shown if flag == "--version" else "--kv-block-size" in shown


def row(option: Option) -> str:
    default = "" if option.default is None else str(option.default)
    default = default.lower() if isinstance(option.default, bool) else default
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    return f"| `{option.flag}` | `{option.env}` | {default} | {option.help}{choices} |"


def test_the_document_shows_the_table() -> None:
    """`docs/configuration.md` has exactly the rows of `OPTIONS`; on failure, paste the left
    side.
    """
    document = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert [row(option) for option in OPTIONS] == re.findall(r"^\| `--.*$", document, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("numerics", config.NUMERICS),
        ("kernels", config.KERNELS),
        ("quantization", config.QUANTIZATIONS),
        ("activation_dtype", config.ACTIVATION_DTYPES),
        ("kv_cache_dtype", config.KV_CACHE_DTYPES),
        ("lora_dtype", config.LORA_DTYPES),
    ],
)
def test_choices_are_those_of_the_embedded_engine(name: str, known: tuple[str, ...]) -> None:
    """The options import no engine, so both name them."""
    assert next(option.choices for option in OPTIONS if option.name == name) == known
