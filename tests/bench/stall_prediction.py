"""Stalls: the longest gap and the newcomer's TTFT, predicted before and then measured.

    python3 -m uv run python -m tests.bench.stall_prediction [PROMPT_LEN [CHUNKS [STREAMS [REPEAT [MODEL...]]]]]
    python3 -m uv run python -m tests.bench.stall_prediction 1024 64,256 1,4 1

The ceilings are measured (or read from results/), then plain runs of each model teach the prediction, then the stalls
are measured; all in results/. Quarter of an hour a model with the defaults: 4096, "64,256,1024", "1,4", 3 repeats, and
the embedded model in Q4_1 and Q4_0.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import lab
from lab.core import results
from lab.core.record import OK, Record
from lab.features import stall as stalls
from lab.features.predict import learning

FOLDER = Path("results")
DEFAULTS = ("4096", "64,256,1024", "1,4", "3")
MODELS = ("smollm2-135m", "smollm2-135m:Q4_0")


def main(prompt_len: str, chunks: str, streams: str, repeat: str, *models: str) -> None:
    gap_errors, newcomer_errors = [], []
    for model in models or MODELS:
        lab.ceilings(model, out=FOLDER)
        lab.measure(sorted({128, min(1024, int(prompt_len)), int(prompt_len)}), 16, 2, model, out=FOLDER)
        records = timed(stalls.stall(prompt_len, chunks, streams, int(repeat), model, out=FOLDER))
        known = results.read([FOLDER])
        prediction = learning.prediction_for(records[0], known.ceilings, known.records)
        print(f"{model}: {prediction.basis if prediction else 'nothing is predicted'}")
        print("streams    chunk  longest gap (ms): measured (range), predicted     newcomer (ms): measured, predicted")
        for row in stalls.rows(records, prediction):
            if row.expected_gap_s is None or row.expected_newcomer_s is None:
                continue
            gap_errors.append(row.expected_gap_s / row.longest_gap_s - 1)
            newcomer_errors.append(row.expected_newcomer_s / row.newcomer_s - 1)
            span = f"({1e3 * row.longest_min_s:,.0f} to {1e3 * row.longest_max_s:,.0f})"
            print(
                f"{row.n_streams:7} {row.chunk or 'at once':>8} {1e3 * row.longest_gap_s:10,.0f} {span:18}"
                f"{1e3 * row.expected_gap_s:10,.0f} {gap_errors[-1]:+6.0%} {1e3 * row.newcomer_s:16,.0f}"
                f"{1e3 * row.expected_newcomer_s:10,.0f} {newcomer_errors[-1]:+6.0%}"
            )
    for name, errors in (("longest gap", gap_errors), ("newcomer", newcomer_errors)):
        off = [abs(error) for error in errors]
        if off:
            print(f"{name}: off by {statistics.median(off):.1%}, the median of {len(off)}; at most {max(off):.1%}")


def timed(records: list[Record]) -> list[Record]:
    return [record for record in records if record.run.status == OK and not record.run.warmup]


if __name__ == "__main__":
    main(*(*sys.argv[1:5], *DEFAULTS[len(sys.argv[1:5]) :]), *sys.argv[5:])
