"""Six sessions, each with one fault: their figures without findings, and what the lab's commands
name in them.

A fault is named by what decides it elsewhere: causes of disturbed runs, the law of growth, the
parts of `lab why`, the causes of a recording.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab.app import kinds
from lab.app.reading import read
from lab.core import growth, phases, shell
from lab.core.files import is_file
from lab.core.lists import join_and
from lab.core.record import DECODE, PREFILL, Record
from lab.core.results import Contents
from lab.errors import LabError
from lab.features.recording import differences
from lab.features.recording.lines import CLIENT, RecordedCall
from lab.features.why import parts
from lab.features.why.answer import WhyAnswer
from lab.features.why.question import why
from lab.features.why.section import section as section_of_answer
from lab.runner import disturbances
from lab.show import console, table, text_growth
from lab.show.section import print_sections
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

FOLDER = Path("faults")  # beside the notebooks
THREADS = "threads"
THROTTLED = "throttled"
CACHE = "cache"
SWAPPED = "swapped"
KERNEL = "kernel"
SPECULATION = "speculation"
FAULTS = {
    THREADS: "one thread too many: llama.cpp's threads wait for one that has no core (with "
    "--budget 0 the command measures nothing, so it names more threads as the likely cause and "
    "leaves the factor unexplained)",
    THROTTLED: "a throttled core: heat or a power limit slows each step",
    CACHE: "a prompt cache broken by a clock in the system prompt, a date or a time",
    SWAPPED: "swapped memory: some steps wait for pages of the disk",
    KERNEL: "a slow kernel: attention needs far more time than its bytes and FLOPs explain",
    SPECULATION: "speculation counted in: the rate has tokens that were drafted, so it cannot be "
    "compared with one of single tokens",
}
"""The words to guess, and what they mean."""
NO_FAULT = "no fault"
TEXT = ".txt"  # what another program printed
WHY = "why"
SHOW = "show"
OF_CAUSES = {disturbances.HEAT: THROTTLED, disturbances.MEMORY: SWAPPED}


@dataclass(frozen=True)
class FaultSession:
    """A session of the page: its files, the command that grades it, and what its user said."""

    files: tuple[str, ...]
    command: str  # of the lab
    complaint: str

    @property
    def paths(self) -> list[Path]:
        return [FOLDER / name for name in self.files]

    @property
    def arguments(self) -> list[str]:
        """The command's words."""
        names = [path.as_posix() for path in self.paths]
        options = ["--budget", "0"] if self.command == WHY else []
        return [self.command, *names, *options]


SESSIONS = {
    1: FaultSession(
        ("base.jsonl", "1.jsonl"), WHY, "The second session has the same command as the first."
    ),
    2: FaultSession(
        ("2.jsonl",), SHOW, "A chat of five short questions, and each waits for its answer."
    ),
    3: FaultSession(("3.jsonl",), WHY, "Twice the threads, and the tokens come slower."),
    4: FaultSession(
        ("4.jsonl", "4.txt"),
        WHY,
        "The same model and thread, and the server says a higher rate.",
    ),
    5: FaultSession(
        ("base.jsonl", "5.jsonl"),
        WHY,
        "The second session was as fast as the first, at first.",
    ),
    6: FaultSession(("6.jsonl",), SHOW, "Short prompts are fine, long ones are not."),
}


def observe(number: int) -> pd.DataFrame:
    """What was measured in a session, without findings: a row for each run or call.

    A text of another program is printed.
    """
    import pandas as pd

    session = session_of(number)
    print(f"Session {number}. {session.complaint}")
    rows: list[dict[str, object]] = []
    for path in session.paths:
        if path.suffix == TEXT:
            print(path.read_text(encoding="utf-8"))
            continue
        contents = read((str(path),), with_findings=True)
        timed = [record for record in contents.records if record.run.is_timed]
        rows += [row_of_run(path.name, record) for record in timed]
        rows += [row_of_call(call) for call in calls_in(contents)]
    return pd.DataFrame(rows)


def session_of(number: int) -> FaultSession:
    """LabError for a number that no session has, and where the files are not."""
    session = SESSIONS.get(number)
    if session is None:
        raise LabError(
            f"There is no session {number}.", f"They are 1 to {len(SESSIONS)}: observe(1)"
        )
    for path in session.paths:
        if not is_file(path):
            raise LabError(
                f"{path} is not here.", "Run this in the folder notebooks of a checkout."
            )
    return session


