"""OpenAI's files and batches: a client uploads requests as a file, and fetches their answers later.

`database` has the tables, `stored_files` the files and `stored_batches` the batches with their
results; together they are the `store`, which loses nothing to a crash. `multipart` reads an upload,
`lines` reads and checks the requests of a file, and `output` writes the results as files. `runner`
takes each batch from its validation to its end, and asks for the answer of each line through
`answering`. `requests` reads what clients ask for, and `handlers` answers them.
"""
