"""A session of claims: one session measures everything that the claims need.

Each part (claim_parts.py) is measured once for all of its claims. Every run is in one results file as soon as it ends,
so that an interrupted session can be judged too. A part that cannot be measured, or fails, leaves a failed run with the
reason; the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from lab.core import results
from lab.core.asked_settings import SettingsKeywords
from lab.core.record import Ceilings, Record
from lab.core.results import Contents
from lab.errors import LabError
from lab.experiments.claims import claim_parts, claim_verdicts
from lab.experiments.claims.claim import Claim
from lab.experiments.claims.claim_parts import CEILINGS, PARTS, Asked, Trial
from lab.experiments.claims.claim_verdicts import CLAIMS, Verdicts
from lab.experiments.common import folder_in, numbers
from lab.models import catalog
from lab.process.wire import DEFAULT_BACKEND, Probe
from lab.process.worker import Worker
from lab.runner import progress, session, side_by_side
from lab.runner.cases import Case, Plan, failed_run
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.why import probing, where
from lab.why.where import Where

RESULTS = Path("results")
"""A second folder in which to look for ceilings and other machines' results."""

SURE_S = 60.0
"""The weight of the estimate, as seconds of measurement, when it is corrected by measured times."""

QUICK_MOST_S = 240.0
"""The longest quick session on 2 cores with the embedded model."""

QUICK_TYPES, TYPES = ("Q4_0", "Q8_0"), ("Q4_0", "Q8_0", "F16")
"""Weight types whose ceilings a session measures besides the model's own; the machine's best is among them."""


@dataclass(frozen=True)
class Session:
    """The planned trials of each part; `problems` has the reason for each part that cannot be measured."""

    claims: tuple[Claim, ...]
    is_quick: bool
    base: Plan
    trials: dict[str, list[Trial]]
    problems: dict[str, LabError]
    probes: tuple[Probe, ...]  # kernels whose ceilings are not known yet

    @property
    def n_runs(self) -> int:
        return sum(trial.n_runs for trials in self.trials.values() for trial in trials)

    @property
    def expected_s(self) -> dict[str, float]:
        """The estimated seconds of each part, by name and in order."""
        of_probes = {CEILINGS: probing.expected_s(self.probes)} if self.probes else {}
        return of_probes | {name: claim_parts.expected_s(name, self.is_quick, self.base.model) for name in self.trials}

    @property
    def warnings(self) -> list[str]:
        """The warnings of all plans, each once."""
        plans = [plan for trials in self.trials.values() for trial in trials for plan in trial.plans.values()]
        return list(dict.fromkeys(warning for plan in [self.base, *plans] for warning in plan.warnings))


def claims(
    only: str | int | Sequence[int] | None = None,
    quick: bool = False,
    model: str = catalog.DEFAULT,
    *,
    records: Sequence[Record] | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Unpack[SettingsKeywords],
) -> Verdicts:
    """Test common claims about LLM inference on this machine, and return a verdict for each.

        verdicts = lab.claims("4,10")
        verdicts.rows      # claim, figures, criterion, verdict
        verdicts.records   # the runs behind the verdicts

    All claims take up to 25 minutes, with `quick` up to 4. With `records` of an earlier session (from `lab.read`) it
    judges these again and measures nothing.
    """
    chosen, folder = choose(only), Path(out)
    if records is not None:
        records = [record for record in records if record.run.part]
        sessions = sorted({record.session for record in records})
        if len(sessions) != 1:
            words = f"{len(sessions)} sessions of claims" + (f": {', '.join(sessions)}" if sessions else "")
            raise LabError(f"These records have {words}.", "Give the records of one session: lab.read([path])")
        return judge(chosen, records, where.of_record(records[0]), folder, None, only is not None)
    with Worker() as worker, progress.in_notebook() as watching, folder_in(folder) as states:
        planned = plan(worker, chosen, quick, states, folder, model=model, **settings)
        path = session.new_results_file(planned.base, folder)
        show = watch or watching
        made = list(execute(planned, worker, path, show, lambda sentence: show(Status(sentence))))
    for warning in (*planned.warnings, *(f"{name}: {text}" for name, text in claim_verdicts.failures(made).items())):
        warnings.warn(warning, stacklevel=2)
    return judge(chosen, made, place_of(planned.base), folder, quick)


