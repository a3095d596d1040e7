"""Servers that print averages over windows of time (vLLM, SGLang), and benchmarks of servers.

A window counts as decode only if no prompt was processed in it, and if as many requests ran in the
window before. Such windows of equally many requests make one figure, their mean.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import BOTH, DECODE, MIXED_WINDOW, SERVED, STEPS, WINDOW, Figure
from lab.features.why.readers import values
from lab.features.why.readers.values import Program, collected, matched
from lab.formats.numbers import NUMBER, number

VLLM = Program(
    source="vLLM log",
    patterns=(
        re.compile(
            rf"Avg prompt throughput: (?P<prompt>{NUMBER}) tokens/s, "
            rf"Avg generation throughput: (?P<decode_tps>{NUMBER}) tokens/s"
            r"(?:, Running: (?P<running>\d{1,6}) reqs)?"
        ),
        re.compile(
            rf"SpecDecoding metrics: Mean acceptance length: (?P<tokens_per_step>{NUMBER}), "
            rf"[^\n]{{0,120}}?\bAccepted: (?P<accepted>\d{{1,9}}) tokens, "
            r"Drafted: (?P<drafted>\d{1,9}) tokens"
        ),
    ),
)
SGLANG = Program(
    source="SGLang log",
    patterns=(
        re.compile(r"(?P<prompt>Prefill batch)"),
        re.compile(
            r"Decode batch[.,] [^\n]{0,40}?#running-req: (?P<running>\d{1,6}), "
            r"#(?:full )?token: (?P<tokens>\d{1,9}), "
            rf"[^\n]{{0,160}}?(?:accept len: (?P<tokens_per_step>{NUMBER}), [^\n]{{0,60}}?)?"
            r"(?:cuda graph: (?P<cuda_graph>\w{4,5}), )?"
            rf"gen throughput \(token/s\): (?P<decode_tps>{NUMBER})"
        ),
    ),
)

SERVING_BEGIN = re.compile(r"={3,60} Serving Benchmark Result ={3,60}")
SERVING_LENGTH = 4_000  # letters of a block
SERVING_LABELS = {
    "duration": r"Benchmark duration \(s\)",
    "generated": r"Total generated tokens",
    "throughput": r"Output token throughput \(tok/s\)",
    "most at once": r"Max(?:imum)? request concurrency",
    "mean TPOT": r"Mean TPOT \(ms\)",
    "median TPOT": r"Median TPOT \(ms\)",
    "drafts": r"Accept(?:ance)? length",
}
OF_SGLANG = re.compile(r"^[>\s]{0,20}Backend:|\(retokenized\):", re.M)
N_STREAMS_OF_MOST = {1.0: 1}
"""Answers at once by the most that were allowed; with more allowed it is unknown."""

ROUNDS_S = 0.006  # of a printed time


@dataclass(frozen=True)
class Window:
    """A window: its rate, how many requests ran at its end, and whether it is of decode alone."""

    line: int
    tps: float
    n_running: int | None
    is_pure: bool
    depth: float | None = None
    tokens_per_step: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    cuda_graph: str | None = None
    is_steady: bool = True  # as many requests ran in the window before


def read(text: str) -> list[Figure]:
    """The figures of windows, and of benchmarks of servers. ValueError for contradictions."""
    figures = of_windows(list(vllm_windows(text)), VLLM.source)
    figures += of_windows(list(sglang_windows(text)), SGLANG.source)
    for line, block in serving_blocks(text):
        figures += of_serving(block, line)
    return figures


def vllm_windows(text: str) -> Iterator[Window]:
    """The windows of vLLM's log in which tokens were generated."""
    n_before: int | None = None
    is_first = True
    for answer in collected(text, VLLM):
        tps = answer.number("decode_tps")
        n_running = answer.count("running")
        if tps is None:
            continue
        is_steady = is_first or n_running == n_before
        if tps:
            yield Window(
                answer.line,
                tps,
                n_running,
                is_pure=bool(not answer.number("prompt") and n_running and is_steady),
                tokens_per_step=answer.number("tokens_per_step"),
                drafted=answer.count("drafted"),
                accepted=answer.count("accepted"),
            )
        n_before = n_running
        is_first = False


