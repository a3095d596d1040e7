"""A token's way as tables, sentences and a picture: layers from left to right, the operations of each below it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped, join_and, plural
from lab.core.record import Record
from lab.core.traced import SAMPLING, Part, Phase, TokenTrace
from lab.features.limits.explanation import TOO_LOW
from lab.features.trace import attention, token_trace
from lab.runner import as_options
from lab.show import setup_columns
from lab.show.canvas import COLOURS, GRID, GUIDE, PAPER, finish
from lab.show.kind import Context, Kind
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEED_FORWARD, PROJECTIONS, ATTENTION, SMALL = (
    "feed-forward",
    "Q, K, V and output",
    "attention and cache",
    "norms and sums",
)
FAMILIES = {
    **dict.fromkeys(("Q", "K", "V", "Q, K and V", "attention output"), PROJECTIONS),
    **dict.fromkeys((token_trace.ATTENTION, token_trace.ROTATION, token_trace.WRITE), ATTENTION),
    **dict.fromkeys((token_trace.OUTSIDE, SAMPLING), "outside and sampling"),
    **{name: name for name in (token_trace.OUTPUT, token_trace.COPIES)},
}
"""Operations that share a colour and a sentence; the others are SMALL."""

OFF = 0.05
"""A sum of the operations that is further than this from the step without stops makes the shares wrong."""

CAPTION = "Above the layers, below them their operations, as wide as they take time."

LETTER = 0.0065
"""Share of a row's width that a letter of an operation's name needs."""


def family(operation: str) -> str:
    """The family of an operation."""
    is_feed_forward = operation.startswith(("feed-forward", "router"))
    return FEED_FORWARD if is_feed_forward else FAMILIES.get(operation, SMALL)


def sections(records: Sequence[Record], by_layer: bool = False) -> list[Section]:
    """What each run of `lab trace` found: sections of a prefill and of a decode, or of attention weights.

    Tables are by operation (and by layer). The picture and where the time goes are with decode.
    """
    made = list[Section]()
    for record in records:
        model = setup_columns.model_label(record)
        if traced := record.run.trace:
            prefill, decode = (_section(model, phase, by_layer) for phase in traced.phases)
            hint = [] if traced.ceilings_measured_at else ["The ceilings of these kernels are not known: lab ceilings"]
            draws = partial(draw, subject=setup_columns.where([record]), traced=traced)
            notes, picture = [*decode.notes, *hint], Picture("trace", CAPTION, draws, (10, 7))
            decode = dataclasses.replace(decode, sentences=sentences(traced), notes=notes, pictures=[picture])
            made += [prefill, decode]
        if seen := record.run.attention:
            made.append(attention.section(seen, model))
    return made


def as_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The same for JSON, with the sums of phases."""
    rows = list[dict[str, Any]]()
    for record in records:
        row: dict[str, Any] = {"session": record.session, "model": record.model.name}
        if traced := record.run.trace:
            phases = [{**dataclasses.asdict(one), "sum_s": one.sum_s, "off": one.off} for one in traced.phases]
            row |= {"phases": phases, "ceilings_measured_at": traced.ceilings_measured_at}
        if seen := record.run.attention:
            row |= {**dataclasses.asdict(seen), "differs": seen.differs}
        rows.append(row)
    return rows


