"""Experiments as tables, sentences and pictures: what `lab batch`, `prefix` and `stall` measured, by setup."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.analysis import disturbances, table
from lab.analysis.wording import digits
from lab.core.levers import Batch, Prefix, Stall
from lab.core.record import OK, Ceilings, Record
from lab.experiments import batching, prefix_cache, stall_search, stalls
from lab.show.console import grid_of
from lab.show.plot_batch import plot_batch
from lab.show.plot_prefix import plot_prefix
from lab.show.plot_stall import plot_stall
from lab.why.step_prediction import StepPrediction, prediction_for

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Columns = tuple[tuple[str, Callable[[Any], str]], ...]


@dataclass(frozen=True)
class Section:
    """What one experiment showed on one setup. `rows` are those of the experiment's file, `more` what JSON adds."""

    kind: Kind
    label: str
    records: tuple[Record, ...]
    rows: tuple[Any, ...]
    prediction: StepPrediction | None
    headings: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    sentences: tuple[str, ...]
    more: dict[str, list[Any]]

    @property
    def title(self) -> str:
        return f"{self.label}: {self.kind.title}"


Conclusions = tuple[list[str], dict[str, list[Any]]]
"""Sentences, and what JSON has besides the rows, by name."""


@dataclass(frozen=True)
class Kind:
    """An experiment: its lever, its words, its columns; its rows, what they say, and its picture."""

    lever: type
    name: str
    question: str
    title: str
    caption: str
    columns: Columns
    rows: Callable[[Sequence[Record], StepPrediction | None], Sequence[Any]]
    conclude: Callable[[Sequence[Any], Sequence[Record], StepPrediction | None], Conclusions]
    draw: Callable[[Section, Figure], Any]


BATCH: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}{' shared' if row.is_shared else ''}"),
    ("sequences", lambda row: f"{row.n_seq:,}"),
    ("runs", lambda row: str(row.n_runs)),
    ("step\nms", lambda row: _ranged(1e3 * row.step_s, 1e3 * row.step_min_s, 1e3 * row.step_max_s, row.n_runs)),
    ("predicted\nms", lambda row: "-" if row.expected_s is None else digits(1e3 * row.expected_s)),
    ("tokens/s\nin all", lambda row: digits(row.total_tps)),
    ("tokens/s\nper user", lambda row: digits(row.user_tps)),
    ("efficiency", lambda row: "-" if row.efficiency is None else f"{digits(row.efficiency)}x"),
    ("prefill\ns", lambda row: digits(row.prefill_s)),
    ("KV cache\nMB", lambda row: "-" if row.kv_bytes is None else digits(row.kv_bytes / 1e6)),
)
PREFIX: Columns = (
    ("prefix\ntokens", lambda row: f"{row.n_prefix:,}"),
    ("suffix\ntokens", lambda row: f"{row.n_suffix:,}"),
    ("runs", lambda row: str(row.n_runs)),
    ("cold\ns", lambda row: digits(row.cold_s)),
    ("cached\ns", lambda row: digits(row.cached_s)),
    ("from RAM\ns", lambda row: digits(row.ram_s)),
    ("from disk\ns", lambda row: digits(row.disk_s)),
    ("saved\ns", lambda row: digits(row.saved_s)),
    ("promised\ns", lambda row: "-" if row.promised_s is None else digits(row.promised_s)),
    ("state\nMB", lambda row: "-" if row.state_bytes is None else digits(row.state_bytes / 1e6)),
    ("RAM\nGB/s", lambda row: _pair(row.save_ram_gbps, row.load_ram_gbps)),
    ("disk\nGB/s", lambda row: _pair(row.save_disk_gbps, row.load_disk_gbps)),
    ("equal\nlogits", lambda row: {True: "yes", False: "NO", None: "-"}[row.is_equal]),
)
STALL: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    ("streams", lambda row: f"{row.n_streams:,}"),
    ("chunk", lambda row: "at once" if row.chunk is None else f"{row.chunk:,}"),
    ("runs", lambda row: str(row.n_runs)),
    ("stalls", lambda row: f"{row.n_stalls:,}"),
    ("longest\ngap ms", lambda row: _ranged(*_longest_ms(row), row.n_runs)),
    ("predicted\nms", lambda row: "-" if row.expected_gap_s is None else digits(1e3 * row.expected_gap_s)),
    ("usual\ngap ms", lambda row: digits(1e3 * row.usual_gap_s)),
    ("newcomer\nTTFT s", lambda row: digits(row.newcomer_s)),
    ("predicted\ns", lambda row: "-" if row.expected_newcomer_s is None else digits(row.expected_newcomer_s)),
    ("lost\n%", lambda row: "-" if row.lost is None else str(round(100 * row.lost))),
)


def sections(records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[Record] = ()) -> list[Section]:
    """What the experiments among `records` showed. `known` ceilings and `others`, plain runs, predict it."""
    timed = [record for record in records if record.run.status == OK and not record.run.warmup and record.run.lever]
    made = []
    for kind in KINDS:
        of_kind = [record for record in timed if isinstance(record.run.lever, kind.lever)]
        for label, rows in table.setups(table.runs(of_kind)) if of_kind else []:
            chosen = tuple(of_kind[i] for i in dict.fromkeys(rows.run))
            section = _section(kind, label, chosen, prediction_for(chosen[0], known, [*records, *others]))
            if section.rows:
                made.append(section)
    return made


