"""Admission of requests, graceful shutdown, and when the engine counts as broken.

`drain` keeps the requests in flight and drains them within a budget; `faults` counts unknown
errors; `whole` has changes that do not stop half-way.
"""
