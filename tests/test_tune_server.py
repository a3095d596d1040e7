"""`lab tune --serve`: what planted loads say about a server's options, and servers that are started and end."""

import dataclasses
import itertools
import json
import math
import random
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.analysis import tuning, tuning_loads, tuning_search
from lab.analysis.tuning import CONFIRM, DEFAULT, GOODPUT, REQUEST, SEARCH, THROUGHPUT, TPOT, TTFT
from lab.analysis.tuning_loads import choice_of, options_of
from lab.core import results
from lab.core.record import FAILED, Tuning
from lab.core.request import COMPLETIONS, NOT_SENT, Endpoint, Events, Load, Request, RequestRecord
from lab.errors import LabError
from lab.experiments import tuning_server
from lab.experiments.tuning_server import ServerPlan, execute, plan
from lab.runner import server_session
from lab.runner.load_plan import make_plan
from lab.runner.progress import Status
from tests.conftest import MACHINE, make_record, run_lab
from tests.test_load_shown import LOAD, failed, planted

SLOTS = "--parallel 4"


def as_record(request: Request) -> RequestRecord:
    endpoint = Endpoint(url="http://127.0.0.1:1/v1", api=COMPLETIONS)
    return RequestRecord(session="a-session", machine=MACHINE, endpoint=endpoint, model="a-model", request=request)


def load_of(record: RequestRecord) -> Load:
    load = record.request.asked.load
    assert load
    return load


def window(variant: str, block: int, gap_s: float, goal: str = REQUEST, stage: str = SEARCH) -> list[RequestRecord]:
    """A window of one user whose answers have five tokens, the first after 0.1 s."""
    load = dataclasses.replace(LOAD, round=block, variant=variant, tuning=Tuning(goal=goal, stage=stage, n_gen=5))
    each_s = 0.1 + 4 * gap_s
    return [as_record(planted(i * each_s, load, gap_s=gap_s)) for i in range(round(5 / each_s) + 1)]


def test_options_and_choices_are_each_other() -> None:
    choice = (("cache_type_k", "q8_0"), ("cont_batching", False), ("kv_unified", True), ("parallel", 1))
    options = "--cache-type-k q8_0 --no-cont-batching --kv-unified --parallel 1"
    assert options_of(choice) == options
    assert choice_of(options) == choice
    assert type(dict(choice_of(options))["parallel"]) is int
    assert (options_of(()), choice_of(DEFAULT)) == (DEFAULT, ())


@pytest.mark.parametrize(
    ("goal", "seconds"),
    [(TTFT, 0.1), (TPOT, 0.05), (REQUEST, 0.3), (THROUGHPUT, 0.06), (GOODPUT, 0.3)],
)
def test_the_figure_of_each_goal_is_in_seconds(goal: str, seconds: float) -> None:
    measured = tuning_loads.measured(window(SLOTS, 2, 0.05, goal))
    assert measured is not None
    assert measured.timing is not None
    assert (measured.timing.block, measured.choice) == (2, (("parallel", 4),))
    assert measured.timing.seconds == {goal: pytest.approx(seconds)}


def test_no_answer_within_the_limits_is_a_bad_choice_and_no_error() -> None:
    measured = tuning_loads.measured(window(SLOTS, 1, 0.2, GOODPUT))  # the limit of TPOT is 0.1 s
    assert measured is not None
    assert measured.timing is not None
    assert measured.timing.seconds == {GOODPUT: pytest.approx(4 * 0.9 / tuning_loads.NONE_GOOD)}


def test_a_window_with_failures_has_no_figure_except_a_goodput() -> None:
    def with_failure(goal: str) -> list[RequestRecord]:
        own = window(SLOTS, 1, 0.05, goal)
        return [*own, as_record(failed(2.0, load_of(own[0]), error="no space in the context", failed_ns=10**8))]

    measured = tuning_loads.measured(with_failure(REQUEST))
    assert measured is not None
    assert measured.timing is None
    assert measured.error is not None
    assert measured.error.startswith("1 of ")
    assert measured.error.endswith(" requests failed: no space in the context")
    of_goodput = tuning_loads.measured(with_failure(GOODPUT))
    assert of_goodput is not None
    assert of_goodput.timing is not None


