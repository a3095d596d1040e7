"""Predictions as text: a ranking of devices with a picture, and the explanation of each device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.core import shown
from lab.core.lists import grouped
from lab.core.request import Slo
from lab.features.predict import published
from lab.features.predict.prediction import HERE, Prediction, Span
from lab.show import canvas, wording
from lab.show.canvas import COLOURS, INK
from lab.show.section import UNKNOWN, Columns, Section, tabled

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 15
"""Devices of a ranking that are shown, with this machine."""

CERTAIN = 0.95


def sections(rows: Sequence[Prediction], slo: Slo | None, is_ranking: bool, shows_all: bool) -> list[Section]:
    """A ranking for each prompt length, or an explanation of each model on each device."""
    if is_ranking:
        by_length = grouped(rows, lambda row: row.n_prompt).values()
        return [ranking(own, slo, None if shows_all else MOST_ROWS) for own in by_length]
    return [explanation(own, slo) for own in grouped(rows, lambda row: (row.name, _model(row))).values()]


def ranking(rows: Sequence[Prediction], slo: Slo | None = None, most: int | None = None) -> Section:
    """The fastest `most` rows and this machine in a table, and what is not shown."""
    models, first = list(dict.fromkeys(map(_model, rows))), rows[0]
    kept = [row for i, row in enumerate(rows) if most is None or i < most or row.name == HERE]
    columns: Columns = (
        ("name", lambda row: row.name),
        ("model", lambda row: _model(row) if len(models) > 1 else UNKNOWN),
        ("TTFT\ns", lambda row: _marked(row, row.prefill_s)),
        ("decode\ntokens/s", lambda row: _marked(row, row.tps)),
        ("E2E\ns", lambda row: _marked(row, row.e2e_s)),
        ("memory\nGB", lambda row: wording.digits(row.needed_bytes / 1e9)),
        *ASKED,
        ("note", _note),
    )
    known = [row for row in rows if row.is_known]
    answer, sentences = "No device here can run this.", []
    if known:
        best = known[0]
        name = f"{best.name} with {_model(best)}" if len(models) > 1 else best.name
        answer = f"The fastest is {name}: {_times(best)} for the whole request."
    if slo is not None:
        n = sum((row.chance or 0.0) >= CERTAIN for row in known)
        sentences.append(f"{n} of {len(rows)} keep {slo.label} with at least {100 * CERTAIN:.0f} % certainty.")
    shown_rows = set(map(id, kept))
    rest = [row for row in rows if id(row) not in shown_rows]
    if rest:
        n_small, n_known = sum(bool(row.misfit) for row in rest), sum(row.is_known for row in rest)
        parts = {"slower": n_known, "with too little memory": n_small}
        parts["without a known peak, so prefill is not predicted"] = len(rest) - n_small - n_known
        words = ", ".join(f"{n} {what}" for what, n in parts.items() if n)
        sentences.append(f"Not shown: {words}. To see them: --all")
    if first.users > 1:
        sentences.append(
            "TTFT is that of one prompt at a time; tokens/s is the rate of each user. Without ceilings of a device it "
            "assumes that a step of several users reaches the same share of the datasheet's figures as that of one."
        )
    if not all(row.is_measured for row in rows):
        sentences.append(published.basis())
    users = f", {first.users} users at once" if first.users > 1 else ""
    return Section(
        models[0] if len(models) == 1 else "Several models",
        f"{first.n_prompt:,} tokens in, {first.n_gen:,} out{users}",
        words=[answer],
        **tabled(columns, kept),
        sentences=sentences,
    )


def explanation(rows: Sequence[Prediction], slo: Slo | None = None) -> Section:
    """For each prompt length the limits, the expected ranges and the memory; then their basis."""

    def time(show: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda row: UNKNOWN if row.misfit else show(row)

    first = rows[0]
    columns: Columns = (
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("prefill s\nexpected", time(lambda row: _span(row.prefill_s))),
        ("TPOT ms\nexpected", time(lambda row: _span((1e3 * row.tpot_s[0], 1e3 * row.tpot_s[1])))),
        ("tokens/s\nin decode", time(lambda row: _span(row.tps))),
        ("E2E s\nexpected", time(lambda row: _span(row.e2e_s))),
        ("prefill s\nlimit", time(lambda row: _known(row.prefill_limit_s))),
        ("TPOT ms\nlimit", time(lambda row: _known(1e3 * row.tpot_limit_s))),
        ("memory\nGB", lambda row: wording.digits(row.needed_bytes / 1e9)),
        *(column for column in ASKED if any(column[1](row) != UNKNOWN for row in rows)),
        ("note", lambda row: f"does not fit: {row.misfit}" if row.misfit else ", ".join(row.doubts)),
    )
    users = f", {first.users} users at once" if first.users > 1 else ""
    is_by_kernels = first.name == HERE or "ceilings" in (first.rests_on or "")
    limit = "the ceilings of its kernels" if is_by_kernels else "the datasheet's peak"
    longest = rows[-1]
    request = f"A request of {longest.n_prompt:,} tokens with {longest.n_gen:,} back"
    answer = f"{request} does not fit: {longest.misfit}." if longest.misfit else ""
    if longest.is_known:
        share = longest.prefill_s[0] * longest.prefill_s[1] / (longest.e2e_s[0] * longest.e2e_s[1])
        answer = f"{request} takes {_times(longest)}: about {100 * math.sqrt(share):.0f} % of it is prefill."
    return Section(
        f"{first.model.name} {first.model.quantization or ''} on {first.about}{users}",
        f"limit: the time at {limit}; no run can be faster",
        words=[answer] if answer else [],
        **tabled(columns, rows),
        sentences=[
            *(f"{row.n_prompt:,} tokens: {sentence}." for row in rows for sentence in row.beyond),
            *([f"keeps limits: the probability of {slo.label}."] if slo else []),
            first.basis,
        ],
    )


def _keeps(row: Prediction) -> str:
    if row.chance is None or row.chance != row.chance:
        return UNKNOWN
    if row.chance >= CERTAIN:
        return "yes"
    return "no" if row.chance <= 1 - CERTAIN else f"{100 * row.chance:.0f} %"


ASKED: Columns = (
    ("keeps\nlimits", _keeps),
    ("price", lambda row: UNKNOWN if row.price is None else f"{row.price:,.0f}"),
)
"""The columns of what was asked for; empty without limits and prices."""


def _model(row: Prediction) -> str:
    return f"{row.model.name} {row.model.quantization or ''}".strip()


def _known(value: float | None) -> str:
    return UNKNOWN if value is None else wording.digits(value)


def _times(row: Prediction) -> str:
    """The time of the whole request in words."""
    return " to ".join(dict.fromkeys(map(wording.seconds, row.e2e_s)))


def _span(ends: Span) -> str:
    return UNKNOWN if ends[0] != ends[0] else f"{wording.digits(ends[0])}-{wording.digits(ends[1])}"


def _marked(row: Prediction, ends: Span) -> str:
    if row.misfit or ends[0] != ends[0]:
        return UNKNOWN
    return "-".join(dict.fromkeys(map(wording.digits, ends))) + shown.mark(row.doubts)


def _note(row: Prediction) -> str:
    if row.misfit or row.is_measured:
        return row.misfit or "measured"
    unknown = "memory size unknown" if row.name != HERE and row.memory_bytes is None else ""
    return "; ".join(filter(None, [unknown, row.rests_on and f"from {row.rests_on}"]))


def plot_requests(rows: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Stacked bars of prefill and decode over devices, fastest first, with the range of the whole.

    lab.plot_requests(lab.predict("8000", 300, "llama-3.1-8b", "geforce")[:5])
    """
    ax = ax or canvas.new_axes()
    figure, first = canvas.figure_of(ax), rows[0]
    several = len(set(map(_model, rows))) > 1
    names = [f"{row.name}, {_model(row)}" if several else row.name for row in rows][::-1]
    rows = rows[::-1]
    prefill = [math.sqrt(row.prefill_s[0] * row.prefill_s[1]) for row in rows]
    decode = [(row.n_gen - 1) * math.sqrt(row.tpot_s[0] * row.tpot_s[1]) for row in rows]
    ax.barh(names, prefill, color=COLOURS[0], label="prefill")
    ax.barh(names, decode, left=prefill, color=COLOURS[1], hatch="//", edgecolor="white", label="decode")
    for name, row in zip(names, rows, strict=True):
        ax.plot(row.e2e_s, [name, name], ls="-" if row.is_measured else "--", color=INK, lw=1.2)
    ax.plot([], [], color=INK, ls="--", label="90 % range, predicted")
    if any(row.is_measured for row in rows):
        ax.plot([], [], color=INK, ls="-", label="range, measured")
    ax.set_xlabel("time of the request (s)")
    figure.set_figheight(max(figure.get_figheight(), 1.6 + 0.28 * len(rows)))
    canvas.finish([ax], f"{_model(first)}: {first.n_prompt:,} tokens in, {first.n_gen:,} out")
    return ax
