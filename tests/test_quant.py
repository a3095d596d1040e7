"""lab quant: the arithmetic against scipy, planted differences, and cache types of a real model."""

import csv
import dataclasses
import io
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import special

from lab.app import kinds
from lab.core import results
from lab.core.lines import parse_line, to_json
from lab.core.record import Record, Steps
from lab.errors import LabError
from lab.features.quant import child, figures, measuring, picture, planning, section, texts
from lab.features.quant.lines import Divergence, QualityLine
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import machine, prompts
from lab.show import canvas
from tests.support import loopback_hub, odd_models
from tests.support.command import run_lab
from tests.support.records import MACHINE, MODEL, SETTINGS, make_record, make_run

SESSION = "a-session"
COMMAND = ("quant", "--budget", "90s")


def chunk(
    kl: float,
    n_same: int = 200,
    nll: float = 2.01,
    reference: float = 2.0,
) -> Divergence:
    return Divergence((kl,) * 255, n_same, nll, reference)


def quality(
    variant: str,
    chunks: list[Divergence],
    is_floor: bool = False,
) -> QualityLine:
    kinds_of_text = ("prose", "code") * len(chunks)
    return QualityLine(
        session=SESSION,
        machine=MACHINE,
        model=MODEL,
        settings=SETTINGS,
        started_at="2026-01-01T00:00:00Z",
        variant=variant,
        reference="A: F16",
        text="",
        texts=kinds_of_text[: len(chunks)],
        chunks=tuple(chunks),
        is_floor=is_floor,
        budget_s=90.0,
        command=COMMAND,
    )


def scaled(steps: Steps, factor: float) -> Steps:
    columns = {}
    for name in ("start_ns", "ready_ns", "end_ns"):
        columns[name] = tuple(round(ns * factor) for ns in getattr(steps, name))
    return dataclasses.replace(steps, **columns)


def speed(
    variant: str,
    block: int,
    gain: float,
) -> Record:
    """A run of a variant that is `gain` times as fast as the reference; blocks differ a little."""
    run = make_run(
        256,
        32,
        repeat=block,
        block=block,
        variant=variant,
        part=planning.PART,
    )
    factor = (1 + 0.01 * math.sin(7 * block)) / gain
    run = dataclasses.replace(
        run, steps=scaled(run.steps, factor), started_at=f"2026-01-01T00:00:{block:02}Z"
    )
    kind = variant.removeprefix(variant[:3])
    model = dataclasses.replace(MODEL, quantization=kind, file=f"{kind}.gguf")
    return make_record(
        run,
        model=model,
        session=SESSION,
        command=COMMAND,
    )


GAINS = {
    "A: F16": 1.0,
    "B: Q8_0": 1.5,
    "C: Q4_K_M": 2.0,
    "D: Q4_0": 1.2,
}
DIVERGENCES = {
    "B: Q8_0": 0.001,
    "C: Q4_K_M": 0.01,
    "D: Q4_0": 0.05,
}
AGREEMENTS = {
    "B: Q8_0": 250,
    "C: Q4_K_M": 249,
    "D: Q4_0": 248,
}


def planted(
    n_blocks: int = 10,
    n_chunks: int = 16,
    gains: dict[str, float] = GAINS,
) -> list[Any]:
    """Q8_0 is near and fast, Q4_K_M further and faster; Q4_0 is beaten by both."""
    lines: list[Any] = []
    for name, kl in DIVERGENCES.items():
        chunks = []
        for i in range(n_chunks):
            share = 1.02 if i % 2 == 0 else 0.98
            chunks.append(chunk(kl * share, AGREEMENTS[name]))
        lines.append(quality(name, chunks))
    lines.append(quality("noise floor", [chunk(1e-5)] * 8, is_floor=True))
    for block in range(n_blocks):
        for name, gain in gains.items():
            lines.append(speed(name, block, gain))
    return lines


def found_in(lines: list[Any]) -> figures.QuantFigures:
    ((_, summary),) = figures.of_sessions(lines)
    return summary


