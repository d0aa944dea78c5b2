"""Migration: a request goes on in another worker, from where its answer has got to.

Dynamo's frontend then sends prompt and answer so far as one list of tokens. `boundary` is the
record that tells them apart, and says what a continuation is. `store` is the protocol of the store
that keeps the records; `file_store`, `nats_store` and `etcd_store` implement it, and `named_store`
chooses one. `record_store` is the store with a time limit and typed records; `boundary_record` is
the record of one request in flight, from `write` to its removal; `records` has all of a worker's,
and tells continuations from new requests.
"""
