"""The figures of a session: quality and speed of each file, and which file is better than which.

Chunks are the replicates of quality, since tokens of one chunk are correlated. Two candidates saw
the same chunks, so they are compared chunk by chunk: on a difficult chunk every candidate diverges
more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lab.core import cost, shown, stats
from lab.core.lists import grouped
from lab.core.record import Record
from lab.core.results import Readable, lines_of
from lab.core.stats import Ratio
from lab.errors import LabError
from lab.features.quant import caches
from lab.features.quant.lines import Divergence, QualityLine, QuantLine
from lab.features.quant.planning import PART
from lab.show import comparison

if TYPE_CHECKING:
    import pandas as pd

NAN = math.nan
UNKNOWN = Ratio(NAN, NAN, NAN)
ITSELF = Ratio(1.0, 1.0, 1.0)
PHASES = {"decode": "tpot_ms", "prefill": "prefill_s"}
FEWEST_CHUNKS = 5  # for saying that two files differ or do not
LARGEST_EXPONENT = 700.0  # a larger one would overflow
LEAST_KL = 1e-12  # a divergence of zero has no logarithm
SMALL_RATIO = 1.1  # of two divergences; a smaller one does not matter


class QuantRow(Protocol):
    """A row of `rows` of QuantFigures: the columns that are shown; NaN where unknown."""

    label: str
    is_reference: bool
    n_bytes: float
    memory_bytes: float
    position_bytes: float
    bytes_per_token: float
    bandwidth: float
    kl: float
    kl_low: float
    kl_high: float
    kl_99: float
    kl_max: float
    same: float
    perplexity: float
    perplexity_ratio: float
    decode: float
    decode_low: float
    decode_high: float
    decode_doubts: tuple[str, ...]
    prefill_doubts: tuple[str, ...]
    is_clear: bool
    on_front: bool | None


class TextRow(Protocol):
    """A row of `by_text` of QuantFigures."""

    kl: float
    same: float
    n_chunks: int


@dataclass(frozen=True)
class QuantFigures:
    """What a session found.

    `rows` has a row for each file or cache type, the reference first. `by_text` has a row for each
    candidate and kind of text. `floor` is the mean divergence of the reference from itself under
    other settings. `equal` are the pairs that the divergence cannot tell apart; None for too few
    chunks.
    """

    rows: pd.DataFrame
    by_text: pd.DataFrame
    floor: float | None
    equal: list[tuple[str, str]] | None
    n_positions: int
    n_chunks: int
    is_of_caches: bool = False

    @property
    def has_speeds(self) -> bool:
        return bool(self.rows.is_clear.any())


@dataclass(frozen=True)
class Speed:
    """How many times as fast as the reference, and what makes it doubtful."""

    ratio: Ratio = UNKNOWN
    doubts: tuple[str, ...] = ()

    @property
    def is_clear(self) -> bool:
        is_known = not math.isnan(self.ratio.estimate)
        return is_known and shown.DISTURBED not in self.doubts


def of_sessions(lines: Sequence[QuantLine]) -> list[tuple[list[QuantLine], QuantFigures]]:
    """Each session with quality: its lines, and what it found."""
    sessions = []
    for lines_of_session in grouped(lines, lambda line: line.session).values():
        if candidates(lines_of_session):
            sessions.append((lines_of_session, figures(lines_of_session)))
    return sessions


def qualities(lines: Iterable[object]) -> list[QualityLine]:
    return [line for line in lines if isinstance(line, QualityLine)]


def runs(lines: Iterable[object]) -> list[Record]:
    """The timed runs that show the speed of files."""
    return [line for line in lines if isinstance(line, Record) and is_speed(line)]


def is_speed(record: Record) -> bool:
    return record.run.part == PART and record.run.is_timed


def candidates(lines: Iterable[object]) -> dict[str, QualityLine]:
    """The qualities by variant, without the noise floor."""
    return {line.variant: line for line in qualities(lines) if not line.is_floor}


def quant_table(lines: Readable) -> pd.DataFrame:
    """One row for each file or cache type that `quant` compared, the reference first.

        lab.quant_table(lines)[["label", "kl", "same", "decode", "on_front"]]

    `kl`: mean divergence in nats, `same`: share of positions with the same most likely token, both
    with their 95 % intervals (`_low`, `_high`). `decode`, `prefill`: how many times as fast as the
    reference. LabError for lines that hold no quality.
    """
    import pandas as pd

    tables = []
    for lines_of_session, summary in of_sessions(lines_of(lines)):
        tables.append(summary.rows.assign(session=lines_of_session[0].session))
    if not tables:
        raise LabError("These records hold no quality.", "Measure it: lab quant")
    return pd.concat(tables, ignore_index=True)


def figures(lines: Sequence[QuantLine]) -> QuantFigures:
    """The figures of one session."""
    import pandas as pd

    scored = candidates(lines)
    first = next(iter(scored.values()))
    chunks = {variant: whole_chunks(line) for variant, line in scored.items()}
    variants = [first.reference, *scored]
    labels = labels_of(variants, lines)
    speeds = all_speeds(runs(lines))
    rows = []
    for variant in variants:
        row: dict[str, object] = {"label": labels[variant], "variant": variant}
        row["is_reference"] = variant == first.reference
        row |= figures_of_file(file_of(variant, lines))
        for phase in PHASES:
            row |= speed_figures(phase, speeds.get((phase, first.reference, variant), Speed()))
        if variant in scored:
            row |= figures_of_chunks(chunks[variant])
        else:
            nll = mean([chunk.reference_nll for chunk in next(iter(chunks.values()))])
            row["perplexity"] = exp(nll)
        rows.append(row)
    table = pd.DataFrame(rows)
    table["bandwidth"] = table.bytes_per_token.iloc[0] / table.bytes_per_token
    table["on_front"] = on_front(table, bool(first.depths))
    return QuantFigures(
        rows=table,
        by_text=figures_by_text(scored, labels),
        floor=floor_of(qualities(lines)),
        equal=equal_pairs({labels[name]: chunks[name] for name in scored}),
        n_positions=sum(len(chunk.kl) for chunk in first.chunks),
        n_chunks=len(next(iter(chunks.values()))),
        is_of_caches=bool(first.depths),
    )


def file_of(variant: str, lines: Sequence[object]) -> QuantLine | None:
    """A line with the model and settings of a variant: its longest run if there is one."""
    of_variant = [record for record in runs(lines) if record.run.variant == variant]
    if of_variant:
        return max(of_variant, key=lambda record: record.run.n_prompt)
    for line in qualities(lines):  # the noise floor has the reference's model
        if variant in (line.variant, line.reference if line.is_floor else None):
            return line
    return None


def labels_of(variants: Sequence[str], lines: Sequence[object]) -> dict[str, str]:
    """The shortest names that differ: cache types, quantizations, file names, or options."""
    found = [file_of(variant, lines) for variant in variants]
    files = [file for file in found if file is not None]
    if len(files) == len(found):
        types: list[str | None] = [caches.name_of(file.settings) for file in files]
        quantizations = [file.model.quantization for file in files]
        names_of_files = [file.model.file.rpartition("/")[2] for file in files]
        for names in (
            types,
            quantizations,
            [f"{name}, {kind} cache" for name, kind in zip(quantizations, types, strict=True)],
            names_of_files,
            [
                f"{name}, {kind} cache"
                for name, kind in zip(names_of_files, types, strict=True)
            ],
        ):
            if all(names) and len(set(names)) == len(names):
                return dict(zip(variants, map(str, names), strict=True))
    return {variant: variant.partition(": ")[2] or variant for variant in variants}


def figures_of_file(file: QuantLine | None) -> dict[str, float]:
    """Bytes of a file, of its buffers, of a position in its cache, and that a decode step reads;
    NaN where unknown."""
    figures = dict.fromkeys(
        ("n_bytes", "memory_bytes", "position_bytes", "bytes_per_token"), NAN
    )
    if file is None:
        return figures
    position_bytes = caches.bytes_per_position(file)
    if position_bytes is not None:
        figures["position_bytes"] = position_bytes
    figures["n_bytes"] = float(file.model.n_bytes or NAN)
    if isinstance(file, Record):
        run = file.run
        n_past = run.n_prompt + run.n_gen // 2
        if run.placement:
            figures["memory_bytes"] = float(
                sum(buffer.n_bytes for buffer in run.placement.buffers)
            )
    else:
        n_past = file.settings.n_ctx
    settings = file.settings
    step = cost.step(file.model, 1, n_past, 1, settings.type_k, settings.type_v)
    if step:
        figures["bytes_per_token"] = step.n_bytes
    return figures


def figures_of_chunks(chunks: Sequence[Divergence]) -> dict[str, object]:
    """The figures of a candidate: divergence, agreement and perplexity, with their intervals."""
    import numpy as np

    kl = np.concatenate([chunk.kl for chunk in chunks])
    log_ratio = interval([chunk.nll - chunk.reference_nll for chunk in chunks])
    perplexity_ratio = Ratio(exp(log_ratio.estimate), exp(log_ratio.low), exp(log_ratio.high))
    return {
        "n_chunks": len(chunks),
        "kl_99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        **with_ends("kl", positive_interval([mean_kl(chunk) for chunk in chunks])),
        **with_ends("same", interval([chunk.n_same / len(chunk.kl) for chunk in chunks])),
        **with_ends("perplexity_ratio", perplexity_ratio),
        "perplexity": exp(mean([chunk.nll for chunk in chunks])),
    }


def figures_by_text(scored: dict[str, QualityLine], labels: dict[str, str]) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for variant, line in scored.items():
        by_text: dict[str, list[Divergence]] = {}
        chunks = whole_chunks(line)
        kinds = line.texts[:: len(line.chunks) // len(chunks)]
        for text, chunk in zip(kinds, chunks, strict=True):
            by_text.setdefault(text, []).append(chunk)
        for text, chunks in by_text.items():
            rows.append({"label": labels[variant], "text": text, **figures_of_chunks(chunks)})
    return pd.DataFrame(rows)


def speed_figures(phase: str, speed: Speed) -> dict[str, object]:
    named = {**with_ends(phase, speed.ratio), f"{phase}_doubts": speed.doubts}
    if phase == "decode":
        named["is_clear"] = speed.is_clear
    return named


def with_ends(name: str, value: Ratio) -> dict[str, float]:
    return {name: value.estimate, f"{name}_low": value.low, f"{name}_high": value.high}


def joined(parts: Sequence[Divergence]) -> Divergence:
    """The divergence over the positions of several parts."""
    if len(parts) == 1:
        return parts[0]
    kl = tuple(itertools.chain.from_iterable(part.kl for part in parts))
    nll = math.fsum(len(part.kl) * part.nll for part in parts) / len(kl)
    reference_nll = math.fsum(len(part.kl) * part.reference_nll for part in parts) / len(kl)
    return Divergence(kl, sum(part.n_same for part in parts), nll, reference_nll)


def whole_chunks(line: QualityLine) -> list[Divergence]:
    """The chunks of a line; those kept by depth joined."""
    n_parts = len(set(line.depths)) or 1
    chunks = []
    for start in range(0, len(line.chunks), n_parts):
        chunks.append(joined(line.chunks[start : start + n_parts]))
    return chunks


def mean_kl(chunk: Divergence) -> float:
    """The mean divergence over a chunk's positions."""
    return math.fsum(chunk.kl) / len(chunk.kl)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def interval(values: Sequence[float]) -> Ratio:
    """The mean over chunks and its interval; NaN for the ends of a single chunk."""
    centre = mean(values)
    if len(values) < 2:
        return Ratio(centre, NAN, NAN)
    half_width = stats.mean_half_width(values)
    return Ratio(centre, centre - half_width, centre + half_width)


