"""The budget of a token: what each part of TPOT takes, as a table without a gap.

In the engine every step is stamped three times, so compute, choosing and the time between steps add
up to TPOT. A sampler's copy of the logits is a part of choosing (greedy reads them in place). The
lab turns tokens into text after a run, so that its TPOT has no detokenizing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.core.lists import plural
from lab.core.record import DECODE, Record
from lab.core.sampling import GREEDY
from lab.roofline.explanation import ExplainedRow
from lab.show.cells import PROMPT_TOKENS, Column
from lab.show.section import Columns, Section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    import pandas as pd

ABOUT = (
    "a token after the first, medians over runs; choose: the samplers, with their copy of the "
    "logits; between: from one step to the next; the lab detokenizes after a run"
)


def section(rows: pd.DataFrame, record: Record) -> Section | None:
    """The parts of TPOT for each prompt length; None without decode steps."""
    decodes = rows[(rows.phase == DECODE) & rows.tpot_s.notna()]
    if decodes.empty:
        return None
    budget = list(decodes.itertuples())
    return Section(
        "A token's time, part by part",
        ABOUT,
        answer="",
        **tabled(COLUMNS, budget, keep_all=True),
        sentences=[sentence(budget[-1], record)],
    )


def sentence(row: ExplainedRow, record: Record) -> str:
    """What choosing takes of a token's time, and by what chain."""
    chain = record.settings.sampling
    label = GREEDY if chain is None else chain.label
    return (
        f"After {plural(row.n_prompt, 'token')} a token takes {seconds(row.tpot_s)}: "
        f"{seconds(row.measured_s)} to compute, {seconds(row.choosing_s)} "
        f"({percent(row.choosing_s / row.tpot_s)}) to choose it ({label}), "
        f"{seconds(row.harness_s)} between steps."
    )


def sum_of_parts(row: ExplainedRow) -> float:
    """The parts of TPOT together, in seconds."""
    return float(row.measured_s + row.choosing_s + row.harness_s)


COLUMNS: Columns[ExplainedRow] = (
    PROMPT_TOKENS,
    Column("TPOT\nms", lambda row: digits(1e3 * row.tpot_s)),
    Column("compute\nms", lambda row: digits(1e3 * row.measured_s)),
    Column("choose\nms", lambda row: digits(1e3 * row.choosing_s)),
    Column("between\nms", lambda row: digits(1e3 * row.harness_s)),
    Column("sum\n%", lambda row: f"{100 * sum_of_parts(row) / row.tpot_s:.1f}"),
)
