"""One file for each experiment: its command, its plan as a script, its rows with the prediction, what they say.

`known.py` lists them. Beside them: both ways to a model (door_*.py), and what texts claim (claim*.py).
"""
