"""Pictures by the anthropic package: the answers to them and their counts, as JSON; and refusals.

Arguments: URL of the front door, name of the model, files of pictures.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import anthropic


def asked(source: Any) -> Any:
    block = {"type": "image", "source": source}
    return [{"role": "user", "content": [block, {"type": "text", "text": "What is it?"}]}]


def main(url: str, model: str, *files: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    sources = [
        {"type": "base64", "media_type": "image/png", "data": base64.b64encode(Path(file).read_bytes()).decode()}
        for file in files
    ]
    texts, counts, streamed = [], [], []
    fields: Any = {"model": model, "max_tokens": 6, "extra_body": {"ignore_eos": True, "temperature": 0}}
    for source in sources:
        message = client.messages.create(messages=asked(source), **fields)
        texts.append(message.content[0].text)
        usage = message.usage
        counted = client.messages.count_tokens(model=model, messages=asked(source)).input_tokens
        counts.append((usage.input_tokens + (usage.cache_read_input_tokens or 0), counted))
        with client.messages.stream(messages=asked(source), **fields) as stream:
            streamed.append("".join(stream.text_stream))
    refusals = []
    for source in ({**sources[0], "data": "!"}, {"type": "url", "url": "http://a.example/b.png"}):
        try:
            client.messages.create(messages=asked(source), **fields)
        except anthropic.BadRequestError as error:
            refusals.append(error.body["error"]["message"].partition(": ")[0])
    sys.stdout.write(json.dumps({"texts": texts, "streamed": streamed, "counts": counts, "refusals": refusals}))


if __name__ == "__main__":
    main(*sys.argv[1:])
