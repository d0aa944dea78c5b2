"""The front door: an HTTP server before Dynamo's frontends, so that every field of a chat or
completion request is honoured or refused.

`fields` is the table of fields and their fates; `requests` rewrites or refuses a body, `tools` what
in it is of tools; `request_reader` reads requests from bytes; `http` writes answers and finds the
end of others'; `upstreams` keeps connections to the frontends; `server` relays; `deadline` says how
long a connection waits; `options` and `__main__` start it. It knows the catalogue of processors,
and nothing of models, engines or workers.
"""
