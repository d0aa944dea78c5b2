"""Weights, candidates and prefixes: one rule for what a share of probability keeps.

Processors, pipes and samplers decide with these functions, whatever they do it to: `weights` are
integers whose sums are exact, `prefixes` ends of the shortest prefix of a mass, `truncation` the
controls on whole rows in place, `candidates` the highest tokens of rows, `whole_row` one row at a
time on the CPU; `native` are the kernels that an engine passes in.
"""
