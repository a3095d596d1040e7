"""lab start --memory and lab predict --memory: planted waits, bounds, groups, wrong input."""

import dataclasses
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lab.core import memory, results
from lab.core.byte_sizes import parse_size
from lab.core.lines import from_json, to_json
from lab.errors import LabError
from lab.features.start import groups, limited, memory_figures, pages
from lab.features.start.groups import MemoryGroups
from lab.features.start.measuring import Engines
from lab.features.start.memory_section import NOT_DROPPED, section
from lab.process.worker import WorkerDied
from lab.roofline import paged_prediction, paging
from lab.roofline.paged_prediction import LimitedMemory
from lab.roofline.paging import MemoryLine, PagingLaw
from lab.roofline.prediction import PhaseTime, Prediction
from lab.runner import cgroups
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import MACHINE, MODEL, SETTINGS
from tests.support.tables import lines_of

FILE_BYTES = 10**9
OWN_BYTES = 10**8
COMPUTE_S = 0.05
SHARES = (0.6, 0.8, 0.9, 1.0, 1.2)


def line_of(share: float | None, token_s: float, **changes: Any) -> MemoryLine:
    line = MemoryLine(
        session="a-session",
        machine=MACHINE,
        model=MODEL,
        settings=SETTINGS,
        started_at="2026-01-01T00:00:00Z",
        kernel="6.1",
        disk="254",
        round=0,
        file_bytes=FILE_BYTES,
        limit_bytes=None if share is None else round(share * FILE_BYTES),
        own_bytes=OWN_BYTES,
        resident=0.0,
        n_tokens=8,
        decode_s=8 * token_s,
        read_bytes=8 * 7 * 10**8,
        n_faults=80,
        disk_s=0.5,
    )
    return dataclasses.replace(line, **changes)


def disk_with_luck(share: float, number: int) -> float:
    """A planted truth, not the law: few bytes at a slow rate, or the whole file at a fast one."""
    room = share - OWN_BYTES / FILE_BYTES
    if room >= 1:
        return COMPUTE_S
    if number % 2:
        return COMPUTE_S + FILE_BYTES / 2.4e9
    return COMPUTE_S + FILE_BYTES * (1 - room**4) / 0.8e9


def planted_lines() -> list[MemoryLine]:
    lines = [line_of(None, COMPUTE_S), line_of(None, 1.1 * COMPUTE_S)]
    for number in range(4):
        for share in SHARES:
            lines.append(line_of(share, disk_with_luck(share, number), round=number))
    return lines


def test_limits_that_were_left_out_are_in_their_ranges() -> None:
    n_inside = 0
    n_starts = 0
    for limit in memory_figures.memory_limits(planted_lines()):
        if limit.limit_bytes is not None:
            assert limit.expected_s is not None
            n_inside += limit.n_inside
            n_starts += len(limit.starts)
    assert n_starts == 4 * len(SHARES)
    assert n_inside / n_starts >= 0.9


def test_the_law_knows_where_the_file_fits_nearly_fits_and_does_not() -> None:
    law = PagingLaw(1e-9, 0.5e-9, 2e-9, 8)
    assert law.token_s(FILE_BYTES, 1.1, (0.1, 0.2)) == (0.1, 0.2)
    assert law.token_s(FILE_BYTES, 1.0, (0.1, 0.2)) == pytest.approx((0.1, 2.2))
    assert law.token_s(FILE_BYTES, 0.5, (0.1, 0.2)) == pytest.approx((0.6, 2.2))
    assert law.wait_of(FILE_BYTES, 1.1) == 0
    assert law.wait_of(FILE_BYTES, 1.0) is None
    assert law.wait_of(FILE_BYTES, 0.5) == pytest.approx(1)


