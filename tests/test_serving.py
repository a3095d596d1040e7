"""Many users of a server, predicted: steps by hand, queueing theory, and the shares that a client sees."""

import dataclasses
import statistics

import pytest

from lab.analysis import load_figures, load_shares, loads
from lab.core.request import POISSON, Request, ServerTimings, Slo, Usage
from lab.why import serving
from lab.why.serving import Arrival, Demand, Law
from tests.test_load_shown import OPEN, planted

LAW = Law(prefill=((100, 0.1),), step=((1, 0.010), (4, 0.016)), n_slots=4)
"""1 ms for each token of a prompt; 10 ms for a step of one answer, 2 ms more for each further one."""


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    served = serving.simulate(LAW, [Arrival(1.0, 200, 11)])
    (only,) = served.answers
    assert (only.ttft_s, only.e2e_s, only.tpot_s) == pytest.approx((0.2, 0.3, 0.01))
    assert (served.prefill_s, served.decode_s, served.idle_s) == pytest.approx((0.2, 0.1, 1.0))


def test_a_prompt_interrupts_running_answers_and_they_share_its_step() -> None:
    one, other = serving.simulate(LAW, [Arrival(0, 100, 11), Arrival(0.145, 50, 3)]).answers
    # 5 steps until 0.15; then 50 tokens of the prompt and one of the answer; then 2 steps of two, 2 of one
    assert (other.ttft_s, other.e2e_s) == pytest.approx((0.15 + 0.051 - 0.145, 0.15 + 0.051 + 0.024 - 0.145))
    assert one.e2e_s == pytest.approx(0.15 + 0.051 + 2 * 0.012 + 2 * 0.010)


def test_who_finds_no_slot_waits_for_the_next_one() -> None:
    narrow = dataclasses.replace(LAW, n_slots=1, rest_s=0.005)
    one, other = serving.simulate(narrow, [Arrival(0, 100, 11), Arrival(0, 100, 1)]).answers
    assert (one.e2e_s, other.ttft_s, other.e2e_s, other.tpot_s) == pytest.approx((0.205, 0.305, 0.305, None))


def test_prompts_are_computed_together_up_to_a_chunk() -> None:
    served = serving.simulate(LAW, [Arrival(0, 1024, 1), Arrival(0, 1024, 1), Arrival(0, 10, 1)])
    assert [one.ttft_s for one in served.answers] == pytest.approx([2.048, 2.048, 2.058])
    fixed = Law(prefill=((100, 0.2), (200, 0.3)), step=((1, 0.01),), n_slots=4)  # 0.1 s for each step, and 1 ms a token
    together = serving.simulate(fixed, [Arrival(0, 100, 1), Arrival(0, 200, 1)])
    assert [one.ttft_s for one in together.answers] == pytest.approx([0.4, 0.4])


@pytest.mark.parametrize("busy", [0.3, 0.6, 0.8])
def test_the_wait_for_one_slot_is_that_of_queueing_theory(busy: float) -> None:
    law, service_s = Law(prefill=((100, 0.1),), step=((1, 0.01),), n_slots=1), 0.2  # M/D/1, by Pollaczek and Khinchine
    served = serving.simulate(law, serving.poisson(busy / service_s, 40_000, 100, 11))
    waited_s = statistics.fmean(one.e2e_s for one in served.answers) - service_s
    assert waited_s == pytest.approx(busy * service_s / (2 * (1 - busy)), rel=0.05)
    assert 1 - served.shares[2] == pytest.approx(busy, rel=0.02)


def test_above_what_it_can_answer_the_queue_grows() -> None:
    most = LAW.most_ps(100, 51)
    assert most == pytest.approx(1 / (0.1 + 50 * 0.016 / 4))
    for share, grows in ((0.9, False), (1.2, True)):
        answers = serving.simulate(LAW, serving.poisson(share * most, 3000, 100, 51)).answers
        first, last = (statistics.fmean(one.ttft_s for one in part) for part in (answers[:1000], answers[2000:]))
        assert (last > 3 * first) == grows


def as_requests(law: Law, arrivals: list[Arrival]) -> list[Request]:
    """What a client sees of a simulated server, which reports how long each prompt took."""
    load = dataclasses.replace(OPEN, arrivals=POISSON, warmup_s=0, duration_s=arrivals[-1].at_s)
    found = []
    for one, answer in zip(arrivals, serving.simulate(law, arrivals).answers, strict=True):
        request = planted(one.at_s, load, answer.ttft_s, answer.tpot_s or 0.0, one.n_gen)
        timings = ServerTimings(prompt_ms=1e3 * min(law.prompt_s(one.n_prompt), answer.ttft_s))
        usage = Usage(prompt_tokens=one.n_prompt, completion_tokens=one.n_gen)
        found.append(dataclasses.replace(request, timings=timings, usage=usage))
    return found


@pytest.mark.parametrize("rate", [0.5, 1.5, 2.5])
def test_a_client_finds_the_shares_of_a_server_whose_truth_is_known(rate: float) -> None:
    arrivals = serving.poisson(rate, 300, 100, 21)
    (arm,) = loads.arms([loads.sample(one) for one in as_requests(LAW, arrivals)])
    truth, found = serving.simulate(LAW, arrivals).shares, load_shares.shares(arm)
    assert found is not None and found.by == load_shares.BY_SERVER
    assert (found.prefill, found.decode, found.idle) == pytest.approx(truth, abs=0.03)
    assert load_figures.figures_of(arm).ttft is not None


DEMAND = Demand(1000, 60.0, 100, 51)


def test_more_users_need_more_devices() -> None:
    most = LAW.most_ps(100, 51)
    found = [serving.need(LAW, dataclasses.replace(DEMAND, users=users)) for users in (100, 1000, 10_000)]
    counts = [one.n_devices for one in found if one]
    assert counts[0] <= counts[1] <= counts[2] == 63  # 166.7 requests/s; each can answer 3.33 and gets 80 % of that
    assert counts[2] - 1 < 10_000 / 60 / (serving.BUSY * most) <= counts[2]
    assert found[2] and sum(found[2].shares) == pytest.approx(1) and found[2].shares[2] < 0.35


def test_limits_need_more_devices_or_cannot_be_kept() -> None:
    loose, strict, never = (
        serving.need(LAW, dataclasses.replace(DEMAND, slo=Slo(ttft_s=limit))) for limit in (2.0, 0.15, 0.09)
    )
    assert loose and strict and loose.n_devices < strict.n_devices and never is None
    assert strict.ttft_s <= 0.15 and loose == serving.need(LAW, DEMAND)
    fewer = serving._with(LAW, DEMAND, strict.n_devices - 1)
    assert fewer and fewer.ttft_s > 0.15
