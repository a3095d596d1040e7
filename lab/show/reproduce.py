"""From records back to the command that makes them again.

Every record holds what was chosen, so the command can be written out in full. Options that have their default
value are left out, but for the number of threads: its default is another one on another machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from lab.analysis import request_table
from lab.core.record import Record, Run
from lab.core.request import CONSTANT, RequestRecord
from lab.experiments import claim_parts, known
from lab.experiments.claim_verdicts import CLAIMS
from lab.runner.as_options import option, options


def commands(records: Sequence[Record | RequestRecord]) -> list[str]:
    """The command line of each session."""
    made = [command(own) for own in _by_session(request_table.of_engine(records))]
    made += [request_command(own) for own in _by_session(request_table.alone(records))]
    made += [load_command(own) for own in _by_session(request_table.loads_of(records))]
    return [line for line in dict.fromkeys(made) if line]


def _by_session(records: Sequence[Any]) -> list[list[Any]]:
    return [[one for one in records if one.session == name] for name in dict.fromkeys(one.session for one in records)]


def request_command(records: Sequence[RequestRecord]) -> str:
    """The command line of one session of requests that ran alone. Keys and headers are in no record."""
    first, asked = records[0], [record.request.asked for record in records]
    lengths = sorted({one.n_prompt for one in asked if one.n_prompt is not None})
    words = ["lab", "measure", "--url", first.endpoint.url, "--model", first.model, "--api", first.endpoint.api]
    words += ["--prompt-len", ",".join(map(str, lengths))] if lengths else []
    return shlex.join(
        [*words, "--gen", str(max(one.n_gen for one in asked)), "--repeat", str(1 + max(one.repeat for one in asked))]
    )


def load_command(records: Sequence[RequestRecord]) -> str | None:
    """The command line of one session of loads; None for a replay, whose file is not in the records."""
    first, of_loads = records[0], [one.request.asked.load for one in records if one.request.asked.load]
    lengths = re.fullmatch(r"(\S+) \+ (\S+) tokens", of_loads[0].lengths)
    if lengths is None:
        return None
    users = sorted({load.concurrency for load in of_loads if load.concurrency is not None})
    rates = sorted({load.rate for load in of_loads if load.rate is not None})
    words = ["lab", "load", "--url", first.endpoint.url, "--model", first.model, "--api", first.endpoint.api]
    words += ["--concurrency", ",".join(map(str, users))] if users else []
    words += ["--rate", ",".join(f"{rate:g}" for rate in rates)] if rates else []
    words += ["--arrivals", CONSTANT] if of_loads[0].arrivals == CONSTANT else []
    words += ["--prompt-len", lengths[1], "--gen", lengths[2], "--warmup", f"{of_loads[0].warmup_s:g}"]
    words += ["--duration", f"{of_loads[0].duration_s:g}", "--rounds", str(1 + max(load.round for load in of_loads))]
    slo = of_loads[0].slo
    limits = (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s)) if slo else ()
    written = [f"{name}={limit:g}s" for name, limit in limits if limit is not None]
    words += ["--slo", ",".join(written)] if written else []
    return shlex.join([*words, "--seed", str(of_loads[0].seed)])


def command(records: Sequence[Record]) -> str | None:
    """The command line of one session; None for imported results, and for networks that a relay made.

    Options that all variants share come last, once.
    """
    timed = [record for record in records if not record.run.warmup] or list(records)
    if not timed or any(record.run.totals or record.run.link for record in timed):
        return None
    if any(record.run.part for record in timed):
        return _claims(timed)
    run = timed[0].run
    lengths = ",".join(str(n) for n in sorted({record.run.n_prompt for record in timed}))
    repeat = 1 + max(record.run.repeat for record in timed)
    shared = [option for option in options(timed[0]) if all(option in options(record) for record in records)]
    if run.block is not None:
        blocks = 1 + max(record.run.block or 0 for record in timed)
        by_name = {record.run.variant or "": options(record) for record in records}
        own = [
            shlex.join(w for option in by_name[name] if option not in shared for w in option)
            for name in sorted(by_name)
        ]
        words = ["lab", "ab", *own, "--prompt-len", lengths, "--gen", str(run.n_gen), "--blocks", str(blocks)]
        numbers = sorted({record.run.batch.n_seq for record in timed if record.run.batch})
        words += ["--sequences", ",".join(map(str, numbers))] if numbers else []
    elif run.lever is not None:
        words = ["lab", *_experiment([record.run for record in timed]), "--repeat", str(repeat)]
    elif run.every is not None:
        words = ["lab", "sweep", "--max-len", lengths, "--every", str(run.every), "--gen", str(run.n_gen)]
        words += ["--repeat", str(repeat)]
    else:
        words = ["lab", "measure", "--prompt-len", lengths, "--gen", str(run.n_gen), "--repeat", str(repeat)]
    return shlex.join([*words, *(word for option in shared for word in option)])


def _claims(timed: Sequence[Record]) -> str:
    """The command line of a session of claims: with the settings of the parts that change none."""
    usual = [record for record in timed if record.run.block is None and record.run.lever is None] or timed
    shared = [option for option in options(usual[0]) if all(option in options(record) for record in usual)]
    quick = ["--quick"] if claim_parts.is_quick(timed) else []
    parts = {record.run.part for record in timed}
    tried = [claim.number for claim in CLAIMS if parts & set(claim.parts)]
    n_all = sum(bool(set(claim.parts) - {claim_parts.CEILINGS}) for claim in CLAIMS)
    only = ["--only", ",".join(map(str, tried))] if len(tried) < n_all and not quick else []
    return shlex.join(["lab", "claims", *only, *quick, *(word for option in shared for word in option)])


def _experiment(runs: Sequence[Run]) -> list[str]:
    """The words of the experiment that made these runs."""
    experiment = known.of_run(runs[0])
    assert experiment is not None
    given = [option(name, value) for name, value in experiment.again(runs).items() if value not in (None, "")]
    return [experiment.name, *(word for words in given for word in words)]
