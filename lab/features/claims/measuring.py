"""A session of claims: a few measurements under fixed names (parts), each made once for all claims
that need it.

A part with one plan runs in rounds, as in `lab measure`; parts that compare run in blocks, as in
`lab ab`, with one turn. A part that cannot be measured, or fails, leaves a failed run with the
reason; the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from lab.app.options import seconds_of
from lab.core import results
from lab.core.arguments import Numbers, StrPath, Time
from lab.core.keywords import EngineSettings
from lab.core.record import Record
from lab.errors import LabError
from lab.features import stall
from lab.features.claims import judging
from lab.features.claims.judging import CEILINGS, CLAIMS, Claim, ClaimRow, Verdicts
from lab.features.speculate import planning as speculation
from lab.features.turns import planning as turns
from lab.models import catalog, obtain
from lab.process.setup import ProcessSetup
from lab.process.wire import Probe
from lab.process.worker import Worker
from lab.roofline import measuring, probing
from lab.roofline.probing import Where
from lab.runner import batches, progress, prompts, session, trial
from lab.runner.cases import Case, MakesPlan, Plan, failed_run
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status, Watch
from lab.runner.refusals import whole_numbers

PARTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("parts.toml").read_text(encoding="utf-8")
)
"""What each part is (`words`), and the arguments of its plan by `variants`."""

PLANS: dict[str, MakesPlan] = {
    "batch": batches.plan,
    "stall": stall.plan,
    "speculation": speculation.plan,
    "turns": turns.plan,
}
"""How the parts are planned that are not plain measurements."""

TYPES = ("Q4_0", "Q8_0")
"""Weight types whose ceilings a session measures besides the model's own; the machine's best is
among them."""

N_REPEAT = 3  # repeats or blocks of each part
MOST_REPEATS = 10  # of a part whose claims stay undecided
HALF = "half"  # the variant with half the threads
TEXTS = "code,table,story"  # what tokens are drafted for, if no prompt is asked for


@dataclass(frozen=True)
class ClaimsSession:
    """The plans of each part by their variants; `problems` has the reason for each part that cannot
    be measured."""

    chosen: tuple[Claim, ...]
    base: Plan
    plans: dict[str, dict[str, Plan]]
    problems: dict[str, LabError]
    probes: tuple[Probe, ...]  # kernels whose ceilings are needed and not known yet

    @property
    def all_plans(self) -> list[Plan]:
        plans = [self.base]
        for variants in self.plans.values():
            plans += variants.values()
        return plans


def claims(
    only: Numbers | None = None,
    model: str = catalog.DEFAULT,
    *,
    budget: Time | None = None,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[EngineSettings],
) -> Verdicts:
    """Test common claims about LLM inference on this machine, and return a verdict for each.

        verdicts = lab.claims("6,7")
        verdicts.rows      # claim, figures, criterion, verdict
        verdicts.records   # the runs behind the verdicts

    All claims take about 5 minutes. `budget`, such as "10min": what is undecided before is measured
    again, until it is spent.
    """
    chosen = choose(only)
    folder = Path(out)
    with Worker() as worker, progress.shown_to(watch) as show:
        planned = plan(worker, chosen, folder, model=model, **settings)
        path = session.new_results_file(planned.base, folder)
        measurement = Measurement(
            planned, worker, path, show, lambda sentence: show(Status(sentence))
        )
        if budget is not None:
            measurement.budget_s = seconds_of(budget)
        records = list(measurement.execute())
    return next(judging.of_sessions(chosen, records, probing.kept(folder)))


def choose(only: Numbers | None) -> tuple[Claim, ...]:
    """The claims with these numbers, or all of them. LabError for numbers that no claim has."""
    by_number = {claim["number"]: claim for claim in CLAIMS}
    if only is None:
        return CLAIMS
    the_numbers = f"The numbers are {', '.join(map(str, by_number))}."
    try:
        numbers = whole_numbers("--only", only, 10**9)
    except LabError as problem:
        raise LabError(problem.what, the_numbers) from problem
    for number in numbers:
        if number not in by_number:
            raise LabError(f"There is no claim {number:,}.", the_numbers)
    return tuple(by_number[number] for number in numbers)


def plan(
    worker: Worker, chosen: Sequence[Claim], folder: Path, **settings: Any
) -> ClaimsSession:
    """Plan every part that the chosen claims need.

    LabError for settings or a model that cannot be measured at all.
    """
    base = make_plan(worker, [1], 1, 1, **settings)
    needed: set[str] = set()
    for claim in chosen:
        needed.update(claim["parts"])
    plans: dict[str, dict[str, Plan]] = {}
    problems: dict[str, LabError] = {}
    for part in PARTS:
        if part not in needed:
            continue
        try:
            variants = plans_of(part, worker, base, settings)
            if len(variants) > 1:
                trial.check(variants)
            plans[part] = variants
        except LabError as problem:
            problems[part] = problem
    probes = missing_probes(base, folder) if CEILINGS in needed else []
    return ClaimsSession(tuple(chosen), base, plans, problems, tuple(probes))


def missing_probes(base: Plan, folder: Path) -> list[Probe]:
    """The kernels whose ceilings the folder does not have; none if the model's cost is unknown."""
    ceilings = probing.kept(folder, lambda sentence: None)
    with contextlib.suppress(LabError):
        return measuring.unknown(base.model, base.settings, TYPES, place_of(base), ceilings)
    return []


def place_of(base: Plan) -> Where:
    return probing.place_of(base.machine, base.model, base.settings)


