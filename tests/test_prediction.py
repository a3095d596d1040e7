"""Predictions of requests: on the machine of some runs, and on devices of datasheets."""

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import lab
from lab.core import cost, memory, results, shown
from lab.core.record import DECODE, PREFILL, Device as MachineDevice, Record
from lab.errors import LabError
from lab.features.predict import wording
from lab.models import catalog, devices, obtain, synthetic
from lab.models.devices import DeviceSheet
from lab.roofline import datasheet, learning, prediction, probing
from lab.roofline.learning import Step
from lab.roofline.prediction import Here, OnDevice, PhaseTime, Prediction
from lab.roofline.step_kernels import StepKernels
from lab.roofline.step_prediction import StepPrediction
from tests.support.ceilings import epyc
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.rates import BIG, FAST, WIDE, of_catalog, timed_run
from tests.support.records import MODEL, SETTINGS


def here(
    records: Sequence[Record],
    model: Any = BIG,
    settings: Any = WIDE,
) -> Here:
    return Here(model, settings, FAST, learning.learn(records, FAST))


def beyond(row: Prediction) -> list[str]:
    return wording.beyond(row.extrapolations)


# This machine


def test_what_was_learned_predicts_what_it_was_learned_from() -> None:
    row = here([timed_run(n, 1.5, 2) for n in (512, 1024, 2048)]).request(1024, 6)
    assert row.prefill.limit_s
    assert row.prefill.expected_s
    assert row.token.expected_s
    measured = timed_run(1024, 1.5, 2).run.steps
    token_s = (measured.ready_ns[3] - measured.start_ns[3]) / 1e9
    assert row.prefill.expected_s == pytest.approx(measured.ready_ns[1] / 1e9, rel=0.1)
    assert row.token.expected_s == pytest.approx(token_s, rel=0.1)
    assert row.token.limit_s is not None
    assert row.token.limit_s < row.tpot_s[0] < row.token.expected_s < row.tpot_s[1]
    assert row.e2e_s[0] == pytest.approx(row.prefill_s[0] + 5 * row.tpot_s[0])
    assert row.e2e_s[1] == pytest.approx(row.prefill_s[1] + 5 * row.tpot_s[1])
    assert not row.extrapolations


def test_a_phase_is_expected_by_the_fit_within_the_factor_of_its_errors() -> None:
    machine = here([timed_run(n, 1.5, 2) for n in (512, 1024)])
    row = machine.request(1024, 7)
    assert row.prefill.limit_s == sum(
        machine.limit_s(Step(512, n_past, n_outputs))
        for n_past, n_outputs in ((0, 0), (512, 1))
    )
    case = machine.case_of(DECODE, 1026)
    costs = learning.costs_of(StepKernels(BIG, WIDE, FAST), [Step(1, 1026, 1)])
    expected_s = machine.learned.fit.seconds(case, costs)
    factor = machine.learned.factor(case)
    assert row.token.expected_s == expected_s
    assert row.tpot_s == (expected_s / factor, expected_s * factor)


def test_the_limit_is_the_slower_of_traffic_and_arithmetic_at_the_best_rates() -> None:
    machine = here([timed_run(512, 1.2, 1.3)])
    token = cost.step(BIG, 1, 100, 1)
    prompt = cost.step(BIG, 512, 0, 1)
    assert token
    assert prompt
    assert machine.limit_s(Step(1, 100, 1)) == pytest.approx(token.n_bytes / 40e9)
    assert machine.limit_s(Step(512, 0, 1)) == pytest.approx(prompt.flops / 400e9)


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 3.0])
def test_nothing_is_expected_below_its_limit(factor: float) -> None:
    machine = here([timed_run(n, factor, factor) for n in (512, 2048)])
    for n_prompt in (1, 100, 512, 10_000):
        row = machine.request(n_prompt, 6)
        assert row.prefill.limit_s
        assert row.prefill.expected_s
        assert row.token.expected_s
        assert (
            row.prefill.limit_s
            <= row.prefill_s[0]
            <= row.prefill.expected_s
            <= row.prefill_s[1]
        )
        assert row.token.limit_s is not None
        assert row.token.limit_s <= row.tpot_s[0] <= row.token.expected_s <= row.tpot_s[1]


