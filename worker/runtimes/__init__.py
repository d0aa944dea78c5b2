"""Distributed runtimes that the worker registers with. They know nothing about logits."""
