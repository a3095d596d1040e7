"""What loads on a server say about the choices of its options, for `lab tune --serve`.

The lab starts the server with the options of a choice, and a closed loop puts load on it. One such load is a *window*.
Its figure is in seconds, so that less is better for every goal: the median TTFT, TPOT or E2E, or the seconds per
generated token of all users together, or per answer within the limits.

Each user always waits for an answer. So N users get N answers per mean time of an answer (Little's law), and the rates
follow from the window's requests alone. To count what arrived inside the window would be wrong here: requests that
began together stay together, and a short window would hold more prefills for one choice and fewer for another.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from lab.analysis import load_figures, loads, tuning
from lab.analysis.load_figures import ArmFigures
from lab.analysis.tuning import CONFIRM, DEFAULT, GOODPUT, SEARCH, THROUGHPUT, TPOT, TTFT, Measured, Tuned
from lab.analysis.tuning_search import Choice, Phase, Timing
from lab.core.lists import grouped
from lab.core.record import Record
from lab.core.request import NOT_SENT, Load, RequestRecord

NONE_GOOD = 0.5
"""Answers within the limits for which a window without any counts, because a ratio needs a number above 0."""

SHORTLY_S = 0.3
"""A little longer than the pause after a failed request (0.25 s)."""


def of_sessions(records: Sequence[Record | RequestRecord]) -> list[Tuned]:
    """The results of all sessions of `lab tune --serve` among the records in which the default was measured."""
    asked = [one for one in records if isinstance(one, RequestRecord) and tuning.tuning_of(one)]
    made = [tuned(own) for own in grouped(asked, lambda one: one.session).values()]
    return [one for one in made if one]


def tuned(records: Sequence[RequestRecord]) -> Tuned | None:
    """The result of one session; None if the default was not measured. Leaves out records of another load."""
    default = next((one for one in records if _load(one).variant == DEFAULT and not one.request.asked.warmup), None)
    if default is None:
        return None
    load = _load(default)
    records = [one for one in records if _key(one) == _key(default) and _load(one).variant]
    *whole, last = grouped(records, lambda one: (_load(one).round, _load(one).variant)).values()
    windows = [one for own in (*whole, *([last] if _is_whole(last) else [])) if (one := measured(own))]
    if not any(one.timing for one in windows if one.variant == DEFAULT and one.stage in (SEARCH, CONFIRM)):
        return None
    confirmed = {one.variant: one.choice for one in windows if one.stage == CONFIRM and one.timing}
    winner = next((own for own in records if _load(own).variant in confirmed.keys() - {DEFAULT}), None)
    assert load.tuning
    tried, gain, n_confirmed, seconds = tuning.results(windows, (Phase(load.tuning.goal),))
    return Tuned(
        session=default.session,
        goal=load.tuning.goal,
        n_prompt=default.request.asked.n_prompt or 0,
        n_gen=load.tuning.n_gen,
        n_users=load.concurrency or 1,
        tried=tried,
        default=default,
        winner=winner,
        choice=confirmed[_load(winner).variant or ""] if winner else (),
        gain=gain,
        n_confirmed=n_confirmed,
        seconds=seconds,
        measured=tuple(windows),
    )


def measured(records: Sequence[RequestRecord]) -> Measured | None:
    """The figure of one window, or why it has none; None if the window was cut off.

    A failed request makes a choice fail, except for goodput, where it only misses the limits.
    """
    load = _load(records[0])
    assert load.tuning
    assert load.variant
    choice, seconds = choice_of(load.variant), None
    error = next((one.request.error for one in records if one.request.failure == NOT_SENT), None)
    if error is None:
        (arm,) = loads.arms([loads.sample(one.request) for one in records])
        if arm.n_cut_off:
            return None
        shown = load_figures.figures_of(arm)
        if shown.failures and (load.tuning.goal != GOODPUT or not shown.n_ok):
            why = "; ".join(shown.errors.get(name, name) for name in shown.failures)
            error = f"{sum(shown.failures.values())} of {shown.n} requests failed: {why}"
        else:
            seconds = _seconds(shown, load.tuning.goal)
            error = None if seconds and seconds > 0 else "its answers are too slow to be measured, or have no tokens"
    timing = Timing(load.round, choice, {load.tuning.goal: seconds}) if seconds and not error else None
    return Measured(load.tuning.stage, load.variant, choice, timing, error)


def _is_whole(records: Sequence[RequestRecord]) -> bool:
    """Whether every user had a request at the end of the window, or shortly before: Ctrl-C loses those in flight."""
    load, samples = _load(records[0]), [loads.sample(one.request) for one in records]
    n_last = sum(one.end_s >= load.warmup_s + load.duration_s - SHORTLY_S for one in samples)
    return n_last >= (load.concurrency or 1) or any(one.request.failure == NOT_SENT for one in records)


def _key(record: RequestRecord) -> tuple[object, ...]:
    """What is equal for all requests of a session."""
    load, tuned = _load(record), tuning.tuning_of(record)
    is_warmup, goal = record.request.asked.warmup, tuned and tuned.goal
    return is_warmup, goal, load.arrivals, load.concurrency, load.rate, load.lengths


def _load(record: RequestRecord) -> Load:
    load = record.request.asked.load
    assert load
    return load


def _seconds(shown: ArmFigures, goal: str) -> float | None:
    """The figure of a goal in seconds; None if unknown."""
    if goal not in (THROUGHPUT, GOODPUT):
        latency = shown.ttft if goal == TTFT else shown.tpot if goal == TPOT else shown.e2e
        return latency.median_s if latency else None
    load, inside = shown.arm.load, shown.arm.inside
    waited_s = sum(one.end_s - one.at_s for one in inside) / (load.concurrency or 1)
    if goal == GOODPUT:
        n_good = sum(load.slo is not None and one.figures.meets(load.slo) for one in inside)
        seconds = waited_s / max(n_good, NONE_GOOD)
    elif any(one.figures.n_generated is None for one in inside):
        return None
    else:
        seconds = waited_s / max(1, sum(one.figures.n_generated or 0 for one in inside))
    return seconds if math.isfinite(seconds) else None


def options_of(choice: Choice) -> str:
    """A choice as options: `(("kv_unified", True), ("ubatch_size", 256))` is `--kv-unified --ubatch-size 256`."""
    parts = []
    for name, value in choice:
        parts.append(("--no-" if value is False else "--") + name.replace("_", "-"))
        parts += [] if isinstance(value, bool) else [f"{value}"]
    return shlex.join(parts) or DEFAULT


def choice_of(options: str) -> Choice:
    """The choice that `options_of` wrote."""
    found: dict[str, Any] = {}
    name = ""
    try:
        words = shlex.split(options)
    except ValueError:  # not written by the lab
        words = options.split()
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_").removeprefix("no_")
            found[name] = not word.startswith("--no-")
        elif name:
            found[name] = int(word) if word.isdecimal() else word
    return tuple(sorted(found.items()))
