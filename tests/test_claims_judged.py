"""Every claim on planted machines, simulated step by step: one on which it holds, and one on which it does not."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from lab.core import script as scripts
from lab.core.guesses import LOOKUP
from lab.core.record import DECODE, FAILED, OK, Ceilings, Rate, Record, Run, Settings, Steps
from lab.core.script import SPECULATE, Script, Shape
from lab.engine import loop
from lab.features import stall as stalls
from lab.features.claims import figures
from lab.features.claims.figures import LONGEST, Evidence, figure
from lab.features.claims.judging import CLAIMS, HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Claim, judge
from lab.features.speculate import planning as speculation
from lab.features.speculate.setup import Speculation
from lab.features.turns import planning as turns
from lab.features.turns.conversation import Conversation
from lab.process.wire import ATTENTION, MUL_MAT
from lab.runner import batches, disturbances
from lab.runner.batches import Batch
from lab.runner.cases import Case, measured_run, named
from lab.show import session_spread
from tests.conftest import MACHINE, MODEL, SETTINGS, FakeClock, make_record, speculated

WEIGHTS = 10**6 * 32 // 18
"""Of the tiny model, whose 10^6 bytes are Q4_0: blocks of 32 weights in 18 bytes."""

BYTES_PER_WEIGHT = {"F16": 2.0, "Q8_0": 34 / 32, "Q4_1": 20 / 32, "Q4_0": 18 / 32}
USUAL = dataclasses.replace(
    SETTINGS, n_ubatch=512, n_ctx=4096, type_k="f16", type_v="f16", flash_attn="on"
)
TRAINED = dataclasses.replace(MODEL, n_ctx_train=8192)


@dataclass(frozen=True)
class Planted:
    """A machine whose step takes as long as its arithmetic or its traffic, and attention on top.

    Without changes: 1 ms to read all weights, 1/8 ms to compute a token, so that 8 tokens take as long as the reading.
    """

    gflops: float = 8 * 2 * WEIGHTS / 1e6
    gbps: float = 1.0
    half_reads: float = 0.9  # the share of the bandwidth that half the threads reach
    pair_ns: float = 26.0  # a token that sees a position
    sees: int = 10**9  # the most positions that a token sees
    q8_cache: float = 0.53  # a pair with a q8_0 cache
    no_flash: float = 5.0  # a pair without flash attention
    slow: dict[str, float] = field(default_factory=dict)  # kernels of these types, by this factor
    wasted_ms: float = 0.0  # in each step
    kept_close: float = 1.0  # the factor by which a run reads faster than a kernel alone
    each_reads: float = (
        0.0  # of a step with several sequences: so many times the step of one, for each
    )
    mixed_ms: float = 0.0  # more for a step of a prompt and other sequences
    n_right: int = 3  # drafted tokens that are right
    again: float = (
        1.0  # of the time of a prompt's token, if the conversation has computed this place before
    )
    cached_decode: float = (
        1.0  # the factor for decode after a prompt of which a cache served a part
    )
    noise: float = 0.003

    def step_ns(self, shape: Shape, settings: Settings, kind: str) -> float:
        """The time of a step."""
        if not shape.n_tokens:
            return 1e3 * shape.n_past
        half = settings.n_threads == 1
        bandwidth = self.gbps * self.kept_close * (self.half_reads if half else 1)
        traffic = WEIGHTS * BYTES_PER_WEIGHT[kind] / bandwidth
        arithmetic = 2 * WEIGHTS * shape.n_tokens / (self.gflops / 2 if half else self.gflops)
        seen = sum(min(self.sees, shape.n_past + i) for i in range(shape.n_tokens))
        pair = self.pair_ns * (self.q8_cache if settings.type_k == "q8_0" else 1)
        pair *= self.no_flash if settings.flash_attn == "off" else 1
        own = max(traffic, arithmetic) * self.slow.get(kind, 1.0) + 1e6 * self.wasted_ms
        if self.each_reads and shape.n_seq > 1:
            own *= self.each_reads * shape.n_seq
        is_mixed = 1 < shape.n_seq < shape.n_tokens and shape.n_outputs > 1
        return own + seen * pair + 1e6 * self.mixed_ms * is_mixed

    def run(
        self, script: Script, case: Case, settings: Settings, kind: str, chance: random.Random
    ) -> Run:
        """The run of a script, with a noise of its own."""
        shapes = list(scripts.shapes(script))
        clock = FakeClock()
        factor = 1 + chance.gauss(0, self.noise)
        accepted: tuple[int, ...] = ()
        if script[-1].kind == SPECULATE:
            more, accepted = speculated(script, self.n_right)
            shapes += more

        n_computed = 0  # the places that a conversation with a cache has computed

        def move(shape: Shape) -> loop.Action:
            nonlocal n_computed
            is_free = not shape.n_tokens and shape.kind not in ("copy", "save", "load")
            ns = 0 if is_free else round(factor * self.step_ns(shape, settings, kind))
            if isinstance(case.lever, Conversation) and case.lever.keep == "memory":
                slower = (
                    self.cached_decode
                    if shape.kind == DECODE
                    else self.again
                    if shape.n_past < n_computed
                    else 1
                )
                ns = round(ns * slower)
                n_computed = max(n_computed, shape.n_past + shape.n_tokens)
            return (
                lambda: clock.advance(ns),
                (lambda: clock.advance(1000)) if shape.n_outputs else None,
                0,
            )

        steps = loop.as_steps(shapes, loop.walk([move(shape) for shape in shapes], clock, [0]))
        usual: dict[str, Any] = {
            "warmup": False,
            "started_at": "2026-01-01T00:00:00Z",
            "status": OK,
        }
        return Run(
            steps=steps,
            repeat=0,
            token_ids=(7,) * 4,
            accepted=accepted or None,
            **named(case),
            **usual,
        )

    def session(self, parts: tuple[str, ...], seed: int = 1, n_repeat: int = 3) -> list[Record]:
        """The runs of some parts."""
        chance = random.Random(seed)
        made = list[Record]()
        for repeat in range(n_repeat):
            for part, variant, case, write, settings, kind in (
                one for one in work() if one[0] in parts
            ):
                run = self.run(write(case, text, settings), case, settings, kind, chance)
                place: dict[str, Any] = {"block": repeat, "variant": variant} if variant else {}
                run = dataclasses.replace(run, part=part, repeat=repeat, **place)
                size = round(WEIGHTS * BYTES_PER_WEIGHT[kind])
                tensors: dict[str, Any] = {
                    "tensor_bytes": {kind: size},
                    "n_bytes": size,
                    "quantization": kind,
                }
                model = dataclasses.replace(TRAINED, **(tensors if kind != "Q4_0" else {}))
                made.append(make_record(run, settings=settings, model=model))
        return made

    def ceilings(self) -> Ceilings:
        """What its kernels reach alone, and a plain read."""
        rates = [Rate("read", "I64", "numpy", 1, 1, 1, 2, 10**6, 0, (round(1e6 / self.gbps),))]
        for kind, n in ((kind, n) for kind in ("Q4_0", "Q8_0", "F16") for n in (1, 8, 512)):
            n_weights = 128 * 64
            n_bytes = round(n_weights * BYTES_PER_WEIGHT[kind])
            flops = 2 * n_weights * n
            ns = 1e3 * self.slow.get(kind, 1.0) * max(n_bytes / self.gbps, flops / self.gflops)
            many = 1000 * n_bytes, 1000 * flops, (round(ns),)
            rates.append(Rate(MUL_MAT, kind, "CPU", 128, 64, n, 2, *many))
        for n in (1, 512):
            ns = n * 512 * self.pair_ns / (MODEL.n_layer or 1)
            rates.append(
                Rate(
                    ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**5, (round(max(1, ns)),), 2, 512
                )
            )
        return Ceilings("2026-01-01T00:00:00Z", MACHINE, False, tuple(rates))


def text(sequence: int, n: int) -> list[int]:
    return [sequence + i for i in range(n)]


Work = tuple[str, str | None, Case, Callable[..., Script], Settings, str]


def work() -> Iterator[Work]:
    """The scripts of a repeat of every part: part, variant, case, script, settings, quantization."""
    for n in (32, 128, LONGEST // 2, LONGEST):
        yield "lengths", None, Case(n, 64), measured_run, USUAL, "Q4_0"
    yield (
        "context",
        None,
        Case(2048, 12, every=256),
        measured_run,
        dataclasses.replace(USUAL, n_ubatch=256),
        "Q4_0",
    )
    changes: dict[str, dict[str, Any]] = {
        "base": {},
        "half": {"n_threads": 1, "n_threads_batch": 1},
        "no-flash": {"flash_attn": "off"},
        "q8_0": {"type_k": "q8_0", "type_v": "q8_0"},
    }
    for variant, change in changes.items():
        yield (
            "settings",
            variant,
            Case(LONGEST, 32),
            measured_run,
            dataclasses.replace(USUAL, **change),
            "Q4_0",
        )
    for kind in BYTES_PER_WEIGHT:
        yield "quantizations", kind, Case(64, 64), measured_run, USUAL, kind
    for n in (1, 2, 4, 8, 16):
        yield (
            "batch",
            None,
            Case(64, 16, experiment="batch", setup=Batch(n, False), sequences=(80,) * n),
            batches.write,
            USUAL,
            "Q4_0",
        )
    unified = dataclasses.replace(USUAL, kv_unified=True)
    for chunk in (None, 256, 64):
        yield "stall", None, stalls.case(512, 2, chunk), stalls.write, unified, "Q4_0"
    for name in ("code", "table", "story"):
        for n_draft in (0, 4):
            lever = Speculation(LOOKUP if n_draft else None, n_draft, name)
            yield "speculation", None, Case(256, 64, lever=lever), speculation.write, USUAL, "Q4_0"
    for breaks, keep, only in (
        ("", "memory", ()),
        ("system@5", "memory", ()),
        ("system@5", "none", (3, 5)),
    ):
        lever_of_turns = Conversation(32, (128,) * 5, (16,) * 5, breaks, keep, only=only)
        case = Case(752, 16, lever=lever_of_turns, sequences=(768,))
        yield "turns", None, case, turns.write, USUAL, "Q4_0"


BY_NUMBER = {claim["number"]: claim for claim in CLAIMS}
FAST = 20 * Planted().gflops

PLANTED: dict[
    int, tuple[list[Planted], list[Planted]]
] = {  # by claim: where it holds, and where it does not
    1: ([Planted()], [Planted(wasted_ms=80)]),
    2: ([Planted()], [Planted(slow={"Q4_0": 2.5}), Planted(half_reads=0.5)]),
    3: ([Planted()], [Planted(pair_ns=0), Planted(pair_ns=2000)]),
    5: ([Planted()], [Planted(pair_ns=400)]),
    6: ([Planted(pair_ns=400)], [Planted(pair_ns=0), Planted(pair_ns=1000, sees=700)]),
    7: ([Planted(gflops=FAST, pair_ns=1)], [Planted()]),
    10: ([Planted()], [Planted(each_reads=1.2)]),
    13: ([Planted(), Planted(slow={"Q4_1": 0.8})], [Planted(slow={"Q4_0": 5})]),
    14: ([Planted(pair_ns=300, wasted_ms=0.05)], [Planted(kept_close=2)]),
    16: ([Planted()], [Planted(no_flash=1.1)]),
    17: ([Planted(pair_ns=400)], [Planted(pair_ns=400, q8_cache=1.4)]),
    18: ([Planted()], [Planted(n_right=0)]),
    21: ([Planted()], [Planted(mixed_ms=200)]),
    34: ([Planted()], [Planted(gbps=0.01)]),
    35: ([Planted(pair_ns=1)], [Planted(pair_ns=200), Planted(pair_ns=1, cached_decode=1.2)]),
    36: ([Planted()], [Planted(again=0.3)]),
}
CASES = [
    (number, verdict, machine)
    for number, sides in PLANTED.items()
    for verdict, machines in zip((HOLDS, HOLDS_NOT), sides, strict=True)
    for machine in machines
]


def judged(number: int, machine: Planted, **changes: int) -> dict[str, Any]:
    claim = BY_NUMBER[number]
    return judge(
        claim, Evidence(machine.session(tuple(claim["parts"]), **changes), machine.ceilings())
    )


@pytest.mark.parametrize(("number", "verdict", "machine"), CASES)
def test_the_verdict_is_that_of_the_planted_machine(
    number: int, verdict: str, machine: Planted
) -> None:
    one = judged(number, machine)
    assert one["verdict"] == verdict, one["words"]


def test_every_claim_has_a_machine_on_which_it_holds_and_one_on_which_it_does_not() -> None:
    assert PLANTED.keys() == BY_NUMBER.keys() and all(
        holds and fails for holds, fails in PLANTED.values()
    )


@pytest.mark.parametrize("number", [3, 6, 10, 13, 18])
def test_a_noisy_machine_gets_no_verdict_that_is_wrong(number: int) -> None:
    noisy = dataclasses.replace(PLANTED[number][0][0], noise=0.15)
    verdicts = [judged(number, noisy, seed=seed)["verdict"] for seed in range(10)]
    assert verdicts.count(HOLDS_NOT) <= 1 and set(verdicts) <= {HOLDS, UNSURE, HOLDS_NOT}


def test_what_is_missing_or_failed_is_named() -> None:
    records = Planted().session(("lengths", "settings"))
    assert "Run: lab ceilings" in judge(BY_NUMBER[1], Evidence(records))["words"]
    assert (
        judge(BY_NUMBER[6], Evidence(records))["words"]
        == "The session has no measurement `context`."
    )
    failed = dataclasses.replace(
        records[0].run, part="context", status=FAILED, error="Out of memory."
    )
    one = judge(BY_NUMBER[6], Evidence([*records, make_record(failed)]))
    assert (one["verdict"], one["words"]) == (
        UNTESTABLE,
        "The measurement `context` failed: Out of memory.",
    )
    alone = [record for record in records if record.run.variant != "half"]
    assert "cannot be halved" in judge(BY_NUMBER[2], Evidence(alone, Planted().ceilings()))["words"]
    on_gpu = [
        dataclasses.replace(one, settings=dataclasses.replace(one.settings, n_gpu_layers=9))
        for one in records
    ]
    assert "on a GPU" in judge(BY_NUMBER[2], Evidence(on_gpu, Planted().ceilings()))["words"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim["number"]))
def test_unknown_shapes_and_steps_without_time_get_no_verdict_that_ends_the_session(
    claim: Claim,
) -> None:
    records = Planted().session(tuple(claim["parts"]), n_repeat=1)
    ceilings = Planted().ceilings()
    still = [
        dataclasses.replace(one, run=dataclasses.replace(one.run, steps=stopped(one)))
        for one in records
    ]
    unknown = [
        dataclasses.replace(
            one, model=dataclasses.replace(MODEL, n_layer=None, n_ctx_train=None, matrices=None)
        )
        for one in records
    ]
    few = dataclasses.replace(ceilings, rates=ceilings.rates[:2])
    for own, best in (
        (still, ceilings),
        (unknown, ceilings),
        (records[:1], ceilings),
        (records, few),
        ([], None),
    ):
        one = judge(claim, Evidence(own, best))
        assert one["words"] and one["verdict"] in (HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE)
    assert one["verdict"] == UNTESTABLE


def stopped(record: Record) -> Steps:
    """Steps that took no time at all, as a clock that stands still has them."""
    nothing = (0,) * len(record.run.steps.kind)
    return dataclasses.replace(record.run.steps, start_ns=nothing, ready_ns=nothing, end_ns=nothing)


def test_mostly_disturbed_runs_are_not_sure_unless_they_were_measured_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        disturbances, "disturbances", lambda record: ["another process used a core"]
    )
    alone = judged(34, Planted())
    assert alone["verdict"] == UNSURE and alone["words"].startswith("12 of 12 runs were disturbed")
    assert judged(16, Planted())["verdict"] == HOLDS


@pytest.mark.parametrize(
    ("n", "low", "high"), [(6, 1, 6), (3, 0.457, 7.22), (2, 0.798, 2.51), (1, 0.798, 1.254)]
)
def test_an_interval_is_made_of_what_there_is(n: int, low: float, high: float) -> None:
    known = figure("a figure", [float(i + 1) for i in range(n)])
    assert known is not None and known["n"] == n
    assert [known["low"], known["high"]] == pytest.approx([low, high], 0.01)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_at_its_very_threshold_a_condition_is_rarely_decided(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(n)

    def drawn(_: Evidence) -> figures.Figures:
        errors = [math.sqrt(2) * chance.gauss(0, session_spread.VIRTUAL) for _ in range(n)]
        return [figure("a ratio", [1.1 * math.exp(error) for error in errors])]

    monkeypatch.setattr(figures, "drawn", drawn, raising=False)
    condition = {"figures": ["drawn"], "what": "A ratio", "most": 1.1}
    claim = {"number": 1, "words": "a claim", "parts": [], "conditions": [condition]}
    verdicts = [judge(claim, Evidence([]))["verdict"] for _ in range(400)]
    assert verdicts.count(UNSURE) >= 0.92 * 400
