"""`lab.why`: from two names to an answer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from lab.app.options import seconds_of
from lab.core import files, sampling
from lab.core.arguments import Reaching, StrPath, Time
from lab.core.keywords import SamplerSettings
from lab.core.record import Record
from lab.errors import LabError
from lab.features.why import facts, measured_now, pairing, recorded
from lab.features.why.answer import Question, WhyAnswer, answer, silently, with_notes
from lab.features.why.facts import Fact
from lab.features.why.figure import Figure
from lab.features.why.machines import HERE
from lab.features.why.pairing import Side
from lab.models import asked_devices, devices
from lab.remote import access
from lab.runner import builds
from lab.runner.progress import ShowStatus

EXAMPLE = 'Give two: lab why A.jsonl B.jsonl, or lab why A.jsonl "35 tokens/s"'


class WhySettings(SamplerSettings, Reaching, total=False):
    pass


def why(
    a: str | Path | Figure,
    b: str | Path | Figure | None = None,
    budget: Time = "2min",
    model: str | None = None,
    *,
    url: str | None = None,
    lib: Sequence[str] = (),
    device: str | None = None,
    prefill: bool = False,
    out: StrPath = "results",
    watch: ShowStatus = silently,
    **reaching: Unpack[WhySettings],
) -> WhyAnswer:
    """Why two speeds differ: their ratio as a product of causes.

        lab.why("results/mine.jsonl", "pasted.txt").parts
        lab.why("results/mine.jsonl", url="http://127.0.0.1:8080/v1")

    A side is a results file, a text that another program printed, or a figure in words.
    Without `b` the two setups of `a` are compared; a figure of another program is measured
    here with `model`. With `url` B is a server, reached as `reaching` says (api, api_key_env,
    header, timeout). Options of a chain of samplers, such as temp, are of what is measured
    here. `model` names the model to measure with, or those of A and B with a comma; one that
    only a file names is never downloaded or made. `lib`: the libraries of A and of B.
    `device`: of a figure without records, as lab predict names it (of two: with a comma).
    `budget=0` measures nothing. LabError for a text that no known program printed, and for a
    side alone.
    """
    began = time.monotonic()
    budget_s = seconds_of(budget, least_s=0)
    if b is not None and not url and is_url(b):
        url = str(b)
        b = None
    check(b, url, lib)
    specs = pair_of_words(model)
    of_chain, how = sampling.split(reaching)
    names = [a] if b is None else [a, b]
    sides = list(map(side_of, names))
    if len(sides) == 1 and (url or is_measured_here(sides[0], specs[0])):
        now = measured_now.SideNow(specs[0], url, budget_s, Path(out), watch, how, of_chain)
        sides.append(measured_side(sides[0], now, prefill))
    first, second = both_sides(sides, prefill, str(a))
    chosen = pairing.nearest(first, second, prefill)
    named = with_devices(chosen, device, device_of_url(url))
    question = Question(
        budget_s=max(0.0, budget_s - (time.monotonic() - began)),
        specs=(None, None) if url else specs,
        libs=[builds.folder_of(path) or path for path in lib],
        folder=Path(out),
        watch=watch,
        records=records_of(sides),
        asked_again=command_words(names, model, url),
    )
    explained = answer(named[0], named[1], question)
    left_out = pairing.setups_in_words(sides, (first, second), chosen)
    others = pairing.others_in_words((first, second), chosen, prefill)
    return with_notes(explained, left_out + others)


def command_words(names: Sequence[object], model: str | None, url: str | None) -> list[str]:
    """The words that ask the same question again."""
    line = list(map(str, names))
    if url:
        line += ["--url", url]
    if model:
        line += ["--model", model]
    return line


def is_url(name: object) -> bool:
    """Whether a name is the address of a server."""
    return isinstance(name, str) and name.startswith(("http://", "https://"))


def check(b: object, url: str | None, lib: Sequence[str]) -> None:
    """LabError for more than two sides, and for other than two libraries."""
    if url and b is not None:
        raise LabError("There are A, B and --url.", "Compare two: lab why A.jsonl --url URL")
    if len(lib) not in (0, 2):
        raise LabError(
            f"--lib is given {len(lib)} times.",
            "Give the libraries of both: lab why A.jsonl B.jsonl --lib OLD --lib NEW",
        )


def pair_of_words(text: str | None) -> tuple[str | None, str | None]:
    """What an option says of A and of B: one word is of both, two have a comma."""
    if text is None:
        return None, None
    first, _, second = text.partition(",")
    return first.strip() or None, second.strip() or first.strip() or None


def side_of(name: str | Path | Figure) -> Side:
    """The figures of A or B by setup."""
    if isinstance(name, Figure):
        return [[name]]
    return pairing.figures_of(str(name))


def is_measured_here(side: Side, spec: str | None) -> bool:
    """Whether a single side is a figure of another program, and a model is named to measure."""
    if spec is None or len(side) > 1:
        return False
    return not any(figure.records or figure.requests for figure in side[0])


def measured_side(side: Side, now: measured_now.SideNow, prefill: bool) -> Side:
    """The figures of what is measured now, in a length like the other side's."""
    like = last_of_phase(side[0], prefill)
    return recorded.figures_of(str(measured_now.measure_like(like, now)))