def not_started(variant: str, block: int) -> RequestRecord:
    (first, *_) = window(variant, block, 0.05)
    request = dataclasses.replace(
        first.request, status=FAILED, failure=NOT_SENT, error="it ended", sent_ns=None, events=Events(), usage=None
    )
    return as_record(request)


def test_a_session_of_requests_becomes_the_same_result_as_one_of_runs(tmp_path: Path) -> None:
    def session(n_blocks: int) -> list[RequestRecord]:
        lines = [*window(DEFAULT, 1, 0.05), *window(SLOTS, 1, 0.025), not_started("--ubatch-size 9", 1)]
        for block in range(2, n_blocks + 2):
            lines += [*window(DEFAULT, block, 0.05, stage=CONFIRM), *window(SLOTS, block, 0.025, stage=CONFIRM)]
        return lines

    path = tmp_path / "a-session.jsonl"
    results.append(path, *session(4))
    (found,) = tuning_loads.of_sessions(results.read([path]).measured)
    assert (found.goal, found.n_prompt, found.n_gen, found.n_users) == (REQUEST, 10, 5, 1)
    assert (found.choice, found.n_confirmed) == ((("parallel", 4),), 4)
    assert found.gain is not None
    assert found.gain.estimate == pytest.approx(1.5)
    assert found.is_recommended
    assert found.seconds[REQUEST] == pytest.approx((0.3, 0.2))
    assert [(one.variant, one.n_runs, one.error) for one in found.tried] == [
        (SLOTS, 1, None),
        (DEFAULT, 1, None),
        ("--ubatch-size 9", 0, "it ended"),
    ]
    assert found.tried[2].seconds is None
    (few,) = tuning_loads.of_sessions(session(3))
    assert (few.gain, few.n_confirmed) == (None, 3)


def test_a_window_that_was_interrupted_does_not_count() -> None:
    first, last = window(DEFAULT, 1, 0.05), window(SLOTS, 1, 0.025)
    for lines, n in ((first + last, 2), (first + last[:-3], 1), (first + last[:1], 1), (first[:-3], 0)):
        found = tuning_loads.of_sessions(lines)
        assert sum(len(one.tried) for one in found) == n
    (ended,) = tuning_loads.of_sessions([*first, not_started(SLOTS, 1)])
    assert ended.tried[1].error == "it ended"


def test_odd_records_are_left_out() -> None:
    def with_load(record: RequestRecord, **changes: Any) -> RequestRecord:
        load = dataclasses.replace(load_of(record), **changes)
        asked = dataclasses.replace(record.request.asked, load=load)
        return dataclasses.replace(record, request=dataclasses.replace(record.request, asked=asked))

    good = [*window(DEFAULT, 1, 0.05), *window(SLOTS, 1, 0.025)]
    other = with_load(good[0], tuning=Tuning(goal=TTFT, stage=SEARCH, n_gen=5))
    odd = [with_load(good[0], variant=None), with_load(good[0], concurrency=9), other]
    assert tuning_loads.of_sessions([*good, *odd]) == tuning_loads.of_sessions(good)
    assert tuning_loads.of_sessions(odd[:1]) == []
    (found,) = tuning_loads.of_sessions([*good, *(with_load(one, variant="--x 'y") for one in good[:18])])
    assert [one.choice for one in found.tried if one.variant == "--x 'y"] == [(("x", "'y"),)]


def test_without_the_default_there_is_no_result_and_other_records_are_told_apart() -> None:
    assert tuning_loads.of_sessions(window(SLOTS, 1, 0.05)) == []
    assert tuning_loads.of_sessions(window(DEFAULT, 0, 0.05, stage=tuning_server.WARMUP)) == []
    others: list[Any] = [make_record(), as_record(planted(0))]
    assert tuning.without([*others, *window(SLOTS, 1, 0.05)]) == others
    assert tuning_loads.of_sessions(others) == []


