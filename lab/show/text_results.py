"""Results of plain runs as sections: the answer, a table of medians, findings, and pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import experiments, figures, phases, shown, stats
from lab.core.figures import FigureKind
from lab.core.lists import grouped, join_and, plural
from lab.core.record import Record
from lab.runner import disturbances
from lab.show import plot_runs, selection, summaries, table
from lab.show.cells import Cell, Column, of_figure, stacked
from lab.show.section import (
    SMALL,
    WIDE,
    Context,
    Kind,
    Picture,
    Section,
    is_plain,
    tabled,
)
from lab.show.text_doubts import doubts
from lab.show.text_findings import (
    answer,
    beyond_training,
    far_apart,
    findings,
    laws,
    of_experts,
)
from lab.show.wording import digits, ends, labelled

if TYPE_CHECKING:
    import pandas as pd

MEANINGS = (
    "TTFT: time to first token. TPOT: time per token after the first. "
    "E2E: from the start of prefill to the last token."
)
OF_RUNS = (
    "A run has two phases: prefill processes the prompt, decode generates one token after another. "
    "TTFT is the time to the first token, TPOT the time per token after it, E2E the time of the "
    "whole run. Figures are medians over runs, with 95 % intervals or, for fewer than 6 runs, "
    "ranges. A bar shows prefill's share of the time."
)
CAPTIONS = {
    "shares": "Where the time of a request goes: medians of each length.",
    "prefill": "Prefill: time until the prompt is processed. Points are runs, the line is their "
    "median. The dashed line shows growth in proportion to the length.",
    "trial": "Each variant against the first, block by block. Left of 1 it is faster. "
    "Bars are intervals of ratios.",
    "decode": "Decode: time of each generated token. Points are tokens, the line is their running "
    "median.",
    "sweep": "Both curves in one pass through the context. Points are runs, the dashed line is the "
    "fitted formula.",
}
WIDE_PICTURES = ("trial", "sweep")


# Sections


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Plain runs, and sweeps: a part for each setup and number of generated tokens."""
    timed = [record for record in records if record.run.is_timed]
    runs = [record for record in timed if record.run.every is None]
    sweeps = [record for record in timed if record.run.every is not None]
    sections = []
    if runs:
        sections.append(_chapter("runs", "Runs", runs, context))
    if sweeps:
        sections.append(_chapter("sweeps", "Sweeps", sweeps, context))
    return sections


def _chapter(name: str, title: str, records: Sequence[Record], context: Context) -> Section:
    setups = table.setups(table.runs(records))
    has_several = len(setups) > 1
    groups: list[tuple[str, pd.DataFrame]] = []
    for label, rows in setups:
        groups += [(label, of_length) for _, of_length in rows.groupby("n_gen")]
    shown_groups = selection.newest(groups, selection.MOST_TABLES)
    parts = []
    answers = []
    for label, of_length in shown_groups:
        of_part = [records[index] for index in dict.fromkeys(of_length.run)]
        details = context.details or context.is_page
        part = _part(label, summaries.summary(of_length), of_part, details)
        answers.append(labelled(label, part.answer) if has_several else part.answer)
        if context.is_page:  # which has the answers among the sentences
            part = dataclasses.replace(part, answer="")
        parts.append(part)
    parts += map(left_out, selection.left_out(len(shown_groups), len(groups)))
    return Section(
        title,
        plural(len(setups), "setup") if has_several else "",
        name=name,
        question=question([label for label, _ in setups]),
        words=[OF_RUNS],
        sentences=answers,
        parts=parts,
        pictures=_pictures(records, context),
        data=partial(summary_rows, records),
    )


def left_out(sentence: str) -> Section:
    return Section(sentences=[sentence])


