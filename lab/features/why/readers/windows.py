"""Servers that print averages over windows of time: vLLM and SGLang.

A window counts as decode only if no prompt was processed in it, and if as many requests ran in the
window before. Such windows of equally many requests make one figure, their mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import DECODE, MIXED_WINDOW, WINDOW, Figure
from lab.features.why.readers.answers import WINDOWS, PastedAnswer, Program, collected


@dataclass(frozen=True)
class Window:
    """A window: its values, how many requests ran at its end, and whether it is of decode alone."""

    answer: PastedAnswer
    tps: float
    n_running: int | None
    is_pure: bool
    is_steady: bool  # as many requests ran in the window before

    @property
    def depth(self) -> float | None:
        tokens = self.answer.count("tokens")
        return tokens / self.n_running if tokens and self.n_running else None


def read(text: str) -> list[Figure]:
    """The figures of windows. ValueError for contradictions."""
    figures = list[Figure]()
    for program in WINDOWS:
        windows = list(windows_of(collected(text, program)))
        pure = [window for window in windows if window.is_pure]
        groups = dict[tuple[object, ...], list[Window]]()
        for window in (
            pure or windows
        ):  # without any pure one the others count, and are named so
            kind = (window.n_running, window.answer.values.get("cuda_graph"))
            groups.setdefault(kind, []).append(window)
        for group in groups.values():
            steady = [window for window in group if window.is_steady]
            figures.append(of_group(steady or group, program))
    return figures


def windows_of(answers: Sequence[PastedAnswer]) -> Iterator[Window]:
    """The windows in which tokens were generated.

    vLLM's prompt of the last request may be in a window before it ran; SGLang names each prefill.
    """
    n_before: int | None = None
    is_first = True
    for answer in answers:
        tps = answer.number("decode_tps")
        if tps is None:
            continue
        n_running = answer.count("running")
        is_steady = is_first or n_running == n_before
        has_prompt = answer.values.get("prompt", "0").strip("0.") != ""
        is_of_batch = (
            "tokens" in answer.values
        )  # SGLang's, whose change of requests is no prefill
        is_pure = bool(n_running) and not has_prompt and (is_steady or is_of_batch)
        if tps:
            yield Window(answer, tps, n_running, is_pure, is_steady)
        n_before = n_running
        is_first = False


def of_group(group: Sequence[Window], program: Program) -> Figure:
    """The mean of windows of one kind."""
    first = group[0]
    line = first.answer.lines["decode_tps"]
    group_facts = dict[str, Fact]()
    graph = first.answer.values.get("cuda_graph")
    if graph:
        group_facts["cuda graph"] = Fact(graph.lower(), line)
    each = mean_of([window.answer.number("tokens_per_step") for window in group])
    depth = mean_of([window.depth for window in group])
    if each == 1.0:
        idle = Fact("drafts", line, shown="drafts, none at work")
        group_facts[facts.SPECULATION] = idle
    n_windows = len(group)
    return Figure(
        source=program.source,
        tps=statistics.fmean(window.tps for window in group),
        phase=DECODE,
        counts=WINDOW if first.is_pure else MIXED_WINDOW,
        n_streams=first.n_running or None,
        depth=None if depth is None else round(depth),
        tokens_per_step=each,
        drafted=sum(window.answer.count("drafted") or 0 for window in group) or None,
        accepted=sum(window.answer.count("accepted") or 0 for window in group) or None,
        facts=group_facts,
        line=line,
        about=f"{n_windows} windows" if n_windows > 1 else "one window",
        is_of_server=True,
    )


def mean_of(numbers: Sequence[float | None]) -> float | None:
    """The mean of the numbers that are known; None if none is."""
    known_numbers = [number for number in numbers if number is not None]
    return statistics.fmean(known_numbers) if known_numbers else None
