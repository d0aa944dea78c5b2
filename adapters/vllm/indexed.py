"""The rows of vLLM's first model runner: by index in its persistent batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from adapters.chain import ProcessorFailed
from adapters.vllm.requests import Params
from adapters.vllm.rows import MakesRows, Row, RowEditor, end, follow, only_row, rows_of


@dataclass(slots=True)
class _Request:
    """A request in the batch, and the lists in which vLLM keeps its tokens."""

    row: Row
    prompt: list[int]
    output: list[int]

    def token_at(self, position: int) -> int:
        """The token at a position of the answer."""
        return self.output[position - len(self.prompt)]


class Indexed:
    """The requests by index in the batch; vLLM's ``process_dict_updates`` moves them.

    Args:
        builder: Makes the rows of requests.
        editor: Applies chains to logits.

    Attributes:
        requests: The requests with processors, by index.
    """

    def __init__(self, builder: MakesRows, editor: RowEditor) -> None:
        self._builder, self._editor = builder, editor
        self.requests: dict[int, _Request] = {}

    def new(self, params: Params, prompt: list[int] | None, output: list[int]) -> _Request | None:
        """A request that joins the batch, for the first time or again; None without processors.

        Args:
            params: The request's parameters.
            prompt: The prompt, None where it is made of embeddings.
            output: The answer so far, a list that vLLM extends.
        """
        standing = [request.row for request in self.requests.values()]
        rows = rows_of(params)
        left = [row for row in rows if row not in standing]
        fitting = [row for row in rows if row.output is output]
        fitting = fitting or [row for row in left if row.output == output]
        if output:  # else the request may begin, beside others with these parameters
            fitting = fitting or [row for row in left if _goes_on(row, [*(prompt or []), *output])]
        row = only_row(fitting) or self._builder.new_row(params)
        if row is None:
            return None
        row.output = output
        return _Request(row, prompt or [], output)

    def leave(self, indices: Iterable[int]) -> None:
        """Drop the requests at some indices, before others join there."""
        for index in indices:
            self.requests.pop(index, None)

    def apply(self, logits: torch.Tensor) -> None:
        """Apply the chains to ``logits`` (float32 ``[requests, V]``), in place."""
        standing = []
        for index, request in self.requests.items():
            row, length = request.row, len(request.prompt) + len(request.output)
            if not row.has_failed(length):
                try:
                    row.chain_after(request.prompt)
                    standing.append((index, row, follow(row, length, request.token_at)))
                except ProcessorFailed as error:
                    row.fail(error)
            if row.failed_at is not None:
                end(logits, index, row)
        if standing:
            self._editor.apply(logits, standing)


def _goes_on(row: Row, tokens: list[int]) -> bool:
    """Whether a row was applied to all of a request's tokens but the newest: with asynchronous
    scheduling vLLM does not write that one into the list of a request that it preempts. A row that
    has failed is applied to none any more.
    """
    return row.fits(tokens) and (row.failed_at is not None or len(tokens) - row.num_known <= 1)
