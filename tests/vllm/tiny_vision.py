"""A tiny random vision-language checkpoint (Idefics 3), and pictures for it."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)

from worker.tiny_model import write_tiny_model

PLACEHOLDER = "<image>"
_SIDE, _PATCH, _SCALE = 28, 14, 1
NUM_IMAGE_TOKENS = (_SIDE // _PATCH // _SCALE) ** 2 + 3
"""Tokens that a picture becomes: its patches, and three marks around them."""
_MARKS = (PLACEHOLDER, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<image>' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_vision(path: Path) -> Path:
    """Write the checkpoint; its weights are large enough that a picture changes the tokens."""
    text = write_tiny_model(path.with_name(f"{path.name}-text"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(text, extra_special_tokens=list(_MARKS))
    shutil.rmtree(text)
    ends = tokenizer.eos_token_id
    torch.manual_seed(0)
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": ends}
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids(PLACEHOLDER),
        scale_factor=_SCALE,
        **ids,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _SIDE,
            "patch_size": _PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": -(-len(tokenizer) // 64) * 64,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "eos_token_id": ends,
        },
    )
    network = Idefics3ForConditionalGeneration(config)
    for value in network.parameters():
        torch.nn.init.normal_(value, std=0.3)
    network.save_pretrained(path)
    size = {"longest_edge": _SIDE}
    images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
    Idefics3Processor(images, tokenizer, image_seq_len=NUM_IMAGE_TOKENS - 3, chat_template=_TEMPLATE).save_pretrained(
        path
    )
    return path


def picture(colour: tuple[int, int, int]) -> Image.Image:
    """A picture of one colour with a white corner."""
    image = Image.new("RGB", (40, 32), colour)
    image.paste((255, 255, 255), (0, 0, 12, 9))
    return image


def png(image: Image.Image) -> bytes:
    """The bytes of a picture's file."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def data_url(image: Image.Image) -> str:
    """The URL that holds a picture."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
