"""Compares two or more sets of runs, or of requests to servers.

Runs are grouped by machine, build, model and settings; groups are never pooled. A row compares one figure at one
length. The intervals of all rows hold together with 95 %, so that a long table does not find a difference by chance.
Runs of `lab ab` are compared block by block, which cancels changes of the machine's speed. Other sessions also differ
because sessions of one machine vary, so a verdict requires a difference that exceeds the spread between sessions:
estimated from sessions of equal setup on the same machine, or assumed. A session gets no verdict if at least half of
its runs were disturbed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core import experiments, shown, stats
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.stats import CONFIDENCE, Ratio
from lab.errors import LabError
from lab.remote.access import Access, is_loopback
from lab.show import table, text_setup
from lab.show.wording import percent, times

if TYPE_CHECKING:
    import pandas as pd

FASTER = "faster"
SLOWER = "slower"
ALIKE = "no difference"
TOO_FEW = "too few runs"
DISTURBED = "disturbed"

WIDEST = 0.5  # if a difference of more than this is possible, the verdict is not "no difference"
AT_LEAST = 0.01
"""Smaller differences count as none: memory layout, for example, changes the speed of a process by about as much."""

FEWEST_RUNS = 3  # runs that a session needs for an interval of its ratio to another
FIGURE_NAMES = {
    "prefill_s": "prefill",
    "ttft_s": "TTFT",
    "tpot_ms": "TPOT",
    "decode_ms": "decode compute",
}
"""The figures of plain runs that are compared. TTFT is compared only if a side is a server."""


def figure_names() -> dict[str, str]:
    """The compared figures in words; those of experiments come last."""
    return FIGURE_NAMES | experiments.figure_names()


VIRTUAL = 0.08
BATTERY = 0.06
PHYSICAL = 0.04
"""Defaults, as standard deviations of logarithms. VIRTUAL was measured: 16 sessions of the main job on a busy 2-core
virtual machine (tests/bench/same_sessions.py). The other two are assumptions without a measurement."""

FEWEST_SESSIONS = 4  # sessions of one setup from which their spread replaces the default
Key = tuple[
    str, int, int | None, str | None
]  # figure, n_prompt, n_gen (None for figures of prompts), case


@dataclass(frozen=True)
class Spread:
    """`sd`: standard deviation of log(figure) between sessions, with `df` degrees of freedom (inf: a default)."""

    sd: float
    df: float
    source: str


@dataclass(frozen=True)
class Group:
    """The timed runs of one setup, as rows of `table.runs`. The label names its differences from the others."""

    label: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class ComparedFigure:
    """One figure at one length, with medians of `base` and `other`. `estimate`: the other's time over the base's."""

    figure: str  # of FIGURE_NAMES
    n_prompt: int
    n_gen: int | None  # None for prefill
    case: str | None  # of an experiment
    base: float
    other: float
    n_base: int  # runs, or blocks if `paired`
    n_other: int
    paired: bool
    estimate: float
    ratio: Ratio | None  # with its interval; None if runs are too few for one
    verdict: str
    words: str
    doubts: tuple[str, ...] = ()  # of core/shown.py, of both sides

    @property
    def name(self) -> str:
        """The figure and its lengths, in words."""
        name = (
            f"{self.case}: {figure_names()[self.figure]}"
            if self.case
            else figure_names()[self.figure]
        )
        if self.n_gen is None:
            return f"{name} of {self.n_prompt:,} tokens"
        return f"{name} after {self.n_prompt:,} prompt tokens ({self.n_gen:,} generated)"


@dataclass(frozen=True)
class Comparison:
    """One group against the base: rows, names of figures that only one has, and the spreads between sessions."""

    base: str
    other: str
    rows: tuple[ComparedFigure, ...]
    only_base: tuple[str, ...]
    only_other: tuple[str, ...]
    spreads: tuple[str, ...] = ()


def default_spread(run: Any) -> Spread:
    """The assumed spread for the machine of a run (a row of `table.runs`)."""
    is_here = True
    if text_setup.is_request(run):
        try:
            is_here = is_loopback(Access(run.url))
        except ValueError:  # not an address, in a damaged file
            is_here = False
    sd, why = next(
        (sd, why)
        for applies, sd, why in (
            (not is_here, VIRTUAL, "since the server's machine is unknown"),
            (run.power == "battery", BATTERY, "for a machine on battery"),
            (run.virtual == False, PHYSICAL, "for a physical machine"),  # noqa: E712  (None and NaN are neither)
            (run.virtual, VIRTUAL, "for a virtual machine"),
            (True, VIRTUAL, "since it is unknown whether the machine is virtual"),
        )
        if applies
    )
    return Spread(sd, math.inf, f"assumed {why}")


def known_spreads(records: Sequence[Record | RequestRecord]) -> dict[tuple[Any, str], Spread]:
    """The spread of every (machine, figure) with enough sessions of one setup that were not disturbed for the most."""
    rows = table.measured(table.runs(records)) if records else None
    if rows is None or rows.empty:
        return {}
    rows = rows[rows.block.isna() & rows.case.isna()]
    rows = rows[
        2 * rows.groupby("session").disturbed.transform("sum")
        < rows.groupby("session").run.transform("size")
    ]
    rows = rows.assign(
        setup=rows.groupby(text_setup.fields(rows), dropna=False, sort=False).ngroup()
    )
    machines = {setup: machine_of(own) for setup, own in rows.groupby("setup")}
    case = ["setup", "n_prompt", "n_gen"]
    known = {}
    for figure in ("prefill_s", "tpot_ms", "decode_ms", *(["ttft_s"] if "server" in rows else [])):
        centres = (
            rows[rows[figure] > 0]
            .groupby([*case, "session"])[figure]
            .median()
            .map(math.log)
            .rename("centre")
        )
        cells = centres.groupby(case).agg(["count", "var"]).query("count > 1")
        for machine in dict.fromkeys(machines[setup] for setup, *_ in cells.index):
            own = cells[[machines[setup] == machine for setup, *_ in cells.index]]
            df = own["count"] - 1
            n_free = df.groupby("setup").max().sum()  # more lengths do not add degrees of freedom
            if n_free >= FEWEST_SESSIONS - 1:
                n = len({session for *key, session in centres.index if tuple(key) in own.index})
                sd = math.sqrt((own["var"] * df).sum() / df.sum())
                known[machine, figure] = Spread(sd, n_free, f"from {n} sessions of this machine")
    return known


def machine_of(rows: pd.DataFrame) -> tuple[Any, ...]:
    """The identity of a machine and its computing device, for rows of one setup; for requests also the server."""
    first = rows.iloc[0]
    of_machine = first.machine, None if first.ram_gb != first.ram_gb else first.ram_gb
    return (*of_machine, first.server) if text_setup.is_request(first) else of_machine


def groups(records: Sequence[Record | RequestRecord], base: str | None = None) -> list[Group]:
    """The setups in order of appearance, but the one whose label contains `base` first.

    If all runs are of one setup, its sessions are the groups. Warm and short requests are left out. LabError
    if there is nothing to compare.
    """
    if not records:
        raise LabError(
            "There is nothing to compare: no records are given.", "Measure some: lab measure"
        )
    rows = sessions_apart(table.measured(table.runs(records)))
    setups = [Group(label, part) for label, part in table.setups(rows)] if len(rows) else []
    if len(setups) < 2:
        hint = "Give results of another machine, model or setting, or measure two settings with lab ab."
        raise LabError(
            "There is nothing to compare: all runs are of one setup and one session.", hint
        )
    if rows.block.notna().all():  # of a trial: A is the base
        setups.sort(key=lambda group: str(group.rows.variant.iloc[0]))
    if base is not None:
        chosen = [group for group in setups if base in group.label]
        if len(chosen) != 1:
            many = f"{len(chosen)} groups" if chosen else "no group"
            labels = "; ".join(one.label for one in setups)
            raise LabError(
                f"--base {base!r} names {many}.", f"Give a part of one of these: {labels}"
            )
        setups = chosen + [group for group in setups if group is not chosen[0]]
    return setups


def by_session(records: Sequence[Record]) -> list[Record]:
    """As `sessions_apart`, for records."""
    rows = table.measured(table.runs(records))
    if sessions_apart(rows) is rows:
        return list(records)
    return [
        dataclasses.replace(
            record, run=dataclasses.replace(record.run, variant=f"session {record.session}")
        )
        for record in records
    ]


def sessions_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows; if all are of one setup, their sessions become variants, so that they can be compared."""
    if rows.empty or rows.session.nunique() < 2 or len(table.setups(rows)) > 1:
        return rows
    return rows.assign(variant=[f"session {session}" for session in rows.session])


