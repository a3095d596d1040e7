"""What a header tells about a model's parts: against llama.cpp's code, and counted by hand."""

import dataclasses
from typing import Any

import gguf
import pytest

from lab.core import layers
from lab.core.attention import AttentionLayers, attention_layers
from lab.core.matrices import (
    ATTENTION,
    BLOCKS,
    EMBEDDING,
    EXPERTS,
    FEED_FORWARD,
    INPUT,
    OTHER,
    OUTPUT,
    UNMULTIPLIED,
    Matrix,
    group,
    matrices_of,
    n_experts_read,
    output_matrix,
)
from lab.core.record import Model
from tests.support.records import MODEL


class Header:
    """A header of an architecture: values and lists by key, without the architecture's name."""

    def __init__(self, arch: str, **values: int | tuple[int, ...]) -> None:
        self.arch = arch
        self.values = {
            f"{arch}.{key.replace('__', '.')}": value for key, value in values.items()
        }

    def number(self, key: str) -> int | None:
        value = self.values.get(key)
        return value if isinstance(value, int) else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        return value if isinstance(value, tuple) else None


BARE = Model(name="bare", source="file", file="bare.gguf", tensor_bytes={})


def layers_of(arch: str, n_layer: int | None, **values: int | tuple[int, ...]) -> Model:
    bare = dataclasses.replace(BARE, arch=arch, n_layer=n_layer)
    read = layers.with_layers(bare, Header(arch, **values))
    return dataclasses.replace(read, arch=None, n_layer=None)


def fields(**values: Any) -> Model:
    return dataclasses.replace(BARE, **values)


# Types


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_ggml(kind: str) -> None:
    if kind in gguf.GGMLQuantizationType.__members__:
        expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert BLOCKS[kind] == expected
    else:  # newer than the package
        assert kind in {
            "Q1_0": (128, 18),
            "Q2_0": (64, 18),
            "NVFP4": (64, 36),
        }


def test_bytes_of_matrices() -> None:
    matrix = Matrix(EXPERTS, "Q4_0", 32, 64, 3, 8)
    assert matrix.n_weights == 3 * 8 * 32 * 64
    assert matrix.n_bytes == 3 * 8 * 32 * 64 / 32 * 18
    assert Matrix(OUTPUT, "F16", 32, 64, 1).n_bytes == 2 * 32 * 64


# Heads


def test_heads_of_single_layers() -> None:
    key_heads = layers_of(
        "deci",
        3,
        attention__head_count=4,
        attention__head_count_kv=(2, 0, 4),
    )
    assert key_heads == fields(n_head=4, heads_kv=(2, 0, 4))
    equal = layers_of("deci", 3, attention__head_count=(4, 4, 4, 9))
    assert equal == fields(n_head=4, n_head_kv=4)
    largest = layers_of("deci", 2, attention__head_count=(4, 10_000))
    assert largest == fields(heads=(4, 10_000), heads_kv=(4, 10_000))


@pytest.mark.parametrize(
    "absurd",
    [
        (4, -4, 4),
        (4, 10_001, 4),
        (),
    ],
)
def test_absurd_lists_of_heads_are_unknown(absurd: tuple[int, ...]) -> None:
    assert layers_of("deci", 3, attention__head_count=absurd) == BARE


def test_without_a_number_of_layers_no_list_is_read() -> None:
    assert layers_of("deci", None, attention__head_count=(4, 2)) == BARE
    assert layers_of("gemma3", None, attention__sliding_window=9) == BARE


# Windows

PATTERNS = {
    # Layers with (w) and without (.) a window: load_arch_hparams in llama.cpp's src/models
    "afmoe": "www.www.w",
    "cohere2": "www.www.w",
    "cohere2moe": ".www.www.",
    "exaone-moe": "www.www.w",
    "gemma2": "w.w.w.w.w",
    "gemma3": "wwwww.www",
    "gpt-oss": "w.w.w.w.w",
    "laguna": ".www.www.",
    "mellum": "www.www.w",
    "olmo2": "www.www.w",
    "plamo3": "wwwwwww.w",
    "smallthinker": ".www.www.",
}


