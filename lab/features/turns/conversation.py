"""`lab turns`: a conversation, turn by turn, and how much of its prompt is read again.

The prompt of a turn is the system prompt, all earlier messages and answers, and a new message. Keys and values of a
token depend only on the tokens before it, so a cache serves a prompt up to the first token that differs; all after it
is computed again. A conversation is a script: cut the cache at the first difference, prefill the rest, decode the
answer. Answers are given tokens (each step feeds the next token of the text, and what the model would have chosen is
recorded), so every case reads the same text, and what a cached turn chooses can be compared with the uncached one.
The last token of an answer is chosen but not computed; the next turn's prefill computes it.

`memory` keeps the cache between turns, `disk` saves it after each turn and loads it before the next, `none` computes
every prompt from its first token. With breaks, the same conversation without them is measured too: the perfect cache.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from lab.core import script, stats
from lab.core.levers import Turns
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, FORGET, LOAD, PREFILL, SAVE, Record, Run, Settings, Steps
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features.common import cell, first_difference, need_every_position, off_by
from lab.features.experiment import REPEAT, Conclusions, Experiment, Keywords, Option, Table, for_plan, public
from lab.features.limits.step_prediction import StepPrediction
from lab.features.serve import loads
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas
from lab.show.wording import seconds

if TYPE_CHECKING:
    import click
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

MEMORY, DISK, NONE = KEEPS = ("memory", "disk", "none")
MOST_TURNS = 200
CLOCK_AT = 16
"""The token of the system prompt that a changed clock changes."""

BREAKS = {
    "system": "A system prompt that does not change",
    "tools": "Tools listed in the same order",
    "truncate": "An old message that is not shortened",
    "second": "A slot of its own for the second conversation",
    "shift": "A context that does not fill up",
    "thinking": "Thinking that stays in earlier answers",
}
"""What breaks a cache, and what would not."""


def parse_breaks(text: str, n_turns: int) -> tuple[tuple[str, ...], ...]:
    """The breaks of each turn, from `system@6,truncate@9,thinking@2+` (`+`: in every turn from there on)."""
    of_turns: list[list[str]] = [[] for _ in range(n_turns)]
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([a-z]{1,20})@(\d{1,6})(\+?)", part)
        if not match or match[1] not in BREAKS:
            raise LabError(
                f"--break {part[:40]!r} is not an event at a turn.",
                f"Write for example --break system@6 or thinking@2+. Events: {', '.join(BREAKS)}.",
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
    for prompt, n_cached, answer, _ in turns_of(lever, text):
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
    folder: Path = Path(),
    **settings: Unpack[Keywords],
) -> Plan:
    """Measure a conversation turn by turn; returns a record per run.

        lab.turns(system=4000, turn="300+150", turns=12, breaks="system@6")

    `turn` is tokens of a message + tokens of an answer, each fixed or drawn as in `lab.load`. States are saved in
    `folder`, on the disk of `out`, and deleted again. LabError for impossible values.
    """
    asked = [part.strip() for part in (keep.split(",") if isinstance(keep, str) else keep)]
    if not asked or set(asked) - set(KEEPS) or len(set(asked)) < len(asked):
        raise LabError(f"--keep {','.join(asked)} is not possible.", f"Give some of {','.join(KEEPS)}, each once.")
    first = lever_of(system, turn, turns, breaks, settings.get("seed") or 0)
    answers = first.answers
    longest = system + sum(first.messages) + sum(answers) - answers[-1]
    made = make_plan(worker, [longest], answers[-1], repeat, model, **for_plan(settings))
    n_most, whole, words = made.model.n_ctx_train, False, list[str]()
    if n_most is not None and longest + answers[-1] > n_most:
        raise LabError(
            f"The last turn has {longest + answers[-1]:,} tokens; {made.model.name} was trained for {n_most:,}.",
            "Give fewer --turns, or a shorter --turn or --system.",
        )
    try:
        need_every_position(made.model)
    except LabError as problem:
        whole = True
        words = [f"{problem.what} Its cache serves a prompt as a whole or not at all."]
    levers = [
        dataclasses.replace(first, breaks=own, keep=kept, whole=whole)
        for kept in asked
        for own in ([breaks, ""] if breaks and kept != NONE else [breaks])
    ]
    cases = [Case(longest, answers[-1], lever=one, sequences=(longest + answers[-1],)) for one in levers]
    planned = with_cases(made, cases, functools.partial(write, folder=folder))
    return dataclasses.replace(planned, warnings=(*planned.warnings, *words))


def figures(steps: pd.DataFrame, lever: Turns) -> pd.DataFrame:
    """A row per turn from a run's steps; empty if they are not those of the conversation."""
    import pandas as pd

    is_prompt = steps.kind.eq(PREFILL)
    number = (is_prompt & ~is_prompt.shift(fill_value=False)).cumsum()
    number += steps.kind.isin([FORGET, LOAD]).astype(int)  # they belong to the prompt that follows
    steps = steps.assign(turn=number, took_s=steps.end_s - steps.start_s)
    prompts, turns = steps[is_prompt].groupby("turn"), steps[steps.kind != SAVE].groupby("turn")
    if len(prompts) != len(lever.messages) or len(lever.answers) != len(lever.messages):
        return pd.DataFrame()
    rows = pd.DataFrame({"n_cached": prompts.n_past.first(), "n_computed": prompts.n_tokens.sum()})
    n_new = pd.Series(lever.messages, index=rows.index) + 1  # and the last token of the answer before
    n_new.iloc[0] += lever.system - 1
    rows["n_prompt"] = rows.n_cached + rows.n_computed
    rows["n_again"] = (rows.n_computed - n_new).clip(lower=0)
    n_held = (rows.n_prompt + list(lever.answers) - 1).shift(fill_value=0)
    rows["differs_at"] = rows.n_cached.where((rows.n_cached < n_held) & (lever.keep != NONE))
    rows["ttft_s"] = prompts.end_s.last() - turns.start_s.first()
    rows["decode_s"] = turns.end_s.last() - prompts.end_s.last()
    rows["turn_s"] = rows.ttft_s + rows.decode_s
    for kind in (SAVE, LOAD):
        rows[f"{kind}_s"] = steps[steps.kind == kind].groupby("turn").took_s.sum().reindex(rows.index)
    return rows


