"""OpenAI's ``usage`` of several answers as that of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

Usage = Mapping[str, Any]

DETAILS = "completion_tokens_details"


def usage_of_choices(usages: Sequence[Usage]) -> dict[str, Any]:
    """The usage of some choices to one prompt, which counts once.

    Cached tokens are those that each choice found: more of them were computed for another choice.

    Args:
        usages: One for each choice, at least one.
    """
    prompt, count = usages[0].get("prompt_tokens", 0), _sum_of("completion_tokens", usages) or 0
    made = {**usages[0], "completion_tokens": count, "total_tokens": prompt + count, **_details(usages)}
    prompts = [each.get("prompt_tokens_details") or {} for each in usages]
    if all(each.get("cached_tokens") is not None for each in prompts):
        made["prompt_tokens_details"] = min(prompts, key=itemgetter("cached_tokens"))
    return made


def usage_of_prompts(usages: Sequence[Usage]) -> dict[str, Any]:
    """The usage of the answers to some prompts.

    Args:
        usages: One for each prompt, at least one. Cached tokens are left out unless all have them.
    """
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    summed = {**usages[0], **{name: _sum_of(name, usages) or 0 for name in names}, **_details(usages)}
    details = [found for each in usages if (found := each.get("prompt_tokens_details"))]
    if details:
        cached = {**details[0], "cached_tokens": _sum_of("cached_tokens", details) or 0}
        summed["prompt_tokens_details"] = cached if len(details) == len(usages) else None
    return summed


def usage_without_answer(usage: Usage) -> dict[str, Any]:
    """The usage of a prompt that was computed for its own sake."""
    kept = {name: value for name, value in usage.items() if name != DETAILS}
    return {**kept, "completion_tokens": 0, "total_tokens": usage.get("prompt_tokens", 0)}


def _details(usages: Sequence[Usage]) -> dict[str, Any]:
    details = [found for each in usages if (found := each.get(DETAILS))]
    names = sorted({name for each in details for name in each})
    return {DETAILS: {name: _sum_of(name, details) for name in names}} if details else {}


def _sum_of(name: str, counts: Iterable[Usage]) -> int | None:
    """The sum of the counts that are known; None if none is."""
    known = [each[name] for each in counts if each.get(name) is not None]
    return sum(known) if known else None
