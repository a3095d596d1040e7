"""Claims about hardware: which figure of a datasheet matters, and the speed of a 7B on a GPU that is not here.

Missing hardware is predicted from its datasheet, and the text says so. A prediction is shown with a claim, but does not
replace a measurement that the claim is about.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from lab.analysis.wording import digits
from lab.core import cost, phases, prefix_times, stats
from lab.core.lists import grouped, plural
from lab.core.record import Model, Record, Run, Settings
from lab.errors import LabError
from lab.experiments import prefix_cache
from lab.experiments.claims import claim as rules
from lab.experiments.claims.claim import ABOVE_0, Condition, Evidence, Figure, Measured, claim
from lab.experiments.claims.claim_parts import CEILINGS
from lab.experiments.claims.of_limits import TEXTBOOK
from lab.models import catalog, shapes
from lab.runner import machine
from lab.why import datasheet, prediction, probing, roofline, where

A100, H100 = "a100-80gb", "h100"
FEWEST_MACHINES = 4
GBIT = 10
"""The network over which a cache is moved, in Gbit/s."""


def _seven(evidence: Evidence) -> tuple[Model, Settings]:
    """The 7B of the textbooks in F16, with default types and batch sizes."""
    model = shapes.model_of(catalog.find(TEXTBOOK), "F16")
    settings = evidence.of("lengths")[0].settings
    return model, dataclasses.replace(settings, type_k="f16", type_v="f16", n_batch=2048, n_ubatch=512)


@claim(
    22,
    "A request of 1,000 + 200 tokens to a 7B is 10 % prefill, one of 100,000 + 200 is 80 %",
    Condition("Prefill's share of 1,000 + 200 tokens (Llama 2 7B in F16 on an A100 with 80 GB)", 0, 20, "%"),
    Condition("Prefill's share of 100,000 + 200 tokens", 70, 90, "%"),
    needs=("lengths",),
    note="Both are predicted from the datasheet and the share of it that llama.cpp reaches. The share of 1,000 + 200 "
    "measured here is shown, but for another model.",
    ignores_disturbances=True,
)
def share_of_prefill(evidence: Evidence) -> Measured:
    """Prefill's share of a short and a long request to a 7B on an A100, predicted, and of one measured here."""
    model, settings = _seven(evidence)
    predicted = []
    for n_prompt in (1_000, 100_000):
        run = prediction.elsewhere(model, settings, datasheet.find_device(A100), n_prompt, 200)
        decode_s = [199 * tpot for tpot in run.tpot_s]
        low, high = (100 * p / (p + d) for p, d in zip(run.prefill_s, reversed(decode_s), strict=True))
        predicted.append(Figure(f"predicted for {n_prompt:,} + 200 on an A100", (low + high) / 2, "%", low, high))
    here = rules.each(dict([evidence.near(1000)]), "measured here, {:,} + 200", _share, "%", 100)
    remark = f"Predicted for {model.name} in F16 from a datasheet, also beyond its {model.n_ctx_train or 0:,} tokens; "
    remark += "the measurement is of another model on this machine."
    return Measured([[known] for known in predicted], [*predicted, *here], remark)


def _share(run: Run) -> float | None:
    """Prefill of a request that generates 200 tokens at the rate of the run."""
    prefill, tpot = phases.prefill_ns(run), phases.tpot_ns(run)
    return prefill / (prefill + 199 * tpot) if prefill and tpot else None


