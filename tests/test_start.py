"""lab start: the stages of a start by a fake clock, what is cold, and the real page cache and
engine."""

import dataclasses
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.core import results
from lab.core.lines import from_json, to_json
from lab.core.record import Settings
from lab.core.script import Script, n_prefilled
from lab.errors import LabError
from lab.features.start import figures, measuring, pages, picture
from lab.features.start.lines import COLD, LOAD, STAGES, WARM, StartLine
from lab.features.start.measuring import Engines
from lab.features.start.section import NOT_COLD, section
from lab.process.wire import Outcome, Progress, Vocabulary
from tests.support.command import run_lab
from tests.support.fake_worker import FakeWorker
from tests.support.records import MACHINE, MODEL, SETTINGS
from tests.support.tables import headings

N_BYTES = 10**6  # of the model
STAGE_S = {"process": 0.5, "load": 0.2, "context": 0.05, "warm-up": 0.02, "first prefill": 0.1}
SECOND_S = 0.08
READ_S = 2.0  # planted: what a cold file adds to loading with mmap off


class SlowWorker(FakeWorker):
    """An engine that takes planted times, by a clock that only it moves."""

    now_s = 0.0
    cache = WARM

    def __init__(self) -> None:
        super().__init__()
        SlowWorker.now_s += STAGE_S["process"]
        self.n_prefills = 0

    def load(self, *arguments: object) -> Vocabulary:
        asked = arguments[1]
        assert isinstance(asked, Settings)
        SlowWorker.now_s += STAGE_S["load"]
        if SlowWorker.cache == COLD:
            SlowWorker.now_s += READ_S / 2 if asked.mmap else READ_S
        return super().load(*arguments)

    def new_context(self, asked: Settings) -> Settings:
        SlowWorker.now_s += STAGE_S["context"]
        return super().new_context(asked)

    def run(self, script: Script, watch: Callable[[Progress], None]) -> Outcome:
        times_s = [STAGE_S["warm-up"], STAGE_S["first prefill"], SECOND_S]
        SlowWorker.now_s += times_s[self.n_prefills]
        self.n_prefills += 1
        return super().run(script, watch)


ENGINES = Engines(new_worker=SlowWorker, clock_s=lambda: SlowWorker.now_s)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> dict[str, float | None]:
    """A page cache that does what it is asked; `left` is the share that stays when dropped."""
    state: dict[str, float | None] = {"resident": 1.0, "left": 0.0}

    def drop(_: Path) -> None:
        state["resident"] = state["left"]
        SlowWorker.cache = COLD

    def read_seconds(_: Path) -> float:
        state["resident"] = 1.0
        SlowWorker.cache = WARM
        return READ_S

    monkeypatch.setattr(pages, "drop", drop)
    monkeypatch.setattr(pages, "read_seconds", read_seconds)
    monkeypatch.setattr(pages, "resident_share", lambda path: state["resident"])
    monkeypatch.setattr(os, "fsync", lambda number: None)
    return state


def planted_starts(mini: Path, folder: Path, repeat: int = 3) -> list[StartLine]:
    plan = measuring.make_start_plan(
        str(mini), 20, repeat, lambda *_: None, {"n_gpu_layers": 0}, ENGINES
    )
    path = folder / "starts.jsonl"
    return list(measuring.execute(plan, [True, False], path, engines=ENGINES))


def test_the_stages_are_those_of_the_clock_and_leave_no_gap(
    mini: Path, tmp_path: Path, planted: dict[str, Any]
) -> None:
    lines = planted_starts(mini, tmp_path)
    assert len(lines) == 12
    for line in lines:
        extra_s = 0.0
        if line.cache == COLD:
            extra_s = READ_S / 2 if line.settings.mmap else READ_S
        assert line.stages == pytest.approx({**STAGE_S, LOAD: STAGE_S[LOAD] + extra_s})
        assert line.first_token_s == pytest.approx(sum(STAGE_S.values()) + extra_s)
        assert line.second_prefill_s == pytest.approx(SECOND_S)
        assert line.is_confirmed


def test_every_round_has_every_kind_of_start_once_and_rounds_differ(
    mini: Path, tmp_path: Path, planted: dict[str, Any]
) -> None:
    lines = planted_starts(mini, tmp_path, repeat=4)
    orders = []
    for number in range(4):
        of_round = [line for line in lines if line.round == number]
        order = [(line.settings.mmap, line.cache) for line in of_round]
        assert len(order) == len(set(order)) == 4
        orders.append(order)
    assert len(set(map(tuple, orders))) > 1


def test_the_wait_for_the_disk_is_the_planted_one(
    mini: Path, tmp_path: Path, planted: dict[str, Any]
) -> None:
    table = figures.starts_table(planted_starts(mini, tmp_path))
    mapped = figures.disk_wait(table, N_BYTES, is_mapped=True)
    unmapped = figures.disk_wait(table, N_BYTES, is_mapped=False)
    assert mapped is not None
    assert unmapped is not None
    assert mapped.seconds == pytest.approx(READ_S / 2)
    assert unmapped.seconds == pytest.approx(READ_S)
    assert unmapped.disk_gbps == pytest.approx(N_BYTES / READ_S / 1e9)
    assert unmapped.is_clear


