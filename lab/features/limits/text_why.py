"""Ceilings and explanations as sections: tables, sentences, and the pictures of `lab explain`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import shown
from lab.core.lists import join_and
from lab.core.record import DECODE, PREFILL, Ceilings, Rate, Record, Settings
from lab.features.limits import advice, probing, roofline, where
from lab.features.limits.advice import Experiment, Lever
from lab.features.limits.roofline import ATTENTION, BETWEEN, LAYERS, OUTPUT, Roof, part_s
from lab.process.wire import ATTENTION as FLASH
from lab.process.wire import DOWNLOAD, PLAIN_ATTENTION, UPLOAD
from lab.show import canvas
from lab.show.canvas import COLOURS, INK, MARKERS, PAPER, new_axes, points
from lab.show.section import MOST_LINES, UNKNOWN, Columns, Picture, Section, tabled
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Advice = Sequence[Lever | Experiment]

FEW = 5
"""The most lengths that a picture or a sentence names each."""

FIRST = MOST_LINES - 1
"""Verdicts of an explanation on a terminal, before the first advice; --details shows all."""


def of_ceilings(ceilings: Ceilings) -> Section:
    """The kernels' best rates, and the ridge of the roofline."""
    measured = datetime.strptime(ceilings.measured_at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    days = (datetime.now(UTC) - measured).total_seconds() / 86400
    age = "today" if days < 1 else f"{days:.0f} days ago"
    columns: Columns = (
        ("kernel", lambda rate: rate.op),
        ("type", lambda rate: rate.type),
        ("shape", _shape),
        ("buffer", lambda rate: rate.buffer),
        ("tokens", lambda rate: str(rate.n_tokens)),
        ("threads", lambda rate: UNKNOWN if ceilings.on_gpu else str(rate.n_threads)),
        ("GB/s", lambda rate: digits(probing.gbps(rate))),
        ("GFLOP/s", lambda rate: digits(probing.gflops(rate)) if rate.flops else UNKNOWN),
    )

    def order(rate: Rate) -> tuple[Any, ...]:
        return rate.op, rate.type, -rate.n_threads, rate.rows, rate.columns, rate.n_tokens, rate.n_positions or 0

    best, name = roofline.roof(ceilings), ceilings.device
    answer, sentences = (
        (
            f"Best: {digits(best.gbps)} GB/s and {digits(best.gflops)} GFLOP/s. Arithmetic limits work above "
            f"{digits(best.ridge)} FLOPs per byte (the ridge), memory traffic limits work below."
        ),
        list[str](),
    )
    copied = []
    for op, direction in ((UPLOAD, "to"), (DOWNLOAD, "from")):
        if copies := sorted((rate for rate in ceilings.rates if rate.op == op), key=lambda rate: rate.n_bytes):
            of_few = f"{copies[0].n_bytes:,} bytes in {seconds(min(copies[0].times_ns) / 1e9)}"
            copied.append(f"{direction} {where.label(name)} {digits(probing.gbps(copies[-1]))} GB/s, {of_few}")
    sentences += [f"Copies: {'; '.join(copied)}."] if copied else []
    device = where.device(ceilings.machine, name)
    if device is not None and where.is_remote(device):
        most = max(rate.n_bytes for rate in ceilings.rates) / 1e6
        sentences.append(
            f"The server's caches are unknown. The probes read up to {most:,.0f} MB; if a cache there is larger, its "
            "memory is slower than these figures."
        )
    return Section(
        f"Ceilings of {where.device_label(ceilings.machine, name)}, measured {ceilings.measured_at} ({age})",
        answer=answer,
        **tabled(columns, sorted(ceilings.rates, key=order), keep_all=True),
        sentences=sentences,
        parts=[of_ceilings(other) for other in ceilings.others or ()],
    )


def _shape(rate: Rate) -> str:
    """The shape of a probe: a matrix, its experts, or heads and positions."""
    if rate.op in (FLASH, PLAIN_ATTENTION):
        positions = f" over {rate.n_positions:,}" if rate.n_positions else ""
        return f"{rate.rows} heads of {rate.columns}{positions}"
    if rate.op in (UPLOAD, DOWNLOAD):
        return f"{rate.n_bytes:,} bytes"
    experts = f", {rate.n_expert_used} of {rate.n_expert}" if rate.n_expert else ""
    return UNKNOWN if rate.op == probing.READ else f"{rate.rows} x {rate.columns}{experts}"


def _shares(row: Any) -> str:
    """The parts of a phase's time in percent; several devices have a sentence instead."""
    if row.is_split or shown.ABOVE in row.doubts:
        return UNKNOWN
    parts = *(row.parts[name] for name in (LAYERS, ATTENTION, OUTPUT)), max(0.0, row.measured_s - row.least_s)
    return "/".join(f"{100 * part / row.measured_s:.0f}" for part in parts)


EXPLAINED: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    ("gen", lambda row: f"{row.n_gen:,}"),
    ("phase", lambda row: row.phase),
    ("measured\nms", lambda row: f"{digits(1e3 * row.measured_s)}{shown.mark(row.doubts)}"),
    ("limit", lambda row: row.limit if shown.is_firm(row.doubts) else "not sure"),
    ("% of\nceiling", lambda row: ">100" if shown.ABOVE in row.doubts else f"{100 * row.of_ceiling:.0f}"),
    ("weights/attention/\noutput/rest %", _shares),
    ("GFLOP/s", lambda row: digits(row.gflops)),
    ("GB/s", lambda row: digits(row.gbps)),
    ("FLOPs\nper byte", lambda row: digits(row.intensity)),
    ("GFLOP", lambda row: digits(row.flops / 1e9)),
    ("MB", lambda row: digits(row.n_bytes / 1e6)),
)

