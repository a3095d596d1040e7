"""Are the figures of `lab quant` right?

    python -m tests.bench.quant order          # some minutes: the embedded model's requantizations, F16 to Q2_K
    python -m tests.bench.quant perplexity     # builds llama-perplexity once: 5 to 10 minutes on two cores
    python -m tests.bench.quant coverage FILE.jsonl

`order`: the order by divergence is the order by bits, but for pairs that are said to be inseparable. `perplexity`: the
figures of `llama-perplexity --kl-divergence`, built from the same source, on the same text and files. It stores
log-probabilities in 16 bits, clamped at 16 below the largest, so its figures differ a little. `coverage`: of a session
with many chunks, how often the interval of 16 of them, drawn 200 times, contains the mean of all. The exit status is 1
for a wrong order, a figure that is off, or a coverage below 90 %.
"""

import itertools
import math
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lab
from lab.features.quant import comparing
from lab.models import catalog, obtain
from lab.process.worker import Worker
from tests.bench import llama_bench

KINDS = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
QUICK: dict[str, Any] = {"blocks": 1, "prompt_len": 16, "gen": 4}
FIGURES = {
    "kl": (r"Mean\s+KLD:\s+(\S+)", 1, 0.01),
    "same": (r"Same top p:\s+(\S+)", 100, 0.005),
    "perplexity": (r"Mean PPL\(Q\)\s+:\s+(\S+)", 1, 0.001),
    "kl_99": (r"99\.0%\s+KLD:\s+(\S+)", 1, 0.02),
    "kl_max": (r"Maximum KLD:\s+(\S+)", 1, 0.05),
}
"""For each figure its line in the output of llama-perplexity, its scale, and by which share it may differ."""


def order() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        records = lab.quant(
            *(f"{catalog.DEFAULT}:{kind}" for kind in KINDS), budget="20min", out=folder, **QUICK
        )
    ((_, found),) = comparing.of_sessions(records)
    rows = list(found.rows.itertuples())[1:]
    for row in rows:
        print(
            f"{row.label:8} {row.kl:.5f} ({row.kl_low:.5f}-{row.kl_high:.5f}), same top {100 * row.same:.1f} %"
        )
    print(f"floor {found.floor:.2g}; not told apart: {found.equal}; {rows[0].n_chunks:.0f} chunks")
    wrong = [(a.label, b.label) for a, b in itertools.combinations(rows, 2) if a.kl > b.kl]
    return all(pair in found.equal for pair in wrong)


def perplexity() -> bool:
    program = str(llama_bench.program("llama-perplexity"))
    is_right = True
    kinds = ("F16", "Q8_0", "Q4_0")
    text = Path("prompts/code.txt")
    with tempfile.TemporaryDirectory() as name, Worker() as worker:
        paths = [
            obtain.obtain(catalog.parse(f"{catalog.DEFAULT}:{kind}"), worker).path for kind in kinds
        ]
        base = [
            "-f",
            str(text),
            "-c",
            "512",
            "-t",
            "2",
            "--kl-divergence-base",
            str(Path(name) / "base"),
        ]

        def told(path: Path, *options: str) -> str:
            command = [program, "-m", str(path), *base, *options]
            return subprocess.run(
                command, env=llama_bench.environment(), check=True, capture_output=True, text=True
            ).stdout

        told(paths[0])
        answers = {
            kind: told(path, "--kl-divergence")
            for kind, path in zip(kinds[1:], paths[1:], strict=True)
        }
        comparing.UNTIL = 0.0  # all chunks
        records = lab.quant(
            *map(str, paths), text=str(text), budget="20min", out=name, threads=2, **QUICK
        )
    for kind, row in zip(
        answers, lab.quant_table(records).iloc[1:].to_dict("records"), strict=True
    ):
        print(f"{kind}, {row['n_chunks']} chunks of {text}")
        for figure, (pattern, scale, share) in FIGURES.items():
            match = re.search(pattern, answers[kind])
            theirs = float(match[1]) if match else math.nan
            ours = scale * row[figure]
            is_near = abs(ours / theirs - 1) <= share
            is_right = is_right and is_near
            print(
                f"  {figure:10} lab {ours:.6f}, llama-perplexity {theirs:.6f}{'' if is_near else '  OFF'}"
            )
    return is_right


def coverage(path: str) -> bool:
    chance = random.Random(1)
    is_right = True
    for record, quality in comparing.candidates(lab.read([path]).findings):
        if len(quality.chunks) < 32:
            raise SystemExit(
                f"{record.run.variant} has only {len(quality.chunks)} chunks: 32 are needed."
            )
        truth, *_ = comparing.mean(quality.chunks, comparing.divergence)
        drawn = (
            comparing.mean(chance.sample(quality.chunks, 16), comparing.divergence)
            for _ in range(200)
        )
        share = sum(low <= truth <= high for _, low, high in drawn) / 200
        is_right = is_right and share >= 0.9
        print(
            f"{record.run.variant}: {100 * share:.1f} % of the intervals of 16 chunks contain the mean of all"
        )
    return is_right


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["order"]
    is_right = (
        coverage(*rest) if what == "coverage" else perplexity() if what == "perplexity" else order()
    )
    sys.exit(not is_right)
