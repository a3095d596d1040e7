"""Results of runs as sections: the answer, a table of medians, findings, pictures, warnings, and their command."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lab.core import experiments, phases, shown, stats
from lab.core.lists import grouped, join_and, plural
from lab.core.record import OK, Record
from lab.core.shown import NOT_TO_BE_TRUSTED
from lab.runner import disturbances, machine
from lab.runner.cases import Plan
from lab.runner.plan import join
from lab.runner.session import wide_figures
from lab.show import plot_runs, sweep_laws, table
from lab.show.comparison import figure_names
from lab.show.section import SMALL, WIDE, Cell, Context, Kind, Picture, Section, is_plain, tabled
from lab.show.wording import digits, ends, percent, seconds, times

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
    "prefill_share": "prefill\n% of E2E",
    "decode_ms": "decode\ncompute ms",
    "j_per_token": "J per\ntoken",
}
"""Figures of the summary of runs or requests, and their headings."""

MOST_ROWS = 8  # lengths of a sweep that a terminal shows; --details shows all
WIDE_RANGES = 2.0
"""Of two lengths the products of their runs' ranges (largest over smallest) above which their growth is not told."""

WIDE_RUNS = 1.25  # the slowest run of a length over the fastest, above which that is said

MEANINGS = "TTFT: time to first token. TPOT: time per token after the first. E2E: from the start of prefill to the last token."
OF_RUNS = (
    "A run has two phases: prefill processes the prompt, decode generates one token after another. TTFT is the time to "
    "the first token, TPOT the time per token after it, E2E the time of the whole run. Figures are medians over runs, "
    "with 95 % intervals or, for fewer than 6 runs, ranges. A bar shows prefill's share of the time."
)
CAPTIONS = {
    "shares": "Where the time of a request goes: medians of each length.",
    "prefill": "Prefill: time until the prompt is processed. Points are runs, the line is their median. The dashed "
    "line shows growth in proportion to the length.",
    "ab": "Each variant against the first, block by block. Left of 1 it is faster. Bars are intervals of ratios.",
    "decode": "Decode: time of each generated token. Points are tokens, the line is their running median.",
    "sweep": "Both curves in one pass through the context. Points are runs, the dashed line is the fitted formula.",
}


def chapters(records: Sequence[Record], context: Context) -> list[Section]:
    """Plain runs, and sweeps: a part for each setup and number of generated tokens."""
    made = []
    for name, title, is_sweep in (("runs", "Runs", False), ("sweeps", "Sweeps", True)):
        own = [
            one for one in records if one.run.is_timed and (one.run.every is not None) == is_sweep
        ]
        if not own:
            continue
        setups = table.setups(table.runs(own))
        parts = list[Section]()
        answers = list[str]()
        for label, rows in setups:
            for _, alike in rows.groupby("n_gen"):
                of_part = [own[i] for i in dict.fromkeys(alike.run)]
                part = _part(
                    label, table.summary(alike), of_part, context.details or context.is_page
                )
                told = part.answer  # a page has it among the sentences
                parts.append(dataclasses.replace(part, answer="") if context.is_page else part)
                answers.append(
                    f"{label}: {told[:1].lower()}{told[1:]}" if len(setups) > 1 else told
                )
        # requests share the first two; a page has bars of the shares
        hidden = [
            *(["prefill", "decode"] if context.together else []),
            *(["shares"] if context.is_page else []),
        ]
        pictures = [
            Picture(
                one,
                CAPTIONS[kind := one.partition("-")[0]],
                draw,
                WIDE if kind in ("ab", "sweep") else SMALL,
            )
            for one, draw in plot_runs.drawings(own).items()
            if one not in hidden
        ]
        made.append(
            Section(
                title,
                plural(len(setups), "setup") if len(setups) > 1 else "",
                name=name,
                question=question([label for label, _ in setups]),
                words=[OF_RUNS],
                sentences=answers,
                parts=parts,
                pictures=pictures,
                data=functools.partial(summary_rows, own),
            )
        )
    return made


