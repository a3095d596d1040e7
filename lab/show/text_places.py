"""What of a model lies where, as tables: as planned, and as llama.cpp said it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

from lab.analysis import wording
from lab.core.placement import CPU
from lab.runner import fits, machine
from lab.runner.plan import Plan
from lab.show.console import grid_of

NOT_ESTIMATED = "not estimated"


def rows(plan: Plan) -> list[dict[str, Any]] | None:
    """What goes where for the case of a plan that needs most, device by device; None where all stays on the CPU.

    Bytes; None is what cannot be worked out. Devices that share a memory have the same `has_bytes`, named in `shares`.
    """
    used = machine.used(plan.machine, plan.settings)
    if not used:
        return None
    case = max(plan.cases, key=lambda case: plan.memory(case).total_bytes)
    places, rooms = fits.places(plan, case), fits.rooms(plan)
    descriptions = {device.name: device.description for device in plan.machine.devices}
    planned = []
    for name in (*(device.name for device in used), CPU):
        room = next(room for room in rooms if name in room.devices)
        place = next((place for place in places or () if place.device == name), None)
        memory = place.memory if place else None
        planned.append(
            {
                "device": name,
                "description": descriptions.get(name),
                "layers": None if place is None else list(place.layers),
                "output_layer": plan.model.n_layer,
                "weights_bytes": memory.weights_bytes if memory else None,
                "kv_cache_bytes": memory.kv_cache_bytes if memory else None,
                "compute_bytes": memory.compute_bytes if memory else None,
                "needs_bytes": memory.total_bytes if memory else None,
                "has_bytes": room.n_bytes,
                "shares": [other for other in room.devices if other != name],
            }
        )
    return planned


def plan_table(planned: Sequence[dict[str, Any]]) -> Table:
    """What goes where, one row per device."""
    grid = grid_of("device", "layers", "weights MB", "KV cache MB", "compute MB", "needs MB", "has MB")
    for row in planned:
        layers = NOT_ESTIMATED if row["layers"] is None else ranges(row["layers"], row["output_layer"])
        sizes = [row[f"{name}_bytes"] for name in ("weights", "kv_cache", "compute", "needs", "has")]
        has = _megabytes(sizes[-1]) + (f" with {', '.join(row['shares'])}" if row["shares"] else "")
        grid.add_row(row["device"], layers, *map(_megabytes, sizes[:-1]), has)
    return grid


def ranges(layers: Iterable[int], n_layer: int | None) -> str:
    """`0-15, output`: layers by number, that after the last one as the output."""
    numbers = sorted(layers)
    plain = [number for number in numbers if number != n_layer]
    starts = [b for a, b in pairwise([-2, *plain]) if b != a + 1]
    ends = [a for a, b in pairwise([*plain, plain[-1] + 2]) if b != a + 1] if plain else []
    words = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ", ".join([*words, *(["output"] if len(plain) < len(numbers) else [])]) or "none"


def _megabytes(n_bytes: int | None) -> str:
    return "unknown" if n_bytes is None else wording.digits(n_bytes / 1e6)
