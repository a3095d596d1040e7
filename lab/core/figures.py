"""The figures of runs and requests: what each is, its name, and its words.

`name` is the column of `lab.runs`, with the unit at its end, and the name in JSON and exports.
Tables, comparisons, pictures and the table of a session under way read headings and words here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.core import experiments, phases
from lab.core.record import Run
from lab.core.request_times import RequestFigures, server_timings

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class FigureKind:
    """A figure. Unknown is None. A figure without `label` is not compared; the others are times:
    less is better."""

    name: str
    meaning: str = ""  # for the documentation
    heading: str = ""  # of a table's column, with the unit in its second line
    label: str = ""  # in comparisons
    axis: str = ""  # of pictures
    is_of_prompt: bool = False  # it does not depend on the number of generated tokens
    scale: float = 1.0  # of the number in a table
    rate_of: str = ""  # of a rate (more is better): the name of the time
    of_run: Callable[[Run], float | None] | None = None
    of_request: Callable[[RequestFigures], float | None] | None = None
    factor: float = 1  # of what these functions give
    priority: int = 0  # of its column on a narrow terminal; columns of low priority are hidden
    implied_by: str = ""  # how the heading of the column begins without which that is ordinary


def per(amount: float, time: float | None) -> float | None:
    """A rate. None for no time."""
    return amount / time if time else None


def _prefill_rate(run: Run) -> float | None:
    return per(run.n_prompt, (phases.prefill_ns(run) or 0) * 1e-9)


def _prefill_share(run: Run) -> float | None:
    return per(phases.prefill_ns(run) or 0, phases.e2e_ns(run))


def _tpot_bound_ns(request: RequestFigures, end: int) -> float | None:
    return request.tpot_bounds_ns[end] if request.tpot_bounds_ns else None


def _server_prompt_ms(request: RequestFigures) -> float | None:
    timings = server_timings(request.request)
    return timings.prompt_ms if timings else None


def _server_decode_ms(request: RequestFigures) -> float | None:
    timings = server_timings(request.request)
    return timings.gen_ms if timings else None


PREFILL = FigureKind(
    name="prefill_s",
    meaning="prefill time, s",
    heading="prefill\ns",
    label="prefill",
    axis="prefill time (s)",
    is_of_prompt=True,
    of_run=phases.prefill_ns,
    factor=1e-9,
)
PREFILL_RATE = FigureKind(
    name="prefill_tps",
    meaning="prompt tokens per second",
    heading="prefill\ntokens/s",
    rate_of=PREFILL.name,
    priority=-2,
    of_run=_prefill_rate,
)
TTFT = FigureKind(
    name="ttft_s",
    meaning="time to first token, s: prefill and the choice of a token",
    heading="TTFT\ns",
    priority=-4,
    implied_by=PREFILL.heading,
    label="TTFT",
    axis="TTFT (s)",
    is_of_prompt=True,
    of_run=phases.ttft_ns,
    of_request=lambda request: request.ttft_ns,
    factor=1e-9,
)
TPOT = FigureKind(
    name="tpot_ms",
    meaning="time per output token, ms, with the choice of the token",
    heading="TPOT\nms",
    label="TPOT",
    axis="decode time per token (ms)",
    of_run=phases.tpot_ns,
    of_request=lambda request: request.tpot_ns,
    factor=1e-6,
)
DECODE_RATE = FigureKind(
    name="decode_tps",
    meaning="generated tokens per second: 1,000 / `tpot_ms`",
    heading="decode\ntokens/s",
    rate_of=TPOT.name,
    priority=-1,
    implied_by="TPOT",
    of_run=lambda run: per(1e9, phases.tpot_ns(run)),
    of_request=lambda request: per(1e9, request.tpot_ns),
)
DECODE_COMPUTE = FigureKind(
    name="step_ms",
    meaning="compute of a decode step, ms, without the choice, as llama-bench counts",
    heading="decode\ncompute ms",
    label="decode compute",
    of_run=phases.decode_compute_mean_ns,
    factor=1e-6,
)
E2E = FigureKind(
    name="e2e_s",
    meaning="the whole request, s",
    heading="E2E\ns",
    priority=2,
    of_run=phases.e2e_ns,
    of_request=lambda request: request.e2e_ns,
    factor=1e-9,
)
PREFILL_SHARE = FigureKind(
    name="prefill_share",
    meaning="the part of `e2e_s` that is prefill",
    heading="prefill\n% of E2E",
    priority=-3,
    scale=100,
    of_run=_prefill_share,
)
FIGURES = (PREFILL, PREFILL_RATE, TTFT, TPOT, DECODE_RATE, DECODE_COMPUTE, E2E, PREFILL_SHARE)
"""Of runs, and some of them of requests, in the order of tables."""

ENERGY = FigureKind(
    name="j_per_token",
    meaning="energy of the run per generated token, J",
    heading="J per\ntoken",
)
"""Of runs whose record has it: only the whole record says which devices count."""

FIRST_OUTPUT = FigureKind(
    name="first_output_s",
    heading="first\noutput s",
    of_request=lambda request: request.first_output_ns,
    factor=1e-9,
)
LONGEST_STALL = FigureKind(
    name="stall_ms",
    heading="longest\nstall ms",
    of_request=lambda request: request.longest_stall_ns,
    factor=1e-6,
)
REQUEST_FIGURES = (
    FIRST_OUTPUT,
    LONGEST_STALL,
    FigureKind(
        name="tpot_low_ms", of_request=lambda request: _tpot_bound_ns(request, 0), factor=1e-6
    ),
    FigureKind(
        name="tpot_high_ms", of_request=lambda request: _tpot_bound_ns(request, 1), factor=1e-6
    ),
    FigureKind(name="n_answer", of_request=lambda request: request.n_generated),
    FigureKind(name="n_cached", of_request=lambda request: request.n_cached),
    FigureKind(name="server_prompt_s", of_request=_server_prompt_ms, factor=1e-3),
    FigureKind(name="server_decode_s", of_request=_server_decode_ms, factor=1e-3),
)
"""Of requests only."""

COMPARED = tuple(figure for figure in FIGURES if figure.label)


def names(figures: Sequence[FigureKind]) -> list[str]:
    return [figure.name for figure in figures]


def labels() -> dict[str, str]:
    """The compared figures in words by name; those of experiments come last."""
    return {figure.name: figure.label for figure in COMPARED} | experiments.figure_names()


def unit(name: str) -> str:
    """The unit of a figure, of an experiment too: the end of its name."""
    return name.rpartition("_")[2]


def of_run(run: Run) -> dict[str, float]:
    """All figures of a run by name; NaN if unknown. An experiment has figures of its own in place
    of phases."""
    values = dict.fromkeys(names(FIGURES), NAN)
    defined = FIGURES if run.is_plain else (E2E,)
    for figure in defined:
        value = figure.of_run(run) if figure.of_run else None
        if value:
            values[figure.name] = value * figure.factor
    return values | experiments.figures(run)


def of_request(request: RequestFigures, figures: Sequence[FigureKind]) -> dict[str, float]:
    """Those of the figures that requests have, by name; NaN if unknown."""
    values = {}
    for figure in figures:
        if figure.of_request is not None:
            value = figure.of_request(request)
            values[figure.name] = NAN if value is None else value * figure.factor
    return values
