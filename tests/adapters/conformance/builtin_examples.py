"""Example arguments of each built-in, for the conformance kit's own model; the first one is also
run in each scope.
"""

from __future__ import annotations

from typing import Any

from adapters.testing.kit_model import KEY_ID

_OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}

_TAGS = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": _OBJECT}, "end": "</f>"},
        {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[0-9]{1,3}"}, "end": ";"},
    ],
}

_TOOLS = [{"name": "fox", "parameters": _OBJECT}, {"name": "dog", "parameters": True}]

EMBEDDED_ONLY = {"cfg", "contrastive", "phrase_ban"}
"""Built-ins that vLLM and TensorRT-LLM refuse."""

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "cfg": [{"scale": 1.5}, {"scale": 3.0, "negative_prompt": "the fox"}, {"scale": 2.0, "negative_token_ids": [40]}],
    "contrastive": [{"beta": 1.5, "alpha": 0.05}, {"alpha": 0.3, "amateur_temperature": 2.0}],
    "logit_bias": [{"bias": {"40": 5.0, "41": -100.0, "0": -2.5}}],
    "sequence_bias": [
        {"sequences": [{"text": "the fox", "bias": 4.0}, {"token_ids": [40], "bias": -3.0}]},
        {"sequences": [{"token_ids": [40, 41, 42], "bias": 9.0}, {"token_ids": [41, 42], "bias": -2.0}]},
    ],
    "repetition_penalty": [{"penalty": 1.3}, {"penalty": 0.5}, {"penalty": 1.7, "window": 3}],
    "frequency_penalty": [{"penalty": 0.7}, {"penalty": -1.0}, {"penalty": 1.0, "window": 4}],
    "presence_penalty": [{"penalty": 1.5}, {"penalty": 2.0, "window": 1}],
    "dry": [{"multiplier": 0.8, "allowed_length": 1, "breakers": ["\n"]}, {"multiplier": 2.0, "range": 8}],
    "gen_length": [{"boost": 2.0, "power": 1.5}, {"boost": 4.0, "complete_sentences": True}],
    "cite_from_prompt": [{"boost": 1.0, "conditional_boost": 3.0}],
    "multiple_choice": [{"choices": ["Yes", "no", "The quick brown fox"], "boost": 1.0}],
    "exponential_decay_length": [{"start": 4, "factor": 1.1}],
    "allowed_tokens": [{"token_ids": [*range(30, 120), 7]}],
    "banned_tokens": [{"token_ids": [0, 44, 45, 270]}],
    "bad_words": [{"words": [" fox", "the fox", "."]}, {"token_ids": [[50, 51], [52]]}],
    "phrase_ban": [{"phrases": [" fox", "The Quick", "é"]}, {"phrases": ["e", "TH"]}],
    "no_repeat_ngram": [{"n": 2}, {"n": 1, "over": "generated"}],
    "min_tokens": [{"n": 9}, {"n": 20}],
    "ban_scripts": [{"scripts": ["Han", "Cyrillic"]}, {"scripts": ["Latin"]}],
    "json_schema": [{"schema": _OBJECT}, {"schema": True, "compact": False}],
    "regex": [{"pattern": "[a-c]+( yes| no)?"}],
    "choice": [{"choices": ["yes", "no", "yes, the fox"]}],
    "grammar": [{"lark": 'start: ("a" | "fox")+ "."'}],
    "structural_tag": [{"format": _TAGS}, {"format": {**_TAGS, "at_least_one": True, "stop_after_first": True}}],
    "tool_calls": [
        {"format": "hermes", "tools": _TOOLS},
        {"format": "phi4", "tools": _TOOLS, "choice": "required", "tool": "fox"},
    ],
    "forced_sequence": [{"text": "Yes, the fox."}, {"token_ids": [40, 41, 42]}],
    "forced_prefix": [{"text": "Yes, the fox"}, {"token_ids": [40, 40]}, {"text": "Yes, th", "heal": True}],
    "force_last_phrase": [{"text": " Hello world!"}],
    "trigger_phrase": [
        {"text": " Wait, let me think.", "trigger": " fox", "times": 2},
        {"text": " See also", "after_tokens": 3},
    ],
    "loop_stop": [{"max_period": 4, "copies": 3}, {"max_period": 1, "copies": 2}],
    "thinking_budget": [{"tokens": 2}, {"tokens": 0}, {"tokens": 1, "grace": 2}, {"tokens": 3, "message": " So, yes."}],
    "temperature": [{"value": 0.7}, {"value": 0.0}],
    "dynamic_temperature": [{"low": 0.2, "high": 1.8}, {"low": 0.0, "high": 3.0, "exponent": 2.0}],
    "top_k": [{"k": 5}, {"k": 1}],
    "top_p": [{"p": 0.8}, {"p": 0.0}],
    "min_p": [{"p": 0.05}],
    "top_a": [{"a": 0.3}],
    "typical_p": [{"p": 0.6}],
    "top_n_sigma": [{"n": 1.5}],
    "xtc": [{"threshold": 0.1, "probability": 0.5}],
    "mirostat": [{"tau": 3.0, "eta": 0.5}],
    "epsilon_cutoff": [{"epsilon": 0.01}],
    "eta_cutoff": [{"epsilon": 0.02}],
    "watermark": [{"key_id": KEY_ID}, {"key_id": KEY_ID, "context": 1}],
    "synthid": [{"key_id": KEY_ID, "depth": 4}, {"key_id": KEY_ID, "context": 1, "depth": 30}],
}
