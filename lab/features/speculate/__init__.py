"""Draft tokens, verify them in one step: what it costs and gains: `lab speculate`.

Open `planning.py` first.
"""
