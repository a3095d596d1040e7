"""What disturbed runs, what failed, and what is not known well enough: warnings below results."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import experiments
from lab.core.lists import grouped, plural
from lab.core.record import OK, Record
from lab.core.shown import NOT_TO_BE_TRUSTED
from lab.runner import disturbances, machine
from lab.runner.cases import Plan
from lab.runner.session import wide_figures
from lab.show import table
from lab.show.wording import percent

IMPORTED = (
    "imported: measured by someone else with another tool, as times of whole tests. "
    "The lab did not watch these runs."
)


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed runs of the engine, and whether their figures are to be trusted."""
    return [*imported(records), *disturbed(records), *distrust(records)]


def doubts(records: Sequence[Record]) -> str:
    """What disturbed these runs, and whether they are unreliable; "" if nothing disturbed them."""
    causes = "; ".join(disturbances.sentences(records))
    if not causes:
        return ""
    if disturbances.is_doubtful(records):
        return f"{causes}. Unreliable."
    return f"{causes}."


def disturbed(records: Sequence[Record]) -> list[str]:
    """Sentences on what disturbed the runs, by session, variant and length, and on drift."""
    sentences = []
    for (_, variant, name), repeats in _repeats(records).items():
        sentence = doubts(repeats)
        if sentence:
            label = f"{name}, {variant}" if variant else name
            sentences.append(f"{label}: {sentence}")
    return sentences + disturbances.drift(records)


def imported(records: Sequence[Record]) -> list[str]:
    """A sentence on results that another tool measured; none without them."""
    n_imported = len([record for record in records if record.run.imported_from is not None])
    if n_imported == 0:
        return []
    if n_imported == len(records):
        sentence = f"All results were {IMPORTED}"
    elif n_imported == 1:
        sentence = f"1 result was {IMPORTED}"
    else:
        sentence = f"{plural(n_imported, 'result')} were {IMPORTED}"
    return [sentence, *_of_samples(records)]


def _of_samples(records: Sequence[Record]) -> list[str]:
    """What the samples of each imported test show."""
    samples = [
        record for record in records if record.run.imported_from and record.run.is_timed
    ]
    tests = grouped(
        samples,
        lambda record: (
            record.session,
            record.model.name,
            record.settings,
            record.machine,
            record.run.variant,
            experiments.run_name(record.run),
        ),
    )
    sentences = []
    for (_, model, _, _, variant, name), repeats in tests.items():
        times = [record.run.steps.end_ns[-1] / 1e9 for record in repeats]
        for sentence in disturbances.of_unwatched(times):
            label = ", ".join(filter(None, (model, name, variant)))
            sentences.append(f"{label}: {sentence}.")
    return sentences


def unreliable(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each session with unreliable figures."""
    doubtful = set()
    for (session, _, _), repeats in _repeats(records).items():
        if disturbances.is_doubtful(repeats):
            doubtful.add(session)
    sessions = grouped(records, lambda record: record.session)
    return [of_session for session, of_session in sessions.items() if session in doubtful]


def distrust(records: Sequence[Record]) -> list[str]:
    """A sentence for each session with unreliable figures."""
    n_sessions = len({record.session for record in records})
    disturbed_runs = (
        f"Unreliable ({NOT_TO_BE_TRUSTED}): at least half of these runs were disturbed"
    )
    sentences = []
    for of_session in unreliable(records):
        if _lost_cores(of_session):
            host = f"the host of {machine.label(of_session[0].machine)}"
            sentences.append(
                f"{disturbed_runs}, because {host} gave its cores to other virtual machines. "
                "Measure again there, at another time."
            )
            continue
        session = f" (session {of_session[0].session})" if n_sessions > 1 else ""
        sentences.append(
            f"{disturbed_runs}{session}. Measure again while no other program runs."
        )
    return sentences


def _lost_cores(records: Sequence[Record]) -> bool:
    """Whether the host took cores from the virtual machine."""
    return any(disturbances.STEAL in disturbances.disturbances(record) for record in records)


def _repeats(records: Sequence[Record]) -> dict[tuple[str, str | None, str], list[Record]]:
    """Timed runs that went well, by session, variant and what they did."""
    timed = [record for record in records if record.run.is_timed]
    return grouped(
        timed,
        lambda record: (record.session, record.run.variant, experiments.run_name(record.run)),
    )


def still_wide(records: Sequence[Record], plan: Plan) -> list[str]:
    """With --until: a sentence on the figures whose intervals are still too wide."""
    runs = [record.run for record in records if record.run.is_timed]
    if plan.until is None or not runs:
        return []
    limit = percent(plan.until.share)
    names = []
    for n_prompt, name, width in wide_figures(runs, plan.until.share):
        label = f"{name} at {n_prompt:,}"
        names.append(f"{label} ({percent(width)})" if width else label)
    if not names:
        return [f"All intervals are within {limit} of their medians."]
    return [f"Intervals still wider than {limit}: {', '.join(names)}."]


def failures(records: Sequence[Record]) -> list[str]:
    """One line per failed run, with its setup if there are several."""
    if all(record.run.status == OK for record in records):
        return []
    setups = table.by_setup(records)
    lines = []
    for label, of_setup in setups:
        for run in (record.run for record in of_setup):
            if run.status != OK:
                line = f"{experiments.run_name(run)}, repeat {run.repeat + 1}: {run.error}"
                lines.append(f"{label}: {line}" if len(setups) > 1 else line)
    return lines
