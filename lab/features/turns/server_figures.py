"""The figures of a conversation's turns through a server.

Two turns are sent again with other first words, so that nothing is cached. With the first turn they
give the TTFT of n tokens after c cached ones, T = f + a (n - c) + b (n^2 - c^2): the times without
a cache and with a perfect one and, if the server reports no cached tokens, c (`is_known` is false
then). Where it reports them, every turn is a point of that formula. A turn faster than its own
message counts as one that computed only that, and T is fitted again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lab.core import stats
from lab.core.experiments import setup_of
from lab.core.record import OK
from lab.core.request import RequestRecord
from lab.core.request_times import figures as figures_of_request
from lab.features.turns.conversation import Conversation, parse_breaks
from lab.features.turns.sentences import SERVER

if TYPE_CHECKING:
    import pandas as pd

MOST_COLD = 0.2
"""A request that must be cold is not if the server had more than this share of its prompt in the
cache; templates begin alike, so that some tokens are always there."""

LEAST_MESSAGE = 8  # tokens by which a prompt with another message is surely longer
COUNTS = ("n_prompt", "n_cached", "n_gen", "differs_at")


@dataclass(frozen=True)
class TurnPlace:
    """The place of a request in a conversation."""

    number: int  # of the turn, from 1
    differs_at: int | None = None
    """Letters of the prompt before the first that differs from the turn before; None: first turn.
    """
    is_cold: bool = False  # the same prompt with other first words, so that no cache served it

    @property
    def must_be_cold(self) -> bool:
        """Whether nothing of the prompt may come from a cache."""
        return self.is_cold or self.number == 1


class TtftFormula(NamedTuple):
    """TTFT = fixed_s + linear_s * tokens + square_s * (difference of squared positions)."""

    fixed_s: float = math.nan
    linear_s: float = math.nan
    square_s: float = math.nan
    largest_error: float = math.nan  # of its own points, as a share of what was measured

    def of_prompt(self, n_tokens: pd.Series) -> pd.Series:
        """Seconds of prompts of n_tokens, without a cache and without the fixed time."""
        return self.linear_s * n_tokens + self.square_s * n_tokens**2

    def tokens_of(self, seconds: pd.Series) -> pd.Series:
        """The inverse: the first tokens of a prompt that take these seconds."""
        if self.square_s > 0:
            root = (self.linear_s**2 + 4 * self.square_s * seconds) ** 0.5
            return (root - self.linear_s) / (2 * self.square_s)
        return seconds / self.linear_s


def served(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row per turn of one conversation through a server; empty if no turn succeeded."""
    import pandas as pd

    requests = answered(records)
    if requests.empty or requests.is_cold.all():
        return pd.DataFrame()
    turns = requests[~requests.is_cold].sort_values("turn", ignore_index=True)
    n_new = new_tokens(turns)
    formula = fitted(requests, turns, n_new)
    turns["is_known"] = turns.n_cached.notna()
    turns["formula_error"] = formula.largest_error
    uncached_s = formula.fixed_s + formula.of_prompt(turns.n_prompt)
    # What the cached tokens would have taken
    saved_s = (uncached_s - turns.ttft_s).clip(lower=0)
    estimate = formula.tokens_of(saved_s).round().clip(upper=turns.n_prompt - n_new)
    turns["n_cached"] = turns.n_cached.fillna(estimate)
    turns["n_computed"] = turns.n_prompt - turns.n_cached
    turns["n_again"] = (turns.n_computed - n_new).clip(lower=0).round()
    turns["turn_s"] = turns.ttft_s + turns.decode_s
    turns["without_s"] = uncached_s + turns.decode_s
    cached_s = formula.of_prompt(turns.n_prompt - n_new)  # of a perfect cache
    perfect_s = (turns.without_s - cached_s).clip(upper=turns.turn_s)
    turns["perfect_s"] = perfect_s.where(turns.n_again > 0, turns.turn_s)
    return turns.assign(conversation=1, keep=SERVER, cache="")