def test_the_section_says_when_the_first_token_comes_and_what_it_waits_for(
    mini: Path, tmp_path: Path, planted: dict[str, Any]
) -> None:
    shown = section(planted_starts(mini, tmp_path))
    assert shown.answer.startswith(
        "From cold the first token comes after 1.87 s: 1.00 s of it"
    )
    assert shown.answer.endswith("From the page cache it comes after 870 ms.")
    assert not shown.warnings
    text = " ".join(shown.sentences)
    assert "Without mmap it comes after 2.87 s from cold, and after 870 ms" in text
    assert "With mmap, a cold start waits 1.00 s" in text
    assert "50 % of the reading time passes while the weights are placed" in text
    assert "the disk is the limit" in text  # without mmap
    assert "57.5 % of the time is the stage process" in text
    assert headings(shown) == [
        "stage",
        "mmap,\ncold",
        "mmap,\nwarm",
        "no mmap,\ncold",
        "no mmap,\nwarm",
    ]
    assert len(shown.document()["starts"]) == 12


@pytest.mark.parametrize("left", [0.4, 1.0, None])
def test_nothing_is_said_about_cold_starts_if_pages_stayed(
    left: float | None, mini: Path, tmp_path: Path, planted: dict[str, Any]
) -> None:
    planted["left"] = left
    lines = planted_starts(mini, tmp_path)
    shown = section(lines)
    assert shown.answer == "From the page cache the first token comes after 870 ms."
    assert list(shown.warnings) == [NOT_COLD]
    assert "cold" not in " ".join([*headings(shown), *shown.sentences])
    assert {line.disk_s for line in lines} == {None}


def line_of(**changes: Any) -> StartLine:
    line = StartLine(
        session="a-session",
        machine=MACHINE,
        model=MODEL,
        settings=dataclasses.replace(SETTINGS, mmap=True),
        started_at="2026-01-01T00:00:00Z",
        round=0,
        cache=COLD,
        resident=0.0,
        n_prompt=20,
        stages=STAGE_S,
        second_prefill_s=SECOND_S,
        n_faults=7,
        read_bytes=10**6,
        disk_s=READ_S,
    )
    return dataclasses.replace(line, **changes)


def test_rounds_that_do_not_agree_give_no_wait() -> None:
    slow = {**STAGE_S, LOAD: 0.4}
    lines = [
        line_of(stages=slow),
        line_of(cache=WARM, resident=1.0),
        line_of(round=1),
        line_of(round=1, cache=WARM, resident=1.0, stages=slow),
    ]
    shown = section(lines)
    assert "the rounds do not agree" in shown.answer
    assert "waits" not in " ".join(shown.sentences)


def test_a_line_is_read_back_and_an_impossible_one_is_refused() -> None:
    line = line_of()
    assert from_json(StartLine, to_json(line)) == line
    for changes in (
        {"stages": {"load": 1.0}},
        {"stages": {**STAGE_S, LOAD: 0.0}},
        {"cache": "lukewarm"},
        {"disk_s": -1.0},
    ):
        with pytest.raises(ValueError, match=r"start|stage|time"):
            line_of(**changes)


@pytest.mark.parametrize("asked", ["", "yes", "on,on", "on,of"])
def test_an_impossible_mmap_is_refused(asked: str) -> None:
    with pytest.raises(LabError, match="not possible"):
        measuring.mmap_values(asked)


def test_the_prompt_is_prefilled_twice_after_one_token(
    mini: Path, tmp_path: Path, planted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    run = SlowWorker.run

    def counted(worker: SlowWorker, script: Script, watch: Any) -> Outcome:
        lengths.append(n_prefilled(script))
        return run(worker, script, watch)

    monkeypatch.setattr(SlowWorker, "run", counted)
    planted_starts(mini, tmp_path, repeat=1)
    assert lengths == [1, 20, 20] * 4


# The real page cache, and the real engine


@pytest.fixture
def file_on_disk(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(50 * mmap.PAGESIZE + 1))
    return path


can_drop = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="this system drops no pages"
)


@can_drop
def test_pages_are_counted_and_dropped(file_on_disk: Path) -> None:
    pages.read_seconds(file_on_disk)
    assert pages.resident_share(file_on_disk) == 1
    pages.drop(file_on_disk)
    dropped = pages.resident_share(file_on_disk)
    if dropped == 1:
        pytest.skip("this file system keeps its pages in memory")
    assert dropped == 0


@can_drop
def test_pages_that_somebody_has_mapped_stay_and_that_is_seen(file_on_disk: Path) -> None:
    with file_on_disk.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert len(bytes(mapping)) == file_on_disk.stat().st_size  # every page is touched
        pages.drop(file_on_disk)
        share = pages.resident_share(file_on_disk)
        mapping.close()
    assert share == 1
    assert not line_of(resident=share).is_confirmed


def test_a_real_start_of_a_small_model(mini: Path, tmp_path: Path) -> None:
    status, out, err = run_lab(
        *("start", "-m", mini, "-p", 8, "-r", 1, "-t", 1, "--mmap", "on", "--json"),
        *("--no-plot", "-o", tmp_path),
    )
    assert status == 0, err
    document = json.loads(out)
    starts = document["starts"]
    assert {start["cache"] for start in starts} == {COLD, WARM}
    for start in starts:
        assert list(start["stages"]) == list(STAGES)
        assert start["first_token_s"] == pytest.approx(sum(start["stages"].values()))
    (path,) = tmp_path.glob("*.jsonl")
    reading = results.read([path])
    assert len(reading.all_lines) == 2
    assert not reading.skipped


def test_the_title_of_the_picture_says_when_the_first_token_comes() -> None:
    sample = Path(__file__).parent.parent / "docs/start-amd-epyc.jsonl"
    lines = [line for line in results.read([sample]).findings if isinstance(line, StartLine)]
    starts = figures.starts_table(lines)
    assert picture.finding(figures.setups(starts)) == (
        "The first token comes after 1.30 s from the disk and 1.15 s from the page cache"
    )
