"""Are predictions right for models that nothing was learned from? Rows of models that joined the catalog later.

    python3 -m uv run python -m tests.bench.unlearned

These rows carry the mark `unknown-model` in models/published.csv, so the coefficients of models/learned.toml know
nothing of them. Their devices may have rows of other models among those that were learned from.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from lab.core.record import PREFILL
from lab.roofline import datasheet
from lab.models import catalog
from tests.bench.learn_published import Row, case_for, published


def ratios() -> Iterator[tuple[Row, float, bool]]:
    """Each row with measured time / predicted time, and whether it is inside the 90 % range."""
    for row in published():
        if row.marks != ("unknown-model",) or row.model not in catalog.entries():
            continue
        n_prompt = row.n_prompt or 64
        row = row._replace(n_prompt=n_prompt)
        case = case_for(row)
        learned = datasheet.learned()[row.phase]
        if case and (expected := learned.expected_s(case)):
            fast, slow = learned.range(case)
            ratio = (n_prompt if row.phase == PREFILL else 1) / row.tps / expected
            yield row, ratio, fast <= ratio <= slow


def main() -> None:
    t = pd.DataFrame(
        (
            {"of": f"{row.phase}, {row.backend}", "off": abs(r - 1), "in": i}
            for row, r, i in ratios()
        )
    )
    print(
        "| phase, backend | rows | median error | inside the 90 % range |\n| --- | --- | --- | --- |"
    )
    for name, own in t.groupby("of", sort=False):
        print(f"| {name} | {len(own)} | {100 * own.off.median():.0f} % | {own['in'].sum()} |")


if __name__ == "__main__":
    main()
