"""The results of `lab quant --cache` as a section: harm by depth beside memory and speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lab.core import shown
from lab.core.lists import join_and, plural
from lab.features.quant import cache_picture, caches, depth, figures
from lab.features.quant.cells import cell, ends, matrix, name_of
from lab.features.quant.figures import FEWEST_CHUNKS, QuantFigures, QuantRow
from lab.features.quant.lines import QualityLine, QuantLine
from lab.show import text_doubts, text_setup
from lab.show.cells import TEXT, Cell, Column, stacked
from lab.show.section import Columns, Picture, Section, tabled
from lab.show.wording import digits, percent, times

if TYPE_CHECKING:
    import pandas as pd

ABOUT = (
    "Divergence is the mean Kullback-Leibler divergence (in nats) of the next token's distribution "
    "from the reference's, 0 is equal; same top is the share of positions at which both find the "
    "same token most likely. A range of positions is a bin of depth. Intervals (95 %) are over "
    "texts, those of speed over blocks. Speeds are times the reference's."
)
LIMITS = (
    "Not measured: how well a model does a task. A type that harms this model little can harm "
    "another one much."
)
CAPTION = (
    "Left: up is more harm, over the depth of the bins of positions. Right: above 1 is faster than "
    "the reference. Bars are 95 % intervals. Below the shaded noise floor nothing can be told "
    "apart."
)


class DepthRow(Protocol):
    """A row of `depth.by_depth`: the columns that sentences read."""

    span: str
    end: int
    kl: float
    same: float


class DecidingRow(Protocol):
    """A row of `depth.deciding`: the columns of its table."""

    ratio: float
    probability: float
    reference_probability: float


SURE_GROWTH = 1.0  # the interval of a growth must not contain it


def section(lines: Sequence[QuantLine], summary: QuantFigures) -> Section:
    """The section of a session."""
    runs = figures.runs(lines)
    rows = list(summary.rows.itertuples())
    by_depth = depth.by_depth(lines)
    deciding = depth.deciding(lines)
    subject = text_setup.where(runs or lines)
    title = answer(summary, by_depth)
    draw = partial(cache_picture.draw, summary, by_depth, subject)
    tables = {
        "quant": summary.rows.to_dict("records"),
        "quant_depths": by_depth.to_dict("records"),
        "quant_deciding": deciding.to_dict("records"),
        "quant_floor": [] if summary.floor is None else [summary.floor],
    }
    deepest = by_depth.end.max()
    return Section(
        "Cache types by depth",
        f"{plural(summary.n_chunks, 'text')} of {deepest:,} tokens, against {cache_of(rows[0])}",
        "the 95 % interval",
        name="quant",
        question="What does a smaller KV cache cost in quality, and what does it gain?",
        answer=title,
        words=[ABOUT],
        **tabled(columns(by_depth), rows),
        sentences=sentences(lines, summary, deciding),
        warnings=text_doubts.disturbed(runs),
        parts=parts(summary, by_depth, deciding),
        pictures=[Picture("quant", CAPTION, draw, (10, 5.2))],
        data=lambda: tables,
    )


# The tables


def columns(by_depth: pd.DataFrame) -> Columns[QuantRow]:
    """The memory, the share of equal tokens in each bin, and the speed after the deepest."""
    table: list[Column[QuantRow]] = [
        Column("name", name_of, TEXT),
        Column("KB a\nposition", lambda row: digits(row.position_bytes / 1e3)),
    ]
    for span, of_span in by_depth.groupby("span", sort=False):
        by_label = {row.label: row for row in of_span.itertuples()}
        table.append(Column(f"same top %\n{span}", partial(same_top_cell, by_label)))
    deepest = by_depth.end.max()
    table += [
        Column(f"decode\nat {deepest:,}", lambda row: speed_cell(row, "decode")),
        Column("divergence", lambda row: cell(row, "kl")),
        Column(f"prefill\nof {deepest:,}", lambda row: speed_cell(row, "prefill")),
        Column("perplexity\nratio", lambda row: cell(row, "perplexity_ratio")),
        Column("memory\nMB", lambda row: digits(row.memory_bytes / 1e6)),
    ]
    return table


def same_top_cell(rows: dict[str, object], row: QuantRow) -> Cell | str:
    in_bin = rows.get(row.label)
    return "" if in_bin is None else cell(in_bin, "same", 100, most=100)


def speed_cell(row: object, phase: str) -> Cell:
    return cell(row, phase, unit=f"x{shown.mark(getattr(row, f'{phase}_doubts'))}")


def parts(
    summary: QuantFigures, by_depth: pd.DataFrame, deciding: pd.DataFrame
) -> list[Section]:
    """The tables that only details have: by depth, of tokens that decide, by file and type."""
    tables = [
        matrix("divergence by depth", by_depth, "span", lambda row: cell(row, "kl")),
        matrix("decode after a number of tokens", by_depth, "end", decode_cell),
        matrix("prefill of a number of tokens", by_depth, "end", prefill_cell),
    ]
    if not deciding.empty:
        tables.append(
            matrix("probability of the tokens that decide", deciding, "text", deciding_cell)
        )
    return [*tables, *by_file(summary)]


def decode_cell(row: object) -> Cell:
    return speed_cell(row, "decode")


def prefill_cell(row: object) -> Cell:
    return speed_cell(row, "prefill")


def deciding_cell(row: DecidingRow) -> Cell:
    interval = ends(row, "ratio")
    change = f"{digits(row.ratio)} times" + (f" ({interval})" if interval else "")
    return stacked(
        percent(row.probability), f"of {percent(row.reference_probability)}", change
    )


def by_file(summary: QuantFigures) -> list[Section]:
    """Divergence by file and cache type, if there are several of both."""
    rows = summary.rows
    names = rows.label.str.rpartition(", ")
    rows = rows.assign(label=names[0], kind=names[2])
    if rows.label.nunique() < 2 or rows.kind.nunique() < 2:
        return []
    return [matrix("divergence by file and type", rows, "kind", lambda row: cell(row, "kl"))]


# The sentences


def answer(summary: QuantFigures, by_depth: pd.DataFrame) -> str:
    """What each type saves, harms and gains, in whichever direction."""
    reference, *rows = summary.rows.itertuples()
    choices = [choice(row, reference, summary, by_depth) for row in rows]
    return f"Against {cache_of(reference)}: {'; '.join(choices)}."


def cache_of(row: QuantRow) -> str:
    """Such as `a cache of f16`, or a file and its cache."""
    return str(row.label) if "," in row.label else f"a cache of {row.label}"


def choice(
    row: QuantRow, reference: QuantRow, summary: QuantFigures, by_depth: pd.DataFrame
) -> str:
    deep = by_depth[by_depth.label == row.label].iloc[-1]
    words = [f"{row.label} {saving(row, reference)}{harm(deep, summary)}"]
    speed = speed_words(row)
    if speed:
        words.append(speed)
    return ", and ".join(words)


def saving(row: QuantRow, reference: QuantRow) -> str:
    """The memory of the cache against the reference's; "" for equal or unknown ones."""
    share = row.position_bytes / reference.position_bytes
    if math.isnan(share) or share == 1:
        return ""
    return f"needs {percent(share)} of the memory, "


