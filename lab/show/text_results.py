"""Results as text: tables of medians, sentences on what they show, warnings, and failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.analysis import disturbances, networks, sweep_laws, table, wording
from lab.analysis.spread import FIGURE_NAMES
from lab.core import lever_figures, phases, shown, stats
from lab.core.lists import grouped, plural
from lab.core.record import OK, Record
from lab.core.shown import MARK, NOT_TO_BE_TRUSTED
from lab.runner.cases import Plan
from lab.runner.plan import join
from lab.runner.rounds import wide_rows
from lab.show import reproduce, text_compare
from lab.show.section import Cell, Columns, Section, print_lines, print_marked, print_sections, tabled

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "prefill_s": "prefill\ns",
    "prefill_tps": "prefill\ntokens/s",
    "ttft_s": "TTFT\ns",
    "tpot_ms": "TPOT\nms",
    "decode_tps": "decode\ntokens/s",
    "e2e_s": "E2E\ns",
}
"""Figures of the summary, and their headings."""

MOST_NAMED = 5
"""Lengths that a sentence lists."""

MEANINGS = "TTFT: time to the first token. TPOT: time of each further one. E2E: the whole."


def sections(records: Sequence[Record]) -> list[Section]:
    """A section for each setup and number of generated tokens: medians, below them their intervals or ranges.

    Notes of rows are on what disturbed their runs, and on lengths that the model was not trained for.
    """
    made = []
    rows = table.runs(records)
    if len(rows):
        rows = rows[(rows.status == OK) & ~rows.warmup & rows.lever.isna()].sort_values(
            ["n_prompt", "n_gen"], kind="stable"
        )
    for label, of_setup in table.setups(rows) if len(rows) else []:
        for n_gen, part in table.summary(of_setup).groupby("n_gen"):
            own = of_setup[of_setup.n_gen == n_gen]
            measured = {n: [records[i] for i in alike.run] for n, alike in own.groupby("n_prompt")}
            is_sweep = bool(part.sweep_every.notna().all())
            of_energy = text_compare.energy_section(part)
            made.append(
                Section(
                    label,
                    heading(part),
                    **tabled(_columns(part), part.to_dict("records")),
                    row_notes=[_notes(n, n_gen, measured[n], is_sweep) for n in part.n_prompt],
                    notes=[MEANINGS] if part.tpot_ms.notna().any() else [],
                    warnings=_drift([records[i] for i in sorted(set(own.run))], is_sweep),
                    sentences=findings(part),
                    parts=[of_energy] if of_energy else [],
                )
            )
    return made


def _columns(rows: pd.DataFrame) -> Columns:
    figures = dict(COLUMNS)
    if rows.tpot_ms.isna().all():  # imported: nothing is known of single tokens
        figures["decode_ms"] = "decode\ncompute ms"
    return [
        ("prompt\ntokens", lambda row: f"{row['n_prompt']:,}"),
        ("runs", lambda row: f"{row['repeats']}{shown.mark(row['doubts'])}"),
        *((heading, partial(figure, name=name)) for name, heading in figures.items()),
        ("prefill\n% of E2E", partial(_share, is_sweep=bool(rows.sweep_every.notna().all()))),
    ]


def _share(row: Mapping[str, Any], is_sweep: bool) -> Cell:
    """Prefill's share of the whole time; a sweep generates too little for a bar."""
    return Cell(figure(row, "prefill_share"), style="" if is_sweep else "bar")


def figure(row: Mapping[str, Any], name: str) -> str:
    """A figure of a row of the summary, and below it its interval, or its range where runs are too few for one."""
    one = table.shown_in(row, name, 100 if name == "prefill_share" else 1)
    return "\n".join(filter(None, [wording.digits(one.value), wording.ends(one)]))


def _notes(n_prompt: int, n_gen: int, measured: Sequence[Record], is_sweep: bool) -> list[str]:
    doubt = "" if is_sweep else doubts(measured)
    trained = measured[0].model.n_ctx_train
    if trained is None or n_prompt + n_gen <= trained:
        return [doubt] if doubt else []
    beyond = f"beyond the {trained:,} tokens that the model was trained for: the time holds, the text does not."
    return [*([doubt] if doubt else []), beyond]


