"""Joules: counters are read as they are, wraps are added up, and nothing is shown where nothing is known."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lab.core.record import DRAM, FAILED, GPU, PACKAGE, Device, Noise, NoiseReading, Record
from lab.features.measure import text_results
from lab.runner import noise_watch
from lab.runner.noise_watch import Counter, EnergyWatch, GpuWatch, describe_energy
from lab.show import table
from tests.conftest import MACHINE, make_record, make_run

NO_GPU = cast(GpuWatch, types.SimpleNamespace(energy_counters=list))
WITH_GPU = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, Device("CUDA0", "A GPU", "gpu")))
READ_COUNTERS = noise_watch.energy_counters
"""The real function: other tests have none (conftest.py)."""


def write_zone(root: Path, zone: str, **files: object) -> None:
    folder = root / "sys/class/powercap" / zone
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_only_packages_and_their_memory_are_read(tmp_path: Path) -> None:
    for zone, name in {"0": "package-0", "0:0": "core", "0:1": "dram", "1": "package-1-die-0", "2": "psys"}.items():
        write_zone(tmp_path, f"intel-rapl:{zone}", name=name, energy_uj=5_000_000, max_energy_range_uj=9_000_000)
    write_zone(tmp_path, "intel-rapl-mmio:0", name="package-0", energy_uj=5)
    found = READ_COUNTERS(NO_GPU, tmp_path)
    assert [(one.covers, one.read(), one.wraps_at) for one in found] == [
        (PACKAGE, 5_000_000, 9_000_000),
        (DRAM, 5_000_000, 9_000_000),
        (PACKAGE, 5_000_000, 9_000_000),
    ]
    assert describe_energy(found) == "package, dram"


def test_a_locked_counter_is_named_with_what_to_do(tmp_path: Path) -> None:
    write_zone(tmp_path, "intel-rapl:0", name="package-0")  # energy_uj cannot be read
    assert describe_energy(READ_COUNTERS(NO_GPU, tmp_path)).startswith("Only root can read RAPL. To allow all users")
    assert describe_energy(READ_COUNTERS(NO_GPU, tmp_path / "none")).startswith("no counter that can be read")


def reads(*values: int | None) -> Callable[[], int | None]:
    return iter(values).__next__


@pytest.mark.parametrize(
    ("found", "joules"),
    [
        ([], None),
        ([Counter(PACKAGE, reads(1000, 3000, 2000), 1.0, 4000)], {PACKAGE: 5000}),  # 2000, then 3000 over the wrap
        ([Counter(PACKAGE, reads(1000, 3000, 2000), 1.0)], None),  # it was set back
        ([Counter(PACKAGE, reads(1, None, 3), 1.0)], None),
        ([Counter(GPU, reads(5, 6, 7), 1e-3), Counter(GPU, reads(5, 6, 9), 1e-3)], {GPU: 0.006}),
        ([Counter(PACKAGE, reads(1, 2, 4), 1.0), Counter(PACKAGE, reads(1, None, 4), 1.0)], None),  # half of a sum
        ([Counter(PACKAGE, reads(1, 2, 4), 1.0), Counter(DRAM, reads(1, 1, None), 1.0)], {PACKAGE: 3}),
    ],
)
def test_what_was_used_between_readings(monkeypatch: pytest.MonkeyPatch, found: Any, joules: Any) -> None:
    monkeypatch.setattr(noise_watch, "energy_counters", lambda gpus: found)
    watch = EnergyWatch(NO_GPU)
    watch.sample()
    assert watch.joules() == joules


def test_a_run_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_watch, "energy_counters", lambda gpus: [Counter(PACKAGE, reads(0, 40, 100), 0.5)])
    watch = noise_watch.NoiseWatch(1)
    watch.sample()
    monkeypatch.setattr(watch, "sample", lambda: None)  # `finish` reads the last value once
    assert watch.finish().joules == {PACKAGE: 50}


def with_joules(joules: dict[str, float] | None, **changes: Any) -> Record:
    reading = NoiseReading()
    machine = changes.pop("machine", MACHINE)
    return make_record(make_run(20, 10, noise=Noise(reading, reading, joules=joules), **changes), machine=machine)


def test_a_run_has_joules_per_generated_token() -> None:
    records = [
        with_joules({PACKAGE: 30, DRAM: 5, GPU: 10}),
        with_joules({PACKAGE: 30, GPU: 10}, machine=WITH_GPU),
        with_joules(None),
        with_joules({PACKAGE: 30}, status=FAILED),
    ]
    rows = table.runs(records)
    assert rows.j_per_token[:2].tolist() == [3.5, 4.0]  # without a GPU in the build its card does not count
    assert rows.energy_of[:2].tolist() == ["package + dram", "package + gpu"]
    assert rows.j_per_token[2:].isna().all() and rows.energy_of[2:].isna().all()


def test_the_table_shows_joules_where_they_are_known() -> None:
    (known,) = text_results.sections([with_joules({PACKAGE: 30}), with_joules({PACKAGE: 50}, repeat=1)])
    assert "J per token: energy of the whole run (package, all that ran on it)" in " ".join(known.notes)
    assert "J per\\ntoken" in str(known)
    mixed = [with_joules({PACKAGE: 30}), with_joules({PACKAGE: 30, DRAM: 5}, repeat=1)]
    for records in (mixed, [with_joules(None)]):
        (section,) = text_results.sections(records)
        assert "J per" not in str(section)
