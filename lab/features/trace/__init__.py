"""Which operations take the time of a token, and what it attends to: `lab trace`.

Open `measuring.py` first.
"""
