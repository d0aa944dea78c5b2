"""Sends the same question with and without logits processors, and prints their receipts.

    .venv/bin/python examples/logits_processors_client.py --model MODEL

Needs the openai package. `adapters.client` needs only the standard library: copy the file if you do
not install this project.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import BadRequestError, OpenAI, OpenAIError

from adapters.client import from_openai_logit_bias, logits_processors, processor

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def ask(client: OpenAI, model: str, question: str, extra_body: dict[str, Any] | None = None) -> None:
    """Print the answer, and the receipt if there is one."""
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        extra_body=extra_body,
    )
    print("  answer: ", reply.choices[0].message.content)
    nvext = (reply.model_extra or {}).get("nvext") or {}
    if "engine_data" in nvext:
        print("  receipt:", json.dumps(nvext["engine_data"]))


def ask_all(client: OpenAI, model: str) -> None:
    print("plain")
    ask(client, model, "Name a person and their age.")

    print("JSON of a schema, with a receipt")
    schema = {"name": "json_schema", "args": {"schema": PERSON}}
    ask(client, model, "Name a person and their age.", logits_processors(schema, receipt=True))

    print("one of two words")
    choice = processor("choice", choices=["yes", "no"])
    ask(client, model, "Is water wet?", logits_processors(choice))

    print("OpenAI's logit_bias, which the frontend would drop: never token 5")
    ask(client, model, "Say anything.", logits_processors(from_openai_logit_bias({5: -100})))

    print("a mistake is refused, and the reply says where")
    try:
        ask(client, model, "Say anything.", logits_processors({"name": "choise", "args": {"choices": ["a"]}}))
    except BadRequestError as error:
        print("  refused:", error.message)


def main() -> None:
    parser = argparse.ArgumentParser(description="Logits processors from a client.")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    try:
        ask_all(OpenAI(base_url=arguments.url, api_key="unused"), arguments.model)
    except OpenAIError as error:
        raise SystemExit(f"error: {arguments.url}: {error}") from None


if __name__ == "__main__":
    main()
