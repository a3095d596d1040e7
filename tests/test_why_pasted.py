"""Figures in texts of other programs: every sample exact, and mutilated ones refused or right."""

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.errors import LabError
from lab.features.why.facts import STATED
from lab.features.why.figure import DECODE, MAYBE_FIRST, PREFILL, STEPS, UNKNOWN, Figure
from lab.features.why.pairing import figures_of, nearest
from lab.features.why.readers import text as reader
from tests.support.pasted import BY_HAND, PRINTED, Sample, Truth, pastes

BY_NAME = {sample.name: sample for sample in (*PRINTED, *BY_HAND)}
CORRUPTIBLE = {
    "ollama": "16.34",
    "server, old": "6.87 ",
    "llama-cli": "33.40",
    "text-generation-webui": "6.67",
}


def as_truth(figure: Figure) -> Truth:
    """What a reader says of a figure."""
    return Truth(figure.tps, figure.phase, figure.counts, figure.depth, figure.n_streams)


def figures(name: str) -> list[Figure]:
    """The figures of a sample."""
    return reader.parse(BY_NAME[name].text)


def only(name: str, phase: str) -> Figure:
    """The first figure of a sample in a phase."""
    return next(figure for figure in figures(name) if figure.phase == phase)


@pytest.mark.parametrize("sample", PRINTED, ids=lambda sample: sample.name)
def test_a_sample_has_its_figures_and_their_meaning(sample: Sample) -> None:
    texts = [sample.text]
    if "\n" in sample.text[:-1]:
        texts.append(f"Why is this so slow?\n\n{sample.text}\nThanks, on my laptop\n")
    for text in texts:
        read = sorted(map(as_truth, reader.parse(text)), key=lambda truth: truth.tps)
        expected = sorted(sample.truths, key=lambda truth: truth.tps)
        assert [figure.tps for figure in read] == pytest.approx(
            [truth.tps for truth in expected], rel=1e-4
        )
        without_rate = [(each.phase, each.counts, each.depth, each.n_streams) for each in read]
        assert without_rate == [
            (truth.phase, truth.counts, truth.depth, truth.n_streams) for truth in expected
        ]


@pytest.mark.parametrize("sample", BY_HAND, ids=lambda sample: sample.name)
def test_what_a_paste_does_not_say_is_unknown(sample: Sample) -> None:
    if not sample.truths:
        with pytest.raises(LabError):
            reader.parse(sample.text)
        return
    read = sorted(map(as_truth, reader.parse(sample.text)), key=lambda truth: truth.tps)
    expected = sorted(sample.truths, key=lambda truth: truth.tps)
    assert len(read) == len(expected)
    for figure, truth in zip(read, expected, strict=True):
        assert figure.tps == pytest.approx(truth.tps, rel=1e-4)
        assert figure == dataclasses.replace(truth, tps=figure.tps)


def test_what_belongs_to_one_answer_is_not_of_the_next() -> None:
    decode = [
        figure
        for figure in figures("a log that begins within an answer")
        if figure.phase == DECODE
    ]
    assert [figure.n_prompt for figure in decode] == [None, 100]
    ollama = [
        figure
        for figure in figures("ollama, two answers, the first one cut off")
        if figure.phase == DECODE
    ]
    assert [figure.n_prompt for figure in ollama] == [None, 32]
    assert [figure.n_gen for figure in ollama] == [None, 48]


def test_drafted_tokens_of_lm_studio_are_speculative() -> None:
    text = (
        "28.92 tok/sec \u2022 877 tokens \u2022 0.06s to first token \u2022 "
        "Accepted 45/60 draft tokens (75.0%)"
    )
    (figure,) = reader.parse(text)
    assert figure.is_speculative
    assert (figure.accepted, figure.drafted) == (45, 60)
    assert figure.tokens_per_step == pytest.approx(876 / 831)  # prefill gave the first


