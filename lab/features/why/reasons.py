"""Why one figure is slower than another: both sides read or measured, all parts, and the sentence that follows.

A trial measures a path from the faster setup to the slower one in blocks of fresh engines. Each variant on the path
changes one group of settings more, and so do those of the reverse path; a factor is the mean of both orders, so the
order does not decide it. One run of the cheapest variant tells what a block will take; the path has as many changes,
the cheapest first, as fit into the budget. What it does not hold is cut off and not counted.

A setup alone is compared with the best that this machine can do. That is a bound, not a measurement: the least time of
the phase's kernels (lab explain), with the one change of settings that is predicted to help most.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lab.core import results, shell
from lab.core.asked_settings import defaults, table as settings_table
from lab.core.lists import plural
from lab.core.record import UNKNOWN_THREADS, Record
from lab.core.request import RequestRecord
from lab.core.stats import mean_half_width as half_range
from lab.errors import LabError
from lab.features.compare import comparison, side_by_side
from lab.features.limits import explanation, probing
from lab.features.running import ceilings_of, read, without_tuning
from lab.features.serve import access, through_server
from lab.features.serve.servers import connect
from lab.features.tune.tuning import seconds_of
from lab.features.why import parts, pasted
from lab.features.why.parts import FEWEST, GEN, Answer, Part
from lab.features.why.pasted import DECODE, PREFILL, Setup
from lab.process.worker import Worker
from lab.runner import as_options, builds, session
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.show import table
from lab.show.wording import digits, seconds, times

FIGURES = {DECODE: ("tpot_ms", "decode_ms"), PREFILL: ("prefill_s", "ttft_s")}
"""Columns of a figure; the second where no run has the first."""

SHORTEST, MOST_GEN, REPEATS = 100, 64, 10
MOST_BLOCKS, PLANNED_BLOCKS, MOST_CHANGES = 30, FEWEST + 1, 6
UNSURE, SURE = " (range unknown)", 0.005
"""Half of a range, as a logarithm, at which a trial ends before its budget does."""


def given(name: str) -> list[list[Setup]]:
    """The figures of a file, a folder, stdin or of words, by setup."""
    path, is_of_lab = Path(name), False
    if len(name) < 4000 and path.is_file():
        with path.open("rb") as file:
            begin = file.read(1000)
        is_of_lab = begin.lstrip()[:1] == b"{" and (b'"session":' in begin or b'"machine":' in begin)
    if is_of_lab or path.suffix == ".html" or (len(name) < 4000 and path.is_dir()):
        return of_records(name)
    found = pasted.read(name)
    most = max(([one for one in found if one.is_prefill == is_prefill] for is_prefill in (False, True)), key=len)
    return [found] if len(most) < 2 else [[one] for one in most]


def of_records(name: str) -> list[list[Setup]]:
    """The figures of a results file by setup, or by session if all are of one setup."""
    measured = without_tuning(read((name,))).measured
    rows = comparison.sessions_apart(table.measured(table.runs(measured)))
    rows = rows[rows.lever.isna()]
    if rows.empty:
        raise LabError(f"{name} has no plain run that succeeded.", "Measure some: lab measure")
    known, setups, groups = comparison.known_spreads(measured), table.setups(rows), list[list[Setup]]()
    for label, part in setups:
        groups.append([])
        for (n_prompt, n_gen), repeats in part.groupby(["n_prompt", "n_gen"]):
            own, first = [measured[i] for i in dict.fromkeys(repeats.run)], repeats.iloc[0]
            runs = tuple(one for one in own if isinstance(one, Record))
            requests = tuple(one for one in own if isinstance(one, RequestRecord))
            server = requests[0].endpoint.settings if requests else None
            for counts, names in FIGURES.items():
                columns = [[value for value in repeats[name] if value > 0] for name in names if name in repeats]
                values = next(filter(None, columns), [])
                if not values:
                    continue
                logs, compute = [math.log(value) for value in values], columns[1:] if counts == DECODE else []
                between = known.get((comparison.machine_of(repeats), names[0])) or comparison.default_spread(first)
                made = Setup(
                    source="lab" if runs else "server",
                    tps=(n_prompt if counts == PREFILL else 1e3) / statistics.median(values),
                    counts=counts,
                    n_prompt=int(n_prompt),
                    n_gen=int(n_gen),
                    n_depth=0,
                    prefill_s=float(repeats.prefill_s.median()) if (repeats.prefill_s > 0).any() else None,
                    model=(server and server.model_file) or str(first.model),
                    quantization=runs[0].model.quantization if runs else server.quantization if server else None,
                    settings=settings_of(runs[0]) if runs else {},
                    spread=math.sqrt(math.pi / 2 / len(logs)) * statistics.stdev(logs) if len(logs) > 1 else None,
                    between=between.sd,
                    compute_tps=1e3 / statistics.median(compute[0]) if compute and compute[0] else None,
                    records=runs,
                    requests=requests,
                    about=label.partition(", ")[2] if len(setups) > 1 else "",
                )
                groups[-1].append(made)
    return [group for group in groups if group]


def settings_of(record: Record) -> dict[str, Any]:
    """The settings of a record as keywords of AskedSettings, with resolved values."""
    settings = record.settings
    chosen = {name: getattr(settings, setting.record_name or name) for name, setting in settings_table().items()}
    chosen["flash_attn"] = settings.flash_attn_resolved or settings.flash_attn
    chosen["kv_unified"] = "on" if settings.kv_unified else "off"
    if UNKNOWN_THREADS in (settings.n_threads, settings.n_threads_batch):
        chosen |= {"threads": None, "threads_batch": None}
    return {name: value for name, value in chosen.items() if value is not None and name not in ("prompt", "seed")}


def nearest(first: Sequence[Setup], second: Sequence[Setup], prefill: bool) -> tuple[Setup, Setup]:
    """The two figures of one phase, decode before prefill, whose lengths are nearest; of equal ones the longest."""

    def apart(pair: tuple[Setup, Setup]) -> float:
        lengths = [(one.n_prompt or 0) + (one.n_depth or 0) + 1 for one in pair]
        is_known = all(one.n_prompt is not None for one in pair)
        return round(abs(math.log(lengths[0] / lengths[1])), 3) - 1e-9 * lengths[0] if is_known else 0.0

    for wanted in (True,) if prefill else (False, True):
        both = [(a, b) for a in first for b in second if a.is_prefill == b.is_prefill == wanted and a is not b]
        if both:
            return min(both, key=apart)
    figures = " and ".join("/".join(dict.fromkeys(one.counts for one in side)) for side in (first, second))
    raise LabError(f"There is no figure that both sides have: {figures}.", "Give two figures of the same phase.")


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
    chosen = {**slow.settings, **fast.settings, "lib": None}
    kept = {name: value for name, value in chosen.items() if value != defaults().get(name)}
    return {**kept, "prompt_len": parts.length(fast if parts.position(fast) is not None else slow)}


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
            through_server.check(asked, served)
            for _ in through_server.execute(asked, served, path, look):
                n_done += 1
        else:
            worker = stack.enter_context(Worker())
            plan = make_plan(worker, [n_prompt], n_gen, REPEATS, spec or "", **settings)
            path = session.new_results_file(plan, out)
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
) -> tuple[dict[str, Part], Path | None]:
    """The parts that differ, measured as far as the budget lasts, by name; and the file of the trial's records."""
    began, gen = time.monotonic(), 1 if is_prefill else GEN
    fixed_s, work_s = math.inf, 0.0  # seconds to start an engine, and to warm up and run
    todo = sorted(todo[:MOST_CHANGES], key=lambda one: ("prompt_len" in one.settings, "model" in one.settings))
    ends = [start["prompt_len"], *(one.settings["prompt_len"] for one in todo if "prompt_len" in one.settings)]
    short = {**start, "prompt_len": min(ends)}
    with TemporaryDirectory() as folder, limited(watch, budget_s) as look:
        first, starts = dict(list(_plans(short, todo[:1], gen)[1].items())[:1]), time.monotonic()
        runs = list(side_by_side.execute(first, 1, Path(folder) / "first.jsonl", look, Worker, n_turns=1))
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
        return found, None
    is_deep = any("prompt_len" in change.settings for change in todo[:n])
    names, plans = _plans(start if is_deep else short, todo[:n], gen)
    path, blocks = session.new_results_file(next(iter(plans.values())), out), [dict[str, float]()]
    measured_parts = factors(todo[:n], names, [])
    with results.unless_empty(path), limited(watch, budget_s - (time.monotonic() - began)) as look:
        for record in side_by_side.execute(plans, MOST_BLOCKS, path, look, Worker, n_turns=1):
            if record.run.is_timed and (value := parts.figure(record.run, is_prefill)):
                blocks[-1][record.run.variant or ""] = value
            if len(blocks[-1]) == len(plans):
                measured_parts = factors(todo[:n], names, blocks)
                if len(blocks) >= PLANNED_BLOCKS and all((part.half or 0.0) < SURE for part in measured_parts.values()):
                    break
                blocks.append({})
    return found | measured_parts, path if path.exists() else None


