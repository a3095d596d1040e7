"""`lab turns`: a conversation, turn by turn, and how much of its prompt is read again.

The prompt of a turn is the system prompt, all earlier messages and answers, and a new message. A cache serves it up to
the first token that differs. A conversation is a script: cut the cache there, prefill the rest, decode the answer.
Answers are given tokens, so every case reads the same text. Their last token is computed by the next turn's prefill.
Besides a cache, `none` is measured at two turns, and a law in n and n^2 gives the others. A conversation with breaks is
also measured without them: the perfect cache.

A server (`--url`) answers in its own words. Two turns are sent again with other first words, so that nothing is cached.
With the first turn they give the TTFT of n tokens after c cached ones, T = f + a (n - c) + b (n^2 - c^2): the times
without a cache and with a perfect one and, if the server reports no cached tokens, c (`is_known` is false then). A turn
faster than its own message counts as one that computed only that, and T is fitted again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lab.app import experiment, experiment_tables
from lab.app.experiment_tables import cell, first_difference
from lab.app.options import MODEL, PROMPT
from lab.core import memory, random_lengths, results, script, stats
from lab.core.experiments import ExperimentRuns, case_of, setup_of
from lab.core.lists import grouped, join_and, plural
from lab.core.record import DECODE, FORGET, LOAD, OK, PREFILL, SAVE, Record, Run, Settings
from lab.core.request import Asked, RequestRecord, short_name
from lab.core.request_times import figures as figures_of_request
from lab.core.script import Operation, Part
from lab.errors import LabError, printable
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.remote import formats
from lab.remote.examination import connect, reaching_of
from lab.remote.servers import Server, prompt_text
from lab.roofline.step_prediction import StepPrediction
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.runner.progress import ShowStatus, Status
from lab.runner.refusals import need_every_position
from lab.show import canvas
from lab.show.section import Context, Kind, Section
from lab.show.wording import UNKNOWN, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

T = TypeVar("T")

KEEPS = ("memory", "slot", "disk", "none")  # where a cache can be between turns
MEMORY, SLOT, DISK, NONE = KEEPS
SERVER = "server"
SECOND = "second"
PLACES = {  # where the cache is: the words of a sentence, and the title of a picture
    MEMORY: ("", "cache in memory"),
    SLOT: (" with a second conversation in its own slot", "a slot for each conversation"),
    DISK: (" with the cache on disk", "cache on disk"),
    NONE: (" without a cache", "no cache"),
    SERVER: (" through the server", "the server's cache"),
}
BREAKS = {  # what breaks a cache, and what would not
    "system": "A system prompt that does not change",
    "tools": "Tools listed in the same order",
    "truncate": "An old message that is not shortened",
    SECOND: "A slot of its own for the second conversation",
    "shift": "A context that does not fill up",
    "thinking": "Thinking that stays in earlier answers",
}
TURN = "Tokens of a message + an answer: 300+150, lognormal:300,0.8+150."
BREAK = "What breaks the cache: system@6,thinking@2+ (+: from there on)."
KEEP = "Where the cache is between turns: memory,slot,disk,none."
REPLAY = "A conversation as JSON lines: role and content of each message."

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "tool": "user",
    "assistant": "assistant",
}
MOST_TURNS = 200
MOST_BYTES = 16 << 20  # bytes: of a file to replay
MOST_TICKS = 16  # numbers of turns below a picture
CLOCK_AT = 16  # the token of the system prompt that a changed clock changes
TOKENS_PER_WORD = 1.3  # of a server that cannot count tokens


@dataclass(frozen=True)
class Turns:
    """`lab turns`: a conversation; each turn's prompt held all earlier turns, and the cache served its beginning."""

    system: int  # tokens of the system prompt
    messages: tuple[int, ...]  # tokens of each turn's message
    answers: tuple[int, ...]  # tokens of each turn's answer
    breaks: str  # what broke the cache, as in --break
    keep: str  # where the cache was between turns: memory, disk, none
    whole: bool = False  # the model's cache cannot keep a part: it serves all or nothing
    asked: str = ""  # --turn, if its lengths were drawn
    only: tuple[int, ...] = ()  # the turns that were measured, from 1; empty: all
    replay: str = ""  # the file whose messages gave the lengths

    def __post_init__(self) -> None:
        n = len(self.messages)
        broken = map(int, re.findall(r"@(\d{1,6})", self.breaks))
        are_there = all(2 <= turn <= n for turn in broken) and all(
            1 <= turn <= n for turn in self.only
        )
        if not n or len(self.answers) != n or self.keep not in KEEPS or not are_there:
            raise ValueError("the turns of a conversation contradict each other")

    @property
    def n_slots(self) -> int:
        """Conversations that were measured alternately, each in a sequence of its own."""
        return 2 if self.keep == "slot" else 1

    @property
    def numbers(self) -> Sequence[int]:
        return self.only or range(1, len(self.messages) + 1)

    @property
    def label(self) -> str:
        how = ("cache in memory", "slot of its own", "cache on disk", "no cache")[
            KEEPS.index(self.keep)
        ]
        return f"{plural(len(self.messages), 'turn')}, {how}" + (
            f", {self.breaks}" if self.breaks else ""
        )


@dataclass(frozen=True)
class Turn:
    """The place of a request in a conversation."""

    number: int  # from 1
    differs_at: int | None = None
    """Letters of the prompt before the first that differs from the turn before; None: first turn."""
    is_cold: bool = False  # the same prompt with other first words, so that no cache served it


def turns_setup(run: Run) -> Turns | None:
    """The conversation of a run; None for runs of other experiments."""
    return setup_of(Turns, run.case) if run.experiment == "turns" else None


