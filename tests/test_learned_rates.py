"""What was learned of rates, with planted factors and spreads: every term worked out by hand."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from lab.core.matrices import EMBEDDING, EXPERTS, Matrix
from lab.core.record import DECODE, PREFILL
from lab.errors import LabError
from lab.models import catalog, devices, named, synthetic
from lab.models.devices import Assumption, DeviceSheet
from lab.roofline import conditioning, datasheet
from lab.roofline.conditioning import ComparedRate, OwnRate
from lab.roofline.datasheet import (
    Condition,
    DatasheetCase,
    DatasheetParts,
    End,
    LearnedRates,
    Unpublished,
)
from tests.support.records import MODEL, SETTINGS

CARD = DeviceSheet(
    "geforce", "card-8gb", "a card of NVIDIA", 1000, "a test", architecture="ada"
)
PROCESSOR = DeviceSheet("cpu", "processor", "cores", 100, "a test", simd="avx2")
ON_CUDA = "CUDA in llama.cpp"
CARD_ON_CUDA = f"card-8gb on {ON_CUDA}"
FAMILY = f"ada on {ON_CUDA}"


def case(
    phase: str = PREFILL,
    parts: Sequence[float] = (1, 1, 1, 1, 1),
    device: DeviceSheet = CARD,
    **changes: Any,
) -> DatasheetCase:
    planted = DatasheetCase(
        phase=phase,
        device=device,
        backend="CUDA" if device.kind == "geforce" else "CPU",
        runtime="llama.cpp",
        model="model",
        quantization="Q4_0",
        flash_attn=None,
        n_prompt=100,
        has_experts=False,
        parts=DatasheetParts(*parts),
    )
    return dataclasses.replace(planted, **changes)


def learned(**changes: Any) -> LearnedRates:
    """Every part takes as long as the datasheet says; no factor is known."""
    names = {
        name for law in datasheet.FACTORS.values() for part in law.values() for name in part
    }
    planted = LearnedRates(
        phase=PREFILL,
        parts=dict.fromkeys(datasheet.PARTS, 1.0),
        factors={**{name: {} for name in names}, "model": {"model": 1.0}},
        spread=dict.fromkeys([*names, "model"], 0.0),
        ranges={
            "all": {"fast": math.exp(-1), "slow": math.exp(2)},
            "all, long": {"fast": math.exp(-3), "slow": math.exp(1)},
        },
        sd={
            "device": {CARD_ON_CUDA: 0.1},
            "family": {FAMILY: 0.3},
            "runtime": {ON_CUDA: 0.5},
            "noise": {"all": 0.2, "files": 0.15, "models": 0.12},
        },
    )
    return dataclasses.replace(planted, **changes)


# Factors


def test_flash_attention_counts_half_on_and_half_off() -> None:
    factors = {**learned().factors, "flash": {"CUDA": 9.0}}
    rates = learned(factors=factors)
    assert rates.coefficients(case(flash_attn=True))[0] == pytest.approx(3)
    assert rates.coefficients(case(flash_attn=False))[0] == pytest.approx(1 / 3)
    assert rates.coefficients(case())[0] == 1


def test_a_device_has_its_own_factor_or_the_mean_of_its_variants() -> None:
    of_variants = {"card-12gb": 2.0, "card-16gb": 8.0, "another": 100.0}
    rates = learned(factors={**learned().factors, "device": of_variants})
    assert rates.coefficients(case())[0] == pytest.approx(4)
    of_device = {**of_variants, "card-8gb": 3.0}
    rates = learned(factors={**learned().factors, "device": of_device})
    assert rates.coefficients(case())[0] == 3


def test_parts_without_a_figure_take_no_time() -> None:
    rates = learned(parts={"weights": 2.0})
    assert rates.part_times(case(parts=(7, 3, 7, 7, 7))) == [0, 6, 0, 0, 0]


def test_a_token_on_a_processor_takes_the_longer_of_two_and_a_little_more() -> None:
    """By their cubes: 27 and 64 are 91."""
    times = learned().part_times(case(DECODE, (3, 4, 1, 5, 6), PROCESSOR))
    assert times == pytest.approx([91 ** (1 / 3) * 27 / 91, 91 ** (1 / 3) * 64 / 91, 1, 5, 6])
    assert learned().part_times(case(PREFILL, (3, 4, 1, 5, 6), PROCESSOR)) == [3, 4, 1, 5, 6]
    both = datasheet.overlapping(0.03, 0.04)
    assert both == pytest.approx([0.01 * seconds for seconds in times[:2]])
    assert datasheet.overlapping(0.0, 5.0) == (0, 5)
    assert datasheet.overlapping(0.0, 0.0) == (0, 0)
    unknown, reading_s = datasheet.overlapping(math.nan, 5.0)
    assert math.isnan(unknown)
    assert reading_s == 5


def test_few_cores_read_slower_but_only_the_weights_of_a_token() -> None:
    """Reading counts 0.7 of 100 GB/s; a core of this kind reads less than half of it."""
    slow = dataclasses.replace(PROCESSOR, core="zen", cores=1)
    slowdown = slow.reading_slowdown
    assert slowdown > 1
    assert case(DECODE, device=slow).slowdown("weights") == slowdown
    assert case(DECODE, device=slow).slowdown("cache") == 1
    assert case(PREFILL, device=slow).slowdown("weights") == 1


def test_an_own_rate_shifts_the_expectation_down_to_the_limit() -> None:
    of_token = case(parts=(4, 1, 1, 0, 5))
    assert learned().expected_s(of_token) == pytest.approx(11)
    assert learned().expected_s(of_token, Condition(math.log(2), 0)) == pytest.approx(22)
    assert learned().expected_s(of_token, Condition(-math.log(2), 0)) == pytest.approx(5.5)
    assert learned().expected_s(of_token, Condition(-math.log(4), 0)) == 5


# What is known


def test_the_uncertainty_is_that_of_the_closest_level_and_the_spread_below_it() -> None:
    spread = {
        **learned().spread,
        "device": 0.4,
        "family": 1.2,
        "architecture": 0.3,
        "runtime": 2.0,
        "backend": 0.6,
    }
    rates = learned(spread=spread)
    assert rates.uncertainty(case()) == 0.1
    no_device = {**rates.sd, "device": {}}
    by_family = learned(spread=spread, sd=no_device)
    assert by_family.uncertainty(case()) == pytest.approx(math.hypot(0.3, 0.4))
    no_family = {**no_device, "family": {}}
    by_runtime = learned(spread=spread, sd=no_family)
    assert by_runtime.uncertainty(case()) == pytest.approx(math.hypot(0.5, 0.3, 1.2, 0.4))
    nothing = learned(spread=spread, sd={**no_family, "runtime": {}})
    every_level = math.hypot(0.6, 2.0, 0.3, 1.2, 0.4)
    assert nothing.uncertainty(case()) == pytest.approx(every_level)
    # No part of a processor's law has a factor of a family, of a runtime or of a backend
    on_processor = case(DECODE, device=PROCESSOR)
    assert nothing.uncertainty(on_processor) == pytest.approx(math.hypot(0.3, 0.4))


def test_the_deviation_has_the_noise_of_what_was_measured() -> None:
    rates = learned()
    assert rates.deviation(case()) == pytest.approx(math.hypot(0.2, 0.1))
    assert rates.deviation(case(), Condition(0, 0.3)) == pytest.approx(math.hypot(0.15, 0.3))
    of_type = Condition(0, 0.3, is_of_type=True)
    assert rates.deviation(case(), of_type) == pytest.approx(math.hypot(0.12, 0.3))
    without = learned(sd={**rates.sd, "noise": {"all": 0.2}})
    assert without.noise_of_files == 0.2
    assert without.noise_of_models == 0.2
    assert learned(sd={}).deviation(case()) == 1


def test_knowledge_is_of_a_family() -> None:
    rates = learned()
    unknown = dataclasses.replace(CARD, architecture="tomorrow")
    assert rates.knowledge(case()) == datasheet.FAMILY_KNOWN
    assert rates.knowledge(case(device=unknown)) == datasheet.NOTHING_KNOWN
    assert learned(sd={}).knowledge(case(device=unknown)) == datasheet.FAMILY_KNOWN
    assert Condition(0, 0).knowledge == datasheet.OWN_RATE
    assert Condition(0, 0, is_of_type=True).knowledge == datasheet.OWN_RATE_OF_TYPE


# Ranges


def test_ends_are_the_learned_ratios_times_deviation_and_scale() -> None:
    """The long end is never narrower than the short one."""
    rates = learned(sd={})
    assert rates.ends(case()) == [pytest.approx(End(1, 3)), pytest.approx(End(2, 2))]
    scaled = learned(sd={}, scale={"all": 2.0, "all, long": 5.0})
    assert scaled.ends(case()) == [pytest.approx(End(2, 15)), pytest.approx(End(4, 5))]
    deviation = math.hypot(0.2, 0.1)
    by_noise = [End(deviation, 3 * deviation), End(2 * deviation, 2 * deviation)]
    for end, expected in zip(learned().ends(case()), by_noise, strict=True):
        assert end == pytest.approx(expected)


def test_the_fast_end_of_tokens_does_not_fall_with_the_prompt() -> None:
    ranges = {
        "all": {"fast": math.exp(-1), "slow": math.exp(2)},
        "all, long": {"fast": math.exp(-3), "slow": math.exp(4)},
    }
    rates = learned(sd={}, phase=DECODE, ranges=ranges)
    assert rates.ends(case(DECODE)) == [pytest.approx(End(1, 1)), pytest.approx(End(2, 4))]


def test_an_own_rate_narrows_each_end_or_leaves_it() -> None:
    """The usual deviation is 0.224, that of files 0.15."""
    rates = learned()
    narrow = rates.ends(case(), Condition(0, 0))
    assert narrow[0] == pytest.approx(End(0.15, 0.45))
    assert rates.ends(case(), Condition(0, 1)) == rates.ends(case())


def test_the_narrowest_group_with_a_range_counts() -> None:
    ranges = {"a": 1, "b, long": 2, "all": 3}
    assert datasheet.of_narrowest(ranges, ["a", "b"], "") == 1
    assert datasheet.of_narrowest(ranges, ["a", "b"], ", long") == 2
    assert datasheet.of_narrowest(ranges, ["a"], ", long") == 3
    groups = datasheet.range_groups(case(), datasheet.OWN_RATE)
    assert groups == [f"{ON_CUDA}, own rate", "own rate"]
    groups = datasheet.range_groups(case(), datasheet.OWN_RATE_OF_TYPE)
    assert groups[1:] == ["own rate of the type", "own rate"]


@pytest.mark.parametrize(
    ("n_prompt", "size"),
    [(1, 2.0), (1000, 2.0), (3162, 3.0), (10_000, 4.0), (99_999, 4.0)],
)
def test_an_end_grows_with_the_logarithm_of_the_prompt(n_prompt: int, size: float) -> None:
    assert datasheet.at_length(End(2, 4), n_prompt) == pytest.approx(size, rel=1e-4)


def test_doubts_widen_by_their_share_of_the_time() -> None:
    """Parts of 1, 2, 3, 4 and 10 s: of 20."""
    doubts = (Unpublished(0.5, (0, 1, 0, 1, 0)), Unpublished(0.2, (1, 0, 1, 0, 0)))
    doubtful = case(parts=(1, 2, 3, 4, 10), doubts=doubts)
    variance = (0.5 * 6 / 20) ** 2 + (0.2 * 4 / 20) ** 2
    assert learned().wide(doubtful) == pytest.approx(1.645 * math.sqrt(variance))
    e_times = dataclasses.replace(doubtful, n_prompt=round(math.e * 65_536))
    variance += 0.2**2
    assert learned().wide(e_times) == pytest.approx(1.645 * math.sqrt(variance), rel=1e-5)
    low, high = learned(sd={}).range(doubtful)
    wide = learned().wide(doubtful)
    assert (math.log(low), math.log(high)) == pytest.approx(
        (-math.hypot(1, wide), math.hypot(2, wide))
    )


def test_with_known_deviations_shared_factors_are_no_doubts() -> None:
    spread = dict.fromkeys(learned().spread, 0.3)
    with_sd = learned(spread=spread).unpublished(case(DECODE))
    of_arithmetic_and_weights = (1, 1, 0, 0, 0)
    of_cache = (0, 0, 0, 1, 0)
    of_layers = (0, 0, 0, 0, 1)
    assert [doubt.counts for doubt in with_sd] == [
        of_arithmetic_and_weights,  # quantization
        of_cache,  # attention
        of_cache,  # attention of the family
        of_layers,
    ]
    without = learned(spread=spread, sd={}).unpublished(case(DECODE))
    assert len(without) == 4 + 4  # backend, runtime, architecture and family; never the device
    other_model = learned(spread=spread).unpublished(case(DECODE, model="another"))
    assert other_model[-1] == Unpublished(0.3, (1, 1, 1, 1, 1))


# Cases


def test_the_parts_of_a_prompt_of_one_token_counted_by_hand() -> None:
    """A million bytes of Q4_0, of 18 bytes for 32 weights; 2 FLOPs each. A position has 256 bytes,
    of which a 64th is counted.
    """
    card = dataclasses.replace(CARD, tflops=100, architecture=None)
    parts = datasheet.parts_of_prompt(MODEL, card, 1, 8, ("f16", "f16"))
    assert parts.arithmetic == pytest.approx(2 * 10**6 * 32 / 18 / 100e12)
    assert parts.weights == pytest.approx(1e6 / 1e12)
    assert parts.attention == pytest.approx(2 * 2 * 4 * 32 / 100e12)
    assert parts.cache == pytest.approx(256 / 64 / 1e12)
    assert parts.layers == pytest.approx(2e-6)
    later = datasheet.parts_of_prompt(MODEL, card, 9, 8, ("f16", "f16"), n_past=3)
    assert later.cache == pytest.approx((9 * 3 + 45) * 256 / 64 / 1e12)
    assert later.layers == pytest.approx(2 * 2e-6)
    at_once = datasheet.parts_of(MODEL, card, PREFILL, 1, 8, ("f16", "f16"))
    assert at_once == parts
    assert datasheet.case_for(MODEL, SETTINGS, card, PREFILL, 9).n_prompt == 9
    for settings, expected in (
        (dataclasses.replace(SETTINGS, flash_attn="auto", flash_attn_resolved=None), True),
        (dataclasses.replace(SETTINGS, flash_attn="auto", flash_attn_resolved="off"), False),
        (dataclasses.replace(SETTINGS, flash_attn=None, flash_attn_resolved=None), None),
    ):
        case = datasheet.case_for(MODEL, settings, card, PREFILL, 9)
        assert case.flash_attn is expected
    assert datasheet.case_for(MODEL, SETTINGS, card, PREFILL, 9, n_past=3).n_prompt == 12
    without_peak = datasheet.parts_of_prompt(MODEL, CARD, 1, 8, ("f16", "f16"))
    assert math.isnan(without_peak.arithmetic)
    assert math.isnan(without_peak.attention)


def test_a_short_prompt_reads_the_experts_of_its_tokens() -> None:
    """Of 4 experts a token uses one: 2 layers with 576 bytes, and a table of 3,600."""
    mixture = dataclasses.replace(
        MODEL,
        n_expert=4,
        n_expert_used=1,
        tensor_bytes={"Q4_0": 3600 + 2 * 4 * 576},
        matrices=(
            Matrix(EMBEDDING, "Q4_0", 100, 64, 1),
            Matrix(EXPERTS, "Q4_0", 32, 32, 2, 4),
        ),
    )
    parts = datasheet.parts_of_prompt(mixture, CARD, 1, 8, ("f16", "f16"))
    assert parts.weights == pytest.approx((3600 + 2 * 576) / 1e12)


def test_a_quantization_that_nobody_knows_keeps_its_name() -> None:
    def quantization(name: str | None) -> str:
        model = dataclasses.replace(MODEL, quantization=name)
        return datasheet.case_for(model, SETTINGS, CARD, DECODE, 9).quantization

    assert quantization("Q4_0") == "Q4_0"
    assert quantization("odd") == "odd"
    assert quantization(None) == ""


def test_as_many_devices_were_tested_as_in_the_phase_with_more() -> None:
    figures = [datasheet.learned()[law].evaluation["all"] for law in (PREFILL, DECODE)]
    n_devices = [round(of_phase["n_devices"]) for of_phase in figures]
    assert datasheet.evaluation_of(CARD).n_devices == max(n_devices)


def test_the_limit_counts_the_cache_for_tokens_alone() -> None:
    assert case(DECODE, (1, 4, 2, 5, 9)).least_s == 9
    assert case(PREFILL, (1, 4, 2, 5, 9)).least_s == 4
    assert case(PREFILL, (3, 4, 2, 5, 9)).least_s == 5


@pytest.mark.parametrize(
    ("quantization", "kind"),
    [
        ("F16", "floats"),
        ("IQ3_S", "of a codebook"),
        ("IQ4_XS", "integers"),
        ("Q4_0", "integers"),
    ],
)
def test_how_processors_multiply(quantization: str, kind: str) -> None:
    assert datasheet.products_of(quantization) == kind


def test_what_each_factor_is_looked_up_by() -> None:
    on_card = case(quantization="F16", flash_attn=True, has_experts=True).levels
    assert on_card["family"] == FAMILY
    assert on_card["kernel"] == "F16 on CUDA"
    assert on_card["flash"] == on_card["attention flash"] == on_card["experts"] == "CUDA"
    assert "other runtime" not in on_card
    assert "kernel" not in case().levels
    elsewhere = case(runtime="llamafile").levels
    assert elsewhere["other runtime"] == "CUDA in llamafile"
    assert "attention" not in elsewhere
    core = dataclasses.replace(PROCESSOR, core="zen")
    on_processor = case(device=core).levels
    assert on_processor["architecture"] == "avx2"
    assert on_processor["core"] == "zen"
    assert on_processor["products"] == "integers"
    assert "core" not in case(device=PROCESSOR).levels
    assert on_processor["kernel"] == "Q4_0 with avx2"
    assert "repacked" not in on_processor


def test_tokens_use_vector_units_and_some_weights_are_repacked() -> None:
    """Q4_0 for these instructions since November 2024."""
    with_products = dataclasses.replace(PROCESSOR, simd="i8mm")
    assert case(PREFILL, device=with_products).levels["architecture"] == "i8mm"
    of_token = case(DECODE, device=with_products).levels
    assert of_token["architecture"] == of_token["reading"] == "dotprod"
    assert of_token["repacked"] == "dotprod"
    assert of_token["kernel"] == "Q4_0 with dotprod, repacked"
    older = case(DECODE, device=with_products, month="2024-10").levels
    assert older["kernel"] == "Q4_0 with dotprod"
    assert "repacked" not in older


def test_what_a_publisher_measured_with() -> None:
    assert datasheet.runtime_of("localscore") == "llamafile"
    assert datasheet.runtime_of("another") == "llama.cpp"


@pytest.mark.parametrize(
    ("phase", "backend", "law"),
    [
        (PREFILL, "CUDA", PREFILL),
        (DECODE, "CUDA", DECODE),
        (PREFILL, "CPU", "prefill on CPU"),
        (DECODE, "CPU", "decode on CPU"),
    ],
)
def test_processors_have_a_law_of_their_own(phase: str, backend: str, law: str) -> None:
    assert case(phase, backend=backend).law == law


def test_what_is_assumed_is_doubted() -> None:
    model = synthetic.model_of(catalog.find("llama-3.1-8b"), "Q4_0")
    assert datasheet.doubts_of(model, CARD, DECODE) == ()
    assumed = (Assumption("gbps", "a guess", bandwidth=0.3), Assumption("x", "y", 0.0, 0.2))
    doubtful = dataclasses.replace(CARD, assumed=assumed)
    of_device = (Unpublished(0.3, (0, 1, 0, 1, 0)), Unpublished(0.2, (1, 0, 1, 0, 0)))
    assert datasheet.doubts_of(model, doubtful, DECODE) == of_device
    approximate = dataclasses.replace(model, source=named.APPROXIMATE)
    of_model = (Unpublished(0.15, (1, 1, 1, 1, 1)),)
    assert datasheet.doubts_of(approximate, CARD, PREFILL) == of_model


def test_a_quantization_known_by_its_bits_is_doubted_for_tokens() -> None:
    model = synthetic.model_of(catalog.find("llama-3.1-8b"), "Q4_0")
    by_bits = dataclasses.replace(model, quantization="4bit")
    like = synthetic.like_quantization("4bit")
    assert like is not None
    assert like.spread > 0
    of_bandwidth = (Unpublished(like.spread, (0, 1, 0, 1, 0)),)
    assert datasheet.doubts_of(by_bits, CARD, DECODE) == of_bandwidth
    assert datasheet.doubts_of(by_bits, CARD, PREFILL) == ()


# A rate of the user's own


def test_a_rate_and_the_prior_are_weighted_by_their_variances() -> None:
    """The device is known within 0.1, a file of its type within 0.12 and another one in 0.15."""
    of_type = conditioning.condition(learned(), case(), [(case(), 5 * math.exp(0.2))])
    precision = 1 / 0.1**2 + 1 / 0.12**2
    assert of_type.shift == pytest.approx(0.2 / 0.12**2 / precision)
    assert of_type.deviation == pytest.approx(precision**-0.5)
    assert of_type.is_of_type
    other = case(quantization="Q8_0")
    of_other = conditioning.condition(learned(), case(), [(other, 5 * math.exp(0.2))])
    precision = 1 / 0.1**2 + 1 / 0.15**2
    assert of_other.shift == pytest.approx(0.2 / 0.15**2 / precision)
    assert of_other.deviation == pytest.approx(precision**-0.5)
    assert not of_other.is_of_type
    both = [(case(), 5 * math.exp(0.2)), (other, 5 * math.exp(-0.1))]
    of_both = conditioning.condition(learned(), case(), both)
    precision = 1 / 0.1**2 + 1 / 0.12**2 + 1 / 0.15**2
    expected = (0.2 / 0.12**2 - 0.1 / 0.15**2) / precision
    assert of_both.shift == pytest.approx(expected)


def test_a_rate_of_a_doubtful_case_says_less() -> None:
    doubtful = case(doubts=(Unpublished(0.05, (1, 1, 1, 1, 1)),))
    condition = conditioning.condition(learned(), case(), [(doubtful, 5 * math.exp(0.2))])
    variance = 0.12**2 + 0.05**2
    precision = 1 / 0.1**2 + 1 / variance
    assert condition.shift == pytest.approx(0.2 / variance / precision)
    assert condition.deviation == pytest.approx(precision**-0.5)


def test_a_rate_is_of_the_length_that_llama_bench_measures() -> None:
    card = devices.find_device("rtx-4090")
    assert conditioning.rates_of_sheet(card) == []
    model = synthetic.model_of(catalog.find("llama-3.1-8b"), "Q4_0")
    settings = dataclasses.replace(SETTINGS, n_ubatch=512)
    rates = [OwnRate("m", PREFILL, 1000.0), OwnRate("m", DECODE, 10.0)]
    compared = conditioning.compare(rates, lambda spec: model, settings, card)
    for (of_rate, of_case), n_prompt, n_tokens in zip(
        compared, (512, 64), (512, 1), strict=True
    ):
        assert of_case.n_prompt == n_prompt
        rates_of_case = datasheet.learned_for(of_case)
        expected_s = rates_of_case.expected_s(of_case)
        assert expected_s is not None
        fast, slow = rates_of_case.range(of_case)
        assert of_rate.high_tps == pytest.approx(n_tokens / expected_s / fast)
        assert of_rate.low_tps == pytest.approx(n_tokens / expected_s / slow)
    (of_prompt, prompt_case), (of_token, token_case) = compared
    for predicted, seconds in ((prompt_case, 512 / 1000), (token_case, 1 / 10)):
        direct = conditioning.condition(
            datasheet.learned_for(predicted), predicted, [(predicted, seconds)]
        )
        assert conditioning.condition_for(predicted, compared) == direct
    assert conditioning.condition_for(prompt_case, [(of_token, token_case)]) is None
    assert conditioning.condition_for(token_case, [(of_prompt, prompt_case)]) is None


@pytest.mark.parametrize(
    ("tps", "is_inside"), [(4, True), (8, True), (3.9, False), (8.1, False)]
)
def test_the_ends_of_a_range_are_inside(tps: float, is_inside: bool) -> None:
    compared = ComparedRate(OwnRate("m", DECODE, tps), MODEL, low_tps=4, high_tps=8)
    assert compared.is_inside == is_inside


def test_a_rate_is_below_ten_million() -> None:
    assert conditioning.parse_rate("m=9999999").tps == 9_999_999
    with pytest.raises(LabError):
        conditioning.parse_rate("m=10000000")
