"""Comparisons as text: which setup is faster, how setups differ, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rich.console import Console

from lab.core import figures, shown
from lab.core.lists import grouped, join_and
from lab.show import comparison, text_setup
from lab.show.cells import LONG_TEXT, TEXT, Cell, Column, stacked
from lab.show.comparison import (
    ALIKE,
    DISTURBED,
    FASTER,
    SLOWER,
    TOO_FEW,
    ComparedFigure,
    Comparison,
    Group,
)
from lab.show.section import Columns, Section, print_sections, tabled
from lab.show.session_spread import FEWEST_SESSIONS
from lab.show.wording import digits, percent, times

LONGEST_VALUE = 60  # letters of a value of a setup
LONGEST_CHECKSUM = 12
EQUAL = "Equal setups, measured at different times."
AGAIN = "Repeat both measurements, or use more runs (--repeat)."
INTERVAL = "the 95 % interval (3 or more runs of each; times assumed to differ by factors)"


def sections(comparisons: Sequence[Comparison], cure: str = AGAIN) -> list[Section]:
    """A section for each group against the base: times, ratios, verdicts, why some are unclear,
    and the `cure` of that."""
    all_sections = []
    for compared in comparisons:
        all_sections.append(
            Section(
                f"{compared.other} against the base",
                "time ratio = other / base",
                INTERVAL,
                **tabled(COLUMNS, compared.rows, keep_all=True),
                sentences=_explanations(compared, cure),
            )
        )
    return all_sections


def _explanations(compared: Comparison, cure: str) -> list[str]:
    """Why rows are unclear or missing."""
    sentences: list[str] = []
    if not compared.rows:
        sentences.append("The two have no length in common.")
    reasons = {
        row.words.partition(":")[0]: None for row in compared.rows if row.verdict == TOO_FEW
    }
    for reason in reasons:
        sentence = reason.replace("unclear, ", "Unclear: ", 1)
        sentences.append(f"{sentence}. {cure}")
    if any(row.verdict == DISTURBED for row in compared.rows):
        sentences.append(
            "Unclear (disturbed): no interval, because at least half of the runs were disturbed."
        )
    if compared.only_base:
        sentences.append(f"Only in the base: {', '.join(compared.only_base)}.")
    if compared.only_other:
        sentences.append(f"Only in the other: {', '.join(compared.only_other)}.")
    return sentences


def _lengths_cell(row: ComparedFigure) -> Cell:
    return stacked(f"{row.n_prompt:,}" if row.n_prompt else "", row.case or "")


def _runs_cell(row: ComparedFigure) -> str:
    numbers = dict.fromkeys((row.n_base, row.n_other))
    return ", ".join(map(str, numbers)) + shown.mark(row.doubts)


def _ratio_cell(row: ComparedFigure) -> Cell:
    interval = f"{digits(row.ratio.low)}-{digits(row.ratio.high)}" if row.ratio else ""
    return stacked(digits(row.estimate), interval)


def _verdict_cell(row: ComparedFigure) -> Cell | str:
    if row.verdict == ALIKE and row.ratio:
        largest = max(row.ratio.high, 1 / row.ratio.low) - 1
        return stacked(ALIKE, f"above {percent(largest)}")
    if row.verdict == TOO_FEW:
        return "unclear"
    if row.verdict == DISTURBED:
        return "unclear (disturbed)"
    return row.verdict


COLUMNS: Columns[ComparedFigure] = (
    Column("prompt\ntokens", _lengths_cell, is_in_title=True),
    Column(
        "figure",
        lambda row: f"{figures.labels()[row.figure]}, {figures.unit(row.figure)}",
        TEXT,
    ),
    Column("base", lambda row: digits(row.base)),
    Column("other", lambda row: digits(row.other)),
    Column("runs", _runs_cell, is_in_title=True),
    Column("time\nratio", _ratio_cell),
    Column("verdict", _verdict_cell, LONG_TEXT),
)


def print_comparisons(
    groups: Sequence[Group],
    comparisons: Sequence[Comparison],
    at_least: float,
    out: Console,
    warnings: Sequence[str] = (),
    cure: str = AGAIN,
) -> None:
    """Print who is faster, how the groups differ, a table per group against the base, and
    warnings."""
    setups = []
    for field, values in differences(groups).items():
        setups.append(f"{field}: {' | '.join(values)}")
    words = [f"Base: {groups[0].label}"]
    words += ["Differences:", *setups] if setups else [EQUAL]
    closing = Section(warnings=warnings, notes=how_compared(groups, comparisons, at_least))
    answers = [Section(answer=overall(compared)) for compared in comparisons]
    print_sections(
        [*answers, Section(words=words), *sections(comparisons, cure), closing], out
    )


def overall(compared: Comparison) -> str:
    """One sentence on all rows: in how many the other is slower or faster, and by how much."""
    base = compared.base
    other = compared.other
    if not compared.rows:
        return f"{other} and {base} have no length in common."
    by_verdict = grouped(compared.rows, lambda row: row.verdict)
    if set(by_verdict) <= {TOO_FEW, DISTURBED}:
        reason = "runs were disturbed"
        if DISTURBED not in by_verdict:
            medians = _factor_range(row.estimate for row in compared.rows)
            reason = f"too few runs or much spread (medians: {medians} the time)"
        return f"It is unclear whether {other} or {base} is faster: {reason}."
    if set(by_verdict) == {ALIKE}:
        return f"There is no clear difference between {other} and {base}."
    return f"{_slower_and_faster(compared, by_verdict)}.{_unclear(by_verdict)}"


def _slower_and_faster(
    compared: Comparison, by_verdict: dict[str, list[ComparedFigure]]
) -> str:
    """The rows with a verdict, without the final full stop."""
    n_rows = len(compared.rows)
    clauses: list[str] = []
    if SLOWER in by_verdict:
        slower = by_verdict[SLOWER]
        reach = _factor_range(row.estimate for row in slower)
        place = _place(slower, by_verdict, n_rows)
        clauses.append(f"slower than {compared.base} in {place} ({reach} the time)")
    if FASTER in by_verdict:
        faster = by_verdict[FASTER]
        reach = _factor_range(1 / row.estimate for row in faster)
        place = _place(faster, by_verdict, n_rows)
        than = "" if clauses else f" than {compared.base}"
        clauses.append(f"faster{than} in {place} ({reach} as fast)")
    alike = ""
    if ALIKE in by_verdict:
        alike = f"no clear difference in {len(by_verdict[ALIKE])} of {n_rows} rows"
    if not clauses:
        sides = f"{compared.other} against {compared.base}"
        return f"{sides}: {alike}" if alike else sides
    sentence = f"{compared.other} is {' and '.join(clauses)}"
    return f"{sentence}; {alike}" if alike else sentence


def _place(
    rows: Sequence[ComparedFigure], by_verdict: dict[str, list[ComparedFigure]], n_rows: int
) -> str:
    return "all rows" if len(by_verdict) == 1 else f"{len(rows)} of {n_rows} rows"


def _unclear(by_verdict: dict[str, list[ComparedFigure]]) -> str:
    n_unclear = len(by_verdict.get(TOO_FEW, ())) + len(by_verdict.get(DISTURBED, ()))
    if n_unclear == 0:
        return ""
    if n_unclear == 1:
        return " The other is unclear."
    return f" The other {n_unclear} are unclear."


def _factor_range(ratios: Iterable[float]) -> str:
    """Two factors, or the lowest and the highest, in words: "1.5 to 2.1 times"."""
    values = sorted(ratios)
    ends = [times(values[0]).removesuffix("x"), times(values[-1]).removesuffix("x")]
    between = " and " if len(values) == 2 else " to "
    return f"{between.join(dict.fromkeys(ends))} times"


def answers(comparisons: Sequence[Comparison]) -> list[str]:
    """The fastest by the medians; of each comparison a verdict, and its shortest and longest
    prompt."""
    sentences = fastest(comparisons) if len(comparisons) > 1 else []
    for compared in comparisons:
        sentences.append(overall(compared))
        lengths = {row.n_prompt for row in (*compared.rows[:1], *compared.rows[-1:])}
        for row in compared.rows:
            if row.n_prompt in lengths:
                sentence = f"{row.name}: {row.words}."
                sentences.append(sentence[:1].upper() + sentence[1:])
    return sentences


def fastest(comparisons: Sequence[Comparison]) -> list[str]:
    """Which setup is the fastest by the medians, figure by figure."""
    labels = [comparisons[0].base, *(compared.other for compared in comparisons)]
    estimates: list[dict[str, float]] = []
    for compared in comparisons:
        estimates.append(
            {row.name: row.estimate for row in compared.rows if shown.is_firm(row.doubts)}
        )
    wins: dict[str, list[str]] = {}
    for name in estimates[0]:
        if all(name in of_comparison for of_comparison in estimates):
            ratios = [1.0, *(of_comparison[name] for of_comparison in estimates)]
            fastest = labels[ratios.index(min(ratios))]
            wins.setdefault(fastest, []).append(name)
    if len(wins) == 1:
        return [f"By the medians, {next(iter(wins))} is the fastest."]
    return [
        f"By the medians, {label} is the fastest in {', '.join(names)}."
        for label, names in wins.items()
    ]


def differences(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The fields in which groups differ, with their values as text, in the order of the groups."""
    texts: dict[str, list[str]] = {}
    for field, values in comparison.differences(groups).items():
        texts[field] = [_value_text(field, value) for value in values]
    return texts


