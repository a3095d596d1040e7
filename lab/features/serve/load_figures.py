"""The figures of loads (a row per request, from it a row per arm, which is a load in all its rounds) and their views.

The steady window of a round is [warmup_s, warmup_s + duration_s] from the start of its plan. A request is inside if it
was due inside (open loop: at its intended time; closed loop: when it was sent), no matter when it ended: the load
continues until it has. Latencies are of successful requests inside; in an open loop TTFT and E2E count from the
intended time. A percentile is a measured value (nearest rank), given only if some request was slower.

Rates of an open loop count what arrived in the window, from all requests. In a closed loop each user always waits for
an answer or pauses after a failure, so N users get N answers per mean time of an answer (Little's law): to count what
ends inside the window would alias with waves of users. A rate's 90 % interval is Student's t over rounds, plus half a
request of a window on either side, because the window cuts answers (tests/bench/closed_loop.py).

Attainment is the share of requests inside that meet every limit; failures and unknown figures miss. Slow requests come
in bunches because they wait in the same queue, so its 95 % interval is wider than a binomial one, by how much batches
of successive requests differ (tests/bench/load_truth.py). Capacity is the highest load at which 90 % meet the limits.

The server is idle while no request is in progress. If it reports the time of each prompt (llama-server does), that
time, which ends with the first token, is prefill; prompts computed together count once. The rest is decode.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lab.core import request_times, stats
from lab.core.lists import grouped, join_and, plural
from lab.core.record import OK, Record
from lab.core.request import CLOSED, STALLED, TIMEOUT, Load, Request, RequestRecord, Slo
from lab.core.request_times import Figures
from lab.core.stats import CONFIDENCE, Interval
from lab.errors import LabError
from lab.runner import as_options
from lab.runner import machine as machines
from lab.show import canvas, table
from lab.show.canvas import COLOURS, GRID, GUIDE, MARKERS, OF_DECODE, OF_PREFILL
from lab.show.section import UNKNOWN, Columns, Context, Kind, Picture, Section, tabled
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NAN, INF = math.nan, math.inf

PAUSE_S, FAILED_S, MOST_GAPS = 0.5, 0.25, 6
"""In a closed loop some user always waits for an answer, or pauses for FAILED_S after a failure (exchange.py). A round
was aborted if nothing happened for longer than PAUSE_S before the end of its window. In an open loop of random arrivals
a pause of MOST_GAPS mean gaps has a probability of 0.2 %."""

SHARE = 0.9  # a load holds from this attainment on
N_BATCHES, FAR = 5, 2
"""Batches of successive requests for the interval of attainment. If all requests stay below half of their limits, or
all exceed twice their limits, bunches of slow requests say nothing about which requests exceed a limit."""


def row(request: Request) -> dict[str, Any]:
    """The row of a request of a load. NaN: unknown; inf: never, or nobody knows when."""
    load, one, events = request.asked.load, request_times.figures(request), request.events
    if load is None:
        raise ValueError("the request is not part of a load")

    def s(ns: float | None) -> float:
        return NAN if ns is None else ns / 1e9

    sent_s, ok = s(one.sent_ns), one.status == OK
    is_unknown = one.failure in (TIMEOUT, STALLED) and one.ended_ns is None
    try:
        date_s = datetime.fromisoformat(one.started_at).timestamp()
    except ValueError:  # a damaged line
        date_s = 0.0
    indices, n_in_window = request_times.generated(request), 0.0
    if one.sent_ns is not None and indices:
        begin_ns = load.warmup_s * 1e9 - one.sent_ns
        inside = [i for i in indices if begin_ns <= events.arrive_ns[i] < begin_ns + load.duration_s * 1e9]
        if events.n_tokens is not None:
            n_in_window = float(sum(events.n_tokens[i] for i in inside))
        else:  # only their sum is known: spread evenly over events
            n_in_window = NAN if one.n_generated is None else one.n_generated * len(inside) / len(indices)
    prompt_ms = one.timings.prompt_ms if one.timings else None
    made = {
        "load": load,
        "level": load.concurrency or load.rate or 0,
        "round": load.round,
        "ok": ok,
        "failure": "" if ok else one.failure or "failed",
        "figures": one,
        "date_s": date_s,
        "sent_s": sent_s,
        "at_s": s(one.sent_ns if one.scheduled_ns is None else one.scheduled_ns),  # when it was due
        "first_s": INF if one.ttft_ns is None else sent_s + one.ttft_ns / 1e9,
        "end_s": INF if is_unknown else sent_s + s(one.e2e_ns if one.ended_ns is None else one.ended_ns),
        "late_s": s(one.delay_ns),
        "n_prompt": table.n_prompt(one) or 0,
        "n_gen": one.asked.n_gen,
        "n_generated": NAN if one.n_generated is None else one.n_generated,
        "n_in_window": n_in_window,
        "is_truncated": one.is_truncated,
        "used": one.used(load.slo) if load.slo else NAN,  # of its limits, at most
    }
    times = {
        "ttft_s": s(one.ttft_due_ns),
        "tpot_s": s(one.tpot_ns),
        "tpot_most_s": s(one.tpot_bounds_ns[1] if one.tpot_bounds_ns else None),
        "e2e_s": NAN if one.is_truncated else s(one.e2e_due_ns),  # the whole answer would take longer
        "stall_s": s(one.longest_stall_ns),
        "prompt_s": NAN if prompt_ms is None or one.ttft_ns is None else prompt_ms / 1e3,
    }
    return made | (times if ok else dict.fromkeys(times, NAN))


def frame(requests: Sequence[Request]) -> pd.DataFrame:
    """A row per request of a session of loads without warm-ups, in the order of levels, of rounds, and of due times.

    `kept`: of a round that was not cut off (or all were). `begin_s`, `length_s` and `over_s`: the steady window, of a
    round that was cut off the part that was measured. A request without a connection has no send time but a date.
    """
    import pandas as pd

    rows = [row(one) for one in requests if not one.asked.warmup]
    if not rows:
        return pd.DataFrame()
    every = pd.DataFrame(rows)
    last_s, parts = every.date_s.max(), []
    for _, own in every.groupby(["level", "round"]):
        load: Load = own.load.iloc[0]
        start_s = (own.date_s - own.sent_s).min()
        at_s = own.at_s.fillna(own.date_s - (start_s if start_s == start_s else own.date_s.min()))
        end_s = own.end_s.fillna(at_s)  # refused at once
        reach_s = max([at_s.max(), *end_s[end_s < INF]])
        silent_s = load.warmup_s + load.duration_s - reach_s
        if load.arrivals == CLOSED:
            is_cut_off = silent_s > PAUSE_S
        else:  # only the last round can have been aborted
            is_last = own.date_s.max() == last_s
            is_cut_off = is_last and silent_s * (load.rate or 0) > MOST_GAPS
        length_s = load.duration_s if not is_cut_off else max(0.0, min(load.duration_s, reach_s - load.warmup_s))
        window = {"begin_s": load.warmup_s, "length_s": length_s, "over_s": load.warmup_s + length_s}
        own = own.assign(at_s=at_s, end_s=end_s, start_s=at_s + own.late_s.fillna(0), is_cut_off=is_cut_off, **window)
        parts.append(own.sort_values("at_s", kind="stable"))
    made = pd.concat(parts, ignore_index=True)
    by_arm = made.groupby("level")
    made["arm"] = by_arm.ngroup()
    made["kept"] = ~made.is_cut_off | by_arm.is_cut_off.transform("all")
    made["inside"] = (made.begin_s <= made.at_s) & (made.at_s < made.over_s)
    return made


def arm_rows(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The figures of each arm of a session's `frame`, by name and unit. NaN or None: unknown."""
    return [_arm(own) for _, own in rows.groupby("arm")] if len(rows) else []


