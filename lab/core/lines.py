"""Write the dataclasses of record.py as lines of JSON, and read them back with every type and range
checked.

A missing key gets its field's default, and an unknown key is ignored. Lines of another
schema than SCHEMA, older or newer, are refused; who reads a file skips them with the reason
(`results.read`).

Files may come from anyone, and figures are computed from them: reading removes control characters
from every string, and refuses numbers far beyond what a machine can do, so that arithmetic neither
overflows nor takes gigabytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lab import feature_list
from lab.core import coherence, experiments
from lab.core.record import SCHEMA, Ceilings, Machine, Record
from lab.core.request import RequestRecord
from lab.errors import printable

if TYPE_CHECKING:
    from msgspec.json import Decoder

T = TypeVar("T")


class ResultLine(Protocol):
    """What a line with a result says: a run, a request, or a line of a feature's own kind."""

    @property
    def session(self) -> str: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def model_name(self) -> str: ...
    @property
    def started_at(self) -> str: ...
    @property
    def command(self) -> tuple[str, ...] | None: ...
    @property
    def is_good(self) -> bool: ...


Lines = Sequence[ResultLine]
Line = ResultLine | Ceilings  # of a results file
BASE_LINES: dict[str, type[Line]] = {
    "run": Record,
    "ceilings": Ceilings,
    "request": RequestRecord,
}
KEPT_AS_SENT = "is_kept_as_sent"
"""Metadata of a field that holds what a stranger sent: it is not cleaned, and never shown."""

TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
}


def to_json(value: object) -> str:
    """Nested dataclasses as one line of JSON without spaces. Lone surrogates become question
    marks."""
    text = json.dumps(
        value, default=fields_of, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode(errors="replace").decode()


def fields_of(value: object) -> object:
    """The JSON value of a dataclass or a path."""
    if isinstance(value, Path):
        return str(value)
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def from_json(cls: type[T], text: str) -> T:
    """The dataclass that `to_json` wrote, printable and in range. ValueError says what is wrong and
    where."""
    value: T = cleaned(_decode(cls, text.encode(errors="replace"), cls.__name__))
    return value


def converted(value: object, hint: type[T]) -> T:
    """A JSON value converted to a type: nested dataclasses and paths."""
    import msgspec

    return msgspec.convert(value, hint, dec_hook=lambda cls, text: cls(text))


@dataclass(frozen=True)
class _Head:
    """The fields that tell how to read a line: its version and its kind."""

    schema: Any = None
    kind: Any = "run"


def parse_line(line: bytes) -> Line:
    """A line of a results file. ValueError says why it cannot be read."""
    if not line.endswith(b"\n"):
        raise ValueError("the line is truncated")
    try:
        head = _decode(_Head, line, "line")
    except _WrongType:
        head = _Head()
    check_schema(head.schema)
    kind = str(head.kind)
    place = "record" if kind == "run" else kind
    parsed: Line = _decode(line_class(kind), line, place)
    may_need_cleaning = not line.isascii() or b"\\" in line or b"\x7f" in line
    if may_need_cleaning:  # only few lines, and it is slow
        parsed = cleaned(parsed)
    if isinstance(parsed, Record | RequestRecord):
        experiments.check(parsed.experiment, parsed.case)
    coherence.check(parsed)
    return parsed


def check_schema(schema: object) -> None:
    """ValueError for a line of another version of the lab, or of something else."""
    if type(schema) is not int or schema < 1:
        raise ValueError("it is not a record of the lab (no schema number)")
    if schema > SCHEMA:
        hint = "update mini-lab"
        raise ValueError(
            f"it was written by a newer version of the lab (schema {schema}): {hint}"
        )
    if schema < SCHEMA:
        hint = "measure again"
        raise ValueError(
            f"it was written by an older version of the lab (schema {schema}): {hint}"
        )


def line_class(kind: str) -> type[Line]:
    """The class of a kind of line. ValueError for a kind that no feature of this version has."""
    if kind in BASE_LINES:
        return BASE_LINES[kind]
    target = feature_list.line_targets().get(kind)
    if target is None:
        shown = printable(kind[:40])
        raise ValueError(f"this version of the lab has no lines of the kind {shown!r}")
    cls: type[Line] = feature_list.load(target)
    return cls


def cleaned(value: object) -> Any:
    """`value`, a dataclass or a part of one, with every string printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, tuple):
        has_numbers_only = set(map(type, value)) <= {int}
        return value if has_numbers_only else tuple(map(cleaned, value))
    if isinstance(value, dict):
        return {cleaned(key): cleaned(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields: dict[str, object] = {}
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            is_as_sent = field.metadata.get(KEPT_AS_SENT)
            fields[field.name] = part if is_as_sent else cleaned(part)
        return type(value)(**fields)
    return value


class _WrongType(ValueError):
    """JSON of the wrong type."""


@cache
def _decoder(cls: Any) -> Decoder[Any]:
    from msgspec.json import Decoder

    return Decoder(cls)


def _decode(cls: Any, text: bytes, name: str) -> Any:
    """JSON as the dataclass `cls`, with types checked. A ValueError calls the whole value
    `name`."""
    import msgspec

    try:
        return _decoder(cls).decode(text)
    except msgspec.ValidationError as error:
        problem = str(error)  # such as "Expected `int`, got `str` - at `$.run.n_prompt`"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is not JSON") from None
    raise _WrongType(_type_error(problem, name, text))


def _type_error(problem: str, name: str, text: bytes) -> str:
    """What msgspec found wrong, in the lab's words."""
    reason, _, path = problem.partition(" - at `$")
    path = path.removesuffix("`")
    place = name + path
    missing = re.fullmatch(r"Object missing required field `(\w+)`", reason)
    if missing:
        return f"{place}.{missing[1]} is missing"
    types = re.fullmatch(r"Expected `(\w+)(?: \| null)?`, got `(\w+)`", reason)
    if types and types[2] == "null":
        return f"{place} is missing"
    if types:
        expected, actual = (TYPE_NAMES.get(kind, f"an {kind}") for kind in types.groups())
        return f"{place} is {actual}, not {expected}"
    bound = re.fullmatch(r"Expected `\w+` (of length )?([<>])= (\S+)", reason)
    if bound:
        of_length, side, limit = bound.groups()
        value = _value_at(text, path)
        if of_length:
            return f"{place} has {len(value):,} letters, and may have {int(limit):,}"
        least_or_most = "at most" if side == "<" else "at least"
        return f"{place} is {_shown(value)}, and may be {least_or_most} {_shown(float(limit))}"
    return f"{place}: {reason[0].lower()}{reason[1:]}"


def _value_at(text: bytes, path: str) -> Any:
    """The value at a path of msgspec, such as .run.token_ids[1]; of a mapping the whole."""
    value = json.loads(text, parse_int=float)  # an int may have too many digits for Python
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        value = value[key] if key else value[int(index)]
    return value


def _shown(value: object) -> str:
    """A value that is out of range; of a mapping, which is not searched, nothing."""
    if not isinstance(value, int | float):
        return "out of range"
    if abs(value) >= 10**21:
        return "too large" if value > 0 else "too small"
    return f"{value:,.0f}" if value == int(value) else f"{value:,}"
