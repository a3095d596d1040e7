"""The part of the depth of the context, or of the length of a prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lab.core import cost, phases
from lab.core.lists import plural
from lab.core.record import DECODE, Record
from lab.core.stats import mean_half_width
from lab.errors import LabError
from lab.features.why.figure import Figure
from lab.features.why.parts import (
    DEPTH,
    FEWEST,
    FROM_RECORDS,
    LENGTH,
    PREDICTED,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.models import catalog, synthetic

GEN = 24  # tokens that a trial generates
USUAL_LENGTH = 128  # of a trial's prompt, if no figure has a position
NEAR_TOKENS = 16
NEAR_SHARE = 0.05
"""Steps this near to a position stand for it."""

SHARES_OF_BYTES = (0.55, 3.1)
"""The logarithm of a token's time at some depth over that of its bytes: 80 % of published pairs.

Chosen on 36 pairs of depths of 15 setups; of 58 other pairs it holds 86 %.
"""

EQUAL_TOKENS = 4
EQUAL_SHARE = 0.02
"""Positions this near to each other count as equal."""


def prompt_length(figure: Figure) -> int:
    """The prompt with which GEN tokens are at a figure's mean position; for prefill its length."""
    position = figure.position
    if position is None:
        return USUAL_LENGTH
    if figure.is_prefill:
        return max(1, round(position))
    return max(1, round(position - GEN / 2))


def depth(pair: Pair, records: Sequence[Record]) -> GapPart:
    """The part of depth: from records that have both positions, by bytes, or to be measured."""
    if pair.fast.is_prefill:
        return length(pair)
    lacking = [letter for letter, figure in pair.in_order if figure.position is None]
    reason = positions_in_words(pair)
    positions = [figure.least_position for _, figure in pair.sides]
    if None in positions:
        return unknown(DEPTH, reason, lacking=lacking)
    places = [position or 0.0 for position in positions]
    if are_near(places):
        return unknown(DEPTH, reason, lacking=lacking) if lacking else equal(DEPTH)
    deeper = pair.letters[0] if places[0] > places[1] else pair.letters[1]
    if set(lacking) - {deeper}:  # the one that looks shallow may be as deep
        return unknown(DEPTH, reason, lacking=lacking)
    law = from_records(pair, places, records)
    if law:
        log, half, n_sessions = law
        how = f"{FROM_RECORDS}, {plural(n_sessions, 'session')}"
        return GapPart(DEPTH, log, half, how, reason)
    if not lacking:
        changes = {"prompt_len": prompt_length(pair.slow)}
        return unknown(DEPTH, reason, differs=True, changes=changes)
    log_of_bytes = by_bytes(pair, places)
    if log_of_bytes is None:
        return unknown(DEPTH, reason, lacking=lacking)
    log = log_of_bytes * statistics.fmean(SHARES_OF_BYTES)
    half = abs(log_of_bytes) * (SHARES_OF_BYTES[1] - SHARES_OF_BYTES[0]) / 2
    return GapPart(DEPTH, log, half, f"{PREDICTED}, 80 % range", reason)


def by_bytes(pair: Pair, positions: Sequence[float]) -> float | None:
    """The logarithm of the ratio of bytes that a step reads at both positions, the slower over the
    faster; None if the catalog does not have the model.
    """
    for figure in (pair.fast, pair.slow):
        try:
            spec = catalog.parse(figure.model or "", or_shape=True)
        except LabError:
            continue
        if spec.entry is None:
            continue
        quantization = spec.quantization or spec.entry.usual_quantization
        model = synthetic.model_of(spec.entry, quantization)
        steps = [cost.step(model, 1, round(position), 1) for position in positions]
        if steps[0] and steps[1]:
            return math.log(steps[1].n_bytes / steps[0].n_bytes)
    return None


