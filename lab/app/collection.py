"""What measuring and reading return: a list of lines, with its tables and pictures within reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from lab.core.arguments import Paths
from lab.core.lists import join_and, plural
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord
from lab.core.results import Contents, contents_of
from lab.show import summaries, table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Line = TypeVar("Line")
Added = TypeVar("Added")


class Results(list[Line]):
    """Lines of results: runs, requests to servers, and what else a command measures.

    A list of them, such as `results[-1].model`; a sum or a part of it is one too.
    """

    def __init__(self, lines: Iterable[Line] = (), contents: Contents | None = None) -> None:
        super().__init__(lines)
        self.ceilings: tuple[Ceilings, ...] = contents.ceilings if contents else ()
        self.skipped: tuple[str, ...] = contents.skipped if contents else ()

    @property
    def records(self) -> tuple[Record, ...]:
        """The runs of the engine."""
        return tuple(line for line in self if isinstance(line, Record))

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests to servers."""
        return tuple(line for line in self if isinstance(line, RequestRecord))

    @property
    def findings(self) -> tuple[Any, ...]:
        """What is neither: a trace, a start, a quality."""
        findings = []
        for line in self:
            if not isinstance(line, (Record, RequestRecord)):
                findings.append(line)
        return tuple(findings)

    @property
    def runs(self) -> pd.DataFrame:
        """A row per run or request, as `lab.runs`."""
        return table.runs(self._measured)

    @property
    def steps(self) -> pd.DataFrame:
        """A row per step, as `lab.steps`."""
        return table.steps(self._measured)

    @property
    def summary(self) -> pd.DataFrame:
        """A row per setup and length, as `lab.summary`."""
        return summaries.summary(self.runs)

    def plot(self) -> Figure:
        """The first picture that the command of these results would draw."""
        from lab.app import kinds
        from lab.errors import LabError
        from lab.show import canvas

        lines: list[Any] = list(self)
        for section in kinds.sections(lines):
            for picture in section.all_pictures:
                figure = canvas.new_figure(picture.file_size)
                picture.draw(figure)
                return figure
        raise LabError("There is nothing to draw.", "Look at the runs: lab show RESULTS")

    @property
    def _measured(self) -> list[Record | RequestRecord]:
        return [*self.records, *self.requests]

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> Line: ...

    @overload
    def __getitem__(self, index: slice, /) -> Results[Line]: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> Line | Results[Line]:
        if isinstance(index, slice):
            return Results(super().__getitem__(index))
        return super().__getitem__(index)

    def __add__(self, more: list[Added], /) -> Results[Line | Added]:
        return Results([*self, *more])

    def __repr__(self) -> str:
        n_warmups = len([line for line in self if getattr(line, "is_warmup", False)])
        parts = []
        for lines, noun in (
            (self.records, "run"),
            (self.requests, "request"),
            (self.findings, "other line"),
        ):
            if lines:
                parts.append(plural(len(lines), noun))
        if self.ceilings:
            parts.append("ceilings")
        content = join_and(parts) or "nothing"
        if n_warmups:
            content = f"{content} ({plural(n_warmups, 'warm-up')})"
        return f"<Results: {content}; .runs .steps .summary .plot()>"


def read(paths: Paths) -> Results[Any]:
    """Read results files, pages of `lab.report`, or all results files in folders.

        lab.read("results").runs

    Duplicates count once. A line that cannot be read is named in `skipped` and in a warning.
    LabError if nothing can be read.
    """
    contents = contents_of(paths)
    return Results(contents.all_lines, contents)
