"""The times of a run of `lab prefix`: how long each of its four ways to the first token took.

The script (lab/features/prefix.py) prefills prefix and suffix with an empty cache; then it prefills the suffix
after a copy of the prefix, after a load from memory, and after a load from a file.
"""

from __future__ import annotations

import itertools

from lab.core.record import COPY, LOAD, PREFILL, SAVE, Run

WAYS = ("cold_s", "cached_s", "ram_s", "disk_s")
"""The names of the figures: times to first token."""


def figures(run: Run) -> dict[str, float]:
    """The time to first token of each way, in s; empty if the steps are not those of that script."""
    return {name: value for name, value in times(run).items() if name in WAYS}


def times(run: Run, are_steps_timed: bool = True) -> dict[str, float]:
    """Seconds of each way, of the prefix in the cold way, saved by the copy, and of each copy, load and save.

    If single prefill steps are not timed (phases.times_prefill_steps), the prefix time is the time that the copy saved.
    Empty if the steps are not those of that script.
    """
    steps, ways = run.steps, _ways(run)
    if run.prefix is None or run.prefix.n_prefix < 1 or not ways:
        return {}
    if sum(steps.n_tokens[i] for i in ways[0]) != run.prefix.n_prefix + run.prefix.n_suffix:
        return {}
    spans = [(steps.end_ns[way[-1]] - steps.start_ns[way[0]]) / 1e9 for way in ways]
    saves = [i for i, kind in enumerate(steps.kind) if kind == SAVE]
    moves = dict(zip(("copy_s", "load_ram_s", "load_disk_s"), (way[0] for way in ways[1:]), strict=True))
    steps_s = max((steps.ready_ns[i] for i in ways[0] if steps.n_past[i] < run.prefix.n_prefix), default=0) / 1e9
    moves |= dict(zip(("save_ram_s", "save_disk_s"), saves, strict=True))
    return {
        **dict(zip(WAYS, spans, strict=True)),
        "prefix_s": steps_s if are_steps_timed else spans[0] - spans[1],
        "saved_s": spans[0] - spans[1],
        **{name: (steps.ready_ns[i] - steps.start_ns[i]) / 1e9 for name, i in moves.items()},
    }


def n_prefilled_again(run: Run) -> int:
    """The number of prefix tokens prefilled again after the copy and the loads; it should be 0."""
    n_suffix = run.prefix.n_suffix if run.prefix else 0
    return sum(max(0, sum(run.steps.n_tokens[i] for i in way) - n_suffix) for way in _ways(run)[1:])


def _ways(run: Run) -> list[range]:
    """The operations of each way, from its copy or load to its last step; empty for another script."""
    kinds = run.steps.kind
    begins = [i for i, kind in enumerate(kinds) if i == 0 or kind in (COPY, LOAD)]
    if [kinds[i] for i in begins] != [PREFILL, COPY, LOAD, LOAD] or kinds.count(SAVE) != 2:
        return []
    lengths = [sum(1 for _ in itertools.takewhile(PREFILL.__eq__, kinds[first + 1 :])) for first in begins]
    return [range(first, first + 1 + n) for first, n in zip(begins, lengths, strict=True)]
