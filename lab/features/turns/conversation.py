"""`lab turns`: a conversation, turn by turn, and how much of its prompt is read again.

The prompt of a turn is the system prompt, all earlier messages and answers, and a new message. Keys and values of a
token depend only on the tokens before it, so a cache serves a prompt up to the first token that differs; all after it
is computed again. A conversation is a script: cut the cache at the first difference, prefill the rest, decode the
answer. Answers are given tokens (each step feeds the next token of the text, and what the model would have chosen is
recorded), so every case reads the same text, and what a cached turn chooses can be compared with the uncached one.
The last token of an answer is chosen but not computed; the next turn's prefill computes it.

`memory` keeps the cache between turns, `slot` too, while a second conversation of the same lengths takes turns with the
first in a sequence of its own, `disk` saves the cache after each turn and loads it before the next, `none` computes
every prompt from its first token; beside a cache it does so at two turns only, and a law in n and n^2 gives the others.
With breaks, the same conversation without them is measured too: the perfect cache.

Rows of the table are turns, of the engine and of a server (`keep` is then `server`). `is_known`: the tokens that the
cache served are counted, not estimated. Of a server `differs_at` counts letters.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from lab.core import memory, script, stats
from lab.core.lists import grouped, plural
from lab.core.payloads import Turns
from lab.core.record import DECODE, FORGET, LOAD, PREFILL, SAVE, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError, printable
from lab.features.experiment import (
    REPEAT,
    Experiment,
    Keywords,
    Option,
    Table,
    as_rows,
    cell,
    first_difference,
    for_plan,
    need_every_position,
    off_by,
    public,
)
from lab.features.predict.learning import StepPrediction
from lab.features.serve import loads
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas
from lab.show.wording import UNKNOWN, seconds

if TYPE_CHECKING:
    import click
    import pandas as pd
    from matplotlib.figure import Figure

T = TypeVar("T")

MEMORY, SLOT, DISK, NONE = KEEPS = ("memory", "slot", "disk", "none")
SERVER = "server"
PLACES = {
    MEMORY: ("", "cache in memory"),
    SLOT: (" with a second conversation in its own slot", "a slot for each conversation"),
    DISK: (" with the cache on disk", "cache on disk"),
    NONE: (" without a cache", "no cache"),
    SERVER: (" through the server", "the server's cache"),
}
"""For each place of the cache the words of a sentence, and the title of a picture."""

SECOND = "second"
BREAKS = {
    "system": "A system prompt that does not change",
    "tools": "Tools listed in the same order",
    "truncate": "An old message that is not shortened",
    SECOND: "A slot of its own for the second conversation",
    "shift": "A context that does not fill up",
    "thinking": "Thinking that stays in earlier answers",
}
"""What breaks a cache, and what would not."""

ROLES = ("system", "developer", "user", "tool", "assistant")
MOST_TURNS = 200
MOST_BYTES = 16 << 20
"""Of a file to replay."""

CLOCK_AT = 16
"""The token of the system prompt that a changed clock changes."""


def parse_breaks(text: str, n_turns: int) -> tuple[tuple[str, ...], ...]:
    """The breaks of each turn, from `system@6,truncate@9,thinking@2+` (`+`: in every turn from there on)."""
    of_turns: list[list[str]] = [[] for _ in range(n_turns)]
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z]{1,20})@(\d{1,6})(\+?)", part)
        at = int(match[2]) if match else 0
        if not match or match[1] not in BREAKS or not 2 <= at <= n_turns:
            hint = f"Write system@6 or thinking@2+. Turns: 2 to {n_turns}. Events: {', '.join(BREAKS)}."
            raise LabError(f"--break {part[:40]!r} is not an event at a turn that can find a cache.", hint)
        for own in of_turns[at - 1 : n_turns if match[3] else at]:
            own.append(match[1])
    return tuple(map(tuple, of_turns))


def of_text(breaks: str) -> str:
    """The breaks that change the prompts: all but that of a second conversation."""
    return ",".join(part for part in breaks.split(",") if not part.strip().startswith(SECOND))


def n_slots(lever: Turns) -> int:
    """Conversations that are measured in turns, each in a sequence of its own."""
    return 2 if lever.keep == SLOT else 1


def n_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of equal tokens at the beginning of both."""
    at = first_difference(one, other)
    return min(len(one), len(other)) if at is None else at


