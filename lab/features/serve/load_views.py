"""Loads as sections: the answer, a table with a row per arm, sentences, warnings, and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lab.core.lists import join_and, plural
from lab.core.record import Record
from lab.core.request import CLOSED, CONSTANT, Endpoint, RequestRecord, Slo
from lab.errors import LabError
from lab.features.serve import load_figures, request_words
from lab.features.serve.text_requests import server_options
from lab.runner import as_options
from lab.runner import machine as machines
from lab.show import canvas, request_table
from lab.show.canvas import COLOURS, GRID, GUIDE, MARKERS, OF_DECODE, OF_PREFILL
from lab.show.kind import Context, Kind
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled
from lab.show.wording import digits, seconds, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LATE_S = 0.01
"""A warning says if the client sent a request more than LATE_S later than intended: it was too busy."""

DRIFT = 1.5
"""A warning says if TTFT differs by more than this factor between the halves of the windows."""

IS_FULL = re.compile(r"context (size|length|window)", re.IGNORECASE)
"""In errors of servers for a request that their context cannot hold, such as llama-server's "exceeds the available
context size (256 tokens)" and "Context size has been exceeded."."""

DEFINITIONS = (
    "TTFT, TPOT, E2E: successful requests due in the window; (n) counts the requests that exceed a percentile. total: "
    "all tokens that arrived in the window; per user: 1 / median TPOT. Intervals: 90 % of rates, 95 % within limits."
)

WIDE = 12
"""If the largest value exceeds the smallest median by more than this factor, an axis of latencies is logarithmic."""

MOST_PANELS, MOST_BARS, FEWEST_BARS, MOST_POINTS = 6, 150, 10, 400
"""Maximum number of arms and bars of a timeline, and of points of an arm; of more, evenly spread ones are drawn."""

SPREAD = 0.16
"""Horizontal spread of an arm's points to each side, as a share of the distance to the next arm."""

FAILED = (COLOURS[6], COLOURS[3], COLOURS[2], COLOURS[5], COLOURS[7])
"""Colours of classes of failure, by their number."""

Arms = Sequence[SimpleNamespace]


def sections(records: Sequence[Record | RequestRecord]) -> list[Section]:
    """A section for each session of loads."""
    return [section(own) for own in load_figures.sessions(records)]


def section(records: Sequence[RequestRecord]) -> Section:
    """The loads of a session, with findings and warnings."""
    rows = load_figures.frame([record.request for record in records])
    plain = load_figures.arm_rows(rows)
    arms = [SimpleNamespace(**row) for row in plain]
    first, endpoint = records[0], records[0].endpoint
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    server = " ".join(word for word in (endpoint.server, endpoint.version) if word) or "a server without a name"
    slots = f", {plural(n_slots, 'slot')}" if n_slots is not None else ""
    title = f"{first.model} on {server}{slots}; client: {machines.label(first.machine)}"
    answer, warnings, sentences = answer_of(arms), _warnings(arms, rows, endpoint), _findings(arms, n_slots)
    data = {
        "session": first.session,
        "url": endpoint.url,
        "model": first.model,
        "arms": plain,
        "capacity": load_figures.capacity(plain),
        "n_slots": n_slots,
        "sentences": [answer, *(f"! {line}" for line in warnings), *sentences],
    }
    of, n_rounds = arms[0], max(arm.n_rounds for arm in arms)
    window = f"{of.load_duration_s:g} s after {of.load_warmup_s:g} s of warm-up; {plural(n_rounds, 'round')}"
    return Section(
        title,
        answer=answer,
        words=[f"{of.load_lengths}; windows of {window}"],
        **tabled(_columns(arms), arms),
        warnings=warnings,
        sentences=sentences,
        notes=[DEFINITIONS],
        pictures=_pictures(arms, rows, f"{title}\n{of.load_lengths}", n_slots),
        data=lambda: {"loads": [data]},
    )


