"""The chapters of a page: runs, experiments, requests, loads, what is faster, why, what failed, what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.analysis import comparison, request_table, table, wording
from lab.analysis.comparison import Group
from lab.analysis.spread import Spread
from lab.core.lists import grouped, plural
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord, short_name
from lab.errors import LabError
from lab.show import (
    levers,
    plot_runs,
    text_compare,
    text_endpoint,
    text_load,
    text_requests,
    text_results,
    text_setup,
    text_tune,
    text_why,
    trace_views,
)
from lab.show.section import SMALL, TALL, UNKNOWN, WIDE, Columns, Picture, Section, tabled
from lab.why import advice, probing, roofline, where

if TYPE_CHECKING:
    import pandas as pd

Lines = Sequence[Record | RequestRecord]

OF_RUNS = (
    "A run has two phases: prefill processes the prompt, decode generates one token after another. TTFT is the time to "
    "the first token, TPOT the time per token after it, E2E the time of the whole run. Figures are medians over runs, "
    "with 95 % intervals or, for fewer than 6 runs, ranges. A bar shows prefill's share of the time."
)
OF_TUNE = (
    "A search measured choices of settings in blocks with fresh engines. The table has the time that it expects of "
    "each, and the ratio of that to the default's, with a 95 % interval below. The search chose the fastest, so its "
    "ratios flatter the winner. The gain in the sentences comes from new blocks."
)
OF_REQUESTS = (
    f"{text_requests.MEANINGS} Figures are medians over requests, with 95 % intervals or, for fewer than 6 requests, "
    "ranges."
)
CAPTIONS = {
    "prefill": "Prefill: time until the prompt is processed. Points are runs, the line is their median. The dashed "
    "line shows growth in proportion to the length.",
    "ab": "Each variant against the first, block by block. Left of 1 it is faster. Bars are intervals of ratios.",
    "decode": "Decode: time of each generated token. Points are tokens, the line is their running median.",
    "sweep": "Both curves in one pass through the context. Points are runs, the dashed line is the fitted law.",
}
CAPTIONS_OF_REQUESTS = {
    "prefill": "TTFT: time until the first token arrives. Points are requests, the line is their median. The dashed "
    "line shows growth in proportion to the length.",
    "decode": "The gaps of each answer. Points are gaps between tokens or, if the server does not count tokens per "
    "event, between events. The line is their running median, or mean.",
}
SIZES = {"ab": WIDE, "sweep": TALL}
MANY = 3
"""With more setups than this, only setups of the same model are compared."""


def runs(timed: Sequence[Record], has_pictures: bool = True) -> list[Section]:
    """Plain runs, and sweeps."""
    plain = [record for record in timed if record.run.lever is None]
    made = []
    for name, title, is_sweep in (("runs", "Runs", False), ("sweeps", "Sweeps", True)):
        own = [record for record in plain if (record.run.every is not None) == is_sweep]
        if not own:
            continue
        rows = table.setups(table.runs(own))
        many = len(rows) > 1
        drawn = plot_runs.drawings(own, stacked=True) if has_pictures or is_sweep else {}
        made.append(
            Section(
                title,
                plural(len(rows), "setup") if many else "",
                name=name,
                question=text_results.question([label for label, _ in rows]),
                words=[OF_RUNS],
                sentences=[line for label, part in rows for line in text_results.times(label if many else "", part)],
                parts=text_results.sections(own),
                pictures=[
                    Picture(one, CAPTIONS[one.partition("-")[0]], draw, SIZES.get(one.partition("-")[0], SMALL))
                    for one, draw in drawn.items()
                ],
            )
        )
    return made


def experiments(timed: Sequence[Record], known: Sequence[Ceilings], others: Sequence[Record]) -> list[Section]:
    """A chapter for each experiment."""
    by_title = grouped(levers.sections(timed, known, others), lambda section: levers.TITLES[section.name])
    return [
        Section(title, name=parts[0].name, question=parts[0].question, parts=parts) for title, parts in by_title.items()
    ]


def tuned(records: Sequence[Record]) -> list[Section]:
    """Searches for the fastest settings, a part for each session."""
    parts = text_tune.sections(records)
    question = parts[0].question if len(parts) == 1 else "Which settings are the fastest?"
    return (
        [Section("The fastest settings", name="tune", question=question, words=[OF_TUNE], parts=parts)] if parts else []
    )


def requests(timed: Sequence[Record], alone: Sequence[RequestRecord]) -> list[Section]:
    """Requests that ran alone; runs of the engine are in the same pictures."""
    good = [record for record in alone if request_table.went_well(record)]
    if not good:
        return []
    rows = table.setups(table.runs(good))
    measured = [record for record in good if request_table.is_measured(record)] or good
    of_setups = table.setups(table.runs(measured))
    many = len(of_setups) > 1
    endpoints = [(label, good[part.run.iloc[0]].endpoint) for label, part in rows]
    seen = [(label, endpoint) for label, endpoint in endpoints if endpoint.capabilities]
    name, server = short_name(good[0].model), good[0].endpoint.server or "its server"
    return [
        Section(
            "Through a server",
            name="requests",
            question=f"How fast does {name} answer through {server}?"
            if len(rows) == 1
            else text_results.question([label for label, _ in rows]),
            words=[OF_REQUESTS],
            sentences=[_time(label if many else "", part) for label, part in of_setups],
            warnings=text_requests.warnings(alone),
            parts=[
                *text_requests.sections(alone),
                *(text_endpoint.capabilities(one, f"{label}: what the server can do") for label, one in seen),
            ],
            pictures=[
                Picture(one, CAPTIONS_OF_REQUESTS[one], draw)
                for one, draw in plot_runs.drawings([*timed, *alone], by_session=True).items()
                if one in CAPTIONS_OF_REQUESTS
            ],
        )
    ]


def loads(of_loads: Sequence[RequestRecord]) -> list[Section]:
    """Loads on servers, a part for each session."""
    if not of_loads:
        return []
    first, n_servers = of_loads[0], len({(one.endpoint.url, one.model) for one in of_loads})
    server = first.endpoint.server or "its server"
    return [
        Section(
            "Under load",
            name="loads",
            question="How much load can these servers handle?"
            if n_servers > 1
            else f"How much load can {first.model} handle through {server}?",
            sentences=text_load.all_capacities(of_loads),
            parts=text_load.sections(of_loads),
        )
    ]


def traces(traced: Sequence[Record]) -> list[Section]:
    """Runs of `lab trace`: parts for prefill and decode, or for attention weights."""
    parts, lines = trace_views.sections(traced), list[str]()
    if len(traced) == 1:  # its sentences are above its tables
        lines = [line for part in parts for line in part.sentences]
        parts = [dataclasses.replace(part, sentences=()) for part in parts]
    question = parts[0].question or "Where does the time of a token go?" if parts else ""
    title = "One token's way"
    return [Section(title, name="trace", question=question, sentences=lines, parts=parts)] if parts else []


def compared(records: Lines, at_least: float, spreads: Mapping[tuple[Any, str], Spread]) -> tuple[bool, list[Section]]:
    """Comparisons of setups, or of sessions of one setup: a part for each group with common lengths.

    Also returns whether all setups are in one group.
    """
    try:
        groups = comparison.groups(records)
    except LabError:  # there is only one
        return False, []
    clusters = _clusters(groups)
    answers, parts = list[str](), list[Section]()
    for cluster in (cluster for cluster in clusters if len(cluster) > 1):
        found = comparison.compare_groups(cluster, at_least, spreads)
        answers += text_compare.answers(found)
        names = [group.label for group in cluster]
        differ = text_compare.differences(cluster)
        parts.append(
            Section(
                "Differences" if differ else "",
                words=[f"The base is {names[0]}."],
                headings=["", *names] if differ else [],
                cells=[[field, *values] for field, values in differ.items()],
                parts=text_compare.sections(found),
            )
        )
        parts.append(Section(sentences=text_compare.how_compared(cluster, found, at_least)))
    n_alone = sum(len(cluster) == 1 for cluster in clusters)
    rest = f"{n_alone} of {len(groups)} setups have no length in common with another setup of their model"
    left_out = [f"{rest}, so {'it is' if n_alone == 1 else 'they are'} not compared."] if n_alone else []
    title = "Which is faster, and how certain is that?"
    return not n_alone and len(clusters) == 1, [
        Section(title, name="compared", words=left_out, sentences=answers, parts=parts)
    ]


def _clusters(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that can be compared with the first of each cluster; with many groups only groups of one model."""
    clusters: list[list[Group]] = []
    for group in groups:
        keys = _measured(group, len(groups) > MANY)
        fitting = [cluster for cluster in clusters if keys & _measured(cluster[0], len(groups) > MANY)]
        if fitting:
            fitting[0].append(group)
        else:
            clusters.append([group])
    return [_relabelled(cluster) for cluster in clusters] if len(clusters) > 1 else clusters


