"""One file for each experiment: its command, its plan as a script, its rows with the prediction, what they say,
its picture.

`known.py` lists them. Beside them: the overhead of a server (overhead_*.py) and common claims (claims/).
"""