def answer_of(arms: Arms) -> str:
    """How much load the server handles: its capacity if there are limits, otherwise what the largest load got."""
    n, good = sum(arm.n for arm in arms), [arm for arm in arms if arm.n_ok]
    if not n:
        return "No request was due in a steady window: try a longer --duration."
    if not good:
        return f"{plural(n, 'request')} failed, and none succeeded."
    if capacity := load_figures.capacity([vars(arm) for arm in arms]):
        limits = Slo(**arms[0].load_slo).label
        return f"Capacity (at least 90 % of requests within {limits}): {capacity['sentence']}."

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
    if split := [arm for arm in busy if arm.share_by]:
        shares = [[100 * share for share in (arm.share_prefill, arm.share_decode, arm.share_idle)] for arm in split]
        parts = [f"{arm.load}: {a:.0f} / {b:.0f} / {c:.0f} %" for arm, (a, b, c) in zip(split, shares, strict=True)]
        sources = join_and(list(dict.fromkeys(arm.share_by for arm in split)))
        most = min(split, key=lambda arm: arm.share_idle)
        phase = "prefill" if most.share_prefill > most.share_decode else "decode"
        words += [
            f"Share of the time in prefill / decode / idle, from {sources}: {'; '.join(parts)}. With {most.load}, "
            f"{phase} takes most of the time."
        ]
    if rest := [f"{100 * arm.share_idle:.0f} % with {arm.load}" for arm in busy if not arm.share_by]:
        has_one = any(arm.load_concurrency == 1 for arm in arms)
        advice = "" if has_one or arms[0].load_arrivals != CLOSED else " Add a load of 1 user: --concurrency 1,..."
        words += [
            f"Idle: {join_and(rest)}. Prefill and decode cannot be told apart there: the server does not report "
            f"the time of every prompt{', and the load of 1 user does not explain the others' * has_one}.{advice}"
        ]
    waits = [f"{n - n_slots} of {arm.load}" for arm in arms if n_slots and (n := arm.load_concurrency or 0) > n_slots]
    words += [f"The server has {plural(n_slots or 0, 'slot')}, so users wait: {', '.join(waits)}."] if waits else []
    if known := [arm for arm in arms if arm.wait_s == arm.wait_s]:
        parts = [f"{seconds(arm.wait_s) if arm.wait_s >= 1e-4 else 'under 0.1 ms'} with {arm.load}" for arm in known]
        words += [
            f"Median TTFT minus the server's prompt time (waiting for a slot, tokenization, HTTP): {join_and(parts)}."
        ]
    late_s = max((arm.late_most_s for arm in arms if arm.late_most_s == arm.late_most_s), default=math.inf)
    words += [f"The client sent each request at most {seconds(late_s)} late."] if late_s <= LATE_S else []
    if uncounted := [arm.load for arm in arms if arm.n_ok and arm.tokens_tps != arm.tokens_tps]:
        words += [f"The server does not count tokens, so tokens/s is unknown: {join_and(uncounted)}."]
    if any(arm.is_spread for arm in arms):
        words += ["The server does not count tokens per event, so they are spread evenly over events."]
    return words


