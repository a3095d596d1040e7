"""What a smaller cache costs by depth: divergence and speed in bins of positions, and the
probability of the tokens that decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core.lists import grouped
from lab.core.stats import Ratio
from lab.features.quant import figures
from lab.features.quant.figures import FEWEST_CHUNKS, LEAST_KL, Speed
from lab.features.quant.lines import Divergence, QualityLine

if TYPE_CHECKING:
    import pandas as pd


def by_depth(lines: Sequence[object]) -> pd.DataFrame:
    """A row for each variant and bin of positions: the figures of `quant_table` there.

    `begin` and `end` are positions, `span` both in words; speeds are those after `end` tokens.
    """
    import pandas as pd

    scored = figures.candidates(lines)
    labels = labels_of(lines)
    speeds = {}
    for at_length in figures.speeds_by_length(figures.runs(lines)):
        key = (at_length.phase, at_length.variant, at_length.n_prompt)
        speeds[key] = at_length.speed
    rows = []
    for variant, line in scored.items():
        begin = 0
        for end, parts in parts_by_end(line).items():
            row: dict[str, object] = {"label": labels[variant], "begin": begin, "end": end}
            row["span"] = f"{begin:,}-{end:,}"
            row |= figures.figures_of_chunks(parts)
            for phase in figures.PHASES:
                speed = speeds.get((phase, variant, end), Speed())
                row |= figures.speed_figures(phase, speed)
            rows.append(row)
            begin = end
    return pd.DataFrame(rows)


def labels_of(lines: Sequence[object]) -> dict[str, str]:
    scored = figures.candidates(lines)
    first = next(iter(scored.values()))
    return figures.labels_of([first.reference, *scored], lines)


def parts_by_end(line: QualityLine) -> dict[int, list[Divergence]]:
    """The parts of a line's texts by the position where they end."""
    pairs = zip(line.depths, line.chunks, strict=True)
    by_end = grouped(pairs, lambda pair: pair[0])
    return {end: [part for _, part in parts] for end, parts in by_end.items()}


def growth(line: QualityLine) -> Ratio | None:
    """How many times as large the divergence is in the last bin of positions as in the first, text
    by text; None for a single bin, and for too few texts."""
    _, *rest = bins = list(parts_by_end(line).values())
    if not rest or len(bins[0]) < FEWEST_CHUNKS:
        return None
    log_ratios = []
    for shallow, deep in zip(bins[0], bins[-1], strict=True):
        low = max(figures.mean_kl(shallow), LEAST_KL)
        high = max(figures.mean_kl(deep), LEAST_KL)
        log_ratios.append(math.log(high / low))
    interval = figures.interval(log_ratios)
    return Ratio(*map(figures.exp, (interval.estimate, interval.low, interval.high)))


def deciding(lines: Sequence[object]) -> pd.DataFrame:
    """A row for each variant and kind of text with tokens that decide; empty without such texts.

    `probability`: that of such a token (a geometric mean), `reference_probability` with the
    reference. `ratio`: the first over the second, with its interval over items. `same`: the share
    of these tokens at which both find the same token most likely.
    """
    import pandas as pd

    labels = labels_of(lines)
    rows = []
    for variant, line in figures.candidates(lines).items():
        pairs = zip(line.item_texts, line.items, strict=True)
        for text, of_text in grouped(pairs, lambda pair: pair[0]).items():
            items = [item for _, item in of_text]
            row = {"label": labels[variant], "text": text, "n_items": len(items)}
            rows.append({**row, **figures_of_items(items)})
    return pd.DataFrame(rows)


def figures_of_items(items: Sequence[Divergence]) -> dict[str, float]:
    joined = figures.joined(items)
    log_ratio = figures.interval([item.reference_nll - item.nll for item in items])
    ratio = Ratio(*map(figures.exp, (log_ratio.estimate, log_ratio.low, log_ratio.high)))
    return {
        "n_tokens": len(joined.kl),
        "probability": math.exp(-joined.nll),
        "reference_probability": math.exp(-joined.reference_nll),
        "same": joined.n_same / len(joined.kl),
        **figures.with_ends("ratio", ratio),
    }