TUNABLE = f"{shlex.quote(sys.executable)} -m tests.tunable_server --port {{port}} {{settings}}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short windows, one block of search, a confirmation of two, and no time for the client itself."""
    monkeypatch.setattr(tuning_server, "LEAST_S", 0.2)
    monkeypatch.setattr(tuning_server, "FEWEST_CONFIRMED", 2)
    monkeypatch.setattr(tuning_server, "MOST_CONFIRMED", 2)
    monkeypatch.setattr(tuning_search, "KNOWN_WITHIN", 10.0)
    monkeypatch.setattr(server_session, "client_error", lambda n_streams: None)


def test_the_choices_are_those_that_the_servers_help_names() -> None:
    made = plan(TUNABLE, 40, 6, users=3)
    singles = [options_of(one) for one in made.choices if len(one) == 1]
    slots, others = singles[:3], singles[3:]
    assert slots == ["--parallel 1", "--parallel 2", "--parallel 3"]
    assert others == ["--flash-attn off", "--flash-attn on", "--ubatch-size 64", "--ubatch-size 128"]  # 120 tokens
    assert all(len({name for name, _ in one}) == len(one) <= 3 for one in made.choices)
    assert not any("cache_type" in name for one in made.choices for name, _ in one)
    unknown = tuning_server._choices(4000, 1, None, allow_lossy=True)
    assert {"cache_type_k", "cont_batching", "kv_unified"} <= {name for one in unknown for name, _ in one}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("llama-server {settings}", "has no place for the port: {port}"),
        ("llama-server --port {port}", "has no place for the settings: {settings}"),
        ("llama-server 'm --port {port} {settings}", "cannot be read: No closing quotation"),
        ("no-such-program --port {port} {settings}", "no-such-program cannot be started: No such file"),
        (f"{sys.executable} -m http.server {{port}} {{settings}}", "names no option that the lab can try"),
    ],
)
def test_a_template_that_cannot_work_is_refused_at_once(template: str, words: str) -> None:
    with pytest.raises(LabError, match=words.replace("{", r"\{")):
        plan(template)


def test_a_server_that_ends_at_once_shows_its_last_words(tmp_path: Path, quick: None) -> None:
    made = plan(f"{sys.executable} -c 'import sys; sys.exit(\"no model here\")' {{port}} {{settings}}")
    path = tuning_server.new_file(made, tmp_path)
    with pytest.raises(LabError, match=r"The server ended: exit status 1. Its last output: no model here"):
        list(execute(made, path, lambda status: None))
    assert not path.exists()


def test_a_server_is_tuned_under_load_and_failing_choices_are_dropped(tmp_path: Path, quick: None) -> None:
    made = plan(TUNABLE, 40, 6, users=2, budget_s=500)
    crash, refused = (("ubatch_size", 64),), (("flash_attn", "on"),)
    made = dataclasses.replace(made, choices=((("parallel", 2),), crash, refused, (*refused, *crash)))
    path, seen = tuning_server.new_file(made, tmp_path), list[Status]()
    records = list(execute(made, path, seen.append))
    assert results.read([path]).measured == records
    found = tuning_loads.tuned(records)
    assert found is not None
    assert (found.choice, found.n_confirmed, found.n_users) == ((("parallel", 2),), 2, 2)
    assert found.seconds[THROUGHPUT][0] > 1.3 * found.seconds[THROUGHPUT][1]  # two slots are twice as fast as one
    errors = {one.variant: one.error or "" for one in found.tried}
    assert "flash attention needs a GPU" in errors["--flash-attn on"]
    assert "GGML_ASSERT failed" in errors["--ubatch-size 64"]
    assert len(errors) == 4  # the combination of both is not tried
    assert {status.part.partition(",")[0] for status in seen} == {"warm-up", "search", "confirm"}


