"""The numbers and texts in the lines of a results file, with the bounds of their types."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from msgspec import Meta

from lab import feature_list
from lab.core.lines import BASE_LINES, KEPT_AS_SENT

PLAIN = (int, float, str)


def line_classes() -> list[type]:
    features = map(feature_list.load, feature_list.line_targets().values())
    return [*BASE_LINES.values(), *features]


def values() -> Iterator[tuple[str, Any, Meta | None]]:
    """The field, the plain type and the bounds of each value that a line may have."""
    classes = line_classes()
    for cls in classes:  # grows while it is read
        hints = get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cls):
            if field.metadata.get(KEPT_AS_SENT):
                continue
            for hint in parts(hints[field.name]):
                if dataclasses.is_dataclass(hint) and hint not in classes:
                    classes.append(hint)  # type: ignore[arg-type]
                elif get_origin(hint) is Annotated:
                    plain, meta = get_args(hint)
                    yield field.name, plain, meta
                elif hint in PLAIN:
                    yield field.name, hint, None


def parts(hint: Any) -> Iterator[Any]:
    """The types that a type is composed of."""
    if get_origin(hint) in (None, Annotated):
        yield hint
        return
    for part in get_args(hint):
        yield from parts(part)


@functools.cache
def largest(name: str) -> float:
    """The largest number that a field of this name may have."""
    for field, plain, meta in values():
        if field == name and plain is not str and meta is not None and meta.le is not None:
            return meta.le
    return 10**15  # a key of a mapping
