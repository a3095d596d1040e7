"""A prefix used again: exactly with a fake engine, and on the embedded model."""

from __future__ import annotations

import dataclasses
import json
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.core import memory
from lab.core import script as scripts
from lab.core.levers import Prefix
from lab.core.record import COPY, FORGET, LOAD, PREFILL, SAVE, Ceilings, Rate, Record, Run
from lab.errors import LabError
from lab.features import prefix as prefix_cache
from lab.features.common import folder_in
from lab.features.limits.step_prediction import StepPrediction
from lab.features.predict import learning
from lab.models import catalog
from lab.process.wire import ATTENTION, MUL_MAT
from lab.process.worker import Worker
from lab.runner import limits, session
from lab.runner.cases import Case
from lab.runner.session import execute, new_results_file
from tests.conftest import MACHINE, MODEL, SETTINGS, FakeWorker, died, make_record, make_run, run_lab, steps_of

FOLDER = Path("states")
N_SUFFIX = 4


def text(sequence: int, n: int) -> list[int]:
    return [100 * sequence + i for i in range(n)]


def case(n_prefix: int = 20, n_suffix: int = N_SUFFIX) -> Case:
    return Case(n_prefix + n_suffix, 1, lever=Prefix(n_prefix, n_suffix))


def prefix_run(n_prefix: int = 20, repeat: int = 0, move_ms: float = 5, prefill_ms: float = 1, **changes: Any) -> Run:
    """A run of an engine that takes prefill_ms a token, 1 ms to choose one, and move_ms to copy, save or load."""
    written = prefix_cache.write(case(n_prefix), text, SETTINGS, folder=FOLDER)  # n_ubatch is 8
    run = dataclasses.replace(
        make_run(n_prefix + N_SUFFIX, 1, repeat),
        steps=steps_of(written, prefill_ms, move_ms=move_ms),
        prefix=Prefix(n_prefix, N_SUFFIX),
        token_ids=(7,) * 4,
        state_bytes=(1000 * n_prefix, 1000 * n_prefix + 4),
        logits_differ=(0.0, 0.0, 0.0),
    )
    return dataclasses.replace(run, **changes)


def records(*lengths: int, **changes: Any) -> list[Record]:
    return [make_record(prefix_run(n, **changes)) for n in lengths]


def test_the_prefix_is_prefilled_once_and_the_suffix_in_four_ways() -> None:
    written = prefix_cache.write(case(20, 10), text, SETTINGS, folder=FOLDER)
    suffix = [(PREFILL, 8), (PREFILL, 2)]
    assert [(op.kind, sum(part.n_tokens for part in op.parts)) for op in written] == [
        *[(PREFILL, 8), (PREFILL, 8), (PREFILL, 4), *suffix, (FORGET, 0)],
        *[(COPY, 0), *suffix, (FORGET, 0), (SAVE, 0), (SAVE, 0), (FORGET, 0)],
        *[(LOAD, 0), *suffix, (FORGET, 0), (LOAD, 0), *suffix],
    ]
    kept = [op.parts[0] for op in written if op.keeps]
    assert [(part.sequence, part.tokens, part.n_outputs) for part in kept] == [(i, (28, 29), 1) for i in (0, 1, 0, 0)]
    assert [op.path for op in written if op.kind in (SAVE, LOAD)] == [None, str(FOLDER / "state")] * 2
    shapes = list(scripts.shapes(written))
    assert {shape.n_past for shape in shapes if shape.kind in (COPY, SAVE, LOAD)} == {20}
    assert [shape.n_past for shape in shapes if shape.kind == PREFILL] == [0, 8, 16, *[20, 28] * 4]


def test_a_row_has_the_times_of_every_way() -> None:
    (row,) = prefix_cache.rows(records(20, 20, 20))
    assert (row.n_prefix, row.n_suffix, row.n_runs) == (20, 4, 3)
    assert (row.cold_s, row.cached_s, row.ram_s, row.disk_s) == pytest.approx((0.025, 0.010, 0.010, 0.010))
    assert (row.prefix_s, row.saved_s, row.copy_s) == pytest.approx((0.020, 0.015, 0.005))
    assert (row.save_ram_s, row.load_ram_s, row.save_disk_s, row.load_disk_s) == pytest.approx((0.005,) * 4)
    assert row.state_bytes == 20_000
    assert (row.save_ram_gbps, row.load_disk_gbps) == pytest.approx((0.004, 0.004))
    assert (row.logits_differ, row.is_equal, row.n_prefilled_again, row.promised_s) == (0, True, 0, None)