def test_a_prompt_that_the_server_cannot_have_is_an_error_with_its_own_hint(tmp_path: Path, quick: None) -> None:
    made = plan(TUNABLE, 2, 6, users=2)
    with pytest.raises(LabError, match=r"A prompt of 2 tokens is not possible") as problem:
        list(execute(made, tuning_server.new_file(made, tmp_path), lambda status: None))
    assert problem.value.hint != tuning_server.HINT


def test_leaving_early_ends_the_server(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    started, make = list[Any](), tuning_server._Process

    def made_process(*args: Any) -> Any:
        started.append(make(*args))
        return started[-1]

    monkeypatch.setattr(tuning_server, "_Process", made_process)
    made = plan(TUNABLE, 40, 6, users=2)
    running = execute(made, tuning_server.new_file(made, tmp_path), lambda status: None)
    next(running)
    assert started[-1].popen.poll() is None
    running.close()
    assert started[-1].popen.poll() is not None


def test_a_server_that_does_not_end_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    )
    monkeypatch.setattr(tuning_server, "END_S", 0.1)
    with tuning_server._started([sys.executable, "-c", code]) as process:
        while not (pid := process.log.read_text().strip()):
            pass
    assert process.popen.returncode == -9
    stat, until = Path(f"/proc/{pid}/stat"), time.monotonic() + 10
    while (
        runs := stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    ) and time.monotonic() < until:
        time.sleep(0.01)
    assert not runs


