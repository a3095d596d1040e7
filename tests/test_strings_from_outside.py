"""Strings of records that would command a terminal: none gets through, whatever field it is in."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.cli import main
from lab.core import results
from lab.core.lines import parse_line, to_json
from lab.core.noise import Gpu, Noise, NoiseReading, NoiseSamples
from lab.core.record import FAILED, Ceilings, Device, Rate, Record, Totals
from lab.core.traced import Attention, Looks, Part, Phase, TokenTrace
from tests.conftest import MACHINE, MODEL, make_record, make_run

EVIL = "evil\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x00\x85\n\r\u202e\u2066\u2028\ufeff"
DANGEROUS = set(EVIL) - set("evil]0;owned[2J31m\n")
READING = NoiseReading(0.5, 12.0, None, 1.5, 2400.0, 10**9, gpus=(Gpu("gpu", 1, 2, 3.0, "heat"),))
SAMPLES = NoiseSamples((1000,), (900,), None, None, None)
RATE = Rate("mul_mat", "Q4_0", "CPU", 8, 8, 1, 2, 100, 100, (5, 6))


def a_record(**changes: Any) -> Record:
    return make_record(make_run(noise=Noise(READING, READING, SAMPLES), totals=Totals(1, 1), **changes))


def poisoned(value: Any, keep: tuple[str, ...] = ()) -> Any:
    """`value` with EVIL in every string, fields that may be text but are None included; those named in `keep` not."""
    if isinstance(value, str):
        return value + EVIL
    if isinstance(value, tuple):
        return tuple(poisoned(part, keep) for part in value)
    if isinstance(value, dict):
        return {poisoned(key): part for key, part in value.items()}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    hints = typing.get_type_hints(type(value))
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    for name, part in parts.items():
        if name not in keep:
            parts[name] = EVIL if part is None and str in typing.get_args(hints[name]) else poisoned(part, keep)
    return type(value)(**parts)


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in strings(part))
    elif isinstance(value, list):
        yield from (text for part in value for text in strings(part))


@pytest.mark.parametrize("line", [a_record(), Ceilings("2026", MACHINE, False, (RATE,))], ids=["record", "ceilings"])
@pytest.mark.parametrize("as_ascii", [True, False])
def test_no_field_keeps_a_control_character(line: Record | Ceilings, as_ascii: bool) -> None:
    whole = json.loads(to_json(poisoned(line)))
    n_evil = sum("evil" in text for text in strings(whole))
    assert n_evil > 10 and all(set(text) >= DANGEROUS for text in strings(whole) if "evil" in text)
    parsed = parse_line(json.dumps(whole, ensure_ascii=as_ascii).encode() + b"\n")
    clean = list(strings(json.loads(to_json(parsed))))
    assert all(text.isprintable() for text in clean)
    assert sum("evil" in text for text in clean) == n_evil


def test_text_of_any_script_stays(tmp_path: Path) -> None:
    name = '\u6a21\u578b \u0645\u062b\u0627\u0644 caf\u00e9 C:\\models "q" \U0001f600'
    results.append(tmp_path / "a.jsonl", make_record(session=name))
    assert results.read([tmp_path]).records[0].session == name


KEPT: tuple[str, ...] = (
    "status",
    "kind",
    "type",
    "type_k",
    "type_v",
    "op",
    "flash_attn_resolved",
    "totals",
    "started_at",
    "measured_at",
)
KEPT += ("part", "tensor_bytes", "embedding_type", "output_type", "uncounted")
"""Fields whose words decide what is computed. That they are cleaned is shown above."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    here = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, Device("GPU0", "a GPU", "gpu", 10**9)))
    runs = [make_run(n, 5, repeat, noise=Noise(READING, READING, SAMPLES)) for n in (10, 40) for repeat in (0, 1)]
    for name in "ab":
        for run in [*runs, make_run(status=FAILED)]:
            model = dataclasses.replace(MODEL, embedding_type="Q4_0")
            record = poisoned(make_record(run, machine=here, model=model, session=name), KEPT)
            record = dataclasses.replace(record, settings=dataclasses.replace(record.settings, prompt=name + EVIL))
            results.append(tmp_path / f"{name}.jsonl", record)
    phase = Phase("decode", 1, 40, (Part("Q", 3, "CPU", 100.0, 200.0, 1e-6),), {"CPU": 1e-6}, 1e-6, 3, 3)
    looks = Looks((((1.0, 0.0), (0.5, 0.5)),), ((0.5, 0.5),), ((0.0, 0.1),))
    found: dict[str, Any] = {
        "trace": TokenTrace(phase, phase, None),
        "attention": Attention("$a_{$<script>", ("$a_{$", "<script>"), 0, "b", looks),
    }
    traces = [poisoned(make_record(make_run(**{name: value}), session=name), KEPT) for name, value in found.items()]
    results.append(tmp_path / "c.jsonl", *traces)
    rates: tuple[Rate, ...] = (
        RATE,
        dataclasses.replace(RATE, op="attention", type="F16", rows=4, columns=16, n_head_kv=2),
    )
    rates = (*rates, *(dataclasses.replace(rate, n_tokens=512) for rate in rates))
    results.append(tmp_path / "ceilings-a.jsonl", poisoned(Ceilings("2026-01-01T00:00:00Z", here, False, rates), KEPT))
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["show"],
        ["show", "--json"],
        ["plot"],
        ["compare", "--no-plot"],
        ["compare", "--json", "--no-plot"],
        ["explain", "--force"],
        ["explain", "--force", "--json", "--no-plot"],
        *(["export", "--as", kind] for kind in ("md", "csv", "json", "jsonl")),
        *(["export", "-f", "csv", "--table", name] for name in ("runs", "steps")),
        ["report"],
    ],
    ids=" ".join,
)
def test_no_command_prints_or_writes_one(command: list[str], folder: Path) -> None:
    name, *options = command
    if name == "explain":
        options += ["--ceilings", str(folder)]
    before = set(folder.iterdir())
    done = CliRunner().invoke(main.lab, [name, str(folder), *options])
    assert done.exit_code == 0, (done.output, done.exception)
    written = [path.read_text() for path in set(folder.iterdir()) - before if path.suffix in (".svg", ".html")]
    assert written or "evil" in done.output
    if name == "show" and not options:
        assert "Decodeevil" in done.output and "Attention of" in done.output
    for text in [done.output, *written]:
        assert "<script>" not in text.partition("mini-lab-records")[0] or name == "show"
        assert not DANGEROUS & set(text)
