"""The command that the user gave, for the lines of its session: stored, not reconstructed.

The command line sets it once, before anything is measured; so does a function of the package. It
holds no secrets and no options of output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_WORDS: ContextVar[tuple[str, ...] | None] = ContextVar("stored_command", default=None)


def command() -> tuple[str, ...] | None:
    """The words after `lab`: ("measure", "--gen", "64"). None where no command asked."""
    return _WORDS.get()


@contextmanager
def storing(command_line: Sequence[str]) -> Iterator[None]:
    """Lines that are made in this context hold this command line."""
    token = _WORDS.set(tuple(command_line))
    try:
        yield
    finally:
        _WORDS.reset(token)
