"""Progress of a measurement, from the tokens that the engine counts: what it does, how fast, the remaining time."""

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
    def words(self) -> str:
        """The status as a line of text."""
        what = self.doing if self.case is None else f"{self.doing}, {self.case.name}"
        rate = (
            f", {self.rate_tps:,.{0 if self.rate_tps >= 10 else 1}f} tokens/s"
            if self.rate_tps
            else ""
        )
        run = (
            f"run {min(self.n_runs, self.n_runs_done + 1)} of {self.n_runs}: "
            if self.n_runs
            else ""
        )
        return f"{self.part}: " * bool(self.part) + run + what + rate


ShowStatus = Callable[[Status], None]

WARMING_UP = "warming up"
ANSWERING = (
    "answering"  # a server's prefill and decode, which the lab cannot distinguish before the end
)
IN_A_RUN = ("prefill", "decode", ANSWERING)  # the values of `doing` during a measured run
KERNEL = "kernel"  # the beginning of `doing` while the ceilings are measured: kernel 3 of 168
LOOK_S = 0.5  # interval of status messages while a server answers


def duration(seconds: float) -> str:
    """Such as `42 s`, `3 min 20 s`, `1 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Reporter:
    """Calls `watch` with a Status. `todo` is the loop's own list; `n_tokens`: what a case prefills and generates."""

    def __init__(
        self,
        watch: ShowStatus,
        todo: Sequence[tuple[int, Case]],
        n_tokens: Callable[[Case], tuple[int, int]],
    ) -> None:
        self.watch = watch
        self._todo = todo
        self._n_tokens = functools.cache(n_tokens)
        self.n_runs = len(todo)
        self._later: tuple[tuple[int, int], float] = (
            (-1, -1),
            0.0,
        )  # the seconds of the list, at some state of it
        self._n_learned = 0
        self._costs: dict[
            Case, tuple[float, float]
        ] = {}  # seconds per prefilled and per generated token

    def learn(self, case: Case, prefill_ns: int, decode_ns: int, n_chosen: int) -> None:
        """Use a run's time per token for the forecast; decode chose `n_chosen` tokens."""
        self._n_learned += 1
        n_prefilled = self._n_tokens(case)[0]
        if n_prefilled and prefill_ns:
            prefill = prefill_ns / n_prefilled / 1e9
            self._costs[case] = prefill, decode_ns / n_chosen / 1e9 if decode_ns else prefill

    def progress_watcher(
        self, case: Case, repeat: int, warmup: bool, pieces: Sequence[bytes]
    ) -> Callable[[Progress], None]:
        """A function to call with a run's progress. With `pieces` (the bytes of each token) it reports the text too."""
        started = changed = time.monotonic()
        last = Progress(0, ())
        first_tokens = (0.0, 0)  # when the first tokens were seen, and how many
        rate: float | None = None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        n_prefill, n_gen = self._n_tokens(case)

        def look(progress: Progress) -> None:
            nonlocal changed, last, first_tokens, rate
            now = time.monotonic()
            n = len(progress.token_ids)
            text = ""
            decoding = (
                n and progress.n_prefilled >= n_prefill
            )  # decode at the stops of a sweep is not reported
            if pieces and not warmup:
                new = b"".join(pieces[i] for i in progress.token_ids[len(last.token_ids) :])
                text = decoder.decode(new, final=n == n_gen)
            if progress != last:
                if not decoding:
                    rate = progress.n_prefilled / (now - started)
                elif not first_tokens[1]:
                    first_tokens = (now, n)
                    rate = None
                else:
                    rate = (n - first_tokens[1]) / (now - first_tokens[0])
                changed = now
                last = progress
            rest = self._seconds(n_prefill - progress.n_prefilled, n_gen - n, case)
            doing = WARMING_UP if warmup else "decode" if decoding else "prefill"
            self.report_status(
                doing, case, repeat, rate, rest and max(0.0, rest - (now - changed)), text
            )

        return look

    def answer_watcher(self, case: Case, repeat: int, warmup: bool) -> Callable[[], None]:
        """A function to call repeatedly while a server answers."""
        started = time.monotonic()
        reported = -math.inf
        whole = self._seconds(*self._n_tokens(case), case)

        def look() -> None:
            nonlocal reported
            now = time.monotonic()
            if now - reported >= LOOK_S:
                reported = now
                rest = whole and max(0.0, whole - (now - started))
                self.report_status(WARMING_UP if warmup else ANSWERING, case, repeat, rest_s=rest)

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
        """Report one status. `rest_s` is the remaining time of the current run; adds the forecast for the others."""
        left_s = None
        state = (len(self._todo), self._n_learned)
        if rest_s is not None and self._costs:
            if self._later[0] != state:  # a run was added or ended
                self._later = (
                    state,
                    sum(
                        self._seconds(*self._n_tokens(case), case) or 0.0 for _, case in self._todo
                    ),
                )
            left_s = rest_s + self._later[1]
        n_done = self.n_runs - len(self._todo) - (doing in IN_A_RUN)
        self.watch(Status(doing, case, repeat, rate_tps, n_done, self.n_runs, left_s, text))

    def _seconds(self, n_prefill: int, n_gen: int, case: Case) -> float | None:
        """Forecast in seconds for these tokens, from the most similar case so far; None before the first run."""

        def distance(known: Case) -> tuple[bool, list[float]]:
            sizes = zip(self._n_tokens(known), self._n_tokens(case), strict=True)
            return known != case, [max(a, b) / max(1, min(a, b)) for a, b in sizes]

        if not self._costs:
            return None
        prefill, decode = self._costs[min(self._costs, key=distance)]
        return n_prefill * prefill + n_gen * decode


def notebook_line() -> Callable[[str], None]:
    """A function that shows a text and replaces its last one; outside a notebook it does nothing."""
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
        show(f"{status.words}{left}")

    yield watch
    show(f"{plural(n_runs, 'run') if n_runs else 'done'} in {duration(time.monotonic() - started)}")
