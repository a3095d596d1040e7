"""The figures of `lab choose`: a row per chain and number of sequences, with its law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lab.app.experiment_tables import as_rows
from lab.core.record import Record
from lab.features.choose.vocabularies import STEM
from lab.roofline.choosing import ChoosingLaw, chain_times, laws

if TYPE_CHECKING:
    import pandas as pd

NO_TOP_K = "no top-k"
"""Its time depends on the logits more than on their number: llama.cpp sorts the whole vocabulary
where its 256 most probable tokens together are less probable than top-p."""

BY = ["n_seq", "number", "name"]


def is_of_size(record: Record) -> bool:
    """Whether a run is of a model that was made for the size of its vocabulary."""
    return record.model.name.startswith(STEM)


class ChainRow(NamedTuple):
    """A chain with a number of sequences: medians over runs."""

    n_seq: int
    number: int
    name: str
    choose_s: float
    low_s: float
    high_s: float
    first_s: float
    built_s: float | None
    compute_s: float
    between_s: float
    n_runs: int
    least_s: float
    most_s: float
    step_choose_s: float
    share: float
    expected_s: float | None
    law_s: float | None


@dataclass(frozen=True)
class ChoosingFigures:
    """The times of a model's chains, and those of other vocabularies with their laws."""

    chains: pd.DataFrame  # by BY: medians over runs
    sizes: pd.DataFrame  # as `chain_times`
    laws: dict[str, ChoosingLaw]

    def rows(self) -> list[ChainRow]:
        return as_rows(self.chains, ChainRow)


def figures(records: Sequence[Record], of_sizes: Sequence[Record]) -> ChoosingFigures | None:
    """The figures of the runs of one setup; None without a whole run.

    `share` is the part of a step that choosing takes, `step_choose_s` its time for all sequences,
    `expected_s` the same predicted from one sequence: they are chosen one after the other.
    """
    times = chain_times(records)
    if times.empty:
        return None
    sizes = chain_times(of_sizes)
    groups = times.groupby(BY)
    table = groups[
        ["choose_s", "low_s", "high_s", "first_s", "built_s", "compute_s", "between_s"]
    ].median()
    table["n_runs"] = groups.size()
    table["least_s"] = groups.choose_s.min()
    table["most_s"] = groups.choose_s.max()
    table = table.reset_index()
    table["step_choose_s"] = table.choose_s * table.n_seq
    total_s = table.step_choose_s + table.compute_s + table.between_s
    table["share"] = table.step_choose_s / total_s
    alone = table[table.n_seq == 1].set_index("name").choose_s
    table["expected_s"] = table.n_seq * table.name.map(alone)
    laws_of_sizes: dict[str, ChoosingLaw] = {}
    if not sizes.empty:
        laws_of_sizes = laws(sizes)
    table["law_s"] = None
    n_vocab = times.n_vocab.iloc[0]
    if n_vocab == n_vocab and n_vocab:
        table["law_s"] = [law_s(laws_of_sizes, name, int(n_vocab)) for name in table.name]
    return ChoosingFigures(table, sizes, laws_of_sizes)


def law_s(laws_of_sizes: dict[str, ChoosingLaw], name: str, n_vocab: int) -> float | None:
    """Seconds by a chain's law; None where none is known."""
    if name == NO_TOP_K or name not in laws_of_sizes:
        return None
    return laws_of_sizes[name].seconds(n_vocab)
