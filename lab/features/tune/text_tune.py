"""The result of `lab tune`: a table of what was tried, the recommendation in words, a picture, and rows for JSON.

Two kinds of figures stand side by side. The table is the search, which chose the winner for its times, so its ratios
flatter the winner. The sentences have the gain of the confirmation, measured in new blocks after the choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core.levers import Batch
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.shown import MARK
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.features.exchange import other_tools
from lab.features.tune import result as tuning
from lab.features.tune.result import (
    AT_LEAST,
    CONFIRM,
    DECODE,
    DEFAULT,
    FEWEST_CONFIRMED,
    PREFILL,
    SEARCH,
    TPOT,
    TTFT,
    Crossing,
    Tried,
    Tuned,
)
from lab.features.tune.search import Choice
from lab.models import catalog, obtain
from lab.runner import as_options, machine
from lab.show import canvas, console, setup_columns
from lab.show.canvas import COLOURS, GUIDE
from lab.show.kind import Context, Kind
from lab.show.section import UNKNOWN, WIDE, Columns, Picture, Section, print_section, tabled
from lab.show.wording import digits, percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHANGES_OUTPUT = "changes the model's output"
"""Of the settings in `tuning.LOSSY`."""

MOST_ROWS, MOST_DRAWN = 12, 40
"""Rows that a terminal shows without --details, and choices in the picture."""

LABEL_LETTERS = 34

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


def section(one: Tuned, is_here: bool = False) -> Section:
    """What a session found; `is_here` as in `sections`."""
    stages = [(run.stage, run.timing.is_disturbed) for run in one.measured if run.timing]
    n_disturbed = sum(is_disturbed for _, is_disturbed in stages)
    doubt = f" ({MARK} {n_disturbed} of {len(stages)} runs disturbed)" if n_disturbed else ""
    rows, warnings = _rows(one), []
    confirmed = [is_disturbed for stage, is_disturbed in stages if stage == CONFIRM]
    counting = confirmed or [is_disturbed for _, is_disturbed in stages]
    if any(counting) and 2 * sum(counting) >= len(counting):
        what = "runs that confirm the gain" if confirmed else "runs"
        warnings = [
            f"Other programs disturbed at least half of the {what}. Run lab tune again while no other program runs."
        ]
    if failed := [f"{row.variant} ({row.error})" for row in rows if row.error]:
        warnings.append(f"Runs failed with {'; '.join(failed)}.")
    columns: Columns = [
        ("settings", lambda row: _name(row.variant, row.choice, "\n{}")),
        ("runs", lambda row: str(row.n_runs)),
        ("time", lambda row: UNKNOWN if row.seconds is None else seconds(row.seconds)),
        ("time\nratio", lambda row: "\n".join(_ratio(row)) or UNKNOWN),
        ("verdict", partial(verdict, one)),
    ]
    parts = []
    if one.is_recommended and one.crossings and one.goal not in (TTFT, TPOT):
        lengths: Columns = [
            ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
            (f"times as fast\nfor {one.n_gen:,} generated", lambda row: digits(row.gain)),
            ("faster for answers of", _lengths),
        ]
        title, subtitle = "When the recommended settings are faster", "by medians, without an interval"
        parts.append(Section(title, subtitle, **tabled(lengths, one.crossings, keep_all=True)))
    if facts := command_lines(one, is_here):
        parts.append(Section("The recommended settings in other programs", facts=facts))
    minimized = GOALS.get(one.goal, one.goal)
    return Section(
        f"{_subject(one.default)}{doubt}",
        f"{workload(one)}; goal: {minimized}",
        name=f"tune-{one.session}",
        question=f"Which settings are the fastest for {aim(one)}?",
        **tabled(columns, rows, keep_all=True),
        most_rows=MOST_ROWS,
        warnings=warnings,
        sentences=sentences(one),
        notes=[
            f"Time: the {minimized} that the search expects from all its runs. "
            "Ratio: that time over the default's, with its 95 % interval below."
        ],
        parts=parts,
        pictures=[Picture("tune", CAPTION, partial(_draw, one), WIDE)],
        data=lambda: {"tunings": [_as_row(one)]},
    )


def _rows(one: Tuned) -> list[Tried]:
    """What was tried, the default and the winner first."""
    first = DEFAULT, one.won
    return sorted(one.tried, key=lambda row: first.index(row.variant) if row.variant in first else len(first))


def _subject(record: Record) -> str:
    return f"{setup_columns.model_label(record)} on {machine.label(record.machine, record.settings)}"


def workload(one: Tuned) -> str:
    """What was asked for: `2,000 prompt tokens + 300 generated, 4 users`."""
    users = "" if one.n_users == 1 else f", {plural(one.n_users, 'user')}"
    return f"{one.n_prompt:,} prompt tokens + {one.n_gen:,} generated{users}"


def aim(one: Tuned) -> str:
    """What is faster: `2,000 + 300 tokens`, or the tokens that the goal is about."""
    users = "" if one.n_users == 1 else f" for each of {plural(one.n_users, 'user')}"
    tokens = {TTFT: "the first token after", TPOT: "each further token after"}.get(one.goal)
    return (
        f"{tokens} {one.n_prompt:,} prompt tokens{users}"
        if tokens
        else f"{one.n_prompt:,} + {one.n_gen:,} tokens{users}"
    )


def _name(variant: str | None, choice: Choice, lossy: str = " ({})") -> str:
    return f"{variant}{lossy.format(CHANGES_OUTPUT) if tuning.is_lossy(choice) else ''}"


def _ratio(row: Tried) -> list[str]:
    """The ratio and its interval; only 1.00 of the default, nothing of a failed choice."""
    if row.ratio is None or row.variant == DEFAULT:
        return [digits(1.0)] if row.ratio else []
    return [digits(row.ratio.estimate), f"{digits(row.ratio.low)}-{digits(row.ratio.high)}"]


def _inverse(ratio: Ratio) -> Ratio:
    return Ratio(1 / ratio.estimate, 1 / ratio.high, 1 / ratio.low)


def _pace(gain: Ratio) -> str:
    return f"{digits(gain.estimate)} times as fast"


def _sure(gain: Ratio) -> str:
    return f"95 % interval {digits(gain.low)} to {digits(gain.high)}"


def verdict(one: Tuned, row: Tried) -> str:
    """What became of a choice."""
    if row.ratio is None:
        return "failed"
    if row.variant == DEFAULT:
        return "the base"
    if row.variant == one.won:
        return "recommended" if one.is_recommended else "gain not confirmed"
    if row.ratio.low > 1:
        return "slower"
    return "faster in the search" if row.ratio.high < 1 else "no clear difference"


def sentences(one: Tuned) -> list[str]:
    """The recommendation with its times, or why there is none."""
    if one.gain is not None:
        name, blocks, visible = _name(one.won, one.choice), f"{one.n_confirmed} new blocks", ""
        if one.visible is not None and one.gain.estimate < one.visible:
            visible = (
                f" Such blocks find a gain of {digits(one.visible)} times in 4 of 5 sessions; smaller ones are found "
                "less often, and then look larger than they are."
            )
        if not one.is_recommended:
            return [
                f"Keep the default: {name} was the fastest in the search, but {blocks} do not show a gain clearly "
                f"above {percent(AT_LEAST)}. There it is {_pace(one.gain)} ({_sure(one.gain)}).{visible}"
            ]
        limit, at = "", next((row for row in one.crossings if row.n_prompt == one.n_prompt), None)
        if at and one.goal not in (TTFT, TPOT) and (at.from_gen, at.to_gen) != (None, None):
            end = f"above {at.to_gen:,}" if at.from_gen is None else f"below {at.from_gen:,}"
            limit = f"; it loses {end} generated tokens"
        words = {PREFILL: "first token after {}", DECODE: "each further token {}"}
        medians = [
            words[name].format(f"{seconds(other)} instead of {seconds(base)}")
            for name, (base, other) in one.seconds.items()
            if name in words
        ]
        return [
            f"{name} is {_pace(one.gain)} for {aim(one)} ({_sure(one.gain)}, from {blocks} measured after the choice)"
            f"{limit}.{visible}",
            *([f"Medians of these blocks: {', '.join(medians)}."] if medians else []),
        ]
    others = [row for row in one.tried if row.variant != DEFAULT and row.ratio]
    best = next((row for row in others if row.variant == one.won), next(iter(others), None))
    if best is None or best.ratio is None:
        return ["No other setting was measured, so nothing is recommended."]
    if one.won is None and (best.ratio.high >= 1 or best.ratio.estimate > 1 / (1 + AT_LEAST)):
        return ["Nothing that was tried is faster than the default beyond noise: keep the default."]
    n, gain = one.n_confirmed, _inverse(best.ratio)
    why = f"only {plural(n, 'new block')} of at least {FEWEST_CONFIRMED} confirmed it" if n else "nothing confirmed it"
    return [
        f"No recommendation: {_name(best.variant, best.choice)} was the fastest in the search "
        f"({_pace(gain)}, {_sure(gain)}), but {why}. The gain of a search is too optimistic, because the "
        "search chose the settings with the shortest times. Run lab tune again with a larger --budget."
    ]


def command_lines(one: Tuned, is_here: bool = False) -> dict[str, str]:
    """By program, the command line, expression or file for the recommended settings; empty without a recommendation.

    Options that a program lacks are named in a comment.
    """
    if not one.is_recommended or one.winner is None:
        return {}
    path = f"./{one.winner.model.file}"
    with contextlib.suppress(LabError):
        if is_here and (found := obtain.locate(catalog.parse(catalog.spec_of(one.winner.model)))):
            path = str(found.path)
    made = other_tools.command_lines(path, one.winner.settings, one.n_prompt, one.n_gen, one.n_users)
    without = "\n# without {}: {} has no such option"
    return {
        line.tool: line.text + (without.format(", ".join(line.missing), line.tool) if line.missing else "")
        for line in made
    }


def _lengths(row: Crossing) -> str:
    if not row.is_ever:
        return "no length"
    if row.from_gen is not None:
        return f"{row.from_gen:,} or more tokens"
    return "any length" if row.to_gen is None else f"up to {row.to_gen:,} tokens"


def _as_row(one: Tuned) -> dict[str, Any]:
    def fields(name: str, ratio: Ratio | None) -> dict[str, float | None]:
        ends = (ratio.estimate, ratio.low, ratio.high) if ratio else (None, None, None)
        return dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))

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
        "recommended": one.won if one.is_recommended else None,
        "winner": one.won,
        "changes_output": tuning.is_lossy(one.choice),
        **fields("gain", one.gain),
        "gain_visible": one.visible,
        "n_blocks_confirmed": one.n_confirmed,
        **times,
        "tried": [
            {
                "settings": row.variant,
                "changes_output": tuning.is_lossy(row.choice),
                "n_runs": row.n_runs,
                "time_s": row.seconds,
                **fields("time_ratio", row.ratio),
                "verdict": verdict(one, row),
                "error": row.error,
            }
            for row in one.tried
        ],
        "crossings": [dataclasses.asdict(row) for row in one.crossings],
        "sentences": sentences(one),
        "command_lines": command_lines(one, is_here=True),
    }


def _draw(one: Tuned, figure: Figure) -> Figure:
    """The search as diamonds and points, the confirmation as squares.

    A point is a run: its time over that of the default's runs in its block, hollow if disturbed.
    """
    import numpy as np
    import pandas as pd

    of = tuning.phases_of(one.goal, one.n_gen, one.default.run.batch is not None)
    runs = pd.DataFrame(
        [
            (run.stage, run.variant, run.timing.block, run.timing.is_disturbed,
             math.log(sum(phase.n * run.timing.seconds.get(phase.name, math.nan) for phase in of)))
            for run in one.measured
            if run.timing
        ],
        columns=["stage", "variant", "block", "disturbed", "log"],
    )  # fmt: skip
    of_block = ["stage", "block"]
    base = runs[runs.variant == DEFAULT].groupby(of_block).log.mean().rename("base")
    runs = runs.join(base, on=of_block).dropna()
    runs["ratio"] = np.exp(runs.log - runs.base)

    known = [row for row in _rows(one) if row.ratio]
    drawn = known[:MOST_DRAWN]
    labels = [_name(row.variant, row.choice, "\n{}").split("\n") for row in drawn]
    wrapped = [
        [textwrap.wrap(part, LABEL_LETTERS, break_on_hyphens=False) or [""] for part in parts] for parts in labels
    ]
    names = ["\n".join(line for lines in parts for line in lines) for parts in wrapped]
    figure.set_figheight(1.9 + 0.19 * sum(max(2, 1 + name.count("\n")) for name in names))
    ax, legend = figure.subplots(), set[str]()

    def mark(
        row: Tried, ratio: Ratio, stage: str, name: str, at: float, of_runs: float, style: tuple[str, str, str]
    ) -> None:
        """A ratio with its interval at the height `at`, and its runs at the height `of_runs`."""
        own = runs[(runs.stage == stage) & (runs.variant == row.variant)]
        words = [None if name in legend else f"run of the {name}", None if name in legend else f"{name}, 95 % interval"]
        legend.add(name)
        canvas.points(ax, own.ratio, [of_runs] * len(own), own.disturbed,
                      marker="o", color=style[1], ms=4.5, alpha=0.8, label=words[0])  # fmt: skip
        reach = [[max(0, ratio.estimate - ratio.low)], [max(0, ratio.high - ratio.estimate)]]
        ax.errorbar([ratio.estimate], [at], xerr=reach, marker=style[2], color=style[0], label=words[1],
                    ms=6, capsize=3, ls="", zorder=3)  # fmt: skip

    for at, row in enumerate(drawn):
        estimate, *interval = _ratio(row)
        text = " ".join([estimate, *(f"({ends})" for ends in interval)])
        ax.text(1.02, at, text, transform=ax.get_yaxis_transform(), va="center", fontsize=8)
        if row.ratio and row.variant != DEFAULT:
            mark(row, row.ratio, SEARCH, "search", at, at + 0.25, (COLOURS[0], COLOURS[5], "D"))
        if one.gain and row.variant == one.won:
            mark(row, _inverse(one.gain), CONFIRM, "confirmation", at - 0.3, at - 0.3, (COLOURS[1], COLOURS[4], "s"))
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set_yticks(range(len(drawn)), names, fontsize=8)
    ax.set_ylim(len(drawn) - 0.4, -0.6)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.95), max(high, 1.05))
    ax.set_xlabel("time / time with the default\n\u2190 faster | slower \u2192")
    some = f" (the {len(drawn)} fastest of {len(known)})" if len(drawn) < len(known) else ""
    title = f"What was tried for {one.n_prompt:,} + {one.n_gen:,} tokens{some}\n{_subject(one.default)}"
    canvas.finish([ax], title, is_apart=True)
    return figure


def faster_settings(records: Iterable[Record], others: Iterable[Record]) -> list[str]:
    """At most one sentence: settings that `lab tune` recommends, and that none of these plain runs uses.

    `others` may hold sessions of `lab tune`. The newest one of each workload counts, of the same model on the same
    devices, for the goal `request` and one user.
    """

    def where(record: Record) -> tuple[str | None, ...]:
        here = machine.label(record.machine, record.settings)
        return record.machine.cpu, here, record.settings.lib, setup_columns.model_label(record)

    known = [one for one in tuning.of_sessions(list(others)) if one.goal == tuning.REQUEST and one.n_users == 1]
    newest = {(one.n_prompt, one.n_gen, where(one.default)): one for one in sorted(known, key=lambda one: one.session)}
    plain = [record for record in tuning.without(records) if record.run.is_timed and record.run.lever is None]
    for one in reversed(newest.values()):
        alike = [tuning.choice_of(record, one.default) for record in plain if where(record) == where(one.default)]
        if one.gain and one.is_recommended and alike and not any(set(one.choice) <= set(choice) for choice in alike):
            name = _name(one.won, one.choice)
            return [f"lab tune found faster settings for {aim(one)} on this machine: {name}, {_pace(one.gain)}."]
    return []


OF_TUNE = (
    "A search measured choices of settings in blocks with fresh engines. The table has the time that it expects of "
    "each, and the ratio of that to the default's, with a 95 % interval below. The search chose the fastest, so its "
    "ratios flatter the winner. The gain in the sentences comes from new blocks."
)


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Searches for the fastest settings, a part for each session."""
    parts = sections(records, is_here=not context.is_page)
    if not parts:
        lines = ["lab tune measured no run of the default, so nothing can be compared with it."]
        return [] if context.is_page else [Section(sentences=lines)]
    question = parts[0].question if len(parts) == 1 else "Which settings are the fastest?"
    return [Section("The fastest settings", name="tune", question=question, words=[OF_TUNE], parts=parts)]


def again(records: Sequence[Record]) -> str:
    """The command of a session of `lab tune`: the model, and the options that no choice changed."""
    timed, own = as_options.timed(records), as_options.options
    first = next((record for record in timed if record.run.variant == tuning.DEFAULT), timed[0])
    asked, lever = first.run.tuning, first.run.lever
    fixed = [one for one in own(first) if one[0] == "--model" or all(one in own(each) for each in timed)]
    is_lossy = any(tuning.is_lossy(tuning.choice_of(record, first)) for record in timed)
    given: dict[str, object] = {
        "prompt_len": first.run.n_prompt,
        "gen": asked.n_gen if asked else None,
        "goal": asked.goal if asked and asked.goal != tuning.REQUEST else None,
        "users": lever.n_seq if isinstance(lever, Batch) else None,
    }
    return as_options.line("tune", given, (), [*([("--allow-lossy",)] if is_lossy else []), *fixed])


KINDS = (Kind("tune", lambda one: isinstance(one, Record) and one.run.tuning is not None, chapters, again),)
