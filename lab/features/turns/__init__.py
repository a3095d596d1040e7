"""A conversation, turn by turn, and how much of its prompt is processed again: `lab turns`.

Open `conversation.py` first.
"""
