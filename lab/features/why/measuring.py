"""Measure within a budget: a setup here, a server, or a path from one setup to another in blocks of fresh engines.

Each variant on the path changes one group more, and so do those of the reverse path. A factor is the mean of both
orders, so the order does not decide it. One run of the cheapest variant tells what a block will take; the path has as
many changes, the cheapest first, as fit. What the budget does not hold is cut off and not counted.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.core import shell
from lab.core.asked_settings import defaults
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.results import unless_empty
from lab.errors import LabError
from lab.features.compare import side_by_side
from lab.features.serve import through_server
from lab.features.serve.servers import connect
from lab.features.why.parts import FEWEST, GEN, MEASURED, Part, figure, half_range, length, position
from lab.features.why.pasted import Setup
from lab.process.worker import Worker
from lab.runner import as_options, session
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.runner.session import new_results_file
from lab.show.wording import seconds, times

SHORTEST, MOST_GEN, REPEATS = 100, 64, 10
MOST_BLOCKS, PLANNED_BLOCKS, MOST_CHANGES, INTERACTION = 30, FEWEST + 1, 6, 0.05
SURE = 0.005
"""Half of a range, as a logarithm, at which a trial ends before its budget does."""


class _Spent(Exception):
    """The budget is spent, in the middle of a run."""


@contextlib.contextmanager
def limited(watch: ShowStatus, budget_s: float) -> Iterator[ShowStatus]:
    """A watch that ends the block when the budget is spent, even within a run."""
    ends = time.monotonic() + budget_s

    def look(status: Status) -> None:
        watch(status)
        if time.monotonic() > ends:
            raise _Spent

    with contextlib.suppress(_Spent):
        yield look


def start(fast: Setup, slow: Setup) -> dict[str, Any]:
    """The keywords of the path's beginning: the faster setup; what it does not say is as in the slower one."""
    chosen = {**slow.settings, **fast.settings, "lib": None, "rpc": None}
    kept = {name: value for name, value in chosen.items() if value != defaults().get(name)}
    return {**kept, "prompt_len": length(fast if position(fast) is not None else slow)}


def alone(
    like: Setup, spec: str | None, url: str | None, budget_s: float, out: Path, watch: ShowStatus, **how: Any
) -> Path:
    """The file of runs with a setup on this machine, or of requests as long as its runs to a server (`url`).

    LabError where none ended in the budget.
    """
    n_gen, n_done, path, settings = max(2, min(like.n_gen or MOST_GEN, MOST_GEN)), 0, out, start(like, like)
    n_prompt = settings.pop("prompt_len")
    with limited(watch, budget_s) as look, contextlib.ExitStack() as stack:
        if url:
            served = stack.enter_context(connect(url, spec, lambda words: look(Status(words)), **how))
            path, asked = served.new_file(out), through_server.make_plan([max(SHORTEST, n_prompt)], n_gen, REPEATS)
            for _ in through_server.execute(through_server.fitted(asked, served), served, path, look):
                n_done += 1
        else:
            worker = stack.enter_context(Worker())
            plan = make_plan(worker, [n_prompt], n_gen, REPEATS, spec or "", **settings)
            path = new_results_file(plan, out)
            for record in session.execute(plan, worker, path, look):
                n_done += record.run.is_timed
    if not n_done:
        raise LabError(f"{url or spec}: nothing ended within {seconds(budget_s)}.", "Give more time: --budget 5min")
    return path