def harm(deep: DepthRow, summary: QuantFigures) -> str:
    """What the deepest bin shows."""
    place = f"at {deep.span} tokens"
    same = f"same top {percent(deep.same)}"
    if deep.kl == 0:
        return f"changes nothing at all ({same})"
    if summary.floor is not None and deep.kl <= summary.floor:
        return (
            f"changes nothing that can be measured here down to {deep.end:,} tokens ({same})"
        )
    if deep.same == 1:
        return f"changes no most likely token {place} (divergence {digits(deep.kl)})"
    every = round(1 / (1 - deep.same))
    if every < 2:
        return f"changes {percent(1 - deep.same)} of the most likely tokens {place}"
    return f"changes every {ordinal(every)} most likely token {place}"


def ordinal(n: int) -> str:
    """2nd, 3rd, 14th."""
    last = "th"
    if n // 10 % 10 != 1:
        last = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n:,}{last}"


def speed_words(row: QuantRow) -> str:
    """How fast it decodes after the longest text; "" if that was not measured."""
    if math.isnan(row.decode):
        return ""
    if not row.is_clear:
        return "its speed is unclear (disturbed runs)"
    if math.isnan(row.decode_low):
        return f"decodes about {times(row.decode)} as fast (too few blocks for an interval)"
    interval = f"{digits(row.decode_low)}-{digits(row.decode_high)}"
    if row.decode_low <= 1 <= row.decode_high:
        return f"no difference in decode can be told ({times(row.decode)}, {interval})"
    return f"decodes {times(row.decode)} as fast ({interval})"


