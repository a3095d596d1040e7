"""The speed-up over plain decoding for each text and draft length, in a table, sentences and a
picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lab.app.experiment import ExperimentTable
from lab.app.experiment_tables import (
    MeasuredPoint,
    as_rows,
    cell,
    first_difference,
    plot_series,
    prediction_errors,
)
from lab.core import drafts, stats
from lab.core.drafts import LOOKUP, Chain, StepTimes
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.features.speculate.curve import curve_case
from lab.features.speculate.setup import figures, speculation_of
from lab.roofline.step_prediction import StepPrediction
from lab.runner.disturbances import disturbances
from lab.show import canvas
from lab.show.cells import PROMPT_TOKENS, Cell, Column, stacked
from lab.show.wording import UNKNOWN, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PROMPT = ["text", "n_prompt", "n_gen"]
DRAFTED = [*PROMPT, "draft"]
CASE = [*DRAFTED, "n_draft"]
BLOCK = ["session", "repeat", "engine"]  # compared runs had the same process
MOST_PANELS = 8


def all_runs(records: Sequence[Record]) -> pd.DataFrame:
    """A row per run that generated a text: CASE, BLOCK, `record`, `tpot_s`."""
    import pandas as pd

    rows = []
    for record in records:
        run = record.run
        speculation = speculation_of(run)
        tpot_ms = figures(run).get("tpot_ms")
        if speculation is None or tpot_ms is None:
            continue
        prompt = (speculation.text, run.n_prompt, run.n_gen)
        draft = (speculation.draft or "", speculation.n_draft)
        block = (record.session, run.repeat, run.engine)
        rows.append((*prompt, *draft, *block, record, tpot_ms / 1e3))
    return pd.DataFrame(rows, columns=[*CASE, *BLOCK, "record", "tpot_s"])


def runs_with_drafts(records: Sequence[Record]) -> pd.DataFrame:
    """A row per run with drafts, beside plain decoding in the same block: `plain`, `plain_s`.

    `parted_at` is the first token at which their texts differ.
    """
    runs = all_runs(records)
    pair = [*PROMPT, *BLOCK]
    plain = runs[runs.n_draft == 0].drop_duplicates(pair, keep="last")
    plain = plain.drop(columns=["draft", "n_draft"])
    plain = plain.rename(columns={"record": "plain", "tpot_s": "plain_s"})
    drafted = runs[runs.n_draft > 0].merge(plain, "left", pair)
    parted_at = []
    for record, plain_record in zip(drafted.record, drafted.plain, strict=True):
        difference = None
        if isinstance(plain_record, Record):
            difference = first_difference(record.run.token_ids, plain_record.run.token_ids)
        parted_at.append(difference)
    return drafted.assign(parted_at=parted_at)


class SpeedUpRow(NamedTuple):
    """The medians of a text and a draft length."""

    text: str
    n_prompt: int
    n_gen: int
    draft: str
    n_draft: int
    n_runs: int
    n_pairs: int
    right: float | None
    length: float | None
    tpot_s: float
    plain_tpot_s: float | None
    speed_up: float | None
    low: float | None
    high: float | None
    n_parted: int
    parted_at: float | None
    bottleneck: str | None
    expected: float | None


def rows(
    records: Sequence[Record], prediction: StepPrediction | None = None
) -> list[SpeedUpRow]:
    """A row for each text and draft length of one setup: medians over blocks.

    `right` is the share of drafted tokens that were accepted, `length` the tokens per step with a
    draft. `speed_up` is the time of plain decoding over that with drafts, block by block
    (`n_pairs`), with its 95 % interval (None for fewer than 6 blocks). `expected` is the speed-up
    predicted from the curve and from the runs with the longest draft. `bottleneck` is known where
    the speed-up is below 1. `n_parted` runs chose another token than plain decoding, the first of
    them at `parted_at`.
    """
    import pandas as pd

    table = []
    curves = grouped([record.run for record in records], curve_case)
    for case, runs in runs_with_drafts(records).groupby(DRAFTED):
        text, n_prompt, n_gen, draft = case
        times = drafts.step_times(curves.get((n_prompt, n_gen, draft), []))
        longest = runs[runs.n_draft == runs.n_draft.max()]
        for n_draft, runs_of_length in runs.groupby("n_draft"):
            row = {"text": text, "n_prompt": n_prompt, "n_gen": n_gen, "draft": draft}
            row["n_draft"] = n_draft
            row |= measured_figures(runs_of_length)
            row["bottleneck"] = None
            if row["speed_up"] < 1:
                row["bottleneck"] = bottleneck(runs_of_length, n_draft, times)
            row["expected"] = expected_speed_up(longest, n_draft, draft == LOOKUP, times)
            table.append(row)
    return as_rows(pd.DataFrame(table), SpeedUpRow)


def chains_with_drafts(runs: pd.DataFrame) -> list[Chain]:
    """The numbers of drafted and of accepted tokens of every step with a draft."""
    chains: list[Chain] = []
    for record in runs.record:
        for n_drafted, n_accepted in drafts.checked(record.run):
            if n_drafted:
                chains.append((n_drafted, n_accepted))
    return chains


def measured_figures(runs: pd.DataFrame) -> dict[str, object]:
    """The figures of the runs of a text and a draft length."""
    pairs = runs.dropna(subset="plain_s")
    ratio = None
    if len(pairs):
        ratio = stats.paired_ratio(list(pairs.tpot_s), list(pairs.plain_s))
    right = None
    length = None
    chains = chains_with_drafts(runs)
    if chains:
        n_drafted, n_accepted = zip(*chains, strict=True)
        right = sum(n_accepted) / sum(n_drafted)
        length = 1 + statistics.fmean(n_accepted)
    return {
        "n_runs": len(runs),
        "n_pairs": len(pairs),
        "right": right,
        "length": length,
        "tpot_s": runs.tpot_s.median(),
        "plain_tpot_s": pairs.plain_s.median(),
        "speed_up": (pairs.plain_s / pairs.tpot_s).median(),
        "low": None if ratio is None else ratio.low,
        "high": None if ratio is None else ratio.high,
        "n_parted": runs.parted_at.count(),
        "parted_at": runs.parted_at.min(),
    }


def expected_speed_up(
    longest: pd.DataFrame, n_draft: int, is_lookup: bool, times: StepTimes | None
) -> float:
    """The speed-up that the acceptance in runs with the longest drafts predicts; NaN if unknown."""
    if times is None:
        return math.nan
    speed_ups = []
    for record in longest.record:
        steps = drafts.in_steps_of(drafts.checked(record.run), n_draft, is_lookup)
        speed_up = drafts.speed_up(steps, times)
        if speed_up is not None:
            speed_ups.append(speed_up)
    return statistics.median(speed_ups) if speed_ups else math.nan


def bottleneck(runs: pd.DataFrame, n_draft: int, times: StepTimes | None) -> str | None:
    """What would gain most if it were ideal: verifying (v = 1), drafting (free) or acceptance (all
    accepted). None without the times of steps, or without drafts."""
    n_positions = n_draft + 1
    chains = chains_with_drafts(runs)
    if times is None or n_positions not in times.target or not chains:
        return None
    one_s = times.target[1]
    v = digits(times.target[n_positions] / one_s)
    all_accepted = digits(drafts.speed_up([(n_draft, n_draft)], times) or 0.0)
    verification = f"verification; a step of {n_positions} positions takes {v}x a step of one"
    acceptance = f"acceptance; with every token accepted the speed-up would be {all_accepted}x"
    free_verifying = StepTimes(dict.fromkeys(times.target, one_s), times.draft)
    accepted_chains = [(n_drafted, n_drafted) for n_drafted, _ in chains]
    ideals = {
        verification: drafts.speed_up(chains, free_verifying),
        acceptance: drafts.speed_up(accepted_chains, times),
    }
    if times.draft:
        c = digits(times.draft[1] / one_s)
        drafting = f"drafting; a drafted token takes {c}x a step of the model"
        ideals[drafting] = drafts.speed_up(chains, StepTimes(times.target, {}))
    return max(ideals, key=lambda part: ideals[part] or 0.0)


def conclude(rows: Sequence[SpeedUpRow], records: Sequence[Record] = ()) -> list[str]:
    """For one setup: the best draft length of each text, whether the text stayed the same, and the
    errors of predictions."""
    sentences: list[str] = []
    pairs: list[tuple[float | None, float | None]] = []
    by_text = grouped(rows, lambda row: (row.text, row.n_prompt, row.n_gen, row.draft))
    for lengths in by_text.values():
        measured = [row for row in lengths if row.speed_up is not None]
        if measured:
            sentences.append(verdict(best_of(measured)))
            for row in lengths[:-1]:
                pairs.append((row.expected, row.speed_up))
    if rows:
        sentences.append(same_text(rows))
    note = " (without the longest draft length, from whose runs they are predicted)"
    return sentences + prediction_errors(pairs, "speed-ups", note)


def best_of(rows: Sequence[SpeedUpRow]) -> SpeedUpRow:
    """The row with the largest speed-up."""
    return max(rows, key=lambda row: row.speed_up or 0.0)


def verdict(row: SpeedUpRow) -> str:
    """Whether drafting pays at the best length, by how much, and what limits it."""
    interval = "too few blocks for an interval"
    if row.low is not None and row.high is not None:
        interval = f"95 % interval {digits(row.low)}-{digits(row.high)}"
    pays = "no clear gain"
    if row.low is not None and row.low > 1:
        pays = "pays"
    elif row.high is not None and row.high < 1:
        pays = "does not pay"
    drafts = plural(row.n_draft, "drafted token")
    gain = f"{digits(row.speed_up or 0.0)}x plain decoding with {drafts} per step ({interval})"
    if row.right is not None:
        gain = f"{gain}, {100 * row.right:.0f} % accepted"
    sentence = f"{row.text} with {row.draft}: {pays}, {gain}."
    if row.bottleneck:
        return f"{sentence} Bottleneck: {row.bottleneck}."
    return sentence


def same_text(rows: Sequence[SpeedUpRow]) -> str:
    """Whether the tokens are those of plain decoding."""
    n_pairs = sum(row.n_pairs for row in rows)
    n_parted = sum(row.n_parted for row in rows)
    if n_pairs == 0:
        return "Without a plain run the text cannot be compared with plain decoding."
    if n_parted == 0 and n_pairs == 1:
        return "In 1 run the tokens match plain decoding."
    if n_parted == 0:
        return f"In all {plural(n_pairs, 'run')} the tokens match plain decoding."
    first = 1 + int(min(row.parted_at for row in rows if row.parted_at is not None))
    return (
        f"In {n_parted} of {n_pairs} runs the text differs from plain decoding, from token {first} "
        "at the earliest: kernels for several positions round differently."
    )


def finding(rows: Sequence[SpeedUpRow]) -> str | None:
    """The largest speed-up, and where it was measured; None without plain runs."""
    measured = [row for row in rows if row.speed_up is not None]
    if not measured:
        return None
    best = best_of(measured)
    interval = ""
    if best.low is not None and best.high is not None:
        interval = f" ({digits(best.low)}-{digits(best.high)})"
    return (
        f"Speculative decoding: at best {digits(best.speed_up or 0.0)}x plain decoding{interval}, "
        f"of {best.text} with {plural(best.n_draft, 'token')} drafted by {best.draft}"
    )


def draw(
    rows: Sequence[SpeedUpRow], records: Sequence[Record], title: str, figure: Figure
) -> None:
    """The speed-up over the draft length, a panel for each text."""
    runs = runs_with_drafts(records).dropna(subset="plain_s")
    by_prompt = grouped(rows, lambda row: (row.text, row.n_prompt, row.n_gen))
    panels = list(by_prompt.items())[:MOST_PANELS]
    axes = canvas.grid(figure, len(panels), min(len(panels), 4), sharex=True, sharey=True)
    drafts = list(dict.fromkeys(row.draft for row in rows))
    styles = dict(zip(drafts, canvas.styles(len(drafts)), strict=True))
    for ax, (prompt, rows_of_panel) in zip(axes, panels, strict=True):
        for draft, lengths in grouped(rows_of_panel, lambda row: row.draft).items():
            runs_of_draft = runs[
                (runs[PROMPT] == list(prompt)).all(axis=1) & (runs.draft == draft)
            ]
            draw_draft(ax, draft, styles[draft], lengths, runs_of_draft)
        ax.axhline(1, color=canvas.GUIDE, ls=":", lw=1.2, label="plain decoding")
        ax.set_xticks(sorted({row.n_draft for row in rows}))
        ax.margins(x=0.1)
        text, n_prompt, n_gen = prompt
        ax.set_title(
            f"{text}, {n_prompt:,} + {plural(n_gen, 'token')}", fontsize=canvas.PANEL_SIZE
        )
        ax.set_xlabel("drafted tokens per step")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("speed-up over plain decoding")
    canvas.finish(axes, title, is_apart=True)


def draw_draft(
    ax: Axes, draft: str, style: canvas.Style, rows: Sequence[SpeedUpRow], runs: pd.DataFrame
) -> None:
    """Draw the speed-ups with drafts of one kind: of each block, their medians, and predicted."""
    measured = []
    for run in runs.itertuples():
        is_disturbed = any(map(disturbances, [run.record, run.plain]))
        measured.append(MeasuredPoint(run.n_draft, run.plain_s / run.tpot_s, is_disturbed))
    medians = [(row.n_draft, row.speed_up) for row in rows if row.speed_up is not None]
    predicted = [(row.n_draft, row.expected) for row in rows if row.expected is not None]
    plot_series(ax, f"drafted by {draft}", style, measured, medians, predicted)


def accepted_cell(row: SpeedUpRow) -> str:
    return UNKNOWN if row.right is None else f"{100 * row.right:.0f}"


def speed_up_cell(row: SpeedUpRow) -> Cell | str:
    if row.low is None or row.high is None:
        return cell(row.speed_up)
    return stacked(cell(row.speed_up), f"{digits(row.low)}-{digits(row.high)}")


TABLE: ExperimentTable[SpeedUpRow] = ExperimentTable(
    name="speculate",
    question="Does it pay to draft tokens, and how many?",
    title="tokens drafted and verified together; medians over blocks, "
    "the speed-up's 95 % interval below",
    topic="Speculative decoding",
    finding=finding,
    caption="Speed-up over plain decoding, over the number of drafted tokens per step; a panel for "
    "each text. Points are blocks, the line is the median, dashes are predictions.",
    columns=(
        Column("text", lambda row: row.text),
        PROMPT_TOKENS,
        Column("draft\nby", lambda row: row.draft),
        Column("drafted\na step", lambda row: f"{row.n_draft}"),
        Column("accepted\n%", accepted_cell),
        Column("tokens\na step", lambda row: cell(row.length)),
        Column("TPOT\nms", lambda row: cell(row.tpot_s, 1e3)),
        Column("plain\nms", lambda row: cell(row.plain_tpot_s, 1e3)),
        Column("speed-up", speed_up_cell),
        Column("predicted", lambda row: cell(row.expected)),
    ),
    rows=rows,
    conclude=conclude,
    draw=draw,
    is_by_ceilings=False,
)