def plans_of(
    part: str, worker: Worker, base: Plan, settings: Mapping[str, Any]
) -> dict[str, Plan]:
    """The plans of a part by their variants: one that runs in rounds, or several that run in
    blocks."""
    plans: dict[str, Plan] = {}
    n_half = base.settings.n_threads // 2
    make: MakesPlan = PLANS.get(part, make_plan)
    for variant, changes in PARTS[part]["variants"].items():
        asked = {"repeat": N_REPEAT, **settings, **changes}
        if variant == HALF:
            asked |= {"threads": n_half, "threads_batch": n_half}
        if part == "speculation" and settings.get("prompt", prompts.TEXT) == prompts.TEXT:
            asked["prompt"] = TEXTS
        if part == "quantizations":
            asked["model"] = in_quantization(settings["model"], variant)
        if variant != HALF or n_half:
            plans[variant] = dataclasses.replace(make(worker, **asked), part=part)
    return plans


def in_quantization(model: str, kind: str) -> str:
    """The same model in another quantization. LabError if it cannot be made here."""
    spec = catalog.parse(model)
    if spec.entry is not None:
        if spec.source == catalog.SYNTHETIC:
            return f"synthetic:{spec.entry.name}:{kind}"
        if obtain.locate(catalog.parse(spec.entry.name)):
            return f"{spec.entry.name}:{kind}"
    raise LabError(
        f"{spec.text} cannot be made in other quantizations: no unpacked original is on this "
        "machine.",
        "Use a model of the list, and get it first: lab models",
    )


@dataclass
class Measurement:
    """A session under way: first the missing ceilings, then each part, which is announced; then
    the parts of undecided claims again, while the budget lasts.

    Every run is in the file at `path` as soon as it ends.
    """

    planned: ClaimsSession
    worker: Worker
    path: Path
    watch: ShowStatus
    announce: Callable[[str], None]
    new_worker: Callable[[], Worker] = Worker
    n_starts: int = 1  # engines so far
    budget_s: float = 0.0  # of the whole session; the first repeats are made in any case
    clock: Callable[[], float] = time.monotonic

    def execute(self) -> Iterator[Record]:
        started_s = self.clock()
        records: list[Record] = []
        repeat_s: dict[str, float] = {}
        with results.unless_empty(self.path):
            self.measure_ceilings()
            for part, problem in self.planned.problems.items():
                yield self.failed(part, problem)
            n_parts = len(self.planned.plans)
            for number, part in enumerate(self.planned.plans, 1):
                label = f"part {number} of {n_parts}, {part}"
                part_began_s = self.clock()
                self.announce(f"{label}: {PARTS[part]['words']}")
                for record in self.measure_part(part, label):
                    records.append(record)
                    yield record
                repeat_s[part] = (self.clock() - part_began_s) / N_REPEAT
            for repeat in range(N_REPEAT, MOST_REPEATS):
                parts = self.undecided(records)
                expected_s = sum(repeat_s[part] for part in parts)
                if self.clock() - started_s + expected_s > self.budget_s:
                    return
                for part in parts:
                    label = f"once more, {part}"
                    self.announce(f"{label}: its claims are undecided")
                    for record in self.measure_part(part, label, range(repeat, repeat + 1)):
                        records.append(record)
                        yield record

    def undecided(self, records: Sequence[Record]) -> list[str]:
        """The parts that another repeat may decide: of claims that cannot be told yet."""
        ceilings = probing.kept(self.path.parent, lambda sentence: None)
        rows: list[ClaimRow] = []
        for verdicts in judging.of_sessions(self.planned.chosen, records, ceilings):
            rows += verdicts.rows
        needed: set[str] = set()
        for row in rows:
            if row["verdict"] == judging.UNSURE:
                needed.update(row["parts"])
        failed = {record.run.part for record in records if record.run.error}
        return [part for part in self.planned.plans if part in needed - failed]

    def measure_ceilings(self) -> None:
        """Measure the missing ones, and copy all to the session's file, which can be judged
        anywhere."""
        base = self.planned.base
        here = place_of(base)
        folder = self.path.parent
        if self.planned.probes:
            self.announce(f"{CEILINGS}: the best rate of each kernel")
            try:
                self.worker.use(base.setup)
                measuring.obtain(
                    self.worker, here, self.planned.probes, self.watch, self.announce, folder
                )
            except LabError as problem:
                self.announce(f"The ceilings could not be measured: {problem}")
        ceilings = probing.known(probing.kept(folder, self.announce), here)
        results.save(self.path, *probing.lines(ceilings))

    def measure_part(
        self, part: str, label: str, repeats: range = range(N_REPEAT)
    ) -> Iterator[Record]:
        """The runs of a part in engines of its own; the last one says why it failed."""
        plans = self.planned.plans[part]
        has_failed = False

        def show(status: Status) -> None:
            self.watch(dataclasses.replace(status, part=label, announcement=""))

        try:
            self.worker.use(ProcessSetup())
            self.worker.restart()  # frees its memory
            if len(plans) == 1:
                plan_of_repeats = dataclasses.replace(
                    plans[""], first_repeat=repeats.start, n_repeat=repeats.stop
                )
                runs = session.execute(
                    plan_of_repeats, self.worker, self.path, show, n_starts=self.n_starts + 1
                )
            else:
                blocks = trial.Blocks(len(repeats), 1, first=repeats.start)
                runs = trial.execute(plans, blocks, self.path, show, self.new_worker)
            for record in runs:
                self.n_starts = max(self.n_starts, record.run.engine or 0)
                has_failed = record.run.error is not None
                yield record
        except LabError as problem:
            if not has_failed:
                yield self.failed(part, problem)

    def failed(self, part: str, problem: LabError) -> Record:
        """The line of a part that could not be measured."""
        base = self.planned.base
        run = dataclasses.replace(failed_run(Case(0, 0), 0, problem), part=part)
        record = Record(self.path.stem, base.machine, base.model, base.settings, run)
        results.save(self.path, record)
        return record
