"""Progress of a measurement, from the tokens that the engine counts: what it does, how fast, the
remaining time."""

from __future__ import annotations

import codecs
import functools
import logging
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lab.core.lists import plural
from lab.process.wire import Progress
from lab.runner.forecast import Forecast, WorkOf, work_of_tokens
from lab.runner.in_flight import RunInFlight

if TYPE_CHECKING:
    from lab.runner.cases import Case
    from lab.runner.run_list import PlannedRun, RunList


@dataclass(frozen=True)
class Status:
    """What the lab is doing now. Times are in seconds; None: not known yet."""

    doing: str  # such as loading the model, warming up, prefill, decode, answering
    case: Case | None = None
    repeat: int | None = None
    rate_tps: float | None = None
    n_runs_done: int = 0
    n_runs: int = 0
    left_s: float | None = None
    text: str = ""  # generated since the last status, if text is streamed
    part: str = ""  # the part of a session with several
    note: str = ""  # a message that must stay visible
    announcement: str = ""  # how long the runs will take, said once

    @property
    def line(self) -> str:
        """The status as a line of text."""
        line = f"{self.part}: " if self.part else ""
        if self.n_runs:
            line += f"run {min(self.n_runs, self.n_runs_done + 1)} of {self.n_runs}: "
        line += self.doing
        if self.case is not None:
            line += f", {self.case.name}"
        if self.rate_tps:
            n_decimals = 0 if self.rate_tps >= 10 else 1
            line += f", {self.rate_tps:,.{n_decimals}f} tokens/s"
        return line


ShowStatus = Callable[[Status], None]
Watch = ShowStatus | bool | None
"""What a public function shows its progress to; None or True: where it can be seen."""

LOG = logging.getLogger("lab")

WARMING_UP = "warming up"
PREFILL = "prefill"
DECODE = "decode"
ANSWERING = "answering"  # a server's prefill and decode, which look alike before the end
IN_A_RUN = (PREFILL, DECODE, ANSWERING)  # the values of `doing` during a measured run
KERNEL = "kernel"  # the beginning of `doing` while the ceilings are measured: kernel 3 of 168
LOOK_S = 0.5  # interval of status messages while a server answers
SHORTEST_ANNOUNCED_S = 10  # shorter sessions are not announced