def _drift(measured: Sequence[Record], is_sweep: bool) -> list[str]:
    """What concerns all rows of a table: drift, and what disturbed a walk through the context."""
    walks = doubts(measured) if is_sweep else ""
    return [*([walks] if walks else []), *disturbances.drift(measured)]


def heading(rows: pd.DataFrame) -> str:
    """The heading of a summary of one setup and one n_gen."""
    per = "per run" if rows.sweep_every.isna().all() else "at each length"
    return f"{plural(int(rows.n_gen.iloc[0]), 'token')} generated {per}; median, {below(rows, 'run')}"


def print_results(records: Sequence[Record], out: Console, experiments: Sequence[Section] = ()) -> None:
    """Prints the tables of runs and of experiments, then what failed, and what disturbed runs of experiments."""
    print_sections(sections(records), out)
    print_lines([Text(sentence) for sentence in networks.pipeline_gains(records)], out)
    print_sections(experiments, out)
    if not any(record.run.is_timed for record in records):
        out.print("\nNo run went well.")
    of_experiments = [record for record in records if record.run.lever is not None]
    print_marked([*imported(records), *distrust(records), *disturbed(of_experiments)], failures(records), out)


def findings(rows: pd.DataFrame) -> list[str]:
    """Sentences on a summary of one setup and one n_gen, with the laws of a sweep; none on what was disturbed."""
    firm = table.firm(rows)
    laws = (sweep_laws.prefill_law(firm), sweep_laws.decode_law(firm))
    lengths = sorted(set(rows.n_prompt) - set(firm.n_prompt))
    sentences = [*wording.sentences(firm), *(str(law) for law in laws if law)]
    if lengths:
        some = join(lengths) if len(lengths) <= MOST_NAMED else f"{len(lengths)} lengths up to {lengths[-1]:,}"
        sentences.append(f"Nothing is concluded from the disturbed runs of {some} prompt tokens.")
    return sentences


def doubts(records: Sequence[Record]) -> str:
    """A sentence on what disturbed these runs, and whether to trust them; "" where nothing disturbed them."""
    words = disturbances.sentences(records)
    if not words:
        return ""
    doubt = " Do not trust these figures: measure again." if disturbances.is_doubtful(records) else ""
    return f"{'; '.join(words)}.{doubt}"


def warnings(records: Sequence[Record]) -> list[str]:
    """The sentences of `imported`, `disturbed` and `distrust`."""
    return imported(records) + disturbed(records) + distrust(records)


def disturbed(records: Sequence[Record]) -> list[str]:
    """Sentences on what disturbed the runs, by session, variant and length, and on drift."""
    by_run = [
        f"{what}{f', {variant}' if variant else ''}: {words}"
        for (_, variant, what), measured in _repeats(records).items()
        if (words := doubts(measured))
    ]
    return by_run + disturbances.drift(records)


def imported(records: Sequence[Record]) -> list[str]:
    """A sentence on results that another tool measured; none without them."""
    n = sum(record.run.totals is not None for record in records)
    what = plural(n, "result") if n < len(records) else "All results"
    are = "was" if n == 1 else "were"
    return [
        f"{what} {are} imported: measured by someone else with another tool, as times of whole tests. The lab did not "
        "watch these runs."
    ] * bool(n)


def distrust(records: Sequence[Record]) -> list[str]:
    """A sentence for each session with figures that are not to be trusted, with the command to measure it again."""
    cases = _repeats(records)
    sentences = []
    for session in dict.fromkeys(case[0] for case, alike in cases.items() if disturbances.is_doubtful(alike)):
        command = reproduce.command([record for record in records if record.session == session])
        sentences.append(
            f"Half of the runs or more were disturbed in some of session {session}: do not trust figures marked "
            f"{NOT_TO_BE_TRUSTED}. Measure again while no other program runs{f': {command}' if command else '.'}"
        )
    return sentences


