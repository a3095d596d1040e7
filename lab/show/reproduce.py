"""From records back to the command that makes them again.

Every record holds what was chosen, so the command can be written out in full. Options that have their default
value are left out, but for the number of threads: its default is another one on another machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lab.analysis import request_table, tuning
from lab.core import shell
from lab.core.levers import Batch
from lab.core.lists import grouped
from lab.core.record import Record
from lab.core.request import CONSTANT, RequestRecord
from lab.experiments import known
from lab.experiments.claims.figures import CLAIMS
from lab.experiments.claims.session import PARTS
from lab.runner.as_options import option, options


def commands(records: Sequence[Record | RequestRecord]) -> list[str]:
    """The command line of each session."""
    made = [command(own) for own in _by_session(request_table.of_engine(records))]
    made += [request_command(own) for own in _by_session(request_table.alone(records))]
    made += [load_command(own) for own in _by_session(request_table.loads_of(records))]
    return [line for line in dict.fromkeys(made) if line]


def _by_session(records: Sequence[Any]) -> list[list[Any]]:
    return list(grouped(records, lambda one: one.session).values())


def _line(
    name: str, given: dict[str, object], first: Sequence[Sequence[str]] = (), last: Sequence[Sequence[str]] = ()
) -> str:
    """A command with options, without those that are None or empty; other words come first, or last."""
    known = [option(key, value) for key, value in given.items() if value not in (None, "", [])]
    return shell.lab(name, *first, *(word for words in (*known, *last) for word in words))


def request_command(records: Sequence[RequestRecord]) -> str:
    """The command line of one session of requests that ran alone. Keys and headers are in no record."""
    asked = [record.request.asked for record in records]
    lengths = sorted({one.n_prompt for one in asked if one.n_prompt is not None})
    n_gen, repeat = max(one.n_gen for one in asked), 1 + max(one.repeat for one in asked)
    return _line("measure", _server(records[0]) | {"prompt_len": lengths, "gen": n_gen, "repeat": repeat})


def _server(record: RequestRecord) -> dict[str, object]:
    return {"url": record.endpoint.url, "model": record.model, "api": record.endpoint.api}


def load_command(records: Sequence[RequestRecord]) -> str | None:
    """The command line of one session of loads; None for a replay: records lack its file."""
    loads = [one.request.asked.load for one in records if one.request.asked.load]
    first, slo = loads[0], loads[0].slo
    lengths = re.fullmatch(r"(\S+) \+ (\S+) tokens", first.lengths)
    if lengths is None:
        return None
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s} if slo else {}
    given = {
        "concurrency": sorted({load.concurrency for load in loads if load.concurrency is not None}),
        "rate": sorted({load.rate for load in loads if load.rate is not None}),
        "arrivals": CONSTANT if first.arrivals == CONSTANT else None,
        "prompt_len": lengths[1],
        "gen": lengths[2],
        "warmup": f"{first.warmup_s:g}",
        "duration": f"{first.duration_s:g}",
        "rounds": 1 + max(load.round for load in loads),
        "slo": [f"{name}={limit:g}s" for name, limit in limits.items() if limit is not None],
        "seed": first.seed,
    }
    return _line("load", _server(records[0]) | given)


def command(records: Sequence[Record]) -> str | None:
    """The command line of one session; None for imported results.

    Options that all variants share come last, once.
    """
    timed = [record for record in records if not record.run.warmup] or list(records)
    if not timed or any(record.run.totals for record in timed):
        return None
    if any(record.run.part for record in timed):
        return _claims(timed)
    run, repeat = timed[0].run, 1 + max(record.run.repeat for record in timed)
    lengths = sorted({record.run.n_prompt for record in timed})
    shared = [option for option in options(timed[0]) if all(option in options(record) for record in records)]
    if run.tuning is not None:
        return _tune(timed)
    if run.attention is not None:
        return _line("trace", {"attention": run.attention.text}, (), shared)
    if run.trace is not None:
        n_rounds = run.trace.prefill.n_steps
        return _line("trace", {"prompt_len": lengths, "gen": run.n_gen - 1, "repeat": n_rounds}, (), shared)
    if run.block is not None:
        by_name = {record.run.variant or "": options(record) for record in records}
        own = [
            [word for option in by_name[name] if option not in shared for word in option] for name in sorted(by_name)
        ]
        blocks = 1 + max(record.run.block or 0 for record in timed)
        numbers = sorted({record.run.batch.n_seq for record in timed if record.run.batch})
        given = {"prompt_len": lengths, "gen": run.n_gen, "blocks": blocks, "sequences": numbers}
        return _line("ab", given, own, shared)
    if run.lever is not None:
        experiment = known.of_run(run)
        assert experiment is not None
        return _line(experiment.name, experiment.again([one.run for one in timed]) | {"repeat": repeat}, (), shared)
    if run.every is not None:
        return _line("sweep", {"max_len": lengths, "every": run.every, "gen": run.n_gen, "repeat": repeat}, (), shared)
    return _line("measure", {"prompt_len": lengths, "gen": run.n_gen, "repeat": repeat}, (), shared)


def _tune(timed: Sequence[Record]) -> str:
    """The command line of a session of `lab tune`: the model, and the options that no choice changed."""
    first = next((record for record in timed if record.run.variant == tuning.DEFAULT), timed[0])
    asked, lever = first.run.tuning, first.run.lever
    fixed = [one for one in options(first) if one[0] == "--model" or all(one in options(each) for each in timed)]
    is_lossy = any(tuning.is_lossy(tuning.choice_of(record, first)) for record in timed)
    given: dict[str, object] = {
        "prompt_len": first.run.n_prompt,
        "gen": asked.n_gen if asked else None,
        "goal": asked.goal if asked and asked.goal != tuning.REQUEST else None,
        "users": lever.n_seq if isinstance(lever, Batch) else None,
    }
    return _line("tune", given, (), [*([("--allow-lossy",)] if is_lossy else []), *fixed])


def _claims(timed: Sequence[Record]) -> str:
    """The command line of a session of claims: with the settings of the parts that change none."""
    usual = [record for record in timed if record.run.block is None and record.run.lever is None] or timed
    shared = [option for option in options(usual[0]) if all(option in options(record) for record in usual)]
    tried = {record.run.part for record in timed}
    only = None if tried.issuperset(PARTS) else [claim.number for claim in CLAIMS if tried.issuperset(claim.parts)]
    return _line("claims", {"only": only}, (), shared)