def test_several_users_take_as_much_longer_as_their_step() -> None:
    machine = here([timed_run(n, 1.5, 2) for n in (512, 1024)])
    single = machine.request(1000, 200)
    many = machine.request(1000, 200, users=4)
    assert machine.request(1000, 200, users=1) == single
    assert machine.request(1000, 200, users=2).users == 2
    other_spans = [(1, 1099)] * 3
    steps = steps_of(machine)
    one_s = steps.seconds(1, 1099, 1)
    all_s = steps.seconds(1, 1099, 4, other_spans)
    assert one_s
    assert all_s
    assert single.token.expected_s
    slower = all_s / one_s
    assert many.users == 4
    assert many.token.expected_s == pytest.approx(slower * single.token.expected_s)
    assert many.tpot_s == pytest.approx((slower * single.tpot_s[0], slower * single.tpot_s[1]))
    assert many.token.limit_s == machine.limit_s(Step(1, 1099, 4), other_spans)
    assert many.prefill_s == single.prefill_s


def steps_of(machine: Here) -> StepPrediction:
    fit = machine.learned.fit
    return StepPrediction(machine.model, machine.settings, machine.ceilings, fit, 1)


def test_users_are_no_faster_than_their_limit_and_unknown_steps_stay_unknown() -> None:
    row = Prediction(
        MODEL,
        10,
        5,
        PhaseTime(None, None, (1, 2)),
        PhaseTime(0.1, 0.3, (0.2, 0.4)),
    )
    bounded = prediction.for_users(row, 2, 1.0, 2.0, 0.7)
    assert bounded.token.expected_s == 0.7
    assert bounded.tpot_s == (0.7, 0.8)
    unknown = prediction.for_users(row, 2, None, 2.0, 0.1)
    assert math.isnan(unknown.tpot_s[1])
    without = dataclasses.replace(row, token=row.token._replace(expected_s=None))
    assert prediction.for_users(without, 2, 1.0, 2.0, 0.1).token.expected_s is None


def test_ranges_widen_where_they_extrapolate_and_the_text_says_so() -> None:
    records = [timed_run(n, 1.2, 1.3) for n in (512, 1024)]
    inside = here(records).request(1024, 6)
    longer = here(records).request(16 * 1024, 6)
    width_inside = inside.prefill_s[1] / inside.prefill_s[0]
    assert inside.extrapolations == ()
    assert longer.prefill_s[1] / longer.prefill_s[0] > 1.2 * width_inside
    longest = "prefill extrapolates to 16x the longest measured prompt (1,024 tokens)"
    assert beyond(longer)[0].startswith(longest)
    assert "range widened to 0." in beyond(longer)[0]
    assert "to 16x the longest measured context (1,026 tokens)" in beyond(longer)[1]
    shorter = here(records).request(10, 6)
    assert "below the shortest measured prompt (512 tokens)" in beyond(shorter)[0]
    other_model = here(records, dataclasses.replace(BIG, n_ff=4096)).request(1024, 6)
    assert "prefill extrapolates to another model: range" in beyond(other_model)[0]
    other_type = here(records, dataclasses.replace(BIG, quantization="Q5_0")).request(1024, 6)
    assert "another quantization (Q5_0)" in beyond(other_type)[0]
    off = dataclasses.replace(WIDE, flash_attn="off", flash_attn_resolved=None)
    assert "other settings (threads" in beyond(here(records, settings=off).request(1024, 6))[0]


def test_a_prediction_has_the_doubts_of_its_runs_and_ceilings() -> None:
    records = [timed_run(512, 1.2, 1.3)]
    assert here(records).request(512, 6).doubts == ()
    assert here(records).request(5120, 6).doubts == (shown.EXTRAPOLATED,)
    too_fast = here([timed_run(512, 1.2, 0.9)])
    assert too_fast.request(512, 6).doubts == (shown.ABOVE,)
    assert here([timed_run(512, 1.2, 0.92)]).request(512, 6).doubts == ()


