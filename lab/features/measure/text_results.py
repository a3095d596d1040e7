"""Results of runs as sections: tables of medians, findings, pictures, warnings, failures, and their command."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import lever_figures, phases, shown, stats
from lab.core.lists import grouped, join_and, plural
from lab.core.record import OK, Record
from lab.core.shown import MARK, NOT_TO_BE_TRUSTED
from lab.features.compare.spread import FIGURE_NAMES
from lab.features.measure import plot_runs, sweep_laws
from lab.runner import as_options
from lab.runner.cases import Plan
from lab.runner.plan import join
from lab.runner.rounds import wide_rows
from lab.show import disturbances, table, wording
from lab.show.kind import Context, Kind, is_plain
from lab.show.section import SMALL, TALL, WIDE, Cell, Columns, Picture, Section, tabled

if TYPE_CHECKING:
    import pandas as pd

HEADINGS = {
    "prefill_s": "prefill\ns",
    "prefill_tps": "prefill\ntokens/s",
    "ttft_s": "TTFT\ns",
    "first_output_s": "first\noutput s",
    "tpot_ms": "TPOT\nms",
    "decode_tps": "decode\ntokens/s",
    "stall_ms": "longest\nstall ms",
    "e2e_s": "E2E\ns",
    "decode_ms": "decode\ncompute ms",
    "j_per_token": "J per\ntoken",
}
"""Figures of the summary of runs or requests, and their headings."""

SHOWN = ("prefill_s", "prefill_tps", "ttft_s", "tpot_ms", "decode_tps", "e2e_s")

MOST_NAMED = 5
"""Lengths that a sentence lists."""

MEANINGS = (
    "TTFT: time to first token. TPOT: time per token after the first. E2E: from the start of prefill to the last token."
)


def sections(records: Sequence[Record]) -> list[Section]:
    """A section for each setup and number of generated tokens: medians with intervals or ranges.

    Notes of rows say what disturbed their runs; a sentence says which lengths exceed the model's training length.
    """
    made = []
    rows = table.runs(records)
    if len(rows):
        good = (rows.status == OK) & ~rows.warmup & rows.lever.isna()
        rows = rows[good].sort_values(["n_prompt", "n_gen"], kind="stable")
    for label, of_setup in table.setups(rows) if len(rows) else []:
        for n_gen, part in table.summary(of_setup).groupby("n_gen"):
            own = of_setup[of_setup.n_gen == n_gen]
            measured = {n: [records[i] for i in alike.run] for n, alike in own.groupby("n_prompt")}
            of_part, is_sweep = [records[i] for i in sorted(set(own.run))], bool(part.sweep_every.notna().all())
            names = (*SHOWN, "decode_ms") if part.tpot_ms.isna().all() else SHOWN  # imported: no single tokens
            notes = [MEANINGS] if part.tpot_ms.notna().any() else []
            if "j_per_token" in part:
                names = (*names, "j_per_token")
            if "energy_of" in part:
                whose = " or ".join(part.energy_of.dropna().unique())
                notes.append(
                    f"J per token: energy of the whole run ({whose}, and all that ran on it) over the generated tokens."
                )
            columns: Columns = [
                ("prompt\ntokens", lambda row: f"{row['n_prompt']:,}"),
                ("runs", lambda row: f"{row['repeats']}{shown.mark(row['doubts'])}"),
                *((HEADINGS[name], partial(figure, name=name)) for name in names),
                (
                    "prefill\n% of E2E",  # a sweep generates few tokens
                    lambda row: Cell(figure(row, "prefill_share"), style="" if row["sweep_every"] > 0 else "bar"),
                ),
            ]
            trained = {n: same[0].model.n_ctx_train for n, same in measured.items()}
            beyond = {n: most for n, most in trained.items() if most is not None and n + int(n_gen) > most}
            too_long = [
                f"{join_and([f'{n:,}' for n in beyond])} prompt tokens: prompt and answer exceed the model's training "
                f"length of {most:,}: timing is valid, the text is not."
                for most in list(beyond.values())[:1]
            ]
            walks = [doubts(of_part)] if is_sweep else []
            made.append(
                Section(
                    label,
                    heading(part),
                    **tabled(columns, part.to_dict("records")),
                    row_notes=[[] if is_sweep else list(filter(None, [doubts(measured[n])])) for n in part.n_prompt],
                    notes=notes,
                    warnings=[*filter(None, walks), *disturbances.drift(of_part)],
                    sentences=[*findings(part), *too_long],
                )
            )
    return made


def figure(row: Mapping[str, Any], name: str) -> str:
    """A figure of a row of the summary, and below it its interval, or its range if runs are too few for one."""
    one = table.shown_in(row, name, 100 if name == "prefill_share" else 1)
    return "\n".join(filter(None, [wording.digits(one.value), wording.ends(one)]))


def heading(rows: pd.DataFrame) -> str:
    """The heading of a summary of one setup and one n_gen."""
    n_gen, per = int(rows.n_gen.iloc[0]), "per run" if rows.sweep_every.isna().all() else "at each length"
    what = f"{plural(n_gen, 'token')} generated {per}"
    if rows.ttft_s.isna().all():  # imported: a test of prefill, or of decode steps without the prompt's
        what = f"{plural(n_gen - 1, 'token')} decoded {per}" if n_gen > 1 else "only prefill"
    return f"{what}; {below(rows, 'run')}"


def findings(rows: pd.DataFrame) -> list[str]:
    """Sentences on a summary of one setup and one n_gen, with the laws of a sweep. Unreliable rows are left out."""
    firm = table.firm(rows)
    laws = (sweep_laws.prefill_law(firm), sweep_laws.decode_law(firm))
    lengths = sorted(set(rows.n_prompt) - set(firm.n_prompt))
    sentences = [*wording.sentences(firm), *(str(law) for law in laws if law)]
    if lengths:
        some = join(lengths) if len(lengths) <= MOST_NAMED else f"{len(lengths)} lengths up to {lengths[-1]:,}"
        sentences.append(f"No findings from the runs of {some} prompt tokens: they were disturbed.")
    return sentences


def doubts(records: Sequence[Record]) -> str:
    """A sentence on what disturbed these runs, and whether they are reliable; "" if nothing disturbed them."""
    words = disturbances.sentences(records)
    if not words:
        return ""
    doubt = " Unreliable: measure again." if disturbances.is_doubtful(records) else ""
    return f"{'; '.join(words)}.{doubt}"


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
    what = f"{plural(n, 'result')} {'was' if n == 1 else 'were'}" if n < len(records) else "All results were"
    return [
        f"{what} imported: measured by someone else with another tool, as times of whole tests. The lab did not "
        "watch these runs."
    ] * bool(n)


def distrust(records: Sequence[Record], again: Callable[[Sequence[Record]], str | None]) -> list[str]:
    """A sentence for each session with unreliable figures, with the command that `again` makes of its records."""
    watched = [one for one in records if [*disturbances.disturbances(one)] != [disturbances.TOO_FAST]]
    cases, sentences = _repeats(watched), list[str]()
    for session in dict.fromkeys(case[0] for case, alike in cases.items() if disturbances.is_doubtful(alike)):
        command = again([record for record in records if record.session == session])
        sentences.append(
            f"{NOT_TO_BE_TRUSTED}: other programs disturbed at least half of the runs, so these figures are unreliable "
            f"(session {session}). Measure again while no other program runs{f': {command}' if command else '.'}"
        )
    return sentences


def _repeats(records: Sequence[Record]) -> dict[tuple[str, str | None, str], list[Record]]:
    """Timed runs that went well, by session, variant and what they did."""
    timed = [record for record in records if record.run.is_timed]
    return grouped(timed, lambda record: (record.session, record.run.variant, record.run.name))


def still_wide(records: Sequence[Record], plan: Plan) -> list[str]:
    """With --until: a sentence on the figures whose intervals are still too wide."""
    if plan.until is None:
        return []
    if not (runs := [record.run for record in records if record.run.is_timed]):
        return []
    wide = wide_rows(runs, plan.until.share)
    if not wide:
        return [f"All intervals are within {wording.percent(plan.until.share)} of their medians."]
    widths = [f" ({wording.percent(row.width)})" if row.width else "" for row in wide]
    names = [f"{row.figure} at {row.n_prompt:,}{width}" for row, width in zip(wide, widths, strict=True)]
    return [f"Intervals still wider than {wording.percent(plan.until.share)}: {', '.join(names)}."]


def failures(records: Sequence[Record]) -> list[str]:
    """One line per failed run, with its setup if there are several."""
    if all(record.run.status == OK for record in records):
        return []
    setups = table.setups(table.runs(records))
    prefixes = {run: f"{label}: " if len(setups) > 1 else "" for label, rows in setups for run in rows.run}
    return [
        f"{prefixes[number]}{record.run.name}, repeat {record.run.repeat + 1}: {record.run.error}"
        for number, record in enumerate(records)
        if record.run.status != OK
    ]


def question(labels: Sequence[str]) -> str:
    """The question that a report on these setups answers."""
    if len(labels) == 1:
        name, _, where = labels[0].partition(", ")
        return f"How fast is {name}{f' on {where}' if where else ''}?"
    if len(labels) > 3:
        return f"Which of these {len(labels)} is fastest?"
    return f"Which is faster: {', '.join(labels[:-1])} or {labels[-1]}?"


def times(label: str, rows: pd.DataFrame) -> list[str]:
    """Sentences on prefill and decode of the longest prompt, one for each number of generated tokens."""
    sentences = []
    for _, part in table.summary(rows).groupby("n_gen"):
        row = part.iloc[-1]
        sure = "" if shown.is_firm(row.doubts) else " (unreliable: its runs were disturbed)"
        each_ms = row.tpot_ms if row.tpot_ms > 0 else row.decode_ms  # imported results have decode compute only
        prefill = f"prefill of {row.n_prompt:,} tokens takes {wording.seconds(row.prefill_s)}"
        words = [prefill] if row.prefill_s > 0 else []
        if each_ms > 0:
            rate = f"{wording.seconds(each_ms / 1e3)} ({wording.digits(1e3 / each_ms)} tokens/s)"
            words.append(f"each token after {'it' if words else f'{row.n_prompt:,} tokens'} takes {rate}")
        text = ", ".join(words)
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
    if not record.run.n_prompt:  # a part of a session that could not be measured
        return f"{record.run.part}: {record.run.status}"
    variant = f"{run.variant}, " if run.variant else ""
    disturbed = f" {MARK}" if disturbances.disturbances(record) else ""
    return f"{variant}{record.run.name}, repeat {run.repeat + 1}: {', '.join(times)}{disturbed}"


def below(rows: pd.DataFrame, noun: str) -> str:
    """What a summary shows: medians with intervals or, of few runs (or requests: the noun), with ranges."""
    fewest = stats.fewest_for_interval()
    if rows.repeats.min() >= fewest:
        return "medians; below them the 95 % interval"
    if rows.repeats.max() == 1:
        return f"1 {noun} each, so the spread is unknown"
    return f"medians; below each its 95 % interval ({fewest} or more {noun}s) or the range"


OF_RUNS = (
    "A run has two phases: prefill processes the prompt, decode generates one token after another. TTFT is the time to "
    "the first token, TPOT the time per token after it, E2E the time of the whole run. Figures are medians over runs, "
    "with 95 % intervals or, for fewer than 6 runs, ranges. A bar shows prefill's share of the time."
)
CAPTIONS = {
    "prefill": "Prefill: time until the prompt is processed. Points are runs, the line is their median. The dashed "
    "line shows growth in proportion to the length.",
    "ab": "Each variant against the first, block by block. Left of 1 it is faster. Bars are intervals of ratios.",
    "decode": "Decode: time of each generated token. Points are tokens, the line is their running median.",
    "sweep": "Both curves in one pass through the context. Points are runs, the dashed line is the fitted law.",
}


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Plain runs, and sweeps."""
    made = []
    for name, title, is_sweep in (("runs", "Runs", False), ("sweeps", "Sweeps", True)):
        own = [one for one in records if one.run.is_timed and (one.run.every is not None) == is_sweep]
        if not own:
            continue
        rows = table.setups(table.runs(own))
        many = len(rows) > 1
        sizes = {"ab": WIDE, "sweep": TALL if context.is_page else WIDE}
        drawn = plot_runs.drawings(own, stacked=context.is_page, by_session=context.by_session)
        pictures = {one: one.partition("-")[0] for one in drawn if not (context.together and one in TOGETHER)}
        made.append(
            Section(
                title,
                plural(len(rows), "setup") if many else "",
                name=name,
                question=question([label for label, _ in rows]),
                words=[OF_RUNS],
                sentences=[line for label, part in rows for line in times(label if many else "", part)],
                parts=sections(own),
                pictures=[
                    Picture(one, CAPTIONS[kind], drawn[one], sizes.get(kind, SMALL)) for one, kind in pictures.items()
                ],
                data=partial(summary_rows, own),
            )
        )
    return made


