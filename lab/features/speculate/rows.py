"""Results of speculative decoding with predictions: rows, and sentences on where it pays and what the bottleneck is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core import phases, stats
from lab.core.lists import grouped, plural
from lab.core.payloads import LOOKUP
from lab.core.record import Record, Run
from lab.features.experiment import as_rows, first_difference, off_by
from lab.features.predict.learning import StepPrediction
from lab.features.speculate import guesses
from lab.features.speculate.guesses import Chain, StepTimes
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd

KEY = ["text", "n_prompt", "n_gen"]
CASE = [*KEY, "draft", "n_draft"]
BLOCK = ["session", "repeat", "engine"]  # compared runs had the same process


def of_runs(records: Sequence[Record]) -> pd.DataFrame:
    """A row per run that generated text: CASE (plain decoding has the draft ""), BLOCK, `record` and `tpot_s`.

    `plain_s` is the time per token, and `plain` the record, of plain decoding in the same block. `parted_at` is the
    first token that differs from plain decoding.
    """
    import pandas as pd

    rows = []
    for one in records:
        run, lever, tpot_ms = one.run, one.run.speculation, phases.figures(one.run).get("tpot_ms")
        if lever and lever.text is not None and tpot_ms:
            case = lever.text, run.n_prompt, run.n_gen, lever.draft or "", lever.n_draft
            rows.append((*case, one.session, run.repeat, run.engine, one, tpot_ms / 1e3))
    made = pd.DataFrame(rows, columns=[*CASE, *BLOCK, "record", "tpot_s"])
    plain = made[made.n_draft == 0].drop_duplicates([*KEY, *BLOCK], keep="last")
    plain = plain[[*KEY, *BLOCK, "record", "tpot_s"]].rename(columns={"record": "plain", "tpot_s": "plain_s"})
    made = made.merge(plain, "left", [*KEY, *BLOCK])
    pairs = zip(made.record, made.plain, strict=True)
    return made.assign(
        parted_at=[
            first_difference(base.run.token_ids, one.run.token_ids) if isinstance(base, Record) else None
            for one, base in pairs
        ]
    )


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each text and draft length of one setup: medians over blocks of the successful timed runs.

    `right` is the share of drafted tokens that were accepted, `length` the tokens per step with a draft. `speed_up` is
    the time of plain decoding over that with drafts, block by block, with its 95 % interval (None for fewer than 6
    blocks). `expected` is the speed-up predicted from the curve and from the runs with the longest draft. `bottleneck`
    is known where the speed-up is below 1. `n_parted` runs chose a different token than plain decoding.
    """
    import pandas as pd

    runs, made = of_runs(records), []
    for case, own in runs[runs.n_draft > 0].groupby(CASE):
        *key, draft, n_draft = case
        times = guesses.step_times([record.run for record in records if _curve_of(record.run) == (*key[1:], draft)])
        alike = runs[(runs[[*KEY, "draft"]] == [*key, draft]).all(axis=1)]
        longest = [record.run for record in alike.record[alike.n_draft == alike.n_draft.max()]]
        tried = [chain for record in own.record for chain in guesses.checked(record.run) if chain[0]]
        pairs = own.dropna(subset="plain_s")
        gain = (pairs.plain_s / pairs.tpot_s).median() if len(pairs) else None
        ratio = stats.paired_ratio(list(pairs.tpot_s), list(pairs.plain_s)) if len(pairs) else None
        is_slower = gain is not None and gain < 1 and times and n_draft + 1 in times.target and tried
        made.append(
            dict(zip(CASE, case, strict=True))
            | {
                "n_runs": len(own),
                "right": sum(right for _, right in tried) / sum(n for n, _ in tried) if tried else None,
                "length": 1 + statistics.fmean(right for _, right in tried) if tried else None,
                "tpot_s": own.tpot_s.median(),
                "plain_tpot_s": runs.tpot_s[(runs[KEY] == key).all(axis=1) & (runs.n_draft == 0)].median(),
                "speed_up": gain,
                "low": ratio.low if ratio else None,
                "high": ratio.high if ratio else None,
                "expected": guesses.expected(longest, n_draft, draft == LOOKUP, times) if times else None,
                "bottleneck": _bottleneck(tried, n_draft, times) if times and is_slower else None,
                "n_parted": own.parted_at.count(),
            }
        )
    return as_rows(pd.DataFrame(made))


def _bottleneck(tried: Sequence[Chain], n_draft: int, times: StepTimes) -> str:
    """The part whose ideal would gain most: verifying (v = 1), drafting (free) or acceptance (all accepted)."""
    one_s, all_right = times.target[1], guesses.speed_up([(n_draft, n_draft)], times) or 0.0
    verifying = StepTimes(dict.fromkeys(times.target, one_s), times.draft)
    ideal = {
        f"verification; a step of {n_draft + 1} positions takes {digits(times.target[n_draft + 1] / one_s)}x a step of "
        "one": guesses.speed_up(tried, verifying),
        f"acceptance; with every token accepted the speed-up would be {digits(all_right)}x": guesses.speed_up(
            [(n, n) for n, _ in tried], times
        ),
    }
    if times.draft:
        words = f"drafting; a drafted token takes {digits(times.draft[1] / one_s)}x a step of the model"
        ideal[words] = guesses.speed_up(tried, StepTimes(times.target, {}))
    return max(ideal, key=lambda words: ideal[words] or 0.0)