def sglang_windows(text: str) -> Iterator[Window]:
    """The batches of decode in SGLang's log; one after a prefill has a part of it in its time."""
    n_before: int | None = None
    for answer in collected(text, SGLANG):
        n_running = answer.count("running")
        tps = answer.number("decode_tps")
        tokens = answer.count("tokens")
        if n_running and tps and tokens is not None:
            yield Window(
                answer.lines["decode_tps"],
                tps,
                n_running,
                is_pure="prompt" not in answer.values,
                depth=tokens / n_running,
                tokens_per_step=answer.number("tokens_per_step"),
                cuda_graph=answer.values.get("cuda_graph"),
                is_steady=n_before in (None, n_running),
            )
            n_before = n_running


def of_windows(windows: Sequence[Window], source: str) -> list[Figure]:
    """A figure for each number of requests: the mean of its windows of decode alone.

    Without any such window the others count, and are named so.
    """
    pure = [window for window in windows if window.is_pure]
    groups = dict[tuple[object, ...], list[Window]]()
    for window in pure or windows:
        groups.setdefault((window.n_running, window.cuda_graph), []).append(window)
    figures = list[Figure]()
    for group in groups.values():
        steady = [window for window in group if window.is_steady]
        figures.append(of_group(steady or group, source))
    return figures


def of_group(group: Sequence[Window], source: str) -> Figure:
    """The mean of windows of one kind."""
    first = group[0]
    group_facts = dict[str, Fact]()
    if first.cuda_graph:
        group_facts["cuda graph"] = Fact(first.cuda_graph.lower(), first.line)
    each = mean_of([window.tokens_per_step for window in group])
    depth = mean_of([window.depth for window in group])
    if each == 1.0:
        group_facts[facts.SPECULATION] = Fact(
            "drafts", first.line, shown="drafts, none at work"
        )
    n_windows = len(group)
    return Figure(
        source=source,
        tps=statistics.fmean(window.tps for window in group),
        phase=DECODE,
        counts=WINDOW if first.is_pure else MIXED_WINDOW,
        n_streams=first.n_running or None,
        depth=None if depth is None else round(depth),
        tokens_per_step=each,
        drafted=sum(window.drafted or 0 for window in group) or None,
        accepted=sum(window.accepted or 0 for window in group) or None,
        facts=group_facts,
        line=first.line,
        about=f"{n_windows} windows" if n_windows > 1 else "one window",
        is_of_server=True,
    )


def mean_of(numbers: Sequence[float | None]) -> float | None:
    """The mean of the numbers that are known; None if none is."""
    numbers_known = [number for number in numbers if number is not None]
    return statistics.fmean(numbers_known) if numbers_known else None


def serving_blocks(text: str) -> Iterator[tuple[int, str]]:
    """The blocks of benchmarks of a server, with the lines where they begin."""
    begins = list(matched(text, SERVING_BEGIN))
    for index, (line, match) in enumerate(begins):
        end = match.end() + SERVING_LENGTH
        if index + 1 < len(begins):
            end = min(end, begins[index + 1][1].start())
        yield line, text[match.end() : end]


def of_serving(block: str, line: int) -> list[Figure]:
    """The tokens of all answers over the whole duration, and the decode of one answer.

    The latter is the inverse of the mean TPOT, which has no first token. How many answers were
    decoded at once is known only where at most one was allowed. ValueError for contradictions.
    """
    printed = dict[str, float]()
    for name, label in SERVING_LABELS.items():
        match = re.search(rf"(?:{label})[^\n:]{{0,10}}:\s{{1,60}}(-?{NUMBER})(?!\S)", block)
        if match:
            printed[name] = number(match[1])
    source = "vLLM bench serve"
    if OF_SGLANG.search(block):
        source = "SGLang bench_serving"
    most_at_once = printed.get("most at once")
    figure = Figure(
        source=source,
        tps=printed.get("throughput", 0.0),
        phase=BOTH,
        counts=SERVED,
        n_streams=N_STREAMS_OF_MOST.get(most_at_once or 0),
        tokens_per_step=printed.get("drafts"),
        line=line,
        about=f"at most {most_at_once:.0f} at once" if (most_at_once or 0) > 1 else "",
        is_of_server=True,
    )
    values.check_rate(
        figure.tps, printed.get("generated", 0), printed.get("duration", 0), ROUNDS_S
    )
    mean_ms = printed.get("mean TPOT", 0.0)
    if mean_ms <= 0 or printed.get("median TPOT", 1.0) <= 0:  # answers came in one piece
        return [figure]
    return [figure, replace(figure, tps=1000 / mean_ms, phase=DECODE, counts=STEPS)]
