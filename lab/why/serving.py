"""Many users of one server, predicted: continuous batching as a simulation of its steps.

Requests take a free slot in the order in which they arrive. As in llama-server, a step computes all prompts that have a
slot, up to CHUNK tokens, and with them one token of each running answer; without such a prompt it decodes one token of
each answer. So two laws suffice: seconds of a prompt by its tokens, and of a decode step by its number of answers. In a
step with a prompt a token of an answer takes as long as one of the prompt (with --kv-unified; without it a ubatch
holds as many tokens of each sequence, so such a step has two parts).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from lab.core import stats
from lab.core.request import Slo

CHUNK = 2048
"""Tokens of a step (llama-server's --batch-size)."""

BUSY = 0.8
"""A device gets at most this share of the requests that it can answer: above, queues become long and rarely seen."""

GOOD = 0.9
"""The share of requests that shall keep the limits (as in lab load), and the percentile that is shown."""

N_REQUESTS = 400
"""Requests of a simulation, or 4 for each slot that is in use. The first third is the warm-up."""


class Arrival(NamedTuple):
    """A request: when it arrives, tokens of its prompt, and of its answer."""

    at_s: float
    n_prompt: int
    n_gen: int


@dataclass(frozen=True)
class Law:
    """How long steps of a server take: points (x, seconds) in order of x, with straight lines between them."""

    prefill: tuple[tuple[float, float], ...]  # by tokens of a prompt; a single point: proportional to it
    step: tuple[tuple[float, float], ...]  # by answers that are decoded together
    n_slots: int
    rest_s: float = 0.0  # before the first token of each request, beside the steps: HTTP, tokenization

    def prompt_s(self, n_tokens: float) -> float:
        """Seconds of a prompt of n_tokens alone."""
        points = self.prefill if len(self.prefill) > 1 else ((0.0, 0.0), *self.prefill)
        return max(0.0, stats.on_lines(points, n_tokens))

    def step_s(self, n_answers: float) -> float:
        """Seconds of a decode step."""
        return stats.on_lines(self.step, n_answers)

    def mixed_s(self, parts: Sequence[tuple[int, int]], n_answers: int) -> float:
        """Seconds of a step with parts of prompts, each (tokens before it, tokens), and a token of each answer."""
        once = self.prompt_s(0)
        each = (self.prompt_s(self.prefill[0][0]) - once) / self.prefill[0][0]
        alone = sum(self.prompt_s(past + n) - self.prompt_s(past) for past, n in parts)
        return max(once + alone + each * n_answers, self.step_s(n_answers) if n_answers else 0.0)

    def most_ps(self, n_prompt: int, n_gen: int) -> float:
        """The most requests per second that it can answer, with all slots in use."""
        return 1 / (self.prompt_s(n_prompt) + (n_gen - 1) * self.step_s(self.n_slots) / self.n_slots)


@dataclass(frozen=True)
class Answer:
    """A simulated request: seconds from its arrival to the first token, and to the last; `tpot_s` between tokens."""

    at_s: float
    ttft_s: float
    e2e_s: float
    tpot_s: float | None

    def meets(self, slo: Slo) -> bool:
        """Whether it keeps every limit."""
        pairs = (slo.ttft_s, self.ttft_s), (slo.tpot_s, self.tpot_s), (slo.e2e_s, self.e2e_s)
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True)
class Served:
    """A simulation: answers in the order of arrival, and the seconds of each phase."""

    answers: tuple[Answer, ...]
    prefill_s: float
    decode_s: float
    idle_s: float

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares of the time: prefill, decode, idle."""
        whole_s = self.prefill_s + self.decode_s + self.idle_s
        return self.prefill_s / whole_s, self.decode_s / whole_s, self.idle_s / whole_s


def simulate(law: Law, arrivals: Sequence[Arrival]) -> Served:
    """The answers of a server to requests, which are in the order of their arrival."""
    first_s, end_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    waiting, prompts, running = deque(range(len(arrivals))), list[list[int]](), list[tuple[int, int]]()
    mixed_s, step_s = cache(law.mixed_s), cache(law.step_s)
    now_s, n_steps, spent = 0.0, 0, {"prefill": 0.0, "decode": 0.0, "idle": 0.0}
    while waiting or prompts or running:
        while waiting and arrivals[waiting[0]].at_s <= now_s and len(prompts) + len(running) < law.n_slots:
            prompts.append([waiting.popleft(), 0])
        before_s, phase = now_s, "decode"
        if prompts:
            phase, room, parts = "prefill", CHUNK - len(running), list[tuple[int, int]]()
            for prompt in prompts:
                n = min(room, arrivals[prompt[0]].n_prompt - prompt[1])
                parts.append((prompt[1], n))
                prompt[1] += n
                room -= n
            now_s += mixed_s(tuple(parts), len(running))
            n_steps += 1
        elif running:
            each_s, n = step_s(len(running)), running[0][0] - n_steps
            if waiting and len(running) < law.n_slots:  # a step ends before the next request gets its slot
                n = min(n, max(1, math.ceil((arrivals[waiting[0]].at_s - now_s) / each_s)))
            now_s += n * each_s
            n_steps += n
        else:
            now_s, phase = arrivals[waiting[0]].at_s, "idle"
        spent[phase] += now_s - before_s
        while running and running[0][0] <= n_steps:
            end_s[heapq.heappop(running)[1]] = now_s
        for i, done in prompts:
            if done == arrivals[i].n_prompt:
                first_s[i] = end_s[i] = now_s
                if arrivals[i].n_gen > 1:
                    heapq.heappush(running, (n_steps + arrivals[i].n_gen - 1, i))
        prompts = [prompt for prompt in prompts if prompt[1] < arrivals[prompt[0]].n_prompt]
    answers = (
        Answer(
            one.at_s,
            law.rest_s + first - one.at_s,
            law.rest_s + end - one.at_s,
            (end - first) / (one.n_gen - 1) if one.n_gen > 1 else None,
        )
        for one, first, end in zip(arrivals, first_s, end_s, strict=True)
    )
    return Served(tuple(answers), spent["prefill"], spent["decode"], spent["idle"])


def poisson(rate: float, n: int, n_prompt: int, n_gen: int, seed: int = 1) -> list[Arrival]:
    """n requests at random times, `rate` per second on average."""
    gaps = random.Random(seed)
    return [Arrival(at_s, n_prompt, n_gen) for at_s in accumulate(gaps.expovariate(rate) for _ in range(n))]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(round(share * len(values), 9)) - 1)]


@dataclass(frozen=True)
class Demand:
    """What users ask: each sends a request every `every_s` seconds on average, at random; limits for the answers."""

    users: int
    every_s: float
    n_prompt: int
    n_gen: int
    slo: Slo | None = None

    @property
    def rate(self) -> float:
        """Requests per second of all users."""
        return self.users / self.every_s


@dataclass(frozen=True)
class Need:
    """The fewest devices for a demand, the 90th percentiles in seconds with that many, and the shares of their time."""

    n_devices: int
    ttft_s: float
    e2e_s: float
    shares: tuple[float, float, float]  # prefill, decode, idle


def need(law: Law, demand: Demand) -> Need | None:
    """The fewest devices under this law that suffice. Users are spread evenly over them.

    None gets more than BUSY of what it can answer, and 90 % of its answers keep the limits. None if no number of them
    does that.
    """
    (alone,) = simulate(law, [Arrival(0, demand.n_prompt, demand.n_gen)]).answers
    if demand.slo and not alone.meets(demand.slo):
        return None
    enough = max(1, math.ceil(demand.rate / (BUSY * law.most_ps(demand.n_prompt, demand.n_gen))))
    too_few = enough - 1
    while (found := _with(law, demand, enough)) is None:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (fewer := _with(law, demand, middle)) is None:
            too_few = middle
        else:
            enough, found = middle, fewer
    return found


def _with(law: Law, demand: Demand, n_devices: int) -> Need | None:
    """What n_devices reach; None if that breaks the limits."""
    rate = demand.rate / n_devices
    alone_s = law.prompt_s(demand.n_prompt) + demand.n_gen * law.step_s(1)
    n = max(N_REQUESTS, 4 * min(law.n_slots, math.ceil(rate * alone_s)))
    served = simulate(law, poisson(rate, n, demand.n_prompt, demand.n_gen))
    steady = served.answers[n // 3 :]
    if demand.slo and sum(one.meets(demand.slo) for one in steady) < GOOD * len(steady):
        return None
    ttft_s, e2e_s = (percentile([getattr(one, name) for one in steady], GOOD) for name in ("ttft_s", "e2e_s"))
    return Need(n_devices, ttft_s, e2e_s, served.shares)
