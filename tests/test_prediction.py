"""Predictions: planted truths, the facts that a first version got wrong, and devices of datasheets."""

import dataclasses
import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core import results
from lab.core.record import DECODE, PREFILL, Ceilings, Device, Record, Steps
from lab.errors import LabError
from lab.features.predict import wording
from lab.models import catalog, devices, obtain, synthetic
from lab.roofline import learning, prediction, probing
from lab.roofline.learning import Case, Costs, Point, Step
from lab.roofline.prediction import Here, on_device
from lab.roofline.probing import Where
from lab.runner import disturbances
from tests.conftest import FakeWorker, exact_steps, make_record, make_run, run_lab
from tests.test_cost import of_catalog
from tests.test_explain import BIG, FAST, WIDE

SAMPLES = Path("results")


def timed(n_prompt: int, prefill_factor: float, decode_factor: float, session: str = "a") -> Record:
    """A run on BIG that takes so many times its kernels' least time."""
    prefill = learning.costs_of(
        BIG, WIDE, FAST, [Step(512, first, 0) for first in range(0, n_prompt, 512)]
    )
    token = learning.costs_of(BIG, WIDE, FAST, [Step(1, n_prompt + 2, 1)])
    rates = (
        1e3 * prefill_factor * prefill.kernels_s / n_prompt,
        1e3 * decode_factor * token.kernels_s,
    )
    run = make_run(n_prompt, 6, steps=exact_steps(n_prompt, 6, 512, *rates))
    return make_record(run, model=BIG, settings=WIDE, session=session)


def ask(
    records: list[Record], n_prompt: int, model: Any = BIG, settings: Any = WIDE
) -> prediction.Prediction:
    learned = learning.learn(records, FAST)
    return Here(model, settings, FAST, learned).request(n_prompt, 6)


def test_what_was_learned_predicts_what_it_was_learned_from() -> None:
    row = ask([timed(n, 1.5, 2) for n in (512, 1024, 2048)], 1024)
    assert row.prefill_limit_s and row.prefill_expected_s and row.tpot_expected_s
    measured = timed(1024, 1.5, 2).run.steps
    assert row.prefill_expected_s == pytest.approx(measured.ready_ns[1] / 1e9, rel=0.1)
    assert row.tpot_expected_s == pytest.approx(
        (measured.ready_ns[3] - measured.start_ns[3]) / 1e9, rel=0.1
    )
    assert row.tpot_limit_s < row.tpot_s[0] < row.tpot_expected_s < row.tpot_s[1]
    assert row.e2e_s[1] == pytest.approx(row.prefill_s[1] + 5 * row.tpot_s[1])
    assert not row.extrapolations
    with pytest.raises(LabError, match="too few runs"):
        learning.learn([], FAST)


@pytest.mark.parametrize("factor", [0.3, 0.7, 1.0, 3.0])
def test_nothing_is_expected_below_its_limit_and_no_factor_is_below_one(factor: float) -> None:
    records = [timed(n, factor, factor) for n in (512, 2048)]
    fit = learning.learn(records, FAST).fit
    assert min(fit.prefill_factor, fit.decode_factor) >= 1
    assert min(fit.per_layer_step_s, fit.per_layer_value_s) >= 0
    for n_prompt in (1, 100, 512, 10_000):
        row = ask(records, n_prompt)
        assert row.prefill_limit_s and row.prefill_expected_s and row.tpot_expected_s
        assert row.prefill_limit_s <= row.prefill_s[0] <= row.prefill_expected_s <= row.prefill_s[1]
        assert row.tpot_limit_s <= row.tpot_s[0] <= row.tpot_expected_s <= row.tpot_s[1]


def test_repeats_of_one_length_are_one_piece_of_information() -> None:
    once = [timed(512, 1.2, 1.3), timed(1024, 1.4, 1.3)]
    often = [timed(512, 1.2, 1.3)] * 9 + [timed(1024, 1.4, 1.3)]
    assert learning.learn(once, FAST).points == learning.learn(often, FAST).points
    assert len(learning.learn(often, FAST).points) == 4


