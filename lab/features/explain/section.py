"""The section of explained runs: a table of phases with their limits and rates, sentences, advice,
and the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.core import shown
from lab.core.record import Ceilings, Record
from lab.features.explain import advice as advising, budget, sentences
from lab.features.explain.advice import Advice
from lab.features.explain.picture import plot_roofline
from lab.roofline import kernel_rates, probing
from lab.roofline.explanation import ExplainedRow, explain
from lab.show.cells import PROMPT_TOKENS, TEXT, Column
from lab.show.section import UNKNOWN, Columns, Picture, Section, tabled
from lab.show.text_ceilings import doubt_sentences
from lab.show.wording import digits

LEGEND = (
    "ms: the whole prompt (prefill) or one token (decode), without choosing the next token; % of "
    "ceiling: 100 is as fast as this quantization's kernels alone, others may be faster; output: "
    "the last layer; rest: time beyond the kernels alone; GFLOP/s, GB/s: operations and bytes that "
    "the model needs at least / measured time"
)
CAPTION = (
    "Roofline: the rate of each phase (numbers: prompt tokens), and left of it the ceiling of its "
    "kernels. The black line is the machine's best: memory limits on its slope, arithmetic on its "
    "flat part."
)
PICTURE_SIZE = (5, 4.8)


def explained(
    label: str, records: Sequence[Record], ceilings: Ceilings, has_advice: bool = True
) -> Section:
    """Runs of one setup: what limits them, each phase's time, limit and rates, and advice."""
    rows = explain(records, ceilings)
    first = records[0]
    roof = kernel_rates.roof(ceilings, probing.layers_of(first))
    changes: list[Advice] = []
    experiments: list[Advice] = []
    answer = ""
    if has_advice:
        changes = advising.changes(rows, first, ceilings)
        experiments = advising.experiments(rows, records, ceilings)
        answer = sentences.answer(rows, first.model, [*changes, *experiments])
    parts = [part for part in [budget.section(rows, first)] if part]
    document: dict[str, Any] = {
        "setup": label,
        "roof": roof._asdict(),
        "levers": [advice.figures for advice in changes],
        "experiments": [advice.figures for advice in experiments],
        "ceilings_measured_at": ceilings.measured_at,
        "warnings": doubt_sentences(ceilings),
        "rows": rows.to_dict("records"),
    }
    roofline = Picture(
        "roofline",
        CAPTION,
        lambda figure: plot_roofline(rows, roof, label, figure.subplots()),
        PICTURE_SIZE,
    )
    return Section(
        label,
        answer=answer,
        notes=[LEGEND],
        **tabled(COLUMNS, list(rows.itertuples()), keep_all=True),
        warnings=doubt_sentences(ceilings),
        sentences=[
            *map(advising.sentence, [*changes, *experiments]),
            *sentences.verdicts(rows, first.settings),
            *sentences.by_device(rows),
            sentences.on_the_roof(roof, ceilings),
        ],
        pictures=[roofline],
        parts=parts,
        data=lambda: document,
    )


def _measured_ms(row: ExplainedRow) -> str:
    return f"{digits(1e3 * row.measured_s)}{shown.mark(row.doubts)}"


def _limit(row: ExplainedRow) -> str:
    return row.limit if shown.is_firm(row.doubts) else "not sure"


def _percent_of_ceiling(row: ExplainedRow) -> str:
    return ">100" if shown.ABOVE in row.doubts else f"{100 * row.of_ceiling:.0f}"


def _shares(row: ExplainedRow) -> str:
    """The parts of a phase's time in percent; a sentence has those of several devices."""
    if row.is_split or shown.ABOVE in row.doubts:
        return UNKNOWN
    beyond_s = max(0.0, row.measured_s - row.least_s)
    parts = [*row.parts.values(), beyond_s]
    return "/".join(f"{100 * seconds / row.measured_s:.0f}" for seconds in parts)


COLUMNS: Columns[ExplainedRow] = (
    PROMPT_TOKENS,
    Column("gen", lambda row: f"{row.n_gen:,}"),
    Column("phase", lambda row: row.phase, TEXT),
    Column("measured\nms", _measured_ms),
    Column("limit", _limit, TEXT),
    Column("% of\nceiling", _percent_of_ceiling),
    Column("weights/attention/\noutput/rest %", _shares),
    Column("GFLOP/s", lambda row: digits(row.gflops)),
    Column("GB/s", lambda row: digits(row.gbps)),
    Column("FLOPs\nper byte", lambda row: digits(row.intensity)),
)
