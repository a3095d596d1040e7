"""A rate of the user's own: how it is read, what it says about a device, and what the page says."""

import dataclasses
import json
import math
from typing import Any

import pytest

from lab.core.record import DECODE, PREFILL
from lab.errors import LabError
from lab.features.predict import wording
from lab.features.predict.ranking import predict
from lab.models import catalog, devices, synthetic
from lab.roofline import conditioning, datasheet
from lab.roofline.conditioning import OwnRate
from lab.roofline.datasheet import Condition
from tests.support.command import run_lab
from tests.support.records import SETTINGS

CARD = devices.find_device("epyc-9654")
MODEL = synthetic.model_of(catalog.find("llama-3.1-8b"), "Q4_0")


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("llama-3.1-8b:Q4_0=12.4", OwnRate("llama-3.1-8b:Q4_0", DECODE, 12.4)),
        ("qwen3-8b = 30", OwnRate("qwen3-8b", DECODE, 30)),
        ("phi-4=tg:9", OwnRate("phi-4", DECODE, 9)),
        ("phi-4=pp:150.5", OwnRate("phi-4", PREFILL, 150.5)),
    ],
)
def test_a_rate_of_the_users_own(text: str, rate: OwnRate) -> None:
    assert conditioning.parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["12.4", "phi-4=fast", "phi-4=0", "=3", "phi-4=1e3", "phi-4=-2"]
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(LabError, match="is not MODEL=TOKENS_PER_SECOND") as problem:
        conditioning.parse_rate(text)
    assert "--measured llama-3.1-8b:Q4_0=12.4" in problem.value.hint


def decode_case(model: str = "llama-3.1-8b") -> datasheet.DatasheetCase:
    of_model = synthetic.model_of(catalog.find(model), "Q4_0")
    return datasheet.case_for(of_model, SETTINGS, CARD, DECODE, 64)


def test_a_device_that_is_twice_as_slow_is_found_by_one_rate() -> None:
    learned = datasheet.learned()[DECODE]
    case = decode_case()
    expected_s = learned.expected_s(case) or math.nan
    condition = conditioning.condition(learned, case, [(case, 2 * expected_s)])
    assert 1.3 < math.exp(condition.shift) < 2
    assert condition.deviation < 0.8 * learned.uncertainty(case)
    larger_model = decode_case("qwen3-14b")
    before = learned.range(larger_model)
    after = learned.range(larger_model, condition)
    assert after[1] / after[0] < before[1] / before[0] * 1.0001
    moved = (learned.expected_s(larger_model, condition) or 0) / (
        learned.expected_s(larger_model) or 1
    )
    assert moved == pytest.approx(math.exp(condition.shift))


def test_a_rate_of_the_users_own_never_widens_a_range() -> None:
    learned = datasheet.learned()[DECODE]
    case = decode_case()
    for deviation in (0.0, learned.uncertainty(case), 100.0):
        pairs = zip(
            learned.ends(case, Condition(0, deviation)), learned.ends(case), strict=True
        )
        for narrowed, usual in pairs:
            assert 0 < narrowed.short <= usual.short
            assert 0 < narrowed.long <= usual.long
    assert learned.ends(case, Condition(0, 100.0)) == learned.ends(case)
    assert learned.ends(case, Condition(0, 0.0)) != learned.ends(case)


def test_more_rates_say_more_and_disagreeing_ones_their_mean() -> None:
    learned = datasheet.learned()[DECODE]
    case = decode_case()
    expected_s = learned.expected_s(case) or math.nan
    single = conditioning.condition(learned, case, [(case, expected_s)])
    measured = [(case, 2 * expected_s), (case, expected_s / 2)]
    double = conditioning.condition(learned, case, measured)
    assert single.shift == pytest.approx(0)
    assert double.shift == pytest.approx(0)
    assert double.deviation < single.deviation


