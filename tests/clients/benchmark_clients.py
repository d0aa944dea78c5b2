"""Clients that measure servers: each asks for streamed chats, four at a time."""

from __future__ import annotations

import json
from pathlib import Path

from client_environments import environment_of, run

BENCHMARKS = ("aiperf", "guidellm")
REQUESTS = 24


def run_benchmark(client: str, url: str, model: str, checkpoint: Path, directory: Path) -> None:
    """Run a benchmark.

    Args:
        client: One of `BENCHMARKS`.
        url: Address of the worker's API, with ``/v1``.
        model: Name of the model that the worker serves.
        checkpoint: Directory with its tokenizer.
        directory: Folder in which the benchmark may write.

    Raises:
        AssertionError: it failed, or one of its requests did.
    """
    address = url.removesuffix("/v1")
    made = (
        _aiperf(address, model, checkpoint, directory)
        if client == "aiperf"
        else _guidellm(address, model, checkpoint, directory)
    )
    program = str(environment_of(client) / "bin" / client)
    # offline aiperf takes a directory for the name of a repository, and ends
    done = run(client, [program, *made], directory, HF_HUB_OFFLINE="")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    if client == "aiperf":
        (path,) = (directory / "artifacts").rglob("profile_export_aiperf.json")
        report = json.loads(path.read_text())
        assert report["request_count"]["avg"] == REQUESTS
        assert not report.get("error_summary")
    else:
        (benchmark,) = json.loads((directory / "report.json").read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


def _aiperf(address: str, model: str, checkpoint: Path, directory: Path) -> list[str]:
    return [
        *("profile", "--model", model, "--url", address, "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", "4", "--request-count", str(REQUESTS), "--random-seed", "7"),
        *("--tokenizer", str(checkpoint), "--isl", "100", "--osl", "32", "--extra-inputs", "ignore_eos:true"),
        *("--ui", "none", "--artifact-dir", str(directory / "artifacts")),
    ]


def _guidellm(address: str, model: str, checkpoint: Path, directory: Path) -> list[str]:
    return [
        *("run", "--backend", f"kind=openai_http,target={address},model={model}"),
        *("--profile", "kind=concurrent,streams=[4]", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=32"),
        *("--tokenizer", f"kind=huggingface_auto,model={checkpoint}"),
        *("--output", f"kind=json,path={directory / 'report.json'}"),
    ]
