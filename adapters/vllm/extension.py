"""`Extension`: what ``--worker-extension-cls adapters.vllm.extension.Extension`` adds."""

from __future__ import annotations

from typing import Any

from adapters.vllm.reports import REPORTS


class Extension:
    """Methods that a vLLM worker gets, to read what processors reported in its process."""

    def take_processor_failures(self) -> list[dict[str, Any]]:
        """The processors that ended their requests since the last call (`reports.Failure`)."""
        return REPORTS.take_failures()