def _part(label: str, rows: pd.DataFrame, records: Sequence[Record], details: bool) -> Section:
    """Medians of one setup and n_gen (a summary), with intervals or ranges."""
    n = len(rows)
    is_sweep = records[0].run.every is not None
    first = records[0]
    notes = [MEANINGS] if rows.tpot_ms.notna().any() else []
    left_out = {"first_output_s", "stall_ms", "j_per_token"} - set(rows)
    left_out |= {"ttft_s"} if not details and rows.prefill_s.notna().all() else set()
    left_out |= (
        {"decode_ms"} if rows.tpot_ms.notna().any() else set()
    )  # imported results have no single tokens
    if "energy_of" in rows:
        whose = " or ".join(rows.energy_of.dropna().unique())
        notes.insert(
            0,
            f"J per token: energy of the whole run ({whose}, all that ran on it) over its tokens.",
        )
    columns: list[tuple[str, Any]] = [("prompt\ntokens", lambda row: f"{row['n_prompt']:,}")]
    if rows.repeats.nunique() > 1 or any(map(shown.mark, rows.doubts)):
        columns.append(("runs", lambda row: f"{row['repeats']}{shown.mark(row['doubts'])}"))
    names = [name for name in HEADINGS if name not in {"prefill_share", *left_out}]
    columns += [(HEADINGS[name], functools.partial(figure, name=name)) for name in names]
    style = "" if is_sweep else "bar"  # a sweep generates few tokens
    columns.append(
        (HEADINGS["prefill_share"], lambda row: Cell(figure(row, "prefill_share"), style))
    )

    n_tokens = first.run.n_gen
    per = "at each length" if is_sweep else "per run"
    about = f"{plural(n_tokens, 'token')} generated {per}"
    if (
        rows.ttft_s.isna().all()
    ):  # imported: a test of prefill, or of decode steps without the prompt's
        about = f"{plural(n_tokens - 1, 'token')} decoded {per}" if n_tokens > 1 else "only prefill"
    about = f"{about}; {below(rows, 'run')}"
    lines = rows.to_dict("records")
    if is_sweep and not details and n > MOST_ROWS:
        lines = [
            lines[i] for i in sorted({round((i + 1) * n / MOST_ROWS) - 1 for i in range(MOST_ROWS)})
        ]
        about = f"{MOST_ROWS} of {n} lengths, {about}"

    (laws, found) = findings(rows)
    drifted = disturbances.drift(records)
    if not drifted and not any(one.run.imported_from for one in records):  # the lab watched them
        found += far_apart(rows)
    most = first.model.n_ctx_train
    beyond = [length for length in rows.n_prompt if most is not None and length + n_tokens > most]
    if beyond:
        found.append(
            f"{join_and([f'{length:,}' for length in beyond])} prompt tokens: prompt and answer exceed the model's "
            f"training length of {most:,}: timing is valid, the text is not."
        )
    by_length = grouped(records, lambda one: one.run.n_prompt)
    alike = grouped(sorted(by_length), lambda length: doubts(by_length[length]) or None)
    warned = [doubts(records)] if is_sweep and doubts(records) else []
    if not is_sweep:
        warned = [
            f"{join_and([f'{n:,}' for n in lengths])} prompt tokens: {why}"
            for why, lengths in alike.items()
        ]
    return Section(
        label,
        about,
        answer=answer(rows, beyond),
        words=laws if is_sweep else [],
        **tabled(columns, lines),
        notes=notes,
        warnings=[*warned, *drifted],
        sentences=found if is_sweep else [*found, *laws],
    )


def figure(row: Mapping[str, Any], name: str) -> str:
    """A figure of a row of the summary, and below it its interval, or its range if runs are too few for one."""
    one = table.shown_in(row, name, 100 if name == "prefill_share" else 1)
    return "\n".join(filter(None, [digits(one.value), ends(one)]))


def below(rows: pd.DataFrame, noun: str) -> str:
    """What a summary shows: medians with intervals or, of few runs (or requests: the noun), with ranges."""
    fewest = stats.fewest_for_interval()
    least = int(rows.repeats.min())
    most = int(rows.repeats.max())
    if most == 1:
        return f"1 {noun} each, so the spread is unknown"
    n = str(most) if least == most else f"{least} to {most}"
    spread = "their range" if most < fewest else "the 95 % interval"
    either = f" ({fewest} or more {noun}s) or the range" if least < fewest <= most else ""
    return f"medians of {n} {noun}s; below each {spread}{either}"


def answer(rows: pd.DataFrame, beyond: Sequence[int] = ()) -> str:
    """What a whole request takes: of a summary of one setup and n_gen, its longest reliable one."""
    of_rows = [row for _, row in rows.iterrows()]
    row = max(
        of_rows,
        key=lambda row: (shown.is_firm(row.doubts), row.n_prompt not in beyond, row.n_prompt),
    )
    sure = " (some of its runs were disturbed)" if shown.PARTLY in row.doubts else ""
    sure = sure if shown.is_firm(row.doubts) else " (unreliable: its runs were disturbed)"
    each_ms = (
        row.tpot_ms if row.tpot_ms > 0 else row.decode_ms
    )  # imported results have decode compute only
    prompt = f"{row.n_prompt:,} tokens"
    rate = f"{digits(1e3 / each_ms)} tokens/s" if each_ms > 0 else ""
    if row.sweep_every > 0 or not row.prefill_share > 0 or not rate:  # single phases
        words = [f"prefill of {prompt} takes {seconds(row.prefill_s)}"] if row.prefill_s > 0 else []
        after = "it" if words else prompt
        words += (
            [f"each token after {after} takes {seconds(each_ms / 1e3)} ({rate})"] if rate else []
        )
        text = ", ".join(words)
    else:
        text = f"a request of {prompt} with {row.n_gen:,} back takes {seconds(row.e2e_s)}: {100 * row.prefill_share:.0f} "
        text += f"% prefill at {digits(row.prefill_tps)} tokens/s, the rest decode at {rate}"
    return f"{text[:1].upper()}{text[1:]}{sure}."


