"""A board: results of many machines as one table in a folder of static pages, with published and predicted rates.

A row is one model in one setup. Measured, published and predicted rates differ in how much they can be trusted, so
each row says in words and by its colour which of the three it is. A measured row links to its report (page.py), which
has the curves and carries the records, and to its records as a results file. The page needs no network; its script only
sorts and filters, and the content security policy allows no other script.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lab.analysis import setup_columns, table, tuning
from lab.analysis.wording import digits
from lab.core import results, shown
from lab.core.lines import to_json
from lab.core.lists import grouped
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record
from lab.core.shown import Shown
from lab.errors import LabError
from lab.runner.machine import slug
from lab.show import page
from lab.show.section import UNKNOWN
from lab.why import prediction, published

MEASURED, PUBLISHED, PREDICTED = "measured", "published", "predicted"
KINDS = {
    MEASURED: "with this lab: medians of runs, with every time stamp",
    PUBLISHED: "by others, as their source says it",
    PREDICTED: "by lab predict, from a datasheet: nobody measured it",
}
GENERATED = 128
"""Tokens that a predicted request generates."""

NEAR = 512
"""The prompt length, in tokens, that prefill is compared at: of the measured lengths the nearest one counts."""


@dataclass(frozen=True)
class BoardRow:
    """A model on a device. Rates are in tokens per second; `at`: the tokens of the prompt that was prefilled, and those
    before the decoded ones (None: not known). `links` are file names in the board's folder by their text.
    """

    kind: str
    device: str
    model: str
    prefill: Shown | None
    decode: Shown | None
    at: tuple[int | None, int | None]
    setup: str = ""
    source: str = ""
    date: str = ""
    links: tuple[tuple[str, str], ...] = ()

    @property
    def cells(self) -> Iterator[tuple[str, float | str, str]]:
        """Text, value to sort by, and small print of each cell."""
        yield self.device, self.device, self.setup
        yield self.model, self.model, ""
        yield self.kind, self.kind, self.source
        for rate, n in zip((self.prefill, self.decode), self.at, strict=True):
            text = UNKNOWN if rate is None else f"{digits(rate.value)}{shown.mark(rate.doubts)}"
            ends = [f"{digits(rate.low)}-{digits(rate.high)}"] if rate and rate.low and rate.high else []
            yield text, rate.value if rate else -1.0, ", ".join([*ends, *([f"at {n:,}"] if rate and n else [])])
        yield self.date, self.date, ""


HEADINGS = (
    ("device", False),
    ("model", False),
    ("kind", False),
    ("prefill tokens/s", True),
    ("decode tokens/s", True),
    ("date", False),
)
"""Columns, and whether they hold numbers: these are sorted with the largest first."""


def write_board(
    folder: str | Path, records: Sequence[Record], known: Sequence[Ceilings] = (), others: Sequence[BoardRow] = ()
) -> Path:
    """Write the board of these runs into `folder`: index.html, and a report and a results file of each measured row.

    `known`: ceilings, which reports explain runs by. `others`: published and predicted rows (`other_rows`). Returns the
    index.
    LabError where no run went well or the folder cannot be written.
    """
    folder = Path(folder)
    measured = list(measured_rows(records))
    if not measured and not others:
        raise LabError("No run here went well, so there is nothing to put on a board.", "Measure one: lab measure")
    for row, own in measured:
        (_, curves), (_, data) = row.links
        page.report(folder / curves, own, known)
        results.write_whole(folder / data, "".join(to_json(record) + "\n" for record in own).encode(), "The records")
    results.write_whole(folder / "index.html", html([*(row for row, _ in measured), *others]).encode(), "The board")
    return folder / "index.html"


def html(rows: Sequence[BoardRow]) -> str:
    """The page: measured rows first, then published and predicted ones, each kind by decode rate."""
    order = {kind: number for number, kind in enumerate(KINDS)}
    return str(
        page.template("board.html.jinja").render(
            version=metadata.version("mini-lab"),
            script=page.script("board.js"),
            headings=HEADINGS,
            kinds={kind: words for kind, words in KINDS.items() if any(row.kind == kind for row in rows)},
            rows=sorted(rows, key=lambda row: (order[row.kind], -row.decode.value if row.decode else 0.0)),
            n_devices=len({row.device for row in rows}),
            n_models=len({row.model for row in rows}),
        )
    )


def measured_rows(records: Sequence[Record]) -> Iterator[tuple[BoardRow, list[Record]]]:
    """A row for each setup of plain timed runs that went well, and its records. Imported ones are published rows."""
    usual = tuning.without(records)  # not settings that lab tune tried
    plain = [one for one in usual if one.run.is_timed and one.run.lever is None and one.run.every is None]
    if not plain:
        return
    rows = table.runs(plain)
    groups = table.setups(rows)
    names = [name for name in setup_columns.differing(rows, len(groups)) if name not in ("model", "machine")]
    taken: dict[str, int] = {}
    for _, of_setup in groups:
        summary = table.summary(of_setup)
        first, own = of_setup.iloc[0], [plain[i] for i in of_setup.run]
        near = summary.loc[(summary.n_prompt / NEAR).map(lambda ratio: max(ratio, 1 / ratio)).idxmin()]
        short = summary.loc[summary.n_prompt.idxmin()]
        stem = slug(f"{first.model} {first.machine}")
        taken[stem] = taken.get(stem, 0) + 1
        stem += f"-{taken[stem]}" if taken[stem] > 1 else ""
        row = BoardRow(
            PUBLISHED if own[0].run.totals else MEASURED,
            first.machine,
            first.model,
            _rate(near, "prefill_tps"),
            _decode_rate(short),
            (int(near.n_prompt), int(short.n_prompt)),
            ", ".join(setup_columns.named(first, names)),
            date=max(of_setup.started_at)[:10],
            links=(("curves", f"{stem}.html"), ("records", f"{stem}.jsonl")),
        )
        yield row, own


def _decode_rate(row: Mapping[str, Any]) -> Shown | None:
    """Of imported runs, whose TPOT is unknown, that of decode compute."""
    compute = _rate(row, "decode_ms")
    return _rate(row, "decode_tps") or (compute and Shown(1e3 / compute.value, None, None, compute.n, compute.doubts))


def other_rows(records: Sequence[Record], known: Sequence[Ceilings]) -> list[BoardRow]:
    """What others published of the models of these records, and predictions for the devices that nobody did."""
    models = [record.model for record in records]
    of_others = list(published_rows(models))
    taken = {f"{row.device} {row.model}" for row in of_others}
    return [*of_others, *predicted_rows(records, known, taken)]


def published_rows(models: Collection[Model]) -> Iterator[BoardRow]:
    """A row for each device, backend and source that published rates of these models; marked rows are left out."""
    wanted = {(model.name, model.quantization) for model in models}
    clean = [row for row in published.rows() if not row.marks and (row.model, row.quantization) in wanted]
    by_place = grouped(clean, lambda row: (row.device, row.gpu_share, row.backend, row.source))
    for (device, share, backend, source), of_place in by_place.items():
        for (name, quantization), rows in grouped(of_place, lambda row: (row.model, row.quantization)).items():
            prefill, decode = ([row for row in rows if row.phase == phase] for phase in (PREFILL, DECODE))
            yield BoardRow(
                PUBLISHED,
                device if share == 1 else f"{device} ({share:.0%} of the GPU's cores)",
                f"{name} {quantization}",
                Shown(prefill[0].tps, None, None, 1) if prefill else None,
                Shown(decode[0].tps, None, None, 1) if decode else None,
                (prefill[0].n_prompt if prefill else None, None),
                backend,
                source,
                max(row.date for row in rows),
            )


def predicted_rows(records: Sequence[Record], known: Sequence[Ceilings], taken: Collection[str]) -> Iterator[BoardRow]:
    """A row for each model of the records on each device of the list that is not `taken` already, where it fits."""
    firsts = {(one.model.name, one.model.quantization): one for one in records if one.run.is_timed}
    for first in firsts.values():
        label = f"{first.model.name} {first.model.quantization}"
        with suppress(LabError):  # a model that the lab's arithmetic does not know
            rows = prediction.on_devices(first.model, first.settings, NEAR, GENERATED, (), records, known)
            for device, row in rows:
                if not row.misfit and f"{device.name} {label}" not in taken:
                    prefill = _from_span(row.prefill_s, NEAR)
                    yield BoardRow(PREDICTED, device.name, label, prefill, _from_span(row.tpot_s, 1), (NEAR, NEAR))


def _from_span(seconds: tuple[float, float], n_tokens: int) -> Shown | None:
    """The rate of n_tokens whose time lies in a range; its value is the middle on a logarithmic scale."""
    low, high = seconds
    return Shown(n_tokens / math.sqrt(low * high), n_tokens / high, n_tokens / low, 1) if low == low else None


def _rate(row: Mapping[str, Any], figure: str) -> Shown | None:
    found = table.shown_in(row, figure)
    return found if found.value == found.value else None
