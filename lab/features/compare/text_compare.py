"""Comparisons as text: how setups differ, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console
from rich.text import Text

from lab.core import shown
from lab.core.lists import grouped, join_and
from lab.features.compare import comparison
from lab.features.compare.comparison import Comparison, Group
from lab.features.compare.spread import FEWEST_SESSIONS, FIGURE_NAMES
from lab.show import setup_columns, wording
from lab.show.section import Columns, Section, print_sections, tabled

MOST_NAMED = 2
"""Rows that a sentence lists."""


def sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """A section for each group against the base: times, ratios, verdicts."""
    return [
        Section(
            f"{compared.other} against the base",
            **tabled(COLUMNS, compared.rows, keep_all=True),
            sentences=[*reasons(compared.rows), *left_out(compared)],
        )
        for compared in comparisons
    ]


def print_comparisons(
    groups: Sequence[Group],
    comparisons: Sequence[Comparison],
    at_least: float,
    out: Console,
    warnings: Sequence[str] = (),
) -> None:
    """Prints the differences between the groups, a table per group against the base, and warnings."""
    out.print(Text("Base: ", style="bold") + Text(groups[0].label))
    fields = differences(groups)
    out.print("Differences:" if fields else "Equal setups, measured at different times.")
    for field, values in fields.items():
        out.print(f"  {field}: {' | '.join(values)}")
    how = how_compared(groups, comparisons, at_least)
    print_sections([*sections(comparisons), Section(warnings=warnings, sentences=how)], out)


def answers(comparisons: Sequence[Comparison]) -> list[str]:
    """Sentences on which group is faster.

    With several comparisons first the fastest group by the medians; then for each comparison a verdict, and the words
    of its rows at the shortest and the longest prompt.
    """
    sentences = []
    if len(comparisons) > 1:
        labels = [comparisons[0].base, *(compared.other for compared in comparisons)]
        rows = [{_what(row): row.estimate for row in one.rows if shown.is_firm(row.doubts)} for one in comparisons]
        wins: dict[str, list[str]] = {}
        for what in rows[0]:
            if all(what in others for others in rows):
                ratios = [1.0, *(others[what] for others in rows)]
                wins.setdefault(labels[ratios.index(min(ratios))], []).append(what)
        for label, figures in wins.items():
            where = f" in {', '.join(figures)}" if len(wins) > 1 else ""
            sentences.append(f"By the medians, {label} is the fastest{where}.")
    for compared in comparisons:
        ends = {row.n_prompt for row in (*compared.rows[:1], *compared.rows[-1:])}
        told = [f"{_what(row)}: {row.words}." for row in compared.rows if row.n_prompt in ends]
        sentences += [_overall(compared), *(f"{sentence[:1].upper()}{sentence[1:]}" for sentence in told)]
    return sentences


def _overall(compared: Comparison) -> str:
    """One sentence on all times: their common verdict, or the range of their ratios."""
    claims, ratios = {row.verdict for row in compared.rows}, sorted(row.estimate for row in compared.rows)
    if not ratios:
        return f"{compared.other} and {compared.base} have no length in common."
    by = "" if claims in ({comparison.SLOWER}, {comparison.FASTER}) else "By the medians, "
    if comparison.DISTURBED in claims:
        return (
            f"It is unclear whether {compared.other} or {compared.base} is faster: runs were disturbed. Measure both "
            "again while no other program runs."
        )
    if claims == {comparison.ALIKE}:
        return f"There is no clear difference between {compared.other} and {compared.base}."
    if ratios[0] > 1:
        return f"{by}{compared.other} is slower than {compared.base}: {_range(ratios)} the time."
    if ratios[-1] < 1:
        pace = _range([1 / ratio for ratio in reversed(ratios)])
        return f"{by}{compared.other} is faster than {compared.base}: {pace} as fast."
    return f"It depends: {compared.other} takes {_range(ratios)} the time of {compared.base}."


def _range(ratios: Sequence[float]) -> str:
    low, high = (wording.times(ratio) for ratio in (ratios[0], ratios[-1]))
    return low if low == high else f"{low} to {high}"


def _what(row: comparison.ComparedFigure) -> str:
    name = f"{row.lever}: {FIGURE_NAMES[row.figure]}" if row.lever else FIGURE_NAMES[row.figure]
    if not row.n_prompt:  # of a load with mixed lengths
        return name
    if row.n_gen is None:
        return f"{name} of {row.n_prompt:,} tokens"
    return f"{name} after {row.n_prompt:,} prompt tokens ({row.n_gen:,} generated)"


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The fields in which groups differ, with their values as text, in the order of the groups."""

    def words(field: str, value: Any) -> str:
        if value is None:
            return setup_columns.unset(field)
        text, most = f"{value:g}" if isinstance(value, float) else str(value), 12 if field.endswith("sha256") else 60
        return text if len(text) <= most else f"{text[: most - 3]}..."

    differ = comparison.differences(groups)
    texts = differ.get("system_info", [None])
    if None not in texts:  # llama.cpp's lists of flags, "CPU : AVX2 = 1 | ...": only those that not all have
        flags = [[flag.strip() for flag in text.replace(" : ", " | ").split("|") if flag.strip()] for text in texts]
        common = set.intersection(*map(set, flags))
        differ["system_info"] = [", ".join(flag for flag in own if flag not in common) or "no others" for own in flags]
    return {field: [words(field, value) for value in values] for field, values in differ.items()}