def judge(
    chosen: Sequence[Claim],
    records: Sequence[Record],
    here: Where,
    folder: Path,
    is_quick: bool | None,
    are_chosen: bool = True,
) -> Verdicts:
    """The verdicts on claims from the records of one session, and from the results in a folder."""
    near = nearby(folder, records)
    evidence = claim_verdicts.evidence_of(records, here, known_ceilings(folder), near.records, near.ceilings, is_quick)
    return claim_verdicts.verdicts(chosen, evidence, are_chosen)


def choose(only: str | int | Sequence[int] | None) -> tuple[Claim, ...]:
    """The claims with these numbers, or all of them. LabError for unknown numbers."""
    if only is None:
        return CLAIMS
    known = {claim.number: claim for claim in CLAIMS}
    return tuple(known[number] for number in numbers("--only", only, len(known), ""))


def plan(worker: Worker, chosen: Sequence[Claim], quick: bool, states: Path, folder: Path, **settings: Any) -> Session:
    """Plan every part that the chosen claims need. LabError for settings or a model that cannot be measured at all.

    `states` is a folder for saved states, `folder` that of the results, where ceilings may be kept.
    """
    base = make_plan(worker, [1], 1, 1, **settings)
    asked = Asked(worker, settings, base, states, quick)
    needed = {part for claim in chosen for part in claim.parts}
    trials: dict[str, list[Trial]] = {}
    problems: dict[str, LabError] = {}
    for name, part in PARTS.items():
        if name not in needed or (quick and part.quick_s is None):
            continue
        try:
            if planned_trials := [trial.of_part(name, quick) for trial in part.plan(asked)]:
                trials[name] = planned_trials
        except LabError as problem:
            problems[name] = problem
    planned = Session(tuple(chosen), quick, base, trials, problems, ())
    if CEILINGS not in needed and len(chosen) < len(CLAIMS):
        return planned
    todo = _unknown(base, known_ceilings(folder), QUICK_TYPES if quick else TYPES)
    if quick and sum(planned.expected_s.values()) + probing.expected_s(todo) > QUICK_MOST_S:
        return planned
    return dataclasses.replace(planned, probes=tuple(todo))


def _unknown(base: Plan, known: Sequence[Ceilings], types: Sequence[str]) -> list[Probe]:
    """The probes for a plan's model that are not in `known`; none for models whose cost is unknown."""
    try:
        return probing.unknown(base.model, base.settings, types, place_of(base), known)
    except LabError:
        return []


def place_of(plan: Plan) -> Where:
    """The machine and the devices of a plan."""
    return where.of(plan.machine, plan.model, plan.settings)


def known_ceilings(folder: Path) -> list[Ceilings]:
    """The ceilings in a folder and in the default folder for results."""
    return [known for where in _folders(folder) for known in probing.kept(where, lambda text: None)]


def nearby(folder: Path, records: Sequence[Record]) -> Contents:
    """Other sessions in a folder and in the default folder for results, with the ceilings in their files."""
    return results.nearby(_folders(folder), records)


def _folders(folder: Path) -> set[Path]:
    return {folder.resolve(), RESULTS.resolve()}


def execute(
    planned: Session,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    announce: Callable[[str], None],
    new_worker: Callable[[], Worker] = Worker,
) -> Iterator[Record]:
    """Measure the missing ceilings, then each part; every run is in `path` as soon as it ends.

    `announce` is called with a line when a part begins. LabError only if the results cannot be written.
    """
    try:
        for name, problem in planned.problems.items():
            yield _failed(planned.base, path, name, problem, planned.is_quick)
        progress, n_starts = Progress(planned.expected_s, watch), 1
        for name in progress.expected_s:
            announce(progress.begin(name))
            if name == CEILINGS:
                _measure_ceilings(planned, worker, path.parent, progress.watch, announce)
            else:
                for record in _part(planned, name, worker, path, progress.watch, new_worker, n_starts):
                    n_starts = max(n_starts, record.run.engine or 0)
                    yield record
            progress.end(name)
    finally:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()
        elif path.exists():
            _keep_ceilings(planned, path)


def _keep_ceilings(planned: Session, path: Path) -> None:
    """Write the machine's ceilings into the session's file, so that it can be judged again anywhere."""
    best = probing.known(known_ceilings(path.parent), place_of(planned.base))
    with contextlib.suppress(OSError):  # the runs matter more
        for one in probing.lines(best):
            results.append(path, one)


