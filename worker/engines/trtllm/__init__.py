"""TensorRT-LLM's LLM API as an engine. Imports without TensorRT-LLM; `TrtllmEngine.start` needs it.

`settings.py` makes the arguments of ``LLM``, of which `llm_options.py` has a row each, from the
worker's options and those of `given.py`; `capabilities.py` inspects the installed package,
`probes.py` the behaviour of the loaded engine by `probe_requests.py`, `description.py` its sizes;
`params.py` turns a request into native parameters
and one callable, and `submission.py` into the arguments beside them; `request_table.py` has the
running requests, `running_request.py` the state of one, `reported_chain.py` that of its processors;
`output_reader.py` reads the outputs, `deltas.py` splits them; `disaggregated_params.py` is the
codec between prefill and decode; `reports.py`, `cache_reports.py` and `health.py` monitor the
executor, `library_metrics.py` feeds its own metrics; `engine.py` puts them together.
"""

from worker.engines.trtllm.engine import TrtllmEngine
from worker.engines.trtllm.settings import TrtllmConfig, config_from

__all__ = ["TrtllmConfig", "TrtllmEngine", "config_from"]
