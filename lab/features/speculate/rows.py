"""Results of speculative decoding with predictions: rows, and sentences on where it pays and what the bottleneck is."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import guesses, stats
from lab.core.guesses import Chain, StepTimes
from lab.core.levers import LOOKUP
from lab.core.lists import grouped, plural
from lab.core.record import DRAFT, PREFILL, VERIFY, Record, Run
from lab.features.common import first_difference, off_by
from lab.features.limits.step_prediction import StepPrediction
from lab.show.wording import digits

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
Key = tuple[str, int, int]  # text, n_prompt, n_gen
VERIFYING, GUESSING, WRONG = "verifying", "guessing", "wrong guesses"


@dataclass(frozen=True)
class Row:
    """One kind of text and draft length of one setup: medians over blocks.

    `right` is the share of drafted tokens that were accepted, `by_position` that of the first, second, ... token of a
    draft, given that those before it were accepted. `length` is the tokens per step with a draft. `draft_s` and
    `verify_s` are the times of one draft and one verification. `speed_up` is the time of plain decoding over that with
    drafts, block by block, with its 95 % interval (None for fewer than 6 blocks).

    `expected` is the speed-up predicted from the curve and from the runs with the longest draft. `to_blame` is the
    largest cost if the speed-up is below 1. `n_parted` runs chose a different token than plain decoding.
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
    """A step of n positions: its time, its ratio v to a step of one, and v predicted from the ceilings.

    If no text was generated: `speed_ups` for n - 1 drafted tokens a step, each accepted with one of the probabilities
    in `ACCEPTANCES`.
    """

    n_prompt: int
    draft: str | None  # timed with it: LOOKUP (costs nothing), a model, or none
    n_positions: int
    step_s: float
    v: float
    expected_v: float | None
    c: float | None  # a step of the draft model over one of the model; None without one
    speed_ups: tuple[float, ...]


@dataclass(frozen=True)
class Parted:
    """Where a run first chose a different token than plain decoding, and the distance of the two best logits there."""

    text: str
    n_prompt: int
    n_gen: int
    draft: str
    n_draft: int
    at: int
    margin: float | None


