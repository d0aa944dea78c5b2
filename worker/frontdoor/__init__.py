"""The front door: an HTTP server before Dynamo's frontends, so that every field of a chat or
completion request is honoured or refused.

`routes` is the table of paths, `fields` that of fields and their fates; `requests` rewrites or
refuses a body, `tools` what in it is of tools, and `rewriting` says where that runs;
`request_reader` reads requests from bytes, `bodies` bounds what is in memory of them, `clients`
says who asks; `http` writes answers and finds the end of others', `choices` and `summaries` make
one answer of several; `upstreams` keeps connections to the frontends; `client_connection` relays
what one client asks, `server` is what all share; `deadline` says how long a connection waits;
`options` and `__main__` start it. It knows the catalogue of processors,
and nothing of models, engines or workers.
"""
