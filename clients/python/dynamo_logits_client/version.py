"""The version of dynamo-logits-worker that this client belongs to."""

__version__ = "0.1.0"
