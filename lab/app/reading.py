"""What commands read: results files, what lies beside them, and where pictures go."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.core import shell
from lab.core.files import is_dir, is_file, opened
from lab.errors import LabError, printable

if TYPE_CHECKING:
    from lab.core.lines import Lines
    from lab.core.record import Ceilings
    from lab.core.results import Contents
    from lab.show.section import Context

MOST_OF_BEGIN = 20_000  # bytes by which a file of another tool is recognized
RESULTS = "results"  # the default folder of results


def read(
    results: Sequence[str], with_findings: bool = False, steps_to: str | None = None
) -> Contents:
    """The contents of files and folders; notes on what is skipped.

    LabError where there is nothing to show. `steps_to` says what steps of the engine are needed
    for.
    """
    from lab.core import results as files

    contents = files.read(results)
    if contents.skipped or not (contents.all_lines or contents.ceilings):
        _refuse_foreign(results)
    for sentence in contents.skipped:
        note(sentence)
    names = " ".join(results)
    has_findings = bool(contents.findings)
    if not contents.measured and not (has_findings and with_findings):
        what = f"{names} contains no runs."
        if has_findings:
            what = f"{names} contains no runs of steps, only other results."
        raise LabError(what, "Measure some: lab measure")
    if steps_to and not contents.records:
        raise LabError(
            f"{names} contains only requests to servers, and no steps of the engine to {steps_to}.",
            "Measure the model in process: lab measure -m MODEL. "
            "To see the requests: lab show RESULTS",
        )
    return contents


def _refuse_foreign(results: Sequence[str]) -> None:
    """LabError for the output of llama-bench, which must be imported."""
    from lab.formats import llama_bench_rows

    for name in filter(is_file, results):
        try:
            with opened(Path(name)) as file:
                begin = file.read(MOST_OF_BEGIN).decode(errors="replace")
        except OSError:
            continue
        if llama_bench_rows.is_of_llama_bench(begin):
            raise LabError(
                f"{name} is output of llama-bench, not a results file of the lab.",
                f"Import it first: {shell.lab('import', name)}",
            )


def without_parts(contents: Contents) -> Contents:
    """What was read, without sessions whose results have tables of their own.

    LabError where nothing else was read.
    """
    records = [record for record in contents.records if not record.run.is_apart]
    if not records and not contents.requests:
        raise LabError(
            "These results have tables of their own, and no plain runs.",
            "To see them: lab show RESULTS",
        )
    return dataclasses.replace(contents, records=tuple(records))


def note(sentence: str) -> None:
    """Say on stderr what was passed over."""
    click.echo(printable(f"Note: {sentence}"), err=True)


def nearby(results: Sequence[str], measured: Lines) -> Contents:
    """Other sessions that lie where the results are: they show how sessions differ."""
    from lab.core import results as files

    return files.nearby(set(map(folder_of, results)), measured)


def plot_folder(results: Sequence[str], out: str | None) -> Path:
    """The folder for plots: `out`, else the folder of the first results file.

    Plots of a sample of this repository go into the current folder.
    """
    if out:
        return Path(out)
    if is_sample(results[0]):
        return Path()
    return folder_of(results[0])


def is_sample(name: str) -> bool:
    """Whether a results file is one of this repository's samples."""
    return Path(name).name.startswith("sample-")


def folder_of(name: str) -> Path:
    """A folder of results, or the folder of a file."""
    path = Path(name)
    return path if is_dir(path) else path.parent


def draws(results: Sequence[str], out: str | None, no_plot: bool) -> bool:
    """Whether a command draws: nothing is written beside committed samples unless asked."""
    is_unasked = is_sample(results[0]) and not out
    if is_unasked and not no_plot:
        note(
            f"{Path(results[0]).name} is a sample of this repository, so no picture was drawn: "
            "--out FOLDER draws it."
        )
    return not (no_plot or is_unasked)


def any_good(records: Lines) -> bool:
    """Whether a line holds something that was measured: a timed run, an answer, another finding."""
    return any(record.is_good for record in records)


def context(records: Lines, results: Sequence[str], **fields: Any) -> Context:
    """What sections of these records may use besides the records.

    For experiments and parts of sessions: the ceilings and, for experiments, the runs beside them.
    """
    from lab.core.record import Record
    from lab.roofline import probing
    from lab.show.section import Context

    has_experiments = False
    has_parts = False
    for record in records:
        if isinstance(record, Record):
            run = record.run
            has_experiments = has_experiments or not (run.is_plain or run.is_apart)
            has_parts = has_parts or run.part is not None
    if has_experiments or has_parts:
        ceilings = probing.kept(folder_of(results[0]), note)
        fields["ceilings"] = [*fields.get("ceilings", ()), *ceilings]
    if has_experiments:
        fields["others"] = nearby(results, records).records
    return Context(**fields)


def ceilings_of(contents: Contents, folder: str) -> list[Ceilings]:
    """The ceilings that came with results, and those in `folder`. LabError for a missing folder."""
    from lab.roofline import probing

    if folder != RESULTS and not is_dir(folder):
        message = f"There is no folder {folder} with ceilings."
        raise LabError(message, "Name the one that lab ceilings wrote to.")
    return [*contents.ceilings, *probing.kept(Path(folder), note)]


def hint(details: bool = False, path: Path | None = None, command: str = "show") -> str:
    """How to see all lines below a table; "" if all are shown."""
    if details:
        return ""
    if path is None:
        return "add --details"
    return shell.lab(command, "--details", path)
