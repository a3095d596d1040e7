"""The results of `lab tune` as sections: the answer, what was tried, what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lab.core import shell, shown
from lab.core.lists import plural
from lab.core.stats import Ratio
from lab.features.tune import picture
from lab.features.tune.choices import DECODE, PREFILL, Choice, is_lossy
from lab.features.tune.figures import (
    DEFAULT,
    FEWEST_CONFIRMED,
    WINNER,
    TriedRow,
    Tuned,
    is_mine,
    of_sessions,
)
from lab.features.tune.lines import CONFIRM, GOALS
from lab.formats import other_tools
from lab.models import catalog
from lab.show import console, text_setup
from lab.show.cells import LONG_TEXT, N_RUNS, Cell, Column, stacked
from lab.show.comparison import AT_LEAST
from lab.show.section import (
    UNKNOWN,
    WIDE,
    Columns,
    Context,
    Kind,
    Picture,
    Section,
    print_section,
    tabled,
)
from lab.show.wording import digits, percent, seconds

MOST_ROWS = 12  # on a terminal
OF_TUNE = (
    "A search measured choices of settings in blocks with fresh engines. The table has the time "
    "that all its runs together let expect of each, and how many times as fast as the default "
    "that is, with a 95 % interval below. It follows from how much all runs scatter, so a choice "
    "with one run has one, too. A winner with 0 runs is a combination that the search "
    "did not measure: its figures follow from those of its settings. The search chose the "
    "fastest, so its figures flatter the winner. The gain in the sentences comes from new blocks."
)
CAPTION = (
    "What was tried: how many times as fast as the default each choice of settings is; right of 1 "
    "it is faster. Bars are 95 % intervals. The winner's bar is from the confirmation."
)
NO_DEFAULT = "lab tune measured no run of the default, so nothing can be compared with it."


def chapters(lines: Sequence[object], context: Context) -> list[Section]:
    """Searches for the fastest settings, a part for each session."""
    parts = [section(result, context) for result in of_sessions(lines)]
    if not parts:
        return [] if context.is_page else [Section(sentences=[NO_DEFAULT])]
    question = "Which settings are the fastest?"
    if len(parts) == 1:
        question = parts[0].question
    return [
        Section(
            "The fastest settings",
            name="tune",
            question=question,
            words=[OF_TUNE],
            parts=parts,
        )
    ]


KINDS = (Kind("tune", is_mine, chapters),)


def section(result: Tuned, context: Context = Context()) -> Section:  # noqa: B008  (frozen)
    """What a session found: the answer, what was tried, what to do next."""
    has_details = context.details or context.is_page
    answer, *more = sentences(result)
    commands = command_lines(result)
    parts = []
    if commands and has_details:
        parts.append(Section("The recommended settings as commands", facts=commands))
    elif commands:
        more.insert(0, f"With these settings: {commands['lab']}")
    return Section(
        picture.subject_of(result),
        f"{result.aim}; goal: {GOALS[result.asked.goal]}",
        name=f"tune-{result.default.session}",
        question=f"Which settings are the fastest for {result.aim}?",
        answer="" if context.is_page else answer,
        **tabled(COLUMNS, list(result.tried.itertuples()), keep_all=True),
        warnings=warnings(result),
        sentences=[answer, *more] if context.is_page else more,
        notes=[OF_TUNE] if context.details else [],
        parts=parts,
        pictures=[Picture("tune", CAPTION, partial(picture.draw, result), WIDE)],
        data=lambda: {"tunings": [document(result)]},
    )


def warnings(result: Tuned) -> list[str]:
    """That the runs that count were disturbed, and what failed."""
    lines = []
    timed = result.runs.dropna(subset=["block"])
    confirming = timed[timed.part == CONFIRM]
    counting = timed if confirming.empty else confirming
    n_disturbed = int(counting.is_disturbed.astype(bool).sum())
    if shown.is_unreliable(len(counting), n_disturbed):
        lines.append(
            "Other programs disturbed at least half of the runs that count. Run lab tune again "
            "while no other program runs."
        )
    failed = [
        f"{row.settings} ({row.error})" for row in result.tried.itertuples() if row.error
    ]
    if failed:
        lines.append(f"Runs failed with {'; '.join(failed)}.")
    return lines


def time_cell(row: TriedRow) -> str:
    return seconds(row.time_s) if row.time_s > 0 else UNKNOWN


def speed_cell(row: TriedRow) -> Cell:
    """How many times as fast as the default, and its interval."""
    return stacked(picture.speed_of(row), picture.interval_of(row))


COLUMNS: Columns[TriedRow] = (
    Column("settings", lambda row: stacked(*picture.name_of(row)), LONG_TEXT),
    N_RUNS,
    Column("time", time_cell),
    Column("times\nas fast", speed_cell),
    Column("verdict", lambda row: row.verdict, LONG_TEXT),
)


def sentences(result: Tuned) -> list[str]:
    """First the answer: what is recommended, or why nothing is. Then the times."""
    if result.gain is None or result.won is None:
        return unconfirmed(result)
    blocks = f"{result.n_confirmed} new blocks"
    name = with_output(result.won, result.choice)
    gain = f"{digits(result.gain.estimate)} times as fast ({interval_words(result.gain)}"
    if not result.is_recommended:
        return [
            f"Keep the default: {found_fastest(result, name)}, but {blocks} do not show a "
            f"gain clearly above {percent(AT_LEAST)}. There it is {gain})."
        ]
    return [
        f"{name} is {gain}, from {blocks} measured after the choice) for {result.aim}.",
        f"Medians of these blocks: {', '.join(median_times(result))}.",
    ]


def found_fastest(result: Tuned, name: str) -> str:
    """What the search says of the settings that it found: were they measured in it?"""
    of_winner = result.tried[result.tried.settings == result.won]
    if result.won is not None and not of_winner.n_runs.sum():
        return f"the search expects most of {name}, a combination that it did not measure"
    return f"{name} was the fastest in the search"


def median_times(result: Tuned) -> list[str]:
    meanings = {PREFILL: "first token after", DECODE: "each further token"}
    times = []
    for phase, default_s, winner_s in result.medians[[DEFAULT, WINNER]].itertuples():
        times.append(f"{meanings[phase]} {seconds(winner_s)} instead of {seconds(default_s)}")
    return times


def unconfirmed(result: Tuned) -> list[str]:
    """Sentences for a session without a confirmation of at least FEWEST_CONFIRMED blocks."""
    tried = result.tried
    candidates = tried[(tried.settings != DEFAULT) & tried.speed.notna()]
    if candidates.empty:
        return ["No other setting was measured, so nothing is recommended."]
    best = next(candidates.itertuples())  # the winner, else the fastest
    speed = Ratio(best.speed, best.speed_low, best.speed_high)
    is_slow = speed.low <= 1 or speed.estimate < 1 + AT_LEAST
    if result.won is None and is_slow:
        return ["Keep the default: nothing that was tried is faster beyond noise."]
    name = with_output(best.settings, best.choice)
    reason = "nothing confirmed it"
    if result.n_confirmed:
        blocks = plural(result.n_confirmed, "new block")
        reason = f"only {blocks} of at least {FEWEST_CONFIRMED} confirmed it"
    return [
        f"No recommendation: {found_fastest(result, name)}, but {reason}.",
        f"In the search it was {digits(speed.estimate)} times as fast ({interval_words(speed)}). "
        "That is too optimistic, because the search chose the settings with the shortest times.",
        "Run lab tune again with a larger --budget.",
    ]


def with_output(settings: str, choice: Choice) -> str:
    return f"{settings} (changes the model's output)" if is_lossy(choice) else settings


def interval_words(ratio: Ratio) -> str:
    return f"95 % interval {digits(ratio.low)} to {digits(ratio.high)}"


def command_lines(result: Tuned) -> dict[str, str]:
    """The commands of llama-server and of the lab with the recommended settings.

    Empty without a recommendation.
    """
    if not result.is_recommended or result.winner is None:
        return {}
    n_prompt = result.default.run.n_prompt
    n_gen = result.asked.n_gen
    options: list[object] = ["--prompt-len", n_prompt, "--gen", n_gen]
    if "model" not in dict(result.choice):
        options += ["--model", catalog.spec_of(result.default.model)]
    options += shell.split(result.won or "")
    file = f"./{result.winner.model.file}"
    server = other_tools.llama_server(
        file, result.winner.settings, n_prompt, n_gen, result.n_users
    )
    return {"llama-server": server, "lab": shell.lab("measure", *options)}


def document(result: Tuned) -> dict[str, object]:
    """A session for JSON; what is unknown is None."""
    tried = result.tried.drop(columns="choice").astype(object)
    is_known = tried.notna() & (tried != "")
    times = {}
    names = {PREFILL: "first_token", DECODE: "each_token"}
    for phase in result.medians.index:
        for side in (DEFAULT, WINNER):
            times[f"{side}_{names[phase]}_s"] = result.medians.loc[phase, side]
    gain = result.gain
    return {
        "session": result.default.session,
        "subject": text_setup.where([result.default]),
        "goal": result.asked.goal,
        "n_prompt": result.default.run.n_prompt,
        "n_gen": result.asked.n_gen,
        "n_users": result.n_users,
        "recommended": result.won if result.is_recommended else None,
        "winner": result.won,
        "changes_output": is_lossy(result.choice),
        "gain": gain.estimate if gain else None,
        "gain_low": gain.low if gain else None,
        "gain_high": gain.high if gain else None,
        "n_blocks_confirmed": result.n_confirmed,
        **times,
        "tried": tried.where(is_known, None).to_dict("records"),
        "sentences": sentences(result),
        "command_lines": command_lines(result),
    }


def show_tuned(result: Tuned) -> None:
    """Print what `lab tune` found: the answer, what was tried, and command lines.

        lab.show_tuned(lab.tune(2000, 300, budget="5min"))

    `result` is what `lab.tune` returned.
    """
    print_section(section(result, Context(details=True)), console.console())