@pytest.mark.parametrize(
    ("changes", "is_equal", "words"),
    [
        ({}, True, "the logits match the uncached prompt exactly"),
        ({"logits_differ": (0.0, 0.25, 0.0)}, False, "the logits differ by up to 0.25; the same token was chosen"),
        ({"token_ids": (7, 7, 8, 7), "logits_differ": (0.0, 0.5, 0.0)}, False, "0.5; different tokens were chosen"),
        ({"logits_differ": None}, None, "the logits were not recorded"),
    ],
)
def test_whether_what_was_restored_is_what_was_computed(
    changes: dict[str, Any], is_equal: bool | None, words: str
) -> None:
    rows = prefix_cache.rows([make_record(prefix_run()), make_record(prefix_run(**changes))])
    assert rows[0].is_equal is is_equal
    assert words in " ".join(prefix_cache.sentences(rows, None))


def test_the_saved_time_is_held_against_the_prefill_law() -> None:
    rates = tuple(
        Rate(MUL_MAT, "Q4_0", "CPU", 128, 64, n, 2, 10**6, 2 * n * 10**6, (round(10**6 * (1 + n / 16)),))
        for n in (1, 2, 4, 8, 32)
    )
    attention = tuple(Rate(ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**4, (10**4,), 2, 512) for n in (1, 512))
    known = Ceilings("2026-01-01T00:00:00Z", MACHINE, False, rates + attention)
    prediction = StepPrediction(MODEL, SETTINGS, known, learning.fit([]), 0)
    short, long = prefix_cache.rows(records(8, 64), prediction)
    assert short.promised_s is not None and long.promised_s is not None
    assert long.promised_s == pytest.approx(prediction.prefill(64, 0, 0))
    assert 8 < long.promised_s / short.promised_s < 10  # attention grows beyond proportion
    errors = [abs((row.promised_s or 0) / row.saved_s - 1) for row in (short, long)]
    words = " ".join(prefix_cache.sentences([short, long], prediction))
    middle, most = 50 * sum(errors), 100 * max(errors)
    assert f"Prediction error of the time saved: median {middle:.0f} %, maximum {most:.0f} %." in words


LENGTHS = [100, 200, 400]
PREFILL_S = [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("restore_s", "n_tokens", "is_measured", "words"),
    [
        ([0.0001, 0.0002, 0.0004], 1, False, "at every measured length"),
        ([0.0501, 0.0502, 0.0504], 50.05, False, "from about 50 tokens, extrapolated"),
        ([0.15, 0.15, 0.15], 150, True, "from about 150 tokens"),
        ([0.55, 0.6, 0.7], 1000, False, "from about 1,000 tokens, extrapolated"),
        ([0.2, 0.4, 0.8], None, False, "at no length up to 400 tokens"),
        ([5.0, 5.1, 5.3], None, False, "at no length up to 400 tokens"),  # it would be at 10,000: too far to say
        ([0.01, 0.3, 0.8], None, False, "only at 100, not at 400 tokens"),
    ],
)
def test_the_break_even_is_where_the_curves_cross(
    restore_s: list[float], n_tokens: float | None, is_measured: bool, words: str
) -> None:
    one = prefix_cache.find("RAM", LENGTHS, PREFILL_S, restore_s)
    assert one.n_tokens == (None if n_tokens is None else pytest.approx(n_tokens, rel=0.01))
    assert one.is_measured == is_measured
    assert prefix_cache.words(one) == words


def planned(worker: FakeWorker, folder: Path, lengths: str = "16,32", suffix: int = 8, **asked: Any) -> Any:
    asked = {"ubatch": 8, "repeat": 1} | asked
    return prefix_cache.plan(worker, lengths, suffix, folder=folder, **asked)  # type: ignore[arg-type]


