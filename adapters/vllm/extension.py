"""`Extension`: what ``--worker-extension-cls adapters.vllm.extension.Extension`` adds."""

from __future__ import annotations

import pickle
from typing import Any

from adapters.vllm.model import model_of
from adapters.vllm.reports import REPORTS


class Extension:
    """Methods that a vLLM worker gets: what processors reported in its process, and their grammars.

    Attributes:
        vllm_config: The worker's configuration.
    """

    vllm_config: Any

    def prepare_grammars(self, grammars: list[str]) -> bool:
        """Start to compile grammars in this process; whether all of them are compiled, or refused.

        Args:
            grammars: Grammars in llguidance's JSON form.
        """
        return model_of(self.vllm_config).has_compiled(grammars)

    def take_processor_failures(self) -> list[dict[str, Any]]:
        """The processors that ended their requests since the last call (`reports.Failure`)."""
        return REPORTS.take_failures()

    def take_processor_receipt(self, report: str, last: tuple[int, int] | None = None) -> bytes | None:
        """The receipt of the request of that name, pickled (`adapters.chain.Receipt`), None if its
        chain has not begun; it is not kept. See `Reports.take_receipt`.
        """
        receipt = REPORTS.take_receipt(report, last)
        return None if receipt is None else pickle.dumps(receipt)
