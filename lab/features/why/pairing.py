"""Which figures of both sides are compared: of one phase, at the nearest depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lab.core import files
from lab.errors import LabError
from lab.features.why import recorded
from lab.features.why.figure import PREFILL, UNKNOWN, Figure
from lab.features.why.readers import text

LONGEST_PATH = 4_000
FAR = 10.0  # the distance of two figures if a depth is not known
WEAK = 0.2  # added for a figure that says little
MOST_LISTED = 4
BEGIN_OF_RESULTS = (b'"session":', b'"machine":')

Side = list[list[Figure]]
"""The figures of A or B by setup."""


def figures_of(name: str) -> Side:
    """The figures of a file, a folder, stdin or of words, by setup. LabError if it has none."""
    if is_of_lab(name):
        return recorded.figures_of(name)
    groups = dict[tuple[object, ...], list[Figure]]()
    for figure in text.read(name):
        groups.setdefault(setup_of(figure), []).append(figure)
    return list(groups.values())


def setup_of(figure: Figure) -> tuple[object, ...]:
    """What keeps the figures of a text apart: figures that differ in it are of two setups."""
    facts_of_figure = tuple(
        sorted((name, str(fact.value)) for name, fact in figure.facts.items())
    )
    return figure.source, facts_of_figure


def two_of(side: Side, prefill: bool) -> tuple[list[Figure], list[Figure]] | None:
    """Two setups of one text: of one setup under two headings, or the first two setups, the
    second one under another heading if there is one; else two rates of a phase.

    None if there are none. Prefill is compared if decode cannot be.
    """
    of_decode = Side()
    if prefill:
        side = [list(map(as_prefill, setup)) for setup in side]
    else:
        of_decode = with_phase(side, is_prefill=False)
    both = two_setups(of_decode, is_prefill=False)
    if of_decode and not both:
        both = two_rates(of_decode[0], is_prefill=False)
    if both:
        return both
    of_prefill = with_phase(side, is_prefill=True)
    both = two_setups(of_prefill, is_prefill=True)
    if of_prefill and not of_decode and not both:
        both = two_rates(of_prefill[0], is_prefill=True)
    return both


def with_phase(side: Side, is_prefill: bool) -> Side:
    """The setups that have a rate of a phase."""
    return [setup for setup in side if rates_of(setup, is_prefill)]


def rates_of(figures: Sequence[Figure], is_prefill: bool) -> list[Figure]:
    """The figures that can be compared with those of a phase."""
    return [figure for figure in figures if figure.is_rate and figure.is_prefill == is_prefill]


def two_setups(setups: Side, is_prefill: bool) -> tuple[list[Figure], list[Figure]] | None:
    """One setup under its first two headings, or the first two setups; None for a single one."""
    if not setups:
        return None
    first = setups[0]
    under = list(dict.fromkeys(figure.heading for figure in rates_of(first, is_prefill)))
    if len(under) > 1:
        above, below = (
            [figure for figure in first if figure.heading == heading] for heading in under[:2]
        )
        return above, below
    for setup in setups[1:]:
        is_like = setup[0].source == first[0].source
        if is_like and all(
            figure.heading not in under for figure in rates_of(setup, is_prefill)
        ):
            return first, setup
    return (first, setups[1]) if len(setups) > 1 else None


def two_rates(
    figures: Sequence[Figure], is_prefill: bool
) -> tuple[list[Figure], list[Figure]] | None:
    """The first two rates of a setup in a phase; None if it has one, or is of the lab."""
    rates = rates_of(figures, is_prefill)
    if len(rates) < 2 or rates[0].records:
        return None
    return [rates[0]], [rates[1]]


def is_of_lab(name: str) -> bool:
    """Whether a name is of a results file, a folder or a page of the lab."""
    if len(name) > LONGEST_PATH or "\n" in name:
        return False
    path = Path(name)
    try:
        if files.is_dir(path) or (path.suffix == ".html" and files.is_file(path)):
            return True
        with files.opened(path) as file:
            begin = file.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return False
    return begin.startswith(b"{") and any(sign in begin for sign in BEGIN_OF_RESULTS)


def nearest(
    first: Sequence[Figure], second: Sequence[Figure], prefill: bool = False
) -> tuple[Figure, Figure]:
    """The two figures of one phase whose depths are nearest; of equally near ones the deepest.

    Decode comes before prefill, unless `prefill` is asked for: then a figure of an unknown phase
    counts as prefill. LabError if no phase is of both sides.
    """
    if prefill:
        first = list(map(as_prefill, first))
        second = list(map(as_prefill, second))
    for is_prefill in (True,) if prefill else (False, True):
        pairs = list[tuple[Figure, Figure]]()
        for figure in first:
            for opposite in second:
                are_of_phase = figure.is_prefill == opposite.is_prefill == is_prefill
                are_rates = figure.is_rate and opposite.is_rate
                if are_of_phase and are_rates and figure is not opposite:
                    pairs.append((figure, opposite))
        if pairs:
            return min(pairs, key=distance)
    left_out = list[str]()
    for letter, figures in (("A", first), ("B", second)):
        for figure in figures:
            if not figure.is_rate:
                place = f"line {figure.line} of {letter}" if figure.line else letter
                left_out.append(f" In {place}: {figure.weakness}.")
    raise LabError(
        f"There is no phase that both sides have: A has {phases_of(first)}, B has "
        f"{phases_of(second)}.{''.join(left_out[:MOST_LISTED])}",
        "Give two figures of the same phase; --prefill compares prefill.",
    )


def as_prefill(figure: Figure) -> Figure:
    """The figure, of prefill if it does not say of what it is."""
    if figure.phase != UNKNOWN:
        return figure
    return replace(figure, phase=PREFILL)


def phases_of(figures: Sequence[Figure]) -> str:
    """The phases of figures in words."""
    phases = [figure.phase for figure in figures if figure.is_rate]
    return " and ".join(dict.fromkeys(phases)) or "no rate"


def distance(pair: tuple[Figure, Figure]) -> tuple[float, float]:
    """How far apart two figures are; smaller is better. Plain rates come before whole answers."""
    first, second = pair
    doubt = 0.0 if first.phase == second.phase else 0.5
    doubt += sum(WEAK for figure in pair if figure.weakness)
    if first.n_streams != second.n_streams and None not in (first.n_streams, second.n_streams):
        doubt += WEAK
    first_place = place(first)
    second_place = place(second)
    if first_place is None or second_place is None:
        return FAR + doubt, 0.0
    apart = abs(math.log((first_place + 1) / (second_place + 1)))
    return round(apart, 3) + doubt, -first_place


def place(figure: Figure) -> float | None:
    """The position of a figure, or the least that it can be; of a prefill after some tokens its
    end.
    """
    if figure.is_prefill:
        return None if figure.n_prompt is None else (figure.depth or 0) + figure.n_prompt
    return figure.least_position


def others_in_words(
    sides: Sequence[Sequence[Figure]], chosen: Sequence[Figure], prefill: bool
) -> list[str]:
    """Sentences on the figures that are not compared; none where each side has a single figure."""
    sentences = list[str]()
    for letter, figures in zip("AB", sides, strict=True):
        left_out = list[str]()
        for figure in figures:
            is_compared = is_same_rate(figure, chosen[0]) or is_same_rate(figure, chosen[1])
            if figure.is_prefill == chosen[0].is_prefill and not is_compared:
                left_out.append(in_words(figure))
        if not left_out:
            continue
        sentences.append(f"other figures of {letter}, not compared: {listed(left_out)}")
    if chosen[0].is_prefill and not prefill:
        sentences.append("prefill is compared, since no decode rate is of both sides")
    return sentences


def setups_in_words(
    sides: Sequence[Side], compared: Sequence[Sequence[Figure]], chosen: Sequence[Figure]
) -> list[str]:
    """A sentence on the setups of a single text that are neither A nor B."""
    if len(sides) > 1 or chosen[0].records:
        return []
    left_out = list[str]()
    for setup in sides[0]:
        for figure in setup:
            is_compared = any(figure in side for side in compared)
            if not is_compared and figure.is_prefill == chosen[0].is_prefill:
                left_out.append(in_words(figure))
    if not left_out:
        return []
    return [f"other setups of the text, not compared: {listed(left_out)}"]


def listed(labels: Sequence[str]) -> str:
    """The first labels, and how many more there are."""
    shown = list(labels[:MOST_LISTED])
    n_more = len(labels) - len(shown)
    if n_more:
        shown.append(f"and {n_more} more")
    return "; ".join(shown)


def is_same_rate(figure: Figure, chosen: Figure) -> bool:
    """Whether two figures are of one place of a text, or of the same runs."""
    return (figure.line, figure.tps, figure.records) == (
        chosen.line,
        chosen.tps,
        chosen.records,
    )


def in_words(figure: Figure) -> str:
    """A figure that is not compared."""
    if figure.line is None:
        return f"{figure.tps:.4g} tokens/s ({figure.timed})"
    return f"{figure.tps:.4g} tokens/s ({figure.timed}, line {figure.line})"