def left_out(compared: Comparison) -> list[str]:
    """Sentences on the figures that only one of the two has."""
    sentences = [] if compared.rows else ["The two have no length in common."]
    for side, names in (("base", compared.only_base), ("other", compared.only_other)):
        if names:
            sentences.append(f"Only in the {side}: {', '.join(names)}.")
    return sentences


def _verdict(row: comparison.ComparedFigure) -> str:
    """The verdict as a table shows it."""
    if row.verdict == comparison.ALIKE and row.ratio:
        return f"{row.verdict}\nabove {wording.percent(max(row.ratio.high, 1 / row.ratio.low) - 1)}"
    return {comparison.TOO_FEW: "unclear", comparison.DISTURBED: "unclear (disturbed)"}.get(row.verdict, row.verdict)


COLUMNS: Columns = (
    (
        "prompt\ntokens",
        lambda row: "\n".join(filter(None, [f"{row.n_prompt:,}" if row.n_prompt else "", row.lever or ""])),
    ),
    ("figure", lambda row: f"{FIGURE_NAMES[row.figure]}, {row.figure.rpartition('_')[2]}"),
    ("base", lambda row: wording.digits(row.base)),
    ("other", lambda row: wording.digits(row.other)),
    ("n", lambda row: ", ".join(map(str, dict.fromkeys((row.n_base, row.n_other)))) + shown.mark(row.doubts)),
    (
        "time\nratio",
        lambda row: "\n".join(
            [wording.digits(row.estimate)]
            + ([f"{wording.digits(row.ratio.low)}-{wording.digits(row.ratio.high)}"] if row.ratio else [])
        ),
    ),
    ("verdict", _verdict),
)


def reasons(rows: Sequence[comparison.ComparedFigure]) -> list[str]:
    """Why verdicts are unclear, and in which rows the runs of both sides do not overlap."""
    sentences = []
    unclear = dict.fromkeys(row.words.partition(":")[0] for row in rows if row.verdict == comparison.TOO_FEW)
    sentences += [words.replace("unclear, ", "Unclear: ") + "." for words in unclear]
    if comparison.DISTURBED in {row.verdict for row in rows}:
        sentences.append("Unclear (disturbed): at least half of the runs were disturbed. Measure again.")
    if apart := [_what(row) for row in rows if row.words.endswith(comparison.NO_OVERLAP)]:
        which = join_and(apart) if len(apart) <= MOST_NAMED else f"{len(apart)} of {len(rows)} rows"
        sentences.append(f"The runs of the two sides do not overlap: {which}.")
    return sentences


def how_compared(groups: Sequence[Group], comparisons: Sequence[Comparison], at_least: float) -> list[str]:
    """Sentences on how the ratios were computed, and their limits."""
    kinds = {row.paired for compared in comparisons for row in compared.rows}
    how = {
        frozenset({True}): "the median over blocks measured side by side",
        frozenset({True, False}): "the median over blocks of one trial, otherwise of session medians",
    }.get(frozenset(kinds), "of session medians")
    sentences = [
        f"Time ratio: other / base, {how}, so it can differ from the ratio of the columns. The 95 % intervals hold "
        f"jointly. Differences below {wording.percent(at_least)} count as none."
    ]
    n_served = sum(setup_columns.is_request(group.rows.iloc[0]) for group in groups)
    if spreads := dict.fromkeys(words for compared in comparisons for words in compared.spreads):
        by_words = grouped((words.split(": ", 1) for words in spreads), itemgetter(1))
        parts = [f"{words} for {join_and([name for name, _ in same])}" for words, same in by_words.items()]
        sentences.append(
            f"Sessions on one machine vary, so a verdict needs a larger difference. Standard deviation: "
            f"{'; '.join(parts)}. To measure it: {FEWEST_SESSIONS} or more sessions of equal setup in one folder."
        )
    if True not in kinds and all(group.rows.machine.iloc[0] == groups[0].rows.machine.iloc[0] for group in groups):
        see = "" if n_served else " lab ab measures side by side."
        sentences.append(f"The sessions ran at different times, which can explain a part of a difference.{see}")
    if n_served and any(row.lever for compared in comparisons for row in compared.rows):
        sentences.append("A run of a load is a round: its medians over the requests due in the window.")
    if 0 < n_served < len(groups):
        sentences.append(
            "In process, TTFT is prefill plus sampling one token. Through a server it also includes templates, "
            "tokenization, queueing, HTTP and the client, and TPOT uses arrival times. The settings of the server's "
            "engine are not visible, so they are not compared."
        )
    return sentences


def comparisons_as_json(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Groups, their differences and their comparisons, as one JSON document."""
    return {
        "groups": [group.label for group in groups],
        "differences": comparison.differences(groups),
        "comparisons": [dataclasses.asdict(compared) for compared in comparisons],
    }