def test_there_is_no_law_without_enough_starts_or_without_one_that_fits() -> None:
    short = [line_of(0.6, 1.0)] * paging.LEAST_STARTS
    assert paging.learn(short) is None
    assert paging.learn([line_of(None, COMPUTE_S), *short[1:]]) is None
    assert paging.learn([line_of(None, COMPUTE_S), *short]) is not None
    warm = [dataclasses.replace(line, resident=0.5) for line in short]
    assert paging.learn([line_of(None, COMPUTE_S), *warm]) is None


def test_the_section_says_how_much_slower_it_is_and_how_often_the_range_held() -> None:
    shown = section(planted_lines())
    assert shown.answer.startswith("With room for 90 % of the file a token takes")
    text = " ".join(shown.sentences)
    assert "its own memory (Python, KV cache, buffers: 100 MB)" in text
    assert "each token reads 70 % to 70 % of it" in text
    assert "Law of this machine, kernel and disk" in text
    assert "Test: each limit was predicted from the starts with the others" in text
    assert len(lines_of(shown)) == len(SHARES) + 1
    assert lines_of(shown)[-1][0] == "no limit"
    assert len(shown.document()["memory"]) == 22
    assert not shown.warnings


@pytest.mark.parametrize("resident", [0.3, 1.0, None])
def test_nothing_is_said_of_starts_whose_pages_stayed(resident: float | None) -> None:
    lines = [line_of(None, COMPUTE_S), line_of(0.6, 1.0, resident=resident)]
    shown = section(lines)
    assert list(shown.warnings) == [NOT_DROPPED]
    assert [row[0] for row in lines_of(shown)] == ["no limit"]
    assert not shown.answer


def test_a_line_is_read_back_and_an_impossible_one_is_refused() -> None:
    line = line_of(0.8, 1.0)
    assert from_json(MemoryLine, to_json(line)) == line
    for changes in (
        {"decode_s": 0.0},
        {"limit_bytes": 0},
        {"file_bytes": 0},
        {"disk_s": -1.0},
    ):
        with pytest.raises(ValueError, match=r"tokens|limit|reading"):
            line_of(0.8, 1.0, **changes)


# What is asked for


def test_limits_are_shares_of_the_file_or_sizes() -> None:
    limits = limited.memory_limits("60%, 1GB,1.5gib,60%", FILE_BYTES, None)
    assert limits == [6 * 10**8, 10**9, 3 << 29]
    assert parse_size("500MB", "--memory") == 5 * 10**8


@pytest.mark.parametrize(
    "asked", ["0", "0%", "banana", "", "60%,", "-1GB", "nan%", "1e99GB", "1XB", "x%", "17GB"]
)
def test_impossible_limits_are_refused(asked: str) -> None:
    with pytest.raises(LabError, match="--memory"):
        limited.memory_limits(asked, FILE_BYTES, MACHINE.ram_bytes)