def answered(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row per request that succeeded: its place in the conversation, tokens, and times."""
    import pandas as pd

    rows: list[dict[str, object]] = []
    for record in records:
        request = record.request
        times = figures_of_request(request)
        ttft_ns = times.ttft_ns
        e2e_ns = times.e2e_ns
        if times.n_events == 0:  # the answer ended with its first token
            ttft_ns = e2e_ns = request.ended_ns
        if request.status != OK or ttft_ns is None or e2e_ns is None:
            continue
        try:
            place = setup_of(TurnPlace, request.asked.place)
            conversation = setup_of(Conversation, request.asked.case)
        except ValueError:
            continue  # a damaged line
        if not 1 <= place.number <= conversation.n_turns:
            continue
        events = parse_breaks(conversation.breaks, conversation.n_turns)
        rows.append(
            {
                "turn": place.number,
                "is_cold": place.is_cold,
                "breaks": ", ".join(events[place.number - 1]),
                "differs_at": place.differs_at,
                "n_message": conversation.messages[place.number - 1],
                "is_counted": bool(conversation.same),  # the message is all that is new
                "n_prompt": times.n_prompt,
                "n_cached": times.n_cached,
                "n_gen": times.n_generated or None,
                "ttft_s": ttft_ns / 1e9,
                "decode_s": (e2e_ns - ttft_ns) / 1e9,
            }
        )
    table = pd.DataFrame(rows)
    return table if table.empty else table.astype(dict.fromkeys(COUNTS, float))


def new_tokens(turns: pd.DataFrame) -> pd.Series:
    """The tokens of each turn that the server cannot have cached.

    By how much the prompt grew beyond the turn before and its answer (the last token of an answer
    is not cached); the message where a break or a failed turn hides that, or where it was counted.
    """
    n_held = (turns.n_prompt + turns.n_gen - 1).shift(fill_value=0)
    n_grown = turns.n_prompt - n_held
    follows = turns.turn.diff().fillna(turns.turn).eq(1) & turns.breaks.eq("")
    is_grown = follows & (n_grown > 0) & ~turns.is_counted.astype(bool)
    n_new = n_grown.where(is_grown, turns.n_message)
    return n_new.clip(upper=turns.n_prompt)


def fitted(requests: pd.DataFrame, turns: pd.DataFrame, n_new: pd.Series) -> TtftFormula:
    """The formula for the TTFT, from all requests with a known number of computed tokens."""
    import pandas as pd

    must_be_cold = requests.is_cold | (requests.turn == 1)
    is_used = (must_be_cold | requests.n_cached.notna()) & ~was_cached(requests)
    points = requests[is_used]
    points = computed_points(points, points.n_cached.fillna(0)).dropna(subset=["linear"])
    if points.empty:
        return TtftFormula()
    formula = formula_through(points)
    least = computed_points(turns, turns.n_prompt - n_new)  # every turn computes its message
    least_s = (
        formula.fixed_s + formula.linear_s * least.linear + formula.square_s * least.square
    )
    is_too_fast = turns.n_cached.isna() & (turns.ttft_s < least_s)
    fast = least[is_too_fast].dropna(subset=["linear"])
    return formula_through(pd.concat([points, fast]))


def was_cached(requests: pd.DataFrame) -> pd.Series:
    """Whether each request had to be cold, and was not by the server's own count."""
    must_be_cold = requests.is_cold | (requests.turn == 1)
    return must_be_cold & (requests.n_cached > MOST_COLD * requests.n_prompt)


def not_cold(records: Sequence[RequestRecord]) -> list[str]:
    """A sentence on the requests that had to be cold and were not, if there are any."""
    requests = answered(records)
    if requests.empty:
        return []
    cached = requests[was_cached(requests)]
    if cached.empty:
        return []
    n_cold = int((requests.is_cold | (requests.turn == 1)).sum())
    worst = cached.loc[cached.n_cached.idxmax()]
    return [
        f"{len(cached)} of {n_cold} requests that no cache may serve were served by it: "
        f"{worst.n_cached:,.0f} of {worst.n_prompt:,.0f} prompt tokens, by the server's count. "
        "Their times are not used."
    ]


def not_longer(records: Sequence[RequestRecord]) -> list[str]:
    """A sentence on a turn that adds a message and whose prompt has as many tokens as that of the
    turn before, by the server's count, if there is one. A request that was sent again adds none."""
    requests = answered(records)
    if requests.empty:
        return []
    counted = requests[~requests.is_cold & requests.n_prompt.notna()].sort_values("turn")
    is_as_long = counted.n_prompt.eq(counted.n_prompt.shift())
    is_next = counted.turn.eq(counted.turn.shift() + 1)
    as_long = counted[is_as_long & is_next & counted.n_message.ge(LEAST_MESSAGE)]
    if as_long.empty:
        return []
    first = as_long.iloc[0]
    return [
        f"Turn {first.turn:,} has {first.n_prompt:,.0f} prompt tokens by the server's count, as "
        "many as the turn before: it cuts prompts, or counts only a part of them. Use fewer or "
        "shorter turns, or start the server with a longer context."
    ]


def computed_points(requests: pd.DataFrame, n_cached: pd.Series) -> pd.DataFrame:
    """What the formula multiplies: tokens after the cached ones, and the difference of squares."""
    return requests.assign(
        linear=requests.n_prompt - n_cached, square=requests.n_prompt**2 - n_cached**2
    )


def formula_through(points: pd.DataFrame) -> TtftFormula:
    """The formula through these points; with one or two, terms are left out."""
    columns = [list(points.linear), list(points.square), [1.0] * len(points)]
    terms = [*stats.fit(columns[: len(points)], list(points.ttft_s)), 0.0, 0.0]
    linear_s, square_s, fixed_s = terms[:3]
    fitted_s = fixed_s + linear_s * points.linear + square_s * points.square
    errors = (fitted_s / points.ttft_s - 1).abs()
    return TtftFormula(fixed_s, linear_s, square_s, errors.max())
