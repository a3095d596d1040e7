"""What the parts of a page share: pictures with captions, and the facts of a setup."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.core.record import Record
from lab.show import svg, text_setup


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
