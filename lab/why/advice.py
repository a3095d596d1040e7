"""What would make it faster here: the same kernels' ceilings, asked about other settings.

A lever replaces one part of a phase by another of which the ceiling is known (weights of another type, another
number of threads) and leaves everything else, overhead included, as it was measured. So its gain is a
prediction, and each lever says how to try it.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core.record import Ceilings, Model, Record, Settings
from lab.core.shape import ATTENTION, BLOCKS, EXPERTS, FEED_FORWARD, Matrix, matrices
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.process.wire import MUL_MAT, MUL_MAT_ID
from lab.runner.as_options import options
from lab.why import step_kernels
from lab.why.probe_plan import used_types
from lab.why.roofline import Explained

LEAST_GAIN = 1.05
MOST_LEVERS = 3
IN_LAYERS = (ATTENTION, FEED_FORWARD, EXPERTS)


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
    """The three largest that the ceilings know of, for one setup's explained rows.

    Their commands measure what was promised: the same lengths, tokens and settings, but for the change.
    """
    model, settings = record.model, record.settings
    known = matrices(model)
    if known is None:
        return []
    tried = []
    main = used_types(model)[0]
    for kind in _other_types(model, settings, known, ceilings, main):
        command = None
        if kind in synthetic.QUANTIZATIONS and model.source != "file":
            command = _command(rows, record, "--model", catalog.spec_of(model), catalog.spec_of(model, kind))
        other = _with_type(model, known, main, kind)
        tried.append(_lever(f"{kind} instead of {main}", rows, record, ceilings, other, settings, command))
    fewer_threads = set() if ceilings.on_gpu else {rate.n_threads for rate in ceilings.rates}
    for n in sorted(fewer_threads - {settings.n_threads}):
        fewer = dataclasses.replace(settings, n_threads=n, n_threads_batch=n)
        change = f"{n} thread{'s' * (n > 1)} instead of {settings.n_threads}"
        command = _command(rows, record, "--threads", str(settings.n_threads), str(n))
        tried.append(_lever(change, rows, record, ceilings, model, fewer, command))
    useful = [lever for lever in tried if lever and lever.best >= LEAST_GAIN]
    return sorted(useful, key=lambda lever: -lever.best)[:MOST_LEVERS]


def _other_types(model: Model, settings: Settings, known: Sequence[Matrix], ceilings: Ceilings, main: str) -> list[str]:
    """Types whose kernels were probed in a shape of the model's layers."""
    ops = {MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT for matrix in known if matrix.type == main}
    shapes = {(matrix.rows, matrix.columns) for matrix in known if matrix.part in IN_LAYERS}
    kinds = {
        rate.type
        for rate in ceilings.rates
        if rate.op in ops
        and (ceilings.on_gpu or rate.n_threads == settings.n_threads)
        and (model.matrices is None or (rate.rows, rate.columns) in shapes)
    }
    return sorted((kinds - {main}) & BLOCKS.keys())


def _command(rows: Sequence[Explained], record: Record, option: str, old: str, new: str) -> str:
    """The trial of a change at the lengths that its gains are promised for."""
    lengths = ",".join(str(n) for n in sorted({min(row.n_prompt for row in rows), max(row.n_prompt for row in rows)}))
    replaced = (option, "--threads-batch") if option == "--threads" else (option,)
    shared = [word for option in options(record) if option[0] not in replaced for word in option]
    sizes = ["--prompt-len", lengths, "--gen", str(max(row.n_gen for row in rows))]
    return " ".join(["lab ab", f'"{option} {old}"', f'"{option} {new}"', shlex.join([*sizes, *shared])])


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
            row = next((candidate for candidate in chosen if candidate.phase == phase), None)
            if row is None:
                continue
            step = _typical_step(row, settings)
            old = step_kernels.total(record.model, record.settings, ceilings, *step)
            new = step_kernels.total(model, settings, ceilings, *step)
            if old is None or new is None:
                return None
            rest = max(0.0, row.measured_s - row.least_s)
            gains[phase] = row.measured_s / (rest + (row.measured_s - rest) * new.total_s / old.total_s)
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


def _with_type(model: Model, known: Sequence[Matrix], old: str, new: str) -> Model:
    """The model with its layers' matrices of one type in another, where their rows can be packed in it.

    Embedding and output matrix stay as they are.
    """
    sizes = {kind: float(n_bytes) for kind, n_bytes in model.tensor_bytes.items()}
    changed = []
    for matrix in known:
        if matrix.type == old and matrix.part in IN_LAYERS and matrix.columns % BLOCKS[new][0] == 0:
            sizes[old] -= matrix.n_bytes
            matrix = dataclasses.replace(matrix, type=new)
            sizes[new] = sizes.get(new, 0.0) + matrix.n_bytes
        changed.append(matrix)
    by_type = {kind: round(n_bytes) for kind, n_bytes in sizes.items() if round(n_bytes)}
    return dataclasses.replace(model, tensor_bytes=by_type, matrices=tuple(changed))