def test_ceilings_that_are_too_low_are_said_to_be_and_lower_the_range() -> None:
    for factor, is_said in ((0.6, True), (1.0, False)):
        machine = here([timed_run(512, 1, factor)])
        (decode,) = machine.learned.points_of(DECODE)
        row = machine.request(512, 6)
        assert ("ceilings are too low" in wording.basis_here(machine.learned)) == is_said
        assert row.tpot_s[0] < decode.seconds < row.tpot_s[1]


# What a first version got wrong in the samples of an EPYC: it promised 46.6 to 49.3 s for a prompt
# of 10,000 tokens from runs of 10 and 512, and 7.0 to 7.2 ms a token at 8,192 from runs of 512.


@pytest.mark.parametrize(
    "learned_from",
    [
        (10, 512),
        (512,),
        (10,),
        (10, 512, 1000),
    ],
)
def test_long_prompts_lie_in_the_range_of_what_short_ones_taught(
    learned_from: tuple[int, ...],
) -> None:
    records, ceilings = epyc(*learned_from)
    learned = learning.learn(records, ceilings)
    machine = Here(records[0].model, records[0].settings, ceilings, learned)
    medians = ((8192, 37.7, 0.0263), (10_000, 62.6, 0.032))
    for n_prompt, prefill_s, tpot_s in medians:
        row = machine.request(n_prompt, 2)
        assert row.prefill_s[0] < prefill_s < row.prefill_s[1]
        assert row.tpot_s[0] < tpot_s < row.tpot_s[1]


def test_memory_is_that_of_the_device_that_has_the_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_worker: FakeWorker
) -> None:
    gpu = MachineDevice("CUDA0", "Test GPU", "gpu", 3 * 10**9)
    fake_worker.build = dataclasses.replace(fake_worker.build, devices=(gpu,))
    monkeypatch.setattr(prediction, "Worker", lambda: fake_worker)
    monkeypatch.setattr(obtain, "find", lambda worker, text, watch: BIG)
    plan = prediction.plan_for("big", {})
    assert plan.settings.n_gpu_layers == (BIG.n_layer or 0) + 1
    n = plan.settings.n_threads
    rates = tuple(dataclasses.replace(rate, n_threads=n) for rate in FAST.rates)
    ceilings = dataclasses.replace(
        FAST, machine=plan.machine, on_gpu=True, device="CUDA0", rates=rates
    )
    probing.save(ceilings, tmp_path)
    settings = dataclasses.replace(
        WIDE,
        n_gpu_layers=99,
        n_threads=n,
        n_threads_batch=n,
    )
    record = dataclasses.replace(
        timed_run(512, 1.2, 1.3),
        machine=plan.machine,
        settings=settings,
    )
    results.save(tmp_path / "runs.jsonl", record)
    (row,) = lab.predict("512", 6, "big", "here", ceilings=tmp_path)
    assert row.memory_bytes == 3 * 10**9
    assert "1 run of" in wording.basis(row)
    assert prediction.request_on("here", "big", 512, 6, tmp_path) == row
    with pytest.raises(LabError, match="not been measured"):
        lab.predict("512", 6, "big", "here", ceilings=tmp_path, n_gpu_layers=0)


def test_a_folder_without_results_is_no_evidence(tmp_path: Path) -> None:
    assert prediction.evidence_in(tmp_path / "missing") == ((), ())
    assert prediction.evidence_in(tmp_path) == ((), ())


# Requests, memory


@pytest.mark.parametrize(
    ("n_prompt", "n_gen", "middle"),
    [
        (10, 2, 10),
        (10, 3, 10),
        (10, 4, 11),
        (1000, 200, 1099),
    ],
)
def test_a_token_is_predicted_in_the_middle_of_the_answer(
    n_prompt: int, n_gen: int, middle: int
) -> None:
    assert prediction.middle_of(n_prompt, n_gen) == middle


def test_requests_beyond_the_limits_are_refused() -> None:
    prediction.check(9_999_998, 2, 1)
    for request, message in (
        ((9_999_999, 2, 1), "10,000,001 tokens are too many"),
        ((10, 1, 1), "leaves nothing to decode"),
        ((10, 2, 0), "--sequences 0 is not possible"),
    ):
        with pytest.raises(LabError, match=message):
            prediction.check(*request)


