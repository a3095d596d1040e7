"""What rates say in the lessons: the limit of a step, and what users share."""

import dataclasses
import math

import pytest

from lab.errors import LabError
from lab.features.lessons import lesson
from lab.roofline import explanation
from lab.show.sweep_laws import Law
from tests.support.ceilings import WITH_GPU
from tests.support.records import MACHINE, SETTINGS, make_record


@pytest.mark.parametrize(
    ("rates", "limit"),
    [
        ((60, 27, 400, 30), "memory"),
        ((380, 2, 400, 30), "arithmetic"),
        ((40, 1.3, 400, 29), "kernel"),
        ((0.5, 1.0, 900, 29), "kernel"),
        ((1, 29, 900, 29), "memory"),
        ((300, 21, 400, 30), "arithmetic"),
        ((9_000, 900, 60_000, 1_000), "memory"),
        ((250, 18, 400, 30), "kernel"),
        ((280, 18, 400, 30), "arithmetic"),
    ],
)
def test_four_rates_name_a_limit(rates: tuple[float, ...], limit: str) -> None:
    assert lesson.limit_by_rates(*rates) == limit


def test_the_rule_is_that_of_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanation, "KERNEL_FACTOR", 1.01)
    assert lesson.limit_by_rates(250, 18, 400, 30) == "kernel"
    assert lesson.limit_by_rates(380, 18, 400, 30) == "kernel"


@pytest.mark.parametrize("bad", [0, -1, math.nan])
def test_rates_that_are_none_are_an_error(bad: float) -> None:
    with pytest.raises(LabError, match="is not above 0"):
        lesson.limit_by_rates(1, bad, 400, 30)


def test_users_share_the_weights_and_not_attention(capsys: pytest.CaptureFixture[str]) -> None:
    lesson.users_together(Law(0.010, 20e-6, None, 0.0), 4, 2000)
    first, second = capsys.readouterr().out.splitlines()
    assert "10.0 ms for the weights and 40.0 ms for attention: one user gets 20.0" in first
    assert "at most 23.5 tokens/s together, 1.18x as many as one, and 5.88 for each" in second


def test_without_context_users_share_all(capsys: pytest.CaptureFixture[str]) -> None:
    lesson.users_together(Law(0.010, 20e-6, None, 0.0), 8, 0)
    assert "at most 800 tokens/s together, 8x as many as one" in capsys.readouterr().out
    lesson.users_together(Law(0.0, 0.0, None, 0.0), 8, 0)
    assert "says nothing" in capsys.readouterr().out
    with pytest.raises(LabError, match="are not possible"):
        lesson.users_together(Law(0.010, 20e-6, None, 0.0), 0, 10)


def test_the_memory_that_users_share_is_that_of_the_device() -> None:
    on_gpu = dataclasses.replace(SETTINGS, n_gpu_layers=99)
    assert lesson.memory_bytes(make_record(machine=WITH_GPU, settings=on_gpu)) == 8e9
    here = dataclasses.replace(MACHINE, ram_bytes=24 * 10**9)
    assert lesson.memory_bytes(make_record(machine=here)) == 24e9
    unknown = dataclasses.replace(MACHINE, ram_bytes=None)
    with pytest.raises(LabError, match="The memory of Test CPU, 4 cores is unknown"):
        lesson.memory_bytes(make_record(machine=unknown))