def curve(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each measured number of positions n: the time of a step, and its ratio v to a step of one.

    `draft`: timed with it (LOOKUP costs nothing, a model, or none). `c` is a step of the draft model over one of the
    model.
    """
    import pandas as pd

    runs, made = [record.run for record in records if record.run.speculation], []
    for (n_prompt, n_gen, draft), own in sorted(grouped(filter(_curve_of, runs), _curve_of).items()):
        times, n_past = guesses.step_times(own), n_prompt + n_gen // 2
        if not times:
            continue
        one_s, c = times.target[1], times.draft[1] / times.target[1] if times.draft else None
        expected_s = prediction.seconds(1, n_past, 1) if prediction else None
        for n, step_s in times.target.items():
            many_s = prediction.seconds(n, n_past, n) if prediction else None
            expected_v = many_s / expected_s if many_s and expected_s else None
            case = {"n_prompt": n_prompt, "draft": draft or None, "n_positions": n}
            made.append({**case, "step_s": step_s, "v": step_s / one_s, "expected_v": expected_v, "c": c})
    return as_rows(pd.DataFrame(made))


def _curve_of(run: Run) -> tuple[int, int, str] | None:
    """The curve that a run of single steps belongs to; None for other runs."""
    lever = run.speculation
    return (run.n_prompt, run.n_gen, lever.draft or "") if lever and lever.text is None else None


def sentences(rows: Sequence[Any], records: Sequence[Record]) -> list[str]:
    """For one setup: the best draft length of each text, whether the text stayed the same, and prediction errors."""
    words = list[str]()
    for alike in grouped(rows, lambda row: row[:4]).values():
        known = [row for row in alike if row.speed_up is not None]
        if not known:
            continue
        best = max(known, key=lambda row: row.speed_up)
        low, high, interval = 0.0, math.inf, "too few blocks for an interval"
        if best.low is not None and best.high is not None:
            low, high = best.low, best.high
            interval = f"95 % interval {digits(low)}-{digits(high)}"
        verdict = "pays" if low > 1 else "does not pay" if high < 1 else "no clear gain"
        right = "" if best.right is None else f", {100 * best.right:.0f} % accepted"
        bottleneck = f" Bottleneck: {best.bottleneck}." if best.bottleneck else ""
        words.append(
            f"{best.text} with {best.draft}: {verdict}, {digits(best.speed_up)}x plain decoding with "
            f"{plural(best.n_draft, 'drafted token')} per step ({interval}){right}.{bottleneck}"
        )
    runs = of_runs(records)
    compared = runs[(runs.n_draft > 0) & runs.plain_s.notna()]
    n_parted, n_runs = compared.parted_at.count(), len(compared)
    if rows and not n_runs:
        words.append("Without a plain run the text cannot be compared with plain decoding.")
    elif rows and not n_parted:
        words.append(f"In {'all ' if n_runs > 1 else ''}{plural(n_runs, 'run')} the tokens match plain decoding.")
    elif rows:
        words.append(
            f"In {n_parted} of {n_runs} runs the text differs from plain decoding, from token "
            f"{1 + int(compared.parted_at.min())} at the earliest: kernels for several positions round differently."
        )
    most_of = {draft: max(row.n_draft for row in own) for draft, own in grouped(rows, lambda row: row.draft).items()}
    predicted = [(row.expected, row.speed_up) for row in rows if row.n_draft < most_of[row.draft]]
    which = " (without the longest draft length, from whose runs they are predicted)"
    return words + off_by(predicted, "speed-ups", which)


def of_curve(curve: Sequence[Any]) -> list[str]:
    """What verifying costs, and the acceptance at which it pays."""
    several = [row for row in curve if row.n_positions > 1]
    words = []
    for alike in grouped(several, lambda row: (row.n_prompt, row.draft)).values():
        last = alike[-1]
        needed = [(guesses.break_even(row.v, row.c or 0.0, row.n_positions - 1), row.n_positions - 1) for row in alike]
        share, n = min(((share, n) for share, n in needed if share is not None), default=(None, 0))
        pays = "no draft length pays, even with every token accepted"
        if share is not None:
            pays = f"drafts of {plural(n, 'token')} pay above {100 * share:.0f} % acceptance"
        drafting = f", drafting a token {digits(last.c)}x" if last.c is not None else ""
        words.append(f"A step of {last.n_positions} positions takes {digits(last.v)}x a step of one{drafting}: {pays}.")
    return words + off_by(((row.expected_v, row.v) for row in several), "v")
