"""Loads: lengths, times and windows as planned, each request kept, each failure a class, against the null server."""

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core.record import FAILED, OK
from lab.core.request import (
    CLOSED,
    LOST,
    POISSON,
    RATE_LIMITED,
    REFUSED,
    Request,
    RequestRecord,
    parse_slo,
)
from lab.core.results import save
from lab.errors import LabError
from lab.features.serve import loads
from lab.remote.formats import MOST_AT_ONCE
from lab.features.serve.loads import make_plan
from lab.remote.servers import connect
from tests.conftest import run_lab
from tests.null_server import NEVER, RUNNING, Behaviour, NullServer, NullSettings, null_server

FAST: dict[str, Any] = {"first_ms": 4.0, "gap_ms": 1.0, "usage": RUNNING}
SHORT: dict[str, Any] = {"prompt_len": 40, "gen": 4, "warmup": 0.1, "duration": 0.2, "rounds": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with null_server(NullSettings(models={"null": Behaviour(**FAST)})) as started:
        yield started


def load_of(request: Request) -> Any:
    assert request.asked.load is not None
    return request.asked.load


def most_in_flight(requests: list[Request]) -> int:
    """Between the sending of the first byte and the arrival of the last one."""
    begun = [(one.sent_ns or 0, 1) for one in requests]
    over = [((one.sent_ns or 0) + (one.ended_ns or 0), -1) for one in requests]
    return max(itertools.accumulate(change for _, change in sorted(begun + over)))


# Lengths and plans


def test_a_length_is_a_number_or_a_distribution_as_its_quantiles() -> None:
    assert loads.parse("--gen", 64).values == (64,)
    assert loads.parse("--gen", "5-8").values == (5, 6, 7, 8)
    uniform = loads.parse("--gen", "100-1000").values
    assert len(uniform) == loads.MOST_VALUES and uniform[0] == 114 and uniform[-1] == 986
    normal = loads.parse("--gen", "normal:500,100").values
    assert (statistics.mean(normal), statistics.pstdev(normal)) == pytest.approx((500, 98), abs=2)
    heavy = loads.parse("--gen", "lognormal:300,0.8").values
    assert heavy[15] < 300 < heavy[16]
    assert (
        heavy[7] < 300 * math.exp(-0.8 * 0.6745) < heavy[8]
    )  # a quarter of a normal's values lies below -0.6745


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "10-5",
        "0-10",
        "1e3",
        "normal:50,100",
        "normal:5",
        "lognormal:0,1",
        "lognormal:9,999999999",
        "x",
    ],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="--gen"):
        make_plan(gen=text)


def test_lengths_are_drawn_from_shuffled_decks_by_the_seed() -> None:
    prompts = loads.Lengths("", (10, 20, 30, 40))
    answers = loads.Lengths("", (1, 2))
    drawn = loads.drawn(prompts, answers, 40, "1 0")
    assert (
        drawn
        == loads.drawn(prompts, answers, 40, "1 0")
        != loads.drawn(prompts, answers, 40, "1 1")
    )
    for i in range(0, 40, 4):
        assert sorted(index for index, _ in drawn[i : i + 4]) == [0, 1, 2, 3]
    assert set(Counter(n_gen for _, n_gen in drawn).values()) == {20}
    assert len(set(drawn)) == 8  # apart from each other


def test_each_round_measures_every_arm_once_in_another_order() -> None:
    plan = make_plan(rounds=20, max_requests=10_000)
    rounds = [[one.concurrency for one in plan.windows if one.round == n] for n in range(20)]
    assert (
        all(len(levels) == 4 and set(levels) == {1, 2, 4, 8} for levels in rounds)
        and len(set(map(tuple, rounds))) > 5
    )
    assert (
        plan
        == make_plan(rounds=20, max_requests=10_000)
        != make_plan(rounds=20, max_requests=10_000, seed=2)
    )
    assert {one.arrivals for one in plan.windows} == {CLOSED} and plan.seconds == 80 * 20


