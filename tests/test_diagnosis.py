"""What is found out when native code ends the engine: with a fake engine, and with libraries that
die for real."""

import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core.record import CRASHED, OK, Rate, Record, Settings
from lab.core.script import Script
from lab.errors import LabError
from lab.process.setup import ProcessSetup
from lab.process.wire import Outcome, Probe, Progress, Vocabulary
from lab.process.worker import Worker, WorkerDied
from lab.runner import builds, diagnosis, trial as side_by_side
from lab.runner.cases import Plan
from lab.runner.diagnosis import Diagnosed
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from lab.runner.session import execute, new_results_file
from lab.runner.trial import plan as plan_trial
from tests.support import faults
from tests.support.fake_worker import FakeWorker

CRASH = "The engine's process ended: SIGSEGV."


class Faulty(FakeWorker):
    """A fake engine that dies in runs under a condition on its settings and its script."""

    def __init__(
        self, dies: Callable[[Settings, int], bool] = lambda settings, n_prompt: False
    ) -> None:
        super().__init__()
        self.dies = dies
        self.deaths = 0
        self.status = -int(signal.SIGSEGV)

    def load(self, *asked: Any) -> Vocabulary:
        self.settings: Settings = asked[1]
        return super().load(*asked)

    def run(
        self,
        script: Script,
        watch: Callable[[Progress], None],
    ) -> Outcome:
        if self.dies(self.settings, sum(part.n_tokens for part in script[0].parts)):
            self.deaths += 1
            raise WorkerDied(CRASH, status=self.status)
        return super().run(script, watch)

    def probe(self, probe: Probe) -> Rate:
        return Rate(probe.op, probe.type, "CPU", 1, 1, 1, 1, 1, 1, (1,))


def planned(worker: Worker | FakeWorker, folder: Path, **asked: Any) -> Plan:
    path = folder / "tiny.gguf"
    path.write_bytes(b"GGUF")
    options = {
        "prompt_len": "10,600",
        "gen": 5,
        "repeat": 2,
        "model": str(path),
        "threads": 2,
        **asked,
    }
    return make_plan(worker, **options)


def measured(
    worker: FakeWorker, folder: Path, **asked: Any
) -> tuple[list[Record], list[Status]]:
    plan = planned(worker, folder, **asked)
    seen: list[Status] = []
    path = new_results_file(plan, folder / "results")
    records = list(execute(plan, worker, path, seen.append))
    return records, seen


def outcome(records: list[Record]) -> list[tuple[int, int, str]]:
    """Prompt length, repeat and status of each timed run."""
    runs = [record.run for record in records if not record.run.warmup]
    return sorted((run.n_prompt, run.repeat, run.status) for run in runs)


ALL_WELL = [
    (10, 0, OK),
    (10, 1, OK),
    (600, 0, OK),
    (600, 1, OK),
]


@pytest.mark.parametrize(
    ("dies", "option", "field", "value"),
    [
        (lambda settings, n: settings.repack is not False, "--no-repack", "repack", False),
        (
            lambda settings, n: settings.flash_attn != "off",
            "--flash-attn off",
            "flash_attn",
            "off",
        ),
        (lambda settings, n: settings.n_threads > 1, "--threads 1", "n_threads_batch", 1),
        (lambda settings, n: settings.mmap is not False, "--no-mmap", "mmap", False),
    ],
)
def test_a_session_goes_on_with_the_setting_that_helps_and_says_so(
    dies: Any, option: str, field: str, value: object, tmp_path: Path
) -> None:
    records, seen = measured(Faulty(dies), tmp_path)
    assert outcome(records) == ALL_WELL
    crash, *following = records
    assert crash.run.status == CRASHED
    assert crash.run.warmup is True
    assert getattr(crash.settings, field) != value
    assert {getattr(record.settings, field) for record in following} == {value}
    assert {record.run.status for record in following} == {OK}
    (note,) = [status.note for status in seen if option in (status.note or "")]
    assert note == crash.run.error
    assert f"The session continues with {option}" in note


