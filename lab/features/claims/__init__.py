"""Textbook claims, each judged on this machine: `lab claims`. Open `session.py` first."""
