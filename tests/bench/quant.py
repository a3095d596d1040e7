"""Are the figures of `lab quant` right?

    python -m tests.bench.quant order          # some minutes: the embedded model, F16 to Q2_K
    python -m tests.bench.quant perplexity     # builds llama-perplexity once: 5 to 10 minutes
    python -m tests.bench.quant coverage FILE.jsonl
    python -m tests.bench.quant cache 512,2048  # 5 to 15 minutes, with llama-perplexity built

`order`: the order by divergence is the order by bits, but for pairs that are said to be
inseparable. `perplexity`: the figures of `llama-perplexity --kl-divergence`, built from the same
source, on the same text and files. It stores log-probabilities in 16 bits, clamped at 16 below the
largest, so its figures differ a little. `cache`: the same for types of the KV cache, in the second
half of texts of 512 and 2,048 tokens, and divergence falls with the bits. `coverage`: of a session
with many chunks, how often the interval of 16 of them, drawn 200 times, contains the mean of all.
The exit status is 1 for a wrong order, a figure that is off, or a coverage below 90 %.
"""

import itertools
import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lab
from lab.features.quant import depth, figures, measuring
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner import prompts
from tests.bench import llama_bench

KINDS = ("F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")
QUICK: dict[str, Any] = {
    "repeat": 1,
    "prompt_len": 16,
    "gen": 4,
}
TEXT = Path("prompts/code.txt")
CACHE_TYPES = ("q8_0", "q5_1", "q4_0")
N_THREADS = 2
N_DRAWS = 200
N_DRAWN = 16


class Figure(NamedTuple):
    """A line in the output of llama-perplexity."""

    pattern: str
    scale: float
    tolerance: float  # the share by which it may differ


FIGURES = {
    "kl": Figure(r"Mean\s+KLD:\s+(\S+)", 1, 0.01),
    "same": Figure(r"Same top p:\s+(\S+)", 100, 0.005),
    "perplexity": Figure(r"Mean PPL\(Q\)\s+:\s+(\S+)", 1, 0.001),
    "kl_99": Figure(r"99\.0%\s+KLD:\s+(\S+)", 1, 0.02),
    "kl_max": Figure(r"Maximum KLD:\s+(\S+)", 1, 0.05),
}


def order() -> bool:
    files = [f"{catalog.DEFAULT}:{kind}" for kind in KINDS]
    with tempfile.TemporaryDirectory() as folder:
        lines = lab.quant(
            *files,
            budget="20min",
            out=folder,
            **QUICK,
        )
    ((_, summary),) = figures.of_sessions(lines)
    _, *rows = summary.rows.itertuples()
    for row in rows:
        interval = f"{row.kl_low:.5f}-{row.kl_high:.5f}"
        print(f"{row.label:8} {row.kl:.5f} ({interval}), same top {100 * row.same:.1f} %")
    print(
        f"floor {summary.floor:.2g}; not told apart: {summary.equal}; {summary.n_chunks} chunks"
    )
    for first, second in itertools.combinations(rows, 2):
        is_wrong = first.kl > second.kl
        if is_wrong and (first.label, second.label) not in (summary.equal or ()):
            return False
    return True


def llama_perplexity(
    path: Path, base: Path, *options: str, text: Path = TEXT, n_ctx: int = 512
) -> str:
    program = str(llama_bench.program("llama-perplexity"))
    command = [program, "-m", str(path), "-f", str(text), "-c", str(n_ctx)]
    command += ["-t", str(N_THREADS)]
    command += ["--kl-divergence-base", str(base), *options]
    done = subprocess.run(
        command, env=llama_bench.environment(), check=True, capture_output=True, text=True
    )
    return done.stdout


def perplexity() -> bool:
    reference = "F16"
    kinds = ["Q8_0", "Q4_0"]
    measuring.NARROW = 0.0  # all chunks
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        base = Path(folder, "base")
        paths = {}
        for kind in (reference, *kinds):
            spec = catalog.parse(f"{catalog.DEFAULT}:{kind}")
            paths[kind] = obtain.obtain(spec, worker).path
        llama_perplexity(paths[reference], base)
        answers = {}
        for kind in kinds:
            answers[kind] = llama_perplexity(paths[kind], base, "--kl-divergence")
        files = map(str, paths.values())
        lines = lab.quant(
            *files,
            prompt=str(TEXT),
            budget="20min",
            out=folder,
            threads=N_THREADS,
            **QUICK,
        )
    rows = lab.quant_table(lines).iloc[1:].to_dict("records")
    agreements = []
    for kind, row in zip(kinds, rows, strict=True):
        print(f"{kind}, {row['n_chunks']} chunks of {TEXT}")
        agreements.append(agrees(row, answers[kind]))
    return all(agreements)


