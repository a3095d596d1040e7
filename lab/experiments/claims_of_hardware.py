"""Claims about hardware: which figure of a datasheet decides, and what a 7B does on a GPU that is not here.

What nobody here has is predicted from its datasheet, and the words say so. A prediction can contradict a claim, but it
does not stand in for a measurement that the claim is about.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from lab.analysis.wording import digits
from lab.core import cost, phases, prefix_times
from lab.core.record import OK, Model, Record, Run, Settings
from lab.experiments import claim_rules as rules
from lab.experiments import prefix_cache
from lab.experiments.claim import UNTESTABLE, Evidence, Figure, Judgement
from lab.experiments.claim_parts import CEILINGS
from lab.experiments.claim_rules import Condition, claim
from lab.experiments.claims_of_memory import TEXTBOOK
from lab.models import catalog, shapes
from lab.runner import machine
from lab.why import datasheet, prediction, probing, roofline, where

A100, H100 = "a100-80gb", "h100"
FEWEST_MACHINES = 4
GBIT = 10
"""The line between two machines that a cache is moved over, in Gbit/s."""


def _seven(evidence: Evidence) -> tuple[Model, Settings]:
    """The 7B of the textbooks in F16, and settings that say nothing of its own."""
    model = shapes.model_of(catalog.find(TEXTBOOK), "F16")
    settings = evidence.of("lengths")[0].settings
    return model, dataclasses.replace(settings, type_k="f16", type_v="f16", n_batch=2048, n_ubatch=512)


def share_of_prefill(evidence: Evidence) -> Judgement:
    """Claim 22."""
    model, settings = _seven(evidence)
    conditions, figures = [], []
    for n_prompt, least, most in ((1_000, 0, 20), (100_000, 70, 90)):
        run = prediction.elsewhere(model, settings, datasheet.find_device(A100), n_prompt, 200)
        decode_s = [199 * tpot for tpot in run.tpot_s]
        low, high = (100 * p / (p + d) for p, d in zip(run.prefill_s, reversed(decode_s), strict=True))
        known = Figure(f"predicted for {n_prompt:,} + 200 on an A100", (low + high) / 2, "%", low, high)
        figures.append(known)
        words = f"of {n_prompt:,} + 200 tokens prefill takes {(least + most) // 2} % within 10 points"
        conditions.append(rules.between(words, known, least, most))
    lengths = rules.by_length(evidence.of("lengths"))
    n = rules.nearest(lengths, 1000) or 0
    here = rules.figure(f"measured here, {n:,} + 200", [_share(r.run) for r in lengths.get(n, [])], "%", 100)
    remark = f"Predicted for {model.name} in F16 from a datasheet, also beyond its {model.n_ctx_train or 0:,} tokens; "
    remark += "what was measured is another model on this machine."
    return rules.decided(conditions, [*figures, here], remark)


def _share(run: Run) -> float | None:
    """Prefill of a request that generates 200 tokens at the rate of the run."""
    prefill, tpot = phases.prefill_ns(run), phases.tpot_ns(run)
    return prefill / (prefill + 199 * tpot) if prefill and tpot else None


def seven_on_gpus(evidence: Evidence) -> Judgement:
    """Claim 23."""
    model, settings = _seven(evidence)
    conditions: list[Condition] = []
    figures: list[Figure | None] = []
    for name, least, most in ((A100, 100, 130), (H100, 50, 100)):
        device = datasheet.find_device(name)
        run = prediction.elsewhere(model, settings, device, 1, 2)
        if name == A100:
            limit = Figure(f"limit on {device.about}", 1 / run.tpot_limit_s, "tokens/s")
            figures.append(limit)
            conditions.append(rules.between("the limit on an A100 is 145 tokens/s within 10 %", limit, 130.5, 159.5))
        words = f"on {device.about} {least} to {most} tokens/s are seen"
        rates = [_rate(r.run) for r in (*evidence.records, *evidence.others) if _is_seven_on(r, name)]
        measured = rules.figure(f"measured on {device.about}", rates, "tokens/s")
        slow, fast = (1 / tpot for tpot in reversed(run.tpot_s))
        expected = Figure(f"predicted for {device.about}", (slow + fast) / 2, "tokens/s", slow, fast)
        figures += [expected, measured]
        if measured is not None:
            conditions.append(rules.between(words, measured, least, most))
        else:
            fits = ", which contradicts it" if fast < least or slow > most else ""
            words += f" (predicted {slow:,.0f} to {fast:,.0f}{fits}; there is no such GPU here)"
            conditions.append(Condition(words, None, is_missing=True))
    remark = f"For {model.name}; predictions take the part of a datasheet's bandwidth that published runs reached."
    return rules.decided(conditions, figures, remark)


def _rate(run: Run) -> float | None:
    tpot = phases.tpot_ns(run) if _is_plain(run) else None
    return 1e9 / tpot if tpot else None


def _is_plain(run: Run) -> bool:
    return run.status == OK and not run.warmup and run.lever is None and run.every is None and run.n_gen > 1


def _is_seven_on(record: Record, name: str) -> bool:
    device, model = device_of(record), record.model
    is_seven = model.quantization == "F16" and 6e9 < (model.n_params or 0) < 8e9
    return is_seven and device is not None and device.name == name


def device_of(record: Record) -> datasheet.Device | None:
    """The device of models/devices.toml that a run was made on; None on a CPU, and where none fits for sure."""
    offload = machine.accelerators(record.machine.devices)
    if not record.settings.n_gpu_layers or not offload:
        return None
    return datasheet.recognise(offload[0].description, offload[0].memory_bytes)


def bandwidth_predicts_better(evidence: Evidence) -> Judgement:
    """Claim 27."""
    rates: dict[tuple[object, ...], dict[str, list[tuple[Record, float]]]] = {}
    usual = {setting_of(record) for record in evidence.of("lengths")}
    for record in (*evidence.of("lengths"), *evidence.others):
        rate = _rate(record.run) if record.run.variant is None and setting_of(record) in usual else None
        if rate is not None and _roof(record, evidence) is not None:
            key = record.model.name, record.model.quantization, record.run.n_prompt
            label = machine.label(record.machine, record.settings)
            rates.setdefault(key, {}).setdefault(label, []).append((record, rate))
    best = max(rates, key=lambda key: len(rates[key]), default=None)
    n = 0 if best is None else len(rates[best])
    if best is None or n < FEWEST_MACHINES:
        words = f"Of {n} machine{'s' * (n != 1)} a rate of one model and both roofs are known; {FEWEST_MACHINES} are "
        return Judgement(UNTESTABLE, words + "needed. Add results of others, with their ceilings: lab ceilings")
    points = []
    for runs in rates[best].values():
        roof = _roof(runs[0][0], evidence)
        assert roof is not None
        points.append((statistics.median(rate for _, rate in runs), roof.gbps, roof.gflops))
    taus = _taus(points)
    names = "rank correlation with bandwidth", "rank correlation with peak FLOP/s"
    figures = [Figure(name, tau, n=n) for name, tau in zip(names, taus, strict=True) if tau is not None]
    differences = [_difference(points)]
    differences += [_difference([*points[:i], *points[i + 1 :]]) for i in range(n)]
    holds = True if min(differences) > 0 else False if max(differences) < 0 else None
    words = f"over {n} machines bandwidth orders the rates better, also with any one of them left out"
    remark = f"{best[0]} {best[1] or ''} after {best[2]:,} tokens on {', '.join(rates[best])}."
    return rules.decided([Condition(words, holds)], figures, remark)


def setting_of(record: Record) -> tuple[object, ...]:
    """What must be equal for rates of two machines to be compared; threads are the machine's own matter."""
    settings = record.settings
    return settings.flash_attn, settings.type_k, settings.type_v, record.run.part or "lengths"


