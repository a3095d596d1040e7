"""FLOPs and bytes against numbers worked out by hand or known from the literature."""

import dataclasses
from typing import Any

import pytest

from lab.core import cost, memory
from lab.core.attention import attention_layers
from lab.core.cost import StepCost
from lab.core.matrices import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    FEED_FORWARD,
    Matrix,
    group,
    matrices_of,
    n_experts_read,
)
from lab.core.record import Model
from tests.support.rates import of_catalog
from tests.support.records import MODEL, SETTINGS

GB = 10**9


def cost_of(model: Model, *size: Any, **options: Any) -> StepCost:
    step = cost.step(model, *size, **options)
    assert step is not None
    return step


LLAMA = of_catalog("llama-3.2-3b")
PHI = of_catalog("phi-3-mini")
LLAMA_7B = of_catalog("llama-2-7b")

# A model that is small enough to count by hand

BY_HAND = dataclasses.replace(
    MODEL,
    arch="llama",
    n_layer=4,
    n_head=6,
    n_head_kv=2,
    head_dim=4,
    head_dim_v=2,
    windows=(5, 0, 5, 0),
    n_expert=8,
    n_expert_used=2,
    n_state=10,
    tensor_bytes={
        "F32": 4_200,
        "F16": 1_536,
        "Q8_0": 2_176,
        "Q4_0": 36_864,
    },
    matrices=(
        Matrix(EMBEDDING, "F32", 100, 8, 1),  # 3,200 bytes; the vectors have 1,000
        Matrix(ATTENTION, "F16", 24, 8, 4),  # 384 bytes each
        Matrix(FEED_FORWARD, "Q8_0", 16, 32, 4),  # 544 bytes each
        Matrix(EXPERTS, "Q4_0", 32, 64, 4, 8),  # 1,152 bytes each expert
    ),
)
TABLE = Matrix(EMBEDDING, "F32", 100, 8, 1)
ONE_FEED_FORWARD = Matrix(FEED_FORWARD, "Q8_0", 16, 32, 1)
NEVER_SKIPPING = dataclasses.replace(BY_HAND, arch="gpt-oss")
EXPERTS_OF_3_TOKENS = 8 * (1 - (3 / 4) ** 3)
EXPERTS_OF_2_TOKENS = 8 * (1 - (3 / 4) ** 2)


def test_each_figure_of_a_step_counted_by_hand() -> None:
    step = cost_of(BY_HAND, 3, 6, 2)

    assert step.head_flops == 2 * 800 * 2
    attention_matrices = 2 * 4 * (24 * 8) * 3
    feed_forward = 2 * 3 * (16 * 32) * 3 + 2 * 1 * (16 * 32) * 2
    experts = 2 * 3 * 2 * (32 * 64) * 3 + 2 * 1 * 2 * (32 * 64) * 2
    assert step.layer_flops == attention_matrices + feed_forward + experts
    full_pairs = 7 + 8 + 9
    windowed_pairs = 5 + 5 + 5
    state_flops = 7 * 10 * 3
    assert (
        step.attention_flops
        == 2 * 2 * 6 * (4 + 2) * (full_pairs + windowed_pairs) + state_flops
    )
    expert_bytes = 1_152 * (3 * EXPERTS_OF_3_TOKENS + EXPERTS_OF_2_TOKENS)
    assert step.weight_bytes == 1_000 + 3_200 + 4 * 384 + 4 * 544 + expert_bytes
    per_head = (4 + 2) * 2
    state_bytes = 4 * 10
    assert step.kv_read_bytes == per_head * 2 * 2 * (9 + 7) + state_bytes
    assert step.kv_written_bytes == 3 * per_head * 4 * 2 + state_bytes
    assert step.flops == step.head_flops + step.layer_flops + step.attention_flops
    assert step.n_bytes == step.weight_bytes + step.kv_read_bytes + step.kv_written_bytes
    assert step.intensity == step.flops / step.n_bytes


