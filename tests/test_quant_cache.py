"""lab quant --cache: spellings, refusals, depths, tokens that decide, and a disturbed cache."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.core import results
from lab.core.lines import parse_line, to_json
from lab.core.record import Record
from lab.errors import LabError
from lab.features.quant import (
    cache_section,
    caches,
    depth,
    figures,
    lines as quant_lines,
    measuring,
    planning,
    texts,
)
from lab.features.quant.caches import CacheTypes
from lab.features.quant.lines import Divergence, QualityLine
from lab.process.worker import Worker
from lab.runner import prompts
from tests.support import disturbed_cache
from tests.support.command import run_lab
from tests.support.records import MACHINE, MODEL, SETTINGS, make_record, make_run

SESSION = "a-session"
COMMAND = ("quant", "--cache", "f16,q8_0,q4_0")
ENDS = (256, 1024, 2048)
SHAPE = dataclasses.replace(MODEL, head_dim=64, n_ctx_train=8192)

# What is asked


SINGLE = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
PAIRS = tuple(f"{k}:{v}" for k, v in itertools.permutations(SINGLE, 2))
ORDINARY = (
    *(f"f16,{name}" for name in (*SINGLE[1:], *PAIRS)),
    *(f"F16,{name.upper()}" for name in SINGLE[1:]),
    "f16,q8_0,q5_1,q4_0",
    "f16, q8_0, q4_0",
    "f32,f16,bf16",
    "bf16,q8_0",
    "f16,q8_0:q8_0",
    "f16:f16,q8_0:q4_0",
    "f16 ,q8_0",
    "f16,q8_0,",
    "q8_0,q4_0",
    "q8_0:q4_0,q4_0",
)
"""A hundred ordinary spellings of --cache."""


@pytest.mark.parametrize("option", ORDINARY)
def test_an_ordinary_spelling_of_cache_types_is_let_through(option: str) -> None:
    types = caches.types_of(option)
    assert len(types) == len([name for name in option.split(",") if name.strip()])
    assert {pair.k for pair in types} | {pair.v for pair in types} <= set(SINGLE)
    caches.check(types, {"flash_attn": "auto", "cache_type_k": "f16", "cache_type_v": "f16"})
    caches.check_model(types, SHAPE, 2048)


def test_the_ordinary_spellings_are_about_a_hundred() -> None:
    assert len(ORDINARY) > 90


@pytest.mark.parametrize(
    ("option", "phrases"),
    [
        ("f16,q8", ("'q8' is not a cache type", "Did you mean q8_0?")),
        ("fp16,q8_0", ("'fp16'", "Did you mean f16?")),
        ("f16,q4", ("'q4'", "Did you mean q4_0?")),
        ("f16,q8-0", ("'q8-0'", "Did you mean q8_0?")),
        ("f16,q80", ("'q80'", "Did you mean q8_0?")),
        ("f16,int8", ("'int8'", "Did you mean q8_0?")),
        ("f16,fp8_e4m3", ("'fp8_e4m3' is not a cache type", "Use some of f16")),
        ("f16,turbo3", ("'turbo3' is not a cache type", "Use some of f16")),
        ("f16,q6_0", ("'q6_0' is not a cache type", "Use some of f16")),
        ("f16,Q4_K_M", ("'Q4_K_M' is not a cache type",)),
        ("f16,q8_0/q4_0", ("not a cache type",)),
        ("q8_0", ("one type, q8_0", "--cache f16,q8_0")),
        ("f16", ("one type, f16", "--cache f16,q8_0")),
        (",", ("names no type",)),
        ("f16,f16", ("named twice",)),
        ("f16,q8_0,q8_0:q8_0", ("named twice",)),
        ("q8_0,f16", ("would be the reference", "--cache f16,q8_0")),
        ("f16,q8_0:", ("not a pair",)),
        ("f16,q8_0:q4_0:q4_0", ("not a pair",)),
        ("model.gguf", ("not a cache type", "--cache f16,q8_0 model.gguf")),
    ],
)
def test_a_wrong_list_of_types_is_refused_with_what_to_write(
    option: str, phrases: tuple[str, ...]
) -> None:
    with pytest.raises(LabError) as refused:
        caches.types_of(option)
    for phrase in phrases:
        assert phrase in f"{refused.value.what} {refused.value.hint}"


@pytest.mark.parametrize(
    ("settings", "phrase"),
    [
        ({"flash_attn": "off"}, "refuses a q4_0 V cache without flash attention"),
        ({"cache_type_k": "q8_0"}, "--cache-type-k q8_0 is given beside --cache"),
        ({"cache_type_v": "q4_0"}, "--cache-type-v q4_0 is given beside --cache"),
    ],
)
def test_settings_that_contradict_the_types_are_refused(
    settings: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(LabError, match=phrase):
        caches.check(caches.types_of("f16,q4_0"), settings)


def test_a_quantized_k_needs_no_flash_attention() -> None:
    caches.check(caches.types_of("f16,q8_0:f16"), {"flash_attn": "off"})


@pytest.mark.parametrize(
    ("changes", "option", "phrase"),
    [
        ({"head_dim": 80}, "f16,q8_0", "heads of 80 do not fit blocks of 32"),
        ({"head_dim_v": 80}, "f16,q8_0", "heads of 80 do not fit blocks of 32"),
        ({"values_in_keys": True}, "f16,q8_0:q4_0", "both need one type"),
        ({"arch": "grok"}, "f16,q8_0", "switches flash attention off"),
        ({"n_ctx_train": 1024}, "f16,q8_0", "more than the 1,024"),
        ({"heads": (0, 0), "heads_kv": (0, 0), "n_layer": 2}, "f16,q8_0", "has no KV cache"),
    ],
    ids=str,
)
def test_types_that_llama_cpp_refuses_for_a_model_are_told_before_anything_runs(
    changes: dict[str, Any], option: str, phrase: str
) -> None:
    model = dataclasses.replace(SHAPE, **changes)
    with pytest.raises(LabError, match=phrase):
        caches.check_model(caches.types_of(option), model, 2048)


def test_a_hybrid_model_says_which_layers_have_a_cache() -> None:
    model = dataclasses.replace(
        SHAPE,
        n_layer=4,
        heads=(0, 4, 0, 4),
        heads_kv=(0, 2, 0, 2),
        n_head=None,
        n_head_kv=None,
    )
    caches.check_model(caches.types_of("f16,q8_0"), model, 256)
    assert "Only 2 of 4 layers" in caches.layers_with_cache(model)
    assert caches.layers_with_cache(MODEL) == ""


@pytest.mark.parametrize(
    ("log", "phrase"),
    [
        (["llama_kv_cache: attn_rot_k = 1, n_embd_head_k_all = 64"], "rotates K (a Hadamard"),
        (["x: attn_rot_k = 1, n = 64", "x: attn_rot_v = 1, n = 64"], "rotates K and V"),
        (["llama_init_from_model: k_cache_hadam = 1"], "rotates K"),
        (["x: attention rotation force disabled (LLAMA_ATTN_ROT_DISABLE)"], "switched off"),
    ],
)
def test_what_the_log_says_of_the_cache_is_named(log: list[str], phrase: str) -> None:
    assert phrase in caches.changes(log)


@pytest.mark.parametrize(
    "line",
    [
        "llama_kv_cache: attn_rot_k = 0, n_embd_head_k_all = 512",
        "llama_kv_cache: attn_rot_v = 0, n_embd_head_k_all = 512",
        "llama_init_from_model: k_cache_hadam = 0",
        "llama_kv_cache: size =   22.00 MiB (  1024 cells,  22 layers), K (f16):   11.00 MiB",
        "print_info: n_rot            = 64",
        "llama_context: flash_attn    = enabled",
    ],
)
def test_a_log_without_changes_of_the_cache_names_none(line: str) -> None:
    assert caches.changes([line]) == ""


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (("--cache", "f16,q8_0", "-p", "9000"), "more than the 8,192"),
        (("--cache", "f16,q8_0", "-p", "10"), "--prompt-len 10 is not possible"),
        (("--cache", "f16,q8_0", "-fa", "off"), "without flash attention"),
        (("--cache", "f16", "q8_0"), "one type, f16"),
        (("--cache-type", "f16,q8_0"), "--cache"),
        (("smollm2-135m", "smollm2-135m", "--cache", "f16,q8_0"), "named twice"),
    ],
)
def test_wrong_uses_are_told_by_the_command(arguments: tuple[str, ...], phrase: str) -> None:
    status, _, err = run_lab("quant", *arguments)
    assert status != 0
    assert phrase in " ".join(err.split())


def test_cache_alone_compares_three_types_in_five_minutes() -> None:
    status, out, _ = run_lab("quant", "--cache", "--dry-run", "--json")
    assert status == 0
    planned = json.loads(out)
    assert len(planned["files"]) == 3
    assert planned["budget_s"] == 300
    assert planned["depths"] == list(ENDS)


# Texts


@pytest.mark.parametrize(
    ("n", "ends"),
    [
        (64, [64]),
        (500, [500]),
        (512, [256, 512]),
        (2048, [256, 1024, 2048]),
        (4000, [256, 1024, 4000]),
        (8192, [256, 1024, 4096, 8192]),
        (32_768, [256, 1024, 4096, 16_384, 32_768]),
    ],
)
def test_bins_end_at_powers_of_four(n: int, ends: list[int]) -> None:
    assert texts.bin_ends(n) == ends


def test_stretches_cover_a_text_once_and_score_each_prediction() -> None:
    tokens = list(range(5000, 7048))
    parts = texts.parts_by_depth(tokens)
    stretches = [stretch for part in parts for stretch in part]
    assert [token for stretch in stretches for token in stretch.tokens] == tokens
    assert max(len(stretch.tokens) for stretch in stretches) == texts.N_STRETCH
    predicted = [token for stretch in stretches for token in stretch.next_tokens]
    assert predicted == tokens[1:]
    assert [sum(len(s.scored) for s in part) for part in parts] == [256, 768, 1023]
    for stretch in stretches:
        assert stretch.tokens[0] == tokens[stretch.n_past]


def letters(text: str) -> list[int]:
    return list(text.encode())


def test_tokens_that_decide_are_those_between_the_marks() -> None:
    pieces = [bytes([i]) for i in range(256)]
    ids, items = texts.marked_tokens(["a [[b]] [[b]]\n", "b [[dé]]."], letters, pieces)
    assert bytes(ids).decode() == "a b b\nb dé."
    assert [[chr(ids[place]) for place in item] for item in items] == [
        ["b", "b"],
        ["d", "Ã", "©"],
    ]
    assert items[0] == [2, 4]


def test_texts_that_a_tokenizer_changes_have_no_places() -> None:
    pieces = [bytes([i]) for i in range(256)]
    assert (
        texts.marked_tokens(["A [[B]]"], lambda text: letters(text.lower()), pieces)[1] == []
    )


def test_the_labs_texts_decide_by_their_marks(embedded: Path) -> None:
    """In the tokens of a real model; the item's predictions are scored and no others."""
    with Worker() as worker:
        worker.load(embedded, dataclasses.replace(SETTINGS, n_ctx=512))
        pieces = worker.pieces()
        chunks = texts.deciding_chunks("So it goes. ", worker.tokenize, pieces, None, 1024)
        assert texts.deciding_chunks("So. ", worker.tokenize, pieces, None, 256) == []
    assert [chunk.text for chunk in chunks] == ["reasoning", "tool calls"]
    for chunk, name in zip(chunks, texts.DECIDING.values(), strict=True):
        assert len(chunk.tokens) == 1024
        _, *parts = prompts.own_text([name]).split(texts.BETWEEN_PARTS)
        marks = ["".join(texts.DECIDES.findall(part)) for part in parts]
        answers = []
        for item in chunk.items:
            answers.append(b"".join(pieces[chunk.tokens[place]] for place in item).decode())
        assert [text.replace(" ", "") for text in answers] == [
            mark.replace(" ", "") for mark in marks
        ]
        before, *of_items = texts.parts_by_item(chunk)
        assert not any(stretch.scored for stretch in before)
        for item, part in zip(chunk.items, of_items, strict=True):
            predicted = [token for stretch in part for token in stretch.next_tokens]
            assert predicted == [chunk.tokens[place] for place in item]