def test_a_request_that_just_fits_lacks_nothing() -> None:
    model = of_catalog("llama-3.1-8b", "F16")
    row = Prediction(
        model,
        1000,
        200,
        PhaseTime(None, None, (1, 2)),
        PhaseTime(0.1, None, (0.2, 0.4)),
    )
    needed = prediction.memory_bytes(model, SETTINGS, 1200)
    fitting = prediction.with_memory(row, SETTINGS, float(needed))
    assert fitting.needed_bytes == needed
    assert fitting.memory_bytes == needed
    assert fitting.shortage is None
    assert fitting.is_known
    lacking = prediction.with_memory(row, SETTINGS, needed - 1.0)
    assert lacking.shortage
    assert lacking.shortage.quantization == "Q8_0"
    assert not lacking.is_known


def test_each_user_has_a_cache() -> None:
    model = of_catalog("llama-3.1-8b", "Q4_0")
    single = prediction.memory_bytes(model, SETTINGS, 1000, 1)
    double = prediction.memory_bytes(model, SETTINGS, 1000, 2)
    triple = prediction.memory_bytes(model, SETTINGS, 1000, 3)
    cache_bytes = 1024 * 32 * 2 * 8 * 128 * 2
    assert double - single == pytest.approx(triple - double, rel=0.01)
    assert double - single > cache_bytes - 1


# Devices of datasheets

CARD = DeviceSheet("geforce", "card", "a card of NVIDIA", 1000, "a test", tflops=100)


def test_the_parts_of_a_prompt_are_its_work_at_the_datasheets_rates() -> None:
    parts = datasheet.parts_of(BIG, CARD, PREFILL, 1000, 512, ("f16", "f16"), n_past=200)
    prompt = cost.step(BIG, 1000, 200, 1)
    first_step = cost.step(BIG, 512, 0, 1)
    assert prompt
    assert first_step
    assert parts.arithmetic == pytest.approx((prompt.flops - prompt.attention_flops) / 100e12)
    assert parts.attention == pytest.approx(prompt.attention_flops / 100e12)
    assert parts.weights == pytest.approx(2 * first_step.weight_bytes / 1000e9)
    n_pairs = 1000 * 200 + 1000 * 1001 / 2
    assert parts.cache == pytest.approx(16 * 8 * 2 * 64 * 2 * n_pairs / 64 / 1000e9)
    assert parts.layers == pytest.approx(16 * 2 * 1e-6)


def test_the_parts_of_tokens_read_the_weights_once_and_every_users_cache() -> None:
    token = datasheet.parts_of(BIG, CARD, DECODE, 1000, 512, ("f16", "f16"))
    work = cost.step(BIG, 1, 1000, 1)
    assert work
    cache_bytes = work.n_bytes - work.weight_bytes
    expected: tuple[float, ...] = (0, work.weight_bytes / 1e12, 0, cache_bytes / 1e12, 16e-6)
    assert token == pytest.approx(expected)
    three = datasheet.parts_of_users(BIG, CARD, 1000, ("f16", "f16"), 3)
    of_three = cost.step(BIG, 1, 1000, 3, "f16", "f16", [(1, 1000)] * 2)
    assert of_three
    expected = (of_three.flops / 100e12, token.weights, 0, 3 * token.cache, 16e-6)
    assert three == pytest.approx(expected)
    without_peak = dataclasses.replace(CARD, tflops=None)
    assert datasheet.parts_of_users(BIG, without_peak, 9, ("f16", "f16"), 3).arithmetic == 0


def case_of(
    phase: str,
    parts: Sequence[float],
    n_prompt: int = 1000,
) -> datasheet.DatasheetCase:
    runtime = ("CUDA", "llama.cpp", "model", "Q4_0", True)
    return datasheet.DatasheetCase(
        phase, CARD, *runtime, n_prompt, False, datasheet.DatasheetParts(*parts)
    )


def test_the_least_time_is_the_slower_of_peak_and_bandwidth() -> None:
    assert case_of(PREFILL, (3, 4, 2, 9, 9)).least_s == 5
    assert case_of(PREFILL, (3, 6, 2, 9, 9)).least_s == 6
    assert case_of(DECODE, (3, 6, 2, 9, 9)).least_s == 15
    assert case_of(PREFILL, (math.nan, 6, 2, 9, 9)).least_s is None