def positive_interval(values: Sequence[float]) -> Ratio:
    """The same for a mean above zero: an interval of its logarithm, which stays above zero."""
    centre = mean(values)
    if len(values) < 2 or centre <= 0:
        return Ratio(centre, NAN, NAN)
    factor = exp(stats.mean_half_width(values) / centre)
    return Ratio(centre, centre / factor, centre * factor)


def exp(value: float) -> float:
    return math.exp(min(value, LARGEST_EXPONENT))


def floor_of(lines: Sequence[QualityLine]) -> float | None:
    """The mean divergence of the reference from itself under other settings; None if unknown."""
    divergences = []
    for line in lines:
        if line.is_floor:
            divergences += [mean_kl(chunk) for chunk in whole_chunks(line)]
    return mean(divergences) if divergences else None


def equal_pairs(scores: Mapping[str, Sequence[Divergence]]) -> list[tuple[str, str]] | None:
    """The pairs of candidates that the divergence cannot tell apart; None for too few chunks.

    All pairs together are right with the confidence of an interval.
    """
    log_ratios = pair_log_ratios(scores)
    if log_ratios is None:
        return None
    equal = []
    for pair, log_ratio in log_ratios.items():
        if log_ratio.low <= 0 <= log_ratio.high:
            equal.append(pair)
    return equal


