"""Every number and text that a results file may contain has bounds."""

from __future__ import annotations

from lab.core.record import Record
from tests.support import bounds


def test_every_value_of_a_line_is_bounded() -> None:
    found = list(bounds.values())
    assert len(found) > 300
    for name, plain, meta in found:
        assert meta is not None, f"{name} is a plain {plain.__name__}"
        if plain is str:
            assert meta.max_length, name
        else:
            assert meta.ge is not None, name
            assert meta.le is not None, name


def test_the_search_sees_what_is_not_bounded() -> None:
    assert list(bounds.parts(tuple[int, ...] | None)) == [int, ..., type(None)]
    assert Record in bounds.line_classes()
