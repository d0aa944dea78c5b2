"""The front door: an HTTP server before Dynamo's frontends, so that every field of a chat or
completion request is honoured or refused.

The request: `routes` is the table of paths, `fields` that of fields and their fates, with the
checks of `field_checks`; `requests` rewrites or refuses a body, `rewriting` does so in a thread,
and `field_processors`, `guides` and `tools` make logits processors of fields.

The connection: `client_connection` serves one client, `request_intake` admits its requests, which
`request_reader` reads from bytes and whose memory `bodies` bounds; `clients` checks hosts and keys,
`deadline` and `absence_probe` end waits. `server` is the state that all connections share.

Files and batches: `uploads` bounds the bodies of uploads on the disk, `batches` keeps and runs
them, `batch_handlers` has their paths, and `batch_lines` answers their requests as those of
clients.

The answer: `answering` has the protocols, `forwarding` hands on the answer of one frontend,
`choices` and `summaries` make one answer of several; `upstreams` keeps connections to the
frontends, `http` writes answers and finds the end of others'.

`openengine` stands where a frontend would before workers that the front door asks itself, whose
addresses are those of `engine_address`.

`options` and `__main__` start it. It knows the catalogue of processors and the sampling controls,
and nothing of models, engines or running workers.
"""
