"""Sentences on ceilings that are not to be trusted."""

from __future__ import annotations

from lab.core.record import Ceilings
from lab.roofline.probing import CPU, each_device

TOO_LOW = "the ceiling was measured too low; measure again: lab ceilings --again"


def doubt_sentences(ceilings: Ceilings) -> list[str]:
    """What disturbed the measurement of ceilings, device by device, and what to do."""
    return [
        f"While the ceilings of {of_device.device or CPU} were measured, {of_device.disturbed}. "
        "Some can be too low, so the lab names no limits or gains. Measure again while no other "
        "program runs: lab ceilings --again"
        for of_device in each_device(ceilings)
        if of_device.disturbed
    ]