def duration(seconds: float) -> str:
    """Such as `42 s`, `3 min 20 s`, `1 h 5 min`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


class Reporter:
    """Calls `watch` with a Status. `runs` are those of the loop, which takes them.

    `n_tokens`: what a case prefills and generates; `work_of` its work, for the forecast.

    `expected_runs` gives the runs that will probably be made: those that are left, unless the loop
    says otherwise.
    """

    def __init__(
        self,
        watch: ShowStatus,
        runs: RunList,
        n_tokens: Callable[[Case], tuple[int, int]],
        work_of: WorkOf | None = None,
    ) -> None:
        self.watch = watch
        self.forecast = Forecast(work_of or work_of_tokens(n_tokens))
        self.expected_runs: Callable[[], Sequence[PlannedRun]] = lambda: list(runs)
        self._runs = runs
        self._n_tokens = functools.cache(n_tokens)
        self._started = time.monotonic()
        self._round: int | None = None
        self._n_rounds = 0  # begun
        self._runs_s = 0.0  # the time of the runs so far
        self._run_started: float | None = None  # the current one, if it is no warm-up
        self._n_learned = 0
        self._forecast_state = (-1, -1)  # the list and the knowledge that the forecast is of
        self._forecast_s = (0.0, 0.0)  # of cases that were run, and of the others
        self._slowness = 1.0  # of the run in flight
        self._is_announced = False
        self.ends_at = math.inf  # when the loop's budget ends, by time.monotonic()

    def begin_round(self, number: int) -> None:
        """Take note of a round's begin: each has the same work beside its runs."""
        self._round = number
        self._n_rounds += 1

    def learn(
        self,
        case: Case,
        prefill_ns: int,
        decode_ns: int,
        n_chosen: int,
        is_warmup: bool = False,
    ) -> None:
        """Use the times of a run for the forecast; its decode chose `n_chosen` tokens."""
        self._n_learned += 1
        self._run_started = None
        self._slowness = 1.0
        if not is_warmup:
            self._runs_s += (prefill_ns + decode_ns) / 1e9
        n_planned = self._n_tokens(case)[1]
        decode_s = decode_ns / 1e9
        if n_chosen:
            decode_s *= n_planned / n_chosen
        self.forecast.learn(case, prefill_ns / 1e9, decode_s)

    def announce(self) -> None:
        """Say once how long the runs in the list will take, after the first warm-up."""
        if self._is_announced:
            return
        self._is_announced = True
        forecast_s = self._forecast_of_list()
        left_s = self._within_budget(forecast_s)
        if left_s >= SHORTEST_ANNOUNCED_S:
            runs = plural(len(self.expected_runs()), "run")
            message = f"{runs}: about {duration(left_s)}"
            if left_s < forecast_s:
                message = f"at most {message}"
            self.watch(Status(message, left_s=left_s, announcement=message))

    def progress_watcher(
        self, case: Case, repeat: int, warmup: bool, pieces: Sequence[bytes]
    ) -> Callable[[Progress], None]:
        """A function to call with a run's progress. With `pieces` (the bytes of each token) it
        reports the text too."""
        n_prefill, n_gen = self._n_tokens(case)
        rates = _Rates(n_prefill)
        seconds = self.forecast.seconds(case)
        run = None
        if seconds is not None:
            run = RunInFlight(seconds, n_prefill, n_gen, self.forecast.linear(case))
        text_of = _Streamed(pieces if not warmup else (), n_gen)
        started = time.monotonic()
        self._run_started = None if warmup else started

        def look(progress: Progress) -> None:
            rates.see(progress)
            doing = DECODE if rates.is_decoding else PREFILL
            rest_s = None
            if run is not None:
                elapsed_s = time.monotonic() - started
                rest_s = run.rest_s(progress, elapsed_s)
                self._slowness = run.slowness(elapsed_s)
            text = text_of.new_text(progress)
            shown = WARMING_UP if warmup else doing
            self.report_status(shown, case, repeat, rates.rate_tps, rest_s, text)

        return look

    def answer_watcher(self, case: Case, repeat: int, warmup: bool) -> Callable[[], None]:
        """A function to call repeatedly while a server answers."""
        started = time.monotonic()
        reported_at = -math.inf
        seconds = self.forecast.seconds(case)

        def look() -> None:
            nonlocal reported_at
            now = time.monotonic()
            if now - reported_at < LOOK_S:
                return
            reported_at = now
            rest_s = None
            if seconds is not None:
                rest_s = max(0.0, sum(seconds) - (now - started))
            doing = WARMING_UP if warmup else ANSWERING
            self.report_status(doing, case, repeat, rest_s=rest_s)

        return look

    def report_status(
        self,
        doing: str,
        case: Case | None = None,
        repeat: int | None = None,
        rate_tps: float | None = None,
        rest_s: float | None = None,
        text: str = "",
    ) -> None:
        """Report one status. `rest_s` is the remaining time of the current run; adds the forecast
        for the others."""
        left_s = None
        if rest_s is not None and self.forecast.is_possible:
            left_s = self._within_budget(rest_s + self._forecast_of_list())
        n_done = self._runs.n_taken
        if doing in IN_A_RUN:
            n_done -= 1
        n_runs = self._runs.n_runs
        self.watch(Status(doing, case, repeat, rate_tps, n_done, n_runs, left_s, text))

    def _within_budget(self, seconds: float) -> float:
        return min(seconds, max(0.0, self.ends_at - time.monotonic()))

    def _forecast_of_list(self) -> float:
        """The seconds of the expected runs, computed anew when a run was added, ended or learned.

        A case that was not run yet is as much slower than its forecast as the run in flight.
        """
        state = (len(self._runs), self._n_learned)
        if state != self._forecast_state:
            self._forecast_state = state
            self._forecast_s = self._seconds_of(self.expected_runs())
        run_s, computed_s = self._forecast_s
        return run_s + self._slowness * computed_s

    def _seconds_of(self, runs: Sequence[PlannedRun]) -> tuple[float, float]:
        """The seconds of cases that were run, and of what a round takes beside its runs; those of
        the other cases."""
        run_s = 0.0
        computed_s = 0.0
        for _, case in runs:
            seconds = sum(self.forecast.seconds(case) or (0.0,))
            if self.forecast.was_run(case):
                run_s += seconds
            else:
                computed_s += seconds
        rounds_to_begin = {number for number, _ in runs} - {self._round}
        now = time.monotonic() if self._run_started is None else self._run_started
        beside_runs_s = now - self._started - self._runs_s
        run_s += len(rounds_to_begin) * beside_runs_s / max(1, self._n_rounds)
        return run_s, computed_s