@claim(
    23,
    "A 7B in F16 on an A100: at most 145 tokens/s, seen 100 to 130; on an H100 50 to 100",
    Condition("The limit on an A100 (bandwidth over the bytes of a step)", 0.9 * 145, 1.1 * 145, "tokens/s"),
    Condition("The rate measured on an A100", 100, 130, "tokens/s"),
    Condition("The rate measured on an H100", 50, 100, "tokens/s"),
    needs=("lengths",),
    note="For Llama 2 7B in F16. On other machines the predicted rates are shown, but do not count as evidence.",
    ignores_disturbances=True,
)
def seven_on_gpus(evidence: Evidence) -> Measured:
    """Rates of a 7B on two GPUs: the limit, the prediction, and the measurement if there is such a GPU."""
    model, settings = _seven(evidence)
    limits: list[Figure] = []
    rates: list[Figure | None] = []
    expected: list[Figure] = []
    for name in (A100, H100):
        device = datasheet.find_device(name)
        run = prediction.elsewhere(model, settings, device, 1, 2)
        limits.append(Figure(f"limit on {device.about}", 1 / run.tpot_limit_s, "tokens/s"))
        slow, fast = (1 / tpot for tpot in reversed(run.tpot_s))
        expected.append(Figure(f"predicted for {device.about}", (slow + fast) / 2, "tokens/s", slow, fast))
        seen = [_rate(r.run) for r in (*evidence.records, *evidence.others) if _is_seven_on(r, name)]
        rates.append(rules.figure(f"measured on {device.about}", seen, "tokens/s"))
    pairs = zip(expected, rates, strict=True)
    unseen = [f"{known.words}; there is no such GPU here." for known, rate in pairs if rate is None]
    remark = f"For {model.name}; predictions use the share of a datasheet's bandwidth that published runs reached."
    shown = [limits[0], expected[0], rates[0], expected[1], rates[1]]
    return Measured((limits[:1], rates[:1], rates[1:]), shown, " ".join([*unseen, remark]))


def _rate(run: Run) -> float | None:
    """The decode rate of a plain run; None for others."""
    is_plain = run.is_timed and run.lever is None and run.every is None and run.n_gen > 1
    return rules.decode_tps(run) if is_plain else None


def _is_seven_on(record: Record, name: str) -> bool:
    device, model = device_of(record), record.model
    is_seven = model.quantization == "F16" and 6e9 < (model.n_params or 0) < 8e9
    return is_seven and device is not None and device.name == name


def device_of(record: Record) -> datasheet.Device | None:
    """The device of models/devices.toml that a run was made on; None on a CPU, and if none fits for sure."""
    offload = machine.accelerators(record.machine.devices)
    if not record.settings.n_gpu_layers or not offload:
        return None
    return datasheet.recognise(offload[0].description, offload[0].memory_bytes)


@claim(
    27,
    "Bandwidth predicts the token rate better than peak compute does",
    Condition("The rank correlation (Kendall) of decode rates with bandwidth, minus that with FLOP/s,", ABOVE_0),
    needs=("lengths",),
    note="For one model on at least 4 machines with known bandwidth and peak (ceilings, or a GPU's datasheet). It must "
    "also hold without any one of them. On 64 published devices with Llama 2 7B Q4_0 (models/published.csv) the rank "
    "correlation is 0.75 with bandwidth and 0.61 with the peak.",
    ignores_disturbances=True,
)
def order_of_machines(evidence: Evidence) -> Measured:
    usual = {setting_of(record) for record in evidence.of("lengths")}
    rated = [
        record
        for record in (*evidence.of("lengths"), *evidence.others)
        if record.run.variant is None and setting_of(record) in usual and _rate(record.run) and _roof(record, evidence)
    ]
    by_model = grouped(rated, lambda record: (record.model.name, record.model.quantization, record.run.n_prompt))
    of_models = [grouped(own, lambda one: machine.label(one.machine, one.settings)) for own in by_model.values()]
    machines = max(of_models, key=len, default={})
    n = len(machines)
    if n < FEWEST_MACHINES:
        raise LabError(
            f"Rates of one model and both roofs are known for {plural(n, 'machine')}; {FEWEST_MACHINES} are needed.",
            "Add results of other machines with their ceilings: lab ceilings",
        )
    points = []
    for own in machines.values():
        best = _roof(own[0], evidence)
        assert best is not None
        points.append((statistics.median(_rate(record.run) or 0.0 for record in own), best.gbps, best.gflops))
    names = "rank correlation with bandwidth", "rank correlation with peak FLOP/s"
    figures = [Figure(name, tau, n=n) for name, tau in zip(names, _taus(points), strict=True) if tau is not None]
    differences = [_difference(points), *(_difference([*points[:i], *points[i + 1 :]]) for i in range(n))]
    most = max(differences) or ABOVE_0  # an equally good order refutes nothing
    better = Figure(
        "rank correlation with bandwidth minus that with peak FLOP/s", differences[0], "", min(differences), most
    )
    first = next(iter(machines.values()))[0]
    after = f"{first.model.name} {first.model.quantization or ''} after {first.run.n_prompt:,} tokens"
    return Measured(([better],), figures, f"{after} on {', '.join(machines)}.")


