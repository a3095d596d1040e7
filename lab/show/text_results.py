"""Results as text: the tables, what they show in words, and what not to trust in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.analysis import comparison, disturbances, sweep_laws, table, wording
from lab.analysis.comparison import Comparison, Group
from lab.core import phases
from lab.core.record import OK, Record
from lab.runner.plan import MIN_FOR_INTERVAL, Plan, join
from lab.runner.session import wide_rows
from lab.show.console import grid_of

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "prefill_s": "prefill\ns",
    "prefill_tps": "prefill\ntokens/s",
    "ttft_s": "TTFT\ns",
    "tpot_ms": "TPOT\nms",
    "decode_tps": "decode\ntokens/s",
    "e2e_s": "E2E\ns",
    "prefill_share": "prefill\n% of E2E",
}
"""Figures of the summary, and their headings."""

DISTURBED = "!"

MEANINGS = "TTFT: time to the first token. TPOT: time of each further one. E2E: the whole."


def summary_cells(rows: pd.DataFrame) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """The headings of a summary, and for each of its rows every figure with its interval.

    A figure is its median and, below it, the interval (or the range of few runs); "" below a single run.
    """
    shown = {name: heading for name, heading in SHOWN.items() if rows[name].notna().any()}
    if "tpot_ms" not in shown and rows.decode_ms.notna().any():  # imported: nothing is known of single tokens
        shown["decode_ms"] = "decode\ncompute ms"
    shown = shown or SHOWN
    lines = []
    for row in rows.to_dict("records"):
        cells = []
        for name in shown:
            scale = 100 if name == "prefill_share" else 1
            ends = ("low", "high") if row[f"{name}_low"] == row[f"{name}_low"] else ("min", "max")
            low, middle, high = (scale * row[key] for key in (f"{name}_{ends[0]}", name, f"{name}_{ends[1]}"))
            told = row["repeats"] > 1 and middle == middle
            cells.append((wording.digits(middle), f"{wording.digits(low)}-{wording.digits(high)}" if told else ""))
        lines.append(cells)
    return list(shown.values()), lines


def summary_table(rows: pd.DataFrame) -> Table:
    """One row per prompt length: medians, with the interval (or the range of few runs) below."""
    headings, lines = summary_cells(rows)
    grid = grid_of("prompt\ntokens", "runs", *headings)
    for row, line in zip(rows.itertuples(), lines, strict=True):
        cells = [Text(middle) + Text(f"\n{ends}" if ends else "", style="dim") for middle, ends in line]
        grid.add_row(f"{row.n_prompt:,}", f"{row.repeats}{DISTURBED if row.disturbed else ''}", *cells)
    return grid


def heading(rows: pd.DataFrame) -> str:
    """What a summary of one setup and one n_gen shows."""
    per = "per run" if rows.sweep_every.isna().all() else "at each length"
    n = int(rows.n_gen.iloc[0])
    return f"{n:,} token{'s' * (n != 1)} generated {per}; median, {_what_is_below(rows)}"


def print_results(records: Sequence[Record], out: Console) -> None:
    """Tables, what they show in words, what disturbed them, and what failed."""
    every = table.runs(records)
    rows = table.summary(every)
    for label, setup in table.setups(rows) if len(rows) else []:
        for _, part in setup.groupby("n_gen"):
            out.print()
            out.print(Text(label, style="bold") + Text(f": {heading(part)}"))
            out.print(summary_table(part))
            if part.tpot_ms.notna().any():
                out.print(Text(MEANINGS, style="dim"))
            for sentence in findings(part):
                out.print(sentence)
    if not len(rows):
        out.print("\nNo run went well.")
    for sentence in warnings(records):
        out.print(Text(f"{DISTURBED} ", style="yellow") + Text(sentence))
    for line in failures(records):
        out.print(Text("failed ", style="red") + Text(line))


def findings(rows: pd.DataFrame) -> list[str]:
    """What a summary of one setup and one n_gen shows in words, its laws included."""
    found = (sweep_laws.prefill_law(rows), sweep_laws.decode_law(rows))
    return [*wording.sentences(rows), *(str(law) for law in found if law)]


def doubts(records: Sequence[Record]) -> str:
    """What disturbed these runs, and whether they can still be trusted; "" where nothing did."""
    words = disturbances.sentences(records)
    if not words:
        return ""
    doubt = " Do not trust these figures: measure again." if disturbances.is_doubtful(records) else ""
    return f"{'; '.join(words)}.{doubt}"


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed the measurement: by session, variant and prompt length, and over whole sessions."""
    by_length: dict[tuple[str, str | None, int], list[Record]] = {}
    for record in records:
        if record.run.status == OK and not record.run.warmup:
            by_length.setdefault((record.session, record.run.variant, record.run.n_prompt), []).append(record)
    said = [
        f"{n_prompt:,} prompt tokens{f', {variant}' if variant else ''}: {words}"
        for (_, variant, n_prompt), measured in by_length.items()
        if (words := doubts(measured))
    ]
    return said + disturbances.drift(records)


def still_wide(records: Sequence[Record], plan: Plan) -> list[str]:
    """With --until: which figures did not get there."""
    if plan.until is None:
        return []
    runs = [record.run for record in records if record.run.status == OK and not record.run.warmup]
    if not runs:
        return []
    wide = wide_rows(runs, plan.until.share)
    if not wide:
        return [f"Every interval is within {plan.until.share:.1%} of its median."]
    names = [f"{row.figure} at {row.n_prompt:,}" + (f" ({row.width:.1%})" if row.width else "") for row in wide]
    return [f"Still wider than {plan.until.share:.1%}: {', '.join(names)}."]


