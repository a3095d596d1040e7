"""`lab turns`: a conversation, turn by turn, and how much of its prompt is read again.

The prompt of a turn is the system prompt, all earlier messages and answers, and a new message. A
cache serves it up to the first token that differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Unpack

import click

from lab.app import experiment
from lab.app.collection import Results
from lab.app.experiment import REPEAT, Experiment, ExperimentTable
from lab.app.experiment_tables import cell
from lab.app.options import MODEL, PROMPT, SAMPLING
from lab.core import shown
from lab.core.arguments import StrPath, Texts
from lab.core.figures import TTFT
from lab.core.keywords import EngineSettings, SamplerSettings
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.core.request import RequestRecord, short_name
from lab.features.turns.conversation import NAME
from lab.features.turns.figures import TurnRow, finished, rows
from lab.features.turns.picture import draw
from lab.features.turns.planning import plan
from lab.features.turns.sentences import conclude, finding, sentences
from lab.features.turns.server_figures import not_cold, not_longer, served
from lab.features.turns.through_server import converse
from lab.models import catalog
from lab.runner import disturbances
from lab.runner.progress import Watch
from lab.show.cells import Column, of_figure
from lab.show.section import Context, Kind, Section
from lab.show.wording import UNKNOWN


class TurnsSettings(EngineSettings, SamplerSettings, total=False):
    pass


def turns(
    system: int = 500,
    turn: str = "100+50",
    turns: int = 8,
    breaks: str = "",
    keep: Texts = "memory,none",
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    replay: StrPath | None = None,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[TurnsSettings],
) -> Results[Record]:
    """Measure a conversation turn by turn; returns a record per run.

        lab.turns(system=4000, turn="300+150", turns=12, breaks="system@6")

    `turn` is tokens of a message + tokens of an answer, each fixed or drawn, such as
    "lognormal:300,0.8+150". `breaks` are what breaks the cache, `keep` where it is between turns:
    memory, slot, disk, none. With `replay`, a file of recorded requests, the lengths are those of
    their prompts, rendered by the model's own template, and the text is the lab's own. States are
    saved in a folder on the disk of `out`, and deleted again. LabError for impossible values.
    """
    options = {
        "system": system,
        "turn": turn,
        "turns": turns,
        "breaks": breaks,
        "keep": keep,
        "repeat": repeat,
        "model": model,
        "replay": replay,
    }
    return Results(EXPERIMENT.measure({**options, **settings}, out, watch))


OPTIONS = (
    click.option(
        "--system", default=500, show_default=True, help="Tokens of the system prompt."
    ),
    click.option(
        "--turn",
        default="100+50",
        show_default=True,
        metavar="LENGTHS",
        help="Tokens of a message + an answer: 300+150, lognormal:300,0.8+150.",
    ),
    click.option("--turns", default=8, show_default=True, help="Number of turns."),
    click.option(
        "--break",
        "breaks",
        default="",
        metavar="EVENTS",
        help="What breaks the cache: system@6,thinking@2+ (+: from there on).",
    ),
    click.option(
        "--keep",
        default="memory,none",
        show_default=True,
        metavar="PLACES",
        help="Where the cache is between turns: memory,slot,disk,none.",
    ),
    REPEAT,
    click.option(
        "--replay",
        metavar="FILE",
        help="Recorded requests: a JSON body a line, or an array of them.",
    ),
    MODEL,
    PROMPT,
    *SAMPLING,
)


def count_cell(name: str, row: TurnRow) -> str:
    """The cell of a number of tokens, with ~ where it is estimated; nothing for none again."""
    count = getattr(row, name)
    if count is None or (name == "n_again" and not count):
        return UNKNOWN
    return f"{count:,}" if row.is_known or name == "n_prompt" else f"~{count:,}"


def perfect_cell(row: TurnRow) -> str:
    return UNKNOWN if row.perfect_s == row.turn_s else cell(row.perfect_s)


def differs_cell(row: TurnRow) -> str:
    return UNKNOWN if row.differs_at is None else f"{row.differs_at + 1:,}"


TABLE: ExperimentTable[TurnRow] = ExperimentTable(
    name=NAME,
    question="How much of a conversation's prompt is read again?",
    title="a conversation turn by turn, medians over runs; again: tokens of earlier turns that "
    "were computed again; differs: the first token that is not the cache's",
    topic="The turns of a conversation: what is read again",
    finding=finding,
    caption="Above: the tokens of each prompt. Below: the time of each turn; lines are the times "
    "without a cache and with one that nothing breaks, a perfect cache. These come from other "
    "runs of the session, so the line of a perfect cache can lie a little above a bar.",
    rows=rows,
    conclude=conclude,
    draw=draw,
    columns=(
        Column("turn", lambda row: str(row.turn)),
        Column("cache", lambda row: row.cache),
        Column("broken by", lambda row: row.breaks),
        Column("cached", partial(count_cell, "n_cached")),
        Column("computed", partial(count_cell, "n_computed")),
        Column("again", partial(count_cell, "n_again")),
        of_figure(TTFT, lambda row: cell(row.ttft_s)),
        Column("turn\ns", lambda row: cell(row.turn_s)),
        Column("no cache\ns", lambda row: cell(row.without_s)),
        Column("perfect\ns", perfect_cell),
        Column("predicted\nTTFT s", lambda row: cell(row.expected_ttft_s)),
        Column("decode\ns", lambda row: cell(row.decode_s)),
        Column("sum\ns", lambda row: cell(row.sum_s)),
        Column("differs\nat", differs_cell),
        Column("prompt", partial(count_cell, "n_prompt")),
    ),
)
SERVED_TITLE = (
    "a conversation turn by turn; again: tokens of earlier turns that were computed again; "
    "differs: the first letter that is not the cache's"
)
FORMULA = (
    "Times without a cache and with a perfect one come from a formula for the TTFT of uncached "
    "tokens."
)


def served_sections(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    """Conversations through a server, a part for each session."""
    parts: list[Section] = []
    for session in grouped(records, lambda record: record.session).values():
        table = served(session)
        if not table.empty:
            parts.append(served_section(session, finished(table), context))
    if not parts:
        return []
    chapter = "Conversations through a server"
    return [Section(chapter, name=NAME, question=TABLE.question, parts=parts)]


def served_section(
    records: Sequence[RequestRecord], turns: Sequence[TurnRow], context: Context
) -> Section:
    """The turns of a session, marked and without conclusions if its requests were disturbed."""
    endpoint = records[0].endpoint
    server = endpoint.server or "its server"
    n_slots = endpoint.settings.n_slots if endpoint.settings else None
    label = f"{short_name(records[0].model)} through {server}"
    conclusions = [*sentences(turns, n_slots), FORMULA]
    n_disturbed = len([record for record in records if disturbances.of_request(record)])
    n_requests = plural(len(records), "request")
    is_conclusive = not shown.is_unreliable(len(records), n_disturbed)
    if not is_conclusive:
        conclusions = [shown.no_conclusions(n_disturbed, n_requests)]
    kind = dataclasses.replace(
        TABLE,
        title=SERVED_TITLE,
        is_by_ceilings=False,
        rows=lambda records, prediction: turns,
        conclude=lambda rows, records: conclusions,
        finding=finding if is_conclusive else None,
    )
    title = shown.titled(label, n_disturbed, n_requests)
    section = experiment.section(kind, title, (), None, context.is_page)
    warnings = [
        *not_cold(records),
        *not_longer(records),
        *disturbances.request_sentences(records),
    ]
    return dataclasses.replace(section, warnings=warnings)


def is_served(line: object) -> bool:
    """Whether a line of a results file is a turn through a server."""
    return isinstance(line, RequestRecord) and line.experiment == NAME


EXPERIMENT = Experiment(
    name=NAME,
    chapter="Conversations",
    about="""Measure what each turn of a conversation processes again.

    \b
      lab turns --system 4000 --turn 300+150 --turns 12 --break system@6
      lab turns --replay session.jsonl
      lab turns --url http://127.0.0.1:8080/v1

    Shows the tokens that the cache served and those computed anew, the times of each turn, its time
    without a cache and with one that nothing breaks, and the prediction from the ceilings. Names
    the first token at which a prompt differs from the cache. Events of --break: system (a clock in
    the system prompt), tools (two in another order), truncate (an old message shortened), second
    (another conversation used the cache), shift (the older half dropped), thinking (removed from
    the newest answer). With --keep slot a second conversation takes turns with the first, in a slot
    of its own; disk uses a hidden folder in --out.

    --replay takes the bodies of requests (with tools, their calls and results, reasoning), or the
    messages of a conversation. In process the model's own chat template renders them, which gives
    the lengths of all prompts, and what each shares with the one before; through a server they are
    sent, with the recorded answers.
    """,
    plan=plan,
    options=OPTIONS,
    main_options=("model", "system", "turn", "turns", "break", "keep"),
    tables=(TABLE,),
    saves_states=True,
    through_server=converse,
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(), Kind("served turns", is_served, served_sections))
