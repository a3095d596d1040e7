"""The sentence that a person would say, and the command that closes most of the gap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.core import shell
from lab.core.asked_settings import table
from lab.features.why.answer import WhyAnswer
from lab.features.why.counting import corrections
from lab.features.why.figure import MIXED_WINDOW
from lab.features.why.parts import (
    BUILD,
    CHOOSING,
    CONCURRENCY,
    COUNTED,
    DEPTH,
    LABEL,
    LEAST,
    LEAST_ALONE,
    LENGTH,
    MACHINE,
    MODEL,
    MORE_SETTINGS,
    OTHER_SETTINGS,
    PROGRAM,
    QUANTIZATION,
    SAMPLING,
    SPECULATION,
    STATE,
    GapPart,
)
from lab.features.why.path_trial import OVER_BUDGET, WITHOUT_BUDGET
from lab.features.why.readers.setup import program_of
from lab.features.why.setups import GROUPS, NOT_OF_LLAMA
from lab.runner import as_options
from lab.show.wording import digits, percent, times

LONGER_BUDGET = "10min"
LONGEST_REASON = 75  # letters of what differs, in a sentence
SHORTEST_SWEEP = 512


@dataclass(frozen=True)
class Conclusion:
    """A sentence, and a command line ("" if none helps)."""

    sentence: str
    command: str = ""
    names_differences: bool = False  # with their values


def conclude(explained: WhyAnswer) -> Conclusion:
    """What explains most of the gap, or what is not known."""
    weak = of_weak_figure(explained)
    if weak:
        return weak
    unexplained = explained.rest
    least = LEAST if unexplained.range else LEAST_ALONE
    is_open = abs(unexplained.log) > max(unexplained.half or 0.0, math.log1p(least))
    largest = max(explained.parts[:-1], key=lambda part: part.log)
    if is_in_doubt(largest) and largest.log > unexplained.log:
        return of_doubtful_part(explained, largest)
    if not explained.causes and not is_open:
        return of_no_difference(explained)
    if not explained.causes or (is_open and unexplained.log > explained.causes[0].log):
        return of_the_rest(explained)
    if explained.causes[0].name == COUNTED:
        return of_counting(explained)
    return of_cause(explained)


def is_in_doubt(part: GapPart) -> bool:
    """Whether a factor is large, but its trial was disturbed or its range is too wide."""
    return part.log > math.log1p(LEAST_ALONE) and not part.is_cause


def of_doubtful_part(explained: WhyAnswer, part: GapPart) -> Conclusion:
    """The largest factor, and why it cannot be relied on."""
    low, high = part.range or (math.nan, math.nan)
    factor = f"{times(part.factor)}, {low:.3g}-{high:.3g}"
    if part.is_doubtful:
        sentence = (
            f"The main cause may be {part.name} ({factor}), but {part.n_disturbed} of "
            f"{part.n_runs} runs of the trial were disturbed: measure again."
        )
    else:
        sentence = (
            f"The main cause may be {part.name} ({factor}): "
            "its range is too wide to say how much of the gap it is."
        )
    command = again(explained, "--budget", LONGER_BUDGET) if part.n_runs else ""
    return Conclusion(sentence, command)


def of_no_difference(explained: WhyAnswer) -> Conclusion:
    """Nothing differs by more than chance, or nobody can tell."""
    fast, slow = explained.pair.letters
    names = {part.name for part in explained.different + explained.not_given}
    of_setup = [name for name in (MODEL, QUANTIZATION, MACHINE) if name in names]
    if of_setup:
        verb = "differ or are not given" if len(of_setup) > 1 else "differs or is not given"
        return Conclusion(
            f"They are nearly equal, but {' and '.join(of_setup)} {verb}: "
            "effects may cancel each other."
        )
    if explained.rest.range:
        return Conclusion(
            f"{slow} is not slower than {fast} for certain: "
            "two sessions of one machine differ as much."
        )
    return Conclusion(
        f"No cause of over {percent(LEAST_ALONE)}; the figures do not say how much they vary."
    )


def of_weak_figure(explained: WhyAnswer) -> Conclusion | None:
    """A figure that is no rate of decode gives no conclusion; None if both are."""
    for letter, figure in explained.pair.in_order:
        if figure.counts == MIXED_WINDOW:
            return Conclusion(
                f"No conclusion: {letter} is the average of a window with prefill. Give windows "
                "in which no prompt was processed."
            )
    return None


def of_the_rest(explained: WhyAnswer) -> Conclusion:
    """Most of the gap is not explained: it may come from what differs, or from what is unknown."""
    unexplained = explained.rest
    factor = times(math.exp(abs(unexplained.log)))
    sentence = f"Most of it is not explained: {factor}{unsure_of(unexplained)}."
    names = [part.name for part in explained.different]
    unknown = names + [part.name for part in explained.not_given]
    listed = "; ".join(differences(explained))
    counting = [
        part for part in explained.not_given if part.name == COUNTED and not part.lacking
    ]
    if len(unknown) == 1 and explained.pair.has_records:
        part = (explained.different + explained.not_given)[0]
        reason = f" ({part.reason})" if part.reason else ""
        sentence += f" The only difference without a known factor is {part.name}{reason}."
        listed = ""
    elif MODEL not in names and LEVERS & set(names):
        causes = differences(explained, but=LABEL)  # a label is no cause
        are = "causes are" if len(causes) > 1 else "cause is"
        sentence += f" The likely {are} {'; '.join(causes)}: not measured."
    elif len(names) == 1:
        sentence += f" The only difference that is known is {listed}."
    elif names:
        sentence += f" It may come from what differs: {listed}."
    elif counting:
        sentence += f" It may come from what is counted: {counting[0].reason}."
    elif unknown:
        sentence += " It may come from what is not known."
    return Conclusion(sentence, next_step(explained, unknown), names_differences=bool(listed))


def differences(explained: WhyAnswer, but: str = "") -> list[str]:
    """What differs without a known factor, but for one part, with the values of both sides."""
    pieces = list[str]()
    for part in explained.different:
        if part.name == but:
            continue
        reason = part.reason.partition("; not measured")[0]
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]}..."
        if part.name == CONCURRENCY:  # a note says so
            pieces.append(part.name)
        else:
            pieces.append(reason if part.name in LEVERS else f"{part.name} ({reason})")
    return pieces


def next_step(explained: WhyAnswer, unknown: Sequence[str]) -> str:
    """The command that measures what is unknown; "" if none can."""
    model = () if explained.has_model else ("-m", "SPEC")
    sources = {program_of(figure) for _, figure in explained.pair.sides}
    if not sources.isdisjoint(NOT_OF_LLAMA):  # nothing here is like them
        return ""
    if any(WITHOUT_BUDGET in part.reason for part in explained.parts):
        return again(explained, *model)
    if any(OVER_BUDGET in part.reason for part in explained.parts):
        return again(explained, "--budget", LONGER_BUDGET)
    if unknown == [BUILD]:
        return again(explained, "--lib", "OLD", "--lib", "NEW")
    are_records = all(figure.records for _, figure in explained.pair.sides)
    if COUNTED in unknown or MODEL in unknown or not are_records:
        return ""
    return shell.lab("doctor")


LEVERS = {*GROUPS, OTHER_SETTINGS, "flash attention and cache type"}
"""Parts that a user sets, and that often make a gap."""


QUESTIONS = {
    COUNTED: "What does the rate count: only generated tokens, over which time?",
    MODEL: "Which model file, in which quantization?",
    QUANTIZATION: "Which quantization?",
    PROGRAM: "Which program and build (--version)?",
    MACHINE: "Which device?",
    MORE_SETTINGS: "Which command line (-ngl, -fa, -t, -ub, -ctk)?",
    DEPTH: "How many tokens were in the context?",
    LENGTH: "How many prompt tokens were processed, and after how many?",
    SPECULATION: "Were tokens drafted, and how many accepted?",
    CONCURRENCY: "One request at a time?",
    SAMPLING: "Which samplers?",
}
"""What to ask for a part that is not given, in the order of what could matter."""

FEWEST_QUESTIONS = 2
MOST_QUESTIONS = 3  # without --details
MOST_NAMES = 3  # of what a side lacks


def lacking_by_sides(explained: WhyAnswer) -> dict[str, list[str]]:
    """The parts that are not known, by the sides that lack them: `A and B`, `A`, or `B`.

    What both give, and leave to a program, is under "".
    """
    order = [*QUESTIONS, *(part.name for part in explained.not_given)]
    by_sides = dict[str, list[str]]()
    for part in sorted(explained.not_given, key=lambda part: order.index(part.name)):
        by_sides.setdefault(" and ".join(part.lacking), []).append(part.name)
    return dict(sorted(by_sides.items(), key=lambda sides: -len(sides[0])))


def asked_by_sides(explained: WhyAnswer, most: int | None = None) -> dict[str, list[str]]:
    """The parts to ask about, by side, if most is unknown; {} otherwise."""
    if all(figure.records or figure.requests for _, figure in explained.pair.sides):
        return {}
    asked = dict[str, list[str]]()
    n_left = len(QUESTIONS) if most is None else most
    for sides, names in lacking_by_sides(explained).items():
        names_asked = [name for name in names if sides and name in QUESTIONS][:n_left]
        n_left -= len(names_asked)
        if names_asked:
            asked[sides] = names_asked
    n_asked = sum(map(len, asked.values()))
    return asked if n_asked >= FEWEST_QUESTIONS else {}


def questions(asked: Mapping[str, Sequence[str]]) -> str:
    """Questions to paste into the thread of a text; "" if there are none."""
    sentences = list[str]()
    for sides, names in asked.items():
        of_sides = " ".join(QUESTIONS[name] for name in names)
        sentences.append(f"Ask about {sides}: {of_sides}")
    return " ".join(sentences)


def not_known(explained: WhyAnswer, asked: Mapping[str, Sequence[str]]) -> str:
    """What is not known, and not asked, by side, in one sentence; what a side says of its drafts
    is told.
    """
    pieces = list[str]()
    drafts = ""
    for sides, names in lacking_by_sides(explained).items():
        names_left = [name for name in names if name not in asked.get(sides, ())]
        for letter, figure in explained.pair.in_order:
            if SPECULATION in names and figure.is_speculative and letter not in sides:
                each = figure.tokens_per_step
                rate = f" ({each:.3g} tokens a step)" if each else ""
                drafts = f" {letter} drafts{rate}; {sides} does not say."
        n_more = len(names_left) - MOST_NAMES
        if n_more > 0:
            names_left[MOST_NAMES:] = [f"{n_more} more"]
        if names_left and (sides or not pieces):  # what both leave to a program matters less
            of = f" (of {sides})" if sides else ""
            pieces.append(f"{', '.join(names_left)}{of}")
    if not pieces:
        return drafts.strip()
    begin = "Also unknown" if asked else "Not known"
    return f"{begin}: {'; '.join(pieces)}.{drafts}"


def again(explained: WhyAnswer, *options: str) -> str:
    """The same question with other options."""
    line = explained.asked_again or ("A.jsonl", "B.jsonl")
    return shell.lab("why", *line, *options)


def of_counting(explained: WhyAnswer) -> Conclusion:
    """Most of the gap is how one of the sides counts: the one whose correction is larger."""
    pair = explained.pair
    by_letter = corrections(pair)
    effects = list[tuple[float, str]]()
    for letter, correction in by_letter.items():
        log = correction.log or 0.0
        effects.append((log if letter == pair.letters[1] else -log, letter))
    _, letter = max(effects)
    correction = by_letter[letter]
    figure = dict(pair.sides)[letter]
    plain = digits(figure.tps * math.exp(correction.log or 0.0))
    unsure = unsure_of(explained.causes[0])
    sentence = (
        f"Most of it is how {letter} counts: {letter} {correction.reason}. "
        f"Its decode alone is {plain} tokens/s{unsure}{further(explained.causes[1:])}."
    )
    if not (explained.pair.fast.records or explained.pair.slow.records):
        return Conclusion(sentence)
    lengths = list[object]()
    if figure.depth and figure.n_gen:
        lengths = ["-p", figure.depth, "-n", figure.n_gen]
    return Conclusion(sentence, shell.lab("measure", *lengths))


def of_cause(explained: WhyAnswer) -> Conclusion:
    """The largest cause, and what the next ones add."""
    cause = explained.causes[0]
    sentence = (
        f"The main cause is {cause.name} ({times(cause.factor)}{unsure_of(cause)}): "
        f"{cause.reason}{further(explained.causes[1:])}."
    )
    return Conclusion(sentence, command_for(explained, cause))


def unsure_of(cause: GapPart) -> str:
    if cause.range:
        return ""
    return ", range unknown"


def further(causes: Sequence[GapPart]) -> str:
    """What further causes add, to end a sentence."""
    if not causes:
        return ""
    added = [f"{cause.name} adds {times(cause.factor)}" for cause in causes]
    return f"; {', '.join(added)}"


def command_for(explained: WhyAnswer, cause: GapPart) -> str:
    """The command that shows or closes the gap of a cause; "" if there is none."""
    slow = explained.pair.slow
    if not (explained.pair.fast.records or slow.records or slow.requests):
        return ""
    if cause.name == DEPTH:
        return shell.lab("sweep", "--max-len", max(SHORTEST_SWEEP, round(slow.position or 0)))
    if cause.name == STATE:
        return shell.lab("doctor")
    if cause.name in (MACHINE, BUILD):
        return ""
    if slow.requests:
        return shell.lab("measure", "--url", slow.requests[0].endpoint.url, "--dry-run")
    if not (explained.pair.fast.records and slow.records):
        return ""
    return measure_changed(explained, cause)


def measure_changed(explained: WhyAnswer, cause: GapPart) -> str:
    """Measure the slower setup with the cause's settings, or the model, of the faster one."""
    best = explained.pair.fast.records[0]
    record = explained.pair.slow.records[0]
    values = dict[str, Any]()
    for group, names in GROUPS.items():
        if group in cause.name:
            for name in names:
                field = table()[name].recorded
                values[field] = getattr(best.settings, field)
    if cause.name == CHOOSING:
        values["sampling"] = best.settings.sampling
    settings = replace(record.settings, **{**values, "lib": None})
    model = best.model if cause.name in (QUANTIZATION, MODEL) else record.model
    changed = replace(record, model=model, settings=settings)
    return shell.lab("measure", *itertools.chain(*as_options.options(changed)))
