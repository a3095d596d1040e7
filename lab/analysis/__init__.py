"""Records as tables, laws and verdicts.

In: records. Out: DataFrames of runs and steps, medians with intervals, what disturbed a run, laws fitted to a sweep,
and comparisons of setups. Nothing is measured or printed here. Open `table.py` first.
"""
