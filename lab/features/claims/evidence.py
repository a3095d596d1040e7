"""What claims are judged by: the timed runs of a session as a table, and the machine's ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lab.core import figures
from lab.core.record import Ceilings, Record, Run, Value
from lab.errors import LabError
from lab.features.stall import GAP
from lab.features.turns.conversation import NAME as TURNS, NONE, conversation_of
from lab.features.turns.figures import figures as figures_of_turns
from lab.roofline import kernel_rates

if TYPE_CHECKING:
    import pandas as pd

LAST_TTFT = "last_ttft_s"
LAST_DECODE = "last_decode_s"
TTFT_SHARE = "ttft_share"
LABELS = {LAST_TTFT: "TTFT of the last turn", LAST_DECODE: "decode of the last turn"}
"""Times of a conversation's last turn in words."""

TIMES = [*figures.names(figures.FIGURES), GAP, LAST_TTFT, LAST_DECODE, TTFT_SHARE]
CASE = [
    "record",
    "part",
    "variant",
    "n_prompt",
    "block",
    "format",
    "n_bytes",
    "n_seq",
    "chunk",
    "text",
    "cache",
]


@dataclass(frozen=True)
class Evidence:
    """The records of one session of claims, and the ceilings of its machine; None if unknown."""

    records: Sequence[Record]
    ceilings: Ceilings | None = None

    def of(self, *parts: str) -> pd.DataFrame:
        """The timed runs of parts."""
        return self.runs[self.runs.part.isin(parts)]

    @cached_property
    def runs(self) -> pd.DataFrame:
        """A row for each timed run: its case, its block and its times; NaN for unknown and 0."""
        import pandas as pd

        rows = [run_row(record) for record in self.records if record.run.is_timed]
        table = pd.DataFrame(rows, columns=[*CASE, *TIMES])
        times = table[TIMES].astype(float)
        table[TIMES] = times.where(times > 0)
        return table

    def need_ceilings(self) -> Ceilings:
        """LabError if it is not known how fast this machine reads."""
        rates = self.ceilings.rates if self.ceilings else ()
        for rate in rates:
            if self.ceilings and rate.n_tokens == 1 and rate.op in kernel_rates.READERS:
                return self.ceilings
        raise LabError("The ceilings of this machine are not measured.", "Run: lab ceilings")


def run_row(record: Record) -> dict[str, object]:
    """The case and the figures of a run."""
    run = record.run
    row: dict[str, object] = {
        "record": record,
        "part": run.part,
        "variant": run.variant,
        "n_prompt": run.n_prompt,
        "block": run.repeat if run.block is None else run.block,
        "format": record.model.quantization or "",
        "n_bytes": record.model.n_bytes or 0,
        "n_seq": run.case.get("n_seq"),
        "chunk": run.case.get("chunk"),
        "text": run.case.get("text"),
        **figures.of_run(run),
    }
    if run.experiment == TURNS:
        row |= last_turn(run)
    return row


def last_turn(run: Run) -> dict[str, object]:
    """The cache of a conversation, and the times of its last turn; empty for other steps.

    TTFT_SHARE: the time of a computed token in the last turn over that in the first.
    """
    conversation = conversation_of(run)
    assert conversation is not None
    table = figures_of_turns(run.steps.frame(), conversation)
    if table.empty:
        return {}
    token_s = table.ttft_s / table.n_computed
    token_s = token_s.where(token_s > 0)
    return {
        "cache": cache_label(run.case),
        LAST_TTFT: table.ttft_s.iloc[-1],
        LAST_DECODE: table.decode_s.iloc[-1],
        TTFT_SHARE: token_s.iloc[-1] / token_s.iloc[0],
    }


def cache_label(case: Mapping[str, Value]) -> str:
    if case["keep"] == NONE:
        return "no cache"
    if case["breaks"]:
        return "changed prompt"
    return "cached prompt"
