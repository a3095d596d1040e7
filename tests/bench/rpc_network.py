"""What a network costs, predicted from what passes over it and measured behind a relay that delays and throttles.

    python3 -m uv run python -m tests.bench.rpc_network [MODEL [ROUNDS [DELAYS [BANDWIDTHS [PROMPT_LEN [GEN]]]]]]
    python3 -m uv run python -m tests.bench.rpc_network smollm2-135m 1 1 1 16 8

Two RPC servers of one thread on this machine, a relay before each, the model split 1:1. Each round starts the engine
anew and measures without a delay and at each delay (ms each way) and bandwidth (Gbit/s), in random order. What the
relay really adds is measured first. Results and picture are in results/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.analysis import networks
from lab.analysis.networks import LOCAL, TimesOverLink
from lab.core.link import Link, bandwidth
from lab.core.record import Record
from lab.core.results import save
from lab.drawing import canvas
from lab.process.rpc_server import RpcServer
from lab.process.worker import Worker
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter
from lab.runner.session import new_results_file
from lab.runner.warm_engine import WarmEngine
from lab.show import plot_why
from tests.relay import Relay, calibrate

FOLDER = Path("results")
DEFAULTS = ("synthetic:llama-3.2-3b:Q4_0", "4", "0.2,1,5", "1,10", "32", "16")
GBIT = 1e9 / 8

Arm = tuple[float, float | None]
"""A delay each way in s, and bytes a second."""

N_SERVERS = 2


def main(model: str, rounds: str, delays: str, bandwidths: str, prompt_len: str, gen: str) -> None:
    wanted = itertools.product(_numbers(delays, 1e-3), _numbers(bandwidths, GBIT))
    arms: dict[Arm, Link] = {(0.0, None): LOCAL, **calibrated(list(wanted))}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(RpcServer("127.0.0.1", 0, ["CPU"], 1)) for _ in range(N_SERVERS)]
        relay = stack.enter_context(Relay([server.endpoint for server in servers]))
        worker = stack.enter_context(Worker())
        split, endpoints = ",".join("1" * N_SERVERS), ",".join(relay.endpoints)
        plan = make_plan(worker, prompt_len, int(gen), int(rounds), model, threads=1, rpc=endpoints, tensor_split=split)
        path = new_results_file(plan, FOLDER, len(arms))
        pids = [server.pid for server in servers]
        records = list(measured(plan, worker, relay, pids, arms, int(rounds), path))
    rows = networks.rows(records)
    print(table(rows))
    for name, drawing in plot_why.drawings(records).items():
        for written in (path, *canvas.write(drawing, FOLDER, f"{path.stem}-{name}")):
            print(written)


def calibrated(arms: Sequence[Arm]) -> dict[Arm, Link]:
    """What the relay adds at each setting to what it costs without a delay: delays and bandwidths on their own."""
    base = calibrate(0.0, None)
    print(f"the relay without a delay: {1e6 * base.round_trip_s:.0f} us back and forth, {bandwidth(base.bytes_per_s)}")
    round_trips, rates = {}, {}
    for delay in sorted({delay for delay, _ in arms}):
        round_trips[delay] = calibrate(delay, None, 6_400_000).round_trip_s - base.round_trip_s
        print(f"{1e3 * delay:g} ms each way: {1e3 * round_trips[delay]:.3f} ms more back and forth")
    for rate in sorted({rate or 0.0 for _, rate in arms}):
        s_per_byte = 1 / calibrate(0.0, rate).bytes_per_s - 1 / base.bytes_per_s
        rates[rate] = 1 / s_per_byte if s_per_byte > 0 else None
        print(f"{bandwidth(rate)}: {bandwidth(rates[rate])} on top of what it lets through without a limit")
    return {(delay, rate): Link(round_trips[delay], rates[rate or 0.0]) for delay, rate in arms}


def measured(
    plan: Plan,
    worker: Worker,
    relay: Relay,
    pids: Sequence[int],
    arms: dict[Arm, Link],
    n_rounds: int,
    path: Path,
) -> Iterator[Record]:
    """A run of each arm in each round, saved as it ends."""
    (case,) = plan.cases
    engine = WarmEngine(plan, worker, Reporter(lambda status: None, plan.order, plan.n_tokens))
    names = {arm: f"{chr(65 + i)}: {_in_words(*arm)}" for i, arm in enumerate(arms)}
    chance = random.Random(plan.seed)
    for number in range(n_rounds):
        relay.set()
        if number:
            engine.renew()
        engine.load()
        engine._servers = [*engine._servers, *pids]  # they are not where --rpc says: that is the relay
        engine.open([case])
        for _ in engine.warm_up([case]):
            pass
        for arm in chance.sample(list(arms), len(arms)):
            relay.set(*arm)
            engine.open([case])  # its sentinel is one of this network, too
            run = dataclasses.replace(engine.run(case, number), block=number, variant=names[arm], link=arms[arm])
            record = Record(path.stem, plan.machine, engine.model, engine.settings, run)
            save(path, record)
            print(f"round {number + 1}  {names[arm]:28} {_now(record)}", flush=True)
            yield record


def table(rows: Sequence[TimesOverLink]) -> str:
    """Measured and predicted; of what the network adds to a token, too, which a slow machine hides in the total."""
    base_s = next(statistics.median(row.tpot_s) for row in rows if row.link == LOCAL)
    lines = ["network                       token: measured predicted  off  (added: measured predicted)  prompt: off"]
    for row in rows:
        measured_s = statistics.median(row.tpot_s)
        lines.append(
            f"{row.link.words:30}{1e3 * measured_s:11,.1f} ms {1e3 * row.expected_tpot_s:6,.1f} ms "
            f"{row.tpot_error:+6.1%}"
            f"{1e3 * (measured_s - base_s):14,.2f} ms {1e3 * (row.expected_tpot_s - base_s):6,.2f} ms"
            f"{row.prefill_error:+15.1%}"
        )
    token = rows[0].token
    n = rows[0].n_gen - 1
    lines.append(f"a token: {token.n_bytes / n:,.0f} bytes and {token.n_round_trips / n:g} round trips")
    lines.append(f"a prompt: {rows[0].prompt.n_bytes:,} bytes and {rows[0].prompt.n_round_trips} round trips")
    off = [abs(row.tpot_error) for row in rows if row.link != LOCAL]
    lines.append(f"decode: off by {statistics.median(off):.1%} (median of {len(off)}), at most {max(off):.1%}")
    return "\n".join(lines)


def _now(record: Record) -> str:
    (row,) = networks.rows([dataclasses.replace(record, run=dataclasses.replace(record.run, link=LOCAL))])
    return f"prefill {row.prefill_s[0]:6.2f} s, token {1e3 * row.tpot_s[0]:7.1f} ms"


def _in_words(delay_s: float, bytes_per_s: float | None) -> str:
    return f"{1e3 * delay_s:g} ms each way, {bandwidth(bytes_per_s)}" if delay_s or bytes_per_s else "no delay"


def _numbers(text: str, unit: float) -> list[float]:
    return [float(part) * unit for part in text.split(",")]


if __name__ == "__main__":
    main(*sys.argv[1:], *DEFAULTS[len(sys.argv[1:]) :])
