"""How requests are served: arguments, request parsing, the Dynamo engine, responses, drain and
metrics.
"""

__version__ = "0.1.0"