def test_disturbed_runs_count_only_where_there_are_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        disturbances,
        "disturbances",
        lambda record: {"others": 1.0} if record.run.repeat == 1 else {},
    )
    quiet = timed(512, 1.2, 1.3)
    disturbed = timed(512, 3, 3)
    disturbed = dataclasses.replace(disturbed, run=dataclasses.replace(disturbed.run, repeat=1))
    assert (
        learning.learn([quiet, *[disturbed] * 5], FAST).points
        == learning.learn([quiet], FAST).points
    )
    alone = learning.learn([disturbed], FAST)
    assert all(point.is_disturbed for point in alone.points)
    wide = alone
    narrow = learning.learn([quiet], FAST)
    assert wide.factor(alone.points[0].case) > 1.3 * narrow.factor(alone.points[0].case)
    assert "2 of the points come from disturbed runs" in wording.basis_here(alone)


def test_records_with_absurd_steps_teach_nothing() -> None:
    whole = timed(512, 1.2, 1.3)
    steps = whole.run.steps
    absurd = (
        dataclasses.replace(steps, n_past=tuple(-(10**9) for _ in steps.n_past)),
        dataclasses.replace(
            steps, n_tokens=tuple(0 for _ in steps.n_tokens), n_past=tuple(0 for _ in steps.n_past)
        ),
        dataclasses.replace(steps, ready_ns=steps.start_ns),
        dataclasses.replace(steps, kind=tuple("decode" for _ in steps.kind)),
        Steps(),
    )
    runs = [dataclasses.replace(whole.run, steps=other, n_prompt=0) for other in absurd]
    records = [whole, *(dataclasses.replace(whole, run=run) for run in runs)]
    learned = learning.learn(records, FAST)
    assert all(0 < error < 10 for error in map(learned.factor, (p.case for p in learned.points)))
    assert ask(records, 512).prefill_expected_s == pytest.approx(
        ask([whole], 512).prefill_expected_s, rel=0.3
    )


def test_runs_on_a_gpu_teach_nothing_about_the_cpu() -> None:
    layers = BIG.n_layer or 0
    cpu = timed(512, 1.2, 1.3)
    gpu = dataclasses.replace(
        timed(1024, 5, 5), settings=dataclasses.replace(WIDE, n_gpu_layers=layers + 1)
    )
    part = dataclasses.replace(
        timed(2048, 9, 9), settings=dataclasses.replace(WIDE, n_gpu_layers=3)
    )
    for offload, n_prompt in (("none", 512), ("all", 1024), ("part", 2048)):
        assert {p.n_prompt for p in learning.learn([cpu, gpu, part], FAST, offload).points} == {
            n_prompt
        }


def test_ranges_widen_where_they_extrapolate_and_the_text_says_so() -> None:
    records = [timed(n, 1.2, 1.3) for n in (512, 1024)]
    inside = ask(records, 1024)
    beyond = ask(records, 16 * 1024)
    assert not inside.extrapolations
    assert (
        beyond.prefill_s[1] / beyond.prefill_s[0] > 1.2 * inside.prefill_s[1] / inside.prefill_s[0]
    )
    assert (
        "prefill extrapolates to 16x the longest measured prompt (1,024 tokens)"
        in wording.beyond(beyond.extrapolations)[0]
    )
    assert "range widened to 0." in wording.beyond(beyond.extrapolations)[0]
    other = ask(records, 1024, dataclasses.replace(BIG, n_ff=4096))
    assert "prefill extrapolates to another model: range" in wording.beyond(other.extrapolations)[0]
    assert (
        "another quantization (Q5_0)"
        in wording.beyond(
            ask(records, 1024, dataclasses.replace(BIG, quantization="Q5_0")).extrapolations
        )[0]
    )
    threads = dataclasses.replace(
        FAST, rates=(*FAST.rates, *(dataclasses.replace(r, n_threads=1) for r in FAST.rates))
    )
    learned = learning.learn(records, threads)
    one = dataclasses.replace(WIDE, n_threads=1, n_threads_batch=1)
    row = Here(BIG, one, threads, learned).request(1024, 6)
    assert "other settings (threads" in wording.beyond(row.extrapolations)[0]
    short = ask(records, 10)
    assert (
        "below the shortest measured prompt (512 tokens)" in wording.beyond(short.extrapolations)[0]
    )


