"""Sweeps and trials on the real engine, as a user runs them."""

import json
from pathlib import Path

import pytest

from lab.core import phases, results
from lab.core import script as scripts
from lab.core.record import Run
from lab.process.wire import Progress
from lab.process.worker import Worker
from lab.runner import prompts
from lab.show import table
from tests.conftest import make_run, run_lab, run_process
from tests.test_real import REAL


def look(progress: Progress) -> None: ...


@pytest.fixture(scope="module")
def worker() -> object:
    with Worker() as started:
        yield started


def test_a_sweep_computes_what_independent_runs_compute(worker: Worker, embedded: Path) -> None:
    vocabulary = worker.load(embedded, REAL)
    import dataclasses

    worker.new_context(dataclasses.replace(REAL, n_ctx=256, n_ubatch=32))
    prompt = prompts.random_ids(150, vocabulary.n_vocab, None, 1, 0)
    seen: list[Progress] = []
    swept = worker.run(scripts.sweep(prompt, 5, 32, 64), seen.append)
    run = Run(**{**make_run(150, 5).__dict__, "steps": swept.steps, "token_ids": swept.token_ids, "every": 64})
    assert [leg.n_prompt for leg in phases.by_length(run)] == [64, 128, 150]
    for i, n in enumerate((64, 128, 150)):
        alone = worker.run(scripts.run(prompt[:n], 5, 32), look)
        assert swept.token_ids[5 * i : 5 * i + 5] == alone.token_ids  # nothing of what was forgotten is left
        leg = phases.by_length(run)[i].steps
        assert (leg.kind, leg.n_tokens, leg.n_past) == (alone.steps.kind, alone.steps.n_tokens, alone.steps.n_past)


@pytest.mark.usefixtures("undisturbed")
def test_sweep_command(tmp_path: Path) -> None:
    code, out, _ = run_lab(
        "sweep", "--max-len", "256", "-e", "32", "-u", "32", "-n", "3", "-r", "2", "-t", "1", "-o", tmp_path
    )
    assert code == 0
    assert "at each length" in out and "Prefill time: T(P) = " in out and "Time per token: t(p) = " in out
    assert len(list(tmp_path.glob("*-sweep.png"))) == 1 and not list(tmp_path.glob("*-decode.png"))
    rows = table.summary(table.runs(results.read([tmp_path]).records))
    assert rows.n_prompt.tolist() == list(range(32, 257, 32)) and set(rows.repeats) == {2}
    assert rows.prefill_s.is_monotonic_increasing
    assert run_lab("show", tmp_path)[0] == 0


def test_until_command(tmp_path: Path) -> None:
    arguments = ["-p", "8", "-n", "16", "-r", "1", "-t", "1", "--no-plot", "-o", tmp_path, "--until", "99%"]
    code, out, _ = run_lab("measure", *arguments)
    assert code == 0
    assert "All intervals are within 99 % of their medians." in out and " runs; below each the 95 % interval" in out
    assert "--max-repeats 3 is too few" in run_lab("measure", "--until", "2%", "--max-repeats", "3")[2]
    assert run_lab("measure", "--until", "many")[0] == 1


def test_ab_and_compare_commands(mini: Path, tmp_path: Path) -> None:
    common = ["-p", "32", "-n", "4", "-t", "1", "-o", tmp_path]
    code, out, err = run_lab(
        "ab", "--flash-attn on", "--flash-attn off", "-m", mini, "--prompt", "random", "--blocks", "2", *common
    )
    assert code == 0, err
    assert "flash_attn: on | off" in out and "Unclear: 2 blocks; an interval needs " in out
    (path,) = tmp_path.glob("*.jsonl")
    code, out, err = run_process("compare", path, "--json", "--base", "off", "--no-plot")
    document = json.loads(out)
    assert code == 0 and document["differences"]["flash_attn"] == ["off", "on"]
    assert document["comparisons"][0]["rows"][0]["paired"] is True
    code, out, err = run_lab("ab", "", "-m smollm2-135m:Q8_0", "--blocks", "1", *common, "--json", "--no-plot")
    assert code == 0, err
    assert [label.partition(":")[0] for label in json.loads(out)["groups"]] == ["A", "B"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads 2"], "two variants"),
        (["--threads 2", "--thread 1"], "--threads"),
        (["--threads 2", "--threads many"], "not a valid integer"),
        (["--threads 2", "--threads 0"], "--threads 0 is not possible"),
        (["--threads 2", "'"], "not understood"),
        (["--threads 2", "--repeat 2"], "--repeat"),
        (["-t 1", "-t 2", "--blocks", "0"], "--blocks 0"),
        (["-t 1", "-m nonsense"], "no model named"),
    ],
)
def test_impossible_trials(tmp_path: Path, arguments: list[str], says: str) -> None:
    code, out, err = run_lab("ab", *arguments, "-o", tmp_path / "none")
    assert code == 1 and not out
    assert says in err and "Error" in err
    assert not (tmp_path / "none").exists()
