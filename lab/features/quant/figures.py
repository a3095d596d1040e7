"""What a session of `lab quant` found: divergences over chunks, ratios of times over blocks, the front; its section.

Chunks are the replicates of quality: tokens of one chunk are correlated. Two candidates saw the same chunks, so they
are compared by the differences chunk by chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from lab.core import cost, results, shown, stats
from lab.core.lists import grouped, join_and, plural
from lab.core.payloads import Divergence, Quality
from lab.core.record import QUANT, Record
from lab.errors import LabError
from lab.features.compare import comparison
from lab.features.measure import text_results
from lab.models import catalog
from lab.runner import as_options
from lab.show import canvas, text_setup
from lab.show.section import UNKNOWN, Columns, Kind, Picture, Section, tabled
from lab.show.wording import digits, percent, times

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure

PHASES = {"decode": "tpot_ms", "prefill": "prefill_s"}
ENDS = ("", "_low", "_high")
NAN = float("nan")
UNCLEAR: tuple[tuple[float, ...], tuple[str, ...]] = (NAN, NAN, NAN), ()
"""A ratio with its ends, and its doubts, where no speed was measured."""

ABOUT = (
    "Divergence is the mean Kullback-Leibler divergence (in nats) of the next token's distribution from the "
    "reference's, over the second half of chunks of 512 tokens; 0 is equal. Same top: the share of these positions at "
    "which both find the same token most likely. Intervals (95 %) are over chunks, those of speed over blocks."
)
LIMITS = "Not measured: how well a model does a task, and what it answers with a chat template or in long chats."
CAPTION = (
    "To the right faster than the reference, down closer to it. Bars are 95 % intervals, the line is the front. "
    "A cross shows the speed if only the bytes read counted. Below the shaded noise floor nothing can be told apart."
)


@dataclass(frozen=True)
class Found:
    """What a session found. `rows` has a row for each file or cache type, the reference first.

    `kinds` has a row for each of them and each kind of text. `floor` is the mean divergence of the reference from
    itself under other settings. `equal` are the pairs that the divergence cannot tell apart.
    """

    rows: pd.DataFrame
    kinds: pd.DataFrame
    floor: float | None
    equal: list[tuple[str, str]]
    n_positions: int

    @property
    def n_chunks(self) -> int:
        return int(self.rows.n_chunks.iloc[1])


def of_sessions(records: Sequence[Record]) -> list[tuple[list[Record], Found]]:
    """Each session with quality, and what it found."""
    sessions = grouped(records, lambda record: record.session).values()
    return [(own, found(own)) for own in sessions if any(candidates(own))]


def candidates(records: Sequence[Record]) -> Iterator[tuple[Record, Quality]]:
    """The records with what was found of candidates."""
    for record in records:
        if (quality := record.run.quality) and not quality.is_floor:
            yield record, quality


def quant_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each file or cache type that `quant` compared, the reference first.

        lab.quant_table(records)[["label", "kl", "same", "decode", "on_front"]]

    `kl`: mean divergence in nats, `same`: share of positions with the same most likely token, both with their 95 %
    intervals (`_low`, `_high`). `decode`, `prefill`: how many times as fast as the reference. LabError for records that
    hold no quality.
    """
    import pandas as pd

    tables = [one.rows.assign(session=own[0].session) for own, one in of_sessions(records)]
    if not tables:
        raise LabError("These records hold no quality.", "Measure it: lab quant")
    return pd.concat(tables, ignore_index=True)