def _plans(
    start: Mapping[str, Any], todo: Sequence[Part], gen: int
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
    with Worker() as worker:
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
        logs = [statistics.fmean(pair) for pair in zip(*orders, strict=True)]
        how = f"{parts.MEASURED}, {n_blocks} blocks"
        made[one.name] = replace(one, log=statistics.fmean(logs), half=half_range(logs), how=how)
    return made


def why(
    a: str | Path | Setup,
    b: str | Path | Setup | None = None,
    budget: str | float = "2min",
    model: str | None = None,
    *,
    url: str | None = None,
    lib: Sequence[str] = (),
    device: str | None = None,
    prefill: bool = False,
    out: str | Path = "results",
    watch: ShowStatus = lambda status: None,
    **how: Any,
) -> Answer:
    """Why two speeds differ: their ratio as a product of causes. What the figures leave open is measured in the budget.

        lab.why("results/mine.jsonl", "pasted.txt").parts
        lab.why("results/mine.jsonl", url="http://127.0.0.1:8080/v1")

    A side is a results file, a text that another program printed, or a figure in words. Without `b`, the two setups of
    `a` are compared, or its only one with the best that this machine can do; a figure of another program is measured
    here. With `url` B is a server, reached as `how` says (api, api_key_env, header, timeout). `lib`: the libraries of A
    and of B. `device`: that of a figure without records, as lab predict names it (of two: with a comma). `budget=0`
    measures nothing. LabError for a text that no known program printed.
    """
    began, folder = time.monotonic(), Path(out)
    budget_s = 0.0 if str(budget).strip() in ("0", "0s", "0.0") else seconds_of(budget)
    if len(lib) not in (0, 2) or (url and b is not None):
        hint = "Compare two: lab why A.jsonl B.jsonl --lib OLD --lib NEW, or lab why A.jsonl --url URL"
        raise LabError("There are A, B and --url." if url else f"--lib is given {len(lib)} times.", hint)
    libs = [path for one in lib if (path := builds.folder_of(one))]
    read = [[[one]] if isinstance(one, Setup) else given(str(one)) for one in (a, b) if one is not None]
    groups, device_of_b = read[0], None
    figure = ([one for one in groups[0] if one.is_prefill == prefill] or groups[0])[-1]
    if url:
        read.append(of_records(str(alone(figure, model, url, budget_s, folder, watch, **how))))
        model, device_of_b = None, "here" if access.is_loopback(access.access(url)) else None
    elif len(read) == len(groups) == 1:
        if figure.records:
            return best(figure, str(a), str(out))
        if model is None:
            hint = "To measure it here: --model SPEC. Or give a second figure."
            raise LabError(f"The model of {figure.label} is not known.", hint)
        read.append(of_records(str(alone(figure, model, None, budget_s, folder, watch))))
    first, second = (side[0] for side in read) if len(read) == 2 else groups[:2]
    devices = iter((device or "").split(",") if device else [])
    named = [
        one if one.records else replace(one, device=next(devices, one.device or device_of_b))
        for one in nearest(first, second, prefill)
    ]
    known = [record for side in read for group in side for one in group for record in one.records]
    left_s = max(0.0, budget_s - (time.monotonic() - began))
    return answer(named[0], named[1], left_s, model=model, libs=libs, out=folder, watch=watch, others=known)


def best(one: Setup, name: str, folder: str) -> Answer:
    """Why a figure of the file `name` is slower than the best. LabError without steps or the machine's ceilings."""
    if not one.records:
        raise LabError(f"{one.label} has no steps to explain.", "Give a second figure, or measure here: lab measure")
    first, phase = one.records[0], "prefill" if one.is_prefill else "decode"
    known = probing.need(ceilings_of(results.read([name]), folder), probing.place_of_record(first), one.label)
    rows = explanation.explain(one.records, known).query(f"n_prompt == {one.n_prompt}")
    row = next((row for row in rows.itertuples() if row.phase == phase and row.n_gen == one.n_gen), None)
    if row is None:
        raise LabError(f"{one.label} has no steps of {phase} to explain.", "Measure here: lab measure")
    between_s = 0.0 if one.is_prefill else row.choosing_s + row.harness_s
    words = "choosing each token, and from one step to the next" if between_s else ""
    found = [Part(parts.COUNTED, math.log1p(between_s / row.measured_s), 0.0, parts.ARITHMETIC, words)]
    words = f"its kernels take longer than at their ceilings; the limit is {row.limit}"
    how = f"from ceilings: {parts.NO_RANGE}"
    found.append(Part("kernels", math.log(row.measured_s / row.least_s), None, how, words))
    best_s, command = row.least_s, shell.lab("explain", name)
    for lever in explanation.levers(rows, first, known):
        gain = lever.figures[f"{phase}_gain"] or 0.0
        changed_s = row.least_s - row.measured_s * (1 - 1 / gain) if gain >= explanation.LEAST_GAIN else best_s
        if 0 < changed_s < best_s:
            best_s, command = changed_s, lever.command or command
            words = f"{lever.figures['change']}: {times(gain)} in all"
    if best_s < row.least_s:
        how = f"predicted from ceilings: {parts.NO_RANGE}"
        found.append(Part("settings", math.log(row.least_s / best_s), None, how, words))
    tps = (row.n_prompt if one.is_prefill else 1) / best_s
    best = replace(one, source="the best that this machine can do", tps=tps, records=(), about="")
    if tps < one.tps:
        raise LabError(f"{one.label} is faster than its ceilings.", "Measure them again: lab ceilings --again")
    rest = parts.rest(best, one, found)
    return Answer(best, one, ("best", "A"), (*found, rest), command=command)


def answer(
    a: Setup,
    b: Setup,
    budget_s: float = 0.0,
    *,
    model: str | None = None,
    libs: Sequence[str] = (),
    out: Path = Path("results"),
    watch: ShowStatus = lambda status: None,
    others: Sequence[Record] = (),
) -> Answer:
    """The ratio of two figures in parts. With a budget, depth, settings and builds (`libs` of A and B) are measured."""
    both = {"A": a, "B": b} if a.tps >= b.tps else {"B": b, "A": a}
    (fast, slow), libs = both.values(), libs if a.tps >= b.tps else libs[::-1]
    steps = [parts.counted(both), parts.depth(both, others), parts.model(both), *parts.of_settings(both)]
    if libs:
        ends = (f"{builds.short(lib)} in {letter}" for lib, letter in zip(libs, both, strict=True))
        steps.append(Part(parts.BUILD, words=", ".join(ends), settings={"lib": libs[1]}))
    found, path = dict[str, Part](), None
    spec, todo = model or parts.spec_of(fast) or parts.spec_of(slow), [part for part in steps if part.settings]
    if todo and budget_s > 0:
        try:
            if spec is None:
                raise LabError("no model is named (--model SPEC)")
            first = {**start(fast, slow), **({"lib": libs[0]} if libs else {}), "model": spec}
            found, path = measured(first, todo, fast.is_prefill, budget_s, out, watch)
        except LabError as problem:
            found = {part.name: replace(part, words=f"{part.words}; not measured: {problem.what}") for part in todo}
    made = [found.get(part.name, part) for part in steps]
    made += [*parts.of_server(both), *parts.of_machine(both, spec, out, not libs)]
    made.append(parts.rest(fast, slow, made))
    return Answer(fast, slow, tuple(both), tuple(made), path)


def conclusion(found: Answer) -> tuple[str, str]:
    """The sentence that a person would say, and the command that closes most of the gap ("" if none does)."""
    rest, slow, (other, letter) = found.rest, found.slow, found.letters
    is_open = abs(rest.log) > max(rest.half or 0.0, math.log1p(parts.LEAST if rest.range else parts.LEAST_ALONE))
    if not found.causes and not is_open:
        if not rest.range:
            return f"No cause of over {parts.LEAST_ALONE:.0%}; the figures do not say how much they vary.", ""
        return f"{letter} is not slower than {other} for certain: two sessions of one machine differ as much.", ""
    if not found.causes or (is_open and rest.log > found.causes[0].log):
        unknown = [part.name for part in found.parts if part.how == parts.NOT_KNOWN]
        words = f"Most of it is not explained: {times(math.exp(abs(rest.log)))}{'' if rest.range else UNSURE}."
        if len(unknown) == 1:
            words += f" The only difference without a known factor is {unknown[0]}."
        elif unknown:
            words += f" It may come from what is unknown: {', '.join(unknown)}."
        if any("(--budget)" in part.words for part in found.parts):
            return words, shell.lab("why", "A.jsonl", "B.jsonl", "--budget", "10min")
        if unknown == [parts.BUILD]:
            return words, shell.lab("why", "A.jsonl", "B.jsonl", "--lib", "OLD", "--lib", "NEW")
        return words, "" if {parts.COUNTED, parts.MODEL} & set(unknown) else shell.lab("doctor")
    cause, *others = found.causes
    more = "".join(f"{', ' if i else '; '}{one.name} adds {times(one.factor)}" for i, one in enumerate(others))
    unsure = "" if cause.range else UNSURE
    words = f"The main cause is {cause.name} ({times(cause.factor)}{unsure}): {cause.words}{more}."
    if cause.name == parts.COUNTED:
        own = f"{digits(slow.tps * cause.factor)} tokens/s{unsure}"
        words = f"Most of it is how {letter} counts: {cause.words.partition('; ')[0]}. Its decode alone is {own}{more}."
        lengths = ["-p", slow.n_prompt, "-n", slow.n_gen] if slow.n_prompt and slow.n_gen else []
        return words, shell.lab("measure", *lengths)
    if cause.name == parts.DEPTH:
        return words, shell.lab("sweep", "--max-len", max(512, round(parts.position(slow) or 0)))
    if slow.requests:
        return words, shell.lab("server", slow.requests[0].endpoint.url)
    if found.command or cause.name in (parts.STATE, parts.MACHINE, parts.BUILD):
        return words, found.command or (shell.lab("doctor") if cause.name == parts.STATE else "")
    if not (found.fast.records and slow.records):
        return words, ""
    first, best = slow.records[0], found.fast.records[0]  # measure the slower setup with one group of settings changed
    keys = [key for group, names in parts.GROUPS.items() if group in cause.name for key in names]
    values = {name: getattr(best.settings, name) for name in (settings_table()[key].record_name or key for key in keys)}
    model = best.model if cause.name in (parts.QUANTIZATION, parts.MODEL) else first.model
    changed = replace(first, model=model, settings=replace(first.settings, lib=None, **values))
    return words, shell.lab("measure", *(word for option in as_options.options(changed) for word in option))
