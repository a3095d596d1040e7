"""Figures in the output of other programs: a file for each family of formats.

Open `text.py` first.
"""