def _arm(every: pd.DataFrame) -> dict[str, Any]:
    import pandas as pd

    rows = every[every.kept]
    load: Load = every.load.iloc[0]
    rounds = [own for _, own in rows.groupby("round")]
    windows = pd.DataFrame([_window(own) for own in rounds])
    inside = rows[rows.inside]
    good = inside[inside.ok]
    failed = [(name, one.error) for name, one in zip(inside.failure, inside.figures, strict=True) if name]
    failures = Counter(name for name, _ in failed)
    is_bound = bool((good.tpot_s.isna() & good.tpot_most_s.notna()).any())
    made: dict[str, Any] = {
        "load": load.label,
        "n_rounds": len(rounds),
        "n_cut_off": int(every[every.is_cut_off]["round"].nunique()),
        "window_s": list(windows.length_s),
        **{f"load_{name}": value for name, value in dataclasses.asdict(load).items() if name != "round"},
        "n": len(inside),
        "n_ok": len(good),
        "failures": dict(failures.most_common()),
        "errors": {name: error for (name, error), _ in reversed(Counter(failed).most_common()) if error},
        "n_failed_outside": int((~rows.ok).sum() - failures.total()),
        "n_truncated": int(good.is_truncated.sum()),
        "n_short": sum(one.is_short is True and not one.is_truncated for one in good.figures),
        "n_warm": sum(one.is_warm is True for one in good.figures),
        "tpot_is_bound": is_bound,
        "stall_s": good.stall_s.max(),
        "late_median_s": inside.late_s.median(),
        "late_most_s": inside.late_s.max(),
        **{name: windows[name].mean() for name in ("in_flight_begin", "in_flight_end", "waiting_end")},
        **dict(zip(("attainment", "attainment_low", "attainment_high"), _attainment(rounds), strict=True)),
    }
    for name in ("ttft", "tpot", "e2e"):
        known = inside["tpot_most_s" if name == "tpot" and is_bound else f"{name}_s"].dropna()
        made |= {f"{name}_n": len(known), f"{name}_median_s": known.median()}
        for percentile in (95, 99):
            value, n_beyond = tail(sorted(known), percentile / 100) or (NAN, None)
            made |= {f"{name}_p{percentile}_s": value, f"{name}_p{percentile}_beyond": n_beyond}
    measured = windows[windows.length_s > 0]
    for name in ("tokens_tps", "requests_ps", "goodput_ps"):  # each with its 90 % interval
        value = half = NAN
        if len(measured) and measured[name].notna().all():
            value = (measured[name] * measured.length_s).sum() / measured.length_s.sum()
            cut = value / (2 * max(1.0, measured.n.mean())) if len(measured) > 1 else 0.0
            half = stats.mean_half_width(list(measured[name]), 0.9) + cut
        low = max(0.0, value - half) if value == value else NAN
        made |= {name: value, f"{name}_low": low, f"{name}_high": value + half}
    made["user_tps"] = 1 / made["tpot_median_s"] if made["tpot_median_s"] > 0 and not is_bound else NAN
    # more in flight at the end than at the start, by over 2 standard deviations of a Poisson count of all arrivals
    growth = (windows.in_flight_end - windows.in_flight_begin).sum()
    made["is_overloaded"] = load.arrivals != CLOSED and bool(growth >= 3 and growth > 2 * math.sqrt(len(inside)))
    shares = windows[["busy_s", "prefill_s"]].sum() / (windows.length_s.sum() or NAN)
    prefill = min(shares.busy_s, shares.prefill_s) if (windows.prefill_s < windows.busy_s + 1e-6).all() else NAN
    return made | {
        "share_prefill": prefill,
        "share_decode": shares.busy_s - prefill,
        "share_idle": 1 - shares.busy_s,
    }


