"""OpenAI's Responses API: each request is translated to the one chat request that there is, and the
chunks of its answer to items and events.

`fields` and `kinds` say what becomes of every field and of every type of item, part and tool;
`translation` makes the chat request, `answer` the events, `store` keeps responses, and `handlers`
are the endpoints.
"""
