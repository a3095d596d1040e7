"""`lab turns`: a conversation, turn by turn, and how much of its prompt is read again.

The prompt of a turn is the system prompt, all earlier messages and answers, and a new message. Keys and values of a
token depend only on the tokens before it, so a cache serves a prompt up to the first token that differs; all after it
is computed again. A conversation is a script: cut the cache at the first difference, prefill the rest, decode the
answer. Answers are given tokens (each step feeds the next token of the text, and what the model would have chosen is
recorded), so every case reads the same text, and what a cached turn chooses can be compared with the uncached one.
The last token of an answer is chosen but not computed; the next turn's prefill computes it.

`memory` keeps the cache between turns, `disk` saves it after each turn and loads it before the next, `none` computes
every prompt from its first token; beside a cache it does so at two turns only, and a law in n and n^2 gives the others.
With breaks, the same conversation without them is measured too: the perfect cache.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from lab.core import script, stats
from lab.core.levers import Turns
from lab.core.lists import grouped
from lab.core.record import DECODE, FORGET, LOAD, PREFILL, SAVE, Record, Run, Settings, Steps
from lab.core.script import Operation, Part
from lab.errors import LabError, printable
from lab.features.experiment import (
    REPEAT,
    Conclusions,
    Experiment,
    Keywords,
    Option,
    Table,
    as_rows,
    for_plan,
    need_every_position,
    public,
)
from lab.features.predict.learning import StepPrediction
from lab.features.serve import loads
from lab.features.turns import views
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases

if TYPE_CHECKING:
    import click
    import pandas as pd

T = TypeVar("T")

MEMORY, DISK, NONE = KEEPS = ("memory", "disk", "none")
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
        if not match or match[1] not in views.BREAKS:
            raise LabError(
                f"--break {part[:40]!r} is not an event at a turn.",
                f"Write for example --break system@6 or thinking@2+. Events: {', '.join(views.BREAKS)}.",
            )
        at = int(match[2])
        if not 2 <= at <= n_turns:
            raise LabError(
                f"--break {part}: turn {at} is not possible.",
                f"Give a turn from 2 to {n_turns}: only a later turn can find a cache.",
            )
        for own in of_turns[at - 1 : n_turns if match[3] else at]:
            own.append(match[1])
    return tuple(map(tuple, of_turns))


def n_common(one: Sequence[object], other: Sequence[object]) -> int:
    """The number of equal tokens at the beginning of both."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (own, its) in enumerate(pairs) if own != its), min(len(one), len(other)))


