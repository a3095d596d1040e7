"""The one door from Python: every public function is called through `public`.

It reads each argument by its declared type, refuses unknown keywords by name, checks settings
before a child starts, and says errors in the words of Python.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lab.app import python_words
from lab.core import arguments
from lab.core.asked_settings import table
from lab.errors import LabError

COLUMNS = {"n_prompt": "prompt_len", "n_gen": "gen", "quiet": "watch", "verbose": "watch"}
"""Words that people try, such as columns of `runs`, and the argument that is meant."""

IS_SETTINGS = "Unpack["  # the type of `**settings` names what may be given


def public(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """A public function as users call it: `lab.NAME`."""

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        try:
            bound = _bound(name, function, args, keywords)
            return function(*bound.args, **bound.kwargs)
        except LabError as problem:
            raise python_words.translated(problem) from None

    call.__module__ = "lab"
    call.__qualname__ = name
    return call


def _bound(
    name: str,
    function: Callable[..., object],
    args: tuple[object, ...],
    keywords: dict[str, object],
) -> inspect.BoundArguments:
    """The arguments of a call as plain values. TypeError for those that it does not have."""
    signature = inspect.signature(function)
    settings_of = {}
    collector = None
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            collector = parameter.name
            settings_of = _keywords_of(function, parameter.annotation)
    known_names = [
        *(parameter for parameter in signature.parameters if parameter != collector),
        *settings_of,
    ]
    _refuse_unknown(f"lab.{name}() has no argument", keywords, known_names)
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as problem:
        raise TypeError(f"lab.{name}(): {problem}") from None
    for argument, value in bound.arguments.items():
        parameter = signature.parameters[argument]
        if argument == collector:
            bound.arguments[argument] = _settings(value, settings_of)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            values = [_read(argument, item, parameter.annotation) for item in value]
            bound.arguments[argument] = tuple(values)
        elif argument == "variants":
            bound.arguments[argument] = _variants(name, value, ["model", *settings_of])
        elif value is not parameter.default:
            bound.arguments[argument] = _read(argument, value, parameter.annotation)
    return bound


def _keywords_of(function: Callable[..., object], annotation: str) -> dict[str, str]:
    """The keywords of a function's settings with their declared types."""
    name = annotation.removeprefix(IS_SETTINGS).removesuffix("]")
    module = vars(sys.modules[function.__module__])
    declared = module[name].__annotations__
    return {key: getattr(kind, "__forward_arg__", str(kind)) for key, kind in declared.items()}


def _refuse_unknown(begin: str, names: Iterable[str], known_names: list[str]) -> None:
    """TypeError for the first name that is not known, with the one that is meant."""
    columns = dict(COLUMNS)
    for setting, entry in table().items():
        if entry.record_name:
            columns[entry.record_name] = setting
    for name in names:
        if name in known_names:
            continue
        meant = columns.get(name, "")
        close = (
            [meant] if meant in known_names else difflib.get_close_matches(name, known_names)
        )
        hint = f" Did you mean {close[0]}?" if close else ""
        raise TypeError(f"{begin} {name!r}.{hint}")


def _read(name: str, value: object, annotation: str) -> object:
    """An argument as its declared type says; types that are not listed are left alone."""
    declared = annotation.split(" | ")
    if value is None and "None" in declared:
        return None
    for kind in declared:
        if kind in arguments.BY_TYPE:
            return arguments.BY_TYPE[kind](name, value)
    return value


def _settings(
    keywords: Mapping[str, object], declared: Mapping[str, str]
) -> dict[str, object]:
    """Keywords beyond the parameters: settings by their table, others by their declared type."""
    values = arguments.settings(keywords)
    for name, value in values.items():
        if not arguments.is_setting(name):
            values[name] = _read(name, value, declared[name])
    return values


def _variants(name: str, variants: object, known_names: list[str]) -> list[dict[str, object]]:
    """The variants of a trial, each a mapping of settings."""
    values: list[Any] = list(variants) if arguments.is_sequence(variants) else []
    is_list = arguments.is_sequence(variants)
    if not is_list or not all(isinstance(variant, Mapping) for variant in values):
        allowed = 'a list of settings, such as [{"threads": 1}, {"threads": 2}]'
        raise arguments.refused("variants", variants, allowed)
    for number, variant in enumerate(values):
        _refuse_unknown(f"A variant of lab.{name}() has no setting", variant, known_names)
        values[number] = arguments.settings(variant)
    return values
