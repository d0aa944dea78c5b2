"""Workers as a trainer sees them, over HTTP: rollouts from them, and weights to each."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engines.embedded.training import Rollout

UNCHANGED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling controls that change no probability; unset, each is the model's own
(``generation_config.json``).
"""


class WorkerError(RuntimeError):
    """No worker did what it was asked for; the message is one line with the reason."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout as the worker reported it.

    Attributes:
        rollout: Prompt and answer, with its end token.
        logprobs: Log probability of each token, the model's own, in float64.
        versions: Names of the weights that its tokens were sampled from.
    """

    rollout: Rollout
    logprobs: list[float]
    versions: tuple[str, ...]


def address(text: str) -> str:
    """The URL of a server, for `argparse`."""
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"expected http://host:port, got {text!r}")
    return text.rstrip("/")


def checkpoint_directory(text: str) -> Path:
    """The directory of a checkpoint, for `argparse`."""
    if not (Path(text) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"expected the directory of a checkpoint, with its config.json, got {text!r}")
    return Path(text)


class Workers:
    """Workers that serve one model behind a front door.

    Args:
        url: The front door, ``http://host:port``.
        engine_urls: ``--engine-port`` of each worker, as ``http://host:port``.
        key: A key of their ``--engine-key-file``.
    """

    def __init__(self, url: str, engine_urls: Sequence[str], key: str) -> None:
        self._url, self._engine_urls = url, list(engine_urls)
        self._key = {"authorization": f"Bearer {key}"}
        models = _asked(f"{url}/v1/models").get("data")
        if not models:
            raise WorkerError(f"{url}/v1/models: no model is served there yet")
        self._model: str = models[0]["id"]

    def update(self, weights: Path, version: str) -> None:
        """Make every worker that lives serve a checkpoint, or a file of some tensors, of its disk.

        Raises:
            WorkerError: a worker refuses it, or none lives.
        """
        body = {"model_path": str(weights.absolute()), "weight_version": version, "mode": "finish"}
        for url in list(self._engine_urls):
            try:
                _asked(f"{url}/engine/update_weights_from_disk", body, self._key)
            except OSError as error:
                print(f"a worker is gone: {error}", file=sys.stderr)
                self._engine_urls.remove(url)
        if not self._engine_urls:
            raise WorkerError("no worker is left: none of --engine-url answers")

    def sample(self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, seed: int) -> list[list[Sample]]:
        """`n` answers to each prompt, sampled from the model's own distribution; seed and weights
        determine them.
        """
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [(list(prompt), n, max_tokens, seed + place) for place, prompt in enumerate(prompts)]
            return list(pool.map(lambda one: self._sample(*one), asked))

    def _sample(self, prompt: list[int], n: int, max_tokens: int, seed: int) -> list[Sample]:
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "n": n, "max_tokens": max_tokens, "seed": seed}
        body |= {**UNCHANGED, "logprobs_mode": "train", "nvext": {"extra_fields": ["engine_data"]}}
        answer = _asked(f"{self._url}/v1/completions", body)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        for one in choices:
            if one["finish_reason"] not in ("stop", "length"):
                raise WorkerError(f"choice {one['index']} is not whole: {one['finish_reason']}")
        versions = _versions(answer.get("nvext") or {})
        return [
            Sample(Rollout(prompt, one["token_ids"]), one["train_logprobs"]["raw"], versions[place])
            for place, one in enumerate(choices)
        ]


def _versions(nvext: dict[str, Any]) -> list[tuple[str, ...]]:
    """The versions of each choice's tokens.

    Raises:
        WorkerError: a choice has none, since its worker is without --engine-port.
    """
    data = [((one or {}).get("engine_data") or {}).get("weight_versions") for one in nvext.get("choices", [nvext])]
    if None in data:
        raise WorkerError(f"choice {data.index(None)} does not name its weights: its worker has no --engine-port")
    return [tuple(part["version"] for part in parts) for parts in data]


def _asked(url: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """The JSON of an answer.

    Raises:
        WorkerError: the server refuses it, with its own reason, or answers with no JSON.
        ConnectionError: nobody is there, or the connection has broken.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)
    except ValueError as error:
        raise WorkerError(f"{url}: its answer is no JSON: {error}") from None
    except urllib.error.HTTPError as error:
        raise WorkerError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from None
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{url}: {getattr(error, 'reason', error)}") from None