def test_the_sequences_share_a_cache_and_a_copy_takes_no_place(fake_worker: FakeWorker, tmp_path: Path) -> None:
    shared, apart = planned(fake_worker, tmp_path), planned(fake_worker, tmp_path, kv_unified="off")
    assert (shared.settings.kv_unified, shared.settings.n_seq_max, shared.settings.n_ctx) == (True, 2, 32 + 8 + 2)
    assert (apart.settings.kv_unified, apart.settings.n_seq_max, apart.settings.n_ctx) == (False, 2, 2 * 256)
    assert shared.n_tokens(shared.cases[0]) == (16 + 4 * 8, 4)
    assert shared.warnings == () and shared.refused == {}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"lengths": "16,16"}, "--prefix-len has 16 twice"),
        ({"lengths": "0"}, "--prefix-len 0 is not possible"),
        ({"lengths": "many"}, "'many' is not a whole number"),
        ({"suffix": 0}, "--suffix-len 0 is not possible"),
        ({"lengths": "16,992"}, "992 tokens and a suffix of 8 are longer than the context of 1,000 tokens"),
        ({"suffix": 1000}, "are longer than the context"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    fake_worker: FakeWorker, tmp_path: Path, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(LabError, match=words):
        planned(fake_worker, tmp_path, **asked)
    assert planned(fake_worker, tmp_path, "991").cases


def test_prefixes_whose_states_find_no_room_are_refused(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_position = memory.kv_bytes_per_position(MODEL) or 0
    context = planned(fake_worker, tmp_path).memory(planned(fake_worker, tmp_path).cases[0]).total_bytes
    monkeypatch.setattr(limits, "memory_available", lambda: context + 20 * per_position)
    (refused,) = planned(fake_worker, tmp_path).refused.values()
    assert refused.startswith("The saved state of a prefix of 32 tokens needs 0.0 GB of memory")
    monkeypatch.undo()
    disk = types.SimpleNamespace(free=20 * per_position)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    (refused,) = planned(fake_worker, tmp_path).refused.values()
    assert refused.endswith("GB are free on the disk.")


def test_runs_are_kept_and_the_texts_of_repeats_differ(fake_worker: FakeWorker, tmp_path: Path) -> None:
    fake_worker.checks = ((100, 104), (0.0, 0.0, 0.0))
    plan = planned(fake_worker, tmp_path, repeat=2)
    made = list(execute(plan, fake_worker, new_results_file(plan, tmp_path), lambda status: None))  # type: ignore[arg-type]
    timed = [record for record in made if not record.run.warmup]
    assert {record.run.status for record in timed} == {"ok"}
    assert sorted(record.run.prefix.n_prefix for record in timed if record.run.prefix) == [16, 16, 32, 32]
    assert {record.run.state_bytes for record in timed} == {(100, 104)}
    prompts = {tuple(prompt[:16]) for prompt in fake_worker.prompts if len(prompt) > 40}
    assert len(prompts) == 2


def states(folder: Path) -> list[Path]:
    return list(folder.rglob("*lab-states*"))


@pytest.mark.parametrize("is_there", [True, False])
def test_the_folder_of_states_is_deleted_whatever_happens(tmp_path: Path, is_there: bool) -> None:
    out = tmp_path if is_there else tmp_path / "not" / "yet"
    with pytest.raises(KeyboardInterrupt), folder_in(out) as folder:
        assert folder.parent == tmp_path
        (folder / "state").write_bytes(b"state")
        raise KeyboardInterrupt
    assert not folder.exists() and not any(tmp_path.iterdir())


def test_no_state_is_left_when_the_engine_dies(
    fake_worker: FakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Path]] = []

    def die(n_prompt: int, n_gen: int) -> None:
        seen.append(states(tmp_path))
        (seen[0][0] / "state").write_bytes(b"half of it")
        if n_gen == 4:
            raise died()

    fake_worker.on_run = die
    monkeypatch.setattr(session, "Worker", lambda: fake_worker)
    with pytest.warns(UserWarning, match="runs failed"):
        made = prefix_cache.prefix("16", 8, 1, out=tmp_path, ubatch=8)
    assert made[-1].run.status == "crashed" and made[-1].run.prefix == Prefix(16, 8)
    assert len(seen[0]) == 1 and states(tmp_path) == []


@pytest.fixture(scope="module")
def real(embedded: Path) -> Iterator[Worker]:
    with Worker() as worker:
        yield worker


@pytest.mark.parametrize("kv_unified", ["on", "off"])
def test_a_real_prefix_is_restored_bit_by_bit(real: Worker, tmp_path: Path, kv_unified: str) -> None:
    with folder_in(tmp_path) as folder:
        plan = prefix_cache.plan(
            real, "100", 20, 1, folder=folder, kv_unified=kv_unified, ubatch=64, model=catalog.DEFAULT, threads=1
        )
        made = list(execute(plan, real, new_results_file(plan, tmp_path), lambda status: None))
    run = made[-1].run
    assert run.status == "ok", run.error
    assert run.logits_differ == (0.0, 0.0, 0.0) and len(set(run.token_ids)) == 1
    assert run.state_bytes is not None
    per_position = memory.kv_bytes_per_position(plan.model) or 0
    assert all(100 * per_position < n < 1.02 * 100 * per_position for n in run.state_bytes)
    (row,) = prefix_cache.rows([made[-1]])
    assert row.is_equal and row.n_prefilled_again == 0 and states(tmp_path) == []


@pytest.mark.usefixtures("undisturbed")
def test_prefix_command(tmp_path: Path) -> None:
    code, out, err = run_lab(
        "prefix", "--prefix-len", "16,40", "--suffix-len", "8", "-r", "1", "-t", "1", "-o", tmp_path
    )
    assert code == 0, err
    assert "time to first token with a prefix cold" in out and "the logits match the uncached prompt exactly" in out
    assert len(list(tmp_path.glob("*-prefix.png"))) == 1 and not list(tmp_path.glob(".lab-states*"))
    document = json.loads(run_lab("show", tmp_path, "--json")[1])
    assert [(row["experiment"], row["n_prefix"], row["is_equal"]) for row in document["rows"]] == [
        ("prefix", 16, True),
        ("prefix", 40, True),
    ]
    assert {one["name"] for one in document["break_even"]} == {"RAM", "disk"}
    assert "--prefix-len 0 is not possible" in run_lab("prefix", "--prefix-len", "0", "-o", tmp_path)[2]
