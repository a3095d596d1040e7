"""Guesses and exercises of the notebooks.

A missing guess or answer is Python's `...`; it prints a sentence instead of raising an error. A
wrong guess of a pop question is kept in a file beside the notebooks, with the same question for
other numbers. Notebooks 6 and 7 ask it.
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
from lab.core.files import exists
from lab.core.lists import join_and
from lab.errors import LabError
from lab.show.wording import digits

CLOSE = 1.1  # a guess within this factor is good
WRONG = 1.5  # a guess outside this factor is asked again
FILE = Path("guesses.json")  # in the folder of the notebooks, where their kernels run
NO_ANSWER = "No answer yet: replace the dots in the cell above, and run both cells."
NO_WRONG_GUESS = "No question to ask again: you entered no guess that was off by more than"
NO_QUESTIONS = "There is nothing to answer."
NO_GUESSES = "No guesses yet: replace the dots in the cell above, and run both cells."


@dataclass(frozen=True)
class PopQuestion:
    """A question to ask again: with other numbers it has another answer."""

    words: str
    answer: float
    unit: str
    guess: float  # the wrong one, of the first question
    measured: float  # the answer to the first question


def guess(
    guess: object,
    measured: float,
    unit: str,
    how: str = "measured",
    again: tuple[str, str, float] | None = None,
) -> None:
    """Print a guess, the measured (or, with `how`, computed) value, and by what factor the guess
    was off.

    `again` is a number such as "1.2", the question with other numbers, and its measured answer in
    the same unit: if the guess is off by more than a factor of WRONG, `ask` asks it. A better guess
    removes it.
    """
    if not math.isfinite(measured):
        print(f"{unit}: not known from this measurement")
        return
    shown = f"{measured:,}" if isinstance(measured, int) else digits(measured)
    value = f"{how}: {shown} {unit}"
    number = number_of(guess)
    if guess is ...:
        print(f"{value}; you entered no guess")
    elif number is None:
        print(f"{value}; {guess!r} is not a number (write 12.5, without a unit)")
    else:
        print(f"your guess: {digits(number)} {unit}; {value}; {judgement(number, measured)}")
        if again:
            name, words, answer = again
            question = PopQuestion(words, float(answer), unit, number, float(measured))
            keep_or_forget(name, question)


def judgement(guess: float, measured: float) -> str:
    """How far a guess is off, in words."""
    off = factor(guess, measured)
    if not math.isfinite(off):
        return f"off by {digits(abs(measured - guess))}"
    if off <= CLOSE:
        return "a good guess"
    if guess > measured:
        return f"the guess is {digits(off)} times too high"
    return f"the guess is {digits(off)} times too low"


def keep_or_forget(name: str, question: PopQuestion) -> None:
    """Keep the question if its guess was wrong and its answer is known."""
    if factor(question.guess, question.measured) > WRONG and math.isfinite(question.answer):
        write_questions(read_questions() | {name: question})
        print(f"Notebook 6 or 7 asks this again, with other numbers (pop question {name}).")
    else:
        forget(name)


def ask() -> None:
    """Print the questions whose guesses were wrong, with other numbers."""
    questions = read_questions()
    for number, question in questions.items():
        guessed = digits(question.guess)
        measured = f"{digits(question.measured)} {question.unit}"
        print(
            f'"{number}": {question.words} (With the numbers of notebook {number[0]}, '
            f"you guessed {guessed} and measured {measured}.)"
        )
    if not questions:
        print(f"{NO_WRONG_GUESS} {WRONG:g} times.")


def ask_again(guesses: object) -> None:
    """Print the guesses, a dict by the questions' numbers, beside what was measured.

    Good ones are not asked again.
    """
    questions = read_questions()
    if guesses is ...:
        print(NO_GUESSES if questions else NO_QUESTIONS)
        return
    if not isinstance(guesses, dict):
        example = next(iter(questions), "1.1")
        message = f"{guesses!r} does not say which questions are meant."
        print(f"{message} Write {{{example!r}: 12.5}}.")
        return
    for name, value in guesses.items():
        number = number_of(value)
        if name not in questions:
            names = join_and(list(questions)) or "none"
            print(f"{name!r} is not asked. Questions to ask: {names}.")
        elif number is None:
            print(f"{name}: {value!r} is not a number. Write 12.5, without a unit.")
        else:
            question = questions[name]
            print(f"{name}: ", end="")
            guess(number, question.answer, question.unit)
            if factor(number, question.answer) <= WRONG:
                forget(name)


def check(
    answer: object,
    right: float | str,
    hint: str,
    within: float = 0.1,
    also: float = math.nan,
) -> None:
    """Print whether an answer is right: the letter of a choice, or a number with a relative error
    up to `within`, from `right` or from `also`."""
    if answer is ...:
        print(NO_ANSWER)
        return
    if isinstance(right, str):
        is_right = str(answer).strip().lower() == right
    else:
        number = number_of(answer)
        if number is None:
            print(f"{answer!r} is not a number. Write 12.5, without a unit.")
            return
        is_right = any(
            abs(number - target) <= within * abs(target) for target in (right, also)
        )
    print("Right." if is_right else f"Not yet. Hint: {hint}")


def read_questions() -> dict[str, PopQuestion]:
    """The questions to ask again, by their numbers. LabError if FILE is not such a file."""
    questions: dict[str, PopQuestion] = {}
    try:
        if exists(FILE):
            for number, values in json.loads(FILE.read_text(encoding="utf-8")).items():
                questions[number] = question_of(values)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        message = f"{FILE}, the file of wrong guesses, cannot be read: {error}"
        raise LabError(message, "Delete it.") from error
    return questions


def question_of(values: dict[str, Any]) -> PopQuestion:
    """KeyError, TypeError or ValueError for other values."""
    return PopQuestion(
        words=str(values["words"]),
        answer=float(values["answer"]),
        unit=str(values["unit"]),
        guess=float(values["guess"]),
        measured=float(values["measured"]),
    )


def write_questions(questions: dict[str, PopQuestion]) -> None:
    values = {number: dataclasses.asdict(questions[number]) for number in sorted(questions)}
    text = json.dumps(values, indent=1)
    results.write_whole(FILE, text.encode(), "The file of wrong guesses")


def forget(number: str) -> None:
    questions = read_questions()
    if number in questions:
        del questions[number]
        write_questions(questions)


def factor(value: float, reference: float) -> float:
    """How many times as large the larger one is as the smaller one; infinite if one is not
    positive."""
    if value <= 0 or reference <= 0:
        return math.inf
    return max(value / reference, reference / value)


def number_of(value: object) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)
