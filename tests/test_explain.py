"""Ceilings and explanations: exact on made-up ceilings, and once on the real kernels."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lab.core import cost, results
from lab.core.record import Ceilings, Rate, Record
from lab.core.shape import FEED_FORWARD, Matrix
from lab.errors import LabError
from lab.features.explain import advice, section, sentences as words
from lab.process.wire import ATTENTION, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, Probe
from lab.process.worker import Worker, WorkerDied
from lab.roofline import explanation, measuring, probes, probing, step_kernels
from lab.roofline.probing import Where
from lab.runner import disturbances
from lab.runner.plan import make_plan
from lab.runner.progress import Status
from tests.conftest import MACHINE, MODEL, SETTINGS, exact_steps, make_record, make_run, run_lab
from tests.test_cost import of_catalog

BIG = dataclasses.replace(of_catalog("llama-3.2-1b", "Q8_0"), name="big")
WIDE = dataclasses.replace(SETTINGS, n_ubatch=512)


def rate(op: str, kind: str, n_tokens: int, gbps: float, gflops: float, n_threads: int = 2) -> Rate:
    """A kernel that reads at gbps, or computes at gflops, whichever is slower."""
    n_bytes = 34 * 10**6
    flops = 2 * 32 * 10**6 * n_tokens
    ns = round(max(n_bytes / gbps, flops / gflops))
    return Rate(op, kind, "CPU", 1, 1, n_tokens, n_threads, n_bytes, flops, (2 * ns, ns))


FAST = Ceilings(
    "2026-01-01T00:00:00Z",
    MACHINE,
    False,
    (
        *(rate(MUL_MAT, "Q8_0", n, 20, 400) for n in (1, 8, 512)),
        rate(ATTENTION, "F16", 1, 20, 400),
        rate(ATTENTION, "F16", 512, 20, 100),
        rate(probes.READ, "I64", 1, 40, 1e9),
    ),
)


def test_the_roof_is_the_best_of_all_kernels() -> None:
    roof = step_kernels.roof(FAST)
    assert [roof.gflops, roof.gbps] == pytest.approx([400, 40])
    assert roof.ridge == pytest.approx(10)


def test_ceilings_without_repacking_are_apart() -> None:
    plain = dataclasses.replace(FAST, repack=False, rates=(rate(MUL_MAT, "Q8_0", 1, 200, 400),))
    of_plain = dataclasses.replace(SETTINGS, repack=False)
    here, there = (probing.place_of(MACHINE, BIG, settings) for settings in (SETTINGS, of_plain))
    packed, unpacked = (probing.known([FAST, plain], place) for place in (here, there))
    assert packed and packed.rates == FAST.rates
    assert unpacked and unpacked.rates == plain.rates and unpacked.repack is False
    with pytest.raises(LabError, match="without repacking have not been measured") as problem:
        probing.need([FAST], there, "these runs")
    assert problem.value.hint.endswith("lab ceilings --no-repack")
    with pytest.raises(LabError) as problem:
        step_kernels.product_s_per_byte(unpacked, BIG, feed_forward("Q4_0"), 1, 2)
    assert problem.value.hint.endswith("--no-repack")
    by_device = (
        probes.probes(BIG, of_plain, device=None),
        probes.probes(BIG, of_plain, device="CUDA0"),
    )
    assert [{probe.repack for probe in group if probe.op == MUL_MAT} for group in by_device] == [
        {False},
        {None},
    ]


def test_ceilings_that_are_too_low_are_told_and_promise_nothing_absurd() -> None:
    slow = (dataclasses.replace(rate, times_ns=(100 * rate.times_ns[1],)) for rate in FAST.rates)
    low = dataclasses.replace(FAST, rates=tuple(slow))
    records = timed(1.1)
    rows = explanation.explain(records, low)
    assert (
        "the ceiling was measured too low; measure again: lab ceilings --again"
        in words.verdicts(rows, WIDE)[-1]
    )
    shown_rows = section.explained("", records, low)
    at = [name.split()[0] for name in shown_rows.headings].index("weights/attention/")
    assert {line[at] for line in shown_rows.cells} == {"-"} and "%" not in " ".join(
        words.verdicts(rows, WIDE)
    )
    assert "too low" not in " ".join(words.verdicts(explanation.explain(records, FAST), WIDE))
    assert all(
        0 < lever.figures["decode_gain"] < 100 for lever in advice.changes(rows, records[0], low)
    )


def test_kernels_of_a_decode_step_read_each_weight_once() -> None:
    kernels = step_kernels.total(BIG, WIDE, FAST, 1, 0, 1)
    step = cost.step(BIG, 1, 0, 1)
    assert kernels is not None and step is not None
    assert kernels.layers_s + kernels.head_s == pytest.approx(step.weight_bytes / 20e9, rel=0.001)
    assert kernels.head_s == pytest.approx((BIG.embedding_bytes or 0) / 20e9)


def test_kernels_of_a_prefill_step_multiply_at_the_rate_of_many_columns() -> None:
    kernels = step_kernels.total(BIG, WIDE, FAST, 512, 0, 0)
    step = cost.step(BIG, 512, 0, 0)
    assert kernels is not None and step is not None
    assert kernels.layers_s == pytest.approx(step.layer_flops / 400e9, rel=0.01)
    assert kernels.head_s == 0
    assert kernels.attention_s == pytest.approx(step.attention_flops / 100e9)


def feed_forward(kind: str) -> Matrix:
    return Matrix(FEED_FORWARD, kind, BIG.n_ff or 1, BIG.n_embd or 1, 1)


def timed(decode_factor: float) -> list[Record]:
    """Runs on BIG whose decode steps take decode_factor times their kernels' least time."""
    kernels = step_kernels.total(BIG, WIDE, FAST, 1, 22, 1)
    prefill = step_kernels.total(BIG, WIDE, FAST, 8, 8, 1)
    assert kernels and prefill
    run = make_run(
        20, 5, decode_ms=1e3 * decode_factor * kernels.total_s, prefill_ms=1e3 * prefill.total_s / 6
    )
    return [make_record(run, model=BIG, settings=WIDE)]


