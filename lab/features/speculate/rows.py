"""Results of speculative decoding with predictions: rows, and sentences on where it pays and what the bottleneck is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core import phases, stats
from lab.core.lists import grouped, plural
from lab.core.payloads import LOOKUP
from lab.core.record import DRAFT, PREFILL, VERIFY, Record, Run
from lab.features.experiment import as_rows, first_difference, off_by
from lab.features.predict.learning import StepPrediction
from lab.features.speculate import guesses
from lab.features.speculate.guesses import Chain, StepTimes
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
VERIFYING, GUESSING, WRONG = "verifying", "guessing", "wrong guesses"
KEY = ["text", "n_prompt", "n_gen"]
CASE = [*KEY, "draft", "n_draft"]
BLOCK = ["session", "repeat", "engine"]  # compared runs had the same process


class Parted(NamedTuple):
    """Where a run first chose a different token than plain decoding, and the distance of the two best logits there."""

    text: str
    n_prompt: int
    n_gen: int
    draft: str
    n_draft: int
    at: int
    margin: float | None


def of_runs(records: Sequence[Record]) -> pd.DataFrame:
    """A row per run that generated text: CASE (plain decoding has the draft ""), BLOCK, `record` and `tpot_s`.

    `plain_s` is the time per token, and `plain` the record, of plain decoding in the same block.
    """
    import pandas as pd

    known = [(one, one.run, one.run.speculation, phases.figures(one.run).get("tpot_ms")) for one in records]
    rows = [
        (lever.text, run.n_prompt, run.n_gen, lever.draft or "", lever.n_draft, *block, one, tpot_ms / 1e3)
        for one, run, lever, tpot_ms in known
        for block in [(one.session, run.repeat, run.engine)]
        if lever and tpot_ms
    ]
    made = pd.DataFrame(rows, columns=[*CASE, *BLOCK, "record", "tpot_s"])
    plain = made[made.n_draft == 0].drop_duplicates([*KEY, *BLOCK], keep="last")
    plain = plain[[*KEY, *BLOCK, "record", "tpot_s"]].rename(columns={"record": "plain", "tpot_s": "plain_s"})
    return made.merge(plain, "left", [*KEY, *BLOCK])


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each text and draft length of one setup: medians over blocks of the successful timed runs.

    `right` is the share of drafted tokens that were accepted, `by_position` that of the first, second, ... token of a
    draft, given that those before it were accepted. `length` is the tokens per step with a draft. `draft_s` and
    `verify_s` are the times of one draft and one verification. `speed_up` is the time of plain decoding over that with
    drafts, block by block, with its 95 % interval (None for fewer than 6 blocks). `expected` is the speed-up predicted
    from the curve and from the runs with the longest draft. `to_blame` is the largest cost if the speed-up is below 1.
    `n_parted` runs chose a different token than plain decoding.
    """
    import pandas as pd

    runs, parted, made = of_runs(records), [one[:5] for one in partings(records)], []
    for case, own in runs[runs.n_draft > 0].groupby(CASE):
        *key, draft, n_draft = case
        times, teachers = times_of(records, key, draft), longest(runs, key, draft)
        tried = [chain for record in own.record for chain in guesses.checked(record.run) if chain[0]]
        plain_s = runs.tpot_s[(runs[KEY] == key).all(axis=1) & (runs.n_draft == 0)]
        pairs = own.dropna(subset="plain_s")
        gain = (pairs.plain_s / pairs.tpot_s).median() if len(pairs) else None
        ratio = stats.paired_ratio(list(pairs.tpot_s), list(pairs.plain_s)) if len(pairs) else None
        of_steps = [_seconds(own.record, kind, len(tried)) for kind in (DRAFT, VERIFY)]
        made.append(
            dict(zip(CASE, case, strict=True))
            | {
                "n_runs": len(own),
                "right": sum(right for _, right in tried) / sum(n for n, _ in tried) if tried else None,
                "by_position": guesses.by_position(tried),
                "length": 1 + statistics.fmean(right for _, right in tried) if tried else None,
                **dict(zip(("draft_s", "verify_s"), of_steps, strict=True)),
                "tpot_s": own.tpot_s.median(),
                "plain_tpot_s": plain_s.median(),
                "speed_up": gain,
                "low": ratio.low if ratio else None,
                "high": ratio.high if ratio else None,
                "expected": expected_speed_up(teachers, times, n_draft, draft == LOOKUP),
                "to_blame": to_blame(tried, times, n_draft) if times and gain is not None and gain < 1 else None,
                "n_parted": parted.count(case),
            }
        )
    return as_rows(pd.DataFrame(made))


def longest(runs: pd.DataFrame, key: Sequence[Any], draft: str) -> list[Run]:
    """Runs of one kind of text with the longest draft, from which acceptance is learned."""
    own = runs[(runs[[*KEY, "draft"]] == [*key, draft]).all(axis=1)]
    return [record.run for record in own.record[own.n_draft == own.n_draft.max()]]


