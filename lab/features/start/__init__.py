"""`lab start`: what it takes until a model's first token can come, from the disk and from the page
cache."""
