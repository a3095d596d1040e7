"""Bytes of caches and compute buffers, and where they lie, of models counted by hand."""

import dataclasses
from typing import Any

import pytest

from lab.core import memory
from lab.core.matrices import ATTENTION, EMBEDDING, Matrix
from lab.core.memory import CPU, Memory, Tensor
from lab.core.record import Device, Model, Settings
from tests.support.records import MODEL, SETTINGS

GPU = "GPU"
ALL_ON_GPU = (GPU, GPU, GPU)  # two layers and the output
OUTPUT_ON_CPU = (GPU, GPU, CPU)
OUTPUT_ON_GPU = (CPU, CPU, GPU)

SMALL = dataclasses.replace(
    MODEL,
    arch="llama",
    n_layer=2,
    n_embd=10,
    n_vocab=50,
    n_ff=1,
    n_head=3,
    n_head_kv=2,
    head_dim=4,  # the queries are 12 numbers wide, the keys 8
    matrices=None,
)
POSITION_BYTES = 2 * (2 * 4) * 2  # of a layer: keys and values, 2 heads of 4, F16
STEP = dataclasses.replace(SETTINGS, n_ctx=256, n_ubatch=5)
WIDTH_BYTES = 4 * 5  # of a column: F32, 5 tokens
LARGE_VOCABULARY = {"n_vocab": 1000}
LARGE_FEED_FORWARD = {"n_ff": 100}
EXPERTS = {"n_expert": 8, "n_expert_used": 4, "n_ff_expert": 3}


def small(**changes: Any) -> Model:
    return dataclasses.replace(SMALL, **changes)


def step(**changes: Any) -> Settings:
    return dataclasses.replace(STEP, **changes)


PLAIN = {"flash_attn": "off", "flash_attn_resolved": "off"}


def width(
    changes: dict[str, Any],
    settings: dict[str, Any],
    device: str = CPU,
    layer_devices: tuple[str, ...] = (),
) -> float:
    """The numbers of a compute buffer for each token of the step."""
    n_bytes = memory.compute_bytes(small(**changes), step(**settings), device, layer_devices)
    assert n_bytes is not None
    return n_bytes / WIDTH_BYTES


# The compute buffer. The mask of 256 positions is 128 numbers wide in F16, 256 without flash
# attention, which also keeps two rows of keys (16) as inputs.


@pytest.mark.parametrize(
    ("changes", "settings", "expected"),
    [
        # Attention: the mask, 3 x 10, queries 2 x 12, keys 2 x 8
        ({}, {}, 128 + 30 + 24 + 16),
        # ... and the scores of 3 heads
        ({}, PLAIN, 256 + 3 * 256 + 30 + 24 + 16),
        # The feed-forward: 3 hidden states and 4 rows; the fused one lives with 3
        (LARGE_FEED_FORWARD, {}, 128 + 300 + 40),
        ({**LARGE_FEED_FORWARD, "arch": "phi3"}, {}, 128 + 300 + 30),
        # The output matrix: the vocabulary and 2 rows
        (LARGE_VOCABULARY, {}, 1000 + 20),
        ({"n_vocab": 5000}, PLAIN, 5000 + 20),
        # A fused model with a mask (128) below queries (120) + 2 keys (16) has a gap
        ({**LARGE_VOCABULARY, "arch": "phi3", "n_head": 30}, {}, 1000 + 20 + 128 + 20),
        ({**LARGE_VOCABULARY, "arch": "phi3", "n_head": 28}, {}, 1000 + 20),
        ({**LARGE_VOCABULARY, "arch": "llama", "n_head": 30}, {}, 1000 + 20),
        ({"n_vocab": 10**5, "arch": "phi3", "n_head": 70}, PLAIN, 10**5 + 20),
        # Four experts of 3: hidden 12, two of it and of each expert's row, and one row
        (EXPERTS, {}, 128 + 2 * (12 + 40) + 10),
        # Wide experts: their hidden states and 4 rows
        ({**EXPERTS, "n_expert_used": 2, "n_ff_expert": 100}, {}, 128 + 600 + 40),
        # Experts without a width of their own have that of the feed-forward
        ({"n_expert": 8, "n_expert_used": 2, **LARGE_FEED_FORWARD}, {}, 128 + 600 + 40),
        # The mask of each window; the widest queries and keys
        ({"windows": (0, 8)}, {"n_ctx": 1024}, (1024 + 256) / 2 + 30 + 24 + 16),
        ({"heads": (3, 5), "heads_kv": (2, 4)}, {}, 128 + 30 + 2 * 20 + 2 * 16),
    ],
)
def test_the_widest_moment_of_a_step_on_the_cpu(
    changes: dict[str, Any], settings: dict[str, Any], expected: float
) -> None:
    assert width(changes, settings) == expected
    assert width(changes, settings, CPU, (CPU,) * 3) == expected


