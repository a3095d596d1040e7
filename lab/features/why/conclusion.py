"""The sentence that a person would say, and the command that closes most of the gap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.core import shell
from lab.core.asked_settings import table
from lab.features.why.answer import WhyAnswer
from lab.features.why.counting import corrections
from lab.features.why.parts import (
    BUILD,
    CHOOSING,
    COUNTED,
    DEPTH,
    LEAST,
    LEAST_ALONE,
    MACHINE,
    MODEL,
    QUANTIZATION,
    STATE,
    GapPart,
)
from lab.features.why.setups import GROUPS
from lab.features.why.trial import OVER_BUDGET, WITHOUT_BUDGET
from lab.runner import as_options
from lab.show.wording import digits, percent, times

LONGER_BUDGET = "10min"
SHORTEST_SWEEP = 512


@dataclass(frozen=True)
class Conclusion:
    """A sentence, and a command line ("" if none helps)."""

    sentence: str
    command: str = ""


def conclude(explained: WhyAnswer) -> Conclusion:
    """What explains most of the gap, or what is not known."""
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
    if explained.rest.range:
        return Conclusion(
            f"{slow} is not slower than {fast} for certain: "
            "two sessions of one machine differ as much."
        )
    unknown = unknown_names(explained)
    sentence = (
        f"No cause of over {percent(LEAST_ALONE)}; the figures do not say how much they vary."
    )
    if unknown:
        sentence += f" Not known: {', '.join(unknown)}."
    return Conclusion(sentence)


def unknown_names(explained: WhyAnswer) -> list[str]:
    """The parts that are not known, in the order of the table: what is counted comes first."""
    return [part.name for part in explained.parts if not part.has_factor]


def of_the_rest(explained: WhyAnswer) -> Conclusion:
    """Most of the gap is not explained: it may come from what is unknown."""
    unexplained = explained.rest
    factor = times(math.exp(abs(unexplained.log)))
    sentence = f"Most of it is not explained: {factor}{unsure_of(unexplained)}."
    unknown = unknown_names(explained)
    if len(unknown) == 1:
        sentence += f" The only difference without a known factor is {unknown[0]}."
    elif unknown:
        sentence += f" It may come from what is unknown: {', '.join(unknown)}."
    if any(WITHOUT_BUDGET in part.reason for part in explained.parts):
        return Conclusion(sentence, again(explained))
    if any(OVER_BUDGET in part.reason for part in explained.parts):
        return Conclusion(sentence, again(explained, "--budget", LONGER_BUDGET))
    if unknown == [BUILD]:
        return Conclusion(sentence, again(explained, "--lib", "OLD", "--lib", "NEW"))
    if COUNTED in unknown or MODEL in unknown:
        return Conclusion(sentence)
    return Conclusion(sentence, shell.lab("doctor"))


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
                field = table()[name].record_name or name
                values[field] = getattr(best.settings, field)
    if cause.name == CHOOSING:
        values["sampling"] = best.settings.sampling
    settings = replace(record.settings, **{**values, "lib": None})
    model = best.model if cause.name in (QUANTIZATION, MODEL) else record.model
    changed = replace(record, model=model, settings=settings)
    return shell.lab("measure", *itertools.chain(*as_options.options(changed)))
