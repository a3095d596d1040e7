"""What runs of a machine teach: the fit, its corrections, and the errors of its predictions."""

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence

import pytest

from lab.core import cost
from lab.core.record import DECODE, PREFILL, Settings, Steps
from lab.errors import LabError
from lab.features.predict import wording
from lab.roofline import learning
from lab.roofline.learning import Costs, Coverage, Fit, Learned, LearnedCase, Point, Step
from lab.roofline.step_kernels import StepKernels
from lab.roofline.step_prediction import StepPrediction
from lab.runner import disturbances
from tests.support.rates import BIG, FAST, WIDE, timed_run
from tests.support.records import make_record, make_run


def case(
    phase: str = PREFILL,
    length: float = 100,
    shape: int = 1,
    kind: str = "Q4_0",
) -> LearnedCase:
    return LearnedCase(phase, length, (shape,), kind, (2,))


def point(
    of: LearnedCase,
    seconds: float,
    kernels_s: float = 1.0,
) -> Point:
    """A point without layers' costs, measured in one session."""
    costs = Costs(kernels_s, 0, 0)
    return Point(round(of.length), of, costs, seconds, {"a": seconds})


def learned_from(*points: Point) -> Learned:
    return Learned(learning.fit(points), points, (), 1)


# The steps and costs of a run


def test_a_prompt_is_cut_into_steps_and_only_the_last_has_outputs() -> None:
    steps = learning.prompt_steps(
        1100,
        WIDE,
        n_past=100,
        n_outputs=3,
    )
    assert steps == [
        (512, 100, 0),
        (512, 612, 0),
        (76, 1124, 3),
    ]
    assert learning.prompt_steps(512, WIDE) == [(512, 0, 1)]
    assert learning.prompt_steps(2, dataclasses.replace(WIDE, n_ubatch=0)) == [
        (1, 0, 0),
        (1, 1, 1),
    ]


def test_costs_are_kernels_layers_of_steps_and_values_of_tokens() -> None:
    steps = [Step(512, 0, 0), Step(8, 512, 1)]
    costs = learning.costs_of(StepKernels(BIG, WIDE, FAST), steps)
    totals = [StepKernels(BIG, WIDE, FAST).total(*step).total_s for step in steps]
    assert costs.kernels_s == sum(totals)
    assert costs.layer_steps == 16 * 2
    assert costs.layer_values == 16 * 520 * (2048 + 8192)
    remembered = {Step(8, 0, 1): 7.0}
    assert (
        learning.costs_of(StepKernels(BIG, WIDE, FAST), [Step(8, 0, 1)], remembered).kernels_s
        == 7
    )


@pytest.mark.parametrize(
    ("n_gpu_layers", "offload"),
    [
        (0, "none"),
        (1, "part"),
        (16, "part"),
        (17, "all"),
        (-1, "all"),
    ],
)
def test_how_much_of_a_model_is_on_a_gpu(n_gpu_layers: int, offload: str) -> None:
    settings = dataclasses.replace(WIDE, n_gpu_layers=n_gpu_layers)
    assert learning.offload_of(BIG, settings) == offload


