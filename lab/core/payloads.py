"""What only the runs of one feature hold: `Run` of record.py has a field for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """`lab tune`: its goal, and the stage in which a run was made."""

    goal: str  # request, ttft, tpot, throughput
    stage: str  # search, confirm
    n_gen: int  # asked for; in the stage `search` runs generate at most a part of them