def differences(setups: Sequence[Group]) -> dict[str, list[Any]]:
    """The fields of the setup in which groups differ, with each group's value; None: see `text_setup.unset`."""
    served = [text_setup.is_request(group.rows.iloc[0]) for group in setups]
    values = dict[str, list[Any]]()
    for name in text_setup.fields(setups[0].rows):
        found = [group.rows[name].tolist()[0] for group in setups]  # tolist: numbers of Python
        found = [
            None if one != one else int(one) if name == "sweep_every" and one else one
            for one in found
        ]
        of_server = name in text_setup.SERVING and name != "server"
        is_own = (
            of_server or name in text_setup.of_engine_only()
        )  # compared within engines, or within servers
        counted = [
            one
            for one, is_served in zip(found, served, strict=True)
            if not is_own or is_served == of_server
        ]
        if len(set(counted)) > 1:
            values[name] = found
    are_sessions = any(
        name is None or str(name).startswith("session ") for name in values.get("variant", ())
    )
    if are_sessions and any(group.rows.block.isna().all() for group in setups):
        del values["variant"]  # neither of a trial nor imported
    if None not in (texts := values.get("system_info", [None])):  # such as "CPU : AVX2 = 1 | ..."
        flags = [
            [flag.strip() for flag in text.replace(" : ", " | ").split("|") if flag.strip()]
            for text in texts
        ]
        common = set.intersection(*map(set, flags))
        own = [
            ", ".join(flag.removesuffix(" = 1") for flag in one if flag not in common)
            for one in flags
        ]
        del values["system_info"]
        values["CPU instructions of one side only"] = [one or "none" for one in own]
    return values


