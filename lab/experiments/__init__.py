"""One file per lever: what it does to the time of a step, predicted, measured, and checked to have happened.

Each file has its plan (cases), its script, its figures of a run, and its rows with the prediction beside them.
"""
