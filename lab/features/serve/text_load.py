"""Loads as text: a table of arms, findings and warnings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from lab.core.lists import join_and, plural
from lab.core.record import Record
from lab.core.request import CLOSED, CONSTANT, Endpoint, RequestRecord
from lab.features.serve import load_figures, loads, plot_load, request_words
from lab.features.serve.load_figures import ArmFigures, Latency, LoadSession, Rate
from lab.features.serve.loads import Attainment, Sample
from lab.features.serve.text_requests import server_options
from lab.runner import as_options
from lab.show import request_table
from lab.show.kind import Context, Kind
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.show.wording import digits, seconds, times

LATE_S = 0.01
"""A warning says if the client sent a request more than LATE_S later than intended: it was too busy."""

DRIFT = 1.5
"""A warning says if TTFT differs by more than this factor between the halves of the windows."""

IS_FULL = re.compile(r"context (size|length|window)", re.IGNORECASE)
"""In errors of servers for a request that their context cannot hold, such as llama-server's "exceeds the available
context size (256 tokens)" and "Context size has been exceeded."."""

DEFINITIONS = (
    "tokens/s: all tokens that arrived in the steady window; for a user 1 / median TPOT. TTFT, TPOT, E2E: successful "
    "requests due in the window. A percentile is shown only if a request exceeds it; (n) counts those."
)


def sections(records: Sequence[Record | RequestRecord]) -> list[Section]:
    """A section for each session of loads."""
    return [
        dataclasses.replace(
            section(one.samples, one.endpoint, plot_load.title(one.endpoint, one.model, one.machine)),
            data=partial(_document, one),
        )
        for one in load_figures.sessions(records)
    ]


def _document(one: LoadSession) -> dict[str, list[Any]]:
    """A session for JSON: arms by name and unit, capacity and the sentences."""
    row = {"session": one.name, "url": one.endpoint.url, "model": one.model, **_as_row(one.samples, one.endpoint)}
    return {"loads": [row]}


def section(samples: Sequence[Sample], endpoint: Endpoint, title: str = "") -> Section:
    """The arms of a session of loads, with findings and warnings."""
    shown = load_figures.all_figures(samples)
    if not shown:
        return Section(title, sentences=["There are no requests of a load."])
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    said = sentences(shown, endpoint)
    return Section(
        title,
        words=[heading(shown)],
        **tabled(_columns(shown), shown, keep_all=True),
        warnings=[line.removeprefix("! ") for line in said if line.startswith("! ")],
        sentences=[line for line in said if not line.startswith("! ")],
        notes=[DEFINITIONS],
        pictures=plot_load.pictures(samples, title, n_slots),
    )


def heading(shown: Sequence[ArmFigures]) -> str:
    """The load: lengths, windows, rounds."""
    loads_of = [one.arm.load for one in shown]
    lengths = join_and(list(dict.fromkeys(load.lengths for load in loads_of)))
    windows = join_and(list(dict.fromkeys(f"{load.duration_s:g} s" for load in loads_of)))
    warmups = join_and(list(dict.fromkeys(f"{load.warmup_s:g} s" for load in loads_of)))
    n = max(len(one.arm.rounds) for one in shown)
    rounds = "1 round" if n == 1 else f"{n} rounds; below rates their 90 % interval, below times the rounds' range"
    return f"{lengths}; {windows} window after {warmups} of warm-up; {rounds}"


def _columns(shown: Sequence[ArmFigures]) -> Columns:
    """The columns of the table of arms."""
    bound = ", at most" if any(one.tpot_is_bound for one in shown) else ""
    of_limits: Columns = (
        ("within\nlimits", lambda one: _share(one.attainment)),
        ("goodput\nper s", lambda one: _rate(one.goodput_ps)),
    )
    ended: Columns = [("ended\nper s", lambda one: _rate(one.requests_ps))]
    return [
        ("load", _load),
        ("requests", _beyond),
        ("TTFT\ns", lambda one: _latency(one.ttft, 1)),
        (f"TPOT\nms{bound}", lambda one: _latency(one.tpot, 1e3)),
        ("E2E\ns", lambda one: _latency(one.e2e, 1)),
        ("longest\nstall s", lambda one: _number(one.stall_s)),
        ("all\ntokens/s", lambda one: _rate(one.tokens_tps)),
        ("a user\ntokens/s", lambda one: _number(one.user_tps)),
        *(of_limits if any(one.attainment for one in shown) else ended),
    ]