def frame(steps: Steps) -> pd.DataFrame:
    """A run's steps: kind, n_tokens, n_past, start_s, end_s."""
    import pandas as pd

    columns = {"kind": steps.kind, "n_tokens": steps.n_tokens, "n_past": steps.n_past}
    times = {"start_s": [ns / 1e9 for ns in steps.start_ns], "end_s": [ns / 1e9 for ns in steps.end_ns]}
    return pd.DataFrame({**columns, **times})


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


@dataclass(frozen=True)
class Row:
    """A turn of one conversation in one setup: medians over runs.

    `conversation` counts conversations of other lengths. `differs_at`: the first token of the prompt that differs from
    the cache, None if the cache served all that it had.
    `n_again`: tokens of earlier turns that were computed again. `without_s` and `perfect_s`: the turn's time without a
    cache, and with one that nothing breaks; None if those cases were not measured. `sum_s`: up to the end of this turn.
    """

    conversation: int
    turn: int
    keep: str
    breaks: str
    n_runs: int
    n_prompt: int
    n_cached: int
    n_computed: int
    n_again: int
    differs_at: int | None
    ttft_s: float
    expected_ttft_s: float | None
    decode_s: float
    turn_s: float
    expected_turn_s: float | None
    sum_s: float
    without_s: float | None
    perfect_s: float | None
    save_s: float | None
    load_s: float | None
    state_bytes: int | None


