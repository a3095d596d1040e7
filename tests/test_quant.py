"""lab quant: the arithmetic against scipy, planted differences, and the embedded model's requantizations."""

import csv
import dataclasses
import io
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special

from lab.app import kinds
from lab.core import results
from lab.core.payloads import Divergence, Quality
from lab.core.record import QUANT, Record, Steps
from lab.errors import LabError
from lab.features.quant import child as quality, comparing
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import machine, prompts
from tests import loopback_hub, odd_models
from tests.conftest import MODEL, SETTINGS, make_record, make_run, run_lab


def chunk(kl: float, same: int = 200, nll: float = 2.1, reference: float = 2.0) -> Divergence:
    return Divergence((kl,) * 255, same, nll, reference)


def quality_record(
    variant: str, chunks: list[Divergence], is_floor: bool = False, **changes: Any
) -> Record:
    found = Quality(
        "A: F16", "", ("prose", "code") * (len(chunks) // 2), tuple(chunks), is_floor, 90.0
    )
    run = make_run(512, 0, variant=variant, part=QUANT, quality=found)
    return make_record(dataclasses.replace(run, steps=Steps(), token_ids=()), **changes)


def planted(n_blocks: int = 10) -> list[Record]:
    """F16, Q8_0 (near, 1.5x), Q4_K_M (further, 2x) and Q4_0 (furthest, 1.2x): Q4_0 is beaten by both others."""
    means = {"B: Q8_0": 0.001, "C: Q4_K_M": 0.01, "D: Q4_0": 0.05}
    made = [
        quality_record(name, [chunk(kl * (1 + 0.02 * (-1) ** i), 250 - j) for i in range(16)])
        for j, (name, kl) in enumerate(means.items())
    ]
    made.append(quality_record("noise floor", [chunk(1e-5)] * 8, is_floor=True))
    for block in range(n_blocks):
        for name, gain in {"A: F16": 1.0, "B: Q8_0": 1.5, "C: Q4_K_M": 2.0, "D: Q4_0": 1.2}.items():
            jitter = 1 + 0.01 * math.sin(7 * block + len(made))
            run = make_run(256, 32, repeat=block, block=block, variant=name, part=QUANT)
            scale = jitter / gain
            steps = run.steps
            times = {
                key: tuple(round(ns * scale) for ns in getattr(steps, key))
                for key in ("start_ns", "ready_ns", "end_ns")
            }
            model = dataclasses.replace(MODEL, quantization=name[3:])
            run = dataclasses.replace(
                run,
                steps=dataclasses.replace(steps, **times),
                started_at=f"2026-01-01T00:00:{block:02}Z",
            )
            made.append(make_record(run, model=model))
    return made


def test_divergence_is_that_of_scipy() -> None:
    random = np.random.default_rng(1)
    reference, own = (random.normal(0, 4, (255, 1000)).astype(np.float32) for _ in range(2))
    own = reference + 0.3 * own
    following = random.integers(0, 1000, 255).tolist()
    found = quality.divergence(reference, own, following)
    p = special.softmax(reference.astype(float), axis=1)
    q = special.softmax(own.astype(float), axis=1)
    assert found.kl == pytest.approx(special.rel_entr(p, q).sum(axis=1), rel=1e-5)
    assert found.n_same == (p.argmax(1) == q.argmax(1)).sum()
    assert found.nll == pytest.approx(-np.log(q[np.arange(255), following]).mean())
    assert found.reference_nll == pytest.approx(-np.log(p[np.arange(255), following]).mean())
    assert max(quality.divergence(own, own, following).kl) == 0


def test_logits_that_no_float_of_16_bits_holds_are_not_clamped() -> None:
    reference = np.zeros((1, 4), np.float32)
    own = np.array([[0, 0, 0, -60]], np.float32)
    found = quality.divergence(reference, own, [3])
    assert found.kl[0] == pytest.approx(0.25 * 60 + math.log(3 / 4), rel=1e-5) and found.nll > 60
    with pytest.raises(LabError, match="not numbers"):
        quality.divergence(reference, own * float("nan"), [3])


def test_the_largest_logits_and_sums_of_the_rest_bound_the_divergence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality, "N_TOP", 64)
    random = np.random.default_rng(4)
    reference = random.normal(0, 4, (40, 2000)).astype(np.float32)
    own = (reference + random.normal(0, 0.5, reference.shape)).astype(np.float32)
    following = random.integers(0, 2000, 40).tolist()
    exact = quality.divergence(reference, own, following)
    found = quality.bounded(quality.largest(reference, following), own, following)
    assert all(low <= kl * (1 + 1e-5) for low, kl in zip(found.kl, exact.kl, strict=True))
    assert found.most is not None and np.mean(found.kl) < np.mean(exact.kl) < found.most
    assert (found.n_same, found.nll, found.reference_nll) == pytest.approx(
        (exact.n_same, exact.nll, exact.reference_nll)
    )
    monkeypatch.setattr(quality, "N_TOP", 5000)  # all entries: nothing is left out
    whole = quality.bounded(quality.largest(reference, following), own, following)
    assert whole.kl == pytest.approx(exact.kl, rel=1e-4) and whole.most == pytest.approx(
        np.mean(exact.kl), rel=1e-4
    )


