"""The chapters that a report has besides the sections of kinds: why, what failed, what was
measured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from lab.core import shell
from lab.core.lines import Lines
from lab.core.lists import grouped, join_and, plural
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.features.explain.section import explained
from lab.roofline import probing
from lab.runner import as_options, machine
from lab.show import table, text_plan, text_results, text_setup
from lab.show.cells import LONG_TEXT, NUMBER, Column
from lab.show.section import UNKNOWN, Section, Table, tabled


def gist(sections: Sequence[Section]) -> list[str]:
    """The first words of chapters: their sentences, otherwise the first one of each part."""
    sentences: list[str] = []
    for section in sections:
        if section.sentences:
            sentences += map(str, section.sentences)
            continue
        for part in section.parts:
            sentences += map(str, part.sentences[:1])
    return sentences


def without_sentences(sections: Sequence[Section]) -> list[Section]:
    return [dataclasses.replace(section, sentences=()) for section in sections]


def title(
    of_kinds: Sequence[Section],
    compared: Sequence[Sequence[Record | RequestRecord]],
    good: Lines,
) -> str:
    """The question of a page; for several kinds of results the number of sessions or the kinds,
    models and machine."""
    if len(of_kinds) == 1:
        return of_kinds[0].question
    labels: list[str] = []
    for records in compared:
        labels += [label for label, _ in table.by_setup(records)]
    if labels:
        return text_results.question(labels)
    sessions = {line.session: line for line in good}.values()
    models = Counter(line.model_name for line in sessions).most_common()
    subject = models[0][0]
    if len(models) > 1:
        subject = f"{subject} and {plural(len(models) - 1, 'other model')}"
    where = text_setup.one_of((machine.label(line.machine) for line in good), "machines")
    if len(sessions) > 1:
        return f"{plural(len(sessions), 'session')} of {subject} on {where}"
    kinds = join_and([section.title for section in of_kinds])
    return f"{kinds.capitalize()} of {subject} on {where}"


def dates(good: Lines) -> str:
    """The first and the last day of the measurements; imported runs may lack it."""
    days = sorted({line.started_at[:10] for line in good if line.started_at})
    if not days:
        return "unknown date"
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def why(timed: Sequence[Record], ceilings: Sequence[Ceilings]) -> list[Section]:
    """What limited each setup; one sentence on all setups without ceilings."""
    plain = [record for record in timed if record.run.is_plain]
    parts: list[Section] = []
    problems: list[str] = []
    for label, of_setup in table.by_setup(plain):
        for n_gen, records in grouped(of_setup, lambda record: record.run.n_gen).items():
            name = f"{label}, {plural(n_gen, 'token')} generated"
            try:
                place = probing.place_of_record(records[0])
                command = probing.commands(records)[0]
                best = probing.need(ceilings, place, label, command=command)
                part = explained(name, records, best)
                parts.append(dataclasses.replace(part, words=[part.answer]))
            except LabError as problem:
                problems.append(f"{problem.what} {problem.hint}")
    if len(problems) > 1:
        problems = [
            f"The limits of {len(problems)} other setups are unknown without ceilings: "
            f"{problems[0]}"
        ]
    own = [record for record in plain if record.run.imported_from is None]
    if own and not parts:
        measure = " && ".join(probing.commands(own))
        problems.append(
            "Without ceilings this page does not say what limits the speed, and has no sliders "
            "that predict other requests. On the machine that measured them, run "
            f"`{measure}`, then write the page again with lab report."
        )
    return [Section("What limits the speed?", name="why", words=problems, parts=parts)]


def failed(failures: Sequence[str]) -> list[Section]:
    if not failures:
        return []
    warnings = [f"failed: {line}" for line in failures]
    return [Section("What failed", name="failed", warnings=warnings)]


def setups(good: Lines) -> Section:
    """Machine, build, model and settings; for several setups a table of the differences."""
    import pandas as pd

    facts = pd.DataFrame(map(facts_of, good)).drop_duplicates().fillna(UNKNOWN)
    shared = facts.columns[facts.nunique() == 1]
    different = facts.columns.difference(shared, sort=False)
    cells: Table = {"columns": (), "cells": (), "rows": ()}
    if len(facts) > 1:
        columns = []
        for name in different:
            kind = LONG_TEXT if name == "settings" else NUMBER
            columns.append(Column(name, itemgetter(name), kind))
        cells = tabled(columns, facts.to_dict("records"))
    return Section(
        "What was measured", name="setups", facts=facts[shared].iloc[0].to_dict(), **cells
    )


def facts_of(line: Any) -> dict[str, str]:
    if hasattr(line, "endpoint"):
        return facts_of_server(line)
    return facts_of_engine(line)


def facts_of_engine(line: Any) -> dict[str, str]:
    """The machine, build, model and settings of a run or a finding."""
    facts = text_plan.facts(line.machine, line.model)
    if line.model.source == "synthetic":
        facts["weights"] = (
            "random: timing is that of the real model's shape, the text is meaningless"
        )
    options: list[str] = []
    for name, value in as_options.keywords_of(line.settings).items():
        options += as_options.option(name, value)
    facts["settings"] = f"{shell.join(*options) or 'none'}; else the defaults"
    return facts


def facts_of_server(record: Any) -> dict[str, str]:
    """The server, the model, and the client's machine of a request or a recorded call."""
    endpoint = record.endpoint
    server = endpoint.server or "an unnamed server"
    if endpoint.version:
        server = f"{server} {endpoint.version}"
    facts = {
        "server": f"{server} at {endpoint.url}, through {endpoint.api}",
        "model": record.model,
    }
    settings = endpoint.settings
    if settings:
        slots = f"{settings.n_slots} slots" if settings.n_slots else ""
        context = f"a context of {plural(settings.n_ctx, 'token')}" if settings.n_ctx else ""
        parts = [slots, context, settings.model_file, settings.quantization]
        facts["settings"] = ", ".join(filter(None, parts)) or UNKNOWN
    facts["client"] = text_plan.facts(record.machine)["machine"]
    return facts