def test_an_architecture_that_never_skips_runs_its_last_layer_for_every_token() -> None:
    step = cost_of(NEVER_SKIPPING, 3, 6, 2)
    flops = 2 * 4 * (24 * 8) * 3 + 2 * 4 * (16 * 32) * 3 + 2 * 4 * 2 * (32 * 64) * 3
    assert step.layer_flops == flops
    expert_bytes = 1_152 * 4 * EXPERTS_OF_3_TOKENS
    assert step.weight_bytes == 1_000 + 3_200 + 4 * 384 + 4 * 544 + expert_bytes


def test_a_step_without_logits_reads_neither_head_nor_last_feed_forward() -> None:
    step = cost_of(BY_HAND, 3, 6, 0)
    assert step.head_flops == 0
    assert step.weight_bytes == 1_000 + 4 * 384 + 3 * 544 + 1_152 * 3 * EXPERTS_OF_3_TOKENS


def test_weights_of_a_decode_step_counted_by_hand() -> None:
    expected = 1_000 + 3_200 + 4 * 384 + 4 * 544 + 1_152 * 4 * 2
    assert cost.weight_bytes_per_step(BY_HAND) == expected
    without_vectors = dataclasses.replace(BY_HAND, tensor_bytes={"Q4_0": 7})
    assert cost.weight_bytes_per_step(without_vectors) == expected - 1_000
    assert cost.weight_bytes_per_step(dataclasses.replace(BY_HAND, matrices=None)) is None


def test_products_tell_the_head_and_the_last_layer_apart() -> None:
    products = cost.products(BY_HAND, 3, 2) or []
    counts = [(part.matrix.part, part.n, part.n_tokens, part.is_last) for part in products]
    assert counts == [
        (EMBEDDING, 1, 2, False),
        (ATTENTION, 4, 3, False),
        (FEED_FORWARD, 3, 3, False),
        (FEED_FORWARD, 1, 2, True),
        (EXPERTS, 3, 3, False),
        (EXPERTS, 1, 2, True),
    ]
    assert [part.is_head for part in products] == [True, False, False, False, False, False]
    assert cost.products(dataclasses.replace(BY_HAND, n_layer=None), 3, 2) is None


def test_the_only_layer_of_a_model_is_its_last_one() -> None:
    single = dataclasses.replace(
        BY_HAND,
        n_layer=1,
        matrices=(TABLE, ONE_FEED_FORWARD),
    )
    products = cost.products(single, 3, 2) or []
    assert [(part.n, part.n_tokens) for part in products] == [(1, 2), (1, 2)]
    assert cost.products(single, 3, 0) == []
    assert cost.products(BY_HAND, 0, 0) == []


def test_the_types_of_a_cache_and_its_sequences_change_only_the_cache() -> None:
    step = cost_of(BY_HAND, 3, 6, 2)
    q8_head = 4 * 34 / 32 + 2 * 2
    q8 = cost_of(BY_HAND, 3, 6, 2, type_k="q8_0")
    assert q8.kv_read_bytes == q8_head * 2 * 2 * (9 + 7) + 4 * 10
    assert q8.kv_written_bytes == 3 * q8_head * 4 * 2 + 4 * 10
    assert q8.flops == step.flops
    assert q8.weight_bytes == step.weight_bytes
    f32 = cost_of(BY_HAND, 3, 6, 2, type_v="f32")
    assert f32.kv_read_bytes == (4 * 2 + 2 * 4) * 2 * 2 * (9 + 7) + 4 * 10
    two_sequences = cost_of(BY_HAND, 3, 6, 2, beside=[(1, 3)])
    assert two_sequences.kv_read_bytes == 12 * 2 * 2 * (9 + 7 + 4 + 4) + 2 * 4 * 10
    assert two_sequences.kv_written_bytes == 4 * 12 * 4 * 2 + 2 * 4 * 10
    assert cost.step(BY_HAND, 3, 6, 2, type_k="unknown") is None