@pytest.mark.parametrize(
    ("changes", "settings", "layer_devices", "expected"),
    [
        # Only the inputs: the mask and 2 rows
        ({}, {}, ALL_ON_GPU, 128 + 20),
        ({}, PLAIN, ALL_ON_GPU, 256 + 16 + 20),
        (LARGE_VOCABULARY, {}, ALL_ON_GPU, 128 + 20),
        # Attention of a cache on the CPU: a row and the queries; fused ones copy 3 rows of keys
        ({}, {"kv_offload": False}, ALL_ON_GPU, 128 + 10 + 12),
        ({}, {"kv_offload": True}, ALL_ON_GPU, 128 + 20),
        ({"arch": "phi3"}, {"kv_offload": False}, ALL_ON_GPU, 128 + 10 + 12 + 24),
        ({"n_head": 1}, {"kv_offload": False}, ALL_ON_GPU, 128 + 20),
        # Tensors on the CPU are multiplied there
        ({}, {"n_cpu_moe": 1}, ALL_ON_GPU, 128 + 30 + 24 + 16),
        ({}, {**PLAIN, "n_cpu_moe": 1}, ALL_ON_GPU, 256 + 30 + 24 + 16),
        ({}, {"override_tensor": ("a=GPU", "b=CPU")}, ALL_ON_GPU, 128 + 30 + 24 + 16),
        ({}, {"override_tensor": ("a=GPU",)}, ALL_ON_GPU, 128 + 20),
        # The output, or the layers, on the CPU
        (LARGE_VOCABULARY, {}, OUTPUT_ON_CPU, 1000 + 20),
        (LARGE_FEED_FORWARD, {}, OUTPUT_ON_CPU, 128 + 20),
        (LARGE_VOCABULARY, {}, OUTPUT_ON_GPU, 128 + 30 + 24 + 16),
        (LARGE_VOCABULARY, {}, (GPU, CPU, GPU), 128 + 30 + 24 + 16),
        # The scores of its own layers
        ({"heads": (9, 3)}, PLAIN, (GPU, CPU, GPU), 256 + 3 * 256 + 30 + 2 * 36 + 16),
    ],
)
def test_the_cpu_beside_a_device_has_the_inputs_and_what_it_computes(
    changes: dict[str, Any],
    settings: dict[str, Any],
    layer_devices: tuple[str, ...],
    expected: float,
) -> None:
    assert width(changes, settings, CPU, layer_devices) == expected


LAYER_CACHE = POSITION_BYTES * 256 / WIDTH_BYTES


