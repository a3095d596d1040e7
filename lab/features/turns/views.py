"""A conversation as sentences, a table and a picture, the same for the engine and for a server.

Rows are named tuples, a turn each. `keep` is where the cache was: memory, disk, none, or server. `is_known`: the tokens
that the cache served are counted, not estimated. Of a server `differs_at` counts letters.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core import stats
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.features.experiment import cell, first_difference, off_by
from lab.features.predict.learning import StepPrediction
from lab.show import canvas
from lab.show.wording import UNKNOWN, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BREAKS = {
    "system": "A system prompt that does not change",
    "tools": "Tools listed in the same order",
    "truncate": "An old message that is not shortened",
    "second": "A slot of its own for the second conversation",
    "shift": "A context that does not fill up",
    "thinking": "Thinking that stays in earlier answers",
}
"""What breaks a cache, and what would not."""

SERVER = "server"
PLACES = {
    "memory": ("", "cache in memory"),
    "disk": (" with the cache on disk", "cache on disk"),
    "none": (" without a cache", "no cache"),
    SERVER: (" through the server", "the server's cache"),
}
"""For each place of the cache the words of a sentence, and the title of a picture."""

COUNTS = (
    "conversation",
    "turn",
    "n_prompt",
    "n_cached",
    "n_computed",
    "n_again",
    "differs_at",
    "n_runs",
    "state_bytes",
)


def counted(t: pd.DataFrame) -> pd.DataFrame:
    """The table with whole numbers for counts, which may be unknown."""
    return t.astype({name: "Int64" for name in COUNTS if name in t})


def sentences(made: Sequence[Any]) -> list[str]:
    """The answer of each conversation, what broke its cache, and how good the predictions are."""
    words = list[str]()
    for (_, keep), own in grouped(made, lambda row: (row.conversation, row.keep)).items():
        again, where = sum(again_s(row) for row in own), PLACES[keep][0]
        read = f"{seconds(again)} of that for tokens read before" if again else "no token was read twice"
        waiting = "waiting for the first token" if keep == SERVER else "prefill"
        ttft = seconds(sum(row.ttft_s for row in own))
        words.append(
            f"{plural(len(own), 'turn')} take {seconds(own[-1].sum_s)}{where}; {ttft} of it is {waiting}, {read}."
        )
        lost: dict[str, float] = {}
        for row in own:
            if row.differs_at is None or not row.breaks:
                continue
            unit, about = ("letter", "" if row.is_known else "about ") if keep == SERVER else ("token", "")
            words.append(
                f"Turn {row.turn} ({row.breaks}): the prompt differs from {unit} {row.differs_at + 1:,} on, and "
                f"{about}{plural(row.n_again, 'token')} after it were read again."
            )
            if row.perfect_s is not None:
                lost[row.breaks] = lost.get(row.breaks, 0.0) + row.turn_s - row.perfect_s
        words += [
            f"{BREAKS.get(kinds, f'Without {kinds} it')} would save {seconds(saved)}."
            for kinds, saved in lost.items()
            if saved > 0
        ]
        if keep != "none" and all(row.without_s is not None for row in own):
            words.append(f"Without a cache they take {seconds(sum(row.without_s for row in own))}.")
        if keep == "disk":
            words += moved(own)
        if not all(row.is_known for row in own):
            words.append("~: the server does not report cached tokens; they are estimated from the TTFT.")
        words += off_by(((row.expected_ttft_s, row.ttft_s) for row in own), f"TTFT{where}")
    return words


def again_s(row: Any) -> float:
    """The part of a turn's TTFT in which tokens of earlier turns were computed again."""
    return float(row.ttft_s * row.n_again / row.n_computed) if row.n_again and row.n_computed else 0.0


def moved(own: Sequence[Any]) -> list[str]:
    """What saving and loading cost, and from which length loading is faster than prefill."""
    loads = [(before, row) for before, row in itertools.pairwise(own) if row.load_s]
    if not loads or not own[-1].save_s or not all(row.state_bytes for row in own):
        return []
    (held, after), last = loads[-1], own[-1]
    words = (
        f"Saving {last.state_bytes / 1e6:,.1f} MB took {seconds(last.save_s)} "
        f"({cell(last.state_bytes / 1e9 / last.save_s)} GB/s), loading {held.state_bytes / 1e6:,.1f} MB "
        f"{seconds(after.load_s)} ({cell(held.state_bytes / 1e9 / after.load_s)} GB/s)."
    )
    if len(loads) < 2:
        return [words]
    lengths = [float(before.n_prompt) for before, _ in loads]
    fixed, per_token = stats.fit([[1.0] * len(loads), lengths], [row.load_s for _, row in loads])
    gain = own[0].ttft_s / own[0].n_computed - per_token
    pays = f"faster than prefill from about {plural(max(1, round(fixed / gain)), 'token')} on" if gain > 0 else ""
    return [words, f"Loading is {pays or 'not faster than prefill at any of these lengths'}."]


