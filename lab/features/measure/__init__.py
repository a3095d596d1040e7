"""Prefill and decode of several prompt lengths: `lab measure`, `lab sweep`, `lab ab`.

Open `measuring.py` first.
"""
