"""All claims in order: what texts about LLM inference say, each with the criterion that judges it here."""

from __future__ import annotations

from lab.experiments import claims_of_limits, claims_of_phases, claims_of_requests
from lab.experiments.claim import Claim

CLAIMS: tuple[Claim, ...] = tuple(
    sorted(
        (*claims_of_phases.CLAIMS, *claims_of_limits.CLAIMS, *claims_of_requests.CLAIMS),
        key=lambda claim: claim.number,
    )
)