@pytest.mark.parametrize(
    ("change", "phases"),
    [
        ({"n_threads": 1}, {DECODE}),
        ({"n_threads_batch": 1}, {PREFILL}),
        ({"prefill_wait": 0.5}, {PREFILL}),
        ({"n_gpu_layers": 3}, {PREFILL, DECODE}),
        ({"n_gpu_layers": 99}, set()),
        ({"flash_attn": "on"}, set()),
        ({"flash_attn": None, "flash_attn_resolved": None}, {PREFILL, DECODE}),  # unknown
        ({"flash_attn": "off", "flash_attn_resolved": None}, {PREFILL, DECODE}),
        ({"n_ubatch": 256}, {PREFILL, DECODE}),
        ({"type_k": "q8_0"}, {PREFILL, DECODE}),
        ({"type_v": "q8_0"}, {PREFILL, DECODE}),
        ({"repack": False}, {PREFILL, DECODE}),
        ({"n_cpu_moe": 2}, {PREFILL, DECODE}),
        ({"kv_offload": False}, {PREFILL, DECODE}),
        ({"op_offload": False}, {PREFILL, DECODE}),
        ({"seed": 2}, set()),
    ],
)
def test_which_settings_make_another_setup(
    change: dict[str, object], phases: set[str]
) -> None:
    changed = dataclasses.replace(WIDE, **change)  # type: ignore[arg-type]
    differing = set()
    for phase in (PREFILL, DECODE):
        before = learning.case_of(phase, 5, BIG, WIDE)
        if learning.case_of(phase, 5, BIG, changed).setup != before.setup:
            differing.add(phase)
    assert differing == phases


def test_a_run_is_timed_as_its_prefill_and_its_mean_decode_step() -> None:
    run = make_run(
        20,
        5,
        prefill_ms=2,
        decode_ms=30,
        per_position_ms=1,
    )
    prefill, decode = learning.timed_phases(run)
    assert prefill[:3] == (
        PREFILL,
        20,
        [
            (8, 0, 0),
            (8, 8, 0),
            (4, 16, 1),
        ],
    )
    assert prefill.seconds == pytest.approx(0.016 + (0.002 + 0.008) * 8 + (0.002 + 0.016) * 4)
    assert decode[:3] == (DECODE, 22, [(1, 22, 1)])
    assert decode.seconds == pytest.approx(0.030 + 0.0215)
    assert [timing.phase for timing in learning.timed_phases(make_run(20, 1))] == [PREFILL]


def test_steps_that_cannot_be_are_not_timed() -> None:
    run = make_run(20, 5)
    steps = run.steps
    absurd = (
        dataclasses.replace(run, steps=Steps()),
        dataclasses.replace(run, n_prompt=0),
        dataclasses.replace(run, steps=dataclasses.replace(steps, n_past=(-1,) * 7)),
        dataclasses.replace(run, steps=dataclasses.replace(steps, n_tokens=(0,) * 7)),
        dataclasses.replace(
            run, steps=dataclasses.replace(steps, n_past=(-1, *steps.n_past[1:]))
        ),
        dataclasses.replace(
            run, steps=dataclasses.replace(steps, n_tokens=(0, *steps.n_tokens[1:]))
        ),
    )
    for changed in absurd:
        assert learning.timed_phases(changed) == []
    nowhere = dataclasses.replace(steps, n_past=(0,) * 7)
    assert len(learning.timed_phases(dataclasses.replace(run, steps=nowhere))) == 2


# The fit


def test_a_fit_finds_the_law_that_made_its_points() -> None:
    law = Fit(1.3, 1.2, 2e-5, 3e-12)
    points = []
    for n in range(1, 60):
        prefill_case = case(PREFILL, 64 * n, shape=n)
        prefill = Costs(0.01 * n, 100 * (n % 4), 2e9 * n * (n % 3))
        points.append(
            Point(
                64 * n,
                prefill_case,
                prefill,
                law.seconds(prefill_case, prefill),
                {},
            )
        )
        decode_case = case(DECODE, 64 * n, shape=n)
        decode = Costs(0.005 * (1 + n % 7), 1000 * (n % 3), 1e7)
        points.append(
            Point(
                64 * n,
                decode_case,
                decode,
                law.seconds(decode_case, decode),
                {},
            )
        )
    fitted = learning.fit(points)
    assert fitted.prefill_factor == pytest.approx(1.3, rel=0.02)
    assert fitted.decode_factor == pytest.approx(1.2, rel=0.02)
    assert fitted.per_layer_step_s == pytest.approx(2e-5, rel=0.05)
    assert fitted.per_layer_value_s == pytest.approx(3e-12, rel=0.2)


