"""The figures of a session of `lab quant`: divergences over chunks, ratios of times over blocks, and the front.

Chunks are the replicates of quality: tokens of one chunk are correlated. Two candidates saw the same chunks, so they
are compared by the differences chunk by chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from lab.core import cost, shown, stats
from lab.core.lists import grouped
from lab.core.payloads import Divergence, Quality
from lab.core.record import Ceilings, Model, Record
from lab.errors import LabError
from lab.features.compare import comparison
from lab.features.limits import probing, step_kernels

if TYPE_CHECKING:
    import pandas as pd

PHASES = {"decode": "tpot_ms", "prefill": "prefill_s"}
NAN = float("nan")
UNKNOWN: tuple[tuple[float, float, float], tuple[str, ...]] = (NAN, NAN, NAN), ()
"""A ratio with its ends, and its doubts."""


@dataclass(frozen=True)
class Found:
    """What a session found. `rows` has a row for each file or cache type, the reference first.

    `kinds` has a row for each of them and each kind of text. `floor` is the mean divergence of the reference from
    itself under other settings. `equal` are the pairs that the divergence cannot tell apart.
    """

    rows: pd.DataFrame
    kinds: pd.DataFrame
    floor: float | None
    equal: list[tuple[str, str]]
    n_chunks: int
    n_positions: int


def of_sessions(records: Sequence[Record], ceilings: Sequence[Ceilings] = ()) -> list[tuple[list[Record], Found]]:
    """Each session with quality, and what it found."""
    sessions = grouped(records, lambda record: record.session).values()
    return [(own, found(own, ceilings)) for own in sessions if any(candidates(own))]


def candidates(records: Sequence[Record]) -> Iterator[tuple[Record, Quality]]:
    """The records with what was found of candidates."""
    for record in records:
        if (quality := record.run.quality) and not quality.is_floor:
            yield record, quality


def quant_table(records: Sequence[Record]) -> pd.DataFrame:
    """One row for each file or cache type that `quant` compared, the reference first.

        lab.quant_table(records)[["label", "kl", "same", "decode", "on_front"]]

    `kl`: mean divergence in nats, `same`: share of positions with the same most likely token, both with their 95 %
    intervals (`_low`, `_high`). `decode`, `prefill`: how many times as fast as the reference. LabError for records that
    hold no quality.
    """
    import pandas as pd

    tables = [one.rows.assign(session=own[0].session) for own, one in of_sessions(records)]
    if not tables:
        raise LabError("These records hold no quality.", "Measure it: lab quant")
    return pd.concat(tables, ignore_index=True)


def known_quality(records: Sequence[Record], model: Model) -> pd.DataFrame:
    """What sessions of `lab quant` found for a model's file: a row for each session and pair of cache types.

    Columns: `reference`, `type_k`, `type_v`, and `kl`, `same`, `perplexity_ratio` with their ends. Empty if no session
    has the file among its candidates. The figures do not depend on the machine.
    """
    import pandas as pd

    def is_same(other: Model) -> bool:
        if model.sha256 and other.sha256:
            return model.sha256 == other.sha256
        return (model.name, model.quantization) == (other.name, other.quantization)

    return pd.DataFrame(
        {
            "reference": quality.reference.partition(": ")[2],
            "type_k": record.settings.type_k,
            "type_v": record.settings.type_v,
            **_of_chunks(quality.chunks),
        }
        for record, quality in candidates(records)
        if is_same(record.model)
    )


def found(records: Sequence[Record], ceilings: Sequence[Ceilings] = ()) -> Found:
    """The figures of one session."""
    import pandas as pd

    qualities = {record.run.variant or "": quality for record, quality in candidates(records)}
    floors = [record.run.quality for record in records if record.run.quality and record.run.quality.is_floor]
    first = next(iter(qualities.values()))
    timed = [one for one in records if one.run.is_timed]
    of_floor = [(first.reference, one) for one in records if one.run.quality and one.run.quality.is_floor]
    of_variant = dict(of_floor)
    of_variant |= {one.run.variant or "": one for one in (*(record for record, _ in candidates(records)), *timed)}
    variants = [first.reference, *qualities]
    labels = _labels({name: of_variant[name] for name in variants if name in of_variant}, variants)
    ratios = _ratios(timed)
    floor = mean([one for quality in floors for one in quality.chunks], divergence)[0] if floors else None
    rows, kinds = list[dict[str, Any]](), list[dict[str, Any]]()
    for name in variants:
        quality = qualities.get(name)
        row = {"label": labels[name], "variant": name, "is_reference": quality is None}
        row |= _of_chunks(quality.chunks) if quality else {"perplexity": _perplexity(first.chunks, "reference_nll")}
        for phase in PHASES:
            ratio, row[f"{phase}_doubts"] = ratios.get((phase, first.reference, name), UNKNOWN)
            row |= dict(zip((phase, f"{phase}_low", f"{phase}_high"), ratio, strict=True))
        rows.append(row | _of_file(of_variant.get(name), ceilings))
        by_kind = grouped(zip(quality.texts, quality.chunks, strict=True), itemgetter(0)) if quality else {}
        for kind, own in by_kind.items():
            kinds.append({"label": labels[name], "text": kind, **_of_chunks([chunk for _, chunk in own])})
    table = pd.DataFrame(rows)
    table["bandwidth"] = table.bytes_per_token.iloc[0] / table.bytes_per_token
    pairs = list(itertools.combinations(qualities, 2))
    apart = {(one, other): _difference(qualities[one], qualities[other], len(pairs)) for one, other in pairs}
    equal = [(labels[a], labels[b]) for (a, b), sign in apart.items() if not sign]

    def beats(one: str, other: str) -> bool:
        """Whether `one` is better in quality and speed than `other`, both beyond their intervals."""
        if other == first.reference:
            return False
        closer = one == first.reference or apart.get((one, other), 0) < 0 or apart.get((other, one), 0) > 0
        (_, low, _), doubts = ratios.get(("decode", other, one), UNKNOWN)
        return closer and low > 1 and shown.DISTURBED not in doubts

    table["on_front"] = [not any(beats(one, name) for one in variants if one != name) for name in variants]
    n_positions = sum(len(one.kl) for one in first.chunks)
    return Found(table, pd.DataFrame(kinds), floor, equal, len(first.chunks), n_positions)


def _labels(records: dict[str, Record], variants: Sequence[str]) -> dict[str, str]:
    """The shortest names that differ: quantizations, cache types, files; else the variants' own."""
    of = [
        [f"{one.settings.type_k} cache" for one in records.values()],
        [one.model.quantization or "" for one in records.values()],
        [one.model.file.rpartition("/")[2] for one in records.values()],
    ]
    for names in of:
        if len(records) == len(variants) == len(set(names)) and all(names):
            return dict(zip(records, names, strict=True))
    return {name: name.partition(": ")[2] or name for name in variants}


