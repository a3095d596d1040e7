"""A report: results as one HTML page with figures, curves, explanations, and the records themselves.

The template page.html.jinja is filled with what the other files compute. The page needs no network and no script, and
its records can be read back. Records come from outside, so the template escapes all values; only the lab's own drawings
are inserted unescaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.analysis import comparison, disturbances, request_table, table, wording
from lab.analysis.spread import known_spreads
from lab.core import results, shown
from lab.core.record import OK, Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.experiments.claim_verdicts import Verdicts
from lab.show import claim_views, levers, page_requests, plot_why, reproduce, text_results, text_why
from lab.show.lever_kinds import Section
from lab.show.page_parts import Picture, comparisons, curves, energy, facts, picture, shares
from lab.why import probing, roofline, where

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Why:
    """What limited one setup; or, in `problem`, why that is unknown."""

    label: str
    problem: str = ""
    verdicts: list[str] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def report(
    path: str | Path,
    records: Sequence[Record | RequestRecord],
    ceilings: Sequence[Ceilings] = (),
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    judged: Sequence[tuple[str, Verdicts]] = (),
) -> Path:
    """Write records (runs, requests to servers) as one HTML page that carries its data, and return its path.

        lab.report("results/page.html", records, [lab.ceilings()])

    `ceilings` of any machines: those that fit explain the records. `others` are further sessions of these machines:
    they show how much sessions differ. Claims are judged anew, unless `judged`. LabError where it cannot be written.
    """
    path = Path(path)
    text = html(records, ceilings, at_least, others, judged)
    results.write_whole(path, text.encode("utf-8", errors="replace"), "The report")
    return path


def html(
    records: Sequence[Record | RequestRecord],
    known: Sequence[Ceilings],
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    judged: Sequence[tuple[str, Verdicts]] = (),
) -> str:
    """The whole page as HTML. Differences smaller than `at_least` are not claimed."""
    if not records:
        raise LabError("There is nothing to report: no records are given.", "Measure some: lab measure")
    of_engine, alone = request_table.of_engine(records), request_table.alone(records)
    claims = claim_views.sections(of_engine, known, others, judged)
    rest = [record for record in of_engine if record.run.part is None]
    if not rest:
        return _without_runs(records, known, claims, at_least)
    apart = comparison.by_session(rest)
    rows = table.runs(apart)
    rows = rows[(rows.status == OK) & ~rows.warmup]
    timed = [record for record in apart if record.run.status == OK and not record.run.warmup]
    served, busy = page_requests.setups(alone), page_requests.load_sections(records)
    served += page_requests.load_setups(records, served)
    if not (timed or served):
        raise LabError("There is nothing to report: no run went well.", "Look at the errors: lab show RESULTS")
    setups = [(label, part, [apart[i] for i in dict.fromkeys(part.run)]) for label, part in table.setups(rows)]
    tried, whys, used = levers.sections(timed, known, others), list[Why](), list[Ceilings]()
    for label, part, chosen in setups:
        of_setup = probing.known(known, where.of_record(chosen[0]))
        used += [of_setup] if of_setup else []
        for n_gen in sorted(set(part[part.lever.isna()].n_gen)):
            alike = [record for record in chosen if record.run.n_gen == n_gen and record.run.lever is None]
            whys.append(_why(f"{label}, {n_gen:,} tokens generated", alike, known, len(whys)))
    labels = [*(label for label, _, _ in setups), *(one["label"] for one in served)]
    return _render(
        records,
        used,
        question=text_results.question(labels, levers.questions(tried)),
        times=[
            *(time for label, part, _ in setups for time in text_results.times(label if len(labels) > 1 else "", part)),
            *(section.sentences[0] for section in tried),
            *page_requests.times(alone, len(labels) > 1),
            *page_requests.answers(records),
        ],
        experiments=_experiments(tried),
        dates=_dates([*timed, *alone, *request_table.loads_of(records)]),
        setups=[
            *(
                {"label": name, "facts": facts(own[0]), "parts": _parts(name, part, apart)}
                for name, part, own in setups
            ),
            *served,
        ],
        served=page_requests.served(alone),
        loads=busy,
        failures=text_results.failures(rest),
        distrust=text_results.distrust(rest),
        claims=claims,
        curves=list((curves(timed, setups) | page_requests.curves([*timed, *alone])).values()),
        shares=[share for label, part, _ in setups for share in shares(label, part)],
        whys=whys,
        **comparisons(
            [*timed, *alone, *request_table.loads_of(records)], at_least, known_spreads([*rest, *others, *alone])
        ),
    )


def _without_runs(
    records: Sequence[Record | RequestRecord],
    known: Sequence[Ceilings],
    claims: Sequence[dict[str, Any]],
    at_least: float,
) -> str:
    """The page of sessions of claims, or of requests to servers, alone."""
    own, alone = request_table.of_engine(records), request_table.alone(records)
    served, busy = page_requests.setups(alone), page_requests.load_sections(records)
    only_loads = bool(busy and not (own or served))
    served += page_requests.load_setups(records, served)
    if not (own or served):
        raise LabError("There is nothing to report: no request went well.", "Look at the errors: lab show RESULTS")
    firsts = [next(r for r in own if r.session == name) for name in dict.fromkeys(r.session for r in own)]
    used = [best for first in firsts if (best := probing.known(known, where.of_record(first)))]
    nothing: list[Any] = []
    compared = comparisons([*alone, *request_table.loads_of(records)], at_least, known_spreads(alone))
    return _render(
        records,
        used,
        question=claim_views.QUESTION
        if own
        else page_requests.load_question(records)
        if only_loads
        else page_requests.question(alone),
        times=[*page_requests.times(alone, len(served) > 1), *page_requests.answers(records)],
        dates=_dates(records),
        setups=[*({"label": first.session, "facts": facts(first), "parts": nothing} for first in firsts), *served],
        served=page_requests.served(alone),
        loads=busy,
        claims=claims,
        curves=list(page_requests.curves(alone).values()),
        **compared | {"answers": [*(section["summary"] for section in claims), *compared["answers"]]},
        **dict.fromkeys(("experiments", "failures", "distrust", "shares", "whys"), nothing),
    )


def _dates(records: Sequence[Record | RequestRecord]) -> str:
    """The day, or the first and the last day, of these runs and requests."""
    begun = (one.run.started_at if isinstance(one, Record) else one.request.started_at for one in records)
    days = sorted({moment[:10] for moment in begun})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _render(records: Sequence[Record | RequestRecord], used: Sequence[Ceilings], **parts: Any) -> str:
    """The template filled with parts, and the records and the ceilings that they were explained by."""
    import jinja2

    lines = dict.fromkeys(line for best in used for line in probing.lines(best))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        version=metadata.version("mini-lab"),
        commands=reproduce.commands(records),
        n_records=len(records),
        packed=results.pack([*records, *lines]),
        **parts,
    )


def _experiments(tried: Sequence[Section]) -> list[dict[str, Any]]:
    """The table, sentences and picture of each."""
    return [
        {
            "title": section.title,
            "headings": section.headings,
            "cells": [[cell.split("\n") for cell in line] for line in section.cells],
            "sentences": section.sentences,
            "picture": picture(draw, name, section.kind.caption, " ".join(section.sentences), (10, 4.6)),
        }
        for section, (name, draw) in zip(tried, levers.drawings(tried).items(), strict=True)
    ]


def _parts(label: str, rows: pd.DataFrame, records: Sequence[Record]) -> list[dict[str, Any]]:
    """A table for each number of generated tokens, with warnings below the rows that they concern."""
    tables = []
    for n_gen, part in table.summary(rows).groupby("n_gen"):
        headings, lines = text_results.summary_cells(part)
        lines_of_rows, mine = [], dict[int, Record]()
        is_sweep = part.sweep_every.notna().all()
        for row, cells in zip(part.itertuples(), lines, strict=True):
            its = rows[(rows.n_gen == n_gen) & (rows.n_prompt == row.n_prompt) & rows.lever.isna()]
            measured = {number: records[number] for number in its.run}
            mine |= measured
            notes = [] if is_sweep else [text_results.doubts(list(measured.values()))]
            trained = records[its.run.iloc[0]].model.n_ctx_train
            if trained is not None and row.n_prompt + n_gen > trained:
                notes.append(
                    f"beyond the {trained:,} tokens that the model was trained for: the time holds, the text does not."
                )
            lines_of_rows.append(
                {
                    "n_prompt": f"{row.n_prompt:,}",
                    "runs": f"{row.repeats}{shown.mark(row.doubts)}",
                    "cells": cells,
                    "notes": [note for note in notes if note],
                }
            )
        walks = text_results.doubts(list(mine.values())) if is_sweep else ""
        tables.append(
            {
                "caption": f"{label}: {text_results.heading(part)}",
                "counted": "runs",
                "headings": headings,
                "rows": lines_of_rows,
                "notes": [*([walks] if walks else []), *disturbances.drift(list(mine.values()))],
                "findings": text_results.findings(part),
                "energy": energy(part),
            }
        )
    return tables


def _why(label: str, records: Sequence[Record], known: Sequence[Ceilings], number: int) -> Why:
    """What limited runs of one setup and one n_gen, where the ceilings of their machine are known."""
    first = records[0]
    try:
        ceilings = probing.need(known, where.of_record(first), False, label)
        rows = roofline.explain(records, ceilings)
    except LabError as problem:
        return Why(label, problem=problem.what)
    best, verdicts = roofline.roof(ceilings, where.layers_of(first)), text_why.verdicts(rows)
    pictures = [
        picture(
            lambda figure: plot_why.plot_roofline(rows, best, label, figure.subplots()),
            f"roofline-{number}",
            "Roofline: what each phase reached (numbers: prompt tokens), under the best that the machine can do.",
            f"Roof: {wording.digits(best.gbps)} GB/s, {wording.digits(best.gflops)} GFLOP/s. {' '.join(verdicts)}",
            (5, 4.8),
        )
    ]
    if first.run.every is None:  # a sweep generates too little for a request
        pictures.append(
            picture(
                lambda figure: plot_why.plot_where(rows, label, figure.subplots()),
                f"where-{number}",
                f"Where the time of a request goes: a prompt and {first.run.n_gen:,} generated tokens.",
                " ".join(map(text_why.where_it_went, rows)),
                (5, 4.8),
            )
        )
    caveats = [*filter(None, [text_why.caveat(first)]), *probing.doubt_words(ceilings)]
    return Why(label, "", [*verdicts, *caveats], pictures, text_why.advised(rows, records, ceilings))