def test_the_planted_front_is_found() -> None:
    ((_, found),) = comparing.of_sessions(planted())
    rows = found.rows.set_index("label")
    assert rows.on_front.to_dict() == {"F16": True, "Q8_0": True, "Q4_K_M": True, "Q4_0": False}
    assert rows.decode["Q4_K_M"] == pytest.approx(2, rel=0.02)
    assert rows.decode_low["Q4_K_M"] < rows.decode["Q4_K_M"] < rows.decode_high["Q4_K_M"]
    assert found.floor == pytest.approx(1e-5) and found.equal == []
    said = comparing.sentences(planted(), found)
    assert said[0] == (
        "No other one is better in both quality and decode speed than F16, Q8_0 and Q4_K_M; Q4_0 is beaten in both."
    )
    answer = comparing.answer(found)
    assert (
        answer.startswith("Q8_0 decodes 1.5")
        and "as fast as F16" in answer
        and "on 98 % of tokens" in answer
    )
    assert "; Q4_K_M 2" in answer and answer.endswith("on 97.6 %.") and said[-1] == comparing.LIMITS


def test_candidates_that_differ_by_chance_are_a_pair_that_cannot_be_told_apart() -> None:
    random = np.random.default_rng(3)
    one = [chunk(kl) for kl in 0.01 + 0.003 * random.random(16)]
    other = [chunk(kl) for kl in 0.01 + 0.003 * random.random(16)]
    records = [quality_record("B: x", one), quality_record("C: y", other)]
    ((_, found),) = comparing.of_sessions(records)
    assert found.equal == [("x", "y")] and found.rows.on_front.all()
    assert (
        comparing.answer(found)
        == "Agreement with F16 on the most likely token: x on 78.4 % and y on 78.4 %."
    )


def test_results_are_shown_drawn_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for record in planted():
        results.save(path, record)
    status, out, _ = run_lab("show", path)
    assert (
        status == 0
        and "Quality and speed" in out
        and "Q4_0 is beaten in both" in out
        and "dialogue" not in out
    )
    status, out, _ = run_lab("show", path, "--json")
    rows = json.loads(out)["quant"]
    assert [row["label"] for row in rows] == ["F16", "Q8_0", "Q4_K_M", "Q4_0"] and rows[3][
        "kl"
    ] == pytest.approx(0.05)
    tried = [make_record(model=MODEL), make_record(model=dataclasses.replace(MODEL, name="other"))]
    assert (
        comparing.known_lines(tmp_path / "none", tried)
        == []
        == comparing.known_lines(tmp_path, tried[1:])
    )
    assert comparing.known_lines(tmp_path, tried)[0] == (
        f"Quality of {MODEL.name} {MODEL.quantization} by lab quant: "
        "divergence 0.00100 from F16, same most likely token at 98 %."
    )
    assert run_lab("plot", path, "--out", tmp_path)[0] == 0 and (tmp_path / "a-quant.png").exists()
    assert run_lab("report", path, "--out", tmp_path / "a.html")[0] == 0
    assert "Quality and speed" in (tmp_path / "a.html").read_text()
    contents = results.read([path])
    (again,) = kinds.commands([*contents.records, *contents.findings])
    assert again.startswith("lab quant ") and "--budget 90s" in again


def test_chunks_are_cut_as_llama_perplexity_does_and_kinds_alternate() -> None:
    texts = {"prose": "a" * 2048, "code": "b" * 1030}
    made = comparing.chunks(texts, lambda text: [ord(c) for c in text], None, 512)
    assert [kind for kind, _ in made] == ["prose", "code", "prose", "prose", "code", "prose"]
    assert all(len(tokens) == 512 for _, tokens in made)
    with_bos = comparing.chunks(texts, lambda text: [ord(c) for c in text], 1, 512)
    assert all(tokens[0] == 1 and 1 not in tokens[1:] for _, tokens in with_bos)
    with pytest.raises(LabError, match="300 tokens"):
        comparing.chunks({"x": "a" * 300}, lambda text: [1] * len(text), None, 512)


