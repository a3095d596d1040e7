"""`lab batch --static`: what static batching wastes when answers differ in length.

A server decodes up to B answers together, in B places. Static batching fills all places, decodes until the longest
answer has ended, and only then starts the next batch: the places of shorter answers are idle. Continuous batching
gives a place to the next request as soon as it is free (Yu et al., "Orca", 2022). Both serve the same requests here,
in the same order, and prefill new prompts between two decode steps while the other answers wait (a server may put
both into one step: `lab stall`). Short prompts are prefilled together by a static batch and one by one in continuous
batching, which costs time.

A place is one sequence in one decode step; the waste is the share of idle places. For static batching it follows from
the lengths of the answers: 1 - sum / (B x longest) of each batch. Continuous batching has idle places only at the end,
when no request is left. A step with idle places takes less time than a full one, unless memory traffic limits it. So
the gain in tokens per second is smaller than the places suggest, and is measured.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.analysis.wording import digits, percent, times
from lab.core import lever_figures, stats
from lab.core.levers import CONTINUOUS, STATIC, Batch
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Record, Run
from lab.drawing import canvas
from lab.experiments.common import cell
from lab.experiments.experiment import Table
from lab.runner import load_plan
from lab.why.step_prediction import StepPrediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULTS = "4,8", "lognormal:64,0.8"
"""Of --sequences and --gen."""

N_BATCHES = 6
"""Requests for each place."""


@dataclass(frozen=True)
class Turn:
    """Requests that start (by sequence), then steps with a token of each sequence in `decoding`."""

    started: dict[int, int]
    decoding: tuple[int, ...]
    n_steps: int


@dataclass(frozen=True)
class Row:
    """One number of sequences of one setup. Rates are useful tokens per second, prefill included; medians over runs.

    `static_waste` and `continuous_waste` are counted in the steps; `computed_waste` follows from the lengths alone.
    `ratio` is continuous over static, the median over rounds, with its interval (fewer than 6 rounds: the range; one:
    None). `places_ratio` is the ratio if every decode step took the same time and prefill took none.
    """

    n_prompt: int
    n_seq: int
    answers: str
    n_requests: int
    n_runs: int  # of each kind
    static_waste: float
    continuous_waste: float
    computed_waste: float
    static_tps: float
    continuous_tps: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    places_ratio: float


def draw_lengths(answers: load_plan.Lengths, n_seq: int, seed: int) -> tuple[int, ...]:
    """The lengths of the answers of all requests: the same first ones for every number of sequences."""
    return tuple(n for _, n in load_plan.drawn(answers, answers, N_BATCHES * n_seq, str(seed)))


def turns(lever: Batch) -> Iterator[Turn]:
    """The turns of a schedule; a new one begins when an answer ends. The first token of an answer is its prefill's.

    A static batch puts its longest answer first: with separate caches llama.cpp computes only neighbouring sequences
    together, so a gap between the remaining ones would cost a second pass over the weights.
    """
    lengths = lever.lengths or ()
    waiting = list(range(len(lengths)))
    left: dict[int, int] = {}  # tokens that each sequence still generates
    while waiting or left:
        free = [i for i in range(lever.n_seq) if i not in left] if lever.schedule == CONTINUOUS or not left else []
        requests, waiting = waiting[: len(free)], waiting[len(free) :]
        if lever.schedule == STATIC:
            requests.sort(key=lambda request: -lengths[request])
        started = dict(zip(free, requests, strict=False))
        left |= {i: lengths[request] - 1 for i, request in started.items()}
        left = {i: n for i, n in sorted(left.items()) if n}
        n_steps = min(left.values(), default=0)
        yield Turn(started, tuple(left), n_steps)
        left = {i: n - n_steps for i, n in left.items() if n > n_steps}


def wasted(run: Run) -> float | None:
    """The share of places that were idle, from the steps; None without a schedule or decode steps."""
    counts = [n for kind, n in zip(run.steps.kind, run.steps.n_tokens, strict=True) if kind == DECODE]
    if run.batch is None or not run.batch.schedule or not counts:
        return None
    return 1 - sum(counts) / (run.batch.n_seq * len(counts))


def useful_tps(run: Run) -> float | None:
    """Generated tokens per second of the whole run, prefill included; None without a schedule, or if it failed."""
    token_ms = lever_figures.figures(run).get("token_ms")
    return 1e3 / token_ms if token_ms else None


def computed_waste(lengths: Sequence[int], n_seq: int) -> float:
    """1 - sum / (B x longest), the mean over batches of `n_seq` answers."""
    batches = [lengths[i : i + n_seq] for i in range(0, len(lengths), n_seq)]
    return statistics.fmean(1 - sum(batch) / (n_seq * max(batch)) for batch in batches)


Pair = tuple[Record, Record]  # of one round: static, continuous


def pairs(records: Sequence[Record]) -> dict[tuple[int, int, str, tuple[int, ...]], list[Pair]]:
    """The runs of both kinds by round, for each prompt length, number of sequences and lengths of answers."""
    good = [record for record in records if useful_tps(record.run) and wasted(record.run) is not None]
    found: dict[tuple[int, int, str, tuple[int, ...]], list[Pair]] = {}
    by_round = grouped(good, lambda one: (one.session, one.run.repeat, one.run.n_prompt, _requests(one.run)))
    for (_, _, n_prompt, requests), own in by_round.items():
        kinds = {record.run.batch.schedule: record for record in own if record.run.batch}
        if STATIC in kinds and CONTINUOUS in kinds:
            found.setdefault((n_prompt, *requests), []).append((kinds[STATIC], kinds[CONTINUOUS]))
    return dict(sorted(found.items()))


def _requests(run: Run) -> tuple[int, str, tuple[int, ...]]:
    assert run.batch is not None
    return run.batch.n_seq, run.batch.answers or "", run.batch.lengths or ()


def _ratio(pair: Pair) -> float:
    static, continuous = (useful_tps(record.run) or 0.0 for record in pair)
    return continuous / static


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each number of sequences that was measured with both kinds in one round."""
    made = []
    for (n_prompt, n_seq, answers, lengths), own in pairs(records).items():
        ratios = [_ratio(pair) for pair in own]
        interval = stats.median_interval(ratios) or stats.Interval(min(ratios), max(ratios))
        wastes = [statistics.median(wasted(pair[i].run) or 0.0 for pair in own) for i in (0, 1)]
        rates = [statistics.median(useful_tps(pair[i].run) or 0.0 for pair in own) for i in (0, 1)]
        row = Row(
            n_prompt=n_prompt,
            n_seq=n_seq,
            answers=answers,
            n_requests=len(lengths),
            n_runs=len(own),
            static_waste=wastes[0],
            continuous_waste=wastes[1],
            computed_waste=computed_waste(lengths, n_seq),
            static_tps=rates[0],
            continuous_tps=rates[1],
            ratio=statistics.median(ratios),
            ratio_low=interval.low if len(own) > 1 else None,
            ratio_high=interval.high if len(own) > 1 else None,
            places_ratio=(1 - wastes[1]) / (1 - wastes[0]),
        )
        made.append(row)
    return made


