"""The engine's process as its parent sees it, and what crosses the pipe between the two.

In: requests as function calls. Out: replies as dataclasses, or a LabError that says how the engine's process ended.
Open `worker.py` first.
"""
