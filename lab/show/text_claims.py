"""Claims as text: a line for each with its verdict, then why where the figures do not say it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from lab.analysis.wording import digits
from lab.core.record import Record
from lab.experiments import claim_parts, claim_verdicts
from lab.experiments.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE
from lab.experiments.claim_session import Session
from lab.experiments.claim_verdicts import Judged, Verdicts
from lab.runner.progress import duration
from lab.show import text_results
from lab.show.console import Grid, grid_of

if TYPE_CHECKING:
    from rich.console import Console

HEADINGS = ("", "claim", "figures", "criterion", "verdict")
COLOURS = {HOLDS: "green", HOLDS_NOT: "red", UNSURE: "yellow", UNTESTABLE: "dim"}


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
    for sentence in text_results.warnings(verdicts.records):
        out.print(Text(f"{text_results.DISTURBED} ", style="yellow") + Text(sentence))
    for line in failures(verdicts.records):
        out.print(Text("failed ", style="red") + Text(line))


def reasons(judged: Sequence[Judged]) -> list[str]:
    """Why, for each claim that does not simply hold."""
    return [
        f"{one.claim.number}, {one.judgement.verdict}: {one.judgement.words}"
        for one in judged
        if one.judgement.words and one.judgement.verdict != HOLDS
    ]


def notes(verdicts: Verdicts) -> list[str]:
    """What the reader should know about the session as a whole."""
    made = []
    if verdicts.is_quick:
        made.append(
            "A quick session: short prompts and few repeats. Without --quick more is measured, and more surely."
        )
    if verdicts.unmeasured:
        numbers = ", ".join(map(str, verdicts.unmeasured))
        made.append(f"Nothing was measured for {numbers}: lab claims --only {numbers.replace(' ', '')}")
    return made


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each part that could not be measured, and for other failed runs."""
    parts = claim_verdicts.failures(records)
    rest = [record for record in records if record.run.part not in parts]
    return [*(f"{part}: {error}" for part, error in parts.items()), *text_results.failures(rest)]


def plan_lines(session: Session) -> list[str]:
    """How long the session will take, and which parts cannot be measured."""
    seconds = sum(session.expected_s.values())
    n, n_parts = len(session.claims), len(session.trials)
    what = f"{n} claim{'s' * (n != 1)}"
    size = f"{n_parts} part{'s' * (n_parts != 1)}, {session.n_runs} runs: about {duration(seconds)}"
    line = f"{what}, {size} on 2 cores of an EPYC" if n_parts else f"{what}, nothing to measure"
    return [line, *(f"{part} cannot be measured: {problem}" for part, problem in session.problems.items())]


def plan_table(session: Session) -> Grid:
    """What `--dry-run` shows: the parts, their runs, memory, time, and the claims that need them."""
    grid = grid_of("part", "what it is", "runs", "memory MB", "about", "claims")
    for name, seconds in session.expected_s.items():
        trials = session.trials.get(name, [])
        needed = [
            sum(max(plan.memory(case).total_bytes for case in plan.cases) for plan in trial.plans.values())
            for trial in trials
        ]
        what = claim_parts.PARTS[name].what if name in claim_parts.PARTS else "the best that the machine's kernels do"
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


def _table(judged: Sequence[Judged]) -> Grid:
    table = Grid(box=None, pad_edge=False, header_style="bold")
    for heading, share in zip(HEADINGS, (0, 4, 5, 6, 0), strict=True):
        table.add_column(heading, ratio=share or None, justify="left" if heading else "right", overflow="fold")
    for one in judged:
        *cells, verdict = one.cells
        table.add_row(*cells, Text(verdict, style=COLOURS[verdict]))
    return table
