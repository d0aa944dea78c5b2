"""Disaggregated serving, as far as a request sees it.

`hand_offs` decides which part of a request this worker does; `seal` signs what a prefill worker
hands over.
"""
