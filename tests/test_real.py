"""The real thing: llama.cpp and the embedded model, in its child process and as a command."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lab
from lab.core import phases, record, script as scripts
from lab.core.record import OK
from lab.errors import LabError
from lab.process.wire import Progress
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter
from lab.runner.run_list import RunList
from lab.runner.warm_engine import WarmEngine
from tests.bench.warm_up import page_faults
from tests.support.command import run_lab
from tests.support.records import SETTINGS

REAL = dataclasses.replace(
    SETTINGS,
    n_ctx=700,
    n_ubatch=512,
    n_threads=1,
    n_threads_batch=1,
)


@pytest.fixture(scope="module")
def worker(embedded: Path) -> Iterator[Worker]:
    with Worker() as worker:
        worker.load(embedded, SETTINGS)
        worker.new_context(REAL)
        yield worker


def run(
    worker: Worker, prompt: list[int], n_gen: int
) -> tuple[record.Steps, tuple[int, ...], int | None]:
    outcome = worker.run(scripts.run(prompt, n_gen, 512), lambda progress: None)
    return outcome.steps, outcome.token_ids, outcome.end_of_generation_at


def test_the_shape_comes_from_the_header(worker: Worker, embedded: Path) -> None:
    model = worker.read_model(embedded, "smollm2-135m", "embedded")
    assert model.arch == "llama"
    assert model.quantization == "Q4_1"
    assert model.n_layer == 30
    assert model.n_embd == 576
    assert model.n_head == 9
    assert model.n_head_kv == 3
    assert model.head_dim == 64
    assert model.n_ff == 1536
    assert model.n_vocab == 49152
    assert model.n_ctx_train == 8192
    assert model.tied_embeddings is True
    assert set(model.tensor_bytes) == {"Q4_1", "Q8_0", "F32"}
    assert model.n_bytes
    header_bytes = model.n_bytes - sum(model.tensor_bytes.values())
    assert 0 < header_bytes < 3_000_000


def test_steps_of_a_real_run(worker: Worker) -> None:
    ids = worker.tokenize("A clock that stops is right twice a day. " * 80)[:200]
    seen: list[Progress] = []
    outcome = worker.run(scripts.run(ids, 5, 128), seen.append)
    steps = outcome.steps
    tokens = outcome.token_ids
    assert any(progress.n_prefilled == 0 for progress in seen)
    assert seen[-1].n_prefilled == 200
    assert len(seen[-1].token_ids) == 5
    assert steps.n_tokens == (128, 72, 1, 1, 1, 1)
    assert steps.n_past == (0, 128, 200, 201, 202, 203)
    by_step = zip(steps.start_ns, steps.ready_ns, steps.end_ns, strict=True)
    stamps = list(itertools.chain.from_iterable(by_step))
    assert stamps == sorted(stamps)
    assert stamps[0] == 0
    assert len(tokens) == 5


def test_no_prefix_is_reused_and_the_same_prompt_gives_the_same_tokens(worker: Worker) -> None:
    ids = worker.tokenize("The lamp was lit each evening by the keeper's daughter. " * 10)[
        :100
    ]
    first = run(worker, ids, 8)
    again = run(worker, ids, 8)
    assert first[1] == again[1]
    assert again[0].n_tokens[0] == 100
    assert again[0].n_past[0] == 0


def test_end_of_generation_is_noted_and_stops_nothing(worker: Worker) -> None:
    im_start = 1
    im_end = 2  # SmolLM2's marks of a turn; the second ends a generation
    question = [
        im_start,
        *worker.tokenize("user\nAnswer with one word: what is the capital of France?"),
        im_end,
    ]
    prompt = [*question, *worker.tokenize("\n"), im_start, *worker.tokenize("assistant\n")]
    _, tokens, end_at = run(worker, prompt, 60)
    assert len(tokens) == 60
    assert end_at is not None
    assert tokens[end_at] == im_end
    assert im_end not in tokens[:end_at]


def test_a_context_that_llama_cpp_refuses_is_an_error_and_the_child_lives(
    worker: Worker,
) -> None:
    with pytest.raises(LabError, match=r"cannot create a context of 700 tokens: .*flash_attn"):
        worker.new_context(dataclasses.replace(REAL, flash_attn="off", type_v="q8_0"))
    worker.new_context(REAL)
    assert len(run(worker, [1, 2, 3], 2)[1]) == 2


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(),
    reason="this system does not count page faults in /proc",
)
def test_the_first_run_after_the_warm_up_touches_no_new_memory(
    embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a whole step in the warm-up the first run has about 2,000 page faults more than the
    next one."""
    # A busy machine takes longer for a step.
    monkeypatch.setattr("lab.runner.warm_engine.FULL_WARMUP_S", 60)
    n_faults = [0]

    def count(worker: Worker) -> None:
        n_faults.append(page_faults(worker.pid) or 0)

    with Worker() as worker:
        plan = make_plan(worker, [256], 1, 2, str(embedded))
        engine = WarmEngine(
            plan, worker, Reporter(lambda status: None, RunList(plan.order), plan.n_tokens)
        )
        engine.load()
        engine.open(plan.cases)
        list(engine.warm_up(plan.cases))
        for repeat in range(2):
            count(worker)
            engine.run(plan.cases[0], repeat)
        count(worker)
    first = n_faults[2] - n_faults[1]
    second = n_faults[3] - n_faults[2]
    assert first - second < 500


