"""Hostile input: files and servers that want to hang, fill or take over the lab."""

from hypothesis import settings

settings.register_profile(
    "lab",
    derandomize=True,
    max_examples=50,
    deadline=None,
    database=None,
)
settings.load_profile("lab")