def test_ceilings_that_are_too_low_are_said_to_be_and_lower_the_range() -> None:
    for factor, low in ((0.6, True), (1.0, False)):
        learned = learning.learn([timed(512, 1, factor)], FAST)
        assert ("ceilings are too low" in wording.basis_here(learned)) == low
        (decode,) = [point for point in learned.points if point.case.phase == DECODE]
        row = ask([timed(512, 1, factor)], 512)
        assert row.tpot_s[0] < decode.seconds < row.tpot_s[1]


# The facts that a first version got wrong, in the samples of an EPYC: it promised 46.6 to 49.3 s for a prompt of 10,000
# tokens from runs of 10 and 512, and 7.0 to 7.2 ms a token at 8,192 from runs of 512 alone.


def epyc(*lengths: int) -> tuple[list[Record], Ceilings]:
    contents = results.read(sorted(SAMPLES.glob("sample-*.jsonl")))
    here = results.read([SAMPLES / "sample-smollm2-135m-amd-epyc.jsonl"]).ceilings[0].machine
    best = probing.known(contents.ceilings, Where(here))
    assert best
    own = [
        record
        for record in contents.records
        if record.model.quantization == "Q4_1" and record.run.every is None
    ]
    return [record for record in own if record.run.n_prompt in lengths], best


@pytest.mark.parametrize("learned_from", [(10, 512), (512,), (10,), (10, 512, 1000)])
def test_long_prompts_lie_in_the_range_of_what_short_ones_taught(
    learned_from: tuple[int, ...],
) -> None:
    records, best = epyc(*learned_from)
    learned = learning.learn(records, best)
    for n_prompt, prefill_s, tpot_ms in (
        (8192, 37.7, 26.3),
        (10_000, 62.6, 32.0),
    ):  # medians of the samples
        row = Here(records[0].model, records[0].settings, best, learned).request(n_prompt, 2)
        assert row.prefill_s[0] < prefill_s < row.prefill_s[1]
        assert row.tpot_s[0] < tpot_ms / 1e3 < row.tpot_s[1]


# Planted truths


