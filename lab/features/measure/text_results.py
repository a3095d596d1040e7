"""Results of runs as sections: the answer, a table of medians, findings, pictures, warnings, and their command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.core import phases, shown, stats
from lab.core.lists import grouped, join_and, plural
from lab.core.record import OK, Record
from lab.core.shown import NOT_TO_BE_TRUSTED
from lab.features.compare.comparison import FIGURE_NAMES
from lab.features.measure import plot_runs, sweep_laws
from lab.runner import as_options, machine
from lab.runner.cases import Plan
from lab.runner.plan import join
from lab.runner.session import wide_figures
from lab.show import disturbances, table
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

MOST_ROWS = 8
"""Lengths of a sweep that a terminal shows; --details shows all."""

MOST_NAMED = 5
"""Lengths that a sentence lists."""

WIDE_RANGES = 2.0
"""Of two lengths the products of their runs' ranges (largest over smallest) above which their growth is not told."""

MEANINGS = (
    "TTFT: time to first token. TPOT: time per token after the first. E2E: from the start of prefill to the last token."
)


def sections(records: Sequence[Record], details: bool = True, is_page: bool = False) -> list[Section]:
    """A section for each setup and number of generated tokens: medians with intervals or ranges.

    Without `details` TTFT is left out, which is prefill and one sampling, and a long sweep shows MOST_ROWS lengths.
    """
    made, rows = [], table.runs(records)
    if len(rows):
        good = (rows.status == OK) & ~rows.warmup & rows.lever.isna()
        rows = rows[good].sort_values(["n_prompt", "n_gen"], kind="stable")
    for label, of_setup in table.setups(rows) if len(rows) else []:
        for n_gen, part in table.summary(of_setup).groupby("n_gen"):
            own, notes = of_setup[of_setup.n_gen == n_gen], [MEANINGS] if part.tpot_ms.notna().any() else []
            measured = {n: [records[i] for i in alike.run] for n, alike in own.groupby("n_prompt")}
            of_part, is_sweep = [records[i] for i in sorted(set(own.run))], bool(part.sweep_every.notna().all())
            names = ["prefill_s", "prefill_tps", "ttft_s", "tpot_ms", "decode_tps", "e2e_s"]
            if not details and part.prefill_s.notna().all():
                names.remove("ttft_s")
            names += ["decode_ms"] if part.tpot_ms.isna().all() else []  # imported: no single tokens
            names += ["j_per_token"] if "j_per_token" in part else []
            if "energy_of" in part:
                whose = " or ".join(part.energy_of.dropna().unique())
                notes.insert(0, f"J per token: energy of the whole run ({whose}, all that ran on it) over its tokens.")
            columns: list[tuple[str, Any]] = [("prompt\ntokens", lambda row: f"{row['n_prompt']:,}")]
            if part.repeats.nunique() > 1 or any(map(shown.mark, part.doubts)):
                columns.append(("runs", lambda row: f"{row['repeats']}{shown.mark(row['doubts'])}"))
            columns += [(HEADINGS[name], partial(figure, name=name)) for name in names]
            style = "" if is_sweep else "bar"  # a sweep generates few tokens
            columns.append(
                (HEADINGS["prefill_share"], lambda row, style=style: Cell(figure(row, "prefill_share"), style))
            )
            most, beyond = of_part[0].model.n_ctx_train, beyond_training(of_part)
            too_long = list[str]()
            if beyond:
                too_long.append(
                    f"{join_and([f'{n:,}' for n in beyond])} prompt tokens: prompt and answer exceed the model's "
                    f"training length of {most:,}: timing is valid, the text is not."
                )
            laws, found = findings(part)
            lines, n = part.to_dict("records"), len(part)
            n_tokens, per = int(n_gen), "at each length" if is_sweep else "per run"
            what = f"{plural(n_tokens, 'token')} generated {per}"
            if part.ttft_s.isna().all():  # imported: a test of prefill, or of decode steps without the prompt's
                what = f"{plural(n_tokens - 1, 'token')} decoded {per}" if n_tokens > 1 else "only prefill"
            about = f"{what}; {below(part, 'run')}"
            if is_sweep and not details and n > MOST_ROWS:
                chosen = sorted({round((i + 1) * n / MOST_ROWS) - 1 for i in range(MOST_ROWS)})
                lines = [lines[i] for i in chosen]
                about = f"{MOST_ROWS} of {n} lengths, {about}"
            by_doubt: dict[str, list[str]] = {}
            for row in [] if is_sweep else lines:
                by_doubt.setdefault(doubts(measured[row["n_prompt"]]), []).append(f"{row['n_prompt']:,}")
            warned = [f"{join_and(names)} prompt tokens: {words}" for words, names in by_doubt.items() if words]
            made.append(
                Section(
                    label,
                    about,
                    answer="" if is_page else answer(part, beyond),
                    words=laws if is_sweep else [],
                    **tabled(columns, lines),
                    notes=notes,
                    warnings=[*warned, *filter(None, [doubts(of_part)] * is_sweep), *disturbances.drift(of_part)],
                    sentences=[*found, *too_long, *([] if is_sweep else laws)],
                )
            )
    return made


