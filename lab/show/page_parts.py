"""Parts of a page: pictures, the facts of a setup, energy, comparisons, and where the time of a request goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis import comparison, table, wording
from lab.analysis.spread import Spread
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.show import plot_runs, svg, text_compare, text_results, text_setup

if TYPE_CHECKING:
    import pandas as pd


Setup = tuple[str, Any, list[Record]]  # label, its rows of table.runs, its records


@dataclass(frozen=True)
class Picture:
    """A drawing, its caption, and a text for readers who cannot see it."""

    svg: str
    caption: str
    shows: str


def picture(
    draw: Callable[[Any], Any], name: str, caption: str, shows: str, size: tuple[float, float] = (5, 3.9)
) -> Picture:
    """The picture that `draw` draws, in inches of `size`; `name` keeps its ids apart from others'."""
    return Picture(svg.inline(draw, name, size), caption, shows)


def facts(record: Record) -> dict[str, str]:
    """Machine, build, model and settings of a record, in words."""
    settings = record.settings
    flash = settings.flash_attn_resolved or settings.flash_attn
    named = text_setup.facts(record.machine, record.model)
    if record.model.source == "synthetic":
        named["weights"] = "random: the time is that of the real model's shape, the text means nothing"
    parts = {
        f"{plural(settings.n_threads, 'thread')} ({settings.n_threads_batch} for prefill)": settings.n_threads,
        f"batch {settings.n_batch}": settings.n_batch,
        f"ubatch {settings.n_ubatch}": settings.n_ubatch,
        f"layers on a GPU {settings.n_gpu_layers}": settings.n_gpu_layers,
        f"flash attention {flash}": flash,
        f"cache {settings.type_k} and {settings.type_v}": settings.type_k,
        f"prompt {settings.prompt}": settings.prompt,
        f"seed {settings.seed}": settings.seed,
    }
    named["settings"] = ", ".join(words for words, value in parts.items() if value is not None)
    return named


def energy(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The table of a summary's energy; none where it is not known."""
    shown = text_compare.table_of(rows)
    return [dict(zip(("caption", "headings", "rows"), shown, strict=True))] if shown else []


def shares(label: str, rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Prefill's share of the whole time, for each number of generated tokens; not for sweeps, which generate few."""
    tables = []
    for n_gen, part in table.summary(rows).groupby("n_gen"):
        known = part[part.prefill_share.notna() & part.sweep_every.isna()]
        shown = [
            {
                "n_prompt": f"{row.n_prompt:,}",
                "prefill": wording.seconds(row.prefill_s),
                "rest": wording.seconds(row.e2e_s - row.prefill_s),
                "percent": round(100 * row.prefill_share),
            }
            for row in known.itertuples()
        ]
        if shown:
            tables.append({"caption": f"{label}: a prompt and {n_gen:,} generated tokens", "rows": shown})
    return tables


def comparisons(
    records: Sequence[Record | RequestRecord], at_least: float, spreads: Mapping[tuple[Any, str], Spread]
) -> dict[str, Any]:
    """Comparisons of the setups, or of sessions of one, with the first."""
    try:
        groups = comparison.groups(records)
    except LabError:  # there is only one
        return {"comparisons": [], "answers": []}
    compared_groups = comparison.compare_groups(groups, at_least, spreads)
    return {
        "answers": text_compare.answers(compared_groups),
        "base": groups[0].label,
        "differences": text_compare.differences(groups),
        "compared": text_compare.headings(compared_groups),
        "comparisons": [
            {
                "other": compared.other,
                "rows": [text_compare.comparison_cells(row) for row in compared.rows],
                "left_out": text_compare.left_out(compared),
            }
            for compared in compared_groups
        ],
        "how_compared": text_compare.how_compared(groups, compared_groups, at_least),
    }


def curves(records: Sequence[Record], setups: Sequence[Setup]) -> dict[str, Picture]:
    """The pictures of plain runs, by name."""
    shows = " ".join(
        f"{label}: {' '.join(text_results.findings(part))}"
        for label, rows, _ in setups
        for _, part in table.summary(rows).groupby("n_gen")
    )
    captions = {
        "prefill": "Prefill: time until the prompt is processed. Points are runs, the line their median; the dashed "
        "line is what the time would be in proportion.",
        "decode": "Decode: time of each generated token. Points are tokens, the line their running median.",
        "sweep": "Both curves in one walk through the context. Points are runs, the dashed line the fitted law.",
    }
    return {
        name: picture(draw, name, captions[name], shows, (5, 7.6 if name == "sweep" else 3.9))
        for name, draw in plot_runs.drawings(records, stacked=True).items()
    }
