"""A report: results as one HTML page, a chapter for each kind of result, with the records themselves.

The chapters (page_chapters.py) are sections; the template page.html.jinja writes them. The page needs no network, and
its records can be read back. Records come from outside, so the template escapes all values; only the lab's own drawings
are inserted unescaped. If ceilings explain its runs, it has sliders: the laws behind predictions (lab/why/laws.py) and
a script that computes with them (explore.js); the content security policy allows no other.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.analysis import comparison, request_table, table
from lab.analysis.spread import known_spreads
from lab.core import results
from lab.core.lists import join_and, plural
from lab.core.record import OK, Ceilings, Record
from lab.core.request import RequestRecord, short_name
from lab.errors import LabError
from lab.experiments.claims import judging
from lab.experiments.claims.figures import CLAIMS
from lab.runner import machine
from lab.show import claim_views, page_chapters, reproduce, svg, text_results, text_tune
from lab.show.section import Section
from lab.why import laws, probing, where

Lines = Sequence[Record | RequestRecord]


def report(
    path: str | Path,
    records: Lines,
    ceilings: Sequence[Ceilings] = (),
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    explore: bool = True,
) -> Path:
    """Write records (runs, requests to servers) as one HTML page that carries its data, and return its path.

        lab.report("results/page.html", records, [lab.ceilings()])

    `ceilings` of any machines: the matching ones explain the records. `others` are more sessions of these machines:
    they show how much sessions vary. Claims are judged again. If ceilings explain plain runs,
    the page has sliders that predict other requests, unless `explore` is False. LabError if it cannot be written.
    """
    path = Path(path)
    text = html(records, ceilings, at_least, others, explore)
    results.write_whole(path, text.encode("utf-8", errors="replace"), "The report")
    return path


def html(
    records: Lines,
    known: Sequence[Ceilings],
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    explore: bool = True,
) -> str:
    """The whole page as HTML. Differences smaller than `at_least` are not claimed."""
    if not records:
        raise LabError("There is nothing to report: no records are given.", "Measure some: lab measure")
    of_engine, alone = request_table.of_engine(records), request_table.alone(records)
    of_loads = request_table.loads_of(records)
    rest = [record for record in of_engine if not record.run.is_apart]
    claimed = [record for record in of_engine if record.run.part is not None]
    apart = comparison.by_session(rest) if rest else []
    timed = [record for record in apart if record.run.status == OK and not record.run.warmup]
    answered = [record for record in alone if request_table.went_well(record)]
    traced = [record for record in of_engine if record.run.is_traced]
    good: Lines = [*timed, *claimed, *text_tune.compared(of_engine), *answered, *of_loads, *traced]
    if not good:
        what = "run" if of_engine else "request"
        raise LabError(f"There is nothing to report: no {what} went well.", "Look at the errors: lab show RESULTS")
    spreads = known_spreads([*rest, *others, *alone])
    is_all, compared = page_chapters.compared([*timed, *alone, *of_loads], at_least, spreads)
    with_requests = timed if is_all else []  # only what is compared is drawn together
    kinds = [
        *page_chapters.runs(timed, has_pictures=not (answered and is_all)),
        *page_chapters.experiments(timed, known, others),
        *page_chapters.tuned(of_engine),
        *page_chapters.requests(with_requests, alone),
        *page_chapters.loads(of_loads),
        *claim_views.sections(judging.of_sessions(CLAIMS, of_engine, known)),
        *page_chapters.traces(traced),
    ]
    setups = page_chapters.setups(good)
    faster = text_tune.faster_settings(timed, [*of_engine, *others])
    lead = list[str]()
    if is_all or len(kinds) == 1:
        lead = [*(line for one in compared for line in one.sentences), *_gist(kinds)]
        kinds = [dataclasses.replace(one, sentences=()) for one in kinds]
        compared = [dataclasses.replace(one, sentences=()) for one in compared]
    chapters = [*kinds, *compared, *page_chapters.whys(timed, known), *page_chapters.failed(rest, alone)]
    chapters = [*chapters, setups] if setups.headings else [setups, *chapters]
    firsts = {(one.session, one.run.variant): one for one in reversed([*timed, *claimed])}.values()
    used = [best for first in firsts if (best := probing.known(known, where.of_record(first)))]
    sliders = None
    if explore and used:
        with suppress(LabError):  # no plain run of a known model
            sliders = laws.laws(timed, known, others)
    return _render(
        records,
        used,
        title=_title(kinds, [timed, answered] if is_all else [], good),
        dates=_dates(good),
        lead=[*lead, *faster],
        distrust=text_results.distrust(rest),
        contents=[] if lead else chapters,
        gist=_gist,
        chapters=chapters,
        laws=sliders,
        script=script("explore.js"),
    )


def _gist(kinds: Sequence[Section]) -> list[str]:
    """The first words of chapters: their own sentences, otherwise the first one of each part."""
    return [
        str(line)
        for kind in kinds
        for line in kind.sentences or [part.sentences[0] for part in kind.parts if part.sentences]
    ]


def _title(kinds: Sequence[Section], compared: Sequence[Lines], good: Lines) -> str:
    """The question of a page; for several kinds of results the number of sessions or the kinds, models and machine."""
    if len(kinds) == 1:
        return kinds[0].question
    if labels := [label for own in compared if own for label, _ in table.setups(table.runs(own))]:
        return text_results.question(labels)
    sessions = {one.session: one for one in good}
    models = Counter(one.model.name if isinstance(one, Record) else short_name(one.model) for one in sessions.values())
    (first, _), *others = models.most_common()
    machines = {machine.label(one.machine) for one in good}
    of = f"{first} and {plural(len(others), 'other model')}" if others else first
    where_it_was = f"{len(machines)} machines" if len(machines) > 1 else machines.pop()
    names = join_and([kind.title.lower() for kind in kinds])
    what = plural(len(sessions), "session") if len(sessions) > 1 else f"{names[:1].upper()}{names[1:]}"
    return f"{what} of {of} on {where_it_was}"


def _dates(records: Lines) -> str:
    """The day, or the first and the last day, of these runs and requests."""
    begun = (one.run.started_at if isinstance(one, Record) else one.request.started_at for one in records)
    days = sorted({moment[:10] for moment in begun if moment})  # imported runs may lack it
    return " to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "unknown date"


def _render(records: Lines, used: Sequence[Ceilings], **parts: Any) -> str:
    """The template filled with parts, and the records and the ceilings that they were explained by."""
    lines, numbers = dict.fromkeys(line for best in used for line in probing.lines(best)), itertools.count(1)
    text: str = template("page.html.jinja").render(
        version=metadata.version("mini-lab"),
        commands=reproduce.commands(records),
        n_records=len(records),
        packed=results.pack([*records, *lines]),
        draw=lambda picture: svg.inline(picture.draw, f"picture-{next(numbers)}", picture.size),
        **parts,
    )
    return text


def template(name: str) -> Any:
    """A template of this folder; it escapes all values."""
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=folder).get_template(name)


def script(name: str) -> dict[str, str]:
    """A script of this folder: its text, and the digest by which a content security policy allows it."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return {"text": text, "digest": base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}
