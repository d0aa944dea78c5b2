"""Whether an answer that was made again is the recorded one, and what might explain it if not."""

from __future__ import annotations

from collections.abc import Callable, Collection

from adapters.catalog import Catalog
from worker.errors import ConfigurationError
from worker.replay.recorded import RecordedReceipt
from worker.replay.run import Replayed
from worker.requests.receipts import ServerRecord, TokenDigest


def check_adapter(receipt: RecordedReceipt, given: Collection[str]) -> None:
    """Raises `ConfigurationError` if an answer of a LoRA adapter cannot be made again.

    Args:
        receipt: The receipt.
        given: Names of the adapters in ``--lora-modules``.
    """
    adapter = receipt.model.adapter
    if adapter is not None and adapter.name not in given:
        raise ConfigurationError(
            f"model.adapter: the answer is of the LoRA adapter {adapter.name}, so give its directory too: "
            f"--lora-modules {adapter.name}=DIRECTORY"
        )


def check_weights(receipt: RecordedReceipt, weights_digest: Callable[[], str] | None) -> None:
    """Raises `ConfigurationError` if the receipt is of updated weights that are not at hand.

    Args:
        receipt: The receipt.
        weights_digest: Returns the digest that an update with the weights of ``--model-path`` has;
            None where an engine makes the answer again that has no digests.
    """
    if not receipt.weights:
        return
    if len(receipt.weights) > 1:
        names = ", ".join(f"{one.version} from token {one.from_token} on" for one in receipt.weights)
        raise ConfigurationError(
            f"weights: the answer is of several versions of the weights ({names}), one checkpoint of one"
        )
    wanted = receipt.weights[0]
    if weights_digest is None:
        raise ConfigurationError(
            f"weights: the answer is of updated weights, version {wanted.version} with digest {wanted.digest}; replay "
            "it with --engine embedded and their checkpoint as --model-path"
        )
    found = weights_digest()
    if found != wanted.digest:
        raise ConfigurationError(
            f"weights[0].digest: the answer is of updated weights, version {wanted.version} with {wanted.digest}; "
            f"--model-path, which must be their checkpoint, has {found}"
        )


def check_model_digest(server: ServerRecord, receipt: RecordedReceipt) -> None:
    """Raises `ConfigurationError` if the receipt is of another checkpoint, or another adapter.

    Updated weights have a digest of their own; see `check_weights`.
    """
    if not receipt.weights and receipt.model.digest is not None and server.model_digest != receipt.model.digest:
        raise ConfigurationError(
            f"model.digest: the receipt is of a checkpoint with {receipt.model.digest}, "
            f"--model-path has {server.model_digest}"
        )
    adapter = receipt.model.adapter
    if adapter is not None and server.adapters[adapter.name] != adapter.digest:
        raise ConfigurationError(
            f"model.adapter.digest: the receipt is of an adapter with {adapter.digest}, "
            f"--lora-modules {adapter.name}=... has {server.adapters[adapter.name]}"
        )
    draft = receipt.model.draft_model
    if draft is not None and server.draft_model != draft:
        raise ConfigurationError(
            f"model.draft_model: the receipt is of the draft model {draft}, "
            f"--speculative-config has {server.draft_model or 'none'}"
        )


def is_equal(replayed: Replayed, receipt: RecordedReceipt) -> bool:
    """Whether the tokens are those that were recorded."""
    tokens = replayed.token_ids
    return len(tokens) == receipt.generated_tokens and str(TokenDigest(tokens)) == receipt.answer_digest


def notes(server: ServerRecord, receipt: RecordedReceipt, catalog: Catalog) -> list[str]:
    """Lines on the engine, and on reasons why tokens may differ though nothing is wrong.

    Args:
        server: Record of the engine that makes the answer again.
        receipt: The receipt.
        catalog: The processors here.
    """
    was = receipt.engine
    lines = [f"engine: {server.engine} {server.version}, computed by {server.computed_by}"]
    if receipt.numerics != "exact":
        lines.append("note: the answer was made with fast numerics: equal tokens are likely, and not promised")
    for name, then, now in (
        ("name", was.name, server.engine),
        ("version", was.version, server.version),
        ("computed_by", was.computed_by, server.computed_by),
    ):
        if then != now:
            lines.append(f"note: engine.{name} was {then!r} and is {now!r} here: tokens may differ")
    for place, record in enumerate(receipt.processors):
        processor = record.get("name")
        if not isinstance(processor, str) or processor not in catalog:
            continue
        recorded, own = record.get("version"), catalog[processor].processor.version
        if recorded != own:
            told = f"{processor} was of version {recorded} and is of version {own} here"
            lines.append(f"note: processors[{place}].version: {told}: tokens may differ")
    return lines


def verdict(replayed: Replayed, receipt: RecordedReceipt) -> str:
    """One line: whether the tokens are equal, or how they differ."""
    tokens, number = replayed.token_ids, receipt.generated_tokens
    if is_equal(replayed, receipt):
        return f"answer: {number} tokens, equal to those recorded"
    if replayed.error is not None:
        return f"answer: DIFFERENT: failed after {len(tokens)} of {number} tokens: {replayed.error}"
    if len(tokens) != number:
        return f"answer: DIFFERENT: ended after {len(tokens)} of {number} tokens"
    answer = dict(enumerate(tokens, receipt.prompt_length))
    place = next((one.position for one in receipt.tokens if answer.get(one.position) != one.token_id), None)
    known = f", the first known one at position {place}" if place is not None else ""
    return f"answer: DIFFERENT: {number} tokens of another digest{known}"
