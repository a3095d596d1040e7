"""What speculation brought, beside what was predicted: rows, and what they say in sentences.

The sentences say where it pays, and where not, which of its three parts is to blame.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import guesses, stats
from lab.core.guesses import Chain, StepTimes
from lab.core.levers import LOOKUP
from lab.core.lists import plural
from lab.core.record import DRAFT, VERIFY, Record, Run
from lab.experiments import cases
from lab.why.step_prediction import StepPrediction

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Key = tuple[str, int, int]  # text, n_prompt, n_gen
VERIFYING, GUESSING, WRONG = "verifying", "guessing", "wrong guesses"


@dataclass(frozen=True)
class Row:
    """One kind of text and draft length of one setup: medians over blocks.

    `right` is the share of all guesses that were right, `by_position` that of the first, second, ... guess of a step
    of those whose predecessors were right. `length` is the tokens that a step with guesses brought. `draft_s` and
    `verify_s` are what guessing and verifying took, each time. `speed_up` is the time of plain decoding over this,
    block by block, with its interval of 95 % (None for fewer than 6 blocks).

    `expected` is the speed-up from the curve and from the runs with the longest draft (its own there); `to_blame` what
    costs most where it is below 1. `n_parted` runs chose another token than plain decoding.
    """

    text: str
    n_prompt: int
    n_gen: int
    draft: str
    n_draft: int
    n_runs: int
    right: float | None
    by_position: tuple[float, ...]
    length: float | None
    draft_s: float | None
    verify_s: float | None
    tpot_s: float
    plain_tpot_s: float | None
    speed_up: float | None
    low: float | None
    high: float | None
    expected: float | None
    to_blame: str | None
    n_parted: int

    @property
    def key(self) -> Key:
        """What is the same for all draft lengths."""
        return self.text, self.n_prompt, self.n_gen


@dataclass(frozen=True)
class CurveRow:
    """A step of n positions: its time, how many times that of one it is, and what the ceilings say of that.

    With a draft of random weights, or none: `speed_ups` by the share of guesses that are right, each with the same
    probability, for n - 1 guesses a step (`ACCEPTANCES`).
    """

    n_prompt: int
    draft: str | None  # that was timed with it: LOOKUP, which costs nothing, a model, or none
    n_positions: int
    step_s: float
    v: float
    expected_v: float | None
    c: float | None  # a step of the draft model over one of the model; None without one
    speed_ups: tuple[float, ...]


@dataclass(frozen=True)
class Parted:
    """Where a run first chose another token than plain decoding, and the distance of the two best there (logits)."""

    text: str
    n_prompt: int
    n_gen: int
    draft: str
    n_draft: int
    at: int
    margin: float | None


Block = tuple[str, int, int | None]  # session, repeat, start of the engine: what is compared ran in one process


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each text and draft length, of timed runs of one setup that went well."""
    by_case: dict[tuple[Key, str, int], list[Record]] = {}
    for record in records:
        run, lever = record.run, record.run.speculation
        if lever is not None and lever.text is not None and guesses.tpot_s(run) is not None:
            key = lever.text, run.n_prompt, run.n_gen
            by_case.setdefault((key, lever.draft or "", lever.n_draft), []).append(record)
    parted = [((one.text, one.n_prompt, one.n_gen), one.draft, one.n_draft) for one in partings(records)]
    made = []
    for (key, draft, n_draft), alike in sorted(by_case.items(), key=lambda item: item[0]):
        if not n_draft:
            continue
        plain, teachers = by_case.get((key, "", 0), []), longest(records, key, draft)
        row = _row(key, draft, n_draft, alike, plain, teachers, times_of(records, key, draft))
        made.append(dataclasses.replace(row, n_parted=parted.count((key, draft, n_draft))))
    return made


def longest(records: Sequence[Record], key: Key, draft: str) -> list[Run]:
    """Runs of one kind of text with the longest draft: they teach which guesses are right."""
    runs = [run for run in _with(records, key, draft) if guesses.tpot_s(run) is not None]
    most = max((_n_draft(run) or 0 for run in runs), default=0)
    return [run for run in runs if _n_draft(run) == most]


def times_of(records: Sequence[Record], key: Key, draft: str) -> StepTimes | None:
    """The times of bare steps beside runs of this kind; None where none were timed."""
    return guesses.step_times(_with(records, (None, *key[1:]), draft))


def _with(records: Sequence[Record], key: tuple[str | None, int, int], draft: str) -> list[Run]:
    """Runs with this draft; of bare steps, where the key has no text."""
    runs = ((record.run, record.run.speculation) for record in records)
    return [run for run, its in runs if its and (its.text, run.n_prompt, run.n_gen, its.draft) == (*key, draft)]


