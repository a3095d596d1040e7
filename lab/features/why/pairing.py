"""Which figures of both sides are compared: of one phase, at the nearest depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from lab.errors import LabError
from lab.features.why import recorded
from lab.features.why.figure import PREFILL, Figure
from lab.features.why.readers import text

LONGEST_PATH = 4_000
FAR = 10.0  # the distance of two figures if a depth is not known
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
    settings = tuple(sorted((name, str(value)) for name, value in figure.settings.items()))
    return figure.source, figure.model_label, figure.device, figure.about, settings


def is_of_lab(name: str) -> bool:
    """Whether a name is of a results file, a folder or a page of the lab."""
    if len(name) > LONGEST_PATH or "\n" in name:
        return False
    path = Path(name)
    try:
        if path.is_dir() or (path.suffix == ".html" and path.is_file()):
            return True
        if not path.is_file():
            return False
        with path.open("rb") as file:
            begin = file.read(1000).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return False
    return begin.startswith(b"{") and any(sign in begin for sign in BEGIN_OF_RESULTS)


def nearest(
    first: Sequence[Figure], second: Sequence[Figure], prefill: bool = False
) -> tuple[Figure, Figure]:
    """The two figures of one phase whose depths are nearest; of equally near ones the deepest.

    Decode comes before prefill, unless `prefill` is asked for. LabError if no phase is of both
    sides.
    """
    for is_prefill in [True] if prefill else [False, True]:
        pairs = list[tuple[Figure, Figure]]()
        for figure in first:
            for opposite in second:
                are_of_phase = figure.is_prefill == opposite.is_prefill == is_prefill
                if are_of_phase and figure is not opposite:
                    pairs.append((figure, opposite))
        if pairs:
            return min(pairs, key=distance)
    phases = [
        " and ".join(dict.fromkeys(figure.phase for figure in side)) for side in (first, second)
    ]
    raise LabError(
        f"There is no phase that both sides have: A has {phases[0]}, B has {phases[1]}.",
        "Give two figures of the same phase; --prefill compares prefill.",
    )


def distance(pair: tuple[Figure, Figure]) -> tuple[float, float]:
    """How far apart two figures are; smaller is better. Plain rates come before whole answers."""
    first, second = pair
    different_count = 0.0 if first.phase == second.phase else 0.5
    positions = place(first), place(second)
    if positions[0] is None or positions[1] is None:
        return FAR + different_count, 0.0
    apart = abs(math.log((positions[0] + 1) / (positions[1] + 1)))
    return round(apart, 3) + different_count, -positions[0]


def place(figure: Figure) -> float | None:
    """The position of a figure; of a prefill after some tokens its end."""
    if figure.phase == PREFILL and figure.depth is not None and figure.n_prompt is not None:
        return figure.depth + figure.n_prompt
    return figure.position


def others_in_words(
    sides: Sequence[Sequence[Figure]], chosen: Sequence[Figure], prefill: bool
) -> list[str]:
    """Sentences on the figures that are not compared; none where each side has a single figure."""
    sentences = list[str]()
    for letter, figures in zip("AB", sides, strict=True):
        left_out = list[Figure]()
        for figure in figures:
            is_of_phase = figure.is_prefill == chosen[0].is_prefill
            if is_of_phase and all(figure is not each for each in chosen):
                left_out.append(figure)
        if not left_out:
            continue
        labels = [in_words(figure) for figure in left_out[:MOST_LISTED]]
        more = len(left_out) - len(labels)
        if more:
            labels.append(f"and {more} more")
        sentences.append(f"not compared of {letter}: {'; '.join(labels)}")
    is_prefill = all(figure.is_prefill for figure in chosen)
    if is_prefill and not prefill:
        sentences.append("prefill is compared, since no decode rate is of both sides")
    return sentences


def in_words(figure: Figure) -> str:
    """A figure that is not compared."""
    if figure.line is None:
        return f"{figure.tps:.4g} ({figure.timed})"
    return f"{figure.tps:.4g} ({figure.timed}, line {figure.line})"
