"""What choosing a token costs, from runs of `lab choose`, and a law over the vocabulary's size.

A chain looks at every token of the vocabulary at least once, so its cost grows with their number;
by how much depends on the samplers. The law of a chain is a line through the medians of the
measured vocabularies, in logarithms of both, so it needs no formula of a sampler.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab import feature_list
from lab.core import stats
from lab.core.experiments import setup_of
from lab.core.record import DECODE, OK, PREFILL, Record

if TYPE_CHECKING:
    import pandas as pd

NAME = feature_list.CHOOSING  # of the experiment in records
BETWEEN = " | "
"""Between the chains of a case."""

WINDOW = re.compile(r"repeat_last_n (\d+)")
DEFAULT_WINDOW = 64
DEFAULT = "default"  # the name of llama-server's chain
TWO_SIDED = 1.96  # standard deviations that hold 95 %
LEAST_HALF = math.log(1.02)
"""Half of the range of a law at least: sessions differ by this much."""


@dataclass(frozen=True)
class Choosing:
    """n_seq sequences were decoded with each chain, n_steps steps forth and as many back."""

    n_seq: int
    n_steps: int
    chains: str  # names and contents, in the order of measurement

    def __post_init__(self) -> None:
        if self.n_seq < 1 or self.n_steps < 2 or not self.chains:
            raise ValueError("it needs sequences, steps and chains")

    @property
    def labels(self) -> list[str]:
        return self.chains.split(BETWEEN)

    @property
    def names(self) -> list[str]:
        """The chains by name."""
        return [label.partition(": ")[0] for label in self.labels]

    @property
    def order(self) -> list[int]:
        """The numbers of the chains: forth, then back, so that a drift affects all equally."""
        numbers = list(range(len(self.labels)))
        return numbers + numbers[::-1]


def choosing_of(record: Record) -> Choosing | None:
    """What a run measured; None for runs of other experiments."""
    if record.run.experiment != NAME:
        return None
    return setup_of(Choosing, record.run.case)


def blocks(record: Record) -> pd.DataFrame | None:
    """A row per step that chose tokens: `chain`, its `name`, `block`, `at` (the number of the token
    in its answer), and times in seconds.

    `choose_s` is that of one token, `compute_s` and `between_s` (since the end of the step before)
    those of the step. None for other runs, and if the steps do not fit the case.
    """
    choosing = choosing_of(record)
    run = record.run
    if choosing is None or run.status != OK:
        return None
    steps = run.steps.frame()
    begins = steps.kind.eq(PREFILL) & steps.n_outputs.gt(0)
    steps["between_s"] = steps.start_s - steps.end_s.shift()
    steps["block"] = begins.cumsum() - 1
    chosen = steps[steps.block.ge(0) & steps.kind.isin((PREFILL, DECODE))].copy()
    n_blocks = len(choosing.order)
    if len(chosen) != n_blocks * (choosing.n_steps + 1) or begins.sum() != n_blocks:
        return None
    chosen["at"] = chosen.groupby("block").cumcount()
    chosen["chain"] = [choosing.order[block] for block in chosen.block]
    chosen["name"] = [choosing.names[number] for number in chosen.chain]
    chosen["choose_s"] = (chosen.end_ns - chosen.ready_ns) / chosen.n_outputs / 1e9
    chosen["compute_s"] = (chosen.ready_ns - chosen.start_ns) / 1e9
    return chosen[~_is_after_end(record, choosing, chosen)]


def _is_after_end(record: Record, choosing: Choosing, chosen: pd.DataFrame) -> pd.Series:
    """Whether each step came after the end of the first sequence's answer.

    After the end of a grammar's text only one token is possible, again and again.
    """
    import numpy as np

    first_tokens = np.array(record.run.token_ids[:: choosing.n_seq])
    are_after = np.zeros(len(chosen), dtype=bool)
    if len(first_tokens) != len(chosen):
        return are_after
    for block, rows in enumerate(np.split(np.arange(len(chosen)), len(choosing.order))):
        if "grammar" not in choosing.labels[choosing.order[block]].lower():
            continue
        tokens = first_tokens[rows]
        last = len(tokens) - 1
        while last > 1 and tokens[last] == tokens[last - 1]:
            are_after[rows[last]] = True
            last -= 1
    return are_after


def chain_times(records: Sequence[Record]) -> pd.DataFrame:
    """A row per run and chain: `choose_s`, the median time to choose a token, and its 5th and 95th
    percentile along the answer (`low_s`, `high_s`); `first_s` of the first token, `built_s` of the
    chain; `compute_s` and `between_s` of a step.
    """
    import pandas as pd

    rows: list[dict[str, object]] = []
    for number, record in enumerate(records):
        choosing = choosing_of(record)
        steps = blocks(record)
        if choosing is None or steps is None:
            continue
        built_s = _built_s(record, choosing)
        for chain, of_chain in steps.groupby("chain"):
            decodes = of_chain[of_chain.kind == DECODE]
            label = choosing.labels[chain]
            rows.append(
                {
                    "run": number,
                    "name": choosing.names[chain],
                    "number": chain,
                    "window": window_of(label),
                    "n_vocab": record.model.n_vocab,
                    "n_seq": choosing.n_seq,
                    "choose_s": decodes.choose_s.median(),
                    "low_s": decodes.choose_s.quantile(0.05),
                    "high_s": decodes.choose_s.quantile(0.95),
                    "first_s": of_chain[of_chain.kind == PREFILL].choose_s.median(),
                    "built_s": built_s.get(chain),
                    "compute_s": decodes.compute_s.median(),
                    "between_s": decodes.between_s.median(),
                }
            )
    return pd.DataFrame(rows)


def _built_s(record: Record, choosing: Choosing) -> dict[int, float]:
    """By chain: seconds to build it, with its grammar; none for greedy, which has no chain."""
    built_ns = list(record.run.counts.get("built_ns", ()))
    times: dict[int, list[float]] = {}
    greedy = [number for number, label in enumerate(choosing.labels) if "most prob" in label]
    for number in choosing.order:
        if number in greedy or not built_ns:
            continue
        times.setdefault(number, []).append(built_ns[0] / 1e9)
        built_ns = built_ns[choosing.n_seq :]
    return {number: statistics.median(values) for number, values in times.items()}


def window_of(label: str) -> int | None:
    """The tokens that the penalties of a chain look back; None without penalties."""
    if "repeat_penalty" not in label:
        return None
    match = WINDOW.search(label)
    return int(match[1]) if match else DEFAULT_WINDOW


@dataclass(frozen=True)
class ChoosingLaw:
    """Seconds to choose a token over the size of the vocabulary: points in logarithms, and half of
    the range in which 95 % of runs lie.
    """

    points: tuple[tuple[float, float], ...]
    half: float

    def seconds(self, n_vocab: int) -> float:
        return math.exp(on_line(self.points, math.log(n_vocab)))

    def range(self, n_vocab: int) -> tuple[float, float]:
        middle = self.seconds(n_vocab)
        return middle * math.exp(-self.half), middle * math.exp(self.half)


def on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The line through points at x; beyond the last ones the next segment goes on."""
    if len(points) == 1:
        return points[0][1]
    segment = 0
    while segment < len(points) - 2 and x > points[segment + 1][0]:
        segment += 1
    x0, y0 = points[segment]
    x1, y1 = points[segment + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def law(times: pd.DataFrame) -> ChoosingLaw:
    """The law of one chain, from rows of `chain_times`.

    Its range comes from the spread of runs and from how well each vocabulary between two others
    lies on the line between them.
    """
    by_size = times.assign(log_s=[math.log(value) for value in times.choose_s])
    groups = by_size.groupby("n_vocab").log_s
    points = [(math.log(size), value) for size, value in groups.median().items()]
    spread = math.sqrt((groups.var().fillna(0) * (groups.size() - 1)).sum())
    spread /= math.sqrt(max(1, (groups.size() - 1).sum()))
    errors: list[float] = []
    for number in range(1, len(points) - 1):
        neighbours = points[:number] + points[number + 1 :]
        size, log_s = points[number]
        errors.append((on_line(neighbours, size) - log_s) ** 2)
    bend = math.sqrt(statistics.fmean(errors)) / 2 if errors else 0.0
    half = max(LEAST_HALF, TWO_SIDED * math.hypot(spread, bend))
    return ChoosingLaw(tuple(points), half)


def laws(times: pd.DataFrame) -> dict[str, ChoosingLaw]:
    """The law of each chain with one sequence, by name."""
    alone = times[(times.n_seq == 1) & (times.choose_s > 0)]
    return {str(name): law(rows) for name, rows in alone.groupby("name", sort=False)}


def default_cost_s(records: Sequence[object], n_vocab: int | None) -> float | None:
    """What llama-server's default chain takes for a token, from runs of `lab choose`; None without
    any.
    """
    if n_vocab is None:
        return None
    times = chain_times([record for record in records if isinstance(record, Record)])
    if times.empty:
        return None
    of_default = laws(times).get(DEFAULT)
    return None if of_default is None else of_default.seconds(n_vocab)


def ratio(
    times: pd.DataFrame, baseline: str, candidate: str, n_seq: int = 1
) -> stats.Ratio | None:
    """The time of a chain over that of another one, in pairs of the same run; None for few runs."""
    rows = times[times.n_seq == n_seq]
    by_run = rows.pivot_table(index="run", columns="name", values="choose_s")
    if not {baseline, candidate} <= set(by_run.columns):
        return None
    pairs = by_run[[baseline, candidate]].dropna()
    return stats.paired_ratio(list(pairs[baseline]), list(pairs[candidate]))


def differs(ratio: stats.Ratio | None) -> bool:
    """Whether a ratio differs from 1 for certain, by more than sessions do."""
    if ratio is None:
        return False
    return ratio.low > math.exp(LEAST_HALF) or ratio.high < math.exp(-LEAST_HALF)
