"""FLOPs and bytes against numbers that can be worked out by hand or are known from the literature."""

import dataclasses
from typing import Any

import pytest

from lab.core import cost, memory, shape
from lab.core.record import Model
from lab.core.shape import EXPERTS
from lab.models import catalog, synthetic
from tests.conftest import SETTINGS


def of_catalog(name: str, quantization: str = "F16") -> Model:
    """A model of the catalog as its header would tell it."""
    return synthetic.model_of(catalog.entries()[name], quantization)


def cost_of(model: Model, *size: Any, **more: Any) -> cost.StepCost:
    found = cost.step(model, *size, **more)
    assert found is not None
    return found


LLAMA = of_catalog("llama-3.2-3b")
PHI = of_catalog("phi-3-mini")
SEVEN = of_catalog("llama-2-7b")


def test_kv_bytes_per_position() -> None:
    assert memory.kv_bytes_per_position(LLAMA) == 114_688
    assert memory.kv_bytes_per_position(PHI) == 393_216


def textbook_flops(model: Model, n_tokens: int) -> float:
    """FLOPs of a prefill of `n_tokens` as textbooks count: all layers for all tokens, the head for the last."""
    own = cost_of(model, n_tokens, 0, 1)
    return own.flops - own.layer_flops + cost_of(model, n_tokens, 0, n_tokens).layer_flops


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
    step = cost_of(SEVEN, 1, 0, 1)
    assert step.intensity == pytest.approx(1, rel=0.01)
    assert step.weight_bytes == pytest.approx(
        13.2e9, rel=0.01
    )  # 6.74e9 weights, less the embedding table


def test_tied_embeddings_are_read_once_and_untied_ones_not_at_all() -> None:
    tied = cost_of(LLAMA, 1, 0, 1)
    untied = cost_of(PHI, 1, 0, 1)
    assert tied.weight_bytes == sum(LLAMA.tensor_bytes.values())
    assert untied.weight_bytes == sum(PHI.tensor_bytes.values()) - 2 * 32064 * 3072


def test_what_the_header_does_not_tell_has_no_cost() -> None:
    for changes in (
        {"n_head_kv": None},
        {"uncounted": "its layers are recurrent"},
        {"matrices": None},
    ):
        assert cost.step(dataclasses.replace(LLAMA, **changes), 1, 0, 1) is None
    recurrent = shape.group(
        [("token_embd.weight", "F16", [64, 100]), ("blk.0.ssm_in.weight", "F16", [64, 256])]
    )
    assert cost.step(dataclasses.replace(LLAMA, matrices=recurrent), 1, 0, 1) is None


# Mixtures of experts, sliding windows

QWEN = of_catalog("qwen3-30b-a3b", "Q8_0")
OSS = of_catalog("gpt-oss-20b", "MXFP4_MOE")
GEMMA = of_catalog("gemma-3-1b")


def test_sizes_of_mixtures_are_those_of_their_model_cards() -> None:
    assert QWEN.n_params == pytest.approx(30.5e9, rel=0.005)  # "30.5B", Qwen/Qwen3-30B-A3B
    assert OSS.n_params == pytest.approx(
        20.9e9, rel=0.005
    )  # "20.9B", the gpt-oss model card, table 1
    assert OSS.n_bytes == pytest.approx(12.1e9, rel=0.01)  # the file in ggml-org/gpt-oss-20b-GGUF
    active = cost_of(QWEN, 1, 0, 1)
    assert (active.layer_flops + active.head_flops) / 2 == pytest.approx(
        3.0e9, rel=0.03
    )  # "3.3B", with embeddings


