"""Disaggregated serving, as far as a request sees it.

`serving` decides which part of a request this worker does; `seal` signs the parameters of a KV
transfer.
"""
