"""Commands for pasting are made here, and nowhere else: values from records, servers and files cannot run anything."""

from __future__ import annotations

import os
import shlex

from lab.errors import printable


def join(*words: object) -> str:
    """Words as one line of a POSIX shell. A word that is a list is a command line within it, as in `lab ab`."""
    return shlex.join(
        printable(join(*word) if isinstance(word, (list, tuple)) else str(word)) for word in words
    )


def lab(*words: object) -> str:
    return join("lab", *words)


def split(text: str) -> list[str]:
    """Split a command line like a POSIX shell, but on Windows keep backslashes. ValueError for an open quote."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if os.name == "nt":
        lexer.escape = ""
    return list(lexer)