def learned_figures(**factors: dict[str, float]) -> datasheet.LearnedRates:
    """Figures of a phase for CUDA in llama.cpp, where every factor is known and 1."""
    levels = {name: {level: 1.0} for name, level in case_of(PREFILL, (1,) * 5).levels.items()}
    factors_by_kind = {
        **levels,
        "other runtime": {},
        "model": {"model": 3.0},
        **factors,
    }
    spread = dict.fromkeys([*factors_by_kind, "experts"], 0.3)
    parts = {
        "arithmetic": 2.0,
        "weights": 1.5,
        "attention": 4.0,
        "layers": 50.0,
    }
    ranges = {
        "all": {"fast": 0.8, "slow": 1.5},
        "all, long": {"fast": 0.5, "slow": 1.2},
        "CUDA in llama.cpp, family known": {"fast": 0.9, "slow": 1.6},
    }
    return datasheet.LearnedRates(PREFILL, parts, factors_by_kind, spread, ranges)


def test_a_time_is_the_sum_of_its_parts_times_their_factors() -> None:
    parts = (1.0, 2.0, 0.5, 7.0, 0.01)
    learned = learned_figures(
        backend={"CUDA": 1.1}, flash={"CUDA": 4.0}, weights={"CUDA in llama.cpp": 3.0}
    )
    case = case_of(PREFILL, parts)
    on = (2 * 1.1 * 2, 1.5 * 3, 4 * 1.1, 0, 50)
    assert learned.coefficients(case) == pytest.approx(on)
    assert learned.expected_s(case) == pytest.approx(4.4 + 9 + 2.2 + 0.5)
    off = dataclasses.replace(case, flash_attn=False)
    assert learned.coefficients(off)[0] == pytest.approx(2 * 1.1 / 2)
    unpublished = dataclasses.replace(case, flash_attn=None)
    assert learned.coefficients(unpublished)[0] == pytest.approx(2 * 1.1)
    bounded = case_of(PREFILL, (100, 1, 1, 1, 1))
    slow_figures = dataclasses.replace(learned, parts={"arithmetic": 0.1})
    assert slow_figures.expected_s(bounded) == 101
    assert learned.expected_s(case_of(PREFILL, (math.nan,) * 5)) is None


@pytest.mark.parametrize(
    ("n_prompt", "fast", "slow"),
    [
        (100, 0.9, 1.6),
        (1000, 0.9, 1.6),
        (10_000, 0.5, 1.6),
        (65_536, 0.5, 1.6),
        (3162, math.sqrt(0.9 * 0.5), 1.6),
    ],
)
def test_a_range_goes_from_that_of_short_prompts_to_that_of_long_ones(
    n_prompt: int, fast: float, slow: float
) -> None:
    ends = learned_figures().range(case_of(PREFILL, (1,) * 5, n_prompt))
    assert ends == pytest.approx((fast, slow), rel=1e-4)


def test_very_long_prompts_and_unpublished_factors_widen_a_range() -> None:
    e_times_longer = case_of(PREFILL, (1,) * 5, round(math.e * 65_536))
    wide = 1.645 * 0.2
    low, high = learned_figures().range(e_times_longer)
    assert low == pytest.approx(math.exp(-math.hypot(math.log(0.5), wide)), rel=1e-4)
    assert high == pytest.approx(math.exp(math.hypot(math.log(1.6), wide)), rel=1e-4)
    other_type = dataclasses.replace(case_of(PREFILL, (1,) * 5), quantization="IQ2_S")
    of_arithmetic = 2 / (2 + 1.5 + 4 + 50)
    wide = 1.645 * 0.3 * of_arithmetic
    low, high = learned_figures().range(other_type)
    assert low == pytest.approx(math.exp(-math.hypot(math.log(0.9), wide)), rel=1e-6)
    assert high == pytest.approx(math.exp(math.hypot(math.log(1.6), wide)), rel=1e-6)


