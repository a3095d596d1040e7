"""Predictions for this machine against runs that never made them, by kind of extrapolation.

    uv run python -m tests.bench.held_out FOLDER --measure    # ten minutes, two quiet cores
    uv run python -m tests.bench.held_out FOLDER              # evaluates what FOLDER holds

Measuring makes ceilings and runs with fresh `lab` processes, round by round, and goes on where it
was interrupted. Evaluating learns from a part of the stored runs and predicts other points, in
every way in which the stored runs can be parted: longer prompts, another model, another
quantization, other settings, and several of these at once. A point is a setup at a length in a
phase; what is learned from and what is predicted are of different sessions where there are two
rounds. Wanted: 90 % of at least 40 points in their ranges, and a median absolute error of at most
10 %.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lab.core import results
from lab.core.lists import grouped
from lab.core.record import DECODE, PREFILL, Ceilings, Machine, Record
from lab.roofline import learning, probing
from lab.roofline.learning import LearnedCase, Point
from lab.roofline.prediction import Here
from tests.support.command import run_process

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

N_GEN = 24
N_ROUNDS = 2
N_REPEAT = 2
TIMEOUT_S = 1800
MOST_TIMES = 17
"""Points beyond so many times the longest length learned from are left out (decode looks back at
a little more)."""

WAYS = (
    ("shape",),
    ("shape", "quantization"),
    ("settings",),
)
"""Properties of a setup: what is not learned from has the same values of these."""


def main() -> None:
    folder = Path(sys.argv[1])
    if "--measure" in sys.argv:
        measure(folder)
    print_errors(evaluate(folder))


def print_errors(predictions: pd.DataFrame) -> None:
    """A line for each kind of extrapolation and phase.

    The deviation of log(measured / predicted), of a doubling, is what learning.PRIOR states.
    """
    print(
        "beyond what was learned from | phase | points | in range | median error | worst | "
        "high / low | deviation"
    )
    groups = [
        (
            str(ways),
            str(phase),
            group,
        )
        for (ways, phase), group in predictions.groupby(["ways", "phase"])
    ]
    for phase in (PREFILL, DECODE):
        groups.append(("all", phase, predictions[predictions.phase == phase]))
    groups.append(("all", "both", predictions))
    for ways, phase, group in groups:
        squares = group.error.map(math.log1p) ** 2 / group.doublings
        errors = group.error.abs()
        print(
            f"{ways} | {phase} | {len(group)} | {group.inside.sum()} ({group.inside.mean():.0%}) | "
            f"{errors.median():.1%} | {errors.max():.0%} | {group.width.median():.2f} | "
            f"{squares.mean() ** 0.5:.3f}"
        )
    print(f"{len(predictions)} predictions of {predictions.point.nunique()} different points")
    print(
        "wanted: at least 90 % in range, a median error of at most 10 %, over at least 40 points"
    )


# Measuring


def measure(folder: Path) -> None:
    """Ceilings of every setup, then runs of every setup, round by round; what is there stays."""
    for model, _, options in SETUPS:
        lab("ceilings", "-m", model, *options, "--types", "", "--out", folder / "ceilings")
    for number in range(N_ROUNDS):
        for index, (model, lengths, options) in enumerate(SETUPS):
            out = folder / f"round-{number}" / str(index)
            if list(out.glob("*.jsonl")):
                continue
            sizes = ("--prompt-len", lengths, "--gen", N_GEN, "--repeat", N_REPEAT)
            seed = ("--seed", number + 1)
            lab("measure", "-m", model, *options, *sizes, *seed, "--no-plot", "--out", out)


def lab(*arguments: object) -> None:
    """The command in a process of its own. A failure is printed, and the bench goes on."""
    code, _, error = run_process(*arguments, "--json", timeout_s=TIMEOUT_S)
    line = f"lab {' '.join(map(str, arguments))}"
    if code:
        line = f"{line}: {error[-600:]}"
    print(line, flush=True)


# Evaluating


@dataclass(frozen=True)
class Learning:
    """What is learned from: up to a length, everything, or what is (not) like a case in some
    properties.
    """

    longest: int
    case: LearnedCase | None = None
    properties: tuple[str, ...] = ()
    is_like: bool = True

    def has(self, point: Point) -> bool:
        if point.n_prompt > self.longest:
            return False
        if self.case is None:
            return True
        for name in self.properties:
            if getattr(point.case, name) != getattr(self.case, name):
                return not self.is_like
        return self.is_like


def evaluate(folder: Path) -> pd.DataFrame:
    """Points predicted from parts of the others, on every machine of the folder.

    A row each: learned from the first sessions of each setup, predicted of the second ones, and
    back.
    """
    contents = results.read(sorted(folder.rglob("*.jsonl")))
    machines = {
        ceilings.machine.system_info: ceilings.machine for ceilings in contents.ceilings
    }
    rows: list[dict[str, object]] = []
    for machine in machines.values():
        ceilings = probing.known(contents.ceilings, probing.Where(machine))
        assert ceilings is not None
        rows += evaluate_machine(machine, contents.records, ceilings)
    return pd.DataFrame(rows)


def evaluate_machine(
    machine: Machine, records: Sequence[Record], ceilings: Ceilings
) -> list[dict[str, object]]:
    records = [record for record in records if probing.same_machine(record.machine, machine)]
    rounds = rounds_of(records)
    rows: list[dict[str, object]] = []
    for number, of_round in enumerate(rounds):
        next_round = rounds[(number + 1) % len(rounds)]
        points = learning.learn(of_round, ceilings).points
        measured = learning.learn(next_round, ceilings).points
        by_case = {}
        for record in next_round:
            by_case[learning.case_of(DECODE, 0, record.model, record.settings)] = record
        for part in parts(points):
            held_out = [point for point in measured if not part.has(point)]
            learned_from = [point for point in points if part.has(point)]
            rows += predict(learned_from, held_out, by_case, ceilings)
        if len(rounds) > 1:
            rows += predict(points, measured, by_case, ceilings)
    return rows


def rounds_of(records: Sequence[Record]) -> list[list[Record]]:
    """The records of the first session of each setup, of the second, and so on."""
    in_order = sorted(records, key=lambda record: record.session)
    setups = grouped(
        in_order,
        lambda record: (
            record.model.name,
            record.model.quantization,
            record.settings.n_threads,
        ),
    )
    rounds: list[list[Record]] = []
    for of_setup in setups.values():
        sessions = grouped(of_setup, lambda record: record.session)
        for number, of_session in enumerate(sessions.values()):
            if number == len(rounds):
                rounds.append([])
            rounds[number] += of_session
    return rounds


def parts(points: Sequence[Point]) -> Iterator[Learning]:
    """Everything, everything but a setup's like, and one setup alone; each up to a length."""
    cases = {point.case.setup: point.case for point in points if point.case.phase == DECODE}
    lengths = sorted({point.n_prompt for point in points})
    for longest in lengths:
        yield Learning(longest)
    for case, longest in itertools.product(cases.values(), lengths):
        for properties in WAYS:
            yield Learning(longest, case, properties, is_like=False)
        yield Learning(longest, case, ("shape", "quantization", "settings"))