def test_tokens_and_steps_of_a_sample() -> None:
    old = only("server, old", DECODE)
    assert old.n_gen == 615
    assert old.n_steps == 614
    new = only("server, new", DECODE)
    assert new.n_gen == 861
    assert new.n_steps == 860
    cli = only("llama-cli", DECODE)
    assert cli.n_gen == 803
    assert cli.n_steps == 802
    assert cli.n_prompt == 32163
    assert only("mlx_lm", DECODE).n_steps == 479
    kobold = only("koboldcpp", DECODE)
    assert kobold.n_prompt == 17
    assert kobold.n_gen == 31
    assert kobold.depth == 17
    (webui,) = figures("text-generation-webui")
    assert webui.total_s == 51.24
    assert webui.n_gen == 342
    assert webui.depth == 7323


def test_the_settings_of_llama_bench_are_those_that_it_names() -> None:
    (table,) = figures("llama-bench")
    assert table.n_prompt == 2048
    assert table.quantization == "MXFP4"
    stated = {name: fact.value for name, fact in table.facts.items() if fact.how == STATED}
    assert stated["ubatch"] == 2048
    assert stated["flash_attn"] == "on"
    assert stated["n_gpu_layers"] is None
    assert stated["mmap"] is False
    assert "batch" not in stated  # a default of the program, which the table leaves out
    assert table.facts["batch"].words == "2048 by default"
    assert table.spread == pytest.approx(18.89 / 2689.42)
    (rows,) = figures("llama-bench json")
    assert rows.settings["n_gpu_layers"] is None  # -1 means all layers
    assert rows.settings["threads"] == rows.settings["threads_batch"] == 8
    assert rows.settings["flash_attn"] == "off"
    (row,) = figures("llama-bench csv")
    assert row.settings["n_gpu_layers"] == 0  # its backend is the CPU
    assert row.settings["threads_batch"] == 8
    assert row.spread == pytest.approx(2.5 / 289.1)


def test_a_label_names_the_quantization_once() -> None:
    bench = figures("llama-bench with columns that few know")[0]
    assert bench.model_label == "qwen3moe 30B.A3B Q4_K_M"


def test_a_draft_model_is_named() -> None:
    figure = only("server, speculative", DECODE)
    assert figure.is_speculative
    assert (figure.accepted, figure.drafted) == (2390, 3320)
    assert figure.n_steps is None


PASTED_LOG = Path(__file__).parent.parent / "docs" / "pasted-llama-server.txt"


def test_the_start_of_a_log_names_model_threads_and_slots() -> None:
    for figure in reader.read(str(PASTED_LOG)):
        assert figure.model == "SmolLM2-135M-Instruct.Q4_1"
        assert figure.settings["threads"] == 1
        assert figure.n_streams == 1


def test_what_a_start_says_holds_until_the_next_one() -> None:
    log = PASTED_LOG.read_text()
    other = log.replace("n_threads = 1", "n_threads = 2").replace(
        "SmolLM2-135M", "SmolLM2-360M"
    )
    read = reader.parse(other.replace("n_slots = 1", "n_slots = 4") + log)
    assert [figure.model for figure in read] == [
        *2 * ["SmolLM2-360M-Instruct.Q4_1"],
        *2 * ["SmolLM2-135M-Instruct.Q4_1"],
    ]
    assert [figure.settings["threads"] for figure in read] == [2, 2, 1, 1]
    assert [figure.n_streams for figure in read] == [None, None, 1, 1]


def test_a_cached_prefix_is_part_of_the_depth() -> None:
    cached = only("server, cached", DECODE)
    assert cached.n_prompt == 1
    assert cached.depth == 874
    assert only("server, old", DECODE).depth is None  # it does not say what was cached


@pytest.mark.parametrize("unit", ["tokens/s", "tok/s", "t/s", "tokens per second", "tps"])
def test_units_of_a_bare_figure(unit: str) -> None:
    (figure,) = reader.parse(f"35 {unit}")
    assert figure.tps == 35