def test_the_prior_says_nothing_of_layers_and_of_the_other_phase() -> None:
    """Points that follow a law with the factors of the prior, and it, are met exactly."""
    law = Fit(1.05, 1.05, 0.5, 0.25)
    points = []
    for phase in (PREFILL, DECODE):
        for costs in (Costs(1.0, 1, 0), Costs(2.0, 0, 3), Costs(1.0, 2, 5)):
            of = case(phase)
            points.append(Point(100, of, costs, law.seconds(of, costs), {}))
    fitted = learning.fit(points)
    assert [fitted.prefill_factor, fitted.decode_factor] == pytest.approx([1.05, 1.05])
    assert [fitted.per_layer_step_s, fitted.per_layer_value_s] == pytest.approx([0.5, 0.25])


def test_a_model_of_unknown_layers_or_width() -> None:
    on_gpu = dataclasses.replace(WIDE, n_gpu_layers=1)
    assert learning.offload_of(dataclasses.replace(BIG, n_layer=None), on_gpu) == "all"
    unknown = dataclasses.replace(BIG, n_embd=None, n_ff=None)
    assert learning.width_of(unknown) == 0


def test_steps_without_time_teach_nothing() -> None:
    quick = make_record(make_run(20, 5, decode_ms=0), model=BIG, settings=WIDE)
    phases_of_points = {point.case.phase for point in learning.points_of_record(quick, FAST)}
    assert phases_of_points == {PREFILL}


def test_without_points_the_factor_is_the_prior_one() -> None:
    fitted = learning.fit([])
    assert [fitted.prefill_factor, fitted.decode_factor] == pytest.approx([1.05, 1.05])
    assert fitted.per_layer_step_s == 0
    assert fitted.per_layer_value_s == 0
    assert fitted.seconds(case(), Costs(2.0, 0, 0)) == pytest.approx(2.1)


def test_a_time_is_corrected_but_never_below_its_kernels() -> None:
    law = Fit(1.5, 2.0, 0.1, 0.01, {case().setup: 0.9})
    costs = Costs(10.0, 20, 30)
    assert law.seconds(case(), costs) == pytest.approx(0.9 * (15 + 2 + 0.3))
    assert law.seconds(case(DECODE), costs) == pytest.approx(20 + 2 + 0.3)
    assert law.corrected_s(costs, 1.0, 0.5) == 10.0


def test_a_setup_is_corrected_by_its_mean_deviation_and_a_ratio_of_one() -> None:
    law = Fit(1.0, 1.0, 0, 0)
    points = [point(case(length=length), seconds) for length, seconds in ((10, 2), (20, 4))]
    corrections = learning.corrections_of(law, [*points, point(case(shape=2), 9)])
    assert corrections[case().setup] == pytest.approx(8 ** (1 / 3))
    assert corrections[case(shape=2).setup] == pytest.approx(3)


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 3.0])
def test_no_coefficient_is_below_its_least(factor: float) -> None:
    fitted = learning.learn([timed_run(n, factor, factor) for n in (512, 2048)], FAST).fit
    assert min(fitted.prefill_factor, fitted.decode_factor) >= 1
    assert min(fitted.per_layer_step_s, fitted.per_layer_value_s) >= 0


# Points of runs


def test_repeats_of_one_length_are_one_piece_of_information() -> None:
    once = [timed_run(512, 1.2, 1.3), timed_run(1024, 1.4, 1.3)]
    often = [timed_run(512, 1.2, 1.3)] * 9 + [timed_run(1024, 1.4, 1.3)]
    points = learning.learn(often, FAST).points
    assert points == learning.learn(once, FAST).points
    assert len(points) == 4


