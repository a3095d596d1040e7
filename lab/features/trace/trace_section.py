"""The way of a token as tables, one for prefill and one for decode, and in sentences."""

from __future__ import annotations

import dataclasses
from functools import partial

from lab.core.lists import join_and, plural
from lab.features.trace import pictures
from lab.features.trace.lines import TracedPart, TracedPhase, TraceLine
from lab.features.trace.operations import (
    ATTENTION_AND_CACHE,
    FEED_FORWARD,
    OUTPUT_MATRIX,
    OUTSIDE_AND_SAMPLING,
    PROJECTIONS,
    SMALL,
    family_of,
)
from lab.features.trace.phases import summed
from lab.show import text_setup
from lab.show.cells import TEXT, Column
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled
from lab.show.text_ceilings import TOO_LOW
from lab.show.wording import digits, percent, seconds

MOST_OFF = 0.05  # a sum that is further than this from the step without stops has no shares
LEAST_SHARE = 0.001
CAPTION = "Above the layers, below them their operations, as wide as they take time."


def adds_up(phase: TracedPhase) -> bool:
    """Whether the operations take as long as the step without stops."""
    return abs(phase.off) <= MOST_OFF


def sections(line: TraceLine) -> list[Section]:
    """A section for prefill, and one for decode with the sentences and the picture."""
    prefill = phase_section(line, line.prefill)
    decode = phase_section(line, line.decode)
    draw = partial(pictures.draw_trace, subject=subject(line), traced=line)
    notes = list(decode.notes)
    if not line.ceilings_measured_at:
        notes.append("The ceilings of these kernels are not known: lab ceilings")
    decode = dataclasses.replace(
        decode,
        notes=notes,
        sentences=sentences(line),
        pictures=[Picture("trace", CAPTION, draw, (10, 7))],
    )
    return [prefill, decode]


def subject(line: TraceLine) -> str:
    """The model and machine, with a mark if the operations do not add up."""
    where = text_setup.where([line])
    if all(adds_up(phase) for phase in line.phases):
        return where
    return f"{where} (! the operations do not add up)"


def phase_section(line: TraceLine, phase: TracedPhase) -> Section:
    """A phase by operation, and how far the sum is from the step without stops."""
    warnings = []
    notes = []
    if adds_up(phase):
        notes.append(f"{sum_sentence(phase)}.")
    else:
        warnings.append(
            f"{sum_sentence(phase)}: too far for shares and ceilings. "
            "Trace again while no other program runs."
        )
    about = f"medians of {plural(phase.n_steps, 'step')}"
    if phase.n_past:
        about = f"{about} after {plural(phase.n_past, 'token')}"
    tokens = plural(phase.n_tokens, "token")
    rows = summed(phase.parts, lambda part: (part.operation, part.device))
    return Section(
        f"{phase.name.capitalize()} of {tokens} by {text_setup.model_label(line)}",
        about,
        name=phase.name,
        **tabled(columns(phase), rows),
        notes=notes,
        warnings=warnings,
    )


def columns(phase: TracedPhase) -> Columns[TracedPart]:
    """The columns of a phase's table. Without shares where the operations do not add up."""
    has_several_devices = len({part.device for part in phase.parts}) > 1

    def device(part: TracedPart) -> str:
        return part.device if has_several_devices else ""

    def share(part: TracedPart) -> str:
        if not adds_up(phase):
            return UNKNOWN
        share_of_step = part.seconds / phase.total_s
        return percent(share_of_step) if share_of_step >= LEAST_SHARE else "< 0.1 %"

    def of_ceiling(part: TracedPart) -> str:
        if not adds_up(phase) or not part.least_s or part.held_s <= 0:
            return UNKNOWN
        return percent(part.least_s / part.held_s)

    return (
        Column("operation", lambda part: part.operation, TEXT),
        Column("device", device),
        Column("count", lambda part: str(part.n)),
        Column("MB read", lambda part: amount(part.n_bytes, 1e6)),
        Column("MFLOP", lambda part: amount(part.flops, 1e6)),
        Column("ms", lambda part: digits(1e3 * part.seconds)),
        Column("share", share),
        Column("GB/s", lambda part: amount(part.n_bytes, 1e9 * part.seconds)),
        Column("GFLOP/s", lambda part: amount(part.flops, 1e9 * part.seconds)),
        Column("of\nceiling", of_ceiling),
    )


