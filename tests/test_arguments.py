"""How arguments are read: what each kind takes, and the ends of its range."""

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.core import arguments, asked_settings
from lab.core.asked_settings import AskedSettings
from lab.errors import LabError


def is_refused(read: Callable[..., Any], *given: Any) -> bool:
    try:
        read("x", *given)
    except LabError as problem:
        assert "x=" in problem.what
        return True
    return False


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (8, 8),
        (8.0, 8),
        (" 8k ", 8000),
        ("-3", -3),
        (np.int64(8), 8),
        (Decimal(8), 8),
        (Fraction(16, 2), 8),
        ("9" * 15, 10**15 - 1),
    ],
)
def test_whole_numbers(value: Any, number: int) -> None:
    assert arguments.whole_number("x", value) == number


@pytest.mark.parametrize(
    "value", [True, 8.5, "8.5", "", "x", None, float("inf"), float("nan"), "9" * 16, [8]]
)
def test_what_is_no_whole_number(value: Any) -> None:
    assert is_refused(arguments.whole_number, value)


def test_numbers() -> None:
    values = [1, 1.5, "1.5", Decimal("1.5"), Fraction(3, 2), np.float64(1.5)]
    assert [arguments.number("x", value) for value in values] == [1, *[1.5] * 5]
    for wrong in (True, "x", None, "inf", "nan", 10**400, [1]):
        assert is_refused(arguments.number, wrong)


def test_shares_are_below_one() -> None:
    values = [0, 0.02, "2%", "2 %", " 0.02", "99.9%"]
    shares = [arguments.share("x", value) for value in values]
    assert shares == pytest.approx([0, 0.02, 0.02, 0.02, 0.02, 0.999])
    for wrong in (1, "100%", -0.01, "-1%", True, None, "x"):
        assert is_refused(arguments.share, wrong)


def test_durations() -> None:
    assert arguments.duration("x", timedelta(minutes=2)) == 120
    assert arguments.duration("x", 5) == 5
    assert arguments.duration("x", "10min") == "10min"
    assert is_refused(arguments.duration, True)
    assert is_refused(arguments.duration, None)


def test_lists() -> None:
    assert arguments.whole_numbers("x", "1,2") == "1,2"
    assert arguments.whole_numbers("x", range(3)) == (0, 1, 2)
    assert arguments.whole_numbers("x", 7) == (7,)
    assert arguments.texts("x", ["a", Path("b")]) == ("a", "b")
    assert arguments.texts("x", "a") == "a"
    assert arguments.text_list("x", "a") == ("a",)
    assert arguments.text_list("x", ["a", "b"]) == ("a", "b")
    assert arguments.number_list("x", [1, 2.5]) == (1, 2.5)
    assert arguments.number_list("x", "1,2") == "1,2"
    assert arguments.paths("x", "a") == [Path("a")]
    assert arguments.paths("x", ["a", Path("b")]) == [Path("a"), Path("b")]
    assert not any(map(arguments.is_sequence, ("a", b"a", {"a": 1}, 7)))
    assert all(map(arguments.is_sequence, ([1], (1,), {1}, range(3))))


def test_paths_and_texts() -> None:
    assert arguments.path("x", "a/b") == Path("a/b")
    assert arguments.path("x", Path("a")) == Path("a")
    for wrong in ("", b"a", 7, None):
        assert is_refused(arguments.path, wrong)
    assert arguments.text("x", Path("a")) == "a"
    assert is_refused(arguments.text, 7)


def test_switches_and_words() -> None:
    values = [True, False, "on", " OFF "]
    assert [arguments.switch("x", value) for value in values] == [True, False, True, False]
    for wrong in ("yes", 1, None):
        assert is_refused(arguments.switch, wrong)
    choices = ("on", "off", "auto")
    words = [arguments.word("x", value, choices) for value in (True, "AUTO", "disabled", -1)]
    assert words == ["on", "auto", "off", "auto"]
    assert is_refused(arguments.word, "x", choices)
    assert arguments.number_or_word("x", " All ", ("all",)) == "all"
    assert arguments.number_or_word("x", "8", ("all",)) == 8
    assert is_refused(arguments.number_or_word, "some", ("all",))


def test_watchers_are_functions_or_switches() -> None:
    assert arguments.watcher("x", print) is print
    assert arguments.watcher("x", False) is False
    for wrong in (None, 1, "on"):
        assert is_refused(arguments.watcher, wrong)


# Settings


def test_a_number_lies_in_its_range() -> None:
    asked_settings.check_number("threads", 1, 8)
    asked_settings.check_number("threads", 8, 8)
    asked_settings.check_number("threads", -1, 8, least=-1)
    for wrong in (0, 9, "8", None, 1.0):
        with pytest.raises(LabError, match=r"--threads .* is not possible"):
            asked_settings.check_number("threads", wrong, 8)


@pytest.mark.parametrize(
    ("split", "shares"),
    [("3,1", (3, 1)), ("3/1", (3, 1)), ((0, 2.5), (0, 2.5)), ("0,1", (0, 1)), (None, None)],
)
def test_shares_of_devices(split: Any, shares: tuple[float, ...] | None) -> None:
    assert AskedSettings(tensor_split=split).shares == shares


@pytest.mark.parametrize("split", ["0,0", "-1,2", "a,b", "inf,1", "nan,1", ""])
def test_impossible_shares(split: str) -> None:
    with pytest.raises(LabError, match="--tensor-split"):
        _ = AskedSettings(tensor_split=split).shares


def test_what_a_setting_needs_of_another() -> None:
    AskedSettings(main_gpu=0, split_mode="none").check()
    AskedSettings(flash_attn="off", cache_type_v="f16").check()
    AskedSettings(flash_attn="on", cache_type_v="q8_0").check()
    AskedSettings(override_tensor="a=CPU,b.*=CUDA0").check()
    for wrong in (
        AskedSettings(main_gpu=0),
        AskedSettings(main_gpu=1, split_mode="layer"),
        AskedSettings(flash_attn="off", cache_type_v="q8_0"),
        AskedSettings(override_tensor="a"),
        AskedSettings(override_tensor="=CPU"),
        AskedSettings(override_tensor="a="),
        AskedSettings(override_tensor="(=CPU"),
    ):
        with pytest.raises(LabError):
            wrong.check()


def test_thousands_and_lists_in_words() -> None:
    assert asked_settings.in_digits("8k,1.5k") == "8000,1500"
    assert asked_settings.parts("a, b,,c ") == ("a", "b", "c")
    assert asked_settings.parts(None) == ()
    assert asked_settings.parts((1, 2)) == (1, 2)
    assert AskedSettings(kv_unified="on").is_unified
    assert AskedSettings(kv_unified=True).is_unified
    assert not AskedSettings().is_unified
    assert AskedSettings(device="none").is_on_cpu
    assert not AskedSettings().is_on_cpu