def _window(own: pd.DataFrame) -> dict[str, float]:
    """The figures of an arm in one round. `seconds`: the window; closed loop: spent on its requests, per user."""
    import numpy as np

    load: Load = own.load.iloc[0]
    begin_s, length_s, over_s = own[["begin_s", "length_s", "over_s"]].iloc[0]
    inside, whole = own[own.inside], own.ok & ~own.is_truncated
    busy_s = (inside.end_s - inside.at_s + FAILED_S * ~inside.ok).sum() / (load.concurrency or 1)
    if load.arrivals == CLOSED and 0 < busy_s < INF:
        seconds, tokens, n_whole = busy_s, inside.n_generated[inside.ok], int((whole & own.inside).sum())
    else:
        seconds, tokens = length_s or NAN, own.n_in_window.where(own.ok | own.n_in_window.notna(), 0)
        n_whole = int((whole & (begin_s <= own.end_s) & (own.end_s < over_s)).sum())
    known = own[(own.end_s > begin_s) & (own.start_s < own.end_s) & (own.start_s < over_s)]  # in progress in the window
    at_end = (own.at_s <= over_s) & (over_s < own.end_s)
    return {
        "length_s": length_s,
        "n": len(inside),
        "tokens_tps": tokens.sum(skipna=False) / seconds if length_s else NAN,
        "requests_ps": n_whole / seconds if length_s else NAN,
        "goodput_ps": (inside.used <= 1).sum() / seconds if length_s and load.slo else NAN,
        "in_flight_begin": ((own.at_s <= begin_s) & (begin_s < own.end_s)).sum(),
        "in_flight_end": at_end.sum(),
        "waiting_end": (at_end & (over_s < own.first_s)).sum(),
        "busy_s": _covered(known.start_s, known.end_s, begin_s, over_s),
        "prefill_s": _covered(
            np.maximum(known.start_s, known.first_s - known.prompt_s), known.first_s, begin_s, over_s
        ),
    }


def _covered(begin_s: pd.Series, end_s: pd.Series, low_s: float, high_s: float) -> float:
    """The time in which at least one of the spans is in progress; NaN if a begin is unknown."""
    total_s, reached_s = 0.0, low_s
    for begin, end in sorted(zip(begin_s, end_s.clip(upper=high_s), strict=True)):
        total_s += max(0.0, end - max(begin, reached_s))
        reached_s = max(reached_s, end)
    return NAN if begin_s.isna().any() else total_s


def tail(ordered: Sequence[float], share: float) -> tuple[float, int] | None:
    """The percentile of ordered values by the nearest rank, and the number that exceed it; None if none does."""
    rank = math.ceil(round(share * len(ordered), 9))
    return (ordered[rank - 1], len(ordered) - rank) if 0 < rank < len(ordered) else None


