"""The engine's process, seen from the parent, and the data that crosses the pipe.

In: function calls. Out: replies as dataclasses, or a LabError that says how the process ended. Open
`worker.py` first.
"""
