"""The values of answers, collected from a text by the patterns of a program.

An answer ends where one of its values comes again, or one that is printed earlier; in a log of
several slots each has answers of its own. Every pattern has bounds, so that reading takes time in
proportion to the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from lab.features.why.figure import MAYBE_FIRST, PROMPT
from lab.features.why.readers.meaning import TABLE
from lab.formats.numbers import GO_DURATION, NUMBER, count, go_seconds, number

SHORT = {
    "<NUMBER>": NUMBER,
    "<N>": r"\d[\d,]{0,12}",
    "<GO>": rf"(?:{GO_DURATION}(?![\w.])|{NUMBER})",
    "<IS>": r"\s{0,20}:\s{0,20}",
    "<LABEL>": r"[^\n:]{0,10}:\s{1,60}",
    "<SLOT>": r"(?:\bid {1,5}\d{1,6} {0,3}\| {0,3}task [^\n]{0,300}?)",
    "<TABBY>": rf"Generate: (?:(?P<decode_tps>{NUMBER})|Indeterminate) T/s",
    "<DRAFT>": r"(?:, Draft: (?P<accepted>\d{1,9}) / (?P<drafted>\d{1,9}) tokens accepted"
    r"(?: \([^)]{1,20}\))?)?",
}
"""Pieces of patterns that have a name in the table."""

BROKEN_SPACE = r"[\s>]{1,40}"
VALUE = (
    r'(?:"([^"\n]{0,200})"|\'([^\'\n]{0,200})\''
    r"|([-+]?\d[\d.,]{0,40}(?:[eE][-+]?\d{1,3})?|[tT]rue|[fF]alse))"
)
NAME_OF_OBJECT = re.compile(r"[\"']\s{0,9}:\s{0,9}$")
LONGEST_NAME_END = 20  # letters that NAME_OF_OBJECT may look back
UNITS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
ANYWHERE = -1  # the rank of a pattern whose place among the others says nothing


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a program counts, and the patterns of its values, in the order in which it prints them.

    Named groups are values. `anywhere`: patterns whose place among the others says nothing.
    """

    source: str
    patterns: Sequence[str] = ()
    anywhere: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # JSON-like names of values
    first: str = ""  # a label that only begins an answer
    key: str = ""  # what an answer belongs to, such as a slot, from here on
    # What a process prints before its first answer: no answer goes on below it
    start: str = ""
    sign: str = ""  # a text without it is of another program
    no_sign: str = ""  # and a text with it too
    is_broken: bool = False  # any space may be the end of a line
    counts: str = MAYBE_FIRST
    counts_of_one: str = (
        ""  # what the rate of a single answer counts, if that is another thing
    )
    counts_of_prefill: str = PROMPT
    is_of_server: bool = True
    n_streams: int | None = None
    starts_empty: bool = False  # the prompt is processed from position 0
    rounds_s: float = 0.0  # rounding of printed times
    is_exact: bool = False  # its tokens and times have more digits than its rates
    carried: Sequence[str] = ()  # values of a head that hold for all answers below it
    reach: int = 4_000  # letters from the first to the last value of an answer
    about: str = ""


PROGRAMS = [Program(**entry) for entry in TABLE["programs"]]
WINDOWS = [Program(**entry) for entry in TABLE["windows"]]


@dataclass
class PastedAnswer:
    """The values of an answer, as texts, and the line of the first one."""

    line: int
    values: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    start: int = 0  # of the text, in letters
    rank: int = 0  # of its last pattern

    def line_of(self, *names: str) -> int:
        """The line of the first of these values that it has; its own first line without any."""
        return next((self.lines[name] for name in names if name in self.lines), self.line)

    def number(self, name: str) -> float | None:
        """A value as a number; None if it is missing. ValueError if it is ambiguous."""
        text = self.values.get(name)
        return number(text) if text else None

    def count(self, name: str) -> int | None:
        """A value as a number of tokens; None if it is missing."""
        text = self.values.get(name)
        return count(text) if text else None

    def seconds(self, name: str) -> float | None:
        """A time in seconds, in whatever unit it is printed; None if it is missing or 0."""
        for unit, factor in UNITS.items():
            text = self.values.get(name + unit)
            if text:
                return factor * number(text) or None
        return go_seconds(self.values.get(name + "_go", "")) or None


@cache
def compiled(pattern: str, flags: re.RegexFlag, is_broken: bool = False) -> re.Pattern[str]:
    """A pattern of the table."""
    for short, piece in SHORT.items():
        pattern = pattern.replace(short, piece)
    if is_broken:
        pattern = pattern.replace(" ", BROKEN_SPACE)
    return re.compile(pattern, flags)