def _row(
    key: Key,
    draft: str,
    n_draft: int,
    alike: Sequence[Record],
    plain: Sequence[Record],
    teachers: Sequence[Run],
    times: StepTimes | None,
) -> Row:
    runs = [record.run for record in alike]
    tried = [chain for run in runs for chain in guesses.checked(run) if chain[0]]
    of_blocks = {_block(one): seconds for one in plain if (seconds := guesses.tpot_s(one.run)) is not None}
    pairs = [(guesses.tpot_s(one.run) or 0.0, of_blocks[_block(one)]) for one in alike if _block(one) in of_blocks]
    gain = statistics.median(b / a for a, b in pairs) if pairs else None
    ratio = stats.paired_ratio([pair[0] for pair in pairs], [pair[1] for pair in pairs]) if pairs else None
    return Row(
        text=key[0],
        n_prompt=key[1],
        n_gen=key[2],
        draft=draft,
        n_draft=n_draft,
        n_runs=len(runs),
        right=sum(right for _, right in tried) / sum(n for n, _ in tried) if tried else None,
        by_position=guesses.by_position(tried),
        length=1 + statistics.fmean(right for _, right in tried) if tried else None,
        draft_s=_seconds(runs, DRAFT, len(tried)),
        verify_s=_seconds(runs, VERIFY, len(tried)),
        tpot_s=statistics.median(guesses.tpot_s(run) or 0.0 for run in runs),
        plain_tpot_s=statistics.median(of_blocks.values()) if of_blocks else None,
        speed_up=gain,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
        expected=expected_speed_up(teachers, times, n_draft, draft == LOOKUP),
        to_blame=to_blame(tried, times, n_draft) if times and gain is not None and gain < 1 else None,
        n_parted=0,
    )


def by_block(records: Sequence[Record], key: Key) -> dict[tuple[str, int], dict[Block, float]]:
    """TPOT in seconds, of one kind of text: by draft (empty: plain decoding) and draft length, then by block."""
    times: dict[tuple[str, int], dict[Block, float]] = {}
    for record in records:
        run, lever, seconds = record.run, record.run.speculation, guesses.tpot_s(record.run)
        if lever is not None and seconds is not None and (lever.text, run.n_prompt, run.n_gen) == key:
            times.setdefault((lever.draft or "", lever.n_draft), {})[_block(record)] = seconds
    return times


def _block(record: Record) -> Block:
    return record.session, record.run.repeat, record.run.engine


def _seconds(runs: Sequence[Run], kind: str, n: int) -> float | None:
    """Time of steps of a kind after the prompt, for each of n verifications."""
    total = 0
    for run in runs:
        steps = run.steps
        first = next(i for i in reversed(range(len(steps.kind))) if steps.kind[i] == "prefill")
        rows = zip(steps.kind[first:], steps.start_ns[first:], steps.end_ns[first:], strict=True)
        total += sum(end - start for its_kind, start, end in rows if its_kind == kind)
    return total / 1e9 / n if n else None


def expected_speed_up(teachers: Sequence[Run], times: StepTimes | None, n_draft: int, is_lookup: bool) -> float | None:
    """The speed-up with n_draft guesses at a time, from the curve and from runs with as many or more; the median."""
    if times is None:
        return None
    steps = [guesses.in_steps_of(guesses.checked(run), n_draft, is_lookup) for run in teachers]
    known = [value for its in steps if (value := guesses.speed_up(its, times)) is not None]
    return statistics.median(known) if known else None


def best_length(teachers: Sequence[Run], times: StepTimes | None, is_lookup: bool) -> tuple[int, float] | None:
    """The draft length with the largest expected speed-up, and that; of lengths up to that of the runs."""
    most = max((_n_draft(run) or 0 for run in teachers), default=0)
    expected = {n: expected_speed_up(teachers, times, n, is_lookup) for n in range(1, most + 1)}
    return max(((n, value) for n, value in expected.items() if value), key=lambda pair: pair[1], default=None)


def to_blame(tried: Sequence[Chain], times: StepTimes, n_draft: int) -> str | None:
    """Which of the three would bring most if it were ideal: verifying (v = 1), guessing (free), guesses (all right)."""
    if n_draft + 1 not in times.target or not tried:
        return None
    free_guesses = guesses.speed_up(tried, StepTimes(times.target, {}))
    free_verifying = guesses.speed_up(tried, StepTimes(dict.fromkeys(times.target, times.target[1]), times.draft))
    all_right = guesses.speed_up([(n, n) for n, _ in tried], times)
    gains = {VERIFYING: free_verifying, GUESSING: free_guesses, WRONG: all_right}
    return max(gains, key=lambda name: gains[name] or 0.0)


