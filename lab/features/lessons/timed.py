"""The timed runs of a lesson's records, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.app import kinds
from lab.core import stats
from lab.core.record import Ceilings, Record
from lab.errors import LabError
from lab.feature_list import TOGETHER
from lab.features import batch
from lab.features.explain import advice
from lab.features.lessons import statements
from lab.roofline import explanation
from lab.show import comparison, summaries, table, text_doubts

if TYPE_CHECKING:
    import pandas as pd

FIGURES = [
    "model",
    "n_threads",
    "n_ubatch",
    "n_prompt",
    "n_gen",
    "prefill_s",
    "tpot_ms",
    "e2e_s",
    "prefill_share",
]


def timed_runs(records: Sequence[Record]) -> list[Record]:
    """The records of timed runs without an error. LabError with the first error where there is
    none."""
    timed = [record for record in records if record.run.is_timed]
    if not timed:
        errors = text_doubts.failures(records)
        raise LabError(
            f"All runs failed. {' '.join(errors[:1])}".strip(),
            "Measure again, with shorter lengths.",
        )
    return timed


def rows(
    records: Sequence[Record], ceilings: Ceilings | None = None, runs: Sequence[Record] = ()
) -> tuple[Any, ...]:
    """The rows of an experiment's table, as in `lab show --json`; `ceilings` and plain `runs` add
    what is predicted. LabError for other runs."""
    parts = kinds.experiments_of(timed_runs(records), [ceilings] if ceilings else [], runs)
    if not parts:
        raise _no_experiment()
    return tuple(parts[0].rows)


def _no_experiment() -> LabError:
    return LabError(
        "These runs belong to no experiment.",
        "Run one: lab.batch(), lab.turns() or lab.stall()",
    )


def steps_s(records: Sequence[Record], n_seq: int) -> list[float]:
    """The seconds of a step with `n_seq` sequences in each timed run of `lab.batch`."""
    return steps_by_size(records).get(n_seq, [])


def steps_by_size(records: Sequence[Record]) -> dict[int, list[float]]:
    """The seconds of a step in each timed run of `lab.batch`, by its number of sequences. LabError
    for other runs."""
    timed = timed_runs(records)
    runs = batch.runs_table([record for record in timed if record.run.experiment == TOGETHER])
    if runs.empty:
        raise _no_experiment()
    return {int(n_seq): list(of_size.step_s) for n_seq, of_size in runs.groupby("n_seq")}


def times_of(records: Sequence[Record], figure: str) -> dict[int, list[float]]:
    """A figure of `lab.runs` in each timed run, by prompt length; without disturbed runs where
    enough of the others are left."""
    of_lengths: dict[int, list[float]] = {}
    for n_prompt, of_length in table.runs(timed_runs(records)).groupby("n_prompt"):
        quiet = of_quiet_runs(of_length, of_length.index.to_series())
        of_lengths[int(n_prompt)] = list(quiet[figure])
    return of_lengths


def of_quiet_runs(of_length: pd.DataFrame, runs: pd.Series) -> pd.DataFrame:
    """Rows of one prompt length, without those of disturbed runs where enough of the others are
    left. `runs`: the run of each row."""
    is_quiet = ~of_length.disturbed
    if runs[is_quiet].nunique() < statements.FEWEST_RUNS:
        return of_length
    return of_length[is_quiet]


def ratios(
    base: Sequence[Record], candidate: Sequence[Record], figure: str
) -> dict[int, stats.Ratio | None]:
    """Candidate over base in a figure at each prompt length that both have."""
    bases = times_of(base, figure)
    candidates = times_of(candidate, figure)
    return {n: statements.ratio(bases[n], candidates[n]) for n in bases if n in candidates}


def compared(
    records: Sequence[Record], figure: str, n_prompt: int
) -> list[comparison.ComparedFigure]:
    """What `compare` prints of a figure, of each further setup against the first."""
    comparisons = comparison.compare_groups(comparison.groups(timed_runs(records)))
    of_figure: list[comparison.ComparedFigure] = []
    for pair in comparisons:
        for row in pair.rows:
            if (row.figure, row.n_prompt) == (figure, n_prompt):
                of_figure.append(row)
    return of_figure


def figures(records: Sequence[Record]) -> pd.DataFrame:
    """The most used columns of the summary, one row per setup and length. Times are medians."""
    return summaries.summary(table.runs(timed_runs(records)))[FIGURES]


def experiment_advice(records: Sequence[Record], ceilings: Ceilings) -> list[advice.Advice]:
    timed = timed_runs(records)
    return advice.experiments(explanation.explain(timed, ceilings), timed, ceilings)
