"""Volleys of requests: sent at the same moment, kept with their case, and shown beside runs in
process."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import lab
from lab.core import results
from lab.core.request import RequestRecord
from lab.errors import LabError
from lab.remote import session
from lab.remote.access import access
from lab.remote.examination import connect
from lab.remote.servers import Server
from lab.remote.session import ServerPlan, execute, make_plan
from lab.remote.watching import RequestWatch, server_pids
from lab.runner.batches import Batch
from lab.runner.cases import Case
from lab.show import canvas, volleys
from lab.show.section import Context
from tests.support.command import run_lab
from tests.support.null_server import RUNNING, Behaviour, NullSettings, null_server
from tests.support.records import make_record, make_run
from tests.support.tables import headings

N_PROMPT = 30
N_GEN = 6


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    behaviour = Behaviour(usage=RUNNING, first_ms=20.0, gap_ms=4.0)
    settings = NullSettings(models={"null": behaviour}, n_slots=2)
    with null_server(settings) as started, connect(started.url) as examined:
        yield examined


def plan_of(*sizes: int, repeat: int = 2) -> ServerPlan:
    """Volleys of these sizes."""
    cases = []
    for n_seq in sizes:
        sequences = (N_PROMPT + N_GEN,) * n_seq
        setup = Batch(n_seq, is_shared=False)
        cases.append(
            Case(
                N_PROMPT,
                N_GEN,
                experiment="batch",
                setup=setup,
                sequences=sequences,
            )
        )
    plan = make_plan([N_PROMPT], N_GEN, repeat)
    return dataclasses.replace(plan, cases=tuple(cases))


@pytest.fixture(scope="module")
def records(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[RequestRecord], Path]:
    path = server.new_file(tmp_path_factory.mktemp("results"))
    return list(execute(plan_of(1, 4), server, path, lambda status: None)), path


def test_a_volley_is_sent_at_once_and_each_request_says_its_case(
    records: tuple[list[RequestRecord], Path],
) -> None:
    requests, path = records
    assert results.read([path]).requests == tuple(requests)
    timed = [record for record in requests if record.is_good]
    assert len(timed) == 2 * (1 + 4)
    of_four = [record for record in timed if record.case == {"n_seq": 4, "is_shared": False}]
    assert {record.experiment for record in of_four} == {"batch"}
    for repeat in (0, 1):
        volley = [record for record in of_four if record.request.asked.repeat == repeat]
        sent_ns = [record.request.sent_ns or 0 for record in volley]
        first_end_ns = min(record.request.ended_ns or 0 for record in volley)
        assert len(volley) == 4
        assert max(sent_ns) - min(sent_ns) < first_end_ns  # all were in flight together


def test_the_table_has_rates_in_total_and_per_user(
    records: tuple[list[RequestRecord], Path],
) -> None:
    measured = volleys.volleys(records[0])
    rows = volleys.summary(measured, volleys.runs_in_process([], "batch"))
    assert rows.n_seq.tolist() == [1, 4]
    assert rows.n_volleys.tolist() == [2, 2]
    alone, four = rows.itertuples()
    assert alone.ttft_s >= 0.02
    assert four.last_ttft_s >= four.ttft_s
    assert alone.user_tps == pytest.approx(1e3 / alone.tpot_ms, rel=0.2)
    assert four.total_tps > 2 * alone.total_tps


def test_runs_in_process_stand_beside_them(
    records: tuple[list[RequestRecord], Path],
) -> None:
    run = dataclasses.replace(
        make_run(N_PROMPT, N_GEN),
        experiment="batch",
        case={"n_seq": 1, "is_shared": False},
    )
    context = Context(runs=[make_record(run)])
    (section,) = volleys.chapters(records[0], context, "batch")
    (part,) = section.parts
    assert "in process:\ntotal" in headings(part)
    assert "4 requests at once: " in part.said
    (picture,) = part.pictures
    figure = canvas.drawn(picture.draw, picture.file_size)
    assert figure.get_suptitle().startswith("4 requests at once: ")
    for ax in figure.axes:
        highest = max(np.asarray(line.get_ydata(), float).max() for line in ax.lines)
        assert ax.get_ylim()[1] >= 1.04 * highest
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["30 prompt tokens", "30 prompt tokens, in process"]
    (wait,) = [line for line in part.warnings if "slot" in line]
    assert wait == "The server has 2 slots, so 2 of 4 requests at once wait for one."


def test_a_volley_with_a_failed_request_is_left_out(
    records: tuple[list[RequestRecord], Path],
) -> None:
    requests = [record for record in records[0] if record.is_good]
    last = requests[-1]
    failed = dataclasses.replace(
        last, request=dataclasses.replace(last.request, status="failed")
    )
    n_before = len(volleys.volleys(requests))
    assert len(volleys.volleys([*requests[:-1], failed])) == n_before - 1


def test_a_plan_says_how_many_requests_it_sends(server: Server) -> None:
    plan = plan_of(1, 4, repeat=3)
    assert plan.n_requests == (1 + 4) * (3 + 1)
    assert plan.summary.startswith("20 requests for up to 36 tokens each")
    session.check(plan, server)


def test_a_session_ends_at_its_deadline(tmp_path: Path) -> None:
    behaviour = Behaviour(usage=RUNNING, first_ms=20.0, gap_ms=4.0)
    requests = []
    with (
        null_server(NullSettings(models={"null": behaviour})) as started,
        connect(started.url, budget_s=60) as examined,
    ):
        path = examined.new_file(tmp_path)
        for record in execute(plan_of(1, repeat=1000), examined, path, lambda status: None):
            requests.append(record)
            if len(requests) == 3:
                examined.client._began_s -= examined.client.left_s - 0.3
        assert 3 <= len(requests) < 1000
        with pytest.raises(LabError, match="time of the session is over"):
            examined.count("one more")


def test_the_command_sends_volleys_and_shows_them(tmp_path: Path) -> None:
    behaviour = Behaviour(usage=RUNNING, first_ms=5.0, gap_ms=1.0)
    with null_server(NullSettings(models={"null": behaviour})) as started:
        options = ("-s", "1,3", "-p", N_PROMPT, "-n", N_GEN, "-r", 1, "--out", tmp_path)
        status, out, err = run_lab("batch", "--url", started.url, *options, "--json")
        assert status == 0, err
        rows = json.loads(out)["rows"]
        assert [row["n_seq"] for row in rows] == [1, 3]
        assert all(row["total_tps"] > 0 for row in rows)
        status, out, err = run_lab("show", tmp_path)
        assert status == 0, err
        assert "3 requests at once: " in out
        status, _, err = run_lab("batch", "--url", started.url, "--shared-prompt")
        assert status == 1
        assert "--shared-prompt is only for the lab's own engine" in err


def test_the_function_sends_volleys(tmp_path: Path) -> None:
    behaviour = Behaviour(usage=RUNNING, first_ms=5.0, gap_ms=1.0)
    with null_server(NullSettings(models={"null": behaviour})) as started:
        requests = lab.batch(
            [2],
            [N_PROMPT],
            N_GEN,
            1,
            url=started.url,
            out=tmp_path,
        )
    assert [record.is_warmup for record in requests] == [True, True, False, False]
    assert {record.case["n_seq"] for record in requests} == {2}
    words = ("batch", "--sequences", "2", "--prompt-len", str(N_PROMPT), "--gen", str(N_GEN))
    assert requests[-1].command == (*words, "--repeat", "1", "--url", started.url)
    assert requests.requests == tuple(requests)
    with pytest.raises(LabError, match="threads is only for the lab's own engine"):
        lab.batch(url=started.url, threads=4)


def test_a_failed_request_of_a_volley_is_named(
    records: tuple[list[RequestRecord], Path], tmp_path: Path
) -> None:
    last = records[0][-1]
    request = dataclasses.replace(
        last.request,
        status="failed",
        failure="stalled",
        error="quiet",
    )
    results.save(
        tmp_path / "a.jsonl", *records[0][:-1], dataclasses.replace(last, request=request)
    )
    status, out, err = run_lab("show", tmp_path)
    assert status == 0, err
    assert "failed 1 of 10 requests (stalled)" in out


def test_a_server_on_this_machine_is_watched_and_its_own_work_is_no_noise() -> None:
    with null_server(NullSettings()) as started:
        here = access(started.url)
        pids = server_pids(here)
        looks: list[int] = []
        watch = RequestWatch(pids, lambda: looks.append(1))
        watch.look()
        noise = watch.finish()

    assert pids[0] == started.pid
    assert looks == [1]
    assert noise is not None
    assert noise.samples is not None
    assert server_pids(access("http://192.0.2.1:8080/v1")) == []
    assert RequestWatch([], lambda: None).finish() is None
