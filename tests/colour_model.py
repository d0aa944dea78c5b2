"""Pictures, and a tiny model that sees them in the stand-in for TensorRT-LLM."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

from worker.tiny_model import SPECIAL_TOKENS, write_tiny_model

PLACEHOLDER = "<|pad|>"
NUM_TOKENS = 3
"""Tokens that the stand-in makes of a picture, in the place of one."""

_PREPROCESSOR = {"image_processor_type": "CLIPImageProcessor", "crop_size": {"height": 336, "width": 336}}

_TEXT = "{% if message['content'] is string %}"
_PARTS = "{% for part in message['content'] if part['type'] in ('image', 'image_url') %}" + PLACEHOLDER + "{% endfor %}"


def write_colour_model(directory: Path) -> Path:
    """The tiny model with a vision tower in name, and a template with places for pictures.

    Dynamo's frontend counts the tokens of its pictures where ``directory`` is called after a model
    that it knows, as ``llava-1.5``.
    """
    model = write_tiny_model(directory)
    config = json.loads((model / "config.json").read_text())
    vision = {"placeholder": PLACEHOLDER, "image_size": 336, "patch_size": 14}
    known = {"vision_config": vision, "image_token_index": SPECIAL_TOKENS.index(PLACEHOLDER)}
    (model / "config.json").write_text(json.dumps({**config, **known}))
    (model / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR))
    path = model / "tokenizer_config.json"
    known = json.loads(path.read_text())
    known["chat_template"] = known["chat_template"].replace(
        _TEXT, "{% if message['content'] is not string %}" + _PARTS + "{% endif %}" + _TEXT
    )
    path.write_text(json.dumps(known))
    return model


def png(colour: tuple[int, int, int]) -> bytes:
    """The file of a picture of four pixels."""
    rows = b"".join(b"\x00" + bytes(colour) * 2 for _ in range(2))
    header = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def data_url(colour: tuple[int, int, int]) -> str:
    """The URL that holds a picture."""
    return f"data:image/png;base64,{base64.b64encode(png(colour)).decode()}"
