"""Layers on a GPU and on the CPU: whose ceilings count for what. Exact on made-up devices."""

import dataclasses
import itertools
from typing import Any

import pytest

from lab.core import cost, shape
from lab.core.record import Buffer, Ceilings, Device, Placement, Rate, Record
from lab.core.shape import EMBEDDING
from lab.errors import LabError
from lab.features.explain import sentences
from lab.roofline import explanation, learning, probes, probing, step_kernels, step_prediction
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, UPLOAD
from tests.conftest import MACHINE, exact_steps, make_record, make_run
from tests.test_explain import BIG, WIDE, rate

GPU = Device("CUDA0", "Test GPU", "gpu", 8 * 10**9)
SMALL = Device("CUDA1", "Small GPU", "gpu", 4 * 10**9)
BOTH = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, GPU, SMALL))
N_LAYER = BIG.n_layer or 0
LAYER_BYTES = sum(m.n_bytes for m in shape.matrices(BIG) or () if m.part != EMBEDDING) / N_LAYER
HEAD_BYTES = sum(m.n_bytes for m in shape.matrices(BIG) or () if m.part == EMBEDDING)
READS = {"CPU": 10.0, "CUDA0": 100.0, "CUDA1": 20.0}
MULTIPLIES = {"CPU": 100.0, "CUDA0": 1000.0, "CUDA1": 200.0}
ATTENDS = {"CPU": 5.0, "CUDA0": 50.0, "CUDA1": 10.0}
LATENCY_S = 1e-4
LINK_GBPS = 2.0


def copies(op: str) -> list[Rate]:
    """Copies that take LATENCY_S, and 1 / LINK_GBPS ns a byte."""
    sizes = probes.COPIES
    return [
        Rate(op, "F32", "CUDA0", 1, n // 4, 1, 1, n, 0, (round(1e9 * LATENCY_S + n / LINK_GBPS),))
        for n in sizes
    ]


def of_device(name: str) -> Ceilings:
    """A device that reads, multiplies and attends at its rates, at any number of tokens."""
    is_cpu = name == "CPU"
    rates = [
        *(rate(MUL_MAT, "Q8_0", n, READS[name], MULTIPLIES[name]) for n in (1, 512)),
        *(rate(ATTENTION, "F16", n, 1e6, ATTENDS[name]) for n in (1, 512)),
        *([] if is_cpu else [*copies(UPLOAD), *copies(DOWNLOAD)]),
    ]
    return Ceilings(
        "2026-01-01T00:00:00Z", BOTH, not is_cpu, tuple(rates), device=None if is_cpu else name
    )


KNOWN = [of_device(name) for name in READS]


def placed(*counts: tuple[str, int]) -> Placement:
    layers = tuple(name for name, n in counts for _ in range(n))
    return Placement(layers, (Buffer("model", "CPU_Mapped", 1),))


def hop_s(n_values: float, n_copies: int = 1) -> float:
    return n_copies * (LATENCY_S + 4 * n_values / LINK_GBPS / 1e9)


def attention_s(name: str, n_layers: float, n_tokens: int, n_past: int) -> float:
    pairs = n_tokens * n_past + n_tokens * (n_tokens + 1) / 2
    return n_layers * 4 * (BIG.head_dim or 0) * (BIG.n_head or 0) * pairs / ATTENDS[name] / 1e9


def decode_truth(layers: dict[str, int], output: str, n_past: int) -> dict[str, float]:
    """Seconds of a decode step on each device."""
    truth = {
        name: n * LAYER_BYTES / READS[name] / 1e9 + attention_s(name, n, 1, n_past)
        for name, n in layers.items()
    }
    truth[output] += HEAD_BYTES / READS[output] / 1e9
    return truth


def record_of(
    placement: Placement | None, settings: Any, decode_s: float, n_prompt: int = 512
) -> Record:
    steps = exact_steps(n_prompt, 3, 512, prefill_ms=50, decode_ms=1e3 * decode_s)
    run = make_run(n_prompt, 3, steps=steps, placement=placement)
    return make_record(run, machine=BOTH, model=BIG, settings=settings)


def explained(record: Record, phase: str) -> Any:
    ceilings = probing.need(KNOWN, probing.place_of_record(record), "this")
    (row,) = [
        row for row in explanation.explain([record], ceilings).itertuples() if row.phase == phase
    ]
    return row


def of(row: Any, device: str) -> float:
    """Seconds of a device."""
    return float(
        sum(seconds for name, seconds in row.parts.items() if name.startswith(f"{device} "))
    )


def test_each_device_of_a_decode_step_gets_its_own_part_back() -> None:
    between_s = hop_s(BIG.n_embd or 0) + hop_s(BIG.n_vocab or 0)
    truth = {name: 0.5 * (one + other) for (name, one), other in zip(
        decode_truth({"CPU": 4, "CUDA0": 12}, "CUDA0", 512).items(),
        decode_truth({"CPU": 4, "CUDA0": 12}, "CUDA0", 513).values(), strict=True)}  # fmt: skip
    rest_s = 0.003
    settings = dataclasses.replace(WIDE, n_gpu_layers=13)
    record = record_of(
        placed(("CPU", 4), ("CUDA0", 13)), settings, sum(truth.values()) + between_s + rest_s
    )
    row = explained(record, "decode")
    assert {name: of(row, name) for name in truth} == pytest.approx(truth, rel=1e-3)
    assert row.parts[explanation.BETWEEN] == pytest.approx(between_s)
    assert row.measured_s - row.least_s == pytest.approx(rest_s, rel=1e-3)
    sentence = sentences.where_it_went(row)
    for name in (
        "CPU layers",
        "CUDA0 layers",
        "CUDA0 output",
        "CUDA0 attention",
        "between devices",
        "rest",
    ):
        assert f"{name} " in sentence
    assert "CPU output" not in sentence


def test_each_device_of_a_prefill_gets_its_own_part_back() -> None:
    """The last feed-forward and the output work for one token only, on the device that has them."""
    settings = dataclasses.replace(WIDE, n_gpu_layers=13, op_offload=False)
    row = explained(record_of(placed(("CPU", 4), ("CUDA0", 13)), settings, 0.01), "prefill")
    step = cost.step(BIG, 512, 0, 1)
    assert step is not None
    matrices = [m for m in shape.matrices(BIG) or () if m.part != EMBEDDING]
    of_layer = sum(2 * m.rows * m.columns * m.n for m in matrices) / N_LAYER * 512
    assert row.parts["CPU layers"] == pytest.approx(
        4 * of_layer / MULTIPLIES["CPU"] / 1e9, rel=1e-3
    )
    assert row.parts["CPU attention"] == pytest.approx(attention_s("CPU", 4, 512, 0), rel=1e-3)
    assert row.parts["CPU output"] == 0 and row.parts["CUDA0 output"] > 0
    on_gpu = step.layer_flops - 4 * of_layer
    assert row.parts["CUDA0 layers"] == pytest.approx(on_gpu / MULTIPLIES["CUDA0"] / 1e9, rel=0.01)
    assert row.parts[explanation.BETWEEN] == pytest.approx(
        hop_s(512 * (BIG.n_embd or 0)) + hop_s(BIG.n_vocab or 0)
    )


def test_a_gpu_takes_weights_of_the_cpu_for_many_tokens() -> None:
    settings = dataclasses.replace(WIDE, n_gpu_layers=13)
    placement = placed(("CPU", 4), ("CUDA0", 13))
    kept = explained(
        record_of(placement, dataclasses.replace(settings, op_offload=False), 0.01), "prefill"
    )
    moved = explained(record_of(placement, settings, 0.01), "prefill")
    assert moved.parts["CPU layers"] == 0
    assert moved.parts["CPU attention"] > 0  # its cache stays
    weights_s = 4 * LAYER_BYTES / LINK_GBPS / 1e9 + LATENCY_S
    assert moved.parts[explanation.BETWEEN] == pytest.approx(
        kept.parts[explanation.BETWEEN] + weights_s, rel=1e-3
    )


def test_two_gpus_are_not_explained() -> None:
    record = record_of(
        placed(("CUDA1", 8), ("CUDA0", 9)), dataclasses.replace(WIDE, n_gpu_layers=17), 0.05
    )
    with pytest.raises(LabError, match=r"for one GPU, .* not for CUDA0 and CUDA1") as problem:
        explained(record, "decode")
    assert problem.value.hint == "Choose one: --device CUDA0"
    assert step_prediction.prediction_for(record, KNOWN, []) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_gpu_layers": 0}, {None: 17}),
        ({"n_gpu_layers": 5, "devices": ("CUDA0",)}, {None: 12, "CUDA0": 5}),
        ({"n_gpu_layers": 99, "devices": ("CUDA0",)}, {"CUDA0": 17}),
        ({"n_gpu_layers": 17}, {"CUDA0": 12, "CUDA1": 5}),  # by memory: 8 of 12 GB
    ],
)
def test_without_a_placement_layers_lie_by_llama_cpps_rule(
    changes: dict[str, Any], expected: dict[str | None, int]
) -> None:
    settings = dataclasses.replace(WIDE, **changes)
    layers = probing.layers(BOTH, BIG, settings)
    assert len(layers) == N_LAYER + 1
    assert {name: layers.count(name) for name in dict.fromkeys(layers)} == expected
    assert list(dict.fromkeys(layers)) == [*expected]


