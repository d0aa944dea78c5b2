"""Guidance of a row of logits by a second one: of another prompt, or of a weaker model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from adapters.contract import ArgumentError, CompanionProcessor, Context, ProcessorArgs, Reads
from adapters.processors.arguments import Text, TokenIds, check_tokens


class Cfg(CompanionProcessor):
    """Moves the answer towards its prompt, and away from a negative one (classifier-free guidance).

    Source: Sanchez et al., arXiv 2306.17806, as transformers' ``guidance_scale`` and
    ``negative_prompt_ids``. Let c and u be the log-softmax of the rows after the prompt and after
    the negative prompt, each followed by the answer so far: the row becomes u + scale * (c - u).
    Without a negative prompt, u is that after the prompt's last token and the answer.

    The text of a negative prompt is tokenised as that of a completion: with the special tokens that
    the tokenizer puts around a text, and without a chat template.
    """

    name = "cfg"
    reads = Reads.PROMPT_AND_GENERATED

    class Args(ProcessorArgs):
        scale: Annotated[float, Field(gt=1, le=100, description="Guidance scale; 1 would change nothing.")]
        negative_prompt: Annotated[Text | None, Field(description="The negative prompt as text.")] = None
        negative_token_ids: Annotated[TokenIds | None, Field(description="The same as token ids.")] = None

        @model_validator(mode="after")
        def _at_most_one(self) -> Self:
            if self.negative_prompt is not None and self.negative_token_ids is not None:
                raise ValueError("give either negative_prompt or negative_token_ids")
            return self

    def __init__(self, args: Args, context: Context) -> None:
        self._scale = args.scale
        self._negative = _negative_ids(args, context)

    @property
    def companion_prompt(self) -> Sequence[int]:
        return self._negative or self.prompt[-1:]

    def shape(self, logits: torch.Tensor) -> None:
        conditional = logits.log_softmax(-1)
        unconditional = self.companion_row().to(logits.device, torch.float32).log_softmax(-1)
        guided = self._scale * (conditional - unconditional) + unconditional
        logits.copy_(guided.masked_fill_(logits == -torch.inf, -torch.inf))


class Contrastive(CompanionProcessor):
    """Moves the answer away from what a weaker model, the worker's draft model, would say
    (contrastive decoding).

    Source: O'Brien and Lewis, arXiv 2309.09117. Let e and a be the rows of the model (the expert)
    and of the draft model (the amateur) after prompt and answer. Tokens with
    e < max(e) + log(alpha) are banned, and the others get (1 + beta) * e - beta * a.

    The ban is the plausibility constraint of Li et al., arXiv 2210.15097, whose amateur has a
    temperature besides: a is divided by it.
    """

    name = "contrastive"
    reads = Reads.PROMPT_AND_GENERATED
    companion_model = "draft"

    class Args(ProcessorArgs):
        alpha: Annotated[
            float, Field(gt=0, le=1, description="Tokens less likely than this times the most likely one are banned.")
        ] = 0.1
        beta: Annotated[float, Field(gt=0, le=100, description="Strength of the contrast.")] = 0.5
        amateur_temperature: Annotated[
            float, Field(ge=0.01, le=100, description="Temperature of the draft model's distribution.")
        ] = 1.0

    def __init__(self, args: Args, context: Context) -> None:
        self._cutoff = math.log(args.alpha)
        self._beta = args.beta
        self._temperature = args.amateur_temperature

    @property
    def companion_prompt(self) -> Sequence[int]:
        return self.prompt

    def shape(self, logits: torch.Tensor) -> None:
        amateur = self.companion_row().to(logits.device, torch.float32) / self._temperature
        banned = logits < logits.max() + self._cutoff
        contrasted = (1 + self._beta) * logits - self._beta * amateur
        logits.copy_(contrasted.masked_fill_(banned, -torch.inf))


def _negative_ids(args: Cfg.Args, context: Context) -> list[int]:
    """Ids of the negative prompt, none if there is none."""
    if args.negative_token_ids is not None:
        check_tokens(context, "negative_token_ids", args.negative_token_ids)
        return list(args.negative_token_ids)
    if args.negative_prompt is None:
        return []
    tokenizer = context.vocabulary.tokenizer
    if tokenizer is None:
        problem = "text needs a tokenizer, and this model was loaded without one; give negative_token_ids"
        raise ArgumentError("negative_prompt", problem)
    found = list(tokenizer.encode(args.negative_prompt, add_special_tokens=True))
    if not found:
        raise ArgumentError("negative_prompt", "expected a text of at least one token, got one of none")
    return found