def _value_text(field: str, value: object) -> str:
    if value is None:
        return text_setup.unset(field)
    text = f"{value:g}" if isinstance(value, float) else str(value)
    longest = LONGEST_CHECKSUM if field.endswith("sha256") else LONGEST_VALUE
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def how_compared(
    groups: Sequence[Group], comparisons: Sequence[Comparison], at_least: float
) -> list[str]:
    """Sentences on how the ratios were computed, and their limits."""
    rows = [row for compared in comparisons for row in compared.rows]
    n_paired = len([row for row in rows if row.paired])
    sentences = [
        f"Time ratio: other / base, {_centres(n_paired, len(rows))}, "
        "so it can differ from the ratio of the columns. In 95 % of such comparisons all intervals "
        "are right together. "
        f"Differences below {percent(at_least)} count as none."
    ]
    spreads = _spreads(comparisons)
    if spreads:
        sentences.append(
            "Sessions on one machine vary, so a verdict needs a larger difference. Standard "
            f"deviation: {spreads}. To measure it: {FEWEST_SESSIONS} or more sessions of equal "
            "setup in one folder."
        )
    n_servers = len([group for group in groups if group.is_server])
    machines = {group.rows.machine.iloc[0] for group in groups}
    if n_paired == 0 and len(machines) == 1:
        sentence = (
            "The sessions ran at different times, which can explain a part of a difference."
        )
        if n_servers == 0:
            sentence += " lab ab measures side by side."
        sentences.append(sentence)
    if 0 < n_servers < len(groups):
        sentences.append(
            "In process, TTFT is prefill plus sampling one token. "
            "Through a server it also includes templates, tokenization, queueing, HTTP and the "
            "client, and TPOT uses arrival times. "
            "The settings of the server's engine are not visible, so they are not compared."
        )
    return sentences


def _centres(n_paired: int, n_rows: int) -> str:
    if n_paired == 0:
        return "of session medians"
    if n_paired == n_rows:
        return "the median over blocks"
    return "the median over blocks of one trial, otherwise of session medians"


def _spreads(comparisons: Sequence[Comparison]) -> str:
    """The spreads between sessions, with the figures that have them; "" without any."""
    figures_of_spread: dict[str, dict[str, None]] = {}
    for compared in comparisons:
        for spread in compared.spreads:
            figure, _, source = spread.partition(": ")
            figures_of_spread.setdefault(source, {})[figure] = None
    parts = [
        f"{source} for {join_and(list(names))}" for source, names in figures_of_spread.items()
    ]
    return "; ".join(parts)


def as_json(groups: Sequence[Group], comparisons: Sequence[Comparison]) -> dict[str, object]:
    """Groups, their differences and their comparisons, as one JSON document."""
    return {
        "groups": [group.label for group in groups],
        "differences": comparison.differences(groups),
        "comparisons": [dataclasses.asdict(compared) for compared in comparisons],
    }
