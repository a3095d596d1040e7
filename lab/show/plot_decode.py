"""The decode picture: the time of each token of an answer, over its position in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import cost, phases, request_times
from lab.core.figures import TPOT
from lab.core.lists import join_and, plural
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord
from lab.core.results import Readable
from lab.errors import LabError
from lab.roofline import kernel_rates
from lab.roofline.kernel_rates import Roof
from lab.show import canvas, selection, table
from lab.show.canvas import OF_DECODE
from lab.show.table import Records
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

N_RUNNING = 15  # positions in a running median
HEADROOM = 1.35
"""The upper end of the axis, relative to the 95th percentile of the gaps of the slowest line; of a
logarithmic one also the lower end, to the 5th percentile of the fastest."""

MOST_LENGTHS = 12  # prompt lengths that are drawn
WIDE = 12  # lines that differ by more than this factor have a logarithmic axis

TOKEN = "token"
EVENT = "event"  # of a stream, with an unknown number of tokens
EITHER = "token or event"
TITLES = {
    TOKEN: "time per generated token",
    EVENT: "time between events with tokens (inter-chunk latency)",
    EITHER: "time between tokens, or between events with tokens",
}


class DrawnLine(NamedTuple):
    """The gaps of all answers of a setup after prompts of one length, and how they are drawn."""

    setup: str
    n_prompt: int
    gaps: pd.DataFrame
    ax: Axes
    style: canvas.Style

    @property
    def name(self) -> str:
        return f"after {plural(self.n_prompt, 'prompt token')}"


def plot_decode(
    records: Readable, ax: Axes | None = None, ceilings: Ceilings | None = None
) -> Axes:
    """Draw decode time per token (ITL) against the token's position, one line per prompt length.

        lab.plot_decode(records)

    Points are tokens of all repeats (hollow: of disturbed runs); the line is the running median of
    the per-token medians. Points beyond the axis are counted and marked at its edge. Setups of
    very different speed get a logarithmic axis. More than six lines of several setups get a panel
    for each setup. Where tokens of a server arrive together, or it does not say how many arrive,
    gaps are between events (inter-chunk latency). With `ceilings`, dotted lines are the bounds of
    memory: the bytes of each step at the machine's highest rate of reading. Answers to prompts of
    one length have a second axis, the position in the context. LabError if no run decoded a token.
    """
    timed, rows = selection.timed_rows(records)
    lengths = _evenly_spaced(sorted(rows.n_prompt.dropna().unique()))
    gaps = _gaps(timed, rows[rows.n_prompt.isin(lengths)])
    if gaps.empty:
        raise LabError(
            "There is nothing to draw: no run decoded a token.",
            "Measure with --gen 2 or more.",
        )
    lines = _lines(gaps, ax or canvas.new_axes())
    axes = [line.ax for line in lines]
    has_panels = axes[0] is not axes[-1]
    ends_ms = _ends_ms(lines)
    if has_panels:  # the legend has the lengths in their order
        for line in sorted(lines, key=lambda line: line.n_prompt):
            axes[0].plot([], [], lw=2, ms=4, **line.style, label=line.name)
    for line in lines:
        _draw_line(line, ends_ms)
        _name_line(line, ends_ms, has_panels, names_setup=gaps.setup.nunique() > 1)
        if ceilings is not None:
            _draw_bound(line, timed, kernel_rates.roof(ceilings))
    _set_scales(lines, ends_ms)
    if gaps.n_prompt.nunique() == 1 and not has_panels:
        _add_positions(axes[0], lines[0].n_prompt)
    kind = _kind(gaps)
    x_label = f"generated {kind}"
    if not has_panels:
        x_label += (
            " (the first ends TTFT)" if table.alone(timed) else " (prefill produces the first)"
        )
    canvas.name_axes(axes, x_label, f"time since the previous {kind} (ms)")
    canvas.finish(axes, f"Decode: {_finding(rows, kind)}\n{selection.subject(timed, rows)}")
    return axes[0]


def _finding(rows: pd.DataFrame, kind: str) -> str:
    """TPOT after the shortest and the longest prompt, or what the picture shows."""
    if kind != TOKEN:
        return TITLES[kind]

    def per_token(tpot_ms: float) -> str:
        return f"{digits(tpot_ms)} ms per token"

    return selection.stated_at_ends(rows, TPOT.name, per_token, "after") or TITLES[kind]


def _evenly_spaced(lengths: Sequence[int]) -> list[int]:
    """At most MOST_LENGTHS of the lengths, with the first and the last one."""
    if len(lengths) <= MOST_LENGTHS:
        return list(lengths)
    last = len(lengths) - 1
    return [lengths[number * last // (MOST_LENGTHS - 1)] for number in range(MOST_LENGTHS)]


def _gaps(timed: Records, rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each gap of each answer: `place` 2 is the second token (or event), and so on.

    `run` is the place of the answer's record in `timed`.
    """
    import pandas as pd

    answers: list[dict[str, object]] = []
    n_gaps: list[int] = []
    all_gaps_ns: list[float] = []
    places: list[int] = []
    for setup, runs in table.setups(rows):
        for run in runs.itertuples():
            gaps_ns, kind = _gaps_of(timed[run.run])
            answer = {
                "setup": setup,
                "n_prompt": int(run.n_prompt),
                "run": run.run,
                "is_disturbed": bool(run.disturbed),
                "kind": kind,
            }
            answers.append(answer)
            n_gaps.append(len(gaps_ns))
            all_gaps_ns += gaps_ns
            places += range(2, 2 + len(gaps_ns))
    of_answers = pd.DataFrame(answers)
    gaps = of_answers.loc[of_answers.index.repeat(n_gaps)].reset_index(drop=True)
    return gaps.assign(ms=pd.Series(all_gaps_ns, dtype=float) / 1e6, place=places)


