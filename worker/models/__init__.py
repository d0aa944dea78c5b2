"""Checkpoints that are made here, of GGUF files and of the default model, or downloaded.

`gguf_file` reads a GGUF file's header and tensors; `architectures`, `gguf_weights` and `tokenizer`
turn them into Hugging Face's configuration, weights and tokenizer; `checkpoint` writes and caches
the result, `default_model` fetches the model that the launch scripts serve unless another is named,
`named` finds models by a name, and `hub` those of the Hugging Face Hub by their ids. `model_types`
is the register of architectures. `config_json`, `geometry` and `weight_files` are the gate that a
checkpoint passes, and `json_files` looks for code in it. Imported without torch; nothing here knows
an engine.
"""

from worker.models.checkpoint import convert_gguf, find_gguf, model_cache
from worker.models.default_model import DEFAULT_MODEL, prepare_default_model
from worker.models.hub import hub_checkpoint, is_hub_id
from worker.models.named import named_model

__all__ = [
    "DEFAULT_MODEL",
    "convert_gguf",
    "find_gguf",
    "hub_checkpoint",
    "is_hub_id",
    "model_cache",
    "named_model",
    "prepare_default_model",
]