def run_figures(run: Run) -> dict[str, float]:
    """`turns_s`, the whole conversation; empty for a failed run."""
    if run.status != OK or run.n_prompt < 1 or run.n_gen < 1 or not run.steps.end_ns:
        return {}
    conversation_s = run.steps.end_ns[-1] / 1e9
    return {"turns_s": conversation_s} if conversation_s > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Turns, case),
    label=lambda case: setup_of(Turns, case).label,
    figures=run_figures,
    figure_names={"turns_s": "whole conversation"},
)


def parse_breaks(text: str, n_turns: int) -> list[list[str]]:
    """The breaks of each turn, from `system@6,truncate@9,thinking@2+` (`+`: in every turn from there on)."""
    of_turns: list[list[str]] = [[] for _ in range(n_turns)]
    for part in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(rf"({'|'.join(BREAKS)})@(\d{{1,6}})(\+?)", part)
        at = int(match[2]) if match else 0
        if not match or not 2 <= at <= n_turns:
            hint = f"Write system@6 or thinking@2+. Turns: 2 to {n_turns}. Events: {', '.join(BREAKS)}."
            raise LabError(
                f"--break {part[:40]!r} is not an event at a turn that can find a cache.", hint
            )
        for own in of_turns[at - 1 : n_turns if match[3] else at]:
            own.append(match[1])
    return of_turns


def of_text(breaks: str) -> str:
    """The breaks that change the prompts: all but that of a second conversation."""
    return ",".join(part for part in breaks.split(",") if not part.strip().startswith(SECOND))


