"""Models unlike most: those that the lab refuses, and recurrent and hybrid ones, which it measures."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.core import cost, results
from lab.core.record import OK
from lab.errors import LabError
from lab.features.trace.nodes import Trace
from lab.models import synthetic
from lab.process.worker import Worker
from tests import miniature, odd_models
from tests.conftest import SETTINGS, run_lab

ASKED = ("--prompt", "random", "-t", "1", "--no-plot")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


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
    code, out, err = run_lab(
        "measure", "-m", path, "-p", "8,16", "-n", "4", *ASKED, "-o", tmp_path / "out"
    )
    assert code == 1 and (out + err).count("does not generate text token by token") == 1
    assert not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize(("arch", "kind"), [("mamba", "recurrent"), ("lfm2", "convolutions")])
def test_a_recurrent_and_a_hybrid_model_are_measured(tmp_path: Path, arch: str, kind: str) -> None:
    path = odd_models.write(arch, tmp_path / f"{arch}.gguf")
    asked = (
        "-m",
        path,
        "-p",
        "8,100",
        "-n",
        "6",
        "-r",
        "2",
        "-u",
        "64",
        *ASKED,
        "-o",
        tmp_path / "out",
    )
    code, out, err = run_lab("measure", *asked)
    assert code == 0, out + err
    records = [one for one in results.read([tmp_path / "out"]).records if not one.run.warmup]
    assert len(records) == 4 and {one.run.status for one in records} == {OK}
    for n_prompt in (8, 100):
        first, second = (one.run for one in records if one.run.n_prompt == n_prompt)
        steps = (64, 36) if n_prompt == 100 else (8,)
        assert first.steps.n_tokens == second.steps.n_tokens == (*steps, 1, 1, 1, 1, 1)
        assert len(first.token_ids) == 6
    assert all(kind in (one.model.uncounted or "") for one in records)
    code, out, err = run_lab("show", tmp_path / "out")
    assert code == 0 and arch in out


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_a_state_that_is_not_cleared_would_show_in_the_tokens(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    from lab.core import script as scripts

    worker.load(odd_models.write(arch, tmp_path / f"{arch}.gguf"), SETTINGS)
    worker.new_context(
        dataclasses.replace(SETTINGS, n_ctx=256, n_ubatch=64, n_threads=1, n_threads_batch=1)
    )
    runs = [
        worker.run(scripts.run(range(start, start + 40), 8, 64), lambda progress: None)
        for start in (1, 90, 1)
    ]
    first, other, again = (run.token_ids for run in runs)
    assert first == again != other


@pytest.mark.parametrize("arch", ["mamba", "lfm2"])
def test_experiments_that_take_positions_back_are_refused_for_them(
    tmp_path: Path, arch: str
) -> None:
    path = odd_models.write(arch, tmp_path / f"{arch}.gguf")
    asked = (
        "-m",
        path,
        "--prompt-len",
        "32",
        "--chunk",
        "16",
        "-r",
        "1",
        *ASKED,
        "-o",
        tmp_path / "out",
    )
    code, _, err = run_lab("stall", *asked)
    assert code == 1 and f"The cache of {arch} cannot be copied and cut" in err


def test_flash_attention_is_not_believed_where_llama_cpp_forces_it_off(
    worker: Worker, tmp_path: Path
) -> None:
    worker.load(odd_models.write("grok", tmp_path / "grok.gguf"), SETTINGS)
    resolved = [
        worker.new_context(dataclasses.replace(SETTINGS, flash_attn=asked))
        for asked in ("on", "auto", "off")
    ]
    assert [one.flash_attn_resolved for one in resolved] == ["off", "off", "off"]


@pytest.mark.parametrize("arch", miniature.NAMES)
def test_the_list_of_those_that_never_skip_is_what_llama_cpp_does(
    worker: Worker, tmp_path: Path, arch: str
) -> None:
    path = tmp_path / f"{arch}.gguf"
    synthetic.write(miniature.entry(arch).shape, miniature.quantization(arch), path)
    worker.load(path, SETTINGS)
    worker.new_context(dataclasses.replace(SETTINGS, n_ctx=64, n_ubatch=64))
    asked = {"tokens": list(range(1, 41)), "n_gen": 1, "n_rounds": 1}
    nodes = worker.call(Trace, "lab.features.trace.child.trace", **asked).prefill.nodes
    (*_, last) = (
        node
        for node in nodes
        if any("ffn_down" in one.name for one in node.sources) and "MUL" in node.op
    )
    assert (max(last.result.ne[1:]) == 40) == (arch in cost.NEVER_SKIPS), last
