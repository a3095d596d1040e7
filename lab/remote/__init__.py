"""A server as an engine: its client, the formats of its answers, its examination and its session.

In: an address, and the cases of a plan. Out: records of requests. Open `session.py` first.
"""