def test_each_session_counts_the_same_however_many_runs_it_has() -> None:
    runs = [point(case(), 1.0)] * 5
    for session, seconds, length in (
        ("b", 2.0, 104),
        ("b", 4.0, 106),
        ("c", 9.0, 108),
    ):
        run = Point(
            100,
            case(length=length),
            Costs(seconds, 6, 9),
            seconds,
            {session: seconds},
        )
        runs.append(run)
    median = learning.median_point(runs)
    assert median.by_session == {"a": 1.0, "b": 3.0, "c": 9.0}
    assert median.seconds == 3.0
    assert list(median.costs) == [1.0, 0, 0]
    assert median.n_prompt == 100
    assert median.case.length == 100


def test_it_says_how_many_runs_and_models_it_learned_from() -> None:
    records = [
        timed_run(512, 1.2, 1.3),
        timed_run(512, 1.2, 1.3, "b"),
        timed_run(1024, 1.4, 1.3),
    ]
    learned = learning.learn([*records, dataclasses.replace(records[0], model=BIG)], FAST)
    assert learned.n_runs == 4
    assert learned.models == ("big Q8_0",)


def test_only_timed_runs_of_the_lab_without_an_experiment_teach() -> None:
    run = make_run()
    assert learning.is_plain(make_record(run))
    assert not learning.is_plain(make_record(dataclasses.replace(run, warmup=True)))
    imported = dataclasses.replace(run, imported_from="llama-bench")
    assert not learning.is_plain(make_record(imported))
    of_experiment = dataclasses.replace(run, experiment="batch")
    assert not learning.is_plain(make_record(of_experiment))


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(LabError, match="too few runs"):
        learning.learn([], FAST)
    without_decode = make_record(
        make_run(512, 1),
        model=BIG,
        settings=WIDE,
    )
    with pytest.raises(LabError, match="too few runs"):
        learning.learn([without_decode], FAST)


def test_disturbed_runs_count_only_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        disturbances,
        "disturbances",
        lambda record: {"others": 1.0} if record.run.repeat == 1 else {},
    )
    quiet = timed_run(512, 1.2, 1.3)
    disturbed = timed_run(512, 3, 3)
    disturbed = dataclasses.replace(
        disturbed, run=dataclasses.replace(disturbed.run, repeat=1)
    )
    narrow = learning.learn([quiet], FAST)
    assert learning.learn([quiet, *[disturbed] * 5], FAST).points == narrow.points
    wide = learning.learn([disturbed], FAST)
    assert all(point.is_disturbed for point in wide.points)
    assert wide.factor(wide.points[0].case) > 1.3 * narrow.factor(wide.points[0].case)
    assert "2 of the points come from disturbed runs" in wording.basis_here(wide)


def test_records_with_absurd_steps_teach_nothing() -> None:
    record = timed_run(512, 1.2, 1.3)
    steps = record.run.steps
    n_steps = len(steps.n_past)
    absurd = (
        dataclasses.replace(steps, n_past=(-(10**9),) * n_steps),
        dataclasses.replace(
            steps,
            n_tokens=(0,) * n_steps,
            n_past=(0,) * n_steps,
        ),
        dataclasses.replace(steps, ready_ns=steps.start_ns),
        dataclasses.replace(steps, kind=("decode",) * n_steps),
        Steps(),
    )
    records = [record]
    for changed in absurd:
        run = dataclasses.replace(record.run, steps=changed, n_prompt=0)
        records.append(dataclasses.replace(record, run=run))
    assert learning.learn(records, FAST).points == learning.learn([record], FAST).points


def test_runs_on_a_gpu_teach_nothing_about_the_cpu() -> None:
    n_layer = BIG.n_layer or 0
    records = []
    for n_prompt, n_gpu_layers in (
        (512, 0),
        (1024, n_layer + 1),
        (2048, 3),
    ):
        settings = dataclasses.replace(WIDE, n_gpu_layers=n_gpu_layers)
        records.append(dataclasses.replace(timed_run(n_prompt, 1.2, 1.3), settings=settings))
    for offload, n_prompt in (
        ("none", 512),
        ("all", 1024),
        ("part", 2048),
    ):
        learned = learning.learn(records, FAST, offload)
        assert {point.n_prompt for point in learned.points} == {n_prompt}


