"""The real kernels, timed; the rounds in which they are timed; and what is kept of them."""

import dataclasses
import json
import os
import re
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.record import Ceilings, Rate
from lab.errors import LabError
from lab.process.wire import ATTENTION, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, Probe
from lab.process.worker import Worker, WorkerDied
from lab.roofline import measuring, probes, probing
from lab.roofline.probing import Where
from lab.runner import disturbances
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from tests.support.command import run_lab
from tests.support.rates import rate
from tests.support.records import MACHINE

SAMPLES = Path("results")
NOISE = "another process used 1 of a core"


def small(
    op: str,
    kind: str,
    n_tokens: int,
    rows: int = 512,
    columns: int = 512,
) -> Probe:
    """A probe that takes 20 ms."""
    n_head_kv = 2 if op == ATTENTION else None
    return Probe(op, kind, rows, columns, n_head_kv, n_tokens, 4 * 2**20, 2, None, 0.02)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16"])
def test_products_are_timed_for_every_type(worker: Worker, kind: str) -> None:
    single = worker.probe(small(MUL_MAT, kind, 1))
    many = worker.probe(small(MUL_MAT, kind, 64))
    assert single.n_bytes == pytest.approx(4 * 2**20, rel=0.2)
    assert single.flops == many.flops / 64
    assert min(single.times_ns + many.times_ns) > 0
    plain = worker.probe(dataclasses.replace(small(MUL_MAT, kind, 1), repack=False))
    assert plain.buffer == "CPU"
    assert plain.n_bytes == single.n_bytes


@pytest.mark.parametrize(
    ("kind", "head_bytes"),
    [("F16", 128), ("Q8_0", 68)],
)
def test_attention_is_timed(
    worker: Worker,
    kind: str,
    head_bytes: int,
) -> None:
    timed = worker.probe(small(ATTENTION, kind, 4, rows=6, columns=64))
    n_positions = timed.n_bytes // (2 * 2 * head_bytes)  # of all layers
    assert timed.flops == 4 * 6 * 64 * 4 * n_positions
    assert n_positions % 512 == 0
    assert probing.gbps(timed) > 0


def test_plain_attention_does_the_same_work(worker: Worker) -> None:
    probe = small(ATTENTION, "F16", 4, rows=6, columns=64)
    flash = worker.probe(probe)
    plain = worker.probe(dataclasses.replace(probe, op=PLAIN_ATTENTION))
    assert flash.n_bytes == plain.n_bytes
    assert flash.flops == plain.flops


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": 576, "type": "Q4_K"},
        {"op": ATTENTION, "type": "Q4_K"},
        {
            "op": ATTENTION,
            "rows": 9,
            "columns": 64,
        },
        {"op": MUL_MAT_ID},
        {"type": "Q8_1"},
    ],
)
def test_nothing_that_can_be_asked_for_ends_the_engine(
    worker: Worker, changes: dict[str, Any]
) -> None:
    probe = dataclasses.replace(
        small(MUL_MAT, "Q4_0", 1),
        n_head_kv=2,
        **changes,
    )
    with pytest.raises(LabError) as problem:
        worker.probe(probe)
    assert not isinstance(problem.value, WorkerDied)


# The commands, on kernels that are timed briefly


def keep_quick_ceilings(worker: Worker, folder: Path) -> Ceilings:
    """Ceilings of the embedded model with one thread and steps of 64 tokens, quickly timed."""
    plan = make_plan(worker, [1], 1, 1, ubatch=64, threads=1)
    rates = []
    for probe in probes.probes(plan.model, plan.settings):
        rates.append(
            worker.probe(
                dataclasses.replace(
                    probe,
                    n_bytes=2**21,
                    seconds=0.01,
                )
            )
        )
    rates.append(measuring.read_rate(1, 2**22))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ceilings = Ceilings(
        now,
        plan.machine,
        on_gpu=False,
        rates=tuple(rates),
    )
    path = probing.save(ceilings, folder)
    assert results.read([path]).ceilings == (ceilings,)
    return ceilings