def last_of_phase(figures: Sequence[Figure], prefill: bool) -> Figure:
    """The last figure of the phase that is compared; the last of all if there is none."""
    for figure in reversed(figures):
        if figure.is_prefill == prefill:
            return figure
    return figures[-1]


def both_sides(
    sides: Sequence[Side], prefill: bool, name: str
) -> tuple[list[Figure], list[Figure]]:
    """The figures of A and of B. One file is enough if it has two setups, or two rates of a phase.

    LabError for a single setup: lab explain says what limits it.
    """
    if len(sides) == 2:  # headings tell the figures of one text apart
        first, second = (
            [replace(figure, heading=None) for figure in flat(side)] for side in sides
        )
        return first, second
    both = pairing.two_of(sides[0], prefill)
    if both:
        return both
    figures = flat(sides[0])
    shown = "stdin" if name == files.STDIN else name
    if any(figure.records for figure in figures):
        raise LabError(
            f"{name} has one setup, and lab why compares two.",
            f"What limits one: lab explain {name}. {EXAMPLE}",
        )
    only = last_of_phase(figures, prefill)
    raise LabError(
        f"{shown} has one figure, and lab why compares two: {only.tps:.4g} tokens/s "
        f"({only.label}).",
        f"To measure the other one here: --model SPEC. {EXAMPLE}",
    )


def flat(side: Side) -> list[Figure]:
    """All figures of a side."""
    return list(itertools.chain(*side))


def records_of(sides: Sequence[Side]) -> list[Record]:
    """All records of both sides: they may show how depth counts."""
    records = list[Record]()
    for side in sides:
        for figure in flat(side):
            records += figure.records
    return records


def device_of_url(url: str | None) -> str | None:
    """The device of a server: this machine, if its address says so."""
    if url and access.is_loopback(access.access(url)):
        return HERE
    return None


def with_devices(
    figures: Sequence[Figure], device: str | None, device_of_b: str | None
) -> list[Figure]:
    """The figures with the devices that the user names, in order, for those without records.

    LabError for what lab predict does not take for a device.
    """
    names = list(map(known_name, asked_devices.names_of_devices(device or "")))
    named = list[Figure]()
    defaults = (None, device_of_b)
    for figure, default in zip(figures, defaults, strict=True):
        name = figure.device or default or ""
        is_named = bool(names) and not figure.records
        if is_named:
            name = names.pop(0)
        figure_facts = dict(figure.facts)
        if name and not figure.records and name != figure.device:
            figure_facts[facts.HARDWARE] = Fact(name)
        named.append(replace(figure, facts=figure_facts, has_named_device=is_named))
    return named


def known_name(name: str) -> str:
    """A device as `--device` names it: its name in the list, or else the words or the datasheet
    themselves. LabError for what is neither.
    """
    if name == asked_devices.HERE:
        return HERE
    listed = devices.called(name) or devices.recognise(name)
    if listed is not None:
        return listed.name
    asked_devices.device_called(name)
    return name


def read_sides(
    names: Sequence[str], prefill: bool
) -> tuple[list[list[Figure]], tuple[Figure, ...]]:
    """All figures of each side, and those that would be compared: of one side its last one."""
    sides = [flat(side_of(name)) for name in names]
    if len(sides) == 2:
        return sides, pairing.nearest(sides[0], sides[1], prefill)
    return sides, (last_of_phase(sides[0], prefill),)
