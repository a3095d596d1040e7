"""The one error a user sees: what failed, with the value that failed, and what to do next; and the
command's exit statuses."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

EXIT_FAILED = 1  # the status of the `lab` command after an error
EXIT_INTERRUPTED = 130  # after Ctrl-C


def printable(text: str, allowed: str = "") -> str:
    """`text` without control characters, which could control a terminal or reverse text.

    Line ends and other whitespace become a space, all others a question mark; those in `allowed`
    stay.
    """
    if text.isprintable():
        return text
    return "".join(_printable_letter(letter, allowed) for letter in text)


def _printable_letter(letter: str, allowed: str) -> str:
    if letter.isprintable() or letter in allowed:
        return letter
    return " " if letter.isspace() else "?"


def warn(message: str) -> None:
    """Warn the user: the warning names the line of the program that called the lab."""
    package = __name__.partition(".")[0]
    n_frames = 2  # of this function, and of the program
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == package:
        n_frames += 1
        frame = frame.f_back
    warnings.warn(printable(message), stacklevel=n_frames)


class LabError(Exception):
    """An error that a user can cause or correct.

    `what` is one sentence that names the failing value; `hint` says what to do next. Parts of both
    may come from a file, which must not control the terminal.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        what = printable(what)
        hint = printable(hint, allowed="\n")
        super().__init__(f"{what}\n{hint}" if hint else what)
        self.what = what
        self.hint = hint

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook instead of a traceback."""
        return [f"Error: {self}"]
