"""A report: results as one HTML page, with chapters for all kinds of results, and the records
themselves.

Besides the sections of kinds it says what is faster, why, what failed and what was measured. The
page needs no network, and its records can be read back. If ceilings explain its runs, it has
sliders: the laws behind predictions (lab/features/predict/laws.py), and a script that computes with
them (lab/show/explore.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lab.app import kinds
from lab.core import files, results
from lab.core.arguments import Share, StrPath, share
from lab.core.lines import Lines
from lab.core.record import Ceilings, Record
from lab.core.results import Readable
from lab.errors import LabError
from lab.features.predict import laws, published_record
from lab.features.report import chapters
from lab.features.report.compared import compare
from lab.features.report.lines import ReportLines, sort_lines
from lab.roofline import probing
from lab.show import comparison, page, table, text_doubts, text_requests
from lab.show.section import Context
from lab.show.session_spread import known_spreads


def report(
    path: StrPath,
    records: Readable,
    ceilings: Ceilings | Sequence[Ceilings] = (),
    at_least: Share = comparison.AT_LEAST,
    others: Readable = (),
    explore: bool = True,
) -> Path:
    """Write records (runs, requests to servers) as one HTML page that carries its data, and return
    its path.

        lab.report("page.html", "results")
        lab.report("page.html", records, lab.ceilings())

    `ceilings` of any machines: the matching ones explain the records. `others` are more sessions of
    these machines: they show how much sessions vary. Differences smaller than `at_least` are not
    claimed. Claims are judged again. If ceilings explain plain runs, the page has sliders that
    predict other requests, unless `explore` is False.
    """
    file = files.expanded(path)
    of_machines = [ceilings] if isinstance(ceilings, Ceilings) else ceilings
    lines = results.lines_of(records)
    others_measured = results.measured_of(others)
    smallest = share("at_least", at_least)
    text = html(lines, of_machines, smallest, table.of_engine(others_measured), explore)
    results.write_whole(file, text.encode("utf-8", errors="replace"), "The report")
    return file


def html(
    records: Lines,
    ceilings: Sequence[Ceilings],
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    explore: bool = True,
) -> str:
    """The whole page, as for `report`."""
    if not records:
        message = "There is nothing to report: no records are given."
        raise LabError(message, "Measure some: lab measure")
    lines = sort_lines(records)
    if not lines.good:
        raise nothing_went_well(lines)
    spreads = known_spreads([*lines.common, *others, *lines.requests])
    compared = compare([*lines.timed, *lines.requests], at_least, spreads)
    context = Context(ceilings, others, is_page=True, together=compared.is_whole)
    of_kinds = kinds.sections(lines.shown, context)
    if not of_kinds and lines.good == lines.findings:
        raise nothing_went_well(lines)
    title = chapters.title(
        of_kinds, [lines.timed, lines.answered] if compared.is_whole else [], lines.good
    )
    comparisons = [compared.chapter] if compared.chapter else []
    lead: list[str] = []
    if compared.is_whole or len(of_kinds) == 1:
        for chapter in comparisons:
            lead += chapter.sentences
        lead += chapters.gist(of_kinds)
        of_kinds = chapters.without_sentences(of_kinds)
        comparisons = chapters.without_sentences(comparisons)
    all_chapters = [*of_kinds, *comparisons, *chapters.why(lines.timed, ceilings)]
    all_chapters += chapters.failed(failures(lines, records))
    setups = chapters.setups(lines.good)
    all_chapters.insert(len(all_chapters) if setups.columns else 0, setups)
    matching = matching_ceilings(lines.setups, ceilings)
    of_sliders = sliders(lines.timed, ceilings, others) if explore and matching else None
    if of_sliders is not None:
        all_chapters.append(published_record.section())
    return page.render(
        title=title,
        dates=chapters.dates(lines.good),
        lead=lead,
        distrust=text_doubts.distrust(lines.common),
        contents=[] if lead else all_chapters,
        gist=chapters.gist,
        chapters=all_chapters,
        laws=of_sliders,
        commands=kinds.commands(records),
        n_records=len(records),
        packed=results.pack([*records, *matching]),
    )


def failures(lines: ReportLines, records: Lines) -> list[str]:
    """A sentence on each kind of failure."""
    of_runs = text_doubts.failures(lines.common)
    return of_runs + text_requests.failures(table.requests_of(records))


def nothing_went_well(lines: ReportLines) -> LabError:
    has_runs = lines.common or lines.special
    what = "run" if has_runs else "request"
    return LabError(
        f"There is nothing to report: no {what} went well.",
        "Look at the errors: lab show RESULTS",
    )


def matching_ceilings(
    records: Sequence[Record], ceilings: Sequence[Ceilings]
) -> list[Ceilings]:
    """The lines of the ceilings that hold for these runs, each once."""
    lines: dict[Ceilings, None] = {}
    for record in records:
        best = probing.known(ceilings, probing.place_of_record(record))
        lines |= dict.fromkeys(probing.lines(best))
    return list(lines)


def sliders(
    timed: Sequence[Record], ceilings: Sequence[Ceilings], others: Sequence[Record]
) -> laws.Numbers | None:
    """What the sliders compute with; None without a plain run of a known model."""
    with suppress(LabError):
        return laws.laws(timed, ceilings, others)
    return None