@dataclasses.dataclass(frozen=True)
class Truth:
    """A machine: what its fit would have to find, and by how much models, quantizations and sessions differ in it."""

    dice: random.Random
    factors: dict[str, float]
    attention: float
    per_layer_step_s: float
    per_layer_value_s: float
    effects: dict[object, float]

    def effect(self, what: object, spread: float) -> float:
        return self.effects.setdefault(what, self.dice.gauss(0, spread))

    def point(
        self, n_prompt: int, phase: str, model: int, quantization: str, session: str
    ) -> Point:
        """A model of 2^`model` times the size of the smallest one, at one length, in one session."""
        layers = 16 + 8 * model
        width = 1000 * 2**model
        weights = 3 * layers * width**2 / 8
        n_bytes = weights * {"Q4_0": 0.56, "Q8_0": 1.06}[quantization]
        n_tokens = n_prompt if phase == PREFILL else 1
        middle = n_prompt / 2 if phase == PREFILL else n_prompt
        matrices = 2 * weights * n_tokens / 4e11 if phase == PREFILL else n_bytes / 2e10
        attention = layers * width * n_tokens * middle * (4e-12 if phase == PREFILL else 1e-10)
        steps = -(-n_tokens // 512)
        costs = Costs(matrices + attention, layers * steps, layers * n_tokens * width)
        differs = (
            self.effect((phase, model), 0.07)
            + self.effect((phase, model, quantization), 0.06)
            + self.effect((phase, session), 0.05)
            + self.dice.gauss(0, 0.02)
        )
        layers_s = (
            self.per_layer_step_s * costs.layer_steps + self.per_layer_value_s * costs.layer_values
        )
        kernels = self.factors[phase] * (matrices + self.attention * attention)
        seconds = (kernels + layers_s) * math.exp(differs)
        return Point(
            n_prompt,
            Case(phase, n_prompt, (model,), quantization, (2,)),
            costs,
            seconds,
            {session: seconds},
        )


def machine(dice: random.Random) -> Truth:
    factors = {phase: dice.uniform(1, 1.3) for phase in (PREFILL, DECODE)}
    return Truth(
        dice,
        factors,
        math.exp(dice.gauss(0, 0.1)),
        dice.uniform(0, 3e-5),
        dice.uniform(0, 3e-11),
        {},
    )


def outcomes(n_machines: int) -> dict[str, list[tuple[bool, float]]]:
    """Whether points lay in their ranges, and how far off the expectation was, by how they extrapolate."""
    dice = random.Random(1)
    by_way: dict[str, list[tuple[bool, float]]] = {}
    for _ in range(n_machines):
        truth = machine(dice)
        lengths = [[256], [10, 512], [64, 256, 1024]][dice.randrange(3)]
        setups = dice.sample(
            [(m, q) for m in range(3) for q in ("Q4_0", "Q8_0")], dice.randint(1, 4)
        )
        learned = [
            truth.point(n, p, m, q, f"{m}{q}")
            for n in lengths
            for p in (PREFILL, DECODE)
            for m, q in setups
        ]
        fit = learning.fit(learned)
        errors = learning.Learned(fit, tuple(learned), (), 1)
        for n in (lengths[0], lengths[-1], 4 * lengths[-1], 16 * lengths[-1]):
            point = truth.point(
                n,
                dice.choice((PREFILL, DECODE)),
                dice.randrange(3),
                dice.choice(("Q4_0", "Q8_0")),
                "later",
            )
            error = math.log(point.seconds / fit.seconds(point.case, point.costs))
            ways = sorted(errors.coverage[point.case.phase].extrapolations(point.case)) or [
                "nothing"
            ]
            inside = abs(error) <= math.log(errors.factor(point.case))
            for way in [*ways, "all"]:
                by_way.setdefault(way, []).append((inside, abs(error)))
    return by_way


def test_nine_of_ten_points_of_planted_machines_lie_in_their_ranges() -> None:
    by_way = outcomes(150)
    assert by_way.keys() >= {"nothing", "longer", "model", "quantization", "all"}
    for way, group in by_way.items():
        assert statistics.fmean(inside for inside, _ in group) >= 0.9, way
    assert statistics.median(error for _, error in by_way["all"]) <= 0.1


# The memory of the right device


def test_memory_is_that_of_the_device_that_has_the_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_worker: FakeWorker
) -> None:
    gpu = Device("CUDA0", "Test GPU", "gpu", 3 * 10**9)
    fake_worker.build = dataclasses.replace(fake_worker.build, devices=(gpu,))
    monkeypatch.setattr(prediction, "Worker", lambda: fake_worker)
    monkeypatch.setattr(obtain, "find", lambda worker, text: BIG)
    plan = prediction.plan_for("big", {})
    assert plan.settings.n_gpu_layers == (BIG.n_layer or 0) + 1
    threads = plan.settings.n_threads
    rates = tuple(dataclasses.replace(rate, n_threads=threads) for rate in FAST.rates)
    probing.save(
        dataclasses.replace(FAST, machine=plan.machine, on_gpu=True, device="CUDA0", rates=rates),
        tmp_path,
    )
    settings = dataclasses.replace(
        WIDE, n_gpu_layers=99, n_threads=threads, n_threads_batch=threads
    )
    record = dataclasses.replace(timed(512, 1.2, 1.3), machine=plan.machine, settings=settings)
    results.save(tmp_path / "runs.jsonl", record)
    (row,) = lab.predict("512", 6, "big", "here", results=tmp_path)
    assert row.memory_bytes == 3 * 10**9
    assert "1 run of" in wording.basis(row)
    with pytest.raises(LabError, match="not been measured"):
        lab.predict("512", 6, "big", "here", results=tmp_path, n_gpu_layers=0)


