"""Layers on a GPU and on the CPU: whose ceilings count for what. Exact on made-up devices."""

import dataclasses
import itertools
from typing import Any

import pytest

from lab.core import cost
from lab.core.matrices import EMBEDDING, matrices_of
from lab.core.record import Buffer, Ceilings, Device, Placement, Rate, Record
from lab.errors import LabError
from lab.features.explain import sentences
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, UPLOAD
from lab.roofline import explanation, learning, probes, probing, step_prediction
from lab.roofline.step_kernels import StepKernels
from tests.support.rates import BIG, WIDE, rate
from tests.support.records import MACHINE, exact_steps, make_record, make_run

GPU = Device("CUDA0", "Test GPU", "gpu", 8 * 10**9)
SMALL = Device("CUDA1", "Small GPU", "gpu", 4 * 10**9)
BOTH = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, GPU, SMALL))
N_LAYER = BIG.n_layer or 0
LAYER_BYTES = sum(m.n_bytes for m in matrices_of(BIG) or () if m.part != EMBEDDING) / N_LAYER
HEAD_BYTES = sum(m.n_bytes for m in matrices_of(BIG) or () if m.part == EMBEDDING)
READS = {
    "CPU": 10.0,
    "CUDA0": 100.0,
    "CUDA1": 20.0,
}
MULTIPLIES = {
    "CPU": 100.0,
    "CUDA0": 1000.0,
    "CUDA1": 200.0,
}
ATTENDS = {
    "CPU": 5.0,
    "CUDA0": 50.0,
    "CUDA1": 10.0,
}
LATENCY_S = 1e-4
LINK_GBPS = 2.0


