"""A recording as sections: the bill of its calls, what broke the cache, and what would mend it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from lab.core.figures import TTFT
from lab.core.lists import grouped, plural
from lab.features.recording import figures, picture, sentences
from lab.features.recording.lines import RecordedCall
from lab.show.cells import LONG_TEXT, Column, of_figure
from lab.show.section import UNKNOWN, WIDE, Columns, Context, Kind, Picture, Section, tabled
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

FEW_ROWS = 6  # calls of a short table that are all shown
QUESTION = "What broke the cache?"
ABOUT = "again: tokens of earlier calls that were computed again"
CAPTION = (
    "Above: the tokens of each call's prompt. Below: the time of each call, and what broke "
    "the cache."
)
FROM_TIME = (
    "~: the server did not say how many tokens it had cached; "
    "they are estimated from the time."
)
BY_CHARACTERS = (
    "Tokens read again are estimated by characters: the server cannot tokenize prompts."
)


class BillRow(Protocol):
    """A row of `figures.bill`."""

    cached_by: str


@dataclasses.dataclass(frozen=True)
class CallRow:
    """A call of the table."""

    call: RecordedCall
    figures: BillRow
    conversation: str  # its number; "" for the only one


def is_recorded(line: object) -> bool:
    return isinstance(line, RecordedCall)


def sections(lines: Sequence[RecordedCall], context: Context) -> list[Section]:
    """A part for each recording."""
    has_all = context.details or context.is_page
    of_sessions = grouped(lines, lambda line: line.session).values()
    parts = [section(calls, has_all) for calls in of_sessions]
    return [Section("Conversations and caches", name="record", question=QUESTION, parts=parts)]


KINDS = (Kind("record", is_recorded, sections),)


def section(calls: Sequence[RecordedCall], has_all: bool) -> Section:
    """The bill of one recording; of many calls those that broke the cache, unless it `has_all`."""
    table = figures.bill(calls)
    mends = figures.mends(calls)
    has_several = table.conversation.nunique() > 1
    rows = []
    for call, row in zip(calls, table.itertuples(), strict=True):
        conversation = str(call.conversation) if has_several else ""
        rows.append(CallRow(call, row, conversation))
    broken = [row for row in rows if row.call.cause is not None]
    shown = broken if broken and len(rows) > FEW_ROWS and not has_all else rows
    statements: list[str] = []
    for mend in mends:
        statements += sentences.cause_sentences(calls, mend)
    draw = partial(picture.draw, calls, table, subject(calls))
    return Section(
        f"{plural(len(calls), 'call')} of {subject(calls)}",
        ABOUT,
        name="record",
        question=QUESTION,
        answer=sentences.answer(calls, table),
        **tabled(COLUMNS, shown),
        hidden=others(len(rows) - len(shown)),
        notes=notes(calls, table),
        warnings=failures(calls),
        sentences=statements,
        pictures=[Picture("record", CAPTION, draw, WIDE)],
        data=partial(document, calls, table, mends),
    )


def others(n_calls: int) -> str:
    return f"{plural(n_calls, 'call')} without a break" if n_calls else ""


def subject(calls: Sequence[RecordedCall]) -> str:
    """The model and the server."""
    call = calls[0]
    server = call.endpoint.server or "a server"
    return f"{call.model} through {server} at {call.endpoint.url}"


def notes(calls: Sequence[RecordedCall], table: pd.DataFrame) -> list[str]:
    """How figures were estimated, and which of the server's were not used."""
    lines = []
    if (table.cached_by == figures.FROM_TIME).any() and table.n_cached.notna().any():
        lines.append(FROM_TIME)
    if not table[table.is_broken & table.n_again.notna()].is_exact.all():
        lines.append(BY_CHARACTERS)
    impossible = [call.call for call in calls if call.has_impossible_times]
    if impossible:
        lines.append(
            f"{sentences.which_calls(impossible)}: the server's times exceed the call's own, "
            "so the client's are shown."
        )
    counted = table[table.failure.isna() & table.n_prompt.isna()]
    if 0 < len(counted) < len(table):
        lines.append(
            f"{sentences.which_calls(list(counted.call))}: the server counted no tokens."
        )
    for encoding, unread in grouped(calls, lambda call: call.unread).items():
        if encoding is not None:
            numbers = sentences.which_calls([call.call for call in unread])
            lines.append(
                f"{numbers}: the answer is compressed ({encoding}) in a way that "
                "lab record cannot read."
            )
    return lines


def failures(calls: Sequence[RecordedCall]) -> list[str]:
    """A sentence for each reason for which calls failed."""
    lines = []
    for reason, failed in grouped(calls, lambda call: call.failure).items():
        if reason is not None:
            numbers = sentences.which_calls([call.call for call in failed])
            lines.append(f"{numbers} failed: {reason}.")
    return lines


def count(row: CallRow, name: str) -> str:
    value = getattr(row.figures, name)
    if math.isnan(value):
        return UNKNOWN
    is_estimate = row.figures.cached_by == figures.FROM_TIME and name != "n_prompt"
    return f"~{value:,.0f}" if is_estimate else f"{value:,.0f}"


def again(row: CallRow) -> str:
    return count(row, "n_again") if row.call.cause is not None else ""


def time(row: CallRow, name: str) -> str:
    return digits(getattr(row.figures, name))


COLUMNS: Columns[CallRow] = (
    Column("call", lambda row: str(row.call.call)),
    Column("conversation", lambda row: row.conversation),
    Column("prompt\ntokens", partial(count, name="n_prompt"), is_in_title=True),
    Column("cached", partial(count, name="n_cached")),
    Column("computed", partial(count, name="n_computed")),
    Column("again", again),
    Column("prefill\ns", partial(time, name="prefill_s")),
    Column("what broke the cache", lambda row: sentences.label(row.call.cause), LONG_TEXT),
    Column("decode\ns", partial(time, name="decode_s")),
    of_figure(TTFT, partial(time, name="ttft_s")),
)


def document(
    calls: Sequence[RecordedCall], table: pd.DataFrame, mends: Sequence[figures.Mend]
) -> dict[str, list[object]]:
    """The calls and the mends, for JSON."""
    rows: list[object] = []
    columns = table.astype(object).where(table.notna(), None)
    for call, row in zip(calls, columns.to_dict("records"), strict=True):
        cause = dataclasses.asdict(call.cause) if call.cause else None
        rows.append({**row, "cause": cause})
    return {"calls": rows, "mends": [dataclasses.asdict(mend) for mend in mends]}