def beyond_training(records: Sequence[Record]) -> list[int]:
    """The prompt lengths of one setup that exceed the model's training length together with the answer."""
    lengths = {one.run.n_prompt: (one.run.n_gen, one.model.n_ctx_train) for one in records}
    return [n for n, (n_gen, most) in lengths.items() if most is not None and n + n_gen > most]


def figure(row: Mapping[str, Any], name: str) -> str:
    """A figure of a row of the summary, and below it its interval, or its range if runs are too few for one."""
    one = table.shown_in(row, name, 100 if name == "prefill_share" else 1)
    return "\n".join(filter(None, [digits(one.value), ends(one)]))


def below(rows: pd.DataFrame, noun: str) -> str:
    """What a summary shows: medians with intervals or, of few runs (or requests: the noun), with ranges."""
    fewest, least, most = stats.fewest_for_interval(), int(rows.repeats.min()), int(rows.repeats.max())
    n = str(most) if least == most else f"{least} to {most}"
    if most == 1:
        return f"1 {noun} each, so the spread is unknown"
    if least >= fewest:
        return f"medians of {n} {noun}s; below each the 95 % interval"
    if most < fewest:
        return f"medians of {n} {noun}s; below each their range"
    return f"medians of {n} {noun}s; below each the 95 % interval ({fewest} or more {noun}s) or the range"


def answer(rows: pd.DataFrame, beyond: Sequence[int] = (), label: str = "") -> str:
    """What a whole request takes: of a summary of one setup and one n_gen, its longest reliable one.

    Lengths `beyond` the model's training length count only if there are no others.
    """
    firm = table.firm(rows)
    firm = firm if len(firm) else rows
    usual = firm[~firm.n_prompt.isin(beyond)]
    row = (usual if len(usual) else firm).iloc[-1]
    some = " (some of its runs were disturbed)" if shown.PARTLY in row.doubts else ""
    sure = some if shown.is_firm(row.doubts) else " (unreliable: its runs were disturbed)"
    each_ms = row.tpot_ms if row.tpot_ms > 0 else row.decode_ms  # imported results have decode compute only
    prompt, rate = f"{row.n_prompt:,} tokens", f"{digits(1e3 / each_ms)} tokens/s" if each_ms > 0 else ""
    if row.sweep_every > 0 or not row.prefill_share > 0 or not rate:  # single phases
        words = [f"prefill of {prompt} takes {seconds(row.prefill_s)}"] if row.prefill_s > 0 else []
        after = "it" if words else prompt
        words += [f"each token after {after} takes {seconds(each_ms / 1e3)} ({rate})"] if rate else []
        text = ", ".join(words)
    else:
        share = 100 * row.prefill_s / row.e2e_s
        text = f"a request of {prompt} with {row.n_gen:,} back takes {seconds(row.e2e_s)}: {share:.0f} "
        text += f"% prefill at {digits(row.prefill_tps)} tokens/s, the rest decode at {rate}"
    return f"{label}: {text}{sure}." if label else f"{text[:1].upper()}{text[1:]}{sure}."


