"""Models that the lab refuses, and recurrent and hybrid ones, which it measures."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lab.core import cost, results
from lab.core.record import OK
from lab.errors import LabError
from lab.features.trace.nodes import Trace
from lab.models import synthetic
from lab.process.worker import Worker
from tests.support import miniature, odd_models
from tests.support.command import run_lab
from tests.support.records import SETTINGS

QUICK = ("--prompt", "random", "-t", "1", "--no-plot")


@pytest.mark.parametrize(
    "arch", ["llada", "t5", "llama"]
)  # diffusion, an encoder, an embedding model
def test_what_does_not_decode_token_by_token_is_refused_with_the_reason(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    path = odd_models.write(arch, tmp_path / f"{arch}.gguf")
    with pytest.raises(
        LabError, match=rf"^{arch}.gguf does not generate text token by token"
    ) as problem:
        worker.load(path, SETTINGS)
    assert "lab models" in problem.value.hint


def test_a_command_says_it_once_and_measures_nothing(tmp_path: Path) -> None:
    path = odd_models.write("llada", tmp_path / "llada.gguf")
    sizes = ("-p", "8,16", "-n", "4")
    code, out, err = run_lab("measure", "-m", path, *sizes, *QUICK, "-o", tmp_path / "out")
    assert code == 1
    assert (out + err).count("does not generate text token by token") == 1
    assert not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_a_recurrent_and_a_hybrid_model_are_measured(tmp_path: Path, arch: str) -> None:
    path = odd_models.write(arch, tmp_path / f"{arch}.gguf")
    sizes = ("-p", "8,100", "-n", "6", "-r", "2", "-u", "64")
    code, out, err = run_lab("measure", "-m", path, *sizes, *QUICK, "-o", tmp_path / "out")
    assert code == 0, out + err
    steps = {
        8: (8, 1, 1, 1, 1, 1),
        100: (64, 36, 1, 1, 1, 1, 1),
    }
    n_runs = dict.fromkeys(steps, 0)
    for record in results.read([tmp_path / "out"]).records:
        run = record.run
        if run.warmup:
            continue
        n_runs[run.n_prompt] += 1
        assert run.status == OK
        assert run.steps.n_tokens == steps[run.n_prompt]
        assert len(run.token_ids) == 6
        assert record.model.uncounted is None
        assert (record.model.n_state or 0) > 0
        assert cost.step(record.model, 1, 8, 1) is not None
    assert n_runs == {8: 2, 100: 2}
    code, out, err = run_lab("show", tmp_path / "out")
    assert code == 0
    assert arch in out


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_a_state_that_is_not_cleared_would_show_in_the_tokens(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    from lab.core import script as scripts

    worker.load(odd_models.write(arch, tmp_path / f"{arch}.gguf"), SETTINGS)
    worker.new_context(
        dataclasses.replace(
            SETTINGS,
            n_ctx=256,
            n_ubatch=64,
            n_threads=1,
            n_threads_batch=1,
        )
    )

    def tokens_after(first_id: int) -> tuple[int, ...]:
        prompt = range(first_id, first_id + 40)
        return worker.run(scripts.run(prompt, 8, 64), lambda progress: None).token_ids

    tokens = tokens_after(1)
    assert tokens_after(90) != tokens
    assert tokens_after(1) == tokens


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_experiments_that_take_positions_back_are_refused_for_them(
    tmp_path: Path, arch: str
) -> None:
    path = odd_models.write(arch, tmp_path / f"{arch}.gguf")
    sizes = ("--prompt-len", "32", "--chunk", "16", "-r", "1")
    code, _, err = run_lab("stall", "-m", path, *sizes, *QUICK, "-o", tmp_path / "out")
    assert code == 1
    assert f"The cache of {arch} cannot be copied and cut" in err


def test_flash_attention_is_not_believed_where_llama_cpp_forces_it_off(
    worker: Worker, tmp_path: Path
) -> None:
    worker.load(odd_models.write("grok", tmp_path / "grok.gguf"), SETTINGS)
    for flash_attn in ("on", "auto", "off"):
        settings = worker.new_context(dataclasses.replace(SETTINGS, flash_attn=flash_attn))
        assert settings.flash_attn_resolved == "off"


@pytest.mark.parametrize("arch", miniature.NAMES)
def test_the_list_of_those_that_never_skip_is_what_llama_cpp_does(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    path = tmp_path / f"{arch}.gguf"
    synthetic.write(miniature.entry(arch).shape, miniature.quantization(arch), path)
    worker.load(path, SETTINGS)
    worker.new_context(dataclasses.replace(SETTINGS, n_ctx=64, n_ubatch=64))
    script = {
        "tokens": list(range(1, 41)),
        "n_gen": 1,
        "n_rounds": 1,
    }
    trace = worker.call(Trace, "lab.features.trace.child.trace", **script)
    products = [node for node in trace.prefill.nodes if is_product_of_down(node)]
    runs_all_tokens = max(products[-1].result.ne[1:]) == 40
    assert runs_all_tokens == (arch in cost.NEVER_SKIPS), products[-1]


def is_product_of_down(node: Any) -> bool:
    has_down = any("ffn_down" in source.name for source in node.sources)
    return has_down and "MUL" in node.op
