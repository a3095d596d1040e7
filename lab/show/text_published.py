"""Measurements that other people published (models/published.csv) as tables: rates with their source and date."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence

from lab.analysis.wording import digits
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL
from lab.errors import LabError
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.why import datasheet
from lab.why.published import Row

ABOUT = "measured by other people, not by the lab"
HINT = "List them: lab published --device NAME, --model NAME or --source NAME; all: --json"


def chosen(rows: Sequence[Row], **wanted: str | None) -> list[Row]:
    """The rows whose `device`, `model` and `source` contain these words (one of several with commas).

    A kind of devices stands for all of them. LabError with close names where no row is left.
    """
    for what, words in wanted.items():
        if words is None:
            continue
        names = {_named(row, what) for row in rows}
        found = {name for name in names if any(_plain(word) in _plain(name) for word in words.split(","))}
        kinds = datasheet.names_of(words) if what == "device" and not found else ()
        kept = [row for row in rows if _named(row, what) in (*found, *kinds)]
        if not kept:
            close = difflib.get_close_matches(words, sorted(names), n=5, cutoff=0.3) or sorted(names)[:5]
            raise LabError(f"There are no published rows of the {what} {words!r}.", f"There are: {', '.join(close)}.")
        rows = kept
    return list(rows)


def entries(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Prefill and decode of each entry of a source, which are neighbours in the file; the fastest of a model first."""
    made: list[dict[str, Row]] = []
    for row in rows:
        if made and row.phase not in made[-1] and _setup(row) == _setup(*made[-1].values()):
            made[-1][row.phase] = row
        else:
            made.append({row.phase: row})
    return sorted(made, key=lambda entry: (*_model(entry), -entry[DECODE].tps if DECODE in entry else 0.0))


def section(rows: Sequence[Row]) -> Section:
    """A table with a line for each entry of a source, and the sources below it."""
    sources = list(dict.fromkeys((row.source, row.url, row.date) for row in rows))
    columns: Columns = (
        ("name", lambda entry: _first(entry).device),
        ("model", lambda entry: " ".join(_model(entry))),
        (
            "prompt\ntokens",
            lambda entry: _of(entry, PREFILL, lambda row: f"{row.n_prompt:,}" if row.n_prompt else UNKNOWN),
        ),
        ("prefill,\ntokens/s", lambda entry: _of(entry, PREFILL, lambda row: digits(row.tps))),
        ("decode,\ntokens/s", lambda entry: _of(entry, DECODE, lambda row: digits(row.tps))),
        ("source", lambda entry: str(1 + [name for name, _, _ in sources].index(_first(entry).source))),
        ("backend", lambda entry: _first(entry).backend),
        ("flash\nattention", lambda entry: {None: UNKNOWN, True: "on", False: "off"}[_first(entry).flash_attn]),
        ("note", _note),
    )
    sentences = ["The lab learns nothing from rows that break a rule (note)."] if any(row.marks for row in rows) else []
    sentences += [f"Source {n}: {name}, {date}, {url}" for n, (name, url, date) in enumerate(sources, 1)]
    title = plural(len(rows), "published measurement")
    return Section(title, ABOUT, **tabled(columns, entries(rows)), sentences=sentences)


def summary(rows: Sequence[Row]) -> Section:
    """How many rows, devices and models each source has, and how many rows break a rule."""
    columns: Columns = (
        ("from", lambda own: own[0].source),
        ("rows", lambda own: f"{len(own):,}"),
        ("devices", lambda own: str(len({row.device for row in own}))),
        ("models", lambda own: str(len({row.model for row in own}))),
        ("rows that\nbreak a rule", lambda own: str(sum(bool(row.marks) for row in own))),
        ("date", lambda own: max(row.date for row in own)),
    )
    by_source = list(grouped(rows, lambda row: row.source).values())
    return Section(plural(len(rows), "published measurement"), ABOUT, **tabled(columns, by_source), sentences=[HINT])


def _named(row: Row, what: str) -> str:
    return f"{row.model} {row.quantization}" if what == "model" else str(getattr(row, what))


def _first(entry: dict[str, Row]) -> Row:
    return next(iter(entry.values()))


def _model(entry: dict[str, Row]) -> tuple[str, str]:
    return _first(entry).model, _first(entry).quantization


def _of(entry: dict[str, Row], phase: str, show: Callable[[Row], str]) -> str:
    return show(entry[phase]) if phase in entry else UNKNOWN


def _note(entry: dict[str, Row]) -> str:
    """The rules that its rows break, and what part of a chip it was measured on."""
    share = f"{100 * _first(entry).gpu_share:.0f} % of the GPU cores"
    marks = dict.fromkeys(mark for row in entry.values() for mark in row.marks)
    return ", ".join([*([share] if _first(entry).gpu_share != 1 else []), *marks])


def _setup(row: Row, *_: Row) -> Row:
    """What prefill and decode of one entry have in common."""
    return dataclasses.replace(row, phase="", n_prompt=None, tps=0.0, marks=())


def _plain(words: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", words.lower())
