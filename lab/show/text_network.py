"""The cost of networks as text; the sizes of a model that is not on this machine, and how to get it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from lab.analysis import wording
from lab.analysis.wording import digits
from lab.core.link import bandwidth, milliseconds
from lab.core.network import Traffic
from lab.models.catalog import SYNTHETIC, Entry, Spec
from lab.runner import plan_needs
from lab.runner.cases import Plan
from lab.show.console import Grid
from lab.why.network_prediction import NetworkPrediction

USUAL = (1e9 / 8, 1e10 / 8)
"""Bytes per second of common networks: 1 and 10 Gbit/s."""

LEFT_OUT = (
    "For a prompt of several steps the cost is an upper bound, because servers compute while others send. Ethernet "
    "carries 94 % of its nominal bandwidth. TCP's slow start after a pause is not included: if a token takes over "
    "0.2 s, the logits can need a few more round trips."
)


def print_network(answer: NetworkPrediction, out: Console) -> None:
    """Prints the traffic, the cost of each network, and the basis."""
    model, n_tokens = answer.model, answer.n_gen - 1
    counts = Counter(answer.layers[:-1]).values()
    layers = str(max(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    servers = f"{len(counts)} server{'s' * (len(counts) > 1)}"
    out.print(Text(f"{model.name} {model.quantization or ''} over {servers}, {layers} layers each", style="bold"))
    decode = answer.decode
    token = Traffic(*(round(n / n_tokens) for n in (decode.bytes_out, decode.bytes_back, decode.n_round_trips)))
    for name, traffic in (("per token", token), (f"prompt of {answer.n_prompt:,} tokens", answer.prompt)):
        out.print(f"{name:27}{_in_words(traffic)}")
    grid = Grid("round trip", "bandwidth", "per token\n+ ms", "waiting\n%", "per prompt\n+ s", "decode\ntokens/s")
    for cost in answer.costs:
        rates = None if cost.decode_tps is None else [digits(rate) for rate in cost.decode_tps]
        grid.add_row(
            milliseconds(cost.link.round_trip_s),
            bandwidth(cost.link.bytes_per_s),
            digits(1e3 * cost.token_s),
            f"{100 * cost.waiting_s / cost.token_s:.0f}",
            digits(cost.prompt_s),
            "-" if rates is None else rates[0] if rates[0] == rates[1] else f"{rates[0]}-{rates[1]}",
        )
    out.print(grid)
    if answer.local is not None:
        slowest, fastest = (digits(1 / seconds) for seconds in reversed(answer.local.tpot_s))
        out.print(f"Without a network: {slowest} to {fastest} tokens/s.")
    out.print(answer.basis)
    out.print(LEFT_OUT)


def planned(plan: Plan) -> dict[str, Any] | None:
    """The network cost of a plan's servers, for JSON; None without servers, or if unknown."""
    cost = plan_needs.network_of(plan)
    if cost is None:
        return None
    at = {bandwidth(width): {"token_s": cost.token_s(width), "prompt_s": cost.prompt_s(width)} for width in USUAL}
    return {**dataclasses.asdict(cost), "at": at}


def plan_lines(plan: Plan) -> list[str]:
    """The same in words, for common bandwidths, because the real one is not measured."""
    cost = plan_needs.network_of(plan)
    if cost is None:
        return []
    decode, n_tokens = cost.decode, cost.n_gen - 1
    mean = Traffic(*(round(n / n_tokens) for n in (decode.bytes_out, decode.bytes_back, decode.n_round_trips)))
    lines = [f"network  the servers answer in {milliseconds(cost.round_trip_s)}; per token: {_in_words(mean)}"]
    for width in USUAL:
        token, prompt = digits(1e3 * cost.token_s(width)), digits(1e3 * cost.prompt_s(width))
        where = f"at {bandwidth(width)} "
        words = f"+ {token} ms per token, at most + {prompt} ms per prompt of {cost.n_prompt:,} tokens"
        lines.append(f"         {where:14}{words}")
    return lines


def _in_words(traffic: Traffic) -> str:
    trips = f"{traffic.n_round_trips:,} round trip{'s' * (traffic.n_round_trips != 1)}"
    return f"{trips}, {_size(traffic.bytes_out)} out, {_size(traffic.bytes_back)} back"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.3g} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:,.3g} kB"


def sizes_table(by_quantization: Mapping[str, Mapping[str, Any]]) -> Grid:
    """A row for each quantization: the file's size, the bytes read per decode step, and the context that fits."""
    grid = Grid("quantization", "MB", "MB read per decode step", "context that fits")
    for quantization, figures in by_quantization.items():
        read, fits = figures["weight_bytes_per_decode_step"], figures["n_ctx_that_fits"]
        grid.add_row(
            quantization,
            wording.digits(figures["n_bytes"] / 1e6),
            "unknown" if read is None else wording.digits(read / 1e6),
            "unknown" if fits is None else f"{fits:,}" if fits else "none",
        )
    return grid


def how_to_get(spec: Spec, entry: Entry, commands: list[str]) -> list[str]:
    """The source of the shape, and the commands that download the file or make one with random weights."""
    n_bytes = entry.n_bytes if spec.quantization in (None, entry.quantization) else None
    lines = [f"Computed from the shape ({entry.shape_source}). The context fits into the memory that is free now."]
    if spec.source != SYNTHETIC:
        download = f" (a download of about {n_bytes / 1e6:,.0f} MB)" if n_bytes else ""
        lines.append(f"To get it: {commands[0]}{download}")
    lines.append(f"With random weights, to measure its speed: {commands[-1]}")
    return lines