def test_an_open_loop_has_times_for_its_windows_and_as_much_again() -> None:
    windows = make_plan(rate=[50], warmup=1, duration=4, rounds=2).windows
    first, second = (loads.times_ns(one) or () for one in windows)
    assert windows[0].arrivals == POISSON and first != second
    assert list(first) == sorted(first) and max(first) < 10e9
    assert len(first) == pytest.approx(500, abs=5 * 500**0.5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"concurrency": "1", "rate": "1"}, "closed loop"),
        ({"concurrency": "0"}, "--concurrency 0"),
        ({"concurrency": "1.5"}, "--concurrency 1.5"),
        ({"concurrency": 10_000}, f"from 1 to {MOST_AT_ONCE}"),
        ({"concurrency": "nan"}, "--concurrency nan"),
        ({"concurrency": "1,x"}, "is not a list of numbers"),
        ({"rate": "0"}, "--rate 0"),
        ({"rate": "inf"}, "--rate inf"),
        ({"duration": 0}, "--duration 0"),
        ({"warmup": -1}, "--warmup -1"),
        ({"rounds": 0}, "--rounds 0"),
        ({"timeout": 0}, "--timeout 0"),
        (
            {"max_requests": 5},
            "needs 96 or more",
        ),  # a request for each user of the largest load in 12 windows
        ({"rate": "100"}, "needs 12,000 or more"),
        ({"slo": "ttft=1"}, "'ttft=1'"),
        ({"slo": "ttft=1s,ttft=2s"}, "ttft=2s"),
        ({"slo": "tpot=0ms"}, "tpot=0ms"),
    ],
)
def test_loads_that_are_not_possible_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words):
        make_plan(**asked)


def test_limits_are_read() -> None:
    slo = parse_slo("ttft=1s, TPOT=50ms,e2e=2.5s")
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s) == (
        1,
        0.05,
        2.5,
    ) and slo.label == "TTFT 1 s, TPOT 50 ms, E2E 2.5 s"


# Measuring


def test_a_closed_loop_has_so_many_users(server: NullServer, tmp_path: Path) -> None:
    asked = SHORT | {"prompt_len": "40-43", "gen": "3-5", "rounds": 2}
    records = lab.load(server.url, concurrency=[1, 3], slo="ttft=1s", out=tmp_path, **asked)
    windows: dict[tuple[int, int], list[Request]] = {}
    for record in records:
        load = load_of(record.request)
        windows.setdefault((load.concurrency, load.round), []).append(record.request)
    dates = sorted(
        (min(dates), max(dates))
        for own in windows.values()
        if (dates := [one.started_at for one in own])
    )
    assert all(
        ended < begun for (_, ended), (begun, _) in itertools.pairwise(dates)
    )  # between them it is idle
    (path,) = tmp_path.glob("*.jsonl")
    assert sorted(map(repr, lab.read([path]).requests)) == sorted(map(repr, records))
    assert sorted(windows) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for (n_users, _), own in windows.items():
        assert most_in_flight(own) == n_users
        assert (
            max(one.sent_ns or 0 for one in own) > 0.3e9
        )  # the load goes on under the last of the window
        assert {one.asked.n_prompt for one in own} >= {40, 41, 42, 43}
    for one in (record.request for record in records):
        assert one.status == OK and one.usage and load_of(one).slo == parse_slo("ttft=1s")
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (
            one.asked.n_prompt,
            one.asked.n_gen,
        )
        assert one.scheduled_ns is None and one.usage.cached_tokens == 0


def test_an_open_loop_sends_at_its_times_and_a_failure_has_its_class(tmp_path: Path) -> None:
    settings = NullSettings(models={"429": Behaviour(fails="429", fails_every=15, **FAST)})
    with null_server(settings) as failing, pytest.warns(UserWarning, match=r"\d requests failed: "):
        records = lab.load(failing.url, rate=100, out=tmp_path, **SHORT)
    requests = sorted((record.request for record in records), key=lambda one: one.scheduled_ns or 0)
    due_ns = loads.times_ns(make_plan(rate=100, **SHORT).windows[0]) or ()
    assert tuple(one.scheduled_ns for one in requests) == due_ns[: len(requests)]
    assert len(requests) >= sum(ns <= 0.3e9 for ns in due_ns) >= 15
    assert all((one.sent_ns or 0) >= (one.scheduled_ns or 0) for one in requests)
    bad = [one for one in requests if one.status == FAILED]
    assert {one.failure for one in bad} == {RATE_LIMITED} and len(bad) >= len(requests) // 15
    assert all(
        one.usage and one.usage.completion_tokens == 4 for one in requests if one.status == OK
    )


def test_never_more_than_max_requests_are_sent(server: NullServer, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match=r"users, round 1 ended after .* it used its share of --max-requests \(10\)",
    ):
        records = lab.load(
            server.url, concurrency="2,4", max_requests=20, out=tmp_path, **SHORT | {"duration": 60}
        )
    assert Counter(load_of(one.request).label for one in records) == {"2 users": 10, "4 users": 10}


