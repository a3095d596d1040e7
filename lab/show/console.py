"""The console: text, JSON, tables and progress; with colours only on a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Never

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import printable
from lab.runner.progress import IN_A_RUN, KERNEL, WARMING_UP, ShowStatus, Status, duration
from lab.show.cells import LONG_TEXT, Cell, Column

if TYPE_CHECKING:
    from lab.show.so_far import SoFar

NARROWEST_TEXT = 12  # smallest width of a column of text that may wrap
UNBOUNDED = 10_000  # a width that no table has
EVERY_S = 10  # seconds between two lines of progress if the output is not a terminal
IN_PLACE_EVERY_S = 0.5  # seconds between two changes of a line of progress on a terminal
KEPT_LETTERS = "\n\t\u200c\u200d"  # joiners: of scripts and emoji


class Terminal(Console):
    """A console that may show only what matters most.

    `details` says how to see all; "" shows all. `end_lines` more lines follow the sections.
    """

    details = ""
    end_lines = 1

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich, but no text (a file's name, a model's) controls the terminal."""
        safe = []
        for printed in objects:
            safe.append(
                printable(printed, KEPT_LETTERS) if isinstance(printed, str) else printed
            )
        super().print(*safe, **options)

    def replace_line(self, text: str = "") -> None:
        """Show a text on a terminal, in place of the last one that was shown so."""
        self.file.write(f"\r\x1b[2K{printable(text)[: self.width - 1]}")
        self.file.flush()


def console(stderr: bool = False, details: str = "") -> Terminal:
    """A console that prints text unchanged: no markup, no emoji. For `details` see Terminal."""
    options: dict[str, Any] = {
        "markup": False,
        "emoji": False,
        "highlight": False,
        "force_jupyter": False,
    }
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty():  # a notebook claims to know colours
        columns = os.environ.get("COLUMNS", "")
        options["width"] = int(columns) if columns.isdecimal() else 100
        options["force_terminal"] = False
    terminal = Terminal(stderr=stderr, soft_wrap=True, **options)
    terminal.details = details
    return terminal