@pytest.mark.parametrize("arch", PATTERNS)
def test_which_layers_have_a_window_depends_on_the_architecture(arch: str) -> None:
    windows = layers_of(arch, 9, attention__sliding_window=7).windows or ()
    assert "".join("w" if window else "." for window in windows) == PATTERNS[arch]
    assert set(windows) == {0, 7}


@pytest.mark.parametrize("arch", ["phi3", "llama"])
def test_the_window_of_other_architectures_is_not_read(arch: str) -> None:
    assert layers_of(arch, 7, attention__sliding_window=9).windows is None
    pattern = layers_of(
        "phi3", 1, attention__sliding_window=9, attention__sliding_window_pattern=(1,)
    )
    assert pattern.windows is None


@pytest.mark.parametrize(
    ("arch", "window"),
    [
        ("gemma2", 4096),
        ("exaone-moe", 128),
        ("smallthinker", 4096),
    ],
)
def test_windows_that_the_file_does_not_tell(arch: str, window: int) -> None:
    assert set(layers_of(arch, 8).windows or ()) == {0, window}


def test_exaone_has_windows_with_64_layers() -> None:
    windows = layers_of("exaone4", 64, attention__sliding_window=9).windows
    assert windows == (4096, 4096, 4096, 0) * 16
    assert layers_of("exaone4", 30, attention__sliding_window=9).windows is None


def test_the_period_in_the_file_counts() -> None:
    period = layers_of(
        "gemma3", 4, attention__sliding_window=9, attention__sliding_window_pattern=3
    )
    assert period.windows == (9, 9, 0, 9)


def test_a_list_of_windows_in_the_file_counts() -> None:
    listed = layers_of(
        "gemma4",
        3,
        attention__sliding_window=9,
        attention__sliding_window_pattern=(0, 1, 1, 1),
    )
    assert listed == fields(windows=(0, 9, 9))
    short = layers_of(
        "gemma4", 3, attention__sliding_window=9, attention__sliding_window_pattern=(0, 1)
    )
    assert short == fields(uncounted="its list of windows is shorter than its list of layers")


def test_layers_with_a_window_may_have_heads_of_another_width() -> None:
    read = layers_of(
        "gemma4",
        3,
        attention__sliding_window=9,
        attention__sliding_window_pattern=(1, 0, 1),
        attention__key_length=64,
        attention__key_length_swa=32,
    )
    assert read.head_dims == (32, 64, 32)


def test_the_last_layers_may_read_the_caches_of_others() -> None:
    assert layers_of("gemma4", 9, attention__shared_kv_layers=4).n_layer_kv == 5
    assert layers_of("gemma4", 9, attention__shared_kv_layers=0).n_layer_kv is None
    assert layers_of("gemma3n", 30).n_layer_kv == 20


def test_compressed_keys_hold_the_values() -> None:
    assert layers_of("deepseek2", 2, attention__key_length_mla=192).values_in_keys
    assert not layers_of("deepseek2", 2).values_in_keys


def test_llama_4_attends_in_chunks_but_for_each_fourth_layer() -> None:
    read = layers_of("llama4", 4)
    assert read.windows == (8192, 8192, 8192, 0)
    assert read.is_chunked


def test_layers_that_only_draft_are_not_run() -> None:
    header = Header("glm4moe", block_count=47, nextn_predict_layers=1)
    assert layers.n_layers_run(header, "glm4moe") == 46
    assert layers.n_layers_run(Header("llama", block_count=3), "llama") == 3
    assert layers.n_layers_run(Header("llama"), "llama") is None


# Layers with a state

SCAN = {
    "ssm__conv_kernel": 4,
    "ssm__state_size": 16,
    "ssm__inner_size": 64,
    "ssm__group_count": 2,
}
SCAN_STATE = 3 * (64 + 2 * 2 * 16) + 16 * 64