def agrees(row: dict[str, Any], answer: str) -> bool:
    is_right = True
    for name, figure in FIGURES.items():
        match = re.search(figure.pattern, answer)
        expected = float(match[1]) if match else math.nan
        measured = figure.scale * row[name]
        is_near = abs(measured / expected - 1) <= figure.tolerance
        mark = "" if is_near else "  OFF"
        print(f"  {name:10} lab {measured:.6f}, llama-perplexity {expected:.6f}{mark}")
        is_right = is_right and is_near
    return is_right


def cache(lengths: str = "512,2048", own_texts: str = "code,story") -> bool:
    """The second half of a text of 512, 2,048 or 8,192 tokens is its last bin."""
    measuring.MIN_LONG_CHUNKS = 1_000_000  # all chunks
    results = [cache_at(int(length), own_texts) for length in lengths.split(",")]
    return all(results)


def cache_at(n_ctx: int, own_texts: str) -> bool:
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        text = Path(folder, "text.txt")
        text.write_text(prompts.own_text(own_texts.split(",")), encoding="utf-8")
        base = Path(folder, "base")
        path = obtain.obtain(catalog.parse(catalog.DEFAULT), worker).path
        llama_perplexity(path, base, "-fa", "on", text=text, n_ctx=n_ctx)
        answers = {}
        for kind in CACHE_TYPES:
            options = ("--kl-divergence", "-fa", "on", "-ctk", kind, "-ctv", kind)
            answers[kind] = llama_perplexity(path, base, *options, text=text, n_ctx=n_ctx)
        lines = lab.quant(
            cache=("f16", *CACHE_TYPES),
            prompt=str(text),
            budget="10h",
            out=folder,
            threads=N_THREADS,
            flash_attn="on",
            repeat=1,
            prompt_len=n_ctx,
            gen=4,
        )
    table = depth.by_depth(lines)
    rows = table[table.end == n_ctx].to_dict("records")
    assert 2 * rows[0]["begin"] == n_ctx
    agreements = []
    for kind, row in zip(CACHE_TYPES, rows, strict=True):
        print(f"{kind}, {row['n_chunks']} texts of {n_ctx:,} tokens, the second half")
        agreements.append(agrees(row, answers[kind]))
    divergences = table.pivot(index="span", columns="label", values="kl")
    for span, of_span in divergences.iterrows():
        in_order = [of_span[kind] for kind in CACHE_TYPES]
        print(f"{span}: {', '.join(f'{kl:.6f}' for kl in in_order)}")
        agreements.append(in_order == sorted(in_order))
    for row in depth.deciding(lines).itertuples():
        print(
            f"{row.label}, {row.text}: {row.probability:.4f} of {row.reference_probability:.4f}"
        )
    return all(agreements)


def coverage(path: str) -> bool:
    chance = random.Random(1)
    shares = []
    for variant, line in figures.candidates(lab.read([path]).findings).items():
        divergences = [figures.mean_kl(chunk) for chunk in line.chunks]
        if len(divergences) < 2 * N_DRAWN:
            raise SystemExit(f"{variant} has only {len(divergences)} chunks: 32 are needed.")
        truth = figures.mean(divergences)
        n_covered = 0
        for _ in range(N_DRAWS):
            interval = figures.positive_interval(chance.sample(divergences, N_DRAWN))
            if interval.low <= truth <= interval.high:
                n_covered += 1
        share = n_covered / N_DRAWS
        shares.append(share)
        print(f"{variant}: {100 * share:.1f} % of the intervals of 16 chunks contain the mean")
    return min(shares) >= 0.9


BENCHMARKS: dict[str, Callable[..., bool]] = {
    "order": order,
    "perplexity": perplexity,
    "cache": cache,
    "coverage": coverage,
}

if __name__ == "__main__":
    name, *arguments = sys.argv[1:] or ["order"]
    sys.exit(not BENCHMARKS[name](*arguments))