@pytest.mark.parametrize(
    ("factor", "limit"), [(1.1, explanation.KERNEL), (3, explanation.OVERHEAD)]
)
def test_the_limit_is_what_is_nearest(factor: float, limit: str) -> None:
    (decode,) = [
        row
        for row in explanation.explain(timed(factor), FAST).itertuples()
        if row.phase == "decode"
    ]
    assert decode.limit == limit  # Q8_0 reads at 20 where 40 are possible: its kernel is the limit
    assert decode.of_ceiling == pytest.approx(1 / factor, rel=0.01)


def test_memory_traffic_and_arithmetic_are_limits_too() -> None:
    better = dataclasses.replace(
        FAST, rates=tuple(probed for probed in FAST.rates if probed.op != probes.READ)
    )
    rows = explanation.explain(timed(1.0), better)
    assert rows[rows.phase == "decode"].limit.tolist() == [explanation.TRAFFIC]
    long = make_record(
        make_run(4096, 2, steps=exact_steps(4096, 2, 512, prefill_ms=8)), model=BIG, settings=WIDE
    )
    (prefill,) = [
        row for row in explanation.explain([long], FAST).itertuples() if row.phase == "prefill"
    ]
    assert prefill.limit == explanation.ARITHMETIC and prefill.arithmetic_s > prefill.traffic_s


# The real kernels


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as started:
        yield started


def small(op: str, kind: str, n_tokens: int, rows: int = 512, columns: int = 512) -> Probe:
    n_head_kv = 2 if op == ATTENTION else None
    return Probe(op, kind, rows, columns, n_head_kv, n_tokens, 4 * 2**20, 2, None, 0.02)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "F16"])
def test_products_are_timed_for_every_type(worker: Worker, kind: str) -> None:
    one = worker.probe(small(MUL_MAT, kind, 1))
    many = worker.probe(small(MUL_MAT, kind, 64))
    assert one.n_bytes == pytest.approx(4 * 2**20, rel=0.2) and one.flops == many.flops / 64
    assert min(one.times_ns + many.times_ns) > 0
    plain = worker.probe(dataclasses.replace(small(MUL_MAT, kind, 1), repack=False))
    assert plain.buffer == "CPU" and plain.n_bytes == one.n_bytes


def test_attention_is_timed(worker: Worker) -> None:
    for kind in ("F16", "Q8_0"):
        best = worker.probe(small(ATTENTION, kind, 4, rows=6, columns=64))
        pairs = best.n_bytes // (2 * 2 * (128 if kind == "F16" else 68))  # positions of all layers
        assert best.flops == 4 * 6 * 64 * 4 * pairs and pairs % 512 == 0
        assert probing.gbps(best) > 0
    wanted = small(ATTENTION, "F16", 4, rows=6, columns=64)
    flash, plain = (
        worker.probe(dataclasses.replace(wanted, op=op)) for op in (ATTENTION, PLAIN_ATTENTION)
    )
    assert (flash.n_bytes, flash.flops) == (plain.n_bytes, plain.flops)