@pytest.mark.parametrize(
    "words",
    [
        ("--memory", "banana"),
        ("--memory", "0"),
        ("--memory", "80%", "--mmap", "off"),
        ("--memory", "80%", "--n-gpu-layers", "3"),
    ],
)
def test_the_command_refuses_before_it_measures(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    status, out, err = run_lab("start", *words, "-o", tmp_path)
    assert status == 1
    assert "--memory" in err
    assert "Traceback" not in err
    assert not out
    assert not list(tmp_path.glob("*.jsonl"))


# Starts with a fake engine


class LimitedWorker(FakeWorker):
    """An engine whose tokens take planted times under a limit."""

    def __init__(self, launcher: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.decode_ms = lambda: 50
        if launcher:
            self.decode_ms = lambda: 500


class FakeGroups(MemoryGroups):
    """Groups that only note their limits."""

    limits: ClassVar[list[int]] = []

    @contextmanager
    def limited(self, n_bytes: int) -> Iterator[tuple[str, ...]]:
        self.limits.append(n_bytes)
        yield ("limit", str(n_bytes))


@pytest.fixture
def fake_starts(mini: Path, monkeypatch: pytest.MonkeyPatch) -> limited.LimitedStarts:
    monkeypatch.setattr(pages, "drop", lambda path: None)
    monkeypatch.setattr(pages, "resident_share", lambda path: 0.0)
    monkeypatch.setattr(pages, "read_seconds", lambda path: 0.5)
    monkeypatch.setattr(limited, "own_bytes", lambda pid: 1000)
    engines = Engines(new_worker=LimitedWorker)
    plan = limited.make_memory_plan(str(mini), 2, "on,off", lambda *_: None, {}, engines)
    FakeGroups.limits.clear()
    return limited.LimitedStarts(plan, (5000, 9000), FakeGroups(None))


def test_every_round_has_every_limit_once_and_one_start_without(
    fake_starts: limited.LimitedStarts, tmp_path: Path
) -> None:
    path = tmp_path / "limits.jsonl"
    engines = Engines(new_worker=LimitedWorker)
    lines = list(limited.execute(fake_starts, path, engines=engines))
    asked = [(line.round, line.limit_bytes) for line in lines]
    assert sorted(asked, key=str) == sorted(
        [(number, limit) for number in (0, 1) for limit in (None, 5000, 9000)], key=str
    )
    assert sorted(FakeGroups.limits) == [5000, 5000, 9000, 9000]
    for line in lines:
        assert line.settings.mmap is True
        assert line.settings.repack is False
        assert line.settings.n_gpu_layers == 0
        assert line.is_confirmed
        assert (line.token_s > 0.2) == (line.limit_bytes is not None)
    assert len(results.read([path]).findings) == 6


def test_an_engine_that_dies_under_a_limit_says_so(
    fake_starts: limited.LimitedStarts,
) -> None:
    class DyingWorker(LimitedWorker):
        def load(self, *arguments: object) -> Any:
            raise WorkerDied("The engine's process was killed.", status=-9)

    with pytest.raises(LabError, match="did not get through") as raised:
        engines = Engines(new_worker=DyingWorker)
        limited.measured(fake_starts, 0, 5000, "session", engines)
    assert "Give more" in raised.value.hint


# The system's groups


@pytest.fixture
def fake_root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("4:memory:/a/b\n0::/c\n", "sys/fs/cgroup/memory/a/b"),
        ("0::/user.slice\n", "sys/fs/cgroup/user.slice"),
        ("0::/../elsewhere\n", None),
    ],
)
def test_the_group_of_this_process_is_found(
    fake_root: Path, text: str, folder: str | None
) -> None:
    (fake_root / "proc/self/cgroup").write_text(text)
    if folder is None:
        assert cgroups.own_group(cgroups.MEMORY, fake_root) is None
        return
    (fake_root / folder).mkdir(parents=True)
    assert cgroups.own_group(cgroups.MEMORY, fake_root) == fake_root / folder


@pytest.mark.parametrize("name", groups.LIMIT_FILES)
def test_a_limit_is_written_to_the_file_of_the_version(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    (tmp_path / "memory.swap.max").touch()
    groups.set_limit(tmp_path, 12345)
    assert (tmp_path / name).read_text() == "12345"
    assert (tmp_path / "memory.swap.max").read_text() == "0"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has groups")
def test_a_machine_without_groups_is_refused_with_the_reason(
    fake_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "has_scopes", lambda: False)
    (fake_root / "proc/self/cgroup").write_text("0::/x\n")
    with pytest.raises(LabError, match="no memory group"):
        groups.find_groups(fake_root)
    (fake_root / "sys/fs/cgroup/x").mkdir(parents=True)
    with pytest.raises(LabError, match="the group has no limit of memory"):
        groups.find_groups(fake_root)
    assert not list((fake_root / "sys/fs/cgroup/x").iterdir())


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="only Linux"):
        groups.find_groups()


def test_systemd_starts_a_scope_with_the_limit() -> None:
    with MemoryGroups(None).limited(1000) as launcher:
        assert launcher[0] == "systemd-run"
        assert "MemoryMax=1000" in launcher
        assert launcher[-1] == "--"


