"""The pictures of a session of claims: of each part those that show what it was measured for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.analysis import table
from lab.core.record import OK, Ceilings, Record
from lab.errors import LabError
from lab.experiments.claim_parts import PARTS
from lab.show import levers, plot_runs, plot_why
from lab.why import probing, roofline, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDE, PLAIN = (11, 5), (8, 5)
PREFILL = "Time until the prompt is processed. Points are runs, the line their median."
DECODE = "Time of each generated token. Points are tokens, the line their running median."
PLAIN_PARTS = {
    "lengths": {"prefill": PREFILL, "decode": DECODE},
    "no_cache": {"prefill": "What a step over so many tokens takes, where nothing is kept. " + PREFILL},
    "threads": {"decode": "With all threads, and with half of them. " + DECODE},
    "quantizations": {"decode": "In several quantizations. " + DECODE},
    "flash": {"prefill": "With flash attention on and off. " + PREFILL},
    "cache": {"decode": "With KV caches of several types. " + DECODE},
    "context": {"sweep": "Both curves in one walk through the context; the dashed line is the fitted law."},
    "heads": {"sweep": "Both curves of two shapes that differ in the heads for keys and values only."},
}
"""Of parts that are plain runs: which pictures show what they were measured for, and their captions."""


@dataclass(frozen=True)
class Drawing:
    """A picture of a part: its name in files, its caption, and what draws it, in inches of `size`."""

    part: str
    name: str
    caption: str
    draw: Callable[[Figure], Any]
    size: tuple[float, float]


def drawings(
    records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[Record] = (), stacked: bool = False
) -> list[Drawing]:
    """All pictures of one session that there is data for, in the order of its parts.

    `known` ceilings and `others`, plain runs, predict what experiments are compared with.
    """
    timed = [record for record in records if record.run.status == OK and not record.run.warmup]
    made = []
    for part in dict.fromkeys(record.run.part for record in timed):
        if part not in PARTS:  # files and the page's anchors are named after parts: a record may not choose any name
            continue
        own = [record for record in timed if record.run.part == part]
        made += _plain(part, own, stacked) + _experiments(part, own, known, [*records, *others])
        if part == "lengths":
            made += _roofline(part, own, known)
    return made


def _plain(part: str, records: Sequence[Record], stacked: bool) -> list[Drawing]:
    captions = PLAIN_PARTS.get(part, {})
    return [
        Drawing(part, _name(part, name), captions[name], draw, WIDE if name == "sweep" and not stacked else PLAIN)
        for name, draw in plot_runs.drawings(records, stacked).items()
        if name in captions
    ]


def _experiments(
    part: str, records: Sequence[Record], known: Sequence[Ceilings], others: Sequence[Record]
) -> list[Drawing]:
    shown = levers.sections(records, known, others)
    return [
        Drawing(part, _name(part, name), section.kind.caption, draw, WIDE)
        for section, (name, draw) in zip(shown, levers.drawings(shown).items(), strict=True)
    ]


def _roofline(part: str, records: Sequence[Record], known: Sequence[Ceilings]) -> list[Drawing]:
    """What each phase reached, under the machine's best, where that is known."""
    first = records[0]
    ceilings = probing.known(known, where.of_record(first))
    if ceilings is None:
        return []
    try:
        rows = roofline.explain(records, ceilings)
    except LabError:
        return []
    best = roofline.roof(ceilings, where.layers_of(first))

    def draw(title: str, figure: Figure) -> None:
        plot_why.plot_roofline(rows, best, title, figure.subplots())

    caption = "Roofline: what each phase reached (numbers: prompt tokens), under the best that the machine can do."
    return [
        Drawing(part, _name(part, "roofline"), caption, partial(draw, table.setups(table.runs(records))[0][0]), PLAIN)
    ]


def _name(part: str, name: str) -> str:
    return name if name == part else f"{part}-{name}"