def sentences(measured: Sequence[Row]) -> list[str]:
    """What each row shows, in words."""
    return [
        f"{plural(row.n_seq, 'sequence')}, answers of {row.answers} tokens: static batching leaves "
        f"{percent(row.static_waste)} of the places idle ({percent(row.computed_waste)} computed from the lengths), "
        f"continuous batching {percent(row.continuous_waste)}. Continuous batching generates {_ratio_words(row)} the "
        f"useful tokens/s; it would be {times(row.places_ratio)} if every step took the same time."
        for row in measured
    ]


def _ratio_words(row: Row, between: str = " (", after: str = ")") -> str:
    if row.ratio_low is None or row.ratio_high is None:
        return times(row.ratio)
    return f"{times(row.ratio)}{between}{digits(row.ratio_low)}-{digits(row.ratio_high)}{after}"


MOST_ROWS = 3


def draw(
    rows: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    """Busy places over time, static (left) and continuous (right), of the round with the median ratio.

    A row for each number of sequences, at most the 3 largest.
    """
    shown = list(pairs(records).items())[-MOST_ROWS:]
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(shown)))
    axes = figure.subplots(len(shown), 2, squeeze=False, sharex="row", sharey="row")
    for ((n_prompt, n_seq, *_), own), both in zip(shown, axes, strict=True):
        pair = sorted(own, key=_ratio)[(len(own) - 1) // 2]
        for ax, record, kind in zip(both, pair, (STATIC, CONTINUOUS), strict=True):
            _places(ax, record.run, n_seq)
            idle = percent(wasted(record.run) or 0.0)
            ax.set_title(f"{kind}, {plural(n_seq, 'sequence')}, prompts of {n_prompt:,}: {idle} idle", fontsize=10)
        both[0].set_ylabel("places")
    for ax in axes[-1]:
        ax.set_xlabel("time (s)")
    canvas.finish(list(axes.flat), f"Static and continuous batching\n{subject}")


def _places(ax: Axes, run: Run, n_seq: int) -> None:
    steps = run.steps
    ends = [*steps.start_ns[1:], steps.end_ns[-1]]
    columns = zip(steps.kind, steps.start_ns, ends, steps.n_tokens, strict=True)
    spans = [(kind, start / 1e9, end / 1e9, n if kind == DECODE else n_seq) for kind, start, end, n in columns]
    looks = {DECODE: ("decoding", canvas.COLOURS[0]), PREFILL: ("prefill: all wait", canvas.COLOURS[4])}
    for kind, (label, colour) in looks.items():
        edges = [(start, end, n if kind == own else 0) for own, start, end, n in spans]
        x = list(itertools.chain.from_iterable((start, end) for start, end, _ in edges))
        y = list(itertools.chain.from_iterable((n, n) for *_, n in edges))
        ax.fill_between(x, y, color=colour, lw=0, label=label)
    ax.axhline(n_seq, color=canvas.GUIDE, ls=":", lw=1.2, label="all places; below it in white: idle")
    ax.set_ylim(0, 1.08 * n_seq)
    ax.locator_params(axis="y", integer=True)


TABLE = Table(
    name="static",
    question="What does static batching waste when answers differ in length?",
    title="the same requests with both; medians over runs; below the ratio its interval (fewer than 6 runs: range)",
    caption="Busy places over time: static batching on the left, continuous batching on the right. White below the "
    "dotted line: idle places. The round with the median ratio.",
    columns=(
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("sequences", lambda row: f"{row.n_seq:,}"),
        ("runs", lambda row: str(row.n_runs)),
        ("idle,\nstatic", lambda row: percent(row.static_waste)),
        ("from\nlengths", lambda row: percent(row.computed_waste)),
        ("idle,\ncontinuous", lambda row: percent(row.continuous_waste)),
        ("ratio", lambda row: _ratio_words(row, "\n", "")),
        ("tokens/s,\nstatic", lambda row: cell(row.static_tps)),
        ("tokens/s,\ncontinuous", lambda row: cell(row.continuous_tps)),
        ("requests", lambda row: f"{row.n_requests:,}"),
        ("answers", lambda row: row.answers),
    ),
    rows=rows,
    conclude=lambda rows, records, prediction: (sentences(rows), {}),
    draw=draw,
    is_by_ceilings=False,
)
