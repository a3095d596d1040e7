"""The arithmetic of the roofline, exact on a model and on rates that can be added up by hand."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from lab.core import cost, drafts, shown
from lab.core.matrices import (
    ATTENTION as IN_ATTENTION,
    EMBEDDING,
    EXPERTS,
    FEED_FORWARD,
    Matrix,
)
from lab.core.record import Model, Rate, Record, Settings, Steps
from lab.errors import LabError
from lab.process.wire import (
    MUL_MAT,
    MUL_MAT_ID,
    PLAIN_ATTENTION,
    UPLOAD,
)
from lab.roofline import explanation, gains, kernel_rates, step_kernels
from lab.roofline.explanation import KERNEL, OVERHEAD, TRAFFIC
from lab.roofline.probes import READ
from lab.roofline.step_kernels import StepKernels
from tests.support.ceilings import (
    ATTENTION_BYTES,
    FFN_BYTES,
    HEAD_BYTES,
    ON_CPU,
    ON_GPU,
    TINY,
    WITH_GPU,
    attention,
    ceilings,
    product,
)
from tests.support.records import SETTINGS, make_record, make_run

FLOPS_OF_PAIR = 4 * 4 * 4 * 16
"""FLOPs of attention for a token and a position: 4 layers, 4 heads, keys and values of 16."""


def ns(seconds: float) -> float:
    return 1e9 * seconds


BOTH = dataclasses.replace(
    ON_GPU, others=(dataclasses.replace(ON_CPU, machine=WITH_GPU, others=None),)
)
HALF = (None, None, "CUDA0", "CUDA0", "CUDA0")
"""The device of each layer and of the output."""


# The kernels of a step


def test_a_decode_step_reads_all_weights_once_with_its_threads() -> None:
    settings = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=2)
    rates = (
        product(1, 10, n_threads=1),
        product(1, 6, n_threads=2),
        attention(1, 3, n_threads=1),
        attention(1, 2, n_threads=2),
    )
    kernels = StepKernels(TINY, settings, ceilings(*rates)).total(1, 9, 1)
    assert ns(kernels.layers_s) == pytest.approx(10 * (ATTENTION_BYTES + FFN_BYTES))
    assert ns(kernels.head_s) == pytest.approx(10 * HEAD_BYTES)
    assert ns(kernels.attention_s) == pytest.approx(3 * FLOPS_OF_PAIR * 10)
    assert kernels.between_s == 0
    assert kernels.total_s == kernels.layers_s + kernels.head_s + kernels.attention_s


def test_a_prefill_step_has_one_token_in_the_last_feed_forward() -> None:
    settings = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=2)
    rates = (
        product(1, 10, n_threads=1),
        product(1, 6, n_threads=2),
        product(32, 20, n_threads=2),
        attention(32, 2, n_threads=2),
    )
    kernels = StepKernels(TINY, settings, ceilings(*rates)).total(32, 5, 1)
    two = StepKernels(TINY, settings, ceilings(*rates)).total(2, 5, 2)
    both = dataclasses.replace(settings, n_threads=2)  # two tokens have the threads of a batch
    assert two == StepKernels(TINY, both, ceilings(*rates)).total(2, 5, 2)
    of_many = ATTENTION_BYTES + 0.75 * FFN_BYTES
    assert ns(kernels.layers_s) == pytest.approx(20 * of_many + 6 * 0.25 * FFN_BYTES)
    assert ns(kernels.head_s) == pytest.approx(6 * HEAD_BYTES)
    assert ns(kernels.attention_s) == pytest.approx(2 * FLOPS_OF_PAIR * (32 * 5 + 32 * 33 / 2))


def test_types_with_little_of_the_bytes_need_no_probe() -> None:
    small = Matrix(FEED_FORWARD, "F32", 1, 64, 4.0)
    model = dataclasses.replace(TINY, matrices=(*(TINY.matrices or ()), small))
    assert StepKernels(model, SETTINGS, ON_CPU).total(1, 0, 1) == StepKernels(
        TINY, SETTINGS, ON_CPU
    ).total(1, 0, 1)


def test_equal_sequences_cost_their_attention_each() -> None:
    single = StepKernels(TINY, SETTINGS, ON_CPU).total(1, 9, 1)
    four = StepKernels(TINY, SETTINGS, ON_CPU).total(1, 9, 4, [(1, 9), (1, 9), (1, 19)])
    n_pairs = 10 + 10 + 10 + 20
    assert ns(four.attention_s) == pytest.approx(3 * FLOPS_OF_PAIR * n_pairs)
    assert four.layers_s == pytest.approx(single.layers_s / 2)  # 4 tokens: 10 / 4 ** 0.5


def test_without_flash_attention_the_cpu_attends_to_other_sequences_too() -> None:
    plain = dataclasses.replace(SETTINGS, flash_attn_resolved="off", kv_unified=True)
    flash = dataclasses.replace(SETTINGS, kv_unified=True)
    seconds = []
    for settings in (plain, flash):
        step = StepKernels(TINY, settings, ON_CPU).total(1, 9, 2, [(1, 19)])
        seconds.append(ns(step.attention_s))
    assert seconds == pytest.approx([3 * FLOPS_OF_PAIR * 60, 3 * FLOPS_OF_PAIR * 30])


def test_layers_count_on_their_device_and_the_hidden_state_moves_between() -> None:
    parts = StepKernels(TINY, SETTINGS, BOTH, HALF).parts(1, 9, 1)
    assert list(parts.by_device) == [None, "CUDA0"]
    cpu = parts.by_device[None]
    gpu = parts.by_device["CUDA0"]
    # three feed-forwards of layers 1 to 3, and the last one: 1.5 of 4 layers, as attention 2 of 4
    in_blocks = ATTENTION_BYTES / 2 + 0.75 * FFN_BYTES * 2 / 3
    assert ns(cpu.layers_s) == pytest.approx(10 * in_blocks)
    assert ns(gpu.layers_s) == pytest.approx(ATTENTION_BYTES + FFN_BYTES - in_blocks)
    assert cpu.head_s == 0
    assert ns(gpu.head_s) == pytest.approx(HEAD_BYTES)
    assert ns(cpu.attention_s) == pytest.approx(3 * FLOPS_OF_PAIR * 10 / 2)
    assert ns(gpu.attention_s) == pytest.approx(0.5 * FLOPS_OF_PAIR * 10 / 2)
    hidden_ns = 1000 + 0.25 * 4 * 64
    logits_ns = 2000 + 0.5 * 4 * 1000
    assert ns(parts.between_s) == pytest.approx(hidden_ns + logits_ns, rel=1e-3)
    total = parts.total
    assert total.layers_s == cpu.layers_s + gpu.layers_s
    assert total.head_s == cpu.head_s + gpu.head_s
    assert total.attention_s == cpu.attention_s + gpu.attention_s
    assert total.between_s == parts.between_s


def test_the_last_feed_forward_is_on_the_device_of_the_last_layer() -> None:
    layers = (None, None, None, "CUDA0", None)
    parts = StepKernels(TINY, SETTINGS, BOTH, layers).parts(1, 9, 1)
    on_gpu = ATTENTION_BYTES / 4 + FFN_BYTES / 4
    assert ns(parts.by_device["CUDA0"].layers_s) == pytest.approx(on_gpu)
    assert parts.by_device["CUDA0"].head_s == 0
    assert ns(parts.by_device[None].head_s) == pytest.approx(10 * HEAD_BYTES)


def test_a_model_of_one_layer_has_a_feed_forward_too() -> None:
    model = dataclasses.replace(TINY, n_layer=1)
    parts = StepKernels(model, SETTINGS, BOTH, ("CUDA0", None)).parts(1, 9, 1)
    weights = ATTENTION_BYTES + FFN_BYTES
    assert ns(parts.by_device["CUDA0"].layers_s) == pytest.approx(weights)


def test_a_model_of_two_layers_has_half_of_its_weights_in_each() -> None:
    model = dataclasses.replace(TINY, n_layer=2)
    parts = StepKernels(model, SETTINGS, BOTH, ("CUDA0", None, None)).parts(1, 9, 1)
    half = (ATTENTION_BYTES + FFN_BYTES) / 2
    assert ns(parts.by_device["CUDA0"].layers_s) == pytest.approx(half)
    assert ns(parts.by_device[None].layers_s) == pytest.approx(10 * half)


def test_attention_is_that_of_the_type_of_the_keys() -> None:
    settings = dataclasses.replace(SETTINGS, type_v="q8_0")  # which was not probed
    alike = StepKernels(TINY, SETTINGS, ON_CPU).total(1, 9, 1).attention_s
    assert StepKernels(TINY, settings, ON_CPU).total(1, 9, 1).attention_s == alike


def test_a_step_without_outputs_copies_no_logits() -> None:
    parts = StepKernels(TINY, SETTINGS, BOTH, HALF).parts(8, 0, 0)
    assert ns(parts.between_s) == pytest.approx(1000 + 0.25 * 4 * 64 * 8, rel=1e-3)
    back = StepKernels(TINY, SETTINGS, BOTH, ("CUDA0", None, None, None, None)).parts(8, 0, 3)
    up_and_down_ns = 1000 + 2000 + (0.25 + 0.5) * 4 * 64 * 8
    assert ns(back.between_s) == pytest.approx(up_and_down_ns, rel=1e-3)
    last = StepKernels(TINY, SETTINGS, BOTH, (None,) * 4 + ("CUDA0",)).parts(8, 0, 3)
    assert last.by_device[None].head_s == 0
    output_ns = 1000 + 2000 + 0.25 * 4 * 64 * 3 + 0.5 * 4 * 1000 * 3
    assert ns(last.between_s) == pytest.approx(output_ns, rel=1e-3)


@pytest.mark.parametrize(
    ("n_tokens", "changes", "buffer", "is_uploaded"),
    [
        (32, {}, "CPU", True),
        (31, {}, "CPU", False),
        (32, {"op_offload": False}, "CPU", False),
        (32, {}, "CPU_REPACK", False),
    ],
)
def test_many_tokens_take_weights_of_the_cpu_to_the_gpu(
    n_tokens: int, changes: dict[str, Any], buffer: str, is_uploaded: bool
) -> None:
    settings = dataclasses.replace(SETTINGS, **changes)
    rates = [dataclasses.replace(rate, buffer=buffer) for rate in ON_CPU.rates]
    rates.append(product(1, 1, "Q4_0", buffer="CPU_REPACK"))  # of other weights
    split = dataclasses.replace(BOTH, others=(ceilings(*rates, here=WITH_GPU),))
    parts = StepKernels(TINY, settings, split, HALF).parts(n_tokens, 0, 0)
    uploaded_bytes = ATTENTION_BYTES / 2 + 0.75 * FFN_BYTES * 2 / 3
    between_ns = 1000 + 0.25 * 4 * 64 * n_tokens
    if is_uploaded:
        between_ns += 1000 + 0.25 * uploaded_bytes
        assert parts.by_device[None].layers_s == 0
    assert ns(parts.between_s) == pytest.approx(between_ns, rel=1e-3)
    assert (parts.by_device[None].layers_s == 0) == is_uploaded


def test_a_cache_and_experts_can_stay_on_the_cpu() -> None:
    settings = dataclasses.replace(SETTINGS, kv_offload=False)
    parts = StepKernels(TINY, settings, BOTH, ("CUDA0",) * 5).parts(1, 9, 1)
    assert parts.by_device["CUDA0"].attention_s == 0
    assert ns(parts.by_device[None].attention_s) == pytest.approx(3 * FLOPS_OF_PAIR * 10)
    experts: dict[str, Any] = {"n_expert": 4, "n_expert_used": 2}
    rates: dict[str, Any] = {"op": MUL_MAT_ID, **experts}
    cpu = ceilings(*ON_CPU.rates, product(1, 40, **rates), here=WITH_GPU)
    gpu = dataclasses.replace(
        ON_GPU,
        rates=(*ON_GPU.rates, product(1, 4, **rates)),
        others=(cpu,),
    )
    model = dataclasses.replace(
        TINY,
        n_expert_used=2,
        matrices=(
            TINY.matrices[0],  # type: ignore[index]
            TINY.matrices[1],  # type: ignore[index]
            Matrix(EXPERTS, "Q8_0", 128, 64, 12.0, 4),
        ),
    )
    moved = dataclasses.replace(SETTINGS, n_cpu_moe=2)
    parts = StepKernels(model, moved, gpu, ("CUDA0",) * 5).parts(1, 9, 1)
    overridden = dataclasses.replace(SETTINGS, override_tensor=(r"blk\.[01]\..*exps=CPU",))
    assert StepKernels(model, overridden, gpu, ("CUDA0",) * 5).parts(1, 9, 1) == parts
    in_first_three = 0.75 * FFN_BYTES * 2  # two of four experts are read
    assert ns(parts.by_device[None].layers_s) == pytest.approx(40 * in_first_three * 2 / 3)
    on_gpu = ATTENTION_BYTES + 4 * (2 * FFN_BYTES - in_first_three * 2 / 3)
    assert ns(parts.by_device["CUDA0"].layers_s) == pytest.approx(on_gpu)


def test_what_is_not_known_or_not_measured_is_said() -> None:
    uncounted = dataclasses.replace(TINY, uncounted="recurrent layers")
    with pytest.raises(LabError, match=r"header \(recurrent layers\)"):
        StepKernels(uncounted, SETTINGS, ON_CPU).total(1, 0, 1)
    with pytest.raises(LabError, match="cannot be derived from its header"):
        step_kernels.known(cost.step(uncounted, 1, 0, 1), uncounted)
    with pytest.raises(LabError, match="cost of a step of tiny cannot be derived"):
        StepKernels(dataclasses.replace(TINY, n_head=None), SETTINGS, ON_CPU).total(1, 0, 1)
    with pytest.raises(LabError, match="ceilings of CUDA1 have not been measured"):
        StepKernels(TINY, SETTINGS, BOTH, ("CUDA1",) * 5).parts(1, 0, 1)
    alone = dataclasses.replace(ON_CPU, others=(dataclasses.replace(ON_GPU, device="CUDA7"),))
    with pytest.raises(LabError, match="ceilings of CUDA0 have not been measured"):
        StepKernels(TINY, SETTINGS, alone, HALF).parts(1, 0, 1)
    settings = dataclasses.replace(SETTINGS, n_threads=7)
    with pytest.raises(LabError, match="of Q8_0 with 7 threads have") as problem:
        StepKernels(TINY, settings, ON_CPU).total(1, 0, 1)
    assert problem.value.hint.endswith(" --types Q8_0 --threads 7")
    mixed = dataclasses.replace(
        TINY, matrices=(*(TINY.matrices or ()), Matrix(FEED_FORWARD, "Q4_0", 128, 64, 9.0))
    )
    with pytest.raises(LabError, match="of Q4_0 with 2 threads have"):
        kernel_rates.product_s_per_byte(
            ceilings(
                product(1, 1),
                product(1, 1, "Q4_0", n_threads=9),
            ),
            mixed,
            of_type("Q4_0"),
            1,
            2,
        )
    no_attention = ceilings(product(1, 1))
    with pytest.raises(LabError, match="attention on a F16 cache with 2 threads") as problem:
        StepKernels(TINY, SETTINGS, no_attention).total(1, 0, 1)
    assert problem.value.hint.endswith(" -ctk f16 --threads 2")
    with pytest.raises(LabError, match="copies to and from CUDA0"):
        kernel_rates.copy_s(ceilings(product(1, 1), device="CUDA0"), UPLOAD, 1)
    with pytest.raises(LabError, match="of Q4_0 on CUDA0 have not been"):
        kernel_rates.product_s_per_byte(
            dataclasses.replace(ON_GPU, others=None), TINY, of_type("Q4_0"), 1, 2
        )


def of_type(
    kind: str,
    rows: int = 128,
    columns: int = 64,
) -> Matrix:
    return Matrix(FEED_FORWARD, kind, rows, columns, 1.0)


def test_between_sizes_of_step_times_are_interpolated_on_logarithms() -> None:
    best = ceilings(
        product(2, 16),
        product(8, 4),
        product(32, 4),
    )
    at = {
        n: 1e9 * kernel_rates.product_s_per_byte(best, TINY, of_type("Q8_0"), n, 2)
        for n in (1, 2, 4, 8, 16, 32, 99)
    }
    assert at == pytest.approx(
        {
            1: 16,
            2: 16,
            4: 8,
            8: 4,
            16: 4,
            32: 4,
            99: 4,
        }
    )


def test_of_two_probes_of_a_shape_the_faster_counts() -> None:
    best = ceilings(product(1, 5), product(1, 2), product(1, 3))
    s_per_byte = kernel_rates.product_s_per_byte(best, TINY, of_type("Q8_0"), 1, 2)
    assert s_per_byte == pytest.approx(2e-9)


def test_the_shape_most_like_a_matrix_counts_and_one_of_few_sizes_only_there() -> None:
    best = ceilings(
        product(1, 1),
        product(64, 1),
        *(product(n, 5, rows=512) for n in (1, 8, 64)),
        *(product(n, 9, rows=128, columns=4096) for n in (1, 8, 64)),
    )
    of_shape = {}
    for rows, columns, n_tokens in (
        (128, 64, 1),
        (128, 64, 64),
        (128, 64, 8),
        (128, 64, 16),
        (255, 64, 1),
        (257, 64, 1),
        (512, 64, 1),
        (128, 2048, 1),
    ):
        matrix = of_type("Q8_0", rows, columns)
        s_per_byte = kernel_rates.product_s_per_byte(best, TINY, matrix, n_tokens, 2)
        of_shape[rows, columns, n_tokens] = round(1e9 * s_per_byte, 6)
    assert list(of_shape.values()) == [1, 1, 5, 5, 1, 5, 5, 9]


def test_attention_of_equal_heads_per_key_is_nearer_than_of_equal_width() -> None:
    best = ceilings(
        attention(1, 2, rows=8, n_head_kv=8),
        attention(1, 3, rows=8, n_head_kv=1),
        attention(1, 7, rows=8, n_head_kv=4),
    )
    heads: Any = SimpleNamespace(n_head=4, n_head_kv=2, head_dim=TINY.head_dim)
    points = kernel_rates.attention_points(best, TINY, heads, "F16", 2, True)
    assert points == {1: {1: pytest.approx(7e-9)}}


def test_attention_is_interpolated_over_positions_and_queries() -> None:
    best = ceilings(
        attention(1, 16, n_positions=100),
        attention(1, 4, n_positions=1600),
        attention(64, 1, n_positions=100),
        attention(
            1,
            2,
            n_positions=100,
            op=PLAIN_ATTENTION,
        ),
        attention(
            1,
            1,
            n_positions=100,
            type="Q8_0",
            flops=0,
        ),
    )
    heads = SimpleNamespace(n_head=4, n_head_kv=2, head_dim=TINY.head_dim)
    asked: Any = (best, TINY, heads)

    def ns_per_flop(*size: Any) -> float:
        return 1e9 * kernel_rates.attention_s_per_flop(*asked, *size)

    assert ns_per_flop("F16", 1, 2, 400) == pytest.approx(8)
    assert ns_per_flop("F16", 8, 2, 100) == pytest.approx(4)
    assert ns_per_flop("F16", 1, 2, 100, False) == pytest.approx(2)
    assert ns_per_flop("Q8_0", 1, 2, 100, False) == math.inf


def test_a_copy_takes_a_constant_and_a_time_for_each_byte() -> None:
    def copy_ns(times_ns: dict[int, int], n_bytes: int) -> float:
        rates = [
            Rate(UPLOAD, "F32", "CUDA0", 1, n, 1, 1, n, 0, (2 * time, time))
            for n, time in times_ns.items()
        ]
        return ns(kernel_rates.copy_s(ceilings(*rates, device="CUDA0"), UPLOAD, n_bytes))

    assert copy_ns({1000: 700, 5000: 1500}, 2000) == pytest.approx(500 + 0.2 * 2000)
    assert copy_ns({1000: 700}, 2000) == pytest.approx(1400)
    assert copy_ns({1000: 700, 5000: 600}, 2000) == pytest.approx(
        700
    )  # never faster with more
    assert copy_ns({1000: 100, 2000: 500}, 4000) == pytest.approx(
        0.4 * 4000
    )  # no constant below 0


def test_the_roof_is_the_best_of_all_kernels_by_shares_of_the_layers() -> None:
    fast_read = Rate(READ, "I64", "numpy", 1, 1, 1, 2, 1000, 0, (20, 25))
    cpu = ceilings(
        product(1, 0.1),
        product(8, 0.01),
        fast_read,
        here=WITH_GPU,
    )
    gpu = ceilings(
        product(1, 0.01),
        attention(1, 1e-6),
        here=WITH_GPU,
        device="CUDA0",
    )
    both = dataclasses.replace(gpu, others=(cpu,))
    assert kernel_rates.roof(cpu) == pytest.approx((200, 50))
    assert kernel_rates.roof(cpu).ridge == pytest.approx(4)
    on_gpu = (10**6, 100)
    assert kernel_rates.roof(both) == pytest.approx(on_gpu)
    assert kernel_rates.roof(both, ("CUDA9", None)) == pytest.approx(on_gpu)
    assert kernel_rates.roof(cpu, (None, None)) == pytest.approx((200, 50))
    halves = kernel_rates.roof(both, (None, "CUDA0"))
    assert halves == pytest.approx((2 / (1 / 200 + 1e-6), 2 / (1 / 50 + 1 / 100)))


# What limits a phase


def run_of_two_steps_each(**changes: Any) -> Record:
    """12 prompt tokens in two steps, then two decode steps; times in us, as written below."""
    steps = Steps(
        kind=("prefill", "prefill", "decode", "decode"),
        n_tokens=(8, 4, 1, 1),
        n_past=(0, 8, 12, 13),
        start_ns=(0, 10_000, 25_000, 40_000),
        ready_ns=(8_000, 20_000, 35_000, 52_000),
        end_ns=(9_000, 22_000, 36_000, 55_000),
        n_seq=(1, 1, 1, 1),
        n_outputs=(0, 1, 1, 1),
    )
    return make_record(make_run(12, 3, steps=steps, **changes), model=TINY)


def test_a_phase_is_the_sum_of_its_steps_and_decode_the_mean_of_its_tokens() -> None:
    prefill, decode = explanation.explain([run_of_two_steps_each()], ON_CPU).itertuples()
    assert prefill.phase == "prefill"
    assert decode.phase == "decode"
    assert prefill.n_prompt == 12
    assert prefill.n_gen == 3
    assert prefill.n_steps == 2
    assert decode.n_steps == 2
    assert (ns(prefill.measured_s), ns(decode.measured_s)) == pytest.approx((18_000, 11_000))
    assert (ns(prefill.choosing_s), ns(decode.choosing_s)) == pytest.approx((3_000, 2_000))
    assert (ns(prefill.harness_s), ns(decode.harness_s)) == pytest.approx((1_000, 3_500))
    assert (prefill.of_request, decode.of_request) == pytest.approx((20 / 55, 35 / 55))
    sizes = {
        "prefill": [(8, 0, 0), (4, 8, 1)],
        "decode": [(1, 12, 1), (1, 13, 1)],
    }
    for row, n in ((prefill, 1), (decode, 2)):
        costs = [step_kernels.known(cost.step(TINY, *size), TINY) for size in sizes[row.phase]]
        kernels = [
            StepKernels(TINY, SETTINGS, ON_CPU).total(*size) for size in sizes[row.phase]
        ]
        flops = sum(step.flops for step in costs) / n
        n_bytes = sum(step.n_bytes for step in costs) / n
        assert (row.flops, row.n_bytes) == pytest.approx((flops, n_bytes))
        assert row.least_s == pytest.approx(sum(step.total_s for step in kernels) / n)
        assert row.parts == pytest.approx(
            {
                "layers": sum(step.layers_s for step in kernels) / n,
                "attention": sum(step.attention_s for step in kernels) / n,
                "output": sum(step.head_s for step in kernels) / n,
            }
        )
        assert not row.is_split
        roof = kernel_rates.roof(ON_CPU)
        assert row.arithmetic_s == pytest.approx(flops / roof.gflops / 1e9)
        assert row.traffic_s == pytest.approx(n_bytes / roof.gbps / 1e9)
        assert row.intensity == pytest.approx(flops / n_bytes)
        assert row.gflops == pytest.approx(flops / row.measured_s / 1e9)
        assert row.gbps == pytest.approx(n_bytes / row.measured_s / 1e9)
        assert row.of_ceiling == pytest.approx(row.least_s / row.measured_s)


def test_rows_are_medians_of_runs_by_length_with_prefill_first() -> None:
    quick = [
        make_record(make_run(20, 5, i, decode_ms=ms), model=TINY)
        for i, ms in enumerate((1, 3, 9))
    ]
    longer = make_record(make_run(20, 7), model=TINY)
    shorter = make_record(make_run(10, 5), model=TINY)
    rows = explanation.explain([*quick, longer, shorter], ON_CPU)
    cases = list(zip(rows.n_prompt, rows.n_gen, rows.phase, rows.n_runs, strict=True))
    assert cases == [
        (10, 5, "prefill", 1),
        (10, 5, "decode", 1),
        (20, 5, "prefill", 3),
        (20, 5, "decode", 3),
        (20, 7, "prefill", 1),
        (20, 7, "decode", 1),
    ]
    assert rows.measured_s[3] == pytest.approx(0.003)
    assert not {"is_disturbed", "n_disturbed"} & set(rows.columns)
    with pytest.raises(LabError, match="no run of lab measure with steps"):
        explanation.explain([make_record(make_run(20, 5, status="failed"))], ON_CPU)


def test_parts_of_several_devices_are_named_by_device() -> None:
    steps = [StepKernels(TINY, SETTINGS, BOTH, HALF).parts(1, n, 1) for n in (5, 6)]
    seconds = explanation.by_part(steps, 2)
    names = ["CPU layers", "CPU attention", "CPU output"]
    names += ["CUDA0 layers", "CUDA0 attention", "CUDA0 output", "between devices"]
    assert list(seconds) == names
    cpu = [step.by_device[None] for step in steps]
    assert seconds["CPU layers"] == pytest.approx((cpu[0].layers_s + cpu[1].layers_s) / 2)
    assert seconds["between devices"] == pytest.approx(
        (steps[0].between_s + steps[1].between_s) / 2
    )


@pytest.mark.parametrize(
    ("measured_s", "least_s", "attention_s", "arithmetic_s", "traffic_s", "limit"),
    [
        (10, 5, 1, 1, 1, KERNEL),  # exactly half is outside of the kernels
        (10, 4.9, 1, 1, 1, OVERHEAD),
        (10, 8, 4, 1, 1, KERNEL),  # exactly half of the kernels is attention
        (10, 8, 4.1, 1, 1, "attention (kernel)"),
        (10, 8, 4.1, 4, 1, "attention (arithmetic)"),
        (10, 8, 4.1, 1, 4, "attention (traffic)"),
        (10, 9, 1, 6, 5, "arithmetic"),  # exactly 1.5 times as slow as arithmetic
        (10, 9, 1, 5.9, 5, KERNEL),
        (10, 9, 1, 5, 6, TRAFFIC),
        (10, 9, 1, 6, 6, TRAFFIC),
        (10, 20, 1, 1, 10.7, TRAFFIC),  # the run is faster than the probe of its kernel
    ],
)
def test_what_is_nearest_limits(
    measured_s: float,
    least_s: float,
    attention_s: float,
    arithmetic_s: float,
    traffic_s: float,
    limit: str,
) -> None:
    is_of_attention = attention_s > least_s / 2
    share = 1.0 if is_of_attention else attention_s / least_s  # of the work
    row = SimpleNamespace(
        measured_s=measured_s,
        least_s=least_s,
        attention_s=attention_s,
        attention_arithmetic_s=share * arithmetic_s,
        attention_traffic_s=share * traffic_s,
        arithmetic_s=arithmetic_s,
        traffic_s=traffic_s,
    )
    assert explanation.limit_of(row) == limit


def test_a_phase_above_its_ceiling_is_doubtful() -> None:
    record = run_of_two_steps_each()
    least_s = explanation.explain([record], ON_CPU).least_s[1]
    for factor, is_above in ((1.004, False), (1.006, True)):
        quicker = [
            dataclasses.replace(
                rate, times_ns=(round(rate.times_ns[1] * 11e-6 * factor / least_s),)
            )
            if rate.op == MUL_MAT
            else dataclasses.replace(
                rate, times_ns=(round(rate.times_ns[0] * 11e-6 * factor / least_s),)
            )
            for rate in ON_CPU.rates
        ]
        rows = explanation.explain([record], ceilings(*quicker))
        assert (shown.ABOVE in rows.doubts[1]) == is_above
        assert shown.FEW in rows.doubts[1]


# What would help


def explained_row(
    phase: str, n_prompt: int, measured_s: float, least_s: float, n_gen: int = 5
) -> Any:
    return {
        "phase": phase,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "measured_s": measured_s,
        "least_s": least_s,
        "doubts": (),
    }


def test_a_change_replaces_the_kernels_and_keeps_what_is_beyond_them() -> None:
    faster = [
        dataclasses.replace(
            rate,
            n_threads=1,
            times_ns=(rate.times_ns[0] // 6,),
        )
        for rate in ON_CPU.rates
    ]
    best = ceilings(*ON_CPU.rates, *faster)
    rows = pd.DataFrame(
        [
            explained_row("decode", 20, 0.010, 0.006),
            explained_row("decode", 30, 0.010, 0.008),
            explained_row("prefill", 20, 0.010, 0.001),
        ]
    )
    record = make_record(make_run(20, 5), model=TINY)
    (change,) = gains.changes(rows, record, best)
    settings = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=1)
    old = StepKernels(TINY, SETTINGS, best).total(1, 30, 1).total_s
    new = StepKernels(TINY, settings, best).total(1, 30, 1).total_s
    old_prefill = StepKernels(TINY, SETTINGS, best).total(8, 6, 1).total_s
    new_prefill = StepKernels(TINY, settings, best).total(8, 6, 1).total_s
    assert change.label == "1 thread instead of 2"
    decode = change.gains["decode"]
    prefill = change.gains["prefill"]
    assert decode.n_prompt == 30
    assert prefill.n_prompt == 20
    assert decode.factor == pytest.approx(0.010 / (0.002 + 0.008 * new / old))
    assert prefill.factor == pytest.approx(0.010 / (0.009 + 0.001 * new_prefill / old_prefill))
    assert change.best == change.gains["decode"].factor
    assert change.command is not None
    assert change.command.startswith(
        "lab ab '--threads 2' '--threads 1' --prompt-len 20,30 --gen 5"
    )
    assert "--ubatch 8" in change.command
    assert change.command.count("--threads") == 2
    assert change.figures == {
        "change": "1 thread instead of 2",
        "prefill_gain": change.gains["prefill"].factor,
        "prefill_at": 20,
        "decode_gain": change.gains["decode"].factor,
        "decode_at": 30,
        "command": change.command,
    }
    only_decode = gains.PredictedChange("x", {"decode": gains.Gain(2.0, 9)}, None).figures
    assert only_decode["prefill_gain"] is None
    assert only_decode["prefill_at"] is None
    doubtful = rows.assign(doubts=[(shown.DISTURBED,)] * 3)
    assert gains.changes(doubtful, record, best) == []


@pytest.mark.parametrize(
    ("factor", "is_named"),
    [(1.04, False), (1.06, True)],
)
def test_a_small_gain_is_not_named(factor: float, is_named: bool) -> None:
    faster = [
        dataclasses.replace(
            rate, n_threads=1, times_ns=tuple(round(time / factor) for time in rate.times_ns)
        )
        for rate in ON_CPU.rates
    ]
    rows = pd.DataFrame([explained_row("decode", 20, 0.010, 0.010)])
    record = make_record(make_run(20, 5), model=TINY)
    named = gains.changes(rows, record, ceilings(*ON_CPU.rates, *faster))
    assert bool(named) == is_named


def test_other_types_threads_and_attention_are_changes_where_they_were_probed() -> None:
    best = ceilings(
        *ON_CPU.rates,
        *(product(n, 0.5, "Q4_0") for n in (1, 16)),
        *(product(n, 0.4, "Q5_0", n_threads=3) for n in (1, 16)),  # not with these threads
        *(product(n, 0.3, "Q6_K") for n in (1, 16)),  # 64 columns do not fit its blocks
        *(product(n, 0.3, "F16", rows=99) for n in (1, 16)),  # not in a shape of the model
        *(attention(n, 0.1, op=PLAIN_ATTENTION) for n in (1, 16)),
    )
    rows = pd.DataFrame([explained_row("decode", 2000, 0.010, 0.010)])
    record = make_record(make_run(20, 5), model=TINY)
    changes = {change.label: change for change in gains.changes(rows, record, best)}
    assert set(changes) == {"Q4_0 instead of Q8_0", "flash attention off instead of on"}
    packed = dataclasses.replace(
        TINY,
        matrices=(
            Matrix(EMBEDDING, "Q8_0", 1000, 64, 1),
            Matrix(IN_ATTENTION, "Q4_0", 64, 64, 8.0),
            Matrix(FEED_FORWARD, "Q4_0", 128, 64, 12.0),
        ),
    )
    old = StepKernels(TINY, SETTINGS, best).total(1, 2000, 1).total_s
    new = StepKernels(packed, SETTINGS, best).total(1, 2000, 1).total_s
    assert changes["Q4_0 instead of Q8_0"].best == pytest.approx(old / new)
    assert (
        changes["Q4_0 instead of Q8_0"].command is None
    )  # a file cannot be made in another type
    of_ollama = dataclasses.replace(record, model=dataclasses.replace(TINY, source="ollama"))
    for change in gains.changes(rows, of_ollama, best):
        assert change.label != "Q4_0 instead of Q8_0" or change.command is None
    imported = dataclasses.replace(SETTINGS, flash_attn=None, flash_attn_resolved=None)
    of_import = gains.changes(rows, dataclasses.replace(record, settings=imported), best)
    assert [change.label for change in of_import] == ["Q4_0 instead of Q8_0"]
    off = dataclasses.replace(SETTINGS, flash_attn_resolved="off")
    new = StepKernels(TINY, off, best).total(1, 2000, 1).total_s
    assert changes["flash attention off instead of on"].best == pytest.approx(old / new)


class FixedTimes:
    """Stands in for a prediction: seconds of steps by number of tokens, of prompts by length."""

    def __init__(self, steps: dict[int, float], model: Model = TINY, **settings: Any) -> None:
        self.by_tokens = steps
        self.model = model
        self.settings: Settings = dataclasses.replace(SETTINGS, **settings)
        self.asked: list[Any] = []

    def seconds(
        self,
        n_tokens: int,
        n_past: int,
        n_outputs: int,
        spans: Any = (),
    ) -> float | None:
        self.asked.append((n_tokens, n_past, n_outputs, list(spans)))
        assert n_outputs == n_tokens + len(spans)
        return self.by_tokens.get(n_outputs)

    def prefill(
        self,
        n_tokens: int,
        n_past: int = 0,
        n_outputs: int = 1,
    ) -> float | None:
        self.asked.append((n_tokens, n_past, n_outputs))
        return self.by_tokens.get(n_tokens)


DECODE = SimpleNamespace(n_prompt=20, n_gen=9)


def test_batching_takes_more_sequences_while_each_step_gains_enough() -> None:
    times: Any = FixedTimes(
        {
            1: 1.0,
            2: 1.5,
            4: 2.0,
            8: 3.9,
            16: 9.0,
        },
        n_batch=16,
    )
    gain = gains.batching(DECODE, times)
    assert gain == gains.Batching(4, 2.0, 0.5, 20, 9)  # 8 give 2.05, less than 1.05 x 2 more
    assert times.asked[1] == (1, 23, 2, [(1, 23)])
    few: Any = FixedTimes({1: 1.0, 2: 1.5, 4: 2.0}, n_batch=2)
    assert gains.batching(DECODE, few) == gains.Batching(2, 2 / 1.5, 1 / 1.5, 20, 9)
    none: Any = FixedTimes({1: 1.0, 2: 1.95})
    assert gains.batching(DECODE, none) is None
    exact: Any = FixedTimes({1: 1.05, 2: 2.0})
    assert gains.batching(DECODE, exact) == gains.Batching(2, 1.05, 0.525, 20, 9)
    assert gains.batching(DECODE, FixedTimes({})) is None  # type: ignore[arg-type]


def test_a_cached_prompt_saves_its_share_of_the_measured_time() -> None:
    times: Any = FixedTimes(
        {
            75: 3.0,
            25: 1.0,
            936: 9.0,
            64: 1.0,
            6: 0.05,
            2: 1.0,
        }
    )
    row = SimpleNamespace(n_prompt=100, measured_s=8.0)
    gain = gains.cached_prompt(row, times)
    assert gain == gains.CachedPrompt(75, 25, 8.0, 6.0, 4.0)
    assert gain is not None
    assert gain.n_prompt == 100
    assert times.asked == [(75, 0, 0), (25, 75, 1)]
    long = gains.cached_prompt(SimpleNamespace(n_prompt=1000, measured_s=10.0), times)
    assert long is not None
    assert long.n_cached == 936
    assert long.saved_s == 9.0
    exact = gains.cached_prompt(SimpleNamespace(n_prompt=8, measured_s=1.05), times)
    assert exact is not None
    assert exact.gain == pytest.approx(1.05)
    less: Any = FixedTimes({6: 0.049, 2: 1.0})
    assert gains.cached_prompt(SimpleNamespace(n_prompt=8, measured_s=1.05), less) is None
    windowed: Any = FixedTimes(
        times.by_tokens, dataclasses.replace(TINY, windows=(0, 8, 0, 8))
    )
    assert gains.cached_prompt(row, windowed) is None
    unknown: Any = FixedTimes({75: 3.0})
    assert gains.cached_prompt(row, unknown) is None


def test_drafting_takes_the_draft_length_with_the_largest_gain() -> None:
    times: Any = FixedTimes(
        {
            1: 1.0,
            2: 1.2,
            3: 1.3,
            4: 1.9,
            5: 9.0,
        }
    )
    gain = gains.drafting(DECODE, times)
    assert gain is not None
    expected = drafts.textbook_length(0.8, 2) / 1.3
    least = drafts.break_even(1.3, 0.0, 2)
    assert gain.n_draft == 2
    assert gain.least_acceptance == least
    assert gain.n_prompt == 20
    assert gain.n_gen == 9
    assert gain.gain == pytest.approx(expected)
    assert times.asked[1] == (2, 23, 2, [])
    short = SimpleNamespace(n_prompt=20, n_gen=3)
    one_guess = gains.drafting(short, times)
    assert one_guess is not None
    assert one_guess.n_draft == 1
    narrow: Any = FixedTimes(times.by_tokens, n_ubatch=2)
    assert gains.drafting(DECODE, narrow).n_draft == 1  # type: ignore[union-attr]
    slow: Any = FixedTimes({1: 1.0, 2: 1.8 / 1.04})
    assert gains.drafting(DECODE, slow) is None
    enough: Any = FixedTimes({1: 1.0, 2: 1.8 / 1.06})
    assert gains.drafting(DECODE, enough) is not None
    synthetic: Any = FixedTimes(times.by_tokens, dataclasses.replace(TINY, source="synthetic"))
    assert gains.drafting(DECODE, synthetic) is None
    assert gains.drafting(DECODE, FixedTimes({})) is None  # type: ignore[arg-type]


def test_experiments_start_from_the_shortest_decode_and_the_longest_prefill() -> None:
    rows = pd.DataFrame(
        [
            explained_row("prefill", 7, 1, 1),
            explained_row("decode", 20, 1, 1, n_gen=5),
            explained_row("decode", 20, 1, 1, n_gen=9),
            explained_row("decode", 30, 1, 1, n_gen=99),
            explained_row("prefill", 998, 1, 1),
            explained_row("prefill", 999, 1, 1),
        ]
    )
    decode = gains.shortest_decode(rows)
    prefill = gains.longest_prefill(rows, TINY)
    assert decode is not None
    assert decode.n_prompt == 20
    assert decode.n_gen == 9
    assert prefill is not None
    assert prefill.n_prompt == 998  # 1,000 were trained: an answer fits
    assert gains.longest_prefill(rows[:1], TINY) is None
    assert gains.longest_prefill(rows[:1].assign(n_prompt=8), TINY) is not None
    untold = dataclasses.replace(TINY, n_ctx_train=None)
    assert gains.longest_prefill(rows, untold).n_prompt == 999  # type: ignore[union-attr]
    assert gains.shortest_decode(rows[:1]) is None
    assert gains.mean_position(SimpleNamespace(n_prompt=20, n_gen=1)) == 20
