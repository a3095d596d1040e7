"""Loads as a table: one row an arm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis import load_figures, load_sessions, loads
from lab.analysis.load_figures import ArmFigures, Latency, Rate
from lab.core.record import Record
from lab.core.request import RequestRecord

if TYPE_CHECKING:
    import pandas as pd


def arms(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """One row an arm of each session of loads: rates, latencies, attainment (NaN or None where not known).

        lab.arms(lab.load(url, concurrency="1,4"))[["load", "tokens_tps", "ttft_median_s", "ttft_p95_s"]]

    What each figure is stands in analysis/loads.py and load_figures.py.
    """
    import pandas as pd

    return pd.DataFrame(
        [
            {"session": one.name, "url": one.endpoint.url, "model": one.model} | as_row(load_figures.figures_of(arm))
            for one in load_sessions.sessions(records)
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
