"""Admission, drain, and when the engine counts as broken.

`drain` admits requests and lets in-flight requests finish within a budget; `faults` counts
unforeseen errors.
"""