LIMITS = {
    roofline.ARITHMETIC: "Arithmetic limits",
    roofline.TRAFFIC: "Memory traffic limits",
    roofline.ATTENTION: "Attention (with --flash-attn {flash}, --cache-type-k {k}, --cache-type-v {v}) limits",
    roofline.KERNEL: "The quantization's kernel (those of others are faster on this machine) limits",
    roofline.OVERHEAD: "Overhead (time outside the large kernels) limits",
}
TOO_LOW = "the ceiling was measured too low; measure again: lab ceilings --again"


def explained(label: str, records: Sequence[Record], ceilings: Ceilings, has_advice: bool = True) -> Section:
    """Runs of one setup: the answer, each phase's time, limit and rates, sentences on limits, changes and parts.

    `data` is the document of --json. LabError if there is nothing to explain, or a ceiling is missing.
    """
    rows = roofline.explain(records, ceilings)
    levers = advice.levers(rows, records[0], ceilings) if has_advice else []
    tried = advice.experiments(rows, records, ceilings) if has_advice else []
    changes: Advice = [*levers, *tried]
    first, best = records[0], roofline.roof(ceilings, where.layers_of(records[0]))
    lines = list(rows.itertuples())
    limits, advised = verdicts(rows, first.settings), [advice_of(one) for one in changes]
    choosing, harness = (
        ", ".join(
            f"{_ends(own[name])} per {'token' if phase == DECODE else 'prompt'}"
            for phase, own in rows.groupby("phase", sort=False)
        )
        for name in ("choosing_s", "harness_s")
    )
    more = [
        *(where_it_went(row) for row in lines if row.is_split and shown.ABOVE not in row.doubts),
        f"The times above leave out choosing tokens ({choosing}) and the lab itself ({harness}).",
        f"The machine's best: {digits(best.gflops)} GFLOP/s and {digits(best.gbps)} GB/s. Below {digits(best.ridge)} "
        f"FLOPs per byte (the ridge) memory limits, above it arithmetic (ceilings of {ceilings.measured_at}).",
    ]
    caption = "Roofline: the rate of each phase (numbers: prompt tokens) below the machine's best."
    draw = partial(_on_figure, partial(plot_roofline, rows, best, label))
    pictures = [Picture("roofline", caption, draw, (5, 4.8))]
    if first.run.every is None:  # a sweep generates too little for a request
        caption = f"Where the time of a request goes: prompt and {first.run.n_gen:,} generated tokens."
        pictures.append(Picture("where", caption, partial(_on_figure, partial(plot_where, rows, label)), (5, 4.8)))
    warnings = [*_caveats(first), *probing.doubt_words(ceilings)]
    document: dict[str, Any] = {
        "setup": label,
        "roof": best._asdict(),
        "levers": [lever._asdict() for lever in levers],
        "experiments": [{**one.figures, "command": one.command, "experiment": one.experiment} for one in tried],
        "ceilings_measured_at": ceilings.measured_at,
        "warnings": warnings,
        "rows": rows.to_dict("records"),
    }
    return Section(
        label,
        "measured ms leave out sampling; 100 % of ceiling: as fast as the same kernels alone (lab ceilings); "
        "output: the last layer; rest: time outside the kernels",
        answer=answer(rows, changes, first.model.quantization or "these") if has_advice else "",
        **tabled(EXPLAINED, lines, keep_all=True),
        warnings=warnings,
        sentences=[*limits[:FIRST], *advised[:1], *limits[FIRST:], *advised[1:], *more],
        pictures=pictures,
        data=lambda: document,
    )


