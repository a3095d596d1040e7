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
import itertools
import math
import re
from collections.abc import Sequence
from functools import partial
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lab.core import request_times, stats
from lab.core.lists import grouped, plural
from lab.core.record import OK, Record
from lab.core.request import CLOSED, TIMEOUT, Load, Request, RequestRecord, Slo
from lab.core.request_times import Figures
from lab.core.stats import CONFIDENCE
from lab.errors import LabError
from lab.runner import as_options, machine as machines
from lab.show import canvas, table
from lab.show.canvas import COLOURS, GRID, GUIDE, MARKERS, OF_DECODE, OF_PREFILL
from lab.show.section import UNKNOWN, Context, Kind, Picture, Section, tabled
from lab.show.table import or_nan
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NAN = math.nan
INF = math.inf

PAUSE_S = 0.5
FAILED_S = 0.25
MOST_GAPS = 6
"""In a closed loop some user always waits for an answer, or pauses for FAILED_S after a failure (exchange.py). A round
was aborted if nothing happened for longer than PAUSE_S before the end of its window. In an open loop of random arrivals
a pause of MOST_GAPS mean gaps has a probability of 0.2 %."""

SHARE = 0.9  # a load holds from this attainment on
N_BATCHES = 5
FAR = 2
"""Batches of successive requests for the interval of attainment. If all requests stay below half of their limits, or
all exceed twice their limits, bunches of slow requests say nothing about which requests exceed a limit."""


def row(request: Request) -> dict[str, Any]:
    """The row of a request of a load. NaN: unknown; inf: never, or nobody knows when."""
    one = request_times.figures(request)
    events = request.events
    load = request.asked.load
    assert load is not None
    s = partial(or_nan, factor=1e-9)
    sent_s = or_nan(one.sent_ns, 1e-9)
    ok = one.status == OK
    indices = request_times.generated(request)
    begin_ns = 1e9 * load.warmup_s - (one.sent_ns or 0)
    spread = (
        NAN if ok and one.n_generated is None else (one.n_generated or 0) / max(1, len(indices))
    )
    n_tokens = events.n_tokens or [spread] * len(
        events.kind
    )  # without a count for each event: evenly
    is_unknown = (
        one.failure == TIMEOUT and one.sent_ns is None
    )  # nobody noted when it gave up to connect
    window_ns = range(round(begin_ns), round(begin_ns + 1e9 * load.duration_s))
    times = {
        "ttft_s": s(one.ttft_due_ns),
        "tpot_s": s(one.tpot_bounds_ns and one.tpot_bounds_ns[1]),  # at most
        "e2e_s": NAN
        if one.is_truncated
        else s(one.e2e_due_ns),  # the whole answer would take longer
        "stall_s": s(one.longest_stall_ns),
        "prompt_s": or_nan(one.timings.prompt_ms, 1e-3)
        if one.timings and one.ttft_ns is not None
        else NAN,
    }
    return {
        "load": load,
        "level": load.concurrency or load.rate or 0,
        "round": load.round,
        "ok": ok,
        "failure": None if ok else one.failure or "failed",
        "error": one.error,
        "figures": one,
        "started_at": one.started_at,
        "sent_s": sent_s,
        "at_s": s(one.sent_ns if one.scheduled_ns is None else one.scheduled_ns),  # when it was due
        "first_s": INF if one.ttft_ns is None else sent_s + s(one.ttft_ns),
        "end_s": INF
        if is_unknown
        else sent_s + s(one.e2e_ns if one.ended_ns is None else one.ended_ns),
        "late_s": s(one.delay_ns),
        "begin_s": load.warmup_s,
        "over_s": load.warmup_s + load.duration_s,
        "n_prompt": table.n_prompt(one) or 0,
        "n_gen": one.asked.n_gen,
        "n_generated": or_nan(one.n_generated, 1),
        "n_in_window": sum(n_tokens[i] for i in indices if events.arrive_ns[i] in window_ns),
        "is_truncated": one.is_truncated,
        "is_bound": ok and one.tpot_ns is None and one.tpot_bounds_ns is not None,
        "used": one.used(load.slo) if load.slo else NAN,  # of its limits, at most
        **(times if ok else dict.fromkeys(times, NAN)),
    }