def test_runs_are_explained_and_predicted_once_their_ceilings_are_known(
    worker: Worker, tmp_path: Path, embedded: Path
) -> None:
    sample = SAMPLES / "sample-sweep-smollm2-135m-amd-epyc.jsonl"
    code, _, err = run_lab("explain", sample, "--ceilings", tmp_path)
    assert code == 1
    assert "lab ceilings" in err
    assert "have not been measured" in err
    settings = ["-u", "64", "-t", "1"]
    sizes = ["-p", "16,32,64", "-n", "4", "-r", "1"]
    assert run_lab("measure", *sizes, *settings, "--no-plot", "-o", tmp_path)[0] == 0
    ceilings = keep_quick_ceilings(worker, tmp_path)

    code, out, err = run_lab("ceilings", *settings, "--types", "", "-o", tmp_path)
    assert code == 0
    assert "All kernels are measured already." in err
    assert "FLOPs per byte" in out
    code, out, err = run_lab("explain", tmp_path, "--ceilings", tmp_path, "--details")
    assert code == 0, err
    assert "weights/attention/" in out
    for suffix in ("png", "svg"):
        assert len(list(tmp_path.glob(f"*-roofline.{suffix}"))) == 1
    document = json.loads(run_lab("explain", tmp_path, "--ceilings", tmp_path, "--json")[1])
    assert [row["phase"] for row in document[0]["rows"]] == ["prefill", "decode"] * 3
    request = ["-p", "64", "-n", "10", "-d", "here"]
    code, out, err = run_lab(
        "predict", *request, *settings, "--ceilings", tmp_path, "--details"
    )
    assert code == 0, err
    assert "fitted to 3 runs of smollm2-135m Q4_1 on this machine" in out

    other_build = dataclasses.replace(ceilings.machine, llama_cpp_commit="other")
    probing.save(dataclasses.replace(ceilings, machine=other_build), tmp_path / "other")
    sample = SAMPLES / "sample-synthetic-phi-3-mini-q4_0-amd-epyc.jsonl"
    code, _, err = run_lab("explain", sample, "--ceilings", tmp_path / "other", "--no-plot")
    assert code == 1
    assert "another machine or build" in err


# In how many rounds, and what is kept


class Counting:
    """Stands in for the engine: every probe is a little faster than the last; those of `unsteady`
    columns are much faster."""

    pid = os.getpid()

    def __init__(
        self, interrupted_at: int | None = None, unsteady: tuple[int, ...] = ()
    ) -> None:
        self.asked: list[Probe] = []
        self.interrupted_at = interrupted_at
        self.unsteady = unsteady

    def probe(self, probe: Probe) -> Rate:
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append(probe)
        faster_ns = 50 if probe.n_tokens in self.unsteady else 1
        return Rate(
            probe.op,
            probe.type,
            "CPU",
            probe.rows,
            probe.columns,
            probe.n_tokens,
            probe.n_threads,
            n_bytes=1000,
            flops=1000,
            times_ns=(1000 - faster_ns * len(self.asked),),
            n_head_kv=probe.n_head_kv,
            n_positions=probe.n_positions,
        )


def disturb(monkeypatch: pytest.MonkeyPatch, engine: Counting, n_probes: int) -> None:
    """Other programs disturb the first probes of an engine."""

    def during(noise: object, n_free: float) -> str:
        return NOISE if len(engine.asked) <= n_probes else ""

    monkeypatch.setattr(disturbances, "during", during)
    read = rate(probes.READ, "I64", 1, 40, 1e9)
    monkeypatch.setattr(measuring, "read_rate", lambda n_threads: read)


@pytest.mark.parametrize(
    ("n_disturbed", "n_rounds"),
    [
        (0, 2),
        (1, 2),
        (2, 3),
        (9, 3),
    ],
)
def test_rounds_go_on_while_the_machine_is_disturbed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_disturbed: int, n_rounds: int
) -> None:
    engine: Any = Counting(unsteady=(1, 8, 64))
    todo = [small(MUL_MAT, "Q4_0", n) for n in (1, 8, 64)]
    n_disturbed_probes = n_disturbed * len(todo)
    disturb(monkeypatch, engine, n_disturbed_probes)
    shown: list[Status] = []
    warnings: list[str] = []
    place = Where(MACHINE)
    ceilings = measuring.obtain(engine, place, todo, shown.append, warnings.append, tmp_path)
    is_slower = [f"slower: {NOISE}" in status.doing for status in shown]
    expected = [0 < n <= n_disturbed_probes for n in range(n_rounds * len(todo))]
    assert is_slower == expected
    assert engine.asked == todo * n_rounds  # interleaved
    assert bool(warnings) == (n_disturbed > n_rounds)
    n_passes = [len(probed.times_ns) for probed in ceilings.rates if probed.op == MUL_MAT]
    assert n_passes == [n_rounds] * 3


