"""What limits a phase, at every border, and the pieces of a step, counted by hand."""

import dataclasses
import math
from types import SimpleNamespace

import pytest

from lab.core import phases, shown
from lab.core.record import DECODE, MIXED, PREFILL, Settings
from lab.core.script import Operation, Part
from lab.roofline import explanation, step_prediction
from lab.roofline.explanation import ARITHMETIC, KERNEL, OVERHEAD, TRAFFIC
from lab.roofline.learning import Fit
from lab.roofline.step_kernels import Kernels, StepKernels, StepParts
from lab.roofline.step_prediction import Remainder, StepPrediction
from tests.support.rates import BIG, FAST, WIDE, timed
from tests.support.records import SETTINGS


def limit(**changes: float) -> str:
    """Of a phase of 10 s with kernels of 8 s, that are 1 s of attention."""
    row = SimpleNamespace(
        measured_s=10.0,
        least_s=8.0,
        attention_s=1.0,
        arithmetic_s=7.0,
        traffic_s=6.0,
        attention_arithmetic_s=0.5,
        attention_traffic_s=0.25,
    )
    vars(row).update(changes)
    return explanation.limit_of(row)


def test_the_higher_roof_limits_kernels_that_are_near_to_it() -> None:
    assert limit() == ARITHMETIC
    assert limit(traffic_s=7.0) == TRAFFIC
    assert limit(arithmetic_s=6.0, traffic_s=5.75) == TRAFFIC  # without attention 5.5 of each


def test_kernels_that_take_half_as_long_again_limit_themselves() -> None:
    """Without attention 7 s: a roof of 4.667 s is just two thirds of it."""
    assert limit(arithmetic_s=5.25, traffic_s=1.0) == ARITHMETIC
    assert limit(arithmetic_s=5.0, traffic_s=1.0) == KERNEL
    assert limit(arithmetic_s=1.0, traffic_s=5.0) == TRAFFIC
    assert limit(least_s=7.0, arithmetic_s=4.5, traffic_s=1.0) == ARITHMETIC  # 6 is 1.5 x 4
    assert limit(measured_s=7.0, arithmetic_s=4.5, traffic_s=1.0) == ARITHMETIC


def test_overhead_limits_a_phase_with_more_than_half_of_its_time_outside_of_kernels() -> None:
    assert limit(least_s=5.0, arithmetic_s=4.5) != OVERHEAD
    assert limit(least_s=4.9, arithmetic_s=4.5) == OVERHEAD


def test_attention_limits_a_phase_with_more_than_half_of_its_kernels() -> None:
    near = {"attention_arithmetic_s": 3.5, "attention_traffic_s": 3.0}
    assert limit(attention_s=4.0, **near) == ARITHMETIC
    assert limit(attention_s=4.1, **near) == "attention (arithmetic)"
    assert limit(attention_s=4.1, attention_traffic_s=3.5) == "attention (traffic)"
    assert limit(attention_s=6.0, **near) == "attention (kernel)"


def test_the_parts_of_steps_are_added_and_divided() -> None:
    alone = StepParts({None: Kernels(4.0, 2.0, 6.0)}, 100.0)
    assert explanation.by_part([alone, alone], 4) == {
        "layers": 2,
        "attention": 3,
        "output": 1,
    }
    split = StepParts({None: Kernels(4.0, 2.0, 6.0), "CUDA0": Kernels(1.0, 0.0, 3.0)}, 8.0)
    assert explanation.by_part([split], 2) == {
        "CPU layers": 2,
        "CPU attention": 3,
        "CPU output": 1,
        "CUDA0 layers": 0.5,
        "CUDA0 attention": 1.5,
        "CUDA0 output": 0,
        "between devices": 4,
    }


def test_rows_have_the_tpot_of_decodes_and_no_experiments() -> None:
    (record,) = timed(2.0)
    of_experiment = dataclasses.replace(
        record, run=dataclasses.replace(record.run, experiment="batch", n_prompt=19)
    )
    rows = explanation.explain([record, of_experiment], FAST).set_index("phase")
    assert list(rows.index) == [PREFILL, DECODE]
    tpot_ns = phases.tpot_ns(record.run)
    assert tpot_ns is not None
    assert rows.tpot_s[DECODE] == pytest.approx(tpot_ns / 1e9)
    assert math.isnan(rows.tpot_s[PREFILL])
    for phase in (PREFILL, DECODE):
        row = rows.loc[phase]
        assert row.attention_arithmetic_s == pytest.approx(row.attention_flops / 400e9)
        assert row.attention_traffic_s == pytest.approx(row.attention_bytes / 40e9)
        assert not row.is_split
    assert rows.of_request[PREFILL] + rows.of_request[DECODE] == pytest.approx(1)


