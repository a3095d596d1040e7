"""The features, each in a room of its own. Open `known.py` first: it lists them, and holds the loops over the list."""