def test_a_run_whose_kernels_were_not_probed_teaches_nothing() -> None:
    without_attention = dataclasses.replace(
        FAST, rates=tuple(rate for rate in FAST.rates if rate.type != "F16")
    )
    assert learning.points_of_record(timed_run(512, 1.2, 1.3), FAST)
    assert learning.points_of_record(timed_run(512, 1.2, 1.3), without_attention) == []


# Extrapolation


def test_how_far_a_case_lies_beyond_what_was_measured() -> None:
    points = [point(case(length=length), 1.0) for length in (90, 200)]
    coverage = Coverage([*points, point(case(length=100, shape=2, kind="Q8_0"), 1.0)])
    for length in (60, 100, 300):
        assert coverage.extrapolations(case(length=length)) == {}
    assert coverage.extrapolations(case(length=800)) == {learning.LONGER: 2.0}
    assert coverage.extrapolations(case(length=45)) == {learning.SHORTER: 1.0}
    from_nothing = coverage.extrapolations(case(length=0.5))
    assert from_nothing == {learning.SHORTER: pytest.approx(math.log2(90))}
    assert coverage.extrapolations(case(shape=3)) == {learning.MODEL: 1.0}
    assert coverage.extrapolations(case(kind="Q8_0")) == {learning.QUANTIZATION: 1.0}
    both = {learning.MODEL: 1.0, learning.QUANTIZATION: 1.0}
    assert coverage.extrapolations(case(shape=3, kind="Q5_0")) == both
    other_settings = dataclasses.replace(case(), settings=(1,))
    assert coverage.extrapolations(other_settings) == {learning.SETTINGS: 1.0}


@pytest.mark.parametrize(
    ("phase", "length", "shape", "kind", "deviations"),
    [
        (PREFILL, 100, 1, "Q4_0", (0.07, 0.05)),
        (DECODE, 100, 1, "Q4_0", (0.06, 0.08)),
        (PREFILL, 200, 1, "Q4_0", (0.07, 0.05, 0.08)),
        (DECODE, 200, 1, "Q4_0", (0.06, 0.08, 0.08)),
        (PREFILL, 50, 1, "Q4_0", (0.07, 0.05, 0.12)),
        (DECODE, 50, 1, "Q4_0", (0.06, 0.08, 0.06)),
        (PREFILL, 100, 2, "Q4_0", (0.07, 0.05, 0.12)),
        (DECODE, 100, 2, "Q4_0", (0.06, 0.08, 0.12)),
        (PREFILL, 100, 1, "Q8_0", (0.07, 0.05, 0.10)),
        (DECODE, 100, 1, "Q8_0", (0.06, 0.08, 0.10)),
    ],
)
def test_a_range_without_errors_of_this_machine_is_that_of_the_benchmark(
    phase: str, length: float, shape: int, kind: str, deviations: Sequence[float]
) -> None:
    learned = learned_from(
        point(case(PREFILL), 1.5),
        point(case(DECODE), 1.5),
    )
    variance = sum(deviation**2 for deviation in deviations)
    factor = learned.factor(case(phase, length, shape, kind))
    assert factor == pytest.approx(math.exp(2 * math.sqrt(variance)))


@pytest.mark.parametrize(
    ("phase", "deviations"),
    [(PREFILL, (0.28, 0.12)), (DECODE, (0.25, 0.12))],
)
def test_disturbed_points_and_other_settings_widen_a_range(
    phase: str, deviations: tuple[float, float]
) -> None:
    quiet = point(case(phase, 100), 1.5)
    disturbed = dataclasses.replace(point(case(phase, 110), 1.5), is_disturbed=True)
    learned = Learned(learning.fit([]), (quiet, disturbed), (), 1)
    squares = 0.0
    for kind in (learning.INSIDE, learning.SESSION):
        squares += learned.variance(phase, kind)
    squares += deviations[0] ** 2 / 2
    assert learned.factor(case(phase)) == pytest.approx(math.exp(2 * math.sqrt(squares)))
    other_settings = dataclasses.replace(case(phase), settings=(1,))
    squares += deviations[1] ** 2
    assert learned.factor(other_settings) == pytest.approx(math.exp(2 * math.sqrt(squares)))