def _roof(record: Record, evidence: Evidence) -> roofline.Roof | None:
    """Bandwidth and peak of the machine of a record: of a GPU its datasheet's, else its ceilings'."""
    device = device_of(record)
    if device is not None and device.tflops:
        return roofline.Roof(1e3 * device.tflops, device.gbps)
    best = probing.known([*probing.lines(evidence.ceilings), *evidence.other_ceilings], where.of_record(record))
    return rules.roof(best)


def _taus(points: Sequence[tuple[float, float, float]]) -> tuple[float | None, float | None]:
    from lab.core import stats

    rates, gbps, gflops = zip(*points, strict=True)
    return stats.rank_correlation(gbps, rates), stats.rank_correlation(gflops, rates)


def _difference(points: Sequence[tuple[float, float, float]]) -> float:
    by_bandwidth, by_peak = _taus(points)
    return (by_bandwidth or 0.0) - (by_peak or 0.0)


def phases_want_different_hardware(evidence: Evidence) -> Judgement:
    """Claim 28."""
    records = evidence.of("prefix")
    lengths = sorted({r.run.prefix.n_prefix for r in records if r.run.prefix})
    longest = lengths[-1] if lengths else 0
    shares = [_moving(r) for r in records if r.run.prefix and r.run.prefix.n_prefix == longest]
    known = rules.figure(f"moving {longest:,} tokens over {GBIT} Gbit/s, of prefilling them", shares, "%", 100)
    words = f"saving, moving over {GBIT} Gbit/s and restoring takes at least 10 % of the prefill that it saves"
    conditions = [_on_both_sides(records[0], evidence), rules.at_least(words, known, 10)]
    rows = prefix_cache.rows(records)
    pays = [
        Figure(f"restoring {'over' if 'bit' in one.name else 'from'} {one.name} pays from", one.n_tokens, "tokens")
        for one in (prefix_cache.break_even(rows) if rows else [])
        if one.n_tokens is not None
    ]
    return rules.decided(conditions, [known, *pays])