def times_of(records: Sequence[Record], key: Sequence[Any], draft: str) -> StepTimes | None:
    """The times of single steps measured with runs of this kind; None if there are none."""
    return guesses.step_times([record.run for record in records if _curve_of(record.run) == (*key[1:], draft)])


def _seconds(records: Sequence[Record], kind: str, n: int) -> float | None:
    """Time of the steps of a kind after the prompt, per verification (n of them)."""
    total_s = 0.0
    for record in records:
        steps = record.run.steps.frame()
        after = steps[steps.kind.eq(PREFILL)[::-1].cumsum().eq(0) & steps.kind.eq(kind)]
        total_s += (after.end_s - after.start_s).sum()
    return total_s / n if n else None


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


def curve(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each measured number of positions n: the time of a step, and its ratio v to a step of one.

    `draft`: timed with it (LOOKUP costs nothing, a model, or none). `c` is a step of the draft model over one of the
    model. If no text was generated: `speed_ups` for n - 1 drafted tokens a step, each accepted with one of the
    probabilities in `ACCEPTANCES`.
    """
    import pandas as pd

    runs = [record.run for record in records if record.run.speculation]
    has_texts = any(_curve_of(run) is None for run in runs)
    made = []
    for (n_prompt, n_gen, draft), own in sorted(grouped(runs, _curve_of).items()):
        times, n_past = guesses.step_times(own), n_prompt + n_gen // 2
        for n, step_s in times.target.items() if times else ():
            c = times.draft[1] / times.target[1] if times and times.draft else None
            v, n_draft = step_s / times.target[1] if times else math.nan, n - 1
            lengths = [guesses.textbook_length(share, n_draft) for share in ACCEPTANCES]
            many, one = (prediction.seconds(k, n_past, k) if prediction else None for k in (n, 1))
            made.append(
                {
                    "n_prompt": n_prompt,
                    "draft": draft or None,
                    "n_positions": n,
                    "step_s": step_s,
                    "v": v,
                    "expected_v": many / one if many is not None and one else None,
                    "c": c,
                    "speed_ups": () if has_texts or not n_draft else [x / (n_draft * (c or 0) + v) for x in lengths],
                }
            )
    return as_rows(pd.DataFrame(made))


def _curve_of(run: Run) -> tuple[int, int, str] | None:
    """The curve that a run of single steps belongs to; None for other runs."""
    lever = run.speculation
    return (run.n_prompt, run.n_gen, lever.draft or "") if lever and lever.text is None else None


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


def sentences(rows: Sequence[Any], records: Sequence[Record]) -> list[str]:
    """For one setup: the best draft length of each text, whether the text stayed the same, and prediction errors."""
    runs, words = of_runs(records), []
    for (*key, draft), alike in grouped(rows, lambda row: row[:4]).items():
        known = [row for row in alike if row.speed_up is not None]
        if not known:
            continue
        best = max(known, key=lambda row: row.speed_up)
        low, high, interval = 0.0, math.inf, "too few blocks for an interval"
        if best.low is not None and best.high is not None:
            low, high = best.low, best.high
            interval = f"95 % interval {digits(low)}-{digits(high)}"
        verdict = "pays" if low > 1 else "does not pay" if high < 1 else "no clear gain"
        speed = f"{digits(best.speed_up)}x plain decoding with {plural(best.n_draft, 'drafted token')} per step"
        right = "" if best.right is None else f", {100 * best.right:.0f} % accepted"
        said = f"{best.text} with {best.draft}: {verdict}, {speed} ({interval}){right}."
        teachers, times = longest(runs, key, draft), times_of(records, key, draft)
        if low <= 1:
            said += _blame(best, times)
        n_best, most = best_length(teachers, times, draft == LOOKUP) or (0, 0.0)
        if n_best not in [row.n_draft for row in known] and most > max(1.0, best.speed_up):
            said += f" {plural(n_best, 'drafted token')} should give {digits(most)}x, predicted from step times."
        words.append(said)
    most_of = {draft: max(row.n_draft for row in own) for draft, own in grouped(rows, lambda row: row.draft).items()}
    predicted = [(row.expected, row.speed_up) for row in rows if row.n_draft < most_of[row.draft]]
    which = " (without the longest draft length, from whose runs they are predicted)"
    return words + _same_text(rows, records) + off_by(predicted, "speed-ups", which)


def _blame(row: Any, times: StepTimes | None) -> str:
    """The bottleneck where it does not pay, with its figure."""
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


def _same_text(rows: Sequence[Any], records: Sequence[Record]) -> list[str]:
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


def of_curve(curve: Sequence[Any]) -> list[str]:
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