def medians(records: Sequence[Record]) -> dict[Turns, pd.DataFrame]:
    """Of each conversation its turns: medians over runs."""
    import pandas as pd

    made = {}
    for lever, own in grouped([one for one in records if one.run.turns], lambda one: one.run.turns).items():
        runs = [known for one in own if not (known := figures(frame(one.run.steps), lever)).empty]
        if runs:
            made[lever] = pd.concat(runs).groupby(level=0).median().assign(n_runs=len(runs))
            sizes = next((one.run.state_bytes for one in own if one.run.state_bytes), ())
            made[lever]["state_bytes"] = pd.Series(sizes, index=range(1, 1 + len(sizes)), dtype=float)
    return made


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """The turns of each conversation, with its breaks if it has some; uncached only if nothing else was measured."""
    known, made = medians(records), list[Row]()
    numbers: dict[Turns, int] = {}
    for lever, own in known.items():
        broken = [other for other in known if same(other, lever) and other.keep != NONE and other.breaks]
        if (lever.keep == NONE and any(same(one, lever) and one.keep != NONE for one in known)) or (
            broken and not lever.breaks
        ):
            continue
        none = next((one for one in known if same(one, lever) and (one.keep, one.breaks) == (NONE, lever.breaks)), None)
        perfect = next((one for one in known if same(one, lever) and (one.keep, one.breaks) == (lever.keep, "")), None)
        table = own.assign(
            sum_s=own.turn_s.cumsum(),
            without_s=known[none].turn_s if none else math.nan,
            perfect_s=known[perfect].turn_s if perfect and perfect.keep != NONE else math.nan,
        )
        expected = predicted(prediction, lever) if prediction else None
        table["expected_ttft_s"] = expected.ttft_s if expected is not None else math.nan
        table["expected_turn_s"] = expected.turn_s if expected is not None else math.nan
        kinds = parse_breaks(lever.breaks, len(lever.messages))
        number = numbers.setdefault(dataclasses.replace(lever, breaks="", keep=""), 1 + len(numbers))
        for turn, values in table.drop(columns=["start_s"], errors="ignore").iterrows():
            cells: dict[str, Any] = {name: None if math.isnan(value) else value for name, value in values.items()}
            counts = {name: int(value) for name, value in cells.items() if value is not None and is_count(str(name))}
            at = int(str(turn))
            made.append(Row(number, at, lever.keep, ", ".join(kinds[at - 1]), **{**cells, **counts}))
    return sorted(made, key=lambda row: (row.conversation, KEEPS.index(row.keep)))


def is_count(name: str) -> bool:
    return name.startswith("n_") or name in ("differs_at", "state_bytes")


def same(one: Turns, other: Turns) -> bool:
    """Whether both are the same conversation, apart from its breaks and its cache."""
    return dataclasses.replace(one, breaks="", keep="") == dataclasses.replace(other, breaks="", keep="")


def sentences(made: Sequence[Row], prediction: StepPrediction | None) -> list[str]:
    """The answer of each conversation, what broke its cache, and how good the predictions are."""
    words = list[str]()
    for (_, keep), own in grouped(made, lambda row: (row.conversation, row.keep)).items():
        total, ttft = own[-1].sum_s, sum(row.ttft_s for row in own)
        again = sum(row.ttft_s * row.n_again / row.n_computed for row in own)
        where = {MEMORY: "", DISK: " with the cache on disk", NONE: " without a cache"}[keep]
        read = f"{seconds(again)} of that was read before" if again else "no token was read twice"
        words.append(
            f"{plural(len(own), 'turn')} take {seconds(total)}{where}; {seconds(ttft)} of it is prefill, {read}."
        )
        for row in own:
            if row.differs_at is None:
                continue
            words.append(
                f"Turn {row.turn} ({row.breaks}): the prompt differs from token {row.differs_at + 1:,} on, and "
                f"{plural(row.n_again, 'token')} after it were read again."
            )
        lost: dict[str, float] = {}
        for row in own:
            if row.breaks and row.perfect_s is not None:
                lost[row.breaks] = lost.get(row.breaks, 0.0) + row.turn_s - row.perfect_s
        words += [
            f"{BREAKS.get(kinds, f'Without {kinds} it')} would save {seconds(saved)}."
            for kinds, saved in lost.items()
            if saved > 0
        ]
        if all(row.without_s is not None for row in own) and keep != NONE:
            words.append(f"Without a cache they take {seconds(sum(row.without_s or 0 for row in own))}.")
        if keep == DISK:
            words += moved(own)
        words += off_by(((row.expected_ttft_s, row.ttft_s) for row in own), f"TTFT{where}")
    return words