@pytest.mark.parametrize(
    ("n_disturbed_probes", "unsteady", "extra", "is_warned"),
    [
        (0, (1, 8, 64), [], False),
        (6, (), [], True),  # all agree: a third round would tell the same
        (99, (8,), [8], True),
        (6, (8,), [8, 1, 64], False),  # it has become quiet: the others may be faster now
        (99, (1, 64), [1, 64], True),
    ],
)
def test_beside_other_work_only_unsteady_kernels_are_timed_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    n_disturbed_probes: int,
    unsteady: tuple[int, ...],
    extra: list[int],
    is_warned: bool,
) -> None:
    engine: Any = Counting(unsteady=unsteady)
    todo = [small(MUL_MAT, "Q4_0", n) for n in (1, 8, 64)]
    disturb(monkeypatch, engine, n_disturbed_probes)
    shown: list[Status] = []
    warnings: list[str] = []
    measuring.obtain(engine, Where(MACHINE), todo, shown.append, warnings.append, tmp_path)
    assert [probe.n_tokens for probe in engine.asked] == [1, 8, 64] * 2 + extra
    assert bool(warnings) == is_warned
    assert all(status.left_s is not None and status.left_s >= 0 for status in shown)


def test_a_late_machine_times_sure_kernels_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each kernel takes 1 s beside other work: those whose passes agreed are not timed again."""
    engine: Any = Counting(unsteady=(8,))
    clock = types.SimpleNamespace(monotonic=lambda: 1.0 * len(engine.asked))
    monkeypatch.setattr(measuring, "time", clock)
    once = engine.probe

    def several(probe: Probe) -> Rate:
        timed: Rate = once(probe)
        times_ns = [timed.times_ns[0] + 500 * i * (probe.n_tokens == 8) for i in range(4)]
        return dataclasses.replace(timed, times_ns=tuple(times_ns))

    monkeypatch.setattr(engine, "probe", several)
    monkeypatch.setattr(disturbances, "during", lambda noise, n_free: NOISE)
    read = rate(probes.READ, "I64", 1, 40, 1e9)
    monkeypatch.setattr(measuring, "read_rate", lambda n_threads: read)
    todo = [small(MUL_MAT, "Q4_0", n) for n in (1, 8, 64)]
    shown: list[Status] = []
    measuring.obtain(engine, Where(MACHINE), todo, shown.append, lambda text: None, tmp_path)
    assert [probe.n_tokens for probe in engine.asked] == [1, 8, 64, 8, 8]
    assert "kernel 5 of 5" in shown[-1].doing


def test_with_a_quota_others_may_use_the_cores_that_kernels_leave_free() -> None:
    here = dataclasses.replace(MACHINE, n_cores_usable=4, cpu_quota=4.0, n_cores_affinity=64)
    probe = dataclasses.replace(small(MUL_MAT, "Q4_0", 1), n_threads=4)
    engine: Any = Counting(unsteady=())
    session = measuring.ProbeSession(engine, Where(here), None, [probe])
    assert session.n_free == 60


def test_no_third_round_after_more_than_twice_the_announced_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine: Any = Counting(unsteady=(1, 8, 64))
    clock = types.SimpleNamespace(monotonic=lambda: 1.4 * len(engine.asked))
    monkeypatch.setattr(measuring, "time", clock)
    monkeypatch.setattr(disturbances, "during", lambda noise, n_free: NOISE)
    read = rate(probes.READ, "I64", 1, 40, 1e9)
    monkeypatch.setattr(measuring, "read_rate", lambda n_threads: read)
    todo = [small(MUL_MAT, "Q4_0", n) for n in (1, 8, 64)]
    warnings: list[str] = []
    measuring.obtain(
        engine, Where(MACHINE), todo, lambda status: None, warnings.append, tmp_path
    )
    assert [probe.n_tokens for probe in engine.asked] == [1, 8, 64] * 2  # 8.4 s; 3 announced
    assert len(warnings) == 1


def test_the_command_says_how_long_it_takes_and_what_ctrl_c_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Counting(interrupted_at=10)
    monkeypatch.setattr(Worker, "probe", lambda worker, probe: engine.probe(probe))
    code, _, err = run_lab("ceilings", "--types", "", "-t", 1, "-o", tmp_path)
    announced = re.search(
        r"^(\d+) kernels to measure in 2 rounds: about .* Ctrl-C keeps", err, re.M
    )
    assert announced is not None
    n = int(announced[1])
    assert code == 130
    assert f"kernel 1 of {2 * n}: " in err
    assert "left" in err
    missing = f"{n - 9} of {n} kernels are missing. The same command measures them."
    assert f"kept in {tmp_path}. {missing}" in err
    # seven sizes of the first kernel, two of the next; the third is not whole
    (session,) = probing.kept(tmp_path)
    assert [probed.n_tokens for probed in session.rates] == [1, 2, 4, 8, 32, 128, 512, 1, 512]
