"""The figures of loads: a DataFrame with a row per request, and from it a row per arm (a load in all its rounds).

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

The server is idle while no request is in progress. The time of prefill comes from the server (llama-server reports the
time of each prompt, which ends with the first token; prompts computed together count once), or from a load of one user
in the same session, whose TTFT has no queue: these times are added up, and if the sum exceeds the busy time, the shares
are unknown. The rest is decode.

Requests of one round wait in the same queue, so they are not replicates of each other. Sessions are therefore compared
by the medians of rounds, with one row per round, as if each were a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from lab.core import request_times as times
from lab.core import stats
from lab.core.lists import grouped
from lab.core.record import OK, Record
from lab.core.request import CLOSED, POISSON, REPLAY, STALLED, TIMEOUT, Load, Request, RequestRecord
from lab.core.stats import CONFIDENCE, Interval
from lab.show import request_table, table

if TYPE_CHECKING:
    import pandas as pd

NAN, INF = math.nan, math.inf

PAUSE_S, FAILED_S = 0.5, 0.25
"""In a closed loop some user always waits for an answer, or pauses for FAILED_S after a failure (client_process.py). A
round was aborted if nothing happened for longer than PAUSE_S before the end of its window."""

MOST_GAPS = 6
"""In an open loop of random arrivals, a pause of MOST_GAPS mean gaps before the end has a probability of 0.2 %."""

SHARE = 0.9
"""A load holds from this attainment on."""

N_BATCHES, FAR = 5, 2
"""Batches of successive requests for the interval of attainment. If all requests stay below half of their limits, or
all exceed twice their limits, bunches of slow requests say nothing about which requests exceed a limit."""

FEWEST = 8
"""Requests that each half of the windows needs for a comparison of the halves."""

BY_SERVER, BY_ONE_USER, LONGER = "the server's prompt times", "TTFT with 1 user", 1.05
"""What the time of prefill is known from. TTFT of one user gives the prefill of prompts up to LONGER times its own."""


def row(request: Request) -> dict[str, Any]:
    """The row of a request of a load. NaN: unknown; inf: never, or nobody knows when. Its tokens in the window are
    spread evenly over its events where only their sum is known."""
    load, one, events = request.asked.load, times.figures(request), request.events
    if load is None:
        raise ValueError("the request is not part of a load")

    def s(ns: float | None) -> float:
        return NAN if ns is None else ns / 1e9

    sent_s = s(one.sent_ns)
    after_s = s(one.e2e_ns if one.ended_ns is None else one.ended_ns)
    is_unknown = one.failure in (TIMEOUT, STALLED) and one.ended_ns is None
    try:
        date_s = datetime.fromisoformat(one.started_at).timestamp()
    except ValueError:  # a damaged line
        date_s = 0.0
    indices, n_in_window, is_spread = times.generated(request), 0.0, False
    if one.sent_ns is not None and indices:
        begin_ns = load.warmup_s * 1e9 - one.sent_ns
        inside = [i for i in indices if begin_ns <= events.arrive_ns[i] < begin_ns + load.duration_s * 1e9]
        if events.n_tokens is not None:
            n_in_window = float(sum(events.n_tokens[i] for i in inside))
        elif one.n_generated is None:
            n_in_window = NAN
        else:
            n_in_window, is_spread = one.n_generated * len(inside) / len(indices), one.n_generated != len(indices)
    ok, n_prompt = one.status == OK, request_table.n_prompt(one)
    prompt_ms = one.timings.prompt_ms if one.timings else None
    return {
        "load": load,
        "level": load.concurrency or load.rate or 0,
        "round": load.round,
        "is_one_user": load.arrivals == CLOSED and load.concurrency == 1,
        "ok": ok,
        "failure": "" if ok else one.failure or "failed",
        "figures": one,
        "date_s": date_s,
        "sent_s": sent_s,
        "at_s": s(one.sent_ns if one.scheduled_ns is None else one.scheduled_ns),  # when it was due
        "first_s": INF if one.ttft_ns is None else sent_s + one.ttft_ns / 1e9,
        "end_s": INF if is_unknown else sent_s + after_s,
        "late_s": s(one.delay_ns),
        "ttft_s": s(one.ttft_due_ns) if ok else NAN,
        "tpot_s": s(one.tpot_ns) if ok else NAN,
        "tpot_most_s": s(one.tpot_bounds_ns[1] if one.tpot_bounds_ns else None) if ok else NAN,
        "e2e_s": s(one.e2e_due_ns) if ok and not one.is_truncated else NAN,  # the whole answer would take longer
        "stall_s": s(one.longest_stall_ns) if ok else NAN,
        "prompt_s": prompt_ms / 1e3 if prompt_ms is not None and one.ttft_ns is not None and ok else NAN,
        "n_prompt": n_prompt or 0,
        "n_uncached": NAN if n_prompt is None else n_prompt - (one.n_cached or 0),
        "n_gen": one.asked.n_gen,
        "n_generated": NAN if one.n_generated is None else one.n_generated,
        "n_in_window": n_in_window,
        "is_spread": is_spread,
        "is_truncated": one.is_truncated,
        "used": one.used(load.slo) if load.slo else NAN,  # of its limits, at most
    }


def frame(requests: Sequence[Request]) -> pd.DataFrame:
    """A row per request of a session of loads without warm-ups, in the order of arms, of rounds, and of due times.

    `arm` numbers the levels, the smallest first. `kept`: of a round that was not cut off
    (or all were). `begin_s`, `length_s` and `over_s`: the steady window, of a round that was cut off the part that was
    measured. A request that found no connection has no send time: its date gives it.
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
        else:  # only the last round can have been aborted; a replay has no rate
            is_last = own.date_s.max() == last_s
            is_cut_off = is_last and silent_s * (load.rate or 0) > (MOST_GAPS if load.arrivals == POISSON else 1.5)
        length_s = load.duration_s if not is_cut_off else max(0.0, min(load.duration_s, reach_s - load.warmup_s))
        window = {"begin_s": load.warmup_s, "length_s": length_s, "over_s": load.warmup_s + length_s}
        own = own.assign(at_s=at_s, end_s=end_s, start_s=at_s + own.late_s.fillna(0), is_cut_off=is_cut_off, **window)
        parts.append(own.sort_values("at_s", kind="stable"))
    made = pd.concat(parts, ignore_index=True)
    by_arm = made.groupby("level")
    made["arm"] = by_arm.ngroup()
    made["kept"] = ~made.is_cut_off | by_arm.is_cut_off.transform("all")
    made["inside"] = (made.begin_s <= made.at_s) & (made.at_s < made.over_s)
    ones = made[made.kept & made.inside & made.ok & made.is_one_user & (made.n_uncached > 0) & (made.first_s < INF)]
    points = [(0.0, 0.0), *(ones.first_s - ones.start_s).groupby(ones.n_uncached).median().items()]
    is_known = made.ok & (made.first_s < INF) & (made.n_uncached <= LONGER * points[-1][0]) & (len(points) > 1)
    made["alone_s"] = made.n_uncached[is_known].map(lambda n: stats.on_lines(points, n))
    return made


