"""Why one figure is slower than another: all parts put together, and the sentence and the command that follow."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.core import shell
from lab.core.asked_settings import defaults
from lab.core.record import Record
from lab.errors import LabError
from lab.features.tune.tuning import seconds_of
from lab.features.why import best, parts, served, sides, trial
from lab.features.why.parts import Answer, Change, Part
from lab.features.why.pasted import Setup
from lab.runner import as_options, builds, machine
from lab.runner.progress import ShowStatus
from lab.show.wording import digits, times


def why(
    a: str | Path | Setup,
    b: str | Path | Setup | None = None,
    budget: str | float = "2min",
    model: str | None = None,
    *,
    url: str | None = None,
    lib: Sequence[str] = (),
    device: str | None = None,
    prefill: bool = False,
    out: str | Path = "results",
    watch: ShowStatus = lambda status: None,
    **how: Any,
) -> Answer:
    """Why two speeds differ: their ratio as a product of causes. What the figures leave open is measured in the budget.

        lab.why("results/mine.jsonl", "pasted.txt").parts
        lab.why("results/mine.jsonl", url="http://127.0.0.1:8080/v1")

    A side is a results file, a text that another program printed, or a figure in words. Without `b`, the two setups of
    `a` are compared, or its only one with the best that this machine can do; a figure of another program is measured
    here. With `url` B is a server, reached as `how` says (api, api_key_env, header, timeout). `lib`: the libraries of A
    and of B. `device`: that of a figure without records, as lab predict names it (of two: with a comma). `budget=0`
    measures nothing. LabError for a text that no known program printed.
    """
    began, folder = time.monotonic(), Path(out)
    budget_s = 0.0 if str(budget).strip() in ("0", "0s", "0.0") else seconds_of(budget)
    if len(lib) not in (0, 2) or (url and b is not None):
        raise LabError(
            f"{len(lib)} libraries for two sides."
            if len(lib) not in (0, 2)
            else "There are three sides: A, B and --url.",
            "Compare two: lab why A.jsonl B.jsonl --lib OLD --lib NEW, or lab why A.jsonl --url URL",
        )
    libs = [path for one in lib if (path := builds.folder_of(one))]
    read = [
        sides.Given([[one]]) if isinstance(one, Setup) else sides.given(str(one)) for one in (a, b) if one is not None
    ]
    first = read[0].groups[0]
    figure = ([one for one in first if one.is_prefill == prefill] or first)[-1]
    if url:
        read.append(sides.of_server(figure, url, model, budget_s, folder, watch, how))
        model = None
    elif len(read) == 1 and len(read[0].groups) == 1:
        if figure.records:
            return best.answer(figure, str(a), str(out))
        read.append(sides.here(figure, model, budget_s, folder, watch))
    known = [record for one in read for record in one.records]
    first, second = (one.groups[0] for one in read) if len(read) == 2 else read[0].groups[:2]
    pair = sides.nearest(first, second, prefill)
    names = iter((device or "").split(","))
    named = [one if one.records or not device else dataclasses.replace(one, device=next(names, None)) for one in pair]
    left_s = max(0.0, budget_s - (time.monotonic() - began))
    return answer(named[0], named[1], left_s, model=model, libs=libs, out=folder, watch=watch, others=known)


def answer(
    a: Setup,
    b: Setup,
    budget_s: float = 0.0,
    *,
    model: str | None = None,
    libs: Sequence[str] = (),
    out: Path = Path("results"),
    watch: ShowStatus = lambda status: None,
    others: Sequence[Record] = (),
    **more: Any,
) -> Answer:
    """The ratio of two figures in parts. With a budget, depth, settings and builds (`libs` of A and B) are measured."""
    if a.is_prefill != b.is_prefill:
        raise LabError("One figure is of prefill and the other of decode.", "Give two figures of the same phase.")
    is_a_fast = a.tps >= b.tps
    both = {"A": a, "B": b} if is_a_fast else {"B": b, "A": a}
    (fast, slow), letters = (a, b) if is_a_fast else (b, a), ("A", "B") if is_a_fast else ("B", "A")
    notes = [f"{letter}: {words}" for letter, one in both.items() if (words := parts.UNKNOWN_COUNTS.get(one.counts))]
    steps = [parts.counted(both), parts.depth(both, others), parts.model(both), *parts.of_settings(both)]
    libs = libs if is_a_fast else libs[::-1]
    if libs:
        ends = [f"{builds.short(lib)} in {letter}" for lib, letter in zip(libs, both, strict=True)]
        steps.append(Change(parts.BUILD, {"lib": libs[1]}, ", ".join(ends)))
    todo = [step for step in steps if isinstance(step, Change)]
    found, records, file = dict[str, Part](), list[Record](), None
    spec = model or parts.spec_of(fast) or parts.spec_of(slow)
    if todo and budget_s > 0 and spec is None:
        notes.append("Name a model to measure depth and settings with: --model SPEC")
    elif todo and budget_s > 0:
        start = {**trial.start(fast, slow), **({"lib": libs[0]} if libs else {}), "model": spec}
        try:
            found, records, file = trial.measured(start, todo, fast.is_prefill, budget_s, out, watch, **more)
        except LabError as problem:
            notes.append(f"Nothing was measured: {problem.what}")
    made = [
        found.get(step.name, Part(step.name, words=step.words)) if isinstance(step, Change) else step for step in steps
    ]
    made += [*served.parts(both), *parts.of_machine(both, spec, out, not libs)]
    made.append(parts.rest(fast, slow, made))
    return Answer(fast, slow, letters, tuple(made), tuple(notes), tuple(records), file)


def conclusion(found: Answer) -> tuple[str, str]:
    """The sentence that a person would say, and the command that closes most of the gap ("" if none does)."""
    rest, slow, (other, letter) = found.rest, found.slow, found.letters
    is_open = abs(rest.log) > max(rest.half or 0.0, math.log1p(parts.LEAST if rest.range else parts.LEAST_ALONE))
    if not found.causes and not is_open:
        if not rest.range:
            return f"No cause of over {parts.LEAST_ALONE:.0%}; the figures do not say how much they vary.", ""
        return f"{letter} is not slower than {other} for certain: two sessions of one machine differ as much.", ""
    how_sure = "" if rest.range else " (range unknown)"
    if not found.causes or (is_open and rest.log > found.causes[0].log):
        unknown = [part.name for part in found.parts if part.how == parts.NOT_KNOWN]
        words = f"Most of it is not explained: {times(math.exp(abs(rest.log)))}{how_sure}."
        if len(unknown) == 1:
            words += f" The only difference without a known factor is {unknown[0]}."
        elif unknown:
            words += f" It may come from what is unknown: {', '.join(unknown)}."
        if unknown == [parts.BUILD]:
            return words, shell.lab("why", "A.jsonl", "B.jsonl", "--lib", "OLD", "--lib", "NEW")
        return words, "" if {parts.COUNTED, parts.MODEL} & set(unknown) else shell.lab("doctor")
    cause, *others = found.causes
    more = f"; {', '.join(f'{one.name} adds {times(one.factor)}' for one in others)}" if others else ""
    own_range = "" if cause.range else ", range unknown"
    words = (
        f"{letter} is slower mostly because of {cause.name} ({times(cause.factor)}{own_range}): {cause.words}{more}."
    )
    if cause.name == parts.COUNTED:
        own = f"{digits(slow.tps * cause.factor)} tokens/s{' (range unknown)' if own_range else ''}"
        words = f"Most of it is how {letter} counts: {cause.words.partition('; ')[0]}. Its decode alone is {own}{more}."
        lengths = ["-p", slow.n_prompt, "-n", slow.n_gen] if slow.n_prompt and slow.n_gen else []
        return words, shell.lab("measure", *lengths)
    if cause.name == parts.DEPTH:
        return words, shell.lab("sweep", "--max-len", max(512, round(parts.position(slow) or 0)))
    if slow.requests:
        return words, shell.lab("server", slow.requests[0].endpoint.url)
    if cause.name in (parts.STATE, parts.MACHINE) and not found.command:
        return words, shell.lab("doctor")
    return words, found.command or command_of(cause.name, found.fast, slow)


def command_of(name: str, fast: Setup, slow: Setup) -> str:
    """The measurement of the slower setup with one group of settings as in the faster one."""
    keys = {key for group, keys in parts.GROUPS.items() if group in name for key in keys}
    one = fast if name in (parts.QUANTIZATION, parts.MODEL, "other settings") or not slow.records else slow
    if not one.records:
        return ""
    first = one.records[0]
    chosen = {key: value for key, value in as_options.asked(first.settings).items() if key not in ("lib", "rpc")}
    if not machine.accelerators(first.machine.devices):
        chosen.pop("n_gpu_layers", None)
    chosen |= {key: fast.settings[key] for key in keys & fast.settings.keys()}
    if chosen.get("threads") == chosen.get("threads_batch"):
        chosen.pop("threads_batch", None)
    chosen = {key: value for key, value in chosen.items() if value != defaults().get(key)}
    options = {**chosen, "model": parts.spec_of(one)}
    return shell.lab("measure", *(word for key, value in options.items() for word in as_options.option(key, value)))
