"""The table of a session under way: medians of the runs so far, and how many they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.core import experiments, figures
from lab.core.figures import DECODE_RATE, E2E, PREFILL, PREFILL_RATE, TPOT, TTFT
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.show import table
from lab.show.cells import PROMPT_TOKENS, Column, of_figure
from lab.show.console import Grid
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

FIGURES = (PREFILL, PREFILL_RATE, TTFT, TPOT, DECODE_RATE, E2E)
COLUMNS: dict[str, Column[object]] = {figure.name: of_figure(figure) for figure in FIGURES}

IDENTITY = ["variant", "n_prompt", "case"]
MOST_ROWS = 8  # lengths that are shown, evenly spaced; a terminal has few lines


class SoFar:
    """The figures of a session's runs; `add` each when it has ended."""

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []
        self._columns = dict(COLUMNS)

    def add(self, line: object) -> None:
        """Add a timed run or request; other lines have no figures of this table."""
        if not isinstance(line, Record | RequestRecord) or not line.is_good:
            return
        variant = ""
        if isinstance(line, Record):
            variant = line.run.variant or ""
            for name in experiments.figures(line.run):
                label = figures.labels().get(name, name)
                self._columns.setdefault(name, Column(f"{label}\n{figures.unit(name)}"))
        for row in table.runs([line]).to_dict("records"):
            self._rows.append({**row, "variant": variant, "case": row["case"] or ""})

    def grid(self) -> Grid | None:
        """The table, a row for each case; None before the first run."""
        import pandas as pd

        if not self._rows:
            return None
        runs = pd.DataFrame(self._rows)
        names = [name for name in self._columns if name in runs and runs[name].notna().any()]
        if PREFILL.name in names:
            names.remove(TTFT.name)
        cases = runs.groupby(IDENTITY, sort=True)
        medians = cases[names].median().assign(n_runs=cases.size()).reset_index()
        if PREFILL_RATE.name in names:  # as in the final table: from the median time
            medians["prefill_tps"] = medians.n_prompt / medians.prefill_s
        if DECODE_RATE.name in names:
            medians["decode_tps"] = 1e3 / medians.tpot_ms
        shown = evenly_spaced(medians)
        texts = [name for name in ("variant", "case") if medians[name].any()]
        shown_figures = [self._columns[name] for name in names]
        grid = Grid(*map(Column, texts), PROMPT_TOKENS, *shown_figures, Column("so far"))
        for row in shown.to_dict("records"):
            cells = [row[name] for name in texts]
            values = [digits(row[name]) for name in names]
            grid.add_row(*cells, f"{row['n_prompt']:,}", *values, plural(row["n_runs"], "run"))
        return grid


def evenly_spaced(rows: pd.DataFrame) -> pd.DataFrame:
    """At most MOST_ROWS of the rows, with the last one."""
    if len(rows) <= MOST_ROWS:
        return rows
    ends = [round((number + 1) * len(rows) / MOST_ROWS) - 1 for number in range(MOST_ROWS)]
    return rows.iloc[ends]
