"""A report: results as one HTML page, with chapters for all kinds of results, and the records
themselves.

Besides the sections of the list (known.py) it says what is faster, why, what failed and what was
measured. The page needs no network, and its records can be read back. If ceilings explain its runs,
it has sliders: the laws behind predictions (lab/features/predict/laws.py), and a script that
computes with them (explore.js).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from lab.app import kinds
from lab.core import results, shell
from lab.core.lists import grouped, join_and, plural
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.features.explain.section import explained
from lab.features.predict import laws
from lab.roofline import probing
from lab.runner import as_options, machine
from lab.show import (
    comparison,
    page,
    table,
    text_comparison,
    text_doubts,
    text_plan,
    text_requests,
    text_results,
    text_setup,
)
from lab.show.comparison import Group
from lab.show.section import UNKNOWN, Context, Section, tabled
from lab.show.session_spread import Spread, known_spreads

Lines = Sequence[Any]  # runs, requests and findings of rooms

MANY = 3
"""With more setups than this, only setups of the same model are compared."""


def report(
    path: str | Path,
    records: Lines,
    ceilings: Sequence[Ceilings] = (),
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    explore: bool = True,
) -> Path:
    """Write records (runs, requests to servers) as one HTML page that carries its data, and return
    its path.

        lab.report("results/page.html", records, [lab.ceilings()])

    `ceilings` of any machines: the matching ones explain the records. `others` are more sessions of
    these machines: they show how much sessions vary. Differences smaller than `at_least` are not
    claimed. Claims are judged again. If ceilings explain plain runs, the page has sliders that
    predict other requests, unless `explore` is False.
    """
    text = html(records, ceilings, at_least, others, explore)
    results.write_whole(Path(path), text.encode("utf-8", errors="replace"), "The report")
    return Path(path)


def html(
    records: Lines,
    ceilings: Sequence[Ceilings],
    at_least: float = comparison.AT_LEAST,
    others: Sequence[Record] = (),
    explore: bool = True,
) -> str:
    """The whole page, as for `report`."""
    if not records:
        raise LabError(
            "There is nothing to report: no records are given.", "Measure some: lab measure"
        )
    of_engine = table.of_engine(records)
    alone = table.alone(records)
    of_turns = table.requests_of_experiments(records)
    rest = [record for record in of_engine if not record.run.is_apart]
    timed = [
        record for record in (comparison.by_session(rest) if rest else []) if record.run.is_timed
    ]
    special = [record for record in of_engine if record.run.is_apart]
    findings = findings_of(records)
    described = {finding.session for finding in findings}  # they stand for their session's runs
    claimed = [record for record in special if record.session not in described]
    answered = [record for record in alone if table.went_well(record)]
    good: Lines = [
        *timed,
        *claimed,
        *answered,
        *of_turns,
        *findings,
    ]
    if not good:
        raise nothing_went_well(of_engine)
    spreads = known_spreads([*rest, *others, *alone])
    is_all, compared = _compared([*timed, *alone], at_least, spreads)
    context = Context(
        ceilings, others, is_page=True, together=is_all
    )  # only what is compared is drawn together
    of_kinds = kinds.sections([*timed, *special, *findings, *alone, *of_turns], context)
    if not of_kinds and good == findings:
        raise nothing_went_well(of_engine)
    failures = text_doubts.failures(rest)
    failures += text_requests.failures(table.requests_of(records))
    failed = [f"failed: {line}" for line in failures]
    setups = _setups(good)
    lead = list[str]()
    if is_all or len(of_kinds) == 1:
        lead = [*(line for one in compared for line in one.sentences), *_gist(of_kinds)]
        of_kinds = [dataclasses.replace(one, sentences=()) for one in of_kinds]
        compared = [dataclasses.replace(one, sentences=()) for one in compared]
    chapters = [*of_kinds, *compared, *_whys(timed, ceilings)]
    chapters += [Section("What failed", name="failed", warnings=failed)] if failed else []
    chapters = [*chapters, setups] if setups.headings else [setups, *chapters]
    firsts = {(one.session, one.run.variant): one for one in reversed([*timed, *claimed])}.values()
    used = [
        best
        for first in firsts
        if (best := probing.known(ceilings, probing.place_of_record(first)))
    ]
    sliders = None
    if explore and used:
        with suppress(LabError):  # no plain run of a known model
            sliders = laws.laws(timed, ceilings, others)
    lines = dict.fromkeys(line for best in used for line in probing.lines(best))
    begun = (record.started_at for record in good)
    days = sorted({moment[:10] for moment in begun if moment})  # imported runs may lack it
    return page.render(
        title=_title(of_kinds, [timed, answered] if is_all else [], good),
        dates=" to ".join(dict.fromkeys([*days[:1], *days[-1:]])) or "unknown date",
        lead=lead,
        distrust=text_doubts.distrust(rest),
        contents=[] if lead else chapters,
        gist=_gist,
        chapters=chapters,
        laws=sliders,
        commands=kinds.commands(records),
        n_records=len(records),
        packed=results.pack([*records, *lines]),
    )


def nothing_went_well(runs: Sequence[Record]) -> LabError:
    what = "run" if runs else "request"
    return LabError(
        f"There is nothing to report: no {what} went well.",
        "Look at the errors: lab show RESULTS",
    )


def findings_of(lines: Lines) -> list[Any]:
    """The lines that are neither runs nor requests."""
    return [line for line in lines if not isinstance(line, Record | RequestRecord)]


def _gist(kinds: Sequence[Section]) -> list[str]:
    """The first words of chapters: their own sentences, otherwise the first one of each part."""
    return [
        str(line)
        for kind in kinds
        for line in kind.sentences or [part.sentences[0] for part in kind.parts if part.sentences]
    ]


def _title(kinds: Sequence[Section], compared: Sequence[Lines], good: Lines) -> str:
    """The question of a page; for several kinds of results the number of sessions or the kinds,
    models and machine."""
    if len(kinds) == 1:
        return kinds[0].question
    if labels := [label for own in compared if own for label, _ in table.setups(table.runs(own))]:
        return text_results.question(labels)
    sessions = {one.session: one for one in good}.values()
    models = Counter(record.model_name for record in sessions)
    (first, _), *others = models.most_common()
    of = f"{first} and {plural(len(others), 'other model')}" if others else first
    what = plural(len(sessions), "session")
    if len(sessions) == 1:
        what = join_and([kind.title.lower() for kind in kinds])
    where = text_setup.one_of((machine.label(one.machine) for one in good), "machines")
    return f"{what[:1].upper()}{what[1:]} of {of} on {where}"


def _compared(
    records: Lines, at_least: float, spreads: Mapping[tuple[Any, str], Spread]
) -> tuple[bool, list[Section]]:
    """Comparisons of setups, or of sessions of one setup, and whether all are compared with each
    other."""
    import pandas as pd

    try:
        groups = comparison.groups(records)
    except LabError:  # there is only one
        return False, []
    found: list[tuple[set[tuple[Any, ...]], list[Group]]] = []
    for group in groups:
        rows = group.rows
        model = group.rows.model.iloc[0].split(" ")[0] if len(groups) > MANY else ""
        keys = {
            (model, *measured) for measured in zip(rows.case.fillna(""), rows.n_prompt, strict=True)
        }
        fitting = next((cluster for known, cluster in found if keys & known), None)
        if fitting is None:
            found.append((keys, [group]))
        else:
            fitting.append(group)
    clusters = [cluster for _, cluster in found]
    answers = list[str]()
    parts = list[Section]()
    n_alone = sum(len(cluster) == 1 for cluster in clusters)
    for cluster in (cluster for cluster in clusters if len(cluster) > 1):
        if len(clusters) > 1:  # labelled by the differences among them
            rows = pd.concat([group.rows for group in cluster])
            cluster = [Group(label, own) for label, own in table.setups(rows)]
        compared = comparison.compare_groups(cluster, at_least, spreads)
        answers += text_comparison.answers(compared)
        names = [group.label for group in cluster]
        differ = text_comparison.differences(cluster)
        parts.append(
            Section(
                "Differences" if differ else "",
                words=[f"The base is {names[0]}."],
                headings=["", *names] if differ else [],
                cells=[[field, *values] for field, values in differ.items()],
                parts=text_comparison.sections(compared),
            )
        )
        parts.append(Section(sentences=text_comparison.how_compared(cluster, compared, at_least)))
    rest = f"{n_alone} of {len(groups)} setups have no length in common with another setup of their model"
    left_out = (
        [f"{rest}, so {'it is' if n_alone == 1 else 'they are'} not compared."] if n_alone else []
    )
    title = "Which is faster, and how certain is that?"
    return not n_alone and len(clusters) == 1, [
        Section(title, name="compared", words=left_out, sentences=answers, parts=parts)
    ]


def _whys(timed: Sequence[Record], known: Sequence[Ceilings]) -> list[Section]:
    """What limited each setup; one sentence on all setups without ceilings."""
    plain = [record for record in timed if record.run.is_plain]
    if not plain:
        return []
    parts = list[Section]()
    problems = list[str]()
    for label, rows in table.setups(table.runs(plain)):
        own = [plain[i] for i in dict.fromkeys(rows.run)]
        for n_gen, alike in grouped(own, lambda record: record.run.n_gen).items():
            try:
                best = probing.need(known, probing.place_of_record(alike[0]), label)
                part = explained(f"{label}, {n_gen:,} tokens generated", alike, best)
                parts.append(dataclasses.replace(part, words=[part.answer]))
            except LabError as problem:
                problems.append(f"{problem.what} {problem.hint}")
    if len(problems) > 1:
        problems = [
            f"The limits of {len(problems)} other setups are unknown without ceilings: {problems[0]}"
        ]
    return [Section("What limits the speed?", name="why", words=problems, parts=parts)]


def _setups(good: Lines) -> Section:
    """Machine, build, model and settings; for several setups a table of the differences."""
    import pandas as pd

    t = pd.DataFrame(map(_facts, good)).drop_duplicates().fillna(UNKNOWN)
    shared = t.columns[t.nunique() == 1]
    columns = [(name, itemgetter(name)) for name in t.columns.difference(shared, sort=False)]
    differ = tabled(columns, t.to_dict("records")) if len(t) > 1 else {}
    return Section("What was measured", name="setups", facts=t[shared].iloc[0].to_dict(), **differ)


def _facts(one: Record | RequestRecord) -> dict[str, str]:
    """Of a run the machine, build, model and settings; of a request the server, model and client's
    machine."""
    if not isinstance(one, RequestRecord):
        facts = text_plan.facts(one.machine, one.model)
        if one.model.source == "synthetic":
            facts["weights"] = (
                "random: timing is that of the real model's shape, the text is meaningless"
            )
        words = [
            shell.join(*as_options.option(name, value))
            for name, value in as_options.asked(one.settings).items()
        ]
        return facts | {"settings": f"{' '.join(words) or 'none'}; else the defaults"}
    endpoint = one.endpoint
    own = one.endpoint.settings
    named = " ".join(filter(None, [endpoint.server or "an unnamed server", endpoint.version]))
    facts = {"server": f"{named} at {endpoint.url}, through {endpoint.api}", "model": one.model}
    if own:
        slots = f"{own.n_slots} slots" if own.n_slots else ""
        room = f"a context of {own.n_ctx:,} tokens" if own.n_ctx else ""
        facts["settings"] = (
            ", ".join(filter(None, [slots, room, own.model_file, own.quantization])) or UNKNOWN
        )
    return facts | {"client": text_plan.facts(one.machine)["machine"]}