def findings(rows: pd.DataFrame) -> tuple[list[str], list[str]]:
    """The fitted laws, and sentences on a summary of one setup and one n_gen. Unreliable rows are left out."""
    firm = table.firm(rows)
    sentences = []
    laws = [str(law) for law in (sweep_laws.prefill_law(firm), sweep_laws.decode_law(firm)) if law]

    def are_apart(one: pd.Series, other: pd.Series, name: str) -> bool:
        """Whether the ranges of a figure do not overlap. A single run has no range."""
        (low, high), (other_low, other_high) = (
            (row[f"{name}_min"], row[f"{name}_max"]) for row in (one, other)
        )
        return min(one.repeats, other.repeats) > 1 and bool(low > other_high or high < other_low)

    known = firm[firm.prefill_share.notna()]
    if len(known) > 1:
        short = known.iloc[0]
        long = known.iloc[-1]
        far = known[known.n_prompt <= long.n_prompt / 2]  # a step of a few percent shows nothing
        before = far.iloc[-1] if len(far) else known.iloc[-2]
        n_times = long.n_prompt / before.n_prompt
        took = long.prefill_s / before.prefill_s
        growth = "about in proportion"
        if math.prod(row.prefill_s_max / row.prefill_s_min for row in (long, before)) > WIDE_RANGES:
            growth = "the runs vary too much to say if that is in proportion"
        if are_apart(long, before, "prefill_tps") and not 0.9 <= took / n_times <= 1.1:
            more = "each token attends to more earlier ones"
            why = more if took > n_times else "short prompts underuse the hardware"
            growth = f"{times(took / n_times)} per token, because {why}"
        sentences.append(
            f"Prefill of {long.n_prompt:,} tokens took {times(took)} as long as for {before.n_prompt:,} "
            f"({times(n_times)} the tokens): {growth}."
        )
        if long.tpot_ms > 0 and short.tpot_ms > 0:  # not NaN: there was decoding
            slower = long.tpot_ms / short.tpot_ms
            why = ""
            if are_apart(long, short, "tpot_ms"):
                why = ", because attention works through the whole KV cache" if slower > 1.1 else ""
            elif min(long.repeats, short.repeats) > 1:
                why = "; their ranges overlap, so it may be chance"
            sentences.append(
                f"Decode took {digits(short.tpot_ms)} ms per token after {short.n_prompt:,} prompt tokens and "
                f"{digits(long.tpot_ms)} ms after {long.n_prompt:,} ({times(slower)}){why}."
            )
    if lengths := sorted(set(rows.n_prompt) - set(firm.n_prompt)):
        some = (
            join(lengths) if len(lengths) <= 5 else f"{len(lengths)} lengths up to {lengths[-1]:,}"
        )
        sentences.append(f"No findings from the runs of {some} prompt tokens: they were disturbed.")
    return laws, sentences


def far_apart(rows: pd.DataFrame) -> list[str]:
    """A sentence on the length whose undisturbed runs differ the most, if that is much."""
    ratios = (
        (row[f"{name}_max"] / row[f"{name}_min"], row["n_prompt"], word)
        for row in table.firm(rows).query("disturbed == 0").to_dict("records")
        for name, word in (("prefill_s", "prefill time"), ("tpot_ms", "TPOT"))
    )
    ratio, n_prompt, word = max((one for one in ratios if one[0] > WIDE_RUNS), default=(1, 0, ""))
    told = f"With {n_prompt:,} prompt tokens the largest {word} is {times(ratio)} the smallest"
    return [f"{told}, and the lab recorded no disturbance. Measure again."] if word else []


def summary_rows(records: Sequence[Any]) -> dict[str, list[Any]]:
    """The summary for JSON."""
    return {"rows": table.summary(table.runs(records)).to_dict("records")}