def _load(one: ArmFigures) -> str:
    failed = [f"{one.n - one.n_ok} failed"] if one.n > one.n_ok else []
    truncated = [f"{one.n_truncated} truncated"] if one.n_truncated else []
    return "\n".join([one.arm.label, plural(one.n, "request"), *failed, *truncated])


def _share(met: Attainment | None) -> str:
    return f"{met.share:.0%}\n{met.low:.0%}-{met.high:.0%}" if met else UNKNOWN


def sentences(shown: Sequence[ArmFigures], endpoint: Endpoint) -> list[str]:
    """Findings and warnings on the arms, the most important first."""
    found = [*capacities(shown), *_time_shares(shown), *_full(shown, endpoint)]
    return [*found, *_doubts(shown), *_unsteady(shown), *_lateness(shown), *_slots(shown, endpoint)]


def capacities(shown: Sequence[ArmFigures]) -> list[str]:
    """Capacity for each pair of lengths."""
    words = []
    all_lengths = list(dict.fromkeys(one.arm.load.lengths for one in shown))
    for lengths in all_lengths:
        arms = [one.arm for one in shown if one.arm.load.lengths == lengths]
        capacity = loads.capacity(arms)
        slo = arms[0].load.slo
        if capacity is not None and slo is not None:
            of = f" with {lengths}" if len(all_lengths) > 1 else ""
            limits = f" within {slo.label}" if slo.label else ""
            words.append(f"Capacity{of} (at least 90 % of requests{limits}): {capacity.sentence}.")
    return words


def all_capacities(records: Sequence[Record | RequestRecord]) -> list[str]:
    """Capacity of each session that has limits."""
    arms = (load_figures.all_figures(one.samples) for one in load_figures.sessions(records))
    return [sentence for shown in arms for sentence in capacities(shown)]


def _as_row(samples: Sequence[Sample], endpoint: Endpoint) -> dict[str, Any]:
    shown = load_figures.all_figures(samples)
    capacity = loads.capacity([one.arm for one in shown])
    return {
        "arms": [load_figures.as_row(one) for one in shown],
        "capacity": dataclasses.asdict(capacity) if capacity else None,
        "n_slots": endpoint.settings.n_slots if endpoint.settings else None,
        "sentences": sentences(shown, endpoint) if shown else [],
    }


def _time_shares(shown: Sequence[ArmFigures]) -> list[str]:
    """How the server spent its time under each load, what limited it, and what that is known from."""
    known = [(one.arm.label, one.shares) for one in shown if one.shares and one.shares.idle < 1]
    split = [(label, of) for label, of in known if of.prefill is not None and of.decode is not None]
    unsplit = [f"{100 * of.idle:.0f} % with {label}" for label, of in known if of.prefill is None]
    words = []
    if split:
        parts = [
            f"{label}: {100 * (of.prefill or 0):.0f} / {100 * (of.decode or 0):.0f} / {100 * of.idle:.0f} %"
            for label, of in split
        ]
        sources = list(dict.fromkeys(of.by for _, of in split if of.by))
        words.append(f"Share of the time in prefill / decode / idle, from {join_and(sources)}: {'; '.join(parts)}.")
        most, of = max(split, key=lambda one: -one[1].idle)
        limit = "prefill" if (of.prefill or 0) > (of.decode or 0) else "decode"
        words[-1] += f" With {most}, {limit} takes most of the time."
    if unsplit:
        words.append(
            f"Idle: {join_and(unsplit)}. How the rest divides into prefill and decode is unknown: the server does not "
            "report the time of every prompt, and a load of 1 user in the same session (--concurrency 1,...) is "
            "missing or does not explain the others."
        )
    return words