def _section(model: str, phase: Phase, by_layer: bool) -> Section:
    def known(amount: float | None, unit: float) -> str:
        return UNKNOWN if amount is None or unit <= 0 else digits(amount / unit)

    def largest(part: Part) -> str:
        own = [one for one in phase.parts if one.layer == part.layer]
        return max(token_trace.summed(own, lambda one: one.operation), key=lambda one: one.seconds).operation

    total_s = phase.total_s
    sizes: Columns = (
        ("MB read", lambda part: known(part.n_bytes, 1e6)),
        ("MFLOP", lambda part: known(part.flops, 1e6)),
        ("ms", lambda part: digits(1e3 * part.seconds)),
        ("share", lambda part: percent(part.seconds / total_s) if part.seconds >= 0.001 * total_s else "< 0.1 %"),
    )
    is_single = len({part.device for part in phase.parts}) == 1
    columns: Columns = (
        ("operation", lambda part: part.operation),
        *(() if is_single else (("device", lambda part: part.device),)),
        ("count", lambda part: str(part.n)),
        *sizes,
        ("GB/s", lambda part: known(part.n_bytes, 1e9 * part.seconds)),
        ("GFLOP/s", lambda part: known(part.flops, 1e9 * part.seconds)),
        (
            "of\nceiling",
            lambda part: percent(part.least_s / part.held_s) if part.least_s and part.held_s > 0 else UNKNOWN,
        ),
    )
    of_layers = (
        ("layer", lambda part: UNKNOWN if part.layer is None else str(part.layer)),
        *sizes,
        ("largest", largest),
    )
    rows = token_trace.summed(phase.parts, lambda part: (part.operation, part.device))
    layers = token_trace.summed(phase.parts, lambda part: (part.layer,))
    # how far the sum is from the step without stops
    costs = join_and([f"{seconds(cost)} for each stop on {name}" for name, cost in phase.stops_s.items()])
    threads = f" and {seconds(phase.threads_s)} for the start and end of the CPU's threads" if phase.threads_s else ""
    taken = f"less {costs}{threads}, " if costs else ""
    off = (
        f"{phase.name.capitalize()}: {phase.n_stops:,} operations, {taken}add up to {seconds(phase.sum_s)}, "
        f"{percent(abs(phase.off))} {'more' if phase.off >= 0 else 'less'} than a step without stops "
        f"({seconds(phase.untraced_s)})"
    )
    is_near, doubt = (
        abs(phase.off) <= OFF,
        "too far for the shares to be right. Trace again while no other program runs.",
    )
    by_layers = Section("By layer", "- is before the first or after the last", **tabled(of_layers, layers))
    return Section(
        f"{phase.name.capitalize()} of {plural(phase.n_tokens, 'token')} by {model}",
        f"medians of {plural(phase.n_steps, 'step')}" + (f" after {phase.n_past:,} tokens" if phase.n_past else ""),
        name=phase.name,
        **tabled(columns, rows),
        parts=[by_layers] if by_layer else (),
        notes=[f"{off}."] if is_near else (),
        warnings=() if is_near else [f"{off}: {doubt}"],
    )


def sentences(traced: TokenTrace) -> list[str]:
    """Where the time of a decode step goes, and what prefill does with its time."""
    prefill, decode = traced.phases
    total_s = decode.total_s
    of = dict.fromkeys((family(part.operation) for part in decode.parts), 0.0)
    for part in decode.parts:
        of[family(part.operation)] += max(0.0, part.seconds)
    read, many = (sum(part.n_bytes or 0 for part in phase.parts) for phase in (decode, prefill))
    flops, more = (sum(part.flops or 0 for part in phase.parts) for phase in (decode, prefill))

    def share(name: str) -> str:
        return percent(of.get(name, 0.0) / total_s)

    words = [
        f"Where do the {seconds(total_s)} of a decode step after {plural(decode.n_past, 'token')} go? The feed-forward "
        f"takes {share(FEED_FORWARD)}, the matrices of Q, K, V and the attention's output {share(PROJECTIONS)}, and "
        f"the last matrix, which rates every token of the vocabulary, {share(token_trace.OUTPUT)}.",
        f"Attention itself (rotation, reading and writing the cache) takes {share(ATTENTION)}, norms, activations and "
        f"sums {share(SMALL)}, and what lies outside the operations (inputs, sampling) "
        f"{share('outside and sampling')}.",
        f"The step reads {digits(read / 1e6)} MB for its {plural(decode.n_tokens, 'token')}, "
        f"{digits(read / total_s / 1e9)} GB/s; prefill reads {digits(many / 1e6)} MB for "
        f"{plural(prefill.n_tokens, 'token')}.",
    ]
    held = [part for part in decode.parts if part.least_s is not None]
    least_s, held_s = sum(part.least_s or 0 for part in held), sum(part.held_s for part in held)
    if 0 < held_s < least_s:
        words.append(f"Operations were faster than their ceiling, so {TOO_LOW}")
    elif least_s:
        words.append(
            f"At the ceilings of their kernels, {plural(sum(part.n for part in held), 'operation')} of the step would "
            f"take {seconds(least_s)} instead of {seconds(held_s)}."
        )
    if token_trace.COPIES in of:
        words.append(f"Copies between devices take {share(token_trace.COPIES)}.")
    if flops and more:
        longer = prefill.untraced_s / decode.untraced_s
        why = ": each matrix it reads serves all its tokens" if longer < more / flops else ""
        words.append(
            f"Prefill computes {digits(more / flops)} times the FLOPs of the decode step in {digits(longer)} times its "
            f"time{why}."
        )
    return words


