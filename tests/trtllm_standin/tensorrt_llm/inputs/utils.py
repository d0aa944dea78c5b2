"""The loader of pictures, for URLs that hold PNG of 8 bits a channel without filters."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse


@dataclass(frozen=True)
class Picture:
    """In the place of an image of Pillow, which is not installed where the stand-in runs."""

    pixels: tuple[tuple[int, int, int], ...]


def load_base64_image(parsed_url: Any) -> Picture:
    data_spec, data = parsed_url.path.split(",", 1)
    _, data_type = data_spec.split(";", 1)
    if data_type != "base64":
        raise NotImplementedError("Only base64 data URLs are supported for now.")
    return _decoded(base64.b64decode(data))


async def async_load_image(image: str, format: str = "pt", device: str = "cpu") -> Picture:
    assert format in ("pt", "pil")
    parsed_url = urlparse(image)
    if parsed_url.scheme != "data":
        raise ValueError(f"the stand-in reads data: alone, got {parsed_url.scheme!r}")
    return await asyncio.to_thread(load_base64_image, parsed_url)


def _decoded(content: bytes) -> Picture:
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        raise OSError("cannot identify image file")
    at, width, body = 8, 0, b""
    while at < len(content):
        (length,), kind = struct.unpack(">I", content[at : at + 4]), content[at + 4 : at + 8]
        part = content[at + 8 : at + 8 + length]
        width = struct.unpack(">I", part[:4])[0] if kind == b"IHDR" else width
        body += part if kind == b"IDAT" else b""
        at += 12 + length
    raw, row = zlib.decompress(body), 1 + 3 * width
    lines = [raw[start + 1 : start + row] for start in range(0, len(raw), row)]
    return Picture(tuple(tuple(line[i : i + 3]) for line in lines for i in range(0, len(line), 3)))  # type: ignore[arg-type]
