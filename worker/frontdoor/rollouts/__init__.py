"""Token ids in and out, and log probabilities for trainers, in the forms of vLLM's, SGLang's and
Dynamo's clients.
"""
