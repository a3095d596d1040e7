"""The quantizations of a model on a device: what fits, how fast, and how near to the original."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core.figures import DECODE_RATE
from lab.errors import LabError
from lab.features.predict import tables
from lab.models import synthetic
from lab.models.candidates import without_tag
from lab.models.devices import names_of
from lab.roofline.prediction import Prediction
from lab.show.cells import Column, of_figure
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.show.wording import digits

COMMON = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K")
"""What repositories usually have, the largest first."""

DISPLAY_GB = 0.6
"""Memory of a card that a display and the driver usually take."""

SOURCE = (
    "Quality: how much higher the perplexity is than with F16 (Llama 3 8B, wikitext-2:"
    " github.com/ggml-org/llama.cpp/pull/6936). Of your files: lab quant"
)


def with_quantizations(models: str, devices: str | None) -> str:
    """Several SPECs: the model in the usual quantizations. LabError unless it is one, on one."""
    is_one_device = devices and "," not in devices and not names_of(devices)
    if "," in models or not is_one_device:
        what = "--quantizations makes a table of one model on one device."
        raise LabError(what, "For example: -m llama-3.1-8b -d rtx-4060-laptop --quantizations")
    name, _ = without_tag(models)
    return ",".join(f"{name}:{quantization}" for quantization in COMMON)


def section(rows: Sequence[Prediction]) -> Section:
    """One row for each quantization, the largest first, and the best one that fits."""
    first = rows[0]
    return Section(
        f"{first.model.name} on {first.about}",
        f"{first.n_prompt:,} tokens in, {first.n_gen:,} out",
        answer=best(rows),
        **tabled(COLUMNS, sorted(rows, key=lambda row: -(row.model.n_bytes or 0))),
        sentences=[SOURCE],
    )


def best(rows: Sequence[Prediction]) -> str:
    """The answer: the largest quantization that fits, with its rate."""
    fitting = [row for row in rows if row.shortage is None]
    if not fitting:
        return f"No quantization of {rows[0].model.name} fits on {rows[0].name}."
    largest = max(fitting, key=lambda row: row.model.n_bytes or 0)
    rate = tables.decode_rate(largest)
    if len(fitting) == len(rows):
        return f"All fit. {largest.model.quantization} is the nearest to the original: {rate}."
    return f"{largest.model.quantization} is the best that fits: {rate}."


def headroom(row: Prediction) -> str:
    """GB that stay free beside the model, its cache and a display; how many are lacking."""
    if row.memory_bytes is None:
        return UNKNOWN
    free_gb = (row.memory_bytes - row.needed_bytes) / 1e9 - DISPLAY_GB
    if free_gb < 0:
        return f"lacks {digits(-free_gb)}"
    return digits(free_gb)


def quality(row: Prediction) -> str:
    share = synthetic.quantizations("perplexity").get(row.model.quantization or "")
    return f"+{share} %" if share is not None else UNKNOWN


COLUMNS: Columns[Prediction] = (
    Column("quantization", lambda row: row.model.quantization or ""),
    Column("file\nGB", lambda row: digits((row.model.n_bytes or 0) / 1e9)),
    Column("free beside\na display GB", headroom),
    of_figure(DECODE_RATE, lambda row: tables.line_cell(row, row.tps_expected, row.tps)),
    Column("perplexity\nover F16", quality),
)