@pytest.mark.parametrize(
    ("changes", "settings", "layer_devices", "expected"),
    [
        # Attention: the inputs, 2 x 10, queries 2 x 12
        ({}, {}, ALL_ON_GPU, 128 + 20 + 24),
        ({}, PLAIN, ALL_ON_GPU, 256 + 16 + 3 * 256 + 20 + 24),
        # The feed-forward: the inputs, 3 hidden states and 2 rows; or the experts
        (LARGE_FEED_FORWARD, {}, ALL_ON_GPU, 128 + 300 + 20),
        ({"n_ff": 1000}, PLAIN, ALL_ON_GPU, 256 + 16 + 3000 + 20),
        (EXPERTS, {}, ALL_ON_GPU, 128 + 2 * (12 + 40) + 10),
        ({"n_head": 1}, {}, ALL_ON_GPU, 128 + 20 + 8),
        # The output matrix
        (LARGE_VOCABULARY, {}, ALL_ON_GPU, 1000 + 20),
        (LARGE_VOCABULARY, {}, OUTPUT_ON_CPU, 128 + 20 + 24),
        (LARGE_FEED_FORWARD, {}, OUTPUT_ON_GPU, 50 + 20),
        # The scores of its own layers
        ({"heads": (3, 9)}, PLAIN, (GPU, CPU, CPU), 256 + 16 + 3 * 256 + 20 + 2 * 36),
        ({"heads": (0, 3)}, PLAIN, ALL_ON_GPU, 256 + 16 + 3 * 256 + 20 + 24),
        # A cache on the CPU is copied, one layer at a time, beside attention
        ({}, {"kv_offload": False}, ALL_ON_GPU, 128 + 20 + 24 + LAYER_CACHE),
        ({"n_ff": 1000}, {"kv_offload": False}, ALL_ON_GPU, 128 + 3000 + 20),
        ({}, {"kv_offload": False}, OUTPUT_ON_GPU, 50 + 20),
        (
            {"windows": (0, 8)},
            {"kv_offload": False, "n_ctx": 1024},
            ALL_ON_GPU,
            (1024 + 256) / 2 + 20 + 24 + 4 * LAYER_CACHE,
        ),
    ],
)
def test_the_widest_moment_of_a_step_on_a_device(
    changes: dict[str, Any],
    settings: dict[str, Any],
    layer_devices: tuple[str, ...],
    expected: float,
) -> None:
    assert width(changes, settings, GPU, layer_devices) == pytest.approx(expected)
    assert width(changes, settings, "another GPU", layer_devices) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"n_vocab": None},
        {"n_embd": None},
        {"n_ff": None},
        {"n_expert": 8, "n_expert_used": None},
        {"n_expert": 8, "n_expert_used": 2, "n_ff": None},
        {"n_layer": None},
        {"heads": (0, 0)},
    ],
)
def test_a_buffer_is_unknown_without_a_width(changes: dict[str, Any]) -> None:
    assert memory.compute_bytes(small(**changes), STEP) is None


# The cache


def test_lengths_are_padded_to_256() -> None:
    assert list(map(memory.padded, (0, 1, 256, 257))) == [0, 256, 256, 512]


def test_a_step_has_the_tokens_of_the_smallest_limit() -> None:
    assert memory.n_rows(step(n_ubatch=3, n_batch=4)) == 3
    assert memory.n_rows(step(n_ubatch=4, n_batch=3)) == 3
    assert memory.n_rows(step(n_ubatch=512, n_ctx=1)) == 256


@pytest.mark.parametrize(
    ("window", "changes", "expected"),
    [
        (0, {}, 1024),
        (0, {"n_seq_max": 4}, 256),
        (0, {"n_seq_max": 4, "kv_unified": True}, 1024),
        (0, {"n_seq_max": 2, "n_ctx": 1025}, 512),
        (251, {}, 256),  # with the 5 tokens of a step
        (252, {}, 512),
        (251, {"n_seq_max": 2}, 256),
        (251, {"n_seq_max": 2, "kv_unified": True}, 512),
        (9999, {}, 1024),
    ],
)
def test_a_window_keeps_its_positions_and_those_of_a_step(
    window: int, changes: dict[str, Any], expected: int
) -> None:
    assert memory.n_cells(window, step(**{"n_ctx": 1024, **changes})) == expected


def test_bytes_of_a_position_in_all_layers() -> None:
    assert memory.kv_bytes_per_position(SMALL) == 2 * POSITION_BYTES
    assert memory.kv_bytes_per_position(small(n_layer_kv=1)) == POSITION_BYTES
    assert memory.kv_bytes_per_position(small(head_dim_v=6)) == 2 * 2 * (2 * 4 + 2 * 6)
    assert memory.kv_bytes_per_position(small(values_in_keys=True)) == 2 * 2 * 2 * 4
    assert memory.kv_bytes_per_position(SMALL, "q8_0") == 2 * (8 * 34 / 32 + 16)
    assert memory.kv_bytes_per_position(SMALL, "f16", "q4_0") == 2 * (16 + 8 * 18 / 32)
    assert memory.kv_bytes_per_position(SMALL, None) is None
    assert memory.kv_bytes_per_position(SMALL, "f16", "odd") is None


