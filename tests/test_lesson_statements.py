"""The rules of the lessons: figures in, a verdict and a sentence out.

What they conclude on whole machines is in test_lesson_machines.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
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
from lab.features.lessons.timed import of_quiet_runs
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
    ("base", "other", "verdict"),
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
    base: list[float], other: list[float], verdict: str
) -> None:
    assert statements.judged(statements.ratio(base, other)) == verdict


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


def test_a_law_that_is_off_by_more_than_10_percent_is_not_said_to_hold() -> None:
    law = Law(7.92e-3, 0.0, None, 0.048)
    off = statements.law_holds("decode", law, [(18, [6.85e-3, 6.91e-3, 7.0e-3])])
    assert off.sentence.endswith("(+15 %). It is off by 15 % at 18 tokens.")
    assert off.verdict == HOLDS  # it may be used, as its error is told
    near = statements.law_holds("decode", law, [(18, [7.3e-3, 7.4e-3])])
    assert near.sentence.endswith("It holds there within 10 %.")
    among_runs = statements.law_holds("decode", law, [(18, [6.9e-3, 6.91e-3, 7.93e-3])])
    assert among_runs.sentence.endswith("It is off by 15 % at 18 tokens.")
    far = statements.law_holds("decode", law, [(18, [6.91e-3]), (80, [4.0e-3])])
    assert far.verdict == FAILS


def test_an_answer_of_which_claim_4_fails_has_no_constant_tokens() -> None:
    assert judging.CLAIMS[3]["words"] == "The time per generated token is mostly constant"
    assert statements.CONSTANT == 1.05
    assert statements.along_answer(10, [100, 100], [107, 109]).verdict == MORE
    same = statements.along_answer(10, [100, 100], [99, 104])
    assert same.verdict == SAME
    assert "take the same time within 5 %" in same.sentence


@pytest.mark.parametrize(
    ("late_ms", "part"),
    [
        ([102, 110, 111], "longer in every run, but not in every run by over 5 %"),
        ([98, 90, 89], "over 5 % longer in no run"),
        ([80, 93, 100], "over 5 % longer in no run"),
        ([104, 104, 90], "over 5 % longer in no run"),
        ([94, 112, 112], "the runs do not agree"),
    ],
)
def test_what_unclear_ends_of_an_answer_still_show_is_told(
    late_ms: list[float], part: str
) -> None:
    statement = statements.along_answer(1000, [100, 100, 100], late_ms)
    assert statement.verdict == UNCLEAR
    assert part in statement.sentence


@pytest.mark.parametrize(
    ("measured", "verdict", "part"),
    [
        (Ratio(1.46, 1.10, 1.93), UNCLEAR, "(1.10 to 1.93, 95 % interval)"),
        (Ratio(1.46, 1.10, 1.93), UNCLEAR, "Both agree, but the interval is wide"),
        (Ratio(1.30, 1.20, 1.41), HOLDS, "they agree, so the kernels explain it"),
        (
            Ratio(3.00, 2.00, 4.50),
            FAILS,
            "The kernels do not explain the difference: the rest",
        ),
    ],
)
def test_a_wide_interval_does_not_let_the_kernels_explain_a_ratio(
    measured: Ratio, verdict: str, part: str
) -> None:
    attention = statements.slow_attention(None, DECODE)
    statement = statements.explains("decode here", "there", 1.30, measured, attention)
    assert statement.verdict == verdict
    assert part in statement.sentence


def test_kernels_that_are_as_fast_do_not_explain_a_clear_difference() -> None:
    attention = statements.slow_attention(None, DECODE)
    for predicted, verdict in ((1.0, FAILS), (0.95, FAILS), (0.85, HOLDS), (1.2, FAILS)):
        measured = Ratio(0.789, 0.734, 0.929)
        statement = statements.explains(
            "decode with Q4_0", "with Q4_1", predicted, measured, attention
        )
        assert statement.verdict == verdict
    more = statements.explains("decode", "there", 0.735, Ratio(0.853, 0.811, 0.878), attention)
    assert more.verdict == UNCLEAR
    assert more.sentence.endswith("in the same direction, but more than was measured.")
    assert statement.sentence.startswith("Decode with Q4_0 takes 0.789 times")
    assert "The kernels do not explain the difference" in statement.sentence


@pytest.mark.parametrize(
    ("at_once_s", "in_chunks_s", "verdict"),
    [
        ([4.15, 5.20], [5.40, 5.65], UNCLEAR),  # the runs at once differ by as much
        ([4.00, 4.02], [4.80, 4.82], MORE),
        ([4.00, 4.02], [4.20, 4.30], SAME),
        ([4.39], [4.68], UNCLEAR),  # one run of each shows nothing
        ([4.39], [6.00], UNCLEAR),
        ([4.80, 4.82], [4.00, 4.02], LESS),
    ],
)
def test_what_chunks_cost_is_told_by_two_runs_of_each(
    at_once_s: list[float], in_chunks_s: list[float], verdict: str
) -> None:
    statement = statements.chunks_cost(64, at_once_s, in_chunks_s)
    assert statement.verdict == verdict
    assert statement.sentence.startswith("With chunks of 64 tokens the new request waits")


def test_an_overhead_whose_turns_differ_has_a_sign_and_no_size() -> None:
    unsure = statements.overhead("each further token", [1.3, 5.4, 12.2])
    assert unsure.verdict == MORE
    assert unsure.sentence.endswith("in every turn, but how much these turns do not tell.")
    assert statements.overhead("x", [2.0, 3.0]).sentence.endswith("It does so in every turn.")
    assert [
        statements.is_settled(ms) for ms in ([2.0, 3.0], [1.3, 12.2], [-1.0, 2.0], [])
    ] == [
        True,
        False,
        False,
        False,
    ]


def test_much_work_outside_the_kernels_is_named_beside_the_limit() -> None:
    row = SimpleNamespace(
        **{"measured_s": 10.0, "least_s": 6.5, "attention_s": 1.0, "traffic_s": 1.0},
        **{"arithmetic_s": 0.5, "attention_arithmetic_s": 0.1, "attention_traffic_s": 0.1},
    )
    statement = statements.limit(row, "decode")
    assert statement.verdict == explanation.KERNEL
    assert statement.sentence.endswith(
        "; the work outside the kernels takes 35 % of the time."
    )


def test_runs_on_both_sides_of_the_rule_do_not_tell_the_limit() -> None:
    def row(measured_s: float) -> SimpleNamespace:
        return SimpleNamespace(
            **{"measured_s": measured_s, "least_s": measured_s, "attention_s": 0.0},
            **{"traffic_s": 1.0, "arithmetic_s": 0.1},
            **{"attention_arithmetic_s": 0.0, "attention_traffic_s": 0.0},
        )

    agreeing = statements.limit_in_runs([row(1.30), row(1.40), row(1.45)], "decode")
    assert agreeing.verdict == explanation.TRAFFIC
    assert "1.4x the speed" in agreeing.sentence
    split = statements.limit_in_runs([row(1.47), row(1.49), row(1.59)], "decode")
    assert split.verdict == statements.UNCLEAR
    assert split.sentence == (
        "In decode, memory would allow 1.47x to 1.59x the speed in the runs: by the fastest run "
        "the limit is memory traffic, and by the slowest the kernel. So these runs do not tell "
        "which."
    )


@pytest.mark.parametrize(
    ("predicted", "ratio", "words"),
    [
        (0.203, (0.257, 0.253, 0.290), "in the same direction, but more than was measured"),
        (0.616, (0.743, 0.699, 0.793), "in the same direction, but more than was measured"),
        (0.40, (0.257, 0.253, 0.290), "explain only a part of the difference"),
        (0.80, (0.257, 0.253, 0.290), "do not explain the difference"),
        (1.50, (0.257, 0.253, 0.290), "do not explain the difference"),
        (0.26, (0.257, 0.253, 0.290), "they agree"),
    ],
)
def test_ceilings_that_miss_a_difference_say_to_which_side(
    predicted: float, ratio: tuple[float, float, float], words: str
) -> None:
    attention = statements.slow_attention(None, DECODE)
    statement = statements.explains("prefill", "there", predicted, Ratio(*ratio), attention)
    assert words in statement.sentence


def test_a_verdict_along_an_answer_is_that_of_the_printed_digits() -> None:
    for last_ms in (4.195, 4.204):  # 1.049 and 1.051 times, both printed as 1.05
        statement = statements.along_answer(10, [4.0, 4.0], [4.06, last_ms])
        assert statement.verdict == UNCLEAR
        assert "(1.01 to 1.05 in the runs)" in statement.sentence


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
    statement = statements.cheaper_prompt_token(5.0, 1.0, 1.0, saved_ms, explanation.KERNEL)
    assert statement.verdict == "output"
    assert statement.sentence.endswith("the largest part of the difference is output: 60 %.")


@pytest.mark.parametrize(
    ("w_s", "verdict"),
    [
        (6.3e-3, statements.SAME),
        (7.0e-3, statements.SAME),
        (7.85e-3, statements.UNCLEAR),  # 1.24 times, and 1.08 by the bytes
        (15.4e-3, statements.UNCLEAR),
        (0.0, statements.UNCLEAR),
        (-1.0e-3, statements.UNCLEAR),
    ],
)
def test_lines_of_the_same_weights_that_differ_in_w_separate_nothing(
    w_s: float, verdict: str
) -> None:
    law = Law(w_s, 15.1e-6, None, 0.036)
    statement = statements.same_weights(law, Law(6.34e-3, 9.37e-6, None, 0.041), 1.08)
    assert statement.verdict == verdict
    assert ("do not separate w from k" in statement.sentence) == (verdict != statements.SAME)


def test_a_length_at_which_a_law_fails_hides_no_other() -> None:
    law = Law(0.0, 1e-3, None, 0.0)
    statement = statements.law_holds(
        "prefill", law, [(10, [0.02, 0.02]), (100, [0.101]), (1000, [1.16])]
    )
    assert statement.verdict == FAILS
    assert statement.sentence.endswith(
        "It does not hold at 10 tokens: do not use it there. It is off by 14 % at 1,000 tokens, "
        "too."
    )


def test_a_disturbed_run_is_left_out_where_enough_others_are_left() -> None:
    steps = pd.DataFrame({"row": [0, 0, 1, 2], "disturbed": [True, True, False, False]})
    assert list(of_quiet_runs(steps, steps.row).row) == [1, 2]
    two_runs = steps[steps.row < 2]
    assert list(of_quiet_runs(two_runs, two_runs.row).row) == [0, 0, 1]


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
    assert "explain" not in statement.sentence
    if rate == 12e9:
        assert statement.sentence.endswith("That does not say what limits it.")
    else:
        assert "does not limit attention: the kernel does" in statement.sentence
    beside_best = statements.slow_attention(law, phase, best_rate=48e9).sentence
    assert "does not limit attention: the kernel does" in beside_best


def test_the_datasheet_has_w_of_the_steps_after_a_short_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    law = Law(9.0e-3, 20e-6, None, 0.0)  # misses short prompts
    records = [make_record(make_run())]
    sheet.note(1, records, None, **sheet.lawful(law, (100, [7.0e-3, 6.0e-3, 6.1e-3])))
    assert sheet.noted(1, "w") == pytest.approx(4.1)  # 6.1 ms - 100 x 20 us
    assert sheet.noted(1, "k") == pytest.approx(20.0)
    sheet.note(1, records, None, **sheet.lawful(law, (100, [1.0e-3])))
    assert sheet.noted(1, "w") is None
    assert "Left out, because it is not known: w" in capsys.readouterr().out
    assert [row.figure for row in own_sheet.read(sheet.FILE).rows] == ["k"]
    sheet.note(6, records, None, server=None)
    assert "adds nothing to datasheet.toml: server is not known" in capsys.readouterr().out