Block = tuple[str, int, int | None]  # session, repeat, start of the engine: compared runs had the same process


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each text and draft length, from the successful timed runs of one setup."""
    by_case = grouped(records, _case_of)
    parted = collections.Counter(
        ((one.text, one.n_prompt, one.n_gen), one.draft, one.n_draft) for one in partings(records)
    )
    return [
        _row(case, own, by_case.get((case[0], "", 0), []), records, parted[case])
        for case, own in sorted(by_case.items(), key=lambda item: item[0])
        if case[2]
    ]


def _case_of(record: Record) -> tuple[Key, str, int] | None:
    """The text, draft (empty: plain decoding) and draft length of a run that generated; else None."""
    run, lever = record.run, record.run.speculation
    if lever is None or lever.text is None or guesses.tpot_s(run) is None:
        return None
    return (lever.text, run.n_prompt, run.n_gen), lever.draft or "", lever.n_draft


def longest(records: Sequence[Record], key: Key, draft: str) -> list[Run]:
    """Runs of one kind of text with the longest draft, from which acceptance is learned."""
    by_case = grouped(records, _case_of)
    cases = [case for case in by_case if case[:2] == (key, draft)]
    return [record.run for record in by_case[max(cases)]] if cases else []


def times_of(records: Sequence[Record], key: Key, draft: str) -> StepTimes | None:
    """The times of single steps measured with runs of this kind; None if there are none."""
    return guesses.step_times([record.run for record in records if _curve_of(record.run) == (*key[1:], draft)])


def _row(
    case: tuple[Key, str, int], own: Sequence[Record], plain: Sequence[Record], records: Sequence[Record], n_parted: int
) -> Row:
    """The row of one case, from its runs, plain decoding of the same, and all records of the setup."""
    key, draft, n_draft = case
    runs, times, teachers = [one.run for one in own], times_of(records, key, draft), longest(records, key, draft)
    tried = [chain for run in runs for chain in guesses.checked(run) if chain[0]]
    plain_s = {_block(one): guesses.tpot_s(one.run) or 0.0 for one in plain}
    pairs = [(guesses.tpot_s(one.run) or 0.0, plain_s[_block(one)]) for one in own if _block(one) in plain_s]
    gain = statistics.median(without / guessed for guessed, without in pairs) if pairs else None
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
        plain_tpot_s=statistics.median(plain_s.values()) if plain_s else None,
        speed_up=gain,
        low=ratio.low if ratio else None,
        high=ratio.high if ratio else None,
        expected=expected_speed_up(teachers, times, n_draft, draft == LOOKUP),
        to_blame=to_blame(tried, times, n_draft) if times and gain is not None and gain < 1 else None,
        n_parted=n_parted,
    )


def by_block(records: Sequence[Record], key: Key) -> dict[tuple[str, int], dict[Block, float]]:
    """TPOT in seconds for one kind of text, by draft (empty: plain decoding) and draft length, then by block."""
    return {
        (draft, n_draft): {_block(record): guesses.tpot_s(record.run) or 0.0 for record in own}
        for (its_key, draft, n_draft), own in grouped(records, _case_of).items()
        if its_key == key
    }


def _block(record: Record) -> Block:
    return record.session, record.run.repeat, record.run.engine


def _seconds(runs: Sequence[Run], kind: str, n: int) -> float | None:
    """Time of the steps of a kind after the prompt, per verification (n of them)."""
    total = 0
    for run in runs:
        steps = run.steps
        last_prefill = max(i for i, its_kind in enumerate(steps.kind) if its_kind == PREFILL)
        columns = zip(steps.kind, steps.start_ns, steps.end_ns, strict=True)
        after = itertools.islice(columns, last_prefill, None)
        total += sum(end - start for its_kind, start, end in after if its_kind == kind)
    return total / 1e9 / n if n else None


def expected_speed_up(teachers: Sequence[Run], times: StepTimes | None, n_draft: int, is_lookup: bool) -> float | None:
    """The predicted speed-up with drafts of n_draft tokens, from the curve and runs with drafts as long or longer."""
    if times is None:
        return None
    steps = [guesses.in_steps_of(guesses.checked(run), n_draft, is_lookup) for run in teachers]
    known = [value for its in steps if (value := guesses.speed_up(its, times)) is not None]
    return statistics.median(known) if known else None


def best_length(teachers: Sequence[Run], times: StepTimes | None, is_lookup: bool) -> tuple[int, float] | None:
    """The draft length with the largest predicted speed-up, and that speed-up."""
    most = max((_n_draft(run) or 0 for run in teachers), default=0)
    expected = {n: expected_speed_up(teachers, times, n, is_lookup) for n in range(1, most + 1)}
    return max(((n, value) for n, value in expected.items() if value), key=lambda pair: pair[1], default=None)


def to_blame(tried: Sequence[Chain], times: StepTimes, n_draft: int) -> str | None:
    """The part whose ideal would gain most: verifying (v = 1), drafting (free) or acceptance (all accepted)."""
    if n_draft + 1 not in times.target or not tried:
        return None
    free_guesses = guesses.speed_up(tried, StepTimes(times.target, {}))
    free_verifying = guesses.speed_up(tried, StepTimes(dict.fromkeys(times.target, times.target[1]), times.draft))
    all_right = guesses.speed_up([(n, n) for n, _ in tried], times)
    gains = {VERIFYING: free_verifying, GUESSING: free_guesses, WRONG: all_right}
    return max(gains, key=lambda name: gains[name] or 0.0)


def curve(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[CurveRow]:
    """One row for each measured number of positions."""
    runs = [record.run for record in records if record.run.speculation]
    of_curves = grouped(runs, _curve_of)
    has_texts = any(_curve_of(run) is None for run in runs)
    made = []
    for (n_prompt, n_gen, draft), own in sorted(of_curves.items()):
        times = guesses.step_times(own)
        if times is None:
            continue
        one_s = times.target[1]
        c = times.draft[1] / one_s if times.draft else None
        for n, seconds in times.target.items():
            v, n_draft = seconds / one_s, n - 1
            speed_ups: tuple[float, ...] = ()
            if n_draft and not has_texts:
                cost = n_draft * (c or 0.0) + v
                speed_ups = tuple(guesses.textbook_length(share, n_draft) / cost for share in ACCEPTANCES)
            expected_v = _expected_v(prediction, n, n_prompt + n_gen // 2)
            made.append(CurveRow(n_prompt, draft or None, n, seconds, v, expected_v, c, speed_ups))
    return made


def _curve_of(run: Run) -> tuple[int, int, str] | None:
    """The curve that a run of single steps belongs to; None for other runs."""
    lever = run.speculation
    return (run.n_prompt, run.n_gen, lever.draft or "") if lever and lever.text is None else None


def _expected_v(prediction: StepPrediction | None, n: int, n_past: int) -> float | None:
    if prediction is None:
        return None
    many, one = prediction.seconds(n, n_past, n), prediction.seconds(1, n_past, 1)
    return many / one if many is not None and one else None


def partings(records: Sequence[Record]) -> list[Parted]:
    """Where runs chose a different token than plain decoding of the same prompt, and the margin there."""
    made = []
    for record, base in compared(records):
        run, lever = record.run, record.run.speculation
        assert lever is not None and lever.text is not None
        at = first_difference(base.token_ids, run.token_ids)
        if at is not None:
            margin = base.margins[at] if base.margins and at < len(base.margins) else None
            made.append(Parted(lever.text, run.n_prompt, run.n_gen, lever.draft or "", lever.n_draft, at, margin))
    return made


def compared(records: Sequence[Record]) -> list[tuple[Record, Run]]:
    """Runs with drafts, each with the plain run of the same prompt; others are left out."""
    plain = {_prompt_of(record): record.run for record in records if _n_draft(record.run) == 0}
    return [(r, plain[_prompt_of(r)]) for r in records if _n_draft(r.run) and _prompt_of(r) in plain]


def _n_draft(run: Run) -> int | None:
    return run.speculation.n_draft if run.speculation and run.speculation.text is not None else None


def _prompt_of(record: Record) -> tuple[object, ...]:
    """Runs in which this is equal have the same prompt."""
    run, text = record.run, record.run.speculation.text if record.run.speculation else None
    return record.session, text, run.n_prompt, run.n_gen, run.repeat, run.prompt_offset, record.settings.seed


def sentences(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """For one setup: the best draft length of each text, whether the text stayed the same, and prediction errors."""
    of_texts = grouped(rows, lambda row: (row.key, row.draft))
    words = [sentence for alike in of_texts.values() for sentence in _of_text(alike, records)]
    most = {draft: max(row.n_draft for row in own) for draft, own in grouped(rows, lambda row: row.draft).items()}
    predicted = [(row.expected, row.speed_up) for row in rows if row.n_draft < most[row.draft]]
    which = " (without the longest draft length, from whose runs they are predicted)"
    return words + _same_text(rows, records) + off_by(predicted, "speed-ups", which)


def _of_text(alike: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Sentences on one kind of text and draft."""
    known = {row: row.speed_up for row in alike if row.speed_up is not None}
    if not known:
        return []
    best, gain = max(known.items(), key=lambda pair: pair[1])
    low, high, interval = 0.0, math.inf, "too few blocks for an interval"
    if best.low is not None and best.high is not None:
        low, high = best.low, best.high
        interval = f"95 % interval {digits(low)}-{digits(high)}"
    verdict = "pays" if low > 1 else "does not pay" if high < 1 else "no clear gain"
    speed = f"{digits(gain)}x plain decoding with {plural(best.n_draft, 'drafted token')} per step"
    right = "" if best.right is None else f", {100 * best.right:.0f} % accepted"
    words = f"{best.text} with {best.draft}: {verdict}, {speed} ({interval}){right}."
    if low <= 1:
        words += _blame(best, records)
    teachers, times = longest(records, best.key, best.draft), times_of(records, best.key, best.draft)
    n_best, most = best_length(teachers, times, best.draft == LOOKUP) or (0, 0.0)
    if n_best not in [row.n_draft for row in known] and most > max(1.0, gain):
        words += f" {plural(n_best, 'drafted token')} should give {digits(most)}x, predicted from step times."
    return [words]