def draw(figure: Figure, subject: str, traced: TokenTrace) -> None:
    """Draws prefill, decode and a layer of decode: layers, below them their operations, as wide as they take time."""
    rows = [
        (
            f"{phase.name} of {plural(phase.n_tokens, 'token')}" + (f" after {phase.n_past:,}" if phase.n_past else ""),
            phase.parts,
        )
        for phase in traced.phases
    ]
    by_layer = grouped((part for part in traced.decode.parts if part.layer is not None), lambda part: part.layer)
    if by_layer:
        middle = sorted(by_layer.values(), key=lambda parts: sum(part.seconds for part in parts))[len(by_layer) // 2]
        rows.append((f"layer {middle[0].layer} of that decode step", tuple(middle)))
    axes = list(figure.subplots(len(rows), 1, squeeze=False)[:, 0])
    families = dict.fromkeys(family(part.operation) for phase in traced.phases for part in phase.parts)
    colours = {name: COLOURS[i] for i, name in enumerate((FEED_FORWARD, *dict.fromkeys(FAMILIES.values()), SMALL))}
    for ax, (title, parts) in zip(axes, rows, strict=True):
        _draw_parts(ax, parts, title, colours)
    for name in families:
        axes[-1].barh([0], [0], color=colours[name], label=name)
    doubt = " (! the operations do not add up)" if any(abs(phase.off) > OFF for phase in traced.phases) else ""
    finish(axes, f"One token's way: layers above, their operations below\n{subject}{doubt}", is_apart=True)
    for ax in axes:
        ax.grid(False)


def _draw_parts(ax: Axes, parts: Sequence[Part], title: str, colours: dict[str, str]) -> None:
    at, total_ms = 0.0, 1e3 * sum(max(0.0, part.seconds) for part in parts)
    summed = token_trace.summed(parts, lambda part: (part.layer, part.operation))
    layers = [
        list(own) for _, own in itertools.groupby(summed, key=lambda part: part.layer)
    ]  # in the order of the step
    edge = 0.6 if len(layers) == 1 else 0
    for number, layer in enumerate(layers):
        width = sum(max(0.0, part.seconds) for part in layer) * 1e3
        ax.barh([1], [width], left=at, color=GRID if number % 2 else GUIDE, height=0.5, ec=PAPER, lw=0.4)
        if layer[0].layer is not None and (layer[0].layer % 5 == 0 or len(layers) == 1):
            ink = GUIDE if number % 2 else PAPER
            ax.text(at + width / 2, 1, str(layer[0].layer), ha="center", va="center", fontsize=7, color=ink)
        for part in layer:
            ms = max(0.0, part.seconds) * 1e3
            ax.barh([0.35], [ms], left=at, color=colours[family(part.operation)], height=0.7, ec=PAPER, lw=edge)
            if ms > LETTER * len(part.operation) * total_ms:
                ax.text(at + ms / 2, 0.35, part.operation, ha="center", va="center", fontsize=8, color=PAPER)
            at += ms
    ax.set_yticks([0.35, 1], ["operations", "layers"])
    ax.set_ylim(0, 1.3)
    ax.set_xlim(0, at)
    ax.set_xlabel("ms")
    ax.set_title(title, fontsize=9)


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Runs of `lab trace`: parts for prefill and decode, or for attention weights."""
    parts, lines = sections(records, by_layer=context.details), list[str]()
    if len(records) == 1 and context.is_page:  # its sentences are above its tables
        lines = [line for part in parts for line in part.sentences]
        parts = [dataclasses.replace(part, sentences=()) for part in parts]
    if not parts:
        return []
    question = parts[0].question or "Where does the time of a token go?"
    data = {"traces": as_rows(records)}
    return [
        Section("One token's way", name="trace", question=question, sentences=lines, parts=parts, data=lambda: data)
    ]


def again(records: Sequence[Record]) -> str:
    """The command of a run of `lab trace`."""
    run, shared = records[0].run, as_options.shared(records)
    if run.attention is not None:
        return as_options.line("trace", {"attention": run.attention.text}, (), shared)
    repeat = run.trace.prefill.n_steps if run.trace else None
    return as_options.line("trace", {"prompt_len": run.n_prompt, "gen": run.n_gen - 1, "repeat": repeat}, (), shared)


KINDS = (
    Kind(
        "trace",
        lambda one: isinstance(one, Record) and one.run.is_traced and not one.run.quality,
        chapters,
        again,
    ),
)
