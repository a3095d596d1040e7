"""Textbook claims as data (texts.py), the session that measures for them (session.py), and their judge (judging.py)."""