def sentences(lines: list[Any]) -> str:
    return " ".join(section.sentences(lines, found_in(lines)))


def saved(path: Path, lines: list[Any]) -> Path:
    for line in lines:
        results.save(path, line)
    return path


# Arithmetic


def test_divergence_is_that_of_scipy() -> None:
    random = np.random.default_rng(1)
    reference = random.normal(0, 4, (255, 1000)).astype(np.float32)
    candidate = reference + random.normal(0, 1.2, (255, 1000)).astype(np.float32)
    next_tokens = random.integers(0, 1000, 255).tolist()
    summary = child.divergence(reference, candidate, next_tokens)
    p = special.softmax(reference.astype(float), axis=1)
    q = special.softmax(candidate.astype(float), axis=1)
    of_text = np.arange(255), next_tokens
    assert summary.kl == pytest.approx(special.rel_entr(p, q).sum(axis=1), rel=1e-5)
    assert summary.n_same == (p.argmax(1) == q.argmax(1)).sum()
    assert summary.nll == pytest.approx(-np.log(q[of_text]).mean())
    assert summary.reference_nll == pytest.approx(-np.log(p[of_text]).mean())


def test_a_model_does_not_diverge_from_itself() -> None:
    logits = np.random.default_rng(1).normal(0, 4, (20, 1000)).astype(np.float32)
    assert max(child.divergence(logits, logits, [0] * 20).kl) == 0


def test_logits_that_no_float_of_16_bits_holds_are_not_clamped() -> None:
    reference = np.zeros((1, 4), np.float32)
    candidate = np.array([[0, 0, 0, -60]], np.float32)
    summary = child.divergence(reference, candidate, [3])
    assert summary.kl[0] == pytest.approx(0.25 * 60 + math.log(3 / 4), rel=1e-5)
    assert summary.nll > 60


def test_logits_that_are_not_numbers_are_refused() -> None:
    reference = np.zeros((1, 4), np.float32)
    with pytest.raises(LabError, match="not numbers"):
        child.divergence(reference, reference * float("nan"), [3])