def test_the_row_at_the_nearest_depth_is_taken() -> None:
    first, second = nearest(figures("server, cached"), figures("llama-bench, several rows"))
    assert first.depth == 874
    assert second.depth == 872
    assert second.tps == 100


def test_decode_is_compared_before_prefill_whatever_their_numbers() -> None:
    first, second = nearest(figures("batched"), figures("llama-bench, several rows"))
    assert first.phase == second.phase == DECODE
    first, second = nearest(
        figures("batched"), figures("llama-bench, several rows"), prefill=True
    )
    assert first.phase == second.phase == PREFILL


def test_a_table_with_a_prefix_on_every_line_is_read() -> None:
    lines = BY_NAME["llama-bench, several rows"].text.splitlines()
    prefixed = "\n".join(f"2026-11-24 12:00:01 bench> {line}" for line in lines)
    assert [figure.tps for figure in reader.parse(prefixed)] == [400, 120, 100]


def test_a_comma_that_could_be_of_thousands_is_settled_by_time_or_refused() -> None:
    log = '"predicted_n": 7718, "predicted_ms": 1000, "predicted_per_second": 7,717'
    (figure,) = reader.parse(log)
    assert figure.tps == 7717
    assert figure.counts == STEPS
    with pytest.raises(LabError, match="could be a decimal or thousands"):
        reader.parse('"predicted_n": 7718, "predicted_per_second": 7,717')


def test_every_answer_of_a_log_is_kept() -> None:
    answers = "".join(
        BY_NAME["server, old"]
        .text.replace("task 0", f"task {task}")
        .replace("615", str(600 + task))
        for task in (10, 12, 14)
    )
    read = [figure for figure in reader.parse(answers) if figure.phase == DECODE]
    assert [figure.n_gen for figure in read] == [610, 612, 614]


def test_a_table_of_two_builds_is_two_setups(tmp_path: Path) -> None:
    path = tmp_path / "compared.md"
    path.write_text(BY_NAME["two builds"].text)
    master, change = figures_of(str(path))
    assert master[0].about == "master"
    assert change[0].about == "pr"


def without_a_piece(sample: Sample, chance: random.Random) -> str:
    """The text with a line or a piece lost, cut off, doubled, or with foreign letters in it."""
    text = sample.text
    lines = text.splitlines(keepends=True)
    kind = chance.randrange(6)
    place = chance.randrange(len(text))
    if kind == 0:
        return text[:place]
    if kind == 1:
        del lines[chance.randrange(len(lines))]
        return "".join(lines)
    if kind == 2:
        marks = ["", "\x1b[31m", "\u202e> "]
        return "".join(chance.choice(marks) + line for line in lines)
    if kind == 3:
        return re.sub(r" +", lambda match: chance.choice([" ", match[0]]), text)
    if kind == 4:
        return text + "\n".join(3 * ["\x00\xff{[|"]) + text[:place]
    word = chance.choice(re.findall(r"[A-Za-z_]{3,}", text) or ["x"])
    return text.replace(word, word[::-1])


@pytest.mark.parametrize("sample", PRINTED, ids=lambda sample: sample.name)
def test_a_mutilated_sample_is_refused_or_right(sample: Sample) -> None:
    chance = random.Random(sample.name)
    true_rates = [truth.tps for truth in sample.truths]
    for _ in range(12):
        text = without_a_piece(sample, chance)
        try:
            read = reader.parse(text)
        except LabError as refused:
            assert "Known formats: llama-bench" in str(refused)
            continue
        for figure in read:
            nearest_error = min(abs(figure.tps / tps - 1) for tps in true_rates)
            assert nearest_error < 0.035, (text, figure)


@pytest.mark.parametrize("name", CORRUPTIBLE)
def test_a_digit_that_contradicts_the_others_is_refused(name: str) -> None:
    rate = CORRUPTIBLE[name]
    text = BY_NAME[name].text.replace(rate, f"9{rate}")
    with pytest.raises(LabError, match="its tokens and time give"):
        reader.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no figures",
        "hello world",
        "x" * 5_000_000,
        "eval time = 1 ms / 0 tokens",
        "1,234 tokens/s",
        "{" * 10_000,
        "eval rate: inf tokens/s",
    ],
    ids=["empty", "none", "words", "long", "no tokens", "ambiguous", "brackets", "infinite"],
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(LabError):
        reader.parse(text)


