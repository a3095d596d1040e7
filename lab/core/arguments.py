"""The arguments of public functions: what people write, as plain values of Python.

Numbers and arrays of numpy, series of pandas, numbers in strings, percents and paths are taken
where their meaning is plain. A LabError says what an argument may be before anything is measured.
"""

from __future__ import annotations

import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, SupportsIndex, TypedDict, TypeGuard

from lab.core import sampling
from lab.core.asked_settings import AskedSettings, in_digits, table
from lab.core.files import expanded
from lab.errors import LabError

Numbers = str | SupportsIndex | Iterable[SupportsIndex]
"""Several whole numbers: `1,4`, in Python also 4, [1, 4] or an array."""

Texts = str | Iterable[str]
"""Several words: with commas in a string, or a list."""

Share = float | str  # 0.02, or 2%
Time = float | str  # seconds, or 10min
StrPath = str | os.PathLike[str]
Paths = StrPath | Iterable[StrPath]


class Repeating(TypedDict, total=False):
    """How often to repeat."""

    until: Share | None  # until every median is known to within this share
    max_repeats: int  # rounds, with `until`
    budget: Time | None  # time to spend


class Reaching(TypedDict, total=False):
    """How to reach a server, and how long to wait for it."""

    api: str | None  # chat or completions; None: what the server has
    api_key_env: str | None  # the environment variable with the key
    header: Sequence[str]  # each NAME: VALUE
    timeout: float  # seconds after which a request times out


SWITCHES = {
    "1": "on",
    "true": "on",
    "enabled": "on",
    "0": "off",
    "false": "off",
    "disabled": "off",
    "-1": "auto",
}
"""llama.cpp's other words for on, off and auto."""

WHOLE = re.compile(r"[+-]?\d{1,15}", re.ASCII)


def shown(name: str, value: object) -> str:
    """An argument as Python writes it, of a bounded length."""
    return f"{name}={reprlib.repr(value)}"


def refused(name: str, value: object, allowed: str) -> LabError:
    """The error for a value that an argument cannot have."""
    return LabError(f"{shown(name, value)} is not possible.", f"Give {allowed}.")


def plain(value: object) -> Any:
    """A number or array of another library as Python's own; anything else as it is."""
    convert = getattr(value, "tolist", None) or getattr(value, "to_list", None)
    return value if convert is None or isinstance(value, type) else convert()


def whole_number(name: str, value: object) -> int:
    """A whole number, also as 8.0, "8" or "8k"."""
    number = plain(value)
    if isinstance(number, str):
        digits = in_digits(number.strip())
        if WHOLE.fullmatch(digits):
            return int(digits)
    elif isinstance(number, (float, Decimal, Fraction)):
        if math.isfinite(number) and number == int(number):
            return int(number)
    elif not isinstance(number, bool) and hasattr(number, "__index__"):
        return operator.index(number)
    raise refused(name, value, "a whole number, such as 8")


def number(name: str, value: object) -> float:
    """A number, also in a string."""
    given_number = plain(value)
    if isinstance(given_number, (str, int, float, Decimal, Fraction)):
        is_switch = isinstance(given_number, bool)
        try:
            converted = float(given_number)
        except (ValueError, OverflowError):
            converted = math.nan
        if math.isfinite(converted) and not is_switch:
            return converted
    raise refused(name, value, "a number")


def share_of(text: str) -> float:
    """2% or 0.02 as 0.02. ValueError for anything that is not from 0 to below 1."""
    share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= share < 1:
        raise ValueError
    return share


def share(name: str, value: object) -> float:
    """A share, such as 0.02 or "2%"."""
    given_share = plain(value)
    if isinstance(given_share, (str, int, float)) and not isinstance(given_share, bool):
        try:
            return share_of(str(given_share).strip().replace(" %", "%"))
        except ValueError:
            pass
    raise refused(name, value, 'a share from 0 to below 1, such as 0.02 or "2%"')


def duration(name: str, value: object) -> float | str:
    """Seconds, or a time with its unit."""
    time = plain(value)
    seconds = getattr(time, "total_seconds", None)
    if seconds is not None:
        return float(seconds())
    if isinstance(time, str) or (
        isinstance(time, (int, float)) and not isinstance(time, bool)
    ):
        return time
    raise refused(name, value, 'seconds, or a time such as "10min"')


def whole_numbers(name: str, value: object) -> str | tuple[int, ...]:
    """Several whole numbers; a string is left to its reader."""
    several = plain(value)
    if isinstance(several, str):
        return several
    if is_sequence(several):
        return tuple(whole_number(name, item) for item in several)
    return (whole_number(name, several),)