def answer(rows: pd.DataFrame, changes: Advice, quantization: str) -> str:
    """What limits most of the time, and the change that is predicted to help most."""
    firm = rows[rows.doubts.map(shown.is_firm)]
    if firm.empty:
        return "What limits these runs cannot be told: they, or the ceilings, were disturbed."
    limits = firm.limit.value_counts()
    what = f"{limits.index[0]} limits the speed"
    if limits.index[0] == roofline.KERNEL:
        what = (
            f"the largest part of the time goes to multiplying {quantization} weights: llama.cpp's kernel (routine) "
            f"for {quantization} is slower than memory and arithmetic allow"
        )
    change = f"The change that helps most (predicted) is {changes[0].words}." if changes else "No known change helps."
    return f"In {limits.iloc[0]} of {len(rows)} rows {what}. {change}"


def where_it_went(row: Any) -> str:
    """A sentence with the parts of a phase's time on several devices, in percent."""
    parts = {name: part for name, part in row.parts.items() if part or name == BETWEEN}
    parts["rest"] = max(0.0, row.measured_s - row.least_s)
    percents = ", ".join(f"{name} {100 * part / row.measured_s:.0f} %" for name, part in parts.items())
    overlap = " (the devices work at the same time)" if row.overlaps else ""
    return f"{row.phase.capitalize()} at {row.n_prompt:,} prompt tokens: {percents}{overlap}."


def _ends(times_s: pd.Series[float]) -> str:
    return " to ".join(dict.fromkeys(seconds(value) for value in (times_s.min(), times_s.max())))


def _caveats(record: Record) -> list[str]:
    """Where the ceilings do not fit a record's settings."""
    settings = record.settings
    words = {
        "All devices share each layer (--split-mode tensor), but the parts assume that each has whole layers.": (
            settings.split_mode == "tensor"
        ),
        "Tensors that --override-tensor moved are counted on the device of their layer.": settings.override_tensor,
        "The ceiling of attention assumes one type for the whole cache.": settings.type_k != settings.type_v,
    }
    return [sentence for sentence, is_so in words.items() if is_so]


def verdicts(rows: pd.DataFrame, settings: Settings) -> list[str]:
    """Sentences on what limited the phases, with the share of the ceiling that each reached; one for each limit."""
    sentences = []
    firm = rows[rows.doubts.map(shown.is_firm)]
    now = {"flash": settings.flash_attn_resolved or settings.flash_attn, "k": settings.type_k, "v": settings.type_v}
    for limit, alike in firm.groupby("limit", sort=False):
        phases = []
        for phase, own in alike.groupby("phase", sort=False):
            lengths = join_and([f"{n:,}" for n in sorted(set(own.n_prompt))])
            shares = join_and([f"{100 * share:.0f}" for share in own.of_ceiling])
            if len(own) > FEW:
                lengths = f"{own.n_prompt.iloc[0]:,} to {own.n_prompt.iloc[-1]:,}"
                shares = f"{100 * own.of_ceiling.min():.0f} to {100 * own.of_ceiling.max():.0f}"
            what = "prefill of" if phase == PREFILL else "decode after"
            phases.append(f"{what} {lengths} tokens ({shares} % of the ceiling)")
        sentences.append(f"{LIMITS[str(limit)].format(**now)} {' and '.join(phases)}.")
    disturbed = rows[rows.doubts.map(lambda doubts: shown.DISTURBED in doubts)]
    if len(disturbed):
        lengths = join_and([f"{n:,}" for n in sorted(set(disturbed.n_prompt))])
        sentences.append(
            f"No verdict on {' and '.join(disturbed.phase.unique())} at {lengths} prompt tokens: the runs were "
            "disturbed. Measure again while no other program runs."
        )
    if rows.doubts.map(lambda doubts: shown.ABOVE in doubts).any():
        sentences.append(f"A run was faster than its ceiling, so predicted gains are not sure: {TOO_LOW}.")
    return sentences


def advice_of(one: Lever | Experiment) -> str:
    """A sentence on a change: its predicted gain, and the command to try it."""
    return f"Predicted for {one.words}.{f' Try: {one.command}' if one.command else ''}"


# Pictures

HATCHES = ("", "//", "..", "xx", "--")
ALL_ELSE = "rest"


def _on_figure(draw: Any, figure: Any) -> None:
    draw(ax=figure.subplots())