def frame(requests: Sequence[Request]) -> pd.DataFrame:
    """A row per request of a session of loads, in the order of levels, of rounds, and of due times.

    `kept`: of a round that was not cut off (or all were). `begin_s`, `length_s` and `over_s`: the steady window, of a
    round that was cut off the part that was measured. A request without a connection has no send time but a date.
    """
    import pandas as pd

    rows = pd.DataFrame(map(row, requests))
    dates = pd.to_datetime(
        rows.started_at, errors="coerce", utc=True, format="ISO8601"
    )  # NaT: a damaged line
    date_s = (dates - pd.Timestamp(0, tz="UTC")).dt.total_seconds().fillna(0)
    of_round = [rows.level, rows["round"]]
    began_s = (date_s - rows.sent_s).fillna(date_s).groupby(of_round).transform("min")
    rows["at_s"] = rows.at_s.fillna(date_s - began_s)
    rows["end_s"] = rows.end_s.fillna(rows.at_s)  # refused at once
    rows["start_s"] = rows.at_s + rows.late_s.fillna(0)
    reach_s = (
        rows[["at_s", "end_s"]].replace(INF, NAN).max(axis=1).groupby(of_round).transform("max")
    )
    silent_s = rows.over_s - reach_s
    is_last = date_s.groupby(of_round).transform("max") == date_s.max()
    is_closed = (
        rows.load.iloc[0].arrivals == CLOSED
    )  # of rates only the last round can have been aborted
    rows["is_cut_off"] = (
        silent_s > PAUSE_S if is_closed else is_last & (silent_s * rows.level > MOST_GAPS)
    )
    rows["over_s"] = rows.over_s.where(~rows.is_cut_off, reach_s.clip(rows.begin_s, rows.over_s))
    rows["length_s"] = rows.over_s - rows.begin_s
    rows["inside"] = (rows.begin_s <= rows.at_s) & (rows.at_s < rows.over_s)
    by_arm = rows.groupby("level")
    rows["arm"] = by_arm.ngroup()
    rows["kept"] = ~rows.is_cut_off | by_arm.is_cut_off.transform("all")
    return rows.sort_values(["level", "round", "at_s"], kind="stable", ignore_index=True)