def undecided_pairs(
    scores: Mapping[str, Sequence[Divergence]],
) -> list[tuple[str, str]] | None:
    """The pairs that are not told apart, and may yet differ by more than SMALL_RATIO; None for too
    few chunks.
    """
    log_ratios = pair_log_ratios(scores)
    if log_ratios is None:
        return None
    undecided = []
    small = math.log(SMALL_RATIO)
    for pair, log_ratio in log_ratios.items():
        is_apart = log_ratio.low > 0 or log_ratio.high < 0
        is_small = log_ratio.low >= -small and log_ratio.high <= small
        if not is_apart and not is_small:
            undecided.append(pair)
    return undecided


def pair_log_ratios(
    scores: Mapping[str, Sequence[Divergence]],
) -> dict[tuple[str, str], Ratio] | None:
    """The logarithm of the ratio of divergences of each pair, chunk by chunk, with its interval."""
    pairs = list(itertools.combinations(scores, 2))
    ratios: dict[tuple[str, str], Ratio] = {}
    for first, second in pairs:
        log_ratios = []
        for a, b in zip(scores[first], scores[second], strict=False):
            log_ratios.append(math.log(max(mean_kl(a), LEAST_KL) / max(mean_kl(b), LEAST_KL)))
        if len(log_ratios) < FEWEST_CHUNKS:
            return None
        confidence = 1 - (1 - stats.CONFIDENCE) / len(pairs)
        centre = mean(log_ratios)
        half_width = stats.mean_half_width(log_ratios, confidence)
        ratios[first, second] = Ratio(centre, centre - half_width, centre + half_width)
    return ratios


