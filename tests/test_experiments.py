"""What an experiment declares: its command and its public function are made of one declaration."""

from __future__ import annotations

import inspect

import pytest

import lab
from lab.main import lab as cli


@pytest.mark.parametrize("name", ["batch", "turns", "stall", "speculate"])
def test_the_command_has_the_parameters_and_defaults_of_the_function(name: str) -> None:
    function = getattr(lab, name)
    options = {option.name: option for option in cli.commands[name].params}
    parameters = inspect.signature(function).parameters
    assert function.__name__ == name and f"lab.{name}(" in function.__doc__
    assert (
        not {"worker", "folder"} & parameters.keys()
        and parameters.keys() - {"settings"} <= options.keys()
    )
    for key in parameters.keys() - {"settings"}:
        assert options[key].default == parameters[key].default, key
