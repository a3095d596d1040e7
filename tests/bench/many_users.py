"""Are many users of a llama-server predicted from a few? Percentiles, capacity and shares, before the load is sent.

    python3 -m uv run python -m tests.bench.many_users [SECONDS]

A few requests, alone and 2 to 4 at the same time, give the server's laws: seconds of a prompt and of a decode step.
With these, lab/why/serving.py simulates the load's requests at their planned times. `lab load` sends them. Two mixes
(prefill takes most of the time, decode does), four rates each, a window of SECONDS (40) for each: 11 minutes. The speed
of a shared machine drifts within minutes, so the laws are measured before and after each window; their mean predicts.

Wanted: measured / predicted of the 50th and 90th percentile of TTFT and E2E from 0.8 to 1.2. And for five limits of E2E
in each mix: the highest rate at which 90 % of the answers keep the limit lies in the predicted bracket, in 9 of 10
cases. The bracket is that of steps that take 10 % longer, and 10 % less.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lab.why.serving import Answer, Arrival, Law

from lab.analysis import load_figures, load_shares, loads
from lab.analysis.load_figures import e2e_s, ttft_s
from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import COMPLETIONS, Asked, Request, RequestRecord
from lab.endpoints.send_plan import SendPlan
from lab.models import catalog
from lab.runner import loading
from lab.runner.load_plan import Window, make_plan
from lab.runner.servers import Server, connect, prompt_text
from lab.why import serving
from tests.servers import wheel_server

MIXES = (64, 16), (16, 64)
"""Tokens of prompts, and of answers."""

SHARES = (0.3, 0.5, 0.7, 0.85)
"""Rates, as shares of the most requests per second that the law allows."""

N_SLOTS, N_TRIALS, WARMUP_S = 4, 2, 5.0
LIMITS = (2, 3, 4, 6, 10)
"""Limits of E2E, as multiples of its prediction for a request alone."""

SCALES = (1.1, 0.9)
"""The law's times are multiplied by these for the ends of a bracket: a slower server, a faster one."""

WITHIN = (0.8, 1.2)
SHARE = 0.9


# The laws, from a few requests


def sent(server: Server, n_prompt: int, n_gen: int, n_users: int, seed: int) -> list[Request]:
    """The answers to n_users requests at the same time."""
    asked = Asked(n_prompt=n_prompt, n_gen=n_gen, temperature=0.0, ignore_eos=server.ignores_eos)
    asks = tuple(
        server.ask(server.prompt(n_prompt, prompt_text("text"), seed, i), asked, is_sent_once=True)
        for i in range(n_users)
    )
    found = [reply.request for reply in server.client.run(SendPlan(asks=asks, api=COMPLETIONS, n_at_once=n_users))]
    assert all(one.status == OK for one in found), found[0].error
    return found


def prompt_s(request: Request) -> tuple[float, float]:
    """Seconds of the prompt by the server, and the rest of TTFT."""
    ttft_ns, timings = times.ttft_ns(request), request.timings
    assert ttft_ns is not None and timings is not None and timings.prompt_ms is not None
    return timings.prompt_ms / 1e3, ttft_ns / 1e9 - timings.prompt_ms / 1e3


def law_of(server: Server, n_prompt: int, n_gen: int) -> Law:
    """The laws of this mix: prompts as long as one to N_SLOTS of its prompts, and decode steps at its context."""
    prefill, rest, step = list[tuple[float, float]](), list[float](), list[tuple[float, float]]()
    sent(server, n_prompt, 8, 1, seed=99)  # warm up
    for k in range(1, N_SLOTS + 1):
        alone = [prompt_s(sent(server, k * n_prompt, 2, 1, seed=10 * k + i)[0]) for i in range(N_TRIALS)]
        prefill.append((float(k * n_prompt), statistics.median(seconds for seconds, _ in alone)))
        rest += [seconds for _, seconds in alone]
        together = []
        for i in range(N_TRIALS):
            tpots = [times.tpot_ns(one) for one in sent(server, n_prompt, max(32, n_gen), k, seed=100 * k + i)]
            together.append(min(ns for ns in tpots if ns is not None) / 1e9)  # of who began last: no prompt interrupts
        step.append((float(k), statistics.median(together)))
    return Law(tuple(prefill), tuple(step), N_SLOTS, statistics.median(rest))


def scaled(law: Law, factor: float) -> Law:
    """The law of a server whose steps take `factor` times as long."""
    prefill, step = (tuple((x, factor * seconds) for x, seconds in points) for points in (law.prefill, law.step))
    return dataclasses.replace(law, prefill=prefill, step=step)


def mean(before: Law, after: Law) -> Law:
    """The law between two measurements of it."""

    def between(
        first: Sequence[tuple[float, float]], last: Sequence[tuple[float, float]]
    ) -> tuple[tuple[float, float], ...]:
        return tuple((x, (one + other) / 2) for (x, one), (_, other) in zip(first, last, strict=True))

    rest_s = (before.rest_s + after.rest_s) / 2
    return Law(between(before.prefill, after.prefill), between(before.step, after.step), N_SLOTS, rest_s)


# What is predicted, and what was measured


def predicted(law: Law, window: Window, n_prompt: int, n_gen: int) -> tuple[list[Answer], tuple[float, float, float]]:
    """The answers of the steady window, and the shares of its time."""
    assert window.times_ns is not None
    arrivals = [Arrival(ns / 1e9, n_prompt, n_gen) for ns in window.times_ns]
    load = window.load
    end_s = load.warmup_s + load.duration_s
    inside = [one for one in serving.simulate(law, arrivals).answers if load.warmup_s <= one.at_s < end_s]
    return inside, serving.simulate(law, [one for one in arrivals if one.at_s < end_s]).shares


