"""Texts that programs print, with what is true of their figures: tests/data/pasted.toml (after real
posts) and pastes.jsonl (written from true values as programs count, and pasted as people do)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.features.why import figure

DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Truth:
    """What a text says of a figure; None: it does not say it."""

    tps: float
    phase: str
    counts: str
    depth: int | None = None
    n_streams: int | None = None


@dataclass(frozen=True)
class Sample:
    """A text, the truth of each of its figures in any order, and what a command in it states."""

    name: str
    text: str
    truths: tuple[Truth, ...]
    facts: Mapping[str, object]


def truth_of(entry: Mapping[str, Any]) -> Truth:
    """An entry of `figures`; it names constants of lab/features/why/figure.py."""
    phase = getattr(figure, entry["phase"].upper())
    counts = getattr(figure, entry["counts"].upper())
    return Truth(entry["tps"], phase, counts, entry.get("depth"), entry.get("n_streams"))


def sample_of(entry: Mapping[str, Any]) -> Sample:
    truths = tuple(map(truth_of, entry["figures"]))
    return Sample(entry["name"], entry["text"], truths, entry.get("facts", {}))


_PASTED = tomllib.loads((DATA / "pasted.toml").read_text(encoding="utf-8"))
PRINTED = tuple(map(sample_of, _PASTED["printed"]))
BY_HAND = tuple(map(sample_of, _PASTED["by_hand"]))


def pastes() -> list[Sample]:
    """Texts of 25 programs with and without commands, prose, quotes and a second program's."""
    lines = (DATA / "pastes.jsonl").read_text(encoding="utf-8").splitlines()
    return [sample_of(json.loads(line)) for line in lines]
