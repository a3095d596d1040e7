"""The results of `lab quant` as a section: an answer, a table, sentences and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from lab.core import shown
from lab.core.lists import join_and, plural
from lab.features.quant import cache_section, figures, picture
from lab.features.quant.cells import cell, ends, matrix, name_of
from lab.features.quant.figures import FEWEST_CHUNKS, QuantFigures, QuantRow, TextRow
from lab.features.quant.lines import QuantLine
from lab.models import catalog
from lab.show import text_doubts, text_setup
from lab.show.cells import TEXT, Cell, Column, stacked
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled
from lab.show.wording import digits, percent, times

MOST_PERPLEXITY_RATIO = 1.02  # of a file that is recommended

ABOUT = (
    "Divergence is the mean Kullback-Leibler divergence (in nats) of the next token's distribution "
    "from the reference's, over the second half of chunks of 512 tokens; 0 is equal. Same top: the "
    "share of these positions at which both find the same token most likely. Intervals (95 %) are "
    "over chunks, those of speed over blocks."
)
LIMITS = (
    "Not measured: how well a model does a task, and what it answers with a chat template or in "
    "long chats."
)
CAPTION = (
    "To the right faster than the reference, down closer to it. Bars are 95 % intervals, the line "
    "is the front. A cross shows the speed if only the bytes read counted. Hollow points are of "
    "disturbed runs. A noise floor near the points is shaded: below it nothing can be told apart."
)


def sections(lines: Sequence[QuantLine]) -> list[Section]:
    """A section for each session; none for speed without quality."""
    shown_sections = []
    for lines_of_session, summary in figures.of_sessions(lines):
        if summary.is_of_caches:
            shown_sections.append(cache_section.section(lines_of_session, summary))
        else:
            shown_sections.append(section(lines_of_session, summary))
    return shown_sections


def section(lines: Sequence[QuantLine], summary: QuantFigures) -> Section:
    runs = figures.runs(lines)
    rows = list(summary.rows.itertuples())
    subject = text_setup.where(runs or lines)
    draw = partial(picture.draw, summary, subject)
    floors = [] if summary.floor is None else [summary.floor]
    tables = {
        "quant": summary.rows.to_dict("records"),
        "quant_texts": summary.by_text.to_dict("records"),
        "quant_floor": floors,
    }
    return Section(
        "Quality and speed",
        f"{summary.n_chunks} chunks, {summary.n_positions:,} positions, against {rows[0].label}",
        "the 95 % interval",
        name="quant",
        question="What does each quantization cost in quality, and what does it gain in speed?",
        answer=answer(summary),
        words=[ABOUT],
        **tabled(COLUMNS, rows),
        sentences=sentences(lines, summary),
        warnings=text_doubts.disturbed(runs),
        parts=by_text(summary),
        pictures=[Picture("quant", CAPTION, draw, (10, 5.2))],
        data=lambda: tables,
    )


def by_bytes(row: QuantRow) -> str:
    return UNKNOWN if math.isnan(row.bandwidth) else times(row.bandwidth)


COLUMNS: Columns[QuantRow] = (
    Column("name", name_of, TEXT),
    Column("MB", lambda row: digits(row.n_bytes / 1e6)),
    Column("divergence", lambda row: cell(row, "kl")),
    Column("same top\n%", lambda row: cell(row, "same", 100, most=100)),
    Column(
        "decode", lambda row: cell(row, "decode", unit=f"x{shown.mark(row.decode_doubts)}")
    ),
    Column(
        "prefill", lambda row: cell(row, "prefill", unit=f"x{shown.mark(row.prefill_doubts)}")
    ),
    Column("by bytes\nalone", by_bytes),
    Column("divergence\n99 %", lambda row: digits(row.kl_99)),
    Column("divergence\nlargest", lambda row: digits(row.kl_max)),
    Column("perplexity", lambda row: digits(row.perplexity)),
    Column("perplexity\nratio", lambda row: cell(row, "perplexity_ratio")),
    Column("memory\nMB", lambda row: digits(row.memory_bytes / 1e6)),
    Column("MB read\nper token", lambda row: digits(row.bytes_per_token / 1e6)),
)


def by_text(summary: QuantFigures) -> list[Section]:
    """Divergence and agreement by kind of text; nothing for one kind."""
    table = summary.by_text
    if table.text.nunique() < 2:
        return []
    return [matrix("divergence and same top by kind of text", table, "text", cell_of_text)]


def cell_of_text(row: TextRow) -> Cell:
    agreement = f"{percent(row.same)} of {plural(row.n_chunks, 'chunk')}"
    return stacked(digits(row.kl), ends(row, "kl"), agreement)


def answer(summary: QuantFigures) -> str:
    """What the files on the front gain and lose."""
    reference, *files = summary.rows.sort_values("kl", na_position="first").itertuples()
    choices = [choice(row) for row in files if row.on_front]
    if choices:
        return f"Against {reference.label}: {'; '.join(choices)}."
    if summary.has_speeds:
        return f"No file is faster than {reference.label}."
    agreements = [f"{row.label} on {percent(row.same)}" for row in files]
    return (
        f"Agreement with {reference.label} on the most likely token: {join_and(agreements)}."
    )


def choice(row: QuantRow) -> str:
    """A file on the front: its size, speed and quality."""
    interval = ends(row, "decode")
    speed = f"{times(row.decode)} as fast"
    if interval:
        speed = f"{speed} ({interval})"
    return (
        f"{row.label} ({digits(row.n_bytes / 1e6)} MB) decodes {speed}, with the same most likely "
        f"token at {percent(row.same)} and {digits(row.perplexity_ratio)} times the perplexity"
    )


def sentences(lines: Sequence[object], summary: QuantFigures) -> list[str]:
    """A recommendation, which files are beaten, what is equal, and the basis of the figures."""
    return [
        *speed_sentences(summary),
        *equality_sentences(summary),
        *floor_sentences(summary),
        *origin_sentences(lines, summary),
        *precision_sentences(summary),
        LIMITS,
    ]


def speed_sentences(summary: QuantFigures) -> list[str]:
    reference, *files = summary.rows.itertuples()
    if not any(row.is_clear for row in files):
        if summary.rows.decode.iloc[1:].isna().all():
            return []
        return [
            "The speeds are unclear: at least half of the runs were disturbed. Measure again."
        ]
    front = [row.label for row in (reference, *files) if row.on_front]
    beaten = [row.label for row in (reference, *files) if row.on_front is False]
    unbeaten = (
        f"No other one is better in both quality and decode speed than {join_and(front)}"
    )
    if not beaten:
        return [recommendation(summary), f"{unbeaten}."]
    verb = "is" if len(beaten) == 1 else "are"
    return [recommendation(summary), f"{unbeaten}; {join_and(beaten)} {verb} beaten in both."]


def recommendation(summary: QuantFigures) -> str:
    """The fastest file on the front whose perplexity is nearly the reference's, and the reason."""
    reference, *files = summary.rows.itertuples()
    limit = percent(MOST_PERPLEXITY_RATIO - 1)
    near = []
    for row in files:
        if row.on_front and row.decode > 1 and row.perplexity_ratio <= MOST_PERPLEXITY_RATIO:
            near.append(row)
    if not near:
        return (
            f"No faster file keeps its perplexity within {limit} of {reference.label}'s: the "
            "choice is between speed and quality."
        )
    best = max(near, key=lambda row: row.decode)
    return (
        f"Recommended: {best.label}, the fastest file whose perplexity is within {limit} of "
        f"{reference.label}'s ({digits(best.perplexity_ratio)} times)."
    )


