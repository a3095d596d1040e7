"""What an experiment declares: its command, its public function and its table are made of one declaration."""

from __future__ import annotations

import inspect

import click
import pytest

import lab
from lab.core.asked_settings import defaults
from lab.features import batch, stall, turns
from lab.features.experiment import Experiment
from lab.features.speculate import speculation
from lab.main import lab as cli

EXPERIMENTS = [one.EXPERIMENT for one in (batch, turns, stall, speculation)]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_the_command_has_the_defaults_of_the_function(experiment: Experiment) -> None:
    options = {option.name: option for option in cli.commands[experiment.name].params}
    parameters = inspect.signature(getattr(lab, experiment.name)).parameters
    assert "worker" not in parameters and "folder" not in parameters
    own = [option.name for option in experiment.options if option.name not in defaults()]
    assert {*own, "model", "settings"} == parameters.keys()
    for name in (*own, "model"):
        assert isinstance(options[name], click.Option) and options[name].default == parameters[name].default, name


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda one: one.name)
def test_the_function_says_what_it_does(experiment: Experiment) -> None:
    function = getattr(lab, experiment.name)
    assert function.__name__ == experiment.name and f"lab.{experiment.name}(" in function.__doc__
