"""The console: text, JSON, tables and progress; with colours only on a terminal."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import printable
from lab.runner.progress import IN_A_RUN, KERNEL, WARMING_UP, ShowStatus, Status, duration

WRAPPED = {
    *(
        "settings",
        "note",
        "what it is",
        "claim",
        "verdict",
        "figures",
        "claims",
        "what it can do",
        "answer",
    ),
    "as seen in",
}
"""Headings of columns whose text may wrap. Other columns never wrap."""

TEXT_COLUMNS = {
    *(
        "name",
        "from",
        "figure",
        "kernel",
        "type",
        "buffer",
        "phase",
        "limit",
        "part",
        "load",
        "requests",
    ),
    *("faster for answers of", "operation", "largest"),
    *WRAPPED,
}
"""Headings of columns that hold text."""

GIVES_WAY = (
    "TTFT\ns",  # if there is a column of prefill, which implies it
    *("prefill\n% of E2E", "prefill\ntokens/s", "interval", "n", "buffer", "threads"),
    *("intensity", "KV cache\nMB", "KV cache MB", "TFLOP/s", "tokens/s", "decode\ntokens/s"),
)
"""Headings of the columns that a narrow terminal hides, in this order. Other columns imply the first ones."""

KEPT = ("E2E\ns", "E2E s")
"""Headings of columns that are hidden last: the time of the whole request is what people want to know."""

NARROWEST_TEXT = 12  # smallest width of a column of text that may wrap
EVERY_S = 10  # seconds between two lines of progress if the output is not a terminal
KEPT_LETTERS = "\n\t\u200c\u200d"  # joiners: of scripts and emoji


class Terminal(Console):
    """A console that shows only the first lines below a table. `details` says how to see all; "" shows all."""

    details = ""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich, but no text (a file's name, a model's) controls the terminal."""
        super().print(
            *(printable(one, KEPT_LETTERS) if isinstance(one, str) else one for one in objects),
            **options,
        )

    def replace_line(self, text: str = "") -> None:
        """Shows a text on a terminal, in place of the last one that was shown so."""
        self.file.write(f"\r\x1b[2K{printable(text)[: self.width - 1]}")
        self.file.flush()


def console(stderr: bool = False, details: str = "") -> Terminal:
    """A console that prints text unchanged: no markup, no emoji. For `details` see Terminal."""
    plain: dict[str, Any] = {
        "markup": False,
        "emoji": False,
        "highlight": False,
        "force_jupyter": False,
    }
    if not (sys.stderr if stderr else sys.stdout).isatty():  # a notebook claims to know colours
        columns = os.environ.get("COLUMNS", "")
        plain |= {"width": int(columns) if columns.isdigit() else 100, "force_terminal": False}
    made = Terminal(stderr=stderr, soft_wrap=True, **plain)
    made.details = details
    return made


class Grid:
    """A table without lines. Text is left-aligned. Columns that do not fit are hidden, and named below it."""

    def __init__(self, *headings: str) -> None:
        self.headings = headings
        self.rows: list[tuple[RenderableType, ...]] = []

    def add_row(self, *cells: RenderableType) -> None:
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def rank(index: int) -> tuple[int, int]:
            """The order of hiding: first the columns of GIVES_WAY, then numbers from the right, then text."""
            heading = self.headings[index]
            if heading in GIVES_WAY and (heading != GIVES_WAY[0] or "prefill\ns" in self.headings):
                return GIVES_WAY.index(heading), 0
            return len(GIVES_WAY) + (2 if heading in KEPT else heading in TEXT_COLUMNS), -index

        kept = list(range(len(self.headings)))
        unbounded = options.update(max_width=10_000)
        order = sorted(kept[1:], key=rank)
        while (
            order
            and Measurement.get(console, unbounded, self._table(kept, True)).maximum
            > options.max_width
        ):
            kept.remove(order.pop(0))
        yield self._table(kept)
        if left_out := [
            " ".join(name.split()) for i, name in enumerate(self.headings) if i not in kept
        ]:
            yield Text(
                f"Columns left out (widen the terminal, or --json): {', '.join(left_out)}",
                style="dim",
            )

    def _table(self, columns: Sequence[int], is_narrowest: bool = False) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in (self.headings[index] for index in columns):
            style: dict[str, Any] = {
                "justify": "left" if heading in TEXT_COLUMNS else "right",
                "no_wrap": True,
            }
            if heading in WRAPPED:
                most = NARROWEST_TEXT if is_narrowest else None
                style |= {"no_wrap": False, "min_width": NARROWEST_TEXT, "max_width": most}
            table.add_column(heading, overflow="fold", **style)
        for cells in self.rows:
            table.add_row(*(cells[index] for index in columns))
        return table


