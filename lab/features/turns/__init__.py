"""A conversation, turn by turn: what a cache serves, and what is read again."""
