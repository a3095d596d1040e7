"""Guesses and exercise answers in the notebooks, compared with the right values.

A missing guess or answer is Python's `...`; it prints a sentence instead of raising an error. A wrong guess of a pop
question is kept in a file beside the notebooks, with the same question for other numbers. The last notebook asks it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from lab.core import results
from lab.core.lists import join_and
from lab.errors import LabError
from lab.show import wording

CLOSE, WRONG = 1.1, 1.5
"""A guess within the first factor is good. One outside the second is asked again."""

KEPT = Path("guesses.json")
"""In the folder of the notebooks, where their kernels run."""


@dataclass(frozen=True)
class Question:
    """A question to ask again: its measured answer in `unit`, and the wrong guess of an earlier one."""

    words: str
    answer: float
    unit: str
    guess: float
    measured: float


def guess(
    guess: Any, measured: float, unit: str, how: str = "measured", again: tuple[str, str, float] | None = None
) -> None:
    """Print a guess, the measured (or, with `how`, computed) value, and by what factor the guess was off.

    `again` is a number such as "1.2", the question with other numbers, and its measured answer in the same unit: if the
    guess is off by more than a factor of WRONG, `ask` asks it. A better guess removes it.
    """
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
    factor = _factor(number, measured)
    if not math.isfinite(factor):
        print(both + f"off by {wording.digits(abs(measured - number))}")
    elif factor <= CLOSE:
        print(both + "a good guess")
    else:
        print(both + f"the guess is {wording.digits(factor)} times too {'high' if number > measured else 'low'}")
    if again is not None and _keep(again, number, measured, unit):
        print(f"The last notebook asks this again, with other numbers (pop question {again[0]}).")


def ask() -> None:
    """Print the questions whose guesses were wrong, with other numbers."""
    kept = _kept()
    for number, asked in kept.items():
        then = f"you guessed {wording.digits(asked.guess)} and measured {wording.digits(asked.measured)} {asked.unit}"
        print(f'"{number}": {asked.words} (With the numbers of notebook {number.partition(".")[0]}, {then}.)')
    if not kept:
        print(f"No question to ask again: no guess was off by more than a factor of {WRONG:g}.")


def ask_again(guesses: Any) -> None:
    """Print the guesses, a dict by the questions' numbers, beside what was measured. Good ones are not asked again."""
    kept = _kept()
    if guesses is ... and kept:
        print("No guesses yet: replace the dots in the cell above, and run both cells.")
    elif guesses is not ... and not isinstance(guesses, dict):
        print(f"{guesses!r} does not say which questions are meant. Write {{{[*kept, '1.1'][0]!r}: 12.5}}.")
    for number, new in guesses.items() if isinstance(guesses, dict) else ():
        if number not in kept:
            print(f"{number!r} is not asked. Questions to ask: {join_and([*kept]) or 'none'}.")
            continue
        asked, value = kept[number], _number(new)
        if value is None:
            print(f"{number}: {new!r} is not a number. Write 12.5, without a unit.")
            continue
        print(f"{number}: ", end="")
        guess(value, asked.answer, asked.unit)
        if _factor(value, asked.answer) <= WRONG:
            _write({one: other for one, other in _kept().items() if one != number})


def _keep(again: tuple[str, str, float], guess: float, measured: float, unit: str) -> bool:
    """Keep the question if the guess is wrong, otherwise remove it. Is it wrong?"""
    (number, words, answer), kept = again, _kept()
    was_kept = kept.pop(number, None) is not None
    is_wrong = _factor(guess, measured) > WRONG and math.isfinite(answer)
    if is_wrong:
        kept[number] = Question(words, float(answer), unit, guess, float(measured))
    if is_wrong or was_kept:
        _write(kept)
    return is_wrong


def _write(kept: dict[str, Question]) -> None:
    text = json.dumps({number: dataclasses.asdict(kept[number]) for number in sorted(kept)}, indent=1)
    results.write_whole(KEPT, text.encode(), "The file of wrong guesses")


def _kept() -> dict[str, Question]:
    """The questions in KEPT by their numbers. LabError if it is not such a file."""
    try:
        questions = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        return {number: Question(**fields) for number, fields in questions.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LabError(f"{KEPT}, the file of wrong guesses, cannot be read: {error}", "Delete it.") from error


def _factor(one: float, other: float) -> float:
    """How many times as large the larger one is as the smaller one; infinite if one is not positive."""
    return max(one / other, other / one) if one > 0 and other > 0 else math.inf


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