def copies(op: str) -> list[Rate]:
    """Copies that take LATENCY_S, and 1 / LINK_GBPS ns a byte."""
    rates = []
    for n_bytes in probes.COPIES:
        ns = round(1e9 * LATENCY_S + n_bytes / LINK_GBPS)
        rates.append(Rate(op, "F32", "CUDA0", 1, n_bytes // 4, 1, 1, n_bytes, 0, (ns,)))
    return rates


def of_device(name: str) -> Ceilings:
    """A device that reads, multiplies and attends at its rates, at any number of tokens."""
    rates = []
    for n_tokens in (1, 512):
        rates.append(rate(MUL_MAT, "Q8_0", n_tokens, READS[name], MULTIPLIES[name]))
        rates.append(rate(ATTENTION, "F16", n_tokens, 1e6, ATTENDS[name]))
    measured_at = "2026-01-01T00:00:00Z"
    if name == "CPU":
        return Ceilings(measured_at, BOTH, False, tuple(rates))
    rates += [*copies(UPLOAD), *copies(DOWNLOAD)]
    return Ceilings(measured_at, BOTH, True, tuple(rates), device=name)


CEILINGS = [of_device(name) for name in READS]


def placed(*counts: tuple[str, int]) -> Placement:
    layers: list[str] = []
    for name, n_layers in counts:
        layers += [name] * n_layers
    return Placement(tuple(layers), (Buffer("model", "CPU_Mapped", 1),))


def hop_s(n_values: float, n_copies: int = 1) -> float:
    return n_copies * (LATENCY_S + 4 * n_values / LINK_GBPS / 1e9)


def attention_s(
    name: str,
    n_layers: float,
    n_tokens: int,
    n_past: int,
) -> float:
    pairs = n_tokens * n_past + n_tokens * (n_tokens + 1) / 2
    return n_layers * 4 * (BIG.head_dim or 0) * (BIG.n_head or 0) * pairs / ATTENDS[name] / 1e9


def decode_truth(
    layers: dict[str, int],
    output: str,
    n_past: int,
) -> dict[str, float]:
    """Seconds of a decode step on each device."""
    truth = {}
    for name, n_layers in layers.items():
        weights_s = n_layers * LAYER_BYTES / READS[name] / 1e9
        truth[name] = weights_s + attention_s(name, n_layers, 1, n_past)
    truth[output] += HEAD_BYTES / READS[output] / 1e9
    return truth


def record_of(
    placement: Placement | None, settings: Any, decode_s: float, n_prompt: int = 512
) -> Record:
    steps = exact_steps(n_prompt, 3, 512, prefill_ms=50, decode_ms=1e3 * decode_s)
    run = make_run(
        n_prompt,
        3,
        steps=steps,
        placement=placement,
    )
    return make_record(
        run,
        machine=BOTH,
        model=BIG,
        settings=settings,
    )


def explained(record: Record, phase: str) -> Any:
    ceilings = probing.need(CEILINGS, probing.place_of_record(record), "this")
    rows = explanation.explain([record], ceilings)
    (row,) = rows[rows.phase == phase].itertuples()
    return row


def of(row: Any, device: str) -> float:
    """Seconds of a device."""
    total = 0.0
    for name, seconds in row.parts.items():
        if name.startswith(f"{device} "):
            total += seconds
    return total


def test_each_device_of_a_decode_step_gets_its_own_part_back() -> None:
    between_s = hop_s(BIG.n_embd or 0) + hop_s(BIG.n_vocab or 0)
    first = decode_truth({"CPU": 4, "CUDA0": 12}, "CUDA0", 512)
    second = decode_truth({"CPU": 4, "CUDA0": 12}, "CUDA0", 513)
    truth = {name: (first[name] + second[name]) / 2 for name in first}
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
    matrices = [m for m in matrices_of(BIG) or () if m.part != EMBEDDING]
    of_layer = sum(2 * m.rows * m.columns * m.n for m in matrices) / N_LAYER * 512
    assert row.parts["CPU layers"] == pytest.approx(
        4 * of_layer / MULTIPLIES["CPU"] / 1e9, rel=1e-3
    )
    assert row.parts["CPU attention"] == pytest.approx(attention_s("CPU", 4, 512, 0), rel=1e-3)
    assert row.parts["CPU output"] == 0
    assert row.parts["CUDA0 output"] > 0
    on_gpu = step.layer_flops - 4 * of_layer
    assert row.parts["CUDA0 layers"] == pytest.approx(
        on_gpu / MULTIPLIES["CUDA0"] / 1e9, rel=0.01
    )
    assert row.parts[explanation.BETWEEN] == pytest.approx(
        hop_s(512 * (BIG.n_embd or 0)) + hop_s(BIG.n_vocab or 0)
    )


def test_a_gpu_takes_weights_of_the_cpu_for_many_tokens() -> None:
    settings = dataclasses.replace(WIDE, n_gpu_layers=13)
    placement = placed(("CPU", 4), ("CUDA0", 13))
    without_offload = dataclasses.replace(settings, op_offload=False)
    stayed = explained(record_of(placement, without_offload, 0.01), "prefill")
    moved = explained(record_of(placement, settings, 0.01), "prefill")
    assert moved.parts["CPU layers"] == 0
    assert moved.parts["CPU attention"] > 0  # its cache stays
    weights_s = 4 * LAYER_BYTES / LINK_GBPS / 1e9 + LATENCY_S
    between_s = stayed.parts[explanation.BETWEEN] + weights_s
    assert moved.parts[explanation.BETWEEN] == pytest.approx(between_s, rel=1e-3)


def test_two_gpus_are_not_explained() -> None:
    record = record_of(
        placed(("CUDA1", 8), ("CUDA0", 9)), dataclasses.replace(WIDE, n_gpu_layers=17), 0.05
    )
    with pytest.raises(LabError, match=r"for one GPU, .* not for CUDA0 and CUDA1") as problem:
        explained(record, "decode")
    assert problem.value.hint == "Choose one: --device CUDA0"
    assert step_prediction.prediction_for(record, CEILINGS, []) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"n_gpu_layers": 0}, {None: 17}),
        (
            {
                "n_gpu_layers": 5,
                "devices": ("CUDA0",),
            },
            {None: 12, "CUDA0": 5},
        ),
        (
            {
                "n_gpu_layers": 99,
                "devices": ("CUDA0",),
            },
            {"CUDA0": 17},
        ),
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
        settings = dataclasses.replace(
            WIDE,
            n_gpu_layers=17 if name else 0,
            kv_unified=unified,
        )
        place = probing.Where(BOTH, (name,))
        ceilings = probing.need(CEILINGS, place, "this")
        parts = StepKernels(BIG, settings, ceilings).parts(1, 511, 3, [(1, 511)] * 2)
        seconds[name, unified] = parts.total.attention_s
    assert seconds["CUDA0", True] == pytest.approx(3 * seconds["CUDA0", False])
    # Flash attention of the CPU skips what is masked.
    assert seconds[None, True] == pytest.approx(seconds[None, False])


# What single prefill steps do not tell


END = dataclasses.replace(WIDE, prefill_wait="end")


def test_sums_teach_where_single_steps_do_not() -> None:
    """What is learned from a prefill that was waited for once is what its steps would teach."""
    even = record_of(None, WIDE, 0.2, 2048)
    steps = even.run.steps
    total = steps.ready_ns[3]
    late = dataclasses.replace(
        steps,
        start_ns=(0, 10, 20, 30, *steps.start_ns[4:]),
        ready_ns=(10, 20, 30, total, *steps.ready_ns[4:]),
        end_ns=(10, 20, 30, *steps.end_ns[3:]),
    )
    once = dataclasses.replace(
        even,
        run=dataclasses.replace(even.run, steps=late),
        settings=END,
    )
    (even_point, once_point) = map(prefill_point, (even, once))
    assert even_point.seconds == pytest.approx(once_point.seconds)
    assert even_point.costs == once_point.costs
    even_row = explained(even, "prefill")
    once_row = explained(once, "prefill")
    assert even_row.measured_s == pytest.approx(once_row.measured_s)
    assert even_row.least_s == once_row.least_s


def prefill_point(record: Record) -> learning.Point:
    """What a record's prefill teaches."""
    points = learning.learn([record], CEILINGS[0]).points
    return next(point for point in points if point.case.phase == "prefill")
