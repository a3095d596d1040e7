"""What is printed of a model that is not on this machine: its sizes, and how to get it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.analysis import wording
from lab.models.catalog import SYNTHETIC, Entry, Spec
from lab.show.console import Grid, grid_of


def sizes_table(by_quantization: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row for each quantization: the file's size, what a decode step reads, and the context that fits."""
    grid = grid_of("quantization", "MB", "MB read per decode step", "context that fits")
    for quantization, figures in by_quantization.items():
        read, fits = figures["weight_bytes_per_decode_step"], figures["n_ctx_that_fits"]
        grid.add_row(
            quantization,
            wording.digits(figures["n_bytes"] / 1e6),
            "unknown" if read is None else wording.digits(read / 1e6),
            "unknown" if fits is None else f"{fits:,}" if fits else "none",
        )
    return grid


def how_to_get(spec: Spec, entry: Entry, commands: list[str]) -> list[str]:
    """Where the shape is from, and the commands that get the file, or make one with random weights."""
    n_bytes = entry.n_bytes if spec.quantization in (None, entry.quantization) else None
    lines = [f"Computed from the shape ({entry.shape_source}). The context is for the memory that is free now."]
    if spec.source != SYNTHETIC:
        download = f" (a download of about {n_bytes / 1e6:,.0f} MB)" if n_bytes else ""
        lines.append(f"To get it: {commands[0]}{download}")
    lines.append(f"With random weights, to measure its speed: {commands[-1]}")
    return lines
