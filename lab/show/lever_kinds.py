"""What every experiment shows: its question, the columns of its table, its sentences, its picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis.wording import digits
from lab.core.levers import Batch, Prefix, Speculation, Stall
from lab.core.record import Record
from lab.experiments import batching, prefix_cache, speculation_rows, stall_chunks, stalls
from lab.show.plot_levers import plot_batch, plot_curve, plot_prefix, plot_speculation, plot_stall
from lab.why.step_prediction import StepPrediction

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
    is_by_ceilings: bool = True  # what is predicted needs ceilings


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


SPECULATE: Columns = (
    ("text", lambda row: row.text),
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    ("guessed\nby", lambda row: row.draft),
    ("guesses\na step", lambda row: f"{row.n_draft}"),
    ("right", lambda row: "-" if row.right is None else f"{row.right:.0%}"),
    ("right by\nposition %", lambda row: "/".join(f"{100 * share:.0f}" for share in row.by_position) or "-"),
    ("tokens\na step", lambda row: "-" if row.length is None else f"{row.length:.2f}"),
    ("guess\nms", lambda row: "-" if row.draft_s is None else digits(1e3 * row.draft_s)),
    ("verify\nms", lambda row: "-" if row.verify_s is None else digits(1e3 * row.verify_s)),
    ("TPOT\nms", lambda row: digits(1e3 * row.tpot_s)),
    ("plain\nms", lambda row: "-" if row.plain_tpot_s is None else digits(1e3 * row.plain_tpot_s)),
    ("speed-up", lambda row: _with_interval(row.speed_up, row.low, row.high)),
    ("predicted", lambda row: "-" if row.expected is None else f"{row.expected:.2f}"),
)
CURVE: Columns = (
    ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
    ("positions\na step", lambda row: f"{row.n_positions}"),
    ("step\nms", lambda row: digits(1e3 * row.step_s)),
    ("v", lambda row: f"{row.v:.2f}"),
    ("predicted\nv", lambda row: "-" if row.expected_v is None else f"{row.expected_v:.2f}"),
    ("c", lambda row: "-" if row.c is None else f"{row.c:.2f}"),
    *(
        (f"speed-up\n{share:.0%} right", lambda row, i=i: f"{row.speed_ups[i]:.2f}" if row.speed_ups else "-")
        for i, share in enumerate(speculation_rows.ACCEPTANCES)
    ),
)


def _of_batch(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    return [words for group in batching.alike(rows) for words in batching.sentences(group, prediction)], {}


def _of_prefix(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    groups = [[row for row in rows if row.n_suffix == n] for n in sorted({row.n_suffix for row in rows})]
    words = [sentence for group in groups for sentence in prefix_cache.sentences(group, prediction)]
    return words, {"break_even": prefix_cache.break_even(rows) if rows else []}


def _of_stall(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    verdicts = stall_chunks.verdicts(records, prediction)
    words = [*map(stall_chunks.sentence, verdicts), *stalls.sentences(rows, prediction), *stalls.check(records)]
    return words, {"max_stall": verdicts}


def _of_speculation(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    return speculation_rows.sentences(rows, records), {"parted": speculation_rows.partings(records)}


def _of_curve(rows: Sequence[Any], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    return speculation_rows.of_curve(rows), {}


def _draw_batch(section: Section, figure: Figure) -> None:
    first = section.rows[0]
    ridge = batching.ridge(section.prediction, first.n_prompt, first.n_gen) if section.prediction is not None else None
    plot_batch(section.rows, section.records, section.label, ridge, figure)


def _draw_prefix(section: Section, figure: Figure) -> None:
    plot_prefix(section.rows, section.records, section.label, figure)


def _draw_stall(section: Section, figure: Figure) -> None:
    limits = [record.run.stall.limit_s for record in section.records if record.run.stall]
    plot_stall(section.records, figure, max((limit for limit in limits if limit is not None), default=None))


def _draw_speculation(section: Section, figure: Figure) -> None:
    plot_speculation(section.rows, section.records, section.label, figure)


def _draw_curve(section: Section, figure: Figure) -> None:
    plot_curve(section.rows, section.records, section.label, figure)


def _ranged(value: float, low: float, high: float, n_runs: int) -> str:
    ends = f"\n{digits(low)}-{digits(high)}".replace(",", "")  # as narrow as can be
    return digits(value) + (ends if n_runs > 1 else "")


def _pair(save: float | None, load: float | None) -> str:
    """Rates of saving, and below it of loading."""
    return "-" if save is None or load is None else f"{digits(save)}\n{digits(load)}"


def _with_interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if low is None else f"\n{low:.2f}-{high:.2f}")


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
        Speculation,
        "speculate",
        "Does it pay to guess tokens ahead, and how many?",
        "tokens guessed ahead and verified at once; medians over blocks, below the speed-up its interval of 95 %",
        "Speed-up over plain decoding, over how many tokens are guessed at a time; a panel for each text. Points are "
        "blocks, the line their median, dashes the prediction.",
        SPECULATE,
        speculation_rows.rows,
        _of_speculation,
        _draw_speculation,
        is_by_ceilings=False,
    ),
    Kind(
        Speculation,
        "curve",
        "What does it cost to verify several tokens at once?",
        "steps of several positions of one sequence; medians",
        "The time of a step over that of a step of one token, over how many tokens it has. Dashes are what the "
        "ceilings predict, dots what would be if every token cost a step, or nothing.",
        CURVE,
        speculation_rows.curve,
        _of_curve,
        _draw_curve,
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