@pytest.mark.parametrize(
    ("n_tokens", "n_past", "beside", "full", "windowed"),
    [  # pairs and positions read, of a layer that sees everything and of one that sees 5
        (1, 0, [], (1, 1), (1, 1)),
        (
            3,
            3,
            [],
            (4 + 5 + 6, 6),
            (4 + 5 + 5, 6),
        ),
        (
            3,
            6,
            [],
            (7 + 8 + 9, 9),
            (5 + 5 + 5, 7),
        ),
        (
            1,
            9,
            [(2, 8)],
            (10 + 10, 10),
            (5 + 6, 5),
        ),
        (
            2,
            9,
            [(1, 1), (1, 8)],
            (10 + 11 + 2 * (2 + 9), 11),
            (5 + 5 + 2 * (2 + 5), 6),
        ),
    ],
)
def test_pairs_and_positions_of_attention_counted_by_hand(
    n_tokens: int,
    n_past: int,
    beside: list[tuple[int, int]],
    full: tuple[int, int],
    windowed: tuple[int, int],
) -> None:
    layers = cost.attended(BY_HAND, n_tokens, n_past, beside) or []
    counts = {part.heads.window: (part.n_pairs, part.n_positions) for part in layers}
    assert counts == {0: full, 5: windowed}


def test_a_copy_of_the_cache_reads_and_writes_it_once() -> None:
    moved = cost.move(BY_HAND, 7)
    n_bytes = 4 * 10 + 12 * 2 * 2 * (7 + 5)
    assert moved == StepCost(0, 0, 0, 0, n_bytes, n_bytes)
    smaller = cost.move(BY_HAND, 7, "q8_0", "f32")
    assert smaller is not None
    assert smaller.kv_read_bytes == 4 * 10 + (4 * 34 / 32 + 2 * 4) * 2 * 2 * (7 + 5)
    without_state = cost.move(LLAMA, 7)
    assert without_state is not None
    assert without_state.n_bytes == 2 * 7 * 114_688
    assert cost.move(BY_HAND, 7, type_v="unknown") is None
    assert cost.move(dataclasses.replace(BY_HAND, n_layer=None), 7) is None


# Known figures


def test_kv_bytes_per_position() -> None:
    assert memory.kv_bytes_per_position(LLAMA) == 114_688
    assert memory.kv_bytes_per_position(PHI) == 393_216


def textbook_flops(model: Model, n_tokens: int) -> float:
    """FLOPs of a prefill as textbooks count: all layers for all tokens, the head for the last."""
    step = cost_of(model, n_tokens, 0, 1)
    all_layers = cost_of(model, n_tokens, 0, n_tokens).layer_flops
    return step.flops - step.layer_flops + all_layers


def test_prefill_of_llama_3b_as_textbooks_count() -> None:
    assert textbook_flops(LLAMA, 1_000) == pytest.approx(5.81e12, rel=0.001)
    assert textbook_flops(LLAMA, 10_000) == pytest.approx(73.6e12, rel=0.001)
    long = cost_of(LLAMA, 10_000, 0, 1)
    assert long.attention_flops / 73.6e12 == pytest.approx(0.23, abs=0.005)


def test_llama_cpp_skips_the_last_feed_forward_for_tokens_without_logits() -> None:
    skipped = cost_of(LLAMA, 1_000, 0, 1)
    saved = textbook_flops(LLAMA, 1_000) - skipped.flops
    assert saved == pytest.approx(2 * 3 * 3072 * 8192 * 999, rel=0.001)


def test_a_decode_step_of_a_7b_in_f16_is_one_flop_a_byte() -> None:
    step = cost_of(LLAMA_7B, 1, 0, 1)
    assert step.intensity == pytest.approx(1, rel=0.01)
    # 6.74e9 weights, without the embedding table
    assert step.weight_bytes == pytest.approx(13.2e9, rel=0.01)


def test_tied_embeddings_are_read_once_and_untied_ones_not_at_all() -> None:
    tied = cost_of(LLAMA, 1, 0, 1)
    untied = cost_of(PHI, 1, 0, 1)
    assert tied.weight_bytes == sum(LLAMA.tensor_bytes.values())
    assert untied.weight_bytes == sum(PHI.tensor_bytes.values()) - 2 * 32064 * 3072