def test_what_is_known_of_a_device_makes_its_range_narrow() -> None:
    learned = datasheet.learned()[DECODE]
    settings = dataclasses.replace(SETTINGS, n_ubatch=512)

    def case_on(device: devices.DeviceSheet) -> datasheet.DatasheetCase:
        return datasheet.case_for(MODEL, settings, device, DECODE, 64)

    with_rows = devices.find_device("rtx-4090")
    of_family = dataclasses.replace(with_rows, name="rtx-4095")
    unknown = dataclasses.replace(of_family, architecture="tomorrow")
    deviations = [
        learned.deviation(case_on(device)) for device in (with_rows, of_family, unknown)
    ]
    assert deviations == sorted(deviations)
    assert deviations[0] < 0.9 * deviations[1] < 0.9 * deviations[2]


def test_a_condition_does_not_hide_the_noise_of_rates() -> None:
    learned = datasheet.learned()[DECODE]
    certain = Condition(0.0, 0.0)
    assert learned.deviation(decode_case(), certain) == learned.noise_of_files


def test_a_rate_of_the_same_quantization_tells_more() -> None:
    """On processors, whose kernels differ by type."""
    learned = datasheet.learned()[datasheet.DECODE_CPU]
    processor = devices.find_device("ryzen-7950x")

    def case_of(quantization: str) -> datasheet.DatasheetCase:
        model = synthetic.model_of(catalog.find("llama-3.1-8b"), quantization)
        return datasheet.case_for(model, SETTINGS, processor, DECODE, 64)

    measured = [(case_of("Q4_0"), 0.1)]
    of_type = conditioning.condition(learned, case_of("Q4_0"), measured)
    of_other = conditioning.condition(learned, case_of("Q8_0"), measured)
    assert of_type.is_of_type
    assert not of_other.is_of_type
    assert of_type.deviation < of_other.deviation
    assert abs(of_type.shift) > abs(of_other.shift)
    widths = []
    for case, own in ((case_of("Q4_0"), of_type), (case_of("Q8_0"), of_other)):
        fast, slow = learned.range(case, own)
        widths.append(slow / fast)
    assert widths[0] < widths[1]


def test_the_page_says_what_narrowed_a_range() -> None:
    rates = ("llama-3.1-8b:Q4_0=38",)
    options: Any = {"model": "qwen3-14b:Q4_0", "device": "epyc-9654"}
    (before,) = predict("1000", 100, **options)
    (after,) = predict("1000", 100, **options, measured=rates)
    assert after.tpot_s[1] / after.tpot_s[0] < before.tpot_s[1] / before.tpot_s[0]
    sentence = wording.basis(after)
    assert "Narrowed by your own rate: llama-3.1-8b Q4_0, decode 38" in sentence
    (strange,) = predict("1000", 100, **options, measured=("llama-3.1-8b:Q4_0=0.5",))
    assert "It lies outside of that range" in wording.basis(strange)


def test_the_bandwidth_of_fewer_channels_makes_a_device_slower() -> None:
    options: Any = {"model": "llama-3.1-8b:Q4_0", "device": "epyc-9654"}
    (full,) = predict("1000", 100, **options)
    (half,) = predict("1000", 100, **options, gbps=CARD.gbps / 2)
    assert full.token.limit_s is not None
    assert half.token.limit_s == pytest.approx(2 * full.token.limit_s)


@pytest.mark.parametrize(
    "options",
    [
        ("--measured", "llama-3.1-8b:Q4_0=38"),
        ("--device", "geforce", "--gbps", "300"),
        ("--device", "rtx-4090,m4", "--gbps", "300"),
    ],
)
def test_a_rate_without_its_device_is_refused(options: tuple[str, ...]) -> None:
    code, _, err = run_lab("predict", "-m", "llama-3.1-8b:Q4_0", *options)
    assert code == 1
    assert "describe one device" in err


def test_the_command_takes_a_rate_and_a_bandwidth() -> None:
    device = ("-m", "qwen3-14b:Q4_0", "--device", "epyc-9654", "-p", "1000", "--json")
    code, out, err = run_lab(
        "predict", *device, "--gbps", "300", "--measured", "llama-3.1-8b:Q4_0=30"
    )
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    assert "memory 300 GB/s" in row["basis"]
    assert "Narrowed by your own rate" in row["basis"]
    code, _, err = run_lab("predict", *device, "--gbps", "0")
    assert code == 1
    assert "--gbps 0 is not possible" in err
