"""What the base asks about the runs of an experiment, without knowing the experiment.

A run names its experiment and has its case: a flat mapping of names to values, by which the base
groups and compares runs. Only the experiment's room knows what the values mean. It gives an
`ExperimentRuns`, which the list of features names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, get_type_hints

from lab import feature_list
from lab.core.lists import plural
from lab.core.record import Run, Value

Case = Mapping[str, Value]
Setup = TypeVar("Setup")  # a room's own dataclass, which a case writes as a flat mapping
NUMBERS = tuple[int, ...]  # a field of a setup that a case writes as text: "100,200"


@dataclass(frozen=True, kw_only=True)
class ExperimentRuns:
    """What a room says about its runs."""

    check: Callable[[Case], object]  # raises ValueError for a case that contradicts itself
    label: Callable[[Case], str]  # the case in words, for tables and progress
    # By which runs are compared; {} for a failed run
    figures: Callable[[Run], dict[str, float]]
    figure_names: dict[str, str] = field(default_factory=dict)  # of those that plain runs lack
    kv_unified: str | None = None  # the setting's default; None if the runs have one sequence


@functools.cache
def experiment_runs(name: str) -> ExperimentRuns:
    """What the experiment's room says. ValueError if this version of the lab has no such
    experiment."""
    feature = feature_list.by_name().get(name)
    if feature is None or feature.experiment is None:
        raise ValueError(
            f"it is a run of lab {name}, which this version of the lab does not have"
        )
    runs: ExperimentRuns = feature_list.load(feature.experiment)
    return runs


def check(experiment: str | None, case: Case) -> None:
    """ValueError for an unknown experiment, and for a case that contradicts itself."""
    if experiment is not None:
        experiment_runs(experiment).check(case)


def case_label(experiment: str | None, case: Case) -> str | None:
    """The case of an experiment in words; None for a plain run."""
    if experiment is None:
        return None
    return experiment_runs(experiment).label(case)


def run_label(n_prompt: int, experiment: str | None, case: Case) -> str:
    """What a run does, for tables, progress lines and errors."""
    label = case_label(experiment, case)
    if label is None:
        return plural(n_prompt, "prompt token")
    return f"{plural(n_prompt, 'prompt token')}, {label}"


def run_name(run: Run) -> str:
    """What a run did, in words."""
    return run_label(run.n_prompt, run.experiment, run.case)


def figures(run: Run) -> dict[str, float]:
    """The figures by which runs of an experiment are compared, by name; empty for a plain run."""
    if run.experiment is None:
        return {}
    return experiment_runs(run.experiment).figures(run)


@functools.cache
def figure_names() -> dict[str, str]:
    """In words: the figures of experiments that plain runs do not have."""
    names: dict[str, str] = {}
    for feature in feature_list.FEATURES:
        if feature.experiment is not None:
            names |= experiment_runs(feature.name).figure_names
    return names


def case_of(setup: object) -> dict[str, Value]:
    """The case that a setup is written as; lists of numbers become text."""
    case: dict[str, Value] = {}
    for name, value in vars(setup).items():
        case[name] = ",".join(map(str, value)) if isinstance(value, tuple) else value
    return case


def setup_of(cls: type[Setup], case: Case) -> Setup:
    """The setup that a case was written from; an absent value has its default. ValueError for a
    missing, unknown or wrong value."""
    types = get_type_hints(cls)
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        if each.name not in case and each.default is dataclasses.MISSING:
            raise ValueError(f"its case has no {each.name}")
    values: dict[str, object] = {}
    for name, value in case.items():
        if name not in types:
            raise ValueError(f"its case has an unknown {name}")
        values[name] = _parsed(name, value, types[name])
    return cls(**values)


def _parsed(name: str, value: Value, expected: type) -> object:
    """A value of a case as its field of the setup has it. ValueError for a wrong type."""
    if expected == NUMBERS:
        if not isinstance(value, str):
            raise ValueError(f"its case's {name} is not a list of numbers")
        return tuple(int(number) for number in value.split(",") if number)
    is_flag_for_number = isinstance(value, bool) and expected is not bool
    if not isinstance(value, expected) or is_flag_for_number:
        raise ValueError(f"its case's {name} is {value!r}")
    return value