TOGETHER = ("prefill", "decode")
"""Pictures that runs and requests share."""


def summary_rows(records: Sequence[Any]) -> dict[str, list[Any]]:
    """The summary for JSON."""
    return {"rows": table.summary(table.runs(records)).to_dict("records")}


def again(records: Sequence[Record]) -> str | None:
    """The command of plain runs, sweeps and variants; None for imported results."""
    timed, shared = as_options.timed(records), as_options.shared(records)
    run = timed[0].run
    given: dict[str, object] = {"prompt_len": sorted({record.run.n_prompt for record in timed})}
    if any(record.run.totals for record in timed):
        return None
    if run.block is not None:
        by_name = {record.run.variant or "": as_options.options(record) for record in records}
        own = [
            [word for option in by_name[name] if option not in shared for word in option] for name in sorted(by_name)
        ]
        blocks = 1 + max(record.run.block or 0 for record in timed)
        numbers = sorted({record.run.batch.n_seq for record in timed if record.run.batch})
        return as_options.line("ab", {**given, "gen": run.n_gen, "blocks": blocks, "sequences": numbers}, own, shared)
    if run.every is not None:
        given = {"max_len": given["prompt_len"], "every": run.every}
    name = "measure" if run.every is None else "sweep"
    repeat = 1 + max(record.run.repeat for record in timed)
    return as_options.line(name, {**given, "gen": run.n_gen, "repeat": repeat}, (), shared)


KINDS = (Kind("runs", lambda one: is_plain(one) and one.run.lever is None, chapters, again),)