# What is found


def bin_of(kl: float, n_same: int, nll: float = 2.01) -> Divergence:
    return Divergence((kl,) * 100, n_same, nll, 2.0)


HARM = {
    "B: q8_0": (0.001, 0.001, 0.001),
    "C: q4_0": (0.01, 0.02, 0.04),
}
SAME = {"B: q8_0": (99, 99, 99), "C: q4_0": (97, 95, 93)}
TYPES = {"A: f16": "f16", "B: q8_0": "q8_0", "C: q4_0": "q4_0"}
GAINS = {"A: f16": 1.0, "B: q8_0": 1.0, "C: q4_0": 1.3}


def quality(variant: str, n_texts: int, is_floor: bool = False) -> QualityLine:
    chunks = []
    for text in range(n_texts):
        share = 1 + 0.1 * math.sin(5 * text)
        for place in range(len(ENDS)):
            kl = 1e-6 if is_floor else HARM[variant][place] * share
            n_same = 100 if is_floor else SAME[variant][place]
            chunks.append(bin_of(kl, n_same))
    kind = TYPES.get(variant, "f16")
    is_harmed = variant == "C: q4_0"
    item = Divergence((0.1,) * 5, 4, 1.3 if is_harmed else 1.0, 1.0)
    return QualityLine(
        session=SESSION,
        machine=MACHINE,
        model=MODEL,
        settings=dataclasses.replace(SETTINGS, type_k=kind, type_v=kind),
        started_at="2026-01-01T00:00:00Z",
        variant=variant,
        reference="A: f16",
        text="",
        texts=("prose",) * len(chunks),
        chunks=tuple(chunks),
        depths=ENDS * n_texts,
        items=() if is_floor else (item,) * 6,
        item_texts=() if is_floor else ("tool calls",) * 6,
        cache_log=("x: attn_rot_k = 1, n = 64", "x: attn_rot_v = 1, n = 64"),
        is_floor=is_floor,
        command=COMMAND,
    )