UNKNOWN = (
    {"n_head_kv": None},
    {"uncounted": "its layers are recurrent"},
    {"matrices": None},
)


@pytest.mark.parametrize("changes", UNKNOWN)
def test_what_the_header_does_not_tell_has_no_cost(changes: dict[str, Any]) -> None:
    assert cost.step(dataclasses.replace(LLAMA, **changes), 1, 0, 1) is None


def test_parts_that_are_not_counted_have_no_cost() -> None:
    recurrent = group(
        [
            ("token_embd.weight", "F16", [64, 100]),
            ("blk.0.time_mix_key.weight", "F16", [64, 256]),
        ]
    )
    assert cost.step(dataclasses.replace(LLAMA, matrices=recurrent), 1, 0, 1) is None


# Mixtures of experts, sliding windows

QWEN = of_catalog("qwen3-30b-a3b", "Q8_0")
GPT_OSS = of_catalog("gpt-oss-20b", "MXFP4_MOE")
GEMMA = of_catalog("gemma-3-1b")
GEMMA_LAYER_BYTES = 2 * 256 * 2  # of one position of a layer: K and V in F16


def test_sizes_of_mixtures_are_those_of_their_model_cards() -> None:
    # "30.5B": Qwen/Qwen3-30B-A3B. "20.9B": the gpt-oss model card, table 1
    assert QWEN.n_params == pytest.approx(30.5e9, rel=0.005)
    assert GPT_OSS.n_params == pytest.approx(20.9e9, rel=0.005)
    # the file in ggml-org/gpt-oss-20b-GGUF
    assert GPT_OSS.n_bytes == pytest.approx(12.1e9, rel=0.01)
    # "3.3B", with embeddings
    active = cost_of(QWEN, 1, 0, 1)
    assert (active.layer_flops + active.head_flops) / 2 == pytest.approx(3.0e9, rel=0.03)


