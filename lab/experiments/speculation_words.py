"""What rows of speculation show, in sentences: where it pays, and where not, which of its three parts is to blame."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lab.core import guesses
from lab.core.levers import LOOKUP
from lab.core.record import Record
from lab.experiments import speculation_rows
from lab.experiments.speculation_rows import GUESSING, VERIFYING, CurveRow, Row, times_of


def sentences(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Of one setup: the best draft length for each text, how good predictions were, and whether the text stayed."""
    words = []
    for key in dict.fromkeys((row.key, row.draft) for row in rows):
        words += _of_text([row for row in rows if (row.key, row.draft) == key], records)
    most = {row.draft: max(r.n_draft for r in rows if r.draft == row.draft) for row in rows}
    errors = [
        abs(row.expected / row.speed_up - 1)
        for row in rows
        if row.expected and row.speed_up and row.n_draft < most[row.draft]
    ]
    if errors:
        words.append(
            f"Predicted speed-ups are off by {statistics.median(errors):.0%}, the median; at most {max(errors):.0%} "
            f"(of draft lengths below the longest, whose runs they are learned from)."
        )
    return words + _same_text(rows, records)


def _of_text(alike: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Of one kind of text."""
    known = [row for row in alike if row.speed_up is not None]
    if not known:
        return []
    best = max(known, key=lambda row: row.speed_up or 0.0)
    gain = best.speed_up or 0.0
    who = "looked up" if best.draft == LOOKUP else f"guessed by {best.draft}"
    low, high = (best.low, best.high) if best.low is not None and best.high is not None else (0.0, float("inf"))
    interval = f" (95 %: {low:.2f} to {high:.2f})" if best.low is not None else " (too few blocks for an interval)"
    right = "" if best.right is None or best.length is None else f"; {best.right:.0%} were right"
    if low > 1:
        words = [
            f"{best.text}: fastest with {best.n_draft} {who} at a time, {gain:.2f} times as fast as plain decoding"
            f"{interval}{right}."
        ]
    elif high < 1:
        words = [
            f"{best.text}: does not pay. At best, with {best.n_draft} {who} at a time, it is {gain:.2f} times as fast "
            f"as plain decoding{interval}{right}.{_blame(best, records)}"
        ]
    else:
        words = [
            f"{best.text}: no clear gain. With {best.n_draft} {who} at a time it is {gain:.2f} times as fast as plain "
            f"decoding{interval}{right}.{_blame(best, records)}"
        ]
    teachers, times = speculation_rows.longest(records, best.key, best.draft), times_of(records, best.key, best.draft)
    expected = speculation_rows.best_length(teachers, times, best.draft == LOOKUP)
    if expected and expected[0] not in [row.n_draft for row in known] and expected[1] > max(1.0, gain):
        words.append(
            f"{best.text}: by the times of the steps {expected[0]} at a time would be best ({expected[1]:.2f})."
        )
    return words


def _blame(row: Row, records: Sequence[Record]) -> str:
    """Why it does not pay, with the number that says so."""
    times = times_of(records, row.key, row.draft)
    if row.to_blame is None or times is None:
        return ""
    if row.to_blame == VERIFYING:
        v = times.target[row.n_draft + 1] / times.target[1]
        return (
            f" Verifying is to blame: a step of {row.n_draft + 1} positions takes {v:.2g} times one of a single token."
        )
    if row.to_blame == GUESSING:
        return f" Guessing is to blame: a guess takes {times.draft[1] / times.target[1]:.2g} of a step of the model."
    n = row.n_draft
    all_right = guesses.speed_up([(n, n)], times)
    if all_right is not None and all_right > 1:
        return f" Wrong guesses are to blame: with every guess right it would be {all_right:.2f} times as fast."
    return " Wrong guesses cost most, but even with every guess right it would not pay."


def _same_text(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Whether the tokens were those of plain decoding, and where not, how near the choice was."""
    n_runs = len(speculation_rows.compared(records))
    parted = speculation_rows.partings(records)
    if not rows or not n_runs:
        return ["Whether the text is that of plain decoding could not be seen: there is no plain run."] if rows else []
    if not parted:
        return [
            f"In {'all ' if n_runs > 1 else ''}{n_runs} run{'s' * (n_runs > 1)} the tokens are those of plain decoding."
        ]
    margins = [one.margin for one in parted if one.margin is not None]
    usual = [margin for record in records for margin in record.run.margins or ()]
    near = ""
    if margins and usual:
        near = (
            f" There the best token was {statistics.median(margins):.2g} above the next one (logits; at most "
            f"{max(margins):.2g}); usually it is {statistics.median(usual):.2g}."
        )
    return [
        f"In {len(parted)} of {n_runs} runs the text parts from plain decoding, from token "
        f"{1 + min(one.at for one in parted)} on at the earliest: a step of several positions takes other paths "
        f"through the kernels, which round differently.{near}"
    ]


def of_curve(curve: Sequence[CurveRow]) -> list[str]:
    """What verifying costs, and how many guesses must be right for it to pay."""
    words = []
    for key in dict.fromkeys((row.n_prompt, row.draft) for row in curve):
        alike = [row for row in curve if (row.n_prompt, row.draft) == key and row.n_positions > 1]
        needed = {row.n_positions - 1: guesses.break_even(row.v, row.c or 0.0, row.n_positions - 1) for row in alike}
        possible = {n: share for n, share in needed.items() if share is not None}
        last = alike[-1] if alike else None
        if last is None:
            continue
        cost = f"A step of {last.n_positions} positions takes {last.v:.2g} times one of a single token"
        guess = f", a guess {last.c:.2g}" if last.c is not None else ""
        if possible:
            n, share = min(possible.items(), key=lambda pair: pair[1])
            pays = (
                f"{n} guess{'es' * (n > 1)} at a time pay{'s' * (n == 1)} where more than {share:.0%} of them are right"
            )
        else:
            pays = "no draft length pays, even with every guess right"
        words.append(f"{cost}{guess}: {pays}.")
    errors = [abs(row.expected_v / row.v - 1) for row in curve if row.expected_v is not None and row.n_positions > 1]
    if errors:
        words.append(
            f"What the ceilings predict for v is off by {statistics.median(errors):.0%}, the median; at most "
            f"{max(errors):.0%}."
        )
    return words