def test_chunks_are_cut_as_llama_perplexity_does_and_kinds_alternate() -> None:
    def tokenize(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    two_kinds = {
        "prose": "a" * 2048,
        "code": "b" * 1030,
    }
    pieces = texts.chunks(two_kinds, tokenize, None, 512)
    assert [piece.text for piece in pieces] == [
        "prose",
        "code",
        "prose",
        "prose",
        "code",
        "prose",
    ]
    assert {len(piece.tokens) for piece in pieces} == {512}
    for piece in texts.chunks(two_kinds, tokenize, 1, 512):
        assert piece.tokens[0] == 1
        assert 1 not in piece.tokens[1:]
    with pytest.raises(LabError, match="300 tokens"):
        texts.chunks({"x": "a" * 300}, tokenize, None, 512)


def test_the_labs_own_texts_make_60_chunks(embedded: Path) -> None:
    with Worker() as worker:
        worker.load(embedded, dataclasses.replace(SETTINGS, n_ctx=512))
        lab_texts = {kind: prompts.own_text(names) for kind, names in texts.TEXTS.items()}
        pieces = texts.chunks(lab_texts, worker.tokenize, None, 512)
    counts = Counter(piece.text for piece in pieces)
    assert counts.total() >= 60
    assert min(counts[kind] for kind in ("prose", "code", "dialogue")) >= 15


# What is found


def test_the_planted_front_is_found() -> None:
    summary = found_in(planted())
    rows = summary.rows.set_index("label")
    assert rows.on_front.to_dict() == {
        "F16": True,
        "Q8_0": True,
        "Q4_K_M": True,
        "Q4_0": False,
    }
    assert rows.decode["Q4_K_M"] == pytest.approx(2, rel=0.02)
    assert rows.decode_low["Q4_K_M"] < rows.decode["Q4_K_M"] < rows.decode_high["Q4_K_M"]
    assert summary.floor == pytest.approx(1e-5)
    assert summary.equal == []


def test_the_answer_has_size_speed_and_quality_of_the_files_on_the_front() -> None:
    text = section.answer(found_in(planted()))
    assert text.startswith("Against F16: Q8_0 (1.00 MB) decodes 1.5x as fast (1.")
    assert "with the same most likely token at 98 % and 1.01 times the perplexity" in text
    assert "; Q4_K_M (1.00 MB) decodes 2x as fast" in text
    assert "Q4_0 (" not in text


def test_the_sentences_recommend_a_file_and_name_the_beaten_ones() -> None:
    first, second, *_, last = section.sentences(planted(), found_in(planted()))
    assert first == (
        "Recommended: Q4_K_M, the fastest file whose perplexity is within 2 % of F16's (1.01 "
        "times)."
    )
    assert second == (
        "No other one is better in both quality and decode speed than F16, Q8_0 and Q4_K_M; Q4_0 "
        "is beaten in both."
    )
    assert last == section.LIMITS


def test_a_file_that_is_slower_and_worse_than_the_reference_is_no_choice() -> None:
    summary = found_in(planted(gains={**GAINS, "D: Q4_0": 0.9}))
    assert "Q4_0 (" not in section.answer(summary)
    assert not summary.rows.set_index("label").on_front["Q4_0"]


def test_disturbed_speeds_make_no_front(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = planted()
    monkeypatch.setattr(figures.Speed, "is_clear", property(lambda speed: False))
    summary = found_in(lines)
    assert set(summary.rows.on_front) == {None}
    assert "The speeds are unclear: at least half of the runs were disturbed." in sentences(
        lines
    )


def test_candidates_that_differ_by_chance_are_a_pair_that_cannot_be_told_apart() -> None:
    random = np.random.default_rng(3)
    first = [chunk(kl) for kl in 0.01 + 0.003 * random.random(16)]
    second = [chunk(kl) for kl in 0.01 + 0.003 * random.random(16)]
    summary = found_in([quality("B: x", first), quality("C: y", second)])
    assert summary.equal == [("x", "y")]
    assert section.answer(summary) == (
        "Agreement with F16 on the most likely token: x on 78.4 % and y on 78.4 %."
    )


def scoring_of(scores: dict[str, list[Divergence]], budget_s: float = 1e6) -> Any:
    plans: Any = dict.fromkeys(["A", *scores])
    plan = planning.QuantPlan(plans, {}, "", budget_s, 10, began=time.monotonic())
    return measuring.Scoring(plan, SESSION, scores=scores)


@pytest.mark.parametrize(
    ("kl", "jitter", "is_enough"),
    [
        pytest.param(0.1, 0.1, True, id="ten times"),
        pytest.param(0.016, 0.6, True, id="1.6 times, with chunks that scatter"),
        pytest.param(0.0101, 0.1, True, id="a difference that does not matter"),
        pytest.param(0.0101, 0.6, False, id="perhaps a difference"),
    ],
)
def test_enough_chunks_are_those_that_tell_the_files_apart(
    kl: float, jitter: float, is_enough: bool
) -> None:
    """Chunks differ by 4 times in difficulty, so that no interval is narrow."""
    scores: dict[str, list[Divergence]] = {"B": [], "C": []}
    for i in range(16):
        difficulty = 4 if i % 2 else 1
        scores["B"].append(chunk(0.01 * difficulty))
        scores["C"].append(chunk(kl * difficulty * (1 + jitter * math.sin(i))))
    scoring = scoring_of(scores)
    assert scoring.is_enough(16) == is_enough
    assert not scoring.is_enough(15)


def test_quality_leaves_time_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of 6 s + 3 x 2 s, and 2 s for the next chunk, of a budget of 60 s."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scoring = scoring_of({"B": [chunk(0.1)] * 2}, budget_s=60.0)
    scoring.load_s = 6.0
    scoring.chunk_s = 2.0
    now = 100 + 60 - 24 - 2 - 0.1
    assert not scoring.is_late()
    now += 0.2
    assert scoring.is_late()
    assert scoring.is_enough(2)


def test_an_estimate_comes_after_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    scoring = scoring_of({"B": []}, budget_s=600.0)
    scoring.chunks = [texts.Chunk("prose", [1])] * 61
    scoring.load_s = 4.0
    scoring.chunk_s = 2.0
    now = 106.0  # both
    assert scoring.estimate() == (
        "At most about 3 min 46 s in all: 2 s for each of at most 61 chunks, then about 10 s for "
        "each of at most 10 blocks."
    )
    scoring.plan = dataclasses.replace(scoring.plan, budget_s=20.0)
    assert scoring.estimate().startswith("The budget is too short for two chunks and 2 blocks")


def test_few_chunks_do_not_say_that_files_are_equal() -> None:
    first = quality("B: Q4_0", [chunk(kl) for kl in (0.1, 0.4, 0.2)])
    second = quality("C: Q2_K", [chunk(kl) for kl in (0.3, 0.4, 0.45)])
    floor = quality("noise floor", [chunk(2.6e-6)] * 3, is_floor=True)
    text = sentences([first, second, floor])
    assert "3 chunks are too few to tell files apart: at least 5 are needed." in text
    assert "cannot be told" not in text
    assert "known to within" not in text


def test_the_interval_of_a_divergence_stays_above_zero() -> None:
    row = found_in([quality("B: x", [chunk(kl) for kl in (0.1, 0.9, 0.1)])]).rows.iloc[1]
    assert 0 < row.kl_low < row.kl < row.kl_high


# Lines, pictures, pages


def test_a_line_comes_back_as_it_was() -> None:
    line = quality("B: x", [chunk(0.1)] * 2)
    assert parse_line(f"{to_json(line)}\n".encode()) == line


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": ()},
        {"texts": ("prose",)},
        {"budget_s": 1.0},
    ],
    ids=str,
)
def test_a_line_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs chunks|10 s to 24 h"):
        dataclasses.replace(quality("B: x", [chunk(0.1)] * 2), **changes)


