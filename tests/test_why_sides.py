"""Two sides in one text: what the author wrote above the figures tells them apart."""
# ruff: noqa: E501 (samples are as programs print them)

import pytest

from lab.errors import LabError
from lab.features.why.figure import Figure
from lab.features.why.parts import GapPart
from lab.features.why.question import why
from lab.features.why.readers import text as reader

OLD_LOG = """\
llama_print_timings:        load time =    900.00 ms
llama_print_timings: prompt eval time =    500.00 ms /   100 tokens (    5.00 ms per token,   200.00 tokens per second)
llama_print_timings:        eval time =   {ms}.00 ms /   100 runs   (   {each}.00 ms per token,    {tps} tokens per second)
"""
FAST = OLD_LOG.format(ms=2000, each=20, tps="50.00")
SLOW = OLD_LOG.format(ms=5000, each=50, tps="20.00")
SWEEP = """\
|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   512 |    128 |      0 |    1.000 |   512.00 |    {first} |    {fast} |
|   512 |    128 |   4096 |    2.000 |   256.00 |    {second} |    {slow} |
"""
BENCH = """\
| model | size | params | backend | ngl | test | t/s |
| --- | --- | --- | --- | --- | --- | --- |
| tiny 2B Q4_0 | 1.10 GiB | 2.00 B | CUDA | 0 | tg128 | {cpu} \u00b1 0.10 |
| tiny 2B Q4_0 | 1.10 GiB | 2.00 B | CUDA | 99 | tg128 | {gpu} \u00b1 0.10 |
"""


def parts_of(text: str) -> dict[str, GapPart]:
    return {part.name: part for part in why(text, budget=0).parts}


def rates(text: str) -> tuple[float, float]:
    """The rates of A and B."""
    first, second = (figure for _, figure in why(text, budget=0).pair.in_order)
    return first.tps, second.tps


HEADINGS = [
    (f"With FA:\n```\n{FAST}```\n\nWithout FA:\n```\n{SLOW}```\n", "With FA", "Without FA"),
    (f"### Vulkan\n{FAST}\n### ROCm (RDNA3):\n{SLOW}", "Vulkan", "ROCm (RDNA3)"),
    (f"Look.\n\n`master`\n\n{FAST}\n`my-branch`\n\n{SLOW}", "master", "my-branch"),
    (
        f"> laptop on battery\n> \n> {FAST}\n\n<b>on mains</b>\n{SLOW}",
        "laptop on battery",
        "on mains",
    ),
    (f"b100\n\nmain\n\n{FAST}\nb101\n\nmain\n\n{SLOW}", "b100, main", "b101, main"),
]


@pytest.mark.parametrize(("text", "above", "below"), HEADINGS, ids=lambda each: str(each)[:12])
def test_headings_name_the_sides_and_are_a_difference(
    text: str, above: str, below: str
) -> None:
    explained = why(text, budget=0)
    assert rates(text) == (50, 20)
    labels = [figure.label for _, figure in explained.pair.in_order]
    assert f'"{above}"' in labels[0]
    assert f'"{below}"' in labels[1]
    heading = parts_of(text)["heading"]
    assert heading.differs
    assert heading.reason == f'"{above}" in A, "{below}" in B'


def test_two_tables_of_one_setup_are_two_sides() -> None:
    before = SWEEP.format(first="4.000", fast="32.00", second="8.000", slow="16.00")
    after = SWEEP.format(first="2.000", fast="64.00", second="6.400", slow="20.00")
    assert rates(f"before\n\n{before}\nafter\n\n{after}") == (16, 20)
    assert rates(before) == (32, 16)


def test_a_setup_is_compared_with_the_same_one_below_another_heading() -> None:
    old = BENCH.format(cpu="5.00", gpu="50.00")
    new = BENCH.format(cpu="6.00", gpu="60.00")
    text = f"### old\n{old}\n### new\n{new}"
    assert rates(text) == (5, 6)
    assert rates(old) == (5, 50)
    with_builds = (
        f"### old\n{old}\nbuild: abcdef01 (7000)\n\n### new\n{new}\nbuild: abcdef02 (7100)\n"
    )
    assert rates(with_builds) == (5, 6)
    assert any(
        "50 tokens/s" in note and "60 tokens/s" in note for note in why(text, budget=0).notes
    )


def test_headings_of_phases_are_no_sides() -> None:
    text = (
        "Prompt:\n| test | t/s |\n| --- | --- |\n| pp512 | 500.0 |\n\n"
        "Generation:\n| test | t/s |\n| --- | --- |\n| tg128 | 50.0 |\n| tg128 @ d4096 | 25.0 |\n"
    )
    assert rates(text) == (50, 25)


def test_prefill_is_compared_where_no_decode_was_timed() -> None:
    line = "prompt eval rate:     {} tokens/s\n"
    assert rates(line.format("400.00") + line.format("100.00")) == (400, 100)


def test_one_heading_over_all_figures_says_nothing() -> None:
    log = "slot print_timing: id  0 | task {} |        eval time =  {} ms / 100 tokens (   20.00 ms per token,    {} tokens per second)\n"
    text = (
        "My server:\n" + log.format(1, "2000.00", "50.00") + log.format(2, "5000.00", "20.00")
    )
    assert [figure.heading for figure in reader.parse(text)] == [None, None]
    assert "heading" not in parts_of(text)


