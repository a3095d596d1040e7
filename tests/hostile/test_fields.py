"""Single fields that the fuzzer (tests/bench/fuzz_fields.py) found to do harm, one line of JSON for
each: no command gives a traceback, a figure that is no number, or takes long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile import fields
from tests.hostile.fields import Case

SEEDS = Path(__file__).with_name("seeds.jsonl")


def seeds() -> list[tuple[Case, str]]:
    """The cases with the command that failed."""
    found = []
    for line in SEEDS.read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        command = values.pop("command")
        found.append((Case(**values), command))
    return found


@pytest.mark.parametrize(
    ("case", "command"), seeds(), ids=lambda value: str(getattr(value, "field", value))
)
def test_a_changed_field_is_a_sentence_or_a_result(
    case: Case, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "START_S", 60)  # no stopwatch here: the benchmark has one
    findings, _ = fields.attack(case, tmp_path, (command,))
    assert not findings, findings[0].details