def divergence(chunk: Divergence) -> float:
    return math.fsum(chunk.kl) / len(chunk.kl)


def mean(chunks: Sequence[Divergence], figure: Any) -> tuple[float, float, float]:
    """The mean over chunks and its interval, NaN for a single chunk."""
    values = [figure(chunk) for chunk in chunks]
    centre = math.fsum(values) / len(values)
    half = stats.mean_half_width(values, stats.CONFIDENCE) if len(values) > 1 else NAN
    return centre, centre - half, centre + half


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # a larger one would overflow


def _perplexity(chunks: Sequence[Divergence], name: str) -> float:
    return _exp(math.fsum(getattr(chunk, name) for chunk in chunks) / len(chunks))


def _of_chunks(chunks: Sequence[Divergence]) -> dict[str, Any]:
    import numpy as np

    kl = np.concatenate([chunk.kl for chunk in chunks])
    row: dict[str, Any] = {"n_chunks": len(chunks), "kl_99": float(np.quantile(kl, 0.99)), "kl_max": float(kl.max())}
    for name, figure in (("kl", divergence), ("same", lambda chunk: chunk.n_same / len(chunk.kl))):
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), mean(chunks, figure), strict=True))
    ratio = map(_exp, mean(chunks, lambda chunk: chunk.nll - chunk.reference_nll))
    row |= dict(zip(("perplexity_ratio", "perplexity_ratio_low", "perplexity_ratio_high"), ratio, strict=True))
    most = [NAN if chunk.most is None else chunk.most for chunk in chunks]
    return row | {"perplexity": _perplexity(chunks, "nll"), "kl_most": math.fsum(most) / len(most)}


def _difference(one: Quality, other: Quality, n_pairs: int) -> int:
    """-1 if the first diverges less, 1 if more, 0 if that is open; all pairs hold together with 95 %.

    By ratios chunk by chunk: on a difficult chunk every candidate diverges more.
    """
    logs = [[math.log(max(divergence(chunk), 1e-12)) for chunk in each.chunks] for each in (one, other)]
    values = [a - b for a, b in zip(*logs, strict=False)]
    mean = math.fsum(values) / len(values)
    half = stats.mean_half_width(values, 1 - (1 - stats.CONFIDENCE) / n_pairs) if len(values) > 1 else math.inf
    return 0 if abs(mean) <= half else 1 if mean > 0 else -1


def _ratios(records: Sequence[Record]) -> dict[tuple[str, str, str], Any]:
    """For each phase and pair of variants how many times as fast the second is: estimate, low and high; doubts."""
    try:
        groups = comparison.groups(records)
    except LabError:  # no speed was measured
        return {}
    made: dict[tuple[str, str, str], Any] = {}
    for base in groups:
        others = [one for one in groups if one is not base]
        name = str(base.rows.variant.iloc[0])
        made |= {(phase, name, name): ((1.0, 1.0, 1.0), ()) for phase in PHASES}
        for group, compared in zip(others, comparison.compare_groups([base, *others]), strict=True):
            for row in compared.rows:
                if phase := next((phase for phase, figure in PHASES.items() if figure == row.figure), None):
                    ends = (1 / row.ratio.high, 1 / row.ratio.low) if row.ratio else (NAN, NAN)
                    made[phase, name, str(group.rows.variant.iloc[0])] = (1 / row.estimate, *ends), row.doubts
    return made


def _of_file(record: Record | None, ceilings: Sequence[Ceilings]) -> dict[str, Any]:
    """Size, memory, bytes that a decode step reads, and the decode rate that bandwidth would allow."""
    row: dict[str, Any] = dict.fromkeys(("n_bytes", "memory_bytes", "bytes_per_token", "ceiling_tps"), NAN)
    if record is None:
        return row
    model, settings = record.model, record.settings
    row["n_bytes"] = float(model.n_bytes or NAN)
    if placed := record.run.placement:
        row["memory_bytes"] = float(sum(buffer.n_bytes for buffer in placed.buffers))
    n_past = record.run.n_prompt + record.run.n_gen // 2
    if step := cost.step(model, 1, n_past, 1, settings.type_k, settings.type_v):
        best = probing.known(ceilings, probing.place_of_record(record))
        row["bytes_per_token"] = step.n_bytes
        row["ceiling_tps"] = 1e9 * step_kernels.roof(best).gbps / step.n_bytes if best else NAN
    return row
