"""SGLang's routes at ``--engine-port``, for trainers whose engines are SGLang's servers.

Sources: ``http_server.py`` and ``io_struct.py`` of SGLang 0.5, and what slime and verl call of
them. Bodies and answers have SGLang's form, and so have defaults, which differ from those of the
routes below ``/engine/``: a pause aborts, and an update waits for what is in flight. Errors have
the form of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker import __version__
from worker.engines.weights import REASONS, NotSupported, PauseMode, WrongState
from worker.errors import InvalidRequest, shown
from worker.server.engine_routes import Answer, Asked, EngineRoutes, Route, check_names, text_of, version_name

_PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "retract": "keep", "in_place": "keep"}
"""SGLang's modes of a pause. What is not aborted stops where it is; behind an update its KV is
computed again, whether SGLang would have kept it (``in_place``) or not (``retract``).
"""

_TAGS = ("kv_cache", "weights", "cuda_graph")

_NO_GPU = "there is no NCCL and no GPU memory to share here; send safetensors to POST /engine/update_weights"
REFUSED: Mapping[str, str] = {
    "/update_weights_from_tensor": _NO_GPU,
    "/update_weights_from_distributed": _NO_GPU,
    "/update_weights_from_ipc": _NO_GPU,
    "/init_weights_update_group": _NO_GPU,
    "/destroy_weights_update_group": _NO_GPU,
    "/get_weights_by_name": "GET /engine/weights lists names, shapes and types; weights do not leave the worker",
    "/weights_checker": "GET /engine/get_weight_version has a digest of the weights",
    "/pull_weights": "use /update_weights_from_disk with a directory that the worker can read",
    "/post_process_weights": "weights are packed and quantised by each update",
    "/update_weight_version": "each update names its version: weight_version",
    "/start_profile": "use --log-requests and GET /metrics (docs/metrics.md)",
    "/stop_profile": "use --log-requests and GET /metrics (docs/metrics.md)",
    "/generate": "this port changes weights; the front door generates",
}
"""Routes of SGLang that are not here, and what takes their place."""


class SglangRoutes:
    """SGLang's routes of one worker, called in its event loop.

    Args:
        routes: The worker's own.

    Attributes:
        by_path: Routes by path.
        reads: Paths that may be asked by GET, as SGLang's clients do.
    """

    def __init__(self, routes: EngineRoutes) -> None:
        self._routes = routes
        told: dict[str, Route] = {
            "/health_generate": self._health,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/get_weight_version": self._version,
            "/weight_version": self._version,
            "/v1/loads": self._loads,
            "/flush_cache": self._flush_cache,
        }
        self.by_path: Mapping[str, Route] = {
            **told,
            "/abort_request": self._abort_request,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/update_weights_from_disk": self._update,
        }
        self.reads = frozenset(told)

    async def _health(self, asked: Asked) -> Answer:
        """No token is generated: the answer is the state that one would meet."""
        check_names(asked, ())
        state = self._routes.weights.weights_state
        if state != "serving":
            raise WrongState(REASONS[state])
        return {}

    async def _model_info(self, asked: Asked) -> Answer:
        check_names(asked, ())
        arguments = self._routes.arguments
        return {
            "model_path": arguments.model_path,
            "tokenizer_path": arguments.model_path,
            "served_model_name": arguments.served_model_name,
            "is_generation": True,
            "weight_version": self._routes.weights.weight_version.name,
        }

    async def _server_info(self, asked: Asked) -> Answer:
        mode = self._routes.arguments.disaggregation_mode
        return {
            **await self._model_info(asked),
            "version": __version__,
            "disaggregation_mode": "null" if mode == "aggregated" else mode,
            "enable_memory_saver": False,  # memory is given back without one
            **dict.fromkeys(("tp_size", "pp_size", "dp_size", "ep_size", "num_gpus"), 1),
        }

    async def _version(self, asked: Asked) -> Answer:
        check_names(asked, ())
        return {"weight_version": self._routes.weights.weight_version.name}

    async def _loads(self, asked: Asked) -> Answer:
        check_names(asked, ("include",))
        return {"dp_rank_count": 1, "loads": [{"dp_rank": 0, "num_total_reqs": self._routes.num_unfinished}]}

    async def _flush_cache(self, asked: Asked) -> Answer:
        check_names(asked, ("timeout",))
        await self._routes.weights.flush_cache()
        return {"success": True}

    async def _abort_request(self, asked: Asked) -> Answer:
        check_names(asked, ("rid", "abort_all"))
        if _flag(asked.fields, "abort_all", default=False):
            await self._routes.abort_all()
        else:
            self._routes.abort(text_of(asked.fields, "rid", 1024))
        return {"success": True}

    async def _pause(self, asked: Asked) -> Answer:
        check_names(asked, ("mode",))
        mode = asked.fields.get("mode", "abort")
        if not isinstance(mode, str) or mode not in _PAUSE_MODES:
            raise InvalidRequest("mode", f"must be {', '.join(_PAUSE_MODES)}, got {shown(mode)}")
        await self._routes.pause(_PAUSE_MODES[mode])
        return {"message": "Generation paused successfully."}

    async def _continue(self, asked: Asked) -> Answer:
        check_names(asked, ("torch_empty_cache",))
        await self._routes.weights.resume()
        return {"message": "Generation continued successfully."}

    async def _release(self, asked: Asked) -> Answer:
        """Weights are given back with the KV cache; the KV cache is also without them."""
        tags, weights = _tags(asked), self._routes.weights
        if tags == {"weights"}:
            raise NotSupported('tags: ["weights"] alone is not supported; the KV cache is given back with the weights')
        if tags != {"cuda_graph"}:
            await weights.sleep(2 if "weights" in tags else 1)
        return {"success": True}

    async def _resume(self, asked: Asked) -> Answer:
        """The first call ends the sleep, whatever its tags: memory is taken when it is used."""
        _tags(asked)
        weights = self._routes.weights
        if weights.weights_state == "asleep":
            await weights.wake()
        return {"success": True}

    async def _update(self, asked: Asked) -> Answer:
        names = ("model_path", "load_format", "weight_version", "abort_all_requests", "flush_cache", "is_async")
        ignored = ("torch_empty_cache", "recapture_cuda_graph", "token_step")
        check_names(asked, (*names, "keep_pause", *ignored))
        fields = asked.fields
        if fields.get("load_format") not in (None, "auto", "safetensors"):
            raise InvalidRequest("load_format", f"must be auto or safetensors, got {shown(fields['load_format'])}")
        if not _flag(fields, "flush_cache", default=True):
            raise InvalidRequest("flush_cache", "must be true: no cache outlives its weights")
        if _flag(fields, "is_async", default=False):
            raise InvalidRequest("is_async", "must be false: the answer says that the weights have changed")
        if _flag(fields, "keep_pause", default=False):
            raise InvalidRequest(
                "keep_pause", "must be false: a worker that was paused before stays paused, and no other"
            )
        waits: PauseMode = "keep" if self._routes.weights.weights_state == "paused" else "finish"
        mode: PauseMode = "abort" if _flag(fields, "abort_all_requests", default=False) else waits
        path = Path(text_of(fields, "model_path", 4096))
        await self._routes.update_from(path, version_name(fields), mode)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def _flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"must be true or false, got {shown(value)}")
    return value


def _tags(asked: Asked) -> set[str]:
    """Kinds of memory that are meant, all for none."""
    check_names(asked, ("tags",))
    tags = asked.fields.get("tags")
    if tags is None:
        return set(_TAGS)
    if not isinstance(tags, list) or not tags or not all(isinstance(tag, str) and tag in _TAGS for tag in tags):
        raise InvalidRequest("tags", f"must be a list of {', '.join(_TAGS)}, got {shown(tags)}")
    return set(tags)