ORDINARY = [
    "srv  update_slots: all slots are idle",
    "main: server is listening on http://127.0.0.1:8080",
    "request: POST /v1/chat/completions 127.0.0.1 200",
    "llama_model_loader: loaded meta data with 30 key-value pairs",
    "~/llama.cpp$ ./llama-cli -m x.gguf",
    "services:",
    "    environment:",
    "https://example.com/a:",
    "====",
    "-----",
    "```shell",
    "> ",
    "...",
    '{"a": 1}:',
    "| model | test | t/s |",
    "INFO:     Started server process [1]",
    "log",
]


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_lines_between_figures_are_no_headings(line: str) -> None:
    text = f"mine:\n{FAST}{line}\n{SLOW}"
    figures = reader.parse(text)
    assert {figure.heading.value for figure in figures if figure.heading} <= {"mine"}


def test_headings_of_two_texts_are_not_compared() -> None:
    text = f"a:\n{FAST}\nb:\n{FAST}"
    explained = why(text, text.replace("a:", "c:"), budget=0)
    assert all(part.name != "heading" for part in explained.parts)


def test_a_text_with_one_figure_is_refused_with_what_was_read() -> None:
    with pytest.raises(LabError, match=r"one figure, .*: 50 tokens/s \(llama-cli, 101 tokens"):
        why(FAST, budget=0)


KOBOLD = """\
CtxLimit:{end}/4096, Amt:100/100, Init:0.07s, Process:10.00s (2.5ms/T = 399.60T/s), Generate:{s}s (50.0ms/T = {tps}T/s), Total:{total}s ({whole}T/s)
Benchmark Completed - v{build} Results:
Flags: Threads={threads} BlasBatchSize=512 FlashAttention={flash} KvCache=0
Layers: {layers}
Model: tiny-2B-Q4_0
MaxCtx: 4096
GenAmount: 100
ProcessingTime: 10.000s
ProcessingSpeed: 399.60T/s
GenerationTime: {s}s
GenerationSpeed: {tps}T/s
TotalTime: {total}s
Output:  1 1 1 1
"""


def kobold(build: str, tps: float, threads: int, flash: bool, layers: int) -> str:
    s = 100 / tps
    return KOBOLD.format(
        end=4096,
        s=f"{s:.3f}",
        tps=f"{tps:.2f}",
        total=f"{s + 10:.3f}",
        whole=f"{100 / (s + 10):.2f}",
        build=build,
        threads=threads,
        flash=flash,
        layers=layers,
    )


def decodes(text: str) -> list[Figure]:
    return [figure for figure in reader.parse(text) if figure.phase == "decode"]


@pytest.mark.parametrize(
    "change",
    [
        {"build": "1.90"},
        {"threads": 4},
        {"flash": False},
        {"layers": 20},
        {"build": "1.91.1", "threads": 2, "layers": 0},
    ],
    ids=str,
)
def test_what_a_program_prints_below_a_run_is_of_that_run(change: dict[str, object]) -> None:
    first = {"build": "1.80", "tps": 20.0, "threads": 8, "flash": True, "layers": 41}
    second = {**first, "tps": 10.0, **change}
    text = f"{kobold(**first)}\n\n{kobold(**second)}"  # type: ignore[arg-type]
    names = {"build": "build", "threads": "threads", "layers": "n_gpu_layers"}
    for figure, run in zip(decodes(text), [first, first, second, second], strict=True):
        for name, fact in names.items():
            assert figure.facts[fact].value == run[name]
        assert figure.facts["flash_attn"].value == ("on" if run["flash"] else "off")


def test_flags_on_the_line_of_a_run_are_not_of_the_run_above() -> None:
    head = "Timestamp,Backend,Layers,Model,MaxCtx,GenAmount,ProcessingTime,ProcessingSpeed,GenerationTime,GenerationSpeed,TotalTime,Output,Flags\n"
    row = "2025-01-01 10:00:00+00:00,koboldcpp_default.dll,33,tiny-2B-Q4_0,4096,100,10.00,399.60,{},15.00,1111{}\n"
    text = (
        head
        + row.format("5.00,20.00", "")
        + row.format(
            "10.00,10.00", ",Threads=8 BlasBatchSize=512 FlashAttention=True KvCache=0"
        )
    )
    text = text.replace("10.00,10.00,15.00", "10.00,10.00,20.00")
    above, below = decodes(text)
    assert "threads" not in above.facts
    assert below.facts["threads"].value == 8


def test_setups_of_a_text_that_are_not_compared_are_named() -> None:
    rows = [
        f"| tiny 2B Q4_0 | 1.10 GiB | 2.00 B | {backend} | 99 | tg128 | {tps}.00 |\n"
        for backend, tps in (("CUDA", 50), ("Vulkan", 40), ("ROCm", 30), ("SYCL", 20))
    ]
    head = "".join(BENCH.splitlines(keepends=True)[:2])
    explained = why(head + "".join(rows), budget=0)
    (note,) = [note for note in explained.notes if "setups" in note]
    assert note.startswith("other setups of the text, not compared: 30 tokens/s")
    assert "20 tokens/s" in note