@pytest.mark.parametrize(("factor", "is_above"), [(1 / 1.007, True), (1 / 1.003, False)])
def test_a_phase_that_is_half_a_percent_faster_than_its_ceiling_is_above_it(
    factor: float, is_above: bool
) -> None:
    rows = explanation.explain(timed(factor), FAST).set_index("phase")
    assert (shown.ABOVE in rows.doubts[DECODE]) == is_above


# Pieces of a step

UNIFIED = dataclasses.replace(SETTINGS, kv_unified=True, n_ubatch=8)
SEPARATE = dataclasses.replace(SETTINGS, kv_unified=False, n_ubatch=8)
SHARED_CACHE = dataclasses.replace(WIDE, kv_unified=True)
PROMPT = Part(0, tuple(range(10)), 1)
TOKEN = Part(1, None, 1)
POSITIONS = {0: 100, 1: 50}


def test_a_shared_cache_cuts_a_step_every_ubatch() -> None:
    first, second = step_prediction.pieces([PROMPT, TOKEN], POSITIONS, UNIFIED)
    assert first == ([(8, 100)], 0)
    assert second == ([(2, 108), (1, 50)], 2)


def test_separate_caches_get_one_token_of_each_sequence_first() -> None:
    first, second, third = step_prediction.pieces([PROMPT, TOKEN], POSITIONS, SEPARATE)
    assert first == ([(1, 100), (1, 50)], 1)
    assert second == ([(8, 101)], 0)
    assert third == ([(1, 109)], 1)
    alone = list(step_prediction.pieces([PROMPT], POSITIONS, SEPARATE))
    assert alone == [([(8, 100)], 0), ([(2, 108)], 1)]
    without_ubatch = dataclasses.replace(UNIFIED, n_ubatch=0)
    assert len(list(step_prediction.pieces([PROMPT], POSITIONS, without_ubatch))) == 10


def test_after_the_first_token_its_output_is_gone() -> None:
    assert step_prediction.after_first(Remainder(5, 3, 1)) == (6, 2, 1)
    assert step_prediction.after_first(Remainder(5, 3, 3)) == (6, 2, 2)
    assert step_prediction.after_first(Remainder(5, 1, 1)) == (6, 0, 0)


def added_s(n_tokens: int, settings: Settings = SHARED_CACHE) -> float:
    """What a step takes beyond its kernels: n_tokens of a prompt, and a token after 100."""
    predicted = StepPrediction(BIG, settings, FAST, Fit(1.0, 1.0, 0.0, 0.0), 1)
    others = Operation(PREFILL, (Part(1, tuple(range(100)), 1),))
    both = (Part(0, tuple(range(n_tokens)), 1), Part(1, None, 1))
    steps = predicted.steps([others, Operation(MIXED, both)])
    assert steps is not None
    assert steps.start_s[0] == 0
    assert steps.start_s[1] == steps.end_s[0]
    kernels = StepKernels(BIG, settings, FAST).total(n_tokens, 0, 2, [(1, 100)])
    return float(steps.end_s[1] - steps.start_s[1]) - kernels.total_s


def test_from_64_tokens_on_a_tile_masks_the_cells_of_the_other_sequences() -> None:
    tile_s = StepKernels(BIG, SHARED_CACHE, FAST).total(64, 100, 0).attention_s
    assert added_s(62) == pytest.approx(0, abs=1e-12)
    assert added_s(63) == pytest.approx(tile_s, rel=1e-6)
    plain = dataclasses.replace(SHARED_CACHE, flash_attn="off", flash_attn_resolved="off")
    assert added_s(63, plain) == pytest.approx(0, abs=1e-12)
    on_gpu = dataclasses.replace(SHARED_CACHE, n_gpu_layers=1)
    assert added_s(63, on_gpu) == pytest.approx(0, abs=1e-12)


def test_a_prediction_is_taught_by_other_sessions() -> None:
    (record,) = timed(2.0)
    elsewhere = dataclasses.replace(record, session="another")
    taught = step_prediction.prediction_for(record, [FAST], [record, elsewhere])
    assert taught is not None
    assert taught.n_runs == 1
    alone = step_prediction.prediction_for(record, [FAST], [record])
    assert alone is not None
    assert alone.n_runs == 0
    assert alone.fit.decode_factor == pytest.approx(1.05)
    assert step_prediction.prediction_for(record, [], [elsewhere]) is None


@pytest.mark.parametrize(("share", "mean"), [(0.0, 2.0), (0.5, 4.0), (1.0, 8.0)])
def test_a_mean_of_logarithms(share: float, mean: float) -> None:
    assert step_prediction.log_mean(share, 2.0, 8.0) == pytest.approx(mean)
