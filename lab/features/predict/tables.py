"""What predictions show: a ranking of devices, or the explanation of each device."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import shown
from lab.core.figures import DECODE_RATE, E2E, TTFT
from lab.core.lists import grouped, join_and, plural
from lab.core.stats import Range
from lab.features.predict import wording
from lab.features.predict.slo import Slo
from lab.models import devices
from lab.roofline.prediction import HERE, Prediction, expected_or_middle
from lab.show.cells import LONG_TEXT, PROMPT_TOKENS, TEXT, Cell, Column, of_figure, stacked
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.show.wording import digits, seconds

CERTAIN = 0.95  # the chance from which limits are said to be kept
MOST_ROWS = 9  # lines below the head of a ranking: this machine, devices, sentences on them
TOO_WIDE = 10.0  # a range of rates whose ends are further apart is not ranked
MOST_RIVALS = 3  # that may be as fast as the fastest are named
EQUAL = 1.15  # a ratio up to which two setups are about as fast, if its range holds 1
HOW_TO_SEE_MORE = "Limits, memory, basis and sources: --details"
NO_PREFILL = "Prefill is not predicted: the peak is not known."


@dataclass(frozen=True)
class Display:
    """What is shown of predictions. `is_named`: the user named devices, or a kind of them."""

    slo: Slo | None = None
    is_ranking: bool = False
    shows_all: bool = False
    details: bool = False
    is_named: bool = False


def sections(
    rows: Sequence[Prediction], shown: Display, specs: Sequence[str] = ()
) -> list[Section]:
    """A ranking for each prompt length, setups side by side, or the explanation of one.

    `specs` are the models as they were asked for.
    """
    sections_of_rows = sections_of(rows, shown)
    last = sections_of_rows[-1]
    sentences = [*last.sentences, *wording.approximations(rows)]
    if shown.details:
        sentences += wording.chosen_quantizations(rows, specs)
    elif not shown.is_ranking or shown.is_named:
        sentences.append(HOW_TO_SEE_MORE)
    return [*sections_of_rows[:-1], dataclasses.replace(last, sentences=sentences)]


def sections_of(rows: Sequence[Prediction], shown: Display) -> list[Section]:
    if shown.is_ranking:
        by_length = grouped(rows, lambda row: row.n_prompt)
        return [ranking(rows_of_length, shown) for rows_of_length in by_length.values()]
    by_setup = grouped(rows, lambda row: (row.name, row.label))
    explained = [
        explanation(rows_of_setup, shown.slo, shown.details)
        for rows_of_setup in by_setup.values()
    ]
    if len(by_setup) == 1:
        return explained
    compared = side_by_side(list(by_setup.values()), shown.slo)
    return [compared, *explained] if shown.details else [compared]


# Setups side by side


def side_by_side(setups: Sequence[Sequence[Prediction]], slo: Slo | None) -> Section:
    """Several devices or models: how many times as fast the fastest is, and a row for each."""
    rows = [row for rows_of_setup in setups for row in rows_of_setup]
    labels = list(dict.fromkeys(row.label for row in rows))
    is_one_model = len(labels) == 1
    rows.sort(key=lambda row: row.n_prompt)
    return Section(
        labels[0] if is_one_model else "Side by side",
        f"answers of {rows[0].n_gen:,} tokens{at_once(rows[0])}",
        answer=faster(setups),
        **tabled(side_columns(is_one_model), rows),
        sentences=[
            *wording.assumptions(rows),
            *([] if slo is None else [kept_limits(rows, slo)]),
        ],
    )


def side_columns(is_one_model: bool) -> Columns[Prediction]:
    return (
        PROMPT_TOKENS,
        *ranking_columns(is_one_model, with_prefill_range=True),
    )


def faster(setups: Sequence[Sequence[Prediction]]) -> str:
    """The answer: the fastest setup over each other one, for the longest prompt that all fit."""
    firsts = [rows_of_setup[0] for rows_of_setup in setups]
    predicted = [row for row in firsts if row.is_known]
    if len(predicted) < len(firsts):
        return fastest(firsts, False)
    best = min(predicted, key=lambda row: row.e2e.shown_s)
    clauses = []
    for row in predicted:
        if row is not best:
            clauses.append(times_as_fast(best, row))
    return f"{capital(name_beside(best, predicted))} {'; it '.join(clauses)}."


def times_as_fast(best: Prediction, row: Prediction) -> str:
    """The ratio of both requests and its range, as if their errors were independent."""
    ratio = row.e2e.shown_s / best.e2e.shown_s
    spread = math.hypot(width_of(best.e2e_s), width_of(row.e2e_s)) / 2
    low = ratio * math.exp(-spread)
    high = ratio * math.exp(spread)
    name = name_beside(row, [best, row])
    if low < 1 and ratio < EQUAL:
        return f"is about as fast as {name} ({digits(low)} to {digits(high)} times)"
    return f"is {digits(ratio)}x as fast as {name} ({digits(low)} to {digits(high)})"


def name_beside(row: Prediction, setups: Sequence[Prediction]) -> str:
    """What distinguishes a setup from others: the device, else the model."""
    if len({setup.name for setup in setups}) > 1:
        return (
            f"the {row.name}"
            if len({setup.label for setup in setups}) == 1
            else (f"{row.label} on {row.name}")
        )
    return row.label


def width_of(ends: Range) -> float:
    """The logarithm of the ratio of both ends."""
    return math.log(ends[1] / ends[0])


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


# Cells


def range_cell(
    row: Prediction, expected: float | None, ends: Range, doubts: Sequence[str] = ()
) -> Cell:
    """The expected figure with a mark of doubt, and its range below it."""
    if row.shortage is not None or math.isnan(ends[0]):
        return Cell(UNKNOWN)
    low = digits(ends[0])
    high = digits(ends[1])
    figure = f"{digits(expected_or_middle(expected, ends))}{shown.mark(doubts)}"
    return stacked(figure, "" if low == high else f"{low}-{high}")


def limit_cell(row: Prediction, limit: float | None, scale: float = 1.0) -> str:
    if row.shortage is not None or limit is None:
        return UNKNOWN
    return digits(scale * limit)


def tpot_cell(row: Prediction) -> Cell:
    """The time per token in milliseconds."""
    expected_ms = None if row.token.expected_s is None else 1e3 * row.token.expected_s
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
    if row.e2e.expected_s is None:
        return f"{low} to {high}"
    return f"{seconds(row.e2e.expected_s)} ({low} to {high})"


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


def ranking(rows: Sequence[Prediction], shown: Display) -> Section:
    """This machine, and devices that people choose from or the fastest ones, in a table."""
    first = rows[0]
    labels = list(dict.fromkeys(row.label for row in rows))
    is_one_model = len(labels) == 1
    visible = visible_rows(rows, shown)
    hidden = [row for row in rows if row not in visible]
    return Section(
        labels[0] if is_one_model else "Several models",
        f"{plural(first.n_prompt, 'token')} in, {first.n_gen:,} out{at_once(first)}"
        f"{memory_of_all(rows)}",
        words=[fastest(visible, is_one_model)],
        **tabled(ranking_columns(is_one_model), visible),
        sentences=ranking_sentences(rows, hidden, shown),
    )


def memory_of_all(rows: Sequence[Prediction]) -> str:
    """The memory that one model needs on most devices; "" for several models."""
    if len({row.label for row in rows}) > 1:
        return ""
    needed = statistics.median_low(row.needed_bytes for row in rows)
    return f"; needs {digits(needed / 1e9)} GB with its cache"


def visible_rows(rows: Sequence[Prediction], shown: Display) -> list[Prediction]:
    """The rows of a ranking that are shown; without a kind that was asked for, ordinary devices.

    This machine comes first.
    """
    if shown.shows_all:
        return list(rows)
    here = [row for row in rows if row.name == HERE]
    ranked = [row for row in rows if row.name != HERE and is_ranked(row)]
    if not shown.is_named:
        ordinary = devices.ordinary()
        ranked = [row for row in ranked if row.name in ordinary]
        ranked.sort(key=lambda row: (row.shortage is not None, ordinary.index(row.name)))
    n_sentences = sum([shown.slo is not None, rows[0].users > 1, shown.is_named])
    n_ranked = MOST_ROWS - len(here) - n_sentences
    return [*here, *ranked[:n_ranked]] or list(rows[:n_ranked])


def is_ranked(row: Prediction) -> bool:
    """Whether a range of rates is narrow enough to have a place."""
    return width_of(row.tps) <= math.log(TOO_WIDE)


def ranking_columns(
    is_one_model: bool, with_prefill_range: bool = False
) -> Columns[Prediction]:
    return (
        Column("name", lambda row: row.name, TEXT),
        Column("model", lambda row: UNKNOWN if is_one_model else row.label),
        of_figure(
            TTFT,
            lambda row: line_cell(
                row, row.prefill.expected_s, row.prefill_s, with_prefill_range
            ),
        ),
        of_figure(DECODE_RATE, lambda row: line_cell(row, row.tps_expected, row.tps)),
        of_figure(E2E, lambda row: line_cell(row, row.e2e.expected_s, row.e2e_s)),
        Column("keeps\nlimits", chance_cell),
        Column("note", short_note if with_prefill_range else ranking_note, LONG_TEXT),
    )


def short_note(row: Prediction) -> str:
    return "does not fit" if row.shortage is not None else ranking_note(row)


def line_cell(
    row: Prediction, expected: float | None, ends: Range, with_range: bool = True
) -> str:
    """The expected figure and its range in one line, with a mark of doubt."""
    cell = range_cell(row, expected, ends, row.doubts)
    return f"{cell.value} ({cell.below[0]})" if cell.below and with_range else cell.value


def ranking_note(row: Prediction) -> str:
    if row.shortage is not None:
        return wording.misfit(row.shortage) or ""
    return "measured" if row.is_measured else ""


def fastest(rows: Sequence[Prediction], is_one_model: bool) -> str:
    """The answer of a ranking."""
    first = min(rows, key=prediction_order)
    if first.shortage is not None:
        return "No device here can run this."
    name = first.name if is_one_model else f"{first.name} with {first.label}"
    if not first.is_known:
        return f"The fastest in decode is {name}: {decode_rate(first)}. {NO_PREFILL}"
    answer = f"The fastest here is {name}: {request_time(first)} for the whole request."
    rivals = [row for row in rows if row is not first and may_be_as_fast(row, first)]
    if not rivals:
        return answer
    names = [row.name if is_one_model else f"{row.name} with {row.label}" for row in rivals]
    named = names[:MOST_RIVALS]
    if len(names) > len(named):
        named.append(f"{len(names) - len(named)} more")
    return f"{answer} By their ranges {join_and(named)} may be as fast."


def may_be_as_fast(row: Prediction, first: Prediction) -> bool:
    """Whether a request may be done by the time that the fastest one is expected to need."""
    expected_s = first.e2e.shown_s
    return row.shortage is None and row.is_known and row.e2e_s[0] <= expected_s


def prediction_order(row: Prediction) -> tuple[bool, bool, float]:
    """What fits comes first, then what is known, the fastest at the top."""
    request_s = row.e2e.shown_s
    return row.shortage is not None, math.isnan(request_s), request_s


def ranking_sentences(
    rows: Sequence[Prediction], hidden: Sequence[Prediction], shown: Display
) -> list[str]:
    sentences = []
    if shown.slo is not None:
        sentences.append(kept_limits(rows, shown.slo))
    if hidden:
        sentences.append(not_shown(hidden))
    if rows[0].users > 1:
        sentences.append(
            "TTFT is that of one prompt at a time; tokens/s is the rate of each user, if a step of"
            " several reaches the same share of the datasheet's figures as that of one."
        )
    if shown.details and not all(row.is_measured for row in rows):
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
    n_small = sum(row.shortage is not None for row in hidden)
    n_wide = sum(row.shortage is None and not is_ranked(row) for row in hidden)
    counts = []
    if len(hidden) > n_small + n_wide:
        counts.append(plural(len(hidden) - n_small - n_wide, "other"))
    if n_small:
        counts.append(f"{n_small} with too little memory")
    if n_wide:
        counts.append(f"{n_wide} with wide ranges")
    return f"Not shown: {', '.join(counts)} (--all)."


def at_once(row: Prediction) -> str:
    if row.users == 1:
        return ""
    return f", {row.users} users at once"


# An explanation


def explanation(
    rows: Sequence[Prediction], slo: Slo | None = None, details: bool = True
) -> Section:
    """For each prompt length the ranges; then what others measured, and what was assumed.

    With details also the limits, the memory and the basis.
    """
    first = rows[0]
    limit = "the ceilings of its kernels" if first.name == HERE else "the datasheet's peak"
    sentences = wording.evidence(rows)
    for row in rows:
        for clause in wording.beyond(row.extrapolations):
            sentences.append(f"{plural(row.n_prompt, 'token')}: {clause}.")
    rows_without_room = [row for row in rows if row.room is not None]
    if rows_without_room:
        sentences.append(wording.reads_again(rows_without_room[0]))
    if slo is not None:
        sentences.append(f"keeps limits: the probability of {slo.label}.")
    if details:
        sentences.append(wording.basis(first))
    return Section(
        f"{first.model.name} {first.model.quantization or ''} on {first.about}{at_once(first)}",
        f"columns named limit: the least possible time, at {limit}" if details else "",
        answer=longest_request(rows[-1]),
        **tabled(EXPLANATION_COLUMNS if details else SHORT_COLUMNS, rows),
        sentences=sentences,
    )


def explanation_note(row: Prediction) -> str:
    if row.shortage is not None:
        return f"does not fit: {wording.misfit(row.shortage)}"
    return ", ".join(row.doubts)


def memory_cell(row: Prediction) -> str:
    """GB that the weights, the cache of the whole request and the buffers need."""
    return digits(row.needed_bytes / 1e9)


SHORT_COLUMNS: Columns[Prediction] = (
    PROMPT_TOKENS,
    of_figure(TTFT, lambda row: line_cell(row, row.prefill.expected_s, row.prefill_s)),
    of_figure(DECODE_RATE, lambda row: line_cell(row, row.tps_expected, row.tps)),
    of_figure(E2E, lambda row: line_cell(row, row.e2e.expected_s, row.e2e_s)),
    Column("memory\nGB", memory_cell, priority=-1),
    Column("keeps\nlimits", chance_cell),
    Column("note", explanation_note, LONG_TEXT),
)
EXPLANATION_COLUMNS: Columns[Prediction] = (
    PROMPT_TOKENS,
    Column(
        "prefill s\nexpected",
        lambda row: range_cell(row, row.prefill.expected_s, row.prefill_s),
    ),
    Column("TPOT ms\nexpected", tpot_cell),
    Column("tokens/s\nin decode", lambda row: range_cell(row, row.tps_expected, row.tps)),
    Column("E2E s\nexpected", lambda row: range_cell(row, row.e2e.expected_s, row.e2e_s)),
    Column("prefill s\nlimit", lambda row: limit_cell(row, row.prefill.limit_s)),
    Column("TPOT ms\nlimit", lambda row: limit_cell(row, row.token.limit_s, 1e3)),
    Column("memory\nGB", memory_cell, priority=-1),
    Column("keeps\nlimits", chance_cell),
    Column("note", explanation_note, LONG_TEXT),
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
