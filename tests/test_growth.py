"""Why long contexts are slower: a slope, a slow kernel or a cliff, and no cause without a law."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import growth, results
from lab.core.growth import BETWEEN, FEW, KERNEL, OVERLAP, SLOPE, UNKNOWN
from lab.core.record import DECODE, PREFILL, Record
from lab.models import catalog, synthetic
from lab.show import plot_sweep, text_growth
from tests.bench import doubt, slope
from tests.bench.slope import Plant, Rates

SAMPLE = Path(__file__).parents[1] / "results/sample-smollm2-135m-amd-epyc.jsonl"
XEON = Path(__file__).parent / "data/slow-attention-intel-xeon.jsonl"
SMOLLM = synthetic.model_of(catalog.find("smollm2-135m"), "Q4_1")
RATES = Rates(15e9, 1e11, 0.6, 0.9, 0.005)
SLOW = Plant(KERNEL, DECODE, 0, 15)


def session(plant: Plant, form: str = "short", rates: Rates = RATES) -> list[Record]:
    return slope.session(SMOLLM, form, rates, plant, random.Random(1))


def law(records: Sequence[Record], phase: str = DECODE) -> growth.Growth:
    attention = growth.growth(records, phase)
    assert attention is not None
    return attention


def with_type(records: Sequence[Record], kind: str) -> list[Record]:
    changed = []
    for record in records:
        settings = dataclasses.replace(record.settings, type_k=kind, type_v=kind)
        changed.append(dataclasses.replace(record, settings=settings))
    return changed


def test_added_bytes_over_added_time_are_a_rate_beside_that_of_the_weights() -> None:
    attention = law(session(Plant()))
    assert attention.verdict == SLOPE
    assert attention.rate / attention.weight_rate == pytest.approx(0.6, rel=0.1)
    assert attention.weight_rate == pytest.approx(15e9, rel=0.05)


def test_a_slow_kernel_is_named_with_both_rates_and_a_comparison_to_try() -> None:
    records = session(SLOW)
    clause = text_growth.because(records, DECODE)
    (comparison,) = text_growth.sentences(records)

    assert law(records).verdict == KERNEL
    assert "because" not in clause
    assert "memory is not the limit" in clause
    assert "for heads of 64" in clause
    assert "lab ab '--flash-attn on' '--flash-attn off' --prompt-len 1500" in comparison


def test_a_slow_kernel_is_not_named_where_nobody_said_which_it_was() -> None:
    records = []
    for record in session(SLOW):
        settings = dataclasses.replace(
            record.settings, flash_attn=None, flash_attn_resolved=None
        )
        records.append(dataclasses.replace(record, settings=settings))
    clause = text_growth.because(records, DECODE)
    assert "llama.cpp's attention is slow here" in clause
    assert "--flash-attn" not in clause


def test_prefill_has_the_same_law() -> None:
    slow = session(Plant(KERNEL, PREFILL, 0, 20))
    assert law(session(Plant()), PREFILL).verdict == SLOPE
    assert law(slow, PREFILL).verdict == KERNEL
    assert "arithmetic is not the limit" in text_growth.because(slow, PREFILL)


@pytest.mark.parametrize("name", slope.HONEST_MODELS)
def test_a_hundred_honest_sessions_have_no_slow_kernel(name: str) -> None:
    model = slope.model_of(name)
    for seed in range(10):
        chance = random.Random(seed)
        records = slope.session(model, "short", slope.made_rates(chance), Plant(), chance)
        for phase in (PREFILL, DECODE):
            attention = growth.growth(records, phase)
            assert attention is None or attention.verdict != KERNEL
            assert growth.cliff(records, phase) is None


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "bf16", "f32"])
def test_a_cache_of_another_type_is_judged_by_its_numbers(kind: str) -> None:
    assert law(with_type(session(Plant()), kind)).verdict == SLOPE


def test_few_runs_tell_no_cause() -> None:
    single = [record for record in session(SLOW) if record.run.repeat == 0]
    assert (law(single).verdict, law(single).why) == (UNKNOWN, FEW)
    assert "cannot tell why" in text_growth.because(single, DECODE)
    assert text_growth.sentences(single) == []


def test_runs_that_overlap_tell_no_cause() -> None:
    noisy = RATES._replace(noise=0.5)
    attention = law(session(Plant(), rates=noisy))
    assert (attention.verdict, attention.why) == (UNKNOWN, OVERLAP)


def test_a_rate_between_both_tells_no_cause() -> None:
    attention = law(session(Plant(factor=4)))
    assert (attention.verdict, attention.why) == (UNKNOWN, BETWEEN)


def test_disturbed_runs_tell_nothing() -> None:
    records = [doubt.neighbour(record) for record in session(SLOW)]
    assert text_growth.because(text_growth.steady(records), DECODE) == ""


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_cliff_has_a_place_and_a_factor(is_whole: bool) -> None:
    records = session(Plant("cliff", DECODE, 2048, 4, is_whole), "sweep")
    cliff = growth.cliff(records, DECODE)

    assert cliff is not None
    assert cliff.n_past == pytest.approx(2048, rel=0.1)
    assert cliff.factor == pytest.approx(4, rel=0.2)
    sentence, comparison = text_growth.sentences(records)
    assert sentence.startswith("Cliff: from a")
    assert "Noise does not explain it" in sentence
    assert "--flash-attn off" in comparison
    assert text_growth.because(records, DECODE) == ""
    _, decode_panel = plot_sweep.plot_sweep(records).axes[:2]
    labels = decode_panel.get_legend_handles_labels()[1]
    assert [label for label in labels if label.startswith("cliff at about ")]


@pytest.mark.parametrize("place", [260, 512])
@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({}, True),
        ({"n_threads": 1}, False),
        ({"flash_attn": "off", "flash_attn_resolved": "off"}, False),
        ({"type_k": "q8_0", "type_v": "q8_0"}, False),
        ({"n_gpu_layers": 99}, False),
    ],
)
def test_the_cliff_of_split_caches_is_named(
    place: int, changes: dict[str, Any], is_named: bool
) -> None:
    records = []
    for record in session(Plant("cliff", DECODE, place, 4), "fine sweep"):
        settings = dataclasses.replace(record.settings, n_threads=2)
        settings = dataclasses.replace(settings, **changes)
        records.append(dataclasses.replace(record, settings=settings))
    sentence = text_growth.sentences(records)[0]
    assert sentence.startswith("Cliff: from ")
    assert ("llama.cpp splits a cache of 512 among threads" in sentence) == is_named


def test_the_sample_has_slopes() -> None:
    records = text_growth.steady(results.read([SAMPLE]).records)
    assert "read at 9.45 GB/s, the weights at 15.7 GB/s" in text_growth.because(
        records, DECODE
    )
    assert "88.3 GFLOP/s of attention" in text_growth.because(records, PREFILL)
    assert text_growth.sentences(records) == []


def test_added_time_is_at_least_and_at_most_what_single_runs_allow() -> None:
    shorts = [growth.Place(0, seconds) for seconds in (1.0, 2.0, 4.0)]
    longs = [growth.Place(1000, seconds) for seconds in (10.0, 12.0, 16.0)]
    assert growth.Ends(shorts, longs).added_s == (6.0, 10.0, 15.0)


def test_of_the_decodes_that_others_published_only_broken_kernels_are_called_slow() -> None:
    """rocWMMA's of gpt-oss and Vulkan's on an Arc B70: other builds are 5 and 21 times as fast.

    DeepSeek's compressed cache with llama.cpp of April 2025 on an RTX 4080: after 24,576 tokens
    ik_llama.cpp decodes 171 tokens/s there, against 39
    (github.com/ikawrakow/ik_llama.cpp/pull/929).
    """
    verdicts = {
        name: slope.verdict_of(records, DECODE)[0] for name, records in slope.published()
    }
    slow = {name for name, verdict in verdicts.items() if verdict != SLOPE}
    assert len(verdicts) > 50
    assert {verdicts[name] for name in slow} == {KERNEL}
    assert sorted(name.split(", ")[2] for name in slow) == [
        "deepseek-v2-lite",
        "gpt-oss-20b",
        "qwen3.5-9b",
    ]


def test_runs_that_differ_by_half_do_not_hide_a_kernel_that_is_slow_by_a_factor() -> None:
    """The Xeon's own session of two runs, whose TPOT differ by a factor of 1.44."""
    records = text_growth.steady(results.read([XEON]).records)
    assert law(records).verdict == KERNEL
    assert "memory is not the limit" in text_growth.because(records, DECODE)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_plain_attention_is_not_advised_for_packed_values(kind: str) -> None:
    assert text_growth.sentences(with_type(session(SLOW), kind)) == []