def findings(rows: pd.DataFrame) -> tuple[list[str], list[str]]:
    """The fitted laws, and sentences on a summary of one setup and one n_gen. Unreliable rows are left out."""
    firm, sentences = table.firm(rows), []
    laws = [str(law) for law in (sweep_laws.prefill_law(firm), sweep_laws.decode_law(firm)) if law]
    known = firm[firm.prefill_share.notna()].sort_values("n_prompt")
    if len(known) > 1:
        short, long = known.iloc[0], known.iloc[-1]
        far = known[known.n_prompt <= long.n_prompt / 2]  # a step of a few percent shows nothing
        before = far.iloc[-1] if len(far) else known.iloc[-2]
        n_times, took = long.n_prompt / before.n_prompt, long.prefill_s / before.prefill_s
        growth = "about in proportion"
        widest = (long.prefill_s_max / long.prefill_s_min) * (before.prefill_s_max / before.prefill_s_min)
        if widest > WIDE_RANGES:
            growth = "the runs vary too much to say if that is in proportion"
        if _apart(long, before, "prefill_s", long.n_prompt, before.n_prompt) and not 0.9 <= took / n_times <= 1.1:
            more = "each token attends to more earlier ones"
            why = more if took > n_times else "short prompts underuse the hardware"
            growth = f"{times(took / n_times)} per token, because {why}"
        sentences.append(
            f"Prefill of {long.n_prompt:,} tokens took {times(took)} as long as for {before.n_prompt:,} "
            f"({times(n_times)} the tokens): {growth}."
        )
        if long.tpot_ms > 0 and short.tpot_ms > 0:  # not NaN: there was decoding
            slower = long.tpot_ms / short.tpot_ms
            is_apart = _apart(long, short, "tpot_ms", 1, 1)
            is_clear, overlap = is_apart and slower > 1.1, not is_apart and min(long.repeats, short.repeats) > 1
            sentences.append(
                f"Decode took {digits(short.tpot_ms)} ms per token after {short.n_prompt:,} prompt tokens and "
                f"{digits(long.tpot_ms)} ms after {long.n_prompt:,} ({times(slower)})"
                f"{', because attention works through the whole KV cache' if is_clear else ''}"
                f"{'; their ranges overlap, so it may be chance' if overlap else ''}."
            )
    if lengths := sorted(set(rows.n_prompt) - set(firm.n_prompt)):
        some = join(lengths) if len(lengths) <= MOST_NAMED else f"{len(lengths)} lengths up to {lengths[-1]:,}"
        sentences.append(f"No findings from the runs of {some} prompt tokens: they were disturbed.")
    return laws, sentences


def _apart(one: pd.Series, other: pd.Series, name: str, per_one: float, per_other: float) -> bool:
    """Whether the ranges of a figure (each over its own unit) do not overlap. A single run has no range."""
    if min(one.repeats, other.repeats) < 2:
        return False
    low, high = one[f"{name}_min"] / per_one, one[f"{name}_max"] / per_one
    return bool(low > other[f"{name}_max"] / per_other or high < other[f"{name}_min"] / per_other)


def doubts(records: Sequence[Record]) -> str:
    """A sentence on what disturbed these runs, and whether they are reliable; "" if nothing disturbed them."""
    words = "; ".join(disturbances.sentences(records))
    doubt = " Unreliable." if disturbances.is_doubtful(records) else ""
    return f"{words}.{doubt}" if words else ""


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