def _measured(group: Group, by_model: bool) -> set[tuple[Any, ...]]:
    """The measurements of a group: experiments, lengths and, if it counts, the model."""
    rows = group.rows
    model = rows.model.iloc[0].split(" ")[0] if by_model else ""
    return {
        (model, lever if isinstance(lever, str) else "", n) for lever, n in zip(rows.lever, rows.n_prompt, strict=True)
    }


def _relabelled(cluster: Sequence[Group]) -> list[Group]:
    """The same groups, labelled by the differences among them."""
    import pandas as pd

    return [Group(label, rows) for label, rows in table.setups(pd.concat([group.rows for group in cluster]))]


def whys(timed: Sequence[Record], known: Sequence[Ceilings]) -> list[Section]:
    """What limited each setup; one sentence on all setups without ceilings."""
    plain = [record for record in timed if record.run.lever is None]
    if not plain:
        return []
    parts, problems = list[Section](), list[str]()
    for label, rows in table.setups(table.runs(plain)):
        own = [plain[i] for i in dict.fromkeys(rows.run)]
        for n_gen, alike in grouped(own, lambda record: record.run.n_gen).items():
            try:
                parts.append(_why(f"{label}, {n_gen:,} tokens generated", alike, known))
            except LabError as problem:
                problems.append(f"{problem.what} {problem.hint}")
    if len(problems) > 1:
        problems = [f"The limits of {len(problems)} other setups are unknown without ceilings: {problems[0]}"]
    return [Section("What limits the speed?", name="why", words=problems, parts=parts)]


