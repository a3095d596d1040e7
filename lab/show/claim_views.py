"""A session of claims as text, on a page, and in pictures.

As text: a line for each claim with its verdict, then the reasons for verdicts other than "holds". On a page: the same
table, then for each claim the figures, the criterion and the pictures of its parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lab.analysis import table
from lab.analysis.wording import digits
from lab.core.lists import grouped
from lab.core.record import Ceilings, Record
from lab.errors import LabError
from lab.experiments.claims import claim_verdicts
from lab.experiments.claims.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE
from lab.experiments.claims.claim_parts import PARTS
from lab.experiments.claims.claim_session import Session
from lab.experiments.claims.claim_verdicts import Judged, Verdicts
from lab.runner.progress import duration
from lab.show import levers, plot_runs, section, text_results, text_why
from lab.show.console import Grid
from lab.show.section import UNKNOWN, Cell, Picture, Section, print_marked
from lab.why import probing, roofline, where

if TYPE_CHECKING:
    from rich.console import Console

QUESTION = "Do the textbooks' claims hold on this machine?"
HEADINGS = ("", "claim", "figures", "criterion", "verdict")
COLOURS = {HOLDS: "green", HOLDS_NOT: "red", UNSURE: "yellow", UNTESTABLE: "dim"}
STYLES = {HOLDS: "holds", HOLDS_NOT: "fails", UNSURE: "unsure", UNTESTABLE: "quiet"}
"""Classes of the page's style sheet."""

PREFILL = "Prefill time of the prompt. Points are runs, the line is the median."
DECODE = "Time of each generated token. Points are tokens, the line is the running median."
PLAIN_PARTS = {
    "lengths": {"prefill": PREFILL, "decode": DECODE},
    "no_cache": {"prefill": "Time of a step over the whole text, without a KV cache. " + PREFILL},
    "threads": {"decode": "With all and with half the threads. " + DECODE},
    "quantizations": {"decode": "In several quantizations. " + DECODE},
    "flash": {"prefill": "With flash attention on and off. " + PREFILL},
    "cache": {"decode": "With KV caches of several types. " + DECODE},
    "context": {"sweep": "Prefill and decode in one walk through the context; the dashed line is the fitted law."},
    "heads": {"sweep": "Prefill and decode of two shapes that differ only in the heads for keys and values."},
}
"""The pictures of parts with plain runs, and their captions."""


def drawings(
    records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[Record] = (), stacked: bool = False
) -> list[Picture]:
    """All pictures of one session, in the order of its parts.

    The predictions of experiments come from `known` ceilings and `others`, plain runs.
    """
    made = []
    for part, own in grouped((record for record in records if record.run.is_timed), lambda one: one.run.part).items():
        if part not in PARTS:  # files and the page's anchors are named after parts: a record may not choose any name
            continue
        experiments = levers.sections(own, known, [*records, *others])
        found = [*_plain(part, own, stacked), *(picture for one in experiments for picture in one.pictures)]
        if part == "lengths":
            found += _roofline(own, known)
        for one in section.numbered_alike(found):
            made.append(
                dataclasses.replace(one, part=part, name=one.name if one.name == part else f"{part}-{one.name}")
            )
    return made


def _plain(part: str, records: Sequence[Record], stacked: bool) -> list[Picture]:
    captions = PLAIN_PARTS.get(part, {})
    sizes = {"sweep": section.TALL if stacked else section.WIDE}
    return [
        Picture(name, captions[name], draw, sizes.get(name, section.SMALL))
        for name, draw in plot_runs.drawings(records, stacked).items()
        if name in captions
    ]


def _roofline(records: Sequence[Record], known: Sequence[Ceilings]) -> Sequence[Picture]:
    """The roofline picture; empty if the machine's ceilings are unknown."""
    ceilings = probing.known(known, where.of_record(records[0]))
    if ceilings is None:
        return []
    try:
        rows = roofline.explain(records, ceilings)
    except LabError:
        return []
    label = table.setups(table.runs(records))[0][0]
    return text_why.section(label, records, rows, ceilings, []).pictures[:1]


def print_verdicts(verdicts: Verdicts, out: Console, name: str = "") -> None:
    """Prints a line for each claim (a table on a terminal), then the reasons, and what disturbed the runs."""
    out.print()
    if name:
        out.print(Text(f"Claims, session {name}", style="bold"))
    if out.is_terminal:
        out.print(_table(verdicts.judged), soft_wrap=False)
    else:
        out.print(" | ".join(("number", *HEADINGS[1:])))
        for one in verdicts.judged:
            out.print(" | ".join(one.cells))
    out.print()
    for sentence in reasons(verdicts.judged):
        out.print(sentence)
    out.print(claim_verdicts.summary(verdicts.judged))
    for sentence in notes(verdicts):
        out.print(sentence)
    print_marked(text_results.warnings(verdicts.records), failures(verdicts.records), out)


def reasons(judged: Sequence[Judged]) -> list[str]:
    """The reasons for each claim that does not hold or cannot be judged."""
    return [
        f"{one.claim.number}, {one.judgement.verdict}: {one.judgement.words}"
        for one in judged
        if one.judgement.words and one.judgement.verdict != HOLDS
    ]


