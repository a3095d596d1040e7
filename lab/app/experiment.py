"""An experiment as data: one `Experiment` in a room, from which its command, its measurement and
its sections follow.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import click

from lab.app.command_words import words_of_values
from lab.app.help import Command
from lab.app.options import DRY_RUN, ENGINE, OUTPUT, SEED, CommandOption, with_options
from lab.app.running import carry_out
from lab.app.server import REACHING, TIMEOUT, URL, check_side, given, of_engine
from lab.core import shown
from lab.core.arguments import StrPath
from lab.core.experiments import run_name
from lab.core.files import expanded, is_dir
from lab.core.lists import grouped
from lab.core.record import Record
from lab.core.stored_command import storing
from lab.roofline.step_prediction import StepPrediction, prediction_for
from lab.runner import disturbances, session
from lab.runner.cases import MakesPlan
from lab.show import table, text_prediction, text_setup
from lab.show.section import (
    WIDE,
    Columns,
    Context,
    Kind,
    Picture,
    Section,
    ShownColumns,
    about_shown,
    is_plain,
    tabled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lab.runner.progress import Watch

REPEAT = click.option(
    "--repeat",
    "-r",
    type=int,
    help="Runs of each case, each in a fresh engine.  [default: 3; 6 if that adds little time]",
)


class NamedRow(Protocol):
    """A row of an experiment: a named tuple of its room."""

    def _asdict(self) -> dict[str, object]: ...


Row = TypeVar("Row", bound=NamedRow)


@dataclass(frozen=True)
class ExperimentTable(Generic[Row]):
    """The results of one setup: the question that they answer, rows in columns, sentences, perhaps
    a picture.

    `rows` makes the rows of records and of a prediction; `conclude` and `draw` get rows and
    records. `draw` also gets the title of the picture and an empty figure. The title begins with
    the `finding` of the rows, with figures, or with the `topic` if they have none.
    """

    name: str
    question: str
    title: str
    columns: Columns[Row]
    rows: Callable[[Sequence[Record], StepPrediction | None], Sequence[Row]]
    conclude: Callable[[Sequence[Row], Sequence[Record]], list[str]]
    draw: Callable[[Sequence[Row], Sequence[Record], str, Figure], None] | None = None
    topic: str = ""  # of the picture
    finding: Callable[[Sequence[Row]], str | None] | None = None
    caption: str = ""  # of the picture
    below: str = ""  # what cells have in their second line, such as "their range"
    is_by_ceilings: bool = True  # its predictions need ceilings


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment.

    `plan` gets an engine's process and the values of the options as keywords. `through_server`
    measures with --url: it gets the context of the command, the address, and the values of all
    options.
    """

    name: str
    chapter: str  # on a page with several kinds of results
    about: str  # the help of the command
    plan: MakesPlan
    options: Sequence[CommandOption]  # besides those of the engine and of the output
    main_options: tuple[str, ...]  # that the help shows first
    tables: tuple[ExperimentTable[Any], ...]
    saves_states: bool = False  # then the plan gets a `folder` for them
    through_server: Callable[[click.Context, str, dict[str, Any]], None] | None = None

    def as_command(self) -> click.Command:
        """The command: options of the experiment, of the engine, of the output, and of a server."""
        options = [*self.options, *ENGINE, SEED, *OUTPUT, DRY_RUN]
        if self.through_server is not None:
            options += [URL, *REACHING, TIMEOUT]

        @click.pass_context
        @with_options(*options)
        def command(context: click.Context, /, url: str | None = None, **options: Any) -> None:
            check_side(given(context), url)
            if url is not None and self.through_server is not None:
                self.through_server(context, url, options)
                return
            with self.planning(options["out"]) as plan:
                carry_out(plan, **of_engine(options))

        make = click.command(self.name, cls=Command, first=self.main_options, help=self.about)
        return make(command)

    def as_kind(self) -> Kind:
        """Its kind of results."""
        return Kind(self.name, self.has_measured, self.sections)

    def has_measured(self, line: object) -> bool:
        """Whether a line of a results file is one of its runs."""
        return is_plain(line) and line.run.experiment == self.name

    def measure(
        self, options: Mapping[str, object], out: StrPath, watch: Watch
    ) -> list[Record]:
        """Plan and measure what a function of the package was asked for."""
        with self.planning(out) as plan, storing(words_of_values(self.as_command(), options)):
            return session.carry_out(lambda worker: plan(worker, **options), out, watch)

    @contextlib.contextmanager
    def planning(self, out: StrPath) -> Iterator[MakesPlan]:
        """The plan's function; if states are saved, with a folder for them, which is deleted at the
        end.
        """
        if not self.saves_states:
            yield self.plan
            return
        with folder_for_states(expanded(out)) as folder:
            yield functools.partial(self.plan, folder=Path(folder))

    def sections(self, records: Sequence[Record], context: Context) -> list[Section]:
        """The results, predicted from ceilings and plain runs: a part for each table and setup."""
        timed = [record for record in records if record.run.is_timed]
        parts: list[Section] = []
        for shown_table in self.tables:
            for label, runs in table.by_setup(timed):
                prediction = prediction_for(
                    runs[0], context.ceilings, [*context.runs, *context.others]
                )
                part = section(shown_table, label, runs, prediction, context.is_page)
                if part.rows:
                    parts.append(part)
        if not parts:
            return []
        first = parts[0]
        return [Section(self.chapter, name=first.name, question=first.question, parts=parts)]