def test_which_factors_nobody_published() -> None:
    learned = learned_figures()
    case = case_of(PREFILL, (1,) * 5)
    assert learned.unpublished(case) == []
    other_model = dataclasses.replace(case, model="other")
    assert learned.unpublished(other_model) == [(0.3, (1, 1, 1, 1, 1))]
    other_type = dataclasses.replace(case, quantization="IQ2_S")
    assert learned.unpublished(other_type) == [(0.3, (1, 0, 0, 0, 0))]
    other_device = dataclasses.replace(case, device=dataclasses.replace(CARD, name="other"))
    assert learned.unpublished(other_device) == []
    elsewhere = dataclasses.replace(case, backend="SYCL")
    counts = [factor.counts for factor in learned.unpublished(elsewhere)]
    of_products = (1, 0, 1, 0, 0)
    assert counts == [
        of_products,
        of_products,
        of_products,
        (1, 0, 0, 0, 0),
        (0, 1, 0, 0, 0),
        (0, 0, 1, 0, 0),
        (0, 0, 1, 0, 0),
        (0, 0, 1, 0, 0),
        (0, 0, 0, 1, 0),
        (0, 0, 0, 0, 1),
    ]
    assert learned.ends(elsewhere)[0].short == pytest.approx(-math.log(0.8))


def test_the_basis_is_of_processors_or_of_gpus() -> None:
    of_card = datasheet.evaluation_of(CARD)
    of_laptop = datasheet.evaluation_of(devices.find_device("laptop-ddr5"))
    figures = datasheet.learned()[DECODE].evaluation["all"]
    assert of_card == datasheet.evaluation_of()
    assert of_card.kind == "GPUs"
    assert of_card.n_rows[DECODE] == figures["n_rows"]
    assert of_card.n_inside[DECODE] == figures["inside"]
    figures = datasheet.learned()[datasheet.DECODE_CPU].evaluation["all"]
    assert of_laptop.kind == "processors"
    assert of_laptop.n_rows[DECODE] == figures["n_rows"]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("rtx-4090", "CUDA"),
        ("h100", "CUDA"),
        ("rx-7900-xtx", "ROCm"),
        ("m4", "Metal"),
        ("arc-a770", "Vulkan"),
        ("ryzen-ai-max-395", "Vulkan"),
        ("laptop-ddr5", "CPU"),
    ],
)
def test_the_backend_that_a_device_is_used_with(name: str, backend: str) -> None:
    assert datasheet.backend_of(devices.find_device(name)) == backend


def test_a_7b_in_f16_on_an_a100() -> None:
    a100 = devices.find_device("A100 80GB")
    row = OnDevice(of_catalog("llama-2-7b"), WIDE, a100).request(1, 2)
    # "About 145" counts the embedding table as well; the ridge is 153, not 312.
    assert row.token.limit_s is not None
    assert 1 / row.token.limit_s == pytest.approx(154, rel=0.02)
    assert a100.tflops
    assert a100.tflops * 1e3 / a100.gbps == pytest.approx(153, rel=0.01)


def test_more_memory_and_bandwidth_make_no_chip_slower() -> None:
    by_chip: dict[str, list[DeviceSheet]] = {}
    for device in devices.devices().values():
        by_chip.setdefault(device.chip, []).append(device)
    small, large = sorted(by_chip["a100"], key=lambda device: device.gbps)
    of_small = OnDevice(BIG, WIDE, small).request(1000, 200)
    of_large = OnDevice(BIG, WIDE, large).request(1000, 200)
    assert small.name == "a100-40gb"
    assert large.name == "a100-80gb"
    assert small.peak_tflops == large.peak_tflops
    assert of_large.prefill.expected_s
    assert of_small.prefill.expected_s
    assert of_large.prefill.expected_s <= of_small.prefill.expected_s
    assert of_large.token.expected_s
    assert of_small.token.expected_s
    assert of_large.token.expected_s < of_small.token.expected_s
    learned = learned_figures(
        device={
            "rtx-1-8gb": 2.0,
            "rtx-1": 8.0,
            "rtx-2": 9.0,
        }
    )
    case = case_of(PREFILL, (1,) * 5)
    variant = dataclasses.replace(case, device=dataclasses.replace(CARD, name="rtx-1-16gb"))
    assert learned.coefficients(variant)[0] == pytest.approx(2 * 4)
    unknown_chip = dataclasses.replace(case, device=dataclasses.replace(CARD, name="rtx-3"))
    assert learned.coefficients(unknown_chip)[0] == pytest.approx(2)


