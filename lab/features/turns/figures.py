"""The figures of a conversation's turns, measured or predicted, in a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from lab.app.experiment_tables import with_none
from lab.core import memory, script, stats
from lab.core.lists import grouped
from lab.core.record import DECODE, FORGET, LOAD, PREFILL, SAVE, Record
from lab.features.turns.conversation import (
    KEEPS,
    MEMORY,
    NAME,
    NONE,
    SLOT,
    Conversation,
    breaks_of_text,
    conversation_of,
    parse_breaks,
)
from lab.features.turns.planning import write
from lab.roofline.step_prediction import StepPrediction
from lab.runner.cases import Case

if TYPE_CHECKING:
    import pandas as pd

COUNTS = (
    *("n_prompt", "n_cached", "n_computed", "n_again", "differs_at"),
    *("state_bytes", "slot_bytes"),
)
TIMES = (
    *("without_s", "perfect_s", "expected_ttft_s", "expected_turn_s", "save_s", "load_s"),
    "formula_error",
)
"""Columns that `finished` adds where they are missing."""

STEP_ROUNDING = 32
"""Predicted decode steps are rounded down to such positions: fewer different steps."""


def figures(steps: pd.DataFrame, conversation: Conversation) -> pd.DataFrame:
    """A row per turn of the first conversation, from a run's steps; empty if they are not those of
    the script.

    `n_cached` tokens of the prompt were in the cache, `n_computed` were not; `n_again` of these
    belong to earlier turns. `differs_at`: the first token of the prompt that is not the cache's,
    NaN if the cache served all that it had.
    """
    import pandas as pd

    steps = steps.assign(turn=turn_of_steps(steps), took_s=steps.end_s - steps.start_s)
    prompts = steps[steps.kind == PREFILL].groupby("turn")
    turns = steps[steps.kind != SAVE].groupby("turn")
    numbers = pd.Index(conversation.numbers).repeat(conversation.n_slots)  # slots alternate
    if len(prompts) != len(numbers):
        return pd.DataFrame()
    n_answer = [conversation.answers[number - 1] for number in numbers]
    new_of_turn = new_tokens(conversation)
    n_new = [new_of_turn[number - 1] for number in numbers]
    table = prompts.agg(n_cached=("n_past", "first"), n_computed=("n_tokens", "sum"))
    table["n_prompt"] = table.n_cached + table.n_computed
    table["n_again"] = (table.n_computed - n_new).clip(lower=0)
    n_after = table.n_prompt + n_answer - 1  # tokens in the cache after a turn
    n_before = n_after.shift(conversation.n_slots, fill_value=0)
    is_cut = (table.n_cached < n_before) & (conversation.keep != NONE)
    table["differs_at"] = table.n_cached.where(is_cut)
    table["ttft_s"] = prompts.end_s.last() - turns.start_s.first()
    table["decode_s"] = turns.end_s.last() - prompts.end_s.last()
    table["turn_s"] = table.ttft_s + table.decode_s
    for kind in (SAVE, LOAD):
        took_s = steps[steps.kind == kind].groupby("turn").took_s.sum()
        table[f"{kind}_s"] = took_s.reindex(table.index)
    first_slot = table[:: conversation.n_slots]
    return first_slot.set_axis(pd.Index(conversation.numbers, name="turn"))


def turn_of_steps(steps: pd.DataFrame) -> pd.Series:
    """The number of each step's turn, from 1, counting the turns of all slots.

    A turn begins with the first of its prefill steps, or with what prepares the cache for them.
    """
    is_prefill = steps.kind.eq(PREFILL)
    begins_prefill = is_prefill & ~is_prefill.shift(fill_value=False)
    number = begins_prefill.cumsum()
    prepares_cache = steps.kind.isin([FORGET, LOAD])
    return number.mask(prepares_cache, number + 1)


def new_tokens(conversation: Conversation) -> list[int]:
    """Tokens of each turn's prompt that no earlier turn computed: the message, and the last token
    of the answer before it, or the system prompt."""
    n_new = []
    n_held = 0  # tokens of the turn before and its answer
    lengths = zip(
        conversation.prompts, conversation.messages, conversation.answers, strict=True
    )
    for number, (n_prompt, n_message, n_answer) in enumerate(lengths, 1):
        if number == 1:
            n_new.append(n_message + conversation.system)
        elif n_prompt - n_message == n_held:
            n_new.append(n_message + 1)
        else:
            n_new.append(n_message)
        n_held = n_prompt + n_answer
    return n_new


def predicted(prediction: StepPrediction, conversation: Conversation) -> pd.DataFrame:
    """The same figures of the same script, with predicted times of its steps; NaN where a step's
    cost is unknown."""
    import pandas as pd

    step_s = cache(prediction.seconds)
    move_s = cache(prediction.move)
    case = Case(1, 1, experiment=NAME, setup=conversation)
    operations = write(case, lambda slot, n: list(range(n)), prediction.settings)
    now_s = 0.0
    rows = []
    for step in script.shapes(operations):
        took_s: float | None = 0.0
        if step.kind in (SAVE, LOAD):
            took_s = move_s(step.n_past)
        elif step.kind == DECODE:
            n_past = step.n_past - step.n_past % STEP_ROUNDING
            took_s = step_s(step.n_tokens, n_past, step.n_outputs)
        elif step.kind != FORGET:
            took_s = step_s(step.n_tokens, step.n_past, step.n_outputs)
        end_s = math.nan if took_s is None else now_s + took_s
        rows.append((step.kind, step.n_tokens, step.n_past, now_s, end_s))
        now_s = end_s
    steps = pd.DataFrame(rows, columns=["kind", "n_tokens", "n_past", "start_s", "end_s"])
    return figures(steps, conversation)


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[TurnRow]:
    """The turns of each conversation, with its breaks if it has some; uncached only if nothing else
    was measured.

    `without_s` and `perfect_s`: the turn's time without a cache, and with one that nothing breaks;
    None if those cases were not measured. `slot_bytes`: the cache of the second conversation.
    Columns: as in `finished`.
    """
    import pandas as pd

    measured = measured_turns(records)
    numbers: dict[Conversation, int] = {}  # of conversations with the same prompts
    tables: list[pd.DataFrame] = []
    for setups in grouped(measured, comparable_part).values():
        comparable = {setup: measured[setup] for setup in setups}
        shown = shown_setups(setups)
        has_several_places = len({setup.keep for setup in shown}) > 1
        for setup in shown:
            number = numbers.setdefault(prompts_of(setup), len(numbers) + 1)
            place = setup.keep if has_several_places else ""
            table = measured[setup].assign(conversation=number, cache=place)
            table = with_comparisons(table, setup, comparable)
            if prediction is not None:
                table = with_prediction(table, predicted(prediction, setup))
            tables.append(table.reset_index())
    return finished(pd.concat(tables, ignore_index=True)) if tables else []


def prompts_of(setup: Conversation) -> Conversation:
    """What decides the prompts of a conversation, wherever its cache is."""
    breaks = breaks_of_text(setup.breaks)
    return dataclasses.replace(setup, breaks=breaks, keep=MEMORY, only=())


def comparable_part(setup: Conversation) -> Conversation:
    """What conversations have in common whose times can be compared: all but breaks and caches."""
    return dataclasses.replace(prompts_of(setup), breaks="")


def measured_turns(records: Sequence[Record]) -> dict[Conversation, pd.DataFrame]:
    """The turns of each conversation: medians over runs."""
    import numpy as np
    import pandas as pd

    tables: dict[Conversation, pd.DataFrame] = {}
    by_setup = grouped(records, lambda record: conversation_of(record.run))
    for setup, records_of_setup in by_setup.items():
        turns = [figures(record.run.steps.frame(), setup) for record in records_of_setup]
        table = pd.concat(turns).groupby(level=0).median()
        if table.empty:
            continue
        # The texts of two runs may differ at different tokens: their median is no whole number.
        table["n_cached"] = np.floor(table.n_cached)
        table["differs_at"] = np.floor(table.differs_at)
        table["n_again"] = np.ceil(table.n_again)
        table["n_computed"] = table.n_prompt - table.n_cached
        table["state_bytes"] = state_bytes(records_of_setup)
        table["slot_bytes"] = slot_bytes(records_of_setup[0], setup)
        events = parse_breaks(setup.breaks, setup.n_turns)
        table["breaks"] = [", ".join(events[turn - 1]) for turn in table.index]
        table["is_known"] = True
        table["keep"] = setup.keep
        tables[setup] = table
    return tables


def state_bytes(records: Sequence[Record]) -> pd.Series:
    """The bytes of each turn's saved state, by turn, of the first run that saved some."""
    import pandas as pd

    for record in records:
        sizes = record.run.counts.get("state_bytes")
        if sizes:
            return pd.Series(sizes, index=range(1, 1 + len(sizes)), dtype=float)
    return pd.Series(dtype=float)


