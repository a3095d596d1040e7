"""Sessions of loads among records: whose they are, and rows by which they can be compared with others.

Requests of one round wait in the same queue: they are no replicates of each other. So what is compared of two sessions
are the medians of rounds, a row a round, as if each were a run.

Loads as a table: one row an arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis import load_figures, loads, request_table, table
from lab.analysis.load_figures import ArmFigures, Latency, Rate
from lab.analysis.loads import Arm, Round, Sample
from lab.core.lists import grouped
from lab.core.record import OK, Machine, Record
from lab.core.request import Endpoint, RequestRecord
from lab.core.request_figures import Figures

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LoadSession:
    """The requests of one session of loads, and where they went."""

    name: str
    endpoint: Endpoint
    model: str
    machine: Machine  # of the client
    samples: tuple[Sample, ...]


def sessions(records: Sequence[Record | RequestRecord]) -> list[LoadSession]:
    """The sessions of loads among records, in order of appearance."""
    return [
        LoadSession(name, own[0].endpoint, own[0].model, own[0].machine, _samples(own))
        for name, own in _by_session(records).items()
    ]


def rows(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """What is compared: the rows of runs, and of requests that ran alone, that count; of loads one row a round."""
    import pandas as pd

    plain = [one for one in records if isinstance(one, Record) or one.request.asked.load is None]
    counted = request_table.measured(table.runs(plain)) if plain else pd.DataFrame()
    of_rounds = [row for own in _by_session(records).values() for row in _round_rows(own)]
    if not of_rounds:
        return counted
    rounds = pd.DataFrame(of_rounds)
    return rounds if counted.empty else pd.concat([counted, rounds], ignore_index=True)


def _by_session(records: Sequence[Record | RequestRecord]) -> dict[str, list[RequestRecord]]:
    return grouped(request_table.loads_of(records), lambda record: record.session)


def _samples(records: Sequence[RequestRecord]) -> tuple[Sample, ...]:
    return tuple(loads.sample(record.request) for record in records)


def _round_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    (first,) = table.runs(records[:1]).to_dict("records")
    for arm in loads.arms(_samples(records)):
        same = {**first, **_same(arm)}
        made += [{**same, **_medians(arm, of_round)} for of_round in arm.rounds if not of_round.is_cut_off]
    return made


def _same(arm: Arm) -> dict[str, Any]:
    """What rounds of an arm share. `n_prompt` and `n_gen` are 0 where requests differ in them: the lever says how."""
    asked = [one.figures for of_round in arm.rounds for one in of_round.all]
    prompts = {request_table.n_prompt(one) or 0 for one in asked}
    answers = {one.asked.n_gen for one in asked}
    is_mixed = len(prompts) > 1 or len(answers) > 1
    nothing = dict.fromkeys(("decode_tps", "warm", "short", "error", "failure", *request_table.FIGURES))
    return nothing | {
        "n_prompt": 0 if is_mixed else prompts.pop(),
        "n_gen": 0 if is_mixed else answers.pop(),
        "lever": f"{arm.load.words}, {arm.load.lengths}" if is_mixed else arm.load.words,
        "status": OK,
        "warmup": False,
    }


def _medians(arm: Arm, of_round: Round) -> dict[str, Any]:
    alone = Arm(arm.label, arm.load, (of_round,), 0)
    return {
        "repeat": of_round.load.round,
        "ttft_s": _median(alone, load_figures.ttft_s, 1),
        "tpot_ms": _median(alone, load_figures.tpot_s, 1e3),
        "e2e_s": _median(alone, load_figures.e2e_s, 1),
    }


def _median(arm: Arm, of: Callable[[Figures], float | None], factor: float) -> float:
    latency = load_figures.latency(arm, of)
    return factor * latency.median_s if latency else float("nan")


def arms(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """One row an arm of each session of loads: rates, latencies, attainment (NaN or None where not known).

        lab.arms(lab.load(url, concurrency="1,4"))[["load", "tokens_tps", "ttft_median_s", "ttft_p95_s"]]

    What each figure is stands in analysis/loads.py and load_figures.py.
    """
    import pandas as pd

    return pd.DataFrame(
        [
            {"session": one.name, "url": one.endpoint.url, "model": one.model} | as_row(load_figures.figures_of(arm))
            for one in sessions(records)
            for arm in loads.arms(one.samples)
        ]
    )


def as_row(shown: ArmFigures) -> dict[str, Any]:
    """The figures of an arm by name and unit. `_beyond`: how many requests are beyond a percentile."""
    arm = shown.arm
    row: dict[str, Any] = {"load": arm.label, "n_rounds": len(arm.rounds), "n_cut_off": arm.n_cut_off}
    row |= {"window_s": [one.length_s for one in arm.rounds], "is_overloaded": arm.is_overloaded}
    row |= {f"load_{name}": value for name, value in dataclasses.asdict(arm.load).items() if name != "round"}
    for field in dataclasses.fields(shown):
        value, name = getattr(shown, field.name), field.name
        if name in ("ttft", "tpot", "e2e"):
            row |= _of_latency(name, value)
        elif name == "attainment":
            row |= {f"attainment{end}": getattr(value, of, None) for end, of in _ENDS}
        elif name.endswith(("tokens_tps", "_ps")):
            row |= _of_rate(name, value)
        elif name != "arm":
            row[name] = value
    return row


_ENDS = (("", "share"), ("_low", "low"), ("_high", "high"))


def _of_latency(name: str, latency: Latency | None) -> dict[str, Any]:
    row: dict[str, Any] = {f"{name}_n": latency.n if latency else 0}
    row[f"{name}_median_s"] = latency.median_s if latency else None
    for percentile in ("p95", "p99"):
        tail = getattr(latency, percentile, None)
        row |= {f"{name}_{percentile}_s": tail and tail.value_s, f"{name}_{percentile}_beyond": tail and tail.n_beyond}
    row[f"{name}_most_s"] = latency.most_s if latency else None
    return row | {f"{name}_by_round_s": list(latency.by_round_s) if latency else []}


def _of_rate(name: str, rate: Rate | None) -> dict[str, Any]:
    return {name: rate.value if rate else None, f"{name}_by_round": list(rate.by_round) if rate else []}
