"""Comparisons as text: what differs between setups, and by how much.

Energy as text: what a prompt and a token cost, where that is known, and which counters this machine has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.analysis import comparison, setup_columns, wording
from lab.analysis.comparison import Comparison, Group
from lab.analysis.spread import FIGURE_NAMES
from lab.core import energy, shown
from lab.runner.energy import Counters
from lab.show.section import UNKNOWN, Columns, Section, print_sections, tabled

if TYPE_CHECKING:
    import pandas as pd

ENERGY = {
    "prefill_j": "J per\nprompt",
    "prefill_above_idle_j": "above\nidle",
    "decode_j_per_token": "J per\ntoken",
    "decode_above_idle_j_per_token": "above\nidle",
    "prefill_w": "prefill\nW",
    "decode_w": "decode\nW",
    "idle_w": "idle\nW",
}
"""Figures of energy, and their headings."""


def energy_section(rows: pd.DataFrame) -> Section | None:
    """The energy of a summary, medians; None where there is none."""
    if "energy_source" not in rows:
        return None
    named = {name: heading for name, heading in ENERGY.items() if rows[name].notna().any()}
    known = rows[rows[list(named)].notna().any(axis="columns")]
    if known.empty or set(named) <= {"idle_w"}:
        return None
    columns: Columns = [
        ("prompt\ntokens", lambda row: f"{row['n_prompt']:,}"),
        *((heading, lambda row, name=name: wording.digits(row[name])) for name, heading in named.items()),
    ]
    title = f"Energy of {scope(known.energy_source.unique())}; median"
    return Section(title, **tabled(columns, known.to_dict("records")))


def scope(sources: Iterable[str]) -> str:
    """What joules are of, in words."""
    return f"{', '.join(sources)} (of all that ran on it, idle power included)"


def which(counters: Counters) -> str:
    """A line on the counters of a machine: those that can be read, and what to do about others."""
    if not counters.readable and not counters.problems:
        return f"not known: there is no {', no '.join(counters.missing)}"
    known = ", ".join(f"{counter.name} ({counter.source})" for counter in counters.readable)
    return "; ".join([*([known] if known else []), *counters.problems])


def sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """A section for each group against the base: times, ratios, verdicts; where there is energy, its own."""
    has_energy = any(compared.energy_of for compared in comparisons)
    columns = [("ratio" if has_energy and name == "time\nratio" else name, show) for name, show in COLUMNS]
    return [
        Section(
            f"{compared.other} against the base",
            **tabled(columns, compared.rows, keep_all=True),
            sentences=left_out(compared),
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
    """Prints in what the groups differ, then a table per group: its times against the base's; then the warnings."""
    out.print(Text("base ", style="bold") + Text(groups[0].label))
    fields = differences(groups)
    out.print("differ in" if fields else "differ in nothing but when they were measured")
    for field, values in fields.items():
        out.print(f"  {field}: {' | '.join(values)}")
    how = how_compared(groups, comparisons, at_least)
    print_sections([*sections(comparisons), Section(warnings=warnings, sentences=how)], out)


def answers(comparisons: Sequence[Comparison]) -> list[str]:
    """Sentences that answer which of the groups is faster, computed from the rows of `comparisons`.

    With several comparisons first the fastest group by the medians; then for each comparison a verdict, and the words
    of its rows at the shortest and the longest prompt.
    """
    sentences = _fastest(comparisons) if len(comparisons) > 1 else []
    for compared in comparisons:
        ends = {row.n_prompt for row in (*compared.rows[:1], *compared.rows[-1:])}
        sentences.append(_overall(compared))
        sentences += [sentence for sentence in [_energy(compared)] if sentence]
        sentences += [f"{_capital(_what(row))}: {row.words}." for row in compared.rows if row.n_prompt in ends]
    return sentences


