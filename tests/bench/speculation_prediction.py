"""Predicted against measured speed-ups of `lab speculate`, for every draft length on several kinds of text.

    python3 -m uv run python -m tests.bench.speculation_prediction FOLDER [DRAFT] [MODEL] [BLOCKS]

What is predicted rests on the bare steps (the curve) and on the runs with the longest draft; the runs of the other
lengths take no part. Within 10 % is wanted for lengths 1 to 8 on three kinds of text. A quiet machine, 10 minutes.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from lab.features.speculate import rows as speculation_rows
from lab.features.speculate import speculation
from lab.models import catalog


def main() -> None:
    folder = Path(sys.argv[1])
    draft = sys.argv[2] if len(sys.argv) > 2 else "lookup"
    model = sys.argv[3] if len(sys.argv) > 3 else catalog.DEFAULT
    blocks = int(sys.argv[4]) if len(sys.argv) > 4 else 6
    records = speculation.speculate(
        draft, "1-8+1", gen=128, repeat=blocks, model=model, out=folder, prompt="code,table,story"
    )
    timed = [record for record in records if not record.run.warmup]
    rows = speculation_rows.rows(timed)
    for row in rows:
        if row.speed_up is None or row.expected is None:
            print(f"{row.text:8} {row.n_draft}: not measured")
            continue
        interval = "" if row.low is None else f" ({row.low:.2f} to {row.high:.2f})"
        print(
            f"{row.text:8} {row.n_draft} by {row.draft}: measured {row.speed_up:.3f}{interval}, predicted "
            f"{row.expected:.3f}, off by {row.expected / row.speed_up - 1:+.1%}; {row.right or 0:.0%} right, "
            f"{row.n_parted} of {row.n_runs} runs part"
        )
    for name in ("all lengths", "lengths below the longest"):
        some = [row for row in rows if row.speed_up and row.expected and (name == "all lengths" or row.n_draft < 8)]
        errors = [abs((row.expected or 0.0) / (row.speed_up or 1.0) - 1) for row in some]
        if errors:
            within = sum(error <= 0.1 for error in errors)
            print(
                f"{name}: {within} of {len(errors)} within 10 %, median {statistics.median(errors):.1%}, "
                f"largest {max(errors):.1%}"
            )
    for sentence in speculation_rows.sentences(rows, timed):
        print(sentence)


if __name__ == "__main__":
    main()
