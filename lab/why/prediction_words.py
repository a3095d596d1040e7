"""What a prediction rests on, and where it goes beyond that, in words."""

from __future__ import annotations

from lab.core.record import DECODE, PREFILL
from lab.core.words import plural
from lab.why import datasheet, uncertainty
from lab.why.datasheet import Device
from lab.why.learning import Case, Learned
from lab.why.measured_device import KERNEL_SHARE, Own
from lab.why.uncertainty import LONGER, MODEL, QUANTIZATION, SETTINGS, SHORTER, Uncertainty

TOO_FAST = 1.1
"""Runs that were so many times as fast as their kernels' ceilings show that the ceilings are too low."""


def basis_here(learned: Learned, errors: Uncertainty) -> str:
    """What a prediction for this machine rests on, in words."""
    fit = learned.fit
    sentence = (
        f"Expected: {fit.prefill_factor:.2f} x the kernels' best time in prefill and {fit.decode_factor:.2f} x in "
        f"decode, plus {1e6 * fit.per_layer_step_s:.3g} us per layer and step, plus "
        f"{1e12 * fit.per_layer_value_s:.3g} ps per layer, token and value; fitted to "
        f"{plural(learned.n_runs, 'run')} of {', '.join(learned.models)} on this machine "
        f"({len(learned.points)} points: medians by length and phase), and "
        "corrected by what runs of the same setup differ from that on average. "
        f"Ranges: {uncertainty.DEVIATIONS:g} standard deviations of {len(errors.held_out)} predictions of points that "
        "were held out, and of those of the lab's own bench (tests/bench/held_out.py) where few could be."
    )
    if n_disturbed := sum(point.is_disturbed for point in learned.points):
        sentence += f" {n_disturbed} of the points are of disturbed runs, which widens all ranges."
    fastest = min(errors.fastest(PREFILL), errors.fastest(DECODE))
    if fastest < 1 / TOO_FAST:
        sentence += (
            f" Some of these runs took only {fastest:.2f} x their kernels' best time: ceilings are too low, so the "
            "expectation is too slow, and the ranges reach down by as much. Run: lab ceilings --again"
        )
    return sentence


def basis_of(device: Device, own: Own | None) -> str:
    """What a prediction for a device of the datasheets rests on."""
    if own is None:
        return datasheet.basis(device)
    if own.learned is not None:
        here = basis_here(own.learned, uncertainty.of(own.learned.points))
        return here.replace("on this machine", "on such a device")
    if own.shares is None:
        day = own.ceilings.measured_at[:10] if own.ceilings else ""
        return (
            f"From ceilings of such a device in the results ({day}): at least the time of its kernels, "
            f"at most {1 / KERNEL_SHARE:.2f}x as long, as on CPUs. With runs it is surer: lab measure"
        )
    figures = {DECODE: f"{device.gbps:g} GB/s", PREFILL: f"{device.tflops:g} TFLOP/s" if device.tflops else ""}
    parts = [f"{low:.0%} to {high:.0%} of {figures[phase]} in {phase}" for phase, (low, high) in own.shares.items()]
    return (
        f"From {plural(own.n_runs, 'run')} on such a device in the results: {' and '.join(parts)} of its datasheet "
        f"({device.source}), widened by what other sessions differ by. With its ceilings it is surer: lab ceilings"
    )


def beyond(case: Case, errors: Uncertainty, wide: float) -> list[str]:
    """In which ways a prediction extrapolates, and how wide its range is therefore; none: an empty list."""
    known = errors.known[case.phase]
    ways, longest = known.beyond(case), known.longest
    what = "prompt" if case.phase == PREFILL else "context"
    words = {
        LONGER: f"to {case.length / longest:.3g} times the longest {what} learned from ({longest:,.0f} tokens)",
        SHORTER: f"below the shortest {what} learned from ({known.shortest:,.0f} tokens)",
        MODEL: "to another model",
        QUANTIZATION: f"to another quantization ({case.quantization})",
        SETTINGS: "to other settings (threads, --ubatch, cache types or flash attention)",
    }
    if not ways:
        return []
    beyond = ", ".join(words[way] for way in ways)
    return [f"{case.phase} extrapolates {beyond}: range widened to {1 / wide:.2g} to {wide:.2g} times the expectation"]
