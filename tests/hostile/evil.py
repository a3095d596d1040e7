"""Records with names that would do harm in a shell or a page."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lab.core.lines import to_json
from lab.core.record import Record
from lab.models.catalog import HUB
from tests.support.rates import timed

EVIL = "x'\"`touch PWNED`$(touch PWNED);touch PWNED;#&&touch PWNED|touch PWNED\ttouch PWNED"


KEPT = (
    *(
        "status",
        "kind",
        "type",
        "type_k",
        "type_v",
        "op",
        "flash_attn_resolved",
        "source",
        "tensor_bytes",
        "arch",
    ),
    *(
        "embedding_type",
        "output_type",
        "uncounted",
        "matrices",
        "part",
        "started_at",
        "measured_at",
        "quantization",
    ),
)
"""Fields whose words decide what is computed."""


def poisoned(value: Any) -> Any:
    """`value` with EVIL instead of every string, but in the fields KEPT."""
    if isinstance(value, str):
        return EVIL
    if isinstance(value, tuple):
        return tuple(map(poisoned, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    changes = {}
    for field in dataclasses.fields(value):
        if field.name not in KEPT:
            changes[field.name] = poisoned(getattr(value, field.name))
    return dataclasses.replace(value, **changes)


def evil_record(source: str = HUB) -> Record:
    record: Record = poisoned(timed(1.1)[0])
    model = dataclasses.replace(
        record.model,
        source=source,
        repo=EVIL,
        file=EVIL,
        revision=EVIL,
    )
    lists: dict[str, Any] = {"devices": (EVIL, EVIL)}
    settings = dataclasses.replace(record.settings, lib=f"{EVIL} 12345678", **lists)
    command = ("measure", "--model", EVIL)
    return dataclasses.replace(
        record,
        model=model,
        settings=settings,
        command=command,
    )


def changed(
    record: Record,
    field: str,
    value: Any,
) -> bytes:
    """A line of a results file with another value in a field such as run.n_prompt."""
    line = json.loads(to_json(record))
    *folders, name = field.split(".")
    place = line
    for folder in folders:
        place = place[folder]
    place[name] = value
    return json.dumps(line).encode() + b"\n"
