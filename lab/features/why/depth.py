"""The part of the depth of the context, or of the length of a prompt."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lab.core import phases
from lab.core.lists import plural
from lab.core.record import DECODE, Record
from lab.core.stats import mean_half_width
from lab.features.why.figure import Figure
from lab.features.why.parts import (
    DEPTH,
    FEWEST,
    FROM_RECORDS,
    LENGTH,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.features.why.readers import programs

GEN = 24  # tokens that a trial generates
USUAL_LENGTH = 128  # of a trial's prompt, if no figure has a position
NEAR_TOKENS = 16
NEAR_SHARE = 0.05
"""Steps this near to a position stand for it."""

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
    """The part of depth: from records that have both positions, otherwise to be measured."""
    if pair.fast.is_prefill:
        return length(pair)
    name = DEPTH
    lacking = [letter for letter, figure in pair.in_order if figure.position is None]
    if lacking:
        return unknown(name, unknown_reason(pair, lacking))
    positions = [figure.position or 0.0 for _, figure in pair.sides]
    if are_near(positions):
        return equal(name)
    places = [f"{letter} at {figure.position or 0:,.0f}" for letter, figure in pair.sides]
    reason = f"{', '.join(places)} (mean position)"
    law = from_records(pair, positions, records)
    if law is None:
        changes = {"prompt_len": prompt_length(pair.slow)}
        return unknown(name, reason, differs=True, changes=changes)
    log, half, n_sessions = law
    return GapPart(name, log, half, f"{FROM_RECORDS}, {plural(n_sessions, 'session')}", reason)


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
        return unknown(LENGTH, reason)
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


def unknown_reason(pair: Pair, lacking: Sequence[str]) -> str:
    """What is known of the contexts: a text may have only the tokens that were processed."""
    reasons = list[str]()
    for letter, figure in pair.in_order:
        if letter not in lacking:
            reasons.append(f"{letter} at {figure.position or 0:,.0f}")
        elif figure.n_prompt is None:
            reasons.append(f"{letter} does not name the length of its context")
        else:
            where = ""
            if figure.source == programs.SERVER:
                where = " (the log's line with `stop processing` has all)"
            reasons.append(
                f"{letter} at least {figure.n_prompt:,}, the processed tokens, besides those from "
                f"the cache{where}"
            )
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