def test_a_name_of_the_catalog_stands_for_its_quantizations_and_asks_before_it_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embedded: Path
) -> None:
    from huggingface_hub import close_session

    repo = (entry := catalog.entries()["llama-3.2-1b"]).repo or ""
    kinds = list(entry.quantizations)
    assert kinds[0] == "F16" and comparing.expanded(["llama-3.2-1b"]) == [
        (f"hf:{repo}:{kind}", n_bytes) for kind, n_bytes in entry.quantizations.items()
    ]
    assert sorted(entry.quantizations.values(), reverse=True) == list(entry.quantizations.values())
    with loopback_hub.running() as hub:
        files = {
            f"Llama-{kind}.gguf": embedded.read_bytes() + bytes(i)
            for i, kind in enumerate(kinds[:2])
        }
        hub.repos[repo] = loopback_hub.Repo(files)
        monkeypatch.setitem(
            catalog.entries(),
            "llama-3.2-1b",
            dataclasses.replace(entry, quantizations=dict(list(entry.quantizations.items())[:2])),
        )
        loopback_hub.set_home(monkeypatch, tmp_path / "hf")
        loopback_hub.set_endpoint(monkeypatch, hub.endpoint)
        close_session()
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
        status, _, err = run_lab("quant", "llama-3.2-1b", "-o", tmp_path)
        assert (
            status != 0
            and "Download" in err
            and f"hf:{repo}:F16 2.5 GB" in err
            and hub.n_bytes == 0
        )
        with Worker() as worker:
            made = comparing.plan(worker, "llama-3.2-1b", prompt_len=16, gen=4, threads=1)
        close_session()
    assert (
        hub.n_bytes == sum(map(len, files.values())) and comparing.missing(["llama-3.2-1b"]) == {}
    )
    assert [name[:3] for name in made.plans] == ["A: ", "B: "] and not made.apart


def test_the_labs_own_texts_make_60_chunks(embedded: Path) -> None:
    with Worker() as worker:
        worker.load(embedded, dataclasses.replace(SETTINGS, n_ctx=512))
        texts = {kind: prompts.own_text(names) for kind, names in comparing.TEXTS.items()}
        kinds = Counter(kind for kind, _ in comparing.chunks(texts, worker.tokenize, None, 512))
    assert kinds.total() >= 60 and min(kinds[kind] for kind in ("prose", "code", "dialogue")) >= 15


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("smollm2-135m:Q8_0",), "nothing to compare"),
        (("smollm2-135m", "--cache-type", "f16,q9"), "'q9' is not a cache type"),
        (("smollm2-135m", "smollm2-135m"), "named twice"),
        (("a.gguf", "b.gguf", "--cache-type", "f16,q8_0"), "--cache-type compares one file"),
        (("smollm2-135m", "--cache-type", "f16,q8_0", "--text", "empty.txt"), "is empty"),
        (("smollm2-135m", "--cache-type", "f16,q8_0", "--text", "random"), "Random tokens"),
        (
            ("smollm2-135m", "--cache-type", "f16,q8_0", "--text", "short.txt", "-t", "1"),
            "too few for two chunks",
        ),
    ],
)
def test_what_cannot_be_compared_is_told(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("It rained for a day. " * 50)  # 300 tokens
    status, _, err = run_lab("quant", *arguments)
    assert status == 1 and said in err and "Traceback" not in err


def test_an_embedding_model_is_refused(tmp_path: Path) -> None:
    path = odd_models.write("llama", tmp_path / "llama.gguf")
    status, _, err = run_lab(
        "quant", path, "--cache-type", "f16,q8_0", "-t", "1", "-o", tmp_path / "out"
    )
    assert status == 1 and "token by token" in err and not list((tmp_path / "out").glob("*.jsonl"))


@pytest.mark.parametrize("apart", [False, True])
def test_cache_types_of_the_embedded_model(
    embedded: Path, tmp_path: Path, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "short.txt"
    path = tmp_path / "a.jsonl"
    text.write_text("The cat sat on the mat, and the dog looked at it for a long time. " * 9)
    monkeypatch.setattr(comparing, "N_CHUNK", 64)
    monkeypatch.setattr(comparing, "FIRST", 32)
    with Worker() as worker, monkeypatch.context() as patch:
        if apart:
            patch.setattr(machine, "memory_available", lambda: 300_000_000)
        asked: dict[str, Any] = {
            "text": str(text),
            "prompt_len": 16,
            "gen": 4,
            "threads": 1,
            "blocks": 1,
        }
        made = comparing.plan(worker, str(embedded), cache_type="f16,q4_0", **asked)
    assert made.apart == apart
    records = list(comparing.execute(made, path, lambda status: None))
    ((_, found),) = comparing.of_sessions(records)
    row = found.rows.iloc[1]
    assert 0 < row.kl < 5 and 0.3 < row.same <= 1 and row.n_chunks == 2
    assert found.floor is not None and found.floor < row.kl
    assert results.read([path]).findings == tuple(one for one in records if one.run.quality)
    variants = [one.run.variant for one in records if one.run.is_timed]
    assert len(variants) == 4 and (variants[0] == variants[1]) == apart  # else A B B A
    assert (row.kl_most > row.kl) if apart else math.isnan(row.kl_most), (row.kl, row.kl_most)
    assert (
        any("ran one after the other" in line for line in comparing.sentences(records, found))
        == apart
    )


def test_csv_has_the_table(embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "execute", lambda *_: iter(planted()))
    arguments = "quant", embedded, "--cache-type", "f16,q4_0", "-o", tmp_path, "--csv"
    assert run_lab(*arguments, tmp_path / "a.csv")[0] == 0
    with (tmp_path / "a.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["F16", "Q8_0", "Q4_K_M", "Q4_0"]
    status, _, err = run_lab(*arguments, tmp_path / "none" / "a.csv")
    assert status == 1 and "cannot be written" in err
