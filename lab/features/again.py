"""From the records of a session back to the command that makes them again, a function for each kind of result.

Every record holds what was chosen, so the command can be written out in full. Options that have their default
value are left out, but for the number of threads: its default is another one on another machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lab.core import shell
from lab.core.levers import Batch
from lab.core.record import Record
from lab.core.request import CONSTANT, RequestRecord
from lab.features.claims.figures import CLAIMS
from lab.features.claims.session import PARTS
from lab.features.experiment import Experiment
from lab.features.tune import result as tuning
from lab.features.turns import served
from lab.models import catalog
from lab.runner.as_options import option, options


def _line(
    name: str, given: dict[str, object], first: Sequence[Sequence[str]] = (), last: Sequence[Sequence[str]] = ()
) -> str:
    """A command with options, without those that are None or empty; other words come first, or last."""
    known = [option(key, value) for key, value in given.items() if value not in (None, "", [])]
    return shell.lab(name, *first, *(word for words in (*known, *last) for word in words))


def requests(records: Sequence[RequestRecord]) -> str:
    """Requests that ran alone. Keys and headers are in no record."""
    asked = [record.request.asked for record in records]
    lengths = sorted({one.n_prompt for one in asked if one.n_prompt is not None})
    n_gen, repeat = max(one.n_gen for one in asked), 1 + max(one.repeat for one in asked)
    return _line("measure", _server(records[0]) | {"prompt_len": lengths, "gen": n_gen, "repeat": repeat})


def _server(record: RequestRecord) -> dict[str, object]:
    return {"url": record.endpoint.url, "model": record.model, "api": record.endpoint.api}


def loads(records: Sequence[RequestRecord]) -> str | None:
    """Loads; None for a replay: records lack its file."""
    known = [one.request.asked.load for one in records if one.request.asked.load]
    first, slo = known[0], known[0].slo
    lengths = re.fullmatch(r"(\S+) \+ (\S+) tokens", first.lengths)
    if lengths is None:
        return None
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s} if slo else {}
    given = {
        "concurrency": sorted({load.concurrency for load in known if load.concurrency is not None}),
        "rate": sorted({load.rate for load in known if load.rate is not None}),
        "arrivals": CONSTANT if first.arrivals == CONSTANT else None,
        "prompt_len": lengths[1],
        "gen": lengths[2],
        "warmup": f"{first.warmup_s:g}",
        "duration": f"{first.duration_s:g}",
        "rounds": 1 + max(load.round for load in known),
        "slo": [f"{name}={limit:g}s" for name, limit in limits.items() if limit is not None],
        "seed": first.seed,
    }
    return _line("load", _server(records[0]) | given)


def served_turns(records: Sequence[RequestRecord]) -> str:
    """A conversation through a server."""
    return _line("turns", _server(records[0]) | served.again(records))


def _timed(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.run.warmup] or list(records)


def _shared(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """The options that all of the records have."""
    return [option for option in options(records[0]) if all(option in options(record) for record in records)]


def runs(records: Sequence[Record], experiment: Experiment | None = None) -> str | None:
    """Plain runs, sweeps, variants, and runs of an experiment; None for imported results."""
    timed, shared = _timed(records), _shared(records)
    run = timed[0].run
    given: dict[str, object] = {"prompt_len": sorted({record.run.n_prompt for record in timed})}
    if any(record.run.totals for record in timed):
        return None
    if run.block is not None:
        by_name = {record.run.variant or "": options(record) for record in records}
        own = [
            [word for option in by_name[name] if option not in shared for word in option] for name in sorted(by_name)
        ]
        blocks = 1 + max(record.run.block or 0 for record in timed)
        numbers = sorted({record.run.batch.n_seq for record in timed if record.run.batch})
        return _line("ab", {**given, "gen": run.n_gen, "blocks": blocks, "sequences": numbers}, own, shared)
    repeat = 1 + max(record.run.repeat for record in timed)
    if experiment is not None:
        asked = experiment.again([one.run for one in timed])
        return _line(experiment.name, asked | {"repeat": repeat}, (), shared)
    if run.every is not None:
        lengths = given.pop("prompt_len")
        given = {"max_len": lengths, "every": run.every}
    name = "measure" if run.every is None else "sweep"
    return _line(name, {**given, "gen": run.n_gen, "repeat": repeat}, (), shared)


def trace(records: Sequence[Record]) -> str:
    """A run of `lab trace`."""
    run, shared = records[0].run, _shared(records)
    if run.attention is not None:
        return _line("trace", {"attention": run.attention.text}, (), shared)
    repeat = run.trace.prefill.n_steps if run.trace else None
    return _line("trace", {"prompt_len": run.n_prompt, "gen": run.n_gen - 1, "repeat": repeat}, (), shared)


def quant(records: Sequence[Record]) -> str:
    """A session of `lab quant`."""
    timed = [one for one in records if one.run.is_timed]
    kept = [(one, one.run.quality) for one in records if one.run.quality]
    of_variant = {one.run.variant or "": one for one in (*timed, *(one for one, of in kept if not of.is_floor))}
    firsts = [of_variant[name] for name in sorted(of_variant)]
    blocks = 1 + max((one.run.block or 0 for one in timed), default=0)
    asked = next((quality for _, quality in kept), None)
    given: dict[str, object] = {"blocks": blocks if timed else None}
    if asked:
        budget = None if asked.budget_s is None else f"{asked.budget_s:g}s"
        given |= {"text": asked.text, "budget": budget, "until": asked.until}
    given |= {"prompt_len": timed[0].run.n_prompt, "gen": timed[0].run.n_gen} if timed else {}
    specs = list(dict.fromkeys(catalog.spec_of(one.model) for one in firsts))
    shared = [words for words in _shared(firsts) if words[0] not in ("--model", "--prompt")]
    if len(specs) == 1:
        given["cache_type"] = [one.settings.type_k for one in firsts]
        shared = [words for words in shared if not words[0].startswith("--cache-type")]
    return _line("quant", given, [(spec,) for spec in specs], shared)


def tune(records: Sequence[Record]) -> str:
    """A session of `lab tune`: the model, and the options that no choice changed."""
    timed = _timed(records)
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


def claims(records: Sequence[Record]) -> str:
    """A session of claims: with the settings of the parts that change none."""
    timed = _timed(records)
    usual = [record for record in timed if record.run.block is None and record.run.lever is None] or timed
    tried = {record.run.part for record in timed}
    only = None if tried.issuperset(PARTS) else [claim.number for claim in CLAIMS if tried.issuperset(claim.parts)]
    return _line("claims", {"only": only}, (), _shared(usual))
