"""The result of `lab tune`: a table of what was tried, the recommendation in words, a picture, and rows for JSON.

Two kinds of figures stand side by side. The table is the search, which chose the winner for its times, so its ratios
flatter the winner. The sentences have the gain of the confirmation, measured in new blocks after the choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core.lists import plural
from lab.core.record import Record
from lab.core.shown import MARK
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.features.exchange import other_tools
from lab.features.tune import result as tuning
from lab.features.tune.plot_tune import draw_tried
from lab.features.tune.result import (
    AT_LEAST,
    CONFIRM,
    DECODE,
    FEWEST_CONFIRMED,
    PREFILL,
    TPOT,
    TTFT,
    Crossing,
    Measured,
    Tried,
    Tuned,
)
from lab.features.tune.search import Choice
from lab.models import catalog, obtain
from lab.runner import machine
from lab.show import canvas, console, setup_columns
from lab.show.section import UNKNOWN, WIDE, Columns, Picture, Section, print_section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANGES_OUTPUT = "changes the model's output"
"""Of the settings in `tuning.LOSSY`."""

MOST_ROWS = 12
"""Rows that a terminal shows without --details."""

GOALS = {
    tuning.REQUEST: "time of the whole request",
    TTFT: "time to the first token",
    TPOT: "time of all tokens after the first",
    tuning.THROUGHPUT: "time of all requests together",
}
"""What each goal minimizes."""

CAPTION = (
    "What was tried: the time with each choice of settings over that with the default; left of 1 it is faster. Points "
    "are runs, bars are 95 % intervals."
)


def sections(records: Sequence[Record], is_here: bool = False) -> list[Section]:
    """What each session of `lab tune` among the records found.

    With `is_here` command lines have the path of the model's file on this machine, which a page to share should not.
    """
    return [section(one, is_here) for one in tuning.of_sessions(records)]


def compared(records: Sequence[Record]) -> list[Record]:
    """A record of the default and one of the winner of each session of `lab tune`."""
    return [each for one in tuning.of_sessions(records) for each in (one.default, one.winner) if each]


def show_tuned(found: Tuned) -> None:
    """Print what `lab tune` prints: what was tried, the recommendation, and its command lines.

    lab.show_tuned(lab.tune(2000, 300, budget="5min"))
    """
    print_section(section(found, is_here=True), console.console())


def plot_tuned(found: Tuned) -> Figure:
    """Draw the time of each choice that `lab tune` tried over the default's, and the winner's in the confirmation.

    lab.plot_tuned(lab.tune(2000, 300, budget="5min"))
    """
    return _draw(found, canvas.new_figure(WIDE))


def _draw(one: Tuned, figure: Figure) -> Figure:
    return draw_tried(one, _rows(one), _label, _variant(one.winner), _subject(one.default), figure)


def _rows(one: Tuned) -> list[Tried]:
    """What was tried, the default and the winner first."""
    first = tuning.DEFAULT, _variant(one.winner)
    return sorted(one.tried, key=lambda row: first.index(row.variant) if row.variant in first else len(first))


def section(one: Tuned, is_here: bool = False) -> Section:
    """What a session found; `is_here` as in `sections`."""
    timed = [run for run in one.measured if run.timing]
    n_disturbed = sum(run.timing.is_disturbed for run in timed if run.timing)
    doubt = f" ({MARK} {n_disturbed} of {len(timed)} runs disturbed)" if n_disturbed else ""
    rows = _rows(one)
    columns: Columns = [
        ("settings", _label),
        ("runs", lambda row: str(row.n_runs)),
        ("time", lambda row: seconds(row.seconds) if row.seconds is not None else UNKNOWN),
        ("time\nratio", _ratio),
        ("verdict", partial(verdict, one)),
    ]
    return Section(
        f"{_subject(one.default)}{doubt}",
        f"{workload(one)}; goal: {_minimized(one)}",
        name=f"tune-{one.session}",
        question=f"Which settings are the fastest for {aim(one)}?",
        **tabled(columns, rows, keep_all=True),
        most_rows=MOST_ROWS,
        warnings=[*_doubts(timed), *_failures(rows)],
        sentences=sentences(one),
        notes=[
            f"Time: the {_minimized(one)} that the search expects from all its runs. "
            "Ratio: that time over the default's, with its 95 % interval below."
        ],
        parts=[*_crossings(one), *_commands(one, is_here)],
        pictures=[Picture("tune", CAPTION, partial(_draw, one), WIDE)],
        data=lambda: {"tunings": [_as_row(one)]},
    )


def _subject(record: Record) -> str:
    return f"{setup_columns.model_label(record)} on {machine.label(record.machine, record.settings)}"


def _minimized(one: Tuned) -> str:
    return GOALS.get(one.goal, one.goal)


def _variant(record: Record | None) -> str | None:
    """The choice of a record, as options."""
    return record.run.variant if record else None


def workload(one: Tuned) -> str:
    """What was asked for: `2,000 prompt tokens + 300 generated, 4 users`."""
    users = "" if one.n_users == 1 else f", {plural(one.n_users, 'user')}"
    return f"{one.n_prompt:,} prompt tokens + {one.n_gen:,} generated{users}"


def aim(one: Tuned) -> str:
    """What is faster: `2,000 + 300 tokens`, or the tokens that the goal is about."""
    users = "" if one.n_users == 1 else f" for each of {plural(one.n_users, 'user')}"
    if one.goal == TTFT:
        return f"the first token after {one.n_prompt:,} prompt tokens{users}"
    if one.goal == TPOT:
        return f"each further token after {one.n_prompt:,} prompt tokens{users}"
    return f"{one.n_prompt:,} + {one.n_gen:,} tokens{users}"


def _label(row: Tried) -> str:
    return row.variant + (f"\n{CHANGES_OUTPUT}" if tuning.is_lossy(row.choice) else "")


def _name(variant: str | None, choice: Choice) -> str:
    """A choice in a sentence."""
    return f"{variant}{f' ({CHANGES_OUTPUT})' if tuning.is_lossy(choice) else ''}"


def _ratio(row: Tried) -> str:
    if row.ratio is None:
        return UNKNOWN
    return digits(1.0) if row.variant == tuning.DEFAULT else f"{digits(row.ratio.estimate)}\n{_ends(row.ratio)}"


def _ends(ratio: Ratio, between: str = "-") -> str:
    return f"{digits(ratio.low)}{between}{digits(ratio.high)}"


def _pace(gain: Ratio) -> str:
    return f"{digits(gain.estimate)} times as fast"


def _sure(gain: Ratio) -> str:
    return f"95 % interval {_ends(gain, ' to ')}"


def verdict(one: Tuned, row: Tried) -> str:
    """What became of a choice."""
    if row.ratio is None:
        return "failed"
    if row.variant == tuning.DEFAULT:
        return "the base"
    if row.variant == _variant(one.winner):
        return "recommended" if one.is_recommended else "gain not confirmed"
    if row.ratio.low > 1:
        return "slower"
    return "faster in the search" if row.ratio.high < 1 else "no clear difference"


def sentences(one: Tuned) -> list[str]:
    """The recommendation with its times, or why there is none."""
    others = [row for row in one.tried if row.variant != tuning.DEFAULT and row.ratio]
    won = _variant(one.winner)
    if one.gain is not None:
        name, blocks = _name(won, one.choice), f"{one.n_confirmed} new blocks"
        if not one.is_recommended:
            return [
                f"Keep the default: {name} was the fastest in the search, but {blocks} do not show a gain clearly "
                f"above {percent(AT_LEAST)}. There it is {_pace(one.gain)} ({_sure(one.gain)}).{_visible(one)}"
            ]
        gain = f"{_pace(one.gain)} for {aim(one)} ({_sure(one.gain)}, from {blocks} measured after the choice)"
        return [f"{name} is {gain}{_limit(one)}.{_visible(one)}", *_phases(one)]
    best = next((row for row in others if row.variant == won), next(iter(others), None))
    if best is None or best.ratio is None:
        return ["No other setting was measured, so nothing is recommended."]
    if won is None and (best.ratio.high >= 1 or best.ratio.estimate > 1 / (1 + AT_LEAST)):
        return ["Nothing that was tried is faster than the default beyond noise: keep the default."]
    n, gain_there = one.n_confirmed, Ratio(1 / best.ratio.estimate, 1 / best.ratio.high, 1 / best.ratio.low)
    why = f"only {plural(n, 'new block')} of at least {FEWEST_CONFIRMED} confirmed it" if n else "nothing confirmed it"
    return [
        f"No recommendation: {_name(best.variant, best.choice)} was the fastest in the search "
        f"({_pace(gain_there)}, {_sure(gain_there)}), but {why}. The gain of a search is too optimistic, because the "
        "search chose the settings with the shortest times. Run lab tune again with a larger --budget."
    ]


def _visible(one: Tuned) -> str:
    """Which gains the confirmation could have seen, unless the gain is clearly one of them."""
    if one.gain is None or one.visible is None or one.gain.estimate >= one.visible:
        return ""
    found = f" Such blocks find a gain of {digits(one.visible)} times in 4 of 5 sessions"
    return f"{found}; smaller ones are found less often, and then look larger than they are."


def _limit(one: Tuned) -> str:
    """For which answers after the prompt that was asked for the winner loses."""
    at = next((row for row in one.crossings if row.n_prompt == one.n_prompt), None)
    if at is None or one.goal in (TTFT, TPOT):
        return ""
    if at.from_gen is not None:
        return f"; it loses below {at.from_gen:,} generated tokens"
    return "" if at.to_gen is None else f"; it loses above {at.to_gen:,} generated tokens"


def _phases(one: Tuned) -> list[str]:
    """The medians of both phases in the confirmation."""
    words = {PREFILL: "first token after {}", DECODE: "each further token {}"}
    parts = [
        words[name].format(f"{seconds(other)} instead of {seconds(base)}")
        for name, (base, other) in one.seconds.items()
        if name in words
    ]
    return [f"Medians of these blocks: {', '.join(parts)}."] if parts else []


def _crossings(one: Tuned) -> list[Section]:
    """For which prompts and answers the recommended settings are faster; nothing without a recommendation."""
    if not (one.is_recommended and one.crossings) or one.goal in (TTFT, TPOT):
        return []
    columns: Columns = [
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        (f"times as fast\nfor {one.n_gen:,} generated", lambda row: digits(row.gain)),
        ("faster for answers of", _lengths),
    ]
    return [
        Section(
            "When the recommended settings are faster",
            "by medians, without an interval",
            **tabled(columns, one.crossings, keep_all=True),
        )
    ]


def _commands(one: Tuned, is_here: bool) -> list[Section]:
    """Ready command lines of the recommended settings."""
    facts = command_lines(one, is_here)
    return [Section("The recommended settings in other programs", facts=facts)] if facts else []


def command_lines(one: Tuned, is_here: bool = False) -> dict[str, str]:
    """By program, the command line, expression or file for the recommended settings; empty without a recommendation.

    Options that a program lacks are named in a comment.
    """
    if not one.is_recommended or one.winner is None:
        return {}
    model = one.winner.model
    path = f"./{model.file}"
    with contextlib.suppress(LabError):
        if is_here and (found := obtain.locate(catalog.parse(catalog.spec_of(model)))):
            path = str(found.path)
    made = other_tools.command_lines(path, one.winner.settings, one.n_prompt, one.n_gen, one.n_users)
    return {
        line.tool: "\n".join(
            [
                line.text,
                *([f"# without {', '.join(line.missing)}: {line.tool} has no such option"] if line.missing else []),
            ]
        )
        for line in made
    }


def _lengths(row: Crossing) -> str:
    if not row.is_ever:
        return "no length"
    if row.from_gen is not None:
        return f"{row.from_gen:,} or more tokens"
    return "any length" if row.to_gen is None else f"up to {row.to_gen:,} tokens"


def _doubts(timed: Sequence[Measured]) -> list[str]:
    """A sentence if at least half of the runs that count were disturbed."""
    confirmed = [run for run in timed if run.stage == CONFIRM]
    counting = [run.timing.is_disturbed for run in confirmed or timed if run.timing]
    if not any(counting) or 2 * sum(counting) < len(counting):
        return []
    what = "runs that confirm the gain" if confirmed else "runs"
    return [f"Other programs disturbed at least half of the {what}. Run lab tune again while no other program runs."]


def _failures(rows: Sequence[Tried]) -> list[str]:
    """One line on all choices with a failed run."""
    failed = [f"{row.variant} ({row.error})" for row in rows if row.error]
    return [f"Runs failed with {'; '.join(failed)}."] if failed else []


def _as_row(one: Tuned) -> dict[str, Any]:
    won = _variant(one.winner)
    times = {
        f"{side}_{part}_s": value
        for phase, part in ((PREFILL, "first_token"), (DECODE, "each_token"))
        for side, value in zip(("default", "winner"), one.seconds.get(phase, ()), strict=False)
    }
    return {
        "session": one.session,
        "subject": _subject(one.default),
        "goal": one.goal,
        "n_prompt": one.n_prompt,
        "n_gen": one.n_gen,
        "n_users": one.n_users,
        "recommended": won if one.is_recommended else None,
        "winner": won,
        "changes_output": tuning.is_lossy(one.choice),
        **_as_fields("gain", one.gain),
        "gain_visible": one.visible,
        "n_blocks_confirmed": one.n_confirmed,
        **times,
        "tried": [
            {
                "settings": row.variant,
                "changes_output": tuning.is_lossy(row.choice),
                "n_runs": row.n_runs,
                "time_s": row.seconds,
                **_as_fields("time_ratio", row.ratio),
                "verdict": verdict(one, row),
                "error": row.error,
            }
            for row in one.tried
        ],
        "crossings": [dataclasses.asdict(row) for row in one.crossings],
        "sentences": sentences(one),
        "command_lines": command_lines(one, is_here=True),
    }


def _as_fields(name: str, ratio: Ratio | None) -> dict[str, float | None]:
    return {
        name: ratio.estimate if ratio else None,
        f"{name}_low": ratio.low if ratio else None,
        f"{name}_high": ratio.high if ratio else None,
    }


def faster_settings(records: Iterable[Record], others: Iterable[Record]) -> list[str]:
    """At most one sentence: settings that `lab tune` recommends, and that none of these plain runs uses.

    `others` may hold sessions of `lab tune`. The newest one of each workload counts, of the same model on the same
    devices, for the goal `request` and one user.
    """
    known = [one for one in tuning.of_sessions(list(others)) if one.goal == tuning.REQUEST and one.n_users == 1]
    newest = {(one.n_prompt, one.n_gen, _where(one.default)): one for one in sorted(known, key=lambda one: one.session)}
    plain = [record for record in tuning.without(records) if record.run.is_timed and record.run.lever is None]
    for one in reversed(newest.values()):
        alike = [record for record in plain if _where(record) == _where(one.default)]
        if one.gain and one.is_recommended and alike and not any(_uses(record, one) for record in alike):
            name = _name(_variant(one.winner), one.choice)
            return [f"lab tune found faster settings for {aim(one)} on this machine: {name}, {_pace(one.gain)}."]
    return []


def _uses(record: Record, one: Tuned) -> bool:
    """Whether a run has the settings of the winner."""
    return set(one.choice) <= set(tuning.choice_of(record, one.default))


def _where(record: Record) -> tuple[str | None, ...]:
    """The machine, its devices with layers, the build and the model of a run."""
    here = machine.label(record.machine, record.settings)
    return record.machine.cpu, here, record.settings.lib, setup_columns.model_label(record)
