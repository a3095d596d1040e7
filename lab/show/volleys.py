"""Volleys of requests to a server, as a section: what sending B requests at once gains, and what it
costs each.

A row is a number of requests at once: medians over its volleys. TTFT is the time until the first
token of a request, and of the last request of a volley. The rate in total is all tokens of a volley
over the time from the first sending to the last token; the rate per user is 1 / TPOT. Beside them
stand the same figures of runs in process that decoded as many sequences together, if there are any
among the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypedDict

from lab.core import figures, request_times
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.request_times import RequestFigures
from lab.show import canvas, table, text_requests
from lab.show.cells import Column, of_figure
from lab.show.section import UNKNOWN, WIDE, Columns, Context, Picture, Section, tabled
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE: Final = "n_seq"  # of a case: requests, or sequences in process
CASE = ["n_prompt", "n_gen", SIZE]
IN_PROCESS = ["process_tpot_ms", "process_total_tps"]

HEADROOM = 0.05  # above the highest point, of its height

ABOUT = "requests sent at once; medians over volleys"
MEANINGS = (
    "TTFT: from sending a request to its first token. tokens/s in total: all tokens of a volley "
    "over its whole time; per user: 1 / TPOT."
)
CAPTION = (
    "Tokens per second in total and per user, over the number of requests at once. "
    "Points are volleys, the line is their median, dashes are runs in process."
)


def volleys(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row per volley whose requests all went well, without warm-ups."""
    import pandas as pd

    rows_of_requests = []
    for record in records:
        if not record.is_warmup:
            times = request_times.figures(record.request)
            rows_of_requests.append(_request_row(record, times))
    requests = pd.DataFrame(rows_of_requests)
    if requests.empty:
        return requests
    of_volley = requests.groupby(["session", *CASE, "repeat"])
    rows = of_volley.agg(
        n_good=("is_good", "sum"),
        ttft_s=("ttft_s", "median"),
        last_ttft_s=("ttft_s", "max"),
        tpot_ms=("tpot_ms", "median"),
        n_tokens=("n_tokens", "sum"),
        begin_s=("sent_s", "min"),
        end_s=("end_s", "max"),
    ).reset_index()
    rows = rows[rows.n_good == rows[SIZE]]
    return rows.assign(
        total_tps=rows.n_tokens / (rows.end_s - rows.begin_s), user_tps=1e3 / rows.tpot_ms
    )


def _request_row(record: RequestRecord, times: RequestFigures) -> dict[str, object]:
    asked = record.request.asked
    sent_ns = record.request.sent_ns
    sent_s = table.NAN if sent_ns is None else sent_ns / 1e9
    values = figures.of_request(times, figures.FIGURES)
    return {
        "session": record.session,
        "n_prompt": asked.n_prompt,
        "n_gen": asked.n_gen,
        SIZE: record.case[SIZE],
        "repeat": asked.repeat,
        "is_good": record.is_good,
        **values,
        "n_tokens": times.n_generated or 0,
        "sent_s": sent_s,
        "end_s": sent_s + values[figures.E2E.name],
    }


def runs_in_process(records: Sequence[Record], experiment: str) -> pd.DataFrame:
    """The same figures of runs in process; empty if there are none."""
    import pandas as pd

    timed = [
        record
        for record in records
        if record.experiment == experiment
        and record.is_good
        and not record.case.get("is_shared")
    ]
    if not timed:
        return pd.DataFrame(columns=[*CASE, *IN_PROCESS])
    rows = table.runs(timed).assign(**{SIZE: [record.case[SIZE] for record in timed]})
    rows["process_total_tps"] = rows[SIZE] * rows.n_gen / rows.e2e_s
    rows["process_tpot_ms"] = rows.tpot_ms
    return rows.groupby(CASE)[IN_PROCESS].median().reset_index()


def summary(rows: pd.DataFrame, in_process: pd.DataFrame) -> pd.DataFrame:
    """A row per case: medians over volleys, beside the runs in process."""
    by_case = rows.groupby(CASE)
    names = ["ttft_s", "last_ttft_s", "tpot_ms", "total_tps", "user_tps"]
    medians = by_case[names].median().assign(n_volleys=by_case.size()).reset_index()
    return medians.merge(in_process, how="left", on=CASE)


class VolleyRow(TypedDict):
    """A row of `summary`: the columns of its table."""

    n_prompt: int
    n_seq: int
    n_volleys: int
    ttft_s: float
    last_ttft_s: float
    tpot_ms: float
    total_tps: float
    user_tps: float
    process_tpot_ms: float
    process_total_tps: float


COLUMNS: Columns[VolleyRow] = (
    Column("prompt\ntokens", lambda row: f"{row['n_prompt']:,}", is_in_title=True),
    Column("requests\nat once", lambda row: f"{row[SIZE]:,}"),
    Column("volleys", lambda row: str(row["n_volleys"])),
    of_figure(figures.TTFT, lambda row: digits(row["ttft_s"])),
    Column("last\nTTFT s", lambda row: digits(row["last_ttft_s"])),
    of_figure(figures.TPOT, lambda row: digits(row["tpot_ms"])),
    Column("tokens/s\nin total", lambda row: digits(row["total_tps"])),
    Column("tokens/s\nper user", lambda row: digits(row["user_tps"])),
    Column("in process:\nTPOT ms", lambda row: _cell(row["process_tpot_ms"])),
    Column("in process:\ntotal", lambda row: _cell(row["process_total_tps"])),
)


