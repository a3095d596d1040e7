"""The sentences below the table of `lab choose`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lab.core.lists import join_and, plural
from lab.core.sampling import GREEDY
from lab.features.choose.chains import JSON, MASKED, SCHEMA
from lab.features.choose.figures import NO_TOP_K, ChainRow, ChoosingFigures
from lab.roofline.choosing import DEFAULT
from lab.show.wording import digits, percent, seconds, times

NEAR = 1.1  # times as long: chains within it are not told apart
SMALL = 1e-6  # seconds that are not worth a sentence


def sentences(figures: ChoosingFigures) -> list[str]:
    """The answer first."""
    rows = figures.rows()
    by_key = {(row.name, row.n_seq): row for row in rows}
    n_seqs = sorted({row.n_seq for row in rows})
    lines: list[str] = []
    default = by_key.get((DEFAULT, n_seqs[0]))
    if default is not None:
        lines.append(answer(default, by_key.get((DEFAULT, n_seqs[-1]))))
        lines += grammars(by_key, default)
    if default is not None:
        lines += most_expensive([row for row in rows if row.n_seq == n_seqs[0]], default)
    lines += without_top_k(by_key.get((NO_TOP_K, n_seqs[0])))
    lines += one_after_the_other(rows)
    lines += growth(figures)
    return lines


def most_expensive(rows: Sequence[ChainRow], default: ChainRow) -> list[str]:
    """The chain that takes longest, and those that take nearly as long."""
    slowest = max(rows, key=lambda row: row.choose_s)
    if slowest.name == DEFAULT:
        return []
    factor = times(slowest.choose_s / default.choose_s)
    sentence = (
        f"The most expensive chain with {plural(default.n_seq, 'sequence')} is {slowest.name}: "
        f"{seconds(slowest.choose_s)} a token, {factor} the default's."
    )
    near = [row.name for row in rows if slowest.choose_s < NEAR * row.choose_s]
    near.remove(slowest.name)
    if near:
        sentence += f" {join_and(near)} took within {percent(NEAR - 1)} of that."
    return [sentence]


def answer(default: ChainRow, together: ChainRow | None) -> str:
    """What the default chain takes alone, and with the most sequences."""
    first = (
        f"llama-server's default chain takes {seconds(default.choose_s)} a token here, "
        f"{percent(default.share)} of a step"
    )
    if together is None or together.n_seq == default.n_seq:
        return f"{first}."
    return f"{first}; with {together.n_seq} sequences {percent(together.share)} of every step."


def grammars(by_key: dict[tuple[str, int], ChainRow], default: ChainRow) -> list[str]:
    """What each grammar adds, both ways, and its compilation."""
    lines: list[str] = []
    for name in (JSON, SCHEMA):
        checked = by_key.get((name, default.n_seq))
        masked = by_key.get((f"{name} {MASKED}", default.n_seq))
        if checked is None or masked is None:
            continue
        built_s = math.nan if checked.built_s is None else checked.built_s
        added_s = max(0.0, checked.choose_s - default.choose_s)
        lines.append(
            f"With {plural(default.n_seq, 'sequence')} a {name} adds {seconds(added_s)} a token if "
            "it checks each choice "
            f"(5 to 95 % of the tokens: {seconds(checked.low_s)} to {seconds(checked.high_s)}), "
            f"{seconds(masked.choose_s - default.choose_s)} if it masks the vocabulary before "
            f"every choice. Building it takes {seconds(built_s)}, once an answer."
        )
    return lines


def without_top_k(row: ChainRow | None) -> list[str]:
    """Why this chain has no law."""
    if row is None:
        return []
    return [
        f"Without top-k a token takes {seconds(row.low_s)} to {seconds(row.high_s)} (5 to 95 % of "
        "the tokens), by no law of the vocabulary: where the 256 most probable tokens do not reach "
        "top-p together, llama.cpp sorts all."
    ]


def one_after_the_other(rows: Sequence[ChainRow]) -> list[str]:
    """How well the time of one sequence predicts that of several."""
    errors: list[float] = []
    for row in rows:
        if row.n_seq > 1 and row.expected_s and row.name != GREEDY:
            errors.append(abs(row.expected_s / row.step_choose_s - 1))
    if not errors:
        return []
    return [
        "Sequences are chosen one after the other: the time of one sequence times their number "
        f"differs by {percent(statistics.median(errors))} from the measured time of all (median of "
        f"{plural(len(errors), 'row')}, without {GREEDY})."
    ]


def growth(figures: ChoosingFigures) -> list[str]:
    """How the default grows with the vocabulary."""
    of_default = figures.laws.get(DEFAULT)
    if of_default is None or len(of_default.points) < 2:
        return []
    sizes = sorted(figures.sizes.n_vocab.unique())
    least_s = of_default.seconds(int(sizes[0]))
    most_s = of_default.seconds(int(sizes[-1]))
    return [
        f"From a vocabulary of {sizes[0]:,} to one of {sizes[-1]:,} tokens "
        f"({times(sizes[-1] / sizes[0])}) the default chain grows from {seconds(least_s)} to "
        f"{seconds(most_s)} ({digits(most_s / least_s)}x), with random weights."
    ]