def test_sessions_that_differ_widen_all_ranges() -> None:
    by_session = {"a": 1.0, "b": 2.0, "c": 2.0}
    several = dataclasses.replace(point(case(), 2.0), by_session=by_session)
    learned = learned_from(
        several,
        point(case(shape=2), 5.0),
        point(case(DECODE), 1.0),
    )
    of_a = math.log(1 / 2) ** 2 * 3 / 2
    assert learned.variance(PREFILL, learning.SESSION) == pytest.approx(
        (of_a + 4 * 0.05**2) / (3 + 4)
    )
    assert learned.variance(DECODE, learning.SESSION) == pytest.approx(0.08**2)


def test_errors_of_points_that_were_held_out_widen_a_range() -> None:
    points = [point(case(length=length), seconds) for length, seconds in ((100, 2), (400, 3))]
    learned = learned_from(*points)
    shorter, longer = points
    without_longer = learning.fit([shorter]).seconds(longer.case, longer.costs)
    error = math.log(3 / without_longer)
    expected = (error**2 / 2 + 4 * 0.08**2) / (1 + 4)
    assert learned.variance(PREFILL, learning.LONGER) == pytest.approx(expected)
    without_shorter = learning.fit([longer]).seconds(shorter.case, shorter.costs)
    error = math.log(2 / without_shorter)
    expected = (error**2 / 2 + 4 * 0.12**2) / (1 + 4)
    assert learned.variance(PREFILL, learning.SHORTER) == pytest.approx(expected)
    assert learned.variance(PREFILL, learning.INSIDE) == pytest.approx(0.07**2)
    assert {held.group for held in learned.held_out} == {str(case().setup)}


def test_an_error_between_measured_lengths_counts_as_it_is() -> None:
    """The other ways to hold points out extrapolate, by more than a factor of 1.5."""
    points = [point(case(length=length), 1.2) for length in (100, 400)]
    middle = point(case(length=200), 1.5)
    learned = learned_from(*points, middle)
    error = math.log(1.5 / learning.fit(points).seconds(middle.case, middle.costs))
    expected = (error**2 + 4 * 0.07**2) / (1 + 4)
    assert learned.variance(PREFILL, learning.INSIDE) == pytest.approx(expected)


def test_points_are_held_out_by_length_model_quantization_and_settings() -> None:
    points = []
    for length in (100, 200, 300):
        points += [
            point(case(length=length), 1.0),
            point(case(length=length, shape=2), 1.0),
        ]
    groups = [
        (name, [(point.n_prompt, point.case.shape[0]) for point in group])
        for name, group in learning.groups_to_hold_out(points)
    ]
    first, second, third = ([(length, 1), (length, 2)] for length in (100, 200, 300))
    assert groups[:2] == [("", [(200, 1)]), ("", [(200, 2)])]
    assert groups[2:6] == [
        ("", [*second, *third]),
        ("", first),
        ("", third),
        ("", [*first, *second]),
    ]
    of_models = [[(length, shape) for length in (100, 200, 300)] for shape in (1, 2)]
    assert groups[6:8] == [("(1,)", of_models[0]), ("(2,)", of_models[1])]
    assert groups[8:10] == [
        ("((1,), 'Q4_0')", of_models[0]),
        ("((2,), 'Q4_0')", of_models[1]),
    ]
    assert groups[10:] == [("(2,)", [*first, *second, *third])]


def test_a_sweep_is_split_at_thirteen_lengths() -> None:
    points = [point(case(length=10 * n), 1.0) for n in range(1, 122)]
    assert learning.lengths_to_split_at(points) == [100 * n + 10 for n in range(13)]
    assert learning.lengths_to_split_at(points[:3]) == [10, 20, 30]


