"""Predicts the cost of a network for a model over several RPC servers.

The network's part is computed (lab/core/network.py). The time of computing is that of one server with all layers,
because servers compute one after the other; it is predicted as in `lab predict`, if possible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import memory, network, placement
from lab.core.link import Link
from lab.core.network import Traffic
from lab.core.record import DECODE, PREFILL, Model
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.process.rpc import MAX_SERVERS
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.why import datasheet, prediction
from lab.why.prediction import Prediction


@dataclass(frozen=True)
class Cost:
    """The time that a network adds per token and per prompt (at most), and the resulting tokens per second (range)."""

    link: Link
    token_s: float
    waiting_s: float  # per token, for answers, at any bandwidth
    prompt_s: float
    decode_tps: tuple[float, float] | None


@dataclass(frozen=True)
class NetworkPrediction:
    """A model over servers with equally many layers: its traffic, and the cost of networks."""

    model: Model
    layers: tuple[str, ...]
    n_prompt: int
    n_gen: int
    prompt: Traffic
    decode: Traffic  # of n_gen - 1 tokens
    where: str | None  # what each server computes on
    local: Prediction | None  # without a network
    basis: str
    costs: tuple[Cost, ...]

    @property
    def local_s(self) -> float | None:
        """A token's time without a network: the expected time, or the middle of the range."""
        if self.local is None:
            return None
        return self.local.tpot_expected_s or math.sqrt(math.prod(self.local.tpot_s))


def predict(
    links: Sequence[Link],
    n_servers: int = 2,
    model: str = catalog.DEFAULT,
    n_prompt: int = 512,
    n_gen: int = 200,
    device: str | None = None,
    results: str | Path = "results",
) -> NetworkPrediction:
    """The cost of each network. `device` is the device of each server (models/devices.toml); None: this machine.

    LabError for an unknown model or device, for impossible lengths and servers, and for a model whose traffic is
    unknown. If the time of computing cannot be predicted, `basis` has the reason.
    """
    if not 1 <= n_servers <= MAX_SERVERS:
        raise LabError(f"--servers {n_servers} is not possible.", f"llama.cpp takes 1 to {MAX_SERVERS}.")
    prediction.checked_lengths([n_prompt], n_gen)
    if device:
        datasheet.find_device(device)
    with Worker() as worker:
        shape, settings = shapes.find(worker, model), make_plan(worker, [1], 1, 1).settings
    if shape.n_layer is not None and n_servers > shape.n_layer:
        raise LabError(
            f"{shape.name} has {shape.n_layer} layers, too few for {n_servers} servers.", "Give fewer --servers."
        )
    layers = evenly(shape.n_layer or 0, n_servers)
    settings = dataclasses.replace(settings, n_ctx=memory.padded(n_prompt + n_gen))
    traffic = network.of_request(shape, settings, layers, n_prompt, n_gen)
    if traffic is None:
        raise LabError(
            f"The traffic of {shape.name} is unknown: {shape.uncounted or 'its header does not describe its layers'}.",
            "Use another model.",
        )
    where, local = None, None
    try:
        computing = prediction.predictions([n_prompt], n_gen, model, device, results)
        where, local = computing.where, computing.rows[0]
        basis = f"Computing on {where}, predicted as in lab predict. {computing.basis}"
    except LabError as problem:
        basis = f"Only the network's part is known. {problem.what} {problem.hint}"
    costs = tuple(_cost(link, traffic[PREFILL], traffic[DECODE], n_gen - 1, local) for link in links)
    return NetworkPrediction(
        *(shape, layers, n_prompt, n_gen, traffic[PREFILL], traffic[DECODE]), where, local, basis, costs
    )


def evenly(n_layer: int, n_servers: int) -> tuple[str, ...]:
    """The devices of the layers, the output last, with equal shares for all servers."""
    return tuple(f"RPC{device}" for device in placement.layers(n_layer, -1, (1.0,) * n_servers))


def _cost(link: Link, prompt: Traffic, decode: Traffic, n_tokens: int, local: Prediction | None) -> Cost:
    token_s = network.seconds(decode, link) / n_tokens
    waiting_s = decode.n_round_trips * link.round_trip_s / n_tokens
    rates = None
    if local is not None:
        fastest, slowest = local.tpot_s
        rates = (1 / (slowest + token_s), 1 / (fastest + token_s))
    return Cost(link, token_s, waiting_s, network.seconds(prompt, link), rates)