def slot_bytes(record: Record, conversation: Conversation) -> float:
    """The bytes of the second conversation's cache; NaN if there was none."""
    if conversation.keep != SLOT:
        return math.nan
    settings = dataclasses.replace(
        record.settings, n_seq_max=1, n_ctx=record.settings.n_ctx // conversation.n_slots
    )
    n_bytes = memory.of_context(record.model, settings).kv_cache_bytes
    return math.nan if n_bytes is None else n_bytes


def shown_setups(setups: Sequence[Conversation]) -> list[Conversation]:
    """The conversations with a cache, in the order of KEEPS; without one only if nothing else was
    measured.

    Where breaks were measured, the conversation without them is only their comparison.
    """
    broken_places = {setup.keep for setup in setups if setup.breaks}
    cached = []
    for setup in setups:
        is_comparison = setup.keep in broken_places and not setup.breaks
        if setup.keep != NONE and not is_comparison:
            cached.append(setup)
    return sorted(cached or setups, key=lambda setup: KEEPS.index(setup.keep))


def with_comparisons(
    table: pd.DataFrame, setup: Conversation, comparable: Mapping[Conversation, pd.DataFrame]
) -> pd.DataFrame:
    """Add the times without a cache and with one that nothing breaks, from the other cases."""
    table = table.copy()
    breaks = breaks_of_text(setup.breaks)
    for candidate, turns in comparable.items():
        if candidate.keep == NONE and breaks_of_text(candidate.breaks) == breaks:
            table["without_s"] = uncached_ttft_s(table, turns) + table.decode_s
        if setup.keep != NONE and candidate.keep == setup.keep and not candidate.breaks:
            table["perfect_s"] = turns.turn_s
    return table