def compare(
    records: Sequence[Record | RequestRecord],
    base: str | None = None,
    at_least: float = AT_LEAST,
    others: Sequence[Record | RequestRecord] = (),
) -> list[Comparison]:
    """Each setup in `records` against the first, or against the one whose label contains `base`.

        for row in lab.compare(lab.read(["mine.jsonl", "yours.jsonl"]).records)[0].rows:
            print(row.n_prompt, row.figure, row.words)

    If all runs are of one setup, its sessions are compared. Differences below `at_least` count as none. `others` are
    more sessions of the same machines: they show how much sessions vary. LabError if there is nothing to compare.
    """
    return compare_groups(groups(records, base), at_least, known_spreads([*records, *others]))


def compare_groups(
    setups: Sequence[Group],
    at_least: float = AT_LEAST,
    known: Mapping[tuple[Any, str], Spread] | None = None,
    confidence: float = stats.CONFIDENCE,
) -> list[Comparison]:
    """Each group against the first. All intervals hold together with `confidence`; `known` are `known_spreads`."""
    figures = [name for name in figure_names() if any(name in group.rows for group in setups)]
    if not any(text_setup.is_request(group.rows.iloc[0]) for group in setups):
        figures.remove("ttft_s")
    base = setups[0]
    pairs = list[tuple[Group, dict[Key, Any], dict[Key, Any]]]()
    for group in setups[1:]:  # imported results have decode compute, but no TPOT
        of_both = [
            one.rows[["tpot_ms", "decode_ms"]].notna().any().tolist() for one in (base, group)
        ]
        names = [
            name
            for name in figures
            if name != ("tpot_ms" if [False, True] in of_both else "decode_ms")
        ]
        pairs.append((group, cases(base.rows, names), cases(group.rows, names)))
    n_rows = sum(len(own.keys() & others.keys()) for _, own, others in pairs)
    comparisons = list[Comparison]()
    of_one_row = 1 - (1 - confidence) / max(1, n_rows)
    for group, own, others in pairs:
        rows = list[ComparedFigure]()
        spreads = set[str]()
        for key in (key for key in own if key in others):
            of_sides = [
                (known or {}).get((machine_of(one.rows), key[0]))
                or default_spread(one.rows.iloc[0])
                for one in (base, group)
            ]
            rows.append(_row(key, (own[key], others[key]), of_sides, of_one_row, at_least))
            if not rows[-1].paired:
                told = (
                    f"{percent(math.expm1(spread.sd))} ({spread.source})" for spread in of_sides
                )
                spreads |= {f"{figure_names()[key[0]]}: {words}" for words in told}
        only_base = tuple(_at(*key) for key in own if key not in others)
        only_other = tuple(_at(*key) for key in others if key not in own)
        compared = Comparison(
            base.label, group.label, tuple(rows), only_base, only_other, tuple(sorted(spreads))
        )
        comparisons.append(compared)
    return comparisons


