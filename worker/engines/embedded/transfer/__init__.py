"""KV transfer from a prefill worker to a decode worker.

`connector` is a worker's part in it, step by step; `nixl` reads remote memory with NIXL; `handle`
is the JSON object that tells a decode worker what to read; `layout` is the arithmetic of where a
sequence's KV lies.
"""

from worker.engines.embedded.transfer.connector import KvConnector, note_mode, open_connector
from worker.engines.embedded.transfer.handle import fingerprint, handle_from_json
from worker.engines.embedded.transfer.nixl import KvHandle

__all__ = ["KvConnector", "KvHandle", "fingerprint", "handle_from_json", "note_mode", "open_connector"]
