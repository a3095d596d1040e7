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
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.core import results
from lab.core.record import DECODE, PREFILL, Ceilings, Record
from lab.roofline import probing
from lab.roofline import learning
from lab.roofline.prediction import Here
from lab.roofline.learning import Case, Point
from tests.conftest import run_process

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
MOST_TIMES = 17
"""Points beyond so many times the longest length learned from are left out (decode looks back at a little more)."""


def main() -> None:
    folder = Path(sys.argv[1])
    if "--measure" in sys.argv:
        measure(folder)
    t = evaluate(folder)
    print(
        "beyond what was learned from | phase | points | in range | median error | worst | high / low | deviation"
    )
    groups = [(ways, phase, own) for (ways, phase), own in t.groupby(["ways", "phase"])]
    groups += [("all", phase, t[t.phase == phase]) for phase in (PREFILL, DECODE)]
    for ways, phase, own in [*groups, ("all", "both", t)]:
        # the deviation of log(measured / predicted), of a doubling, is what learning.PRIOR states
        deviation = (own.error.map(math.log1p) ** 2 / own.doublings).mean() ** 0.5
        print(
            f"{ways} | {phase} | {len(own)} | {own.inside.sum()} ({own.inside.mean():.0%}) | "
            f"{own.error.abs().median():.1%} | {own.error.abs().max():.0%} | {own.width.median():.2f} | {deviation:.3f}"
        )
    print(f"{len(t)} predictions of {t.point.nunique()} different points")
    print("wanted: at least 90 % in range, a median error of at most 10 %, over at least 40 points")


def measure(folder: Path) -> None:
    """Ceilings of every setup, then runs of every setup, round by round. What is there already is kept."""
    for model, _, options in SETUPS:
        lab(
            "ceilings", "-m", model, *options, "--types", "", "--out", folder / "ceilings", "--json"
        )
    for number, (index, (model, lengths, options)) in itertools.product(
        range(N_ROUNDS), enumerate(SETUPS)
    ):
        out = folder / f"round-{number}" / str(index)
        if not list(out.glob("*.jsonl")):
            sizes = ("--prompt-len", lengths, "--gen", N_GEN, "--repeat", N_REPEAT)
            lab(
                "measure",
                "-m",
                model,
                *options,
                *sizes,
                "--seed",
                number + 1,
                "--no-plot",
                "--json",
                "--out",
                out,
            )


def lab(*arguments: object) -> None:
    """The command in a process of its own. A failure is printed, and the bench goes on."""
    code, _, error = run_process(*arguments, timeout_s=1800)
    print(f"lab {' '.join(map(str, arguments))}{f': {error[-600:]}' if code else ''}", flush=True)


def evaluate(folder: Path) -> pd.DataFrame:
    """Points predicted from parts of the others, for every machine that the folder has ceilings and runs of.

    A row each: learned from the first sessions of each setup, predicted of the second ones, and back.
    """
    contents = results.read(sorted(folder.rglob("*.jsonl")))
    rows = list[dict[str, object]]()
    for here in {
        ceilings.machine.system_info: ceilings.machine for ceilings in contents.ceilings
    }.values():
        best = probing.known(contents.ceilings, probing.Where(here))
        assert best is not None
        records = [
            record for record in contents.records if probing.same_machine(record.machine, here)
        ]
        sessions: dict[object, list[str]] = {}
        for record in sorted(records, key=lambda record: record.session):
            of_setup = sessions.setdefault(
                (record.model.name, record.model.quantization, record.settings.n_threads), []
            )
            of_setup += [] if record.session in of_setup else [record.session]
        rounds = {
            session: number
            for of_setup in sessions.values()
            for number, session in enumerate(of_setup)
        }
        n_rounds = max(rounds.values(), default=-1) + 1
        for number in range(n_rounds):
            learned = learning.learn(
                [record for record in records if rounds[record.session] == number], best
            ).points
            other = [
                record for record in records if rounds[record.session] == (number + 1) % n_rounds
            ]
            measured = learning.learn(other, best).points
            models = {
                learning.case_of(DECODE, 0, record.model, record.settings): record
                for record in other
            }
            for keeps in parts(learned):
                held = [point for point in measured if not keeps(point)]
                rows += predict(list(filter(keeps, learned)), held, models, best)
            if n_rounds > 1:
                rows += predict(learned, measured, models, best)
    return pd.DataFrame(rows)


LEFT_OUT = ("shape",), ("shape", "quantization"), ("settings",)
"""Of a setup: what is not learned from has the same values of these."""


def parts(points: Sequence[Point]) -> Iterator[Callable[[Point], bool]]:
    """What to learn from, each up to a length: everything, without a setup's like, and one setup alone."""
    cases = {
        point.case.setup: point.case for point in points if point.case.phase == DECODE
    }.values()
    chosen: list[tuple[Case | None, tuple[str, ...], bool]] = [(None, (), True)]
    chosen += [(one, names, False) for one in cases for names in LEFT_OUT]
    chosen += [(one, ("shape", "quantization", "settings"), True) for one in cases]
    for (case, names, is_alike), longest in itertools.product(
        chosen, sorted({point.n_prompt for point in points})
    ):

        def keeps(
            point: Point, case: Any = case, names: Any = names, wanted: Any = (is_alike, longest)
        ) -> bool:
            alike = case is None or all(
                getattr(point.case, name) == getattr(case, name) for name in names
            )
            return bool(alike == wanted[0]) and bool(point.n_prompt <= wanted[1])

        yield keeps


def predict(
    kept: Sequence[Point], held: Sequence[Point], records: dict[Case, Record], best: Ceilings
) -> Iterator[dict[str, object]]:
    """The held-out points, predicted from those that were kept: how each extrapolates, and how it came out."""
    if {point.case.phase for point in kept} != {PREFILL, DECODE}:
        return
    learned = learning.Learned(learning.fit(kept), tuple(kept), (), 1)
    for point in held:
        case = dataclasses.replace(point.case, phase=DECODE, length=0)
        known = learned.coverage[point.case.phase]
        if case not in records or point.case.length > MOST_TIMES * known.longest:
            continue
        record = records[case]
        here = Here(record.model, record.settings, best, learned)
        row = here.request(point.n_prompt, record.run.n_gen)
        is_prefill = point.case.phase == PREFILL
        ways = known.extrapolations(point.case)
        low, high = row.prefill_s if is_prefill else row.tpot_s
        expected = (row.prefill_expected_s if is_prefill else row.tpot_expected_s) or 0.0
        yield {
            "point": (point.case.setup, point.n_prompt),
            "ways": ", ".join(sorted(ways)) or "nothing",
            "phase": point.case.phase,
            "error": expected / point.seconds - 1,
            "inside": low <= point.seconds <= high,
            "width": high / low,
            "doublings": max(ways.get(learning.LONGER, 0), ways.get(learning.SHORTER, 0)) or 1.0,
        }


if __name__ == "__main__":
    main()