def turns_of(
    lever: Turns, text: Callable[[int, int], list[T]]
) -> Generator[tuple[list[T], int, list[T], list[list[T]]], list[T] | None, None]:
    """Of each turn: its prompt, the number of its first tokens that the cache has, its answer, and the prompt in parts.

    An answer that is sent to it takes the place of the planned one. Tokens may also be words.

    The cache has the turn before: its prompt, and its answer without the last token.
    """
    n_turns = len(lever.messages)
    of_turns, n_parts = parse_breaks(lever.breaks, n_turns), sum(lever.messages) + sum(lever.answers)
    source = text(0, lever.system + n_parts + 2 * n_turns)
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
            elif kind == "second":  # it began with the same system prompt
                n_kept = min(n_kept, n_common(cache, system))
            elif kind == "shift":
                said = said[2 * ((len(said) // 2 + 1) // 2) :]
            elif kind == "thinking":
                said = [own[len(own) // 2 :] if i % 2 else own for i, own in enumerate(said)]
        said.append(take(n_message))
        prompt, answer = [*system, *(token for own in said for token in own)], take(n_answer)
        n_cached = 0 if lever.keep == NONE else min(n_kept, n_common(cache, prompt), len(prompt) - 1)
        served = 0 if lever.whole and n_cached < len(cache) else n_cached
        given = yield prompt, served, answer, [system, *said]
        answer = given or answer
        said.append(answer)
        cache = [*prompt, *answer[:-1]]


def write(case: Case, text: Text, settings: Settings, *, folder: Path = Path()) -> list[Operation]:
    """The script: of each turn cut the cache at the first difference, prefill the rest, decode the answer."""
    lever, path, made, n_past = case.lever, str(folder / "state"), list[Operation](), 0
    assert isinstance(lever, Turns)
    for number, (prompt, n_cached, answer, _) in enumerate(turns_of(lever, text), 1):
        if number not in numbers(lever):
            continue
        if n_past and lever.keep == DISK:
            made += [Operation(FORGET), Operation(LOAD, path=path)]
        if n_cached < n_past:
            made.append(Operation(FORGET, first=n_cached))
        made += script.prefill(0, prompt[n_cached:], settings.n_ubatch)
        made += [Operation(DECODE, (Part(0, (token,), 1),)) for token in answer[:-1]]
        if lever.keep == DISK:
            made.append(Operation(SAVE, path=path))
        n_past = len(prompt) + len(answer) - 1
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
    hint = 'Each line is a message: {"role": "user", "content": "..."} (roles: system, user, tool, assistant).'
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
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
            raise LabError(f"{path.name}, line {number}, is not a message.", hint) from None
        if role not in ("system", "developer", "user", "tool", "assistant"):
            raise LabError(f"{path.name}, line {number}, has no known role.", hint)
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
        raise LabError(
            f"The last turn has {longest + n_last:,} tokens; {made.model.name} was trained for {most:,}.",
            "Give fewer --turns, or a shorter --turn or --system.",
        )
    whole, words, n = False, list[str](), len(first.messages)
    try:
        need_every_position(made.model)
    except LabError as problem:
        whole = True
        words = [f"{problem.what} Its cache serves a prompt as a whole or not at all."]
    levers = [
        dataclasses.replace(
            first,
            breaks=own,
            keep=kept,
            whole=whole,
            only=(n // 2 + 1, n) if kept == NONE and len(asked) > 1 and n > 3 else (),
        )
        for kept in asked
        for own in ([breaks, ""] if breaks and kept != NONE else [breaks])
    ]
    cases = [Case(longest, n_last, lever=one, sequences=(longest + n_last,)) for one in levers]
    planned = with_cases(made, cases, functools.partial(write, folder=folder))
    return dataclasses.replace(planned, warnings=(*planned.warnings, *words))


def frame(steps: Steps) -> pd.DataFrame:
    """A run's steps: kind, n_tokens, n_past, start_s, end_s."""
    import pandas as pd

    columns = {"kind": steps.kind, "n_tokens": steps.n_tokens, "n_past": steps.n_past}
    times = {"start_s": [ns / 1e9 for ns in steps.start_ns], "end_s": [ns / 1e9 for ns in steps.end_ns]}
    return pd.DataFrame({**columns, **times})


def figures(steps: pd.DataFrame, lever: Turns) -> pd.DataFrame:
    """A row per turn from a run's steps; empty if they are not those of the conversation.

    `differs_at`: the first token of the prompt that is not the cache's, NaN if the cache served all that it had.
    `n_again`: tokens of earlier turns that were computed again.
    """
    import pandas as pd

    is_prompt = steps.kind.eq(PREFILL)
    number = (is_prompt & ~is_prompt.shift(fill_value=False)).cumsum()
    number += steps.kind.isin([FORGET, LOAD]).astype(int)  # they belong to the prompt that follows
    steps = steps.assign(turn=number, took_s=steps.end_s - steps.start_s)
    prompts, turns = steps[is_prompt].groupby("turn"), steps[steps.kind != SAVE].groupby("turn")
    measured = numbers(lever)
    if len(prompts) != len(measured) or not len(lever.answers) == len(lever.messages) >= max(measured):
        return pd.DataFrame()
    n_answer = [lever.answers[i - 1] for i in measured]
    n_new = [lever.messages[i - 1] + (1 if i > 1 else lever.system) for i in measured]  # and the last token before
    t = pd.DataFrame({"n_cached": prompts.n_past.first(), "n_computed": prompts.n_tokens.sum()})
    t["n_prompt"] = t.n_cached + t.n_computed
    t["n_again"] = (t.n_computed - n_new).clip(lower=0)
    n_held = (t.n_prompt + n_answer - 1).shift(fill_value=0)
    t["differs_at"] = t.n_cached.where((t.n_cached < n_held) & (lever.keep != NONE))
    t["ttft_s"] = prompts.end_s.last() - turns.start_s.first()
    t["decode_s"] = turns.end_s.last() - prompts.end_s.last()
    t["turn_s"] = t.ttft_s + t.decode_s
    for kind in (SAVE, LOAD):
        t[f"{kind}_s"] = steps[steps.kind == kind].groupby("turn").took_s.sum().reindex(t.index)
    return t.set_axis(pd.Index(measured, name="turn"))


def predicted(prediction: StepPrediction, lever: Turns) -> pd.DataFrame:
    """The same figures of the same script, with predicted times of its steps; NaN where a step's cost is unknown."""
    import pandas as pd

    @functools.cache
    def taken(kind: str, n_tokens: int, n_past: int, n_outputs: int) -> float:
        if kind in (FORGET, SAVE, LOAD):
            known = 0.0 if kind == FORGET else prediction.move(n_past)
        else:
            known = prediction.seconds(n_tokens, n_past, n_outputs)
        return math.nan if known is None else known

    now, rows = 0.0, []
    case = Case(1, 1, lever=lever)
    for shape in script.shapes(write(case, lambda sequence, n: list(range(n)), prediction.settings)):
        n_past = shape.n_past if shape.kind != DECODE else shape.n_past // 32 * 32  # for fewer different steps
        start_s, now = now, now + taken(shape.kind, shape.n_tokens, n_past, shape.n_outputs)
        rows.append((shape.kind, shape.n_tokens, shape.n_past, start_s, now))
    return figures(pd.DataFrame(rows, columns=["kind", "n_tokens", "n_past", "start_s", "end_s"]), lever)


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """The turns of each conversation, with its breaks if it has some; uncached only if nothing else was measured.

    `without_s` and `perfect_s`: the turn's time without a cache, and with one that nothing breaks; None if those cases
    were not measured. `sum_s`: up to the end of this turn.
    """
    import pandas as pd

    known, made = dict[Turns, pd.DataFrame](), list[pd.DataFrame]()
    for lever, own in grouped([one for one in records if one.run.turns], lambda one: one.run.turns).items():
        runs = [t for one in own if not (t := figures(frame(one.run.steps), lever)).empty]
        if runs:
            sizes = next((one.run.state_bytes for one in own if one.run.state_bytes), ())
            known[lever] = pd.concat(runs).groupby(level=0).median().assign(n_runs=len(runs))
            known[lever]["state_bytes"] = pd.Series(sizes, index=range(1, 1 + len(sizes)), dtype=float)
    conversations = grouped(known, lambda lever: dataclasses.replace(lever, breaks="", keep="", only=()))
    for number, levers in enumerate(conversations.values(), 1):
        cached = [lever for lever in levers if lever.keep != NONE]
        broken = [lever for lever in cached if lever.breaks]
        for lever in sorted(broken or cached or levers, key=lambda lever: KEEPS.index(lever.keep)):
            t = known[lever]
            none = next((one for one in levers if (one.keep, one.breaks) == (NONE, lever.breaks)), None)
            perfect = next((one for one in cached if (one.keep, one.breaks) == (lever.keep, "")), None)
            expected = predicted(prediction, lever) if prediction else pd.DataFrame()
            made.append(
                t.assign(
                    conversation=number,
                    keep=lever.keep,
                    cache=lever.keep if len({one.keep for one in broken or cached}) > 1 else "",
                    breaks=[", ".join(parse_breaks(lever.breaks, len(lever.messages))[turn - 1]) for turn in t.index],
                    sum_s=t.turn_s.cumsum(),
                    without_s=uncached(known[none], t) + t.decode_s if none else math.nan,
                    perfect_s=known[perfect].turn_s if perfect else math.nan,
                    expected_ttft_s=expected.get("ttft_s", math.nan),
                    expected_turn_s=expected.get("turn_s", math.nan),
                    is_known=True,
                ).reset_index()
            )
    return [] if not made else as_rows(views.counted(pd.concat(made, ignore_index=True)))


def uncached(none: pd.DataFrame, cached: pd.DataFrame) -> pd.Series[float]:
    """The TTFT of each turn without a cache: measured, or by the law a n + b n^2 of those and of the first turn."""
    n, times = [*cached.n_prompt.head(1), *none.n_prompt], [*cached.ttft_s.head(1), *none.ttft_s]
    linear, square = stats.fit([n, [one * one for one in n]], times)
    return none.ttft_s.reindex(cached.index).fillna(linear * cached.n_prompt + square * cached.n_prompt**2)


def _conclude(made: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    """The sentences, and whether cached turns chose the tokens of uncached ones."""
    of_turns: dict[bool, dict[tuple[int, str, int, str], tuple[int, ...]]] = {True: {}, False: {}}
    for run in (one.run for one in records):
        start = 0
        for turn in numbers(run.turns) if run.turns else ():
            assert run.turns
            end, is_cold = start + run.turns.answers[turn - 1], run.turns.keep == NONE
            key = run.repeat, run.turns.breaks, turn, "" if is_cold else run.turns.keep
            of_turns[is_cold][key], start = run.token_ids[start:end], end
    cold = of_turns[True]
    pairs = [(ids, cold[*key[:3], ""], key[2]) for key, ids in of_turns[False].items() if (*key[:3], "") in cold]
    return [*views.sentences(made), *views.agreement([one for one in pairs if one[2] > 1])], {}


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


EXPERIMENT = Experiment(
    name="turns",
    chapter="Conversations",
    about="""Measure a conversation, and what of it is processed again.

    \b
      lab turns --system 4000 --turn 300+150 --turns 12 --break system@6
      lab turns --replay session.jsonl
      lab turns --url http://127.0.0.1:8080/v1

    Each turn's prompt holds all earlier turns. The command shows the tokens that the cache served and those computed
    anew, TTFT, decode and the sum of each turn, the time without a cache (measured at two turns, computed for the
    others) and with one that nothing breaks, and the prediction from the ceilings. It names the first token at which a
    prompt differs from the cache. Events of --break: system (a clock in the system prompt), tools (two in another
    order), truncate (an old message shortened), second (another conversation used the cache), shift (the older half
    dropped), thinking (removed from earlier answers). States are saved in a hidden folder in --out and deleted
    afterwards. A file to --replay gives the lengths of its messages; through a server its messages are sent.
    """,
    lever=Turns,
    plan=plan,
    options=(
        Option("system", "Tokens of the system prompt."),
        Option("turn", "Tokens of a message + an answer: 300+150, lognormal:300,0.8+150.", metavar="LENGTHS"),
        Option("turns", "Number of turns."),
        Option(
            "breaks",
            "What breaks the cache, and when: system@6,thinking@2+ (+: from there on).",
            metavar="EVENTS",
            flag="break",
        ),
        Option("keep", "Where the cache is between turns: memory,disk,none.", metavar="PLACES"),
        Option("replay", "A conversation as JSON lines: role and content of each message.", metavar="FILE"),
        REPEAT,
    ),
    again=_again,
    tables=(Table(rows=rows, conclude=_conclude, draw=views.draw_engine, **views.TABLE),),
    saves_states=True,
    through_server=_through_server,
)

command, KINDS = EXPERIMENT.as_command(), (EXPERIMENT.as_kind(),)
turns = public("turns", plan, saves_states=True)
