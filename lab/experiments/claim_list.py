"""All claims in order: what texts about LLM inference say, each with the criterion that judges it here."""

from __future__ import annotations

from lab.experiments import (
    claims_of_hardware,
    claims_of_levers,
    claims_of_limits,
    claims_of_memory,
    claims_of_phases,
    claims_of_requests,
    claims_of_settings,
)
from lab.experiments.claim import Claim

_SUBJECTS = (
    claims_of_phases.CLAIMS,
    claims_of_requests.CLAIMS,
    claims_of_limits.CLAIMS,
    claims_of_memory.CLAIMS,
    claims_of_settings.CLAIMS,
    claims_of_levers.CLAIMS,
    claims_of_hardware.CLAIMS,
)

CLAIMS: tuple[Claim, ...] = tuple(
    sorted((claim for claims in _SUBJECTS for claim in claims), key=lambda claim: claim.number)
)
