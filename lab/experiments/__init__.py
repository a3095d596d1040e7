"""One file for each experiment: its command, its plan as a script, its rows with the prediction, what they say,
its picture.

`known.py` lists them. Beside them: common claims (claims/).
"""
