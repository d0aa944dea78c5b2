"""Checkpoints by their ids on the Hugging Face Hub: from its local cache, or downloaded into it.

The cache is the one of all programs that use huggingface_hub (``HF_HOME``, ``HF_HUB_CACHE``), and
so are ``HF_TOKEN``, ``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from worker.errors import StartupError, one_line

if TYPE_CHECKING:
    from worker.models.checkpoint import Say

_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[\w.-]+", re.ASCII)
_PART = re.compile(r".+-\d+-of-(\d+)\.safetensors")
_TEMPLATES = "*.jinja"
_TEXTS = ["*.json", _TEMPLATES, "*.model", "*.tiktoken", "*.txt"]
_WEIGHTS = ["*.safetensors"]
_INDEX = "model.safetensors.index.json"
_ELSEWHERE = [*(f"*/{each}" for each in (*_TEXTS, *_WEIGHTS) if each != _TEMPLATES), "consolidated*"]
"""Files of other formats: of subfolders, which may have chat templates beside the default one, and
of Mistral's own.
"""

_READ = [
    *("*config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    _TEMPLATES,
]
"""Texts that a start reads, beside a `tokenizer.json`: a model without one of its own is another
model. The rest are licences, results of a training, and the tokenizer in other formats.
"""

_INCOMPLETE = "the model has no config.json, or no weights in safetensors"


def is_hub_id(name: str) -> bool:
    """Whether ``name`` is an id, OWNER/NAME, and no path of this machine."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def hub_checkpoint(name: str, revision: str | None, say: Say, *, has_weights: bool = True) -> Path:
    """The directory of a checkpoint. The network is asked only if the cache lacks a file.

    Args:
        name: Id of the model; see `is_hub_id`.
        revision: Branch, tag or commit; None is ``main``.
        say: Takes lines about the progress.
        has_weights: Whether the weights are wanted, beside configuration and tokenizer.

    Raises:
        StartupError: it is not in the cache and cannot be downloaded, or has no safetensors.
    """
    cached = _snapshot(name, revision, has_weights, is_local=True)
    if cached is not None and _is_whole(cached, has_weights):
        return cached
    if not _is_offline():
        say(f"downloading {name} into the cache of Hugging Face models ...")
    path = _snapshot(name, revision, has_weights, is_local=False)
    assert path is not None
    if not _is_whole(path, has_weights):
        missing = f"no such directory, and {_kept_offline()}" if _is_offline() else _INCOMPLETE
        raise StartupError(f"--model-path {name}: {missing}")
    say(f"downloaded {name}")
    return path


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _snapshot(name: str, revision: str | None, has_weights: bool, *, is_local: bool) -> Path | None:
    """The directory of what is in the cache, None if nothing is; or of what was downloaded."""
    from huggingface_hub import snapshot_download  # takes a second, which others need not wait for
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def snapshot(patterns: list[str]) -> Path:
        found: str = snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_ELSEWHERE,
            local_files_only=is_local,
        )
        return Path(found)

    try:
        return snapshot([*_TEXTS, *_WEIGHTS] if has_weights else _TEXTS)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, RuntimeError) as error:
        if is_local and isinstance(error, LocalEntryNotFoundError):
            # some of its files are missing: a licence, perhaps, that another program did not fetch
            read = [*_READ, _INDEX] if has_weights else _READ
            with suppress(LocalEntryNotFoundError):
                if _is_offline() and ((found := snapshot(read)) / "tokenizer.json").is_file():
                    return found
            return None
        raise StartupError(f"--model-path {name}: no such directory, and {_reason(name, revision, error)}") from error


def _reason(name: str, revision: str | None, error: Exception) -> str:
    """The cause of a failed download, and the cure."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    if _is_offline():
        return _kept_offline()
    if isinstance(error, GatedRepoError):
        return f"the model is gated: accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no such model, or only for its members: set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"the model has no revision {revision or 'main'!r} (--revision)"
    said = one_line(_first_cause(error))[:200]
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} refuses it: {said}"
    return f"it cannot be downloaded from {constants.ENDPOINT} into {constants.HF_HUB_CACHE}: {said}"


def _kept_offline() -> str:
    from huggingface_hub import constants

    cache = constants.HF_HUB_CACHE
    return f"the cache {cache} has not all of the model, which HF_HUB_OFFLINE keeps from being downloaded"


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _is_whole(path: Path, has_weights: bool) -> bool:
    """Whether the files that a checkpoint needs are there; a download may have been cut off."""
    if not (path / "config.json").is_file():
        return False
    if not has_weights:
        return True
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        names = set(index["weight_map"].values())
    except FileNotFoundError:
        return _has_every_part([each.name for each in path.glob("*.safetensors") if each.is_file()])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return False
    return all(os.path.isfile(path / str(each)) for each in names)


def _has_every_part(names: list[str]) -> bool:
    """Whether there are files of weights, and with one of several, such as
    ``model-00001-of-00004.safetensors``, all the others: a download fetches their index last.
    """
    counts = Counter(part[1] for name in names if (part := _PART.fullmatch(name)))
    return bool(names) and all(count == int(total) for total, count in counts.items())
