"""The times of single steps: what verifying several positions costs, and drafting a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lab.app.experiment import ExperimentTable
from lab.app.experiment_tables import as_rows, cell, prediction_errors
from lab.core import drafts
from lab.core.lists import grouped, plural
from lab.core.record import Record, Run
from lab.features.speculate.setup import speculation_of
from lab.roofline.step_prediction import StepPrediction
from lab.show.cells import PROMPT_TOKENS, Column
from lab.show.wording import digits

CurveCase = tuple[int, int, str]  # n_prompt, n_gen, what drafts


def curve_case(run: Run) -> CurveCase | None:
    """The curve that a run of single steps belongs to; None for other runs."""
    speculation = speculation_of(run)
    if speculation is None or speculation.text is not None:
        return None
    return (run.n_prompt, run.n_gen, speculation.draft or "")


class CurveRow(NamedTuple):
    """A step of a number of positions."""

    n_prompt: int
    draft: str | None
    n_positions: int
    step_s: float
    v: float
    expected_v: float | None
    c: float | None


def rows(
    records: Sequence[Record], prediction: StepPrediction | None = None
) -> list[CurveRow]:
    """A row for each measured number of positions n: the time of a step, and its ratio v to a step
    of one.

    `draft`: timed with it (lookup costs nothing, a model, or none). `c` is a step of the draft
    model over one of the model.
    """
    import pandas as pd

    runs = [record.run for record in records]
    table = []
    for case, runs_of_case in sorted(grouped(runs, curve_case).items()):
        times = drafts.step_times(runs_of_case)
        if times is None:
            continue
        n_prompt, n_gen, draft = case
        n_past = n_prompt + n_gen // 2
        for n_positions, step_s in times.target.items():
            table.append(
                {
                    "n_prompt": n_prompt,
                    "draft": draft or None,
                    "n_positions": n_positions,
                    "step_s": step_s,
                    "v": step_s / times.target[1],
                    "expected_v": expected_v(prediction, n_past, n_positions),
                    "c": times.draft[1] / times.target[1] if times.draft else None,
                }
            )
    return as_rows(pd.DataFrame(table), CurveRow)


def expected_v(
    prediction: StepPrediction | None, n_past: int, n_positions: int
) -> float | None:
    """The predicted time of a step over that of one position; None if it is unknown."""
    if prediction is None:
        return None
    step_s = prediction.seconds(n_positions, n_past, n_positions)
    one_s = prediction.seconds(1, n_past, 1)
    return step_s / one_s if step_s and one_s else None


def conclude(rows: Sequence[CurveRow], records: Sequence[Record] = ()) -> list[str]:
    """What verifying costs, and the chance of a right draft at which it pays."""
    several = [row for row in rows if row.n_positions > 1]
    sentences = []
    for curve in grouped(several, lambda row: (row.n_prompt, row.draft)).values():
        sentences.append(what_pays(curve))
    pairs = [(row.expected_v, row.v) for row in several]
    return sentences + prediction_errors(pairs, "v")


def what_pays(curve: Sequence[CurveRow]) -> str:
    """The draft length that needs the least chance of a right draft to pay, and what its step
    costs; the longest one where none pays."""
    possible = []
    for row in curve:
        n_draft = row.n_positions - 1
        chance = drafts.break_even(row.v, row.c or 0.0, n_draft)
        if chance is not None:
            possible.append((chance, n_draft, row))
    if not possible:
        cost = cost_of_step(curve[-1])
        return f"{cost}: no draft length pays, even with every token accepted."
    chance, n_draft, row = min(possible, key=lambda length: length[:2])
    return (
        f"{cost_of_step(row)}: drafts of {plural(n_draft, 'token')} pay if each drafted token is "
        f"right with a chance above {100 * chance:.0f} %."
    )


def cost_of_step(row: CurveRow) -> str:
    """What a step with drafts and drafting a token take, over a plain step."""
    step = f"A step of {row.n_positions} positions takes {digits(row.v)}x a step of one"
    return step if row.c is None else f"{step}, drafting a token {digits(row.c)}x"


TABLE: ExperimentTable[CurveRow] = ExperimentTable(
    name="curve",
    question="What does it cost to verify several tokens at once?",
    title="steps of several positions of one sequence; medians",
    columns=(
        PROMPT_TOKENS,
        Column("positions\na step", lambda row: f"{row.n_positions}"),
        Column("step\nms", lambda row: cell(row.step_s, 1e3)),
        Column("v", lambda row: cell(row.v)),
        Column("predicted\nv", lambda row: cell(row.expected_v)),
        Column("c", lambda row: cell(row.c)),
    ),
    rows=rows,
    conclude=conclude,
)
