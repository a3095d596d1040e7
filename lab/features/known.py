"""The list of kinds of results. `lab show`, `lab plot`, `lab report`, `--json` and "make again" are loops over it.

A kind says which records are its own, what sections show them, and which command makes them again. A section holds its
table, sentences, pictures and rows for JSON; the terminal prints its parts, a page is made of whole sections.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lab.core.lists import grouped, plural
from lab.core.record import QUANT, Ceilings, Record
from lab.core.request import RequestRecord, short_name
from lab.core.shown import MARK
from lab.features import again
from lab.features.claims import judging
from lab.features.claims import views as claim_views
from lab.features.claims.figures import CLAIMS
from lab.features.experiment import Experiment, Table
from lab.features.experiments import EXPERIMENTS
from lab.features.limits.step_prediction import StepPrediction, prediction_for
from lab.features.measure import plot_runs, text_results
from lab.features.quant import views as quant_views
from lab.features.serve import text_endpoint, text_load, text_requests
from lab.features.trace import trace_views
from lab.features.tune import text_tune
from lab.features.turns import served
from lab.show import canvas, disturbances, request_table, table, wording
from lab.show.section import (
    SMALL,
    TALL,
    WIDE,
    Picture,
    Section,
    numbered,
    print_marked,
    print_sections,
    tabled,
)

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


@dataclass(frozen=True)
class Context:
    """What sections may use besides the records of their kind.

    `others` are more runs of these machines, `runs` (set by `sections`) the runs among the records.
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
    """A kind of results."""

    name: str
    is_mine: Callable[[Any], bool]
    sections: Callable[[Any, Context], list[Section]]
    again: Callable[[Any], str | None]


def runs(records: Sequence[Record], context: Context) -> list[Section]:
    """Plain runs, and sweeps."""
    made = []
    for name, title, is_sweep in (("runs", "Runs", False), ("sweeps", "Sweeps", True)):
        own = [one for one in records if one.run.is_timed and (one.run.every is not None) == is_sweep]
        if not own:
            continue
        rows = table.setups(table.runs(own))
        many = len(rows) > 1
        sizes = {"ab": WIDE, "sweep": TALL if context.is_page else WIDE}
        drawn = plot_runs.drawings(own, stacked=context.is_page, by_session=context.by_session)
        kinds = {one: one.partition("-")[0] for one in drawn if not (context.together and one in CAPTIONS_OF_REQUESTS)}
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
                    Picture(one, CAPTIONS[kind], drawn[one], sizes.get(kind, SMALL)) for one, kind in kinds.items()
                ],
                data=partial(_summary, own),
            )
        )
    return made


def _summary(records: Lines) -> dict[str, list[Any]]:
    return {"rows": table.summary(table.runs(records)).to_dict("records")}


def experiments(experiment: Experiment, records: Sequence[Record], context: Context) -> list[Section]:
    """The results of an experiment, predicted from ceilings and plain runs: a part for each table and setup."""
    own = [record for record in records if record.run.is_timed]
    setups = [
        (label, tuple(own[i] for i in dict.fromkeys(rows.run)))
        for label, rows in (table.setups(table.runs(own)) if own else [])
    ]
    made = [
        _experiment(kind, label, chosen, prediction_for(chosen[0], context.ceilings, [*context.runs, *context.others]))
        for kind in experiment.tables
        for label, chosen in setups
    ]
    parts = [one for one in made if one.rows]
    first = parts[0] if parts else Section()
    return [Section(experiment.chapter, name=first.name, question=first.question, parts=parts)] if parts else []


def _experiment(kind: Table, label: str, records: tuple[Record, ...], prediction: StepPrediction | None) -> Section:
    """A table of an experiment with its sentences and the basis of its predictions."""
    rows = tuple(kind.rows(records, prediction))
    words, more = kind.conclude(rows, records, prediction)
    shown = tabled(kind.columns, rows)
    is_predicted = any("predicted" in heading for heading in shown["headings"])
    basis = list[str]()
    if kind.is_by_ceilings and prediction is None:
        basis = ["No predictions: measure the ceilings first (lab ceilings)."]
    elif kind.is_by_ceilings and is_predicted and prediction:
        basis = [prediction.basis]
    n_disturbed = sum(bool(disturbances.disturbances(record)) for record in records)
    if any(map(disturbances.is_doubtful, grouped(records, lambda record: record.run.name).values())):
        words = [f"No conclusions: {n_disturbed} of {len(records)} runs were disturbed. Measure again."]
    title = f"{label} ({MARK} {n_disturbed} of {len(records)} runs disturbed)" if n_disturbed else label
    return Section(
        title,
        kind.title,
        name=kind.name,
        question=kind.question,
        **shown,
        sentences=[*words, *basis],
        pictures=[Picture(kind.name, kind.caption, partial(kind.draw, rows, records, prediction, title), WIDE)],
        data=lambda: {
            "rows": [{"experiment": kind.name, "setup": title, **_as_dict(row)} for row in rows],
            **{name: [{"setup": title, **_as_dict(one)} for one in own] for name, own in more.items()},
        },
    )


