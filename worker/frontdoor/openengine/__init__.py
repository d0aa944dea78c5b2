"""Workers behind OpenEngine as the front door's upstream: what stands in Dynamo's frontend's place.

`frontend` speaks to the rest of the front door as Dynamo's frontend does, over sockets within the
process, so that all of it stays as it is. `body` turns a body into the request that a worker gets,
with the prompt of `prompts`; `workers` knows the workers and chooses one, `generation` reads its
answer and lets another worker go on where one dies; `thinking` and `answer` make OpenAI's chunks.
Only `opening` is imported from elsewhere, once there are such workers: gRPC is needed here alone.
"""