def _why(label: str, records: Sequence[Record], known: Sequence[Ceilings]) -> Section:
    """What limited runs of one setup and one n_gen. LabError without ceilings of their machine."""
    first = records[0]
    ceilings = probing.need(known, where.of_record(first), False, label)
    rows = roofline.explain(records, ceilings)
    levers = [*advice.levers(rows, first, ceilings), *advice.experiments(rows, records, ceilings)]
    section = text_why.section(label, records, rows, ceilings, levers)
    caveat = text_why.caveat(first)
    return dataclasses.replace(section, words=[*section.words, caveat]) if caveat else section


def failed(rest: Sequence[Record], alone: Sequence[RequestRecord]) -> list[Section]:
    """What failed, in one list."""
    lines = [*text_results.failures(rest), *text_requests.failures(alone)]
    return [Section("What failed", name="failed", warnings=[f"failed: {line}" for line in lines])] if lines else []


def setups(good: Lines) -> Section:
    """Machine, build, model and settings; for several setups a table of the differences."""
    all_facts = (_facts_of_run(one) if isinstance(one, Record) else _facts_of_request(one) for one in good)
    by_facts = {tuple(facts.items()): facts for facts in all_facts}
    known = list(by_facts.values())
    names = list(dict.fromkeys(name for facts in known for name in facts))
    shared = {name: known[0][name] for name in names if len({facts.get(name) for facts in known}) == 1}
    columns: Columns = [(name, partial(_fact, name=name)) for name in names if name not in shared]
    return Section(
        "What was measured", name="setups", facts=shared, **(tabled(columns, known) if len(known) > 1 else {})
    )


def _fact(facts: dict[str, str], name: str) -> str:
    return facts.get(name, UNKNOWN)


def _facts_of_run(record: Record) -> dict[str, str]:
    """Machine, build, model and settings of a record, in words."""
    settings = record.settings
    flash = settings.flash_attn_resolved or settings.flash_attn
    named = text_setup.facts(record.machine, record.model)
    if record.model.source == "synthetic":
        named["weights"] = "random: timing is that of the real model's shape, the text is meaningless"
    n_threads, n_layers = (n if n >= 0 else None for n in (settings.n_threads, settings.n_gpu_layers))  # imported: -1
    parts = {
        f"{plural(settings.n_threads, 'thread')} ({settings.n_threads_batch} for prefill)": n_threads,
        f"batch {settings.n_batch}": settings.n_batch,
        f"ubatch {settings.n_ubatch}": settings.n_ubatch,
        f"{settings.n_gpu_layers} layers on GPUs": n_layers,
        f"flash attention {flash}": flash,
        f"KV cache: keys {settings.type_k}, values {settings.type_v}": settings.type_k,
        f"prompts from {settings.prompt}": settings.prompt,
        f"seed {settings.seed}": settings.seed,
    }
    return named | {"settings": ", ".join(words for words, value in parts.items() if value is not None)}


def _facts_of_request(record: RequestRecord) -> dict[str, str]:
    """The server, the model, and the machine of the client. Unknown parts are left out."""
    endpoint, settings = record.endpoint, record.endpoint.settings
    named = " ".join(word for word in (endpoint.server or "an unnamed server", endpoint.version) if word)
    parts = (
        {
            f"{settings.n_slots} slots": settings.n_slots,
            f"a context of {settings.n_ctx:,} tokens" if settings.n_ctx else "": settings.n_ctx,
            f"file {settings.model_file}": settings.model_file,
            f"quantization {settings.quantization}": settings.quantization,
        }
        if settings
        else {}
    )
    known = ", ".join(words for words, value in parts.items() if value is not None)
    texts = {"server": f"{named} at {endpoint.url}, through {endpoint.api}", "model": record.model}
    return texts | ({"settings": known} if known else {}) | {"client": text_setup.facts(record.machine)["machine"]}


def _time(label: str, rows: pd.DataFrame) -> str:
    """A sentence on the longest prompt of a setup of requests."""
    row = table.summary(rows).iloc[-1]
    n = text_requests.length(row.n_prompt)
    words = f"the first token of {n} prompt tokens arrives after {wording.seconds(row.ttft_s)}"
    if row.tpot_ms > 0 and not row.n_bounds:
        words += f", each further token takes {wording.seconds(row.tpot_ms / 1e3)}"
        words += f" ({wording.digits(1e3 / row.tpot_ms)} tokens/s)"
    elif row.tpot_low_ms > 0:
        ends = (wording.seconds(ms / 1e3) for ms in (row.tpot_low_ms, row.tpot_high_ms))
        words += f", each further token takes {' to '.join(ends)}"
    return f"{label}: {words}." if label else f"{words[:1].upper()}{words[1:]}."
