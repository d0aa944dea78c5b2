"""Disaggregated serving: the parts of a request, and the seal of KV transfers.

`serving` decides which part of a request this worker does; `seal` signs the parameters of a KV
transfer.
"""
