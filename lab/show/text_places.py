"""The placement of a model as tables: as planned, and as llama.cpp reported it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console

from lab.core.lists import grouped
from lab.core.placement import CPU, device_of
from lab.core.record import Buffer, Placement, Record
from lab.runner import machine, plan_needs
from lab.runner.cases import Plan
from lab.show import table, wording
from lab.show.console import Grid

NOT_ESTIMATED = "not estimated"
PARTS = {"model": "weights", "KV": "KV cache", "RS": "recurrent state", "compute": "compute", "output": "output"}
"""Parts of a record's buffers, and their headings."""


def rows(plan: Plan) -> list[dict[str, Any]] | None:
    """The placement for the largest case of a plan, device by device; None if everything stays on the CPU.

    In bytes; None if unknown. Devices that share a memory have the same `has_bytes`; `shares` names them.
    """
    used = machine.used(plan.machine, plan.settings)
    if not used:
        return None
    case = max(plan.cases, key=lambda case: plan.memory(case).total_bytes)
    places, rooms = plan_needs.places(plan, case), plan_needs.rooms(plan)
    descriptions = {device.name: device.description for device in plan.machine.devices}
    planned = []
    for name in (*(device.name for device in used), CPU):
        room = next(room for room in rooms if name in room.devices)
        place = next((place for place in places or () if place.device == name), None)
        sizes = ("weights_bytes", "kv_cache_bytes", "compute_bytes", "total_bytes")
        sizes_of = {size: getattr(place.memory, size) if place and place.memory else None for size in sizes}
        sizes_of["needs_bytes"] = sizes_of.pop("total_bytes")
        planned.append(
            {
                "device": name,
                "description": descriptions.get(name),
                "layers": None if place is None else list(place.layers),
                "output_layer": plan.model.n_layer,
                **sizes_of,
                "has_bytes": room.n_bytes,
                "shares": [other for other in room.devices if other != name],
            }
        )
    return planned


def plan_table(planned: Sequence[dict[str, Any]]) -> Grid:
    """The placement, one row per device."""
    grid = Grid("device", "layers", "weights MB", "KV cache MB", "compute MB", "needs MB", "has MB")
    for row in planned:
        layers = NOT_ESTIMATED if row["layers"] is None else ranges(row["layers"], row["output_layer"])
        sizes = [row[f"{name}_bytes"] for name in ("weights", "kv_cache", "compute", "needs", "has")]
        has = _megabytes(sizes[-1]) + (f" with {', '.join(row['shares'])}" if row["shares"] else "")
        grid.add_row(row["device"], layers, *map(_megabytes, sizes[:-1]), has)
    return grid


def recorded(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The placement of each setup by llama.cpp, for its largest run: devices with layers, and bytes by part.

    `devices` is None if the records do not contain it.
    """
    placed = []
    for label, part in table.setups(table.runs(records)) if records else ():
        own = [records[number] for number in dict.fromkeys(part.run)]
        known = [(record.run.placement, record) for record in own if record.run.placement is not None]
        largest = max(known, key=lambda pair: sum(buffer.n_bytes for buffer in pair[0].buffers), default=None)
        placed.append({"setup": label, "devices": None if largest is None else _by_device(*largest)})
    return placed


def _by_device(placement: Placement, record: Record) -> list[dict[str, Any]]:
    """The layers of each device, the output last, and the bytes of llama.cpp's buffers, by part and by name."""
    own: dict[str, list[Buffer]] = {name: [] for name in placement.layers}
    for buffer in placement.buffers:
        own.setdefault(device_of(buffer, record.machine.devices), []).append(buffer)

    def total(buffers: Sequence[Buffer], by: Callable[[Buffer], str]) -> dict[str, int]:
        return {name: sum(one.n_bytes for one in alike) for name, alike in grouped(buffers, by).items()}

    return [
        {
            "device": name,
            "layers": [layer for layer, device in enumerate(placement.layers) if device == name],
            "output_layer": len(placement.layers) - 1,
            "bytes": total(own[name], lambda one: one.part),
            "model_buffers": total([one for one in own[name] if one.part == "model"], lambda one: one.name),
        }
        for name in sorted(own, key=lambda name: name == CPU)
    ]


def print_recorded(placed: Sequence[dict[str, Any]], out: Console) -> None:
    """Prints the placement of each setup."""
    for setup in placed:
        out.print(f"\n{setup['setup']}: placement reported by llama.cpp", highlight=False)
        if setup["devices"] is None:
            out.print("not recorded")
            continue
        parts = [part for part in PARTS if part != "RS" or any(row["bytes"].get(part) for row in setup["devices"])]
        grid = Grid("device", "layers", *(f"{PARTS[part]} MB" for part in parts), "in")
        for row in setup["devices"]:
            sizes = (wording.digits(row["bytes"].get(part, 0) / 1e6) for part in parts)
            names = row["model_buffers"]
            several = [name if len(names) == 1 else f"{name} {_megabytes(n)}" for name, n in names.items()]
            grid.add_row(row["device"], ranges(row["layers"], row["output_layer"]), *sizes, ", ".join(several))
        out.print(grid)


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