def _at(figure: str, n_prompt: int, n_gen: int | None, case: str | None) -> str:
    """A figure that only one side has, in words."""
    at = ", ".join(filter(None, [f"{n_prompt:,}", case]))
    return f"{figure_names()[figure]} at {at}{f' with {n_gen:,} generated' if n_gen else ''}"


def cases(rows: pd.DataFrame, figures: Sequence[str]) -> dict[Key, pd.DataFrame]:
    """The positive values of every figure at every length (and case), a row each; by length, then by figure."""
    t = rows.melt(
        ["session", "block", "disturbed", "n_prompt", "n_gen", "case"],
        rows.columns.intersection(figures),
        "figure",
    )
    of_prompt = t.figure.isin(
        ["prefill_s", "ttft_s"]
    )  # which do not depend on the number of generated tokens
    t = t[t.value > 0].assign(n_gen=t.n_gen.mask(of_prompt).fillna(-1), case=t.case.fillna(""))
    cases_in_order = list(dict.fromkeys(t.case))
    parts = dict(list(t.groupby(["case", "n_prompt", "n_gen", "figure"], sort=False)))

    def order(key: tuple[Any, ...]) -> tuple[Any, ...]:
        case, n_prompt, n_gen, figure = key
        return (
            case != "",
            n_prompt,
            cases_in_order.index(case),
            max(0, n_gen),
            figures.index(figure),
        )

    return {
        (figure, int(n_prompt), None if n_gen < 0 else int(n_gen), case or None): parts[
            case, n_prompt, n_gen, figure
        ]
        for case, n_prompt, n_gen, figure in sorted(parts, key=order)
    }


def _row(
    key: Key,
    sides: tuple[pd.DataFrame, pd.DataFrame],
    spreads: Sequence[Spread],
    confidence: float,
    at_least: float,
) -> ComparedFigure:
    """One figure of two sides: by block if they were measured side by side, otherwise by session."""
    by_block = [
        side.groupby(["session", "block"]).value.agg(statistics.geometric_mean) for side in sides
    ]
    blocks = by_block[0].index.intersection(by_block[1].index)
    ratio = None
    if (
        is_paired := len(blocks) > 0
    ):  # the mean of the runs of a block, in the order ABBA, cancels a steady drift
        a, b = (side[blocks].tolist() for side in by_block)
        estimate = math.exp(statistics.median(math.log(y / x) for x, y in zip(a, b, strict=True)))
        ratio = stats.paired_ratio(a, b, confidence)
        too_few = f"unclear, {plural(len(blocks), 'block')}; an interval needs {stats.fewest_for_interval(confidence)}"
    else:
        sessions = [
            [own.value.tolist() for _, own in side.groupby("session", sort=False)] for side in sides
        ]
        n_base, n_other = (max(map(len, of_side)) for of_side in sessions)
        too_few = f"unclear, {n_base} against {plural(n_other, 'run')}; an interval needs {FEWEST_RUNS} each"
        if min(n_base, n_other) >= FEWEST_RUNS:  # only sessions with enough runs count
            sessions = [
                [values for values in of_side if len(values) >= FEWEST_RUNS] for of_side in sessions
            ]
            (sd, df), (other_sd, other_df) = ((spread.sd, spread.df) for spread in spreads)
            ratio = between_sessions(
                (sessions[0], sessions[1]), ((sd, df), (other_sd, other_df)), confidence
            )
        centres = [
            statistics.fmean(statistics.median(map(math.log, one)) for one in of_side)
            for of_side in sessions
        ]
        estimate = math.exp(centres[1] - centres[0])
        a, b = ([value for values in of_side for value in values] for of_side in sessions)
    doubts = [
        shown.of_runs(len(own), own.disturbed.sum(), 0)
        for side in sides
        for _, own in side.groupby("session")
    ]
    is_assumed = not is_paired and math.isinf(min(spread.df for spread in spreads))
    doubts += [() if ratio else (shown.FEW,), (shown.ASSUMED,) if is_assumed else ()]
    if shown.DISTURBED in (all_doubts := shown.all_of(doubts)):
        ratio = None
        told = DISTURBED
        words = f"unclear, at least half of the runs were disturbed: {about(estimate)}"
    elif ratio is None:
        told = TOO_FEW
        words = f"{too_few}: {about(estimate)}"
    else:
        told, words = verdict(ratio, at_least)
    medians = statistics.median(a), statistics.median(b)
    return ComparedFigure(
        *key,
        *medians,
        len(a),
        len(b),
        is_paired,
        estimate,
        ratio,
        verdict=told,
        words=words,
        doubts=all_doubts,
    )