def unreliable(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each session with unreliable figures."""
    doubtful = {case[0] for case, alike in _repeats(records).items() if disturbances.is_doubtful(alike)}
    return [own for session, own in grouped(records, lambda one: one.session).items() if session in doubtful]


def distrust(records: Sequence[Record]) -> list[str]:
    """A sentence for each session with unreliable figures."""
    sentences, n_sessions = [], len({one.session for one in records})
    for own in unreliable(records):
        which = f" (session {own[0].session})" * (n_sessions > 1)
        where, when = "", "while no other program runs"
        if any(disturbances.STEAL in disturbances.disturbances(one) for one in own):
            where = f", because the host of {machine.label(own[0].machine)} gave its cores to other virtual machines"
            when = "there, at another time"
        sentences.append(
            f"Unreliable ({NOT_TO_BE_TRUSTED}): at least half of these runs were disturbed{which}{where}. "
            f"Measure again {when}."
        )
    return sentences


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed runs of the engine, and whether their figures are to be trusted."""
    return [*imported(records), *disturbed(records), *distrust(records)]


def _repeats(records: Sequence[Record]) -> dict[tuple[str, str | None, str], list[Record]]:
    """Timed runs that went well, by session, variant and what they did."""
    timed = [record for record in records if record.run.is_timed]
    return grouped(timed, lambda record: (record.session, record.run.variant, record.run.name))


def still_wide(records: Sequence[Record], plan: Plan) -> list[str]:
    """With --until: a sentence on the figures whose intervals are still too wide."""
    runs = [record.run for record in records if record.run.is_timed]
    if plan.until is None or not runs:
        return []
    within, wide = percent(plan.until.share), wide_figures(runs, plan.until.share)
    if not wide:
        return [f"All intervals are within {within} of their medians."]
    names = [f"{name} at {n:,}{f' ({percent(width)})' if width else ''}" for n, name, width in wide]
    return [f"Intervals still wider than {within}: {', '.join(names)}."]


def failures(records: Sequence[Record]) -> list[str]:
    """One line per failed run, with its setup if there are several."""
    if all(record.run.status == OK for record in records):
        return []
    setups = table.setups(table.runs(records))
    prefixes = {run: f"{label}: " * (len(setups) > 1) for label, rows in setups for run in rows.run}
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


def finished(record: Record) -> str:
    """A line on a finished run."""
    run = phases.by_length(record.run)[-1]
    ttft, tpot = phases.ttft_ns(run), phases.tpot_ns(run)
    words = [f"TTFT {digits(ttft / 1e9)} s"] if ttft else [run.status]
    words += [f"TPOT {digits(tpot / 1e6)} ms"] if tpot else []
    if run.lever is not None:
        own = phases.figures(run).items()
        words = [f"{FIGURE_NAMES[name]} {digits(value)} {name.rpartition('_')[2]}" for name, value in own]
    if not record.run.n_prompt:  # a part of a session that could not be measured
        return f"{record.run.part}: {record.run.status}"
    variant = f"{run.variant}, " if run.variant else ""
    mark = " (disturbed)" if disturbances.disturbances(record) else ""
    return f"{variant}{record.run.name}, repeat {run.repeat + 1}: {', '.join(words or [run.status])}{mark}"


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
    """Plain runs, and sweeps."""
    made = []
    for name, title, is_sweep in (("runs", "Runs", False), ("sweeps", "Sweeps", True)):
        own = [one for one in records if one.run.is_timed and (one.run.every is not None) == is_sweep]
        if not own:
            continue
        rows = table.setups(table.runs(own))
        many = len(rows) > 1
        sizes = {"ab": WIDE, "sweep": WIDE}
        drawn = plot_runs.drawings(own, context.by_session)
        hidden = (*(TOGETHER if context.together else ()), *(["shares"] if context.is_page else []))  # a page has bars
        pictures = {one: one.partition("-")[0] for one in drawn if one not in hidden}
        made.append(
            Section(
                title,
                plural(len(rows), "setup") if many else "",
                name=name,
                question=question([label for label, _ in rows]),
                words=[OF_RUNS],
                sentences=[
                    answer(same, beyond_training([own[i] for i in set(part.run)]), label if many else "")
                    for label, part in rows
                    for _, same in table.summary(part).groupby("n_gen")
                ],
                parts=sections(own, context.details or context.is_page, context.is_page),
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