def _overall(compared: Comparison) -> str:
    """One sentence on all times: their common verdict, or the range of their ratios."""
    rows = [row for row in compared.rows if row.figure not in energy.COMPARED]
    claims, ratios = {row.verdict for row in rows}, sorted(row.estimate for row in rows)
    if not ratios:
        return f"{compared.other} and {compared.base} have no length in common."
    by = "" if claims in ({comparison.SLOWER}, {comparison.FASTER}) else "By the medians, "
    if comparison.DISTURBED in claims:
        return (
            f"Whether {compared.other} or {compared.base} is faster cannot be told: runs were disturbed. Measure both "
            "again while no other program runs."
        )
    if claims == {comparison.ALIKE}:
        return f"No difference between {compared.other} and {compared.base} can be claimed."
    if ratios[0] > 1:
        return f"{by}{compared.other} is slower than {compared.base}: it takes {_range(ratios)} times the time."
    if ratios[-1] < 1:
        pace = _range([1 / ratio for ratio in reversed(ratios)])
        return f"{by}{compared.other} is faster than {compared.base}: {pace} times as fast."
    return f"It depends: {compared.other} takes {_range(ratios)} times the time of {compared.base}."


def _energy(compared: Comparison) -> str:
    """The same on all energies; "" where there are none."""
    rows = [row for row in compared.rows if row.figure in energy.COMPARED]
    if not rows:
        return ""
    claims, ratios = {row.verdict for row in rows}, sorted(row.estimate for row in rows)
    if claims == {comparison.ALIKE}:
        return f"No difference in energy between {compared.other} and {compared.base} can be claimed."
    if comparison.DISTURBED in claims:
        return f"Whether {compared.other} or {compared.base} takes less energy cannot be told: runs were disturbed."
    by = "" if claims in ({comparison.LESS}, {comparison.MORE}) else "By the medians, "
    return f"{by}{compared.other} takes {_range(ratios)} times the energy of {compared.base}."


def _fastest(comparisons: Sequence[Comparison]) -> list[str]:
    """For each group that is fastest somewhere a sentence: in which figures, by the medians."""
    labels = [comparisons[0].base, *(compared.other for compared in comparisons)]
    rows = [
        {
            _what(row): row.estimate
            for row in compared.rows
            if row.figure not in energy.COMPARED and shown.is_firm(row.doubts)
        }
        for compared in comparisons
    ]
    wins: dict[str, list[str]] = {}
    for what in rows[0]:
        if all(what in others for others in rows):
            ratios = [1.0, *(others[what] for others in rows)]
            wins.setdefault(labels[ratios.index(min(ratios))], []).append(what)
    if len(wins) == 1:
        return [f"By the medians, {label} is the fastest." for label in wins]
    return [f"By the medians, {label} is the fastest in {', '.join(figures)}." for label, figures in wins.items()]


def _range(ratios: Sequence[float]) -> str:
    low, high = (f"{ratio:.3g}" for ratio in (ratios[0], ratios[-1]))
    return low if low == high else f"{low} to {high}"


def _what(row: comparison.ComparedFigure) -> str:
    name = f"{row.lever}: {FIGURE_NAMES[row.figure]}" if row.lever else FIGURE_NAMES[row.figure]
    if not row.n_prompt:  # of a load with mixed lengths
        return name
    if row.n_gen is None:
        return f"{name} of {row.n_prompt:,} tokens"
    return f"{name} after {row.n_prompt:,} prompt tokens ({row.n_gen:,} generated)"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The fields in which groups differ, with their values as text, in the order of the groups."""

    def words(field: str, value: Any) -> str:
        if value is None:
            return setup_columns.unset(field)
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return _short(text, 12 if field.endswith("sha256") else 60)

    differ = comparison.differences(groups)
    if None not in differ.get("system_info", [None]):
        differ["system_info"] = _flags_that_differ(differ["system_info"])
    return {field: [words(field, value) for value in values] for field, values in differ.items()}


def _flags_that_differ(texts: Sequence[str]) -> list[str]:
    """Of llama.cpp's lists of flags, "CPU : AVX2 = 1 | ...", only what the others do not have."""
    lists = [[flag.strip() for flag in text.replace(" : ", " | ").split("|") if flag.strip()] for text in texts]
    common = set.intersection(*map(set, lists))
    return [", ".join(flag for flag in flags if flag not in common) or "no others" for flags in lists]