def arm_rows(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The figures of each arm of a session's `frame`, by name and unit. NaN or None: unknown."""
    return [_arm(own) for _, own in rows.groupby("arm")]


def _arm(every: pd.DataFrame) -> dict[str, Any]:
    import pandas as pd

    rows = every[every.kept]
    load: Load = rows.load.iloc[0]
    rounds = [own for _, own in rows.groupby("round")]
    windows = pd.DataFrame(map(_window, rounds))
    inside = rows[rows.inside]
    good = inside[inside.ok]
    bad = inside[~inside.ok]
    made: dict[str, Any] = {
        "load": load.label,
        "level": load.concurrency or load.rate or 0,
        "n_rounds": len(rounds),
        "n_cut_off": int(every[every.is_cut_off]["round"].nunique()),
        "window_s": list(windows.length_s),
        **{
            f"load_{name}": value
            for name, value in dataclasses.asdict(load).items()
            if name != "round"
        },
        "n": len(inside),
        "n_ok": len(good),
        "failures": bad.failure.value_counts().to_dict(),
        "errors": {
            name: own.error.mode()[0]
            for name, own in bad.groupby("failure")
            if own.error.notna().any()
        },
        "n_truncated": int(good.is_truncated.sum()),
        "n_short": sum(one.is_short is True and not one.is_truncated for one in good.figures),
        "n_warm": sum(one.is_warm is True for one in good.figures),
        "held_back": held_back(list(good.figures)),
        "tpot_is_bound": bool(good.is_bound.any()),
        "stall_s": good.stall_s.max(),
        "late_most_s": inside.late_s.max(),
        "in_flight_begin": windows.in_flight_begin.mean(),
        "in_flight_end": windows.in_flight_end.mean(),
        **dict(
            zip(
                ("attainment", "attainment_low", "attainment_high"),
                _attainment(inside),
                strict=True,
            )
        ),
    }
    for name in ("ttft", "tpot", "e2e"):
        known = sorted(inside[f"{name}_s"].dropna())
        made |= {f"{name}_n": len(known), f"{name}_median_s": inside[f"{name}_s"].median()}
        for percentile in (95, 99):
            value, n_beyond = tail(known, percentile / 100)
            made |= {f"{name}_p{percentile}_s": value, f"{name}_p{percentile}_beyond": n_beyond}
    made["user_tps"] = (
        1 / made["tpot_median_s"]
        if made["tpot_median_s"] > 0 and not made["tpot_is_bound"]
        else NAN
    )
    measured = windows[windows.length_s > 0]
    for name in ("tokens_tps", "requests_ps", "goodput_ps"):  # each with its 90 % interval
        value = (measured[name] * measured.length_s).sum(skipna=False) / (
            measured.length_s.sum() or NAN
        )
        cut = value / (2 * max(1.0, measured.n.mean())) if len(measured) > 1 else 0.0
        half = stats.mean_half_width(list(measured[name]), 0.9) + cut if value == value else NAN
        made |= {name: value, f"{name}_low": max(value - half, 0.0), f"{name}_high": value + half}
    # more in flight at the end than at the start, by over 2 standard deviations of a Poisson count of all arrivals
    growth = (windows.in_flight_end - windows.in_flight_begin).sum()
    made["is_overloaded"] = load.arrivals != CLOSED and bool(
        growth >= 3 and growth > 2 * math.sqrt(len(inside))
    )
    busy, prefill = windows[["busy_s", "prefill_s"]].sum(skipna=False) / (
        windows.length_s.sum() or NAN
    )
    return made | {"share_prefill": prefill, "share_decode": busy - prefill, "share_idle": 1 - busy}


def _window(own: pd.DataFrame) -> dict[str, float]:
    """The figures of an arm in one round."""
    import numpy as np

    load: Load = own.load.iloc[0]
    begin_s, length_s, over_s = own[["begin_s", "length_s", "over_s"]].iloc[0]
    inside = own[own.inside]
    whole = own.ok & ~own.is_truncated
    per_user_s = (inside.end_s - inside.at_s + FAILED_S * ~inside.ok).sum() / (
        load.concurrency or 1
    )
    if load.arrivals == CLOSED and 0 < per_user_s < INF:  # Little's law
        spent_s = per_user_s
        tokens = inside.n_generated[inside.ok]
        n_whole = (whole & own.inside).sum()
    else:
        spent_s = length_s or NAN
        tokens = own.n_in_window
        n_whole = (whole & (begin_s <= own.end_s) & (own.end_s < over_s)).sum()

    def covered_s(begins_s: Any, ends_s: Any) -> float:
        """The time in which at least one of the spans is in progress; NaN if a begin is unknown."""
        order = np.argsort(begins_s)
        begins = np.asarray(begins_s)[order]
        ends = np.minimum(ends_s, over_s).to_numpy()[order]
        reached = np.maximum.accumulate([begin_s, *ends])[:-1]
        return float(np.maximum(0, ends - np.maximum(begins, reached)).sum())

    known = own[
        (own.end_s > begin_s) & (own.start_s < own.end_s) & (own.start_s < over_s)
    ]  # in progress in the window
    return {
        "length_s": length_s,
        "n": len(inside),
        "tokens_tps": tokens.sum(skipna=False) / spent_s,
        "requests_ps": n_whole / spent_s,
        "goodput_ps": (inside.used <= 1).sum() / spent_s if load.slo else NAN,
        "in_flight_begin": ((own.at_s <= begin_s) & (begin_s < own.end_s)).sum(),
        "in_flight_end": ((own.at_s <= over_s) & (over_s < own.end_s)).sum(),
        "busy_s": covered_s(known.start_s, known.end_s),
        "prefill_s": covered_s(
            np.maximum(known.start_s, known.first_s - known.prompt_s), known.first_s
        ),
    }


def tail(ordered: Sequence[float], share: float) -> tuple[float, int]:
    """The percentile of ordered values by the nearest rank, and the number that exceed it; NaN if none does."""
    rank = math.ceil(round(share * len(ordered), 9))
    return (ordered[rank - 1], len(ordered) - rank) if 0 < rank < len(ordered) else (NAN, 0)


def _attainment(inside: pd.DataFrame) -> tuple[float, float, float]:
    """The share of requests that met every limit, with its 95 % interval; NaN without limits or requests.

    Clopper-Pearson interval with the effective number of independent draws (Korn & Graubard, Survey Methodology 24,
    1998), which is smaller if batches of successive requests differ by more than chance: in how many met the limits,
    or in how many are among the slowest tenth, which shows bunches also where hardly any or nearly all met them.
    """
    from scipy.special import betaincinv, stdtrit

    known = inside[inside.used.notna()]
    if known.empty:
        return NAN, NAN, NAN
    of_round = known.groupby("round").used
    number = of_round.cumcount() + 1
    n_batches = math.ceil(N_BATCHES / of_round.ngroups)
    batch = [known["round"], (number * n_batches - 1) // of_round.transform("size")]

    def design_effect(met: pd.Series) -> float:  # variance of the share over that of single draws
        batches = met.groupby(batch).agg(["size", "sum"])
        share = met.mean()
        if len(batches) < 2 or share in (0, 1):
            return 0.0
        between = ((batches["sum"] - share * batches["size"]) ** 2).sum() / len(met)
        return float(len(batches) / (len(batches) - 1) * between / (share * (1 - share)))

    used = known.used.sort_values()
    n = len(known)
    outside = (1 - CONFIDENCE) / 2
    n_good = int((used <= 1).sum())
    n_worth = float(n)
    effect = design_effect(known.used <= 1)
    if not (used.iloc[-1] * FAR < 1 or used.iloc[0] > FAR):
        effect = max(effect, design_effect(known.used <= used.iloc[math.ceil(0.9 * n) - 1]))
    if effect > 1:  # known from few batches only
        t_all, t_batches = (
            stdtrit(df - 1, 1 - outside) for df in (n, known.groupby(batch).ngroups)
        )
        n_worth *= (t_all / t_batches) ** 2 / effect
    bad_worth = n_worth * (n - n_good) / n
    low = betaincinv(n_worth - bad_worth, bad_worth + 1, outside) if n_good else 0.0
    high = betaincinv(n_worth - bad_worth + 1, bad_worth, 1 - outside) if n_good < n else 1.0
    return n_good / n, float(low), float(high)


def capacity(arms: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The highest load (users or requests/s) at which 90 % of requests meet every limit, as they do at all lower loads.

    `at_least` and `below` are None if no arm shows them; `best` is the highest arm whose measured share reaches 90 %,
    with all lower arms. None without limits.
    """
    measured = [one for one in arms if one["attainment"] == one["attainment"]]
    if not measured:
        return None
    holding = list(itertools.takewhile(lambda one: one["attainment"] >= SHARE, measured))
    sure = [one for one in holding if one["attainment_low"] >= SHARE and not one["is_overloaded"]]
    missing = [one for one in measured if one["attainment_high"] < SHARE]
    at_least, below, best = (
        ends[0] if ends else None for ends in (sure[-1:], missing[:1], holding[-1:])
    )
    if at_least and below:
        sentence = f"between {at_least['level']:g} and {below['load']}"
    elif at_least:
        sentence = f"at least {at_least['load']}"
    else:
        sentence = f"below {below['load']}" if below else "unknown, too few requests"
    if best and best is not at_least:
        sentence += f"; {best['load']} met the limits, but not clearly"
    ends = {"at_least": at_least, "below": below, "best": best}
    return {"sentence": sentence, **{name: one and one["level"] for name, one in ends.items()}}


def sessions(records: Sequence[Record | RequestRecord]) -> list[list[RequestRecord]]:
    """The requests of each session of loads, in order of appearance; of mixed files each kind of load on its own."""
    key = attrgetter("session", "request.asked.load.arrivals", "request.asked.load.lengths")
    return list(grouped(table.loads_of(records), key).values())


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
    parts = [table.measured(table.runs(plain))] if plain else []
    for own in sessions(records):
        first = table.runs(own[:1]).to_dict("records")[0]
        first |= dict.fromkeys(
            ("decode_tps", "warm", "short", "error", "failure", *table.REQUEST_FIGURES)
        )
        for _, arm in frame([record.request for record in own]).groupby("arm"):
            load = arm.load.iloc[0]
            lengths = arm.loc[arm.kept, ["n_prompt", "n_gen"]].drop_duplicates()
            n_prompt, n_gen = map(int, lengths.iloc[0]) if len(lengths) == 1 else (0, 0)
            lever = load.label if n_gen else f"{load.label}, {load.lengths}"
            known = arm.assign(tpot_ms=1e3 * arm.tpot_s.mask(arm.is_bound))[
                ~arm.is_cut_off & arm.inside
            ]
            medians = known.groupby("round")[["ttft_s", "tpot_ms", "e2e_s"]].median()
            same = first | {
                "n_prompt": n_prompt,
                "n_gen": n_gen,
                "lever": lever,
                "status": OK,
                "warmup": False,
            }
            parts.append(
                pd.DataFrame(
                    [{**same, "repeat": number, **one} for number, one in medians.iterrows()]
                )
            )
    filled = [one for one in parts if len(one)]
    return pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()


Arms = Sequence[SimpleNamespace]


def sections(records: Sequence[Record | RequestRecord]) -> list[Section]:
    """A section for each session of loads, with findings, warnings and pictures."""
    return [_section(own) for own in sessions(records)]


def _section(records: Sequence[RequestRecord]) -> Section:
    rows = frame([record.request for record in records])
    plain = arm_rows(rows)
    arms = [SimpleNamespace(**row) for row in plain]
    first = records[0]
    endpoint = records[0].endpoint
    of = arms[0]
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    server = (
        " ".join(word for word in (endpoint.server, endpoint.version) if word)
        or "a server without a name"
    )
    slots = f", {plural(n_slots, 'slot')}" if n_slots is not None else ""
    title = f"{first.model} on {server}{slots}; client: {machines.label(first.machine)}"
    window = f"windows of {of.load_duration_s:g} s after {of.load_warmup_s:g} s of warm-up"
    words = f"{of.load_lengths}; {window}; {plural(max(arm.n_rounds for arm in arms), 'round')}"
    answer = answer_of(arms)
    warnings = _warnings(arms)
    sentences = _findings(arms, n_slots)
    cells = [_cells(arm) for arm in arms]
    said = [answer, *(f"! {line}" for line in warnings), *sentences]
    data = {
        "session": first.session,
        "url": endpoint.url,
        "model": first.model,
        "n_slots": n_slots,
        "sentences": said,
    }
    drawn = [rows[(rows.arm == number) & rows.kept] for number in range(len(arms))]
    latency = partial(_plot_latency, arms, drawn, f"Latency over load\n{title}\n{words}", n_slots)
    timeline = partial(
        _plot_timeline, arms, drawn, f"The timeline of requests\n{title}\n{of.load_lengths}"
    )
    of_latency = "Latency over load. Points are requests, lines their median and percentiles. Limits are dashed."
    of_timeline = "The requests of the first round. The steady window is shaded."
    pictures = [
        Picture("load", of_latency, latency, (11, 5)),
        Picture("timeline", of_timeline, timeline, (11, 7)),
    ]
    return Section(
        title,
        answer=answer,
        words=[words],
        **tabled([(heading, itemgetter(heading)) for heading in cells[0]], cells),
        warnings=warnings,
        sentences=sentences,
        notes=[
            "TTFT, TPOT, E2E: successful requests due in the window; (n) counts the requests that exceed a percentile. "
            "total: all tokens that arrived in the window; per user: 1 / median TPOT. Intervals: 90 % of rates, 95 % "
            "within limits."
        ],
        pictures=pictures if any(arm.ttft_n for arm in arms) else pictures[1:],
        data=lambda: {"loads": [data | {"arms": plain, "capacity": capacity(plain)}]},
    )


def held_back(ones: Sequence[Figures]) -> list[str]:
    """On answers that arrived in one piece."""
    n = sum(one.came_at_once for one in ones)
    words = (
        f"{n} of {len(ones)} answers arrived in one piece: the server or a proxy held them back until they were "
        "complete. Their TTFT and TPOT are unknown."
    )
    return [words] if n else []


def span(numbers: Sequence[int]) -> str:
    """The smallest and the largest number."""
    return " to ".join(f"{n:,}" for n in sorted({min(numbers, default=0), max(numbers, default=0)}))


def server_options(record: RequestRecord) -> dict[str, object]:
    """The options that name the server of a request."""
    return {"url": record.endpoint.url, "model": record.model, "api": record.endpoint.api}


def answer_of(arms: Arms) -> str:
    """How much load the server handles: its capacity if there are limits, otherwise what the largest load got."""
    n = sum(arm.n for arm in arms)
    good = [arm for arm in arms if arm.n_ok]
    if not n:
        return "No request was due in a steady window: try a longer --duration."
    if not good:
        return f"{plural(n, 'request')} failed, and none succeeded."
    if holds := capacity([vars(arm) for arm in arms]):
        limits = Slo(**arms[0].load_slo).label
        return f"Capacity (at least 90 % of requests within {limits}): {holds['sentence']}."
    first = good[0]
    last = good[-1]
    is_counted = last.tokens_tps == last.tokens_tps
    name, verb, unit = (
        ("tokens_tps", "generates", "tokens")
        if is_counted
        else ("requests_ps", "answers", "requests")
    )
    place = "With" if last.load_arrivals == CLOSED else "At"
    line = f"{place} {last.load} the server {verb} {digits(getattr(last, name))} {unit}/s"
    line += f" ({first.load}: {digits(getattr(first, name))})" if first is not last else ""
    line += f"; the median request takes {seconds(last.e2e_median_s)}" if last.e2e_n else ""
    line += f" and waits {seconds(last.ttft_median_s)} for its first token" if last.ttft_n else ""
    return f"{line}."


def _cells(arm: SimpleNamespace) -> dict[str, str]:
    """The cells of a row of the table by their headings."""

    def latency(name: str, factor: float = 1) -> str:
        values = [getattr(arm, f"{name}_{which}_s") for which in ("median", "p95", "p99")]
        return "\n".join(digits(factor * value) for value in values if value == value) or UNKNOWN

    def rate(name: str) -> str:
        value, low, high = (getattr(arm, f"{name}{end}") for end in ("", "_low", "_high"))
        return digits(value) + (
            f"\n{digits(low)}-{digits(high)}" if arm.n_rounds > 1 and value == value else ""
        )

    beyond = {
        95: arm.ttft_p95_beyond or arm.e2e_p95_beyond,
        99: arm.ttft_p99_beyond or arm.e2e_p99_beyond,
    }
    within = f"{arm.attainment:.0%}\n{arm.attainment_low:.0%}-{arm.attainment_high:.0%}"
    limits = {"within\nlimits": within if arm.n else UNKNOWN, "goodput\nper s": rate("goodput_ps")}
    return {
        "load": f"{arm.load}\n{plural(arm.n, 'request')}"
        + (f"\n{arm.n - arm.n_ok} failed" if arm.n > arm.n_ok else ""),
        "requests": "\n".join(
            ["median", *(f"{percentile} % ({n})" for percentile, n in beyond.items() if n)]
        ),
        "TTFT\ns": latency("ttft"),
        "TPOT\nms": latency("tpot", 1e3),
        "E2E\ns": latency("e2e"),
        "total\ntokens/s": rate("tokens_tps"),
        **(limits if arm.load_slo else {"requests\nper s": rate("requests_ps")}),
        "per user\ntokens/s": digits(arm.user_tps),
        "longest\nstall s": digits(arm.stall_s),
    }


def _findings(arms: Arms, n_slots: int | None) -> list[str]:
    """How the server spent its time under each load, what limited it, and what made requests wait."""

    def split(arm: SimpleNamespace) -> str:
        shares = (arm.share_prefill, arm.share_decode, arm.share_idle)
        return f"{arm.load}: {' / '.join(f'{100 * one:.0f}' if one == one else '?' for one in shares)} %"

    words = list[str]()
    busy = [arm for arm in arms if arm.share_idle < 1]
    if busy:
        busiest = min(busy, key=lambda arm: arm.share_idle)
        phase = "prefill" if busiest.share_prefill > busiest.share_decode else "decode"
        most = f"With {busiest.load}, {phase} takes most of the time."
        if busiest.share_prefill != busiest.share_prefill:
            most = (
                "Only a server that reports prompt times shows which part of the rest is prefill."
            )
        words += [
            f"Share of the time in prefill / decode / idle: {'; '.join(map(split, busy))}. {most}"
        ]
    users = {arm.load: arm.load_concurrency or 0 for arm in arms}
    if waits := [
        f"{n - n_slots} of {load}" for load, n in users.items() if n_slots and n > n_slots
    ]:
        words += [
            f"The server has {plural(n_slots or 0, 'slot')}, so users wait: {', '.join(waits)}."
        ]
    return words


def _warnings(arms: Arms) -> list[str]:
    """What went wrong under each load, and which loads were not steady."""
    words = []
    for arm in arms:
        examples = {name: f", for example {error}" for name, error in arm.errors.items()}
        failed = "; ".join(
            f"{n} {name}{examples.get(name, '')}" for name, n in arm.failures.items()
        )
        said = {
            f"{arm.n - arm.n_ok} of {arm.n} requests failed ({failed}).": failed,
            f"{plural(arm.n_truncated, 'answer')} truncated (finish reason length, but fewer tokens than requested): "
            "the server's context was full. They have no E2E and meet no limits.": arm.n_truncated,
            "no request was due in the window. Try a longer --duration.": not arm.n,
            f"{plural(arm.n_cut_off, 'round')} stopped early (left out, unless all did).": arm.n_cut_off,
            f"{plural(arm.n_short, 'answer')} shorter than requested.": arm.n_short,
            f"{plural(arm.n_warm, 'request')} had prompt tokens in the server's cache.": arm.n_warm,
            **dict.fromkeys(arm.held_back, True),
            "the tokens of some first events are unknown, so TPOT is at most what is shown.": arm.tpot_is_bound,
            f"overloaded. {arm.in_flight_begin:.0f} requests were in flight when the window started and "
            f"{arm.in_flight_end:.0f} when it ended. A longer window would show longer waits.": arm.is_overloaded,
            f"the client was busy and sent requests up to {seconds(arm.late_most_s)} late. TTFT and E2E count from the "
            "intended time.": arm.late_most_s > 0.01,
            "tokens/s is unknown, because nobody counted all tokens.": arm.n_ok
            and arm.tokens_tps != arm.tokens_tps,
        }
        words += [f"{arm.load}: {line}" for line, holds in said.items() if holds]
    return words


MOST_PANELS = 6
MOST_BARS = 150
MOST_POINTS = 400
"""Maximum number of arms and bars of a timeline, and of points of an arm; of more, evenly spread ones are drawn."""


def plot_arms(
    records: Sequence[Record | RequestRecord], name: str = "load", figure: Figure | None = None
) -> Figure:
    """A picture of the first session of loads among records: load (latency over it), or timeline.

        lab.plot_arms(lab.load(url, concurrency="1,2,4"), "timeline")

    LabError if there is nothing to draw.
    """
    drawn = {one.name: one for section in sections(records)[:1] for one in section.pictures}
    if name not in drawn:
        hint = (
            f"Choose one of: {', '.join(drawn)}" if drawn else "Measure a load: lab load --url URL"
        )
        raise LabError(f"There is no picture {name!r} of a load in these records.", hint)
    figure = figure or canvas.new_figure(drawn[name].size)
    drawn[name].draw(figure)
    return figure


def _plot_latency(
    arms: Arms, rows: Sequence[pd.DataFrame], title: str, n_slots: int | None, figure: Figure
) -> None:
    """TTFT and TPOT over the load: a point per request, lines for the median, percentiles, limits and slots."""
    slo = Slo(**(arms[0].load_slo or {}))
    is_closed = arms[0].load_arrivals == CLOSED
    panels = [
        ("ttft", 1.0, "TTFT (s)" + ("" if is_closed else " from the intended time"), slo.ttft_s)
    ]
    panels += [("tpot", 1e3, "TPOT (ms)", slo.tpot_s)] if any(arm.tpot_n for arm in arms) else []
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    lines = {"median": "median", "95th percentile": "p95", "99th percentile": "p99"}
    n_inside = (
        sum(arm.level <= n_slots for arm in arms)
        if is_closed and n_slots is not None
        else len(arms)
    )
    for ax, (name, factor, label, limit_s) in zip(axes, panels, strict=True):
        known = [sorted(factor * own[f"{name}_s"][own.inside].dropna()) for own in rows]
        for place, values in enumerate(known):
            drawn = values[:: math.ceil(len(values) / MOST_POINTS) or 1]
            xs = [place + 0.16 * (2 * (0.618034 * i % 1) - 1) for i in range(len(drawn))]
            style: dict[str, Any] = {
                "ls": "",
                "marker": "o",
                "ms": 4,
                "alpha": 0.5,
                "mew": 0,
                "color": COLOURS[5],
            }
            ax.plot(xs, drawn, label="requests" if place == 0 else None, **style)
        for (line, which), colour, marker in zip(
            lines.items(), COLOURS[:2] + COLOURS[3:4], MARKERS, strict=False
        ):
            ys = [factor * getattr(arm, f"{name}_{which}_s") for arm in arms]
            if any(y == y for y in ys):
                ax.plot(ys, lw=1.8, ms=5, label=line, color=colour, marker=marker)
        largest = max([factor * (limit_s or 0), *(values[-1] for values in known if values)])
        medians = [y for arm in arms if (y := factor * getattr(arm, f"{name}_median_s")) > 0]
        if medians and largest > 12 * min(medians):
            ax.set_yscale("log")
        else:
            ax.set_ylim(0, 1.08 * largest or 1)
        if limit_s is not None:
            ax.axhline(factor * limit_s, color=GUIDE, ls="-.", lw=1.4, label=f"limit: {slo.label}")
        ticks = [
            f"{arm.level:,g}" + (f"\n{n:,} of {arm.n:,}\nfailed" if (n := arm.n - arm.n_ok) else "")
            for arm in arms
        ]
        ax.set_xticks(range(len(arms)), ticks)
        ax.set(
            ylabel=label,
            xlabel="users" if is_closed else "requests per second",
            xlim=(-0.5, len(arms) - 0.5),
        )
        if n_inside < len(arms):
            words = f"to the right: more users than the server's {plural(n_slots or 0, 'slot')}"
            ax.axvline(n_inside - 0.5, color=GUIDE, ls=":", lw=1.4, label=words)
    canvas.finish(axes, title, is_apart=True)


def _plot_timeline(arms: Arms, rows: Sequence[pd.DataFrame], title: str, figure: Figure) -> None:
    """A bar per request of the first round of up to 6 loads; a failure is a mark at the time when it was due."""
    n = min(len(arms), MOST_PANELS)
    begin_s = arms[0].load_warmup_s
    stop_s = begin_s + arms[0].load_duration_s
    chosen = [round(i * (len(arms) - 1) / max(1, n - 1)) for i in range(n)]
    axes = canvas.grid(figure, n, 1 if n == 1 else 2 if n in (2, 4) else 3, sharex=True)
    firsts = [own[own["round"] == own["round"].min()] for own in (rows[i] for i in chosen)]
    for ax, i, own in zip(axes, chosen, firsts, strict=True):
        ax.axvspan(begin_s, stop_s, color=GRID, alpha=0.5, lw=0, label="steady window (measured)")
        step = math.ceil(len(own) / MOST_BARS)
        drawn = own[::step].reset_index()
        ended = drawn[drawn.end_s < INF]
        first_s = ended[["first_s", "end_s"]].min(axis=1)
        wait = "waiting for the first token" + (
            "" if arms[0].load_arrivals == CLOSED else ", from the intended time"
        )
        spans = (
            (ended.at_s, first_s, OF_PREFILL, wait),
            (first_s, ended.end_s, OF_DECODE, "receiving the answer"),
        )
        for from_s, to_s, colour, label in spans:
            ax.barh(
                ended.index, to_s - from_s, left=from_s, height=0.9, color=colour, lw=0, label=label
            )
        if len(failed := drawn[~drawn.ok]):
            ax.plot(failed.at_s, failed.index, "X", ms=5, mew=0, color=COLOURS[6], label="failed")
        of_step = f", 1 of {step} drawn" if step > 1 else ""
        ax.set_title(f"{arms[i].load}: {plural(len(own), 'request')}{of_step}", fontsize=10)
        ax.set(xlim=(0, None), ylim=(max(len(drawn), 10) - 0.5, -0.5), yticks=[])
    canvas.name_axes(axes, "since the start (s)", "requests, in order")
    canvas.finish(axes, title, is_apart=True)


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Loads on servers, a part for each session."""
    parts = sections(records)
    server = records[0].endpoint.server or "its server"
    question = f"How much load can {records[0].model} handle through {server}?"
    sentences = [part.answer for part in parts]
    return [
        Section("Under load", name="loads", question=question, sentences=sentences, parts=parts)
    ]


def again(records: Sequence[RequestRecord]) -> str | None:
    """The command of loads; None if the lengths are not those of an option."""
    known = [one.request.asked.load for one in records if one.request.asked.load]
    first = known[0]
    limits = dataclasses.asdict(known[0].slo or Slo())
    if (lengths := re.fullmatch(r"(\S+) \+ (\S+) tokens", first.lengths)) is None:
        return None
    given = {
        "concurrency": sorted({load.concurrency for load in known if load.concurrency is not None}),
        "rate": sorted({load.rate for load in known if load.rate is not None}),
        "prompt_len": lengths[1],
        "gen": lengths[2],
        "warmup": f"{first.warmup_s:g}",
        "duration": f"{first.duration_s:g}",
        "rounds": 1 + max(load.round for load in known),
        "slo": [
            f"{name.removesuffix('_s')}={limit:g}s"
            for name, limit in limits.items()
            if limit is not None
        ],
        "seed": first.seed,
    }
    return as_options.line("load", server_options(records[0]) | given)


KINDS = (Kind("loads", lambda one: bool(table.loads_of([one])), chapters, again),)