def test_a_request_on_a_device_is_what_was_learned_of_its_phases() -> None:
    card = devices.find_device("rtx-4090")
    row = OnDevice(BIG, WIDE, card).request(1000, 200)
    prompt = datasheet.case_for(BIG, WIDE, card, PREFILL, 1000)
    token = datasheet.case_for(BIG, WIDE, card, DECODE, 1099)
    learned = datasheet.learned()
    assert row.prefill.limit_s == prompt.least_s
    assert row.prefill.expected_s == learned[PREFILL].expected_s(prompt)
    assert row.token.expected_s == learned[DECODE].expected_s(token)
    assert row.token.expected_s
    fast, slow = learned[DECODE].range(token)
    least_s = token.least_s or 0
    assert row.tpot_s[0] == max(least_s, fast * row.token.expected_s)
    assert row.tpot_s[1] == slow * row.token.expected_s


def test_users_of_a_device_take_as_much_longer_as_their_parts() -> None:
    card = devices.find_device("rtx-4090")
    single = OnDevice(BIG, WIDE, card).request(1000, 200)
    many = OnDevice(BIG, WIDE, card).request(1000, 200, users=64)
    token = datasheet.case_for(BIG, WIDE, card, DECODE, 1099)
    times = []
    for users in (1, 64):
        parts = datasheet.parts_of_users(BIG, card, 1099, ("f16", "f16"), users)
        case = dataclasses.replace(token, parts=parts)
        times.append(datasheet.learned()[DECODE].expected_s(case) or math.nan)
    slower = times[1] / times[0]
    assert single.token.expected_s
    assert many.token.expected_s == pytest.approx(slower * single.token.expected_s)
    assert many.tpot_s[1] == pytest.approx(slower * single.tpot_s[1])
    assert many.token.limit_s == case.least_s


@pytest.mark.parametrize("name", ["rtx-4090", "m4", "h100", "rx-7900-xtx", "laptop-ddr5"])
def test_no_end_of_a_range_falls_or_jumps_as_the_prompt_grows(name: str) -> None:
    model = synthetic.model_of(catalog.find("llama-3.1-8b"), "Q4_0")
    device = devices.find_device(name)
    lengths = [round(10 ** (2 + i / 20)) for i in range(61)]  # 100 to 100,000
    rows = [OnDevice(model, WIDE, device).request(n, 200) for n in lengths]
    for shorter, longer in itertools.pairwise(rows):
        for times in ("prefill_s", "tpot_s", "e2e_s"):
            ends = zip(
                getattr(shorter, times),
                getattr(longer, times),
                strict=True,
            )
            for before, after in ends:
                assert math.isnan(before) or before <= after * (1 + 1e-9), times
    before, after = (OnDevice(model, WIDE, device).request(n, 200) for n in (3000, 3001))
    assert after.e2e_s == pytest.approx(before.e2e_s, rel=0.01, nan_ok=True)


# The command


def predict_json(*arguments: object) -> list[dict[str, Any]]:
    code, out, error = run_lab("predict", *arguments, "--json")
    assert code == 0, error
    rows: list[dict[str, Any]] = json.loads(out)["rows"]
    return rows


def test_the_function_and_the_command_predict_the_same() -> None:
    rows = lab.predict("100,1000", 10, "llama-3.2-3b", device="rtx-4090")
    printed = predict_json("-p", "100,1000", "-n", 10, "-m", "llama-3.2-3b", "-d", "rtx-4090")
    assert [row["tpot_s"] for row in printed] == [list(row.tpot_s) for row in rows]
    with pytest.raises(LabError, match="leaves nothing to decode"):
        lab.predict("100", 1, "llama-3.2-3b", device="rtx-4090")


def test_the_page_counts_the_devices_that_are_ranked(tmp_path: Path) -> None:
    rows = lab.predict("4000", 300, "llama-3.1-8b", ceilings=tmp_path)
    n_known = sum(row.is_known for row in rows)
    sentence = f"The ranking has {n_known} of the {len(rows)} devices that the lab knows"
    page = Path("docs/machines.md").read_text(encoding="utf-8")
    assert sentence in " ".join(page.split())