def about(estimate: float) -> str:
    """A ratio in words, without a verdict."""
    if max(estimate, 1 / estimate) < 1.05:
        return "about the same time"
    return (
        f"about {times(estimate)} the time"
        if estimate > 1
        else f"about {times(1 / estimate)} as fast"
    )


def verdict(ratio: Ratio, at_least: float) -> tuple[str, str]:
    """The verdict that the interval of a ratio allows, and its words."""
    if ratio.low > 1 + at_least:
        return SLOWER, f"slower, {times(ratio.estimate)} the time"
    if ratio.high < 1 / (1 + at_least):
        return FASTER, f"faster, {times(1 / ratio.estimate)} as fast"
    largest = max(ratio.high, 1 / ratio.low) - 1
    if largest > WIDEST:
        where = "contains 1" if ratio.low <= 1 <= ratio.high else "comes close to 1"
        return TOO_FEW, f"unclear, the interval {where}: {about(ratio.estimate)}"
    if ratio.high < 1 or ratio.low > 1:
        ends = sorted((ratio.low, ratio.high) if ratio.low > 1 else (1 / ratio.high, 1 / ratio.low))
        word = SLOWER if ratio.low > 1 else FASTER
        by = " to ".join(percent(end - 1) for end in ends)
        return ALIKE, f"no difference clearly above {percent(at_least)}: {word} by {by}"
    return ALIKE, f"no difference larger than {percent(largest)}"


def between_sessions(
    sides: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    spreads: tuple[tuple[float, float], tuple[float, float]],
    confidence: float = CONFIDENCE,
) -> Ratio:
    """The ratio of the second side to the first, with its interval; a side has sessions of positive values.

    A side's centre is the mean over sessions of the median of logarithms. The variance of a session is that of a median
    (pi / 2 x variance / n, for normal values), but at least sd^2 of its side's spread: the variance between sessions,
    known with this number of degrees of freedom. Student's t with Welch-Satterthwaite degrees of freedom, in which all
    sessions with one spread count as one estimate: their errors do not average out. ValueError for a session of one
    value.
    """
    from scipy.special import stdtrit

    estimates: dict[
        object, tuple[float, float]
    ] = {}  # the part of the variance from each estimate, and its freedom
    centres = []
    for i, (sessions, (sd, df)) in enumerate(zip(sides, spreads, strict=True)):
        logs = [[math.log(value) for value in values] for values in sessions]
        centres.append(statistics.fmean(map(statistics.median, logs)))
        for j, own in enumerate(logs):
            variance = math.pi / 2 * statistics.variance(own) / len(own)
            key, own_df = ((sd, df), df) if sd**2 >= variance else ((i, j, None), len(own) - 1)
            variance = max(variance, sd**2)
            (before, _) = estimates.get(key, (0.0, 0.0))
            estimates[key] = before + variance / len(logs) ** 2, own_df
    total = sum(variance for variance, _ in estimates.values())
    parts = sum(variance**2 / df for variance, df in estimates.values())
    half = float(
        stdtrit(total**2 / parts if parts else math.inf, (1 + confidence) / 2)
    ) * math.sqrt(total)
    difference = centres[1] - centres[0]
    return Ratio(*map(math.exp, (difference, difference - half, difference + half)))
