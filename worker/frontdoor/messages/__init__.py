"""Anthropic's Messages API, translated to the one chat request that there is and back.

`fields` is the table of the request's fields, which `docs/messages.md` shows. `request` makes a
chat of a request: `conversation` its messages, `tools` its tools, `thinking` its thoughts;
`chat_paths` finds the field of the request that an error of the chat is about. `events` makes the
events of a stream of the chat's chunks, with `held_text` for stop sequences, and `message` the
whole answer of the events. `handlers` has the endpoints.
"""
