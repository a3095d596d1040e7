"""The one error a user sees: what failed, with the value that failed, and what to do next."""


def printable(text: str, kept: str = "") -> str:
    """`text` without control characters (but those in `kept`), which could command a terminal or turn text around.

    Line ends and other spaces become a plain space, the rest a question mark.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else " " if c.isspace() else "?" for c in text)


class LabError(Exception):
    """Something a user can cause or mend.

    `what` is one sentence that names the failing value; `hint` says what to do next.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        what = printable(what)  # parts of it may come out of a file: nothing in it shall command the terminal
        hint = "\n".join(map(printable, hint.split("\n")))
        super().__init__(f"{what}\n{hint}" if hint else what)
        self.what = what
        self.hint = hint

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback (IPython asks for it)."""
        return [f"Error: {self}"]
