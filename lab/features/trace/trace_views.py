"""A token's way and attention weights as tables, sentences and pictures."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped, join_and, plural
from lab.core.payloads import Attention, Part, Phase, TokenTrace
from lab.core.record import Record
from lab.features.limits.explanation import TOO_LOW
from lab.features.trace import token_trace
from lab.features.trace.token_trace import summed
from lab.runner import as_options
from lab.show import text_setup
from lab.show.canvas import COLOURS, GRID, GUIDE, PAPER, finish, grid
from lab.show.section import UNKNOWN, Columns, Context, Kind, Picture, Section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEED_FORWARD, PROJECTIONS, SMALL = "feed-forward", "Q, K, V and output", "norms and sums"
ATTENTION, AROUND = "attention and cache", "outside and sampling"
FAMILIES = {name: family for family, names in token_trace.OPERATIONS["families"].items() for name in names}
"""Operations that share a colour and a sentence; the others are SMALL."""

OFF = 0.05
"""A sum of the operations that is further than this from the step without stops makes the shares wrong."""

CAPTION = "Above the layers, below them their operations, as wide as they take time."

LETTER = 0.0065
"""Share of a row's width that a letter of an operation's name needs."""

N_COLUMNS = 6
"""Of the layers in the picture of attention weights."""


def family(part: Part) -> str:
    """The family of an operation."""
    is_feed_forward = part.operation.startswith(("feed-forward", "router"))
    return FEED_FORWARD if is_feed_forward else FAMILIES.get(part.operation, SMALL)


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Runs of `lab trace`: parts for prefill and decode, or for attention weights.

    The picture and where the time goes are with decode, but on the page of one run the sentences are above the tables.
    """
    parts, data = list[Section](), list[dict[str, Any]]()
    for record in records:
        model = text_setup.model_label(record)
        row: dict[str, Any] = {"session": record.session, "model": record.model.name}
        if traced := record.run.trace:
            prefill, decode = (_section(model, phase) for phase in traced.phases)
            hint = [] if traced.ceilings_measured_at else ["The ceilings of these kernels are not known: lab ceilings"]
            draws = partial(draw, subject=text_setup.where([record]), traced=traced)
            notes, picture = [*decode.notes, *hint], Picture("trace", CAPTION, draws, (10, 7))
            decode = dataclasses.replace(decode, sentences=sentences(traced), notes=notes, pictures=[picture])
            parts += [prefill, decode]
            phases = [{**dataclasses.asdict(one), "sum_s": one.sum_s, "off": one.off} for one in traced.phases]
            row |= {"phases": phases, "ceilings_measured_at": traced.ceilings_measured_at}
        if seen := record.run.attention:
            parts.append(attention(seen, model))
            row |= {**dataclasses.asdict(seen), "differs": seen.differs}
        data.append(row)
    lines = list[str]()
    if len(records) == 1 and context.is_page:
        lines = [line for part in parts for line in part.sentences]
        parts = [dataclasses.replace(part, sentences=()) for part in parts]
    question = parts[0].question or "Where does the time of a token go?"
    return [
        Section(
            "One token's way",
            name="trace",
            question=question,
            sentences=lines,
            parts=parts,
            data=lambda: {"traces": data},
        )
    ]


def _section(model: str, phase: Phase) -> Section:
    """A phase by operation, and how far the sum is from the step without stops."""
    total_s = phase.total_s

    def known(amount: float | None, unit: float) -> str:
        return UNKNOWN if amount is None or unit <= 0 else digits(amount / unit)

    several = len({part.device for part in phase.parts}) > 1
    columns: Columns = (
        ("operation", lambda part: part.operation),
        ("device", lambda part: part.device if several else ""),
        ("count", lambda part: str(part.n)),
        ("MB read", lambda part: known(part.n_bytes, 1e6)),
        ("MFLOP", lambda part: known(part.flops, 1e6)),
        ("ms", lambda part: digits(1e3 * part.seconds)),
        ("share", lambda part: percent(part.seconds / total_s) if part.seconds >= 0.001 * total_s else "< 0.1 %"),
        ("GB/s", lambda part: known(part.n_bytes, 1e9 * part.seconds)),
        ("GFLOP/s", lambda part: known(part.flops, 1e9 * part.seconds)),
        (
            "of\nceiling",
            lambda part: percent(part.least_s / part.held_s) if part.least_s and part.held_s > 0 else UNKNOWN,
        ),
    )
    costs = join_and([f"{seconds(cost)} for each stop on {name}" for name, cost in phase.stops_s.items()])
    threads = f" and {seconds(phase.threads_s)} for the start and end of the CPU's threads" if phase.threads_s else ""
    off = (
        f"{phase.name.capitalize()}: {phase.n_stops:,} operations, {f'less {costs}{threads}, ' if costs else ''}"
        f"add up to {seconds(phase.sum_s)}, {percent(abs(phase.off))} {'more' if phase.off >= 0 else 'less'} than a "
        f"step without stops ({seconds(phase.untraced_s)})"
    )
    is_near = abs(phase.off) <= OFF
    doubt = f"{off}: too far for the shares to be right. Trace again while no other program runs."
    return Section(
        f"{phase.name.capitalize()} of {plural(phase.n_tokens, 'token')} by {model}",
        f"medians of {plural(phase.n_steps, 'step')}" + (f" after {phase.n_past:,} tokens" if phase.n_past else ""),
        name=phase.name,
        **tabled(columns, summed(phase.parts, lambda part: (part.operation, part.device))),
        notes=[f"{off}."] * is_near,
        warnings=[doubt] * (not is_near),
    )


