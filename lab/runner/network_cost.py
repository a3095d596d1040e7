"""What a plan's RPC servers cost on the network, from the round trips that they answered in."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from lab.core import network
from lab.core.link import Link
from lab.core.network import Traffic
from lab.core.record import DECODE, PREFILL
from lab.runner import fits
from lab.runner.case import Case, with_room
from lab.runner.planned import Plan


@dataclass(frozen=True)
class PlannedNetwork:
    """The traffic of a prompt and of the n_gen - 1 tokens after it, and the mean round trip to the servers."""

    n_prompt: int
    n_gen: int
    prompt: Traffic
    decode: Traffic
    round_trip_s: float

    def token_s(self, bytes_per_s: float | None) -> float:
        """What a network of such a bandwidth adds to each token."""
        return network.seconds(self.decode, Link(self.round_trip_s, bytes_per_s)) / (self.n_gen - 1)

    def prompt_s(self, bytes_per_s: float | None) -> float:
        """What it adds to the prompt, at most."""
        return network.seconds(self.prompt, Link(self.round_trip_s, bytes_per_s))


def of_plan(plan: Plan) -> PlannedNetwork | None:
    """For the plan's longest plain prompt; None without servers, or where the traffic cannot be worked out."""
    plain = [case for case in plan.cases if case.lever is None and case.every is None and case.n_gen > 1]
    if not plan.round_trips_s or not plain:
        return None
    case = max(plain, key=lambda case: case.n_prompt)
    layers = _layers(plan, case)
    if layers is None:
        return None
    traffic = network.of_request(plan.model, with_room(plan.settings, [case]), layers, case.n_prompt, case.n_gen)
    if traffic is None:
        return None
    round_trip_s = statistics.fmean(plan.round_trips_s)
    return PlannedNetwork(case.n_prompt, case.n_gen, traffic[PREFILL], traffic[DECODE], round_trip_s)


def _layers(plan: Plan, case: Case) -> list[str] | None:
    """The device of each layer, the output last."""
    devices = {layer: place.device for place in fits.places(plan, case) or () for layer in place.layers}
    n_all = (plan.model.n_layer or 0) + 1
    return [devices[layer] for layer in range(n_all)] if len(devices) == n_all else None