def equality_sentences(summary: QuantFigures) -> list[str]:
    if summary.equal is None:
        return [
            f"{summary.n_chunks} chunks are too few to tell files apart: at least {FEWEST_CHUNKS} "
            "are needed. Give a longer --prompt, or a larger --budget."
        ]
    if not summary.equal:
        return []
    pairs = join_and([f"{first} and {second}" for first, second in summary.equal])
    return [f"By divergence these cannot be told apart: {pairs}."]


def floor_sentences(summary: QuantFigures) -> list[str]:
    if summary.floor is None:
        return []
    reference, *files = summary.rows.itertuples()
    floor = f"{max(0.0, summary.floor):.2g}"
    sentence = (
        f"The noise floor, {reference.label} against itself with other settings, is {floor}."
    )
    below = []
    for row in files:
        if summary.n_chunks >= FEWEST_CHUNKS and row.kl_low <= summary.floor:
            below.append(row.label)
    if below:
        sentence = f"{sentence} {join_and(below)} cannot be told from {reference.label}."
    return [sentence]


def origin_sentences(lines: Sequence[object], summary: QuantFigures) -> list[str]:
    """What the reference was made from, if it was requantized."""
    reference = summary.rows.iloc[0]
    file = figures.file_of(reference.variant, lines)
    entries = catalog.entries()
    if (
        file is None
        or file.model.source != catalog.REQUANTIZED
        or file.model.name not in entries
    ):
        return []
    kind = entries[file.model.name].quantization
    return [
        f"{reference.label} was made from the {kind} file: what is lost is lost of that, not of "
        "the original."
    ]


def precision_sentences(summary: QuantFigures) -> list[str]:
    if summary.n_chunks < FEWEST_CHUNKS:
        return []
    widths = []
    for row in summary.rows.iloc[1:].itertuples():
        if row.kl > 0 and not math.isnan(row.kl_high):
            widths.append((row.kl_high - row.kl) / row.kl)
    if not widths:
        return []
    width = percent(max(widths))
    return [f"The divergences are known to within {width} or better, on text like this."]
