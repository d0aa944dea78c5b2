"""Workers as a trainer sees them, over HTTP: rollouts from them, and weights to each."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engines.embedded.training import Rollout


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
        self._model: str = _asked(f"{url}/v1/models")["data"][0]["id"]

    def update(self, weights: Path, version: str) -> None:
        """Make every worker that lives serve a checkpoint, or a file of some tensors, of its disk.

        Raises:
            RuntimeError: a worker refuses it, or none lives.
        """
        body = {"model_path": str(weights), "weight_version": version, "mode": "finish"}
        for url in list(self._engine_urls):
            try:
                _asked(f"{url}/engine/update_weights_from_disk", body, self._key)
            except OSError as error:
                print(f"{url} is gone: {error}", file=sys.stderr)
                self._engine_urls.remove(url)
        if not self._engine_urls:
            raise RuntimeError("no worker is left")

    def sample(self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, seed: int) -> list[list[Sample]]:
        """`n` answers to each prompt at temperature 1; seed and weights determine them."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            asked = [(list(prompt), n, max_tokens, seed + place) for place, prompt in enumerate(prompts)]
            return list(pool.map(lambda one: self._sample(*one), asked))

    def _sample(self, prompt: list[int], n: int, max_tokens: int, seed: int) -> list[Sample]:
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "n": n, "max_tokens": max_tokens, "seed": seed}
        body |= {"temperature": 1.0, "logprobs_mode": "train", "nvext": {"extra_fields": ["engine_data"]}}
        answer = _asked(f"{self._url}/v1/completions", body)
        versions = _versions(answer.get("nvext") or {})
        return [
            Sample(Rollout(prompt, one["token_ids"]), one["train_logprobs"]["raw"], versions[place])
            for place, one in enumerate(sorted(answer["choices"], key=lambda choice: choice["index"]))
        ]


def _versions(nvext: dict[str, Any]) -> list[tuple[str, ...]]:
    """The versions of each choice's tokens."""
    data = [one["engine_data"]["weight_versions"] for one in nvext.get("choices", [nvext])]
    return [tuple(part["version"] for part in parts) for parts in data]


def _asked(url: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """The JSON of an answer. Raises `RuntimeError` with the server's own reason."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read().decode(errors='replace')}") from None
