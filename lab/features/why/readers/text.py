"""A pasted text as figures. Every reader looks at the whole text, and all figures are kept."""

from __future__ import annotations

import re

from lab.core import files, shell
from lab.errors import LabError, printable
from lab.features.why.figure import Figure, is_possible
from lab.features.why.readers import headings, programs, prose, setup, tables, windows
from lab.formats import markdown, text as texts

MOST_BYTES = 4_000_000
MOST_FIGURES = 1_000
LONGEST_BARE = 60
CONTRADICTION = "has figures that the lab cannot trust"
READERS = (tables.read, programs.read, windows.read)
FORMATS = (
    "llama-bench (Markdown, JSON, CSV, SQL)",
    "llama-batched-bench and llama-sweep-bench (tables and JSON lines)",
    "llama-benchy",
    "llama-server (log and timings)",
    "llama-swap",
    "llama-cli",
    "llama-speculative",
    "ik_llama.cpp",
    "Ollama (--verbose and API)",
    "LM Studio",
    "KoboldCpp (log and benchmark)",
    "vLLM (log and bench serve)",
    "SGLang (log and bench_serving)",
    "TabbyAPI",
    "mlx_lm",
    "text-generation-webui",
    "LocalScore",
    "a bare figure such as 35 tokens/s",
)
KNOWN = f"Known formats: {', '.join(FORMATS)}."
LIKE_A_RATE = re.compile(
    r"\d[\d.,]{0,12}\s{0,3}(?:tokens?|toks?|tks?|t)\s{0,3}(?:/|per|p)\s{0,3}s(?:ec\w{0,4})?\b"
    r"|\bt/s\b|\btokens? per sec|\btps\b"
    r"|\b(?:eval|prompt) (?:rate|time|duration)\b|tokens-per-sec",
    re.I,
)
LONE_NUMBER = re.compile(r"(?:[^\d./\\]*\s)?(\d{1,9}(?:[.,]\d{1,9})?)(?:\s[^\d./\\]*)?")
"""Words without a path that hold one number."""

MOST_QUOTED = 3
LONGEST_QUOTE = 80
FEWEST_WORDS = 4  # of a sentence


def read(name: str) -> list[Figure]:
    """The figures of a file, of stdin (`-`), or of a text such as `35 tokens/s`.

    LabError if it is none of these, or no figure is recognized.
    """
    if "\n" in name:
        return parse(name)
    if len(name) <= LONGEST_BARE:
        bare = programs.read_bare(texts.cleaned(name))
        if bare and not files.exists(name):
            return prose.with_prose(bare, texts.cleaned(name))
    try:
        content = texts.read(name, KNOWN, MOST_BYTES)
    except LabError as problem:
        is_hidden = name.startswith(("/", "~")) and files.obstacle(files.expanded(name))
        if problem.what.startswith("stdin") or files.exists(name) or is_hidden:
            raise
        return parse_words(name)
    return parse(content, "stdin" if name == files.STDIN else name)


def parse_words(typed: str) -> list[Figure]:
    """The figures of words on the command line. LabError if they are no figure, and no file."""
    try:
        return parse(typed)
    except LabError as problem:
        if CONTRADICTION in problem.what:
            raise
        stated = programs.read_stated(typed)
        if stated:
            return prose.with_prose(setup.with_setups(stated, typed), typed)
        what = f"{typed[:100]!r} is neither a figure such as 35 tokens/s nor a readable file."
        hint = f"Give a figure, - for stdin, or a file. {KNOWN}"
        without_unit = LONE_NUMBER.fullmatch(typed.strip())
        rate = programs.BARE.search(typed)
        if without_unit:
            figure = f"{without_unit[1]} t/s"
            hint = f"Give the unit too: {shell.lab('why', figure, 'B')}"
        elif rate:
            figure = f"{rate[1]} t/s"
            hint = f"Give one measured rate for each side: {shell.lab('why', figure, 'B')}"
        raise LabError(what, hint) from None


def parse(text: str, name: str = "The text") -> list[Figure]:
    """The figures of a text, in its order.

    LabError if there is none, if the text is too long, or if figures contradict themselves: then
    the text was changed or misread.
    """
    if len(text) > MOST_BYTES or text.count("\n") > texts.MOST_LINES:
        what = f"{name} has over {texts.MOST_LINES:,} lines or {MOST_BYTES:,} bytes."
        raise LabError(what, "Give only the lines with the figures.")
    text = texts.cleaned(text)
    figures = list[Figure]()
    try:
        for reader in READERS:
            figures += reader(text)
        figures = figures or programs.read_bare(text)
    except (ArithmeticError, KeyError, ValueError) as problem:
        what = f"{name} {CONTRADICTION}: {printable(str(problem))}."
        raise LabError(what, f"{KNOWN} {hint_in_words(text)}") from None
    possible = [figure for figure in figures if is_possible(figure.tps)]
    if not possible:
        raise LabError(
            f"{name} has no figure that the lab can read.{nearly_read(text)}",
            f"{hint_in_words(text)}. {KNOWN}",
        )
    possible.sort(key=lambda figure: figure.line or 0)
    figures = setup.with_setups(possible[:MOST_FIGURES], text)
    found = list(headings.headings_of(text, {figure.line or 0 for figure in figures}))
    figures = prose.with_prose(figures, text, {heading.line for heading in found})
    return headings.with_headings(figures, found)


def nearly_read(text: str) -> str:
    """Sentences on the lines that look like a rate, and why they are none."""
    sentences = list[str]()
    for row in markdown.rows(text, tables.has_test_and_rate):
        if row.problem and "columns" in row.problem:
            sentences.append(f"Line {row.line} is cut: {row.problem}")
    for number, line in enumerate(text.split("\n"), 1):
        is_head = tables.has_test_and_rate(markdown.cells_of(line))
        if LIKE_A_RATE.search(line[:400]) and not is_head and len(sentences) < MOST_QUOTED:
            quote = " ".join(line[:400].split())[:LONGEST_QUOTE]
            problem = "is not in a known layout, or is cut"
            is_sentence = len(quote.split()) >= FEWEST_WORDS and not prose.OF_LOG.search(line)
            if is_sentence and programs.BARE.search(line):
                problem = (
                    "has a rate in a sentence, which the lab does not take for a measurement"
                )
            sentences.append(f"Line {number} {problem}: {quote!r}")
    return "".join(f" {sentence}." for sentence in sentences[:MOST_QUOTED])


def hint_in_words(text: str) -> str:
    """How to give the first two rates of a text in words, or the only one."""
    rates = list[str]()
    for match in programs.BARE.finditer(text[:MOST_BYTES]):
        is_spread = "\u00b1" in text[max(0, match.start() - 2) : match.start()]
        if not is_spread:
            rates.append(f"{match[1]} t/s")
    if len(rates) > 1:
        return f"Or give figures in words: {shell.lab('why', *rates[:2])}"
    words = rates[0] if rates else "32.4 t/s"
    return f"Or give one figure in words: {shell.lab('why', words, 'B')}"
