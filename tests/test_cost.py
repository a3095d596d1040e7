"""FLOPs and bytes against numbers that can be worked out by hand or are known from the literature."""

import dataclasses

import pytest

from lab.core import cost
from lab.core.record import Model
from lab.models import catalog, synthetic
from tests.conftest import MODEL


def of_catalog(name: str, quantization: str = "F16") -> Model:
    """A model of the catalog as its header would tell it."""
    entry = catalog.entries()[name]
    tensors = synthetic.tensors(entry.shape, quantization)
    by_type: dict[str, int] = {}
    for tensor in tensors:
        by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.n_bytes
    sizes = {tensor.name: tensor.n_bytes for tensor in tensors}
    shape = dataclasses.asdict(entry.shape)
    shape.pop("rope_base")
    return dataclasses.replace(
        MODEL,
        **shape,
        tensor_bytes=by_type,
        embedding_bytes=sizes["token_embd.weight"],
        output_bytes=sizes.get("output.weight"),
    )


LLAMA, PHI, SEVEN = of_catalog("llama-3.2-3b"), of_catalog("phi-3-mini"), of_catalog("llama-2-7b")


def test_kv_bytes_per_position() -> None:
    assert cost.kv_bytes_per_position(LLAMA) == 114_688
    assert cost.kv_bytes_per_position(PHI) == 393_216


def test_prefill_of_llama_3b_as_textbooks_count() -> None:
    assert cost.textbook_flops(LLAMA, 1_000) == pytest.approx(5.81e12, rel=0.001)
    assert cost.textbook_flops(LLAMA, 10_000) == pytest.approx(73.6e12, rel=0.001)
    long = cost.step(LLAMA, 10_000, 0, 1)
    assert long is not None
    assert long.attention_flops / 73.6e12 == pytest.approx(0.23, abs=0.005)


def test_llama_cpp_skips_the_last_feed_forward_for_tokens_without_logits() -> None:
    skipped = cost.step(LLAMA, 1_000, 0, 1)
    assert skipped is not None
    saved = (cost.textbook_flops(LLAMA, 1_000) or 0) - skipped.flops
    assert saved == pytest.approx(2 * 3 * 3072 * 8192 * 999, rel=0.001)


def test_a_decode_step_of_a_7b_in_f16_is_one_flop_a_byte() -> None:
    step = cost.step(SEVEN, 1, 0, 1)
    assert step is not None
    assert step.intensity == pytest.approx(1, rel=0.01)
    assert step.weight_bytes == pytest.approx(13.2e9, rel=0.01)  # 6.74e9 weights, less the embedding table


def test_tied_embeddings_are_read_once_and_untied_ones_not_at_all() -> None:
    tied, untied = cost.step(LLAMA, 1, 0, 1), cost.step(PHI, 1, 0, 1)
    assert tied is not None and untied is not None
    assert tied.weight_bytes == sum(LLAMA.tensor_bytes.values())
    assert untied.weight_bytes == sum(PHI.tensor_bytes.values()) - 2 * 32064 * 3072


def test_steps_add_up_to_the_prefill() -> None:
    whole = cost.step(LLAMA, 1024, 0, 1)
    parts = [cost.step(LLAMA, 512, 0, 0), cost.step(LLAMA, 512, 512, 1)]
    assert whole is not None
    assert sum(part.flops for part in parts if part) == pytest.approx(whole.flops)
    assert parts[0] is not None and parts[1] is not None
    assert parts[0].weight_bytes < parts[1].weight_bytes  # no head, no last feed-forward


def test_the_cache_counts_by_its_type() -> None:
    f16, q8 = cost.step(LLAMA, 1, 999, 1), cost.step(LLAMA, 1, 999, 1, "q8_0", "q8_0")
    assert f16 is not None and q8 is not None
    assert f16.kv_read_bytes == 1000 * 114_688 and f16.kv_written_bytes == 114_688
    assert q8.kv_read_bytes == pytest.approx(f16.kv_read_bytes * 34 / 64)


def test_what_the_header_does_not_tell_has_no_cost() -> None:
    assert cost.step(dataclasses.replace(LLAMA, n_expert=8), 1, 0, 1) is None
    assert cost.step(dataclasses.replace(LLAMA, n_head_kv=None), 1, 0, 1) is None
    assert cost.step(dataclasses.replace(LLAMA, tensor_bytes={"TQ9": 5}), 1, 0, 1) is None