def test_probes_cover_what_a_model_needs() -> None:
    wanted = probes.probes(dataclasses.replace(MODEL, n_ff=128), SETTINGS, ["Q8_0"])
    assert {(p.type, p.n_tokens) for p in wanted if p.op == MUL_MAT and p.n_threads == 2} >= {
        ("Q4_0", 1),
        ("Q8_0", 8),
    }
    attention = {
        (p.n_tokens, p.n_positions) for p in wanted if p.op == ATTENTION and p.n_threads == 2
    }
    assert attention == {
        (1, 512),
        (1, 4096),
        (1, 32768),
        (SETTINGS.n_ubatch, 512),
        (SETTINGS.n_ubatch, 4096),
    }
    assert {p.n_threads for p in wanted} == {2} and PLAIN_ATTENTION not in {p.op for p in wanted}
    off = probes.probes(MODEL, dataclasses.replace(SETTINGS, flash_attn="off"))
    assert {(p.n_tokens, p.n_positions) for p in off if p.op == PLAIN_ATTENTION} == attention
    assert ATTENTION not in {p.op for p in off}


def test_commands_on_ceilings_that_are_known(
    worker: Worker, tmp_path: Path, embedded: Path
) -> None:
    sample = Path("results") / "sample-sweep-smollm2-135m-amd-epyc.jsonl"
    code, _, err = run_lab("explain", sample, "--ceilings", tmp_path)
    assert code == 1 and "lab ceilings" in err and "have not been measured" in err
    arguments = [
        "-p",
        "16,64,128",
        "-n",
        "4",
        "-r",
        "1",
        "--no-plot",
        "-u",
        "64",
        "-t",
        "1",
        "-o",
        tmp_path,
    ]
    assert run_lab("measure", *arguments)[0] == 0
    plan = make_plan(worker, [1], 1, 1, ubatch=64, threads=1)
    wanted = [
        dataclasses.replace(p, n_bytes=2**21, seconds=0.01)
        for p in probes.probes(plan.model, plan.settings)
    ]
    assert probes.missing(wanted, ()) == wanted
    rates = (*map(worker.probe, wanted), measuring.read_rate(1, 2**22))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    path = probing.save(Ceilings(now, plan.machine, False, rates), tmp_path)
    assert results.read([path]).ceilings[0].rates == rates and not results.read([path]).skipped
    known = probing.known(probing.kept(tmp_path), Where(plan.machine))
    assert known and probes.missing(wanted, known.rates) == []
    another = dataclasses.replace(plan.machine, llama_cpp_commit="other")
    assert probing.known(probing.kept(tmp_path), Where(another)) is None
    sample = Path("results") / "sample-synthetic-phi-3-mini-q4_0-amd-epyc.jsonl"
    elsewhere = dataclasses.replace(known, machine=another)
    probing.save(elsewhere, tmp_path / "other")
    code, _, err = run_lab("explain", sample, "--ceilings", tmp_path / "other", "--no-plot")
    assert code == 1 and "another machine or build" in err
    code, out, err = run_lab("ceilings", "-u", "64", "-t", "1", "--types", "", "-o", tmp_path)
    assert code == 0 and "All kernels are measured already." in err and "FLOPs per byte" in out
    code, out, err = run_lab("explain", tmp_path, "--ceilings", tmp_path, "--details")
    assert code == 0, err
    assert "weights/attention/" in out
    assert (
        len(list(tmp_path.glob("*-roofline.png")))
        == len(list(tmp_path.glob("*-roofline.svg")))
        == 1
    )
    document = json.loads(run_lab("explain", tmp_path, "--ceilings", tmp_path, "--json")[1])
    assert [row["phase"] for row in document[0]["rows"]] == ["prefill", "decode"] * 3
    code, out, err = run_lab(
        "predict",
        "-p",
        "64",
        "-n",
        "10",
        "-u",
        "64",
        "-t",
        "1",
        "-d",
        "here",
        "--results",
        tmp_path,
    )
    assert code == 0, err
    assert "fitted to 3 runs of smollm2-135m Q4_1 on this machine" in out


# How much is probed, in how many rounds, and what is kept