def arm_rows(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The figures of each arm of a session's `frame`, by name and unit. NaN or None: unknown."""
    if rows.empty:
        return []
    return [_arm(own) for _, own in rows.groupby("arm")]


def _arm(every: pd.DataFrame) -> dict[str, Any]:
    import pandas as pd

    rows = every[every.kept]
    load: Load = every.load.iloc[0]
    rounds = [own for _, own in rows.groupby("round")]
    windows = pd.DataFrame([_window(own) for own in rounds])
    inside = rows[rows.inside]
    good = inside[inside.ok]
    is_bound = bool((good.tpot_s.isna() & good.tpot_most_s.notna()).any())
    ttft, tpot, e2e = (_latency(name, rounds, is_bound) for name in ("ttft", "tpot", "e2e"))
    failed = [(name, one.error) for name, one in zip(inside.failure, inside.figures, strict=True) if name]
    failures = Counter(name for name, _ in failed)
    middle_s = (inside.begin_s + inside.over_s) / 2
    first, second = inside.ttft_s[inside.at_s < middle_s].dropna(), inside.ttft_s[inside.at_s >= middle_s].dropna()
    has_drift = min(len(first), len(second)) >= FEWEST and first.median() > 0
    growth = (windows.in_flight_end - windows.in_flight_begin).sum()
    return {
        "load": load.label,
        "n_rounds": len(rounds),
        "n_cut_off": int(every[every.is_cut_off]["round"].nunique()),
        "window_s": list(windows.length_s),
        # more in flight at the end than at the start, by over 2 standard deviations of a Poisson count of all arrivals
        "is_overloaded": load.arrivals != CLOSED and bool(growth >= 3 and growth > 2 * math.sqrt(len(inside))),
        **{f"load_{name}": value for name, value in dataclasses.asdict(load).items() if name != "round"},
        "n": len(inside),
        "n_ok": len(good),
        "failures": dict(failures.most_common()),
        "errors": {name: error for (name, error), _ in reversed(Counter(failed).most_common()) if error},
        "n_failed_outside": int((~rows.ok).sum() - failures.total()),
        "n_truncated": int(good.is_truncated.sum()),
        "n_short": sum(one.is_short is True and not one.is_truncated for one in good.figures),
        "n_warm": sum(one.is_warm is True for one in good.figures),
        **_rate("tokens_tps", windows),
        "is_spread": bool(rows.is_spread.any()),
        **_rate("requests_ps", windows),
        "user_tps": 1 / tpot["tpot_median_s"] if tpot["tpot_median_s"] > 0 and not is_bound else NAN,
        **ttft,
        **tpot,
        "tpot_is_bound": is_bound,
        **e2e,
        "stall_s": good.stall_s.max(),
        "late_median_s": inside.late_s.median(),
        "late_most_s": inside.late_s.max(),
        "wait_s": (good.first_s - good.start_s - good.prompt_s).median(),
        **_attainment([own[own.inside].used for own in rounds] if load.slo else []),
        **_rate("goodput_ps", windows),
        **{name: windows[name].mean() for name in ("in_flight_begin", "in_flight_end", "waiting_end")},
        "drift": second.median() / first.median() if has_drift else NAN,
        **_shares(windows),
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
    busy = _covered(known.start_s, known.end_s, begin_s, over_s)
    by_server, by_alone = (np.maximum(known.start_s, known.first_s - known[by]) for by in ("prompt_s", "alone_s"))
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
        "busy_s": busy,
        "of_server_s": _covered(by_server, known.first_s, begin_s, over_s),
        "of_alone_s": (known.first_s.clip(upper=over_s) - by_alone.clip(lower=begin_s)).clip(lower=0).sum(skipna=False),
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


def _latency(name: str, rounds: Sequence[pd.DataFrame], is_bound: bool) -> dict[str, Any]:
    import pandas as pd

    column = "tpot_most_s" if name == "tpot" and is_bound else f"{name}_s"
    by_round = [own[column][own.inside].dropna() for own in rounds]
    known = pd.concat(by_round)
    made: dict[str, Any] = {f"{name}_n": len(known), f"{name}_median_s": known.median()}
    for percentile in (95, 99):
        value, n_beyond = tail(sorted(known), percentile / 100) or (NAN, None)
        made |= {f"{name}_p{percentile}_s": value, f"{name}_p{percentile}_beyond": n_beyond}
    medians = [own.median() for own in by_round if len(own)]
    return made | {f"{name}_most_s": known.max(), f"{name}_by_round_s": medians}


def _rate(name: str, windows: pd.DataFrame) -> dict[str, Any]:
    """A rate over the windows of all rounds, its 90 % interval, and the rate in each; NaN if a round has none."""
    known = windows[windows.length_s > 0]
    by_round = list(known[name])
    if known.empty or known[name].isna().any():
        return {name: NAN, f"{name}_low": NAN, f"{name}_high": NAN, f"{name}_by_round": []}
    value = (known[name] * known.length_s).sum() / known.length_s.sum()
    cut = value / (2 * max(1.0, known.n.mean())) if len(by_round) > 1 else 0.0
    half = stats.mean_half_width(by_round, 0.9) + cut
    return {
        name: value,
        f"{name}_low": max(0.0, value - half),
        f"{name}_high": value + half,
        f"{name}_by_round": by_round,
    }


def _attainment(used: Sequence[pd.Series]) -> dict[str, float]:
    """The share of requests that met every limit, with its 95 % interval; NaN without limits or requests."""
    everything = sorted(value for own in used for value in own)
    if not everything:
        return {"attainment": NAN, "attainment_low": NAN, "attainment_high": NAN}
    n = math.ceil(N_BATCHES / len(used))
    batches = [list(own.iloc[i * len(own) // n : (i + 1) * len(own) // n]) for own in used for i in range(n)]
    is_far = everything[-1] * FAR < 1 or everything[0] > FAR
    worst = everything[math.ceil(0.9 * len(everything)) - 1]
    met = [[value <= 1 for value in batch] for batch in batches]
    interval = share_interval(met, [] if is_far else [[value <= worst for value in batch] for batch in batches])
    n_good = sum(map(sum, met))
    return {"attainment": n_good / len(everything), "attainment_low": interval.low, "attainment_high": interval.high}


def _shares(windows: pd.DataFrame) -> dict[str, Any]:
    """The shares of the steady windows in prefill, decode and idle, and what the time of prefill is known from."""
    whole_s = windows.length_s.sum()
    if not whole_s:
        return {"share_prefill": NAN, "share_decode": NAN, "share_idle": NAN, "share_by": None}
    busy = windows.busy_s.sum() / whole_s
    for by, name in ((BY_SERVER, "of_server_s"), (BY_ONE_USER, "of_alone_s")):
        if (windows[name] < windows.busy_s + 1e-6).all():
            prefill = min(busy, windows[name].sum() / whole_s)
            return {"share_prefill": prefill, "share_decode": busy - prefill, "share_idle": 1 - busy, "share_by": by}
    return {"share_prefill": NAN, "share_decode": NAN, "share_idle": 1 - busy, "share_by": None}


def capacity(arms: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The highest load at which 90 % of requests meet every limit, as they do at all lower loads.

    In users for closed loops, otherwise in requests per second. `at_least` and `below` are None if no arm shows them;
    `best` is the highest arm whose measured share reaches 90 %, together with all lower arms. None without limits, and
    without closed or open loops.
    """
    measured = [one for one in arms if one["attainment"] == one["attainment"] and one["load_arrivals"] != REPLAY]
    if not measured:
        return None
    is_closed = measured[0]["load_arrivals"] == CLOSED
    levels = [one["load_concurrency" if is_closed else "load_rate"] for one in measured]
    at_least = below = best = None
    holding = True
    for level, one in zip(levels, measured, strict=True):
        holding = holding and one["attainment"] >= SHARE
        best = level if holding else best
        at_least = level if holding and one["attainment_low"] >= SHARE and not one["is_overloaded"] else at_least
        below = level if below is None and one["attainment_high"] < SHARE else below
    unit = "users" if is_closed else "requests/s"
    low, high, met = (f"{n or 0:g} {unit.removesuffix('s' * (is_closed and n == 1))}" for n in (at_least, below, best))
    sentence = "unknown, too few requests"
    if at_least is not None and below is not None:
        sentence = f"between {at_least:g} and {high}"
    elif at_least is not None:
        sentence = (
            f"at least {low} ({'every load met' if at_least == levels[-1] else 'no load clearly missed'} the limits)"
        )
    elif below is not None:
        sentence = f"below {high} ({'no load met' if below == levels[0] else 'no load clearly met'} the limits)"
    sentence += f"; {met} met the limits, but not clearly" if best not in (None, at_least) else ""
    return {"unit": unit, "at_least": at_least, "below": below, "best": best, "sentence": sentence}


def sessions(records: Sequence[Record | RequestRecord]) -> list[list[RequestRecord]]:
    """The requests of each session of loads, in order of appearance; of mixed files each kind of load on its own."""

    def key(record: RequestRecord) -> tuple[object, ...]:
        load = record.request.asked.load
        return record.session, load and (load.arrivals, load.lengths)

    return list(grouped(request_table.loads_of(records), key).values())


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
    counted = request_table.measured(table.runs(plain)) if plain else pd.DataFrame()
    nothing = dict.fromkeys(("decode_tps", "warm", "short", "error", "failure", *request_table.FIGURES))
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

    n, n_good = sum(map(len, good)), sum(map(sum, good))
    if not n:
        raise ValueError("there is no draw")
    outside = (1 - CONFIDENCE) / 2
    n_worth, effect = float(n), max(_design_effect(good), _design_effect(alike))
    if effect > 1:  # known from few batches only
        t_all, t_batches = (stdtrit(df, 1 - outside) for df in (n - 1, sum(map(bool, good)) - 1))
        n_worth *= (t_all / t_batches) ** 2 / effect
    bad_worth = n_worth * (n - n_good) / n
    low = betaincinv(n_worth - bad_worth, bad_worth + 1, outside) if n_good else 0.0
    high = betaincinv(n_worth - bad_worth + 1, bad_worth, 1 - outside) if n_good < n else 1.0
    return Interval(float(low), float(high))


def _design_effect(batches: Sequence[Sequence[bool]]) -> float:
    """The design effect: the variance of a share over that of independent draws; 0 if unknown."""
    own, n, n_good = [batch for batch in batches if batch], sum(map(len, batches)), sum(map(sum, batches))
    if len(own) < 2 or n_good in (0, n):
        return 0.0
    share = n_good / n
    between = sum((sum(batch) - share * len(batch)) ** 2 for batch in own) / n
    return len(own) / (len(own) - 1) * between / (share * (1 - share))
