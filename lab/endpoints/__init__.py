"""Measure a model behind HTTP.

In: an address, and requests to send. Out: the server's capabilities (`probe.py`), prompts of exactly n of its tokens
(`prompts.py`), and each request with the time of each event of its answer (`client.py`). The client runs in a separate
process (`client_process.py`), and `selftest.py` measures its error with a server that has a known schedule
(`null_server.py`). Only this wing uses httpx2. Open `client.py` first.
"""