def cache_bytes(model: Model, **changes: Any) -> int | None:
    return memory.of_context(model, step(**changes)).kv_cache_bytes


def test_each_sequence_has_a_cache_unless_all_share_one() -> None:
    assert cache_bytes(SMALL) == 2 * 256 * POSITION_BYTES
    assert cache_bytes(SMALL, n_seq_max=3, n_ctx=768) == 2 * 3 * 256 * POSITION_BYTES
    unified = cache_bytes(SMALL, n_seq_max=3, n_ctx=512, kv_unified=True)
    assert unified == 2 * 512 * POSITION_BYTES
    assert cache_bytes(small(n_layer_kv=1)) == 256 * POSITION_BYTES


def test_each_sequence_has_a_state_in_f32() -> None:
    hybrid = small(n_layer=3, heads=(0, 3, 0), n_state=12)
    assert cache_bytes(hybrid) == 256 * POSITION_BYTES + 4 * 12
    two = cache_bytes(hybrid, n_seq_max=2, n_ctx=512)
    assert two == 2 * 256 * POSITION_BYTES + 2 * 4 * 12
    assert cache_bytes(dataclasses.replace(hybrid, n_state=None)) == 256 * POSITION_BYTES
    by_layer = dataclasses.replace(hybrid, states=(5, 6, 7))
    assert cache_bytes(by_layer) == 256 * POSITION_BYTES + 4 * 18
    of_other_layers = dataclasses.replace(hybrid, states=(5, 6))
    assert cache_bytes(of_other_layers) == 256 * POSITION_BYTES + 4 * 12


def test_the_weights_take_what_the_file_takes() -> None:
    assert memory.of_context(SMALL, STEP).weights_bytes == SMALL.n_bytes
    assert memory.of_context(small(n_bytes=None), STEP).weights_bytes == 0


def test_layouts_of_the_cpu_count_without_layers_on_devices() -> None:
    """AMX adds 4 bytes to each block of 32 numbers of Q8_0."""
    model = small(matrices=(Matrix(ATTENTION, "Q8_0", 32, 64, 2),))
    amx = "AMX_INT8 = 1 | AVX512_VNNI = 1 | REPACK = 1"

    def n_bytes(n_gpu_layers: int) -> int:
        return memory.of_context(model, step(n_gpu_layers=n_gpu_layers), amx).weights_bytes

    assert n_bytes(0) == 10**6 + 2 * 32 * 64 // 32 * 4
    assert n_bytes(1) == 10**6


def test_a_tied_table_of_another_layout_is_there_twice() -> None:
    """The copy for the output has 4 bytes more in each block of 34."""
    tied = small(
        matrices=(
            Matrix(EMBEDDING, "Q8_0", 64, 32, 1),
            Matrix(ATTENTION, "Q8_0", 32, 32, 3),
            Matrix(ATTENTION, "odd", 32, 32, 3),
        )
    )
    amx = "AMX_INT8 = 1 | AVX512_VNNI = 1 | REPACK = 1"
    of_layers = 3 * 32 * 4
    assert memory.of_context(tied, STEP, amx).weights_bytes == 10**6 + of_layers + 64 * 38
    untied = dataclasses.replace(tied, tied_embeddings=False)
    assert memory.of_context(untied, STEP, amx).weights_bytes == 10**6 + of_layers


def test_memory_of_two_models_is_known_where_both_are() -> None:
    both = Memory(1, 20, 300).beside(Memory(4, 50, 600))
    assert both == Memory(5, 70, 900)
    assert both.total_bytes == 975
    assert Memory(1, None, 3).beside(Memory(1, 2, 3)) == Memory(2, None, 6)
    assert Memory(1, 2, 3).beside(Memory(1, 2, None)) == Memory(2, 4, None)
    assert Memory(7, None, None).total_bytes == 7


def test_the_longest_context_just_fits() -> None:
    needed = memory.of_context(SMALL, step(n_ctx=768)).total_bytes
    assert memory.longest(SMALL, needed, STEP) == 768
    assert memory.longest(SMALL, needed - 1, STEP) == 512
    assert memory.longest(SMALL, 0, STEP) == 0
    assert memory.longest(SMALL, 10**18, STEP) == 2**31 - 256