def text(name: str, value: object) -> str:
    """A text, also as a path."""
    content = plain(value)
    if isinstance(content, os.PathLike):
        content = str(expanded(Path(content)))
    if not isinstance(content, str):
        raise refused(name, value, "a text")
    return content


def texts(name: str, value: object) -> str | tuple[str, ...]:
    """A text, or several."""
    several = plain(value)
    if is_sequence(several):
        return tuple(text(name, item) for item in several)
    return text(name, several)


def path(name: str, value: object) -> Path:
    """A path, with the user's home in place of ~."""
    if isinstance(value, (str, os.PathLike)):
        text_of_path = os.fspath(value)
        if isinstance(text_of_path, str) and text_of_path:
            return expanded(text_of_path)
    raise refused(name, value, "a path")


def paths(name: str, value: object) -> list[Path]:
    """Paths, also a single one."""
    several = list(value) if is_sequence(value) else [value]
    return [path(name, item) for item in several]


def switch(name: str, value: object) -> bool:
    """True or False, also as "on" or "off"."""
    state = plain(value)
    if isinstance(state, str):
        state = {"on": True, "off": False}.get(state.strip().lower())
    if not isinstance(state, bool):
        raise refused(name, value, "True or False")
    return state


def is_sequence(value: object) -> TypeGuard[Iterable[object]]:
    """Whether a value has items of its own; texts and mappings are single values."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))


def word(name: str, value: object, choices: Sequence[str]) -> str:
    """One of a few words; True and False are on and off."""
    spelled = str(plain(value)).strip().lower()
    chosen = SWITCHES.get(spelled, spelled)
    if chosen not in choices:
        raise refused(name, value, f"one of {', '.join(map(repr, choices))}")
    return chosen


def number_or_word(name: str, value: object, choices: Sequence[str]) -> int | str:
    """A whole number, or one of a few words."""
    lower = str(plain(value)).strip().lower()
    if lower in choices:
        return lower
    try:
        return whole_number(name, value)
    except LabError:
        alternatives = " or ".join(map(repr, choices))
        raise refused(name, value, f"a whole number, or {alternatives}") from None


def number_list(name: str, value: object) -> str | tuple[float, ...]:
    """Numbers, or a text with commas."""
    several = plain(value)
    if is_sequence(several):
        return tuple(number(name, item) for item in several)
    return text(name, several)


def text_list(name: str, value: object) -> tuple[str, ...]:
    """Several texts; a single one is a list of one."""
    several = texts(name, value)
    return (several,) if isinstance(several, str) else several


def watcher(name: str, value: object) -> object:
    """A function that is called with statuses, or whether they are shown."""
    if not callable(value) and not isinstance(value, bool):
        raise refused(name, value, "a function, True or False")
    return value


Convert = Callable[[str, object], object]

BY_TYPE: dict[str, Convert] = {
    "Numbers": whole_numbers,
    "Texts": texts,
    "Sequence[str]": text_list,
    "Share": share,
    "Time": duration,
    "StrPath": path,
    "Paths": paths,
    "Watch": watcher,
    "int": whole_number,
    "float": number,
    "bool": switch,
    "str": text,
}
"""How an argument is read, by the name of its declared type; the first that is declared counts."""


def setting(name: str, value: object) -> object:
    """The value of a setting of the engine, by the table of settings."""
    entry = table()[name]
    kinds = table()[name].types
    if entry.choices:
        return word(name, value, entry.choices)
    if bool in kinds:
        return switch(name, value)
    if name == "tensor_split":
        return number_list(name, value)
    if name == "lib":
        return str(path(name, value))
    if int not in kinds:
        several = texts(name, value)
        return ",".join(several) if name == "prompt" and is_sequence(several) else several
    if entry.words:
        return number_or_word(name, value, entry.words)
    return whole_number(name, value)


def is_setting(name: str) -> bool:
    """Whether a keyword is a setting of the engine or of its sampler."""
    return name in table() or name in sampling.table()


def settings(keywords: Mapping[str, object]) -> dict[str, Any]:
    """Settings of the engine and of its sampler as plain values; None stands for the default.

    LabError for a value that is not possible on any machine.
    """
    plain_values: dict[str, Any] = {}
    for name, value in keywords.items():
        plain_values[name] = value
        if value is None:
            plain_values[name] = getattr(AskedSettings, name, None)
        elif name in table():
            plain_values[name] = setting(name, value)
        elif name in sampling.table():
            kind = sampling.table()[name].type
            plain_values[name] = texts(name, value) if kind is str else number(name, value)
            if kind is int:
                plain_values[name] = whole_number(name, value)
    of_engine = {name: value for name, value in plain_values.items() if name in table()}
    AskedSettings(**of_engine).check()
    return plain_values
