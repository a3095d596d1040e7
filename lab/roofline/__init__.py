"""What a step should take: measured ceilings, the kernels of a step, learned and fitted times.

Arithmetic only; the tables and pictures are in the features `explain` and `predict`. Open
`probing.py` first.
"""