def test_a_real_process_is_in_its_group_and_the_group_goes_even_after_ctrl_c() -> None:
    try:
        real = groups.find_groups()
    except LabError as problem:
        pytest.skip(problem.what)
    if real.parent is None:
        pytest.skip("systemd makes the groups here")
    folder = real.parent / f"mini-lab-{os.getpid()}"
    with pytest.raises(KeyboardInterrupt), real.limited(10**8) as launcher:
        show = [*launcher, "cat", "/proc/self/cgroup"]
        done = subprocess.run(show, check=True, capture_output=True, text=True)
        assert folder.name in done.stdout
        raise KeyboardInterrupt
    assert not folder.exists()


# Predictions


def prediction() -> Prediction:
    model = dataclasses.replace(MODEL, n_bytes=FILE_BYTES)
    prefill = PhaseTime(0.1, 0.3, (0.2, 0.4))
    return Prediction(model, 20, 10, prefill, PhaseTime(0.04, 0.055, (0.05, 0.06)))


def limit_of(n_bytes: int) -> LimitedMemory:
    return LimitedMemory(n_bytes, PagingLaw(1e-9, 0.5e-9, 2e-9, 8), float(OWN_BYTES))


def test_a_model_that_does_not_fit_waits_in_each_step() -> None:
    row = paged_prediction.with_limit(prediction(), SETTINGS, limit_of(8 * 10**8))
    assert row.shortage is None
    assert row.room is not None
    assert 0.6 < row.room < 0.7
    assert row.tpot_s == pytest.approx((0.55, 2.06))
    assert row.token.expected_s == pytest.approx(1.055)
    n_steps = math.ceil(20 / SETTINGS.n_ubatch)
    assert row.prefill_s == pytest.approx((0.2 + n_steps * 0.5, 0.4 + n_steps * 2))
    assert row.e2e_s[1] > 9 * 2


def test_a_model_that_fits_is_predicted_as_without_a_limit() -> None:
    row = paged_prediction.with_limit(prediction(), SETTINGS, limit_of(2 * 10**9))
    assert row.tpot_s == prediction().tpot_s
    assert row.room is None
    assert row.memory_bytes == 2 * 10**9


def test_caches_without_room_do_not_fit() -> None:
    row = paged_prediction.with_limit(prediction(), SETTINGS, limit_of(5 * 10**7))
    assert row.shortage is not None
    assert row.needed_bytes > memory.padded(1)


def own_bytes(n_ctx: int, n_seq: int = 1) -> int:
    """The caches, buffers and the process."""
    settings = dataclasses.replace(SETTINGS, n_ctx=n_ctx, n_seq_max=n_seq)
    context = memory.of_context(prediction().model, settings)
    return context.total_bytes - context.weights_bytes + OWN_BYTES


def test_what_must_have_room_beside_the_file() -> None:
    def needed(**changes: Any) -> int:
        row = dataclasses.replace(prediction(), **changes)
        return paged_prediction.with_limit(row, SETTINGS, limit_of(2 * 10**9)).needed_bytes

    assert needed() == FILE_BYTES + own_bytes(256)
    assert needed(n_prompt=250) == FILE_BYTES + own_bytes(512)
    assert needed(users=3) == FILE_BYTES + own_bytes(3 * 256, 3)


def test_a_file_needs_some_room() -> None:
    none = paged_prediction.with_limit(prediction(), SETTINGS, limit_of(own_bytes(256)))
    assert none.shortage is not None
    some = paged_prediction.with_limit(prediction(), SETTINGS, limit_of(own_bytes(256) + 1))
    assert some.shortage is None
    assert some.room == pytest.approx(1e-9)
    unknown = dataclasses.replace(MODEL, n_bytes=None)
    row = dataclasses.replace(prediction(), model=unknown)
    assert paged_prediction.with_limit(row, SETTINGS, limit_of(10**9)).shortage is not None