def sentences(traced: TokenTrace) -> list[str]:
    """Where the time of a decode step goes, and what prefill does with its time."""
    prefill, decode = traced.phases
    total_s, parts = decode.total_s, grouped(decode.parts, family)

    def share(name: str) -> str:
        return percent(sum(max(0.0, part.seconds) for part in parts.get(name, ())) / total_s)

    words = [
        f"Where do the {seconds(total_s)} of a decode step after {plural(decode.n_past, 'token')} go? The feed-forward "
        f"takes {share(FEED_FORWARD)}, the matrices of Q, K, V and the attention's output {share(PROJECTIONS)}, and "
        f"the last matrix, which rates every token of the vocabulary, {share(token_trace.OUTPUT_MATRIX)}. Attention "
        f"itself (rotation, reading and writing the cache) takes {share(ATTENTION)}, norms, activations and sums "
        f"{share(SMALL)}, and what lies outside the operations (inputs, sampling) {share(AROUND)}.",
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
    flops, more = (sum(part.flops or 0 for part in phase.parts) for phase in (decode, prefill))
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
        (f"{one.name} of {plural(one.n_tokens, 'token')}" + (f" after {one.n_past:,}" if one.n_past else ""), one.parts)
        for one in traced.phases
    ]
    by_layer = grouped(traced.decode.parts, lambda part: part.layer)
    if by_layer:
        middle = sorted(by_layer.values(), key=lambda parts: sum(part.seconds for part in parts))[len(by_layer) // 2]
        rows.append((f"layer {middle[0].layer} of that decode step", tuple(middle)))
    axes = list(figure.subplots(len(rows), 1, squeeze=False)[:, 0])
    colours = {name: COLOURS[i] for i, name in enumerate((FEED_FORWARD, *dict.fromkeys(FAMILIES.values()), SMALL))}
    for ax, (title, parts) in zip(axes, rows, strict=True):
        at, total_ms = 0.0, 1e3 * sum(max(0.0, part.seconds) for part in parts)
        in_order = summed(parts, lambda part: (part.layer, part.operation))
        layers = [(layer, list(own)) for layer, own in itertools.groupby(in_order, key=lambda part: part.layer)]
        is_alone = len(layers) == 1
        for number, (layer, own) in enumerate(layers):
            widths = [1e3 * max(0.0, part.seconds) for part in own]
            ax.barh([1], [sum(widths)], left=at, color=GRID if number % 2 else GUIDE, height=0.5, ec=PAPER, lw=0.4)
            if layer is not None and (layer % 5 == 0 or is_alone):
                ink = GUIDE if number % 2 else PAPER
                ax.text(at + sum(widths) / 2, 1, str(layer), ha="center", va="center", fontsize=7, color=ink)
            for part, ms in zip(own, widths, strict=True):
                style = {"color": colours[family(part)], "ec": PAPER, "lw": 0.6 if is_alone else 0}
                ax.barh([0.35], [ms], left=at, height=0.7, **style)
                if ms > LETTER * len(part.operation) * total_ms:
                    ax.text(at + ms / 2, 0.35, part.operation, ha="center", va="center", fontsize=8, color=PAPER)
                at += ms
        ax.set_yticks([0.35, 1], ["operations", "layers"])
        ax.set(ylim=(0, 1.3), xlim=(0, at), xlabel="ms")
        ax.set_title(title, fontsize=9)
    for name in dict.fromkeys(family(part) for phase in traced.phases for part in phase.parts):
        axes[-1].barh([0], [0], color=colours[name], label=name)
    doubt = " (! the operations do not add up)" if any(abs(phase.off) > OFF for phase in traced.phases) else ""
    finish(axes, f"One token's way: layers above, their operations below\n{subject}{doubt}", is_apart=True)
    for ax in axes:
        ax.grid(False)


def attention(seen: Attention, model: str = "") -> Section:
    """What the last token attends to in each layer (of a model), and what K and V depend on."""
    of_model, looks, layers = f" in {model}" if model else "", seen.looks, list(range(len(seen.looks.decode)))
    most = [row.index(max(row)) for row in looks.decode]
    columns: Columns = (
        ("layer", str),
        ("most on", lambda layer: repr(seen.tokens[most[layer]])),
        ("weight", lambda layer: percent(looks.decode[layer][most[layer]])),
        ("on the\nfirst", lambda layer: percent(looks.decode[layer][0])),
        ("on\nitself", lambda layer: percent(looks.decode[layer][-1])),
        ("K of later\nmoves by", lambda layer: percent(looks.changes[layer][0])),
        ("V of later\nmoves by", lambda layer: percent(looks.changes[layer][1])),
    )
    same = ", ".join(str(layer) for layer in layers if not any(looks.changes[layer]))
    differs = f"at most {percent(seen.differs)}" if seen.differs >= 0.001 else "less than 0.1 %"
    words = [
        "In prefill every token attends to itself and to those before it: a triangle. In decode only the new token "
        f"asks: one row, which differs from the last row of prefill by {differs}. It needs the "
        "keys and values of earlier tokens, and none of their queries: so the cache has keys and values.",
        f"With {seen.tokens[seen.replaced]!r} replaced by {seen.replacement!r}, K and V of the later tokens stay "
        f"exactly the same in {f'layer {same}' if same else 'no layer'}: elsewhere they depend on the tokens "
        "before, so a cached prefix must match from its first token on.",
    ]
    size = 11, 1 + 1.9 * math.ceil(len(layers) / N_COLUMNS)
    draws = partial(draw_attention, seen=seen, of_model=of_model)
    return Section(
        f"Attention of {seen.tokens[-1]!r}, the last of {plural(len(seen.tokens), 'token')}{of_model}",
        "means over the heads of each layer",
        name="attention",
        question=f"What does each token of {seen.text!r} attend to?",
        **tabled(columns, layers),
        sentences=words,
        pictures=[Picture("attention", "Attention weights, means over heads", draws, size)],
    )


def draw_attention(figure: Figure, seen: Attention, of_model: str) -> None:
    """Draws a matrix for each layer: the tokens that ask from top to bottom, those that they attend to across."""
    axes = grid(figure, len(seen.looks.prefill), N_COLUMNS, sharex=True, sharey=True)
    texts = [text.replace("\n", "\\n") for text in seen.tokens]
    middles, size = [i + 0.5 for i in range(len(texts))], 7 if len(texts) <= 10 else 4
    for layer, (ax, rows) in enumerate(zip(axes, seen.looks.prefill, strict=True)):
        until_now = [[w if i <= asks else math.nan for i, w in enumerate(row)] for asks, row in enumerate(rows)]
        image = ax.pcolormesh(until_now, vmin=0, vmax=1, cmap="viridis")  # shapes: a page shows no embedded images
        ax.set_title(f"layer {layer}", fontsize=8)
        ax.set_xticks(middles, texts, rotation=90, fontsize=size)
        ax.set_yticks(middles, texts, fontsize=size)
        ax.set_aspect("equal")
    axes[0].invert_yaxis()  # shared by all
    bar = figure.colorbar(image, ax=axes, shrink=0.3, label="weight")
    if bar.solids is not None:
        bar.solids.set_rasterized(False)
    figure.suptitle(f"What each token attends to{of_model} (the last row is that of decode)", fontsize=11)


def again(records: Sequence[Record]) -> str:
    """The command of a run of `lab trace`."""
    run, shared = records[0].run, as_options.shared(records)
    if run.attention is not None:
        return as_options.line("trace", {"attention": run.attention.text}, (), shared)
    repeat = run.trace.prefill.n_steps if run.trace else None
    return as_options.line("trace", {"prompt_len": run.n_prompt, "gen": run.n_gen - 1, "repeat": repeat}, (), shared)


def is_mine(one: Any) -> bool:
    return isinstance(one, Record) and one.run.is_traced and not one.run.quality


KINDS = (Kind("trace", is_mine, chapters, again),)
