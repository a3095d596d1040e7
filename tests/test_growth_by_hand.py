"""Rates of a growing context and what they mean, from steps whose bytes and FLOPs are counted by
hand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from lab.core import growth
from lab.core.growth import BETWEEN, FEW, KERNEL, NO_BASE, OVERLAP, SLOPE, UNKNOWN
from lab.core.record import DECODE, PREFILL, Record, Steps
from tests.support.records import MODEL, SETTINGS, make_record, make_run

POSITION_BYTES = 2 * (32 + 32) * 2  # 2 layers, keys and values of 2 heads of 16, F16
PAIR_FLOPS = 2 * 2 * 4 * (16 + 16)  # 2 for each number of keys and values, 2 layers, 4 heads
WEIGHT_BYTES = 10**6


def at(n_prompt: int, ms: float, n_gen: int = 6) -> Record:
    """Decode steps that take so long; the middle one is at n_prompt + 2."""
    return make_record(make_run(n_prompt, n_gen, decode_ms=ms))


def decode(*short_ms: float, long_ms: Sequence[float]) -> growth.Growth | None:
    """From the position 102 to 1,102: 1,000 positions more."""
    records = [at(100, ms) for ms in short_ms] + [at(1100, ms) for ms in long_ms]
    return growth.growth(records, DECODE)


def test_a_slow_kernel_counted_by_hand() -> None:
    """Of 10 ms the 103 positions that a step reads take 2.6368."""
    found = decode(10, 10, long_ms=(35.6, 35.6))
    assert found is not None
    assert found.verdict == KERNEL
    assert found.rate == pytest.approx(1000 * POSITION_BYTES / 0.0256)
    assert found.rate_of_reads == pytest.approx(1000 * PAIR_FLOPS / 0.0256)
    assert found.weight_rate == pytest.approx(WEIGHT_BYTES / 0.0073632)
    assert found.seconds_per_1000 == pytest.approx(0.0256)


def test_the_added_work_explains_the_added_time() -> None:
    """1,000 positions have 0.256 of the bytes of the weights."""
    found = decode(10, 10, long_ms=(12.56, 12.56))
    assert found is not None
    assert found.verdict == SLOPE
    assert found.rate == pytest.approx(1e8)
    assert found.weight_rate == pytest.approx(WEIGHT_BYTES / (0.01 - 0.00026368))
    assert found.why == ""


def test_runs_that_touch_or_that_are_single_tell_nothing() -> None:
    single = decode(10, long_ms=(35.6, 35.6))
    assert single is not None
    assert (single.verdict, single.why) == (UNKNOWN, FEW)
    touching = decode(10, 20, long_ms=(20, 35.6))
    assert touching is not None
    assert (touching.verdict, touching.why) == (UNKNOWN, OVERLAP)
    assert growth.growth([at(100, 10), at(100, 10, n_gen=5)], DECODE) is not None
    assert (
        growth.growth([at(100, 10, n_gen=4)] * 2, DECODE) is None
    )  # three steps are no place


def test_a_fifth_of_the_shortest_step_is_left_for_the_weights() -> None:
    """103 of 1,000 positions: added 77.6 ms take 7.99 of 10, and 77.8 take 8.01."""
    enough = decode(10, 10, long_ms=(87.6, 87.6))
    assert enough is not None
    assert enough.why != NO_BASE
    lacking = decode(10, 10, long_ms=(87.8, 87.8))
    assert lacking is not None
    assert (lacking.verdict, lacking.why) == (UNKNOWN, NO_BASE)


@pytest.mark.parametrize(
    ("n_prompt", "belongs_to_an_end"), [(150, True), (156, False), (1044, False), (1050, True)]
)
def test_an_end_is_a_twentieth_of_all_positions(
    n_prompt: int, belongs_to_an_end: bool
) -> None:
    """From 102 to 1,102: 50 positions. A run beyond all others makes an end of runs overlap."""
    records = [at(100, 10)] * 2 + [at(1100, 35.6)] * 2
    ms = 50 if n_prompt < 500 else 1
    found = growth.growth([*records, at(n_prompt, ms)], DECODE)
    assert found is not None
    assert (found.why == OVERLAP) == belongs_to_an_end


def test_noise_that_could_make_the_opposite_leaves_no_verdict() -> None:
    """The median is slow by a factor; the runs that differ least would be a plain slope."""
    noisy = decode(10, 33, long_ms=(34, 69))
    assert noisy is not None
    assert (noisy.verdict, noisy.why) == (UNKNOWN, BETWEEN)
    plain = decode(10, 12, long_ms=(13, 16))
    assert plain is not None
    assert plain.verdict == SLOPE


def test_prefill_is_judged_by_its_arithmetic() -> None:
    """Steps of 8 tokens after 0 to 1,016: each position more has 8 pairs."""
    records = [make_record(make_run(1024, 1, prefill_ms=1, per_position_ms=0.001))] * 2
    found = growth.growth(records, PREFILL)
    assert found is not None
    assert found.rate == pytest.approx(PAIR_FLOPS / 1e-6)
    assert found.seconds_per_1000 == pytest.approx(0.001)
    with_a_rest = [make_record(make_run(1028, 1, prefill_ms=1, per_position_ms=0.001))] * 2
    assert growth.growth(with_a_rest, PREFILL) == found  # a step of 4 tokens does not count
    two_steps = [make_record(make_run(16, 1, prefill_ms=1, per_position_ms=0.001))] * 2
    assert growth.growth(two_steps, PREFILL) is not None  # the last one has logits
    waited_once = dataclasses.replace(SETTINGS, prefill_wait="end")
    once = [dataclasses.replace(record, settings=waited_once) for record in records]
    assert growth.growth(once, PREFILL) is None


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(1 / 12, KERNEL), (0.0834, UNKNOWN), (0.1666, UNKNOWN), (1 / 6, SLOPE)],
)
def test_the_limits_of_prefill(share: float, verdict: str) -> None:
    assert growth.verdict(PREFILL, share, 0) == verdict


@pytest.mark.parametrize(
    ("share", "share_of_reads", "verdict"),
    [
        (1 / 8, 0.3, KERNEL),
        (0.126, 0.3, UNKNOWN),
        (1 / 8, 0.31, UNKNOWN),
        (0.1666, 0.49, UNKNOWN),
        (1 / 6, 0.3, SLOPE),
        (0.1, 0.5, SLOPE),
    ],
)
def test_the_limits_of_decode(share: float, share_of_reads: float, verdict: str) -> None:
    assert growth.verdict(DECODE, share, share_of_reads) == verdict


# A cliff


def prefilled(n_steps: int, slope_after: float = 3, **changes: Any) -> Record:
    """Steps of 8 tokens; from the 64th one on each takes `slope_after` times 10 us longer."""
    starts = []
    readies = []
    now = 0
    for number in range(1, n_steps + 1):
        starts.append(now)
        now += round(100_000 + 10_000 * (min(number, 64) + slope_after * max(0, number - 64)))
        readies.append(now)
    steps = Steps(
        kind=(PREFILL,) * n_steps,
        n_tokens=(8,) * n_steps,
        n_past=tuple(range(0, 8 * n_steps, 8)),
        start_ns=tuple(starts),
        ready_ns=tuple(readies),
        end_ns=tuple(readies),
        n_seq=(1,) * n_steps,
        n_outputs=(0,) * n_steps,
    )
    run = dataclasses.replace(make_run(8 * n_steps, 1), steps=steps, **changes)
    return make_record(run)


def test_a_cliff_counted_by_hand() -> None:
    """A step more has 64 pairs of a token and a position more."""
    found = growth.cliff([prefilled(124), prefilled(124)], PREFILL)
    assert found is not None
    assert not found.is_jump
    assert (found.n_past, found.low, found.high) == pytest.approx((504, 504, 504))
    assert found.factor == pytest.approx(3)
    assert found.rate_before == pytest.approx(64 * PAIR_FLOPS / 10e-6)
    assert found.rate_after == pytest.approx(64 * PAIR_FLOPS / 30e-6)


def test_a_cliff_needs_two_runs_of_a_length_and_the_longest_counts() -> None:
    assert growth.cliff([prefilled(124)], PREFILL) is None
    assert growth.cliff([prefilled(124), prefilled(123)], PREFILL) is None
    shorter = [prefilled(60), prefilled(60)]
    assert growth.cliff(shorter, PREFILL) is None
    assert growth.cliff([*shorter, *[prefilled(124)] * 2], PREFILL) is not None
    assert growth.cliff([*[prefilled(124)] * 2, *shorter], PREFILL) is not None
    imported = [prefilled(124, imported_from="llama-bench")] * 2
    assert growth.cliff(imported, PREFILL) is None


def test_a_window_hides_a_cliff() -> None:
    windowed = dataclasses.replace(MODEL, windows=(64, 64))
    records = [dataclasses.replace(prefilled(124), model=windowed)] * 2
    assert growth.cliff(records, PREFILL) is None
