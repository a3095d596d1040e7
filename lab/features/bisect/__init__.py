"""`lab bisect`: which build of llama.cpp became slower.

It compares the two ends, then halves the builds between them, then proves the pair it found.
"""
