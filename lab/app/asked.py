"""What the user asked for, as words of a command line: stored in every record, and shown to measure
again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click
from click.core import ParameterSource

from lab import feature_list
from lab.core import shell

ASKED_FOR = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
NOT_STORED = {
    *("out", "as_json", "no_plot", "report", "details", "stream", "dry_run", "yes", "save"),
    *("header", "watch"),  # a header may hold a key
}


def words_of_command(ctx: click.Context) -> list[str]:
    """The command and the options that were given, without those of output and without secrets."""
    words = [str(ctx.command.name)]
    for parameter in ctx.command.params:
        name = str(parameter.name)
        value = ctx.params.get(name)
        is_given = ctx.get_parameter_source(name) in ASKED_FOR
        if is_given and name not in NOT_STORED:
            words += _words_of_parameter(parameter, value)
    return words


def _words_of_parameter(parameter: click.Parameter, value: Any) -> list[str]:
    values = value if isinstance(value, (tuple, list)) else [value]
    if isinstance(parameter, click.Argument):
        return [_public(str(each).strip()) for each in values if each is not None]
    flag = max(parameter.opts, key=len)
    if isinstance(value, bool) and getattr(parameter, "is_flag", False):
        if value:
            return [flag]
        return [max(parameter.secondary_opts, key=len)] if parameter.secondary_opts else []
    words: list[str] = []
    for each in values:
        if each is not None:
            words += [flag, _public(str(each))]
    return words


def _public(word: str) -> str:
    """A word without what may name a person or hold a key: folders of files, the user and password
    of an address."""
    if "://" in word:
        address = urlsplit(word)
        host = address.netloc.rpartition("@")[2]
        return urlunsplit((address.scheme, host, address.path, "", ""))
    path = Path(word)
    if path.name != word and len(word) < 4096 and path.exists():
        return path.name
    return word


def words_of_values(command: click.Command, values: Mapping[str, Any]) -> list[str]:
    """The command for values by the names of its parameters, as a function gets them; defaults are left out."""
    words = [str(command.name)]
    for parameter in command.params:
        name = str(parameter.name)
        if name in values and name not in NOT_STORED and values[name] != parameter.default:
            value = values[name]
            is_flag = getattr(parameter, "is_flag", False)
            is_multiple = getattr(parameter, "multiple", False)
            if isinstance(value, (tuple, list)) and not is_multiple:
                value = ",".join(map(str, value))
            elif isinstance(value, bool) and not is_flag:
                value = "on" if value else "off"
            words += _words_of_parameter(parameter, value)
    return words


def line(records: Sequence[Any]) -> str | None:
    """The command line that made a session; None where it is not known, as for imported results."""
    for record in records:
        words = record.command
        if words and words[0] in feature_list.by_name():
            return shell.lab(*words)
    return None
