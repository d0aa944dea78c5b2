"""The worker: arguments, requests, engines, server, runtimes, front door, migration and metrics."""

__version__ = "0.1.0"
