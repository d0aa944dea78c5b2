"""Digests of a worker's part in the controls of a request: an answer goes on where they are equal.

A request that continues an answer has all that the client gives. It has nothing of what the
operator's policy and the model's files add, nor the versions of the processors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from adapters.catalog import Catalog, Selection
from adapters.contract import Context
from adapters.processors import MinTokens
from worker.requests.continuation import ControlDigests
from worker.requests.sampling_defaults import SamplingDefaults
from worker.sampling import SamplingParams
from worker.sampling.field_processors import field_values

_DIGEST_BYTES = 8


def control_digests(
    params: SamplingParams,
    selection: Selection,
    *,
    catalog: Catalog,
    model: Context,
    defaults: SamplingDefaults,
    end_token_ids: tuple[int, ...],
    max_tokens: int | None = None,
) -> ControlDigests:
    """The digests of one request. ``min_tokens``, which a frontend reduces by an answer's length,
    has no part in them.

    Args:
        params: Sampling parameters, as they were parsed.
        selection: Processors of the request, the operator's among them.
        catalog: Every processor that may be named.
        model: Context that all requests to the model share.
        defaults: Values of controls that the request leaves unset.
        end_token_ids: The model's end tokens.
        max_tokens: Most tokens of the whole answer, which the worker's context may bound; None
            where a frontend has reduced it.
    """
    named = {one.name for one in selection.processors}
    filled, defaulted = defaults.fill(params, named)
    by_field = {value.requested.name for _, value in field_values(params) if not value.is_neutral}
    used = named | defaulted | by_field | {MinTokens.name}
    versions = {name: catalog[name].processor.version for name in used if name in catalog}
    added = {
        "policy": [[one.name, one.scope, one.args] for one in selection.processors if one.origin != "client"],
        "keys": [_digest(key) for one in selection.processors if (key := _key(one.args, model))],
        "defaults": {name: getattr(filled, name) for name in defaulted},
        "ends": [] if params.ignore_eos else sorted(end_token_ids),
        "thinking": [model.think_start, model.think_end],
        "most": max_tokens,
    }
    return ControlDigests(*(_digest(_json(each)) for each in (added, versions)))


def _key(args: Mapping[str, Any], model: Context) -> bytes:
    """The operator's watermark key that arguments name; empty if they name none."""
    key_id = args.get("key_id")
    return model.watermark_keys.get(key_id, b"") if isinstance(key_id, str) else b""


def _json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(_plain(data), separators=(",", ":")).encode()


def _plain(data: Any) -> Any:
    """JSON data that is equal where ``data`` is. The policy's arguments come from YAML, which has
    numbers beside texts as keys, and sets, dates and bytes.
    """
    if isinstance(data, Mapping):
        return sorted(([str(key), _plain(value)] for key, value in data.items()), key=itemgetter(0))
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, set | frozenset):
        return sorted(map(repr, data))
    return data if data is None or isinstance(data, str | int | float) else repr(data)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