def _slots(shown: Sequence[ArmFigures], endpoint: Endpoint) -> list[str]:
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    words = []
    if n_slots is not None:
        over = [one for one in shown if one.arm.load.arrivals == CLOSED and (one.arm.level or 0) > n_slots]
        waits = [f"{int(one.arm.level or 0) - n_slots} of {one.arm.label}" for one in over]
        words += [f"The server has {plural(n_slots, 'slot')}, so users wait: {', '.join(waits)}."] if waits else []
    if known := [one for one in shown if one.wait_s is not None]:
        parts = [f"{_ms(one.wait_s or 0)} with {one.arm.label}" for one in known]
        words.append(
            f"Median TTFT minus the server's prompt time (waiting for a slot, tokenization, HTTP): {join_and(parts)}."
        )
    return words


def _full(shown: Sequence[ArmFigures], endpoint: Endpoint) -> list[str]:
    """What a full cache did: requests refused, answers truncated, tokens dropped."""
    n_ctx = endpoint.settings.n_ctx if endpoint.settings else None
    words = []
    for one in shown:
        went_well = [due.figures for due in one.arm.inside if due.is_ok]
        sizes = [(done.n_prompt or 0) + (done.n_generated or 0) for done in went_well]
        n_beyond = sum(size > n_ctx for size in sizes) if n_ctx else 0
        if any(IS_FULL.search(error) for error in one.errors.values()):
            words.append(
                f"! {one.arm.label}: the server's context is too short for these requests. Give it a longer one "
                "(llama-server: --ctx-size), or use fewer tokens or users."
            )
        if one.n_truncated:
            words.append(
                f"! {one.arm.label}: {plural(one.n_truncated, 'answer')} truncated (finish reason length, but fewer "
                "tokens than requested): the server's context was full. They have no E2E and meet no limits."
            )
        if n_beyond:
            words.append(
                f"! {one.arm.label}: {plural(n_beyond, 'answer')} went beyond the server's context of {n_ctx:,} "
                "tokens: it dropped earlier tokens (context shift), so they are not answers to the whole prompt."
            )
    return words


def _unsteady(shown: Sequence[ArmFigures]) -> list[str]:
    words = []
    for one in shown:
        if one.arm.is_overloaded:
            words.append(
                f"! {one.arm.label}: overloaded. {one.in_flight_begin:.0f} requests were in flight when the window "
                f"started and {one.in_flight_end:.0f} when it ended ({one.waiting_end:.0f} waited for a first token). "
                "A longer window would show longer waits."
            )
        elif one.drift is not None and not 1 / DRIFT < one.drift < DRIFT:
            words.append(
                f"! {one.arm.label}: TTFT in the second half of the window was {times(one.drift)} that in the first: "
                "the load was not steady. Try a longer --warmup and --duration."
            )
    return words


def _lateness(shown: Sequence[ArmFigures]) -> list[str]:
    late = [one for one in shown if one.late_most_s is not None]
    if not late:
        return []
    worst = max(late, key=lambda one: one.late_most_s or 0)
    median, most = max(one.late_median_s or 0 for one in late), worst.late_most_s or 0
    mark = "! " if most > LATE_S else ""
    return [
        f"{mark}The client sent requests {seconds(median)} late (median of the worst arm; at most {seconds(most)}, "
        f"with {worst.arm.label}). TTFT and E2E count from the intended time."
    ]


