"""The compute buffer of a step, summed up by hand for small shapes."""

import dataclasses
from typing import Any

import pytest

from lab.core.memory import CPU, compute_bytes
from lab.core.record import Model
from tests.support.records import MODEL, SETTINGS

# Queries are 3 x 7 = 21 numbers wide, keys 7
SHAPE = dataclasses.replace(
    MODEL, n_layer=2, n_embd=10, n_head=3, n_head_kv=1, head_dim=7, n_ff=16, n_vocab=50
)
WIDE_HEADS: dict[str, Any] = {"head_dim": 70}  # queries are 210 wide, keys 70
EXPERTS: dict[str, Any] = {"n_expert": 8, "n_expert_used": 4, "n_ff_expert": 5}
FUSED: dict[str, Any] = {"arch": "phi3"}
NO_FLASH: dict[str, Any] = {"flash_attn_resolved": "off"}
CACHES_ON_CPU: dict[str, Any] = {"kv_offload": False}
BYTES = 4 * 4  # of a column: 4 tokens of a step, in F32
ON_A = ("A", "A", "A")


def buffer(
    shape: dict[str, Any],
    changes: dict[str, Any],
    device: str = CPU,
    layer_devices: tuple[str, ...] = (),
) -> int | None:
    """Of a context of 256 positions: its mask is 256 numbers wide, in F16 128."""
    model: Model = dataclasses.replace(SHAPE, **shape)
    settings = dataclasses.replace(SETTINGS, **{"n_ctx": 256, "n_ubatch": 4, **changes})
    return compute_bytes(model, settings, device, layer_devices)


@pytest.mark.parametrize(
    ("shape", "changes", "width"),
    [
        # The output matrix, and two rows of the hidden state
        ({"n_vocab": 1000}, {}, 1000 + 2 * 10),
        # A mask of 128 leaves a gap if the fused matrix gives 78 + 2 x 26 numbers, not 75 + 2 x 25
        ({**FUSED, "head_dim": 26, "n_vocab": 1000}, {}, 1000 + 2 * 10 + 128 + 2 * 10),
        ({**FUSED, "head_dim": 25, "n_vocab": 1000}, {}, 1000 + 2 * 10),
        # The feed-forward beside the mask
        ({"n_ff": 500}, {}, 128 + 3 * 500 + 4 * 10),
        ({**FUSED, "n_ff": 500}, {}, 128 + 3 * 500 + 3 * 10),
        # The results of 4 experts, whose hidden states are 4 x 5 wide
        (EXPERTS, {}, 128 + 2 * 20 + 2 * 40 + 10),
        # Attention; without flash attention 3 heads have a score for each position
        (WIDE_HEADS, {}, 128 + 2 * 210 + 2 * 70 + 3 * 10),
        ({}, NO_FLASH, 256 + 3 * 256 + 2 * 21 + 2 * 7 + 3 * 10),
    ],
)
def test_the_cpus_buffer_is_its_largest_peak(
    shape: dict[str, Any], changes: dict[str, Any], width: int
) -> None:
    assert buffer(shape, changes) == BYTES * width


@pytest.mark.parametrize(
    ("shape", "changes", "width"),
    [
        ({}, {}, 128 + 2 * 10),
        ({}, NO_FLASH, 256 + 2 * 7 + 2 * 10),
        ({}, CACHES_ON_CPU, 128 + 21 + 10),
        (FUSED, CACHES_ON_CPU, 128 + 21 + 3 * 7 + 10),
        # Tensors that stay on the CPU
        ({"n_ff": 500}, {"n_cpu_moe": 1}, 128 + 3 * 500 + 4 * 10),
        ({"n_ff": 500}, {"override_tensor": ("ffn=CPU",)}, 128 + 3 * 500 + 4 * 10),
        ({"n_ff": 500}, {"override_tensor": ("ffn=A",)}, 128 + 2 * 10),
    ],
)
def test_the_cpu_has_the_inputs_of_layers_on_devices(
    shape: dict[str, Any], changes: dict[str, Any], width: int
) -> None:
    assert buffer(shape, changes, CPU, ON_A) == BYTES * width


@pytest.mark.parametrize(
    ("shape", "changes", "width"),
    [
        ({"n_vocab": 1000}, {}, 1000 + 2 * 10),
        ({"n_ff": 500}, {}, 128 + 3 * 500 + 2 * 10),
        ({"n_ff": 500}, NO_FLASH, 256 + 2 * 7 + 3 * 500 + 2 * 10),
        (EXPERTS, {}, 128 + 2 * 20 + 2 * 40 + 10),
        (WIDE_HEADS, {}, 128 + 2 * 210 + 2 * 10),
        ({}, NO_FLASH, 256 + 2 * 7 + 3 * 256 + 2 * 21 + 2 * 10),
    ],
)
def test_a_devices_buffer_is_its_largest_peak(
    shape: dict[str, Any], changes: dict[str, Any], width: int
) -> None:
    assert buffer(shape, changes, "A", ON_A) == BYTES * width


def test_a_device_has_the_peaks_of_what_it_holds() -> None:
    assert buffer({}, {}, "A", (CPU, CPU, "A")) == BYTES * (50 + 2 * 10)
    assert buffer({"n_vocab": 1000, "n_ff": 500}, {}, "A", ("A", "A", CPU)) == BYTES * (
        128 + 3 * 500 + 2 * 10
    )
    assert buffer({}, {}, "B", ON_A) == 0


def test_one_layers_cache_is_copied_to_a_device() -> None:
    cache_bytes = 256 * (7 + 7) * 2  # positions, keys and values, F16
    expected = BYTES * (128 + 2 * 21 + 2 * 10) + cache_bytes
    assert buffer({}, CACHES_ON_CPU, "A", ON_A) == expected


def test_windows_have_masks_of_their_own() -> None:
    """1,024 positions, and of the window 256 + 4, rounded up to 512."""
    shape: dict[str, Any] = {"windows": (0, 256)}
    feed_forward = 3 * 16 + 4 * 10
    attention = 2 * 21 + 2 * 7 + 3 * 10
    masks = 1024 + 512
    assert buffer(shape, {"n_ctx": 1024}) == BYTES * (masks // 2 + feed_forward)
    # The CPU's layer is the one with the window
    expected = BYTES * (masks + 3 * 512 + attention)
    assert buffer(shape, {"n_ctx": 1024, **NO_FLASH}, CPU, ("A", CPU, "A")) == expected


@pytest.mark.parametrize("field", ["n_embd", "n_vocab", "n_ff", "n_head"])
def test_the_buffer_of_an_incomplete_header_is_unknown(field: str) -> None:
    assert buffer({field: None}, {}) is None
