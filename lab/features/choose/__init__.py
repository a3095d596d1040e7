"""`lab choose`: what choosing a token costs: samplers, grammars, vocabularies.

After a step the logits of the whole vocabulary are there, and a chain of samplers chooses a token
from them, on the CPU, one sequence after the other. A run decodes with each chain in turn, forth
and back, after one prompt; its steps are stamped as in every run (compute, then choose).
"""
