"""Commands for pasting are made here, and nowhere else.

Values from records, servers and files cannot run anything.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from lab.core.request import short_name
from lab.errors import printable


def join(*arguments: object) -> str:
    """Arguments as one line of a POSIX shell.

    An argument that is a list is a command line within it, as in `lab ab`.
    """
    return shlex.join(printable(_as_text(argument)) for argument in arguments)


def _as_text(argument: object) -> str:
    if isinstance(argument, (list, tuple)):
        return join(*argument)
    return str(argument)


def lab(*arguments: object) -> str:
    """A command of the lab."""
    return join("lab", *arguments)


def braced(stem: str, names: Sequence[str], suffixes: Sequence[str]) -> str:
    """The files `<stem>-<name><suffix>` as one word that a shell expands: `a-{x,y}.{png,svg}`."""
    name = _alternatives([f"-{name}" for name in names])
    suffix = _alternatives(suffixes)
    return f"{join(stem)}{name}{suffix}"


def _alternatives(words: Sequence[str]) -> str:
    """Words with the same first letter: `-x` or `-{x,y}`."""
    if len(words) == 1:
        return join(words[0])
    return f"{words[0][0]}{{{','.join(join(word[1:]) for word in words)}}}"


def without_folders(text: str) -> str:
    """A command line for a title: a path is shortened to the name of its file."""
    try:
        words = split(text)
    except ValueError:
        return text
    shortened = [short_name(word) for word in words]
    return text if shortened == words else join(*shortened)


def split(text: str) -> list[str]:
    """Split a command line like a POSIX shell, but keep backslashes on Windows.

    ValueError for an open quote.
    """
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if os.name == "nt":
        lexer.escape = ""
    return list(lexer)
