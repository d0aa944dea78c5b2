"""Streams one chat answer from a running ``launch/agg.sh``, with the stock OpenAI client.

    .venv/bin/python examples/chat.py "Hello" --temperature 0.8 --seed 7

Needs ``pip install openai`` (``scripts/install`` brings it).
"""

from __future__ import annotations

import argparse

from openai import OpenAI, OpenAIError


def chat(options: argparse.Namespace) -> None:
    client = OpenAI(base_url=options.url, api_key="unused")
    models = client.models.list().data
    if not models:
        raise SystemExit(f"error: {options.url}: no model is served there yet")
    stream = client.chat.completions.create(
        model=models[0].id,
        messages=[{"role": "user", "content": options.message}],
        temperature=options.temperature,
        seed=options.seed,
        max_tokens=options.max_tokens,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream one chat answer.")
    parser.add_argument("message")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    try:
        chat(options)
    except OpenAIError as error:
        raise SystemExit(f"error: {options.url}: {error}") from None


if __name__ == "__main__":
    main()