@pytest.mark.parametrize(
    ("arch", "values", "recurrent"),
    [
        ("mamba2", {}, (1, 1, 1)),
        ("falcon-h1", {"attention__head_count": 4}, (1, 1, 1)),
        (
            "granitehybrid",
            {"attention__head_count": 4, "attention__head_count_kv": (0, 2, 0)},
            (1, 0, 1),
        ),
        (
            "nemotron_h_moe",
            {
                "attention__head_count": 4,
                "attention__head_count_kv": (0, 0, 2),
                "feed_forward_length": (0, 8, 0),
            },
            (1, 0, 0),
        ),
    ],
)
def test_state_space_layers(
    arch: str, values: dict[str, Any], recurrent: tuple[int, ...]
) -> None:
    read = layers_of(arch, 3, **SCAN, **values)
    assert read.uncounted is None
    assert read.states == tuple(SCAN_STATE * is_recurrent for is_recurrent in recurrent)
    assert read.n_state == SCAN_STATE * sum(recurrent)
    assert read.state_flops == 5 * 16 * 64 * sum(recurrent)


def test_short_convolutions_keep_the_last_inputs() -> None:
    read = layers_of(
        "lfm2",
        2,
        shortconv__l_cache=3,
        embedding_length=8,
        attention__head_count=4,
        attention__head_count_kv=(0, 2),
    )
    assert read.states == (16, 0)
    assert read.state_flops == 0


def test_delta_nets_with_a_gate_for_each_channel() -> None:
    read = layers_of(
        "kimi-linear",
        2,
        kda__head_dim=8,
        ssm__conv_kernel=4,
        attention__head_count=2,
        attention__head_count_kv=(0, 1),
    )
    assert read.states == (3 * 3 * 16 + 8 * 8 * 2, 0)
    assert read.state_flops == 7 * 8 * 8 * 2


# What is not counted


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("attention__indexer__head_count", "it chooses the positions that it attends to"),
        ("ssm__state_size", "some of its layers are recurrent"),
        ("wkv__head_size", "its layers are recurrent"),
        ("shortconv__l_cache", "some of its layers are convolutions"),
        ("kda__head_dim", "some of its layers are recurrent"),
    ],
)
def test_what_the_lab_does_not_count_is_named(key: str, reason: str) -> None:
    assert (layers_of("new", 3, **{key: 1}).uncounted or "").startswith(reason)
    assert layers_of("new", 3, **{key: 0}).uncounted is None


def test_an_architecture_that_is_not_counted_is_named() -> None:
    assert layers_of("deepseek4", 3).uncounted == "it attends to compressed positions"
    assert layers_of("plain", 2, expert_used_count=(2, 4)).uncounted == (
        "its layers use different numbers of experts"
    )


# Gated delta nets

DELTA_NET = {
    "attention__head_count": 8,
    "attention__head_count_kv": 2,
    "ssm__state_size": 16,
    "ssm__group_count": 3,
    "ssm__time_step_rank": 5,
    "ssm__conv_kernel": 4,
}


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next"])
def test_a_hybrid_attends_in_each_fourth_layer_and_has_a_state_in_the_others(
    arch: str,
) -> None:
    read = layers_of(arch, 6, **DELTA_NET)
    state = 16 * 16 * 5 + 3 * 16 * (2 * 3 + 5)
    assert read == fields(
        heads=(0, 0, 0, 8, 0, 0),
        heads_kv=(0, 0, 0, 2, 0, 0),
        n_state=5 * state,
        states=(state, state, state, 0, state, state),
        state_flops=5 * 7 * 16 * 16 * 5,
    )
    period = layers_of(
        arch,
        4,
        full_attention_interval=2,
        **DELTA_NET,
    )
    assert period.heads_kv == (0, 2, 0, 2)


@pytest.mark.parametrize("key", ["group_count", "time_step_rank", "conv_kernel"])
def test_a_hybrid_without_a_size_of_its_state_is_not_counted(key: str) -> None:
    incomplete = {**DELTA_NET, f"ssm__{key}": 0}
    assert layers_of("qwen35", 4, **incomplete).uncounted == layers.RECURRENT


