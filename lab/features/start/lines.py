"""What `lab start` measures, as a line of a results file: one start of a fresh engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lab.core.bounds import Count, Number, Size, Text, Whole
from lab.core.record import SCHEMA, Machine, Model, Settings
from lab.roofline.paging import MOST_COLD

PROCESS = "process"
LOAD = "load"
CONTEXT = "context"
WARM_UP = "warm-up"
PREFILL = "first prefill"
STAGES = (PROCESS, LOAD, CONTEXT, WARM_UP, PREFILL)
"""The stages of a start, in their order. Together they are the time to the first token."""

COLD = "cold"
WARM = "warm"
LEAST_WARM = 0.99


@dataclass(frozen=True, kw_only=True)
class StartLine:
    """A start: the seconds of each stage, and what the page cache held of the file before it."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings  # with mmap on or off
    started_at: Text
    round: Count
    cache: Text  # what was asked for: cold, warm
    resident: (
        Number | None
    )  # share of the file's pages in the cache, just before; None: unknown
    n_prompt: Count
    stages: dict[Text, Number]  # seconds
    second_prefill_s: Number
    n_faults: Count | None  # major page faults of the engine until the first token
    read_bytes: Size | None  # that the engine had to get from a disk until then
    disk_s: Number | None  # for the same file, read in order after its pages were dropped
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "start"
    is_good: ClassVar[bool] = True  # a line is written only if it is whole
    is_warmup: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if tuple(self.stages) != STAGES or self.cache not in (COLD, WARM):
            raise ValueError("a start needs its five stages, and is cold or warm")
        for seconds in (*self.stages.values(), self.second_prefill_s):
            if not 0 < seconds < math.inf:
                raise ValueError("each stage of a start needs a time")
        if self.disk_s is not None and not 0 < self.disk_s < math.inf:
            raise ValueError("reading a file needs a time")

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def first_token_s(self) -> float:
        return sum(self.stages.values())

    @property
    def is_confirmed(self) -> bool:
        """Whether the page cache was as cold or as warm as it was meant to be."""
        if self.cache == WARM:
            return self.resident is None or self.resident >= LEAST_WARM
        return self.resident is not None and self.resident <= MOST_COLD
