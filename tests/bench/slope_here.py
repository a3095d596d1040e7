"""Does the lab tell a slope, a slow kernel and a cliff apart on sessions that this machine runs?

    python3 -m uv run python -m tests.bench.slope_here real     # minutes, on two quiet cores
    python3 -m uv run python -m tests.bench.slope_here planted  # half an hour; builds a library

`real`: this CPU as it is, with flash attention on and off. Where /proc/cpuinfo has avx512_fp16,
flash attention of SmolLM2's heads of 64 is slow, and must be named. Plain attention is honest
everywhere, and so is flash attention elsewhere. The gain that `lab doctor` predicts for a step at
2,000 tokens is printed beside the measured one.

`planted`: SmolLM2 on the library of tests.bench.slow_attention: nothing, a slow kernel from the
first position on, cliffs at 512, 2,048 and 6,000, slow attention of prefill, and a cache of F32.
Named right: the kind, and of a cliff its place within 10 % and its factor within 20 %.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.core import growth, phases, results
from lab.core.growth import KERNEL, SLOPE
from lab.core.record import DECODE, PREFILL, Record
from lab.features.doctor import attention
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.show import text_growth
from tests.bench import slow_attention
from tests.bench.slope import CLIFF, FACTOR_ERROR, PLACE_ERROR, verdict_of
from tests.bench.slow_attention import Slowness

MEASURE = "measure -p 10,2000 -n 32 -r 3"
SWEEP = "sweep --max-len 8192 -e 256 -n 8 -r 2"
FINE_SWEEP = "sweep --max-len 2048 -e 64 -n 8 -r 2"
LONG_ANSWER = "measure -p 10 -n 2000 -r 2"

PLANTED: Sequence[tuple[str, Slowness, str]] = (
    (SLOPE, Slowness(), MEASURE),
    (SLOPE, Slowness(), SWEEP),
    (SLOPE, Slowness(), f"{MEASURE} -ctk f32 -ctv f32"),
    (KERNEL, Slowness(0, 25), MEASURE),
    (KERNEL, Slowness(0, 15), f"{MEASURE} -ctk f32 -ctv f32"),
    (KERNEL, Slowness(0, 25), SWEEP),
    (KERNEL, Slowness(0, 25, 512), MEASURE),
    (CLIFF, Slowness(512, 5), FINE_SWEEP),
    (CLIFF, Slowness(512, 4, is_whole=True), LONG_ANSWER),
    (CLIFF, Slowness(2048, 4), SWEEP),
    (CLIFF, Slowness(2048, 4, is_whole=True), SWEEP),
    (CLIFF, Slowness(6000, 5), SWEEP),
    (CLIFF, Slowness(6000, 4, is_whole=True), SWEEP),
)


def session(options: str, variables: Mapping[str, str] | None = None) -> list[Record]:
    """The undisturbed runs of a session of the lab."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lab", *options.split(), "--out", folder]
        subprocess.run(
            command, env={**os.environ, **(variables or {})}, check=True, capture_output=True
        )
        records = results.read(sorted(Path(folder).glob("*.jsonl"))).records
    return text_growth.steady([record for record in records if record.run.is_plain])


def is_right(kind: str, plant: Slowness, records: Sequence[Record]) -> bool:
    phase = PREFILL if plant.n_tokens > 1 else DECODE
    if verdict_of(records, phase)[0] != kind:
        return False
    cliff = growth.cliff(records, phase)
    if cliff is None:
        return True
    is_near = abs(cliff.n_past / plant.n_from - 1) <= PLACE_ERROR
    return is_near and abs(cliff.factor / plant.factor - 1) <= FACTOR_ERROR


def planted() -> None:
    library = slow_attention.library()
    n_right = 0
    for kind, plant, options in PLANTED:
        records = session(f"{options} --lib {library}", plant.variables)
        right = is_right(kind, plant, records)
        n_right += right
        mark = "right" if right else "WRONG"
        phase = PREFILL if plant.n_tokens > 1 else DECODE
        print(
            f"{mark}  {kind} {tuple(plant)}, {options}: {verdict_of(records, phase)}",
            flush=True,
        )
    print(f"{n_right} of {len(PLANTED)} planted sessions named right")


def real() -> None:
    is_slow = "avx512_fp16" in Path("/proc/cpuinfo").read_text()
    seconds = {}
    for used in ("on", "off"):
        records = session(f"{MEASURE} -fa {used}")
        expected = KERNEL if is_slow and used == "on" else SLOPE
        name, figures = verdict_of(records, DECODE)
        mark = "right" if name == expected else "WRONG"
        print(
            f"{mark}  flash attention {used}: {name}, {figures}; {expected} wanted", flush=True
        )
        print(f"       prefill: {verdict_of(records, PREFILL)}", flush=True)
        seconds[used] = tpot_s(records, 2000)
        short = [record for record in records if record.run.n_prompt == 10]
    with Worker() as worker:
        plan = make_plan(worker, [32], 4, 1)
        worker.use(plan.setup)
        print(f"lab doctor: {attention.examine(worker, plan, short)}")
    print(f"measured at 2,000 tokens: {seconds['on'] / seconds['off']:.2f}x as fast without")


def tpot_s(records: Sequence[Record], n_prompt: int) -> float:
    runs = [record.run for record in records if record.run.n_prompt == n_prompt]
    return statistics.median((phases.tpot_ns(run) or 0) / 1e9 for run in runs)


if __name__ == "__main__":
    {"real": real, "planted": planted}[sys.argv[1]]()
