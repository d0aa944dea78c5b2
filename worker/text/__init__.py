"""Text of a growing answer: detokenisation, and stop strings across tokens.

`stop_strings` matches stop strings in a growing text; all other modules use it. `incremental_text`
detokenises one token after another; `answer_text` is the text of an answer up to its first stop
string, for whoever shows text (the offline engine, requests over NATS). Where Dynamo's frontend
detokenises, a worker reads the bytes of the tokens (`adapters.vocabulary.token_bytes`) instead:
`stop_text` ends the answer at a stop string, `safe_chunks` holds tokens back whose text the
frontend would withhold. The last two see an engine's stream as `deltas` says.

The other direction, a text to the token ids that add exactly it to an answer, is
`adapters.vocabulary.exact_text`; processors look for a text in a token history with
`adapters.vocabulary.text_match`, whose index costs a look at the whole vocabulary per text.
"""