def moved(own: Sequence[Row]) -> list[str]:
    """What saving and loading cost, and from which length loading is faster than prefill."""
    held = {row.turn: row for row in own}
    loads = [(held[row.turn - 1], row) for row in own if row.load_s and row.turn - 1 in held]
    saves = [row for row in own if row.save_s and row.state_bytes]
    if not loads or not saves:
        return []
    last = saves[-1]
    before, after = loads[-1]
    words = (
        f"Saving {(last.state_bytes or 0) / 1e6:,.1f} MB took {seconds(last.save_s or 0)} "
        f"({cell((last.state_bytes or 0) / 1e9 / (last.save_s or 1))} GB/s)"
    )
    if before.state_bytes and after.load_s:
        words += (
            f", loading {before.state_bytes / 1e6:,.1f} MB {seconds(after.load_s)} "
            f"({cell(before.state_bytes / 1e9 / after.load_s)} GB/s)"
        )
    if len(loads) < 2 or own[0].n_computed < 1:
        return [f"{words}."]
    lengths = [float(one.n_prompt) for one, _ in loads]
    fixed, per_token = stats.fit([[1.0] * len(loads), lengths], [row.load_s or 0.0 for _, row in loads])
    gain = own[0].ttft_s / own[0].n_computed - per_token
    n_even = max(1, round(fixed / gain)) if gain > 0 else None
    pays = (
        "not faster than prefill at any of these lengths"
        if n_even is None
        else f"faster than prefill from about {plural(n_even, 'token')} on"
    )
    return [f"{words}.", f"Loading is {pays}."]


def check(records: Sequence[Record]) -> list[str]:
    """Whether cached turns chose the tokens that uncached ones chose: the first difference, in words."""
    cold = {(r.run.repeat, r.run.turns.breaks): r.run for r in records if r.run.turns and r.run.turns.keep == NONE}
    warm = [one.run for one in records if one.run.turns and one.run.turns.keep != NONE]
    pairs = [(run, cold[key]) for run in warm if run.turns and (key := (run.repeat, run.turns.breaks)) in cold]
    firsts = [(at, run) for run, other in pairs if (at := first_difference(run.token_ids, other.token_ids)) is not None]
    if not pairs:
        return []
    if not firsts:
        return [f"In {plural(len(pairs), 'run')} the cached turns chose the tokens of the uncached ones."]
    at, run = min(firsts, key=lambda one: one[0])
    turn, token = placed(at, run)
    return [
        f"In {len(firsts)} of {plural(len(pairs), 'run')} a cached turn chose another token than the uncached one, "
        f"first token {token} of answer {turn}: kernels for steps of other sizes round differently."
    ]


def placed(at: int, run: Run) -> tuple[int, int]:
    """The turn and the token of its answer, from the index among all chosen tokens; both from 1."""
    for turn, n in enumerate(run.turns.answers if run.turns else (), 1):
        if at < n:
            return turn, at + 1
        at -= n
    return 0, at + 1


