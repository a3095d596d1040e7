"""A text from somebody else: read from a file or stdin within bounds, and cleaned."""

from __future__ import annotations

import codecs
import re

from lab.core import files
from lab.core.files import MOST_BYTES, STDIN
from lab.errors import LabError

TAB = "\t"
MOST_LINES = 50_000
MOST_LETTERS = 10_000
"""Letters of a line; longer lines are no tables and no logs."""

ESCAPES = re.compile(
    r"\x1b\[[0-?]{0,20}[ -/]{0,4}[@-~]|\x1b[@-Z\\-_]|\[(?:\d{1,3};){0,4}\d{1,3}m"
)
INVISIBLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
REPLACED = (
    ("\r\n", "\n"),
    ("\r", "\n"),
    ("\\_", "_"),
    ("\\|", "\u00a6"),  # an escaped bar within a cell
    ("\u00a0", " "),
    ("\u2009", " "),
    ("\u202f", " "),
    ("**", ""),
    ("`", ""),
    ("\u00c2\u00b1", "\u00b1"),
    ("+/-", "\u00b1"),
    ("&plusmn;", "\u00b1"),
    ("&nbsp;", " "),
)
"""What copying does to a text, and what it was."""


def read(name: str, hint: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file, or of stdin (`-`). LabError if it cannot be read or is too large."""
    shown = "stdin" if name == STDIN else name
    return decoded(files.read(name, "", hint, most_bytes), shown, hint)


def decoded(data: bytes, shown: str, hint: str) -> str:
    """UTF-8, or UTF-16 with a mark, as PowerShell writes it. LabError for neither."""
    is_wide = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    try:
        return data.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as problem:
        raise LabError(f"{shown} cannot be read: {problem}.", hint) from None


def cleaned(text: str) -> str:
    """The text without colours, invisible letters and marks of Markdown."""
    text = ESCAPES.sub("", text)
    for copied, original in REPLACED:
        text = text.replace(copied, original)
    return INVISIBLE.sub("", with_bars(text))


def with_bars(text: str) -> str:
    """The text with bars in tables whose cells are apart by tabs, as a browser copies them: lines
    that follow each other with as many tabs, two at least.
    """
    if "\t" not in text:
        return text
    lines = text.split("\n")
    n_tabs = [line.rstrip().count("\t") if is_row(line) else 0 for line in lines]
    beside = zip([0, *n_tabs[:-1]], n_tabs, [*n_tabs[1:], 0], strict=True)
    for place, (above, here, below) in enumerate(beside):
        if here > 1 and here in (above, below):
            lines[place] = f"|{lines[place].replace(TAB, '|')}|"
    return "\n".join(lines)


def is_row(line: str) -> bool:
    """Whether a line with tabs can be a row: it begins with a cell, and has no bars."""
    return not line.startswith(TAB) and "|" not in line