def speed(variant: str, block: int, n_prompt: int) -> Record:
    run = make_run(n_prompt, 8, repeat=block, block=block, variant=variant, part=planning.PART)
    factor = (1 + 0.01 * math.sin(7 * block + n_prompt * GAINS[variant])) / GAINS[variant]
    factor *= 1 + 0.002 * math.cos(block * len(variant) + 3 * list(TYPES).index(variant))
    columns = {}
    for name in ("start_ns", "ready_ns", "end_ns"):
        columns[name] = tuple(round(ns * factor) for ns in getattr(run.steps, name))
    steps = dataclasses.replace(run.steps, **columns)
    kind = TYPES[variant]
    return make_record(
        dataclasses.replace(run, steps=steps),
        settings=dataclasses.replace(SETTINGS, type_k=kind, type_v=kind),
        session=SESSION,
        command=COMMAND,
    )


def planted(n_texts: int = 6, n_blocks: int = 10) -> list[Any]:
    """q8_0 harms little at each depth; q4_0 harms more with the depth, and decodes faster."""
    lines: list[Any] = [quality(variant, n_texts) for variant in HARM]
    lines.append(quality("noise floor", 2, is_floor=True))
    for block, variant, n_prompt in itertools.product(range(n_blocks), TYPES, ENDS):
        lines.append(speed(variant, block, n_prompt))
    return lines


