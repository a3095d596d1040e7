"""Are predictions right for models that nothing was learned from? Rows of models that joined later.

    python3 -m uv run python -m tests.bench.unlearned

These rows carry the mark `unknown-model` in models/published.csv, so the coefficients of
models/learned.toml know nothing of them. Their devices may have rows of other models among those
that were learned from.
"""

from __future__ import annotations

import pandas as pd

from lab.core.record import PREFILL
from lab.models import catalog
from lab.roofline import datasheet
from tests.bench.learn_published import case_for, published

UNKNOWN_MODEL = "unknown-model"
N_PROMPT = 64  # of rows that do not say it


def errors() -> pd.DataFrame:
    """Each row's error of measured time / predicted time, and whether it is inside the range."""
    rows = []
    for row in published():
        if row.marks != (UNKNOWN_MODEL,) or row.model not in catalog.entries():
            continue
        n_prompt = row.n_prompt or N_PROMPT
        learned = datasheet.learned()[row.phase]
        case = case_for(row._replace(n_prompt=n_prompt))
        expected_s = learned.expected_s(case) if case else None
        if not case or not expected_s:
            continue
        n_tokens = n_prompt if row.phase == PREFILL else 1
        ratio = n_tokens / row.tps / expected_s
        fast, slow = learned.range(case)
        rows.append(
            {
                "group": f"{row.phase}, {row.backend}",
                "error": abs(ratio - 1),
                "is_inside": fast <= ratio <= slow,
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    print("| phase, backend | rows | median error | inside the 90 % range |")
    print("| --- | --- | --- | --- |")
    for name, group in errors().groupby("group", sort=False):
        n_inside = group.is_inside.sum()
        print(f"| {name} | {len(group)} | {100 * group.error.median():.0f} % | {n_inside} |")


if __name__ == "__main__":
    main()
