"""What would make it faster here: the same kernels' ceilings, asked about other settings.

A lever replaces one part of a phase by another of which the ceiling is known (weights of another type, another
number of threads) and leaves everything else, overhead included, as it was measured. So its gain is a
prediction, and each lever says how to try it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import cost
from lab.core.record import Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.process.wire import MUL_MAT
from lab.why import roofline
from lab.why.roofline import Explained

LEAST_GAIN = 1.05
MOST_LEVERS = 3


@dataclass(frozen=True)
class Lever:
    """A change, by what factor it is predicted to speed each phase up, and how to find out."""

    change: str
    prefill_gain: float | None  # at the longest prompt, of prefill_at tokens
    decode_gain: float | None  # after the shortest prompt, of decode_at tokens
    prefill_at: int
    decode_at: int
    command: str | None  # None: no name that the lab could get or make it by

    @property
    def best(self) -> float:
        return max(self.prefill_gain or 0.0, self.decode_gain or 0.0)


def levers(rows: Sequence[Explained], record: Record, ceilings: Ceilings) -> list[Lever]:
    """The three largest that the ceilings know of, for one setup's explained rows."""
    model, settings = record.model, record.settings
    main = max(model.tensor_bytes, key=lambda kind: model.tensor_bytes[kind])
    found = []
    own = [rate for rate in ceilings.rates if (rate.op, rate.rows, rate.columns) == (MUL_MAT, model.n_ff, model.n_embd)]
    kinds = {rate.type for rate in own} - {main}
    for kind in sorted(kinds & cost.BLOCKS.keys()):
        other = _with_type(model, main, kind)
        command = None
        if kind in synthetic.QUANTIZATIONS and model.source != "file":
            command = f'lab ab "-m {catalog.spec_of(model)}" "-m {catalog.spec_of(model, kind)}"'
        found.append(_lever(f"{kind} instead of {main}", rows, record, ceilings, other, settings, command))
    for n in sorted({rate.n_threads for rate in ceilings.rates} - {settings.n_threads}):
        fewer = dataclasses.replace(settings, n_threads=n, n_threads_batch=n)
        command = f'lab ab "--threads {settings.n_threads}" "--threads {n}" -m {catalog.spec_of(model)}'
        found.append(
            _lever(
                f"{n} thread{'s' * (n > 1)} instead of {settings.n_threads}",
                rows,
                record,
                ceilings,
                model,
                fewer,
                command,
            )
        )
    useful = [lever for lever in found if lever and lever.best >= LEAST_GAIN]
    return sorted(useful, key=lambda lever: -lever.best)[:MOST_LEVERS]


def _lever(
    change: str,
    rows: Sequence[Explained],
    record: Record,
    ceilings: Ceilings,
    model: Model,
    settings: Settings,
    command: str | None,
) -> Lever | None:
    """The gains of another model or other settings; None where a ceiling for it is missing."""
    gains: dict[str, float] = {}
    ordered = sorted(rows, key=lambda row: row.n_prompt)
    try:
        for phase, chosen in (("prefill", ordered[::-1]), ("decode", ordered)):
            row = next((each for each in chosen if each.phase == phase), None)
            if row is None:
                continue
            shape = _typical_step(row, settings)
            old = roofline.step_kernels(record.model, record.settings, ceilings, *shape)
            new = roofline.step_kernels(model, settings, ceilings, *shape)
            if old is None or new is None:
                return None
            kept = max(0.0, row.measured_s - row.kernels.total_s)
            gains[phase] = row.measured_s / (kept + (row.measured_s - kept) * new.total_s / old.total_s)
    except LabError:
        return None
    ends = ordered[-1].n_prompt, ordered[0].n_prompt
    return Lever(change, gains.get("prefill"), gains.get("decode"), *ends, command)


def _typical_step(row: Explained, settings: Settings) -> tuple[int, int, int]:
    """(n_tokens, n_past, n_outputs) of a step in the middle of the phase."""
    if row.phase == "decode":
        return 1, row.n_prompt, 1
    n_tokens = min(settings.n_ubatch, row.n_prompt)
    return n_tokens, (row.n_prompt - n_tokens) // 2, 1


def _with_type(model: Model, old: str, new: str) -> Model:
    """The model with its main weights in another type; embedding and output matrix stay as they are."""
    kept = sum(
        n_bytes
        for n_bytes, kind in (
            (model.embedding_bytes or 0, model.embedding_type),
            (model.output_bytes or 0, model.output_type),
        )
        if n_bytes and roofline.type_of(model, n_bytes, kind) == old
    )
    moved = model.tensor_bytes[old] - kept
    weights = moved / cost.BLOCKS[old][1] * cost.BLOCKS[old][0]
    sizes = dict(model.tensor_bytes) | {old: kept}
    sizes[new] = sizes.get(new, 0) + round(weights / cost.BLOCKS[new][0] * cost.BLOCKS[new][1])
    return dataclasses.replace(model, tensor_bytes={kind: n_bytes for kind, n_bytes in sizes.items() if n_bytes})