def test_a_file_that_nearly_fits_may_wait_or_not() -> None:
    limit = limit_of(own_bytes(256) + round(0.97 * FILE_BYTES))
    row = paged_prediction.with_limit(prediction(), SETTINGS, limit)
    assert row.room == pytest.approx(0.97)
    assert row.token.expected_s is None
    assert row.prefill.expected_s is None
    assert row.tpot_s == pytest.approx((0.05, 0.06 + 2))
    assert row.prefill_s == pytest.approx((0.2, 0.4 + 3 * 2))
    without = paged_prediction.with_limit(prediction(), SETTINGS, limit_of(8 * 10**8))
    assert without.prefill.expected_s == pytest.approx(0.3 + 3 * 1)


def planned(monkeypatch: pytest.MonkeyPatch, model_file: Path) -> Plan:
    plan = make_plan(FakeWorker(), [8], 1, 1, str(model_file), n_gpu_layers=0)
    monkeypatch.setattr(platform, "release", lambda: "6.1")
    return dataclasses.replace(plan, machine=MACHINE)


def test_another_kernel_machine_or_disk_is_refused_with_the_reason(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(monkeypatch, model_file)
    disk = paging.disk_of(model_file)
    lines = [dataclasses.replace(line, disk=disk) for line in planted_lines()]
    assert paged_prediction.lines_here(lines, plan, model_file) == lines
    assert paged_prediction.lines_here(planted_lines(), plan, None) == planted_lines()
    with pytest.raises(LabError, match="on another disk"):
        paged_prediction.lines_here(planted_lines(), plan, model_file)
    with pytest.raises(LabError, match="another machine or kernel"):
        monkeypatch.setattr(platform, "release", lambda: "6.2")
        paged_prediction.lines_here(lines, plan, model_file)
    with pytest.raises(LabError, match="Nothing was measured"):
        paged_prediction.lines_here([], plan, model_file)


def test_what_is_known_of_limits_here(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = planned(monkeypatch, model_file)

    def known(n_bytes: int) -> LimitedMemory:
        return paged_prediction.limited_memory(n_bytes, plan, None, tmp_path)

    with pytest.raises(LabError, match="Nothing was measured"):
        known(10**9)
    path = tmp_path / "a.jsonl"
    results.save(path, line_of(0.6, 1.0))
    with pytest.raises(LabError, match="Too few starts"):
        known(10**9)
    own_bytes = (None, 1, 2, 9, 100)
    lines = [
        line_of(0.6, 1.0, own_bytes=n_bytes, limit_bytes=10**8, round=number)
        for number, n_bytes in enumerate(own_bytes)
    ]
    results.save(path, line_of(None, COMPUTE_S, own_bytes=None), *lines)
    limit = known(MACHINE.ram_bytes or 0)
    assert limit.n_bytes == 16 * 10**9
    assert limit.law.n_starts == 5
    assert limit.process_bytes == 9
    too_much = r"--memory 17 GB is more than this machine has \(16 GB\)"
    with pytest.raises(LabError, match=too_much):
        known(17 * 10**9)
    with pytest.raises(LabError, match="is more than this machine has"):
        known(16 * 10**9 + 1)
    plan = dataclasses.replace(
        plan, settings=dataclasses.replace(plan.settings, n_gpu_layers=1)
    )
    with pytest.raises(LabError, match="that the CPU reads"):
        known(10**9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "8GB"), "limits this machine"),
        (("-d", "here,m4", "--memory", "8GB"), "limits this machine"),
        (("-d", "here", "--memory", "banana"), "no size"),
        (("-d", "here", "--memory", "0"), "leaves no memory"),
    ],
)
def test_predict_refuses_what_it_cannot_limit(words: tuple[str, ...], message: str) -> None:
    status, _, err = run_lab("predict", *words)
    assert status == 1
    assert message in err
