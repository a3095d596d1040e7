"""The two figures that are compared: read from files and texts, or measured here."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.core.asked_settings import table as settings_table
from lab.core.record import UNKNOWN_THREADS, Record
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.features.compare import comparison, spread
from lab.features.running import read, without_tuning
from lab.features.serve import access
from lab.features.why import pasted, served
from lab.features.why.parts import spec_of
from lab.features.why.pasted import DECODE, PREFILL, Setup
from lab.features.why.trial import limited, start
from lab.process.worker import Worker
from lab.runner import session
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus
from lab.show import request_table, table
from lab.show.wording import seconds

FIGURES = {DECODE: ("tpot_ms", "decode_ms"), PREFILL: ("prefill_s", "ttft_s")}
"""Columns of a figure; the second where no run has the first."""

HERE_REPEATS, HERE_GEN = 8, 64


@dataclasses.dataclass(frozen=True)
class Given:
    """The figures of one argument by setup, and its records."""

    groups: list[list[Setup]]
    records: Sequence[Record] = ()


def given(name: str) -> Given:
    """The figures of a file, a folder, stdin or of words."""
    path, is_of_lab = Path(name), False
    if len(name) < 4000 and path.is_file():
        with path.open("rb") as file:
            begin = file.read(1000)
        is_of_lab = begin.lstrip()[:1] == b"{" and (b'"session":' in begin or b'"machine":' in begin)
    if is_of_lab or path.suffix == ".html" or (len(name) < 4000 and path.is_dir()):
        return of_records(name)
    found = pasted.read(name)
    most = max(([one for one in found if one.is_prefill == is_prefill] for is_prefill in (False, True)), key=len)
    return Given([found] if len(most) < 2 else [[one] for one in most])


def of_records(name: str) -> Given:
    """The figures of a results file by setup, or by session if all are of one setup."""
    reading = without_tuning(read((name,)))
    measured = reading.measured
    rows = comparison.sessions_apart(request_table.measured(table.runs(measured)))
    rows = rows[rows.lever.isna()]
    if rows.empty:
        raise LabError(f"{name} has no plain run that succeeded.", "Measure some: lab measure")
    known, setups, groups = spread.known_spreads(measured), table.setups(rows), list[list[Setup]]()
    for label, part in setups:
        groups.append([])
        for _, repeats in part.groupby(["n_prompt", "n_gen"]):
            own = [measured[i] for i in dict.fromkeys(repeats.run)]
            for counts, names in FIGURES.items():
                figure = next((name for name in names if name in repeats and (repeats[name] > 0).any()), None)
                if figure is not None:
                    between = known.get((spread.machine_of(repeats), names[0])) or spread.default(repeats.iloc[0])
                    about = label if len(setups) > 1 else ""
                    groups[-1].append(_of_rows(repeats, figure, counts, own, between, about))
    return Given([group for group in groups if group], list(reading.records))


def _of_rows(
    rows: Any, figure: str, counts: str, own: Sequence[Record | RequestRecord], between: spread.Spread, about: str
) -> Setup:
    """The figure of repeats, rows of `lab.runs`."""
    first, values = rows.iloc[0], [value for value in rows[figure] if value > 0]
    logs, n_prompt = [math.log(value) for value in values], int(first.n_prompt)
    runs = tuple(one for one in own if isinstance(one, Record))
    requests = tuple(one for one in own if isinstance(one, RequestRecord))
    compute = [value for value in rows.decode_ms if value > 0] if "decode_ms" in rows and counts == DECODE else []
    server = requests[0].endpoint.settings if requests else None
    return Setup(
        source="lab" if runs else "server",
        tps=n_prompt / statistics.median(values) if counts == PREFILL else 1e3 / statistics.median(values),
        counts=counts,
        n_prompt=n_prompt,
        n_gen=int(first.n_gen),
        n_depth=0,
        prefill_s=float(rows.prefill_s.median()) if (rows.prefill_s > 0).any() else None,
        model=(server and server.model_file) or str(first.model),
        quantization=runs[0].model.quantization if runs else server.quantization if server else None,
        settings=settings_of(runs[0]) if runs else {},
        spread=math.sqrt(math.pi / 2) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None,
        between=between.sd,
        between_source=between.source,
        compute_tps=1e3 / statistics.median(compute) if compute else None,
        records=runs,
        requests=requests,
        about=about,
    )


def settings_of(record: Record) -> dict[str, Any]:
    """The settings of a record as keywords of AskedSettings, with resolved values."""
    settings = record.settings
    chosen = {name: getattr(settings, setting.record_name or name) for name, setting in settings_table().items()}
    chosen["flash_attn"] = settings.flash_attn_resolved or settings.flash_attn
    chosen["kv_unified"] = "on" if settings.kv_unified else "off"
    if UNKNOWN_THREADS in (settings.n_threads, settings.n_threads_batch):
        chosen |= {"threads": None, "threads_batch": None}
    return {name: value for name, value in chosen.items() if value is not None and name not in ("prompt", "seed")}


def here(a: Setup, model: str | None, budget_s: float, out: Path, watch: ShowStatus) -> Given:
    """A's setup measured on this machine, until the budget is spent. LabError without a model or a run in that time."""
    spec = model or spec_of(a)
    if spec is None:
        raise LabError(
            f"{a.label}: its model is not known.", "To measure it here: --model SPEC. Or give a second figure."
        )
    asked: dict[str, Any] = {**start(a, a), "gen": max(2, min(a.n_gen or HERE_GEN, HERE_GEN)), "repeat": HERE_REPEATS}
    n_done, path = 0, None
    with limited(watch, budget_s) as look, Worker() as worker:
        plan = make_plan(worker, [asked.pop("prompt_len")], model=spec, **asked)
        path = session.new_results_file(plan, out)
        for record in session.execute(plan, worker, path, look):
            n_done += record.run.is_timed
    if path is None or not n_done:
        raise LabError(f"No run of {spec} ended within {seconds(budget_s)}.", "Give more time: --budget 5min")
    return of_records(str(path))


def of_server(a: Setup, url: str, model: str | None, budget_s: float, out: Path, watch: ShowStatus, how: Any) -> Given:
    """A server, measured here with requests like A."""
    path, trip_s = served.measured(a, url, model, budget_s, out, watch, **how)
    found = of_records(str(path))
    device = "here" if access.is_loopback(access.access(url)) else None
    groups = [[dataclasses.replace(one, round_trip_s=trip_s, device=device) for one in group] for group in found.groups]
    return Given(groups, found.records)


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
