"""A model behind HTTP: the same words as for the engine, from outside.

In: an address, and requests to send. Out: what the server can do (`probe.py`), prompts of exactly n of its tokens
(`prompts.py`), and each request with the time of each event of its answer (`client.py`). The client runs in a process
of its own (`child.py`), and `selftest.py` measures its error against a server with a known schedule
(`null_server.py`). httpx2 is used here only. Open `client.py` first.
"""
