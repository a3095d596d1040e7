"""Every claim of the textbooks tried on this machine: one session measures for all of them what they need.

Each part (claim_parts.py) is measured once, however many claims rest on it. All runs go into one results file the
moment they end, so that what was measured can be judged even where the session did not come to its end. A part that
cannot be measured here, or fails, leaves a failed run that says why; the others go on.
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
from lab.experiments import claim_parts, claim_verdicts
from lab.experiments.claim import Claim
from lab.experiments.claim_parts import CEILINGS, PARTS, Asked, Trial
from lab.experiments.claim_verdicts import CLAIMS, Verdicts
from lab.experiments.common import folder_in, numbers
from lab.models import catalog
from lab.process.wire import DEFAULT_BACKEND, Probe
from lab.process.worker import Worker
from lab.runner import progress, repeatability, session, side_by_side
from lab.runner.cases import Case, Plan, failed_run
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.why import probing, where
from lab.why.where import Where

RESULTS = Path("results")
"""Where ceilings and other machines' results are looked for besides the session's own folder."""

SURE_S = 60.0
"""Seconds of measuring that the expectation counts for, when it is corrected by what parts took."""

QUICK_MOST_S = 240.0
"""What a quick session may take on 2 cores with the embedded model."""

QUICK_TYPES, TYPES = ("Q4_0", "Q8_0"), ("Q4_0", "Q8_0", "F16")
"""Weight types of which a session knows the ceilings, besides the model's own: the machine's best is among them."""


@dataclass(frozen=True)
class Session:
    """What will be measured: the trials of each part; `problems` says of other parts why they cannot be."""

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
        """Seconds that each part will take, about, by name and in order."""
        of_probes = {CEILINGS: probing.expected_s(self.probes)} if self.probes else {}
        return of_probes | {name: claim_parts.expected_s(name, self.is_quick, self.base.model) for name in self.trials}

    @property
    def warnings(self) -> list[str]:
        """What the plans of all parts warn of, each once."""
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
    """Try what texts about LLM inference claim on this machine, and return a verdict for each of the claims.

        verdicts = lab.claims("4,10")
        verdicts.rows      # claim, figures, criterion, verdict
        verdicts.records   # what they were judged by

    All of them take up to 25 minutes, `quick` ones up to 4. With `records` of an earlier session (of `lab.read`) these
    are judged again, and nothing is measured.
    """
    chosen, folder = choose(only), Path(out)
    if records is not None:
        records = [record for record in records if record.run.part]
        sessions = sorted({record.session for record in records})
        if len(sessions) != 1:
            words = f"of {len(sessions)} sessions: {', '.join(sessions)}" if sessions else "of no session of claims"
            raise LabError(f"These records are {words}.", "Give those of one: lab.read([path])")
        return judge(chosen, records, where.of_record(records[0]), folder, None, only is not None)
    with Worker() as worker, progress.in_notebook() as watching, folder_in(folder) as states:
        planned = plan(worker, chosen, quick, states, folder, model=model, **settings)
        path = session.new_results_file(planned.base, folder, planned.n_runs)
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
    """The verdicts on claims by the records of one session, and by what is kept in a folder of results."""
    near = nearby(folder, records)
    evidence = claim_verdicts.evidence_of(records, here, known_ceilings(folder), near.records, near.ceilings, is_quick)
    return claim_verdicts.verdicts(chosen, evidence, are_chosen)


def choose(only: str | int | Sequence[int] | None) -> tuple[Claim, ...]:
    """The claims with these numbers; all of them without any. LabError for numbers that no claim has."""
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
    """The probes for a plan's model that `known` does not answer; none for models whose cost is not known."""
    try:
        return probing.unknown(base.model, base.settings, types, place_of(base), known)
    except LabError:
        return []


def place_of(plan: Plan) -> Where:
    """The machine and the devices that a plan runs on."""
    return where.of(plan.machine, plan.model, plan.settings)


def known_ceilings(folder: Path) -> list[Ceilings]:
    """The ceilings that are kept in a folder, and in the default one for results."""
    return [known for where in _folders(folder) for known in probing.kept(where, lambda text: None)]


def nearby(folder: Path, records: Sequence[Record]) -> Contents:
    """Other sessions in a folder and in the default one for results, and the ceilings in their files."""
    return repeatability.nearby(_folders(folder), records)


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
    """Measure the ceilings that are missing, then part by part; each run is in `path` the moment it ends.

    `announce` is called with a line when a part begins. LabError only where the results cannot be written any more.
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
    """Write what is known of the machine into the session's file: so it can be judged again anywhere."""
    best = probing.known(known_ceilings(path.parent), place_of(planned.base))
    with contextlib.suppress(OSError):  # the runs are what counts
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
    """The runs of a part. What ends it early is in a failed run. `n_starts`: of the engine so far."""
    is_failed = False
    try:
        for trial in planned.trials[name]:
            worker.use(DEFAULT_BACKEND)  # what it holds would take the room, and the servers, of the next engines
            worker.restart()
            if trial.n_blocks:
                runs = side_by_side.execute(dict(trial.plans), trial.n_blocks, path, watch, new_worker, n_turns=1)
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


def _failed(base: Plan, path: Path, name: str, problem: LabError, is_quick: bool) -> Record:
    """The run that stands for a part that could not be measured, written to the file."""
    run = dataclasses.replace(failed_run(Case(0, 0), 0, problem), part=name, is_quick=is_quick)
    line = Record(path.stem, base.machine, base.model, base.settings, run)
    results.save(path, line)
    return line


def _measure_ceilings(
    planned: Session, worker: Worker, folder: Path, watch: ShowStatus, announce: Callable[[str], None]
) -> None:
    """Measure what is missing, and keep it in `folder`. A failure is announced: the runs can do without."""
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
    """Turns the statuses of runs into those of the session, of which `expected_s` says what each part is to take.

    What parts are expected to take is corrected by what those before them took.
    """

    def __init__(self, expected_s: Mapping[str, float], watch: ShowStatus) -> None:
        self.expected_s, self._watch = dict(expected_s), watch
        self._taken_s: dict[str, float] = {}  # by the parts that have ended
        self._name = self._words = ""
        self._began = self._started = time.monotonic()

    def begin(self, name: str) -> str:
        """A part begins; a line that says so."""
        self._name, self._began = name, time.monotonic()
        number = 1 + list(self.expected_s).index(name)
        self._words = f"part {number} of {len(self.expected_s)}, {name}"
        what = PARTS[name].what if name in PARTS else "what the machine can do at best, kernel by kernel"
        return f"{self._words}: {what}"

    def end(self, name: str) -> None:
        """A part has ended."""
        self._taken_s[name] = time.monotonic() - self._began

    def watch(self, status: Status) -> None:
        """Report the status of a run as one of the whole session."""
        now, expected_s = time.monotonic(), self.expected_s[self._name]
        ended_s = sum(self.expected_s[name] for name in self._taken_s)
        pace = (SURE_S + sum(self._taken_s.values())) / (SURE_S + ended_s)  # the first parts say little of it
        own_s = max(0.0, pace * expected_s - (now - self._began)) if status.left_s is None else status.left_s
        left_s = own_s + pace * (sum(self.expected_s.values()) - ended_s - expected_s)
        self._watch(dataclasses.replace(status, part=self._words, elapsed_s=now - self._started, left_s=left_s))