def question(labels: Sequence[str]) -> str:
    """The question that a report on these setups answers."""
    if len(labels) == 1:
        name, _, where = labels[0].partition(", ")
        return f"How fast is {name}{f' on {where}' if where else ''}?"
    if len(labels) > 3:
        return f"Which of these {len(labels)} is fastest?"
    return f"Which is faster: {', '.join(labels[:-1])} or {labels[-1]}?"


def doubts(records: Sequence[Record]) -> str:
    """A sentence on what disturbed these runs, and whether they are reliable; "" if nothing disturbed them."""
    words = "; ".join(disturbances.sentences(records))
    return f"{words}.{' Unreliable.' * disturbances.is_doubtful(records)}" if words else ""


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
    n = sum(record.run.imported_from is not None for record in records)
    what = (
        f"{plural(n, 'result')} {'was' if n == 1 else 'were'}"
        if n < len(records)
        else "All results were"
    )
    return [
        f"{what} imported: measured by someone else with another tool, as times of whole tests. The lab did not "
        "watch these runs."
    ] * bool(n)


def unreliable(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each session with unreliable figures."""
    doubtful = {
        case[0] for case, alike in _repeats(records).items() if disturbances.is_doubtful(alike)
    }
    return [
        own
        for session, own in grouped(records, lambda one: one.session).items()
        if session in doubtful
    ]


def distrust(records: Sequence[Record]) -> list[str]:
    """A sentence for each session with unreliable figures."""
    sentences = []
    n_sessions = len({one.session for one in records})
    for own in unreliable(records):
        which = f" (session {own[0].session})" * (n_sessions > 1)
        when = "while no other program runs"
        if any(disturbances.STEAL in disturbances.disturbances(one) for one in own):
            where = f"the host of {machine.label(own[0].machine)}"
            which = f", because {where} gave its cores to other virtual machines"
            when = "there, at another time"
        sentences.append(
            f"Unreliable ({NOT_TO_BE_TRUSTED}): at least half of these runs were disturbed{which}. "
            f"Measure again {when}."
        )
    return sentences


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed runs of the engine, and whether their figures are to be trusted."""
    return [*imported(records), *disturbed(records), *distrust(records)]


def _repeats(records: Sequence[Record]) -> dict[tuple[str, str | None, str], list[Record]]:
    """Timed runs that went well, by session, variant and what they did."""
    timed = [record for record in records if record.run.is_timed]
    return grouped(
        timed, lambda record: (record.session, record.run.variant, experiments.run_name(record.run))
    )


def still_wide(records: Sequence[Record], plan: Plan) -> list[str]:
    """With --until: a sentence on the figures whose intervals are still too wide."""
    runs = [record.run for record in records if record.run.is_timed]
    if plan.until is None or not runs:
        return []
    within = percent(plan.until.share)
    wide = wide_figures(runs, plan.until.share)
    names = [f"{name} at {n:,}{f' ({percent(width)})' if width else ''}" for n, name, width in wide]
    all_within = f"All intervals are within {within} of their medians."
    return [f"Intervals still wider than {within}: {', '.join(names)}." if wide else all_within]


def failures(records: Sequence[Record]) -> list[str]:
    """One line per failed run, with its setup if there are several."""
    failed = {number: one for number, one in enumerate(records) if one.run.status != OK}
    setups = table.setups(table.runs(records)) if failed else []
    labels = {run: f"{label}: " * (len(setups) > 1) for label, rows in setups for run in rows.run}
    named = ((labels[number], one.run) for number, one in failed.items())
    return [
        f"{label}{experiments.run_name(run)}, repeat {run.repeat + 1}: {run.error}"
        for label, run in named
    ]


def finished(record: Record) -> str:
    """A line on a finished run."""
    run = phases.by_length(record.run)[-1]
    if not record.run.n_prompt:  # a part of a session that could not be measured
        return f"{record.run.part}: {record.run.status}"
    ttft = phases.ttft_ns(run)
    tpot = phases.tpot_ns(run)
    words = [f"TTFT {digits(ttft / 1e9)} s"] if ttft else [run.status]
    words += [f"TPOT {digits(tpot / 1e6)} ms"] if tpot else []
    if not run.is_plain:
        own = experiments.figures(run).items()
        words = [
            f"{figure_names()[name]} {digits(value)} {name.rpartition('_')[2]}"
            for name, value in own
        ]
    variant = f"{run.variant}, " if run.variant else ""
    mark = " (disturbed)" if disturbances.disturbances(record) else ""
    return f"{variant}{experiments.run_name(record.run)}, repeat {run.repeat + 1}: {', '.join(words or [run.status])}{mark}"


KINDS = (Kind("runs", lambda one: is_plain(one) and one.run.is_plain, chapters),)