def print_json(value: object) -> None:
    """Prints one JSON document on stdout, in ASCII, which every encoding can write. NaN becomes null."""

    def without_nan(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nan(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [without_nan(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(without_nan(value), indent=2))


@contextmanager
def transfer(err: Terminal) -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows the progress of a download or of writing a file. Yields the function that takes the counts."""
    started: dict[str, tuple[float, int]] = {}
    printed_at: dict[str, float] = {}

    def watch(what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        since, first = started.setdefault(what, (now, done))
        finished = total is not None and done >= total
        if (
            now - printed_at.get(what, -math.inf) < (0.5 if err.is_terminal else EVERY_S)
            and not finished
        ):
            return
        printed_at[what] = now
        rate = (done - first) / (now - since) if now > since else 0.0
        size = f" of {total / 1e6:,.0f}" if total is not None else ""
        left = (
            f", {duration((total - done) / rate)} left"
            if total is not None and rate and not finished
            else ""
        )
        speed = f" at {rate / 1e6:,.0f} MB/s" if rate else ""
        show = err.replace_line if err.is_terminal else err.print
        show(f"{what}: {done / 1e6:,.0f}{size} MB{speed}{left}")

    yield watch
    if started and err.is_terminal:
        err.print()


@contextmanager
def progress(
    err: Terminal, stream_to: Console | None, describe_run: Callable[[Any], str]
) -> Iterator[tuple[ShowStatus, Any]]:
    """Shows progress. Yields two functions: the first takes a Status, the second a finished Record or RequestRecord."""
    in_place = err.is_terminal and not stream_to
    latest = Status("starting")
    n_finished = 0
    printed_at = -math.inf

    def left() -> str:
        return f"; about {duration(latest.left_s)} left" if latest.left_s else ""

    def watch(status: Status) -> None:
        nonlocal latest, printed_at
        before = latest
        latest = status
        if status.note:
            err.print(f"{chr(10) * in_place}Note: {status.note}", style="bold red")
        elif in_place:
            err.replace_line(f"{status.line}{left()}")
        elif stream_to and status.doing in IN_A_RUN:
            if (status.case, status.repeat) != (
                before.case,
                before.repeat,
            ) or before.doing == WARMING_UP:
                head = f"\n--- {status.case.name if status.case else ''}, repeat {(status.repeat or 0) + 1}"
                stream_to.print(Text(head, style="bold"))
            stream_to.print(printable(status.text, KEPT_LETTERS), end="")
        elif status.doing.startswith(KERNEL):
            if time.monotonic() - printed_at >= EVERY_S:
                err.print(f"{status.doing}{left()}")
                printed_at = time.monotonic()
        elif (
            status.doing not in (*IN_A_RUN, before.doing) and not n_finished
        ):  # the start of the first engine
            err.print(f"{status.doing} ...")

    def finished(record: Record | RequestRecord) -> None:
        nonlocal n_finished
        if in_place or record.is_warmup:
            return
        n_finished += 1
        if stream_to:
            stream_to.print()
        err.print(f"{describe_run(record)}{left()}")

    try:
        yield watch, finished
    finally:
        if in_place:
            err.replace_line()