def section_of(lines: list[Any]) -> Any:
    ((of_session, summary),) = figures.of_sessions(lines)
    return cache_section.section(of_session, summary)


def test_the_answer_says_memory_harm_and_speed_in_one_sentence() -> None:
    answer = section_of(planted()).answer
    assert answer.startswith(
        "Against a cache of f16: q8_0 needs 53.1 % of the memory, changes every 100th most likely "
        "token at 1,024-2,048 tokens, and no difference in decode can be told (1x,"
    )
    assert "q4_0 needs 28.1 % of the memory, changes every 14th most likely" in answer
    assert "decodes 1.3x as fast (1." in answer


def test_a_type_below_the_noise_floor_changes_nothing_that_can_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(HARM, "B: q8_0", (1e-7, 1e-7, 1e-7))
    answer = section_of(planted()).answer
    assert "changes nothing that can be measured here down to 2,048 tokens" in answer
    monkeypatch.setitem(HARM, "B: q8_0", (0.0, 0.0, 0.0))
    assert "changes nothing at all" in section_of(planted()).answer


def test_harm_that_grows_with_the_depth_is_told_from_harm_that_does_not() -> None:
    grown, equal, *_ = section_of(planted()).sentences
    assert grown.startswith("The divergence grows from the first bin to the last: q4_0 4x")
    assert "q8_0" not in grown
    assert "4x" not in equal