@contextlib.contextmanager
def folder_for_states(out: Path) -> Iterator[str]:
    """A hidden folder on the disk of `out`, which is deleted at the end; elsewhere if that is not
    possible.
    """
    try:
        parents = [path for path in (out.absolute(), *out.absolute().parents) if is_dir(path)]
        str(parents[0]).encode()  # the engine gets the path in UTF-8
        states = tempfile.TemporaryDirectory(prefix=".lab-states-", dir=parents[0])
    except (OSError, UnicodeError):
        states = tempfile.TemporaryDirectory(prefix="lab-states-")
    with states as folder:
        yield folder


def section(
    shown_table: ExperimentTable[Row],
    label: str,
    records: Sequence[Record],
    prediction: StepPrediction | None,
    is_page: bool,
) -> Section:
    """A table, its sentences and the basis of its predictions. On a terminal the first sentence is
    the answer.
    """
    rows = tuple(shown_table.rows(records, prediction))
    cells = tabled(shown_table.columns, rows)
    title, doubt = title_and_doubt(label, records)
    sentences = [doubt]
    if not doubt:
        sentences = shown_table.conclude(rows, records)
    answer = ""
    if sentences and not is_page:
        answer, *sentences = sentences
    pictures = []
    if shown_table.draw is not None:
        subject = text_setup.with_model_and_machine(title, records)
        heading = f"{headline(shown_table, rows, records)}\n{subject}"
        draw = functools.partial(shown_table.draw, rows, records, heading)
        pictures.append(Picture(shown_table.name, shown_table.caption, draw, WIDE))
    return Section(
        title,
        about_shown(shown_table.title, shown_table.columns, cells["columns"]),
        shown_table.below,
        name=shown_table.name,
        question=shown_table.question,
        answer=answer,
        **cells,
        sentences=[*sentences, *basis(shown_table, prediction, cells["columns"])],
        pictures=pictures,
        data=lambda: {
            "rows": [
                {"experiment": shown_table.name, "setup": label, **row._asdict()}
                for row in rows
            ]
        },
    )


def headline(
    shown_table: ExperimentTable[Row], rows: Sequence[Row], records: Sequence[Record]
) -> str:
    """What the picture shows: its finding, or else its topic."""
    if shown_table.finding is None or not rows or is_doubtful(records):
        return shown_table.topic
    return shown_table.finding(rows) or shown_table.topic


def title_and_doubt(label: str, records: Sequence[Record]) -> tuple[str, str]:
    """The title of a setup's results, and why nothing is concluded from them; "" if it may be."""
    n_disturbed = disturbances.n_disturbed(records)
    n_runs = f"{len(records)} runs"
    doubt = ""
    if is_doubtful(records):
        doubt = shown.no_conclusions(n_disturbed, n_runs)
    return shown.titled(label, n_disturbed, n_runs), doubt


def is_doubtful(records: Sequence[Record]) -> bool:
    """Whether the median of some case is unreliable, so that nothing is concluded."""
    by_case = grouped(records, lambda record: run_name(record.run))
    return any(map(disturbances.is_doubtful, by_case.values()))


def basis(
    shown_table: ExperimentTable[Row],
    prediction: StepPrediction | None,
    columns: ShownColumns,
) -> list[str]:
    """What the predictions of a table come from, in a sentence, where they need ceilings."""
    if not shown_table.is_by_ceilings:
        return []
    if prediction is None:
        return ["No predictions: measure the ceilings first (lab ceilings)."]
    if any("predicted" in column.heading for column in columns):
        return [text_prediction.basis(prediction)]
    return []