def test_where_nothing_helps_each_length_dies_once(tmp_path: Path) -> None:
    worker = Faulty(lambda settings, n: n in (10, 32))
    records, seen = measured(worker, tmp_path)
    assert outcome(records) == [(10, 0, CRASHED), (600, 0, CRASHED)]
    first, second = (str(record.run.error) for record in records)
    assert "also with each of --no-repack, --flash-attn off, --threads 1, --no-mmap" in first
    assert second == CRASH
    assert not any(status.note for status in seen)
    assert worker.deaths == 1 + 1 + 4 + 1  # the first, the trials, and the other length


def test_a_crash_that_does_not_come_again_is_told_and_tried_again(tmp_path: Path) -> None:
    deaths = iter([True])
    records, _ = measured(Faulty(lambda settings, n: next(deaths, False)), tmp_path)
    assert outcome(records) == ALL_WELL
    assert "the crash did not repeat" in str(records[0].run.error)
    assert {record.settings.repack for record in records} == {None}


def test_a_trial_of_variants_ends_with_the_cause(tmp_path: Path) -> None:
    """To go on with another setting than a variant's would compare what nobody asked for."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    def new_worker() -> Any:
        return Faulty(lambda settings, n: settings.flash_attn == "on")

    variants = [
        ("-fa on", {"flash_attn": "on"}),
        ("-fa off", {"flash_attn": "off"}),
    ]
    shared: dict[str, Any] = {
        "model": str(tmp_path / "tiny.gguf"),
        "prompt_len": "10",
        "gen": 5,
    }
    plans = plan_trial(new_worker(), variants, 3, **shared)
    path = new_results_file(next(iter(plans.values())), tmp_path / "results")
    records = []
    with pytest.raises(LabError, match=r"A: -fa on: .*The cause is flash attention"):
        for record in side_by_side.execute(
            plans, side_by_side.Blocks(3), path, lambda status: None, new_worker
        ):
            records.append(record)
    assert outcome(records) == [(10, 0, CRASHED)]


# Builds of another machine


def test_a_build_for_another_cpu_is_told_before_anything_is_loaded(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "mismatch", lambda text: (frozenset({"AVX512"}), frozenset()))
    with pytest.raises(
        LabError, match="needs AVX512, which this CPU does not have"
    ) as problem:
        planned(fake_worker, tmp_path)
    assert builds.BUILD_HERE in problem.value.hint
    assert not fake_worker.loads
    monkeypatch.setattr(builds, "mismatch", lambda text: None)  # the system does not say
    assert planned(fake_worker, tmp_path).cases


# Libraries that die

needs_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("gcc"),
    reason="plants faults with gcc and ELF libraries",
)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with other things a trial takes longer than it does for people."""
    monkeypatch.setattr(diagnosis, "DIAGNOSIS_S", 300.0)
    monkeypatch.setattr(diagnosis, "ATTEMPT_S", 60.0)


@pytest.fixture
def engine() -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@needs_linux
@pytest.mark.parametrize(
    ("fault", "sentence", "option"),
    [
        ("kernel", r"SIGILL.*A plain matrix product on the CPU", None),
        ("repacked", r"SIGSEGV.*The cause is the repacked layouts of weights", "--no-repack"),
    ],
)
def test_the_cause_of_a_planted_fault_is_named(
    fault: str,
    sentence: str,
    option: str | None,
    engine: Worker,
    mini: Path,
    tmp_path: Path,
    patience: None,
) -> None:
    engine.use(ProcessSetup(lib=str(faults.plant(fault, tmp_path))))
    plan = make_plan(
        FakeWorker(),
        "8",
        4,
        1,
        str(mini),
        prompt="random",
        threads=2,
    )
    with pytest.raises(WorkerDied) as death:
        diagnosis.small_job(engine, plan, plan.settings, 8)
    diagnosed = diagnosis.diagnose(engine, plan, 8, death.value)
    assert isinstance(diagnosed, Diagnosed)
    assert re.search(sentence, diagnosed.what)
    assert getattr(diagnosed.change, "option", None) == option
    assert diagnosed.is_lasting


@needs_linux
def test_a_build_that_ends_while_it_starts_is_told_in_a_sentence(
    engine: Worker, tmp_path: Path
) -> None:
    engine.use(ProcessSetup(lib=str(faults.plant("start", tmp_path))))
    with pytest.raises(LabError, match=r"SIGILL.*llama.cpp crashed at its start") as problem:
        builds.of_worker(engine)
    assert not isinstance(problem.value, WorkerDied)
    assert "Build the llama.cpp" in problem.value.hint