def test_the_fastest_point_says_whether_ceilings_are_too_low() -> None:
    learned = learned_from(
        point(case(), 6.0, 5.0),
        point(case(DECODE), 3.0, 4.0),
    )
    assert learned.fastest(PREFILL) == 1.0
    assert learned.fastest(DECODE) == 0.75


# Steps


def prediction_of(fit: Fit, settings: Settings = WIDE) -> StepPrediction:
    return StepPrediction(BIG, settings, FAST, fit, 3)


def test_a_step_goes_from_decode_to_prefill_by_the_logarithm_of_its_tokens() -> None:
    corrections = {
        learning.case_of(DECODE, 1, BIG, WIDE).setup: 1.1,
        learning.case_of(PREFILL, 1, BIG, WIDE).setup: 1.2,
    }
    prediction = prediction_of(Fit(2.0, 8.0, 1e-4, 1e-12, corrections))
    for n, factor, correction in (
        (1, 8.0, 1.1),
        (512, 2.0, 1.2),
        (600, 2.0, 1.2),
        (8, 8.0 ** (2 / 3) * 2.0 ** (1 / 3), 1.1 ** (2 / 3) * 1.2 ** (1 / 3)),
    ):
        kernels_s = StepKernels(BIG, WIDE, FAST).total(n, 10, 1).total_s
        layers_s = 1e-4 * 16 + 1e-12 * 16 * n * (2048 + 8192)
        expected = correction * (factor * kernels_s + layers_s)
        assert prediction.seconds(n, 10, 1) == pytest.approx(expected)
    one_token_steps = prediction_of(
        Fit(2.0, 8.0, 0, 0),
        dataclasses.replace(WIDE, n_ubatch=1),
    )
    kernels_s = StepKernels(BIG, WIDE, FAST).total(2, 10, 1).total_s
    assert one_token_steps.seconds(2, 10, 1) == pytest.approx(2.0 * kernels_s)


def test_tokens_of_all_sequences_of_a_step_count() -> None:
    prediction = prediction_of(Fit(1.0, 1.0, 0, 1e-9))
    kernels_s = StepKernels(BIG, WIDE, FAST).total(1, 10, 4, [(1, 10)] * 3).total_s
    expected = kernels_s + 1e-9 * 16 * 4 * (2048 + 8192)
    assert prediction.seconds(1, 10, 4, [(1, 10)] * 3) == pytest.approx(expected)


def test_a_prompt_is_the_sum_of_its_steps() -> None:
    prediction = prediction_of(learning.fit([]))
    steps = [
        prediction.seconds(512, 100, 0),
        prediction.seconds(88, 612, 1),
    ]
    assert prediction.prefill(600, 100) == pytest.approx(sum(filter(None, steps)))
    uncounted = dataclasses.replace(prediction, model=dataclasses.replace(BIG, n_layer=None))
    assert uncounted.prefill(600) is None
    assert uncounted.move(10) is None


def test_a_copy_takes_its_bytes_at_the_best_rate() -> None:
    moved = cost.move(BIG, 500, "f16", "f16")
    assert moved is not None
    assert prediction_of(learning.fit([])).move(500) == pytest.approx(moved.n_bytes / 40e9)


# Planted truths


