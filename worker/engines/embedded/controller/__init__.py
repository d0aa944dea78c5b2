"""Megatron-Core's `TextGenerationController`, under its public names.

`controller` is the class; `types` what goes in and comes out; `text` tokenises and detokenises;
`padding` are padded batches, `sampling` samples from given logits, `stream` copies requests for
their streams, `state` is what is kept of them.
"""

__all__ = []