def _cell(value: float) -> str:
    return digits(value) if value == value else UNKNOWN


class VolleyGain(NamedTuple):
    """What the largest volley of a prompt length gains, and what it costs each request."""

    gain: str
    wait: str

    @property
    def sentence(self) -> str:
        return f"{self.gain}; {self.wait}."


def gains(rows: pd.DataFrame) -> list[VolleyGain]:
    """One for each prompt length with volleys and single requests."""
    lines = []
    by_prompt = rows.groupby(["n_prompt", "n_gen"])
    for (n_prompt, _), of_prompt in by_prompt:
        alone = of_prompt[of_prompt[SIZE] == 1]
        most = of_prompt.iloc[-1]
        if alone.empty or most[SIZE] == 1:
            continue
        total = digits(most.total_tps / alone.total_tps.iloc[0])
        per_user = digits(most.user_tps / alone.user_tps.iloc[0])
        after = f"After {plural(n_prompt, 'prompt token')}, " if len(by_prompt) > 1 else ""
        gain = (
            f"{after}{most[SIZE]:,.0f} requests at once: {total}x the tokens/s of one in total, "
            f"{per_user}x per user"
        )
        wait = (
            f"the last of them waits {seconds(most.last_ttft_s)} for its first token "
            f"(alone {seconds(alone.ttft_s.iloc[0])})"
        )
        lines.append(VolleyGain(gain, wait))
    return lines


def warnings(records: Sequence[RequestRecord]) -> list[str]:
    """On requests that wait for a slot, and on what the answers do not show."""
    settings = records[0].endpoint.settings
    n_slots = settings.n_slots if settings else None
    most = max(int(record.case[SIZE] or 0) for record in records)
    lines = []
    if n_slots is not None and n_slots < most:
        lines.append(
            f"The server has {plural(n_slots, 'slot')}, so {most - n_slots} of {most} requests "
            "at once wait for one."
        )
    good = [record for record in records if record.is_good]
    return [*lines, *text_requests.doubts([record.request for record in good])]


def chapters(
    records: Sequence[RequestRecord], context: Context, experiment: str
) -> list[Section]:
    """A part for each server and model: the table, what it shows, and its picture."""
    others = [record for record in context.others if record.experiment == experiment]
    in_process = runs_in_process([*context.runs, *others], experiment)
    parts = []
    for label, of_setup in table.by_setup(records):
        measured = volleys(of_setup)
        if not measured.empty:
            parts.append(_section(label, of_setup, measured, in_process))
    if not parts:
        return []
    question = "How many requests at once, and what does it cost each?"
    return [Section("Requests at once", name="volleys", question=question, parts=parts)]


def _section(
    label: str,
    records: Sequence[RequestRecord],
    measured: pd.DataFrame,
    in_process: pd.DataFrame,
) -> Section:
    rows = summary(measured, in_process)
    of_lengths = gains(rows)
    headline = of_lengths[-1].gain if of_lengths else "Requests at once"
    draw = partial(_draw, f"{headline}\n{label}", measured, rows)
    sentences = [gain.sentence for gain in of_lengths]
    return Section(
        label,
        ABOUT,
        name="volleys",
        answer=sentences[0] if sentences else "",
        **tabled(COLUMNS, rows.to_dict("records")),
        warnings=warnings(records),
        sentences=sentences[1:],
        notes=[MEANINGS],
        pictures=[Picture("volleys", CAPTION, draw, WIDE)],
        data=lambda: {"rows": rows.to_dict("records")},
    )


def _draw(title: str, measured: pd.DataFrame, rows: pd.DataFrame, figure: Figure) -> None:
    """The rate in total (left) and per user (right) over the number of requests at once."""
    left, right = figure.subplots(1, 2)
    process_user_tps = 1e3 / rows.process_tpot_ms
    rows = rows.assign(process_user_tps=process_user_tps)
    _draw_rate(left, measured, rows, "total_tps", "process_total_tps")
    _draw_rate(right, measured, rows, "user_tps", "process_user_tps")
    left.set_ylabel("tokens per second, in total")
    right.set_ylabel("tokens per second, per user")
    canvas.finish(figure.axes, title)


def _draw_rate(
    ax: Axes, measured: pd.DataFrame, rows: pd.DataFrame, name: str, name_in_process: str
) -> None:
    groups = list(rows.groupby(["n_prompt", "n_gen"]))
    styles = canvas.styles(len(groups), canvas.OF_DECODE)
    for ((n_prompt, n_gen), medians), style in zip(groups, styles, strict=True):
        label = plural(n_prompt, "prompt token")
        is_alike = (measured.n_prompt == n_prompt) & (measured.n_gen == n_gen)
        points = measured[is_alike]
        ax.plot(points[SIZE], points[name], ls="", ms=5, alpha=0.6, **style)
        ax.plot(medians[SIZE], medians[name], lw=1.8, color=style["color"], label=label)
        if medians[name_in_process].notna().any():
            ax.plot(
                medians[SIZE],
                medians[name_in_process],
                ls="--",
                lw=1.4,
                color=style["color"],
                label=f"{label}, in process",
            )
    canvas.over_lengths(ax, sorted(rows[SIZE].unique()))
    highest = max(measured[name].max(), rows[name_in_process].max())
    ax.set(xlabel="requests at once", ylim=(0, (1 + HEADROOM) * highest))