class Simulated:
    """Loads whose answers take `seconds[options]` (None: the server ends), in place of servers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float | None]) -> None:
        self.seconds, self.order = seconds, list[tuple[str, int]]()
        monkeypatch.setattr(tuning_server._Session, "_window", lambda session, choice, load: self.window(session, load))
        monkeypatch.setattr(tuning_server._Session, "_keep", lambda session, load, reason: not_started(load.variant, 1))

    def window(self, session: Any, load: Load) -> Iterator[RequestRecord]:
        assert load.variant is not None
        self.order.append((load.variant, load.round))
        each_s = self.seconds[load.variant]
        if each_s is None:
            raise tuning_server._Failed("it ended")
        n = round((load.warmup_s + load.duration_s) / each_s) + 1
        yield from (as_record(planted(i * each_s, load, ttft_s=each_s / 2, gap_s=each_s / 8)) for i in range(n))


def simulated_plan(*options: str, budget_s: float = 3600.0) -> ServerPlan:
    load = make_plan(concurrency=1, rounds=1, prompt_len=10, gen=5)
    choices = tuple(choice_of(one) for one in options)
    return ServerPlan(("server",), REQUEST, budget_s, load, "", choices, None, {})


@pytest.mark.parametrize(
    ("effects", "winner"), [({}, None), ({"--parallel 4": 0.8, "--flash-attn off": 0.9, "--threads 2": 1.3}, 2)]
)
def test_a_planted_combination_is_found_and_none_among_equals(
    effects: dict[str, float], winner: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block has a speed of its own, each window noise of 3 %; a window with its server takes 5 s more."""
    chance, speeds, now = random.Random(1), dict[int, float](), [0.0]

    class Noisy(Simulated):
        def window(self, session: Any, load: Load) -> Iterator[RequestRecord]:
            speed = speeds.setdefault(load.round, chance.lognormvariate(0, 0.05))
            parts = [options_of((one,)) for one in choice_of(load.variant or "")]
            each_s = speed * chance.lognormvariate(0, 0.03) * math.prod(effects.get(one, 1.0) for one in parts)
            self.seconds[load.variant or ""] = each_s
            now[0] += 5 + load.warmup_s + load.duration_s
            return super().window(session, load)

    Noisy(monkeypatch, {})
    monkeypatch.setattr(tuning_server.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    singles = [*(choice_of(one) for one in effects or {SLOTS: 1, "--threads 2": 1}), (("ubatch_size", 64),)]
    made = simulated_plan(
        *map(options_of, singles), *(options_of(a + b) for a, b in itertools.combinations(singles, 2))
    )
    found = tuning_loads.tuned(list(execute(made, tmp_path / "file", lambda status: None)))
    assert found is not None
    assert found.is_recommended is (winner is not None)
    if winner:
        assert dict(found.choice) == {"flash_attn": "off", "parallel": 4}
        assert found.gain is not None
        assert found.gain.low < 1 / (0.8 * 0.9) < found.gain.high


def test_the_confirmation_alternates_in_blocks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(monkeypatch, {DEFAULT: 0.5, SLOTS: 0.25, "--threads 9": None})
    list(execute(simulated_plan(SLOTS, "--threads 9"), tmp_path / "file", lambda status: None))
    last = simulated.order[-16:]
    assert [variant for variant, _ in last] == [SLOTS, DEFAULT, DEFAULT, SLOTS] * 4
    assert len({block for _, block in last}) == 8
    assert min(block for _, block in last) > max(block for _, block in simulated.order[:-16])
    assert sum(variant == "--threads 9" for variant, _ in simulated.order) == 1


def test_nothing_is_confirmed_where_the_default_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(monkeypatch, {DEFAULT: 0.5, SLOTS: 0.6})
    list(execute(simulated_plan(SLOTS), tmp_path / "file", lambda status: None))
    assert simulated.order[:1] == [(DEFAULT, 0)]
    assert sum(variant == SLOTS for variant, _ in simulated.order) < 4


def test_a_budget_too_small_for_a_proof_is_refused_after_the_first_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated = Simulated(monkeypatch, {DEFAULT: 0.5})
    with pytest.raises(LabError, match=r"The budget of 50 s is too small: .* about \d s.\nUse at least --budget 1min"):
        list(execute(simulated_plan(SLOTS, budget_s=50), tmp_path / "file", lambda status: None))
    assert simulated.order == [(DEFAULT, 0)]


def test_a_default_that_fails_once_later_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(Simulated):
        def window(self, session: Any, load: Load) -> Iterator[RequestRecord]:
            self.seconds[DEFAULT] = None if load.round == 2 else 0.5
            return super().window(session, load)

    monkeypatch.setattr(tuning_search, "KNOWN_WITHIN", 0.0)
    simulated = Once(monkeypatch, {SLOTS: 0.25})
    running = execute(simulated_plan(SLOTS), tmp_path / "file", lambda status: None)
    while (DEFAULT, 3) not in simulated.order:
        next(running)
    assert (DEFAULT, 2) in simulated.order


def test_a_default_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Simulated(monkeypatch, {DEFAULT: None})
    with pytest.raises(LabError, match=r"The server cannot be measured: it ended\."):
        list(execute(simulated_plan(SLOTS), tmp_path / "file", lambda status: None))


def test_llama_server_gets_the_options_of_each_choice(
    tmp_path: Path, embedded: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_server, "FEWEST_CONFIRMED", 1)
    monkeypatch.setattr(tuning_server, "MOST_CONFIRMED", 1)
    monkeypatch.setattr(tuning_server, "FEWEST_EACH", 3)
    template = (
        f"{shlex.quote(sys.executable)} -m tests.servers {shlex.quote(str(embedded))} --port {{port}} {{settings}}"
    )
    made = plan(template, 50, 4, users=2, goal=TTFT)
    assert (("parallel", 2),) in made.choices
    assert {name for choice in made.choices for name, _ in choice} == {"parallel", "threads"}  # what its help names
    made = dataclasses.replace(made, choices=((("parallel", 2),),))
    records = list(execute(made, tuning_server.new_file(made, tmp_path), lambda status: None))
    slots = {(load_of(one).variant, one.endpoint.settings and one.endpoint.settings.n_slots) for one in records}
    assert slots == {(DEFAULT, 1), ("--parallel 2", 2)}
    assert {one.request.asked.n_prompt_counted for one in records} == {50}
    found = tuning_loads.tuned(records)
    assert found is not None
    assert all(one.seconds and one.seconds > 0 for one in found.tried)


def test_lab_tune_with_a_command_tunes_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def tuned(*args: Any, **more: Any) -> list[RequestRecord]:
        asked.append((args, more))
        return [*window(DEFAULT, 1, 0.05), *window(SLOTS, 1, 0.025)]

    monkeypatch.setattr(tuning_server, "tune_server", tuned)
    found = lab.tune(40, 6, serve="server {port} {settings}", users=2, budget="2min", slo="ttft=1s", seed=3)
    assert [one.variant for one in found.tried] == [SLOTS, DEFAULT]
    more = {"goal": REQUEST, "users": 2, "budget_s": 120.0, "allow_lossy": False, "slo": "ttft=1s", "seed": 3}
    assert asked == [(("server {port} {settings}", 40, 6), more)]


def planted_session(plan: ServerPlan, path: Path, watch: Any) -> Iterator[RequestRecord]:
    """A session in which two slots are the fastest, confirmed in four blocks."""
    lines = [*window(DEFAULT, 1, 0.05, THROUGHPUT), *window("--parallel 2", 1, 0.025, THROUGHPUT)]
    for block, variant in itertools.product(range(2, 6), (DEFAULT, "--parallel 2")):
        lines += window(variant, block, 0.05 if variant == DEFAULT else 0.025 + block / 1e5, THROUGHPUT, CONFIRM)
    for line in lines:
        results.save(path, line)
        yield line


def test_the_command_shows_the_result_and_a_ready_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_server, "execute", planted_session)
    asked = ("tune", "--serve", TUNABLE, "--users", 2, "-p", 40, "-n", 6, "--out", tmp_path, "--no-plot")
    status, out, err = run_lab(*asked)
    assert status == 0, err
    assert "--parallel 2 is 1.50 times as fast" in out
    assert f"command  {sys.executable} -m tests.tunable_server --port 8080 --parallel 2\n" in out
    assert "tries    --parallel, --flash-attn, --ubatch-size;" in err
    status, out, _ = run_lab(*asked, "--json")
    (found,) = json.loads(out)["tunings"]
    assert (found["recommended"], found["goal"], found["n_blocks_confirmed"]) == ("--parallel 2", THROUGHPUT, 4)
    assert json.loads(out)["command"].endswith("--parallel 2")
    _, out, _ = run_lab("show", json.loads(out)["results"])
    assert "--parallel 2 is 1.50 times as fast" in out


