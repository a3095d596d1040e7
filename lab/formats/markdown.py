"""Rows of Markdown tables within a text: quoted, prefixed by a log, or pasted into one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lab.formats.text import MOST_LETTERS

RULE_LETTERS = set("-:|+ \t=")
INNER_RULE = re.compile(r"\|\s{0,9}:?-{2,}:?\s{0,9}\|")
NEXT_ROW = re.compile(r"\|[ \t]{0,9}\|")


@dataclass(frozen=True)
class TableRow:
    """A line of a table: its cells by head, or the `problem` why it has none."""

    line: int
    cells: Mapping[str, str]
    problem: str = ""


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table; [] for another line, and for the rule below the head."""
    if len(line) > MOST_LETTERS or line.count("|") < 2 or set(line) <= RULE_LETTERS:
        return []
    inner = line.strip()
    if inner.endswith("|"):  # what stands before the first bar is of a quote or a log
        _, _, inner = inner.removesuffix("|").partition("|")
    cells = [cell.replace("\u00a6", "|").strip() for cell in inner.split("|")]
    if all(not cell or set(cell) <= RULE_LETTERS for cell in cells):
        return []
    return cells


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a text with their numbers; a table in one line gives a line for each row."""
    for number, line in enumerate(text.split("\n"), 1):
        rule = None
        if len(line) <= MOST_LETTERS:
            rule = INNER_RULE.search(line)
        has_head = rule is not None and "|" in line[: rule.start()]
        if not has_head:
            yield number, line
            continue
        for row in NEXT_ROW.split(line):
            yield number, f"|{row.strip().strip('|')}|"


def distinct(heads: Sequence[str]) -> list[str]:
    """The heads of a table; those that are the same have the numbers of their columns."""
    if len(set(heads)) == len(heads):
        return list(heads)
    return [
        f"{head} column {number}" if heads.count(head) > 1 else head
        for number, head in enumerate(heads, 1)
    ]


def rows(text: str, is_head: Callable[[Sequence[str]], bool]) -> Iterator[TableRow]:
    """The rows below heads of one kind, and the lines of tables that cannot be read."""
    heads: list[str] = []
    for number, line in _lines(text):
        if len(line) > MOST_LETTERS and "|" in line:
            yield TableRow(number, {}, f"it has over {MOST_LETTERS:,} letters")
            continue
        cells = cells_of(line)
        if not cells:
            continue
        if is_head(cells):
            heads = distinct(cells)
        elif not heads:
            yield TableRow(number, {}, "it is not below the head of a table of llama-bench")
        elif len(cells) != len(heads):
            what = f"it has {len(cells)} columns, and the head of the table has {len(heads)}"
            yield TableRow(number, {}, what)
        else:
            yield TableRow(number, dict(zip(heads, cells, strict=True)))