@pytest.mark.parametrize(
    "piece",
    [
        "1,",
        "eval time = ",
        "| a ",
        "prompt_n: ",
        "Prompt: 1",
        "Limit:1/",
        "9",
        "[1;",
        "\n|",
        " id 1",
    ],
)
def test_reading_takes_time_in_proportion_to_the_text(piece: str) -> None:
    """Else this takes longer than any test may (`timeout` in pyproject.toml)."""
    text = piece * (400_000 // len(piece))
    with pytest.raises(LabError):
        reader.parse(text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    for name in (
        "/proc/self/mem",
        "/dev/zero",
        str(tmp_path),
        str(tmp_path / "none"),
    ):
        with pytest.raises(LabError):
            reader.read(name)


@dataclasses.dataclass
class Score:
    """Statements on pastes: how many there are, which are false, and which unknown though given."""

    n_statements: int = 0
    false: list[str] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)


def judge(sample: Sample, score: Score) -> None:
    """Compare what the reader says of a text with the truth."""
    try:
        figures = reader.parse(sample.text)
    except LabError as problem:
        figures = []
        score.unknown.append(f"{sample.name}: refused: {problem.what[:120]}")
    left = list(figures)
    for truth in sample.truths:
        figure = best_match(truth, left)
        if figure is None:
            score.n_statements += 1
            score.unknown.append(f"{sample.name}: no figure {truth}")
            continue
        left.remove(figure)
        judge_figure(sample.name, truth, figure, score)
        if figure.source.startswith("llama-server"):
            judge_facts(sample, figure, score)
    for figure in left:
        score.n_statements += 1
        score.false.append(f"{sample.name}: invented {figure.label} {figure.tps:g}")


def judge_facts(sample: Sample, figure: Figure, score: Score) -> None:
    """Compare the facts of a command with what it states: a stated fact is never unknown."""
    for name, true in sample.facts.items():
        score.n_statements += 1
        fact = figure.facts.get(name)
        line = f"{sample.name}: {name} is {true}, read {fact}"
        if fact is None:
            score.false.append(f"{line} (called not given)")
        elif fact.value != true:
            score.false.append(line)


def best_match(truth: Truth, figures: Sequence[Figure]) -> Figure | None:
    """The figure with the truth's rate, if there is one; of equal rates that of its phase."""
    near = [figure for figure in figures if abs(figure.tps / truth.tps - 1) < 0.002]
    if not near:
        return None
    return min(near, key=lambda figure: figure.phase != truth.phase)


def judge_figure(
    name: str,
    truth: Truth,
    figure: Figure,
    score: Score,
) -> None:
    """Compare phase, what is counted, depth and concurrency."""
    fields = [
        ("phase", truth.phase, figure.phase, UNKNOWN),
        ("counts", truth.counts, figure.counts, UNKNOWN),
        ("depth", truth.depth, figure.depth, None),
        ("concurrency", truth.n_streams, figure.n_streams, None),
    ]
    for label, true, read, unknown in fields:
        score.n_statements += 1
        if read == true:
            continue
        line = f"{name}: {label} of {truth.tps:.5g} is {true}, read {read}"
        is_unknown = read == unknown or (label == "counts" and read == MAYBE_FIRST)
        if is_unknown:
            score.unknown.append(line)
        else:
            score.false.append(line)


def test_nothing_false_is_said_of_pastes_and_at_most_one_percent_is_missed() -> None:
    """ "Unknown" is not false, but missed where the text says it."""
    score = Score()
    for sample in pastes():
        judge(sample, score)
    assert score.n_statements > 3000
    assert score.false == []
    assert len(score.unknown) <= 0.01 * score.n_statements, score.unknown