def length(pair: Pair) -> GapPart:
    """The part of the size of a prefill, and of the tokens before it."""
    sizes = [figure.n_prompt for _, figure in pair.in_order]
    starts = [figure.depth for _, figure in pair.in_order]
    pieces = list[str]()
    for letter, figure in pair.in_order:
        size = "an unknown number of" if figure.n_prompt is None else f"{figure.n_prompt:,}"
        start = "an unknown number" if figure.depth is None else f"{figure.depth:,}"
        pieces.append(f"{letter} {size} new tokens after {start}")
    reason = ", ".join(pieces)
    if None in sizes or None in starts:
        lacking = [
            letter
            for letter, figure in pair.in_order
            if None in (figure.n_prompt, figure.depth)
        ]
        return unknown(LENGTH, reason, lacking=lacking)
    if are_near(sizes) and are_near(starts):
        return equal(LENGTH)
    changes = {}
    if starts == [0, 0]:
        changes = {"prompt_len": prompt_length(pair.slow)}
    return unknown(LENGTH, reason, differs=True, changes=changes)


def are_near(positions: Sequence[float | None]) -> bool:
    """Whether two known positions count as equal."""
    first, second = (position or 0.0 for position in positions)
    return abs(first - second) <= max(EQUAL_TOKENS, EQUAL_SHARE * max(first, second))


def positions_in_words(pair: Pair) -> str:
    """The mean positions: a text may have only the tokens that were processed, a bound."""
    reasons = list[str]()
    for letter, figure in pair.in_order:
        if figure.position is not None:
            reasons.append(f"{letter} at {figure.position:,.0f}")
        elif figure.n_prompt is None:
            reasons.append(f"{letter} does not name the length of its context")
        else:
            reasons.append(f"{letter} at least {figure.n_prompt:,}, besides cached ones")
    return "; ".join(reasons)


def from_records(
    pair: Pair, positions: Sequence[float], records: Sequence[Record]
) -> tuple[float, float, int] | None:
    """The logarithm of the ratio of both positions, half of its range, and the number of sessions.

    A session of one setup counts if it has each position in FEWEST runs. None if there is none.
    """
    names = {record.model.name for record in (*pair.fast.records, *pair.slow.records)}
    first_by_session = dict[object, list[float]]()
    second_by_session = dict[object, list[float]]()
    for record in distinct([*pair.fast.records, *pair.slow.records, *records]):
        if record.model.name not in names:
            continue
        key = (record.session, record.settings, record.model.name, record.model.quantization)
        first_by_session.setdefault(key, []).extend(log_time_near(record, positions[0]))
        second_by_session.setdefault(key, []).extend(log_time_near(record, positions[1]))
    logs = list[float]()
    halves = list[float]()
    for session, first in first_by_session.items():
        second = second_by_session[session]
        if min(len(first), len(second)) >= FEWEST:
            logs.append(statistics.fmean(second) - statistics.fmean(first))
            halves += [mean_half_width(first), mean_half_width(second)]
    if not logs:
        return None
    half = math.hypot(*halves) / len(logs)
    if len(logs) >= FEWEST:
        half = mean_half_width(logs)
    return statistics.fmean(logs), half, len(logs)


def distinct(records: Sequence[Record]) -> list[Record]:
    """The records, each once."""
    by_id = dict(zip(map(id, records), records, strict=True))
    return list(by_id.values())


def log_time_near(record: Record, position: float) -> list[float]:
    """The logarithm of a run's time per token near a position; nothing for too few steps there."""
    steps = record.run.steps
    places = list[int]()
    for index, kind in enumerate(steps.kind):
        if kind == DECODE and index > 0:  # the steps that itl_ns counts
            places.append(steps.n_past[index])
    near = max(NEAR_TOKENS, NEAR_SHARE * position)
    times_ns = list[int]()
    for place, latency_ns in zip(places, phases.itl_ns(record.run), strict=True):
        if abs(place - position) <= near:
            times_ns.append(latency_ns)
    if len(times_ns) < FEWEST or statistics.median(times_ns) <= 0:
        return []
    return [math.log(statistics.median(times_ns))]
