"""What the lessons conclude on thirteen planted machines: the truth, and never its opposite.

A machine is planted as the time of each step (tests.support.planted). The lessons' own functions
get its records, its ceilings and nothing else. The verdicts that they must come to are written here
by hand, from the planted times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lab.core.growth import KERNEL, SLOPE
from lab.core.record import (
    DECODE,
    PREFILL,
    Buffer,
    Ceilings,
    Model,
    Placement,
    Record,
    Settings,
)
from lab.features.claims import judging
from lab.features.claims.evidence import Evidence
from lab.features.lessons import conclusions, lesson, statements
from lab.features.lessons.statements import (
    FAILS,
    HOLDS,
    LESS,
    MORE,
    SAME,
    UNCLEAR,
    Judgement,
)
from lab.roofline import explanation
from lab.show.sweep_laws import Law
from tests.support.planted import WEIGHTS, Planted
from tests.support.requests import served

PARTS = ("lengths", "context", "batch", "speculation")
IN_BLOCKS = ("settings",)
N_BLOCKS = 7  # of two figures, as in lesson 2
SHORT, STEP, LONG = 32, 512, 1024  # prompts of the part `lengths`; a full step
MEMORY = explanation.TRAFFIC
ARITHMETIC = explanation.ARITHMETIC
OF_WEIGHTS = explanation.KERNEL
OUTSIDE = explanation.OVERHEAD
SLOW_ATTENTION = explanation.OF_ATTENTION[explanation.KERNEL]
WEIGHT_KERNELS = statements.WEIGHTS
ATTENTION = explanation.ATTENTION
READING = "reading"
WORK_OUTSIDE = statements.WORK_OUTSIDE


@dataclass(frozen=True)
class Truth:
    """What is true of a machine, in the verdicts of the lessons; UNCLEAR where nothing can be
    told.

    The fields are all that the lessons speak of.
    """

    longer: str  # a token after 1,024 prompt tokens, over one after 32
    along: str  # the last tokens of an answer of 64 after 32, over the first
    decode_short: str  # what limits a token after 32 prompt tokens
    decode_long: str  # and after 1,024
    prefill: str  # what limits a prompt of 1,024
    attention: str  # its kernel in decode
    attention_prefill: str
    cheaper: str  # why a prompt token is cheaper than a generated one
    together: str  # a token in a step of 16, over one alone
    threads: str  # whether prefill gains more than decode
    q8_token: str  # a token after 1,024 with a q8_0 cache, over F16
    q8_prompt: str
    heads: str  # a token after 1,024 with three times the attention
    drafts: str  # the best number of up to 4 drafts that are right with 80 %
    explained_prefill: str  # whether the ceilings explain the ratio to the sample's machine
    explained_decode: str
    law: str = HOLDS  # of decode, at the shortest prompt
    overhead: str = MORE  # of a server that adds 2 ms to each token
    repacked: str = FAILS


MEMORY_BOUND = Truth(
    longer=SAME,  # 20 ns x 992 positions beside 1 ms
    along=SAME,
    decode_short=MEMORY,
    decode_long=MEMORY,
    prefill=ARITHMETIC,
    attention=SLOPE,  # 256 bytes in 20 ns are twelve times the rate of the weights
    attention_prefill=SLOPE,
    cheaper=READING,
    together=LESS,  # 2 ms for 16 tokens, 1 ms for one
    threads=MORE,  # prefill 2 times as fast, decode 1.11
    q8_token=SAME,
    q8_prompt=SAME,
    heads=SAME,  # 41 us more beside 1 ms
    drafts=MORE,  # five positions take as long as one
    explained_prefill=HOLDS,
    explained_decode=HOLDS,
)
SLOW = Truth(
    longer=MORE,
    along=MORE,
    decode_short=MEMORY,
    decode_long=SLOW_ATTENTION,
    prefill=SLOW_ATTENTION,
    attention=KERNEL,  # 256 bytes in 3,000 ns: a twelfth of the rate of the weights
    attention_prefill=KERNEL,
    cheaper=ATTENTION,  # of 2.5 ms it has 1.5: a prompt token sees half of the positions
    together=LESS,
    threads=SAME,
    q8_token=LESS,
    q8_prompt=LESS,
    heads=MORE,
    drafts=MORE,
    explained_prefill=HOLDS,
    explained_decode=HOLDS,
)


def arithmetic_of(token_ms: float) -> float:
    """The GFLOP/s with which a token's arithmetic takes so many milliseconds."""
    return 2 * WEIGHTS / token_ms / 1e6


