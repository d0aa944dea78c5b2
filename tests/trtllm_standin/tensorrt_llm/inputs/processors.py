"""Input processors: that of text, and that of a model that sees colours.

A checkpoint whose ``config.json`` has a ``vision_config`` sees: each placeholder in the text of a
prompt becomes three tokens, which say the mean of red, green and blue in the picture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class PreprocessedInputs:
    prompt_token_ids: list[int]


class DefaultInputProcessor:
    def __call__(self, prompt_token_ids: list[int], media: Any) -> list[int]:
        raise ValueError("the model takes text alone")


class ColourInputProcessor:
    def __init__(self, model: Path, placeholder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._placeholder = placeholder

    def __call__(self, prompt_token_ids: list[int], media: Any) -> list[int]:
        text = self._tokenizer.decode(prompt_token_ids)
        first, *rest = text.split(self._placeholder)
        if len(rest) != len(media["image"]):
            raise ValueError(f"{len(media['image'])} images for {len(rest)} placeholders")
        ids = self._encoded(first)
        for picture, part in zip(media["image"], rest, strict=True):
            means = [sum(pixel[i] for pixel in picture.pixels) // len(picture.pixels) for i in range(3)]
            ids += [10 + 100 * i + mean // 4 for i, mean in enumerate(means)] + self._encoded(part)
        return ids

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def input_processor_of(model: Path) -> Any:
    vision = json.loads((model / "config.json").read_text()).get("vision_config")
    return DefaultInputProcessor() if vision is None else ColourInputProcessor(model, vision["placeholder"])