def _as_dict(row: Any) -> dict[str, Any]:
    """A row of an experiment: a named tuple or a dataclass."""
    return row._asdict() if hasattr(row, "_asdict") else dataclasses.asdict(row)


def tuned(records: Sequence[Record], context: Context) -> list[Section]:
    """Searches for the fastest settings, a part for each session."""
    parts = text_tune.sections(records, is_here=not context.is_page)
    if not parts:
        lines = ["lab tune measured no run of the default, so nothing can be compared with it."]
        return [] if context.is_page else [Section(sentences=lines)]
    question = parts[0].question if len(parts) == 1 else "Which settings are the fastest?"
    return [Section("The fastest settings", name="tune", question=question, words=[OF_TUNE], parts=parts)]


def claims(records: Sequence[Record], context: Context) -> list[Section]:
    """The verdicts of each session of claims."""
    judged = judging.of_sessions(CLAIMS, records, context.ceilings)
    return claim_views.sections(judged, warnings, with_criteria=context.details or context.is_page)


def requests(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Requests that ran alone; runs of the engine are in the same pictures."""
    good = [record for record in records if request_table.went_well(record)]
    if not good:
        return []
    rows = table.setups(table.runs(good))
    of_setups = table.setups(table.runs([one for one in good if request_table.is_measured(one)] or good))
    many = len(of_setups) > 1
    name, server = short_name(good[0].model), good[0].endpoint.server or "its server"
    question = f"How fast does {name} answer through {server}?"
    seen = [(label, good[part.run.iloc[0]].endpoint) for label, part in rows if context.is_page]
    drawn = plot_runs.drawings(
        [*(context.runs if context.together else ()), *records], by_session=context.by_session or context.is_page
    )
    return [
        Section(
            "Through a server",
            name="requests",
            question=question if len(rows) == 1 else text_results.question([label for label, _ in rows]),
            words=[OF_REQUESTS],
            sentences=[_time(label if many else "", part) for label, part in of_setups],
            warnings=text_requests.warnings(records),
            parts=[
                *text_requests.sections(records),
                *(
                    text_endpoint.capabilities(one, f"{label}: what the server can do")
                    for label, one in seen
                    if one.capabilities
                ),
            ],
            pictures=[
                Picture(one, caption, drawn[one]) for one, caption in CAPTIONS_OF_REQUESTS.items() if one in drawn
            ],
            data=partial(_summary, records),
        )
    ]


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


def loads(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Loads on servers, a part for each session."""
    first, n_servers = records[0], len({(one.endpoint.url, one.model) for one in records})
    server = first.endpoint.server or "its server"
    return [
        Section(
            "Under load",
            name="loads",
            question="How much load can these servers handle?"
            if n_servers > 1
            else f"How much load can {first.model} handle through {server}?",
            sentences=text_load.all_capacities(records),
            parts=text_load.sections(records),
        )
    ]


def served_turns(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Conversations through a server, a part for each session."""
    parts = served.sections(records)
    return (
        [Section("Conversations through a server", name="turns", question=parts[0].question, parts=parts)]
        if parts
        else []
    )


def traces(records: Sequence[Record], context: Context) -> list[Section]:
    """Runs of `lab trace`: parts for prefill and decode, or for attention weights."""
    parts, lines = trace_views.sections(records, by_layer=context.details), list[str]()
    if len(records) == 1 and context.is_page:  # its sentences are above its tables
        lines = [line for part in parts for line in part.sentences]
        parts = [dataclasses.replace(part, sentences=()) for part in parts]
    question = parts[0].question or "Where does the time of a token go?" if parts else ""
    made = Section(
        "One token's way",
        name="trace",
        question=question,
        sentences=lines,
        parts=parts,
        data=lambda: {"traces": trace_views.as_rows(records)},
    )
    return [made] if parts else []


def quants(records: Sequence[Record], context: Context) -> list[Section]:
    """Sessions of `lab quant`: quality, and the runs that show the speed."""
    return quant_views.sections(records, context.ceilings)


def _runs(records: Lines) -> list[Record]:
    """Plain runs and those of experiments."""
    return [one for one in request_table.of_engine(records) if not one.run.is_apart]


KINDS = (
    Kind("runs", lambda one: bool(_runs([one])) and one.run.lever is None, runs, again.runs),
    *(
        Kind(
            each.name,
            lambda one, lever=each.lever: bool(_runs([one])) and isinstance(one.run.lever, lever),  # type: ignore[misc]
            partial(experiments, each),
            partial(again.runs, experiment=each),
        )
        for each in EXPERIMENTS
    ),
    Kind("tune", lambda one: isinstance(one, Record) and one.run.tuning is not None, tuned, again.tune),
    Kind("claims", lambda one: isinstance(one, Record) and one.run.part not in (None, QUANT), claims, again.claims),
    Kind("quant", lambda one: isinstance(one, Record) and one.run.part == QUANT, quants, again.quant),
    Kind("requests", lambda one: bool(request_table.alone([one])), requests, again.requests),
    Kind("loads", lambda one: bool(request_table.loads_of([one])), loads, again.loads),
    Kind("served turns", served.is_mine, served_turns, again.served_turns),
    Kind(
        "trace", lambda one: isinstance(one, Record) and one.run.is_traced and not one.run.quality, traces, again.trace
    ),
)
"""Every kind of results, in the order in which they are shown."""


def sections(records: Lines, context: Context | None = None, only: Sequence[str] = ()) -> list[Section]:
    """The sections of all records, or of those of some kinds. Without a context nothing is predicted."""
    context = context or Context()
    answered = any(map(request_table.went_well, request_table.alone(records)))
    context = dataclasses.replace(context, runs=_runs(records), together=context.together and answered)
    owned = [(kind, [one for one in records if kind.is_mine(one)]) for kind in KINDS if not only or kind.name in only]
    return [section for kind, own in owned if own for section in kind.sections(own, context)]


def experiments_of(records: Lines, ceilings: Sequence[Ceilings] = (), others: Sequence[Record] = ()) -> list[Section]:
    """The tables of experiments: a section for each table and setup."""
    made = sections(records, Context(ceilings, others), [one.name for one in EXPERIMENTS])
    return [part for section in made for part in section.parts]


def print_results(
    records: Lines, out: Console, made: Sequence[Section] | None = None, sentences: Sequence[str] = ()
) -> None:
    """Prints the sections that are `made` of records, then what failed and what disturbed the runs, then sentences.

    Of a section without a table of its own the parts are printed, without what introduces them on a page.
    """
    for section in sections(records) if made is None else made:
        print_sections([section] if section.headings or not section.parts else section.parts, out)
    rest, alone = _runs(records), request_table.alone(records)
    if rest and not any(record.run.is_timed for record in rest):
        out.print("\nNo run went well.")
    of_experiments = [record for record in rest if record.run.lever is not None]
    doubts = [*text_results.imported(rest), *distrust(rest), *text_results.disturbed(of_experiments)]
    print_marked(doubts, text_results.failures(rest), out)
    if alone and not any(map(request_table.went_well, alone)):
        out.print("\nNo request went well.")
    print_marked(text_requests.warnings(alone), text_requests.failures(alone), out)
    print_sections([Section(sentences=sentences)] if sentences else [], out)


def as_json(records: Lines, made: Sequence[Section] | None = None) -> dict[str, Any]:
    """The rows of sections, what disturbed the runs, and what failed."""
    lists: dict[str, list[Any]] = {"rows": []}
    for section in sections(records) if made is None else made:
        for name, values in section.document().items():
            lists[name] = [*lists.get(name, ()), *values]
    of_engine, alone = (
        [one for one in request_table.of_engine(records) if not one.run.is_traced],
        request_table.alone(records),
    )
    return {
        **{name: values for name, values in lists.items() if values or name == "rows"},
        "warnings": [*warnings(of_engine), *text_requests.warnings(alone)],
        "failures": [*text_results.failures(of_engine), *text_requests.failures(alone)],
    }


def draw(made: Sequence[Section], folder: Path, stem: str) -> list[Path]:
    """Writes the pictures of sections; their paths: `<stem>-prefill.png` ..."""
    pictures = numbered([picture for section in made for picture in section.all_pictures])
    return [path for one in pictures for path in canvas.write(one.draw, folder, f"{stem}-{one.name}", one.file_size)]


def commands(records: Lines) -> list[str]:
    """The command line of each session."""
    in_order: Lines = [
        *request_table.of_engine(records),
        *request_table.alone(records),
        *request_table.loads_of(records),
        *(one for one in records if isinstance(one, RequestRecord) and served.is_mine(one)),
    ]
    sessions = grouped(in_order, lambda one: (one.session, type(one)))
    return [line for line in dict.fromkeys(map(command, sessions.values())) if line]


def command(records: Lines) -> str | None:
    """The command line of one session; None for what no command makes again, such as imported results."""
    first = next((one for one in request_table.of_engine(records) if not one.run.warmup), records[0])
    return next(kind for kind in KINDS if kind.is_mine(first)).again(records)


def distrust(records: Sequence[Record]) -> list[str]:
    """A sentence for each session with unreliable figures, with the command to measure it again."""
    return text_results.distrust(records, command)


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed runs of the engine, and whether their figures are to be trusted."""
    return [*text_results.imported(records), *text_results.disturbed(records), *distrust(records)]
