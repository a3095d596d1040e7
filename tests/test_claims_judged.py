"""Every claim on planted machines, simulated step by step: one on which it holds, and one on which
it does not."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest

from lab.core.record import FAILED, Record, Steps
from lab.features.claims import figures, judging
from lab.features.claims.evidence import Evidence
from lab.features.claims.figures import ClaimFigure, Figures, figure
from lab.features.claims.judging import (
    CLAIMS,
    HOLDS,
    HOLDS_NOT,
    UNSURE,
    UNTESTABLE,
    Claim,
    JudgedClaim,
    JudgedFigure,
    judge,
)
from lab.runner import disturbances
from lab.show import session_spread
from tests.support.planted import (
    Planted,
)
from tests.support.records import MODEL, make_record

BY_NUMBER = {claim["number"]: claim for claim in CLAIMS}
FAST = 20 * Planted().gflops

HOLDING = {
    1: [Planted()],
    2: [Planted()],
    3: [Planted(pair_ns=20)],
    4: [Planted()],
    5: [Planted(pair_ns=400)],
    6: [Planted(gflops=FAST, pair_ns=1)],
    7: [Planted()],
    8: [Planted(), Planted(slow={"Q4_1": 0.8})],
    9: [Planted(pair_ns=300, wasted_ms=0.05)],
    10: [Planted()],
    11: [Planted(pair_ns=400)],
    12: [Planted()],
    13: [Planted()],
    14: [Planted()],
    15: [Planted(pair_ns=1)],
    16: [Planted()],
}
"""By claim: machines on which it holds."""

FAILING = {
    1: [Planted(wasted_ms=80)],
    2: [Planted(slow={"Q4_0": 2.5}), Planted(half_reads=0.5)],
    3: [Planted(pair_ns=0), Planted(pair_ns=2000)],
    4: [Planted(pair_ns=400), Planted(pair_ns=400, stair=256)],
    5: [Planted(pair_ns=0), Planted(pair_ns=1000, sees=700)],
    6: [Planted()],
    7: [Planted(each_reads=1.2)],
    8: [Planted(slow={"Q4_0": 5})],
    9: [Planted(kept_close=2)],
    10: [Planted(no_flash=1.1)],
    11: [Planted(pair_ns=400, q8_cache=1.4)],
    12: [Planted(n_right=0)],
    13: [Planted(mixed_ms=200)],
    14: [Planted(gbps=0.01)],
    15: [
        Planted(pair_ns=200),
        Planted(pair_ns=1, cached_decode=1.2),
    ],
    16: [Planted(again=0.3)],
}
"""By claim: machines on which it does not hold."""


def judged(
    number: int,
    machine: Planted,
    seed: int = 1,
) -> JudgedClaim:
    claim = BY_NUMBER[number]
    records = machine.session(tuple(claim["parts"]), seed)
    return judge(claim, Evidence(records, machine.ceilings()))


@pytest.mark.parametrize("number", BY_NUMBER)
def test_a_claim_holds_on_machines_on_which_it_is_true(number: int) -> None:
    for machine in HOLDING[number]:
        row = judged(number, machine)
        assert row["verdict"] == HOLDS, row["words"]


@pytest.mark.parametrize("number", BY_NUMBER)
def test_a_claim_fails_on_machines_on_which_it_is_false(number: int) -> None:
    for machine in FAILING[number]:
        row = judged(number, machine)
        assert row["verdict"] == HOLDS_NOT, row["words"]


@pytest.mark.parametrize("number", [3, 5, 7, 8, 12])
def test_a_noisy_machine_gets_no_verdict_that_is_wrong(number: int) -> None:
    noisy = dataclasses.replace(HOLDING[number][0], noise=0.15)
    verdicts = [judged(number, noisy, seed)["verdict"] for seed in range(10)]
    assert verdicts.count(HOLDS_NOT) <= 1
    assert set(verdicts) <= {HOLDS, UNSURE, HOLDS_NOT}


def test_what_is_missing_or_failed_is_named() -> None:
    records = Planted().session(("lengths", "settings"))
    assert "Run: lab ceilings" in judge(BY_NUMBER[1], Evidence(records))["words"]
    without_walks = judge(BY_NUMBER[5], Evidence(records))
    assert without_walks["words"] == "The session has no measurement `context`."
    failed = dataclasses.replace(
        records[0].run, part="context", status=FAILED, error="Out of memory."
    )
    row = judge(BY_NUMBER[5], Evidence([*records, make_record(failed)]))
    assert row["verdict"] == UNTESTABLE
    assert row["words"] == "The measurement `context` failed: Out of memory."


def test_threads_that_cannot_be_halved_or_hardly_matter_are_named() -> None:
    records = Planted().session(("lengths", "settings"))
    ceilings = Planted().ceilings()
    single = [record for record in records if record.run.variant != "half"]
    on_gpu: list[Record] = []
    for record in records:
        settings = dataclasses.replace(record.settings, n_gpu_layers=9)
        on_gpu.append(dataclasses.replace(record, settings=settings))
    assert "cannot be halved" in judge(BY_NUMBER[2], Evidence(single, ceilings))["words"]
    assert "on a GPU" in judge(BY_NUMBER[2], Evidence(on_gpu, ceilings))["words"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim["number"]))
def test_unknown_shapes_and_steps_without_time_get_no_verdict_that_ends_the_session(
    claim: Claim,
) -> None:
    records = Planted().session(tuple(claim["parts"]), n_repeat=1)
    ceilings = Planted().ceilings()
    shapeless = dataclasses.replace(
        MODEL,
        n_layer=None,
        n_ctx_train=None,
        matrices=None,
    )
    sessions = [
        Evidence([stopped(record) for record in records], ceilings),
        Evidence(
            [dataclasses.replace(record, model=shapeless) for record in records], ceilings
        ),
        Evidence(records[:1], ceilings),
        Evidence(records, dataclasses.replace(ceilings, rates=ceilings.rates[:2])),
    ]
    for evidence in sessions:
        row = judge(claim, evidence)
        assert row["words"]
        assert row["verdict"] in (HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE)
    assert judge(claim, Evidence([]))["verdict"] == UNTESTABLE


def stopped(record: Record) -> Record:
    """A record whose steps took no time at all, as a clock that stands still has them."""
    nothing = (0,) * len(record.run.steps.kind)
    steps: Steps = dataclasses.replace(
        record.run.steps, start_ns=nothing, ready_ns=nothing, end_ns=nothing
    )
    return dataclasses.replace(record, run=dataclasses.replace(record.run, steps=steps))


def test_mostly_disturbed_runs_are_not_sure_unless_they_were_measured_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cause = {disturbances.OTHERS: 1.0}
    monkeypatch.setattr(disturbances, "disturbances", lambda record: cause)
    alone = judged(14, Planted())
    side_by_side = judged(10, Planted())
    assert alone["verdict"] == UNSURE
    assert alone["words"].startswith("12 of 12 runs were disturbed")
    assert side_by_side["verdict"] == HOLDS


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [
        (6, 1, 6),
        (3, 0.457, 7.22),
        (2, 0.798, 2.51),
        (1, 0.798, 1.254),
    ],
)
def test_an_interval_is_made_of_what_there_is(
    n: int,
    low: float,
    high: float,
) -> None:
    computed = figure("a figure", [float(i + 1) for i in range(n)])
    assert computed is not None
    assert computed.n == n
    assert [computed.low, computed.high] == pytest.approx([low, high], 0.01)


@pytest.mark.parametrize(
    ("low", "verdict", "shown"),
    [
        (1.0042, HOLDS_NOT, "1.03x (1.004-1.07)"),
        (0.99961, UNSURE, "1.03x (0.9996-1.07)"),
        (1.0, UNSURE, "1.03x (1.00-1.07)"),
        (1.02, HOLDS_NOT, "1.03x (1.02-1.07)"),
    ],
)
def test_the_end_of_an_interval_shows_on_which_side_of_its_threshold_it_is(
    low: float, verdict: str, shown: str
) -> None:
    judged = JudgedFigure(ClaimFigure("a", 1.03, low, 1.07, "x", 6), {"most": 1.0})
    assert judged.verdict == verdict
    assert judged.sentence == f"a: {shown}, must be at most 1"


@pytest.mark.parametrize("n", [1, 2, 6])
def test_at_its_very_threshold_a_condition_is_rarely_decided(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(n)

    def drawn(evidence: Evidence) -> Figures:
        errors = [math.sqrt(2) * chance.gauss(0, session_spread.VIRTUAL) for _ in range(n)]
        return [figure("a ratio", [1.1 * math.exp(error) for error in errors])]

    monkeypatch.setattr(figures, "drawn", drawn, raising=False)
    condition = {
        "figures": ["drawn"],
        "what": "A ratio",
        "most": 1.1,
    }
    claim = {
        "number": 1,
        "words": "a claim",
        "parts": [],
        "conditions": [condition],
    }
    verdicts = [judge(claim, Evidence([]))["verdict"] for _ in range(400)]
    assert verdicts.count(UNSURE) >= 0.92 * 400


def test_the_summary_counts_verdicts() -> None:
    verdicts = [
        judging.HOLDS,
        judging.HOLDS,
        judging.HOLDS_NOT,
        judging.UNSURE,
        judging.UNSURE,
    ]
    rows: list[Any] = [{"verdict": verdict} for verdict in verdicts]
    summary = judging.Verdicts("a-session", rows, ()).summary
    assert summary == "5 claims: 2 hold here, 1 does not hold here and 2 cannot be told."
