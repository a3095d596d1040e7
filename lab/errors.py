"""The one error a user sees: what failed, with the value that failed, and what to do next."""


def printable(text: str, kept: str = "") -> str:
    """`text` without control characters (except those in `kept`), which could control a terminal or reverse text.

    Line ends and other whitespace become a space, all others a question mark.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else " " if c.isspace() else "?" for c in text)


class LabError(Exception):
    """An error that a user can cause or correct.

    `what` is one sentence that names the failing value; `hint` says what to do next.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        what = printable(
            what
        )  # parts of it may come from a file, which must not control the terminal
        hint = "\n".join(map(printable, hint.split("\n")))
        super().__init__(f"{what}\n{hint}" if hint else what)
        self.what = what
        self.hint = hint

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook instead of a traceback."""
        return [f"Error: {self}"]