def changed(truth: Truth, **changes: str) -> Truth:
    return dataclasses.replace(truth, **changes)


MACHINES: dict[str, tuple[Planted, Truth]] = {
    "memory-bound": (Planted(pair_ns=20), MEMORY_BOUND),
    "compute-bound": (  # a prompt token skips most of the last of two layers
        Planted(gflops=arithmetic_of(2.0), pair_ns=300),
        changed(
            MEMORY_BOUND,
            longer=MORE,
            heads=MORE,
            decode_short=ARITHMETIC,
            decode_long=ARITHMETIC,
            cheaper=WEIGHT_KERNELS,
            together=SAME,
            threads=SAME,
            drafts=LESS,
        ),
    ),
    "slow kernel of the weights": (
        Planted(pair_ns=20, slow={"Q4_0": 2.5}),
        changed(
            MEMORY_BOUND,
            decode_short=OF_WEIGHTS,
            decode_long=OF_WEIGHTS,
            prefill=OF_WEIGHTS,
            cheaper=WEIGHT_KERNELS,
        ),
    ),
    "slow kernel of attention": (Planted(pair_ns=3000), SLOW),
    "very slow kernel of attention": (  # two positions wait 5.4 ms for it, one 2.7
        Planted(pair_ns=10_000, q8_cache=0.2),
        changed(SLOW, drafts=SAME),
    ),
    "noisy": (Planted(pair_ns=20, noise=0.3, step_noise=0.3), MEMORY_BOUND),
    "noisy ceilings": (Planted(pair_ns=20, probe_noise=0.3), MEMORY_BOUND),
    "two cores that gain nothing": (
        Planted(pair_ns=20, half_reads=1, half_computes=1),
        changed(MEMORY_BOUND, threads=SAME),
    ),
    "fast GPU": (
        Planted(gbps=1000, gflops=arithmetic_of(0.000_125), pair_ns=0.05, wasted_ms=0.5),
        changed(
            MEMORY_BOUND,
            decode_short=OUTSIDE,
            decode_long=OUTSIDE,
            prefill=OUTSIDE,
            cheaper=WORK_OUTSIDE,
            threads=SAME,
            explained_prefill=FAILS,
            explained_decode=FAILS,
        ),
    ),
    "large memory, fast arithmetic": (
        Planted(gbps=4, gflops=arithmetic_of(0.08), pair_ns=50),
        changed(MEMORY_BOUND, longer=MORE, heads=MORE, q8_prompt=LESS),
    ),
    "one core": (  # two positions compute 1.6 ms, one reads 1 ms
        Planted(gflops=arithmetic_of(0.8), pair_ns=130),
        changed(MEMORY_BOUND, longer=MORE, heads=MORE),
    ),
    "much work outside the kernels": (
        Planted(pair_ns=20, wasted_ms=3),
        changed(
            MEMORY_BOUND,
            decode_short=OUTSIDE,
            decode_long=OUTSIDE,
            cheaper=WORK_OUTSIDE,
            explained_decode=FAILS,
        ),
    ),
    "attention that costs nearly nothing": (Planted(pair_ns=18), MEMORY_BOUND),
}


def hear(function: Callable[[], Any]) -> list[Judgement]:
    """The judgements that a function of the lessons says."""
    said_here: list[Judgement] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(conclusions, "say", said_here.append)
        function()
    return [sentence for sentence in said_here if isinstance(sentence, Judgement)]


