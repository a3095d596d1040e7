"""Polling and priority of the CPU threads: checked against the build, given to ggml, and seen by the system."""

import ctypes
import dataclasses
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.core import script as scripts
from lab.engine import bindings, thread_pool
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner import limits
from lab.runner.plan import make_plan
from tests.conftest import SETTINGS, FakeWorker

SMALL = dataclasses.replace(SETTINGS, n_ctx=64, n_ubatch=32)


class FakeGgml:
    """The functions of ggml and llama.cpp that pools need; pools are numbered from 1 in the order of their making."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, int, bool]] = []  # threads, priority, poll, paused
        self.freed: list[int] = []
        self.attached: tuple[int, ...] = ()
        self._lib = SimpleNamespace(llama_attach_threadpool=lambda *given: self.attach(*given))  # noqa: PLW0108 its types are set

    def ggml_threadpool_params_init(self, params: Any, n_threads: int) -> None:
        params._obj.n_threads, params._obj.prio, params._obj.poll = n_threads, 0, 50

    def attach(self, context: Any, pool: Any, pool_batch: Any) -> None:
        self.attached = context, pool.value, pool_batch.value

    def function(self, name: bytes, *_: object) -> Any:
        return self.new if name == b"ggml_threadpool_new" else lambda pool: self.freed.append(pool.value)

    def new(self, params: Any) -> int:
        one = params._obj
        self.made.append((one.n_threads, one.prio, one.poll, one.paused))
        return len(self.made)


@pytest.fixture
def ggml(monkeypatch: pytest.MonkeyPatch) -> FakeGgml:
    fake = FakeGgml()
    monkeypatch.setattr(thread_pool, "ggml", lambda: fake)
    monkeypatch.setattr(thread_pool, "llama_cpp", lambda: fake)
    monkeypatch.setattr(thread_pool, "_function", fake.function)
    return fake


def test_nothing_is_attached_by_default(ggml: FakeGgml) -> None:
    thread_pool.attach(9, SMALL).free()
    assert (ggml.made, ggml.attached, ggml.freed) == ([], (), [])


def test_one_pool_serves_both_phases_and_what_was_not_asked_stays_ggmls(ggml: FakeGgml) -> None:
    pools = thread_pool.attach(9, dataclasses.replace(SMALL, poll=0))
    assert (ggml.made, ggml.attached) == ([(2, 0, 0, False)], (9, 1, 1))
    pools.free()
    assert ggml.freed == [1]
    thread_pool.attach(9, dataclasses.replace(SMALL, priority=-1))
    assert ggml.made[1:] == [(2, -1, 50, False)]


def test_two_numbers_of_threads_are_two_pools_and_that_of_decode_begins_paused(ggml: FakeGgml) -> None:
    pools = thread_pool.attach(9, dataclasses.replace(SMALL, n_threads=1, n_threads_batch=4, poll=100, priority=2))
    assert (ggml.made, ggml.attached) == ([(4, 2, 100, False), (1, 2, 100, True)], (9, 2, 1))
    pools.free()
    assert ggml.freed == [1, 2]


def test_the_structure_is_that_of_the_installed_library() -> None:
    params = thread_pool.Params()
    ctypes.memset(ctypes.byref(params), 0xFF, ctypes.sizeof(params))
    bindings.ggml().ggml_threadpool_params_init(ctypes.byref(params), 7)
    assert not any(params.cpumask)
    assert (params.n_threads, params.prio, params.poll) == (7, 0, 50)
    assert (params.strict_cpu, params.paused) == (False, False)


def settings_of(worker: FakeWorker, path: Path, **asked: Any) -> tuple[int | None, int | None]:
    path.write_bytes(b"GGUF")
    made = make_plan(cast(Worker, worker), "10", 5, model=str(path), **asked).settings
    return made.poll, made.priority


def test_a_build_without_openmp_uses_both(fake_worker: FakeWorker, tmp_path: Path) -> None:
    assert settings_of(fake_worker, tmp_path / "m.gguf", threads=1, poll=0, priority=-1) == (0, -1)
    assert settings_of(fake_worker, tmp_path / "m.gguf") == (None, None)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"poll": 100}, "--poll 100 would have no effect: .* OpenMP's threads"),
        ({"priority": 1, "threads": 1}, "--priority 1 would have no effect: .* one thread"),
        ({"poll": 101}, "Give a whole number from 0 to 100"),
        ({"priority": -2}, "Give a whole number from -1 to 3"),
    ],
)
def test_what_openmp_ignores_is_refused(fake_worker: FakeWorker, tmp_path: Path, asked: Any, says: str) -> None:
    fake_worker.build = dataclasses.replace(fake_worker.build, system_info="CPU : AVX = 1 | OPENMP = 1 | ")
    with pytest.raises(LabError) as problem:
        settings_of(fake_worker, tmp_path / "m.gguf", **asked)
    assert problem.match(says)
    assert settings_of(fake_worker, tmp_path / "m.gguf", threads=1, threads_batch=2, priority=-1) == (None, -1)


def test_a_priority_that_the_system_refuses_is_an_error(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[tuple[Any, ...]] = []

    def refuse(*asked: Any) -> None:
        tried.append(asked)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    with pytest.raises(LabError, match="--priority 3 is not permitted"):
        settings_of(fake_worker, tmp_path / "m.gguf", priority=3)
    assert settings_of(fake_worker, tmp_path / "m.gguf", priority=-1) == (None, -1)
    assert [(thread, policy, param.sched_priority) for thread, policy, param in tried] == [(0, os.SCHED_FIFO, 90)]
    monkeypatch.delattr(os, "sched_setscheduler")
    assert limits.permits_priority(3)  # no way to know


@pytest.fixture
def worker(mini: Path) -> Iterator[Worker]:
    with Worker() as worker:
        worker.load(mini, SMALL)
        yield worker


def tokens(worker: Worker, **changes: Any) -> tuple[int, ...]:
    asked = dataclasses.replace(SMALL, **changes)
    resolved = worker.new_context(asked)
    assert (resolved.poll, resolved.priority) == (asked.poll, asked.priority)
    return worker.run(scripts.run(list(range(40)), 8, 32), lambda progress: None).token_ids


def test_tokens_do_not_depend_on_the_pool(worker: Worker) -> None:
    without = tokens(worker)
    assert tokens(worker, poll=0) == tokens(worker, poll=100) == tokens(worker, priority=-1) == without
    assert tokens(worker, poll=100, n_threads=1) == tokens(worker, n_threads=1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux shows the scheduling policy of threads")
def test_the_threads_of_a_real_run_have_the_priority(worker: Worker) -> None:
    def n_low() -> int:
        policies = []
        for thread in Path(f"/proc/{worker.pid}/task").iterdir():
            with suppress(ProcessLookupError):
                policies.append(os.sched_getscheduler(int(thread.name)))
        return policies.count(os.SCHED_BATCH)

    tokens(worker, poll=0)
    assert n_low() == 0
    tokens(worker, priority=-1)
    assert n_low() == SMALL.n_threads