def test_a_token_reads_its_own_experts_and_a_long_step_nearly_all() -> None:
    (matrix, *_) = [m for m in shape.matrices(QWEN) or () if m.part == EXPERTS]
    assert shape.n_experts_read(matrix, 8, 1) == pytest.approx(8)
    assert shape.n_experts_read(matrix, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert shape.n_experts_read(matrix, 8, 512) == pytest.approx(128)
    one = cost_of(QWEN, 1, 0, 1)
    many = cost_of(QWEN, 512, 0, 512)
    assert one.weight_bytes < 0.12 * many.weight_bytes
    assert many.layer_flops == pytest.approx(512 * one.layer_flops)


def test_attention_looks_back_only_as_far_as_its_window() -> None:
    layers = shape.heads(GEMMA) or ()
    assert {(part.n_layer, part.window) for part in layers} == {(22, 512), (4, 0)}
    near = cost_of(GEMMA, 1, 100, 1)
    far = cost_of(GEMMA, 1, 10_000, 1)
    per_layer = 2 * 256 * 2  # bytes of one position: K and V in F16
    assert near.kv_read_bytes == 26 * per_layer * 101
    assert far.kv_read_bytes == per_layer * (4 * 10_001 + 22 * 512)
    # Tokens one by one see as many pairs as tokens at once.
    growing, *_ = cost.attended(GEMMA, 300, 400) or []
    alone = [cost.attended(GEMMA, 1, 400 + i) or [] for i in range(300)]
    assert growing.n_pairs == sum(part[0].n_pairs for part in alone)


def test_windowed_layers_keep_the_window_and_one_ubatch() -> None:
    per_layer = 2 * 256 * 2
    settings = dataclasses.replace(SETTINGS, n_ctx=10_000, n_ubatch=512)
    assert memory.of_context(GEMMA, settings).kv_cache_bytes == per_layer * (
        4 * 10_240 + 22 * 1_024
    )
    short = dataclasses.replace(settings, n_ctx=300)
    assert memory.of_context(GEMMA, short).kv_cache_bytes == per_layer * 26 * 512
    assert (
        memory.of_context(
            dataclasses.replace(GEMMA, uncounted="it is odd"), settings
        ).kv_cache_bytes
        is None
    )


RESERVED = [  # MiB of compute buffer that llama.cpp 0c1e570 reserves on a CPU (tests/bench/memory_estimates.py)
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
    assert memory.of_context(of_catalog(name, "Q4_0"), settings).compute_bytes == pytest.approx(
        mib * 2**20, rel=0.05
    )


def test_the_longest_context_is_the_last_that_fits() -> None:
    for model in (LLAMA, GEMMA):
        n = memory.longest(model, 16 * 10**9)
        assert (
            n
            and memory.of_length(model, n).total_bytes
            <= 16 * 10**9
            < memory.of_length(model, n + 1).total_bytes
        )
    assert memory.longest(LLAMA, 10**6) == 0
    assert memory.longest(dataclasses.replace(LLAMA, uncounted="it is odd"), 10**12) is None


def test_sequences_in_a_step_share_the_weights_but_not_the_cache() -> None:
    one = cost_of(LLAMA, 1, 1000, 1)
    four = cost_of(LLAMA, 1, 1000, 4, others=[(1, 1000)] * 3)
    assert four.weight_bytes == one.weight_bytes
    for name in (
        "layer_flops",
        "head_flops",
        "attention_flops",
        "kv_read_bytes",
        "kv_written_bytes",
    ):
        assert getattr(four, name) == pytest.approx(4 * getattr(one, name)), name
    mixed = cost_of(LLAMA, 256, 512, 3, others=[(1, 1000)] * 2)
    prompt = cost_of(LLAMA, 256, 512, 1)
    assert mixed.attention_flops == pytest.approx(prompt.attention_flops + 2 * one.attention_flops)
    assert mixed.kv_written_bytes == pytest.approx(prompt.kv_written_bytes * 258 / 256)


def test_in_one_cache_attention_runs_over_the_positions_of_all() -> None:
    alone, apart, together = (
        cost_of(LLAMA, 1, 99, n, others=[(1, 99)] * (n - 1), is_unified=unified)
        for n, unified in ((1, True), (4, False), (4, True))
    )
    assert alone and apart and together
    a_pair = 4 * LLAMA.n_layer * LLAMA.n_head * 128  # type: ignore[operator]
    assert [one.attention_flops / a_pair for one in (alone, apart, together)] == [
        100,
        4 * 100,
        4 * 400,
    ]
    assert together.n_bytes == apart.n_bytes and together.layer_flops == apart.layer_flops
    gemma = of_catalog("gemma-3-1b")
    seen = cost.attended(gemma, 1, 9_999, [(1, 9_999)]), cost.attended(gemma, 1, 9_999)
    for both, own in zip(*seen, strict=True):  # type: ignore[arg-type]
        assert both.n_pairs == 2 * own.n_pairs == 2 * (512 if own.heads.window else 10_000)
