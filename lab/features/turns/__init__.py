"""A conversation, turn by turn: how much of its prompt is read again?"""
