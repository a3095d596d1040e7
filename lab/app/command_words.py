"""What the user asked for, as words of a command line: stored in every record, and shown to measure
again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import click
from click.core import ParameterSource

from lab import feature_list
from lab.app.options import UNSTORED
from lab.core import shell
from lab.core.files import exists
from lab.models import catalog

if TYPE_CHECKING:
    from lab.core.lines import Lines

ASKED_FOR = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


def words_of_command(ctx: click.Context) -> list[str]:
    """The command and the options that were given, without those of output and without secrets."""
    command = [str(ctx.command.name)]
    for parameter in ctx.command.params:
        name = str(parameter.name)
        is_asked = ctx.get_parameter_source(name) in ASKED_FOR
        if is_asked and not isinstance(parameter, UNSTORED):
            command += _words_of_parameter(parameter, ctx.params.get(name))
    return command


def _words_of_parameter(parameter: click.Parameter, value: object) -> list[str]:
    if isinstance(value, bool) and getattr(parameter, "is_flag", False):
        flags = parameter.opts if value else parameter.secondary_opts
        return [max(flags, key=len)] if flags else []
    arguments: list[str] = []
    for item in value if isinstance(value, (tuple, list)) else [value]:
        if item is None:
            continue
        if not isinstance(parameter, click.Argument):
            arguments.append(max(parameter.opts, key=len))
        arguments.append(_public(str(item).strip()))
    return arguments


def _public(word: str) -> str:
    """A word without what may name a person or hold a key: folders of files outside the current
    one, the user and password of an address."""
    if "://" in word:
        try:
            address = urlsplit(word)
        except ValueError:  # what it is no address of may hold a password
            return f"{word.partition('://')[0]}://"
        host = address.netloc.rpartition("@")[2]
        return urlunsplit((address.scheme, host, address.path, "", ""))
    path = Path(word)
    is_inside = not path.is_absolute() and ".." not in path.parts
    if is_inside:
        return word
    if path.name != word and exists(path):
        return path.name
    return word


def _findable(word: str) -> str:
    """A stored word; the name of a model's file that is not here needs its folder."""
    is_name = word.endswith(".gguf") and "/" not in word and ":" not in word
    return catalog.elsewhere(word) if is_name else word


def words_of_values(command: click.Command, values: Mapping[str, object]) -> list[str]:
    """The command for values by the names of its parameters, without defaults and secrets."""
    arguments = [str(command.name)]
    for parameter in command.params:
        name = str(parameter.name)
        if name not in values or isinstance(parameter, UNSTORED):
            continue
        value = values[name]
        if value == parameter.default:
            continue
        takes_several = getattr(parameter, "multiple", False) or parameter.nargs != 1
        if isinstance(value, (tuple, list)) and not takes_several:
            value = ",".join(map(str, value))
        elif isinstance(value, bool) and not getattr(parameter, "is_flag", False):
            value = "on" if value else "off"
        arguments += _words_of_parameter(parameter, value)
    return arguments


def line(records: Lines) -> str | None:
    """The command line that made a session; None where it is not known, as for imported results."""
    for record in records:
        command = record.command
        if command and command[0] in feature_list.by_name():
            return shell.lab(*map(_findable, command))
    return None
