"""The time that a cached prefix saves, against what the prefill law promises for it, in several lengths.

    python3 -m uv run python -m tests.bench.prefix_law FOLDER [LENGTHS [REPEAT [MODEL...]]]    # about five minutes
    python3 -m uv run python -m tests.bench.prefix_law /tmp/law 64,256 1                       # the smallest

In a folder of its own inside FOLDER for each model: ceilings, plain runs that teach the law, then the prefixes, unless
they are there. The law knows nothing of the prefixes but their lengths. Prints every row, the median error, and from
which length restoring pays.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from pathlib import Path

import lab
from lab.core import results
from lab.core.record import OK, Record
from lab.features import prefix as prefix_cache
from lab.features.limits import probing, step_prediction

DEFAULT_LENGTHS, DEFAULT_REPEAT = "64,256,1024,4096", "3"
LAW_LENGTHS = "64,512,1024"


def records_of(model: str, folder: Path, lengths: str, repeat: int) -> list[Record]:
    """All records of one model; what is missing is measured."""
    if not probing.kept(folder):
        lab.ceilings(model, types=(), out=folder)
    if not any(is_timed(record) and not record.run.prefix for record in results.read([folder]).records):
        lab.measure(LAW_LENGTHS, 8, 2, model, out=folder)
    if not any(record.run.prefix for record in results.read([folder]).records):
        prefix_cache.prefix(lengths, prefix_cache.DEFAULT_SUFFIX, repeat, model, out=folder)
    return list(results.read([folder]).records)


def is_timed(record: Record) -> bool:
    return record.run.status == OK and not record.run.warmup


def main(folder: str, lengths: str = DEFAULT_LENGTHS, repeat: str = DEFAULT_REPEAT, *models: str) -> None:
    warnings.simplefilter("ignore", UserWarning)
    errors: list[float] = []
    for model in models or ("smollm2-135m",):
        own = Path(folder) / model.replace(":", "-")
        own.mkdir(parents=True, exist_ok=True)
        records = records_of(model, own, lengths, int(repeat))
        timed = [
            record for record in records if record.run.prefix and record.run.status == OK and not record.run.warmup
        ]
        prediction = step_prediction.prediction_for(timed[0], probing.kept(own), records)
        rows = prefix_cache.rows(timed, prediction)
        print(f"{model}: {prediction.basis if prediction else 'nothing is promised'}")
        print("prefix | runs | saved s | promised s | promised / saved | logits differ | GB/s of load: RAM, disk")
        for row in rows:
            ratio = "-"
            if row.promised_s is not None:
                errors.append(abs(row.promised_s / row.saved_s - 1))
                ratio = f"{row.promised_s:.4g} | {row.promised_s / row.saved_s:.3f}"
            print(
                f"{row.n_prefix} | {row.n_runs} | {row.saved_s:.4g} | {ratio} | {row.logits_differ} | "
                f"{row.load_ram_gbps or 0:.2g}, {row.load_disk_gbps or 0:.2g}"
            )
        print(*prefix_cache.sentences(rows, prediction), sep="\n")
    if errors:
        print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