def amount(value: float | None, unit: float) -> str:
    """A number in a unit; UNKNOWN without one, and for a part that took no time."""
    if value is None or unit <= 0:
        return UNKNOWN
    return digits(value / unit)


def sum_sentence(phase: TracedPhase) -> str:
    """How far the operations are from the step without stops."""
    name = phase.name.capitalize()
    direction = "more" if phase.off >= 0 else "less"
    difference = f"{percent(abs(phase.off))} {direction} than a step without stops"
    total = f"add up to {seconds(phase.sum_s)}, {difference} ({seconds(phase.untraced_s)})"
    operations = f"{plural(phase.n_stops, 'operation')}"
    if not phase.stops_s:
        return f"{name}: {operations}, {total}"
    costs = []
    for device, cost_s in phase.stops_s.items():
        costs.append(f"{seconds(cost_s)} for each stop on {device}")
    stops = join_and(costs)
    if not phase.threads_s:
        return f"{name}: {operations}, less {stops}, {total}"
    threads = f"{seconds(phase.threads_s)} for the start and end of the CPU's threads"
    return f"{name}: {operations}, less {stops} and {threads}, {total}"


def sentences(line: TraceLine) -> list[str]:
    """Where the time of a decode step goes, and what prefill does with its time."""
    lines = []
    if adds_up(line.decode):
        lines.append(shares_sentence(line.decode))
        lines += ceilings_sentences(line.decode)
    n_flops_decode = sum(part.flops or 0 for part in line.decode.parts)
    n_flops_prefill = sum(part.flops or 0 for part in line.prefill.parts)
    if n_flops_decode and n_flops_prefill:
        more_flops = n_flops_prefill / n_flops_decode
        longer = line.prefill.untraced_s / line.decode.untraced_s
        comparison = (
            f"Prefill computes {digits(more_flops)} times the FLOPs of the decode step in "
            f"{digits(longer)} times its time"
        )
        if longer < more_flops:
            lines.append(f"{comparison}: each matrix it reads serves all its tokens.")
        else:
            lines.append(f"{comparison}.")
    return lines


def shares_sentence(decode: TracedPhase) -> str:
    by_family: dict[str, float] = {}
    for part in decode.parts:
        family = family_of(part.operation)
        by_family[family] = by_family.get(family, 0.0) + max(0.0, part.seconds)

    def share(family: str) -> str:
        return percent(by_family.get(family, 0.0) / decode.total_s)

    return (
        f"Where do the {seconds(decode.total_s)} of a decode step after "
        f"{plural(decode.n_past, 'token')} go? The feed-forward takes {share(FEED_FORWARD)}, the "
        f"matrices of Q, K, V and the attention's output {share(PROJECTIONS)}, and the last "
        f"matrix, which rates every token of the vocabulary, {share(OUTPUT_MATRIX)}. Attention "
        "itself (rotation, reading and writing the cache) takes "
        f"{share(ATTENTION_AND_CACHE)}, norms, activations and sums {share(SMALL)}, and what lies "
        f"outside the operations (inputs, sampling) {share(OUTSIDE_AND_SAMPLING)}."
    )


def ceilings_sentences(decode: TracedPhase) -> list[str]:
    """What the operations with a ceiling would take at it; nothing without ceilings."""
    least_s = 0.0
    held_s = 0.0
    n_held = 0
    for part in decode.parts:
        if part.least_s is not None:
            least_s += part.least_s
            held_s += part.held_s
            n_held += part.n
    if not least_s:
        return []
    if 0 < held_s < least_s:
        return [f"Operations were faster than their ceiling, so {TOO_LOW}"]
    return [
        f"At the ceilings of their kernels, {plural(n_held, 'operation')} of the step would take "
        f"{seconds(least_s)} instead of {seconds(held_s)}."
    ]


def document(line: TraceLine) -> dict[str, object]:
    """What JSON has of a trace."""
    phases = []
    for phase in line.phases:
        phases.append({**dataclasses.asdict(phase), "sum_s": phase.sum_s, "off": phase.off})
    return {
        "session": line.session,
        "model": line.model.name,
        "phases": phases,
        "ceilings_measured_at": line.ceilings_measured_at,
    }