def print_sections(shown: Sequence[Section], out: Console) -> None:
    """Prints each as a table with its sentences."""
    for section in shown:
        out.print()
        out.print(Text(section.title, style="bold"))
        grid = grid_of(*section.headings)
        for cells in section.cells:
            grid.add_row(*cells)
        out.print(grid)
        for sentence in section.sentences:
            out.print(sentence)


def as_rows(shown: Sequence[Section]) -> list[dict[str, Any]]:
    """The rows of all sections as JSON has them, each with the name of its experiment and its setup."""
    return [
        {"experiment": section.kind.name, "setup": section.label, **dataclasses.asdict(row)}
        for section in shown
        for row in section.rows
    ]


def more(shown: Sequence[Section]) -> dict[str, list[dict[str, Any]]]:
    """What JSON has besides the rows, by name: break-even lengths, and what searches ended with."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for section in shown:
        for name, values in section.more.items():
            lists.setdefault(name, []).extend({"setup": section.label, **dataclasses.asdict(one)} for one in values)
    return {name: values for name, values in lists.items() if values}


def questions(shown: Sequence[Section]) -> list[str]:
    """What the experiments answer."""
    return list(dict.fromkeys(section.kind.question for section in shown))


def drawings(shown: Sequence[Section]) -> dict[str, Callable[[Figure], Any]]:
    """What draws the pictures, by their names."""
    names = [section.kind.name for section in shown]
    return {
        name if names.count(name) == 1 else f"{name}-{1 + names[:i].count(name)}": partial(section.kind.draw, section)
        for i, (name, section) in enumerate(zip(names, shown, strict=True))
    }


def _section(kind: Kind, label: str, records: tuple[Record, ...], prediction: StepPrediction | None) -> Section:
    """A section; a column in which nothing is known is left out."""
    rows = tuple(kind.rows(records, prediction))
    words, lists = kind.conclude(rows, records, prediction)
    cells = [tuple(show(row) for _, show in kind.columns) for row in rows]
    shown = [i for i in range(len(kind.columns)) if any(line[i] != "-" for line in cells)]
    basis = [prediction.basis] if prediction else ["Nothing is predicted: measure the ceilings first (lab ceilings)."]
    if disturbances.is_doubtful(records):
        basis.append("Half of these runs or more were disturbed. Do not trust these figures: measure again.")
    return Section(
        kind,
        label,
        records,
        rows,
        prediction,
        tuple(kind.columns[i][0] for i in shown),
        tuple(tuple(line[i] for i in shown) for line in cells),
        (*words, *basis),
        lists,
    )


def _of_batch(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    return [words for group in batching.alike(rows) for words in batching.sentences(group, prediction)], {}


def _of_prefix(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    groups = [[row for row in rows if row.n_suffix == n] for n in sorted({row.n_suffix for row in rows})]
    words = [sentence for group in groups for sentence in prefix_cache.sentences(group, prediction)]
    return words, {"break_even": prefix_cache.break_even(rows) if rows else []}


def _of_stall(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    verdicts = stall_search.verdicts(records, prediction)
    words = [*map(stall_search.sentence, verdicts), *stalls.sentences(rows, prediction), *stalls.check(records)]
    return words, {"max_stall": verdicts}


def _draw_batch(section: Section, figure: Figure) -> None:
    first = section.rows[0]
    ridge = batching.ridge(section.prediction, first.n_prompt, first.n_gen) if section.prediction is not None else None
    plot_batch(section.rows, section.records, section.label, ridge, figure)


def _draw_prefix(section: Section, figure: Figure) -> None:
    plot_prefix(section.rows, section.records, section.label, figure)


def _draw_stall(section: Section, figure: Figure) -> None:
    limits = [record.run.stall.limit_s for record in section.records if record.run.stall]
    plot_stall(section.records, figure, max((limit for limit in limits if limit is not None), default=None))


def _ranged(value: float, low: float, high: float, n_runs: int) -> str:
    ends = f"\n{digits(low)}-{digits(high)}".replace(",", "")  # as narrow as can be
    return digits(value) + (ends if n_runs > 1 else "")


def _pair(save: float | None, load: float | None) -> str:
    """Rates of saving, and below it of loading."""
    return "-" if save is None or load is None else f"{digits(save)}\n{digits(load)}"


def _longest_ms(row: stalls.Row) -> tuple[float, float, float]:
    return 1e3 * row.longest_gap_s, 1e3 * row.longest_min_s, 1e3 * row.longest_max_s


KINDS = (
    Kind(
        Batch,
        "batch",
        "How many at once, and what does it cost each?",
        "sequences decoded together; medians over runs, below them their range",
        "Tokens per second over how many sequences share a step: in all, and of each user. Points are runs, the line "
        "their median, dashes the prediction.",
        BATCH,
        batching.rows,
        _of_batch,
        _draw_batch,
    ),
    Kind(
        Prefix,
        "prefix",
        "What need not be read again, and when does restoring it pay?",
        "time to first token with a prefix cold, cached and restored; medians over runs; GB/s of saving, and below it "
        "of loading",
        "Time to first token over the length of the prefix: cold, copied in the cache, restored from RAM, from disk. "
        "Points are runs, the lines their medians.",
        PREFIX,
        prefix_cache.rows,
        _of_prefix,
        _draw_prefix,
    ),
    Kind(
        Stall,
        "stall",
        "How long do running answers stop for a long prompt?",
        "a long prompt beside running answers; medians over runs, below them their range",
        "The gap before each token of the streams, since the prompt came; a panel for each chunk. Points are tokens of "
        "all runs, the line is the run with the median longest gap.",
        STALL,
        stalls.rows,
        _of_stall,
        _draw_stall,
    ),
)
"""All experiments, in the order in which they are shown."""
