"""How a command that measured ends: tables, pictures, a page, the names of files, what to do
next."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab import feature_list
from lab.app import command_words, kinds
from lab.app.reading import RESULTS, any_good, context, hint, nearby, note
from lab.core import shell
from lab.core.files import expanded
from lab.errors import EXIT_FAILED, LabError

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.lines import Lines
    from lab.core.record import Record
    from lab.show.section import Section


@dataclass(frozen=True)
class Output:
    """What the options of OUTPUT ask for."""

    folder: Path
    as_json: bool
    plots: bool
    report: bool = False

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> Output:
        """Take these options out of the options of a command."""
        return cls(
            expanded(options.pop("out")),
            options.pop("as_json"),
            not options.pop("no_plot"),
            options.pop("report", False),
        )

    def finish(
        self,
        records: Lines,
        path: Path,
        problem: LabError | None = None,
        failed: bool = False,
        shown: Sequence[Section] | None = None,
        tables: Callable[[Console], object] | None = None,
        document: Callable[[], dict[str, object]] | None = None,
        at_least: float | None = None,
        sentences: Sequence[str] = (),
        **more: object,
    ) -> None:
        """Print the tables, then draw, which may fail, and name the files; or print one document.

        Then raise the `problem` that ended the measurement early, or exit if a run `failed`.
        `tables` (of a comparison) and `document` stand for those of the sections `shown` of the
        records. The `sentences` are printed last, `more` is of the JSON document.
        """
        if records:
            if shown is None:
                shown = kinds.sections(records, context(records, (str(path),)))
            if self.as_json:
                content = document() if document else kinds.as_json(records, shown)
                self._print_json(records, path, shown, at_least, {**more, **content})
            else:
                self._print_text(records, path, shown, tables, at_least, sentences)
        if problem:
            raise problem
        if failed:
            sys.exit(EXIT_FAILED)

    def _print_text(
        self,
        records: Lines,
        path: Path,
        shown: Sequence[Section],
        tables: Callable[[Console], object] | None,
        at_least: float | None,
        sentences: Sequence[str],
    ) -> None:
        from lab.show import console

        out = console.console(details=hint(path=path, command="compare" if tables else "show"))
        if tables:
            tables(out)
        else:
            kinds.print_results(records, out, shown, sentences)
        out.print(f"\nresults  {path}")
        for line in kinds.plot_lines(path.with_suffix(""), self._draw(path, shown)):
            out.print(line)
        page = self._write_page(records, path, at_least)
        if page:
            out.print(f"report   {page}")
        for line in self._next_steps(records, path):
            out.print(line)

    def _print_json(
        self,
        records: Lines,
        path: Path,
        shown: Sequence[Section],
        at_least: float | None,
        content: dict[str, object],
    ) -> None:
        from lab.show import console

        plots = self._draw(path, shown)
        page = self._write_page(records, path, at_least)
        files = {
            "session": path.stem,
            "results": str(path),
            "plots": [str(plot) for plot in plots],
            "report": None if page is None else str(page),
        }
        console.print_json({**files, **content})

    def _draw(self, path: Path, shown: Sequence[Section]) -> list[Path]:
        if not self.plots:
            return []
        return kinds.draw_what_can_be(shown, path.parent, path.stem)

    def _write_page(self, records: Lines, path: Path, at_least: float | None) -> Path | None:
        """The page for --report, by the feature that writes pages."""
        from lab.roofline import probing
        from lab.show import table
        from lab.show.comparison import AT_LEAST

        if not self.report or not any_good(records):
            return None
        page = path.with_suffix(".html")
        write_page = feature_list.load(feature_list.page_target())
        ceilings = probing.kept(path.parent, note)
        others = nearby((str(path),), table.of_engine(records)).records
        try:
            write_page(page, records, ceilings, at_least or AT_LEAST, others)
        except LabError as problem:
            note(f"{problem.what} {problem.hint}")
            return None
        return page

    def _next_steps(self, records: Lines, path: Path) -> list[str]:
        from lab.show import table

        runs = table.of_engine(records)
        if any_good(runs):
            explain = f"{ceilings_command(runs)} && {shell.lab('explain', path)}"
            return next_steps(runs, self.folder, explain)
        if any_good(table.alone(records)):
            return [f"next     a page to share: {shell.lab('report', path)}"]
        return []


def plain_runs(records: Sequence[Record]) -> list[Record]:
    """The records of no experiment and of no larger session."""
    return [record for record in records if record.run.is_plain and not record.run.is_apart]


def ceilings_command(records: Sequence[Record]) -> str:
    """The commands that measure the ceilings of the engine, the model and the settings of plain
    runs."""
    from lab.roofline import probing

    return " && ".join(probing.commands(plain_runs(records))) or shell.lab("ceilings")


def next_steps(records: Sequence[Record], folder: Path, explain: str) -> list[str]:
    """Measure unreliable sessions again, into the same folder, or else explain plain runs."""
    from lab.show import text_doubts
    from lab.show.section import is_plain

    into_folder = "" if folder == Path(RESULTS) else f" {shell.join('--out', folder)}"
    lines: list[str] = []
    for session in text_doubts.unreliable([record for record in records if is_plain(record)]):
        command = command_words.line(session)
        if command:
            lines.append(f"next     measure again: {command}{into_folder}")
    own = [record for record in plain_runs(records) if record.run.imported_from is None]
    if not lines and any_good(own):
        lines.append(f"next     what limited each phase: {explain}")
    return lines