def test_answers_that_no_stream_counts_are_tokenised_afterwards_and_never_sent_again(
    tmp_path: Path,
) -> None:
    with null_server(NullSettings(models={"null": Behaviour(**FAST | {"usage": NEVER})})) as plain:
        with connect(plain.url):
            n_probes = plain.sent()["n_requests"]
        records = lab.load(plain.url, concurrency=2, out=tmp_path, **SHORT)
        assert plain.sent()["n_requests"] == 2 * n_probes + len(records)
    counts = {
        (one.completion_tokens, one.counted_by) if (one := record.request.usage) else None
        for record in records
    }
    assert counts == {(4, "tokenize")}


def test_a_server_that_dies_ends_the_session_and_what_had_ended_is_kept(tmp_path: Path) -> None:
    behaviour = Behaviour(fails="dies", fails_every=40, **FAST)
    with (
        null_server(NullSettings(models={"null": behaviour})) as dying,
        pytest.raises(LabError, match="is gone") as gone,
    ):
        lab.load(dying.url, concurrency="3", out=tmp_path, **SHORT | {"duration": 60})
    (path,) = tmp_path.glob("*.jsonl")
    assert str(path) in gone.value.hint
    requests = [one.request for one in lab.read([path]).requests]
    assert sum(one.status == OK for one in requests) >= 20
    assert {one.failure for one in requests if one.status == FAILED} <= {REFUSED, LOST}
    assert loads.MOST_LOST <= sum(one.status == FAILED for one in requests) <= loads.MOST_LOST + 6


def test_ctrl_c_while_requests_are_written_keeps_each_once(
    server: NullServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_saved = itertools.count()

    def interrupted(path: Path, *records: Any) -> None:
        save(path, *records)
        if next(n_saved) == 0:  # they are on the disk, and nobody has been told
            raise KeyboardInterrupt

    monkeypatch.setattr(loads, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lab.load(server.url, concurrency=4, out=tmp_path, **SHORT | {"duration": 60})
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines()
    read = lab.read([path])
    assert len(lines) == len(set(lines)) == len(read.requests) > 0 and not read.skipped


# The command


def test_the_command_shows_and_keeps(server: NullServer, tmp_path: Path) -> None:
    options = [
        part for name, value in SHORT.items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    common = ["load", "--url", server.url, "--out", tmp_path, "--no-plot", *options]
    status, out, err = run_lab(*common, "-c", "1,2", "--slo", "ttft=1s")
    assert status == 0, err
    assert out.strip().startswith("Capacity (at least 90 % of requests within TTFT 1 s): ")
    assert "2 users" in out and "results  " in out and "a page to share: " in out
    assert "1 user, round 1 of 1 ..." in err and err.count("sizing prompts ...") == 1
    status, out, err = run_lab(*common, "--rate", "20", "--json", "--report")
    assert status == 0, err
    known = json.loads(out)
    assert "Under load" in Path(known["report"]).read_text() and known["plots"] == []
    assert len(lab.read([known["results"]]).requests) >= 3


def test_a_dry_run_sends_nothing() -> None:
    status, out, err = run_lab(
        "load", "--url", "http://server.invalid/v1", "--dry-run", "--rounds", "3"
    )
    assert (
        (status, err) == (0, "")
        and "1 user; 2 users; 4 users; 8 users" in out
        and "seconds       240.0" in out
    )
    status, out, _ = run_lab(
        "load", "--url", "http://server.invalid/v1", "--dry-run", "--rate", "1", "--json"
    )
    assert json.loads(out)["loads"] == ["1 request/s"]


def test_ctrl_c_shows_the_rounds_that_ended(
    server: NullServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*asked: Any) -> Iterator[RequestRecord]:
        for record in execute(*asked):
            if load_of(record.request).round == 1:
                raise KeyboardInterrupt
            yield record

    execute = loads.execute
    monkeypatch.setattr(loads, "execute", interrupted)
    options = (
        "-c",
        "2",
        "--gen",
        4,
        "--prompt-len",
        40,
        "--warmup",
        0,
        "--duration",
        2,
        "--no-plot",
    )
    status, out, err = run_lab("load", "--url", server.url, *options, "--out", tmp_path)
    assert status == 130 and "Interrupted. " in err
    assert "; 1 round\n" in out and "2 users" in out and "results  " in out
    assert "1 round stopped early (left out" in out


def test_nothing_but_failures_is_a_failure(tmp_path: Path) -> None:
    behaviour = Behaviour(fails="500", fails_every=1, **FAST)
    with null_server(NullSettings(models={"null": behaviour})) as bad:
        status, _, err = run_lab("load", "--url", bad.url, "--out", tmp_path, "--no-plot")
    assert status == 1 and "server error" in err and not list(tmp_path.glob("*.jsonl"))
