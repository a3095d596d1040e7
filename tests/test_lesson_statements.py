"""The rules of the lessons: figures in, a verdict and a sentence out.

What they conclude on whole machines is in test_lesson_machines.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.core.growth import SLOPE, Growth
from lab.core.record import DECODE, PREFILL, Buffer, Placement
from lab.core.stats import Ratio
from lab.features.claims import judging
from lab.features.lessons import lesson, sheet, statements
from lab.features.lessons.statements import (
    FAILS,
    HOLDS,
    LESS,
    MORE,
    SAME,
    UNCLEAR,
    RunsRatio,
)
from lab.models import own_sheet
from lab.roofline import explanation
from lab.show.sweep_laws import Law
from tests.support.records import make_record, make_run

NAN = float("nan")


@pytest.mark.parametrize(
    ("added_ms", "verdict", "part"),
    [
        ([5.2, 5.0, 5.4, 5.1], MORE, "adds 5.2 ms to each token (5.0 to 5.4 ms in 4 turns)"),
        ([NAN, 5.2, NAN, 5.0], MORE, "in 2 turns"),
        ([NAN, 5.2], MORE, "in 1 turn)"),
        ([-0.4, 0.5, 0.1], UNCLEAR, "do not agree on the sign"),
        ([-2.0, -1.0], LESS, "its settings differ"),
        ([NAN, NAN], UNCLEAR, "no turn has both times"),
        ([], UNCLEAR, "no turn has both times"),
    ],
)
def test_a_failed_turn_is_no_part_of_the_overhead(
    added_ms: list[float], verdict: str, part: str
) -> None:
    statement = statements.overhead("each token", added_ms)
    assert (statement.verdict, part in statement.sentence) == (verdict, True)
    assert "nan" not in statement.sentence


@pytest.mark.parametrize(
    ("base", "compared", "verdict"),
    [
        ([1.0, 1.01], [1.02, 1.03], SAME),
        ([1.0, 1.1], [1.3, 1.4], MORE),
        ([1.0, 1.1], [0.5, 0.6], LESS),
        ([1.0, 2.0], [1.5, 2.5], UNCLEAR),
        ([1.0, 1.5], [1.6, 2.4], UNCLEAR),  # apart by 7 %, and the runs differ by 60
        ([1.0, NAN], [2.0, 2.0], UNCLEAR),
        ([], [2.0], UNCLEAR),
        ([0.0], [2.0], UNCLEAR),
    ],
)
def test_one_rule_says_when_two_figures_differ(
    base: list[float], compared: list[float], verdict: str
) -> None:
    assert statements.judged(statements.ratio(base, compared)) == verdict


def test_a_law_that_misses_one_end_is_refused_there() -> None:
    law = Law(8.56e-3, 5.5e-6, None, 0.0)
    short, long = (18, [5.0e-3]), (10_100, [64e-3])
    assert statements.law_holds("decode", law, [long]).verdict == HOLDS
    both = statements.law_holds("decode", law, [long, short])
    assert both.verdict == FAILS
    assert "does not hold at 18 tokens" in both.sentence


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["CPU_Mapped"], FAILS),
        (["CPU_REPACK", "CPU_Mapped"], HOLDS),
        (["AMX"], HOLDS),
        (["CUDA0"], FAILS),
        ([], UNCLEAR),
    ],
)
def test_whether_weights_are_repacked_is_read_from_the_buffers(
    names: list[str], verdict: str
) -> None:
    buffers = tuple(Buffer("model", name, 1) for name in names)
    assert statements.repacked("Q4_1", Placement((), buffers)).verdict == verdict
    assert statements.repacked("Q4_1", None).verdict == UNCLEAR


def test_too_few_blocks_decide_nothing_about_drafts() -> None:
    assert statements.drafts("story", 3.0, 1.9, None).verdict == UNCLEAR
    assert statements.drafts("story", 3.0, 1.9, (1.2, 2.2)).verdict == MORE
    assert statements.drafts("story", 3.0, 0.7, (0.6, 0.8)).verdict == LESS


def test_an_interval_of_several_figures_needs_more_runs() -> None:
    assert [lesson.repeats(n) for n in (1, 2, 4)] == [6, 7, 8]


def test_a_law_is_not_refused_by_runs_that_differ_more_than_it_misses() -> None:
    law = Law(8.0e-3, 0.0, None, 0.0)
    assert statements.law_holds("decode", law, [(18, [7.9e-3, 8.2e-3])]).verdict == HOLDS
    unsure = statements.law_holds("decode", law, [(18, [4.0e-3, 5.0e-3, 9.0e-3])])
    assert unsure.verdict == UNCLEAR
    assert "nan" not in unsure.sentence


def test_a_law_that_is_off_by_more_than_its_fit_is_not_said_to_hold() -> None:
    law = Law(7.92e-3, 0.0, None, 0.048)
    off = statements.law_holds("decode", law, [(18, [6.85e-3, 6.91e-3, 7.0e-3])])
    assert off.sentence.endswith("(+15 %). It is off by 15 % at 18 tokens.")
    assert off.verdict == HOLDS  # it may be used, as its error is told
    near = [[7.3e-3, 7.4e-3], [6.9e-3, 6.91e-3, 7.93e-3]]  # by the fit's error, by the runs
    for runs_s in near:
        statement = statements.law_holds("decode", law, [(18, runs_s)])
        assert statement.sentence.endswith("It holds there.")
    far = statements.law_holds("decode", law, [(18, [6.91e-3]), (80, [4.0e-3])])
    assert far.verdict == FAILS


def test_an_answer_of_which_claim_4_fails_has_no_constant_tokens() -> None:
    assert judging.CLAIMS[3]["words"] == "The time per generated token is mostly constant"
    assert statements.CONSTANT == 1.05
    assert statements.along_answer(10, [100, 100], [107, 109]).verdict == MORE
    same = statements.along_answer(10, [100, 100], [99, 104])
    assert same.verdict == SAME
    assert "take the same time within 5 %" in same.sentence


def test_runs_that_agree_on_the_sign_are_told_although_they_are_few() -> None:
    longer = statements.along_answer(1000, [100, 100, 100], [102, 110, 111])
    assert longer.verdict == UNCLEAR
    assert "longer in every run, by 2 to 11 %: too few runs to be sure" in longer.sentence
    shorter = statements.along_answer(1000, [100, 100, 100], [98, 90, 89])
    assert "less time in every run, by 2 to 11 %" in shorter.sentence
    both = statements.along_answer(1000, [100, 100], [94, 112])
    assert "the runs do not agree" in both.sentence


@pytest.mark.parametrize(
    ("measured", "verdict", "part"),
    [
        (Ratio(1.46, 1.10, 1.93), UNCLEAR, "(1.10 to 1.93, 95 % interval)"),
        (Ratio(1.46, 1.10, 1.93), UNCLEAR, "too wide to tell whether the kernels explain it"),
        (Ratio(1.30, 1.20, 1.41), HOLDS, "they agree, so the kernels explain it"),
        (Ratio(3.00, 2.00, 4.50), FAILS, "more than 1.25 times apart"),
    ],
)
def test_a_wide_interval_does_not_let_the_kernels_explain_a_ratio(
    measured: Ratio, verdict: str, part: str
) -> None:
    attention = statements.slow_attention(None, DECODE)
    statement = statements.explains(DECODE, 1.30, measured, attention)
    assert statement.verdict == verdict
    assert part in statement.sentence


def test_tokens_along_an_answer_are_compared_within_their_run() -> None:
    slow_run_hides_nothing = statements.along_answer(10, [4.0, 8.0], [5.0, 10.4])
    assert slow_run_hides_nothing.verdict == MORE
    assert "1.27 times (1.25 to 1.30 in the runs)" in slow_run_hides_nothing.sentence
    assert statements.along_answer(10, [4.0, 4.0], [5.0, 4.1]).verdict == UNCLEAR
    assert statements.along_answer(10, [4.0, 4.0], [5.0]).verdict == UNCLEAR
    assert statements.along_answer(10, [4.0, NAN], [4.0, 4.0]).verdict == UNCLEAR


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(explanation.TRAFFIC, "reading"), (explanation.ARITHMETIC, "layers")],
)
def test_sharing_the_reading_is_no_reason_where_decode_does_not_wait_for_memory(
    limit: str, verdict: str
) -> None:
    saved_ms = {"layers": 3.2, "attention": 0.5}
    assert statements.cheaper_prompt_token(5.0, 1.0, 3.0, saved_ms, limit).verdict == verdict


def test_the_part_that_saves_most_is_named_with_its_share_of_the_difference() -> None:
    saved_ms = {"layers": 1.0, "output": 2.4, "attention": 0.6}
    told = statements.cheaper_prompt_token(5.0, 1.0, 1.0, saved_ms, explanation.KERNEL)
    assert told.verdict == "output"
    assert told.sentence.endswith("the largest part of it, 60 %, is saved in output.")


def test_both_phases_that_gain_the_same_are_told_so() -> None:
    half = Ratio(0.5, 0.49, 0.51)
    assert statements.threads_gain(half, half, 2).verdict == SAME
    assert statements.threads_gain(half, Ratio(0.9, 0.88, 0.92), 2).verdict == MORE
    assert statements.threads_gain(Ratio(0.9, 0.88, 0.92), half, 2).verdict == LESS
    assert statements.threads_gain(half, Ratio(0.6, 0.4, 0.9), 2).verdict == UNCLEAR


def test_an_interval_on_one_side_of_1_is_clear_and_a_few_runs_are_not() -> None:
    ends = (1.2, 1.01, 1.4)
    assert statements.judged(Ratio(*ends)) == MORE
    assert statements.judged(RunsRatio(*ends)) == UNCLEAR
    assert statements.judged(statements.inverse(RunsRatio(*ends))) == UNCLEAR
    assert statements.judged(statements.inverse(Ratio(*ends))) == LESS


def test_disjoint_intervals_of_blocks_tell_which_phase_gains_more() -> None:
    prefill = Ratio(1 / 1.81, 1 / 1.91, 1 / 1.58)
    decode = Ratio(1 / 1.49, 1 / 1.57, 1 / 1.32)
    gain = statements.threads_gain(prefill, decode, 2)
    assert gain.verdict == MORE
    assert "1.81 times (1.58 to 1.91, 95 % interval) as fast" in gain.sentence


def test_the_gains_of_both_phases_are_compared_block_by_block() -> None:
    half = Ratio(0.5, 0.3, 0.8)
    assert statements.threads_gain(half, half, 2).verdict == UNCLEAR
    assert statements.threads_gain(half, half, 2, Ratio(1.3, 1.2, 1.4)).verdict == MORE


def test_lengths_that_agree_are_told_although_the_longest_is_unclear() -> None:
    same = RunsRatio(1.01, 0.995, 1.04)
    wide = RunsRatio(1.11, 1.02, 1.22)
    more = {512: same, 1024: RunsRatio(1.15, 1.08, 1.23), 1536: RunsRatio(1.12, 1.08, 1.16)}
    statement = statements.by_length("a token", more | {2048: wide})
    assert statement.verdict == MORE
    assert "After 1,024 and 1,536 tokens it clearly takes longer." in statement.sentence
    assert statement.sentence.endswith("At the longest the runs differ too much to tell.")
    opposite = more | {512: RunsRatio(0.5, 0.49, 0.51), 2048: wide}
    assert statements.by_length("a token", opposite).verdict == UNCLEAR
    assert statements.by_length("a token", {512: more[1024], 2048: wide}).verdict == UNCLEAR
    assert statements.by_length("a token", more).sentence.endswith(
        "At the longest it clearly takes longer."
    )


@pytest.mark.parametrize(
    ("verdict", "says", "part"),
    [
        (
            MORE,
            FAILS,
            "has 53.1 % of the bytes, and a token takes longer: attention to it does not",
        ),
        (LESS, UNCLEAR, "fewer bytes or a faster kernel"),
        (SAME, UNCLEAR, "do not show whether"),
        (UNCLEAR, UNCLEAR, "do not show whether"),
    ],
)
def test_half_the_bytes_that_take_longer_do_not_wait_for_memory(
    verdict: str, says: str, part: str
) -> None:
    token = statements.Judgement("a token with q8_0", verdict, "")
    statement = statements.smaller_cache(token, 34 / 64)
    assert statement.verdict == says
    assert part in statement.sentence


@pytest.mark.parametrize(
    ("phase", "rate", "reads", "part"),
    [
        (
            DECODE,
            7e9,
            7e9,
            "no slower than sound kernels usually are (at least 17 % of the rate",
        ),
        (
            PREFILL,
            7e9,
            7e9,
            "no slower than sound kernels usually are (at least 17 % of the rate",
        ),
        (DECODE, 1e9, 7e9, "once for each query head"),
        (DECODE, 12e9, 12e9, "Attention is no slower."),
    ],
)
def test_a_usual_speed_of_attention_explains_no_time(
    phase: str, rate: float, reads: float, part: str
) -> None:
    law = Growth(phase, SLOPE, "", 1e-3, rate, 12e9, reads)
    statement = statements.slow_attention(law, phase)
    assert statement.verdict == SLOPE
    assert part in statement.sentence
    assert statement.sentence.endswith("That does not say what limits it.")
    assert "explain" not in statement.sentence


def test_the_datasheet_has_no_w_of_a_law_that_misses_a_short_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    law = Law(9.0e-3, 20e-6, None, 0.0)
    holds = statements.law_holds("decode", law, [(18, [9.4e-3])])
    misses = statements.law_holds("decode", law, [(18, [4.2e-3])])
    records = [make_record(make_run())]
    sheet.note(1, records, None, **sheet.lawful(law, holds))
    assert sheet.noted(1, "w") == pytest.approx(9.0)
    sheet.note(1, records, None, **sheet.lawful(law, misses))
    assert sheet.noted(1, "w") is None
    assert sheet.noted(1, "k") == pytest.approx(20.0)
    assert "Left out, because it is not known: w" in capsys.readouterr().out
    assert [row.figure for row in own_sheet.read(sheet.FILE).rows] == ["k"]