class Grid:
    """A table without lines. Columns that do not fit are hidden, and named below it."""

    def __init__(self, *columns: Column[Never]) -> None:
        self.columns = columns
        self.rows: list[Sequence[Cell]] = []

    def add_row(self, *cells: Cell | str) -> None:
        self.rows.append([Cell(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.fitting(console, options)
        yield self.table(shown)
        names = [
            " ".join(column.heading.split())
            for index, column in enumerate(self.columns)
            if index not in shown
        ]
        if names:
            hidden = f"Columns left out (widen the terminal, or --json): {', '.join(names)}"
            yield Text(hidden, style="dim")

    def fitting(self, console: Console, options: ConsoleOptions) -> list[int]:
        """The columns that fit into the width of a console."""
        shown = list(range(len(self.columns)))
        unbounded = options.update(max_width=UNBOUNDED)
        priorities = [column.priority_among(self.columns) for column in self.columns]
        for index in sorted(shown[1:], key=lambda index: (priorities[index], -index)):
            narrowest = self.table(shown, is_narrowest=True)
            if Measurement.get(console, unbounded, narrowest).maximum <= options.max_width:
                break
            shown.remove(index)
        return shown

    def table(self, shown: Sequence[int], is_narrowest: bool = False) -> Table:
        """These columns, in the least width if it `is_narrowest`. Lower lines are dimmed."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index in shown:
            column = self.columns[index]
            wraps = column.kind is LONG_TEXT
            table.add_column(
                column.heading,
                overflow="fold",
                no_wrap=not wraps,
                min_width=NARROWEST_TEXT if wraps else None,
                max_width=NARROWEST_TEXT if wraps and is_narrowest else None,
                justify="left" if column.is_text else "right",
            )
        for cells in self.rows:
            table.add_row(*(_text(cells[index]) for index in shown))
        return table


def _text(cell: Cell) -> Text:
    return Text(cell.value) + Text("".join(f"\n{line}" for line in cell.below), style="dim")


def print_json(value: object) -> None:
    """Print one JSON document on stdout, in ASCII, which every encoding can write.

    NaN becomes null.
    """
    print(json.dumps(_without_nan(value), indent=2))


def _without_nan(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    is_nan = isinstance(value, float) and not math.isfinite(value)
    return None if is_nan else value


@contextmanager
def transfer(err: Terminal) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show the progress of a download or of writing a file.

    Yields the function that takes a name, the bytes done, and all bytes (None: unknown).
    """
    transfers = _Transfers(err)
    yield transfers.watch
    if transfers.started and err.is_terminal:
        err.print()


class _Transfers:
    """Files on their way: when each began, and when its progress was last shown."""

    def __init__(self, err: Terminal) -> None:
        self.err = err
        self.started: dict[str, tuple[float, int]] = {}  # time, and bytes done before it
        self.shown_at: dict[str, float] = {}

    def watch(self, name: str, n_done: int, n_total: int | None) -> None:
        now = time.monotonic()
        started_at, n_before = self.started.setdefault(name, (now, n_done))
        is_finished = n_total is not None and n_done >= n_total
        every_s = IN_PLACE_EVERY_S if self.err.is_terminal else EVERY_S
        if now - self.shown_at.get(name, -math.inf) < every_s and not is_finished:
            return
        self.shown_at[name] = now
        line = f"{name}: {n_done / 1e6:,.0f}"
        if n_total is not None:
            line += f" of {n_total / 1e6:,.0f}"
        line += " MB"
        if n_done == 0 and n_total is None:
            line = f"{name} ..."
        if now > started_at and n_done > n_before:
            bytes_per_s = (n_done - n_before) / (now - started_at)
            line += f" at {bytes_per_s / 1e6:,.0f} MB/s"
            if n_total is not None and not is_finished:
                line += f", {duration((n_total - n_done) / bytes_per_s)} left"
        if self.err.is_terminal:
            self.err.replace_line(line)
        else:
            self.err.print(line)


@contextmanager
def progress(
    err: Terminal,
    stream_to: Console | None,
    describe_run: Callable[[Any], str],
    table: SoFar | None = None,
) -> Iterator[tuple[ShowStatus, Any]]:
    """Show progress. Yields two functions.

    The first takes a Status, the second a finished Record or RequestRecord. With `stream_to` the
    generated text is shown there. With `table` announcements are shown too, and on a terminal the
    table of the runs so far.
    """
    session = _Progress(err, stream_to, describe_run, table)
    if not session.is_in_place:
        yield session.watch, session.finished
        return
    with session.live:
        yield session.watch, session.finished


class _Progress:
    """The progress of a session: what it did last, and how many runs have ended."""

    def __init__(
        self,
        err: Terminal,
        stream_to: Console | None,
        describe_run: Callable[[object], str],
        table: SoFar | None,
    ) -> None:
        self.err = err
        self.table = table
        self.rows = SegmentLines([])  # the table so far as it is shown
        self.stream_to = stream_to
        self.describe_run = describe_run
        can_replace = err.is_terminal and not err.is_dumb_terminal
        self.is_in_place = can_replace and stream_to is None
        self.live = Live(
            console=err,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.latest = Status("starting")
        self.n_finished = 0
        self.notes: set[str] = set()
        self.kernel_shown_at = -math.inf

    def watch(self, status: Status) -> None:
        before = self.latest
        self.latest = status
        if status.note:
            self._show_note(printable(f"Note: {status.note}"))
        elif status.announcement:
            if self.table is not None:
                self.err.print(status.announcement)
        elif self.is_in_place:
            self._show_in_place(f"{status.line}{self._time_left()}")
        elif self.stream_to and status.doing in IN_A_RUN:
            self._stream(status, before, self.stream_to)
        elif status.doing.startswith(KERNEL):
            if time.monotonic() - self.kernel_shown_at >= EVERY_S:
                self.err.print(f"{status.doing}{self._time_left()}")
                self.kernel_shown_at = time.monotonic()
        elif self.n_finished == 0 and status.doing not in (*IN_A_RUN, before.doing):
            self.err.print(f"{status.doing} ...")  # the start of the first engine

    def _show_note(self, note: str) -> None:
        """Print a note once: every engine of a long session may say the same of the machine."""
        if note not in self.notes:
            self.notes.add(note)
            self.err.print(Text(note, style="bold red"))

    def _stream(self, status: Status, before: Status, out: Console) -> None:
        """Print generated text, below a heading for each run."""
        is_new_run = (status.case, status.repeat) != (before.case, before.repeat)
        if is_new_run or before.doing == WARMING_UP:
            case = status.case.name if status.case else ""
            repeat = (status.repeat or 0) + 1
            out.print(Text(f"\n--- {case}, repeat {repeat}", style="bold"))
        out.print(printable(status.text, KEPT_LETTERS), end="")

    def _show_in_place(self, line: str) -> None:
        """The table so far and a line, in place of what was shown before."""
        text = Text(printable(line)[: self.err.width - 1], no_wrap=True)
        self.live.update(Group(self.rows, text), refresh=True)

    def finished(self, record: Record | RequestRecord) -> None:
        if self.is_in_place and self.table is not None:
            self.table.add(record)
            self._draw_table(self.table)
        if self.is_in_place or record.is_warmup:
            return
        self.n_finished += 1
        if self.stream_to:
            self.stream_to.print()
        self.err.print(f"{self.describe_run(record)}{self._time_left()}")

    def _draw_table(self, table: SoFar) -> None:
        """Draw it once: the line below it changes twice a second."""
        grid = table.grid()
        if grid is None:
            return
        lines = self.err.render_lines(grid, pad=False)
        self.rows = SegmentLines(lines, new_lines=True)

    def _time_left(self) -> str:
        left_s = self.latest.left_s
        return f"; about {duration(left_s)} left" if left_s else ""
