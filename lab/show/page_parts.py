"""Parts of a page: pictures with captions, the facts of a setup, energy, and where the time of a request goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis import table, wording
from lab.core.record import Record
from lab.show import svg, text_energy, text_setup

if TYPE_CHECKING:
    import pandas as pd


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
        f"{settings.n_threads} threads ({settings.n_threads_batch} for prefill)": settings.n_threads,
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
    shown = text_energy.table_of(rows)
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
