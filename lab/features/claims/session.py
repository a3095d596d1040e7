"""A session of claims: a few measurements under fixed names (parts), each made once for all claims that need it.

A part with one plan runs in rounds, as in `lab measure`; parts that compare run in blocks, as in `lab ab`, with one
turn. A part that cannot be measured, or fails, leaves a failed run with the reason; the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from lab.app.help import Command
from lab.app.options import ENGINE, MODEL, OUTPUT, PROMPT, SEED, with_options
from lab.app.output import Output
from lab.app.reading import note
from lab.app.running import collect, introduce
from lab.core import results
from lab.core.lists import plural
from lab.core.record import Record
from lab.errors import LabError
from lab.features import stall
from lab.features.claims import judging
from lab.features.claims.judging import CEILINGS, CLAIMS, Claim, Verdicts
from lab.features.speculate import planning as speculation
from lab.features.turns import planning as turns
from lab.models import catalog, obtain
from lab.process.wire import Probe
from lab.process.worker import Worker
from lab.roofline import measuring, probing
from lab.runner import batches, progress, prompts, session, trial as side_by_side
from lab.runner.cases import Case, Plan, failed_run
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status, duration
from lab.runner.refusals import whole_numbers

PARTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("parts.toml").read_text(encoding="utf-8")
)
"""What each part is (`words`), its `seconds`, and the arguments of its plan by `variants`."""

PLANS: dict[str, Callable[..., Plan]] = {
    "batch": batches.plan,
    "stall": stall.plan,
    "speculation": speculation.plan,
    "turns": turns.plan,
}
"""How the parts are planned that are not plain measurements."""

TYPES = ("Q4_0", "Q8_0")
"""Weight types whose ceilings a session measures besides the model's own; the machine's best is among them."""

N_REPEAT = 3  # repeats or blocks of each part


@dataclass(frozen=True)
class Session:
    """The plans of each part by their variants; `problems` has the reason for each part that cannot be measured."""

    base: Plan
    plans: dict[str, dict[str, Plan]]
    problems: dict[str, LabError]
    probes: tuple[Probe, ...]  # kernels whose ceilings are needed and not known yet


def claims(
    only: str | int | Sequence[int] | None = None,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    **settings: Any,
) -> Verdicts:
    """Test common claims about LLM inference on this machine, and return a verdict for each.

        verdicts = lab.claims("7,10")
        verdicts.rows      # claim, figures, criterion, verdict
        verdicts.records   # the runs behind the verdicts

    All claims take about 5 minutes.
    """
    chosen = choose(only)
    folder = Path(out)
    with Worker() as worker, progress.in_notebook() as watch:
        planned = plan(worker, chosen, folder, model=model, **settings)
        path = session.new_results_file(planned.base, folder)
        records = list(
            execute(planned, worker, path, watch, lambda sentence: watch(Status(sentence)))
        )
    (made,) = judging.of_sessions(chosen, records, probing.kept(folder))
    return made


def choose(only: str | int | Sequence[int] | None) -> tuple[Claim, ...]:
    """The claims with these numbers, or all of them. LabError for unknown numbers."""
    known = {claim["number"]: claim for claim in CLAIMS}
    wanted = known if only is None else whole_numbers("--only", only, max(known))
    if unknown := [number for number in wanted if number not in known]:
        raise LabError(
            f"There is no claim {unknown[0]}.", f"The numbers are {', '.join(map(str, known))}."
        )
    return tuple(known[number] for number in wanted)


def plan(worker: Worker, chosen: Sequence[Claim], folder: Path, **settings: Any) -> Session:
    """Plan every part that the chosen claims need. LabError for settings or a model that cannot be measured at all."""
    base = make_plan(worker, [1], 1, 1, **settings)
    needed = {part for claim in chosen for part in claim["parts"]}
    planned = dict[str, dict[str, Plan]]()
    problems = dict[str, LabError]()
    todo = list[Probe]()
    for part in (name for name in PARTS if name in needed):
        try:
            planned[part] = plans_of(part, worker, base, settings)
            if len(planned[part]) > 1:
                side_by_side.check(planned[part])
        except LabError as problem:
            planned.pop(part, None)
            problems[part] = problem
    if CEILINGS in needed:
        here = probing.place_of(base.machine, base.model, base.settings)
        with contextlib.suppress(LabError):  # the cost of some models is unknown
            todo = measuring.unknown(
                base.model, base.settings, TYPES, here, probing.kept(folder, lambda text: None)
            )
    return Session(base, planned, problems, tuple(todo))


def plans_of(part: str, worker: Worker, base: Plan, settings: dict[str, Any]) -> dict[str, Plan]:
    """The plans of a part by their variants: one that runs in rounds, or several that run in blocks."""
    plans = dict[str, Plan]()
    spec = catalog.parse(settings["model"])
    n_half = base.settings.n_threads // 2
    is_synthetic = spec.source == catalog.SYNTHETIC
    for variant, changes in PARTS[part]["variants"].items():
        asked = {"repeat": N_REPEAT, **settings, **changes}
        if variant == "half":
            asked |= {"threads": n_half, "threads_batch": n_half}
        if part == "speculation" and settings.get("prompt", prompts.TEXT) == prompts.TEXT:
            asked["prompt"] = "code,table,story"
        if part == "quantizations":
            if spec.entry is None or not (
                is_synthetic or obtain.locate(catalog.parse(spec.entry.name))
            ):
                what = f"{spec.text} cannot be made in other quantizations: no unpacked original is on this machine."
                raise LabError(what, "Use a model of the list, and get it first: lab models")
            asked["model"] = f"{'synthetic:' * is_synthetic}{spec.entry.name}:{variant}"
        make: Callable[..., Plan] = PLANS.get(part, make_plan)
        if variant != "half" or n_half:
            plans[variant] = dataclasses.replace(make(worker, **asked), part=part)
    return plans


def execute(
    planned: Session,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    announce: Callable[[str], None],
    new_worker: Callable[[], Worker] = Worker,
) -> Iterator[Record]:
    """Measure the missing ceilings, then each part, which is announced; every run is in `path` as soon as it ends."""
    base = planned.base
    n_starts = 1
    here = probing.place_of(base.machine, base.model, base.settings)

    def failed(part: str, problem: LabError) -> Record:
        run = dataclasses.replace(failed_run(Case(0, 0), 0, problem), part=part)
        line = Record(path.stem, base.machine, base.model, base.settings, run)
        results.save(path, line)
        return line

    with results.unless_empty(path):
        if planned.probes:
            announce(f"{CEILINGS}: the best rate of each kernel")
            try:
                worker.use(base.lib, base.settings.rpc or ())
                measuring.obtain(worker, here, planned.probes, watch, announce, path.parent)
            except LabError as problem:
                announce(f"The ceilings could not be measured: {problem}")
        known = probing.lines(probing.known(probing.kept(path.parent, announce), here))
        results.save(path, *known)  # so that the session's file can be judged anywhere
        yield from (failed(part, reason) for part, reason in planned.problems.items())
        for i, (part, plans) in enumerate(planned.plans.items(), 1):
            words = f"part {i} of {len(planned.plans)}, {part}"
            is_failed = False
            announce(f"{words}: {PARTS[part]['words']}")
            show = partial(_with_part, watch, words)
            try:
                worker.use(None)
                worker.restart()  # frees its memory
                runs = side_by_side.execute(plans, N_REPEAT, path, show, new_worker, n_turns=1)
                if len(plans) == 1:
                    runs = session.execute(plans[""], worker, path, show, n_starts=n_starts + 1)
                for record in runs:
                    n_starts = max(n_starts, record.run.engine or 0)
                    is_failed = record.run.error is not None
                    yield record
            except LabError as problem:
                if not is_failed:  # else its last run says why
                    yield failed(part, problem)


def _with_part(watch: ShowStatus, part: str, status: Status) -> None:
    watch(dataclasses.replace(status, part=part))


@click.command("claims", cls=Command, first=("only", "model", "threads", "report", "out"))
@with_options(
    click.option("--only", metavar="NUMBERS", help="Test only these claims, such as 2,7."),
    MODEL,
    PROMPT,
    *ENGINE,
    SEED,
    *OUTPUT,
)
def command(only: str | None, **asked: Any) -> None:
    """Test common claims about LLM inference on this machine.

    \b
      lab claims
      lab claims --only 2,7 --report

    Each claim has a criterion that is fixed before the measurement. The verdict is: holds here, does not hold here,
    cannot be told (too noisy), or not testable here, with the reason. What several claims need is measured once; all
    claims take about 5 minutes on two cores with the embedded model, and a minute more if the ceilings are unknown.
    Each run is written to one file as soon as it ends. lab show and lab report judge that file again, also after an
    interrupted session.
    """
    from lab.show import console
    from lab.show.section import Context

    output = Output.taken_from(asked)
    chosen = choose(only)
    err = console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            planned = plan(worker, chosen, output.folder, **asked, watch=transferring)
        plans = [planned.base, *(plan for own in planned.plans.values() for plan in own.values())]
        introduce(
            [planned.base],
            err,
            err,
            list(dict.fromkeys(one for plan in plans for one in plan.warnings)),
        )
        usual = catalog.entries()[catalog.DEFAULT].n_bytes or 1
        scale = max(
            1.0, (planned.base.model.n_bytes or usual) / usual
        )  # runs take in proportion to the weights
        seconds = measuring.expected_s(planned.probes) + scale * sum(
            PARTS[part]["seconds"] for part in planned.plans
        )
        size = f"{plural(len(chosen), 'claim')}, {plural(len(planned.plans), 'part')}"
        err.print(f"{size}: about {duration(seconds)} on two cores of an EPYC")
        for part, reason in planned.problems.items():
            err.print(f"{part} cannot be measured: {reason}")
        path = session.new_results_file(planned.base, output.folder)
        records, problem = collect(
            lambda watch: execute(planned, worker, path, watch, err.print), path, err
        )
    judged = judging.of_sessions(chosen, records, probing.kept(output.folder, note))
    has_failed = any(
        record.run.error and record.run.part not in planned.problems for record in records
    )
    output.finish(records, path, problem, has_failed, shown=judging.sections(judged, Context()))