@dataclasses.dataclass(frozen=True)
class Truth:
    """A machine: what its fit has to find, and how much models, types and sessions differ."""

    dice: random.Random
    factors: dict[str, float]
    attention: float
    per_layer_step_s: float
    per_layer_value_s: float
    effects: dict[object, float]

    def effect(
        self,
        what: object,
        spread: float,
    ) -> float:
        return self.effects.setdefault(what, self.dice.gauss(0, spread))

    def point(
        self, n_prompt: int, phase: str, model: int, quantization: str, session: str
    ) -> Point:
        """A model of 2^`model` times the size of the smallest one, in one session."""
        layers = 16 + 8 * model
        width = 1000 * 2**model
        weights = 3 * layers * width**2 / 8
        if phase == PREFILL:
            n_tokens = n_prompt
            matrices = 2 * weights * n_tokens / 4e11
            attention = layers * width * n_tokens * (n_prompt / 2) * 4e-12
        else:
            n_tokens = 1
            matrices = weights * {"Q4_0": 0.56, "Q8_0": 1.06}[quantization] / 2e10
            attention = layers * width * n_prompt * 1e-10
        n_steps = math.ceil(n_tokens / 512)
        costs = Costs(matrices + attention, layers * n_steps, layers * n_tokens * width)
        differs = (
            self.effect((phase, model), 0.07)
            + self.effect((phase, model, quantization), 0.06)
            + self.effect((phase, session), 0.05)
            + self.dice.gauss(0, 0.02)
        )
        layers_s = (
            self.per_layer_step_s * costs.layer_steps
            + self.per_layer_value_s * costs.layer_values
        )
        kernels_s = self.factors[phase] * (matrices + self.attention * attention)
        seconds = (kernels_s + layers_s) * math.exp(differs)
        of = LearnedCase(phase, n_prompt, (model,), quantization, (2,))
        return Point(n_prompt, of, costs, seconds, {session: seconds})


def planted_machine(dice: random.Random) -> Truth:
    factors = {phase: dice.uniform(1, 1.3) for phase in (PREFILL, DECODE)}
    attention = math.exp(dice.gauss(0, 0.1))
    return Truth(
        dice,
        factors,
        attention,
        dice.uniform(0, 3e-5),
        dice.uniform(0, 3e-11),
        {},
    )


SETUPS = [(model, kind) for model in range(3) for kind in ("Q4_0", "Q8_0")]


def points_of(truth: Truth, lengths: Sequence[int]) -> list[Point]:
    """What is learned from: some setups at these lengths, each setup in a session of its own."""
    points = []
    for model, kind in truth.dice.sample(SETUPS, truth.dice.randint(1, 4)):
        for length in lengths:
            for phase in (PREFILL, DECODE):
                points.append(truth.point(length, phase, model, kind, f"{model}{kind}"))
    return points


def outcomes(n_machines: int) -> dict[str, list[tuple[bool, float]]]:
    """Whether points lay in their ranges, and by how much the expectation was off.

    By the kind of extrapolation; "nothing" without any.
    """
    dice = random.Random(1)
    by_kind: dict[str, list[tuple[bool, float]]] = {}
    for _ in range(n_machines):
        truth = planted_machine(dice)
        lengths = dice.choice(
            [
                [256],
                [10, 512],
                [64, 256, 1024],
            ]
        )
        learned = learned_from(*points_of(truth, lengths))
        for n in (lengths[0], lengths[-1], 4 * lengths[-1], 16 * lengths[-1]):
            phase = dice.choice((PREFILL, DECODE))
            later = truth.point(n, phase, *dice.choice(SETUPS), "later")
            expected = learned.fit.seconds(later.case, later.costs)
            error = abs(math.log(later.seconds / expected))
            is_inside = error <= math.log(learned.factor(later.case))
            kinds = list(learned.coverage[phase].extrapolations(later.case)) or ["nothing"]
            for kind in (*kinds, "all"):
                by_kind.setdefault(kind, []).append((is_inside, error))
    return by_kind


def test_nine_of_ten_points_of_planted_machines_lie_in_their_ranges() -> None:
    by_kind = outcomes(150)
    assert by_kind.keys() >= {"nothing", "longer", "model", "quantization", "all"}
    for kind, of_kind in by_kind.items():
        assert statistics.fmean(is_inside for is_inside, _ in of_kind) >= 0.9, kind
    assert statistics.median(error for _, error in by_kind["all"]) <= 0.1