def predict(
    learned_from: Sequence[Point],
    held_out: Sequence[Point],
    records: dict[LearnedCase, Record],
    ceilings: Ceilings,
) -> Iterator[dict[str, object]]:
    """The held-out points as predicted: how each extrapolates, and how it came out."""
    if {point.case.phase for point in learned_from} != {PREFILL, DECODE}:
        return
    learned = learning.Learned(learning.fit(learned_from), tuple(learned_from), (), 1)
    for point in held_out:
        case = dataclasses.replace(point.case, phase=DECODE, length=0)
        coverage = learned.coverage[point.case.phase]
        if case not in records or point.case.length > MOST_TIMES * coverage.longest:
            continue
        record = records[case]
        here = Here(record.model, record.settings, ceilings, learned)
        row = here.request(point.n_prompt, record.run.n_gen)
        if point.case.phase == PREFILL:
            low, high = row.prefill_s
            expected_s = row.prefill.expected_s or 0.0
        else:
            low, high = row.tpot_s
            expected_s = row.token.expected_s or 0.0
        ways = coverage.extrapolations(point.case)
        doublings = max(ways.get(learning.LONGER, 0), ways.get(learning.SHORTER, 0))
        yield {
            "point": (point.case.setup, point.n_prompt),
            "ways": ", ".join(sorted(ways)) or "nothing",
            "phase": point.case.phase,
            "error": expected_s / point.seconds - 1,
            "inside": low <= point.seconds <= high,
            "width": high / low,
            "doublings": doublings or 1.0,
        }


if __name__ == "__main__":
    main()
