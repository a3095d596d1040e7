"""The pictures of `lab batch`, `prefix`, `stall` and `speculate`.

Points are runs, tokens or blocks, hollow if disturbed; lines are medians, dashes are predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import disturbances, table
from lab.analysis.wording import digits, seconds
from lab.core import gaps, guesses, lever_figures, prefix_times
from lab.core.gaps import Gaps
from lab.core.record import Record
from lab.errors import LabError
from lab.experiments import batching, prefix_cache, speculation_rows
from lab.experiments.speculation_rows import CurveRow
from lab.show import canvas, plot_runs
from lab.show.canvas import GUIDE, MOST_SERIES, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_batch(
    rows: Sequence[batching.Row], records: Sequence[Record], subject: str, ridge: float | None, figure: Figure
) -> Figure:
    """The total rate (left) and the rate per user (right), from rows and runs of one setup.

    The grey lines show the rates if sharing a step cost nothing.
    """
    groups = batching.alike(rows)
    parts = [groups] if len(groups) <= MOST_SERIES else [[group] for group in groups]
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    axes = figure.subplots(len(parts), 2, squeeze=False, sharex=True)
    for part, pair in zip(parts, axes, strict=True):
        for ax, whose, scale in zip(pair, ("all sequences", "each sequence"), (1, 0), strict=True):
            for group, style in zip(part, canvas.styles(len(part)), strict=True):
                _rates(ax, group, records, scale, style)
            first = part[0][0]
            if first.n_seq == 1:
                numbers = [row.n_seq for row in part[0]]
                rates = [first.user_tps * (n if scale else 1) for n in numbers]
                ax.plot(numbers, rates, color=GUIDE, ls=":", lw=1.2, label="if sharing a step cost nothing")
            if ridge is not None and 1 <= ridge <= rows[-1].n_seq:
                label = f"ridge: arithmetic is the limit from {digits(ridge)} sequences"
                ax.axvline(ridge, color=GUIDE, ls="-.", lw=1, label=label)
            canvas.over_lengths(ax, [row.n_seq for row in rows])
            ax.set_xlabel("sequences in a step")
            ax.set_yscale("log")
            ax.set_ylabel(f"tokens per second, {whose}")
    canvas.finish(list(axes.flat), f"Sequences decoded together\n{subject}")
    return figure


def _rates(
    ax: Axes, rows: Sequence[batching.Row], records: Sequence[Record], scale: int, style: dict[str, Any]
) -> None:
    """The rates of one prompt length; `scale` 1: of all sequences together, 0: of each."""
    first, colour = rows[0], style["color"]
    name = f"{first.n_prompt:,} prompt tokens{', shared' if first.is_shared else ''}"
    medians = [row.n_seq**scale / row.step_s for row in rows]
    ax.plot([row.n_seq for row in rows], medians, color=colour, lw=2, label=f"{name}: median")
    of_runs = [
        (record.run.batch.n_seq, record.run.batch.n_seq**scale / lever_figures.step_s(record.run), record)
        for record in records
        if record.run.batch is not None
        and (record.run.n_prompt, record.run.n_gen, record.run.batch.is_shared)
        == (first.n_prompt, first.n_gen, first.is_shared)
        and lever_figures.figures(record.run)
    ]
    _runs(ax, of_runs, **style, label=f"{name}: runs")
    expected = [(row.n_seq, row.n_seq**scale / row.expected_s) for row in rows if row.expected_s]
    if expected:
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label=f"{name}: predicted")


def _runs(ax: Axes, measured: Iterable[tuple[float, float, Record]], **style: Any) -> None:
    """Points of runs, hollow where these were disturbed."""
    rows = [(x, y, bool(disturbances.disturbances(record))) for x, y, record in measured]
    if rows:
        points(ax, *zip(*rows, strict=True), **{"ms": 5, "alpha": 0.6, **style})


LABELS = ("cold", "prefix copied in the cache", "restored from RAM", "restored from disk")
NAMES = {"ram_s": "RAM", "disk_s": "disk"}
"""Names of the break-evens, by figure."""


def plot_prefix(rows: Sequence[prefix_cache.Row], records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """Time to first token over the length of the prefix, both logarithmic, from rows and runs of one setup.

    The dashed grey line is the prediction without a cache. A dotted vertical line marks a break-even between two
    measured lengths; the legend gives the others.
    """
    ax = figure.subplots()
    n_suffix = rows[0].n_suffix
    alike = [row for row in rows if row.n_suffix == n_suffix]
    own = [record for record in records if record.run.prefix and record.run.prefix.n_suffix == n_suffix]
    known = {one.name: one for one in prefix_cache.break_even(alike)}
    lengths = [row.n_prefix for row in alike]
    for way, label, style in zip(prefix_times.WAYS, LABELS, canvas.styles(len(LABELS)), strict=True):
        pays = known.get(NAMES.get(way, ""))
        name = f"{label} (pays {prefix_cache.words(pays)})" if pays else label
        name += "" if pays else ": median and runs"
        ax.plot(lengths, [getattr(row, way) for row in alike], **style, ms=4, mew=0, lw=2, label=name)
        of_runs = [
            (record.run.prefix.n_prefix, figures[way], record)
            for record in own
            if record.run.prefix and (figures := prefix_times.figures(record.run))
        ]
        _runs(ax, of_runs, **style, ms=7)
        if pays and pays.is_measured and pays.n_tokens is not None:
            ax.axvline(pays.n_tokens, color=style["color"], ls=":", lw=1.4)
    predicted = [(row.n_prefix, row.promised_s + row.cold_s - row.prefix_s) for row in alike if row.promised_s]
    if predicted:
        label = "cold, predicted from prefill times"
        ax.plot(*zip(*predicted, strict=True), color=GUIDE, ls="--", lw=1.2, label=label)
    canvas.over_lengths(ax, lengths)
    ax.set_xlabel("length of the prefix (tokens)")
    ax.set_yscale("log")
    ax.set_ylabel("time to first token (s)")
    canvas.finish([ax], f"Time to first token: a prefix, then a suffix of {n_suffix:,} tokens\n{subject}")
    return figure


MOST_CHUNKS = 4

Lines = dict[str, list[tuple[Gaps, Record]]]
"""The runs of each line, by its name."""


def plot_stall(records: Sequence[Record], figure: Figure | None = None, limit_s: float | None = None) -> Figure:
    """The gap before each token of the streams over the time since the new prompt came, a panel for each chunk.

    A point is a token of a run; the line is the run with the median longest gap, each step as wide as the wait. The
    vertical line is the new request's first token. Of more than 4 chunks it draws the smallest, the largest and two
    between. `limit_s` is drawn if given.
    """
    panels = _panels(records)
    if not panels:
        raise LabError("There is nothing to draw: no run shows a stall.", "Measure some: lab stall")
    figure = figure or canvas.new_figure((11, 5))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    parts = [names] if len(names) <= MOST_SERIES else [[name] for name in names]
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    axes = figure.subplots(len(parts), len(panels), sharex=True, sharey=True, squeeze=False)
    for part, own_axes in zip(parts, axes, strict=True):
        for ax, (chunk, lines) in zip(own_axes, panels.items(), strict=True):
            for name, style in zip(part, canvas.styles(len(part)), strict=True):
                if name in lines:
                    _draw(ax, name, lines[name], style)
            if limit_s is not None:
                ax.axhline(1e3 * limit_s, color=GUIDE, ls="-.", lw=1.4, label=f"limit: {seconds(limit_s)}")
            chunk_words = "all at once" if chunk is None else f"chunks of {chunk:,}"
            ax.set_title(
                chunk_words if len(parts) == 1 else f"{part[0]}\n{chunk_words}", fontsize=11 - 2 * (len(parts) > 1)
            )
            ax.plot([], [], color=GUIDE, ls=":", lw=1.2, label="first token of the new request")
            ax.set_yscale("log")
        own_axes[0].set_ylabel("time since the previous token (ms)")
    for ax in axes[-1]:
        ax.set_xlabel("time since the prompt came (s)")
    canvas.finish(list(axes.flat), _title(records), is_apart=True)
    return figure


def _draw(ax: Axes, name: str, runs: Sequence[tuple[Gaps, Record]], style: dict[str, Any]) -> None:
    tokens = [(at, 1e3 * gap, record) for run, record in runs for at, gap in zip(run.ends_s, run.gaps_s, strict=True)]
    _runs(ax, tokens, **style, ms=3.5, alpha=0.5)
    middle, _ = sorted(runs, key=lambda run: max(run[0].during_s))[(len(runs) - 1) // 2]
    gaps_ms = [1e3 * gap for gap in middle.gaps_s]
    began = middle.ends_s[0] - middle.gaps_s[0]
    colour = style["color"]
    ax.step([began, *middle.ends_s], [gaps_ms[0], *gaps_ms], where="pre", color=colour, lw=1.6, label=name)
    ax.axvline(middle.newcomer_s, color=colour, ls=":", lw=1.2)


def _panels(records: Sequence[Record]) -> dict[int | None, Lines]:
    """The runs of each line by chunk, in ascending order, all at once last."""
    timed = [record for record in records if record.run.is_timed]
    known = [(record, of) for record in timed if (of := gaps.of(record.run)) is not None]
    if not known:
        return {}
    records_of = [record for record, _ in known]
    runs = table.runs(records_of)
    setups = table.setups(runs)
    n_lengths = len({record.run.n_prompt for record, _ in known})
    panels: dict[int | None, Lines] = {}
    for label, rows in setups:
        for index in rows.run:
            record, of = known[index]
            lever = record.run.stall
            assert lever is not None
            name = f"{lever.n_streams} stream{'s' * (lever.n_streams > 1)}"
            name += f", prompt of {record.run.n_prompt:,}" if n_lengths > 1 else ""
            name = f"{label}: {name}" if len(setups) > 1 else name
            panels.setdefault(lever.chunk, {}).setdefault(name, []).append((of, records_of[index]))
    chunks = sorted(panels, key=lambda chunk: (chunk is None, chunk or 0))
    if len(chunks) > MOST_CHUNKS:
        chunks = [chunks[round(i * (len(chunks) - 1) / (MOST_CHUNKS - 1))] for i in range(MOST_CHUNKS)]
    return {chunk: dict(sorted(panels[chunk].items())) for chunk in chunks}


def _title(records: Sequence[Record]) -> str:
    own = [record for record in records if record.run.stall]
    lengths = sorted({f"{record.run.n_prompt:,}" for record in own})
    prompt = f"a prompt of {lengths[0]} tokens" if len(lengths) == 1 else "long prompts"
    n = 1 + max(record.run.repeat for record in own)
    repeats = f"{n} repeat{'s' * (n > 1)}"
    return f"Gaps between tokens of the streams when {prompt} comes\n{plot_runs.where(own)} ({repeats})"


MOST_PANELS = 8


def plot_speculation(
    rows: Sequence[speculation_rows.Row], records: Sequence[Record], subject: str, figure: Figure
) -> Figure:
    """The speed-up over the draft length, a panel for each text, from rows and runs of one setup."""
    keys = list(dict.fromkeys((row.text, row.n_prompt, row.n_gen) for row in rows))[:MOST_PANELS]
    axes = canvas.grid(figure, len(keys), min(len(keys), 4), sharex=True, sharey=True)
    drafts = list(dict.fromkeys(row.draft for row in rows))
    for ax, key in zip(axes, keys, strict=True):
        for draft, style in zip(drafts, canvas.styles(len(drafts)), strict=True):
            own = [row for row in rows if (row.text, row.n_prompt, row.n_gen, row.draft) == (*key, draft)]
            if own:
                _speed_ups(ax, own, records, style)
        ax.axhline(1, color=GUIDE, ls=":", lw=1.2, label="plain decoding")
        ax.set_xticks(sorted({row.n_draft for row in rows}))
        ax.margins(x=0.1)
        ax.set_title(f"{key[0]}, {key[1]:,} + {key[2]:,} tokens", fontsize=10)
        ax.set_xlabel("drafted tokens per step")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("speed-up over plain decoding")
    canvas.finish(axes, f"Speculative decoding\n{subject}", is_apart=True)
    return figure


def _speed_ups(
    ax: Axes, alike: Sequence[speculation_rows.Row], records: Sequence[Record], style: dict[str, Any]
) -> None:
    """The panel of one text, for one draft."""
    ordered = sorted((row for row in alike if row.speed_up is not None), key=lambda row: row.n_draft)
    name, colour = f"drafted by {alike[0].draft}", style["color"]
    medians = [row.speed_up or 0.0 for row in ordered]
    ax.plot([row.n_draft for row in ordered], medians, color=colour, lw=2, marker="_", ms=14, label=f"{name}: median")
    of_blocks = [point for row in ordered for point in _blocks(row, records)]
    if of_blocks:
        points(ax, *zip(*of_blocks, strict=True), **style, ms=5, alpha=0.6, label=f"{name}: blocks")
    expected = [(row.n_draft, row.expected) for row in ordered if row.expected is not None]
    if expected:
        label = f"{name}: predicted"
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, marker="x", ms=5, label=label)


def _blocks(row: speculation_rows.Row, records: Sequence[Record]) -> list[tuple[int, float, bool]]:
    """The speed-up of each block, and whether a run of it was disturbed."""
    times = speculation_rows.by_block(records, row.key)
    disturbed = {
        (record.session, record.run.repeat, record.run.engine)
        for record in records
        if (lever := record.run.speculation)
        and (lever.text, lever.n_draft in (0, row.n_draft)) == (row.text, True)
        and disturbances.disturbances(record)
    }
    plain = times.get(("", 0), {})
    of_draft = times.get((row.draft, row.n_draft), {}).items()
    return [(row.n_draft, plain[block] / seconds, block in disturbed) for block, seconds in of_draft if block in plain]


def plot_curve(rows: Sequence[CurveRow], records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """The time of a step of several positions relative to a step of one; points are runs, the line is their median.

    A second panel draws the speed-ups by the share of accepted tokens, if there are any.
    """
    has_gains = any(row.speed_ups for row in rows)
    axes = figure.subplots(1, 2 if has_gains else 1, squeeze=False)[0]
    keys = list(dict.fromkeys((row.n_prompt, row.draft) for row in rows))
    for key, style in zip(keys, canvas.styles(len(keys)), strict=True):
        _costs(axes[0], [row for row in rows if (row.n_prompt, row.draft) == key], records, style)
    numbers = sorted({row.n_positions for row in rows})
    axes[0].plot(numbers, numbers, color=GUIDE, ls=":", lw=1.2, label="if every position cost a step")
    axes[0].axhline(1, color=GUIDE, ls="-.", lw=1.2, label="if more positions cost nothing")
    axes[0].set_xlabel("positions in a step")
    axes[0].set_ylabel("time of a step / time of a step of one position (v)")
    if has_gains:
        _gains(axes[1], rows)
    for ax, ticks in zip(axes, (numbers, [n - 1 for n in numbers if n > 1]), strict=False):
        ax.set_xticks(ticks[:: -(-len(ticks) // 16)])
        ax.set_ylim(bottom=0)
    canvas.finish(axes, f"Cost of verifying several tokens in one step\n{subject}", is_apart=True)
    return figure


def _costs(ax: Axes, alike: Sequence[CurveRow], records: Sequence[Record], style: dict[str, Any]) -> None:
    """The curve of one prompt length and draft."""
    name = f"after {alike[0].n_prompt:,} prompt tokens" + (f", {alike[0].draft}" if alike[0].c is not None else "")
    numbers, colour = [row.n_positions for row in alike], style["color"]
    ax.plot(numbers, [row.v for row in alike], color=colour, lw=2, label=f"{name}: median")
    one = alike[0].step_s / alike[0].v
    of_runs = [
        (n, seconds / one, record)
        for record in records
        if (record.run.n_prompt, record.run.speculation and record.run.speculation.draft)
        == (alike[0].n_prompt, alike[0].draft)
        and (its := guesses.step_times([record.run]))
        for n, seconds in its.target.items()
    ]
    _runs(ax, of_runs, **style, label=f"{name}: runs")
    expected = [(row.n_positions, row.expected_v) for row in alike if row.expected_v is not None]
    if expected:
        label = f"{name}: predicted from ceilings"
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label=label)


def _gains(ax: Axes, rows: Sequence[CurveRow]) -> None:
    """Speed-ups of the first curve, a line for each share of accepted tokens."""
    first = rows[0].n_prompt, rows[0].draft
    alike = [row for row in rows if (row.n_prompt, row.draft) == first and row.speed_ups]
    shades = canvas.shades(len(speculation_rows.ACCEPTANCES))
    for i, (share, colour) in enumerate(zip(speculation_rows.ACCEPTANCES, shades, strict=True)):
        numbers, gains = [row.n_positions - 1 for row in alike], [row.speed_ups[i] for row in alike]
        ax.plot(numbers, gains, color=colour, marker=".", lw=1.6, label=f"{100 * share:.0f} % accepted")
    ax.axhline(1, color=GUIDE, ls=":", lw=1.2, label="plain decoding")
    ax.set_xlabel("drafted tokens per step")
    ax.set_ylabel("computed speed-up")