def left_out(compared: Comparison) -> list[str]:
    """Sentences that name the figures which only one of the two has."""
    sentences = [] if compared.rows else ["They have no length in common."]
    for side, names in (("base", compared.only_base), ("other", compared.only_other)):
        if names:
            sentences.append(f"Only in the {side}: {', '.join(names)}.")
    if compared.energy_differs:
        base, other = compared.energy_differs
        sentences.append(
            f"Energy is compared only where both count the same: it is of {base} in the base, of {other} in the other."
        )
    return sentences


COLUMNS: Columns = (
    (
        "prompt\ntokens",
        lambda row: "\n".join(filter(None, [f"{row.n_prompt:,}" if row.n_prompt else "", row.lever or ""])),
    ),
    ("figure", lambda row: FIGURE_NAMES[row.figure] + _unit(row.figure)),
    ("base", lambda row: wording.digits(row.base)),
    ("other", lambda row: wording.digits(row.other)),
    ("n", lambda row: ", ".join(map(str, dict.fromkeys((row.n_base, row.n_other)))) + shown.mark(row.doubts)),
    ("time\nratio", lambda row: wording.digits(row.estimate)),
    ("interval", lambda row: f"{row.ratio.low:.3f}-{row.ratio.high:.3f}" if row.ratio else UNKNOWN),
    ("verdict", lambda row: row.words),
)


def _unit(figure: str) -> str:
    """Of a time its unit; the names of energies have theirs."""
    return "" if figure in energy.COMPARED else f", {figure.rpartition('_')[2]}"


def how_compared(groups: Sequence[Group], comparisons: Sequence[Comparison], at_least: float) -> list[str]:
    """Sentences on how the ratios were computed, and how far they can be trusted."""
    kinds = {row.paired for compared in comparisons for row in compared.rows}
    how = {
        frozenset({True}): "block by block, measured side by side",
        frozenset({True, False}): "blocks of one trial block by block, others run against run",
    }.get(frozenset(kinds), "run against run")
    sentences = [
        f"Time ratio: other over base, {how}. All intervals together hold with 95 %; "
        f"differences below {at_least:.1%} are not claimed. A ratio is a median of ratios, so it need not be that of "
        "the two columns."
    ]
    if sources := dict.fromkeys(compared.energy_of for compared in comparisons if compared.energy_of):
        sentences.append(f"Energy is that of {scope(sources)}; its ratio is read as that of times.")
    n_served = sum(setup_columns.is_request(group.rows.iloc[0]) for group in groups)
    if spreads := dict.fromkeys(words for compared in comparisons for words in compared.spreads):
        by_session = "several sessions of lab measure --url" if n_served else ""
        measured_by = filter(None, ["lab repeatability" if n_served < len(groups) else "", by_session])
        sentences.append(
            "Sessions of one machine differ from each other; a difference is claimed only beyond that. Taken for one "
            f"standard deviation: {'; '.join(spreads)}. Measure it: {', '.join(measured_by)}."
        )
    if True not in kinds and all(group.rows.machine.iloc[0] == groups[0].rows.machine.iloc[0] for group in groups):
        see = "" if n_served == len(groups) > 1 else " See lab overhead." if n_served else " See lab ab."
        sentences.append(f"These sessions were not measured side by side: part of a difference may be the hour.{see}")
    if n_served and any(row.lever for compared in comparisons for row in compared.rows):
        sentences.append("Of a load each run is a round: its medians over the requests that were due in its window.")
    if 0 < n_served < len(groups):
        sentences.append(
            "In process, TTFT is prefill and the choice of one token. Through a server it also has templates and "
            "tokenising, queueing, HTTP and the client; TPOT is of the times at which tokens arrive. How the server's "
            "engine is set is not visible, and not among the differences."
        )
    return sentences


def comparisons_as_json(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Groups, their differences and their comparisons, as one JSON document."""
    return {
        "groups": [group.label for group in groups],
        "differences": comparison.differences(groups),
        "comparisons": [dataclasses.asdict(compared) for compared in comparisons],
    }


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