def _doubts(shown: Sequence[ArmFigures]) -> list[str]:
    words = []
    for one in shown:
        label = one.arm.label
        if one.failures:
            named = [(f"{n} {name}", one.errors.get(name)) for name, n in one.failures.items()]
            classes = "; ".join(f"{what}, for example {error}" if error else what for what, error in named)
            words.append(f"! {label}: {one.n - one.n_ok} of {one.n} requests failed ({classes}).")
        if one.n_failed_outside:
            words.append(f"! {label}: {one.n_failed_outside} more failed before or after the window.")
        if not one.n:
            words.append(f"! {label}: no request was due in the window. Try a longer --duration.")
        if one.arm.n_cut_off:
            is_all = one.arm.rounds[0].is_cut_off
            kept = "there are no others, so long requests are missing" if is_all else "left out"
            words.append(f"! {label}: {plural(one.arm.n_cut_off, 'round')} stopped before the window ended ({kept}).")
        if one.n_short:
            words.append(f"! {label}: {plural(one.n_short, 'answer')} shorter than requested.")
        if one.n_warm:
            words.append(f"! {label}: {plural(one.n_warm, 'request')} had prompt tokens in the server's cache.")
        went_well = [due.figures for due in one.arm.inside if due.is_ok]
        words += [f"! {label}: {doubt}" for doubt in request_words.wrong(went_well)]
        if one.tokens_tps is None and one.n_ok:
            words.append(f"{label}: the server does not count tokens, so tokens/s is unknown.")
    if any(one.is_spread for one in shown):
        words.append("The server does not count tokens per event, so they are spread evenly over events.")
    return words


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return UNKNOWN
    ends = f"\n{digits(rate.low)}-{digits(rate.high)}" if len(rate.by_round) > 1 else ""
    return f"{digits(rate.value)}{ends}"


def _beyond(one: ArmFigures) -> str:
    """The names of the lines with percentiles, and how many requests exceed them: one count for each latency if they
    differ."""
    known = [latency for latency in (one.ttft, one.tpot, one.e2e) if latency]
    lines = ["median"]
    for name, tails in (("95 %", [of.p95 for of in known]), ("99 %", [of.p99 for of in known])):
        counts = list(dict.fromkeys(tail.n_beyond if tail else 0 for tail in tails))
        lines += [f"{name} ({', '.join(map(str, counts))})"] if any(counts) else []
    return "\n".join(lines)


def _latency(latency: Latency | None, factor: float) -> str:
    if latency is None:
        return UNKNOWN
    tails = [tail.value_s for tail in (latency.p95, latency.p99) if tail]
    return "\n".join(digits(factor * value_s) for value_s in (latency.median_s, *tails))


def _ms(value_s: float) -> str:
    return "under 0.1 ms" if value_s < 1e-4 else seconds(value_s)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else digits(value)


def chapters(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Loads on servers, a part for each session."""
    first, n_servers = records[0], len({(one.endpoint.url, one.model) for one in records})
    question = f"How much load can {first.model} handle through {first.endpoint.server or 'its server'}?"
    return [
        Section(
            "Under load",
            name="loads",
            question="How much load can these servers handle?" if n_servers > 1 else question,
            sentences=all_capacities(records),
            parts=sections(records),
        )
    ]


def again(records: Sequence[RequestRecord]) -> str | None:
    """The command of loads; None for a replay: records lack its file."""
    known = [one.request.asked.load for one in records if one.request.asked.load]
    first, slo = known[0], known[0].slo
    lengths = re.fullmatch(r"(\S+) \+ (\S+) tokens", first.lengths)
    if lengths is None:
        return None
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s} if slo else {}
    given = {
        "concurrency": sorted({load.concurrency for load in known if load.concurrency is not None}),
        "rate": sorted({load.rate for load in known if load.rate is not None}),
        "arrivals": CONSTANT if first.arrivals == CONSTANT else None,
        "prompt_len": lengths[1],
        "gen": lengths[2],
        "warmup": f"{first.warmup_s:g}",
        "duration": f"{first.duration_s:g}",
        "rounds": 1 + max(load.round for load in known),
        "slo": [f"{name}={limit:g}s" for name, limit in limits.items() if limit is not None],
        "seed": first.seed,
    }
    return as_options.line("load", server_options(records[0]) | given)


KINDS = (Kind("loads", lambda one: bool(request_table.loads_of([one])), chapters, again),)