def _pictures(records: Sequence[Record], context: Context) -> list[Picture]:
    hidden = set()
    if context.together:  # requests have these pictures, with the runs in them
        hidden |= {"prefill", "decode"}
    if context.is_page:  # which has bars of the shares
        hidden.add("shares")
    pictures = []
    for name, draw in plot_runs.drawings(records).items():
        if name in hidden:
            continue
        kind = name.partition("-")[0]
        size = WIDE if kind in WIDE_PICTURES else SMALL
        pictures.append(Picture(name, CAPTIONS[kind], draw, size))
    return pictures


def _part(label: str, rows: pd.DataFrame, records: Sequence[Record], details: bool) -> Section:
    """Medians of one setup and n_gen (a summary), with intervals or ranges."""
    is_sweep = records[0].run.every is not None
    n_gen = records[0].run.n_gen
    lines = rows.to_dict("records")
    n_ctx_train = records[0].model.n_ctx_train
    beyond = []
    if n_ctx_train is not None:
        beyond = [length for length in rows.n_prompt if length + n_gen > n_ctx_train]
    drift = disturbances.drift(records)
    sentences = findings(rows, records)
    is_watched = not any(record.run.imported_from for record in records)
    if is_watched and not drift:
        sentences += far_apart(rows)
    sentences += beyond_training(beyond, n_ctx_train)
    sentences += of_experts(records[0].model)
    fitted = laws(rows)
    return Section(
        label,
        _about(rows, n_gen, is_sweep),
        below(rows, "run"),
        answer=answer(rows, beyond),
        **tabled(_columns(rows, is_sweep, details), lines),
        is_curve=is_sweep,
        notes=_notes(rows),
        warnings=[*_disturbed(records, is_sweep), *drift],
        sentences=[*fitted, *sentences] if is_sweep else [*sentences, *fitted],
    )


def _about(rows: pd.DataFrame, n_gen: int, is_sweep: bool) -> str:
    """What was measured in each row of the table, and how often."""
    has_no_answers = rows.ttft_s.isna().all()  # imported tests of one phase
    if has_no_answers and n_gen > 1:
        work = f"{plural(n_gen - 1, 'token')} decoded per run"
    elif has_no_answers:
        work = "only prefill"
    elif is_sweep:
        work = f"{plural(n_gen, 'token')} generated at each length"
    else:
        work = f"{plural(n_gen, 'token')} generated per run"
    return f"{work}; {medians(rows, 'run')}"


def _columns(
    rows: pd.DataFrame, is_sweep: bool, details: bool
) -> list[Column[Mapping[str, Any]]]:
    """Length, number of runs if there is more to say than the title, figures, prefill's share."""
    hidden = {figures.PREFILL_SHARE}
    if figures.ENERGY.name not in rows:
        hidden.add(figures.ENERGY)
    if not details and rows.prefill_s.notna().all():
        hidden.add(figures.TTFT)
    if rows.tpot_ms.notna().any():  # imported results have decode compute in its place
        hidden.add(figures.DECODE_COMPUTE)
    columns: list[Column[Mapping[str, Any]]] = [
        Column("prompt\ntokens", lambda row: f"{row['n_prompt']:,}", is_in_title=True)
    ]
    if rows.repeats.nunique() > 1 or rows.doubts.map(shown.mark).any():
        columns.append(
            Column(
                "runs",
                lambda row: f"{row['repeats']}{shown.mark(row['doubts'])}",
                is_in_title=True,
            )
        )
    for shown_figure in (*figures.FIGURES, figures.ENERGY):
        if shown_figure not in hidden:
            columns.append(of_figure(shown_figure, partial(cell, figure=shown_figure)))
    style = "" if is_sweep else "bar"  # a sweep generates few tokens
    columns.append(of_figure(figures.PREFILL_SHARE, partial(_share_cell, style=style)))
    return columns


def _share_cell(row: Mapping[str, object], style: str) -> Cell:
    return dataclasses.replace(cell(row, figures.PREFILL_SHARE), style=style)