# Places


def test_all_layers_are_those_and_the_output() -> None:
    assert memory.has_all_layers(-1, SMALL)
    assert memory.has_all_layers(3, SMALL)
    assert not memory.has_all_layers(2, SMALL)
    assert not memory.has_all_layers(0, SMALL)
    assert not memory.has_all_layers(99, small(n_layer=None))


def test_shares_are_summed_as_c_floats() -> None:
    """Three tenths of four are 0.7500000000000001 in doubles, and 0.75 in floats."""
    assert memory.layers(3, -1, (0.1,) * 4) == (0, 1, 2, 3)


def test_devices_share_by_their_free_memory() -> None:
    assert memory.shares({"A": 3, "B": 5}, ["A", "B"]) == (3, 5)
    assert memory.shares({"A": 3, CPU: 8}, ["A", "B"]) == (3, 8)
    assert memory.shares({"A": 3}, ["A", "B"]) == (3, 1)
    assert memory.shares({"A": 0, "B": 0}, ["A", "B"]) == (1, 1)
    assert memory.shares({"A": 0, "B": 2}, ["A", "B"]) == (0, 2)
    assert memory.shares({"A": 3, "B": 5}, ["A", "B"], (2, 1)) == (2, 1)


def weights(model: Model, tensors: tuple[Tensor, ...] = (), **changes: Any) -> dict[str, int]:
    places = memory.places(model, step(**changes), tensors, ["A", "B"], (1, 1))
    assert places is not None
    return {place.device: place.memory.weights_bytes for place in places}


def test_without_a_table_of_tensors_layers_are_equal() -> None:
    model = small(
        n_layer=3, tensor_bytes={"F32": 400, "F16": 600}, embedding_bytes=100, output_bytes=59
    )
    # 841 bytes are 280 for each layer
    assert weights(model, n_gpu_layers=0) == {"A": 0, "B": 0, CPU: 999}
    assert weights(model, n_gpu_layers=2) == {"A": 280, "B": 59, CPU: 660}
    tied = dataclasses.replace(model, output_bytes=None, embedding_bytes=160)
    assert weights(tied, n_gpu_layers=2) == {"A": 280, "B": 160, CPU: 720}
    unknown = dataclasses.replace(tied, embedding_bytes=None)
    assert weights(unknown, n_gpu_layers=0) == {"A": 0, "B": 0, CPU: 999}
    larger = dataclasses.replace(tied, embedding_bytes=2000)
    single = dataclasses.replace(larger, n_layer=1)
    assert weights(single, n_gpu_layers=0) == {"A": 0, "B": 0, CPU: 2000}


def test_tensors_without_a_layer_have_a_home() -> None:
    tensors = (
        Tensor("rope_freqs.weight", 1),
        Tensor("token_types.weight", 20),
        Tensor("blk.1.attn_q.weight", 300),
        Tensor("blk.2.nextn.weight", 4000),  # beyond the last layer: with it
        Tensor("output.weight", 50_000),
    )
    assert weights(SMALL, tensors, n_gpu_layers=3) == {"A": 4301, "B": 50_000, CPU: 20}
    assert weights(SMALL, tensors, n_gpu_layers=2) == {"A": 4300, "B": 50_000, CPU: 21}


def test_caches_lie_with_their_layers() -> None:
    model = small(heads=(0, 3), n_state=12)

    def caches(**changes: Any) -> list[int | None]:
        places = memory.places(model, step(**changes), (), ["A", "B"], (1, 1)) or ()
        return [place.memory.kv_cache_bytes for place in places]

    assert caches(n_gpu_layers=2) == [256 * POSITION_BYTES, 0, 4 * 12]
    assert caches(n_gpu_layers=2, kv_offload=False) == [0, 0, 256 * POSITION_BYTES + 4 * 12]


def test_a_server_has_as_many_devices_as_it_lists() -> None:
    devices = (Device("RPC0", "host:1", "gpu"), Device("RPC1", "host:1", "gpu"))
    assert memory.device_of("RPC1[host:1]", devices) == "RPC1"
    assert memory.device_of("RPC2[host:1]", devices) == "RPC2[host:1]"