def test_on_a_gpu_sequences_in_one_cache_attend_to_all_positions() -> None:
    seconds = {}
    for name, unified in itertools.product(("CUDA0", None), (False, True)):
        settings = dataclasses.replace(WIDE, n_gpu_layers=17 if name else 0, kv_unified=unified)
        place = probing.Where(BOTH, (name,))
        known = probing.need(KNOWN, place, "this")
        parts = step_kernels.parts(BIG, settings, known, 1, 511, 3, [(1, 511)] * 2)
        seconds[name, unified] = parts.total.attention_s
    assert seconds["CUDA0", True] == pytest.approx(3 * seconds["CUDA0", False])
    assert seconds[None, True] == pytest.approx(
        seconds[None, False]
    )  # flash attention of the CPU skips what is masked


# What single prefill steps do not tell


END = dataclasses.replace(WIDE, prefill_wait="end")


def test_sums_teach_where_single_steps_do_not() -> None:
    """Predictions from runs whose prefill was waited for once are those of the same times step by step."""
    even = record_of(None, WIDE, 0.2, 2048)
    steps = even.run.steps
    total = steps.ready_ns[3]
    late = dataclasses.replace(
        steps,
        start_ns=(0, 10, 20, 30, *steps.start_ns[4:]),
        ready_ns=(10, 20, 30, total, *steps.ready_ns[4:]),
        end_ns=(10, 20, 30, *steps.end_ns[3:]),
    )
    once = dataclasses.replace(even, run=dataclasses.replace(even.run, steps=late), settings=END)
    points = [
        next(p for p in learning.learn([record], KNOWN[0]).points if p.case.phase == "prefill")
        for record in (even, once)
    ]
    assert (
        points[0].seconds == pytest.approx(points[1].seconds) and points[0].costs == points[1].costs
    )
    rows = [next(explanation.explain([record], KNOWN[0]).itertuples()) for record in (even, once)]
    assert (
        rows[0].measured_s == pytest.approx(rows[1].measured_s)
        and rows[0].least_s == rows[1].least_s
    )