def _repeats(records: Sequence[Record]) -> dict[tuple[str, str | None, str], list[Record]]:
    """Timed runs that went well, by session, variant and what they did."""
    timed = [record for record in records if record.run.is_timed]
    return grouped(timed, lambda record: (record.session, record.run.variant, record.run.name))


def still_wide(records: Sequence[Record], plan: Plan) -> list[str]:
    """With --until: a sentence that names the figures whose intervals are still too wide."""
    if plan.until is None:
        return []
    runs = [record.run for record in records if record.run.is_timed]
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
    prefixes = {run: f"{label}: " if len(setups) > 1 else "" for label, rows in setups for run in rows.run}
    return [
        f"{prefixes[number]}{record.run.name}, repeat {record.run.repeat + 1}: {record.run.error}"
        for number, record in enumerate(records)
        if record.run.status != OK
    ]


def question(labels: Sequence[str], asked: Sequence[str] = ()) -> str:
    """What a report on these setups answers; `asked` are the questions of its experiments."""
    if asked:
        return " ".join(asked)
    if len(labels) == 1:
        name, _, where = labels[0].partition(", ")
        return f"How fast does {name} read a prompt and write an answer{f' on {where}' if where else ''}?"
    if len(labels) > 3:
        return f"Which of these {len(labels)} is fastest?"
    return f"Which is faster: {', '.join(labels[:-1])} or {labels[-1]}?"


def times(label: str, rows: pd.DataFrame) -> list[str]:
    """Sentences on the times of the longest prompt, one for each number of generated tokens."""
    sentences = []
    for _, part in table.summary(rows).groupby("n_gen"):
        row = part.iloc[-1]
        sure = "" if shown.is_firm(row.doubts) else " (disturbed: do not trust these times)"
        each_ms = row.tpot_ms if row.tpot_ms > 0 else row.decode_ms  # imported: decode compute is what is known
        rate = f"each token takes {wording.seconds(each_ms / 1e3)} ({wording.digits(1e3 / each_ms)} a second)"
        reads = f"a prompt of {row.n_prompt:,} tokens is read in {wording.seconds(row.prefill_s)}"
        words = [reads] if row.prefill_s > 0 else []
        words += [f"after {'it' if words else f'{row.n_prompt:,} tokens'} {rate}"] if each_ms > 0 else []
        text = "; ".join(words)
        sentences.append(f"{label}: {text}{sure}." if label else f"{text[:1].upper()}{text[1:]}{sure}.")
    return sentences


def finished(record: Record) -> str:
    """A line on a finished run."""
    run = phases.by_length(record.run)[-1]
    ttft, tpot = phases.ttft_ns(run), phases.tpot_ns(run)
    times = [f"TTFT {wording.digits(ttft / 1e9)} s"] if ttft else [run.status]
    times += [f"TPOT {wording.digits(tpot / 1e6)} ms"] if tpot else []
    if run.lever is not None:
        times = [run.status]
    if figures := lever_figures.figures(run):
        times = [
            f"{FIGURE_NAMES[name]} {wording.digits(value)} {name.rpartition('_')[2]}" for name, value in figures.items()
        ]
    if not record.run.n_prompt:  # it stands for a part of a session that could not be measured
        return f"{record.run.part}: {record.run.status}"
    variant = f"{run.variant}, " if run.variant else ""
    disturbed = f" {MARK}" if disturbances.disturbances(record) else ""
    return f"{variant}{record.run.name}, repeat {run.repeat + 1}: {', '.join(times)}{disturbed}"


def below(rows: pd.DataFrame, noun: str) -> str:
    """What stands below the medians of a summary: intervals or, of few runs (or requests: the noun), ranges."""
    few = sorted(set(rows.repeats[rows.repeats < stats.fewest_for_interval()]))
    if not few:
        return "95 % interval below it"
    if few == [1]:
        return f"one {noun}: too few to tell how sure"
    return f"range below it ({join(few)} {noun}s are too few for an interval, {stats.fewest_for_interval()} would do)"
