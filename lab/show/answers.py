"""What a reader guessed or answered in a notebook, beside what is right.

A guess or an answer that is not yet written is Python's `...`, and gives a sentence, not an error.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from lab.analysis import wording

CLOSE = 1.1
"""A guess within this factor is good."""


def guess(guess: Any, measured: float, unit: str, how: str = "measured") -> None:
    """Print a reader's guess, the measured value (or, with `how`, the counted one), and how far the guess was off."""
    if not math.isfinite(measured):
        print(f"{unit}: this measurement cannot tell")
        return
    value = f"{how}: {wording.digits(measured)} {unit}"
    number = _number(guess)
    if number is None:
        no_number = f"{guess!r} is no number (write one, such as 12.5, without a unit)"
        print(f"{value}; {'you wrote no guess' if guess is ... else no_number}")
        return
    both = f"your guess: {wording.digits(number)} {unit}; {value}; "
    if number <= 0 or measured <= 0:
        print(both + f"off by {wording.digits(abs(measured - number))}")
        return
    factor = max(number / measured, measured / number)
    if factor <= CLOSE:
        print(both + "well guessed")
    else:
        print(both + f"you guessed {wording.digits(factor)} times too {'much' if number > measured else 'little'}")


def check(answer: Any, right: float | str, hint: str, within: float = 0.1) -> None:
    """Print whether an answer is right: a number off by at most the share `within`, or the letter of a choice."""
    if answer is ...:
        print("No answer yet: put it in place of the dots in the cell above, and run both cells.")
        return
    if isinstance(right, str):
        good = str(answer).strip().lower() == right
    else:
        number = _number(answer)
        if number is None:
            print(f"{answer!r} is no number. Write one, such as 12.5, without its unit.")
            return
        good = abs(number - right) <= within * abs(right)
    print("Right." if good else f"Not yet. Hint: {hint}")


def _number(value: Any) -> float | None:
    """A number that a reader wrote; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)
