"""Text of a growing answer: detokenisation, and stop strings across tokens.

`stop_strings` is the one matcher of stop strings in a growing text, `begun_stops` tells how much of
its end may be the beginning of one. `incremental_text` detokenises one token after another;
`answer_text` is the text of an answer up to its first stop string, where this package detokenises:
offline, and for every runtime but Dynamo's. Where Dynamo's frontend does, a worker reads the bytes
of the tokens (`adapters.vocabulary.token_bytes`) instead: `stop_text` ends the answer at a stop
string, `safe_chunks` holds tokens back whose text the frontend would withhold. `deltas` says what
these two need of an engine's stream.

The other direction, a text to the token ids that add exactly it to an answer, is
`adapters.vocabulary.exact_text`; processors look for a text in a token history with
`adapters.vocabulary.text_match`, which reads the whole vocabulary once for each text.
"""