def curve(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[CurveRow]:
    """One row for each number of positions that was timed."""
    made = []
    curves = [record.run for record in records if record.run.speculation and record.run.speculation.text is None]
    has_texts = any(record.run.speculation and record.run.speculation.text for record in records)
    for n_prompt, n_gen, draft in sorted({_curve_key(run) for run in curves}):
        times = guesses.step_times([run for run in curves if _curve_key(run) == (n_prompt, n_gen, draft)])
        if times is None:
            continue
        n_past = n_prompt + n_gen // 2
        c = times.draft[1] / times.target[1] if times.draft else None
        for n, seconds in times.target.items():
            v = seconds / times.target[1]
            gains = [guesses.textbook_length(a, n - 1) / ((n - 1) * (c or 0.0) + v) for a in ACCEPTANCES]
            of_random = () if has_texts or n == 1 else tuple(gains)
            made.append(
                CurveRow(n_prompt, draft or None, n, seconds, v, _expected_v(prediction, n, n_past), c, of_random)
            )
    return made


def _curve_key(run: Run) -> tuple[int, int, str]:
    return run.n_prompt, run.n_gen, (run.speculation.draft if run.speculation else None) or ""


def _expected_v(prediction: StepPrediction | None, n: int, n_past: int) -> float | None:
    if prediction is None:
        return None
    many, one = prediction.seconds(n, n_past, n), prediction.seconds(1, n_past, 1)
    return many / one if many is not None and one else None


def partings(records: Sequence[Record]) -> list[Parted]:
    """Where runs chose another token than plain decoding of the same prompt, and how near the choice was there."""
    made = []
    for record, base in compared(records):
        run, lever = record.run, record.run.speculation
        assert lever is not None and lever.text is not None
        pairs = zip(base.token_ids, run.token_ids, strict=False)
        at = next((i for i, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if at is not None:
            margin = base.margins[at] if base.margins and at < len(base.margins) else None
            made.append(Parted(lever.text, run.n_prompt, run.n_gen, lever.draft or "", lever.n_draft, at, margin))
    return made


def compared(records: Sequence[Record]) -> list[tuple[Record, Run]]:
    """Runs with guesses, each with plain decoding of the same prompt; without those that have none."""
    plain = {_prompt_of(record): record.run for record in records if _n_draft(record.run) == 0}
    return [(r, plain[_prompt_of(r)]) for r in records if _n_draft(r.run) and _prompt_of(r) in plain]


def _n_draft(run: Run) -> int | None:
    return run.speculation.n_draft if run.speculation and run.speculation.text is not None else None


def _prompt_of(record: Record) -> tuple[object, ...]:
    """Runs in which this is equal have the same prompt."""
    run, text = record.run, record.run.speculation.text if record.run.speculation else None
    return record.session, text, run.n_prompt, run.n_gen, run.repeat, run.prompt_offset, record.settings.seed


def sentences(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Of one setup: the best draft length for each text, how good predictions were, and whether the text stayed."""
    words = []
    for key in dict.fromkeys((row.key, row.draft) for row in rows):
        words += _of_text([row for row in rows if (row.key, row.draft) == key], records)
    most = {row.draft: max(r.n_draft for r in rows if r.draft == row.draft) for row in rows}
    if by := cases.off_by((row.expected, row.speed_up) for row in rows if row.n_draft < most[row.draft]):
        words.append(
            f"Predicted speed-ups are off {by} (of draft lengths below the longest, whose runs they are learned from)."
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
    low, high = 0.0 if best.low is None else best.low, math.inf if best.high is None else best.high
    interval = f" (95 %: {low:.2f} to {high:.2f})" if best.low is not None else " (too few blocks for an interval)"
    right = "" if best.right is None or best.length is None else f"; {best.right:.0%} were right"
    how, times_as_fast = f"{best.n_draft} {who} at a time", f"{gain:.2f} times as fast as plain decoding"
    if low > 1:
        words = [f"{best.text}: fastest with {how}, {times_as_fast}{interval}{right}."]
    else:
        verdict = f"does not pay. At best, with {how}," if high < 1 else f"no clear gain. With {how}"
        words = [f"{best.text}: {verdict} it is {times_as_fast}{interval}{right}.{_blame(best, records)}"]
    teachers, times = longest(records, best.key, best.draft), times_of(records, best.key, best.draft)
    expected = best_length(teachers, times, best.draft == LOOKUP)
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
    n_runs = len(compared(records))
    parted = partings(records)
    if not rows or not n_runs:
        return ["Whether the text is that of plain decoding could not be seen: there is no plain run."] if rows else []
    if not parted:
        all_runs = f"{'all ' if n_runs > 1 else ''}{plural(n_runs, 'run')}"
        return [f"In {all_runs} the tokens are those of plain decoding."]
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
    if by := cases.off_by((row.expected_v, row.v) for row in curve if row.n_positions > 1):
        words.append(f"What the ceilings predict for v is off {by}.")
    return words