def matched(text: str, expression: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """The matches of an expression with the numbers of their lines."""
    line = 1
    last = 0
    for match in expression.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        yield line, match


def is_of_program(text: str, program: Program) -> bool:
    """Whether a text has what a program always prints, and nothing that it never prints."""
    if program.sign and not re.search(program.sign, text):
        return False
    return not program.no_sign or not re.search(program.no_sign, text)


def collected(text: str, program: Program) -> list[PastedAnswer]:
    """The answers of a program in a text, in order of their first values."""
    if not is_of_program(text, program):
        return []
    if program.labels:
        return labelled(text, program.labels, program.first)
    begins = [0, *(match.end() for match in re.finditer("\n", text))]
    keys = [(0, "")]
    if program.key:
        keys += [(match.start(), match[1]) for match in re.finditer(program.key, text)]
    starts = list[int]()
    if program.start:
        starts += [match.start() for match in re.finditer(program.start, text)]
    answers = list[PastedAnswer]()
    newest = dict[tuple[int, str], PastedAnswer]()
    for place, rank, match in matches_of(text, program):
        values = {name: value for name, value in match.groupdict().items() if value}
        of_process = bisect_right(starts, place)
        key = (of_process, keys[bisect_right(keys, (place, "\uffff")) - 1][1])
        answer = newest.get(key)
        line = bisect_right(begins, place)
        if answer is None or is_of_next(answer, program, place, rank, values):
            carried = dict[str, str]()
            for name in program.carried:
                if answer and name in answer.values:
                    carried[name] = answer.values[name]
            answer = PastedAnswer(line, carried, start=place)
            newest[key] = answer
            answers.append(answer)
        answer.rank = max(answer.rank, rank)
        answer.values |= values
        answer.lines |= dict.fromkeys(values, line)
    return answers


def matches_of(text: str, program: Program) -> list[tuple[int, int, re.Match[str]]]:
    """The matches of a program's patterns in order: their place, their pattern, and the match."""
    matches = list[tuple[int, int, re.Match[str]]]()
    ranked = [*enumerate(program.patterns), *((ANYWHERE, each) for each in program.anywhere)]
    for rank, pattern in ranked:
        expression = compiled(pattern, re.I | re.M, program.is_broken)
        matches += [(match.start(), rank, match) for match in expression.finditer(text)]
    return sorted(matches, key=lambda each: each[:2])


def is_of_next(
    answer: PastedAnswer, program: Program, place: int, rank: int, values: Mapping[str, str]
) -> bool:
    """Whether values are no longer of an answer."""
    if place > answer.start + program.reach:
        return True
    if rank == ANYWHERE:
        return False
    return rank < answer.rank or not values.keys().isdisjoint(answer.values)


def labelled(text: str, labels: Mapping[str, str], first: str = "") -> list[PastedAnswer]:
    """The values of JSON-like fields, by answer: `"label": 1.5`, `label: "text"`, `label=1.5`.

    `labels`: the name of the value of each. `first`: a label that only begins an answer.
    """
    names = "|".join(sorted(labels, key=len, reverse=True))
    pattern = rf"(?<![\w.])[\"']?({names})[\"']?\s{{0,9}}[:=]\s{{0,9}}{VALUE}"
    begins = beginnings(text)
    answers = list[PastedAnswer]()
    for line, match in matched(text, compiled(pattern, re.M)):
        name = labels[match[1]]
        is_new = not answers or match[1] == first or name in answers[-1].values
        while begins and begins[-1] < match.start():
            begins.pop()
            is_new = True
        if is_new:
            answers.append(PastedAnswer(line))
        value = match[2] or match[3] or match[4] or ""
        answers[-1].values[name] = value.rstrip(".,")
    return answers


def beginnings(text: str) -> list[int]:
    """Where objects without a name open that are in no other object, from the last to the first.

    A fragment may lack its outer brackets: `"usage": {...}, "stats": {...}` is one object.
    """
    places = list[int]()
    n_open = 0
    for match in re.finditer("[{}]", text):
        if match[0] == "}":
            n_open = max(0, n_open - 1)
            continue
        before = text[max(0, match.start() - LONGEST_NAME_END) : match.start()]
        if n_open == 0 and not NAME_OF_OBJECT.search(before):
            places.append(match.start())
        n_open += 1
    return places[::-1]
