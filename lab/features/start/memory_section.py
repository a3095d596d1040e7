"""Decode with limited memory as a table, in sentences, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from lab.core.lists import grouped, plural
from lab.features.start import memory_figures
from lab.features.start.memory_figures import MemoryLimit
from lab.features.start.memory_picture import draw_memory
from lab.roofline import paging
from lab.roofline.paging import MemoryLine
from lab.show import text_setup
from lab.show.cells import Cell, listed, stacked
from lab.show.section import Picture, Section, tabled
from lab.show.wording import UNKNOWN, digits, percent, seconds, times

CAPTION = "Points are starts. Bars are ranges predicted from the starts with other limits."
COLUMNS = listed(
    (
        "memory\nMB",
        "of the\nfile",
        "room for\nthe file",
        "decode\ntokens/s",
        "predicted\ntokens/s",
        "ms per\ntoken",
        "file read\nper token",
        "major faults\nper token",
    )
)
NOT_DROPPED = (
    "The file's pages did not leave the page cache before some starts, so that the limit did not "
    "hold for them: these starts are left out."
)
VIRTUAL = (
    "This machine is virtual: reads of the file may come from its host's memory, faster than from "
    "the disk."
)
OWN_MEMORY = (
    "The limit is that of the whole process: its own memory (Python, KV cache, buffers: {size} MB) "
    "comes first, and the file's pages have the rest."
)


def sections(lines: Sequence[MemoryLine]) -> list[Section]:
    """A section for each session."""
    by_session = grouped(lines, lambda line: line.session)
    return [section(lines_of_session) for lines_of_session in by_session.values()]


def section(lines: Sequence[MemoryLine]) -> Section:
    """Speed against memory, for the starts of a session."""
    line = lines[0]
    limits = memory_figures.memory_limits(lines)
    where = text_setup.where(lines)
    draw = partial(draw_memory, limits=limits, file_bytes=line.file_bytes, subject=where)
    has_limits = any(limit.limit_bytes is not None for limit in limits)
    return Section(
        where,
        f"decode of a file of {digits(line.file_bytes / 1e6)} MB with limited memory; medians",
        "the range of all starts",
        name="memory",
        question="How fast is a model that does not fit into memory?",
        answer=answer(limits),
        **tabled(COLUMNS, list(map(partial(cells, line), limits)), keep_all=True),
        warnings=[NOT_DROPPED] if has_unconfirmed(lines) else [],
        sentences=sentences(lines, limits),
        notes=[VIRTUAL] if line.machine.virtual else [],
        pictures=[Picture("memory", CAPTION, draw, (8, 5))] if has_limits else [],
        data=lambda: {"memory": document(lines)},
    )


def has_unconfirmed(lines: Sequence[MemoryLine]) -> bool:
    return not all(line.is_confirmed for line in lines)


def cells(line: MemoryLine, limit: MemoryLimit) -> list[Cell | str]:
    """A row of the table."""
    starts = limit.starts
    rates = 1 / starts.token_s
    spread = f"{digits(rates.min())}-{digits(rates.max())}" if len(rates) > 1 else ""
    measured: list[Cell | str] = [
        stacked(digits(1 / limit.token_s), spread),
        range_of_rates(limit),
        digits(1e3 * limit.token_s),
        share_cell(limit.read_share),
        count_cell(float(starts.n_faults.median()) / line.n_tokens),
    ]
    if limit.limit_bytes is None:
        return ["no limit", UNKNOWN, UNKNOWN, *measured]
    share = percent(limit.limit_bytes / line.file_bytes)
    return [f"{limit.limit_bytes / 1e6:,.0f}", share, share_cell(limit.room), *measured]


def range_of_rates(limit: MemoryLimit) -> str:
    """The predicted tokens per second."""
    if limit.expected_s is None:
        return UNKNOWN
    fastest_s, slowest_s = limit.expected_s
    return f"{digits(1 / slowest_s)}-{digits(1 / fastest_s)}"


def share_cell(share: float) -> str:
    return UNKNOWN if math.isnan(share) else f"{100 * share:.0f} %"


def count_cell(count: float) -> str:
    return UNKNOWN if math.isnan(count) else f"{count:.0f}"


def answer(limits: Sequence[MemoryLimit]) -> str:
    """How much slower the model is with the largest limit in which it does not fit."""
    unlimited = [limit for limit in limits if limit.limit_bytes is None]
    short = [limit for limit in limits if limit.room < paging.NEARLY]
    if not unlimited or not short:
        return ""
    closest = short[-1]
    slower = times(closest.token_s / unlimited[0].token_s)
    return (
        f"With room for {share_cell(closest.room)} of the file a token takes "
        f"{seconds(closest.token_s)}, {slower} as long as without a limit "
        f"({seconds(unlimited[0].token_s)})."
    )


def sentences(lines: Sequence[MemoryLine], limits: Sequence[MemoryLimit]) -> list[str]:
    """What the limit includes, what is read, the law, and how often it held."""
    result = []
    process_bytes = [line.own_bytes for line in lines if line.own_bytes is not None]
    if process_bytes:
        result.append(OWN_MEMORY.format(size=digits(max(process_bytes) / 1e6)))
    short = [limit for limit in limits if limit.room < paging.NEARLY]
    reads = [limit.read_share for limit in short if not math.isnan(limit.read_share)]
    if reads:
        result.append(
            f"With room for less than {percent(paging.NEARLY)} of the file, each token reads "
            f"{share_cell(min(reads))} to {share_cell(max(reads))} of it from the disk (medians), "
            "at least the part without room."
        )
    law = paging.learn(lines)
    if law is not None:
        result.append(
            "Law of this machine, kernel and disk below this room: a token waits "
            f"{digits(1e9 * law.wait_s)} s for each GB of the whole file (range "
            f"{digits(1e9 * law.low_s)} to {digits(1e9 * law.high_s)} s, "
            f"{plural(law.n_starts, 'start')})."
        )
    predicted = [limit for limit in limits if limit.expected_s is not None]
    if predicted:
        n_inside = sum(limit.n_inside for limit in predicted)
        n_starts = sum(len(limit.starts) for limit in predicted)
        result.append(
            f"Test: each limit was predicted from the starts with the others; {n_inside} of "
            f"{plural(n_starts, 'start')} fell inside the range."
        )
    return result


def document(lines: Sequence[MemoryLine]) -> list[dict[str, object]]:
    """What JSON has of the starts."""
    documents = []
    for line in lines:
        documents.append(
            {
                "session": line.session,
                "model": line.model.name,
                "round": line.round,
                "limit_bytes": line.limit_bytes,
                "own_bytes": line.own_bytes,
                "file_bytes": line.file_bytes,
                "room": line.room,
                "is_confirmed": line.is_confirmed,
                "resident": line.resident,
                "token_s": line.token_s,
                "read_share": line.read_share,
                "n_faults": line.n_faults,
                "disk_s": line.disk_s,
            }
        )
    return documents