def cell(row: Mapping[str, Any], figure: FigureKind) -> Cell:
    """A figure of a row of the summary; below it its interval, or its range if runs are few."""
    shown_figure = summaries.shown_in(row, figure.name, figure.scale)
    return stacked(digits(shown_figure.value), ends(shown_figure))


def _notes(rows: pd.DataFrame) -> list[str]:
    notes = []
    if "energy_of" in rows:
        sources = " or ".join(rows.energy_of.dropna().unique())
        notes.append(
            f"J per token: energy of the whole run ({sources}, all that ran on it) over its tokens."
        )
    if rows.tpot_ms.notna().any():
        notes.append(MEANINGS)
    return notes


def _disturbed(records: Sequence[Record], is_sweep: bool) -> list[str]:
    """What disturbed the runs: of sweeps, or of runs by length."""
    if is_sweep:
        sentence = doubts(records)
        return [sentence] if sentence else []
    by_length = grouped(records, lambda record: record.run.n_prompt)
    lengths_of = grouped(sorted(by_length), lambda length: doubts(by_length[length]) or None)
    sentences = []
    for sentence, lengths in lengths_of.items():
        names = join_and([f"{length:,}" for length in lengths])
        sentences.append(f"{names} prompt tokens: {sentence}")
    return sentences


def medians(rows: pd.DataFrame, noun: str) -> str:
    """What the figures of a summary are: medians, and of how many runs or requests (the noun)."""
    fewest = int(rows.repeats.min())
    most = int(rows.repeats.max())
    if most == 1:
        return f"1 {noun} each, so the spread is unknown"
    number = str(most) if fewest == most else f"{fewest} to {most}"
    return f"medians of {number} {noun}s"


def below(rows: pd.DataFrame, noun: str) -> str:
    """What stands below the medians of a summary: intervals or, of few runs, ranges."""
    fewest_for_interval = stats.fewest_for_interval()
    if rows.repeats.max() < fewest_for_interval:
        return "their range"
    if rows.repeats.min() >= fewest_for_interval:
        return "the 95 % interval"
    return f"the 95 % interval ({fewest_for_interval} or more {noun}s) or the range"


def question(labels: Sequence[str]) -> str:
    """The question that a report on these setups answers."""
    if len(labels) > 3:
        return f"Which of these {len(labels)} is fastest?"
    if len(labels) > 1:
        return f"Which is faster: {', '.join(labels[:-1])} or {labels[-1]}?"
    model, _, place = labels[0].partition(", ")
    return f"How fast is {model} on {place}?" if place else f"How fast is {model}?"


def summary_rows(records: Sequence[object]) -> dict[str, list[object]]:
    """The summary for JSON."""
    return {"rows": summaries.summary(table.runs(records)).to_dict("records")}


KINDS = (Kind("runs", lambda line: is_plain(line) and line.run.is_plain, chapters),)


# A line of a session


def finished(record: Record) -> str:
    """A line on a run that has ended."""
    run = record.run
    if not run.n_prompt:  # a part of a session that could not be measured
        return f"{run.part}: {run.status}"
    name = f"{experiments.run_name(run)}, repeat {run.repeat + 1}"
    if run.variant:
        name = f"{run.variant}, {name}"
    line = f"{name}: {', '.join(_figures(record))}"
    return f"{line} (disturbed)" if disturbances.disturbances(record) else line


def _figures(record: Record) -> list[str]:
    """The figures of a run, of a sweep at its end; the status if there are none."""
    run = phases.by_length(record.run)[-1]
    texts = []
    if run.is_plain:
        ttft_ns = phases.ttft_ns(run)
        tpot_ns = phases.tpot_ns(run)
        texts.append(f"TTFT {digits(ttft_ns / 1e9)} s" if ttft_ns else run.status)
        if tpot_ns:
            texts.append(f"TPOT {digits(tpot_ns / 1e6)} ms")
    for name, value in experiments.figures(run).items():
        texts.append(f"{figures.labels()[name]} {digits(value)} {figures.unit(name)}")
    return texts or [run.status]
