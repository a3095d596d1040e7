"""The arithmetic of a prediction: sums, limits and borders, with planted times."""

import dataclasses
import math
from typing import Any

import pytest

from lab.core import memory
from lab.errors import LabError
from lab.models import catalog, devices, synthetic
from lab.roofline import prediction
from lab.roofline.prediction import UNKNOWN, PhaseTime, Prediction
from tests.support.records import MODEL, SETTINGS

PREFILL_TIME = PhaseTime(1.0, 3.0, (2.0, 5.0))
TOKEN_TIME = PhaseTime(0.1, 0.25, (0.2, 0.5))


def request(**changes: Any) -> Prediction:
    return dataclasses.replace(Prediction(MODEL, 20, 11, PREFILL_TIME, TOKEN_TIME), **changes)


def test_a_request_is_a_prefill_and_its_further_tokens() -> None:
    row = request()
    assert row.e2e.expected_s == 3 + 10 * 0.25
    assert row.e2e_s == (2 + 10 * 0.2, 5 + 10 * 0.5)
    assert row.tps_expected == 4
    assert row.tps == pytest.approx((2, 5))
    unknown = PhaseTime(0.1, None, (0.2, 0.5))
    assert request(token=unknown).e2e.expected_s is None
    assert request(token=unknown).tps_expected is None
    assert request(prefill=PhaseTime(1.0, None, (2.0, 5.0))).e2e.expected_s is None


def test_a_request_is_known_if_it_fits_and_has_times() -> None:
    assert request().is_known
    assert not request(shortage=prediction.Shortage(2, 1, 1)).is_known
    assert not request(token=PhaseTime(None, None, UNKNOWN)).is_known
    assert not request(prefill=PhaseTime(None, None, UNKNOWN)).is_known
    assert not request(token=PhaseTime(None, None, (math.nan, 1.0))).is_known


def test_a_wait_is_added_to_the_expectation_and_to_the_range() -> None:
    assert TOKEN_TIME.longer(1.0, (0.5, 2.0)) == PhaseTime(0.1, 1.25, (0.7, 2.5))
    assert TOKEN_TIME.longer(None, (0.5, 2.0)) == PhaseTime(0.1, None, (0.7, 2.5))
    unexpected = TOKEN_TIME._replace(expected_s=None)
    assert unexpected.longer(1.0, (0.5, 2.0)).expected_s is None


def test_without_an_expectation_the_middle_of_the_range_is_shown() -> None:
    assert TOKEN_TIME.shown_s == 0.25
    assert PhaseTime(None, None, (0.2, 0.8)).shown_s == pytest.approx(0.4)
    assert math.isnan(PhaseTime(None, 1.0, UNKNOWN).shown_s)


@pytest.mark.parametrize(("n_gen", "middle"), [(1, 10), (2, 10), (3, 10), (4, 11), (6, 12)])
def test_the_middle_of_an_answer(n_gen: int, middle: int) -> None:
    assert prediction.middle_of(10, n_gen) == middle


def test_the_limits_of_a_request() -> None:
    prediction.check(9_999_998, 2, 1)
    for n_prompt, n_gen, users in ((9_999_999, 2, 1), (10, 1, 1), (10, 2, 0)):
        with pytest.raises(LabError):
            prediction.check(n_prompt, n_gen, users)


def test_users_take_as_much_longer_as_their_step_and_no_less_than_the_limit() -> None:
    three = prediction.for_users(request(), 3, one_s=2.0, all_s=3.0, limit_s=0.1)
    assert three.users == 3
    assert (three.token.limit_s, three.token.expected_s) == (0.1, 0.375)
    assert three.token.range_s == pytest.approx((0.3, 0.75))
    bounded = prediction.for_users(request(), 3, 2.0, 3.0, limit_s=0.4)
    assert bounded.token == PhaseTime(0.4, 0.4, (0.4, 0.75))
    unexpected = request(token=TOKEN_TIME._replace(expected_s=None))
    assert prediction.for_users(unexpected, 3, 2.0, 3.0, 0.1).token.expected_s is None
    for times in ((None, 3.0, 0.1), (2.0, None, 0.1), (2.0, 3.0, None)):
        unknown = prediction.for_users(request(), 3, *times)
        assert unknown.token.expected_s is None
        assert math.isnan(unknown.token.range_s[0])


def test_memory_that_is_just_enough_is_no_shortage() -> None:
    long = request(n_prompt=250)  # 261 tokens with the answer: more than 256 positions
    needed = prediction.memory_bytes(MODEL, SETTINGS, 512)
    row = prediction.with_memory(long, SETTINGS, needed)
    assert row.shortage is None
    assert (row.needed_bytes, row.memory_bytes) == (needed, needed)
    lacking = prediction.with_memory(long, SETTINGS, needed - 1)
    assert lacking.shortage is not None
    assert lacking.shortage.needed_bytes == needed
    assert lacking.shortage.longest == 256
    assert prediction.with_memory(long, SETTINGS, None).shortage is None
    two = prediction.with_memory(request(n_prompt=250, users=2), SETTINGS, needed)
    assert two.shortage is not None
    assert two.shortage.longest is None


def test_the_largest_quantization_that_just_fits() -> None:
    entry = catalog.entries()["smollm2-135m"]
    by_type = synthetic.by_quantization(entry)
    sizes = {
        name: prediction.memory_bytes(packed, SETTINGS, 100)
        for name, packed in by_type.items()
    }
    model = next(iter(by_type.values()))
    for name in ("Q4_0", "Q8_0"):
        fitting = [other for other, size in sizes.items() if size == sizes[name]]
        found = prediction.quantization_that_fits(model, SETTINGS, 100, sizes[name])
        assert found in fitting
    smallest = min(sizes.values())
    assert prediction.quantization_that_fits(model, SETTINGS, 100, smallest - 1) is None
    assert prediction.quantization_that_fits(MODEL, SETTINGS, 100, 10**12) is None


def test_a_prediction_is_named_for_its_device() -> None:
    card = devices.find_device("rtx-4090")
    assert (request(device=card).name, request(device=card).about) == (card.name, card.about)
    assert request().name == request().about == prediction.HERE


def test_each_user_has_positions_that_are_padded_to_256() -> None:
    """256 positions of 2 layers, with keys and values of 2 heads of 16 in F16."""
    cache_bytes = 256 * 2 * 2 * 2 * 16 * 2

    def without_buffers(n_ctx: int, users: int) -> int:
        n_bytes = prediction.memory_bytes(MODEL, SETTINGS, n_ctx, users)
        settings = dataclasses.replace(SETTINGS, n_ctx=256 * users, n_seq_max=users)
        buffer_bytes = memory.compute_bytes(MODEL, settings)
        assert buffer_bytes is not None
        return n_bytes - buffer_bytes

    assert without_buffers(256, 1) == 10**6 + cache_bytes
    assert without_buffers(1, 3) == 10**6 + 3 * cache_bytes
