"""Where the runs of a results file fall in what is predicted for their machine."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.core import phases, results
from lab.core.lists import grouped, plural
from lab.core.memory import CPU
from lab.core.record import Record
from lab.errors import LabError
from lab.features.predict import published_record
from lab.features.predict.published_record import RecordedRate
from lab.models import described, devices, processors
from lab.models.devices import DeviceSheet
from lab.roofline import datasheet, learning
from lab.roofline.prediction import OnDevice, Prediction
from lab.show.cells import TEXT, Column
from lab.show.section import Columns, Section, tabled
from lab.show.wording import digits, percent


def section(path: str) -> Section:
    """A row for each setup and phase: measured, predicted, inside or not.

    LabError for results without runs, and for a machine that words do not describe.
    """
    records = [record for record in results.read([Path(path)]).records if is_used(record)]
    if not records:
        raise LabError(f"{path} has no plain runs to check.", "Measure some: lab measure")
    rows = list(checked_rows(records))
    n_inside = sum(row.is_inside for row in rows)
    off = published_record.median_error([row.off for row in rows])
    sheet = sheet_of(records[0])
    is_processor = datasheet.backend_of(sheet) == CPU
    places = []
    for phase, of_phase in grouped(rows, lambda row: row.phase).items():
        offs = [row.off for row in of_phase]
        places.append(published_record.place_of(phase, is_processor, offs))
    return Section(
        "Measured and predicted",
        f"as for another machine, {sheet.about}",
        answer=f"{n_inside} of {plural(len(rows), 'rate')} inside the predicted range, off by"
        f" {percent(off)} at the median.",
        **tabled(COLUMNS, rows),
        sentences=places,
    )


def is_used(record: Record) -> bool:
    return learning.is_plain(record) and not record.run.is_apart and not record.run.warmup


def checked_rows(records: Sequence[Record]) -> Iterator[RecordedRate]:
    setups = grouped(
        records, lambda record: (learning.model_label(record.model), record.run.n_prompt)
    )
    for (_, n_prompt), runs in setups.items():
        first = runs[0]
        model = first.model
        n_gen = max(2, first.run.n_gen)
        on_device = OnDevice(model, first.settings, sheet_of(first))
        row = on_device.request(n_prompt, n_gen)
        yield from checked(row, runs)


def checked(row: Prediction, runs: Sequence[Record]) -> Iterator[RecordedRate]:
    """The rates of both phases of runs of one setup."""
    sheet = sheet_of(runs[0])
    prefill_s = [phases.prefill_ns(record.run) for record in runs]
    tpot_s = [phases.tpot_ns(record.run) for record in runs]
    both = (
        ("prefill", prefill_s, row.n_prompt, row.prefill_s, row.prefill.expected_s),
        ("decode", tpot_s, 1, row.tpot_s, row.token.expected_s),
    )
    for phase, times, n_tokens, ends, expected_s in both:
        known_ns = [ns for ns in times if ns]
        if known_ns and expected_s:
            yield RecordedRate(
                phase=phase,
                backend=datasheet.backend_of(sheet),
                device=sheet.name,
                model=row.model.name,
                quantization=row.model.quantization or "",
                n_prompt=row.n_prompt,
                threads=runs[0].settings.n_threads,
                tps=n_tokens * 1e9 / statistics.median(known_ns),
                expected=n_tokens / expected_s,
                low=n_tokens / ends[1],
                high=n_tokens / ends[0],
                source="",
            )


def sheet_of(record: Record) -> DeviceSheet:
    """The device that a record was measured on: its GPU if layers lay there, else its processor."""
    machine = record.machine
    if record.settings.n_gpu_layers:
        for device in machine.devices or ():
            sheet = devices.recognise(device.description, device.memory_bytes)
            if sheet is not None:
                return sheet
    cores = machine.n_cores_physical or record.settings.n_threads
    words = f"{machine.cpu or ''} {simd_of(machine.system_info or '')} cores={cores}"
    return described.find(f"{words} threads={record.settings.n_threads}")


def simd_of(system_info: str) -> str:
    """The best instructions that llama.cpp says it uses; "" for none that are known."""
    used = re.findall(r"(\w+) = 1", system_info.lower())
    for name in reversed(processors.instruction_sets()):
        if any(flag.startswith(name) for flag in used):
            return name
    return ""


COLUMNS: Columns[RecordedRate] = (
    Column("model", lambda row: row.label),
    Column("phase", lambda row: row.phase, TEXT),
    Column("prompt\ntokens", lambda row: f"{row.n_prompt:,}", is_in_title=True),
    Column("measured\ntokens/s", lambda row: digits(row.tps)),
    Column(
        "predicted\ntokens/s",
        lambda row: f"{digits(row.expected)} ({digits(row.low)}-{digits(row.high)})",
    ),
    Column("inside", lambda row: "yes" if row.is_inside else "no"),
)
