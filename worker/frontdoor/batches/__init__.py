"""OpenAI's files and batches: a client uploads requests as a file, and fetches their answers later.

`database` has the tables, `stored_files` the files and `stored_batches` the batches with their
results; together they are the `store`, which loses nothing to a crash, and works in a thread of its
own (`store_thread`). `multipart` reads an upload, `lines` reads and checks the requests of a file,
and `output` writes the results as files. `runner` takes each batch from its validation to its end,
and `running_batch` asks for the answer of each line. `requests` reads what clients ask for.
`service` is all of it for the front door, which has the paths, and answers the lines as it answers
clients.
"""

from worker.frontdoor.batches.service import BatchService, Limits

__all__ = ["BatchService", "Limits"]
