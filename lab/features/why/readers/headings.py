"""What the author of a text calls the figures below: `### Vulkan`, `With FA:`, a line of its own.

A heading holds until the next one. A text with one heading over all figures says nothing by it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from lab.features.why.facts import Fact
from lab.features.why.figure import Figure
from lab.features.why.readers import commands
from lab.features.why.readers.prose import OF_LOG
from lab.formats import markdown

LONGEST = 120
MOST_WORDS_ALONE = 3
MARKED = re.compile(r"#{1,6}\s|\S[^\n]*:\s*$")
LABEL = re.compile(r"([^\W\d][^\n:|=]{0,80}):\s{0,9}\d[\d.,]{0,19} ?tok/s(?:ec)?\b")
"""What stands before a rate of LM Studio on its line, which has no words of its own there."""

TAG = re.compile(r"</?[a-z][^<>\n]{0,60}>", re.I)
WITH_OPTIONS = re.compile(
    r"\s-{1,2}[A-Za-z]|\.gguf|\b(?:run|serve)\s{1,9}[\w.-]{0,60}[\d:/]\w"
)
MARKS = re.compile(r"^(?:\s{0,40}(?:>|[-*\u2022](?=\s)))*\s{0,40}")
FENCE = re.compile(
    r"(?:~~~.*|shell|bash|sh|console|text|txt|log|ya?ml|json|powershell|cmd|md|markdown|python)$"
)
"""A line that opens or closes a block, whose other marks are gone already."""

ASIDE = re.compile(
    r"https?://|[{}]|^(?:\w+_\w+:|main:|build: ?[0-9a-f]{4,})(?=\s{0,9}\S)"
    r"|^[\"'\[]|^(?:services|models|env|environment|command|cmd|args|volumes|ports)\s?:"
)
"""Addresses, code, lines of programs, and keys of a configuration, which are no headings."""


def with_headings(figures: Sequence[Figure], headings: Sequence[Fact]) -> list[Figure]:
    """The figures with the headings above them, if there is more than one."""
    places = [heading.line or 0 for heading in headings]
    above = [bisect_right(places, figure.line or 0) for figure in figures]
    if len(set(above)) < 2:
        return list(figures)
    n_called = Counter(headings[place - 1].value for place in set(above) if place)
    completed = list[Figure]()
    for figure, place in zip(figures, above, strict=True):
        heading = headings[place - 1] if place else None
        if heading and n_called[heading.value] > 1 and place > 1 and place - 1 not in above:
            part = headings[place - 2]  # without figures of its own: it names several headings
            heading = replace(heading, value=f"{part.value}, {heading.value}")
        completed.append(replace(figure, heading=heading))
    return completed


def headings_of(text: str, of_figures: Collection[int]) -> Iterator[Fact]:
    """The headings of a text in order; `of_figures` are lines of figures."""
    lines = [plain_line(line) for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        if number in of_figures:
            label = LABEL.match(line)
            if label:
                yield called(label[1], number)
            continue
        if not is_of_prose(line):
            continue
        is_first = number == 1 or is_blank(lines[number - 2])
        is_last = number == len(lines) or is_blank(lines[number])
        is_name = is_last and len(line.split()) <= MOST_WORDS_ALONE
        is_caption = is_first and (is_name or is_above_output(lines, number, of_figures))
        if is_caption or MARKED.match(line):
            yield called(line, number)


def called(line: str, number: int) -> Fact:
    """The words of a heading."""
    return Fact(line.strip(" #:"), number)


def plain_line(line: str) -> str:
    """A line without marks of quotes and of HTML."""
    return MARKS.sub("", TAG.sub("", line[: 2 * LONGEST]), count=1).rstrip()


def is_blank(line: str) -> bool:
    return not line or bool(FENCE.match(line))


def is_of_prose(line: str) -> bool:
    """Whether a line can be a heading: a short one of words."""
    is_short = 0 < len(line) <= LONGEST and re.search(r"\w", line) is not None
    is_output = OF_LOG.search(line) or ASIDE.search(line) or FENCE.match(line)
    return is_short and not is_output and not is_command(line)


def is_command(line: str) -> bool:
    """Whether a line starts a program with options or a file; a name alone is a heading."""
    return bool(commands.START.search(line) and WITH_OPTIONS.search(line))


def is_above_output(lines: Sequence[str], number: int, of_figures: Collection[int]) -> bool:
    """Whether the next line that is not empty is of a log, a table, a command or a figure."""
    for below, line in enumerate(lines[number:], number + 1):
        if not is_blank(line):
            is_output = OF_LOG.search(line) or markdown.cells_of(line)
            return below in of_figures or bool(is_output) or is_command(line)
    return False