def test_predicting_elsewhere(tmp_path: Path) -> None:
    (row,) = predict_json("-m", "llama-3.2-3b", "-d", "m4", "-p", "100")
    assert 0 < row["prefill_limit_s"] < row["prefill_expected_s"]
    (row,) = predict_json("-m", "llama-3.2-3b", "-d", "raspberry-pi-5", "-p", "100")
    assert 0 < row["prefill_limit_s"] < row["prefill_expected_s"]
    assert row["tpot_limit_s"] > 0
    code, out, error = run_lab(
        "predict", "-m", "llama-3.3-70b:Q4_K_M", "-d", "rtx-4090", "--details"
    )
    assert code == 0, error
    assert "does not fit" in out
    assert "1,008 GB/s" in out
    _, out, _ = run_lab(
        "predict", "-m", "llama-2-7b:Q4_0", "-d", "rtx-3060", "--ceilings", tmp_path
    )
    cited = "Others measured: prefill of 512 tokens 2,137.5 to 2,407.7 tokens/s ("
    assert cited in " ".join(out.split())


def test_this_machine_without_ceilings_and_too_many_tokens_are_refused(tmp_path: Path) -> None:
    request = ("-m", "llama-3.1-8b:Q4_K_M", "-d", "here")
    _, _, error = run_lab("predict", *request, "--ceilings", tmp_path)
    assert "not been measured" in error
    assert "Measure them: lab ceilings --types Q4_K,Q6_K" in error
    _, _, error = run_lab("predict", "-p", "999999999999", "-d", "m4")
    assert "has at most 10,000,000 tokens" in error


def test_without_a_cost_of_a_step_no_figure_of_several_users_is_invented() -> None:
    alone = here([timed_run(512, 1.2, 1.3)]).request(1024, 6)
    unknown = prediction.for_users(alone, 4, None, 0.1, limit_s=0.01)
    assert unknown.token.expected_s is None
    assert all(map(math.isnan, unknown.tpot_s))
    assert unknown.token.limit_s == 0.01


@pytest.mark.parametrize("layers", [{}, {"n_gpu_layers": "auto"}, {"n_gpu_layers": 0}])
def test_a_prediction_needs_no_embedded_model(
    monkeypatch: pytest.MonkeyPatch, layers: dict[str, Any]
) -> None:
    def not_installed() -> NoReturn:
        raise LabError("The embedded model is not installed.")

    monkeypatch.setattr(catalog, "embedded_path", not_installed)
    plan = prediction.plan_for("llama-3.2-3b", layers)
    assert plan.model.name == "llama-3.2-3b"


def test_an_architecture_without_flash_attention_is_planned_without(
    monkeypatch: pytest.MonkeyPatch, fake_worker: FakeWorker
) -> None:
    grok = dataclasses.replace(BIG, arch="grok")
    monkeypatch.setattr(prediction, "Worker", lambda: fake_worker)
    monkeypatch.setattr(obtain, "find", lambda worker, text, watch: grok)
    assert not prediction.plan_for("grok", {}).settings.uses_flash
    plain = dataclasses.replace(WIDE, flash_attn="off", flash_attn_resolved="off")
    available = (BIG.n_bytes or 0) + 10**9
    assert memory.longest(grok, available) == memory.longest(BIG, available, plain)
    assert memory.longest(grok, available) != memory.longest(BIG, available)


def test_users_of_one_cache_are_padded_together() -> None:
    unified = dataclasses.replace(SETTINGS, kv_unified=True)
    three = prediction.memory_bytes(BIG, unified, 1100, 3)
    assert three == prediction.memory_bytes(BIG, unified, 3300, 1)


def test_the_context_that_fits_counts_the_types_of_the_cache() -> None:
    small = dataclasses.replace(WIDE, type_k="q4_0", type_v="q4_0")
    of_f16 = memory.longest(BIG, (BIG.n_bytes or 0) + 10**9, WIDE)
    of_q4 = memory.longest(BIG, (BIG.n_bytes or 0) + 10**9, small)
    assert of_f16 and of_q4
    assert 3 < of_q4 / of_f16 < 4
