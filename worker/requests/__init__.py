"""Requests and responses, as Dynamo's frontend sends and takes them.

`fields` is the table of every field and what becomes of it; `request` parses and bounds a request,
with its controls in `SamplingParams`; `client` says whose it is; `deadline` ends it at a point in
time; `response` makes the chunks that are streamed back, `receipts` what they say of how the answer
was made.
"""
