"""One token's way through the layers, and what it looks at."""