@pytest.mark.parametrize(("floor", "is_near"), [(3e-4, True), (1e-7, False)])
def test_a_noise_floor_near_the_points_is_shaded_in_both_panels(
    floor: float, is_near: bool
) -> None:
    summary = dataclasses.replace(found_in(planted()), floor=floor)
    axes = canvas.drawn(lambda figure: picture.draw(summary, "tiny", figure), (10, 5.2)).axes
    n_shaded = [ax.get_legend_handles_labels()[1].count("noise floor") for ax in axes]
    assert n_shaded == [int(is_near)] * 2
    bottom, _ = axes[0].get_ylim()
    assert math.isclose(bottom, floor / 3) is is_near


@pytest.mark.usefixtures("undrawn")
def test_results_are_shown_drawn_and_made_again(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.jsonl", planted())
    status, out, _ = run_lab("show", path)
    assert status == 0
    assert "Quality and speed" in out
    assert "Q4_0 is beaten in both" in " ".join(out.split())
    rows = json.loads(run_lab("show", path, "--json")[1])["quant"]
    assert [row["label"] for row in rows] == ["F16", "Q8_0", "Q4_K_M", "Q4_0"]
    assert rows[3]["kl"] == pytest.approx(0.05)
    assert run_lab("plot", path, "--out", tmp_path)[0] == 0
    assert (tmp_path / "a-quant.png").exists()
    assert run_lab("report", path, "--file", tmp_path / "a.html")[0] == 0
    assert "Quality and speed" in (tmp_path / "a.html").read_text()
    assert kinds.commands(results.read([path]).all_lines) == ["lab quant --budget 90s"]


def test_csv_has_the_table(
    shallow: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def execute(*_: object) -> Iterator[Any]:
        yield from planted()

    monkeypatch.setattr(measuring, "execute", execute)
    asked = "quant", shallow, "--cache", "f16,q4_0", "--no-plot", "-o", tmp_path, "--csv"
    assert run_lab(*asked, tmp_path / "a.csv")[0] == 0
    with (tmp_path / "a.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert labels == ["F16", "Q8_0", "Q4_K_M", "Q4_0"]
    status, _, err = run_lab(*asked, tmp_path / "none" / "a.csv")
    assert status == 1
    assert "cannot be written" in err


# What is asked


def two_quantizations(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The catalog's entry with its two largest files only."""
    entry = catalog.entries()[name]
    sizes = dict(list(entry.quantizations.items())[:2])
    smaller = dataclasses.replace(entry, quantizations=sizes)
    monkeypatch.setitem(catalog.entries(), name, smaller)
    return list(sizes)


def test_a_name_of_the_catalog_stands_for_its_quantizations() -> None:
    entry = catalog.entries()["llama-3.2-1b"]
    expected = {}
    for kind, n_bytes in entry.quantizations.items():
        expected[f"hf:{entry.repo}:{kind}"] = n_bytes
    assert planning.expanded(["llama-3.2-1b"]) == expected
    sizes = list(entry.quantizations.values())
    assert sizes == sorted(sizes, reverse=True)


def test_a_name_of_the_catalog_asks_before_it_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shallow: Path
) -> None:
    from huggingface_hub import close_session

    repo = catalog.entries()["llama-3.2-1b"].repo or ""
    files = {}
    for i, kind in enumerate(two_quantizations(monkeypatch, "llama-3.2-1b")):
        files[f"Llama-{kind}.gguf"] = shallow.read_bytes() + bytes(i)
    with loopback_hub.running() as hub:
        hub.repos[repo] = loopback_hub.Repo(files)
        loopback_hub.set_home(monkeypatch, tmp_path / "hf")
        loopback_hub.set_endpoint(monkeypatch, hub.endpoint)
        close_session()
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
        status, _, err = run_lab("quant", "llama-3.2-1b", "-o", tmp_path)
        assert status != 0
        assert "Download 2 files" in err
        assert f"hf:{repo}:F16 2.5 GB" in err
        assert hub.n_bytes == 0
        with Worker() as worker:
            plan = planning.plan(
                worker,
                "llama-3.2-1b",
                prompt_len=16,
                gen=4,
                threads=1,
            )
        close_session()
    assert hub.n_bytes == sum(map(len, files.values()))
    assert planning.missing(["llama-3.2-1b"]) == {}
    assert [name[:3] for name in plan.plans] == ["A: ", "B: "]


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("smollm2-135m:Q8_0",), "lab quant smollm2-135m:F16 smollm2-135m:Q8_0"),
        (("model.gguf",), "lab quant REFERENCE.gguf model.gguf"),
        (("smollm2-135m", "--cache", "f16,q9"), "'q9' is not a cache type"),
        (("smollm2-135m", "--cache", "q4_0,f16"), "Name the reference first"),
        (("smollm2-135m", "smollm2-135m"), "named twice"),
        (("smollm2-135m", "--cache", "f16,q8_0", "--prompt", "empty.txt"), "is empty"),
        (("smollm2-135m", "--cache", "f16,q8_0", "--prompt", "random"), "Random tokens"),
        (
            ("smollm2-135m", "--cache", "f16,q8_0", "--prompt", "short.txt", "-t", "1"),
            "too few for two chunks",
        ),
    ],
)
def test_what_cannot_be_compared_is_told(
    arguments: tuple[str, ...], phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("It rained for a day. " * 50)  # 300 tokens
    status, _, err = run_lab("quant", *arguments)
    assert status == 1
    assert phrase in " ".join(err.split())


def test_one_file_under_two_names_is_refused(shallow: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(shallow)
    status, _, err = run_lab("quant", shallow, link, "-o", tmp_path / "out")
    assert status == 1
    assert "are one file." in " ".join(err.split())


def test_files_that_do_not_fit_into_memory_together_are_refused_with_what_they_need(
    embedded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda: 300_000_000)
    with (
        Worker() as worker,
        pytest.raises(LabError, match=r"need about 0\.\d GB of memory; 0\.3"),
    ):
        planning.plan(
            worker,
            str(embedded),
            cache="f16,q4_0",
            threads=1,
        )


def test_an_embedding_model_is_refused(tmp_path: Path) -> None:
    path = odd_models.write("llama", tmp_path / "llama.gguf")
    out = tmp_path / "out"
    asked = ("quant", path, "--cache", "f16,bf16", "-p", "256", "-t", "1", "-o", out)
    status, _, err = run_lab(*asked)
    assert status == 1
    assert "token by token" in err
    assert not list(out.glob("*.jsonl"))


# A real model


def plan_of_two_chunks(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> planning.QuantPlan:
    text = folder / "short.txt"
    text.write_text("The cat sat on the mat, and the dog looked at it for a long time. " * 9)
    monkeypatch.setattr(texts, "EDGES", (32,))
    asked = {
        "prompt": str(text),
        "prompt_len": 64,
        "gen": 4,
        "threads": 1,
        "repeat": 1,
        **options,
    }
    with Worker() as worker:
        return planning.plan(
            worker,
            str(model),
            cache="f16,q4_0",
            **asked,
        )


def test_files_of_a_model(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The cat sat on the mat, and the dog looked at it for a long time. " * 9)
    monkeypatch.setattr(measuring, "N_CHUNK", 64)
    monkeypatch.setattr(measuring, "FIRST_SCORED", 32)
    asked: dict[str, Any] = {"prompt": str(text), "prompt_len": 16, "gen": 4, "threads": 1}
    packed = tmp_path / "packed.gguf"
    with Worker() as worker:
        worker.quantize(shallow, packed, "Q4_0", lambda n_bytes: None)
        plan = planning.plan(worker, str(shallow), str(packed), repeat=1, **asked)
    lines = list(measuring.execute(plan, tmp_path / "a.jsonl", lambda status: None))
    summary = found_in(lines)
    row = summary.rows.iloc[1]
    assert list(summary.rows.label) == ["Q4_1", "Q4_0"]
    assert 0 < row.kl < 5
    assert summary.n_positions == 2 * 31
    assert summary.floor is not None
    assert summary.floor < row.kl
    variants = [record.run.variant for record in figures.runs(lines)]
    first, second, *_ = variants
    assert variants == [first, second, second, first]


def test_the_budget_covers_the_speed_too(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of_two_chunks(shallow, tmp_path, monkeypatch, repeat=100)
    spent = dataclasses.replace(plan, budget_s=0.0)
    monkeypatch.setattr(measuring, "FEWEST_BLOCKS", 1)
    monkeypatch.setattr(QualityLine, "__post_init__", lambda line: None)
    notes: list[str] = []
    lines = list(
        measuring.execute(
            spent, tmp_path / "a.jsonl", lambda status: notes.append(status.note)
        )
    )
    assert {record.run.block for record in figures.runs(lines)} == {0}
    assert len(figures.runs(lines)) == 4  # two types, two depths
    assert [note for note in notes if note] == [
        note for note in notes if note.startswith("The budget is too short")
    ]


def test_the_budget_begins_with_the_plan(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = time.monotonic()
    plan = plan_of_two_chunks(shallow, tmp_path, monkeypatch, budget="2min")
    assert before <= plan.began < time.monotonic()
    assert plan.end == plan.began + 120


def test_a_dry_run_measures_nothing(shallow: Path, tmp_path: Path) -> None:
    asked = ("quant", shallow, "--cache", "f16,q4_0", "--dry-run", "-o", tmp_path)
    status, out, _ = run_lab(*asked)
    assert status == 0
    text = " ".join(out.split())
    assert "At most 5 min 0 s in all." in text
    planned = json.loads(run_lab(*asked, "--json")[1])
    assert list(planned["files"]) == [
        "A: --cache-type-k f16 --cache-type-v f16",
        "B: --cache-type-k q4_0 --cache-type-v q4_0",
    ]
    assert list(tmp_path.iterdir()) == []