@pytest.mark.parametrize("key", ["head_count", "head_count_kv"])
def test_a_hybrid_without_heads_has_no_states(key: str) -> None:
    values = {**DELTA_NET, f"attention__{key}": 0}
    assert layers_of("qwen35", 4, **values).heads is None


# Matrices


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("token_embd", EMBEDDING),
        ("output", OUTPUT),
        ("blk.0.attn_q", ATTENTION),
        ("blk.10.attn_qkv", ATTENTION),
        ("blk.0.attn_gate", ATTENTION),
        ("blk.0.attn_output", ATTENTION),
        ("blk.0.ssm_conv1d", ATTENTION),
        ("blk.0.ssm_out", ATTENTION),
        ("blk.0.ffn_gate", FEED_FORWARD),
        ("blk.0.ffn_down_shexp", FEED_FORWARD),
        ("blk.0.ffn_gate_inp", FEED_FORWARD),
        ("blk.0.ffn_gate_inp_shexp", FEED_FORWARD),
        ("blk.0.ffn_up_exps", EXPERTS),
        ("blk.0.ffn_gate_up_exps", EXPERTS),
        ("blk.0.ssm_in", ATTENTION),
        ("blk.0.attn_kv_a_mqa", ATTENTION),
        ("blk.0.shortconv.in_proj", ATTENTION),
        ("blk.0.ffn_latent_up", FEED_FORWARD),
        ("blk.0.inp_gate", FEED_FORWARD),
        ("per_layer_model_proj", INPUT),
        ("per_layer_token_embd", UNMULTIPLIED),
        ("position_embd", UNMULTIPLIED),
        ("blk.0.indexer.k_proj", OTHER),
        ("blk.0.xffn_up", OTHER),
        ("enc.blk.0.attn_q", OTHER),
        ("pooler", OTHER),
    ],
)
def test_the_part_of_a_matrix_follows_from_its_name(name: str, part: str) -> None:
    matrices = group([(f"{name}.weight", "F16", (64, 32))])
    assert matrices == (Matrix(part, "F16", 32, 64, 1),)


def test_equal_matrices_are_counted_and_vectors_left_out() -> None:
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        ("blk.0.attn_q.weight", "F16", (64, 32)),
        ("blk.1.attn_k.weight", "F16", (64, 32)),
        ("blk.1.attn_v.weight", "Q8_0", (64, 32)),
        ("blk.1.ffn_up_exps.weight", "F16", (64, 32, 8)),
        ("blk.1.ffn_up.weight", "F16", (64, 1, 8)),
        ("output.weight", "F16", (64, 32, 8)),
        ("blk.0.attn_q.bias", "F32", (64, 32)),
        ("blk.0.attn_norm.weight", "F32", (64, 32)),
        ("blk.0.ffn_gate.weight", "F32", (64, 1)),
    ]
    assert group(tensors) == (
        Matrix(ATTENTION, "F16", 32, 64, 2),
        Matrix(ATTENTION, "Q8_0", 32, 64, 1),
        Matrix(EXPERTS, "F16", 32, 64, 1, 8),
        Matrix(OTHER, "F16", 1, 64, 1, 8),
        Matrix(OTHER, "F16", 32, 64, 1, 8),
    )


def test_slices_of_a_matrix_are_no_experts() -> None:
    matrices = group([("blk.0.attn_k_b.weight", "F16", (64, 32, 8))])
    assert matrices == (Matrix(ATTENTION, "F16", 32, 64, 8),)


def test_matrices_that_not_all_layers_have_are_counted_in_the_last_layer() -> None:
    tensors = [
        ("blk.0.ffn_up.weight", "F16", (64, 32)),
        ("blk.1.ffn_up_exps.weight", "F16", (64, 32, 8)),
        ("blk.0.attn_q.weight", "F16", (64, 32)),
        ("blk.1.attn_q.weight", "F16", (64, 32)),
    ]
    assert group(tensors, n_layer=2) == (
        Matrix(FEED_FORWARD, "F16", 32, 64, 1, 1, 0),
        Matrix(EXPERTS, "F16", 32, 64, 1, 8, 1),
        Matrix(ATTENTION, "F16", 32, 64, 2),
    )


