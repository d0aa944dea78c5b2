"""TensorRT-LLM's LLM API as an engine. Imports without TensorRT-LLM; `TrtllmEngine.start` needs it.

`settings.py` makes the arguments of ``LLM``; `capabilities.py` inspects the installed package,
`probes.py` the behaviour of the loaded engine; `params.py` turns a request into native parameters
and one callable; `running_request.py` is the state of one request; `deltas.py` splits cumulative
outputs; `disaggregated_params.py` is the codec between prefill and decode; `cache_reports.py` and
`health.py` monitor the executor; `engine.py` puts them together.
"""

from worker.engines.trtllm.engine import TrtllmEngine
from worker.engines.trtllm.settings import TrtllmConfig, config_from

__all__ = ["TrtllmConfig", "TrtllmEngine", "config_from"]