def _attainment(rounds: Sequence[pd.DataFrame]) -> tuple[float, float, float]:
    """The share of requests that met every limit, with its 95 % interval; NaN without limits or requests."""
    used = [own.used[own.inside].dropna() for own in rounds]
    everything = sorted(value for own in used for value in own)
    if not everything:
        return NAN, NAN, NAN
    n = math.ceil(N_BATCHES / len(used))
    batches = [list(own.iloc[i * len(own) // n : (i + 1) * len(own) // n]) for own in used for i in range(n)]
    is_far = everything[-1] * FAR < 1 or everything[0] > FAR
    worst = everything[math.ceil(0.9 * len(everything)) - 1]
    met = [[value <= 1 for value in batch] for batch in batches]
    interval = share_interval(met, [] if is_far else [[value <= worst for value in batch] for batch in batches])
    return sum(map(sum, met)) / len(everything), interval.low, interval.high


def capacity(arms: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The highest load (users or requests/s) at which 90 % of requests meet every limit, as they do at all lower loads.

    `at_least` and `below` are None if no arm shows them; `best` is the highest arm whose measured share reaches 90 %,
    with all lower arms. None without limits.
    """
    measured = [one for one in arms if one["attainment"] == one["attainment"]]
    if not measured:
        return None
    is_closed, holding = measured[0]["load_arrivals"] == CLOSED, True
    at_least = below = best = None
    levels = [one["load_concurrency" if is_closed else "load_rate"] or 0 for one in measured]
    for level, one in zip(levels, measured, strict=True):
        holding = holding and one["attainment"] >= SHARE
        best = level if holding else best
        at_least = level if holding and one["attainment_low"] >= SHARE and not one["is_overloaded"] else at_least
        below = level if below is None and one["attainment_high"] < SHARE else below
    unit = "users" if is_closed else "requests/s"
    low, high, met = (f"{n or 0:g} {unit.removesuffix('s' * (is_closed and n == 1))}" for n in (at_least, below, best))
    if at_least is not None and below is not None:
        sentence = f"between {at_least:g} and {high}"
    elif at_least is not None:
        sentence = (
            f"at least {low} ({'every load met' if at_least == levels[-1] else 'no load clearly missed'} the limits)"
        )
    elif below is not None:
        sentence = f"below {high} ({'no load met' if below == levels[0] else 'no load clearly met'} the limits)"
    else:
        sentence = "unknown, too few requests"
    sentence += f"; {met} met the limits, but not clearly" if best not in (None, at_least) else ""
    return {"unit": unit, "at_least": at_least, "below": below, "best": best, "sentence": sentence}


def sessions(records: Sequence[Record | RequestRecord]) -> list[list[RequestRecord]]:
    """The requests of each session of loads, in order of appearance; of mixed files each kind of load on its own."""
    own = [(one.request.asked.load, one) for one in table.loads_of(records)]
    groups = grouped(own, lambda pair: (pair[1].session, pair[0] and (pair[0].arrivals, pair[0].lengths)))
    return [[record for _, record in group] for group in groups.values()]


def arms(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """One row per arm of each session of loads: rates, latencies, attainment (NaN or None if unknown).

        lab.arms(lab.load(url, concurrency="1,4"))[["load", "tokens_tps", "ttft_median_s", "ttft_p95_s"]]

    `_beyond` is the number of requests that exceed a percentile. features/serve/load_figures.py defines the figures.
    """
    import pandas as pd

    return pd.DataFrame(
        [
            {"session": own[0].session, "url": own[0].endpoint.url, "model": own[0].model} | arm
            for own in sessions(records)
            for arm in arm_rows(frame([record.request for record in own]))
        ]
    )


def rows(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """The compared rows: of runs and of requests that ran alone, and one row per round of a load.

    A round that was cut off has none. `n_prompt` and `n_gen` are 0 if requests of an arm differ in them; see the lever.
    """
    import pandas as pd

    plain = [one for one in records if isinstance(one, Record) or one.request.asked.load is None]
    counted = table.measured(table.runs(plain)) if plain else pd.DataFrame()
    nothing = dict.fromkeys(("decode_tps", "warm", "short", "error", "failure", *table.REQUEST_FIGURES))
    of_rounds = []
    for own in sessions(records):
        (first,) = table.runs(own[:1]).to_dict("records")
        every = frame([record.request for record in own])
        for _, arm in every.groupby("arm") if len(every) else ():
            load, lengths = arm.load.iloc[0], arm.loc[arm.kept, ["n_prompt", "n_gen"]]
            n_prompt, n_gen = (0, 0) if lengths.nunique().max() > 1 else map(int, lengths.iloc[0])
            lever = load.label if n_gen else f"{load.label}, {load.lengths}"
            same = {"n_prompt": n_prompt, "n_gen": n_gen, "lever": lever, "status": OK, "warmup": False}
            for number, one in arm[~arm.is_cut_off].groupby("round"):
                of = one.loc[one.inside, ["ttft_s", "tpot_s", "e2e_s"]].median()
                known = {"ttft_s": of.ttft_s, "tpot_ms": 1e3 * of.tpot_s, "e2e_s": of.e2e_s}
                of_rounds.append({**first, **nothing, **same, "repeat": number, **known})
    parts = [one for one in (counted, pd.DataFrame(of_rounds)) if len(one)]
    return pd.concat(parts, ignore_index=True) if parts else counted


def share_interval(good: Sequence[Sequence[bool]], alike: Sequence[Sequence[bool]] = ()) -> Interval:
    """The interval of a share that was drawn in batches, such as successive requests.

    Clopper-Pearson interval with the effective number of independent draws (Korn & Graubard, Survey Methodology 24,
    1998), which is smaller if batches differ by more than chance. `alike` are batches with the same clustering; the
    stronger clustering counts. ValueError without a draw.
    """
    from scipy.special import betaincinv, stdtrit

    def design_effect(batches: Sequence[Sequence[bool]]) -> float:  # variance of the share over that of single draws
        own, n, n_good = [batch for batch in batches if batch], sum(map(len, batches)), sum(map(sum, batches))
        if len(own) < 2 or n_good in (0, n):
            return 0.0
        share = n_good / n
        between = sum((sum(batch) - share * len(batch)) ** 2 for batch in own) / n
        return len(own) / (len(own) - 1) * between / (share * (1 - share))

    n, n_good = sum(map(len, good)), sum(map(sum, good))
    if not n:
        raise ValueError("there is no draw")
    outside = (1 - CONFIDENCE) / 2
    n_worth, effect = float(n), max(design_effect(good), design_effect(alike))
    if effect > 1:  # known from few batches only
        t_all, t_batches = (stdtrit(df, 1 - outside) for df in (n - 1, sum(map(bool, good)) - 1))
        n_worth *= (t_all / t_batches) ** 2 / effect
    bad_worth = n_worth * (n - n_good) / n
    low = betaincinv(n_worth - bad_worth, bad_worth + 1, outside) if n_good else 0.0
    high = betaincinv(n_worth - bad_worth + 1, bad_worth, 1 - outside) if n_good < n else 1.0
    return Interval(float(low), float(high))


LATE_S = 0.01  # a warning says if the client sent a request more than this later than intended, because it was too busy

IS_FULL = re.compile(r"context (size|length|window)", re.IGNORECASE)
"""In errors of servers for a request that their context cannot hold."""

DEFINITIONS = (
    "TTFT, TPOT, E2E: successful requests due in the window; (n) counts the requests that exceed a percentile. total: "
    "all tokens that arrived in the window; per user: 1 / median TPOT. Intervals: 90 % of rates, 95 % within limits."
)

CAPTIONS = {
    "load": "Latency over load. Points are requests, lines their median and percentiles. Limits are dashed.",
    "timeline": "The requests of the first round: waiting for the first token, then receiving the answer. The steady "
    "window is shaded.",
}

WIDE = 12
"""If the largest value exceeds the smallest median by more than this factor, an axis of latencies is logarithmic."""

MOST_PANELS, MOST_BARS, FEWEST_BARS, MOST_POINTS = 6, 150, 10, 400
"""Maximum number of arms and bars of a timeline, and of points of an arm; of more, evenly spread ones are drawn."""

SPREAD = 0.16  # horizontal spread of an arm's points to each side, as a share of the distance to the next arm
FAILED = (COLOURS[6], COLOURS[3], COLOURS[2], COLOURS[5], COLOURS[7])
"""Colours of classes of failure, by their number."""

Arms = Sequence[SimpleNamespace]


def sections(records: Sequence[Record | RequestRecord]) -> list[Section]:
    """A section for each session of loads, with findings, warnings and pictures."""
    return [_section(own) for own in sessions(records)]


def _section(records: Sequence[RequestRecord]) -> Section:
    rows = frame([record.request for record in records])
    plain = arm_rows(rows)
    arms = [SimpleNamespace(**row) for row in plain]
    first, endpoint, of = records[0], records[0].endpoint, arms[0]
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "a server without a name"
    slots = f", {plural(n_slots, 'slot')}" if n_slots is not None else ""
    title = f"{first.model} on {server}{slots}; client: {machines.label(first.machine)}"
    rounds = plural(max(arm.n_rounds for arm in arms), "round")
    answer, warnings, sentences = answer_of(arms), _warnings(arms, rows), _findings(arms, n_slots)
    said = [answer, *(f"! {line}" for line in warnings), *sentences]
    data: dict[str, Any] = {"session": first.session, "url": endpoint.url, "model": first.model, "arms": plain}
    data |= {"capacity": capacity(plain), "n_slots": n_slots, "sentences": said}
    return Section(
        title,
        answer=answer,
        words=[
            f"{of.load_lengths}; windows of {of.load_duration_s:g} s after {of.load_warmup_s:g} s of warm-up; {rounds}"
        ],
        **tabled(_columns(arms), arms),
        warnings=warnings,
        sentences=sentences,
        notes=[DEFINITIONS],
        pictures=_pictures(arms, rows, f"{title}\n{of.load_lengths}", n_slots),
        data=lambda: {"loads": [data]},
    )


def held_back(ones: Sequence[Figures]) -> list[str]:
    """On answers that arrived in one piece."""
    held = [one.n_events for one in ones if one.came_at_once]
    in_one = (
        f"{len(held)} of {len(ones)} answers arrived in one piece ({span(held)} events): the server or a proxy held "
        "them back until they were complete. Their TTFT and TPOT are unknown."
    )
    return [in_one] if held else []


def span(numbers: Sequence[int]) -> str:
    """The smallest and the largest number."""
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def server_options(record: RequestRecord) -> dict[str, object]:
    """The options that name the server of a request."""
    return {"url": record.endpoint.url, "model": record.model, "api": record.endpoint.api}


def answer_of(arms: Arms) -> str:
    """How much load the server handles: its capacity if there are limits, otherwise what the largest load got."""
    n, good = sum(arm.n for arm in arms), [arm for arm in arms if arm.n_ok]
    if not n:
        return "No request was due in a steady window: try a longer --duration."
    if not good:
        return f"{plural(n, 'request')} failed, and none succeeded."
    if holds := capacity([vars(arm) for arm in arms]):
        limits = Slo(**arms[0].load_slo).label
        return f"Capacity (at least 90 % of requests within {limits}): {holds['sentence']}."

    def measured(name: str, show: Callable[[float], str]) -> str:
        """The figure with the largest load, then in parentheses with the smallest."""
        first, last = getattr(good[0], name), getattr(good[-1], name)
        return show(last) + (f" ({good[0].load}: {show(first)})" if len(good) > 1 and first == first else "")

    arm = good[-1]
    line = f"{'With' if arm.load_arrivals == CLOSED else 'At'} {arm.load} the server "
    if arm.tokens_tps == arm.tokens_tps:
        line += f"generates {measured('tokens_tps', lambda rate: f'{digits(rate)} tokens/s')}"
    else:
        line += f"answers {measured('requests_ps', lambda rate: f'{digits(rate)} requests/s')}"
    line += f"; the median request takes {measured('e2e_median_s', seconds)}" if arm.e2e_n else ""
    line += f" and waits {measured('ttft_median_s', seconds)} for its first token" if arm.ttft_n else ""
    return f"{line}."


def _columns(arms: Arms) -> Columns:
    def latency(name: str, factor: float, arm: SimpleNamespace) -> str:
        values = [getattr(arm, f"{name}_{which}_s") for which in ("median", "p95", "p99")]
        return "\n".join(digits(factor * value) for value in values if value == value) or UNKNOWN

    def rate(name: str, arm: SimpleNamespace) -> str:
        value, low, high = (getattr(arm, f"{name}{end}") for end in ("", "_low", "_high"))
        return digits(value) + (f"\n{digits(low)}-{digits(high)}" if arm.n_rounds > 1 and value == value else "")

    def requests(arm: SimpleNamespace) -> str:
        lines = ["median"]
        for name in ("p95", "p99"):
            counts = [
                getattr(arm, f"{of}_{name}_beyond") or 0 for of in ("ttft", "tpot", "e2e") if getattr(arm, f"{of}_n")
            ]
            lines += [f"{name[1:]} % ({', '.join(map(str, dict.fromkeys(counts)))})"] if any(counts) else []
        return "\n".join(lines)

    def load(arm: SimpleNamespace) -> str:
        marks = ((arm.n - arm.n_ok, "failed"), (arm.n_truncated, "truncated"))
        return "\n".join([arm.load, plural(arm.n, "request"), *(f"{n} {word}" for n, word in marks if n)])

    def within(arm: SimpleNamespace) -> str:
        low, high = arm.attainment_low, arm.attainment_high
        return f"{arm.attainment:.0%}\n{low:.0%}-{high:.0%}" if low == low else UNKNOWN

    bound = ", at most" if any(arm.tpot_is_bound for arm in arms) else ""
    limits: Columns = (("within\nlimits", within), ("goodput\nper s", partial(rate, "goodput_ps")))
    return [
        ("load", load),
        ("requests", requests),
        ("TTFT\ns", partial(latency, "ttft", 1)),
        (f"TPOT\nms{bound}", partial(latency, "tpot", 1e3)),
        ("E2E\ns", partial(latency, "e2e", 1)),
        ("total\ntokens/s", partial(rate, "tokens_tps")),
        *(limits if any(arm.load_slo for arm in arms) else [("requests\nper s", partial(rate, "requests_ps"))]),
        ("per user\ntokens/s", lambda arm: digits(arm.user_tps)),
        ("longest\nstall s", lambda arm: digits(arm.stall_s)),
    ]


def _findings(arms: Arms, n_slots: int | None) -> list[str]:
    """How the server spent its time under each load, what limited it, and what made requests wait."""
    words, busy = [], [arm for arm in arms if arm.share_idle < 1]
    if split := [arm for arm in busy if arm.share_prefill == arm.share_prefill]:
        shares = [[100 * share for share in (arm.share_prefill, arm.share_decode, arm.share_idle)] for arm in split]
        parts = [f"{arm.load}: {a:.0f} / {b:.0f} / {c:.0f} %" for arm, (a, b, c) in zip(split, shares, strict=True)]
        most = min(split, key=lambda arm: arm.share_idle)
        phase = "prefill" if most.share_prefill > most.share_decode else "decode"
        words += [
            f"Share of the time in prefill / decode / idle, from the server's prompt times: {'; '.join(parts)}. With "
            f"{most.load}, {phase} takes most of the time."
        ]
    if rest := [f"{100 * arm.share_idle:.0f} % with {arm.load}" for arm in busy if arm not in split]:
        words += [f"Idle: {join_and(rest)}. Prefill and decode cannot be told apart without the server's prompt times."]
    waits = [f"{n - n_slots} of {arm.load}" for arm in arms if n_slots and (n := arm.load_concurrency or 0) > n_slots]
    words += [f"The server has {plural(n_slots or 0, 'slot')}, so users wait: {', '.join(waits)}."] if waits else []
    if uncounted := [arm.load for arm in arms if arm.n_ok and arm.tokens_tps != arm.tokens_tps]:
        words += [f"The server does not count tokens, so tokens/s is unknown: {join_and(uncounted)}."]
    return words


def _warnings(arms: Arms, rows: pd.DataFrame) -> list[str]:
    """What went wrong under each load, and which loads were not steady."""
    words = []
    for number, arm in enumerate(arms):
        own = rows[(rows.arm == number) & rows.kept]
        examples = {name: f", for example {error}" for name, error in arm.errors.items()}
        failed = [f"{n} {name}{examples.get(name, '')}" for name, n in arm.failures.items()]
        missing = "there are no others, so long requests are missing" if own.is_cut_off.all() else "left out"
        said = [
            (failed, f"{arm.n - arm.n_ok} of {arm.n} requests failed ({'; '.join(failed)})."),
            (
                any(map(IS_FULL.search, arm.errors.values())),
                "the server's context is too short for these requests. Give it a longer one (llama-server: "
                "--ctx-size), or use fewer tokens or users.",
            ),
            (
                arm.n_truncated,
                f"{plural(arm.n_truncated, 'answer')} truncated (finish reason length, but fewer tokens than "
                "requested): the server's context was full. They have no E2E and meet no limits.",
            ),
            (arm.n_failed_outside, f"{arm.n_failed_outside} more failed before or after the window."),
            (not arm.n, "no request was due in the window. Try a longer --duration."),
            (arm.n_cut_off, f"{plural(arm.n_cut_off, 'round')} stopped before the window ended ({missing})."),
            (arm.n_short, f"{plural(arm.n_short, 'answer')} shorter than requested."),
            (arm.n_warm, f"{plural(arm.n_warm, 'request')} had prompt tokens in the server's cache."),
            *((True, line) for line in held_back(list(own.figures[own.inside & own.ok]))),
            (
                arm.is_overloaded,
                f"overloaded. {arm.in_flight_begin:.0f} requests were in flight when the window started and "
                f"{arm.in_flight_end:.0f} when it ended ({arm.waiting_end:.0f} waited for a first token). A longer "
                "window would show longer waits.",
            ),
            (
                arm.late_most_s > LATE_S,
                f"the client was busy and sent requests {seconds(arm.late_median_s)} late (median; at most "
                f"{seconds(arm.late_most_s)}). TTFT and E2E count from the intended time.",
            ),
        ]
        words += [f"{arm.load}: {line}" for holds, line in said if holds]
    return words


def plot_arms(records: Sequence[Record | RequestRecord], name: str = "load", figure: Figure | None = None) -> Figure:
    """A picture of the first session of loads among records: load (latency over it), or timeline.

        lab.plot_arms(lab.load(url, concurrency="1,2,4"), "timeline")

    LabError if there is nothing to draw.
    """
    made = sections(records)
    if not made:
        raise LabError("There is nothing to draw: no request is part of a load.", "Measure some: lab load --url URL")
    drawn = {one.name: one for one in made[0].pictures}
    if name not in drawn:
        raise LabError(f"There is no picture {name!r} of this load.", f"Choose one of: {', '.join(drawn)}")
    figure = figure or canvas.new_figure(drawn[name].size)
    drawn[name].draw(figure)
    return figure


def _pictures(arms: Arms, rows: pd.DataFrame, below: str, n_slots: int | None) -> list[Picture]:
    """The pictures with data."""
    own = [rows[(rows.arm == number) & rows.kept] for number in range(len(arms))]
    drawn: dict[str, Any] = {"timeline": partial(_plot_timeline, arms, own, f"The timeline of requests\n{below}")}
    if any(arm.ttft_n for arm in arms):
        words = f"{below}; {arms[0].load_duration_s:g} s window, {plural(max(arm.n_rounds for arm in arms), 'round')}"
        drawn = {"load": partial(_plot_latency, arms, own, f"Latency over load\n{words}", n_slots), **drawn}
    return [Picture(name, CAPTIONS[name], draw, (11, 7 if name == "timeline" else 5)) for name, draw in drawn.items()]


def _plot_latency(arms: Arms, rows: Sequence[pd.DataFrame], title: str, n_slots: int | None, figure: Figure) -> None:
    """TTFT and TPOT over the load: a point per request, lines for the median, percentiles, limits and slots."""
    slo, is_closed = Slo(**(arms[0].load_slo or {})), arms[0].load_arrivals == CLOSED
    bound = any(arm.tpot_is_bound for arm in arms)
    ttft_label = "TTFT (s)" + ("" if is_closed else " from the intended time")
    panels = [("ttft", "ttft_s", 1.0, ttft_label, slo.ttft_s)]
    if any(arm.tpot_n for arm in arms):
        tpot_label = "TPOT (ms)" + (", at most" if bound else "")
        panels.append(("tpot", "tpot_most_s" if bound else "tpot_s", 1e3, tpot_label, slo.tpot_s))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    levels = [(arm.load_concurrency if is_closed else arm.load_rate) or 0 for arm in arms]
    for ax, (name, column, factor, label, limit_s) in zip(axes, panels, strict=True):
        largest = factor * (limit_s or 0)
        for place, own in enumerate(rows):
            known = sorted(factor * own[column][own.inside].dropna())
            largest = max([largest, *known])
            n = min(len(known), MOST_POINTS)
            drawn = [known[i * (len(known) - 1) // max(1, n - 1)] for i in range(n)]
            xs = [place + SPREAD * (2 * (0.618034 * i % 1) - 1) for i in range(n)]
            style: dict[str, Any] = {"ls": "", "marker": "o", "ms": 4, "alpha": 0.5, "mew": 0, "color": COLOURS[5]}
            ax.plot(xs, drawn, label="requests" if place == 0 else None, **style)
        lines = {"median": "median", "95th percentile": "p95", "99th percentile": "p99"}
        for number, (line, which) in enumerate(lines.items()):
            values = [factor * getattr(arm, f"{name}_{which}_s") for arm in arms]
            if points := [(place, y) for place, y in enumerate(values) if y == y]:
                style = {"color": COLOURS[(0, 1, 3)[number]], "marker": MARKERS[number]}
                ax.plot(*zip(*points, strict=True), lw=1.8, ms=5, label=line, **style)
        medians = [y for arm in arms if (y := factor * getattr(arm, f"{name}_median_s")) > 0]
        if medians and largest > WIDE * min(medians):
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1.08 * largest or 1)
        if limit_s is not None:
            ax.axhline(factor * limit_s, color=GUIDE, ls="-.", lw=1.4)
        ax.set_ylabel(label)
        ax.set_xticks(range(len(arms)), [f"{level:,g}" for level in levels])
        ax.set_xlim(-0.5, len(arms) - 0.5)
        ax.set_xlabel("users" if is_closed else "requests per second")
        n_inside = sum(level <= n_slots for level in levels) if is_closed and n_slots is not None else len(arms)
        if n_inside < len(arms):
            words = f"to the right: more users than the server's {plural(n_slots or 0, 'slot')}"
            ax.axvline(n_inside - 0.5, color=GUIDE, ls=":", lw=1.4, label=words)
    if slo.label:
        axes[0].plot([], [], color=GUIDE, ls="-.", lw=1.4, label=f"limit: {slo.label}")
    for place, arm in enumerate(arms):
        if n := arm.n - arm.n_ok:
            at = {"transform": axes[0].get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 8}
            axes[0].text(place, 1.0, f"{n:,} of {arm.n:,}\nfailed", **at)
    canvas.finish(axes, title, is_apart=True)


def _plot_timeline(arms: Arms, rows: Sequence[pd.DataFrame], title: str, figure: Figure) -> None:
    """A bar per request of the first round of up to 6 loads; a failure is a mark at the time when it was due."""
    n, begin_s = min(len(arms), MOST_PANELS), arms[0].load_warmup_s
    stop_s = begin_s + arms[0].load_duration_s
    chosen = [round(i * (len(arms) - 1) / max(1, n - 1)) for i in range(n)]
    axes = canvas.grid(figure, n, 1 if n == 1 else 2 if n in (2, 4) else 3, sharex=True)
    firsts = [own[own["round"] == own["round"].min()] for own in (rows[i] for i in chosen)]
    classes = dict.fromkeys(name for own in firsts for name in own.failure if name)
    styles = {name: (FAILED[i % len(FAILED)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(classes)}
    last_s = 1.01 * max([stop_s, *(end_s for own in firsts for end_s in own.end_s if end_s < math.inf)])
    for ax, i, own in zip(axes, chosen, firsts, strict=True):
        ax.axvspan(begin_s, stop_s, color=GRID, alpha=0.5, lw=0)
        step = math.ceil(len(own) / MOST_BARS)
        drawn = own[::step].reset_index()
        ended = drawn[drawn.end_s < math.inf]
        first_s = ended[["first_s", "end_s"]].min(axis=1)
        ax.barh(ended.index, first_s - ended.at_s, left=ended.at_s, height=0.9, color=OF_PREFILL, lw=0)
        ax.barh(ended.index, ended.end_s - first_s, left=first_s, height=0.9, color=OF_DECODE, lw=0)
        for name, (colour, marker) in styles.items():
            failed = drawn[drawn.failure == name]
            ax.plot(failed.at_s, failed.index, ls="", ms=5, mew=0, color=colour, marker=marker)
        of_step = f", 1 of {step} drawn" if step > 1 else ""
        ax.set_title(f"{arms[i].load}: {plural(len(own), 'request')}{of_step}", fontsize=10)
        ax.set_xlim(0, last_s)
        ax.set_ylim(max(len(drawn), FEWEST_BARS) - 0.5, -0.5)
        ax.set_yticks([])
    canvas.name_axes(axes, "since the start (s)", "requests, in order")
    wait = "waiting for the first token" + ("" if arms[0].load_arrivals == CLOSED else ", from the intended time")
    for label, colour in ((wait, OF_PREFILL), ("receiving the answer", OF_DECODE), ("steady window (measured)", GRID)):
        axes[0].fill_between([], [], color=colour, alpha=0.5 if colour == GRID else 1, label=label)
    for name, (colour, marker) in styles.items():
        axes[0].plot([], [], ls="", ms=6, mew=0, color=colour, marker=marker, label=f"failed: {name}")
    canvas.finish(axes, title, is_apart=True)


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Loads on servers, a part for each session."""
    first, n_servers = records[0], len({(one.endpoint.url, one.model) for one in records})
    question = f"How much load can {first.model} handle through {first.endpoint.server or 'its server'}?"
    parts = sections(records)
    return [
        Section(
            "Under load",
            name="loads",
            question="How much load can these servers handle?" if n_servers > 1 else question,
            sentences=[part.answer for part in parts],
            parts=parts,
        )
    ]


def again(records: Sequence[RequestRecord]) -> str | None:
    """The command of loads; None if the lengths are not those of an option."""
    known = [one.request.asked.load for one in records if one.request.asked.load]
    first, slo = known[0], known[0].slo
    if (lengths := re.fullmatch(r"(\S+) \+ (\S+) tokens", first.lengths)) is None:
        return None
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s} if slo else {}
    given = {
        "concurrency": sorted({load.concurrency for load in known if load.concurrency is not None}),
        "rate": sorted({load.rate for load in known if load.rate is not None}),
        "prompt_len": lengths[1],
        "gen": lengths[2],
        "warmup": f"{first.warmup_s:g}",
        "duration": f"{first.duration_s:g}",
        "rounds": 1 + max(load.round for load in known),
        "slo": [f"{name}={limit:g}s" for name, limit in limits.items() if limit is not None],
        "seed": first.seed,
    }
    return as_options.line("load", server_options(records[0]) | given)


KINDS = (Kind("loads", lambda one: bool(table.loads_of([one])), chapters, again),)
