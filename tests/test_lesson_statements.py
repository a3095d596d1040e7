"""What the lessons conclude on twelve planted machines: the truth, and never its opposite.

A machine is planted as plain times, which somebody could have measured with a watch, and the
verdicts that they must lead to are written beside it by hand.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lab.core.growth import KERNEL, SLOPE
from lab.core.record import DECODE, Buffer, Placement, Record
from lab.core.stats import Ratio
from lab.features.lessons import lesson, statements
from lab.features.lessons.statements import (
    FAILS,
    HOLDS,
    LESS,
    MORE,
    SAME,
    UNCLEAR,
    Judgement,
)
from lab.models import catalog, synthetic
from lab.roofline import explanation
from lab.show.sweep_laws import Law
from tests.support.records import make_record, make_run

SMOLLM = synthetic.model_of(catalog.find("smollm2-135m"), "Q4_1")
WEIGHTS_MB = 96.6  # of a step, as lesson 2 counts them
CACHE_KB = 23.04  # of a position in F16, as lesson 3 counts it
DECODE_LIMIT = "limit of decode at 512 prompt tokens"
ATTENTION = "attention in decode"
ALONG = "decode along an answer after 10"
LONGER = "decode after a longer prompt"
THREADS = "threads help prefill more than decode"


@dataclass(frozen=True)
class Planted:
    """A machine: milliseconds of a token of decode, and what each position adds in microseconds.

    `kernels_ms`: what the kernels of the weights take alone. `truths`: verdicts by subject.
    """

    weights_ms: float
    position_us: float
    prompt_token_ms: float
    kernels_ms: float
    reads_gbps: float
    gflops: float
    truths: dict[str, str]
    noise: float = 0.002
    threads: tuple[float, float] = (0.52, 0.6)  # times of prefill and decode over one thread
    batch_of_16: float = 0.5  # the time of a token in it, over one alone
    q8_0: tuple[float, float] = (1.0, 1.0)  # a token and a prompt, over those with F16
    draft_step: float = 1.2  # a step of 5 positions, over one
    buffers: tuple[str, ...] = field(default=("CPU_Mapped",))


MEMORY = explanation.TRAFFIC
OF_WEIGHTS = explanation.KERNEL
SLOW_ATTENTION = explanation.OF_ATTENTION[explanation.KERNEL]

MACHINES = {
    "memory-bound": Planted(
        *(5.0, 1.5, 0.6, 4.9, 20, 600),
        {DECODE_LIMIT: MEMORY, ATTENTION: SLOPE, LONGER: MORE, THREADS: MORE},
        threads=(0.51, 0.97),
    ),
    "compute-bound": Planted(
        *(20.0, 2.5, 19.5, 19.5, 20, 14),
        {DECODE_LIMIT: explanation.ARITHMETIC, ATTENTION: SLOPE, THREADS: UNCLEAR},
        threads=(0.51, 0.51),
        batch_of_16=1.0,
        draft_step=5.0,
    ),
    "slow kernel of the weights": Planted(
        *(5.8, 2.2, 1.9, 5.2, 45, 600),
        {DECODE_LIMIT: OF_WEIGHTS, ATTENTION: SLOPE, LONGER: MORE},
        draft_step=3.5,
    ),
    "slow kernel of attention": Planted(
        *(4.6, 18.0, 0.5, 4.4, 29, 900),
        {DECODE_LIMIT: SLOW_ATTENTION, ATTENTION: KERNEL, LONGER: MORE, ALONG: MORE},
        q8_0=(0.45, 3.8),
        draft_step=4.0,
        buffers=("AMX", "CPU_Mapped"),
    ),
    "very slow kernel of attention": Planted(
        *(5.0, 40.0, 0.5, 4.8, 29, 900),
        {DECODE_LIMIT: SLOW_ATTENTION, ATTENTION: KERNEL, LONGER: MORE, ALONG: MORE},
        q8_0=(0.2, 5.0),
    ),
    "noisy": Planted(
        *(5.0, 0.5, 0.6, 4.9, 20, 600),
        {LONGER: UNCLEAR, ALONG: SAME, THREADS: UNCLEAR},
        noise=0.5,
    ),
    "two cores that gain nothing": Planted(
        *(5.0, 1.5, 0.6, 4.9, 20, 600),
        {DECODE_LIMIT: MEMORY, ATTENTION: SLOPE, THREADS: UNCLEAR},
        threads=(1.0, 1.0),
    ),
    "fast GPU": Planted(
        *(0.5, 0.1, 0.004, 0.09, 1000, 80_000),
        {DECODE_LIMIT: explanation.OVERHEAD},
        batch_of_16=0.07,
        buffers=("CUDA0",),
    ),
    "large memory, fast arithmetic": Planted(
        *(0.9, 0.22, 0.05, 0.88, 120, 9_000),
        {DECODE_LIMIT: MEMORY, ATTENTION: SLOPE, LONGER: MORE},
    ),
    "one core": Planted(
        *(7.0, 2.5, 3.8, 6.6, 12, 120),
        {DECODE_LIMIT: MEMORY, ATTENTION: SLOPE, LONGER: MORE},
        batch_of_16=0.9,
        draft_step=4.2,
    ),
    "much work outside the kernels": Planted(
        *(9.0, 2.0, 1.0, 3.0, 40, 600),
        {DECODE_LIMIT: explanation.OVERHEAD, ATTENTION: SLOPE, LONGER: MORE},
    ),
    "attention that costs nothing": Planted(
        *(5.0, 0.1, 0.6, 4.9, 20, 600),
        {DECODE_LIMIT: MEMORY, LONGER: SAME, ALONG: SAME},
        noise=0.0,
    ),
}


def runs(machine: Planted, n_prompt: int, n_gen: int, chance: random.Random) -> list[Record]:
    """Three runs, each with luck of its own."""
    records = []
    for repeat in range(3):
        luck = 1 + machine.noise * chance.uniform(-1, 1)
        run = make_run(
            n_prompt,
            n_gen,
            repeat,
            prefill_ms=luck * machine.prompt_token_ms,
            decode_ms=luck * machine.weights_ms,
            per_position_ms=luck * machine.position_us / 1e3,
        )
        records.append(make_record(run, model=SMOLLM))
    return records


def values(machine: Planted, middle: float, chance: random.Random) -> list[float]:
    return [middle * (1 + machine.noise * chance.uniform(-1, 1)) for _ in range(6)]


def explained_row(machine: Planted) -> Any:
    """What `lab.explain` finds in decode after 512 tokens."""
    attention_bytes = 512 * CACHE_KB * 1e3
    attention_flops = 3 * attention_bytes  # three query heads share a cache
    attention_s = 512 * machine.position_us / 1e6
    n_bytes = WEIGHTS_MB * 1e6 + attention_bytes
    flops = 0.27e9 + attention_flops
    return SimpleNamespace(
        phase=DECODE,
        n_prompt=512,
        measured_s=machine.weights_ms / 1e3 + attention_s,
        least_s=machine.kernels_ms / 1e3 + attention_s,
        attention_s=attention_s,
        traffic_s=n_bytes / machine.reads_gbps / 1e9,
        arithmetic_s=flops / machine.gflops / 1e9,
        attention_traffic_s=attention_bytes / machine.reads_gbps / 1e9,
        attention_arithmetic_s=attention_flops / machine.gflops / 1e9,
        attention_bytes=attention_bytes,
        attention_flops=attention_flops,
        n_bytes=n_bytes,
        flops=flops,
        parts={"layers": machine.kernels_ms / 1e3, "attention": attention_s, "output": 0.0},
    )


def said(machine: Planted) -> Iterator[tuple[str, Judgement]]:
    """All statements of the lessons on a machine, each with its lesson."""
    chance = random.Random(1)
    short = runs(machine, 10, 200, chance)
    long = runs(machine, 1000, 20, chance)
    row = explained_row(machine)
    longer = lesson.longer_prompt(short + long)
    yield "0", longer
    yield "1", longer
    yield "0", along(short)
    law = Law(machine.weights_ms / 1e3, machine.position_us / 1e6, None, 0.0)
    yield "1", statements.law_holds("decode", law, [(110, law.seconds(110))])
    yield "1", lesson.attention(short + long)
    yield "2", statements.limit(row, "decode at 512 prompt tokens")
    yield "2", statements.attention_of_row(row)
    token_ms = 1e3 * row.measured_s
    reading_ms = WEIGHTS_MB / machine.reads_gbps
    parts_ms = {name: 1e3 * part_s for name, part_s in row.parts.items()}
    yield (
        "2",
        statements.cheaper_prompt_token(
            token_ms, machine.prompt_token_ms, reading_ms, parts_ms
        ),
    )
    times = [values(machine, 1.0, chance), values(machine, machine.batch_of_16, chance)]
    yield "2", statements.batched("Q4_1", 16, *times)
    prefill, decode = (ratio(machine, factor, chance) for factor in machine.threads)
    yield "2", statements.threads_gain(prefill, decode, 2)
    buffers = tuple(Buffer("model", name, 1) for name in machine.buffers)
    yield "2", statements.repacked("Q4_1", Placement((), buffers))
    attention = lesson.attention(short + long)
    yield "3", attention
    yield "3", statements.shared_heads(ratio(machine, 1.4, chance), 3, attention)
    token, prompt = (ratio(machine, factor, chance) for factor in machine.q8_0)
    yield "3", statements.by_length("a token with q8_0", {512: token, 2048: token})
    yield "3", statements.by_length("a prompt with q8_0", {2048: prompt})
    yield "4", statements.explains("decode", 1.3, ratio(machine, 1.3, chance), attention)
    yield "5", statements.drafts_to_gain(5, machine.draft_step)
    speed_up = 3.36 / machine.draft_step  # 1 + 0.8 + 0.8^2 + ...: the same drafts
    low, high = speed_up * (1 - machine.noise), speed_up * (1 + machine.noise)
    yield "5", statements.drafts("table", 3.36, speed_up, (low, high))
    yield "7", lesson.attention(short + long)


def along(records: Sequence[Record]) -> Judgement:
    """As `lesson.along_answers`, of one length."""
    gaps = [
        [
            (end - start) / 1e6
            for kind, start, end in zip(
                record.run.steps.kind,
                record.run.steps.start_ns,
                record.run.steps.end_ns,
                strict=True,
            )
            if kind == DECODE
        ]
        for record in records
    ]
    early = [gap[8] for gap in gaps]
    late = [gap[-8] for gap in gaps]
    return statements.along_answer(10, early, late)


def ratio(machine: Planted, factor: float, chance: random.Random) -> Ratio | None:
    return statements.ratio(values(machine, 1.0, chance), values(machine, factor, chance))


@pytest.mark.parametrize("name", MACHINES)
def test_no_two_lessons_say_the_opposite_of_one_machine(name: str) -> None:
    pairs = itertools.combinations(said(MACHINES[name]), 2)
    for (lesson_1, first), (lesson_2, second) in pairs:
        is_same = first.subject == second.subject
        if is_same and UNCLEAR not in (first.verdict, second.verdict):
            assert first.verdict == second.verdict, (lesson_1, first, lesson_2, second)


@pytest.mark.parametrize("name", MACHINES)
def test_what_the_lessons_say_is_true_of_the_planted_machine(name: str) -> None:
    machine = MACHINES[name]
    verdicts: dict[str, set[str]] = {}
    for _number, statement in said(machine):
        verdicts.setdefault(statement.subject, set()).add(statement.verdict)
    for subject, truth in machine.truths.items():
        told = verdicts[subject] - {UNCLEAR}
        assert told == ({truth} - {UNCLEAR}), (subject, verdicts[subject])


@pytest.mark.parametrize("name", MACHINES)
def test_every_statement_is_a_sentence_without_a_missing_number(name: str) -> None:
    for _number, statement in said(MACHINES[name]):
        assert statement.sentence.endswith("."), statement
        assert "nan" not in statement.sentence.split()
        assert "None" not in statement.sentence
        assert "inf" not in statement.sentence.split()


def test_a_slow_kernel_of_attention_is_the_third_limit_in_the_words() -> None:
    words = {
        statement.subject: statement.sentence
        for _number, statement in said(MACHINES["slow kernel of attention"])
    }
    assert "Neither memory nor arithmetic limits attention here" in words[ATTENTION]
    assert "the kernel of attention is" in words[DECODE_LIMIT]
    assert "llama.cpp's kernel for it does" in words["heads that share a cache, in time"]


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
    short, long = (18, 5.0e-3), (10_100, 64e-3)
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
