"""What an experiment declares: its command and its public function have the same parameters."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core.results import read
from lab.feature_list import FEATURES
from lab.features.batch import batch
from lab.main import lab as cli

OF_OUTPUT = {"out", "watch"}


EXPERIMENTS = [feature.name for feature in FEATURES if feature.experiment is not None]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_has_the_parameters_and_defaults_of_the_function(name: str) -> None:
    function = getattr(lab, name)
    defaults = cli.commands[name].make_context(name, []).params
    parameters = inspect.signature(function).parameters

    assert function.__name__ == name
    assert f"lab.{name}(" in function.__doc__
    for key in parameters.keys() - OF_OUTPUT - {"settings"}:
        assert defaults[key] == parameters[key].default, key


def test_the_function_stores_the_command_that_measures_the_same(
    mini: Path, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {
        "prompt": "random",
        "threads": 1,
        "kv_unified": True,
        "out": tmp_path,
    }

    batch([1, 2], 24, 4, 1, str(mini), **asked)

    record, *_ = read([tmp_path]).records
    expected = [
        "batch",
        "--sequences",
        "1,2",
        "--prompt-len",
        "24",
        "--gen",
        "4",
        "--repeat",
        "1",
    ]
    assert record.command is not None
    assert list(record.command[:9]) == expected
    assert {"--kv-unified", "on"} <= set(record.command)
    assert "--shared-prompt" not in record.command