def _moving(record: Record) -> float | None:
    """Saving, sending and loading a prefix, as a share of the time that prefilling it took."""
    run = record.run
    taken = prefix_times.times(run, phases.times_prefill_steps(record.settings))
    if not taken or taken["prefix_s"] <= 0 or not run.state_bytes:
        return None
    return (taken["save_ram_s"] + 8 * run.state_bytes[0] / (GBIT * 1e9) + taken["load_ram_s"]) / taken["prefix_s"]


def _on_both_sides(record: Record, evidence: Evidence) -> Condition:
    """That the ridge lies between the intensities of a decode step and of a full prefill step."""
    words, settings = "decode lies below the machine's ridge, prefill above it", record.settings
    best = rules.roof(evidence.ceilings)
    types = settings.type_k, settings.type_v
    one = cost.step(record.model, 1, record.run.n_prompt, 1, *types)
    many = cost.step(record.model, settings.n_ubatch, 0, 0, *types)
    if best is None or one is None or many is None:
        return Condition(f"{words} (no ceilings, or an unknown shape)", None, is_missing=True)
    numbers = ", ".join(digits(value) for value in (one.intensity, best.ridge, many.intensity))
    return Condition(f"{words} ({numbers} FLOPs per byte)", one.intensity < best.ridge < many.intensity)


CLAIMS = (
    claim(
        22,
        "A request of 1,000 + 200 tokens to a 7B is 10 % prefill, one of 100,000 + 200 is 80 %",
        "Predicted for Llama 2 7B in F16 on an A100 (80 GB) from its datasheet, with what llama.cpp reaches of it: "
        "both shares within 10 points, over the whole range of the prediction. The share of 1,000 + 200 here is "
        "measured and shown, but it is that of another model.",
        ("lengths",),
        share_of_prefill,
        ignores_disturbances=True,
    ),
    claim(
        23,
        "A 7B in F16 on an A100: at most 145 tokens/s, seen 100 to 130; on an H100 50 to 100",
        "The limit (bandwidth over bytes of a step of Llama 2 7B in F16) is 145 within 10 %. What is seen is "
        "measured where such a GPU is; elsewhere a prediction that lies outside refutes it, and one that does not "
        "proves nothing.",
        ("lengths",),
        seven_on_gpus,
        ignores_disturbances=True,
    ),
    claim(
        27,
        "Bandwidth predicts the token rate better than peak compute does",
        "Over at least 4 machines whose bandwidth and peak are known (ceilings, or a GPU's datasheet), the rank "
        "correlation (Kendall) of one model's decode rate with bandwidth is larger than with FLOP/s, whichever of "
        "them is left out.",
        ("lengths",),
        bandwidth_predicts_better,
        ignores_disturbances=True,
    ),
    claim(
        28,
        "The phases want different hardware, and moving the cache costs",
        "A decode step lies below the machine's ridge and a full prefill step above it; and saving the longest "
        "measured prefix, moving it over 10 Gbit/s and restoring it takes at least 10 % of prefilling it. The "
        "lengths from which moving pays are shown.",
        ("prefix",),
        phases_want_different_hardware,
        also=(CEILINGS,),
        source="Splitwise (2023), DistServe (2024)",
    ),
)