def _conclude(made: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    return [*sentences(made, prediction), *check(records)], {}


def draw(
    made: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    """Tokens of each prompt (cached, read again, new), and below the time of each turn; the perfect cache is a line."""
    keeps = list(grouped(made, lambda row: (row.conversation, row.keep)).items())
    figure.set_figheight(figure.get_figheight() * 1.4)
    axes = figure.subplots(2, len(keeps), sharex=True, sharey="row", squeeze=False)
    colours = [style["color"] for style in canvas.styles(4)]
    for (tokens, times), ((_, keep), own) in zip(axes.T, keeps, strict=True):
        at = [row.turn for row in own]
        again_s = [row.ttft_s * row.n_again / row.n_computed for row in own]
        parts = {
            "cached": [row.n_cached for row in own],
            "read again": [row.n_again for row in own],
            "new": [row.n_computed - row.n_again for row in own],
        }
        stack(tokens, at, parts, colours)
        spans = {
            "": [0.0] * len(own),
            "prefill of tokens read before": again_s,
            "prefill of new tokens": [row.ttft_s - again for row, again in zip(own, again_s, strict=True)],
            "decode": [row.decode_s for row in own],
        }
        stack(times, at, spans, colours)
        for name, values, style in (
            ("perfect cache", [row.perfect_s for row in own], "-"),
            ("no cache", [row.without_s for row in own], "--"),
            ("predicted", [row.expected_turn_s for row in own], ":"),
        ):
            if None not in values:
                times.plot(at, values, color=canvas.GUIDE, ls=style, lw=1.4, label=name)
        tokens.set_title({MEMORY: "cache in memory", DISK: "cache on disk", NONE: "no cache"}[keep], fontsize=10)
        times.set_xlabel("turn")
        times.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylabel("tokens of the prompt")
    axes[1, 0].set_ylabel("time of the turn (s)")
    canvas.finish(
        list(axes.flat), f"A conversation of {plural(max(row.turn for row in made), 'turn')}\n{subject}", is_apart=True
    )


def stack(ax: Axes, at: Sequence[int], parts: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    """Stacked bars, a colour for each part; a part without a name has no entry in the legend."""
    bottom = [0.0] * len(at)
    for colour, (name, values) in zip(colours, parts.items(), strict=False):
        if name:
            ax.bar(at, values, bottom=bottom, color=colour, label=name)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.turns for run in runs if run.turns]
    first = next((lever for lever in levers if lever.breaks), levers[0])
    return {**options_of(first), "keep": ",".join(keep for keep in KEEPS if any(one.keep == keep for one in levers))}


def options_of(lever: Turns) -> dict[str, object]:
    """The options of a conversation."""
    turn = lever.asked or f"{lever.messages[0]}+{lever.answers[0]}"
    return {"system": lever.system, "turn": turn, "turns": len(lever.messages), "break": lever.breaks or None}


TABLE = Table(
    name="turns",
    question="How much of a conversation's prompt is read again?",
    title="a conversation turn by turn; medians over runs; differs: the first token that is not the cache's; again: "
    "tokens of earlier turns that were computed again",
    caption="Above: the tokens of each prompt. Below: the time of each turn, with that of a cache that nothing breaks "
    "and that without a cache.",
    columns=(
        ("turn", lambda row: str(row.turn)),
        ("cache", lambda row: row.keep),
        ("broken by", lambda row: row.breaks or "-"),
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("cached", lambda row: f"{row.n_cached:,}"),
        ("computed", lambda row: f"{row.n_computed:,}"),
        ("again", lambda row: f"{row.n_again:,}"),
        ("differs\nat", lambda row: "-" if row.differs_at is None else f"{row.differs_at + 1:,}"),
        ("TTFT\ns", lambda row: cell(row.ttft_s)),
        ("predicted\ns", lambda row: cell(row.expected_ttft_s)),
        ("decode\ns", lambda row: cell(row.decode_s)),
        ("turn\ns", lambda row: cell(row.turn_s)),
        ("sum\ns", lambda row: cell(row.sum_s)),
        ("no cache\ns", lambda row: cell(row.without_s)),
        ("perfect\ns", lambda row: cell(row.perfect_s)),
    ),
    rows=rows,
    conclude=_conclude,
    draw=draw,
)


def _through_server(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    from lab.features.turns import served

    served.converse(context, url, asked)


EXPERIMENT = Experiment(
    name="turns",
    chapter="Conversations",
    about="""Measure a conversation turn by turn, and what is read again.

    \b
      lab turns --keep memory,disk,none
      lab turns --system 4000 --turn 300+150 --turns 12 --break system@6
      lab turns --url http://127.0.0.1:8080/v1

    Each turn's prompt holds all earlier turns. The command shows the tokens that the cache served and those computed
    anew, TTFT, decode and the sum of each turn, the time without a cache and with one that nothing breaks, and the
    prediction from the ceilings. It names the first token at which a prompt differs from the cache. Events of --break:
    system (a clock in the system prompt), tools (two in another order), truncate (an old message shortened), second
    (another conversation used the cache), shift (the older half dropped), thinking (removed from earlier answers).
    States are saved in a hidden folder in --out and deleted afterwards.
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
        REPEAT,
    ),
    again=_again,
    tables=(TABLE,),
    saves_states=True,
    through_server=_through_server,
)

command, KINDS = EXPERIMENT.as_command(), (EXPERIMENT.as_kind(),)
turns = public("turns", plan, saves_states=True)
