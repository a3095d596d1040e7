"""A server as an engine: its client, the formats of its answers, and its examination.

In: an address and plans of requests. Out: records of requests. Open `servers.py` first.
"""