def _warnings(arms: Arms, rows: pd.DataFrame, endpoint: Endpoint) -> list[str]:
    """What went wrong under each load, what a full context did, and which loads were not steady."""
    words, n_ctx = [], (endpoint.settings.n_ctx if endpoint.settings else None) or math.inf
    for number, arm in enumerate(arms):
        own = rows[(rows.arm == number) & rows.kept]
        good = own[own.inside & own.ok]
        n_beyond = sum((one.n_prompt or 0) + (one.n_generated or 0) > n_ctx for one in good.figures)
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
            (
                n_beyond,
                f"{plural(n_beyond, 'answer')} went beyond the server's context of {n_ctx:,.0f} tokens: it dropped "
                "earlier tokens (context shift), so they are not answers to the whole prompt.",
            ),
            (arm.n_failed_outside, f"{arm.n_failed_outside} more failed before or after the window."),
            (not arm.n, "no request was due in the window. Try a longer --duration."),
            (arm.n_cut_off, f"{plural(arm.n_cut_off, 'round')} stopped before the window ended ({missing})."),
            (arm.n_short, f"{plural(arm.n_short, 'answer')} shorter than requested."),
            (arm.n_warm, f"{plural(arm.n_warm, 'request')} had prompt tokens in the server's cache."),
            *((True, line) for line in request_words.wrong(list(good.figures))),
            (
                arm.is_overloaded,
                f"overloaded. {arm.in_flight_begin:.0f} requests were in flight when the window started and "
                f"{arm.in_flight_end:.0f} when it ended ({arm.waiting_end:.0f} waited for a first token). A longer "
                "window would show longer waits.",
            ),
            (
                not arm.is_overloaded and (arm.drift <= 1 / DRIFT or arm.drift >= DRIFT),
                f"TTFT in the second half of the window was {times(arm.drift)} that in the first: the load was not "
                "steady. Try a longer --warmup and --duration.",
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
    """A picture of the first session of loads among records: load (latency over it), throughput, or timeline.

        lab.plot_arms(lab.load(url, concurrency="1,2,4"), "throughput")

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
    words = f"{below}; {arms[0].load_duration_s:g} s window, {plural(max(arm.n_rounds for arm in arms), 'round')}"
    made = []
    if any(arm.ttft_n for arm in arms):
        caption = "Latency over load. Points are requests, lines their median and percentiles. Limits are dashed."
        draw = partial(_plot_latency, arms, own, f"Latency over load\n{words}", n_slots)
        made.append(Picture("load", caption, draw, (11, 5)))
    if any(arm.tokens_tps == arm.tokens_tps and arm.ttft_n for arm in arms):
        caption = (
            "Throughput against latency: tokens per second of all users, over a user's median TTFT. Points are loads, "
            "with their range over rounds."
        )
        draw = partial(_plot_throughput, arms, f"Throughput against latency\n{words}")
        made.append(Picture("throughput", caption, draw, (11, 5)))
    caption = (
        "The requests of the first round: waiting for the first token, then receiving the answer. The steady window is "
        "shaded."
    )
    draw = partial(_plot_timeline, arms, own, f"The timeline of requests\n{below}")
    return [*made, Picture("timeline", caption, draw, (11, 7))]


def _plot_latency(arms: Arms, rows: Sequence[pd.DataFrame], title: str, n_slots: int | None, figure: Figure) -> None:
    """TTFT and TPOT over the load: a point per request, lines for the median and percentiles.

    Limits are dash-dotted lines. If there are more users than slots of the server, the slots are a dotted line.
    """
    slo, is_closed = Slo(**(arms[0].load_slo or {})), arms[0].load_arrivals == CLOSED
    bound = any(arm.tpot_is_bound for arm in arms)
    ttft_label = "TTFT (s)" + ("" if is_closed else " from the intended time")
    panels = [("ttft", "ttft_s", 1.0, ttft_label, slo.ttft_s)]
    if any(arm.tpot_n for arm in arms):
        tpot_label = "TPOT (ms)" + (", at most" if bound else "")
        panels.append(("tpot", "tpot_most_s" if bound else "tpot_s", 1e3, tpot_label, slo.tpot_s))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    levels = [arm.load_concurrency if is_closed else arm.load_rate for arm in arms]
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
        ax.set_xticks(range(len(arms)), ["replay" if level is None else f"{level:,g}" for level in levels])
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


def _plot_throughput(arms: Arms, title: str, figure: Figure) -> None:
    """Tokens per second of all users over median TTFT and median TPOT: a point per load, with its range over rounds."""
    counted = [arm for arm in arms if arm.tokens_tps == arm.tokens_tps]
    bound = ", at most" if any(arm.tpot_is_bound for arm in arms) else ""
    panels = [("ttft", "median TTFT (s)", 1.0), ("tpot", f"median TPOT (ms){bound}", 1e3)]
    panels = [panel for panel in panels if any(getattr(arm, f"{panel[0]}_n") for arm in counted)]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    what = "number of users" if arms[0].load_arrivals == CLOSED else "request rate"
    labels = []
    for ax, (name, label, factor) in zip(axes, panels, strict=True):
        known = [arm for arm in counted if getattr(arm, f"{name}_n")]
        xs, ys = [factor * getattr(arm, f"{name}_median_s") for arm in known], [arm.tokens_tps for arm in known]
        by_round = [[factor * x for x in getattr(arm, f"{name}_by_round_s")] for arm in known]
        left, right = [min(own) for own in by_round], [max(own) for own in by_round]
        low, high = [arm.tokens_tps_low for arm in known], [arm.tokens_tps_high for arm in known]
        ax.plot(xs, ys, color=GUIDE, lw=1, zorder=1)
        style: dict[str, Any] = {"ls": "", "marker": "o", "ms": 7, "color": COLOURS[0], "zorder": 2}
        ends = ((left, xs), (xs, right), (low, ys), (ys, high))  # the median of all can lie outside the rounds' range
        bars = [[max(0, b - a) for a, b in zip(*of, strict=True)] for of in ends]
        n = max(arm.n_rounds for arm in known)
        words = what + (f", with range over {n} rounds" if n > 1 else "")
        ax.errorbar(xs, ys, xerr=bars[:2], yerr=bars[2:], capsize=3 if n > 1 else 0, label=words, **style)
        if max(xs) > WIDE * min(xs) > 0:
            ax.set_xscale("log")
            ax.set_xlim(right=max(2 * max(xs), 1.1 * max(right)))
        else:
            ax.set_xlim(0, max(1.3 * max(xs), 1.1 * max(right)) or 1)
        ax.set_ylim(0, 1.15 * max([*high, 1e-9]))
        ax.set_xlabel(label)
        along = [i / 20 for i in range(21)]  # positions on the bars, which labels avoid
        avoid = [(a + (b - a) * t, y) for a, b, y in zip(left, right, ys, strict=True) for t in along]
        avoid += [(x, a + (b - a) * t) for x, a, b in zip(xs, low, high, strict=True) for t in along]
        labels.append((ax, list(zip(xs, ys, [arm.load for arm in known], strict=True)), avoid))
    axes[0].set_ylabel("tokens per second, all users")
    canvas.finish(axes, title, is_apart=True)
    for ax, points, avoid in labels:
        canvas.label_points(ax, points, avoid)


def _plot_timeline(arms: Arms, rows: Sequence[pd.DataFrame], title: str, figure: Figure) -> None:
    """A bar per request of the first round of each load: waiting for the first token, then receiving the answer.

    The steady window is shaded. A failure is a mark at the time when the request was due. Of more than 6 loads the
    smallest, the largest and some between are drawn.
    """
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
