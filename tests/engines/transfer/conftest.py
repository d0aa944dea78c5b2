"""A worker in another process, whose KV tests read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer_peer import Peer


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    one = Peer()
    yield one
    one.end()
