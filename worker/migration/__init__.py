"""Migration: a request goes on in another worker, from where its answer has got to.

Dynamo's frontend then sends prompt and answer so far as one list of tokens. `boundary` has the
record that tells them apart and what a continuation is; `store` the protocol of the store that
keeps the records, with one choice point, and `file_store`, `nats_store` and `etcd_store` implement
it; `records` writes, renews and removes this worker's records.
"""
