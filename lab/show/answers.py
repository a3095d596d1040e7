"""Guesses and exercise answers in the notebooks, compared with the right values.

A missing guess or answer is Python's `...`; it prints a sentence instead of raising an error.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from lab.analysis import wording

CLOSE = 1.1
"""A guess within this factor is good."""


def guess(guess: Any, measured: float, unit: str, how: str = "measured") -> None:
    """Print a guess, the measured (or, with `how`, computed) value, and by what factor the guess was off."""
    if not math.isfinite(measured):
        print(f"{unit}: not known from this measurement")
        return
    value = f"{how}: {wording.digits(measured)} {unit}"
    number = _number(guess)
    if number is None:
        not_a_number = f"{guess!r} is not a number (write 12.5, without a unit)"
        print(f"{value}; {'you entered no guess' if guess is ... else not_a_number}")
        return
    both = f"your guess: {wording.digits(number)} {unit}; {value}; "
    if number <= 0 or measured <= 0:
        print(both + f"off by {wording.digits(abs(measured - number))}")
        return
    factor = max(number / measured, measured / number)
    if factor <= CLOSE:
        print(both + "a good guess")
    else:
        print(both + f"the guess is {wording.digits(factor)} times too {'high' if number > measured else 'low'}")


def check(answer: Any, right: float | str, hint: str, within: float = 0.1) -> None:
    """Print whether an answer is right: the letter of a choice, or a number with a relative error up to `within`."""
    if answer is ...:
        print("No answer yet: replace the dots in the cell above, and run both cells.")
        return
    if isinstance(right, str):
        good = str(answer).strip().lower() == right
    else:
        number = _number(answer)
        if number is None:
            print(f"{answer!r} is not a number. Write 12.5, without a unit.")
            return
        good = abs(number - right) <= within * abs(right)
    print("Right." if good else f"Not yet. Hint: {hint}")


def _number(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)