def sentences(
    lines: Sequence[QuantLine], summary: QuantFigures, deciding: pd.DataFrame
) -> list[str]:
    """What happens with the depth and to the tokens that decide, the front, the build's changes of
    the cache, and the basis of the figures."""
    scored = figures.candidates(lines)
    return [
        *growth_sentences(lines),
        *deciding_sentences(deciding),
        *front_sentences(summary),
        *changes_of_cache(list(scored.values())),
        *floor_sentences(summary),
        *few_sentences(summary),
        LIMITS,
    ]


def growth_sentences(lines: Sequence[QuantLine]) -> list[str]:
    """Whether the harm grows with the depth."""
    labels = depth.labels_of(lines)
    grown = []
    shrunk = []
    equal = []
    for variant, line in figures.candidates(lines).items():
        ratio = depth.growth(line)
        if ratio is None or ratio.estimate == 1:
            continue
        label = labels[variant]
        interval = f"{digits(ratio.low)}-{digits(ratio.high)}"
        if ratio.low > SURE_GROWTH:
            grown.append(f"{label} {times(ratio.estimate)} ({interval})")
        elif ratio.high < SURE_GROWTH:
            shrunk.append(f"{label} {times(ratio.estimate)} ({interval})")
        else:
            equal.append(label)
    sentences_of_growth = []
    if grown:
        sentences_of_growth.append(
            f"The divergence grows from the first bin to the last: {join_and(grown)}."
        )
    if shrunk:
        sentences_of_growth.append(
            f"The divergence falls from the first bin to the last: {join_and(shrunk)}."
        )
    if equal:
        sentences_of_growth.append(
            f"No growth of the harm with the depth can be sentences_of_growth of {join_and(equal)}."
        )
    return sentences_of_growth


def deciding_sentences(deciding: pd.DataFrame) -> list[str]:
    """The types that make the tokens that decide less probable."""
    if deciding.empty:
        return ["The texts with tokens that decide are longer than -p, and were left out."]
    less = []
    for row in deciding.itertuples():
        if row.ratio_high < 1:
            less.append(f"{row.label} in {row.text} {digits(row.ratio)} times")
    n_tokens = int(deciding.groupby("text").n_tokens.first().sum())
    basis = (
        f"of the {n_tokens} tokens that decide (arguments of calls, numbers of a reasoning)"
    )
    if less:
        return [f"The probability {basis} falls: {join_and(less)}."]
    return [f"No change of the probability {basis} can be told."]


def front_sentences(summary: QuantFigures) -> list[str]:
    rows = list(summary.rows.itertuples())
    if not any(row.is_clear for row in rows[1:]):
        return []
    front = [row.label for row in rows if row.on_front]
    beaten = [row.label for row in rows if row.on_front is False]
    sentence = (
        "No other one is better in quality, memory and decode speed at once than "
        f"{join_and(front)}"
    )
    if beaten:
        return [f"{sentence}; {join_and(beaten)} can be left out."]
    return [f"{sentence}."]


def changes_of_cache(lines: Sequence[QualityLine]) -> list[str]:
    """What the build does to the cache, and which layers have none."""
    changes = [caches.changes(line.cache_log) for line in lines]
    changes.append(caches.layers_with_cache(lines[0].model))
    return list(filter(None, dict.fromkeys(changes)))


def floor_sentences(summary: QuantFigures) -> list[str]:
    if summary.floor is None:
        return []
    label = summary.rows.label.iloc[0]
    floor = f"{max(0.0, summary.floor):.2g}"
    return [f"The noise floor, {label} against itself with other settings, is {floor}."]


def few_sentences(summary: QuantFigures) -> list[str]:
    if summary.n_chunks >= FEWEST_CHUNKS:
        return []
    return [
        f"{plural(summary.n_chunks, 'text')} are few: the intervals are wide. Give a longer "
        "--prompt, a smaller -p or a larger --budget."
    ]