def turns_of(
    lever: Turns, text: Callable[[int], list[T]]
) -> Generator[tuple[list[T], int, list[T], list[list[T]]], list[T] | None, None]:
    """Of each turn: its prompt, the number of its first tokens that the cache has, its answer, and the prompt in parts.

    The cache has the turn before: its prompt, and its answer without the last token. An answer that is sent to it takes
    the place of the planned one. Tokens may also be words.
    """
    n_all = lever.system + sum(lever.messages) + sum(lever.answers)
    source = text(n_all + 2 * len(lever.messages))
    tokens = iter(source)
    spare = iter(source[n_all:])

    def take(n: int) -> list[T]:
        return list(itertools.islice(tokens, n))

    def n_common(one: Sequence[T], other: Sequence[T]) -> int:
        at = first_difference(one, other)
        return min(len(one), len(other)) if at is None else at

    system = take(lever.system)
    said = list[list[T]]()
    cached = list[T]()  # said: message, answer, message, ...
    for number, kinds in enumerate(parse_breaks(lever.breaks, len(lever.messages))):
        n_kept = len(cached)
        for kind in kinds:
            if kind == "system" and system:
                at = min(CLOCK_AT, len(system) - 1)
                system = [
                    *system[:at],
                    next((t for t in spare if t != system[at]), system[0]),
                    *system[at + 1 :],
                ]
            elif kind == "tools":  # the second half of the system prompt lists two tools
                half = len(system) // 2
                quarter = len(system) // 4
                system = [*system[:half], *system[half + quarter :], *system[half : half + quarter]]
            elif kind == "truncate":
                oldest = 2 * ((number - 1) // 2)
                said[oldest] = said[oldest][: max(1, len(said[oldest]) // 4)]
            elif kind == SECOND:  # it began with the same system prompt
                n_kept = min(n_kept, n_common(cached, system))
            elif kind == "shift":
                said = said[2 * ((len(said) // 2 + 1) // 2) :]
            elif kind == "thinking":
                said = [own[len(own) // 2 :] if i % 2 else own for i, own in enumerate(said)]
        said.append(take(lever.messages[number]))
        prompt = [*system, *itertools.chain(*said)]
        answer = take(lever.answers[number])
        n_cached = (
            0 if lever.keep == NONE else min(n_kept, n_common(cached, prompt), len(prompt) - 1)
        )
        served = 0 if lever.whole and n_cached < len(cached) else n_cached
        answer = (yield prompt, served, answer, [system, *said]) or answer
        said.append(answer)
        cached = [*prompt, *answer[:-1]]


def write(case: Case, text: Text, settings: Settings, *, folder: Path = Path()) -> list[Operation]:
    """The script: of each turn cut the cache at the first difference, prefill the rest, decode the answer."""
    lever = case.setup
    path = str(folder / "state")
    made = list[Operation]()
    assert isinstance(lever, Turns)
    n_past = [0] * lever.n_slots
    conversations = [turns_of(lever, partial(text, slot)) for slot in range(len(n_past))]
    for number, turns in enumerate(zip(*conversations, strict=True), 1):
        for slot, (prompt, n_cached, answer, _) in enumerate(
            turns if number in lever.numbers else ()
        ):
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


def lever_of(system: int, turn: str, turns: int, breaks: str, seed: int) -> Turns:
    """The conversation of these options, with a cache in memory. LabError for impossible values."""
    for name, value, low, most in (
        ("system", system, 0, MAX_TOKENS),
        ("turns", turns, 1, MOST_TURNS),
    ):
        if not low <= value <= most:
            raise LabError(
                f"--{name} {value:,} is not possible.",
                f"Give a whole number from {low} to {most:,}.",
            )
    message, plus, answer = turn.partition("+")
    if not plus:
        raise LabError(
            f"--turn {turn!r} has one length.",
            "Give the tokens of a message and an answer: --turn 300+150",
        )
    of_message = random_lengths.parse("--turn", message)
    of_answer = random_lengths.parse("--turn", answer)
    if min(of_answer.values) < 2:
        raise LabError(
            f"--turn {turn}: an answer of 1 token has no decode.",
            "Give answers of 2 or more tokens.",
        )
    parse_breaks(breaks, turns)
    messages = random_lengths.draw(of_message, turns, f"{seed} turns prompts")
    answers = random_lengths.draw(of_answer, turns, f"{seed} turns answers")
    is_drawn = len(of_message.values) > 1 or len(of_answer.values) > 1
    return Turns(system, messages, answers, breaks, MEMORY, asked=turn if is_drawn else "")


def read_messages(path: Path) -> list[str]:
    """A conversation from JSON lines with `role` and `content`: the system prompt, then messages and answers."""
    hint = (
        f'Each line is a message: {{"role": "user", "content": "..."}} Roles: {", ".join(ROLES)}.'
    )
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as problem:
        raise LabError(
            f"The file {path} cannot be read: {problem.strerror}.", "Check its name."
        ) from None
    if len(data) > MOST_BYTES:
        raise LabError(
            f"The file {path.name} is larger than {MOST_BYTES >> 20} MB.", "Give a part of it."
        )
    said = [""]  # the system prompt, message, answer, message, ...
    for number, line in enumerate(filter(bytes.strip, data.splitlines()), 1):
        try:
            fields = json.loads(line)
            text = fields.get("content") or ""
            role = ROLES[fields["role"]]
            if isinstance(text, list):
                text = "\n".join(part["text"] for part in text if part.get("type") == "text")
            text = printable(text, allowed="\n\t")
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
            raise LabError(f"{path.name}, message {number}, is not a message.", hint) from None
        if (role == "assistant") == (len(said) % 2 == 1) or (role == "system" and len(said) == 1):
            said[-1] += text
        elif text:
            said.append(text)
    said += [""] * (1 - len(said) % 2)
    if not 3 <= len(said) <= 2 * MOST_TURNS + 1:
        raise LabError(
            f"{path.name} has {len(said) // 2} turns; 1 to {MOST_TURNS} are possible.", hint
        )
    return said


def replayed(said: Sequence[str], name: str, breaks: str, count: Callable[[str], int]) -> Turns:
    """The conversation of a file, with the lengths that `count` gives; a missing or short answer has 2 tokens."""
    system, *rest = map(count, said)
    parse_breaks(breaks, len(rest) // 2)
    messages = (max(1, n) for n in rest[::2])
    answers = (max(2, n) for n in rest[1::2])
    return Turns(system, tuple(messages), tuple(answers), breaks, MEMORY, replay=printable(name))


def plan(
    worker: Worker,
    system: int,
    turn: str,
    turns: int,
    breaks: str,
    keep: str | Sequence[str],
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    replay: str | None = None,
    folder: Path = Path(),
    **settings: Any,
) -> Plan:
    """Every place of the cache, with the breaks and without them. LabError for impossible values."""
    asked = [part.strip() for part in (keep.split(",") if isinstance(keep, str) else keep)]
    if not asked or set(asked) - set(KEEPS) or len(set(asked)) < len(asked):
        raise LabError(
            f"--keep {','.join(asked)} is not possible.",
            f"Give some of {','.join(KEEPS)}, each once.",
        )
    if replay:
        said = read_messages(Path(replay))
        small = make_plan(worker, [16], 2, 1, model, **settings)
        worker.load(small.file.path, small.settings)
        first = replayed(said, Path(replay).name, breaks, lambda text: len(worker.tokenize(text)))
    else:
        first = lever_of(system, turn, turns, breaks, settings.get("seed") or 0)
    longest = first.system + sum(first.messages) + sum(first.answers[:-1])
    n_last = first.answers[-1]
    made = make_plan(worker, [longest], n_last, repeat, model, **settings)
    if (most := made.model.n_ctx_train) is not None and longest + n_last > most:
        what = f"The last turn has {longest + n_last:,} tokens; {made.model.name} was trained for {most:,}."
        raise LabError(what, "Give fewer --turns, or a shorter --turn or --system.")
    words = list[str]()
    n = len(first.messages)
    cases = list[Case]()
    try:
        need_every_position(made.model)
    except LabError as problem:
        words = [f"{problem.what} Its cache serves a prompt as a whole or not at all."]
    for kept in asked:
        broken = of_text(breaks) if kept in (SLOT, NONE) else breaks
        only = (n // 2 + 1, n) if kept == NONE and len(asked) > 1 and n > 3 else ()
        for own in dict.fromkeys([broken] if kept == NONE else [broken, ""]):
            lever = dataclasses.replace(first, breaks=own, keep=kept, whole=bool(words), only=only)
            cases.append(
                Case(
                    longest,
                    n_last,
                    experiment="turns",
                    setup=lever,
                    sequences=(longest + n_last,) * lever.n_slots,
                )
            )
    planned = with_cases(made, cases, partial(write, folder=folder))
    return dataclasses.replace(planned, warnings=(*planned.warnings, *words))


def turns(
    system: int = 500,
    turn: str = "100+50",
    turns: int = 8,
    breaks: str = "",
    keep: str | Sequence[str] = "memory,none",
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    replay: str | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Any,
) -> list[Record]:
    """Measure a conversation turn by turn; returns a record per run.

        lab.turns(system=4000, turn="300+150", turns=12, breaks="system@6")

    `turn` is tokens of a message + tokens of an answer, each fixed or drawn (core/random_lengths.py). With `replay`, a file of
    messages as JSON lines, the lengths are those of its messages, and the text is the lab's own. States are saved in
    `folder`, on the disk of `out`, and deleted again. LabError for impossible values.
    """
    asked = {
        "system": system,
        "turn": turn,
        "turns": turns,
        "breaks": breaks,
        "keep": keep,
        "repeat": repeat,
        "model": model,
        "replay": replay,
    }
    return EXPERIMENT.measure({**asked, **settings}, out, watch)


OPTIONS = (
    click.option("--system", default=500, show_default=True, help="Tokens of the system prompt."),
    click.option("--turn", default="100+50", show_default=True, metavar="LENGTHS", help=TURN),
    click.option("--turns", default=8, show_default=True, help="Number of turns."),
    click.option("--break", "breaks", default="", metavar="EVENTS", help=BREAK),
    click.option("--keep", default="memory,none", show_default=True, metavar="PLACES", help=KEEP),
    experiment.REPEAT,
    click.option("--replay", metavar="FILE", help=REPLAY),
    MODEL,
    PROMPT,
)


def figures(steps: pd.DataFrame, lever: Turns) -> pd.DataFrame:
    """A row per turn of the first conversation, from a run's steps; empty if they are not those of the script.

    `differs_at`: the first token of the prompt that is not the cache's, NaN if the cache served all that it had.
    `n_again`: tokens of earlier turns that were computed again.
    """
    import pandas as pd

    is_prompt = steps.kind.eq(PREFILL)
    number = (is_prompt & ~is_prompt.shift(fill_value=False)).cumsum()
    number += steps.kind.isin([FORGET, LOAD]).astype(int)  # they belong to the prompt that follows
    steps = steps.assign(number=number, took_s=steps.end_s - steps.start_s)
    prompts = steps[is_prompt].groupby("number")
    turns = steps[steps.kind != SAVE].groupby("number")
    measured = [i for i in lever.numbers for _ in range(lever.n_slots)]
    if len(prompts) != len(measured) or not len(lever.answers) == len(lever.messages) >= max(
        measured
    ):
        return pd.DataFrame()
    n_answer = [lever.answers[i - 1] for i in measured]
    n_new = [
        lever.messages[i - 1] + (1 if i > 1 else lever.system) for i in measured
    ]  # and the last token before
    t = pd.DataFrame({"n_cached": prompts.n_past.first(), "n_computed": prompts.n_tokens.sum()})
    t["n_prompt"] = t.n_cached + t.n_computed
    t["n_again"] = (t.n_computed - n_new).clip(lower=0)
    n_held = (t.n_prompt + n_answer - 1).shift(lever.n_slots, fill_value=0)
    t["differs_at"] = t.n_cached.where((t.n_cached < n_held) & (lever.keep != NONE))
    t["ttft_s"] = prompts.end_s.last() - turns.start_s.first()
    t["decode_s"] = turns.end_s.last() - prompts.end_s.last()
    t["turn_s"] = t.ttft_s + t.decode_s
    for kind in (SAVE, LOAD):
        t[f"{kind}_s"] = steps[steps.kind == kind].groupby("number").took_s.sum().reindex(t.index)
    return t[:: lever.n_slots].set_axis(pd.Index(lever.numbers, name="turn"))


def predicted(prediction: StepPrediction, lever: Turns) -> pd.DataFrame:
    """The same figures of the same script, with predicted times of its steps; NaN where a step's cost is unknown."""
    import pandas as pd

    move = cache(prediction.move)
    compute = cache(prediction.seconds)
    now = 0.0
    rows = []
    for shape in script.shapes(
        write(
            Case(1, 1, experiment="turns", setup=lever),
            lambda _, n: list(range(n)),
            prediction.settings,
        )
    ):
        if shape.kind in (FORGET, SAVE, LOAD):
            taken = 0.0 if shape.kind == FORGET else move(shape.n_past)
        else:
            n_past = (
                shape.n_past // 32 * 32 if shape.kind == DECODE else shape.n_past
            )  # for fewer different steps
            taken = compute(shape.n_tokens, n_past, shape.n_outputs)
        start_s = now
        now = now + (math.nan if taken is None else taken)
        rows.append((shape.kind, shape.n_tokens, shape.n_past, start_s, now))
    return figures(
        pd.DataFrame(rows, columns=["kind", "n_tokens", "n_past", "start_s", "end_s"]), lever
    )


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """The turns of each conversation, with its breaks if it has some; uncached only if nothing else was measured.

    `without_s` and `perfect_s`: the turn's time without a cache, and with one that nothing breaks; None if those cases
    were not measured. `slot_bytes`: the cache of the second conversation. Columns: as in `finished`.
    """
    import pandas as pd

    known = dict[Turns, pd.DataFrame]()
    made = list[pd.DataFrame]()
    texts = dict[Turns, int]()
    for lever, own in grouped(records, lambda one: turns_setup(one.run)).items():
        t = (
            pd.concat([figures(one.run.steps.frame(), lever) for one in own])
            .groupby(level=0)
            .median()
        )
        if t.empty:
            continue
        sizes = next((sizes for one in own if (sizes := one.run.counts.get("state_bytes"))), ())
        settings = own[0].settings
        t["state_bytes"] = pd.Series(sizes, index=range(1, 1 + len(sizes)), dtype=float)
        slot = dataclasses.replace(settings, n_seq_max=1, n_ctx=settings.n_ctx // 2)
        t["slot_bytes"] = (
            memory.of_context(own[0].model, slot).kv_cache_bytes if lever.keep == SLOT else math.nan
        )
        kinds = parse_breaks(lever.breaks, len(lever.messages))
        known[lever] = t.assign(
            breaks=[", ".join(kinds[turn - 1]) for turn in t.index], is_known=True, keep=lever.keep
        )
    for like, levers in grouped(
        known, lambda one: dataclasses.replace(one, breaks="", keep=MEMORY, only=())
    ).items():
        cases = {
            (one.keep, of_text(one.breaks) if one.keep == NONE else one.breaks): known[one]
            for one in levers
        }
        broken = {keep for keep, breaks in cases if breaks}
        cached = [
            one for one in levers if one.keep != NONE and (one.breaks or one.keep not in broken)
        ]
        for lever in sorted(cached or levers, key=lambda one: KEEPS.index(one.keep)):
            t = known[lever]
            text = of_text(lever.breaks)
            t["conversation"] = texts.setdefault(
                dataclasses.replace(like, breaks=text), len(texts) + 1
            )
            t["cache"] = lever.keep if len({one.keep for one in cached}) > 1 else ""
            if (
                none := cases.get((NONE, text))
            ) is not None:  # measured, or by the law a n + b n^2 of those and turn 1
                n, times_s = ([*t[name].head(1), *none[name]] for name in ("n_prompt", "ttft_s"))
                linear, square = stats.fit([n, [one * one for one in n]], times_s)
                law_s = linear * t.n_prompt + square * t.n_prompt**2
                t["without_s"] = none.ttft_s.reindex(t.index).fillna(law_s) + t.decode_s
            if cached and (perfect := cases.get((lever.keep, ""))) is not None:
                t["perfect_s"] = perfect.turn_s
            if prediction and not (expected := predicted(prediction, lever)).empty:
                t["expected_ttft_s"] = expected.ttft_s
                t["expected_turn_s"] = expected.turn_s
            made.append(t.reset_index())
    return finished(pd.concat(made, ignore_index=True)) if made else []


def finished(t: pd.DataFrame) -> list[Any]:
    """The table as rows, with all columns, None for an unknown figure, and whole numbers for counts."""
    counts = (
        "n_prompt",
        "n_cached",
        "n_computed",
        "n_again",
        "differs_at",
        "state_bytes",
        "slot_bytes",
    )
    times = ("without_s", "perfect_s", "expected_ttft_s", "expected_turn_s", "save_s", "load_s")
    t = t.assign(**{name: math.nan for name in (*counts, *times) if name not in t})
    t["sum_s"] = t.groupby(["conversation", "keep"]).turn_s.cumsum()
    t["again_s"] = (t.ttft_s * t.n_again / t.n_computed).where(t.n_again > 0, 0.0).astype(float)
    return experiment_tables.as_rows(t.astype(dict.fromkeys(counts, "Int64")))


def sentences(made: Sequence[Any]) -> list[str]:
    """The answer of each conversation, what broke its cache, and how good the predictions are."""
    words = list[str]()
    for (_, keep), own in grouped(made, lambda row: (row.conversation, row.keep)).items():
        (where, _) = PLACES[keep]
        first = own[0]
        last = own[-1]
        ttft_s = sum(row.ttft_s for row in own)
        again_s = sum(row.again_s for row in own)
        waiting = "waiting for the first token" if keep == SERVER else "prefill"
        read = (
            f"{seconds(again_s)} of that for tokens read before"
            if again_s
            else "no token was read twice"
        )
        whole = f"{plural(len(own), 'turn')} take {seconds(last.sum_s)}{where}"
        words.append(f"{whole}; {seconds(ttft_s)} of it is {waiting}, {read}.")
        unit = "letter" if keep == SERVER else "token"
        about = "" if all(row.is_known for row in own) else "about "
        broken = [row for row in own if row.differs_at is not None]
        for kinds, at in grouped(broken, lambda row: row.breaks or None).items():
            which = f"Turn{'s' * (len(at) > 1)} {join_and([str(row.turn) for row in at])}"
            places = join_and([f"{row.differs_at + 1:,}" for row in at])
            n_again = sum(row.n_again for row in at)
            words.append(
                f"{which} ({kinds}): the prompt differs from {unit} {places} on, and {about}"
                f"{plural(n_again, 'token')} after it were read again."
            )
            if (
                at[0].perfect_s is not None
                and (saved_s := sum(row.turn_s - row.perfect_s for row in at)) > 0
            ):
                words.append(
                    f"{BREAKS.get(kinds, f'Without {kinds} it')} would save {seconds(saved_s)}."
                )
        if keep == SLOT and first.slot_bytes:
            words.append(
                f"The second conversation's own slot costs {first.slot_bytes / 1e6:,.1f} MB of memory."
            )
        if keep != NONE and all(row.without_s is not None for row in own):
            words.append(f"Without a cache they take {seconds(sum(row.without_s for row in own))}.")
        restored = [(before, row) for before, row in itertools.pairwise(own) if row.load_s]
        for name, n_bytes, took_s in (
            ("Saving", last.state_bytes, last.save_s),
            *(("Loading", before.state_bytes, row.load_s) for before, row in restored[-1:]),
        ):
            if n_bytes and took_s:
                rate = cell(n_bytes / 1e9 / took_s)
                words.append(
                    f"{name} {n_bytes / 1e6:,.1f} MB took {seconds(took_s)} ({rate} GB/s)."
                )
        if len(restored) > 1:
            n_held = [float(before.n_prompt) for before, _ in restored]
            fixed, per_token = stats.fit(
                [[1.0] * len(n_held), n_held], [row.load_s for _, row in restored]
            )
            least = (
                fixed / gain
                if (gain := first.ttft_s / first.n_computed - per_token) > 0
                else math.inf
            )
            faster = (
                f"from about {plural(max(1, round(least)), 'token')} on"
                if least < math.inf
                else "at no length"
            )
            words.append(f"Loading is faster than prefill {faster}.")
        if about:
            words.append(
                "~: the server does not report cached tokens; they are estimated from the TTFT."
            )
        words += experiment_tables.prediction_errors(
            ((row.expected_ttft_s, row.ttft_s) for row in own), f"TTFT{where}"
        )
    return words


def answers(records: Sequence[Record]) -> list[str]:
    """Whether cached turns chose the tokens of uncached ones: the first difference."""
    chosen = dict[tuple[str, int, int, Turns], tuple[int, ...]]()
    for run, lever in ((one.run, turns_setup(one.run)) for one in records):
        if lever is None:
            continue
        start = 0
        text = dataclasses.replace(lever, breaks=of_text(lever.breaks), keep=NONE, only=())
        for turn in lever.numbers:
            n = lever.answers[turn - 1]
            chosen[lever.keep, turn, run.repeat, text] = run.token_ids[start : start + n]
            start += n * lever.n_slots
    pairs = [
        (key[1], ids, chosen.get((NONE, *key[1:]))) for key, ids in chosen.items() if key[0] != NONE
    ]
    at = [
        (turn, first_difference(ids, others)) for turn, ids, others in pairs if others and turn > 1
    ]
    differ = [(turn, token + 1) for turn, token in at if token is not None]
    if differ:
        turn, token = min(differ)
        return [
            f"In {len(differ)} of {plural(len(at), 'answer')} a cached turn chose another token than the uncached one, "
            f"first token {token} of answer {turn}: kernels for steps of other sizes round differently."
        ]
    return [
        f"In {plural(len(at), 'answer')} the cached turns chose the tokens of the uncached ones."
    ] * bool(at)


def draw(made: Sequence[Any], subject: str, figure: Figure) -> None:
    """Tokens of each prompt (cached, read again, new), and below the time of each turn, with lines to compare with."""
    import pandas as pd

    conversations = list(pd.DataFrame(made).groupby(["conversation", "keep"], sort=False))
    figure.set_figheight(figure.get_figheight() * 1.4)
    axes = figure.subplots(2, len(conversations), sharex=True, sharey="row", squeeze=False)
    for (tokens, times), ((_, keep), t) in zip(axes.T, conversations, strict=True):
        new = "new tokens (prefill)"
        tops = {tokens: 0 * t.turn, times: 0 * t.turn}
        for ax, name, values, colour in (
            (tokens, "cached", t.n_cached, canvas.GRID),
            (tokens, "read again", t.n_again, canvas.COLOURS[3]),
            (tokens, new, t.n_computed - t.n_again, canvas.OF_PREFILL),
            (times, "read again", t.again_s, canvas.COLOURS[3]),
            (times, new, t.ttft_s - t.again_s, canvas.OF_PREFILL),
            (times, "decode", t.turn_s - t.ttft_s, canvas.OF_DECODE),
        ):
            ax.bar(t.turn, values.fillna(0), bottom=tops[ax], color=colour, label=name)
            tops[ax] = tops[ax] + values.fillna(0)
        for name, line, style in (
            ("with a perfect cache", t.perfect_s, "-"),
            ("without a cache", t.without_s, "--"),
            ("predicted", t.expected_turn_s, ":"),
        ):
            if line.notna().all():
                times.hlines(
                    line,
                    t.turn - 0.45,
                    t.turn + 0.45,
                    color=canvas.INK,
                    ls=style,
                    lw=1.6,
                    label=name,
                )
        tokens.set_title(PLACES[keep][1], fontsize=10)
        times.set_xlabel("turn, and what broke the cache" if t.breaks.any() else "turn")
        every = t.iloc[:: math.ceil(len(t) * len(conversations) / MOST_TICKS)]
        times.set_xticks(
            every.turn,
            [f"{one.turn}\n{one.breaks.replace(', ', chr(10))}" for one in every.itertuples()],
        )
    axes[0, 0].set_ylabel("tokens of the prompt")
    axes[1, 0].set_ylabel("time of the turn (s)")
    n_turns = plural(max(row.turn for row in made), "turn")
    canvas.finish(
        list(axes.flat),
        f"A conversation of {n_turns}: what is read again\n{subject}",
        is_apart=True,
    )


def execute(
    lever: Turns, server: Server, text: str, path: Path, watch: ShowStatus, said: Sequence[str] = ()
) -> Iterator[RequestRecord]:
    """Send a request per turn, append each to `path`, and yield its record. A failed request ends the conversation.

    Messages are whole words of `text`, so their lengths in tokens are approximate; or those that were `said` in a file.
    The first words differ in each session, so that the first turn finds no cache. A second conversation, which breaks
    the cache, is sent and not recorded.
    """
    words = [re.findall(r"\s*\S+\s*", part) for part in said or [text]]
    last = len(lever.answers)
    flat = [word for own in words for word in own]
    lengths = [len(own) for own in words]
    if not said:
        n_counted = server.counter.count("".join(flat[:300])) if server.counter else None
        ratio = n_counted / len(flat[:300]) if n_counted else TOKENS_PER_WORD
        pairs = [n for pair in zip(lever.messages, lever.answers, strict=True) for n in pair]
        lengths = [max(2, round(n / ratio)) if n else 0 for n in (lever.system, *pairs)]
    nonces = [[f"{letter} " for letter in formats.fresh_nonce().split()] for _ in range(3)]
    begin = 0 if lengths[0] else 1
    lengths[begin] += len(nonces[0])
    in_words = [max(1, n) for n in lengths[1:]]
    own = dataclasses.replace(
        lever, system=lengths[0], messages=tuple(in_words[::2]), answers=tuple(in_words[1::2])
    )

    accepted = tuple(option for option in server.endpoint.accepted if option != formats.NO_CACHE)

    def send(
        parts: Sequence[Sequence[str]], n_gen: int, place: Turn, is_kept: bool = True
    ) -> tuple[RequestRecord, str]:
        asked = Asked(
            n_prompt=None,
            n_gen=n_gen,
            experiment="turns",
            case=case_of(lever),
            place=vars(place),
            **formats.limits(accepted),
        )
        prompt = ["".join(part) for part in parts]
        reply = server.send(
            formats.ask_for(server.endpoint.api, server.model, prompt, asked, accepted)
        )
        record = server.record(path.stem, reply.request)
        if is_kept:
            results.save(path, record)
        return record, reply.text

    turns = turns_of(own, lambda n: [*nonces[0], *(flat * (1 + n // len(flat)))][:n])
    cold = []
    prompt, n_common, _, parts = next(turns)
    for number, n_gen in enumerate(lever.answers, 1):
        watch(Status(f"turn {number} of {last}"))
        place = Turn(
            number=number,
            differs_at=sum(map(len, prompt[:n_common])) if number > 1 else None,
        )
        if SECOND in parse_breaks(lever.breaks, last)[number - 1]:
            send([parts[0], flat[::-1][: len(parts[1])]], 2, place, is_kept=False)
        record, answer = send(parts, n_gen, place)
        yield record
        if record.request.status != OK:
            return
        if number in (last // 2 + 1, last) and number > 1:
            cold.append((parts, dataclasses.replace(place, is_cold=True, differs_at=None)))
        if number < last:
            prompt, n_common, _, parts = turns.send(re.findall(r"\s+|\S+\s*", answer) or [" "])
    for nonce, (parts, place) in zip(nonces[1:], cold, strict=False):
        watch(Status(f"turn {place.number} without a cache"))
        changed = [*nonce, *parts[begin][len(nonce) :]]
        yield send([*parts[:begin], changed, *parts[begin + 1 :]], 2, place)[0]


def served(records: Sequence[RequestRecord]) -> pd.DataFrame:
    """A row per turn of one conversation through a server; empty if no turn succeeded."""
    import pandas as pd

    made = []
    for one in (record.request for record in records):
        place = Turn(**one.asked.place)  # type: ignore[arg-type]
        times = figures_of_request(one)
        if one.status == OK and times.ttft_ns is not None and times.e2e_ns is not None:
            conversation = setup_of(Turns, one.asked.case)
            kinds = parse_breaks(conversation.breaks, len(conversation.messages))[place.number - 1]
            known = {"turn": place.number, "is_cold": place.is_cold, "breaks": ", ".join(kinds)}
            known |= {
                "differs_at": place.differs_at,
                "n_message": conversation.messages[place.number - 1],
            }
            known |= {
                "n_prompt": times.n_prompt,
                "n_cached": times.n_cached,
                "n_gen": times.n_generated or None,
            }
            made.append(
                {
                    **known,
                    "ttft_s": times.ttft_ns / 1e9,
                    "decode_s": (times.e2e_ns - times.ttft_ns) / 1e9,
                }
            )
    if all(row["is_cold"] for row in made):
        return pd.DataFrame()
    every = pd.DataFrame(made).astype(
        dict.fromkeys(("n_prompt", "n_cached", "n_gen", "differs_at"), float)
    )
    t = every[~every.is_cold].sort_values("turn", ignore_index=True)
    grown = t.n_prompt - (t.n_prompt + t.n_gen - 1).shift(
        fill_value=0
    )  # the last token of an answer is not cached
    is_next = t.turn.diff().fillna(t.turn).eq(1) & t.breaks.eq("")  # a failed turn is missing
    n_new = grown.where(is_next & (grown > 0), t.n_message).clip(upper=t.n_prompt)
    points = pd.concat([t[t.turn == 1], every[every.is_cold]])
    points = points.assign(n=points.n_prompt - points.n_cached.fillna(0)).dropna(subset=["n"])
    points["n2"] = points.n**2
    linear = math.nan
    square = math.nan
    fixed = math.nan
    for _ in range(
        2 if len(points) else 0
    ):  # first of the uncached turns, then also of those too fast for that law
        columns = [list(points.n), list(points.n2), [1.0] * len(points)][: len(points)]
        linear, square, fixed = (*stats.fit(columns, list(points.ttft_s)), 0.0, 0.0)[:3]
        least = t.assign(
            n=n_new, n2=t.n_prompt**2 - (t.n_prompt - n_new) ** 2
        )  # every turn computes its message
        is_fast = t.n_cached.isna() & (t.ttft_s < fixed + linear * least.n + square * least.n2)
        points = pd.concat([points, least[is_fast].dropna(subset=["n"])])

    def time_of(n: pd.Series[float]) -> pd.Series[float]:
        return linear * n + square * n**2

    t["is_known"] = t.n_cached.notna()
    left = (fixed + time_of(t.n_prompt) - t.ttft_s).clip(
        lower=0
    )  # the time that the cached tokens would have taken
    estimate = (
        ((linear**2 + 4 * square * left) ** 0.5 - linear) / (2 * square)
        if square > 0
        else left / linear
    )
    t["n_cached"] = t.n_cached.fillna(estimate.round().clip(upper=t.n_prompt - n_new))
    t["n_computed"] = t.n_prompt - t.n_cached
    t["n_again"] = (t.n_computed - n_new).clip(lower=0).round()
    t["turn_s"] = t.ttft_s + t.decode_s
    t["without_s"] = fixed + time_of(t.n_prompt) + t.decode_s
    perfect = fixed + time_of(t.n_prompt) - time_of(t.n_prompt - n_new) + t.decode_s
    t["perfect_s"] = perfect.clip(upper=t.turn_s)
    return t.assign(conversation=1, keep=SERVER, cache="")


def served_sections(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Conversations through a server, a part for each session."""
    law = "Times without a cache and with a perfect one come from a formula for the TTFT of uncached tokens."
    parts = list[Section]()
    title = TABLE.title.replace(", medians over runs", "").replace("token that", "letter that")
    table = dataclasses.replace(
        TABLE, title=title, is_by_ceilings=False, conclude=lambda made, _: [*sentences(made), law]
    )
    for own in grouped(records, lambda one: one.session).values():
        if not (t := served(own)).empty:
            label = f"{short_name(own[0].model)} through {own[0].endpoint.server or 'its server'}"
            of_session = dataclasses.replace(
                table, rows=partial(lambda made, _, __: made, finished(t))
            )
            parts.append(experiment.section(of_session, label, (), None, context.is_page))
    name = "Conversations through a server"
    return [Section(name, name="turns", question=TABLE.question, parts=parts)] if parts else []


def converse(context: click.Context, url: str, asked: dict[str, Any]) -> None:
    """`lab turns` through a server."""
    from lab.app.running import collect
    from lab.app.server import confirm, given
    from lab.app.output import Output
    from lab.show import console, text_requests

    said = read_messages(Path(asked["replay"])) if asked["replay"] else []
    if said:  # lengths in tokens are those of its words
        name = Path(asked["replay"]).name
        count = lambda part: round(TOKENS_PER_WORD * len(part.split()))
        lever = replayed(said, name, asked["breaks"], count)
    else:
        lever = lever_of(*(asked[name] for name in ("system", "turn", "turns", "breaks", "seed")))
    confirm(url, f"{len(lever.messages) + 2} requests", asked["yes"])
    output = Output.taken_from(asked)
    err = console.console(stderr=True)
    err.print("examining the server ...")
    model = asked["model"] if "model" in given(context) else None
    with connect(url, model, err.print, **reaching_of(asked)) as server:
        if asked["dry_run"]:
            n_most = lever.system + sum(lever.messages) + sum(lever.answers)
            return err.print(
                f"{len(lever.messages)} turns, up to about {n_most:,} tokens in the last"
            )
        path = server.new_file(output.folder)
        text = prompt_text(asked["prompt"])
        records, problem = collect(
            lambda watch: execute(lever, server, text, path, watch, said),
            path,
            err,
            None,
            text_requests.finished,
        )
        output.finish(records, path, problem, any(one.request.status != OK for one in records))


def count(name: str, row: Any) -> str:
    """The cell of a number of tokens, with ~ where it is estimated."""
    value = getattr(row, name)
    mark = "" if row.is_known or name == "n_prompt" else "~"
    return UNKNOWN if value is None or (name == "n_again" and not value) else f"{mark}{value:,}"


TABLE = experiment.Table(
    name="turns",
    question="How much of a conversation's prompt is read again?",
    title="a conversation turn by turn, medians over runs; again: tokens of earlier turns that were computed again; "
    "differs: the first token that is not the cache's",
    caption="Above: the tokens of each prompt. Below: the time of each turn, with that of a cache that nothing breaks "
    "and that without a cache.",
    rows=rows,
    conclude=lambda made, records: [*sentences(made), *answers(records)],
    draw=lambda made, _, subject, figure: draw(made, subject, figure),
    columns=(
        ("turn", lambda row: str(row.turn)),
        ("cache", lambda row: row.cache),
        ("broken by", lambda row: row.breaks),
        ("cached", partial(count, "n_cached")),
        ("computed", partial(count, "n_computed")),
        ("again", partial(count, "n_again")),
        ("TTFT\ns", lambda row: cell(row.ttft_s)),
        ("turn\ns", lambda row: cell(row.turn_s)),
        ("no cache\ns", lambda row: cell(row.without_s)),
        ("perfect\ns", lambda row: UNKNOWN if row.perfect_s == row.turn_s else cell(row.perfect_s)),
        ("predicted\nTTFT s", lambda row: cell(row.expected_ttft_s)),
        ("decode\ns", lambda row: cell(row.decode_s)),
        ("sum\ns", lambda row: cell(row.sum_s)),
        (
            "differs\nat",
            lambda row: UNKNOWN if row.differs_at is None else f"{row.differs_at + 1:,}",
        ),
        ("prompt", partial(count, "n_prompt")),
    ),
)

EXPERIMENT = experiment.Experiment(
    name="turns",
    chapter="Conversations",
    about="""Measure what each turn of a conversation processes again.

    \b
      lab turns --system 4000 --turn 300+150 --turns 12 --break system@6
      lab turns --replay session.jsonl
      lab turns --url http://127.0.0.1:8080/v1

    Shows the tokens that the cache served and those computed anew, the times of each turn, its time without a cache and
    with one that nothing breaks, and the prediction from the ceilings. Names the first token at which a prompt differs
    from the cache. Events of --break: system (a clock in the system prompt), tools (two in another order), truncate (an
    old message shortened), second (another conversation used the cache), shift (the older half dropped), thinking
    (removed from earlier answers). With --keep slot a second conversation takes turns with the first, in a slot of its
    own; disk uses a hidden folder in --out. A file to --replay gives the lengths of its messages; through a server its
    messages are sent.
    """,
    plan=plan,
    options=OPTIONS,
    main_options=("model", "system", "turn", "turns", "break", "keep"),
    saves_states=True,
    tables=(TABLE,),
    through_server=converse,
)

KINDS = (
    EXPERIMENT.as_kind(),
    Kind(
        "served turns",
        lambda one: isinstance(one, RequestRecord) and one.experiment == "turns",
        served_sections,
    ),
)
command = EXPERIMENT.as_command()
