"""KV transfer from a prefill worker to a decode worker.

`connector` is a worker's part in it, step by step: its `prefill_side` leases KV, its `decode_side`
receives KV. `transport` reads remote KV, with `nixl` and under `leases`; `handle` says where leased
KV is, `params` for which request it was computed, and `layout` has the arithmetic.
"""

from worker.engines.embedded.transfer.connector import KvConnector, open_connector
from worker.engines.embedded.transfer.decode_side import note_mode
from worker.engines.embedded.transfer.fingerprint import fingerprint, fingerprint_beside
from worker.engines.embedded.transfer.handle import KvHandle, handle_from_json

__all__ = [
    "KvConnector",
    "KvHandle",
    "fingerprint",
    "fingerprint_beside",
    "handle_from_json",
    "note_mode",
    "open_connector",
]
