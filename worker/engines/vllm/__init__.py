"""vLLM's ``AsyncLLM`` as an engine. Imports without vLLM; `VllmEngine.start` needs it.

`settings.py` makes the arguments of ``AsyncEngineArgs``, of vLLM's own flags too, which `flags.py`
reads; `lora.py` loads adapters; `package.py` imports the library and finds out what it takes;
`params.py` turns a request into native fields and one chain. In vLLM's process `chain_receiver.py`
takes the chain, for the class in `processors.py`, and `extension.py` compiles grammars for
`grammar_waits.py`, which lets requests wait for them. `requests.py` has the running requests,
`deltas.py` reads their outputs; `core_reports.py` fetches failures and receipts. `core_calls.py`
lets no call of vLLM's processes outlive them. `kv_events.py` subscribes to KV events and
`event_relay.py` forwards them; `loads.py` keeps the scheduler's statistics. `probes.py` and
`control_probes.py` try the loaded engine; `worker.parent_watch` ends vLLM's processes with the
worker; `engine.py` puts them together.
"""

from worker.engines.vllm.engine import VllmEngine
from worker.engines.vllm.settings import VllmConfig, config_from

__all__ = ["VllmConfig", "VllmEngine", "config_from"]