@dataclass(frozen=True)
class Session:
    """The records and ceilings of a machine; what the lessons measure on it."""

    machine: Planted
    records: tuple[Record, ...]
    ceilings: Ceilings

    def of(self, part: str, *variants: str) -> list[Record]:
        """The runs of a part; of these variants, in their order."""
        of_part = [
            dataclasses.replace(record, run=dataclasses.replace(record.run, part=None))
            for record in self.records
            if record.run.part == part
        ]
        if not variants:
            return of_part
        chosen: list[Record] = []
        for variant in variants:
            chosen += [record for record in of_part if record.run.variant == variant]
        return chosen

    @property
    def model(self) -> Model:
        return self.after(SHORT)[0].model

    @property
    def settings(self) -> Settings:
        return self.after(SHORT)[0].settings

    @property
    def gbps(self) -> float:
        return lesson.roof(self.ceilings).gbps

    def token_s(self, n_prompt: int) -> float:
        return float(lesson.figures(self.after(n_prompt)).tpot_ms.iloc[0] / 1e3)

    def after(self, n_prompt: int) -> list[Record]:
        return [record for record in self.of("lengths") if record.run.n_prompt == n_prompt]


@functools.cache
def session_of(name: str, seed: int = 1) -> Session:
    return session(MACHINES[name][0], seed)


def session(machine: Planted, seed: int = 1) -> Session:
    records = machine.session(PARTS, seed) + machine.session(IN_BLOCKS, seed, N_BLOCKS)
    return Session(machine, tuple(records), machine.ceilings(seed))


@functools.cache
def sample() -> Session:
    """The machine with which lesson 4 compares: another one, so its processor has another name."""
    here = session(Planted(), 2)
    machine = dataclasses.replace(here.records[0].machine, cpu="Of the sample")
    records = tuple(dataclasses.replace(record, machine=machine) for record in here.records)
    return dataclasses.replace(here, records=records)


Spoken = tuple[str, str, Judgement]
Said = Iterator[Spoken]


@functools.cache
def statements_called(name: str) -> list[Spoken]:
    return list(statements_of(session_of(name)))


def statements_of(here: Session) -> Said:
    """(fact, lesson, judgement) of everything that the lessons conclude from a session."""
    for lesson_of in (answers, laws, limits, batches, settings, other_machine, drafts, server):
        yield from lesson_of(here)


def answers(here: Session) -> Said:
    ends = [*here.after(SHORT), *here.after(LONG)]
    yield "longer", "0 and 1", lesson.longer_prompt(ends)
    (along,) = hear(lambda: lesson.along_answers(here.after(SHORT)))
    yield "along", "0, 1 and 3", along


def laws(here: Session) -> Said:
    laws_of_sweep: list[tuple[Law, Law]] = []
    short = here.after(SHORT)
    hear(lambda: laws_of_sweep.append(lesson.both_laws(here.of("context"), short)))
    point = (SHORT + 31, [ms / 1e3 for ms in lesson.times_of(short, "tpot_ms")[SHORT]])
    yield "law", "1 and 7", lesson.law_holds("decode", laws_of_sweep[0][1], [point])
    yield "attention", "1 and 7", lesson.attention(here.of("context"))
    yield "attention", "3", lesson.attention(here.of("lengths"))


def limits(here: Session) -> Said:
    for n_prompt, fact in ((SHORT, "decode_short"), (LONG, "decode_long")):
        with contextlib.redirect_stdout(io.StringIO()):
            rows = lesson.explain(here.after(n_prompt), here.ceilings)
        said_of_rows = hear(functools.partial(lesson.limits, rows))
        prefill, prefill_attention, decode, decode_attention = said_of_rows
        yield fact, "2", decode
        yield "attention", "2", decode_attention
    yield "prefill", "2", prefill
    yield "attention_prefill", "2", prefill_attention
    reading_ms = lesson.step_cost(here.model, 1).weight_bytes / here.gbps / 1e6
    (cheaper,) = hear(lambda: lesson.cheaper_prompt_token(here.after(LONG), rows, reading_ms))
    yield "cheaper", "2", cheaper
    (limit,) = hear(
        lambda: lesson.limit_of_step(
            "decode of a model",
            here.model,
            here.settings,
            here.ceilings,
            [here.token_s(SHORT)],
            SHORT + 31,
        )
    )
    yield "decode_short", "2", limit


def batches(here: Session) -> Said:
    sentences = hear(lambda: lesson.batched(here.of("batch")))
    yield "together", "2 and 5", sentences[-1]


