"""Has `lab predict` a figure for what strangers ask? python -m tests.bench.coverage

tests/bench/asked.csv has devices, models and quantizations as people wrote them in public threads
and collections of rates, collected before the names were read by the lab. Half of them (by a
checksum) are held out: --held-out counts these, and names none. Wanted: a figure for 95 %.
"""

from __future__ import annotations

import argparse
import csv
import math
import zlib
from pathlib import Path

from lab.errors import LabError
from lab.features.predict.ranking import predict

ASKED = Path(__file__).with_name("asked.csv")
FIELDS = "device", "model", "quantization"


def is_held_out(asked: dict[str, str]) -> bool:
    words = ",".join(asked[name] for name in FIELDS)
    return zlib.crc32(words.encode()) % 2 == 1


def problem_of(asked: dict[str, str]) -> str | None:
    """Why there is no figure of both phases; None if there is one."""
    spec = ":".join(filter(None, (asked["model"], asked["quantization"])))
    words = asked["device"].replace(",", " ")
    try:
        row = predict("512", 128, spec, words)[0]
    except LabError as problem:
        return problem.what
    if math.isnan(row.prefill_s[0]) or math.isnan(row.tpot_s[0]):
        return f"only one phase: {row.name}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true")
    asked_for = parser.parse_args()
    with ASKED.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if is_held_out(row) == asked_for.held_out]
    n_answered = 0
    for row in rows:
        problem = problem_of(row)
        if problem is None:
            n_answered += 1
        elif not asked_for.held_out:
            print(", ".join(row[name] for name in FIELDS), "|", problem)
    share = 100 * n_answered / len(rows)
    print(f"{n_answered} of {len(rows)} ({share:.1f} %) have a figure of both phases.")


if __name__ == "__main__":
    main()
