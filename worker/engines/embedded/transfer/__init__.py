"""KV transfer from a prefill worker to a decode worker.

`connector` is a worker's part in it, step by step; `transport` reads remote KV, with `nixl` and
under `leases`; `handle` says where leased KV is, `params` for which request it was computed, and
`layout` has the arithmetic. Below the scheduler: the connector knows a protocol of it.
"""

from worker.engines.embedded.transfer.connector import KvConnector, note_mode, open_connector
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