# Devices that nobody here has


def test_the_function_and_the_command_predict_the_same() -> None:
    rows = lab.predict("100,1000", 10, "llama-3.2-3b", device="rtx-4090")
    code, out, _ = run_lab(
        "predict", "-p", "100,1000", "-n", 10, "-m", "llama-3.2-3b", "-d", "rtx-4090", "--json"
    )
    assert code == 0
    assert [row["tpot_s"] for row in json.loads(out)["rows"]] == [list(row.tpot_s) for row in rows]
    with pytest.raises(LabError, match="leaves nothing to decode"):
        lab.predict("100", 1, "llama-3.2-3b", device="rtx-4090")


def test_a_7b_in_f16_on_an_a100() -> None:
    model = of_catalog("llama-2-7b")
    a100 = devices.find_device("A100 80GB")
    row = on_device(model, WIDE, a100, 1, 2)
    assert 1 / row.tpot_limit_s == pytest.approx(
        154, rel=0.02
    )  # "about 145" counts the embedding table as well
    assert a100.tflops and a100.tflops * 1e3 / a100.gbps == pytest.approx(
        153, rel=0.01
    )  # the ridge, not 312


@pytest.mark.parametrize("name", ["rtx-4090", "m4", "h100", "rx-7900-xtx", "laptop-ddr5"])
def test_no_end_of_a_range_falls_or_jumps_as_the_prompt_grows(name: str) -> None:
    model = synthetic.model_of(catalog.find("llama-3.1-8b"), "Q4_0")
    device = devices.find_device(name)
    lengths = [round(10 ** (2 + i / 20)) for i in range(61)]  # 100 to 100,000
    rows = [on_device(model, WIDE, device, n, 200) for n in lengths]
    for times in ("prefill_s", "tpot_s", "e2e_s"):
        for one, longer in itertools.pairwise(getattr(row, times) for row in rows):
            assert all(
                math.isnan(a) or a <= b * (1 + 1e-9) for a, b in zip(one, longer, strict=True)
            ), times
    before, after = (on_device(model, WIDE, device, n, 200) for n in (3000, 3001))
    assert after.e2e_s == pytest.approx(before.e2e_s, rel=0.01, nan_ok=True)


def test_the_readme_counts_the_devices_that_are_ranked(tmp_path: Path) -> None:
    rows = lab.predict("4000", 300, "llama-3.1-8b", results=tmp_path)
    words = f"It ranks {sum(row.is_known for row in rows)} of the {len(rows)} devices that it knows"
    assert words in " ".join(Path("README.md").read_text(encoding="utf-8").split())


def test_predicting_elsewhere(tmp_path: Path) -> None:
    code, out, err = run_lab(
        "predict", "-m", "llama-3.3-70b:Q4_K_M", "-d", "rtx-4090", "--results", tmp_path
    )
    assert code == 0, err
    assert "does not fit" in out and "1008 GB/s" in out
    document = json.loads(
        run_lab("predict", "-m", "llama-3.2-3b", "-d", "m4", "-p", "100", "--json")[1]
    )
    assert 0 < document["rows"][0]["prefill_limit_s"] < document["rows"][0]["prefill_expected_s"]
    document = json.loads(
        run_lab("predict", "-m", "llama-3.2-3b", "-d", "raspberry-pi-5", "-p", "100", "--json")[1]
    )
    assert (
        document["rows"][0]["prefill_limit_s"] is None and document["rows"][0]["tpot_limit_s"] > 0
    )
    basis = " ".join(
        run_lab("predict", "-m", "llama-2-7b:Q4_0", "-d", "rtx-3060", "--results", tmp_path)[
            1
        ].split()
    )
    assert "llama-2-7b: Q4_0 prefill of 512 tokens 2,137.5 to 2,407.7 tokens/s (" in basis
    assert "not been measured" in run_lab("predict", "-d", "here", "--results", tmp_path)[2]
    assert "are too many" in run_lab("predict", "-p", "999999999999", "-d", "m4")[2]