def found(records: Sequence[Record]) -> Found:
    """The figures of one session."""
    import pandas as pd

    qualities = {record.run.variant or "": quality for record, quality in candidates(records)}
    first, of_variant = next(iter(qualities.values())), _of_variants(records)
    floors = [record.run.quality for record in records if record.run.quality and record.run.quality.is_floor]
    variants = [first.reference, *qualities]
    labels = {name: name.partition(": ")[2] or name for name in variants}
    if all(name in of_variant for name in variants):  # the shortest names that differ
        for name_of in (
            lambda one: one.model.file.rpartition("/")[2],
            lambda one: one.model.quantization,
            lambda one: f"{one.settings.type_k} cache",
        ):
            names = [name_of(of_variant[name]) for name in variants]
            labels = dict(zip(variants, names, strict=True)) if all(names) and len(set(names)) == len(names) else labels
    ratios = _ratios([one for one in records if one.run.is_timed])
    rows, kinds = list[dict[str, Any]](), list[dict[str, Any]]()
    for name in variants:
        quality, row = (
            qualities.get(name),
            {"label": labels[name], "variant": name, "is_reference": name not in qualities},
        )
        perplexity = _exp(mean(first.chunks, lambda chunk: chunk.reference_nll)[0])
        row |= of_chunks(quality.chunks) if quality else {"perplexity": perplexity}
        for phase in PHASES:
            ratio, row[f"{phase}_doubts"] = ratios.get((phase, first.reference, name), UNCLEAR)
            row |= _with_ends(phase, ratio)
        row |= dict.fromkeys(("n_bytes", "memory_bytes", "bytes_per_token"), NAN)
        if record := of_variant.get(name):
            model, settings, run = record.model, record.settings, record.run
            row["n_bytes"] = float(model.n_bytes or NAN)
            if run.placement:
                row["memory_bytes"] = float(sum(buffer.n_bytes for buffer in run.placement.buffers))
            if step := cost.step(model, 1, run.n_prompt + run.n_gen // 2, 1, settings.type_k, settings.type_v):
                row["bytes_per_token"] = step.n_bytes
        rows.append(row)
        by_kind = grouped(zip(quality.texts, quality.chunks, strict=True), itemgetter(0)) if quality else {}
        for kind, own in by_kind.items():
            kinds.append({"label": labels[name], "text": kind, **of_chunks([chunk for _, chunk in own])})
    table, pairs = pd.DataFrame(rows), list(itertools.combinations(qualities, 2))
    table["bandwidth"] = table.bytes_per_token.iloc[0] / table.bytes_per_token
    closer = {(first.reference, name) for name in qualities}  # the first of each pair
    equal = list[tuple[str, str]]()
    for one, other in pairs:  # by ratios chunk by chunk: on a difficult chunk every candidate diverges more
        each = zip(qualities[one].chunks, qualities[other].chunks, strict=False)
        logs = [math.log(max(divergence(a), 1e-12) / max(divergence(b), 1e-12)) for a, b in each]
        centre, confidence = math.fsum(logs) / len(logs), 1 - (1 - stats.CONFIDENCE) / len(pairs)  # of all together
        if len(logs) > 1 and abs(centre) > stats.mean_half_width(logs, confidence):
            closer.add((one, other) if centre < 0 else (other, one))
        else:
            equal.append((labels[one], labels[other]))

    def beats(one: str, other: str) -> bool:
        """Whether `one` is better in quality and speed than `other`, both beyond their intervals."""
        (_, low, _), doubts = ratios.get(("decode", other, one), UNCLEAR)
        return (one, other) in closer and low > 1 and shown.DISTURBED not in doubts

    table["on_front"] = [not any(beats(one, name) for one in variants) for name in variants]
    floor = mean([chunk for one in floors for chunk in one.chunks], divergence)[0] if floors else None
    return Found(table, pd.DataFrame(kinds), floor, equal, sum(len(one.kl) for one in first.chunks))


def _of_variants(records: Sequence[Record]) -> dict[str, Record]:
    """A record of each variant: a timed run if there is one. The noise floor has the reference's model."""
    kept = [(one.run.quality, one) for one in records if one.run.quality]
    found = {of.reference if of.is_floor else one.run.variant or "": one for of, one in kept}
    return found | {one.run.variant or "": one for one in records if one.run.is_timed}


def divergence(chunk: Divergence) -> float:
    """The mean over a chunk's positions."""
    return math.fsum(chunk.kl) / len(chunk.kl)


def mean(chunks: Sequence[Divergence], figure: Any) -> tuple[float, float, float]:
    """The mean over chunks and its interval, NaN for a single chunk."""
    values = [figure(chunk) for chunk in chunks]
    centre = math.fsum(values) / len(values)
    half = stats.mean_half_width(values, stats.CONFIDENCE) if len(values) > 1 else NAN
    return centre, centre - half, centre + half


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # a larger one would overflow


def _with_ends(name: str, values: Sequence[float]) -> dict[str, Any]:
    return {name + end: value for end, value in zip(ENDS, values, strict=True)}


def of_chunks(chunks: Sequence[Divergence]) -> dict[str, Any]:
    """The figures of a candidate: divergence, agreement and perplexity, with their intervals."""
    import numpy as np

    kl = np.concatenate([chunk.kl for chunk in chunks])
    return {
        "n_chunks": len(chunks),
        "kl_99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        **_with_ends("kl", mean(chunks, divergence)),
        **_with_ends("same", mean(chunks, lambda chunk: chunk.n_same / len(chunk.kl))),
        **_with_ends("perplexity_ratio", [*map(_exp, mean(chunks, lambda chunk: chunk.nll - chunk.reference_nll))]),
        "perplexity": _exp(mean(chunks, lambda chunk: chunk.nll)[0]),
        "kl_most": float(np.mean([NAN if chunk.most is None else chunk.most for chunk in chunks])),
    }


def _ratios(records: Sequence[Record]) -> dict[tuple[str, str, str], Any]:
    """For each phase and pair of variants how many times as fast the second is: estimate, low and high; doubts."""
    try:
        groups = comparison.groups(records)
    except LabError:  # no speed was measured
        return {}
    made, phase_of = dict[tuple[str, str, str], Any](), {figure: phase for phase, figure in PHASES.items()}
    for base in groups:
        others, name = [one for one in groups if one is not base], str(base.rows.variant.iloc[0])
        made |= {(phase, name, name): ((1.0, 1.0, 1.0), ()) for phase in PHASES}
        for group, compared in zip(others, comparison.compare_groups([base, *others]), strict=True):
            for row in (row for row in compared.rows if row.figure in phase_of):
                ends = (1 / row.ratio.high, 1 / row.ratio.low) if row.ratio else (NAN, NAN)
                key = phase_of[row.figure], name, str(group.rows.variant.iloc[0])
                made[key] = (1 / row.estimate, *ends), row.doubts
    return made


def _cell(row: Any, name: str, scale: float = 1.0, unit: str = "", most: float = math.inf) -> str:
    """A figure with its interval, between 0 and `most`, in a second line."""
    value, low, high = (scale * getattr(row, name + end) for end in ENDS)
    if value != value:
        return UNKNOWN
    first = f"{digits(value)}{unit}"
    return first if low != low or low == high else f"{first}\n{digits(max(low, 0))}-{digits(min(high, most))}"


COLUMNS: Columns = (
    ("name", lambda row: f"{row.label}{' (reference)' if row.is_reference else ''}"),
    ("MB", lambda row: digits(row.n_bytes / 1e6)),
    ("divergence", lambda row: _cell(row, "kl")),
    ("same top\n%", lambda row: _cell(row, "same", 100, most=100)),
    ("decode", lambda row: _cell(row, "decode", 1, f"x{shown.mark(row.decode_doubts)}")),
    ("prefill", lambda row: _cell(row, "prefill", 1, f"x{shown.mark(row.prefill_doubts)}")),
    ("by bytes\nalone", lambda row: UNKNOWN if row.bandwidth != row.bandwidth else times(row.bandwidth)),
    ("divergence\n99 %", lambda row: digits(row.kl_99)),
    ("divergence\nlargest", lambda row: digits(row.kl_max)),
    ("perplexity", lambda row: digits(row.perplexity)),
    ("perplexity\nratio", lambda row: _cell(row, "perplexity_ratio")),
    ("memory\nMB", lambda row: digits(row.memory_bytes / 1e6)),
    ("MB read\nper token", lambda row: digits(row.bytes_per_token / 1e6)),
)


def sections(records: Sequence[Record]) -> list[Section]:
    """A section for each session; none for speed without quality."""
    made = []
    for own, one in of_sessions(records):
        rows, kinds, parts = list(one.rows.itertuples()), one.kinds, list[Section]()
        timed = [record for record in own if record.run.is_timed]
        if kinds.text.nunique() > 1:
            each = kinds.itertuples()
            cells = [f"{_cell(k, 'kl')}\n{percent(k.same)} of {plural(k.n_chunks, 'chunk')}" for k in each]
            by_text = kinds.assign(cell=cells).pivot(index="label", columns="text", values="cell").fillna("")
            by_text = by_text.loc[[row.label for row in rows[1:]], kinds.text.unique()]
            table = {"headings": ["name", *by_text.columns], "cells": by_text.reset_index().to_numpy().tolist()}
            parts = [Section("", "divergence and same top by kind of text", **table)]
        floor = [] if one.floor is None else [one.floor]
        tables = {"quant": one.rows.to_dict("records"), "quant_texts": kinds.to_dict("records"), "quant_floor": floor}
        made.append(
            Section(
                "Quality and speed",
                f"{one.n_chunks} chunks, {one.n_positions:,} positions, against {rows[0].label}",
                name="quant",
                question="What does each quantization cost in quality, and what does it gain in speed?",
                answer=answer(one),
                words=[ABOUT],
                **tabled(COLUMNS, rows),
                sentences=sentences(own, one),
                warnings=text_results.disturbed(timed),
                parts=parts,
                pictures=[Picture("quant", CAPTION, partial(draw, one, text_setup.where(timed or own)), (10, 5.2))],
                data=partial(dict, tables),
            )
        )
    return made


def answer(found: Found) -> str:
    """What the files that no other one beats gain and lose, in one sentence."""
    first, *others = found.rows.sort_values("kl", na_position="first").itertuples()
    said = list[str]()
    for row in others:
        if row.on_front and row.decode == row.decode and shown.DISTURBED not in row.decode_doubts:
            is_sure, share = row.decode_low == row.decode_low, percent(row.same)
            ends = f" ({digits(row.decode_low)}-{digits(row.decode_high)})" if is_sure else ""
            gain = f"{row.label}{'' if said else ' decodes'} {'' if is_sure else 'about '}{times(row.decode)}"
            of = (
                f"{ends} and on {share}"
                if said
                else f" as fast as {first.label}{ends} and agrees with it on {share} of tokens"
            )
            said.append(gain + of)
    shares = join_and([f"{row.label} on {percent(row.same)}" for row in others])
    return f"{'; '.join(said)}." if said else f"Agreement with {first.label} on the most likely token: {shares}."


def sentences(records: Sequence[Record], found: Found) -> list[str]:
    """Which files are beaten in both, what cannot be told apart, and the basis of the figures."""
    first, *others = found.rows.itertuples()
    lines, known = list[str](), [row for row in others if row.decode == row.decode]
    if known and all(shown.DISTURBED in row.decode_doubts for row in known):
        lines.append("The speeds are unclear: at least half of the runs were disturbed. Measure again.")
    elif known:
        front, beaten = ([row.label for row in (first, *others) if row.on_front == good] for good in (True, False))
        more = f"; {join_and(beaten)} {'is' if len(beaten) == 1 else 'are'} beaten in both" if beaten else ""
        lines.append(f"No other one is better in both quality and decode speed than {join_and(front)}{more}.")
    if found.equal:
        pairs = join_and([f"{a} and {b}" for a, b in found.equal])
        lines.append(f"By divergence these cannot be told apart: {pairs}.")
    if found.floor is not None:
        below = [row.label for row in others if not row.kl_low > found.floor]
        same = f" {join_and(below)} cannot be told from {first.label}." if below else ""
        floor = f"{max(0.0, found.floor):.2g}"
        lines.append(f"The noise floor, {first.label} against itself with other settings, is {floor}.{same}")
    model = next((one for one in records if one.run.variant == first.variant), records[0]).model
    if model.source == catalog.REQUANTIZED and model.name in catalog.entries():
        kind = catalog.entries()[model.name].quantization
        lines.append(f"{first.label} was made from the {kind} file: what is lost is lost of that, not of the original.")
    if bounded := [row for row in others if row.kl_most == row.kl_most]:
        ends = join_and([f"{digits(row.kl)}-{digits(row.kl_most)} for {row.label}" for row in bounded])
        lines.append(
            "The models ran one after the other, and the reference's 1,024 most likely tokens and the sum of the rest "
            f"were kept: divergences are the least that is possible. Within these bounds: {ends}."
        )
    if widths := [(row.kl_high - row.kl) / row.kl for row in others if row.kl > 0 and row.kl_low == row.kl_low]:
        lines.append(f"The divergences are known to within {percent(max(widths))} or better, on text like this.")
    return [*lines, LIMITS]


def known_lines(folder: Path, tried: Sequence[Record]) -> list[str]:
    """What `lab quant` found in a folder for the files of these records in sentences; the newest of each comparison."""
    lines, models = dict[str, str](), [one.model for one in tried]
    for own, one in of_sessions(results.nearby([folder]).traces):
        by_variant = {record.run.variant: record for record, _ in candidates(own)}
        first, *others = one.rows.itertuples()
        for row in others:
            model, type_k = by_variant[row.variant].model, by_variant[row.variant].settings.type_k
            name = f"{model.name} {model.quantization}"
            same = {each.sha256 for each in models if f"{each.name} {each.quantization}" == name}
            if same and (model.sha256 is None or same & {None, model.sha256}):
                of = f"Quality of {name}{'' if type_k == 'f16' else f' with a {type_k} cache'} by lab quant"
                what = f"divergence {digits(row.kl)} from {first.label}, same most likely token at {percent(row.same)}"
                lines.setdefault(f"{of} {first.label}", f"{of}: {what}.")
    return list(lines.values())


def draw(found: Found, subject: str, figure: Figure) -> None:
    """Speed against divergence: decode on the left, prefill on the right."""
    rows = [row for row in found.rows.itertuples() if not row.is_reference and row.kl > 0]
    reference, axes = found.rows.label.iloc[0], list(figure.subplots(1, 2, sharey=True))
    marked = list[Any]()
    for ax, phase in zip(axes, PHASES, strict=True):
        known = [(row, *(getattr(row, phase + end) for end in ENDS)) for row in rows]
        known = [one for one in known if one[1] == one[1]]
        ax.set_yscale("log")
        ax.set_xlabel(f"{phase}: times as fast as {reference}")
        ax.axvline(1, color=canvas.GUIDE, lw=1, ls=":")
        for row, x, low, high in known:
            colour = canvas.COLOURS[0 if row.on_front else 1]
            label = "not beaten in both" if row.on_front else "beaten in quality and decode speed"
            ax.plot([x], [row.kl], "o", color=colour, label=label)
            ax.plot([low, high], [row.kl, row.kl], color=colour, lw=1.4)  # nothing where an end is NaN
            ax.plot([x, x], [max(row.kl_low, row.kl / 1e3), row.kl_high], color=colour, lw=1.4)
            if phase == "decode" and row.bandwidth == row.bandwidth:
                ax.plot([row.bandwidth], [row.kl], "x", color=canvas.GUIDE, label="by bytes read alone")
        if phase == "decode":
            front = sorted((row.kl, x) for row, x, *_ in known if row.on_front)
            ax.plot([x for _, x in front], [y for y, _ in front], color=canvas.COLOURS[0], lw=1, ls="--", label="front")
        if found.floor and found.floor > 0:
            low, high = ax.get_ylim()
            ax.set_ylim(min(low, found.floor / 3), high)
            ax.axhspan(ax.get_ylim()[0], found.floor, color=canvas.GRID, label="noise floor")
        sizes = ["" if row.n_bytes != row.n_bytes else f", {digits(row.n_bytes / 1e6)} MB" for row, *_ in known]
        marked.append([(x, row.kl, row.label + size) for (row, x, *_), size in zip(known, sizes, strict=True)])
    axes[0].set_ylabel("mean divergence (nats)")
    canvas.finish(axes, f"Quality against speed, over {reference}\n{subject}", is_apart=True)
    crosses = [(row.bandwidth, row.kl) for row in rows if row.bandwidth == row.bandwidth]
    for ax, points, avoid in zip(axes, marked, (crosses, []), strict=True):
        canvas.label_points(ax, points, avoid)


def again(records: Sequence[Record]) -> str:
    """The command of a session of `lab quant`."""
    timed = [one for one in records if one.run.is_timed]
    kept = [one.run.quality for one in records if one.run.quality]
    firsts = [one for _, one in sorted(_of_variants(records).items())]
    given: dict[str, object] = {"blocks": 1 + max(one.run.block or 0 for one in timed)} if timed else {}
    if kept:
        budget = None if kept[0].budget_s is None else f"{kept[0].budget_s:g}s"
        given |= {"text": kept[0].text, "budget": budget}
    if timed:
        given |= {"prompt_len": timed[0].run.n_prompt, "gen": timed[0].run.n_gen}
    specs = list(dict.fromkeys(catalog.spec_of(one.model) for one in firsts))
    shared = [words for words in as_options.shared(firsts) if words[0] not in ("--model", "--prompt")]
    if len(specs) == 1:
        given["cache_type"] = [one.settings.type_k for one in firsts]
        shared = [words for words in shared if not words[0].startswith("--cache-type")]
    return as_options.line("quant", given, [(spec,) for spec in specs], shared)


KINDS = (
    Kind(
        "quant",
        lambda one: isinstance(one, Record) and one.run.part == QUANT,
        lambda records, _: sections(records),
        again,
    ),
)
