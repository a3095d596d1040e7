"""Progress of a measurement, from the tokens that the engine counts: what it does, how fast, the
remaining time."""

from __future__ import annotations

import codecs
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core.lists import plural
from lab.process.wire import Progress

if TYPE_CHECKING:
    from lab.runner.cases import Case


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

WARMING_UP = "warming up"
PREFILL = "prefill"
DECODE = "decode"
ANSWERING = "answering"  # a server's prefill and decode, which look alike before the end
IN_A_RUN = (PREFILL, DECODE, ANSWERING)  # the values of `doing` during a measured run
KERNEL = "kernel"  # the beginning of `doing` while the ceilings are measured: kernel 3 of 168
LOOK_S = 0.5  # interval of status messages while a server answers


def duration(seconds: float) -> str:
    """Such as `42 s`, `3 min 20 s`, `1 h 5 min`."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


@dataclass(frozen=True)
class Cost:
    """Seconds per prefilled and per generated token."""

    prefill_s: float
    decode_s: float


class Reporter:
    """Calls `watch` with a Status. `todo` is the loop's own list; `n_tokens`: what a case prefills
    and generates."""

    def __init__(
        self,
        watch: ShowStatus,
        todo: Sequence[tuple[int, Case]],
        n_tokens: Callable[[Case], tuple[int, int]],
    ) -> None:
        self.watch = watch
        self.n_runs = len(todo)
        self._todo = todo
        self._n_tokens = functools.cache(n_tokens)
        self._costs: dict[Case, Cost] = {}
        self._n_learned = 0
        self._forecast_state = (-1, -1)  # the list and the knowledge that the forecast is of
        self._forecast_s = 0.0

    def learn(self, case: Case, prefill_ns: int, decode_ns: int, n_chosen: int) -> None:
        """Use a run's time per token for the forecast; decode chose `n_chosen` tokens."""
        self._n_learned += 1
        n_prefilled = self._n_tokens(case)[0]
        if not n_prefilled or not prefill_ns:
            return
        prefill_s = prefill_ns / n_prefilled / 1e9
        decode_s = decode_ns / n_chosen / 1e9 if decode_ns else prefill_s
        self._costs[case] = Cost(prefill_s, decode_s)

    def progress_watcher(
        self, case: Case, repeat: int, warmup: bool, pieces: Sequence[bytes]
    ) -> Callable[[Progress], None]:
        """A function to call with a run's progress. With `pieces` (the bytes of each token) it
        reports the text too."""
        n_prefill, n_gen = self._n_tokens(case)
        rates = _Rates(n_prefill)
        text_of = _Streamed(pieces if not warmup else (), n_gen)

        def look(progress: Progress) -> None:
            rates.see(progress)
            doing = DECODE if rates.is_decoding else PREFILL
            n_generated = len(progress.token_ids)
            rest_s = self.seconds(n_prefill - progress.n_prefilled, n_gen - n_generated, case)
            if rest_s is not None:
                rest_s = max(0.0, rest_s - rates.since_change_s)
            text = text_of.new_text(progress)
            shown = WARMING_UP if warmup else doing
            self.report_status(shown, case, repeat, rates.rate_tps, rest_s, text)

        return look

    def answer_watcher(self, case: Case, repeat: int, warmup: bool) -> Callable[[], None]:
        """A function to call repeatedly while a server answers."""
        started = time.monotonic()
        reported_at = -math.inf
        answer_s = self.seconds(*self._n_tokens(case), case)

        def look() -> None:
            nonlocal reported_at
            now = time.monotonic()
            if now - reported_at < LOOK_S:
                return
            reported_at = now
            rest_s = None
            if answer_s is not None:
                rest_s = max(0.0, answer_s - (now - started))
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
        if rest_s is not None and self._costs:
            left_s = rest_s + self._forecast_of_others()
        n_done = self.n_runs - len(self._todo)
        if doing in IN_A_RUN:
            n_done -= 1
        self.watch(Status(doing, case, repeat, rate_tps, n_done, self.n_runs, left_s, text))

    def _forecast_of_others(self) -> float:
        """The seconds of the runs in the list, computed anew when a run was added, ended or
        learned."""
        state = (len(self._todo), self._n_learned)
        if state != self._forecast_state:
            self._forecast_state = state
            self._forecast_s = 0.0
            for _, case in self._todo:
                self._forecast_s += self.seconds(*self._n_tokens(case), case) or 0.0
        return self._forecast_s

    def seconds(self, n_prefill: int, n_gen: int, case: Case) -> float | None:
        """Forecast in seconds for these tokens, from the most similar case so far; None before the
        first run."""

        def difference(learned: Case) -> tuple[bool, list[float]]:
            sizes = zip(self._n_tokens(learned), self._n_tokens(case), strict=True)
            return learned != case, [max(pair) / max(1, min(pair)) for pair in sizes]

        if not self._costs:
            return None
        cost = self._costs[min(self._costs, key=difference)]
        return n_prefill * cost.prefill_s + n_gen * cost.decode_s


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


def notebook_line() -> Callable[[str], None]:
    """A function that shows a text and replaces its last one; outside a notebook it does
    nothing."""
    kernel = sys.modules.get("ipykernel.zmqshell")
    if kernel is None or not kernel.ZMQInteractiveShell.initialized():
        return lambda text: None
    from IPython.display import display

    handle: list[Any] = []

    def show(text: str) -> None:
        shown = {"text/plain": text}
        if handle:
            handle[0].update(shown, raw=True)
        else:
            handle.append(display(shown, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    return show


@contextmanager
def in_notebook() -> Iterator[Callable[[Status], None]]:
    """A function that shows statuses in a notebook; at the end the line shows the total time."""
    show = notebook_line()
    started = time.monotonic()
    n_runs = 0

    def watch(status: Status) -> None:
        nonlocal n_runs
        n_runs = status.n_runs
        left = f"; {duration(status.left_s)} left" if status.left_s is not None else ""
        show(f"{status.line}{left}")

    yield watch
    what = plural(n_runs, "run") if n_runs else "done"
    show(f"{what} in {duration(time.monotonic() - started)}")