def percentiles(ttfts_s: Sequence[float], e2es_s: Sequence[float]) -> list[float]:
    return [serving.percentile(values, share) for values in (ttfts_s, e2es_s) for share in (0.5, 0.9)]


def highest(attained: Sequence[float]) -> int:
    """How many rates hold, from the lowest one on, until the first that does not."""
    return next((i for i, share in enumerate(attained) if share < SHARE), len(attained))


def kept(e2es_s: Sequence[float], limit_s: float) -> float:
    return sum(value <= limit_s for value in e2es_s) / len(e2es_s)


def mix(server: Server, n_prompt: int, n_gen: int, seconds: float) -> tuple[list[float], list[bool]]:
    """Prints a mix of lengths. Returns measured / predicted of all percentiles, and whether each bracket is right."""
    laws = [law_of(server, n_prompt, n_gen)]
    most = laws[0].most_ps(n_prompt, n_gen)
    print(f"{n_prompt} tokens in, {n_gen} out: {described(laws[0])}; at most {most:.2f}/s")
    rates = [float(f"{share * most:.3g}") for share in SHARES]
    (alone,) = serving.simulate(laws[0], [Arrival(0, n_prompt, n_gen)]).answers
    limits = [limit * alone.e2e_s for limit in LIMITS]
    ratios, e2es = list[float](), list[list[float]]()
    by_scale = {scale: list[list[float]]() for scale in SCALES}
    for seed, rate in enumerate(rates, 1):
        plan = make_plan(
            rate=[rate], prompt_len=n_prompt, gen=n_gen, warmup=WARMUP_S, duration=seconds, rounds=1, seed=seed
        )
        with tempfile.TemporaryDirectory() as folder:
            path = server.new_file(Path(folder))
            records: list[RequestRecord] = list(
                loading.execute(plan, server, prompt_text("text"), path, lambda _: None, print)
            )
        (arm,) = loads.arms([loads.sample(record.request) for record in records])
        assert arm.inside, f"a rate without requests: more than {seconds:g} s"
        laws.append(law_of(server, n_prompt, n_gen))
        law, (window,) = mean(*laws[-2:]), plan.windows
        answers, shares = predicted(law, window, n_prompt, n_gen)
        measured = load_figures.values(arm.inside, ttft_s), load_figures.values(arm.inside, e2e_s)
        before = percentiles([one.ttft_s for one in answers], [one.e2e_s for one in answers])
        own = [after / one for after, one in zip(percentiles(*measured), before, strict=True)]
        found = load_shares.shares(arm)
        assert found is not None and found.prefill is not None and found.decode is not None
        words = ", ".join(f"{name} {a:.2f} ({r:.2f}x)" for name, a, r in zip(NAMES, before, own, strict=True))
        print(
            f"  {rate:g}/s, {len(arm.inside)} requests; after it {described(laws[-1])}\n    predicted {words}\n"
            f"    prefill, decode, idle {[round(share, 2) for share in shares]}, measured "
            f"{[round(share, 2) for share in (found.prefill, found.decode, found.idle)]}",
            flush=True,
        )
        ratios += own
        e2es.append(measured[1])
        for scale, of_scale in by_scale.items():
            of_scale.append([one.e2e_s for one in predicted(scaled(law, scale), window, n_prompt, n_gen)[0]])
    right = []
    for limit in limits:
        low, high = (highest([kept(own, limit) for own in of]) for of in by_scale.values())
        best = highest([kept(own, limit) for own in e2es])
        right.append(low <= best <= high)
        names = [f"{rates[n - 1]:g}/s" if n else "none" for n in (low, high, best)]
        print(f"  E2E within {limit:.2f} s: predicted {names[0]} to {names[1]}, measured {names[2]}", flush=True)
    return ratios, right


def described(law: Law) -> str:
    prompts = [f"{n:.0f}: {1e3 * s:.0f} ms" for n, s in law.prefill]
    return f"prompts {prompts}, steps {[f'{n:.0f}: {1e3 * s:.1f} ms' for n, s in law.step]}"


NAMES = ("TTFT p50", "TTFT p90", "E2E p50", "E2E p90")


def main(seconds: float = 40.0) -> None:
    options = ["--parallel", str(N_SLOTS), "--ctx-size", str(N_SLOTS * 512), "--threads", "1", "--no-cache-prompt"]
    options += ["--kv-unified"]  # as where llama-server chooses its slots; without it a prompt's step has two parts
    ratios, right = list[float](), list[bool]()
    with (
        wheel_server(catalog.embedded_path(), *options) as real,
        connect(real.url, api=COMPLETIONS) as server,
    ):
        for n_prompt, n_gen in MIXES:
            of_mix = mix(server, n_prompt, n_gen, seconds)
            ratios += of_mix[0]
            right += of_mix[1]
    inside = [WITHIN[0] <= ratio <= WITHIN[1] for ratio in ratios]
    for i, name in enumerate(NAMES):
        own = sorted(ratios[i::4])
        print(f"{name}: measured / predicted {own[0]:.2f} to {own[-1]:.2f}, median {statistics.median(own):.2f}")
    print(f"{sum(inside)} of {len(inside)} percentiles within {WITHIN[0]:g} to {WITHIN[1]:g} of the prediction")
    print(f"{sum(right)} of {len(right)} highest rates inside the predicted bracket")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]))