def on_front(rows: pd.DataFrame, by_memory: bool = False) -> list[bool | None]:
    """Whether no other file is both nearer to the reference and faster in decode.

    With `by_memory` one that needs more memory does not count. None where the speed is unknown or
    disturbed.
    """
    clear = rows[rows.is_clear]
    kl = clear.kl.fillna(0.0)  # the reference
    marks: list[bool | None] = []
    for row in rows.itertuples():
        if not row.is_clear:
            marks.append(None)
            continue
        own_kl = 0.0 if row.is_reference else row.kl
        is_better = (kl < own_kl) & (clear.decode > row.decode)
        if by_memory:
            is_better &= clear.memory_bytes <= row.memory_bytes
        marks.append(not is_better.any())
    return marks


SpeedKey = tuple[str, str, str]  # the phase, and two variants


@dataclass(frozen=True)
class SpeedAt:
    """The speed of a variant against the reference, in a phase after n_prompt tokens."""

    phase: str
    reference: str
    variant: str
    n_prompt: int
    speed: Speed


def all_speeds(records: Sequence[Record]) -> dict[SpeedKey, Speed]:
    """For each phase and pair of variants, how many times as fast the second is as the first;
    after the longest prompt."""
    speeds: dict[SpeedKey, Speed] = {}
    for at_length in sorted(
        speeds_by_length(records), key=lambda at_length: at_length.n_prompt
    ):
        speeds[at_length.phase, at_length.reference, at_length.variant] = at_length.speed
    return speeds


def speeds_by_length(records: Sequence[Record]) -> list[SpeedAt]:
    """How many times as fast each variant is as the reference, for each length of the prompt; the
    reference itself has 1."""
    try:
        groups = comparison.groups(records)
    except LabError:  # no speed was measured
        return []
    reference = variant_of(groups[0])
    lengths = sorted({record.run.n_prompt for record in records})
    speeds = []
    for phase in PHASES:
        for n_prompt in lengths:
            speeds.append(SpeedAt(phase, reference, reference, n_prompt, Speed(ITSELF)))
    phases = {figure: phase for phase, figure in PHASES.items()}
    compared = comparison.compare_groups(groups)
    for group, comparison_of_group in zip(groups[1:], compared, strict=True):
        variant = variant_of(group)
        for row in comparison_of_group.rows:
            if row.figure in phases:
                speed = Speed(inverse(row), row.doubts)
                phase = phases[row.figure]
                speeds.append(SpeedAt(phase, reference, variant, row.n_prompt, speed))
    return speeds


def variant_of(group: comparison.Group) -> str:
    return str(group.rows.variant.iloc[0])


def inverse(row: comparison.ComparedFigure) -> Ratio:
    """From a ratio of times to a ratio of speeds."""
    if row.ratio is None:
        return Ratio(1 / row.estimate, NAN, NAN)
    return Ratio(1 / row.estimate, 1 / row.ratio.high, 1 / row.ratio.low)