def test_the_command_shows_what_is_known_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: ServerPlan, path: Path, watch: Any) -> Iterator[RequestRecord]:
        yield from itertools.islice(planted_session(plan, path, watch), 50)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning_server, "execute", interrupted)
    status, out, err = run_lab("tune", "--serve", TUNABLE, "--users", 2, "--out", tmp_path, "--no-plot")
    assert status == 130
    assert "Interrupted. 50 requests in " in err
    assert "No recommendation: --parallel 2 was the fastest in the search" in out
    assert "command  " not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--url", "http://user:password@host/v1"), "The settings of a running server (--url) cannot be changed."),
        (("--slo", "ttft=1s"), "--slo needs a server."),
        (("--serve", TUNABLE, "--threads", "2"), "--threads is not possible with --serve."),
        (("--serve", TUNABLE, "--slo", "ttft=1s", "--goal", "ttft"), "--goal and --slo exclude each other."),
        (("--serve", TUNABLE, "--slo", "ttft=1"), "The limits 'ttft=1' cannot be read."),
        (("--serve", TUNABLE, "--budget", "long"), "--budget long is not possible."),
        (("--serve", TUNABLE, "--users", "0"), "--concurrency 0 is not possible."),
    ],
)
def test_options_that_cannot_work_are_refused(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    status, out, err = run_lab("tune", *options, "--out", tmp_path)
    assert (status, out) == (1, "")
    assert words in " ".join(err.split())
    assert "password" not in err
    assert not list(tmp_path.iterdir())


def test_a_dry_run_starts_nothing_but_the_help(tmp_path: Path) -> None:
    status, out, err = run_lab("tune", "--serve", TUNABLE, "--slo", "ttft=1s", "--dry-run", "--json", "--out", tmp_path)
    assert (status, list(tmp_path.iterdir())) == (0, [])
    assert "tries    --parallel" in err
    assert json.loads(out)["goal"] == GOODPUT