def test_keys_of_layers_that_read_another_cache_are_not_computed() -> None:
    tensors = [(f"blk.{layer}.attn_k.weight", "F16", (64, 32)) for layer in range(3)]
    assert group(tensors, n_layer=3, n_layer_kv=2) == (
        Matrix(ATTENTION, "F16", 32, 64, 2),
        Matrix(UNMULTIPLIED, "F16", 32, 64, 1),
    )


TABLE = Matrix(EMBEDDING, "F16", 100, 8, 1)
QUERIES = Matrix(ATTENTION, "F16", 8, 8, 2)
UP = Matrix(EXPERTS, "F16", 8, 8, 2, 4)


def with_matrices(*matrices: Matrix, **changes: Any) -> Model:
    return dataclasses.replace(MODEL, matrices=matrices, **changes)


def test_the_matrices_of_a_model_that_can_be_counted() -> None:
    assert matrices_of(with_matrices(TABLE, QUERIES)) == (TABLE, QUERIES)
    assert matrices_of(with_matrices(TABLE, UP, n_expert_used=2)) == (TABLE, UP)


@pytest.mark.parametrize(
    "model",
    [
        dataclasses.replace(MODEL, matrices=None),
        with_matrices(TABLE, uncounted="it is odd"),
        with_matrices(QUERIES),
        with_matrices(TABLE, dataclasses.replace(QUERIES, part=OTHER)),
        with_matrices(TABLE, dataclasses.replace(QUERIES, type="Q9_9")),
        with_matrices(TABLE, dataclasses.replace(QUERIES, n=0)),
        with_matrices(TABLE, UP),
    ],
)
def test_a_model_with_a_part_that_is_not_counted_has_no_matrices(model: Model) -> None:
    assert matrices_of(model) is None


def test_the_head_is_the_output_matrix_or_with_tied_embeddings_the_table() -> None:
    output = Matrix(OUTPUT, "F16", 100, 8, 1)
    assert output_matrix((TABLE, output)) == output
    assert output_matrix((TABLE, QUERIES)) == TABLE


# Heads of a model


def heads_of(n_layer: int, n_head: int, n_head_kv: int, window: int) -> AttentionLayers:
    width = MODEL.head_dim or 0
    return AttentionLayers(n_layer, n_head, n_head_kv, window, width, width)


def test_layers_are_grouped_by_heads_and_window() -> None:
    model = dataclasses.replace(
        MODEL,
        n_layer=4,
        heads=(4, 0, 4, 4),
        windows=(9, 9, 0, 9),
    )
    assert attention_layers(model) == (heads_of(2, 4, 2, 9), heads_of(1, 4, 2, 0))
    model = dataclasses.replace(
        MODEL,
        n_layer=3,
        heads_kv=(2, 0, 4),
    )
    assert attention_layers(model) == (heads_of(1, 4, 2, 0), heads_of(1, 4, 4, 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layer": None},
        {"n_layer": 0},
        {"head_dim": None},
        {"uncounted": "it is odd"},
        {"matrices": (dataclasses.replace(QUERIES, part=OTHER),)},
        {"n_head": None},
        {"n_head_kv": None},
        {"heads": (4, 4, 4)},
        {"windows": (9,)},
    ],
)
def test_a_model_that_is_not_counted_has_no_heads(changes: dict[str, Any]) -> None:
    assert attention_layers(dataclasses.replace(MODEL, **changes)) is None


def test_heads_need_no_matrices() -> None:
    assert attention_layers(dataclasses.replace(MODEL, matrices=None)) == (
        heads_of(2, 4, 2, 0),
    )


def test_experts_that_are_read() -> None:
    assert n_experts_read(UP, 2, 3) == 4 * (1 - 0.5**3)
    assert n_experts_read(UP, 9, 1) == 4
