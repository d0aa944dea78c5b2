"""The front door: an HTTP server before Dynamo's frontends, so that every field of a chat or
completion request is honoured or refused.

`fields` is the table of fields and their fates; `requests` rewrites or refuses a body; `http` reads
and writes what HTTP/1.1 needs beside h11; `upstreams` opens connections to the frontends; `server`
relays; `options` and `__main__` start it. It knows the catalogue of processors, and nothing of
models, engines or workers.
"""
