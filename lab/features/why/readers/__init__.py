"""Figures in the output of other programs. `programs.toml` is the table of what their lines mean.

Open `text.py` first.
"""