def failures(records: Sequence[Record]) -> list[str]:
    """One line per failed run, with its setup where there are several."""
    if all(record.run.status == OK for record in records):
        return []
    setups = table.setups(table.runs(records))
    whose = {run: f"{label}: " if len(setups) > 1 else "" for label, rows in setups for run in rows.run}
    return [
        f"{whose[number]}{record.run.n_prompt:,} prompt tokens, repeat {record.run.repeat + 1}: {record.run.error}"
        for number, record in enumerate(records)
        if record.run.status != OK
    ]


def print_comparisons(found: Sequence[Group], comparisons: Sequence[Comparison], at_least: float, out: Console) -> None:
    """What differs between the groups, then a table for each against the base, with a verdict a row."""
    out.print(Text("base ", style="bold") + Text(found[0].label))
    fields = differences(found)
    out.print("differ in" if fields else "differ in nothing but when they were measured")
    for field, values in fields.items():
        out.print(f"  {field}: {' | '.join(values)}")
    for compared in comparisons:
        out.print()
        out.print(Text(compared.other, style="bold") + Text(" against the base"))
        grid = grid_of(*COMPARED)
        for row in compared.rows:
            grid.add_row(*comparison_cells(row))
        out.print(grid)
        for sentence in left_out(compared):
            out.print(sentence)
    out.print()
    for sentence in how_compared(found, comparisons, at_least):
        out.print(sentence)


def differences(found: Sequence[Group]) -> dict[str, list[str]]:
    """The fields in which groups differ, with each group's value in words."""

    def words(field: str, value: Any) -> str:
        if value is None:
            return "none" if field in ("sweep_every", "variant") else "unknown"
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return _short(text, 12 if field.endswith("sha256") else 60)

    differ = comparison.differences(found)
    return {field: [words(field, value) for value in values] for field, values in differ.items()}


def left_out(compared: Comparison) -> list[str]:
    """What could not be compared, because only one side has it."""
    said = [] if compared.rows else ["They have no length in common."]
    for side, names in (("base", compared.only_base), ("other", compared.only_other)):
        if names:
            said.append(f"Only in the {side}: {', '.join(names)}.")
    return said


COMPARED = ("prompt\ntokens", "figure", "base", "other", "n", "time\nratio", "interval", "verdict")


def comparison_cells(row: comparison.Row) -> list[str]:
    """One row under the headings `COMPARED`."""
    name, unit = FIGURES[row.figure]
    return [
        f"{row.n_prompt:,}",
        f"{name}, {unit}",
        wording.digits(row.base),
        wording.digits(row.other),
        str(row.n_base) if row.n_base == row.n_other else f"{row.n_base}, {row.n_other}",
        wording.digits(row.ratio.estimate) if row.ratio else "-",
        f"{row.ratio.low:.3f}-{row.ratio.high:.3f}" if row.ratio else "-",
        row.words,
    ]


def how_compared(found: Sequence[Group], comparisons: Sequence[Comparison], at_least: float) -> list[str]:
    """How the ratios were made, and how far they can be believed."""
    paired = any(row.paired for compared in comparisons for row in compared.rows)
    how = "block by block, measured side by side" if paired else "run against run"
    said = [
        f"Time ratio: other over base, {how}. All intervals together hold with 95 %; "
        f"differences below {at_least:.1%} are not claimed. A ratio is a median of ratios, so it need not be that of "
        "the two columns."
    ]
    if not paired and all(group.rows.machine.iloc[0] == found[0].rows.machine.iloc[0] for group in found):
        said.append("These sessions were not measured side by side: part of a difference may be the hour. See lab ab.")
    return said


FIGURES = {"prefill_s": ("prefill", "s"), "tpot_ms": ("TPOT", "ms"), "decode_ms": ("decode compute", "ms")}


def comparisons_as_json(found: Sequence[Group], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The same for programs."""
    import dataclasses

    return {
        "groups": [group.label for group in found],
        "differences": comparison.differences(found),
        "comparisons": [dataclasses.asdict(compared) for compared in comparisons],
    }


def finished(record: Record) -> str:
    """A finished run in a line."""
    run = phases.by_length(record.run)[-1]
    ttft, tpot = phases.ttft_ns(run), phases.tpot_ns(run)
    times = [f"TTFT {wording.digits(ttft / 1e9)} s"] if ttft else [run.status]
    times += [f"TPOT {wording.digits(tpot / 1e6)} ms"] if tpot else []
    variant = f"{run.variant}, " if run.variant else ""
    disturbed = f" {DISTURBED}" if disturbances.disturbances(record) else ""
    return f"{variant}{run.n_prompt:,} prompt tokens, repeat {run.repeat + 1}: {', '.join(times)}{disturbed}"


def _what_is_below(rows: pd.DataFrame) -> str:
    few = sorted(set(rows.repeats[rows.repeats < MIN_FOR_INTERVAL]))
    if not few:
        return "95 % interval below it"
    if few == [1]:
        return "one run: too few to tell how sure"
    return f"range below it ({join(few)} runs are too few for an interval, {MIN_FOR_INTERVAL} would do)"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
