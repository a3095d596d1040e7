"""What can be known before a weight is loaded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.core.asked_settings import AskedSettings
from lab.errors import LabError
from lab.features import measure, sweep
from lab.runner import cgroups, machine, prompts
from lab.runner.cases import Plan, Until
from lab.runner.machine import n_cores_usable
from lab.runner.plan import make_plan, parse_lengths
from tests.support.fake_worker import FakeWorker


def plan(worker: FakeWorker, path: Path, **asked: Any) -> Plan:
    return make_plan(
        worker,
        **{
            "model": str(path),
            "prompt_len": "10,20",
            "gen": 5,
            **asked,
        },
    )


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("10", (10,)),
        ("10,1000, 10000", (10, 1000, 10000)),
        ("512-4096*2", (512, 1024, 2048, 4096)),
        ("100-1000+300", (100, 400, 700, 1000)),
        ("3-5", (3, 4, 5)),
        ("1,100-200+100", (1, 100, 200)),
    ],
)
def test_lengths_as_llama_bench_writes_them(text: str, lengths: tuple[int, ...]) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "ten", "-5", "10,", "1.5", "10-5", "10-20*1", "10-20+0", "0-8*2", "1e3"]
)
def test_what_is_not_a_length_is_said(text: str) -> None:
    with pytest.raises(LabError):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt_len": "0"}, "prompt length of 0"),
        ({"prompt_len": [-5]}, "prompt length of -5"),
        ({"prompt_len": []}, "no prompt length"),
        ({"prompt_len": "10,20,10"}, "10 occurs 2 times"),
        ({"prompt_len": "1-5000"}, "more than 1,000"),
        ({"gen": 0}, "--gen 0"),
        ({"gen": 10**8}, "from 1 to 1,048,576"),
        ({"repeat": 0}, "--repeat 0"),
        ({"threads": 0}, "--threads 0"),
        ({"ubatch": -1}, "--ubatch -1"),
        ({"flash_attn": "off", "cache_type_v": "q8_0"}, "needs flash attention"),
        ({"threads": 10**12}, "from 1 to 512"),
        ({"n_gpu_layers": -5}, "--n-gpu-layers -5"),
        ({"prompt": "~nobody-of-that-name/text"}, "cannot be read"),
        ({"model": "x" * 5000}, "cannot be read"),
        ({"prompt_len": "9" * 5000}, "not a prompt length"),
        ({"prompt": "/no/such/text"}, "cannot be read"),
        ({"model": "smolm2-135"}, "no model named"),
    ],
)
def test_bad_settings(
    fake_worker: FakeWorker, model_file: Path, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(LabError, match=says):
        plan(fake_worker, model_file, **asked)


def test_more_threads_than_the_quota_is_a_warning(
    fake_worker: FakeWorker, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "cpu_quota", lambda root=None: 1.0)
    monkeypatch.setattr(machine, "n_cores_affinity", lambda: 4)
    planned = plan(fake_worker, model_file)
    assert planned.settings.n_threads == 1
    assert planned.machine.cpu_quota == 1
    assert planned.machine.n_cores_affinity == 4
    assert not planned.warnings
    [warning] = plan(fake_worker, model_file, threads=2).warnings
    assert "CPU quota is 1 core: 2 threads use it up early" in warning


def test_close_names_are_offered(fake_worker: FakeWorker) -> None:
    with pytest.raises(LabError, match="Did you mean smollm2-135m"):
        plan(fake_worker, Path("smolm2-135"))


def test_beyond_the_training_context_is_a_warning(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    planned = plan(fake_worker, model_file, prompt_len="10,996,2000")
    assert "996 and 2,000 prompt tokens" in planned.warnings[0]
    assert "timing is valid" in planned.warnings[0]
    assert not plan(fake_worker, model_file, prompt_len="10,995").warnings


def test_a_length_that_cannot_fit_is_refused_and_the_others_stay(
    fake_worker: FakeWorker, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda: 10**9)
    planned = plan(fake_worker, model_file, prompt_len=[10, 9_000_000])
    (refused,) = planned.refused
    assert refused.n_prompt == 9_000_000
    assert "KV cache" in planned.refused[refused]
    assert {case.n_prompt for _, case in planned.order} == {10}


def test_gpu_layers_without_a_gpu_are_told(fake_worker: FakeWorker, model_file: Path) -> None:
    planned = plan(fake_worker, model_file, n_gpu_layers=10)
    assert planned.settings.n_gpu_layers == 0
    assert "finds no GPU" in planned.warnings[0]


def test_the_first_round_starts_short_and_later_rounds_are_shuffled(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    lengths = "6,2,3,4,5,1"
    planned = plan(fake_worker, model_file, prompt_len=lengths, repeat=2)
    assert [repeat for repeat, _ in planned.order] == [0] * 6 + [1] * 6
    n_prompts = [case.n_prompt for _, case in planned.order]
    assert n_prompts[:6] == [1, 2, 3, 4, 5, 6]
    assert sorted(n_prompts[6:]) == [1, 2, 3, 4, 5, 6]
    assert n_prompts[6:] != [1, 2, 3, 4, 5, 6]
    assert planned.order == planned.order
    reseeded = plan(fake_worker, model_file, prompt_len=lengths, repeat=2, seed=2)
    assert planned.order != reseeded.order


def test_prompts_have_exactly_n_tokens_and_go_around_the_end() -> None:
    assert prompts.cut([5, 6, 7], 5, start=2, bos=None) == [7, 5, 6, 7, 5]
    assert prompts.cut([5, 6, 7], 3, start=0, bos=1) == [1, 5, 6]
    assert prompts.cut([5, 6, 7], 1, start=0, bos=1) == [1]
    assert len(prompts.random_ids(50, 100, 3, seed=1, repeat=0)) == 50
    assert prompts.random_ids(50, 100, 3, seed=1, repeat=0)[0] == 3


def test_prompt_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, says in {"empty.txt": "is empty", "binary": "not UTF-8"}.items():
        with pytest.raises(LabError, match=says):
            prompts.source(str(tmp_path / name))


def test_more_threads_than_cores_are_warned_of(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    n = n_cores_usable() or 1
    assert (
        "every step becomes many times slower"
        in plan(fake_worker, model_file, threads=n + 1).warnings[0]
    )
    assert not plan(fake_worker, model_file, threads=n).warnings


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"threads": 0}, "--threads 0 is not possible"),
        ({"ubatch": 2**30 + 1}, "--ubatch 1,073,741,825"),
        (
            {"flash_attn": "yes"},
            "--flash-attn yes is not possible.\nChoose one of on, off, auto.",
        ),
        ({"cache_type_k": "q9_0"}, "--cache-type-k q9_0"),
        ({"n_gpu_layers": "all"}, "Give a whole number from 0 to 10,000, or auto."),
        ({"wait": "300 spins"}, "--wait 300 spins is not possible."),
        ({"wait": -1}, "Give a whole number from 0 to 1,000,000,000, or default, or sleep."),
        ({"kv_unified": "maybe"}, "--kv-unified maybe"),
    ],
)
def test_values_that_no_machine_could_work_with_are_refused(asked: Any, message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        AskedSettings(**asked).check()


def test_a_measurement_from_python_may_be_a_sweep(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Plan] = []
    model = str(model_file)

    def keep_plan(make: Callable[[FakeWorker], Plan], *_: Any) -> list[Any]:
        plans.append(make(FakeWorker()))
        return []

    monkeypatch.setattr(measure, "carry_out", keep_plan)
    monkeypatch.setattr(sweep, "carry_out", keep_plan)

    measure.measure([40], 3, 1, model, every=20, threads=1)
    sweep.sweep(40, 20, 3, 1, model, threads=1)
    measure.measure([40], 3, model=model, until=0.02, budget="5min")

    assert plans[0] == plans[1]
    assert plans[0].cases[0].every == 20
    assert plans[2].until == Until(0.02, 30, 300)
    with pytest.raises(LabError, match="--budget has an effect only with --until"):
        sweep.sweep(40, model=model, budget="5min")


def test_a_length_that_no_results_file_can_hold_is_refused(
    fake_worker: FakeWorker, model_file: Path
) -> None:
    with pytest.raises(LabError, match="A prompt has at most 10,000,000 tokens"):
        plan(fake_worker, model_file, prompt_len=[10, 10**12])
