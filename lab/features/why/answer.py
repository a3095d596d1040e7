"""Why one figure is slower than another: their ratio as a product of causes, and what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.core.record import Record
from lab.errors import LabError
from lab.features.why import choosing, counting, machines, path_trial, serving, setups
from lab.features.why.depth import depth
from lab.features.why.figure import Figure
from lab.features.why.parts import BUILD, GapPart, Pair, left_over, unknown
from lab.features.why.permission import allowed_spec, refusal
from lab.process.worker import Worker
from lab.runner import builds
from lab.runner.progress import ShowStatus


def silently(status: object) -> None:
    """Shows nothing."""


@dataclass(frozen=True)
class Question:
    """What the answer may use: time to measure, models and libraries of A and B, and more records.

    A model that the user names may be downloaded or made; one that a file names must be here.
    """

    budget_s: float = 0.0
    specs: tuple[str | None, str | None] = (None, None)
    libs: Sequence[str] = ()
    folder: Path = Path("results")
    watch: ShowStatus = silently
    records: Sequence[Record] = ()
    asked_again: Sequence[str] = ()  # the words of the command that asks the same
    new_worker: Callable[[], Worker] = Worker


@dataclass(frozen=True)
class WhyAnswer:
    """Both figures and the parts of their ratio, the last of them what is not explained."""

    pair: Pair
    parts: tuple[GapPart, ...]
    path: Path | None = None  # of the trial's records
    asked_again: Sequence[str] = ()  # the words of the command that asks the same
    notes: Sequence[str] = field(default_factory=tuple)  # on what is compared, and what is not
    has_model: bool = False  # one that a trial may load

    @property
    def fast(self) -> Figure:
        return self.pair.fast

    @property
    def slow(self) -> Figure:
        return self.pair.slow

    @property
    def ratio(self) -> float:
        return self.pair.ratio

    @property
    def causes(self) -> list[GapPart]:
        """The parts that make the slower one slower, the largest first."""
        causes = [part for part in self.parts if part.is_cause and part.log > 0]
        return sorted(causes, key=lambda part: -part.log)

    @property
    def different(self) -> list[GapPart]:
        """The parts in which the sides differ without a known factor."""
        return [part for part in self.parts if part.differs and not part.has_factor]

    @property
    def not_given(self) -> list[GapPart]:
        """The parts that a side does not give."""
        return [part for part in self.parts if not part.differs and not part.has_factor]

    @property
    def rest(self) -> GapPart:
        return self.parts[-1]


def answer(a: Figure, b: Figure, question: Question | None = None) -> WhyAnswer:
    """The ratio of two figures in parts.

    With a budget depth, settings, models and builds are measured.
    """
    question = question or Question()
    pair = Pair.of(a, b)
    specs = specs_of(pair, question)
    libs = tuple(question.libs)
    if pair.letters == ("B", "A"):
        libs = libs[::-1]
    parts = known_parts(pair, specs, libs, question)
    measured = measure(pair, parts, specs, libs, question)
    parts = [measured.parts.get(part.name, part) for part in parts]
    parts += serving.of_server(pair)
    spec = specs[0] or specs[1]
    parts += machines.of_machine(pair, spec, question.folder, with_build=not libs)
    parts.append(left_over(pair, parts))
    notes = [*counting.sums(pair), *counting.slow_samplers(pair)]
    if measured.ended_by:
        notes.insert(0, f"The trial ended early. {measured.ended_by}")
    has_model = any(specs)
    return WhyAnswer(pair, tuple(parts), measured.path, question.asked_again, notes, has_model)


def specs_of(pair: Pair, question: Question) -> tuple[str | None, str | None]:
    """The models of the faster and of the slower side: those that the user names, or that are
    here.
    """
    spec_of_a, spec_of_b = question.specs
    if pair.letters == ("B", "A"):
        return spec_of_b or allowed_spec(pair.fast), spec_of_a or allowed_spec(pair.slow)
    return spec_of_a or allowed_spec(pair.fast), spec_of_b or allowed_spec(pair.slow)


def known_parts(
    pair: Pair, specs: tuple[str | None, str | None], libs: Sequence[str], question: Question
) -> list[GapPart]:
    """The parts that follow from the figures, and those that a trial can measure."""
    parts = [counting.counted(pair)]
    if not pair.has_records:
        parts.append(counting.concurrency(pair))
        parts += choosing.with_cost(counting.of_serving(pair), pair, question.folder)
    parts += setups.of_labels(pair)
    parts.append(depth(pair, question.records))
    parts.append(setups.of_model(pair, specs))
    parts += setups.of_settings(pair)
    parts += setups.of_sampling(pair)
    parts += setups.of_program(pair)
    if libs:
        fast, slow = pair.letters
        reason = f"{builds.short(libs[0])} in {fast}, {builds.short(libs[1])} in {slow}"
        parts.append(unknown(BUILD, reason, changes={"lib": libs[1]}))
    return parts


def measure(
    pair: Pair,
    parts: Sequence[GapPart],
    specs: tuple[str | None, str | None],
    libs: Sequence[str],
    question: Question,
) -> path_trial.Measured:
    """The parts that a trial can measure, as far as the budget lasts; with the reason if it
    cannot.
    """
    changes = [part for part in parts if part.changes]
    if not changes:
        return path_trial.Measured()
    if question.budget_s <= 0:
        return without(changes, path_trial.WITHOUT_BUDGET)
    spec = specs[0] or specs[1]
    try:
        if spec is None:
            raise LabError(refusal(pair.fast, pair.slow))
        start = path_trial.start_of(pair, spec, libs[0] if libs else None)
        return path_trial.run(
            path_trial.PathTrial(
                start=start,
                changes=changes,
                is_prefill=pair.fast.is_prefill,
                budget_s=question.budget_s,
                folder=question.folder,
                watch=question.watch,
                new_worker=question.new_worker,
            )
        )
    except LabError as problem:
        return without(changes, problem.what.rstrip("."))


def without(changes: Sequence[GapPart], reason: str) -> path_trial.Measured:
    """The parts that a trial could measure, with the reason why none did."""
    return path_trial.Measured(
        {part.name: path_trial.not_measured(part, reason) for part in changes}
    )


def with_notes(explained: WhyAnswer, notes: Sequence[str]) -> WhyAnswer:
    """The answer with sentences on what is compared."""
    return replace(explained, notes=(*explained.notes, *notes))