def settings(here: Session) -> Said:
    trial = [*labelled("A", here.of("settings", "half"))]
    trial += labelled("B", here.of("settings", "base"))
    (threads,) = hear(lambda: lesson.threads_gain(trial, LONG, 2))
    yield "threads", "2", threads
    base = here.of("settings", "base")
    packed = here.of("settings", "q8_0")
    for fact, figure in (("q8_token", "tpot_ms"), ("q8_prompt", "prefill_s")):
        by_length = lesson.by_length(
            f"{figure} with q8_0", lesson.ratios(base, packed, figure)
        )
        yield fact, "3", by_length
    apart = dataclasses.replace(here.machine, pair_ns=3 * here.machine.pair_ns)
    without = lesson.ratios(here.after(LONG), session(apart, 3).after(LONG), "tpot_ms")
    attention = lesson.attention(here.of("lengths"))
    yield "heads", "3", lesson.shared_heads((without[LONG], without[LONG]), 3, attention)
    buffers = (Buffer("model", "CPU_Mapped", 1),)
    placed = [with_placement(record, buffers) for record in base]
    (repacked,) = hear(lambda: lesson.repacked(placed))
    yield "repacked", "2", repacked


def labelled(variant: str, records: list[Record]) -> list[Record]:
    """The runs as a trial names them: the first variant is the base of a comparison."""
    runs = [dataclasses.replace(record.run, variant=variant) for record in records]
    return [
        dataclasses.replace(record, run=run) for record, run in zip(records, runs, strict=True)
    ]


def with_placement(record: Record, buffers: tuple[Buffer, ...]) -> Record:
    run = dataclasses.replace(record.run, placement=Placement((), buffers))
    return dataclasses.replace(record, run=run)


def other_machine(here: Session) -> Said:
    theirs = sample()
    both = [*theirs.after(STEP), *here.after(STEP)]
    for phase, figure, n, n_past in (
        (PREFILL, "prefill_s", STEP, 0),
        (DECODE, "tpot_ms", 1, STEP),
    ):
        mine_ms, theirs_ms = (
            lesson.step_ms(of.ceilings, of.model, of.settings, n, n_past)
            for of in (here, theirs)
        )
        (measured,) = lesson.compared(both, figure, STEP)
        attention = lesson.attention(here.of("lengths"), phase)
        explained = lesson.explains(
            f"{phase} here", "there", mine_ms / theirs_ms, measured.ratio, attention
        )
        yield f"explained_{phase}", "4", explained


def drafts(here: Session) -> Said:
    (gain,) = hear(lambda: lesson.drafts_to_gain(here.of("speculation")))
    yield "drafts", "5", gain


def server(here: Session) -> Said:
    """A server that adds 2 ms to each token, with the luck of the machine."""
    chance = random.Random(1)
    turns = []
    for record in here.after(SHORT):
        alone_ms = 1e3 * lesson.figures([record]).tpot_ms.iloc[0] / 1e3
        luck = 1 + chance.gauss(0, here.machine.noise)
        turns.append(([record], [served(SHORT, gap_ms=luck * (alone_ms + 2))]))
    added_ms = lesson.added(turns, "tpot_ms")
    yield "overhead", "6", lesson.overhead("each further token", added_ms)


CLAIMS = {
    "The time per generated token is mostly constant": ("along", {MORE}),
    "Decode is memory-bound": ("decode_short", {ARITHMETIC, OF_WEIGHTS, OUTSIDE}),
    "Batched decode: each user is slower": ("together", {SAME, MORE}),
    "A quantized cache speeds decode up": ("q8_token", {MORE}),
}
"""Claims of lesson 8 about the same facts: what cannot be true where they hold."""


def holding(here: Session) -> Iterator[tuple[str, set[str], str]]:
    """(fact, what it cannot be, the reason) of each claim that holds here."""
    evidence = Evidence(here.records, here.ceilings)
    for claim in judging.CLAIMS:
        for begin, (fact, opposites) in CLAIMS.items():
            if claim["words"].startswith(begin):
                row = judging.judge(claim, evidence)
                if row["verdict"] == judging.HOLDS:
                    yield fact, opposites, row["words"]