class Counting:
    """Stands in for the engine: every probe is a little faster than the last."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.asked: list[Probe] = []

    def probe(self, probe: Probe) -> Rate:
        self.asked.append(probe)
        ns = 1000 - len(self.asked)
        return dataclasses.replace(rate(probe.op, probe.type, probe.n_tokens, 1, 1), times_ns=(ns,))


@pytest.mark.parametrize(("n_disturbed", "n_rounds"), [(0, 2), (1, 2), (2, 3), (9, 3)])
def test_rounds_go_on_while_the_machine_is_disturbed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, n_disturbed: int, n_rounds: int
) -> None:
    engine: Any = Counting()
    wanted = [small(MUL_MAT, "Q4_0", n) for n in (1, 8, 64)]

    def during(noise: object, n_free: float) -> str:
        return (
            "another process used 1 of a core"
            if len(engine.asked) <= n_disturbed * len(wanted)
            else ""
        )

    monkeypatch.setattr(disturbances, "during", during)
    monkeypatch.setattr(
        measuring, "read_rate", lambda n_threads: rate(probes.READ, "I64", 1, 40, 1e9)
    )
    told: list[Status] = []
    warned: list[str] = []
    known = measuring.obtain(engine, Where(MACHINE), wanted, told.append, warned.append, tmp_path)
    slower = ["slower: another process used 1 of a core" in status.doing for status in told]
    assert slower == [0 < n <= n_disturbed * len(wanted) for n in range(n_rounds * len(wanted))]
    assert engine.asked == wanted * n_rounds  # interleaved
    assert bool(warned) == (n_disturbed > n_rounds)
    assert [len(probed.times_ns) for probed in known.rates if probed.op == MUL_MAT] == [
        n_rounds
    ] * 3


def test_the_command_says_how_long_it_takes_and_what_ctrl_c_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine: Any = Counting()

    def probe(asked: Probe) -> Rate:
        if (
            len(engine.asked) == 10
        ):  # of the first kernel seven sizes, of the next two, and one of the third
            raise KeyboardInterrupt
        done = Counting.probe(engine, asked)
        names = (
            "op",
            "type",
            "rows",
            "columns",
            "n_tokens",
            "n_threads",
            "n_head_kv",
            "n_positions",
        )
        return dataclasses.replace(done, **{name: getattr(asked, name) for name in names})

    monkeypatch.setattr(Worker, "probe", lambda worker, asked: probe(asked))
    code, _, err = run_lab("ceilings", "--types", "", "-t", 1, "-o", tmp_path)
    n = int(
        re.search(
            r"^(\d+) kernels to measure in 2 rounds: about .* Ctrl-C keeps", err, re.MULTILINE
        )[1]
    )  # type: ignore[index]
    assert code == 130 and f"kernel 1 of {2 * n}: " in err and "left" in err
    assert (
        f"kept in {tmp_path}. {n - 9} of {n} kernels are missing. The same command measures them."
        in err
    )
    ((kept),) = probing.kept(tmp_path)
    assert [rate.n_tokens for rate in kept.rates] == [1, 2, 4, 8, 32, 128, 512, 1, 512]


def test_broken_lines_of_ceilings_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    path = probing.save(FAST, tmp_path)
    with path.open("a") as file:
        file.write('{"schema": 3, "rates": 5}\n')
    sentences = list[str]()
    assert len(probing.kept(tmp_path, sentences.append)) == 1
    assert len(sentences) == 1 and path.name in sentences[0]
    with pytest.warns(UserWarning, match=path.name):
        probing.kept(tmp_path)
    results.save(tmp_path / "runs.jsonl", make_record(timed(1.1)[0].run, model=BIG, settings=WIDE))
    code, _, err = run_lab("explain", tmp_path / "runs.jsonl", "--ceilings", tmp_path, "--no-plot")
    assert code == 0 and f"Note: {path.name} line 2" in err


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": 576, "type": "Q4_K"},
        {"op": ATTENTION, "type": "Q4_K"},
        {"op": ATTENTION, "rows": 9, "columns": 64},
        {"op": MUL_MAT_ID},
        {"type": "Q8_1"},
    ],
)
def test_nothing_that_can_be_asked_for_ends_the_engine(
    worker: Worker, changes: dict[str, Any]
) -> None:
    with pytest.raises(LabError) as problem:
        worker.probe(dataclasses.replace(small(MUL_MAT, "Q4_0", 1), n_head_kv=2, **changes))
    assert not isinstance(problem.value, WorkerDied)


def test_a_levers_command_measures_what_it_promised() -> None:
    rows = explanation.explain(timed(1.1), FAST)
    fewer = dataclasses.replace(
        FAST, rates=(*FAST.rates, *(dataclasses.replace(r, n_threads=1) for r in FAST.rates))
    )
    quick = tuple(
        dataclasses.replace(probed, times_ns=(1,)) if probed.n_threads == 1 else probed
        for probed in fewer.rates
    )
    record = dataclasses.replace(timed(1.1)[0], settings=dataclasses.replace(WIDE, n_ubatch=64))
    (lever, *_) = advice.changes(rows, record, dataclasses.replace(fewer, rates=quick))
    assert lever.command and lever.command.startswith(
        "lab ab '--threads 2' '--threads 1' --prompt-len 20 --gen 5 "
    )
    assert "--threads-batch" not in lever.command
    assert lever.command.endswith("--ubatch 64")
