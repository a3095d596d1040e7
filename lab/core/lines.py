"""Write the dataclasses of record.py as lines of JSON, and read them back with every type and range checked.

A missing key gets its field's default, and an unknown key is ignored. Files may come from anyone, and figures are
computed from them: reading removes control characters from every string, and refuses numbers far beyond what a machine
can do, so that arithmetic neither overflows nor takes gigabytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lab.core.record import SCHEMA, Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import printable

if TYPE_CHECKING:
    from msgspec.json import Decoder

T = TypeVar("T")
Line = Record | Ceilings | RequestRecord  # a line of a results file
RANGES: tuple[
    tuple[str, float, float], ...
] = (  # the first one whose pattern is a field's name counts
    ("n_batch|n_ubatch|n_seq_max|every|concurrency", 1, 10**7),
    ("n_threads.*|n_gpu_layers|n_cpu_moe|main_gpu", -1, 10**6),
    ("n_layer|n_head.*|head_dim.*|n_expert.*|heads.*|windows|n_cores.*|n_slots", 0, 10**5),
    ("n_prompt.*|n_gen|n_ctx.*|n_context|n_before|n_streams|n_draft|n_seq|n_past|chunk", 0, 10**7),
    ("n_tokens|n_outputs|n_positions|.*_tokens|repeat|block|engine|round", 0, 10**7),
    ("n_embd|n_ff.*|n_vocab|token_ids", 0, 10**9),
    ("rows|columns", 0, 10**11),
    ("times_ns", 1, 10**15),
    (".*_ns", 0, 10**15),
    ("n|.*_bytes|n_params|.*_j|joules", 0, 10**16),
    ("flops", 0, 10**21),
    ("seed", -(2**63), 2**64),
    ("rate|duration_s", 1e-9, 10**9),
    (".*", -(10**15), 10**15),
)
GONE = {"prefix": "lab prefix"}
"""Fields of runs and their settings that older versions wrote, and what they were for."""

MOST_LETTERS = 10_000  # length of a text
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
}


def to_json(value: Any) -> str:
    """Nested dataclasses as one line of JSON without spaces. Lone surrogates become question marks."""
    text = json.dumps(
        value, default=fields_of, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode(errors="replace").decode()


def fields_of(value: Any) -> Any:
    """The JSON value of a dataclass or a path."""
    if isinstance(value, Path):
        return str(value)
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def from_json(cls: type[T], text: str) -> T:
    """The dataclass that `to_json` wrote, printable and in range. ValueError says what is wrong and where."""
    value: T = cleaned(_decode(cls, text.encode(errors="replace"), cls.__name__))
    check(value, cls.__name__.lower())
    return value


def converted(value: Any, hint: Any) -> Any:
    """A JSON value converted to a type: nested dataclasses and paths."""
    import msgspec

    return msgspec.convert(value, hint, dec_hook=lambda cls, text: cls(text))


@dataclass(frozen=True)
class _Head:
    """The fields that tell how to read a line: its version, and whether it has rates (ceilings) or an endpoint."""

    schema: Any = None
    rates: Any = None
    endpoint: Any = None


def parse_line(line: bytes) -> Line:
    """A line of a results file (a run, ceilings, or a request). ValueError says why it cannot be read."""
    if not line.endswith(b"\n"):
        raise ValueError("the line is truncated")
    try:
        head = _decode(_Head, line, "line")
    except _WrongType:
        head = _Head()
    version = head.schema
    if type(version) is not int or version < 1:
        raise ValueError("it is not a record of the lab (no schema number)")
    if version != SCHEMA:
        age, hint = (
            ("a newer", "update mini-lab") if version > SCHEMA else ("an older", "measure again")
        )
        raise ValueError(f"it was written by {age} version of the lab (schema {version}): {hint}")
    cls = Ceilings if head.rates is not None else Record if head.endpoint is None else RequestRecord
    name = {Ceilings: "ceilings", Record: "record", RequestRecord: "request"}[cls]
    parsed: Line = _decode(cls, line, name)
    gone = [name for name in GONE if cls is Record and f'"{name}"'.encode() in line]
    whole = json.loads(line) if gone else {}
    for name in gone:  # read without these fields, it would be a plain run
        if {**whole["settings"], **whole["run"]}.get(name) is not None:
            raise ValueError(
                f"it is a run of {GONE[name]}, which this version of the lab no longer has"
            )
    if (
        not line.isascii() or b"\\" in line or b"\x7f" in line
    ):  # only few lines need the slow cleaning
        parsed = cleaned(parsed)
    check(parsed, name)
    return parsed


def cleaned(value: Any) -> Any:
    """`value`, a dataclass or a part of one, with every string printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, tuple):
        return value if set(map(type, value)) <= {int} else tuple(map(cleaned, value))
    if isinstance(value, dict):
        return {cleaned(key): cleaned(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{name: cleaned(part) for name, part in fields_of(value).items()})
    return value


def check(value: Any, place: str, name: str = "") -> None:
    """ValueError if a part of a line's dataclass is outside of its range; `place` names the whole."""
    kind = type(value)
    if kind is int or kind is float:
        _check_numbers(value, value, place, name)
    elif kind is str:
        if len(value) > MOST_LETTERS:
            raise ValueError(f"{place} has {len(value):,} letters, and may have {MOST_LETTERS:,}")
    elif kind is tuple and value:
        kinds = set(map(type, value))
        if kinds <= {int, float}:
            _check_numbers(min(value), max(value), place, name)
        elif kinds == {str}:
            check(max(value, key=len), place, name)
        else:
            for part in value:
                check(part, place, name)
    elif kind is dict:
        for key, part in value.items():
            check(key, place)
            check(part, place, name)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            check(getattr(value, field.name), f"{place}.{field.name}", field.name)


def _check_numbers(low: float, high: float, place: str, name: str) -> None:
    least, most = _range(name)
    if not (least <= low and high <= most):
        wrong = low if low < least else high
        shown = f"{wrong:,}" if abs(wrong) < 10**21 else "too large" if wrong > 0 else "too small"
        raise ValueError(f"{place} is {shown}, and may be {least:,} to {most:,}")


@cache
def _range(name: str) -> tuple[float, float]:
    return next((least, most) for pattern, least, most in RANGES if re.fullmatch(pattern, name))


class _WrongType(ValueError):
    """JSON of the wrong type."""


@cache
def _decoder(cls: Any) -> Decoder[Any]:
    from msgspec.json import Decoder

    return Decoder(cls)


def _decode(cls: Any, text: bytes, name: str) -> Any:
    """JSON as the dataclass `cls`, with types checked. A ValueError calls the whole value `name`."""
    import msgspec

    try:
        return _decoder(cls).decode(text)
    except (
        msgspec.ValidationError
    ) as error:  # such as "Expected `int`, got `str` - at `$.run.n_prompt`"
        problem, _, path = str(error).partition(" - at `$")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError("it is not JSON") from None
    place = name + path.removesuffix("`")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", problem):
        raise _WrongType(f"{place}.{missing[1]} is missing")
    if types := re.fullmatch(r"Expected `(\w+)(?: \| null)?`, got `(\w+)`", problem):
        expected, got = (_TYPES.get(kind, f"an {kind}") for kind in types.groups())
        raise _WrongType(
            f"{place} is missing" if types[2] == "null" else f"{place} is {got}, not {expected}"
        )
    raise _WrongType(f"{place}: {problem[0].lower()}{problem[1:]}")