def wrong(name: str, here: Session, all_said: Sequence[Spoken]) -> list[str]:
    """What the lessons say of a session that is not true."""
    truth = dataclasses.asdict(MACHINES[name][1])
    mistakes = []
    for fact, number, judgement in all_said:
        if judgement.verdict not in (truth[fact], UNCLEAR):
            mistakes.append(f"lesson {number}, {fact} is {truth[fact]}: {judgement.sentence}")
    for fact, opposites, sentence in holding(here):
        if truth[fact] in opposites:
            mistakes.append(f"lesson 8, {fact} is {truth[fact]}: {sentence}")
    return mistakes


@pytest.mark.parametrize("name", MACHINES)
def test_no_lesson_says_what_is_not_true_of_a_planted_machine(name: str) -> None:
    assert wrong(name, session_of(name), statements_called(name)) == []


NOISY = ("noisy", "noisy ceilings")


@pytest.mark.parametrize("name", [name for name in MACHINES if name not in NOISY])
def test_every_fact_of_a_quiet_machine_is_told(name: str) -> None:
    decided = {
        fact for fact, _, judgement in statements_called(name) if judgement.verdict != UNCLEAR
    }
    truth = dataclasses.asdict(MACHINES[name][1])
    assert decided == {fact for fact, verdict in truth.items() if verdict != UNCLEAR}


@pytest.mark.parametrize("name", NOISY)
def test_noise_makes_a_lesson_wrong_at_most_once_in_twenty_verdicts(name: str) -> None:
    mistakes = []
    n_told = 0
    for seed in (1, 2):
        here = session_of(name, seed)
        all_said = list(statements_of(here))
        mistakes += wrong(name, here, all_said)
        n_told += len(all_said)
    assert len(mistakes) <= n_told / 20, mistakes


@pytest.mark.parametrize("name", MACHINES)
def test_no_two_lessons_say_the_opposite_of_one_machine(name: str) -> None:
    for first, second in itertools.combinations(statements_called(name), 2):
        is_same = first[2].subject == second[2].subject
        if is_same and UNCLEAR not in (first[2].verdict, second[2].verdict):
            assert first[2].verdict == second[2].verdict, (first, second)


@pytest.mark.parametrize("name", MACHINES)
def test_every_conclusion_is_a_sentence_without_a_missing_number(name: str) -> None:
    for _, _, judgement in statements_called(name):
        assert judgement.sentence.endswith(".")
        words = judgement.sentence.replace("(", " ").split()
        assert not {"nan", "inf", "None"} & set(words), judgement


def test_a_step_that_refutes_the_best_rate_has_no_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = sample()
    bytes_read = lesson.step_cost(here.model, 1, SHORT).n_bytes
    for share, is_told in ((0.9, True), (1.05, True), (1.37, False)):
        step_s = bytes_read / (share * lesson.roof(here.ceilings).gbps * 1e9)
        lesson.limit_of_step(
            "decode", here.model, here.settings, here.ceilings, [step_s], SHORT
        )
        assert ("That rate is too low" in capsys.readouterr().out) is not is_told


def test_a_slow_kernel_of_attention_is_the_third_limit_in_the_words() -> None:
    sentences: dict[str, str] = {}
    for fact, _, judgement in statements_of(session_of("slow kernel of attention")):
        sentences[fact] = judgement.sentence
    assert "Neither memory nor arithmetic limits attention here" in sentences["attention"]
    assert "the kernel of attention is" in sentences["decode_long"]
    assert "llama.cpp's kernel for it does" in sentences["heads"]


@pytest.mark.parametrize("name", MACHINES)
def test_a_limit_and_the_speed_of_attention_have_one_word_for_a_slow_kernel(name: str) -> None:
    """`explain` compares attention with memory and arithmetic, `growth` with the weights."""
    by_fact: dict[str, list[Judgement]] = {}
    for fact, _, judgement in statements_called(name):
        by_fact.setdefault(fact, []).append(judgement)
    for limit in by_fact["decode_long"]:
        if "the kernel of attention is" in limit.sentence:
            assert SLOPE not in {judgement.verdict for judgement in by_fact["attention"]}