def plot_roofline(rows: pd.DataFrame, roof: Roof, subject: str, ax: Axes | None = None) -> Axes:
    """GFLOP/s over FLOPs per byte: each phase at each length as a point under the machine's two roofs.

    lab.plot_roofline(lab.explain(records, best), lesson.roof(best), "my machine")
    """
    ax = ax or new_axes()
    ends = min(1, rows.intensity.min()) / 2, max(roof.ridge, rows.intensity.max()) * 3
    ridge = [ends[0], roof.ridge, ends[1]]
    label = f"roof: {digits(roof.gbps)} GB/s, then {digits(roof.gflops)} GFLOP/s"
    ax.plot(ridge, [min(roof.gbps * x, roof.gflops) for x in ridge], color=INK, lw=2, label=label)
    labels, marked = list[tuple[float, float, str]](), list[tuple[float, float]]()
    for number, (phase, own) in enumerate(rows.groupby("phase", sort=False)):
        style = {"color": COLOURS[number], "marker": MARKERS[number]}
        unsure = [not shown.is_firm(doubts) for doubts in own.doubts]
        points(ax, own.intensity.tolist(), own.gflops.tolist(), unsure, ms=7, **style, label=phase)
        ceilings = own.flops / own.least_s / 1e9
        bar: dict[str, Any] = {"ls": "", "marker": "_", "ms": 9, "mew": 2, "color": COLOURS[number]}
        ax.plot(own.intensity, ceilings, **bar, label=f"{phase}: ceiling of its kernels")
        named = own if len(own) <= FEW else own.iloc[[0, -1]]
        labels += [(row.intensity, row.gflops, f"{row.n_prompt:,}") for row in named.itertuples()]
        marked += [*zip(own.intensity, ceilings, strict=True), *zip(own.intensity, own.gflops, strict=True)]
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(bottom=ax.get_ylim()[0] / 1.5)  # for labels
    ax.set(xlabel="arithmetic intensity (FLOPs per byte)", ylabel="rate of arithmetic (GFLOP/s)")
    canvas.finish([ax], f"Roofline: the rate of each phase (numbers: prompt tokens)\n{subject}")
    canvas.label_points(ax, labels, marked)
    return ax


def plot_where(rows: pd.DataFrame, subject: str, ax: Axes | None = None) -> Axes:
    """Stacked bars over prompt lengths: the parts of a request's time in percent, by device if there are several.

    lab.plot_where(lab.explain(records, best), "my machine")
    """
    import pandas as pd

    ax, n_gens = ax or new_axes(), sorted(set(rows.n_gen))
    bars = list[dict[str, Any]]()
    for row in rows.itertuples():
        own = bar_parts(row)  # scaled to the phase's share of the request
        for name, part in own.items():
            share = row.of_request * part / sum(own.values())
            bars.append(
                {"n_prompt": row.n_prompt, "n_gen": row.n_gen, "phase": row.phase, "name": name, "share": share}
            )
    t = pd.DataFrame(bars).pivot_table("share", ["n_prompt", "n_gen"], ["phase", "name"], sort=False).fillna(0.0)
    t = 100 * t.div(t.sum(axis=1), axis=0)
    doubts = rows.groupby(["n_prompt", "n_gen"]).doubts.agg(lambda own: shown.mark(shown.all_of(list(own))))
    labels = [f"{n:,}" + (f" + {n_gen:,}" if len(n_gens) > 1 else "") + doubts[n, n_gen] for n, n_gen in t.index]
    base = 0.0 * t.iloc[:, 0]
    for number, phase in enumerate((PREFILL, DECODE)):
        names = [name for one, name in t.columns if one == phase]
        names.sort(key=lambda name: (name == BETWEEN) + 2 * (name == ALL_ELSE))
        for i, name in enumerate(names):
            ax.bar(
                labels,
                t[phase, name],
                bottom=base,
                color=COLOURS[number],
                alpha=1 - 0.3 * i * 2 / max(2, len(names) - 1),
                hatch=HATCHES[i % len(HATCHES)],
                edgecolor=PAPER,
                label=f"{phase}: {name}",
            )
            base = base + t[phase, name]
    if len(t) > FEW:
        ax.set_xticks(range(0, len(t), -(-len(t) // FEW)))
    several = " + generated tokens" if len(n_gens) > 1 else ""
    ax.set(xlabel=f"prompt length (tokens){several}", ylabel="share of the request's time (%)")
    n_gen = "generated tokens" if several else f"{n_gens[0]:,} generated tokens"
    note = "\n!: some runs were disturbed; !!: unreliable" if doubts.any() else ""
    canvas.finish([ax], f"Where the time goes: prompt and {n_gen}\n{subject}{note}")
    return ax


def bar_parts(row: Any) -> dict[str, float]:
    """Seconds of a phase's parts, which add up to the measured time unless a kernel was faster than its ceiling.

    Devices that work at the same time share the time of the slowest, in proportion to their own times.
    """
    rest = max(0.0, row.measured_s - row.least_s)
    if not row.is_split:
        parts = {"weights": row.parts[LAYERS], "attention": part_s(row, ATTENTION), "output": row.parts[OUTPUT]}
        return parts | {ALL_ELSE: rest}
    scale = row.least_s / sum(row.parts.values()) if row.overlaps else 1.0
    made: dict[str, float] = {}
    for name, part in row.parts.items():
        device = name if name == BETWEEN else name.rpartition(" ")[0]
        made[device] = made.get(device, 0.0) + scale * part
    return made | {ALL_ELSE: rest}