def _blame(row: Row, records: Sequence[Record]) -> str:
    """The bottleneck where it does not pay, with its figure."""
    times = times_of(records, row.key, row.draft)
    if row.to_blame is None or times is None:
        return ""
    n = row.n_draft
    if row.to_blame == VERIFYING:
        v = times.target[n + 1] / times.target[1]
        return f" Bottleneck: verification; a step of {n + 1} positions takes {digits(v)}x a step of one."
    if row.to_blame == GUESSING:
        c = times.draft[1] / times.target[1]
        return f" Bottleneck: drafting; a drafted token takes {digits(c)}x a step of the model."
    all_right = guesses.speed_up([(n, n)], times)
    if all_right is not None and all_right > 1:
        return f" Bottleneck: acceptance; with every token accepted the speed-up would be {digits(all_right)}x."
    return " Bottleneck: acceptance, but it would not pay with every token accepted either."


def _same_text(rows: Sequence[Row], records: Sequence[Record]) -> list[str]:
    """Whether the tokens match plain decoding, and if not, how near the choice was."""
    n_runs = len(compared(records))
    parted = partings(records)
    if not rows or not n_runs:
        return ["Without a plain run the text cannot be compared with plain decoding."] if rows else []
    if not parted:
        all_runs = f"{'all ' if n_runs > 1 else ''}{plural(n_runs, 'run')}"
        return [f"In {all_runs} the tokens match plain decoding."]
    margins = [one.margin for one in parted if one.margin is not None]
    usual = [margin for record in records for margin in record.run.margins or ()]
    near = ""
    if margins and usual:
        near = (
            f" The two best logits differed by {digits(statistics.median(margins))} there (maximum "
            f"{digits(max(margins))}), elsewhere by {digits(statistics.median(usual))}."
        )
    return [
        f"In {len(parted)} of {n_runs} runs the text differs from plain decoding, from token "
        f"{1 + min(one.at for one in parted)} at the earliest: kernels for several positions round differently.{near}"
    ]


def of_curve(curve: Sequence[CurveRow]) -> list[str]:
    """What verifying costs, and the acceptance at which it pays."""
    several = [row for row in curve if row.n_positions > 1]
    words = []
    for alike in grouped(several, lambda row: (row.n_prompt, row.draft)).values():
        last = alike[-1]
        needed = [(guesses.break_even(row.v, row.c or 0.0, row.n_positions - 1), row.n_positions - 1) for row in alike]
        possible = [(share, n) for share, n in needed if share is not None]
        pays = "no draft length pays, even with every token accepted"
        if possible:
            share, n = min(possible)
            pays = f"drafts of {plural(n, 'token')} pay above {100 * share:.0f} % acceptance"
        drafting = f", drafting a token {digits(last.c)}x" if last.c is not None else ""
        words.append(f"A step of {last.n_positions} positions takes {digits(last.v)}x a step of one{drafting}: {pays}.")
    return words + off_by(((row.expected_v, row.v) for row in several), "v")