def test_the_sentences_name_the_front_the_rotation_and_the_tokens_that_decide() -> None:
    text = " ".join(section_of(planted()).sentences)
    assert "falls: q4_0 in tool calls 0.741 times." in text
    assert "This build of llama.cpp rotates K and V (a Hadamard transform)" in text
    assert "than f16, q8_0 and q4_0." in text
    assert "The noise floor, f16 against itself with other settings, is 1e-06." in text


def test_figures_by_depth_and_of_whole_texts_agree() -> None:
    lines = planted()
    table = depth.by_depth(lines)
    assert list(table.span.unique()) == ["0-256", "256-1,024", "1,024-2,048"]
    deepest = table[table.end == 2048].set_index("label")
    assert deepest.kl["q4_0"] == pytest.approx(0.04, rel=0.05)
    assert deepest.decode["q4_0"] == pytest.approx(1.3, rel=0.02)
    assert table.decode.notna().all()
    rows = figures.quant_table(lines).set_index("label")
    mean = table[table.label == "q4_0"].kl.mean()
    assert rows.kl["q4_0"] == pytest.approx(mean)
    assert rows.n_chunks["q4_0"] == 6


def test_a_table_of_files_and_types_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TYPES, "B: q8_0", "f16")
    lines = []
    for line in planted(n_blocks=0):
        quantization = "Q4_K_M" if line.variant == "B: q8_0" else "Q8_0"
        model = dataclasses.replace(MODEL, quantization=quantization)
        lines.append(dataclasses.replace(line, model=model))
    labels = depth.labels_of(lines)
    assert list(labels.values()) == [
        "Q8_0, f16 cache",
        "Q4_K_M, f16 cache",
        "Q8_0, q4_0 cache",
    ]
    titles = [part.about for part in section_of(lines).parts]
    assert "divergence by file and type" in titles


def test_few_texts_are_called_few() -> None:
    text = " ".join(section_of(planted(n_texts=2)).sentences)
    assert "2 texts are few" in text
    assert "grows" not in text


# Lines, pictures, pages


def test_a_line_by_depth_comes_back_as_it_was() -> None:
    line = quality("C: q4_0", 2)
    assert parse_line(f"{to_json(line)}\n".encode()) == line


@pytest.mark.parametrize("changes", [{"depths": (256,)}, {"item_texts": ()}], ids=str)
def test_a_line_by_depth_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a quality"):
        dataclasses.replace(quality("C: q4_0", 2), **changes)


@pytest.mark.usefixtures("undrawn")
def test_saved_results_are_shown_drawn_reported_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line in planted():
        results.save(path, line)
    status, out, _ = run_lab("show", path)
    assert status == 0
    assert out.lstrip().startswith("Against a cache of f16: q8_0 needs 53.1 %")
    details = run_lab("show", path, "--details")[1]
    assert "probability of the tokens that decide" in details
    document = json.loads(run_lab("show", path, "--json")[1])
    assert len(document["quant_depths"]) == 6
    assert document["quant_deciding"][0]["text"] == "tool calls"
    assert run_lab("plot", path, "--out", tmp_path)[0] == 0
    assert (tmp_path / "a-quant.png").exists()
    assert run_lab("report", path, "--file", tmp_path / "a.html")[0] == 0
    assert "Cache types by depth" in (tmp_path / "a.html").read_text()
    assert "To see them: lab show" in run_lab("compare", path)[2]
    lines = results.read([path]).all_lines
    assert kinds.commands(lines) == ["lab quant --cache f16,q8_0,q4_0"]