def row_of_run(file: str, record: Record) -> dict[str, object]:
    """A run's rates, and how long its steps took."""
    run = record.run
    tokens_ms = [ns / 1e6 for ns in phases.itl_ns(run)]
    prefill_s = (phases.prefill_ns(run) or 0) / 1e9
    return {
        "file": file,
        "threads": record.settings.n_threads,
        "prompt": run.n_prompt,
        "prefill, tokens/s": round(run.n_prompt / prefill_s) if prefill_s else None,
        "a token, ms (median)": digits(statistics.median(tokens_ms)),
        "the slowest token, ms": digits(max(tokens_ms)),
    }


def row_of_call(call: RecordedCall) -> dict[str, object]:
    """A call of a conversation, as its client sees it."""
    return {
        "call": call.call,
        "prompt tokens": call.n_prompt,
        "answer tokens": call.n_gen,
        "seconds": digits(call.ended_ns / 1e9),
    }


def calls_in(contents: Contents) -> list[RecordedCall]:
    return [line for line in contents.findings if isinstance(line, RecordedCall)]


def grade(number: int, guess: object = ...) -> None:
    """Print what the session's command answers, which fault that names, and whether the guess is
    right."""
    session = session_of(number)
    print(f"$ {shell.lab(*session.arguments)}")
    if session.command == WHY:
        print_sections([section_of_answer(explained(session))], console.console())
    else:
        contents = read([str(path) for path in session.paths], with_findings=True)
        kinds.print_results(contents.all_lines, console.console())
    faults = named(session)
    verdict = " and ".join(FAULTS[fault] for fault in faults)
    print(f"This names {verdict or NO_FAULT}.")
    print(judged(guess, faults))


def judged(guess: object, faults: Sequence[str]) -> str:
    """Whether a guess is one of these faults, in words."""
    if guess is ...:
        return f"You entered no guess. The words are: {join_and(list(FAULTS))}."
    word = str(guess).strip().lower()
    if word not in FAULTS:
        return f"{guess!r} is none of the words: {join_and(list(FAULTS))}."
    return (
        "Your guess is right." if word in faults else f"Your guess was {word}: not this time."
    )


def named(session: FaultSession) -> list[str]:
    """The faults that the lab names in a session; of two files, what is new in the second."""
    files = [str(path) for path in session.paths if path.suffix != TEXT]
    contents = read(files, with_findings=True)
    faults = {*in_runs(contents.records), *in_calls(calls_in(contents))}
    if session.command == WHY:
        faults.update(in_answer(explained(session)))
    return [fault for fault in FAULTS if fault in faults]


def in_runs(records: Sequence[Record]) -> Iterator[str]:
    """What disturbed runs, and a slow kernel of attention."""
    for record in records:
        for cause in disturbances.disturbances(record):
            if cause in OF_CAUSES:
                yield OF_CAUSES[cause]
    for _, of_setup in table.by_setup(records):
        steady = text_growth.steady(of_setup)
        for phase in (DECODE, PREFILL):
            law = growth.growth(steady, phase) if steady else None
            if law is not None and law.verdict == growth.KERNEL:
                yield KERNEL


def in_calls(calls: Sequence[RecordedCall]) -> Iterator[str]:
    """A time or a date that a client changed in what the cache had."""
    for call in calls:
        cause = call.cause
        if cause is not None and cause.by == CLIENT and cause.what in differences.CLOCKS:
            yield CACHE


def in_answer(answer: WhyAnswer) -> Iterator[str]:
    """Drafts that make a side faster, and threads that are the likely cause of a slower one."""
    for part in answer.parts:
        if part.name == parts.SPECULATION and part.is_cause:
            yield SPECULATION
        if part.name == THREADS and part.differs and has_more_threads(answer):
            yield THREADS


def has_more_threads(answer: WhyAnswer) -> bool:
    """Whether the slower side has more threads, and is slower for certain."""
    slow = answer.slow.settings["threads"]
    fast = answer.fast.settings["threads"]
    is_certain = answer.rest.half is not None and answer.rest.log > answer.rest.half
    return is_certain and slow > fast


def explained(session: FaultSession) -> WhyAnswer:
    """What `lab why` says of two files, or of the two setups of one, without measuring."""
    first = session.paths[0]
    second = session.paths[1] if len(session.paths) > 1 else None
    return why(first, second, budget=0)
