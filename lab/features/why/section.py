"""The answer as a section: both figures, the table of parts, a sentence and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from lab.core.shown import MARK, NOT_TO_BE_TRUSTED
from lab.errors import printable
from lab.features.why import facts
from lab.features.why.answer import WhyAnswer
from lab.features.why.conclusion import (
    MOST_QUESTIONS,
    asked_by_sides,
    conclude,
    differences,
    not_known,
    questions,
)
from lab.features.why.counting import sums
from lab.features.why.facts import Fact
from lab.features.why.figure import Figure
from lab.features.why.machines import place_of
from lab.features.why.parts import NOT_EXPLAINED, GapPart
from lab.show import canvas
from lab.show.cells import TEXT, Column
from lab.show.section import WIDE, Columns, Picture, Section, tabled
from lab.show.wording import UNKNOWN, digits, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

ABOUT = (
    "The factors multiply to the ratio. Their ranges are 95 % intervals, predicted ones 90 %. "
    "The range of the rest combines those of the parts and of both figures."
)
DETAILS = "See --details."
NEARLY_EQUAL = 1.005
SMALLEST_SHOWN = math.log(1.05)  # a factor that has a row without --details
MOST_FIGURES = 20  # in the table of what was read
LONGEST_CELL = 34  # letters of a fact in the table of what was read
SLOWS = "slows"
SPEEDS_UP = "speeds up"
COLOURS_OF_KINDS = {
    SLOWS: canvas.COLOURS[1],
    SPEEDS_UP: canvas.COLOURS[2],
    NOT_EXPLAINED: canvas.GUIDE,
}
FIELDS = (
    *("tps", "phase", "counts", "source", "label", "n_prompt", "n_gen", "depth", "n_streams"),
    *("model", "quantization", "device", "line", "weakness"),
)
"""Fields of a figure in JSON."""

ORDER = (
    *(facts.BUILD, facts.MODEL, facts.QUANTIZATION, facts.PARAMETERS, facts.FILE_ID),
    *(facts.HARDWARE, facts.BACKEND, facts.PLACEMENT, facts.SPECULATION, facts.SAMPLING),
    *facts.MEASURABLE[:7],
)
"""Facts that the table of what was read always has, in its order; other ones follow."""


def section(explained: WhyAnswer, details: bool = False) -> Section:
    """The answer as it is printed, and drawn on a page; `details`: with every part and reason."""
    lines = []
    for letter, figure in explained.pair.in_order:
        lines.append(f"{letter}  {digits(figure.tps):>6} tokens/s   {figure.label}")
    lines += explained.notes if details else explained.notes[:2]
    columns: Columns[GapPart] = (
        Column("part", lambda part: part.name, TEXT),
        Column("factor", factor_cell),
        Column("range", range_cell),
        Column("by order", orders_cell),
        Column("how known", lambda part: part.how),
    )
    rows = list(explained.parts)
    if not details:
        rows = [part for part in rows if is_shown(part)]
        if rows == [explained.rest]:  # a sentence says so
            rows = []
    lines.append(headline(explained, "Of this:" if rows else ""))
    notes = list[str]()
    if details:
        notes = [f"{part.name}: {part.reason}" for part in explained.parts if part.reason]
        notes.append(ABOUT)
    caption = "The way from one rate to the other, part by part."
    return Section(
        name="why",
        question="Why do these two figures differ?",
        words=lines,
        **tabled(columns, rows),
        notes=notes,
        sentences=sentences(explained, details),
        pictures=[Picture("why", caption, partial(draw, explained), WIDE)],
    )


def headline(explained: WhyAnswer, end: str) -> str:
    """The ratio in words, with the weakness of a figure that is no plain rate."""
    pair = explained.pair
    fast, slow = pair.letters
    if explained.ratio <= NEARLY_EQUAL:
        return "They are equal."
    weak = list[str]()
    for letter, figure in pair.in_order:
        if figure.weakness:
            weak.append(f"{letter}: {figure.weakness}")
    ratio = times(explained.ratio)
    sentence = f"{fast} is {ratio} as fast as {slow}"
    if sums(pair):
        of_sum = pair.fast.tps / pair.slow.tps
        quicker = fast if of_sum >= 1 else slow
        together = times(max(of_sum, 1 / of_sum))
        sentence = (
            f"One answer of {fast} is {ratio} as fast as one of {slow} (in sum {quicker} is "
            f"{together} as fast)"
        )
    doubt = f" ({'; '.join(weak)})" if weak else ""
    return f"{sentence}{doubt}. {end}".strip()


def is_shown(part: GapPart) -> bool:
    """Whether a part has a row without --details: it changes the ratio, or was tried."""
    is_visible = abs(part.log) > SMALLEST_SHOWN or part.n_runs > 0
    return part.name == NOT_EXPLAINED or is_visible


def sentences(explained: WhyAnswer, details: bool) -> list[str]:
    """The conclusion, what differs or is not given, and what to do next."""
    conclusion = conclude(explained)
    lines = [conclusion.sentence]
    different = differences(explained)
    if different and not details and not conclusion.names_differences:
        lines.append(f"Different, effect not known: {'; '.join(different)}.")
    if conclusion.command:
        lines.append(f"Try: {conclusion.command}")
    asked = asked_by_sides(explained, None if details else MOST_QUESTIONS)
    if explained.causes:
        asked = {}
    if asked:
        lines.append(questions(asked))
    unknown = not_known(explained, asked)
    if unknown and not details:
        lines.append(f"{unknown} {DETAILS}")
    return lines


def read_section(sides: Sequence[Sequence[Figure]], chosen: Sequence[Figure]) -> Section:
    """What was read: all figures of each side, and the facts of those that are compared."""
    lines = list[str]()
    for letter, side in zip("AB", sides, strict=False):
        for figure in side[:MOST_FIGURES]:
            lines.append(f"{letter}  {digits(figure.tps):>6} tokens/s   {figure.label}")
    table_of_facts = list[tuple[str, ...]]()
    lacking = list[str]()
    for name, cells in rows_of_facts(chosen):
        if set(cells) == {UNKNOWN}:
            lacking.append(name)
        else:
            table_of_facts.append((name, *cells))
    of_facts: list[Column[Sequence[str]]] = [Column("fact", lambda row: row[0])]
    for place, (letter, figure) in enumerate(zip("AB", chosen, strict=False), 1):
        where = f", line {figure.line}" if figure.line else ""
        of_facts.append(Column(f"{letter}{where}", partial(cell_of, place)))
    return Section(
        name="why-read",
        words=lines,
        **tabled(of_facts, table_of_facts, keep_all=True),
        sentences=[f"Not found: {', '.join(lacking)}."] if lacking else [],
    )


def cell_of(place: int, row: Sequence[str]) -> str:
    """A cell of the table of facts."""
    return row[place]


def rows_of_facts(chosen: Sequence[Figure]) -> list[tuple[str, list[str]]]:
    """The facts of the figures by name, each with its line or how it is known."""
    rows = [
        ("program", [figure.source for figure in chosen]),
        ("answers at once", [shown_or_unknown(figure.n_streams) for figure in chosen]),
        ("tokens a step", [shown_or_unknown(figure.tokens_per_step) for figure in chosen]),
    ]
    names = dict.fromkeys(ORDER)
    for figure in chosen:
        names |= dict.fromkeys(figure.facts)
    for name in names:
        most = LONGEST_CELL // len(chosen)
        cells = [fact_cell(fact_of(figure, name), most) for figure in chosen]
        rows.append((name, cells))
    return rows


def fact_of(figure: Figure, name: str) -> Fact | None:
    """A fact of a figure; its drafts may follow from its tokens alone."""
    if name == facts.SPECULATION and figure.is_speculative and name not in figure.facts:
        return Fact("drafts", figure.line)
    return figure.facts.get(name)


def shown_or_unknown(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def fact_cell(fact: Fact | None, most: int) -> str:
    """A fact with the line that states it; a dash for an unknown one."""
    if fact is None:
        return UNKNOWN
    text = printable(fact.words)
    if len(text) > most:
        text = f"{text[:most]}..."
    return f"{text} (line {fact.line})" if fact.line else text


def factor_cell(part: GapPart) -> str:
    """The factor, with the mark of a trial whose runs were disturbed."""
    if not part.has_factor:
        return UNKNOWN
    if part.is_doubtful:
        return f"{times(part.factor)} {NOT_TO_BE_TRUSTED}"
    if part.n_disturbed:
        return f"{times(part.factor)} {MARK}"
    return times(part.factor)


def range_cell(part: GapPart) -> str:
    """The range of a factor; "" if it is exact or not known."""
    if not part.half or part.range is None:
        return ""
    low, high = part.range
    return f"{low:.3g}-{high:.3g}"


def orders_cell(part: GapPart) -> str:
    """The factor on the way there and on the way back, if they differ; else ""."""
    if not part.orders or not part.depends_on_order:
        return ""
    there, back = map(times, map(math.exp, part.orders))
    return f"{there} or {back}"


def draw(explained: WhyAnswer, drawing: Drawing) -> None:
    """A waterfall from the faster rate to the slower one on a logarithmic axis, with ranges."""
    ax = drawing.subplots()
    parts = [part for part in explained.parts if part.log or part.half]
    rates = [explained.pair.fast.tps, explained.pair.slow.tps]
    ax.barh([0, len(parts) + 1], rates, color=canvas.COLOURS[0])
    rate = explained.pair.fast.tps
    for place, part in enumerate(parts, 1):
        rates += draw_part(ax, place, part, rate)
        rate /= part.factor
    fast, slow = explained.pair.letters
    names = [f"{fast}: {digits(explained.pair.fast.tps)} tokens/s"]
    names += [part.name for part in parts]
    names.append(f"{slow}: {digits(explained.pair.slow.tps)} tokens/s")
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(min(rates) / 1.15, max(rates) * 1.05)
    ax.set_xlabel("tokens/s")
    for label in dict.fromkeys(map(kind_of, parts)):
        ax.barh([0], [0], color=COLOURS_OF_KINDS[label], alpha=0.8, label=label)
    title = f"Why {fast} is {times(explained.ratio)} as fast as {slow}"
    setups = []
    for letter, figure in explained.pair.in_order:
        machine = None if figure.device else place_of(figure)
        where = printable(f", {machine}") if machine else ""
        setups.append(f"{letter}: {figure.label}{where}")
    canvas.finish([ax], "\n".join([title, *setups]))


def draw_part(ax: Axes, place: int, part: GapPart, rate: float) -> list[float]:
    """A bar from the rate before a part to the rate after it; the rates that the axis must show."""
    after = rate / part.factor
    left = min(rate, after)
    ax.barh(
        [place],
        [abs(rate - after)],
        left=[left],
        color=COLOURS_OF_KINDS[kind_of(part)],
        alpha=0.8,
    )
    ax.plot([rate, rate], [place - 1, place + 0.4], color=canvas.GUIDE, lw=0.8)
    rates = [after]
    label = factor_cell(part)
    if part.half and part.range:
        whisker = [rate / part.range[0], rate / part.range[1]]
        ax.plot(whisker, [place, place], color=canvas.INK, lw=1.5, marker="|", ms=8)
        rates += whisker
        label = f"{label} ({range_cell(part)})"
    canvas.write_beside(ax, place, label)
    return rates


def kind_of(part: GapPart) -> str:
    """What a bar shows: a part that slows, that speeds up, or that is not explained."""
    if part.name == NOT_EXPLAINED:
        return NOT_EXPLAINED
    return SLOWS if part.log > 0 else SPEEDS_UP


def document(explained: WhyAnswer) -> dict[str, object]:
    """The answer as JSON."""
    conclusion = conclude(explained)
    sides = dict[str, object]()
    for letter, figure in explained.pair.sides:
        sides[letter] = figure_document(figure)
    return {
        **sides,
        "slower": explained.pair.letters[1],
        "ratio": explained.ratio,
        "parts": list(map(part_document, explained.parts)),
        "causes": [part.name for part in explained.causes],
        "notes": list(explained.notes),
        "sentence": conclusion.sentence,
        "questions": questions(asked_by_sides(explained)) or None,
        "command": conclusion.command or None,
        "results": str(explained.path) if explained.path else None,
    }


def figure_document(figure: Figure) -> dict[str, object]:
    """A figure as JSON: its fields, and its facts with their lines."""
    fields = {name: getattr(figure, name) for name in FIELDS}
    facts_by_name = dict[str, object]()
    for name, fact in figure.facts.items():
        facts_by_name[name] = {"value": fact.value, "line": fact.line, "how": fact.how}
    return {
        **fields,
        "program": figure.source,
        "build": facts.value_of(figure.facts, facts.BUILD),
        "concurrency": figure.n_streams,
        "speculation": figure.is_speculative,
        "tokens_per_step": figure.tokens_per_step,
        "settings": figure.settings,
        "facts": facts_by_name,
    }


def part_document(part: GapPart) -> dict[str, object]:
    """A part as JSON."""
    low, high = part.range or (None, None)
    return {
        "part": part.name,
        "factor": part.factor if part.has_factor else None,
        "low": low,
        "high": high,
        "how": part.how,
        "differs": part.differs,
        "why": part.reason,
        "runs": part.n_runs,
        "disturbed": part.n_disturbed,
    }
