"""The table of a session under way: medians of the runs so far, and how many they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lab.core import experiments
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.show import table
from lab.show.console import Grid
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

HEADINGS = {
    "prefill_s": "prefill\ns",
    "prefill_tps": "prefill\ntokens/s",
    "ttft_s": "TTFT\ns",
    "tpot_ms": "TPOT\nms",
    "decode_tps": "decode\ntokens/s",
    "e2e_s": "E2E\ns",
}
"""Figures of runs and requests, and their headings."""

IDENTITY = ["variant", "n_prompt", "case"]
MOST_ROWS = 8  # lengths that are shown, evenly spaced; a terminal has few lines


class SoFar:
    """The figures of a session's runs; `add` each when it has ended."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._names: dict[str, str] = dict(HEADINGS)

    def add(self, line: Any) -> None:
        """Add a timed run or request; other lines have no figures of this table."""
        if not isinstance(line, Record | RequestRecord) or not line.is_timed:
            return
        variant = ""
        if isinstance(line, Record):
            variant = line.run.variant or ""
            for name in experiments.figures(line.run):
                self._names.setdefault(name, experiments.figure_names().get(name, name))
        for row in table.runs([line]).to_dict("records"):
            self._rows.append({**row, "variant": variant, "case": row["case"] or ""})

    def grid(self) -> Grid | None:
        """The table, a row for each case; None before the first run."""
        import pandas as pd

        if not self._rows:
            return None
        runs = pd.DataFrame(self._rows)
        names = [name for name in self._names if name in runs and runs[name].notna().any()]
        if "prefill_s" in names:
            names.remove("ttft_s")
        cases = runs.groupby(IDENTITY, sort=True)
        medians = cases[names].median().assign(n_runs=cases.size()).reset_index()
        if "prefill_tps" in names:  # as in the final table: from the median time
            medians["prefill_tps"] = medians.n_prompt / medians.prefill_s
        if "decode_tps" in names:
            medians["decode_tps"] = 1e3 / medians.tpot_ms
        shown = evenly_spaced(medians)
        texts = [name for name in ("variant", "case") if medians[name].any()]
        grid = Grid(*texts, "prompt\ntokens", *map(self._heading, names), "so far")
        for row in shown.to_dict("records"):
            cells = [row[name] for name in texts]
            figures = [digits(row[name]) for name in names]
            grid.add_row(
                *cells, f"{row['n_prompt']:,}", *figures, plural(row["n_runs"], "run")
            )
        return grid

    def _heading(self, name: str) -> str:
        unit = name.rpartition("_")[2]
        if name in HEADINGS:
            return HEADINGS[name]
        return f"{self._names[name]}\n{unit}"


def evenly_spaced(rows: pd.DataFrame) -> pd.DataFrame:
    """At most MOST_ROWS of the rows, with the last one."""
    if len(rows) <= MOST_ROWS:
        return rows
    ends = [round((number + 1) * len(rows) / MOST_ROWS) - 1 for number in range(MOST_ROWS)]
    return rows.iloc[ends]
