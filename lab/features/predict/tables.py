"""What predictions show: a ranking of devices, or the explanation of each device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lab.core import shown
from lab.core.lists import grouped, plural
from lab.features.predict import wording
from lab.features.predict.slo import Slo
from lab.roofline.prediction import HERE, Prediction, Span, expected_or_middle
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.show.wording import digits, seconds

CERTAIN = 0.95  # the chance from which limits are said to be kept
MOST_ROWS = 15  # devices of a ranking that are shown, with this machine
NO_PREFILL = "Prefill is not predicted: the peak is not known."


def sections(
    rows: Sequence[Prediction],
    slo: Slo | None,
    is_ranking: bool,
    shows_all: bool,
    specs: Sequence[str] = (),
) -> list[Section]:
    """A ranking for each prompt length, or an explanation of each model on each device.

    `specs` are the models as they were asked for.
    """
    chosen = wording.chosen_quantizations(rows, specs)
    shown_sections = sections_of(rows, slo, is_ranking, shows_all)
    last = dataclasses.replace(
        shown_sections[-1], sentences=[*shown_sections[-1].sentences, *chosen]
    )
    return [*shown_sections[:-1], last]


def sections_of(
    rows: Sequence[Prediction], slo: Slo | None, is_ranking: bool, shows_all: bool
) -> list[Section]:
    if is_ranking:
        most = None if shows_all else MOST_ROWS
        by_length = grouped(rows, lambda row: row.n_prompt)
        return [ranking(rows_of_length, slo, most) for rows_of_length in by_length.values()]
    by_setup = grouped(rows, lambda row: (row.name, row.label))
    return [explanation(rows_of_setup, slo) for rows_of_setup in by_setup.values()]


# Cells


def range_cell(
    row: Prediction, expected: float | None, ends: Span, doubts: Sequence[str] = ()
) -> str:
    """The expected figure with a mark of doubt, and its range below it."""
    if row.shortage is not None or math.isnan(ends[0]):
        return UNKNOWN
    low = digits(ends[0])
    high = digits(ends[1])
    figure = f"{digits(expected_or_middle(expected, ends))}{shown.mark(doubts)}"
    if low == high:
        return figure
    return f"{figure}\n{low}-{high}"


def limit_cell(row: Prediction, limit: float | None) -> str:
    if row.shortage is not None or limit is None or math.isnan(limit):
        return UNKNOWN
    return digits(limit)


def tpot_cell(row: Prediction) -> str:
    """The time per token in milliseconds."""
    expected_ms = None if row.tpot_expected_s is None else 1e3 * row.tpot_expected_s
    return range_cell(row, expected_ms, (1e3 * row.tpot_s[0], 1e3 * row.tpot_s[1]))


def chance_cell(row: Prediction) -> str:
    """Whether the limits are kept, or how probable that is."""
    if row.chance is None or math.isnan(row.chance):
        return UNKNOWN
    if row.chance >= CERTAIN:
        return "yes"
    if row.chance <= 1 - CERTAIN:
        return "no"
    return f"{100 * row.chance:.0f} %"


def request_time(row: Prediction) -> str:
    """The time of the whole request and its range in words."""
    low = seconds(row.e2e_s[0])
    high = seconds(row.e2e_s[1])
    if low == high:
        return low
    if row.e2e_expected_s is None:
        return f"{low} to {high}"
    return f"{seconds(row.e2e_expected_s)} ({low} to {high})"


def decode_rate(row: Prediction) -> str:
    """The tokens per second of each user and their range in words."""
    low = digits(row.tps[0])
    high = digits(row.tps[1])
    if low == high:
        return f"{low} tokens/s"
    if row.tps_expected is None:
        return f"{low} to {high} tokens/s"
    return f"{digits(row.tps_expected)} tokens/s ({low} to {high})"


# A ranking


def ranking(
    rows: Sequence[Prediction], slo: Slo | None = None, most: int | None = None
) -> Section:
    """The fastest `most` rows and this machine in a table, and what is not shown."""
    first = rows[0]
    labels = list(dict.fromkeys(row.label for row in rows))
    is_one_model = len(labels) == 1
    visible = list(rows[:most])
    hidden = list[Prediction]()
    for row in rows[len(visible) :]:
        if row.name == HERE:
            visible.append(row)
        else:
            hidden.append(row)
    return Section(
        labels[0] if is_one_model else "Several models",
        f"{plural(first.n_prompt, 'token')} in, {first.n_gen:,} out{at_once(first)}",
        words=[fastest(rows, is_one_model)],
        **tabled(ranking_columns(is_one_model), visible),
        sentences=ranking_sentences(rows, hidden, slo),
    )


def ranking_columns(is_one_model: bool) -> Columns:
    return (
        ("name", lambda row: row.name),
        ("model", lambda row: UNKNOWN if is_one_model else row.label),
        (
            "TTFT\ns",
            lambda row: range_cell(row, row.prefill_expected_s, row.prefill_s, row.doubts),
        ),
        (
            "decode\ntokens/s",
            lambda row: range_cell(row, row.tps_expected, row.tps, row.doubts),
        ),
        ("E2E\ns", lambda row: range_cell(row, row.e2e_expected_s, row.e2e_s, row.doubts)),
        ("memory\nGB", lambda row: digits(row.needed_bytes / 1e9)),
        ("keeps\nlimits", chance_cell),
        ("note", ranking_note),
    )


def ranking_note(row: Prediction) -> str:
    if row.shortage is not None:
        return wording.misfit(row.shortage) or ""
    if row.is_measured:
        return "measured"
    if row.name != HERE and row.memory_bytes is None:
        return "memory size unknown"
    return ""


def fastest(rows: Sequence[Prediction], is_one_model: bool) -> str:
    """The answer of a ranking."""
    first = rows[0]
    if first.shortage is not None:
        return "No device here can run this."
    name = first.name if is_one_model else f"{first.name} with {first.label}"
    if not first.is_known:
        return f"The fastest in decode is {name}: {decode_rate(first)}. {NO_PREFILL}"
    return f"The fastest is {name}: {request_time(first)} for the whole request."


def ranking_sentences(
    rows: Sequence[Prediction], hidden: Sequence[Prediction], slo: Slo | None
) -> list[str]:
    sentences = []
    if slo is not None:
        sentences.append(kept_limits(rows, slo))
    if hidden:
        sentences.append(not_shown(hidden))
    if rows[0].users > 1:
        sentences.append(
            "TTFT is that of one prompt at a time; tokens/s is the rate of each user. It assumes"
            " that a step of several users reaches the same share of the datasheet's figures as"
            " that of one."
        )
    if not all(row.is_measured for row in rows):
        sentences.append(wording.basis_of_datasheets())
    return sentences


def kept_limits(rows: Sequence[Prediction], slo: Slo) -> str:
    n_kept = 0
    for row in rows:
        if row.is_known and row.chance is not None and row.chance >= CERTAIN:
            n_kept += 1
    certainty = f"{100 * CERTAIN:.0f} % certainty"
    return f"{n_kept} of {len(rows)} keep {slo.label} with at least {certainty}."


def not_shown(hidden: Sequence[Prediction]) -> str:
    """How many rows are left out, by reason."""
    n_small = 0
    n_slower = 0
    n_unknown = 0
    for row in hidden:
        if row.is_known:
            n_slower += 1
        elif row.shortage is not None:
            n_small += 1
        else:
            n_unknown += 1
    counts = []
    if n_slower:
        counts.append(f"{n_slower} slower")
    if n_small:
        counts.append(f"{n_small} with too little memory")
    if n_unknown:
        counts.append(f"{n_unknown} without a known peak, so prefill is not predicted")
    return f"Not shown: {', '.join(counts)}. To see them: --all"


def at_once(row: Prediction) -> str:
    if row.users == 1:
        return ""
    return f", {row.users} users at once"


# An explanation


def explanation(rows: Sequence[Prediction], slo: Slo | None = None) -> Section:
    """For each prompt length the limits, the ranges and the memory; then their basis."""
    first = rows[0]
    limit = "the ceilings of its kernels" if first.name == HERE else "the datasheet's peak"
    sentences = []
    for row in rows:
        for clause in wording.beyond(row.extrapolations):
            sentences.append(f"{plural(row.n_prompt, 'token')}: {clause}.")
    rows_without_room = [row for row in rows if row.room is not None]
    if rows_without_room:
        sentences.append(wording.reads_again(rows_without_room[0]))
    if slo is not None:
        sentences.append(f"keeps limits: the probability of {slo.label}.")
    sentences.append(wording.basis(first))
    return Section(
        f"{first.model.name} {first.model.quantization or ''} on {first.about}{at_once(first)}",
        f"columns named limit: the least possible time, at {limit}",
        answer=longest_request(rows[-1]),
        **tabled(EXPLANATION_COLUMNS, rows),
        sentences=sentences,
    )


def explanation_note(row: Prediction) -> str:
    if row.shortage is not None:
        return f"does not fit: {wording.misfit(row.shortage)}"
    return ", ".join(row.doubts)


EXPLANATION_COLUMNS: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    (
        "prefill s\nexpected",
        lambda row: range_cell(row, row.prefill_expected_s, row.prefill_s),
    ),
    ("TPOT ms\nexpected", tpot_cell),
    ("tokens/s\nin decode", lambda row: range_cell(row, row.tps_expected, row.tps)),
    ("E2E s\nexpected", lambda row: range_cell(row, row.e2e_expected_s, row.e2e_s)),
    ("prefill s\nlimit", lambda row: limit_cell(row, row.prefill_limit_s)),
    ("TPOT ms\nlimit", lambda row: limit_cell(row, 1e3 * row.tpot_limit_s)),
    ("memory\nGB", lambda row: digits(row.needed_bytes / 1e9)),
    ("keeps\nlimits", chance_cell),
    ("note", explanation_note),
)


def longest_request(row: Prediction) -> str:
    """The answer for the longest prompt: its time, and how much of it is prefill.

    Without a known peak it is the rate of decode.
    """
    request = f"A request of {plural(row.n_prompt, 'token')} with {row.n_gen:,} back"
    if row.shortage is not None:
        return f"{request} does not fit: {wording.misfit(row.shortage)}."
    if not row.is_known:
        return (
            f"After {plural(row.n_prompt, 'token')} decode is {decode_rate(row)}. {NO_PREFILL}"
        )
    prefill_square = row.prefill_s[0] * row.prefill_s[1]
    share = math.sqrt(prefill_square / (row.e2e_s[0] * row.e2e_s[1]))
    return f"{request} takes {request_time(row)}: about {100 * share:.0f} % of it is prefill."