def _gaps_of(record: Record | RequestRecord) -> tuple[Sequence[float], str]:
    """The gaps of an answer in ns, and whether they are between tokens or between events."""
    if isinstance(record, Record):
        return phases.itl_ns(record.run), TOKEN
    gaps_of_tokens = request_times.itl_ns(record.request)
    gaps_of_events = request_times.chunk_gaps_ns(record.request)
    is_by_token = gaps_of_tokens is not None and len(gaps_of_tokens) <= len(gaps_of_events)
    return gaps_of_events, TOKEN if is_by_token else EVENT


def _kind(gaps: pd.DataFrame) -> str:
    kinds = gaps.kind.unique()
    return str(kinds[0]) if len(kinds) == 1 else EITHER


def _lines(gaps: pd.DataFrame, ax: Axes) -> list[DrawnLine]:
    """The lines by prompt length: shades of the colour of decode, or of their setup."""
    groups = [(*key, group) for key, group in gaps.groupby(["setup", "n_prompt"], sort=False)]
    groups.sort(key=lambda group: group[1])
    setups = list(gaps.setup.unique())
    lengths = sorted(gaps.n_prompt.unique())
    axes = canvas.panels(ax, [setup for setup, _, _ in groups])
    shares_axes = len(setups) > 1 and axes[0] is axes[-1]
    styles_of_setups = canvas.styles(len(setups), OF_DECODE)
    lines: list[DrawnLine] = []
    for (setup, n_prompt, group), panel in zip(groups, axes, strict=True):
        setup_style = styles_of_setups[setups.index(setup)]
        colour = setup_style["color"] if shares_axes else OF_DECODE
        style = canvas.shades(len(lengths), colour)[lengths.index(n_prompt)]
        if shares_axes:
            style["marker"] = setup_style["marker"]
        lines.append(DrawnLine(setup, n_prompt, group, panel, style))
    return lines


def _ends_ms(lines: Sequence[DrawnLine]) -> tuple[float, float]:
    """The ends of the axis of times: from zero (a linear axis) unless speeds are very different."""
    top_ms = HEADROOM * max(line.gaps.ms.quantile(0.95, "lower") for line in lines) or 1.0
    medians = [line.gaps.ms.median() for line in lines]
    if not max(medians) > WIDE * min(medians) > 0:
        return 0, top_ms
    lows = [line.gaps.ms[line.gaps.ms > 0].quantile(0.05, "higher") for line in lines]
    return min(lows) / HEADROOM, top_ms


