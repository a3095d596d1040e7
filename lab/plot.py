"""The two pictures: what a prompt costs, and what each further token costs.

Every point of every run is drawn; the line over them is a median. Colours are Okabe and Ito's, which
colour-blind readers can tell apart, and markers differ as well.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import machine, table
from lab.errors import LabError
from lab.record import OK, PREFILL, Record
from lab.table import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", ":", "-.")
RUNNING_MEDIAN = 15
"""Tokens that the line in the decode plot takes the median of."""


def plot_prefill(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Prefill time against prompt length, both logarithmic: points are runs, the thick line their medians.

    Thin lines are the inside of each run, from its steps. The dashed grey line is what the time would be
    if every token cost what it cost at its cheapest.
    """
    records = _timed(records)
    ax = ax or _new_axes()
    step_rows = table.steps(records)
    setups = table.setups(table.runs(records))
    per_token: dict[float, float] = {}
    for (label, rows), (_, inside), style in zip(setups, table.setups(step_rows), _styles(), strict=False):
        name = f"{label}: " if len(setups) > 1 else ""
        for _, run in inside[inside.kind == PREFILL].groupby("run"):
            if len(run) > 1:
                (thin,) = ax.plot(run.n_past + run.n_tokens, run.ready_s, color=style["color"], lw=0.7, alpha=0.5)
                thin.set_label("_" if name else "inside each run, step by step")
                name = name or " "
        medians = rows.groupby("n_prompt").prefill_s.median()
        ax.plot(medians.index, medians, lw=2, color=style["color"], label=f"{name}median over runs".strip())
        ax.plot(
            rows.n_prompt,
            rows.prefill_s,
            ls="",
            ms=6,
            alpha=0.6,
            mew=0,
            **style,
            label=None if name.strip() else "runs",
        )
        per_token.update((float(seconds / n), float(n)) for n, seconds in medians.items())
    cheapest = min(per_token)
    lengths = [step_rows.n_prompt.min(), step_rows.n_prompt.max()]
    guide = f"in proportion: {digits(1e3 * cheapest)} ms a token, as at {per_token[cheapest]:,.0f}"
    ax.plot(lengths, [n * cheapest for n in lengths], color="0.4", ls="--", lw=1.2, label=guide)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain_ticks(ax.xaxis)
    _plain_ticks(ax.yaxis)
    ax.set_xlabel("prompt length (tokens)")
    ax.set_ylabel("prefill time (s)")
    return _finish(ax, "Prefill: time until the prompt is processed", records)


def plot_decode(records: Sequence[Record], ax: Axes | None = None) -> Axes:
    """Decode time per token (ITL) against the token's place in the generation, one line a prompt length.

    Points are tokens of all repeats; the line is the running median of the per-token medians. Points above
    the axis are counted and marked at its upper edge.
    """
    records = _timed(records)
    ax = ax or _new_axes()
    decode = table.steps(records)
    decode = decode[decode.itl_ms.notna()]
    if decode.empty:
        raise LabError("There is nothing to draw: no run decoded a token.", "Measure with --gen 2 or more.")
    groups = table.setups(decode)
    n_lines = decode.groupby([*table.SETUP, "n_prompt"], dropna=False).ngroups
    headroom = 1.35 + 0.08 * max(0, n_lines - 3)  # for the legend
    top = headroom * float(decode.groupby([*table.SETUP, "n_prompt"], dropna=False).itl_ms.quantile(0.95).max())
    lengths = {n: i for i, n in enumerate(sorted(decode.n_prompt.unique()))}
    for line, (setup, rows) in enumerate(groups):
        for n_prompt, tokens in rows.groupby("n_prompt"):
            colour = COLOURS[lengths[n_prompt] % len(COLOURS)]
            marker = MARKERS[lengths[n_prompt] % len(MARKERS)]
            ax.plot(tokens.generated, tokens.itl_ms, ls="", marker=marker, ms=3, alpha=0.3, mew=0, color=colour)
            above = tokens[tokens.itl_ms > top]
            if len(above):
                ax.plot(above.generated, [top] * len(above), ls="", marker="^", ms=5, color=colour, clip_on=False)
            middle = tokens.groupby("generated").itl_ms.median()
            middle = middle.rolling(RUNNING_MEDIAN, center=True, min_periods=1).median()
            label = f"after {n_prompt:,} prompt tokens" + (f", {setup}" if len(groups) > 1 else "")
            label += f" ({len(above)} point{'s' * (len(above) > 1)} above the axis)" if len(above) else ""
            ax.plot(middle.index, middle, color=colour, lw=2, ls=LINES[line % len(LINES)], label=label)
    ax.set_ylim(0, top)
    ax.set_xlabel("generated token (the first comes out of prefill)")
    ax.set_ylabel("time since the token before (ms)")
    return _finish(ax, "Decode: time per generated token", records)


def save(records: Sequence[Record], folder: Path, stem: str) -> list[Path]:
    """Both plots as PNG and SVG: `<stem>-prefill.png` and so on. What there is no data for is left out."""
    from matplotlib.figure import Figure

    written = []
    drawings: dict[str, Any] = {"prefill": plot_prefill}
    if any(record.run.n_gen > 1 for record in _timed(records)):
        drawings["decode"] = plot_decode
    for name, draw in drawings.items():
        figure = Figure(figsize=(8, 5), layout="constrained")
        draw(records, figure.subplots())
        for suffix in ("png", "svg"):
            path = folder / f"{stem}-{name}.{suffix}"
            try:
                figure.savefig(path, dpi=150)
            except OSError as problem:
                raise LabError(f"The plot {path} cannot be written: {problem.strerror}.", "Use --out.") from None
            written.append(path)
    return written


def _timed(records: Sequence[Record]) -> list[Record]:
    timed = [record for record in records if record.run.status == OK and not record.run.warmup]
    if not timed:
        raise LabError("There is nothing to draw: no run went well.", "Look at the errors: lab show RESULTS")
    return timed


def _styles() -> list[dict[str, Any]]:
    return [{"color": colour, "marker": marker} for colour, marker in zip(COLOURS, MARKERS, strict=True)] * 8


def _new_axes() -> Axes:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(8, 5), layout="constrained")[1]


def _plain_ticks(axis: Any) -> None:
    """1,000 instead of 10^3."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _finish(ax: Axes, what: str, records: Sequence[Record]) -> Axes:
    models = sorted({table.model_label(record) for record in records})
    machines = sorted({machine.label(r.machine, r.settings.n_gpu_layers) for r in records})
    repeats = collections.Counter(
        (table.model_label(r), r.machine, r.settings, r.run.n_prompt, r.run.n_gen) for r in records
    )
    n_repeat = max(repeats.values())
    shown = f"{_short(models, 'models')} on {_short(machines, 'machines')}"
    ax.set_title(f"{what}\n{shown} ({n_repeat} repeat{'s' * (n_repeat > 1)})", fontsize=11)
    ax.grid(True, which="major", color="0.85", lw=0.6)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, fontsize=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def _short(names: list[str], kind: str) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} {kind}"