def _part(
    planned: Session,
    name: str,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Worker],
    n_starts: int,
) -> Iterator[Record]:
    """The runs of a part; an error becomes a failed run. `n_starts`: of the engine so far."""
    is_failed = False
    try:
        for trial in planned.trials[name]:
            worker.use(DEFAULT_BACKEND)  # it would occupy memory and servers of the next engines
            worker.restart()
            if trial.n_blocks:
                runs = side_by_side.execute(dict(trial.plans), trial.n_blocks, path, watch, new_worker, n_turns=1)
            elif trial.measure:
                runs = _measured(trial, worker, path, watch)
            else:
                (alone,) = trial.plans.values()
                runs = session.execute(alone, worker, path, watch, n_starts=n_starts + 1)
            for record in runs:
                n_starts = max(n_starts, record.run.engine or 0)
                is_failed = record.run.error is not None
                yield record
    except LabError as problem:
        if not is_failed:
            yield _failed(planned.base, path, name, problem, planned.is_quick)


def _measured(trial: Trial, worker: Worker, path: Path, watch: ShowStatus) -> Iterator[Record]:
    """The runs that a trial makes itself, each written to the file."""
    (plan,) = trial.plans.values()
    assert trial.measure is not None
    for run in trial.measure(plan, worker, watch):
        named = dataclasses.replace(run, part=plan.part, is_quick=plan.is_quick)
        line = Record(path.stem, plan.machine, plan.model, plan.settings, named)
        results.save(path, line)
        yield line


def _failed(base: Plan, path: Path, name: str, problem: LabError, is_quick: bool) -> Record:
    """A failed run for a part that could not be measured, written to the file."""
    run = dataclasses.replace(failed_run(Case(0, 0), 0, problem), part=name, is_quick=is_quick)
    line = Record(path.stem, base.machine, base.model, base.settings, run)
    results.save(path, line)
    return line


def _measure_ceilings(
    planned: Session, worker: Worker, folder: Path, watch: ShowStatus, announce: Callable[[str], None]
) -> None:
    """Measure the missing ceilings into `folder`. A failure is announced: the runs do not need them."""
    try:
        worker.use(planned.base.backend)
        words = probing.run_probes(worker, place_of(planned.base), planned.probes, watch, folder)
    except LabError as problem:
        announce(f"The ceilings could not be measured: {problem}")
        with contextlib.suppress(LabError):
            worker.restart()
        return
    if words:
        announce(f"While the ceilings were measured, {words}: some may be too low.")


class Progress:
    """Turns the statuses of runs into those of the session. `expected_s` are the estimated seconds of each part.

    The estimates are corrected by the times of the parts before.
    """

    def __init__(self, expected_s: Mapping[str, float], watch: ShowStatus) -> None:
        self.expected_s, self._watch = dict(expected_s), watch
        self._taken_s: dict[str, float] = {}  # by the parts that have ended
        self._name = self._words = ""
        self._began = self._started = time.monotonic()

    def begin(self, name: str) -> str:
        """Begins a part and returns the line that announces it."""
        self._name, self._began = name, time.monotonic()
        number = 1 + list(self.expected_s).index(name)
        self._words = f"part {number} of {len(self.expected_s)}, {name}"
        what = PARTS[name].what if name in PARTS else "the best rate of each kernel"
        return f"{self._words}: {what}"

    def end(self, name: str) -> None:
        """Ends a part."""
        self._taken_s[name] = time.monotonic() - self._began

    def watch(self, status: Status) -> None:
        """Report the status of a run as one of the whole session."""
        now, expected_s = time.monotonic(), self.expected_s[self._name]
        ended_s = sum(self.expected_s[name] for name in self._taken_s)
        pace = (SURE_S + sum(self._taken_s.values())) / (SURE_S + ended_s)  # the first parts say little about it
        own_s = max(0.0, pace * expected_s - (now - self._began)) if status.left_s is None else status.left_s
        left_s = own_s + pace * (sum(self.expected_s.values()) - ended_s - expected_s)
        self._watch(dataclasses.replace(status, part=self._words, elapsed_s=now - self._started, left_s=left_s))
