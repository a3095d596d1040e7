"""The budget of a token through llama-server: its own times, and what is outside of them.

llama-server reports the time of the prompt and of the tokens after the first. The client's TTFT
also holds the template, tokenizing, HTTP and the queue; its TPOT what it takes to send and to
receive a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lab.core import request_times
from lab.core.request import RequestRecord
from lab.show.cells import TEXT, Column
from lab.show.section import Columns, Section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    import pandas as pd

ABOUT = (
    "medians over requests; server: by llama-server's own times (steps with choosing, and the text "
    "of tokens); outside: HTTP and the client, before the first token also template, tokenizing "
    "and queue"
)


class ServerBudgetRow(Protocol):
    """A row of `rows`."""

    n_prompt: float
    n_requests: int
    ttft_s: float
    tpot_s: float
    prompt_s: float
    step_s: float


def rows(requests: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row for each number of prompt tokens: medians in seconds over requests with the server's
    times.

    `ttft_s` and `tpot_s` are the client's, `prompt_s` and `step_s` the server's.
    """
    import pandas as pd

    table: list[dict[str, object]] = []
    for record in requests:
        figures = request_times.figures(record.request)
        timings = request_times.server_timings(record.request)
        if timings is None or figures.tpot_ns is None or figures.ttft_ns is None:
            continue
        if not timings.prompt_ms or not timings.gen_ms or (timings.n_gen or 0) < 2:
            continue
        n_steps = (timings.n_gen or 0) - 1
        table.append(
            {
                "n_prompt": figures.n_prompt or figures.asked.n_prompt,
                "ttft_s": figures.ttft_ns / 1e9,
                "tpot_s": figures.tpot_ns / 1e9,
                "prompt_s": timings.prompt_ms / 1e3,
                "step_s": timings.gen_ms / 1e3 / n_steps,
            }
        )
    if not table:
        return pd.DataFrame()
    by_length = pd.DataFrame(table).groupby("n_prompt")
    return by_length.median().assign(n_requests=by_length.size()).reset_index()


def section(requests: Sequence[RequestRecord]) -> Section | None:
    """The table and its sentence; None if no server reported its times."""
    table = rows(requests)
    if table.empty:
        return None
    budget = list(table.itertuples())
    return Section(
        "A token's time through llama-server",
        ABOUT,
        **tabled(COLUMNS, budget, keep_all=True),
        sentences=[sentence(budget[-1])],
        data=lambda: {"server_budget": table.to_dict("records")},
    )


def sentence(row: ServerBudgetRow) -> str:
    """What the server's own times leave of TPOT and of TTFT."""
    outside_s = row.tpot_s - row.step_s
    return (
        f"After {row.n_prompt:,.0f} tokens the server takes {seconds(row.step_s)} for a token and "
        f"{seconds(abs(outside_s))} ({percent(abs(outside_s) / row.tpot_s)} of TPOT) is outside of "
        f"its times; before the first token {seconds(max(0.0, row.ttft_s - row.prompt_s))} are: "
        "template, tokenizing, HTTP, queue."
    )


COLUMNS: Columns[ServerBudgetRow] = (
    Column("prompt\ntokens", lambda row: f"{row.n_prompt:,.0f}", is_in_title=True),
    Column("requests", lambda row: f"{row.n_requests:,}", TEXT),
    Column("TPOT\nms", lambda row: digits(1e3 * row.tpot_s)),
    Column("server\nms", lambda row: digits(1e3 * row.step_s)),
    Column("sum\n%", lambda row: f"{100 * row.step_s / row.tpot_s:.1f}"),
    Column("TTFT\nms", lambda row: digits(1e3 * row.ttft_s)),
    Column("prompt\nms", lambda row: digits(1e3 * row.prompt_s)),
    Column("outside\nms", lambda row: digits(1e3 * (row.ttft_s - row.prompt_s))),
)