def setting_of(record: Record) -> tuple[object, ...]:
    """The settings that must be equal to compare rates of two machines; threads may differ."""
    settings = record.settings
    return settings.flash_attn, settings.type_k, settings.type_v, record.run.part or "lengths"


def _roof(record: Record, evidence: Evidence) -> roofline.Roof | None:
    """Bandwidth and peak of a record's machine, from a GPU's datasheet or from ceilings."""
    device = device_of(record)
    if device is not None and device.tflops:
        return roofline.Roof(1e3 * device.tflops, device.gbps)
    best = probing.known([*probing.lines(evidence.ceilings), *evidence.other_ceilings], where.of_record(record))
    return rules.roof(best)


def _taus(points: Sequence[tuple[float, float, float]]) -> tuple[float | None, float | None]:
    rates, gbps, gflops = zip(*points, strict=True)
    return stats.rank_correlation(gbps, rates), stats.rank_correlation(gflops, rates)


def _difference(points: Sequence[tuple[float, float, float]]) -> float:
    by_bandwidth, by_peak = _taus(points)
    return (by_bandwidth or 0.0) - (by_peak or 0.0)


@claim(
    28,
    "The phases want different hardware, and moving the cache costs",
    Condition("The machine's ridge over the intensity of a decode step", 1),
    Condition("The intensity of a full prefill step over the ridge", 1),
    Condition(f"The time to move a prefix over {GBIT} Gbit/s, as a share of its prefill,", 10, unit="%"),
    needs=("prefix",),
    note="Moving means saving, sending and restoring the longest measured prefix. The lengths from which moving pays "
    "are shown.",
    also=(CEILINGS,),
    source="Splitwise (2023), DistServe (2024)",
)
def cost_of_moving(evidence: Evidence) -> Measured:
    """The intensity of both phases relative to the ridge, and the time to move a cache relative to its prefill."""
    lengths = evidence.by(lambda record: record.run.prefix.n_prefix if record.run.prefix else None, "prefix")
    longest = max(lengths, default=0)
    shares = [_moving(record) for record in lengths.get(longest, [])]
    known = rules.figure(f"moving {longest:,} tokens over {GBIT} Gbit/s, share of their prefill", shares, "%", 100)
    rows = prefix_cache.rows(evidence.of("prefix"))
    pays = [
        Figure(f"restoring from {one.name} pays from", one.n_tokens, "tokens")
        for one in (prefix_cache.break_even(rows) if rows else [])
        if one.n_tokens is not None
    ]
    return Measured((*_beside_the_ridge(evidence.of("prefix")[0], evidence), [known]), [known, *pays])


def _moving(record: Record) -> float | None:
    """Saving, sending and loading a prefix, as a share of the time of its prefill."""
    run = record.run
    taken = prefix_times.times(run, phases.times_prefill_steps(record.settings))
    if not taken or taken["prefix_s"] <= 0 or not run.state_bytes:
        return None
    return (taken["save_ram_s"] + 8 * run.state_bytes[0] / (GBIT * 1e9) + taken["load_ram_s"]) / taken["prefix_s"]


def _beside_the_ridge(record: Record, evidence: Evidence) -> tuple[list[Figure], list[Figure]]:
    """The ridge over the intensity of a decode step, and the intensity of a full prefill step over the ridge.

    Empty without ceilings, and for an unknown shape.
    """
    best, settings = rules.roof(evidence.ceilings), record.settings
    types = settings.type_k, settings.type_v
    one = cost.step(record.model, 1, record.run.n_prompt, 1, *types)
    many = cost.step(record.model, settings.n_ubatch, 0, 0, *types)
    if best is None or one is None or many is None:
        return [], []
    ridge, low, high = (f"{digits(value)} FLOPs per byte" for value in (best.ridge, one.intensity, many.intensity))
    return (
        [Figure(f"the ridge ({ridge}) over decode ({low})", best.ridge / one.intensity, "times")],
        [Figure(f"prefill ({high}) over the ridge ({ridge})", many.intensity / best.ridge, "times")],
    )


CLAIMS = (share_of_prefill, seven_on_gpus, order_of_machines, cost_of_moving)