def test_a_token_reads_its_own_experts_and_a_long_step_nearly_all() -> None:
    matrices = matrices_of(QWEN) or ()
    experts = next(matrix for matrix in matrices if matrix.part == EXPERTS)
    assert n_experts_read(experts, 8, 1) == pytest.approx(8)
    assert n_experts_read(experts, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert n_experts_read(experts, 8, 512) == pytest.approx(128)
    assert n_experts_read(experts, 200, 1) == 128
    token = cost_of(QWEN, 1, 0, 1)
    long = cost_of(QWEN, 512, 0, 512)
    assert token.weight_bytes < 0.12 * long.weight_bytes
    assert long.layer_flops == pytest.approx(512 * token.layer_flops)


def test_attention_looks_back_only_as_far_as_its_window() -> None:
    layers = attention_layers(GEMMA) or ()
    assert {(part.n_layer, part.window) for part in layers} == {(22, 512), (4, 0)}
    near = cost_of(GEMMA, 1, 100, 1)
    far = cost_of(GEMMA, 1, 10_000, 1)
    assert near.kv_read_bytes == 26 * GEMMA_LAYER_BYTES * 101
    assert far.kv_read_bytes == GEMMA_LAYER_BYTES * (4 * 10_001 + 22 * 512)


def test_tokens_one_by_one_see_as_many_pairs_as_tokens_at_once() -> None:
    at_once, *_ = cost.attended(GEMMA, 300, 400) or []
    n_pairs = 0.0
    for i in range(300):
        token, *_ = cost.attended(GEMMA, 1, 400 + i) or []
        n_pairs += token.n_pairs
    assert at_once.n_pairs == n_pairs


def test_windowed_layers_keep_the_window_and_one_ubatch() -> None:
    settings = dataclasses.replace(SETTINGS, n_ctx=10_000, n_ubatch=512)
    expected = GEMMA_LAYER_BYTES * (4 * 10_240 + 22 * 1_024)
    assert memory.of_context(GEMMA, settings).kv_cache_bytes == expected
    short = dataclasses.replace(settings, n_ctx=300)
    assert memory.of_context(GEMMA, short).kv_cache_bytes == GEMMA_LAYER_BYTES * 26 * 512
    odd = dataclasses.replace(GEMMA, uncounted="it is odd")
    assert memory.of_context(odd, settings).kv_cache_bytes is None


# MiB of compute buffer that llama.cpp 0c1e570 reserves on a CPU (tests/bench/memory_estimates.py)
RESERVED = [
    ("smollm2-135m", 512, 98.25),
    ("phi-3-mini", 4096, 90.64),
    ("llama-2-7b", 32768, 128.51),
    ("qwen3-4b", 512, 306.75),
    ("gemma-3-1b", 4096, 516.50),
    ("mistral-7b", 32768, 148.01),
]


@pytest.mark.parametrize(("name", "n_ctx", "mib"), RESERVED)
def test_compute_buffers_are_those_that_llama_cpp_reserves(
    name: str, n_ctx: int, mib: float
) -> None:
    settings = dataclasses.replace(SETTINGS, n_ctx=n_ctx, n_ubatch=512)
    estimate = memory.of_context(of_catalog(name, "Q4_0"), settings)
    assert estimate.compute_bytes == pytest.approx(mib * 2**20, rel=0.05)


@pytest.mark.parametrize("model", [LLAMA, GEMMA])
def test_the_longest_context_is_the_last_that_fits(model: Model) -> None:
    n = memory.longest(model, 16 * GB)
    assert n
    assert memory.of_length(model, n).total_bytes <= 16 * GB
    assert memory.of_length(model, n + 1).total_bytes > 16 * GB


def test_no_context_fits_or_none_is_known() -> None:
    assert memory.longest(LLAMA, 10**6) == 0
    assert memory.longest(dataclasses.replace(LLAMA, uncounted="it is odd"), 10**12) is None


# Several sequences in one step


@pytest.mark.parametrize(
    "figure",
    ["layer_flops", "head_flops", "attention_flops", "kv_read_bytes", "kv_written_bytes"],
)
def test_sequences_in_a_step_share_the_weights_but_not_the_cache(figure: str) -> None:
    alone = cost_of(LLAMA, 1, 1000, 1)
    four = cost_of(LLAMA, 1, 1000, 4, beside=[(1, 1000)] * 3)
    assert four.weight_bytes == alone.weight_bytes
    assert getattr(four, figure) == pytest.approx(4 * getattr(alone, figure))


def test_a_prompt_and_tokens_of_others_in_one_step() -> None:
    token = cost_of(LLAMA, 1, 1000, 1)
    prompt = cost_of(LLAMA, 256, 512, 1)
    mixed = cost_of(LLAMA, 256, 512, 3, beside=[(1, 1000)] * 2)
    assert mixed.attention_flops == pytest.approx(
        prompt.attention_flops + 2 * token.attention_flops
    )
    assert mixed.kv_written_bytes == pytest.approx(prompt.kv_written_bytes * 258 / 256)


def test_in_one_cache_attention_runs_over_the_positions_of_all() -> None:
    pair_flops = 4 * (LLAMA.n_layer or 0) * (LLAMA.n_head or 0) * 128
    alone = cost_of(LLAMA, 1, 99, 1, is_unified=True)
    separate = cost_of(LLAMA, 1, 99, 4, beside=[(1, 99)] * 3)
    unified = cost_of(LLAMA, 1, 99, 4, beside=[(1, 99)] * 3, is_unified=True)
    assert alone.attention_flops == pair_flops * 100
    assert separate.attention_flops == pair_flops * 4 * 100
    assert unified.attention_flops == pair_flops * 4 * 400
    assert unified.n_bytes == separate.n_bytes
    assert unified.layer_flops == separate.layer_flops


def test_in_one_cache_a_window_masks_all_but_its_positions() -> None:
    both = cost.attended(GEMMA, 1, 9_999, [(1, 9_999)]) or []
    alone = cost.attended(GEMMA, 1, 9_999) or []
    for with_neighbour, part in zip(both, alone, strict=True):
        n_seen = 512 if part.heads.window else 10_000
        assert part.n_pairs == n_seen
        assert with_neighbour.n_pairs == 2 * n_seen
