"""A kind of results: which records are its own, what sections show them, and which command makes them again.

Each feature says so for its results (`KINDS` in its room); lab/features/known.py lists the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord

if TYPE_CHECKING:
    from lab.show.section import Section

Lines = Sequence[Record | RequestRecord]


@dataclass(frozen=True)
class Context:
    """What sections may use besides the records of their kind.

    `others` are more runs of these machines, `runs` (set by `known.sections`) the runs among the records.
    """

    ceilings: Sequence[Ceilings] = ()
    others: Sequence[Record] = ()
    details: bool = False
    is_page: bool = False
    by_session: bool = False  # sessions of one setup are drawn apart
    together: bool = True  # runs and requests are drawn in one picture
    runs: Sequence[Record] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of results. `again` is None for what no command makes again, such as imported results."""

    name: str
    is_mine: Callable[[Any], bool]
    sections: Callable[[Any, Context], list[Section]]
    again: Callable[[Any], str | None]


def is_plain(one: Any) -> bool:
    """Whether a record is a run whose results are in the common tables: of `lab measure`, or of an experiment."""
    return isinstance(one, Record) and not one.run.is_apart
