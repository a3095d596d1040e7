"""Are predictions right for models that nothing was learned from? Rows of models that joined the catalog later.

    python3 -m uv run python -m tests.bench.unlearned

These rows carry the mark `unknown-model` in models/published.csv, so the coefficients of models/learned.toml know
nothing of them. Their devices may have rows of other models among those that were learned from.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from lab.core.record import PREFILL
from lab.errors import LabError
from lab.features.predict import datasheet
from lab.features.predict.datasheet import Case, Row
from lab.models import catalog, synthetic


def ratios() -> Iterator[tuple[Row, float, bool]]:
    """Each row with measured time / predicted time, and whether it is inside the 90 % range."""
    for row in datasheet.rows():
        if row.marks != ("unknown-model",) or row.model not in catalog.entries():
            continue
        try:
            model = synthetic.model_of(catalog.entries()[row.model], row.quantization)
        except LabError:  # a mix of types that llama.cpp does not make
            continue
        device, n_prompt = datasheet.find_device(row.device), row.n_prompt or 64
        is_prefill = row.phase == PREFILL
        depth = row.n_depth if is_prefill else 0
        work = datasheet.work_of(model, row.phase, n_prompt, row.n_ubatch, ("f16", "f16"), depth)
        assert work is not None
        setup = device, row.gpu_share, row.backend, row.runtime, row.model, row.quantization, row.flash_attn
        case = Case(row.phase, *setup, work, n_prompt + depth, bool(model.n_expert))
        learned = datasheet.learned()[row.phase]
        expected = learned.expected_s(case)
        if expected is not None:
            fast, slow = learned.range(case)
            ratio = (n_prompt if is_prefill else 1) / row.tps / expected
            yield row, ratio, fast <= ratio <= slow


def main() -> None:
    t = pd.DataFrame(({"of": f"{row.phase}, {row.backend}", "off": abs(r - 1), "in": i} for row, r, i in ratios()))
    print("| phase, backend | rows | median error | inside the 90 % range |\n| --- | --- | --- | --- |")
    for name, own in t.groupby("of", sort=False):
        print(f"| {name} | {len(own)} | {100 * own.off.median():.0f} % | {own['in'].sum()} |")


if __name__ == "__main__":
    main()