class _Rates:
    """The rate of the current phase of a run, from its progress."""

    def __init__(self, n_prefill: int) -> None:
        self.n_prefill = n_prefill
        self.rate_tps: float | None = None
        self.is_decoding = False  # decode at the stops of a sweep is not reported
        self.since_change_s = 0.0
        self._started = time.monotonic()
        self._changed = self._started
        self._last = Progress(0, ())
        self._first_tokens: tuple[float, int] | None = None  # when seen, and how many

    def see(self, progress: Progress) -> None:
        now = time.monotonic()
        n_generated = len(progress.token_ids)
        self.is_decoding = n_generated > 0 and progress.n_prefilled >= self.n_prefill
        if progress != self._last:
            if not self.is_decoding:
                self.rate_tps = progress.n_prefilled / (now - self._started)
            elif self._first_tokens is None:
                self._first_tokens = (now, n_generated)
                self.rate_tps = None
            else:
                first_at, n_first = self._first_tokens
                self.rate_tps = (n_generated - n_first) / (now - first_at)
            self._changed = now
            self._last = progress
        self.since_change_s = now - self._changed


class _Streamed:
    """The text of a run, piece by piece: the bytes of its tokens as complete letters."""

    def __init__(self, pieces: Sequence[bytes], n_gen: int) -> None:
        self._pieces = pieces
        self._n_gen = n_gen
        self._n_shown = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def new_text(self, progress: Progress) -> str:
        if not self._pieces:
            return ""
        token_ids = progress.token_ids[self._n_shown :]
        self._n_shown = len(progress.token_ids)
        new_bytes = b"".join(self._pieces[token_id] for token_id in token_ids)
        return self._decoder.decode(new_bytes, final=self._n_shown == self._n_gen)


def shows_lines() -> Callable[[str], None] | None:
    """A function that shows a text and replaces its last one, in a notebook or on a terminal; None
    elsewhere."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    if kernel is not None and kernel.ZMQInteractiveShell.initialized():
        return _notebook_line()
    return _on_terminal if sys.stderr is not None and sys.stderr.isatty() else None


class NotebookLine(Protocol):
    """A line of a notebook's output."""

    def update(self, shown: object, /, raw: bool) -> object: ...


def _notebook_line() -> Callable[[str], None]:
    from IPython.display import display

    handle: list[NotebookLine] = []

    def show(text: str) -> None:
        shown = {"text/plain": text}
        if handle:
            handle[0].update(shown, raw=True)
        else:
            handle.append(display(shown, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    return show


def _on_terminal(text: str) -> None:
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"\r\033[K{text[:width]}")
    sys.stderr.flush()


@contextmanager
def shown_to(watch: Watch = None) -> Iterator[ShowStatus]:
    """What a public function tells its statuses: `watch`, or nothing if that is False.

    Otherwise a line in a notebook or on a terminal, which at the end has the total time; elsewhere
    the log gets the estimate and each run.
    """
    show = shows_lines()
    if watch is not None and not isinstance(watch, bool):
        yield watch
    elif watch is False:
        yield lambda status: None
    elif show is None:
        yield _Logged().watch
    else:
        yield from _line_of_statuses(show)


def _line_of_statuses(show: Callable[[str], None]) -> Iterator[ShowStatus]:
    started = time.monotonic()
    n_runs = 0

    def watch(status: Status) -> None:
        nonlocal n_runs
        n_runs = status.n_runs
        left = f"; {duration(status.left_s)} left" if status.left_s is not None else ""
        show(f"{status.line}{left}")

    try:
        yield watch
        what = plural(n_runs, "run") if n_runs else "done"
        show(f"{what} in {duration(time.monotonic() - started)}")
    finally:
        if show is _on_terminal:
            sys.stderr.write("\n")


class _Logged:
    """Statuses as lines of the log `lab`: the estimate, and each run that has ended."""

    def __init__(self) -> None:
        self.n_runs_done = 0

    def watch(self, status: Status) -> None:
        if status.announcement:
            LOG.info(status.announcement)
        if status.n_runs_done > self.n_runs_done:
            self.n_runs_done = status.n_runs_done
            left = f", {duration(status.left_s)} left" if status.left_s is not None else ""
            LOG.info("run %d of %d has ended%s", status.n_runs_done, status.n_runs, left)
