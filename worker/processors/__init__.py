"""The logits processors of a request, as the worker serves them.

`builder` makes a request's chain from its selection, its fields and the operator's policy;
`breaker` is the circuit breaker of third-party processors; `smoke` the smoke test; `metrics` and
`grammar_metrics` are what Prometheus is told.
"""