# A real model


@pytest.fixture
def short_bins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(texts, "EDGES", (32,))
    yield


def plan_of_types(model: Path, folder: Path, cache: str) -> planning.QuantPlan:
    text = folder / "short.txt"
    text.write_text("The cat sat on the mat, and the dog looked at it for a long time. " * 9)
    with Worker() as worker:
        return planning.plan(
            worker,
            str(model),
            cache=cache,
            prompt=str(text),
            prompt_len=64,
            gen=4,
            threads=1,
            repeat=1,
        )


def with_equal_types(plan: planning.QuantPlan) -> planning.QuantPlan:
    """The same plan with the reference's cache types for all."""
    plans = {}
    for name, of_variant in plan.plans.items():
        settings = dataclasses.replace(of_variant.settings, type_k="f16", type_v="f16")
        plans[name] = dataclasses.replace(of_variant, settings=settings)
    return dataclasses.replace(plan, plans=plans)


def scored(plan: planning.QuantPlan) -> tuple[Divergence, ...]:
    """The parts of the only candidate."""
    scoring = measuring.Scoring(plan, SESSION)
    scoring.run(lambda status: None)
    line, *_ = scoring.lines()
    assert line.depths == (32, 64) * 2
    return line.chunks


@pytest.mark.usefixtures("short_bins")
def test_cache_types_of_a_model(shallow: Path, tmp_path: Path) -> None:
    plan = plan_of_types(shallow, tmp_path, "f16,q8_0:q4_0")
    path = tmp_path / "a.jsonl"
    lines = list(measuring.execute(plan, path, lambda status: None))
    ((_, summary),) = figures.of_sessions(lines)
    row = summary.rows.iloc[1]
    assert list(summary.rows.label) == ["f16", "q8_0:q4_0"]
    assert 0 < row.kl < 5
    assert 0.3 < row.same <= 1
    assert row.n_chunks == 2
    assert row.position_bytes == 3 * 64 * (34 + 18) / 32
    assert summary.n_positions == 2 * 63
    assert summary.floor is not None
    assert summary.floor < row.kl
    findings = results.read([path]).findings
    assert findings == tuple(figures.qualities(lines))
    assert any("attn_rot_k = 1" in line for line in figures.qualities(lines)[0].cache_log)
    lengths = [record.run.n_prompt for record in figures.runs(lines)]
    assert sorted(lengths) == [32, 32, 64, 64]


@pytest.mark.usefixtures("short_bins")
def test_f16_against_f16_is_exactly_zero(shallow: Path, tmp_path: Path) -> None:
    plan = with_equal_types(plan_of_types(shallow, tmp_path, "f16,q8_0"))
    for part in scored(plan):
        assert set(part.kl) == {0.0}
        assert part.n_same == len(part.kl)
        assert part.nll == part.reference_nll


@pytest.mark.usefixtures("short_bins")
def test_a_disturbance_of_one_layers_cache_is_found_where_it_is(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first 32 positions, so that only the predictions after them change."""
    diverge = measuring.diverge

    def diverge_and_disturb(
        worker: Worker, stretch: quant_lines.Stretch, path: Path
    ) -> tuple[Divergence, ...]:
        divergence = diverge(worker, stretch, path)
        if stretch.n_past == 0:
            noise = {"layer": 0, "share": 0.1, "n_layer": 1, "n_row": 192}
            worker.call(type(None), f"{disturbed_cache.__name__}.disturb", **noise)
        return divergence

    monkeypatch.setattr(measuring, "diverge", diverge_and_disturb)
    monkeypatch.setattr(measuring, "N_LONG_FLOOR", 0)
    plan = with_equal_types(plan_of_types(shallow, tmp_path, "f16,q8_0"))
    first, second, third, fourth = scored(plan)
    assert set(first.kl) | set(third.kl) == {0.0}
    assert figures.mean_kl(second) > 1e-6
    assert figures.mean_kl(fourth) > 1e-6


def test_a_pair_has_one_name() -> None:
    assert CacheTypes("q8_0", "q8_0").name == "q8_0"
    assert CacheTypes("q8_0", "q4_0").name == "q8_0:q4_0"