def _draw_line(line: DrawnLine, ends_ms: tuple[float, float]) -> None:
    """Draw the tokens, marks for those beyond the axis, and the running median."""
    ax = line.ax
    gaps = line.gaps
    color = line.style["color"]
    canvas.points(ax, gaps.place, gaps.ms, gaps.is_disturbed, ms=3, alpha=0.3, **line.style)
    bottom_ms, top_ms = ends_ms
    above = gaps.place[gaps.ms > top_ms]
    below = gaps.place[gaps.ms < bottom_ms]
    for places, end_ms, marker in ((above, top_ms, "^"), (below, bottom_ms, "v")):
        if len(places):
            edge = [end_ms] * len(places)
            ax.plot(places, edge, ls="", marker=marker, ms=5, color=color, clip_on=False)
    medians = gaps.groupby("place").ms.median()
    running = medians.rolling(N_RUNNING, center=True, min_periods=1).median()
    ax.plot(running, label="_", lw=2, color=color)


def _name_line(
    line: DrawnLine, ends_ms: tuple[float, float], has_panels: bool, names_setup: bool
) -> None:
    """Name the line in the legend, with the numbers of its points beyond the axis.

    A panel names its setup, has the numbers in its title, and the legend has its lines already.
    """
    bottom_ms, top_ms = ends_ms
    beyond = []
    for side, is_beyond in (
        ("above", line.gaps.ms > top_ms),
        ("below", line.gaps.ms < bottom_ms),
    ):
        if is_beyond.any():
            beyond.append(f"{plural(int(is_beyond.sum()), 'point')} {side} the axis")
    note = f" ({join_and(beyond)})" if beyond else ""
    label = f"{line.name}{note}"
    if has_panels:
        if beyond:
            line.ax.set_title(
                f"{line.ax.get_title()}\n{label}", fontsize=canvas.SMALL_SIZE, pad=8
            )
        return
    if names_setup:
        label = f"{line.name}, {line.setup}{note}"
    line.ax.plot([], [], lw=2, ms=4, **line.style, label=label)


def _draw_bound(line: DrawnLine, timed: Records, roof: Roof) -> None:
    """Draw the least time of each step if memory is the only limit; nothing for a server, or for a
    model whose cost is unknown."""
    record = timed[int(line.gaps.run.iloc[0])]
    if not isinstance(record, Record):
        return
    places = range(2, int(line.gaps.place.max()) + 1)
    settings = record.settings
    bounds_ms: list[float] = []
    for place in places:
        n_past = line.n_prompt + place - 2
        step = cost.step(record.model, 1, n_past, 1, settings.type_k, settings.type_v)
        if step is None:
            return
        bounds_ms.append(step.n_bytes / roof.gbps / 1e6)
    label = f"bound of memory, {digits(roof.gbps)} GB/s"
    line.ax.plot(places, bounds_ms, ls=":", lw=1.6, color=line.style["color"], label=label)


def _add_positions(ax: Axes, n_prompt: int) -> None:
    """Add an axis above: how many tokens the context has before each generated token."""
    from matplotlib.ticker import MaxNLocator

    def position(place: Any) -> Any:
        return place + n_prompt - 1

    def place(position: Any) -> Any:
        return position - n_prompt + 1

    above = ax.secondary_xaxis("top", functions=(position, place))
    above.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    above.set_xlabel("position in the context (tokens before it)", fontsize=canvas.LABEL_SIZE)
    above.tick_params(labelsize=canvas.SMALL_SIZE)
    above.spines["top"].set_visible(False)
    canvas.plain_ticks(above.xaxis)


def _set_scales(lines: Sequence[DrawnLine], ends_ms: tuple[float, float]) -> None:
    """Whole numbers of tokens; a time that does not begin at zero is logarithmic."""
    from matplotlib.ticker import MaxNLocator

    for ax in dict.fromkeys(line.ax for line in lines):
        ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        ax.set_yscale("log" if ends_ms[0] else "linear")
        ax.set_ylim(*ends_ms)
