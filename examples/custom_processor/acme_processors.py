"""acme_processors.py"""

import re

from pydantic import Field

from adapters.contract import Ban, Context, Edit, ProcessorArgs, Reads, Stage, SteeringProcessor


class DigitLimit(SteeringProcessor):
    """Masks tokens with digits once the answer has a given number of them."""

    name = "acme/digit_limit"
    stage = Stage.MASK
    reads = Reads.GENERATED

    class Args(ProcessorArgs):
        tokens: int = Field(default=0, ge=0, le=10_000, description="Tokens with digits that the answer may have.")

    def __init__(self, args: Args, context: Context) -> None:
        texts = context.vocabulary.token_bytes
        self.limit = args.tokens
        self.digits = frozenset(token_id for token_id, text in enumerate(texts) if re.search(rb"[0-9]", text))
        self.ban = Ban.of(self.digits)

    def reset(self) -> None:
        self.count = 0

    def advance(self, token_id: int, index: int) -> None:
        self.count += token_id in self.digits

    def edit(self) -> Edit | None:
        return self.ban if self.count >= self.limit else None
