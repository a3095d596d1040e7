"""Predictions for this machine against runs that were never used to make them, by kind of extrapolation.

    python3 -m uv run python -m tests.bench.held_out FOLDER --measure    # about ten minutes on two quiet cores
    python3 -m uv run python -m tests.bench.held_out FOLDER              # evaluates what FOLDER holds, in seconds

Measuring makes ceilings and runs with fresh `lab` processes, round by round, and goes on where it was interrupted.
Evaluating learns from a part of the stored runs and predicts other points, in every way in which the stored runs can
be parted: longer prompts, another model, another quantization, other settings, and several of these at once. A point
is a setup at a length in a phase; what is learned from and what is predicted are of different sessions where there
are two rounds. Wanted: 90 % of at least 40 points in their ranges, and a median absolute error of at most 10 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import results
from lab.core.record import DECODE, PREFILL, Ceilings, Record
from lab.features.limits import probing
from lab.features.predict import learning, prediction
from lab.features.predict.learning import Case, Point

SETUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("smollm2-135m", "64,256,1024,4096", ()),
    ("smollm2-135m:Q4_0", "64,256,1024,4096", ()),
    ("smollm2-135m:Q8_0", "64,256,1024,4096", ()),
    ("smollm2-135m:Q4_K_M", "64,256,1024,4096", ()),
    ("synthetic:qwen2.5-0.5b:Q4_0", "64,256,1024,4096", ()),
    ("synthetic:qwen2.5-0.5b:Q8_0", "64,256,1024", ()),
    ("synthetic:llama-3.2-1b:Q4_0", "64,256,1024", ()),
    ("smollm2-135m", "64,256,1024", ("--threads", "1")),
)
"""Model, prompt lengths, and further options of `lab measure`."""

SHORT = (("smollm2-135m", "16,64", ()), ("smollm2-135m:Q4_0", "16,64", ()))
"""With --short: does everything, shows nothing."""

N_GEN, N_ROUNDS, N_REPEAT = 24, 2, 2
MOST_TIMES = 17
"""Points beyond so many times the longest length learned from are left out (decode looks back at a little more)."""


@dataclass(frozen=True)
class Outcome:
    """A point that was predicted: in which ways it lay beyond what was learned from, and how it came out."""

    point: tuple[object, ...]
    ways: tuple[str, ...]
    phase: str
    error: float  # expected / measured - 1
    inside: bool
    width: float  # high / low
    doublings: float  # of the length beyond what was learned from; 1 where the length is not beyond


def main() -> None:
    folder = Path(sys.argv[1])
    if "--measure" in sys.argv:
        measure(folder)
    outcomes = evaluate(folder)
    print("beyond what was learned from | phase | points | in range | median error | worst | high / low | deviation")
    for ways, phase in sorted({(outcome.ways, outcome.phase) for outcome in outcomes}):
        show(", ".join(ways) or "nothing", phase, [o for o in outcomes if (o.ways, o.phase) == (ways, phase)])
    for phase in (PREFILL, DECODE):
        show("all", phase, [outcome for outcome in outcomes if outcome.phase == phase])
    show("all", "both", outcomes)
    print(f"{len(outcomes)} predictions of {len({outcome.point for outcome in outcomes})} different points")
    print("wanted: at least 90 % in range, a median error of at most 10 %, over at least 40 points")


def measure(folder: Path) -> None:
    """Ceilings of every setup, then runs of every setup, round by round. What is there already is kept."""
    kept = folder / "ceilings"
    setups = SHORT if "--short" in sys.argv else SETUPS
    for model, _, options in setups:
        lab("ceilings", "-m", model, *options, "--types", "", "--out", kept, "--json")
    for number, (index, (model, lengths, options)) in itertools.product(range(N_ROUNDS), enumerate(setups)):
        out = folder / f"round-{number}" / str(index)
        if not list(out.glob("*.jsonl")):
            sizes = ("--prompt-len", lengths, "--gen", N_GEN, "--repeat", N_REPEAT)
            lab("measure", "-m", model, *options, *sizes, "--seed", number + 1, "--no-plot", "--json", "--out", out)


def lab(*arguments: object) -> None:
    """The command in a process of its own. A failure is printed, and the bench goes on."""
    start = time.monotonic()
    command = [sys.executable, "-m", "lab", *map(str, arguments)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{time.monotonic() - start:5.0f} s  lab {' '.join(map(str, arguments))}", flush=True)
    if process.returncode:
        print(f"exit status {process.returncode}: {process.stderr[-600:]}", flush=True)


def evaluate(folder: Path) -> list[Outcome]:
    """Points predicted from parts of the others, for every machine that the folder has ceilings and runs of."""
    contents = results.read(sorted(folder.rglob("*.jsonl")))
    outcomes: list[Outcome] = []
    for here in {ceilings.machine.system_info: ceilings.machine for ceilings in contents.ceilings}.values():
        best = probing.known(contents.ceilings, probing.Where(here))
        assert best is not None
        records = [record for record in contents.records if probing.same_machine(record.machine, here)]
        if records:
            outcomes += evaluate_machine(records, best)
    return outcomes


def evaluate_machine(records: Sequence[Record], best: Ceilings) -> list[Outcome]:
    """Learn from parts of the first sessions of each setup, predict from other parts of the second ones; and back."""
    by_setup: dict[object, list[str]] = {}
    rounds: dict[str, int] = {}
    for record in sorted(records, key=lambda record: record.session):
        sessions = by_setup.setdefault((record.model.name, record.model.quantization, record.settings.n_threads), [])
        if record.session not in rounds:
            rounds[record.session] = len(sessions)
            sessions.append(record.session)
    outcomes: list[Outcome] = []
    n_rounds = max(rounds.values()) + 1
    for number in range(n_rounds):
        learned = learning.learn([record for record in records if rounds[record.session] == number], best).points
        other = [record for record in records if rounds[record.session] == (number + 1) % n_rounds]
        measured = learning.learn(other, best).points
        models = {learning.case_of(DECODE, 0, record.model, record.settings): record for record in other}
        for is_kept in parts(learned):
            outcomes += predict(
                [p for p in learned if is_kept(p)], [p for p in measured if not is_kept(p)], models, best
            )
        if n_rounds > 1:
            outcomes += predict(learned, measured, models, best)
    return outcomes


def parts(points: Sequence[Point]) -> Iterator[Callable[[Point], bool]]:
    """What to learn from: up to a length, without a model, a quantization or settings, of one setup; and both."""
    chosen: list[Callable[[Case], bool]] = [lambda case: True]
    for case in {point.case.setup: point.case for point in points if point.case.phase == DECODE}.values():
        chosen += without(case)
    lengths = sorted({point.n_prompt for point in points})
    return (up_to(longest, is_chosen) for is_chosen, longest in itertools.product(chosen, lengths))


def without(case: Case) -> list[Callable[[Case], bool]]:
    """Cases of another model, of another quantization of it, of other settings; and those of this setup alone."""
    return [
        lambda other: other.shape != case.shape,
        lambda other: (other.shape, other.quantization) != (case.shape, case.quantization),
        lambda other: other.settings != case.settings,
        lambda other: (
            (other.shape, other.quantization, other.settings) == (case.shape, case.quantization, case.settings)
        ),
    ]


def up_to(longest: int, is_chosen: Callable[[Case], bool]) -> Callable[[Point], bool]:
    return lambda point: point.n_prompt <= longest and is_chosen(point.case)


def predict(
    kept: Sequence[Point], held: Sequence[Point], records: dict[Case, Record], best: Ceilings
) -> Iterator[Outcome]:
    """The held-out points, predicted from those that were kept."""
    if {point.case.phase for point in kept} != {PREFILL, DECODE}:
        return
    learned = learning.Learned(learning.fit(kept), tuple(kept), (), 1)
    errors = learned
    for point in held:
        case = dataclasses.replace(point.case, phase=DECODE, length=0)
        if case not in records or point.case.length > MOST_TIMES * errors.known[point.case.phase].longest:
            continue
        record = records[case]
        row = prediction.here(record.model, record.settings, best, learned, point.n_prompt, record.run.n_gen)
        prefill = point.case.phase == PREFILL
        low, high = row.prefill_s if prefill else row.tpot_s
        expected = (row.prefill_expected_s if prefill else row.tpot_expected_s) or 0.0
        ways = errors.known[point.case.phase].beyond(point.case)
        doublings = max(ways.get(learning.LONGER, 0), ways.get(learning.SHORTER, 0)) or 1.0
        error = expected / point.seconds - 1
        yield Outcome(
            (point.case.setup, point.n_prompt),
            tuple(sorted(ways)),
            point.case.phase,
            error,
            low <= point.seconds <= high,
            high / low,
            doublings,
        )


def show(ways: str, phase: str, outcomes: Sequence[Outcome]) -> None:
    """A line of the table. The deviation of log(measured / predicted), a doubling, is what learning.PRIOR states."""
    errors = sorted(abs(outcome.error) for outcome in outcomes)
    inside = sum(outcome.inside for outcome in outcomes)
    width = statistics.median(outcome.width for outcome in outcomes)
    deviation = statistics.fmean(math.log1p(o.error) ** 2 / o.doublings for o in outcomes) ** 0.5
    print(
        f"{ways} | {phase} | {len(outcomes)} | {inside} ({inside / len(outcomes):.0%}) | "
        f"{statistics.median(errors):.1%} | {errors[-1]:.0%} | {width:.2f} | {deviation:.3f}"
    )


if __name__ == "__main__":
    main()