def test_measuring_from_python(tmp_path: Path) -> None:
    records = lab.measure(
        "8,40",
        gen=4,
        repeat=1,
        out=tmp_path,
        threads=1,
    )
    runs = [record.run for record in records]
    assert [run.warmup for run in runs] == [True, True, False, False]
    assert {run.status for run in runs} == {OK}
    assert len(lab.runs(records)) == 4
    assert len(lab.steps(records)) == sum(len(run.steps.kind) for run in runs)
    assert list(lab.read([tmp_path]).records) == records
    of_forty = [record for record in records if record.run.n_prompt == 40]
    (timed,) = [record for record in of_forty if not record.run.warmup]
    assert timed.model.sha256
    assert len(timed.model.sha256) == 64
    assert timed.settings.prompt == "text"
    assert timed.run.noise is not None
    assert 0 < sum(phases.decode_compute_ns(timed.run)) <= sum(phases.itl_ns(timed.run))


@pytest.mark.usefixtures("undisturbed")
def test_the_command_measures_tells_and_draws(tmp_path: Path) -> None:
    status, out, err = run_lab(
        "measure", "-p", "8,40", "-n", "4", "-r", "2", "-t", "1", "-o", tmp_path
    )
    assert status == 0
    assert "smollm2-135m Q4_1" in out
    assert re.search("Prefill of 40 tokens took|No findings from the runs", out)
    assert "repeat 2" in err
    assert len(list(tmp_path.glob("*.png"))) == len(list(tmp_path.glob("*.svg"))) == 3
    shown = run_lab("show", tmp_path)
    assert shown[0] == 0
    assert "Prefill of 40 tokens took" in shown[1]
    (tmp_path / "plots").mkdir()
    drawn = run_lab("plot", tmp_path, "-o", tmp_path / "plots")
    assert drawn[0] == 0
    assert len(drawn[1].splitlines()) == 6


def test_json_is_one_document_and_nothing_else(tmp_path: Path) -> None:
    """With the default number of threads; other tests take one, which work disturbs less."""
    status, out, _ = run_lab(
        "measure", "-p", "8", "-n", "3", "-r", "1", "-o", tmp_path, "--json", "--stream"
    )
    document = json.loads(out)
    assert status == 0
    assert Path(document["results"]).exists()
    assert len(document["plots"]) == 6
    (row,) = document["rows"]
    assert row["n_prompt"] == 8
    assert row["n_gen"] == 3
    assert row["repeats"] == 1
    assert all(
        row[name] > 0
        for name in ("prefill_s", "prefill_tps", "ttft_s", "tpot_ms", "decode_tps", "e2e_s")
    )


def test_dry_run_measures_nothing(tmp_path: Path) -> None:
    status, out, _ = run_lab("measure", "-p", "10,1000", "--dry-run", "-o", tmp_path / "none")
    assert status == 0
    assert "1,000" in out
    assert "KV cache" in out
    assert not (tmp_path / "none").exists()
    document = json.loads(run_lab("measure", "-p", "10", "--dry-run", "--json")[1])
    assert (
        document["cases"][0]["memory"]["kv_cache_bytes"] == 256 * 23_040
    )  # llama.cpp pads to 256


def test_models(embedded: Path) -> None:
    assert "smollm2-135m" in run_lab("models")[1]
    assert json.loads(run_lab("models", "--json")[1])[0]["n_bytes"] == embedded.stat().st_size


def test_a_function_of_the_package_stores_the_command_that_does_the_same(
    tmp_path: Path,
) -> None:
    measured = lab.measure(
        "8",
        gen=2,
        repeat=1,
        threads=1,
        out=tmp_path,
    )
    swept = lab.sweep(
        16,
        every=8,
        gen=2,
        repeat=1,
        threads=1,
        out=tmp_path,
    )

    options = ("--gen", "2", "--repeat", "1", "--threads", "1")
    assert measured[0].command == ("measure", "--prompt-len", "8", *options)
    assert swept[0].command == ("sweep", "--max-len", "16", "--every", "8", *options)