def agreement(pairs: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> list[str]:
    """Whether cached turns chose the tokens of uncached ones, from both answers and the turn's number."""
    at = [(turn, i) for ids, others, turn in pairs if (i := first_difference(ids, others)) is not None]
    if not pairs or not at:
        answers = plural(len(pairs), "answer")
        return [f"In {answers} the cached turns chose the tokens of the uncached ones."] if pairs else []
    turn, token = min(at)
    return [
        f"In {len(at)} of {plural(len(pairs), 'answer')} a cached turn chose another token than the uncached one, "
        f"first token {token + 1} of answer {turn}: kernels for steps of other sizes round differently."
    ]


def _count(row: Any, name: str) -> str:
    value, mark = getattr(row, name), "" if row.is_known or name == "n_prompt" else "~"
    return UNKNOWN if value is None else f"{mark}{value:,}"


TABLE: dict[str, Any] = {
    "name": "turns",
    "question": "How much of a conversation's prompt is read again?",
    "title": "a conversation turn by turn, medians over runs; again: tokens of earlier turns that were computed again; "
    "differs: the first token that is not the cache's",
    "caption": "Above: the tokens of each prompt. Below: the time of each turn, with that of a cache that nothing "
    "breaks and that without a cache.",
    "columns": (
        ("turn", lambda row: str(row.turn)),
        ("cache", lambda row: row.cache),
        ("broken by", lambda row: row.breaks),
        ("cached", lambda row: _count(row, "n_cached")),
        ("computed", lambda row: _count(row, "n_computed")),
        ("again", lambda row: _count(row, "n_again") if row.n_again else UNKNOWN),
        ("TTFT\ns", lambda row: cell(row.ttft_s)),
        ("turn\ns", lambda row: cell(row.turn_s)),
        ("no cache\ns", lambda row: cell(row.without_s)),
        ("perfect\ns", lambda row: UNKNOWN if row.perfect_s == row.turn_s else cell(row.perfect_s)),
        ("predicted\nTTFT s", lambda row: cell(row.expected_ttft_s)),
        ("decode\ns", lambda row: cell(row.decode_s)),
        ("sum\ns", lambda row: cell(row.sum_s)),
        ("differs\nat", lambda row: UNKNOWN if row.differs_at is None else f"{row.differs_at + 1:,}"),
        ("prompt", lambda row: _count(row, "n_prompt")),
    ),
}


def draw_engine(
    made: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    draw(made, subject, figure)


def draw(made: Sequence[Any], subject: str, figure: Figure) -> None:
    """Tokens of each prompt (cached, read again, new), and below the time of each turn; the perfect cache is a line."""
    keeps = list(grouped(made, lambda row: (row.conversation, row.keep)).items())
    figure.set_figheight(figure.get_figheight() * 1.4)
    axes = figure.subplots(2, len(keeps), sharex=True, sharey="row", squeeze=False)
    for (tokens, times), ((_, keep), own) in zip(axes.T, keeps, strict=True):
        at, again = [row.turn for row in own], [row.n_again or 0 for row in own]
        _stack(tokens, at, "cached", [row.n_cached or 0 for row in own], canvas.GRID)
        _stack(tokens, at, "read again", again, canvas.COLOURS[3])
        new = [(row.n_computed or 0) - n for row, n in zip(own, again, strict=True)]
        _stack(tokens, at, "new tokens (prefill)", new, canvas.OF_PREFILL)
        _stack(times, at, "read again", [again_s(row) for row in own], canvas.COLOURS[3])
        _stack(times, at, "new tokens (prefill)", [row.ttft_s - again_s(row) for row in own], canvas.OF_PREFILL)
        _stack(times, at, "decode", [row.decode_s for row in own], canvas.OF_DECODE)
        for name, values, style in (
            ("perfect cache", [row.perfect_s for row in own], "-"),
            ("no cache", [row.without_s for row in own], "--"),
            ("predicted", [row.expected_turn_s for row in own], ":"),
        ):
            if None not in values:
                times.plot(at, values, color=canvas.GUIDE, ls=style, lw=1.4, label=name)
        tokens.set_title(PLACES[keep][1], fontsize=10)
        times.set_xlabel("turn")
        times.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("tokens of the prompt")
    axes[1, 0].set_ylabel("time of the turn (s)")
    n_turns = plural(max(row.turn for row in made), "turn")
    canvas.finish(list(axes.flat), f"A conversation of {n_turns}\n{subject}", is_apart=True)


def _stack(ax: Axes, at: Sequence[int], name: str, values: Sequence[float], colour: str) -> None:
    """Bars on top of those that are there."""
    tops = {round(bar.get_x() + bar.get_width() / 2): bar.get_y() + bar.get_height() for bar in ax.patches}  # type: ignore[attr-defined]
    ax.bar(at, values, bottom=[tops.get(x, 0.0) for x in at], color=colour, label=name)