def turns_of(
    lever: Turns, text: Callable[[int], list[T]]
) -> Generator[tuple[list[T], int, list[T], list[list[T]]], list[T] | None, None]:
    """Of each turn: its prompt, the number of its first tokens that the cache has, its answer, and the prompt in parts.

    The cache has the turn before: its prompt, and its answer without the last token. An answer that is sent to it takes
    the place of the planned one. Tokens may also be words.
    """
    n_turns = len(lever.messages)
    of_turns, n_parts = parse_breaks(lever.breaks, n_turns), sum(lever.messages) + sum(lever.answers)
    source = text(lever.system + n_parts + 2 * n_turns)
    tokens, spare = iter(source), iter(source[lever.system + n_parts :])

    def take(n: int) -> list[T]:
        return [next(tokens) for _ in range(n)]

    system, said = take(lever.system), list[list[T]]()  # said: message, answer, message, answer, ...
    cache: list[T] = []
    for number, (n_message, n_answer) in enumerate(zip(lever.messages, lever.answers, strict=True)):
        n_kept = len(cache)
        for kind in of_turns[number]:
            if kind == "system" and system:
                at = min(CLOCK_AT, len(system) - 1)
                system = [*system[:at], next((t for t in spare if t != system[at]), system[0]), *system[at + 1 :]]
            elif kind == "tools":  # the second half of the system prompt lists two tools
                half, quarter = len(system) // 2, len(system) // 4
                system = [*system[:half], *system[half + quarter :], *system[half : half + quarter]]
            elif kind == "truncate":
                oldest = 2 * ((number - 1) // 2)
                said[oldest] = said[oldest][: max(1, len(said[oldest]) // 4)]
            elif kind == SECOND:  # it began with the same system prompt
                n_kept = min(n_kept, n_common(cache, system))
            elif kind == "shift":
                said = said[2 * ((len(said) // 2 + 1) // 2) :]
            elif kind == "thinking":
                said = [own[len(own) // 2 :] if i % 2 else own for i, own in enumerate(said)]
        said.append(take(n_message))
        prompt, answer = [*system, *(token for own in said for token in own)], take(n_answer)
        n_cached = 0 if lever.keep == NONE else min(n_kept, n_common(cache, prompt), len(prompt) - 1)
        served = 0 if lever.whole and n_cached < len(cache) else n_cached
        answer = (yield prompt, served, answer, [system, *said]) or answer
        said.append(answer)
        cache = [*prompt, *answer[:-1]]


def write(case: Case, text: Text, settings: Settings, *, folder: Path = Path()) -> list[Operation]:
    """The script: of each turn cut the cache at the first difference, prefill the rest, decode the answer."""
    lever, path, made = case.lever, str(folder / "state"), list[Operation]()
    assert isinstance(lever, Turns)
    n_past = [0] * n_slots(lever)
    conversations = [turns_of(lever, functools.partial(text, slot)) for slot in range(len(n_past))]
    for number, turns in enumerate(zip(*conversations, strict=True), 1):
        for slot, (prompt, n_cached, answer, _) in enumerate(turns if number in numbers(lever) else ()):
            if n_past[slot] and lever.keep == DISK:
                made += [Operation(FORGET), Operation(LOAD, path=path)]
            if n_cached < n_past[slot]:
                made.append(Operation(FORGET, sequence=slot, first=n_cached))
            made += script.prefill(slot, prompt[n_cached:], settings.n_ubatch)
            made += [Operation(DECODE, (Part(slot, (token,), 1),)) for token in answer[:-1]]
            if lever.keep == DISK:
                made.append(Operation(SAVE, path=path))
            n_past[slot] = len(prompt) + len(answer) - 1
    return made


def numbers(lever: Turns) -> Sequence[int]:
    """The turns that are measured, from 1."""
    return lever.only or range(1, len(lever.messages) + 1)


def lever_of(system: int, turn: str, turns: int, breaks: str, seed: int) -> Turns:
    """The conversation of these options, with a cache in memory. LabError for impossible values."""
    for name, value, low, most in (("system", system, 0, MAX_TOKENS), ("turns", turns, 1, MOST_TURNS)):
        if not low <= value <= most:
            raise LabError(f"--{name} {value:,} is not possible.", f"Give a whole number from {low} to {most:,}.")
    message, plus, answer = turn.partition("+")
    if not plus:
        raise LabError(f"--turn {turn!r} has one length.", "Give the tokens of a message and an answer: --turn 300+150")
    of_message, of_answer = loads.parse("--turn", message), loads.parse("--turn", answer)
    if min(of_answer.values) < 2:
        raise LabError(f"--turn {turn}: an answer of 1 token has no decode.", "Give answers of 2 or more tokens.")
    drawn = loads.drawn(of_message, of_answer, turns, f"{seed} turns")
    parse_breaks(breaks, turns)
    messages, answers = tuple(of_message.values[i] for i, _ in drawn), tuple(n for _, n in drawn)
    is_drawn = len({*of_message.values}) > 1 or len({*of_answer.values}) > 1
    return Turns(system, messages, answers, breaks, MEMORY, asked=turn if is_drawn else "")


def read_messages(path: Path) -> list[str]:
    """A conversation from JSON lines with `role` and `content`: the system prompt, then messages and answers in turn.

    Messages of the user and of tools between two answers are one; a missing last answer is "". LabError for a file that
    is too large or is not a conversation.
    """
    hint = 'Each line is a message: {"role": "user", "content": "..."} Roles: system, user, tool, assistant.'
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise LabError(f"The file {path} cannot be read: {problem.strerror}.", "Check its name.") from None
    if len(data) > MOST_BYTES:
        raise LabError(f"The file {path.name} is larger than {MOST_BYTES >> 20} MB.", "Give a part of it.")
    said = [""]
    for number, line in enumerate(data.splitlines(), 1):
        try:
            fields = json.loads(line) if line.strip() else {}
            parts = fields.get("content") or ""
            if isinstance(parts, list):
                parts = "\n".join(part["text"] for part in parts if part.get("type") == "text")
            text, role = printable(parts, kept="\n\t"), fields.get("role", "system")
            ROLES.index(role)
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
            raise LabError(f"{path.name}, line {number}, is not a message.", hint) from None
        after_answer, is_answer = len(said) % 2 == 1, role == "assistant"  # the system prompt counts as an answer
        if is_answer == after_answer or (len(said) == 1 and role in ("system", "developer")):
            said[-1] += text
        elif text:
            said.append(text)
    said += [""] * (1 - len(said) % 2)
    if not 3 <= len(said) <= 2 * MOST_TURNS + 1:
        raise LabError(f"{path.name} has {len(said) // 2} turns; 1 to {MOST_TURNS} are possible.", hint)
    return said


def replayed(said: Sequence[str], name: str, breaks: str, count: Callable[[str], int]) -> Turns:
    """The conversation of a file, with the lengths that `count` gives; a missing or short answer has 2 tokens."""
    system, *rest = map(count, said)
    parse_breaks(breaks, len(rest) // 2)
    messages, answers = (max(1, n) for n in rest[::2]), (max(2, n) for n in rest[1::2])
    return Turns(system, tuple(messages), tuple(answers), breaks, MEMORY, replay=printable(name))


def plan(
    worker: Worker,
    /,
    system: int = 500,
    turn: str = "100+50",
    turns: int = 8,
    breaks: str = "",
    keep: str | Sequence[str] = "memory,none",
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    replay: str | None = None,
    folder: Path = Path(),
    **settings: Unpack[Keywords],
) -> Plan:
    """Measure a conversation turn by turn; returns a record per run.

        lab.turns(system=4000, turn="300+150", turns=12, breaks="system@6")

    `turn` is tokens of a message + tokens of an answer, each fixed or drawn as in `lab.load`. With `replay`, a file of
    messages as JSON lines, the lengths are those of its messages, and the text is the lab's own. States are saved in
    `folder`, on the disk of `out`, and deleted again. LabError for impossible values.
    """
    asked = [part.strip() for part in (keep.split(",") if isinstance(keep, str) else keep)]
    if not asked or set(asked) - set(KEEPS) or len(set(asked)) < len(asked):
        raise LabError(f"--keep {','.join(asked)} is not possible.", f"Give some of {','.join(KEEPS)}, each once.")
    if replay:
        said = read_messages(Path(replay))
        small = make_plan(worker, [16], 2, 1, model, **for_plan(settings))
        worker.load(small.file.path, small.settings)
        first = replayed(said, Path(replay).name, breaks, lambda text: len(worker.tokenize(text)))
    else:
        first = lever_of(system, turn, turns, breaks, settings.get("seed") or 0)
    longest, n_last = first.system + sum(first.messages) + sum(first.answers[:-1]), first.answers[-1]
    made = make_plan(worker, [longest], n_last, repeat, model, **for_plan(settings))
    if (most := made.model.n_ctx_train) is not None and longest + n_last > most:
        what = f"The last turn has {longest + n_last:,} tokens; {made.model.name} was trained for {most:,}."
        raise LabError(what, "Give fewer --turns, or a shorter --turn or --system.")
    words, n, cases = list[str](), len(first.messages), list[Case]()
    try:
        need_every_position(made.model)
    except LabError as problem:
        words = [f"{problem.what} Its cache serves a prompt as a whole or not at all."]
    for kept in asked:
        broken = of_text(breaks) if kept in (SLOT, NONE) else breaks
        only = (n // 2 + 1, n) if kept == NONE and len(asked) > 1 and n > 3 else ()
        for own in dict.fromkeys([broken] if kept == NONE else [broken, ""]):
            lever = dataclasses.replace(first, breaks=own, keep=kept, whole=bool(words), only=only)
            cases.append(Case(longest, n_last, lever=lever, sequences=(longest + n_last,) * n_slots(lever)))
    planned = with_cases(made, cases, functools.partial(write, folder=folder))
    return dataclasses.replace(planned, warnings=(*planned.warnings, *words))


def figures(steps: pd.DataFrame, lever: Turns) -> pd.DataFrame:
    """A row per turn from a run's steps; empty if they are not those of the conversation.

    `differs_at`: the first token of the prompt that is not the cache's, NaN if the cache served all that it had.
    `n_again`: tokens of earlier turns that were computed again; `second_again`: those of the second conversation.
    """
    import pandas as pd

    is_prompt = steps.kind.eq(PREFILL)
    number = (is_prompt & ~is_prompt.shift(fill_value=False)).cumsum()
    number += steps.kind.isin([FORGET, LOAD]).astype(int)  # they belong to the prompt that follows
    steps = steps.assign(number=number, took_s=steps.end_s - steps.start_s)
    prompts, turns = steps[is_prompt].groupby("number"), steps[steps.kind != SAVE].groupby("number")
    slots = n_slots(lever)
    measured = [i for i in numbers(lever) for _ in range(slots)]
    if len(prompts) != len(measured) or not len(lever.answers) == len(lever.messages) >= max(measured):
        return pd.DataFrame()
    n_answer = [lever.answers[i - 1] for i in measured]
    n_new = [lever.messages[i - 1] + (1 if i > 1 else lever.system) for i in measured]  # and the last token before
    t = pd.DataFrame({"n_cached": prompts.n_past.first(), "n_computed": prompts.n_tokens.sum()})
    t["n_prompt"] = t.n_cached + t.n_computed
    t["n_again"] = (t.n_computed - n_new).clip(lower=0)
    t["second_again"] = t.n_again.shift(-1) if slots > 1 else math.nan
    n_held = (t.n_prompt + n_answer - 1).shift(slots, fill_value=0)
    t["differs_at"] = t.n_cached.where((t.n_cached < n_held) & (lever.keep != NONE))
    t["ttft_s"] = prompts.end_s.last() - turns.start_s.first()
    t["decode_s"] = turns.end_s.last() - prompts.end_s.last()
    t["turn_s"] = t.ttft_s + t.decode_s
    for kind in (SAVE, LOAD):
        t[f"{kind}_s"] = steps[steps.kind == kind].groupby("number").took_s.sum().reindex(t.index)
    return t[::slots].set_axis(pd.Index(numbers(lever), name="turn"))


def predicted(prediction: StepPrediction, lever: Turns) -> pd.DataFrame:
    """The same figures of the same script, with predicted times of its steps; NaN where a step's cost is unknown."""
    import pandas as pd

    move, compute = functools.cache(prediction.move), functools.cache(prediction.seconds)
    now, rows, case = 0.0, [], Case(1, 1, lever=lever)
    for shape in script.shapes(write(case, lambda sequence, n: list(range(n)), prediction.settings)):
        n_past = shape.n_past if shape.kind != DECODE else shape.n_past // 32 * 32  # for fewer different steps
        if shape.kind in (FORGET, SAVE, LOAD):
            taken = 0.0 if shape.kind == FORGET else move(n_past)
        else:
            taken = compute(shape.n_tokens, n_past, shape.n_outputs)
        start_s, now = now, now + (math.nan if taken is None else taken)
        rows.append((shape.kind, shape.n_tokens, shape.n_past, start_s, now))
    return figures(pd.DataFrame(rows, columns=["kind", "n_tokens", "n_past", "start_s", "end_s"]), lever)


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """The turns of each conversation, with its breaks if it has some; uncached only if nothing else was measured.

    `without_s` and `perfect_s`: the turn's time without a cache, and with one that nothing breaks; None if those cases
    were not measured. `sum_s`: up to the end of this turn. `slot_bytes`: the cache of the second conversation.
    """
    import pandas as pd

    known, made = dict[Turns, pd.DataFrame](), list[pd.DataFrame]()
    for lever, own in grouped([one for one in records if one.run.turns], lambda one: one.run.turns).items():
        if runs := [t for one in own if not (t := figures(one.run.steps.frame(), lever)).empty]:
            sizes = next((one.run.state_bytes for one in own if one.run.state_bytes), ())
            slot = dataclasses.replace(own[0].settings, n_seq_max=1, n_ctx=own[0].settings.n_ctx // 2)
            n_bytes = memory.of_context(own[0].model, slot).kv_cache_bytes if lever.keep == SLOT else None
            known[lever] = pd.concat(runs).groupby(level=0).median().assign(n_runs=len(runs), slot_bytes=n_bytes)
            known[lever]["state_bytes"] = pd.Series(sizes, index=range(1, 1 + len(sizes)), dtype=float)
    conversations = grouped(known, lambda lever: dataclasses.replace(lever, breaks="", keep="", only=()))
    for number, levers in enumerate(conversations.values(), 1):
        cached = [lever for lever in levers if lever.keep != NONE]
        are_broken = {lever.keep for lever in cached if lever.breaks}
        shown = [lever for lever in cached if lever.breaks or lever.keep not in are_broken] or levers
        for lever in sorted(shown, key=lambda lever: KEEPS.index(lever.keep)):
            t, text = known[lever], of_text(lever.breaks)
            none = next((one for one in levers if (one.keep, of_text(one.breaks)) == (NONE, text)), None)
            perfect = next((one for one in cached if (one.keep, one.breaks) == (lever.keep, "")), None)
            expected, without_s = predicted(prediction, lever) if prediction else pd.DataFrame(), math.nan
            if none:  # measured, or by the law a n + b n^2 of those turns and of the first one
                n, times_s = ([*t[name].head(1), *known[none][name]] for name in ("n_prompt", "ttft_s"))
                linear, square = stats.fit([n, [one * one for one in n]], times_s)
                law_s = linear * t.n_prompt + square * t.n_prompt**2
                without_s = known[none].ttft_s.reindex(t.index).fillna(law_s) + t.decode_s
            made.append(
                t.assign(
                    conversation=number,
                    keep=lever.keep,
                    cache=lever.keep if len({one.keep for one in shown}) > 1 else "",
                    breaks=[", ".join(parse_breaks(lever.breaks, len(lever.messages))[turn - 1]) for turn in t.index],
                    sum_s=t.turn_s.cumsum(),
                    without_s=without_s,
                    perfect_s=known[perfect].turn_s if perfect else math.nan,
                    expected_ttft_s=expected.get("ttft_s", math.nan),
                    expected_turn_s=expected.get("turn_s", math.nan),
                    is_known=True,
                ).reset_index()
            )
    return finished(pd.concat(made, ignore_index=True)) if made else []


def finished(t: pd.DataFrame) -> list[Any]:
    """The table as rows, with whole numbers for counts, and the part of TTFT in which tokens were read again."""
    counts = {"conversation", "turn", "n_prompt", "n_cached", "n_computed", "n_again", "second_again", "differs_at"}
    counts |= {"n_runs", "state_bytes", "slot_bytes"}
    t = t.assign(again_s=(t.ttft_s * t.n_again / t.n_computed).where(t.n_again > 0, 0.0).astype(float))
    return as_rows(t.astype(dict.fromkeys(counts & {*t.columns}, "Int64")))


def sentences(made: Sequence[Any]) -> list[str]:
    """The answer of each conversation, what broke its cache, and how good the predictions are."""
    words = list[str]()
    for (_, keep), own in grouped(made, lambda row: (row.conversation, row.keep)).items():
        first, last, where = own[0], own[-1], PLACES[keep][0]
        ttft_s, again_s = sum(row.ttft_s for row in own), sum(row.again_s for row in own)
        read = f"{seconds(again_s)} of that for tokens read before" if again_s else "no token was read twice"
        waiting = "waiting for the first token" if keep == SERVER else "prefill"
        whole = f"{plural(len(own), 'turn')} take {seconds(last.sum_s)}{where}"
        words.append(f"{whole}; {seconds(ttft_s)} of it is {waiting}, {read}.")
        lost: dict[str, float] = {}
        for row in own:
            if row.differs_at is None or not row.breaks:
                continue
            unit, about = ("letter", "" if row.is_known else "about ") if keep == SERVER else ("token", "")
            words.append(
                f"Turn {row.turn} ({row.breaks}): the prompt differs from {unit} {row.differs_at + 1:,} on, and "
                f"{about}{plural(row.n_again, 'token')} after it were read again."
            )
            if row.perfect_s is not None:
                lost[row.breaks] = lost.get(row.breaks, 0.0) + row.turn_s - row.perfect_s
        words += [
            f"{BREAKS.get(kinds, f'Without {kinds} it')} would save {seconds(saved)}."
            for kinds, saved in lost.items()
            if saved > 0
        ]
        if keep == SLOT:
            costs = f" costs {first.slot_bytes / 1e6:,.1f} MB of memory" if first.slot_bytes else " costs memory"
            n_again = sum(row.second_again for row in own)
            read = f"{plural(n_again, 'token')} of it were read again" if n_again else "no token of it was read twice"
            words.append(f"The second conversation's own slot{costs}; {read}.")
        if keep != NONE and all(row.without_s is not None for row in own):
            words.append(f"Without a cache they take {seconds(sum(row.without_s for row in own))}.")
        loads = [(before, row) for before, row in itertools.pairwise(own) if row.load_s]
        if loads and last.save_s and all(row.state_bytes for row in own):
            (held, after), gbps = loads[-1], last.state_bytes / 1e9 / last.save_s
            words.append(
                f"Saving {last.state_bytes / 1e6:,.1f} MB took {seconds(last.save_s)} ({cell(gbps)} GB/s), loading "
                f"{held.state_bytes / 1e6:,.1f} MB {seconds(after.load_s)} "
                f"({cell(held.state_bytes / 1e9 / after.load_s)} GB/s)."
            )
        if len(loads) > 1:
            lengths = [[1.0] * len(loads), [float(before.n_prompt) for before, _ in loads]]
            fixed, per_token = stats.fit(lengths, [row.load_s for _, row in loads])
            gain = first.ttft_s / first.n_computed - per_token
            about = (
                f"faster than prefill from about {plural(max(1, round(fixed / gain)), 'token')} on" if gain > 0 else ""
            )
            words.append(f"Loading is {about or 'not faster than prefill at any of these lengths'}.")
        if not all(row.is_known for row in own):
            words.append("~: the server does not report cached tokens; they are estimated from the TTFT.")
        words += off_by(((row.expected_ttft_s, row.ttft_s) for row in own), f"TTFT{where}")
    return words


def _conclude(made: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> list[str]:
    """The sentences, and whether cached turns chose the tokens of uncached ones."""
    cold, cached = dict[Any, tuple[int, ...]](), list[tuple[Any, tuple[int, ...]]]()
    for run, lever in ((one.run, one.run.turns) for one in records):
        start = 0
        for turn in numbers(lever) if lever else ():
            assert lever
            n, key = lever.answers[turn - 1], (run.repeat, of_text(lever.breaks), turn)
            ids, start = run.token_ids[start : start + n], start + n * n_slots(lever)
            if lever.keep == NONE:
                cold[key] = ids
            elif turn > 1:
                cached.append((key, ids))
    pairs = [(key[2], first_difference(ids, cold[key])) for key, ids in cached if key in cold]
    differ, answers = [(turn, token) for turn, token in pairs if token is not None], plural(len(pairs), "answer")
    words = [f"In {answers} the cached turns chose the tokens of the uncached ones."] if pairs else []
    if differ:
        words = [
            f"In {len(differ)} of {answers} a cached turn chose another token than the uncached one, first token "
            f"{min(differ)[1] + 1} of answer {min(differ)[0]}: kernels for steps of other sizes round differently."
        ]
    return [*sentences(made), *words]


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.turns for run in runs if run.turns]
    first = next((lever for lever in levers if lever.breaks), levers[0])
    return {**options_of(first), "keep": ",".join(keep for keep in KEEPS if any(one.keep == keep for one in levers))}


def options_of(lever: Turns) -> dict[str, object]:
    """The options of a conversation."""
    breaks = {"break": lever.breaks or None}
    if lever.replay:
        return {"replay": lever.replay, **breaks}
    turn = lever.asked or f"{lever.messages[0]}+{lever.answers[0]}"
    return {"system": lever.system, "turn": turn, "turns": len(lever.messages), **breaks}


def _through_server(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    from lab.features.turns import served

    served.converse(context, url, asked)


def _count(row: Any, name: str) -> str:
    value, mark = getattr(row, name), "" if row.is_known or name == "n_prompt" else "~"
    return UNKNOWN if value is None else f"{mark}{value:,}"


def draw(made: Sequence[Any], subject: str, figure: Figure) -> None:
    """Tokens of each prompt (cached, read again, new), and below the time of each turn; the perfect cache is a line."""
    import pandas as pd

    conversations = list(pd.DataFrame(made).groupby(["conversation", "keep"], sort=False))
    figure.set_figheight(figure.get_figheight() * 1.4)
    axes = figure.subplots(2, len(conversations), sharex=True, sharey="row", squeeze=False)
    for (tokens, times), ((_, keep), t) in zip(axes.T, conversations, strict=True):
        again_s, new, prefill = t.again_s, "new tokens (prefill)", canvas.OF_PREFILL
        tops = {tokens: 0 * t.turn, times: 0 * t.turn}
        for ax, name, values, colour in (
            (tokens, "cached", t.n_cached, canvas.GRID),
            (tokens, "read again", t.n_again, canvas.COLOURS[3]),
            (tokens, new, t.n_computed - t.n_again, prefill),
            (times, "read again", again_s, canvas.COLOURS[3]),
            (times, new, t.ttft_s - again_s, prefill),
            (times, "decode", t.decode_s, canvas.OF_DECODE),
        ):
            ax.bar(t.turn, values.fillna(0), bottom=tops[ax], color=colour, label=name)
            tops[ax] = tops[ax] + values.fillna(0)
        for name, column, style in (
            ("perfect cache", t.perfect_s, "-"),
            ("no cache", t.without_s, "--"),
            ("predicted", t.expected_turn_s, ":"),
        ):
            if column.notna().all():
                times.plot(t.turn, column, color=canvas.GUIDE, ls=style, lw=1.4, label=name)
        tokens.set_title(PLACES[keep][1], fontsize=10)
        times.set_xlabel("turn")
        times.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("tokens of the prompt")
    axes[1, 0].set_ylabel("time of the turn (s)")
    n_turns = plural(max(row.turn for row in made), "turn")
    canvas.finish(list(axes.flat), f"A conversation of {n_turns}\n{subject}", is_apart=True)


TABLE = Table(
    name="turns",
    question="How much of a conversation's prompt is read again?",
    title="a conversation turn by turn, medians over runs; again: tokens of earlier turns that were computed again; "
    "differs: the first token that is not the cache's",
    caption="Above: the tokens of each prompt. Below: the time of each turn, with that of a cache that nothing breaks "
    "and that without a cache.",
    rows=rows,
    conclude=_conclude,
    draw=lambda made, _, __, subject, figure: draw(made, subject, figure),
    columns=(
        ("turn", lambda row: str(row.turn)),
        ("cache", lambda row: row.cache),
        ("broken by", lambda row: row.breaks),
        ("cached", lambda row: _count(row, "n_cached")),
        ("computed", lambda row: _count(row, "n_computed")),
        ("again", lambda row: _count(row, "n_again") if row.n_again else UNKNOWN),
        ("TTFT\ns", lambda row: cell(row.ttft_s)),
        ("turn\ns", lambda row: cell(row.turn_s)),
        ("no cache\ns", lambda row: cell(row.without_s)),
        ("perfect\ns", lambda row: UNKNOWN if row.perfect_s == row.turn_s else cell(row.perfect_s)),
        ("predicted\nTTFT s", lambda row: cell(row.expected_ttft_s)),
        ("decode\ns", lambda row: cell(row.decode_s)),
        ("sum\ns", lambda row: cell(row.sum_s)),
        ("differs\nat", lambda row: UNKNOWN if row.differs_at is None else f"{row.differs_at + 1:,}"),
        ("prompt", lambda row: _count(row, "n_prompt")),
    ),
)

EXPERIMENT = Experiment(
    name="turns",
    chapter="Conversations",
    about="""Measure what each turn of a conversation processes again.

    \b
      lab turns --system 4000 --turn 300+150 --turns 12 --break system@6
      lab turns --replay session.jsonl
      lab turns --url http://127.0.0.1:8080/v1

    Each turn's prompt holds all earlier turns. The command shows the tokens that the cache served and those computed
    anew, TTFT, decode and the sum of each turn, the time without a cache (measured at two turns, computed for the
    others) and with one that nothing breaks, and the prediction from the ceilings. It names the first token at which a
    prompt differs from the cache. Events of --break: system (a clock in the system prompt), tools (two in another
    order), truncate (an old message shortened), second (another conversation used the cache), shift (the older half
    dropped), thinking (removed from earlier answers). With --keep slot a second conversation takes turns with the
    first, in a slot of its own. States are saved in a hidden folder in --out and deleted afterwards. A file to --replay
    gives the lengths of its messages; through a server its messages are sent.
    """,
    lever=Turns,
    plan=plan,
    options=(
        Option("system", "Tokens of the system prompt."),
        Option("turn", "Tokens of a message + an answer: 300+150, lognormal:300,0.8+150.", metavar="LENGTHS"),
        Option("turns", "Number of turns."),
        Option(
            "breaks", "What breaks the cache: system@6,thinking@2+ (+: from there on).", metavar="EVENTS", flag="break"
        ),
        Option("keep", "Where the cache is between turns: memory,slot,disk,none.", metavar="PLACES"),
        Option("replay", "A conversation as JSON lines: role and content of each message.", metavar="FILE"),
        REPEAT,
    ),
    again=_again,
    tables=(TABLE,),
    saves_states=True,
    through_server=_through_server,
)

command, KINDS = EXPERIMENT.as_command(), (EXPERIMENT.as_kind(),)
turns = public("turns", plan, saves_states=True)