def measured(
    start: Mapping[str, Any],
    todo: Sequence[Part],
    is_prefill: bool,
    budget_s: float,
    out: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Any] = Worker,
) -> tuple[dict[str, Part], list[Record], Path | None]:
    """The parts that differ, measured as far as the budget lasts, by name; the trial's records and their file."""
    began, gen = time.monotonic(), 1 if is_prefill else GEN
    fixed_s, work_s = math.inf, 0.0  # seconds to start an engine, and to warm up and run
    todo = sorted(todo[:MOST_CHANGES], key=lambda one: ("prompt_len" in one.settings, "model" in one.settings))
    ends = [start["prompt_len"], *(one.settings["prompt_len"] for one in todo if "prompt_len" in one.settings)]
    short = {**start, "prompt_len": min(ends)}
    with TemporaryDirectory() as folder, limited(watch, budget_s) as look:
        first = dict(list(_plans(short, todo[:1], gen, new_worker)[1].items())[:1])
        starts = time.monotonic()
        runs = list(side_by_side.execute(first, 1, Path(folder) / "first.jsonl", look, new_worker, n_turns=1))
        work_s = sum((each.run.steps.end_ns[-1] - each.run.steps.start_ns[0]) / 1e9 for each in runs)
        fixed_s = time.monotonic() - starts - work_s
    needs = list[float]()  # seconds of a block with the first change, the first two and so on
    for n, change in enumerate(todo, 1):
        longer = (sum(ends) / 2 + gen) / (min(ends) + gen) if "prompt_len" in change.settings else 1.0
        needs.append(2 * n * (fixed_s + work_s * longer))
    spent_s = time.monotonic() - began
    n = sum(PLANNED_BLOCKS * need <= budget_s - spent_s for need in needs)
    found = {}
    for change, need in zip(todo[n:], needs[n:], strict=True):
        why = f"needs about {seconds(spent_s + PLANNED_BLOCKS * need)}" if math.isfinite(need) else "no run fits"
        found[change.name] = replace(change, words=f"{change.words}; not measured: {why} (--budget)")
    if not n:
        return found, [], None
    is_deep = any("prompt_len" in change.settings for change in todo[:n])
    names, plans = _plans(start if is_deep else short, todo[:n], gen, new_worker)
    path, records = new_results_file(next(iter(plans.values())), out), list[Record]()
    blocks, measured_parts = [dict[str, float]()], dict[str, Part]()
    with unless_empty(path), limited(watch, budget_s - (time.monotonic() - began)) as look:
        for record in side_by_side.execute(plans, MOST_BLOCKS, path, look, new_worker, n_turns=1):
            records.append(record)
            if record.run.is_timed and (value := figure(record.run, is_prefill)):
                blocks[-1][record.run.variant or ""] = value
            if len(blocks[-1]) == len(plans):
                measured_parts = factors(todo[:n], names, blocks)
                if len(blocks) >= PLANNED_BLOCKS and all((part.half or 0.0) < SURE for part in measured_parts.values()):
                    break
                blocks.append({})
    return found | (measured_parts or factors(todo[:n], names, [])), records, path if records else None


def _plans(
    start: Mapping[str, Any], todo: Sequence[Part], gen: int, new_worker: Callable[[], Any]
) -> tuple[dict[frozenset[int], str], dict[str, Plan]]:
    """The plans of the variants on the path and on its reverse, by name, and the name of each set of changes."""
    n = len(todo)
    sets = [frozenset(range(i)) for i in range(n + 1)] + [frozenset(range(i, n)) for i in range(1, n)]
    variants = []
    for chosen in sets:
        settings = dict(start)
        for i in sorted(chosen):
            settings |= todo[i].settings
        shown = {**settings, "prompt_len": str(settings["prompt_len"])}
        words = [word for name, value in shown.items() for word in as_options.option(name, value)]
        variants.append((shell.join(*words), shown))
    with new_worker() as worker:
        plans = side_by_side.plan(worker, variants, MOST_BLOCKS, gen=gen)
    return dict(zip(sets, plans, strict=True)), plans


def factors(
    todo: Sequence[Part], names: Mapping[frozenset[int], str], blocks: Sequence[Mapping[str, float]]
) -> dict[str, Part]:
    """The parts with their factors from blocks of times per token, with 95 % ranges."""
    n, n_blocks, made = len(todo), len(blocks), dict[str, Part]()
    if n_blocks < FEWEST:
        why = f"not measured: only {plural(n_blocks, 'block')} of {FEWEST} (--budget)"
        return {one.name: replace(one, words=f"{one.words}; {why}") for one in todo}
    for i, one in enumerate(todo):
        orders = [  # changed after those before it on the path, and before them
            [math.log(block[names[frozenset(after)]] / block[names[frozenset(before)]]) for block in blocks]
            for before, after in ((range(i), range(i + 1)), (range(i + 1, n), range(i, n)))
        ]
        first, last = map(statistics.fmean, orders)
        logs, words = [statistics.fmean(pair) for pair in zip(*orders, strict=True)], one.words
        if abs(first - last) > INTERACTION:
            words += f"; {times(math.exp(first))} or {times(math.exp(last))}, depending on the order"
        half, how = half_range(logs), f"{MEASURED}, {n_blocks} blocks"
        made[one.name] = replace(one, log=statistics.fmean(logs), half=half, how=how, words=words)
    return made