def with_prediction(table: pd.DataFrame, expected: pd.DataFrame) -> pd.DataFrame:
    if expected.empty:
        return table
    return table.assign(expected_ttft_s=expected.ttft_s, expected_turn_s=expected.turn_s)


def uncached_ttft_s(table: pd.DataFrame, uncached: pd.DataFrame) -> pd.Series:
    """The TTFT of each turn without a cache: measured, or by the law a n + b n^2 through the
    measured turns and turn 1."""
    import pandas as pd

    columns = ["n_prompt", "ttft_s"]
    points = pd.concat([table[columns].head(1), uncached[columns]])  # turn 1 had no cache
    terms = [list(points.n_prompt), list(points.n_prompt**2)]
    linear, square = stats.fit(terms, list(points.ttft_s))
    by_law_s = linear * table.n_prompt + square * table.n_prompt**2
    return uncached.ttft_s.reindex(table.index).fillna(by_law_s)


class TurnRow(Protocol):
    """A turn: the columns that the table, the sentences and the picture read."""

    conversation: int
    keep: str
    turn: int
    cache: str
    breaks: str
    differs_at: int | None
    n_prompt: int
    n_cached: int
    n_computed: int
    n_again: int | None
    ttft_s: float
    decode_s: float
    turn_s: float
    sum_s: float
    again_s: float
    without_s: float | None
    perfect_s: float | None
    expected_ttft_s: float | None
    formula_error: float | None
    is_known: bool
    state_bytes: int | None
    slot_bytes: int | None
    save_s: float | None
    load_s: float | None

    def _asdict(self) -> dict[str, object]: ...


def finished(table: pd.DataFrame) -> list[TurnRow]:
    """The table as rows, with all columns, None for an unknown figure, and whole numbers for
    counts."""
    table = table.copy()
    for name in (*COUNTS, *TIMES):
        if name not in table:
            table[name] = math.nan
    table["sum_s"] = table.groupby(["conversation", "keep"]).turn_s.cumsum()
    again_s = table.ttft_s * table.n_again / table.n_computed
    table["again_s"] = again_s.where(table.n_again > 0, 0.0).astype(float)
    cells = with_none(table.astype(dict.fromkeys(COUNTS, "Int64")))
    return list(cells.itertuples(index=False, name="Row"))