def notes(verdicts: Verdicts) -> list[str]:
    """Notes on the session as a whole."""
    made = []
    if verdicts.is_quick:
        made.append("Quick session with short prompts and few repeats; without --quick the verdicts are more certain.")
    if verdicts.unmeasured:
        numbers = ", ".join(map(str, verdicts.unmeasured))
        made.append(f"Claims without measurements: {numbers}. Run: lab claims --only {numbers.replace(' ', '')}")
    return made


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each part that could not be measured, and for other failed runs."""
    parts = claim_verdicts.failures(records)
    rest = [record for record in records if record.run.part not in parts]
    return [*(f"{part}: {error}" for part, error in parts.items()), *text_results.failures(rest)]


def plan_lines(session: Session) -> list[str]:
    """The estimated time of the session, and the parts that cannot be measured."""
    seconds = sum(session.expected_s.values())
    n, n_parts = len(session.claims), len(session.trials)
    what = f"{n} claim{'s' * (n != 1)}"
    size = f"{n_parts} part{'s' * (n_parts != 1)}, {session.n_runs} runs: about {duration(seconds)}"
    line = f"{what}, {size} on 2 cores of an EPYC" if n_parts else f"{what}, nothing to measure"
    return [line, *(f"{part} cannot be measured: {problem}" for part, problem in session.problems.items())]


def plan_table(session: Session) -> Grid:
    """The table of `--dry-run`: the parts with their runs, memory, time and claims."""
    grid = Grid("part", "what it is", "runs", "memory MB", "time", "claims")
    for name, seconds in session.expected_s.items():
        trials = session.trials.get(name, [])
        needed = [
            sum(max(plan.memory(case).total_bytes for case in plan.cases) for plan in trial.plans.values())
            for trial in trials
        ]
        what = PARTS[name].what if name in PARTS else "the best rate of each kernel"
        users = [str(claim.number) for claim in session.claims if name in claim.parts]
        grid.add_row(
            name,
            what,
            str(sum(trial.n_runs for trial in trials)) if trials else "-",
            digits(max(needed) / 1e6) if needed else "-",
            duration(seconds),
            ",".join(users) or "-",
        )
    return grid


def _table(judged: Sequence[Judged]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, share in zip(HEADINGS, (0, 4, 5, 6, 0), strict=True):
        table.add_column(heading, ratio=share or None, justify="left" if heading else "right", overflow="fold")
    for one in judged:
        *cells, verdict = one.cells
        table.add_row(*cells, Text(verdict, style=COLOURS[verdict]))
    return table


def sections(
    records: Sequence[Record],
    known: Sequence[Ceilings] = (),
    others: Sequence[Record] = (),
    judged: Sequence[tuple[str, Verdicts]] = (),
) -> list[Section]:
    """The page's section on each session of claims among the records, judged again unless `judged` has them."""
    judged = judged or claim_verdicts.of_sessions(records, known, others)
    return [
        _section(f"session-{i}", name if len(judged) > 1 else "", own, known, others)
        for i, (name, own) in enumerate(judged)
    ]


def _section(
    prefix: str, name: str, verdicts: Verdicts, known: Sequence[Ceilings], others: Sequence[Record]
) -> Section:
    """A table of all verdicts, then the evidence of each."""
    pictures = grouped(drawings(verdicts.records, known, others, stacked=True), lambda one: one.part)
    shown_at: dict[str, int] = {}
    evidence = [_evidence(prefix, one, pictures, shown_at) for one in verdicts.judged]
    return Section(
        f"Claims and verdicts{f': {name}' if name else ''}",
        "each claim with its figures and its criterion, which was fixed before the measurement",
        name=prefix,
        question=QUESTION,
        words=notes(verdicts),
        headings=HEADINGS,
        cells=[_cells(prefix, one) for one in verdicts.judged],
        warnings=[
            *text_results.warnings(verdicts.records),
            *(f"failed: {line}" for line in failures(verdicts.records)),
        ],
        sentences=[claim_verdicts.summary(verdicts.judged)],
        parts=[Section("The evidence, claim by claim", parts=evidence)],
    )


def _cells(prefix: str, one: Judged) -> list[Cell]:
    number, words, _, criterion, verdict = one.cells
    figures = "\n".join(one.first_figures) or UNKNOWN
    link, style = f"{prefix}-claim-{number}", STYLES[one.judgement.verdict]
    return [
        Cell(number),
        Cell(words, link),
        Cell(figures, style="figures"),
        Cell(criterion),
        Cell(verdict, style=style),
    ]


def _evidence(prefix: str, one: Judged, pictures: dict[str, list[Picture]], shown_at: dict[str, int]) -> Section:
    """The evidence of a claim; pictures of several claims are shown with the first, the others link to it."""
    number, words, _, criterion, verdict = one.cells
    own = [part for part in one.claim.parts if part in pictures]
    here = [part for part in own if part not in shown_at]
    elsewhere = [
        Cell(
            f"Picture: {PARTS[part].what if part in PARTS else part}, at claim {shown_at[part]}.",
            f"{prefix}-claim-{shown_at[part]}",
        )
        for part in own
        if part in shown_at
    ]
    shown_at.update(dict.fromkeys(here, one.claim.number))
    return Section(
        f"{number}. {words}: {verdict}",
        name=f"{prefix}-claim-{number}",
        words=[line for line in (one.claim.source, one.judgement.words) if line],
        sentences=[*(figure.words for figure in one.judgement.figures), f"Criterion: {criterion}"],
        links=elsewhere,
        pictures=[picture for part in here for picture in pictures[part]],
    )
