"""Two sides in one text: what the author wrote above the figures tells them apart."""
# ruff: noqa: E501 (samples are as programs print them)

import re
from pathlib import Path

import pytest

from lab.errors import LabError
from lab.features.why.conclusion import conclude
from lab.features.why.figure import DECODE, UNKNOWN, Figure
from lab.features.why.parts import GapPart
from lab.features.why.question import why
from lab.features.why.readers import text as reader
from lab.formats import llama_bench_import, llama_bench_rows

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
    heading = parts_of(text)["label"]
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
    assert "label" not in parts_of(text)


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
    assert all(part.name != "label" for part in explained.parts)


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


def tabbed(table: str) -> str:
    """A table as a browser copies it."""
    rows = [line.strip("| \n").split("|") for line in table.splitlines() if "--" not in line]
    return "\n".join("\t".join(cell.strip() for cell in row) for row in rows) + "\n"


TABBED = [
    SWEEP.format(first="4.000", fast="32.00", second="8.000", slow="16.00"),
    BENCH.format(cpu="5.00", gpu="50.00"),
    "| GPU | pp512 | tg128 |\n| --- | --- | --- |\n"
    "| RTX 3060 | 900.5 | 40.5 |\n| RTX 3070 | 1200.5 | 55.5 |\n",
    "| engine | quant | tok/s |\n| -- | -- | -- |\n| one | Q4_0 | 12.5 |\n| two | Q4_0 | 25.0 |\n",
    "| PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |\n"
    "|--|--|--|--|--|--|--|--|--|--|\n"
    "| 512 | 128 | 1 | 640 | 1.000 | 512.00 | 4.000 | 32.00 | 5.000 | 128.00 |\n",
]


@pytest.mark.parametrize("table", TABBED, ids=lambda table: table[:20])
@pytest.mark.parametrize("prose", ["{}", "My card:\n\n{}\nThanks\tto all\n"])
def test_a_table_that_a_browser_copied_is_read_like_its_source(table: str, prose: str) -> None:
    source = [(each.tps, each.phase, each.label) for each in reader.parse(prose.format(table))]
    copied = [
        (each.tps, each.phase, each.label)
        for each in reader.parse(prose.format(tabbed(table)))
    ]
    assert [each[:2] for each in copied] == [each[:2] for each in source]
    assert [each[2].rpartition("line")[0] for each in copied] == [
        each[2].rpartition("line")[0] for each in source
    ]


def test_lab_import_reads_a_table_that_a_browser_copied(tmp_path: Path) -> None:
    path = tmp_path / "copied.txt"
    path.write_text(
        f"My card\n\n{tabbed(BENCH.format(cpu='5.00', gpu='50.00'))}\n\tso\tslow\n"
    )
    assert llama_bench_rows.is_of_llama_bench(path.read_text())
    records, skipped = llama_bench_import.read(str(path), "RTX 3060")
    assert [record.settings.n_gpu_layers for record in records] == [0, 99]
    assert skipped == []


UNITS = [
    ("| binary | card | tok/s |", "| v1 | slot 1 | 12.5 |", "| v2 | slot 1 | 25.0 |"),
    ("engine | quant | Tokens/Second", "one | Q4_0 | 12.5", "two | Q4_0 | 25.0"),
    ("| command | t/s |", "| -t 4 | 12.5 |", "| -t 8 | 25.0 |"),
    ("| Run | Eval Rate (tokens/s) |", "| 1 | 12.5 tokens/s |", "| 2 | 25.0 tokens/s |"),
    ("| setup | throughput (tokens per second) |", "| a | 12.50 |", "| b | 25.00 |"),
]


@pytest.mark.parametrize(("head", "first", "second"), UNITS, ids=lambda each: str(each)[:18])
def test_a_column_that_names_a_unit_alone_is_a_rate(
    head: str, first: str, second: str
) -> None:
    rule = re.sub("[^|]+", "--", head)
    text = f"{head}\n{rule}\n{first}\n{second}\n"
    assert rates(text) == (12.5, 25)
    for figure in reader.parse(text):
        assert figure.phase == (DECODE if "Eval" in head else UNKNOWN)
        assert figure.depth is None


COLUMNS_OF_NO_RATE = [
    *(
        "speedup (t/s)",
        "tok/s diff",
        "t/s change",
        "peak tok/s",
        "max t/s",
        "p95 t/s",
        "delta tok/s",
    ),
    *(
        "tokens",
        "time",
        "latency (ms)",
        "GB/s",
        "size",
        "params",
        "TTFT (ms)",
        "ms/tok",
        "req/s",
    ),
    *("power (W)", "tokens per watt", "VRAM", "score", "PPL", "s", "it/s", "MB/s", "tps gain"),
]


@pytest.mark.parametrize("head", COLUMNS_OF_NO_RATE)
def test_other_columns_are_no_rates(head: str) -> None:
    with pytest.raises(LabError):
        reader.parse(f"| name | {head} |\n| --- | --- |\n| a | 12.5 |\n| b | 25.0 |\n")


def test_a_column_of_no_phase_beside_one_of_decode_is_no_figure() -> None:
    table = "| engine | tok/s | decode tok/s |\n| -- | -- | -- |\n| one | 10.5 | 12.5 |\n"
    (figure,) = reader.parse(table)
    assert (figure.tps, figure.phase, figure.about) == (12.5, DECODE, "one, decode tok/s")


OPTIONS = [
    ("`-sm row`", {"split_mode": "row"}),
    ("2 cards, -sm tensor (Q4_K_XL)", {"split_mode": "tensor"}),
    ("-t 7 -ngl 2000000", {"threads": 7, "n_gpu_layers": None}),
    ("-fa on, -ub 2048", {"flash_attn": "on", "ubatch": 2048}),
    ("with --n-cpu-moe 12", {"n_cpu_moe": 12}),
    ("without -fa", {}),
    ("no -sm row", {}),
    ("gpt-oss-20b", {}),
    ("Q4_K - Medium", {}),
    ("-12 %", {}),
    ("-", {}),
    ("2 - 3 users", {}),
]


@pytest.mark.parametrize(("cell", "expected"), OPTIONS, ids=lambda each: str(each)[:20])
def test_options_in_a_cell_are_settings(cell: str, expected: dict[str, object]) -> None:
    table = f"| config | tg128 |\n| --- | --- |\n| {cell} | 12.5 |\n"
    (figure,) = reader.parse(table)
    assert {name: fact.value for name, fact in figure.facts.items()} == expected


def test_a_row_of_a_table_is_called_by_its_label() -> None:
    text = "\n".join(("| binary | tok/s |", "| -- | -- |", "| v1 | 12.5 |", "| v2 | 25.0 |"))
    assert parts_of(text)["label"].reason == '"v1" in A, "v2" in B'


def test_a_test_with_words_behind_it_and_a_unit_in_its_cell() -> None:
    table = (
        "| test | result |\n| --- | --- |\n"
        "| pp512, `llama-bench` | 198.5 \u00b1 3 t/s |\n"
        "| tg64, `llama-bench` | 11.5 t/s |\n| perplexity | 5.5 |\n"
    )
    prefill, decode = reader.parse(table)
    assert (prefill.tps, prefill.n_prompt, prefill.phase) == (198.5, 512, "prefill")
    assert (decode.tps, decode.n_gen, decode.phase) == (11.5, 64, DECODE)


STATISTICS = [
    "28.5 tok/sec \u2022 640 tokens \u2022 1.50s to first token",
    "28.5 tok/sec, 640 tokens, 1.50s to first token, Stop reason: EOS Token Found",
    "28.5 tok/sec | 640 tokens | 1.50s to first token",
    "28.5 tok/s; 640 tokens; 1.50s to first token",
    "28.5 tok/sec \u00b7 640 tokens \u00b7 1.50s to first token",
]


@pytest.mark.parametrize("line", STATISTICS)
def test_the_statistics_of_lm_studio_with_any_separator(line: str) -> None:
    text = f"Vulkan: {line}\nROCm : {line.replace('28.5', '14.5')}\n"
    assert rates(text) == (28.5, 14.5)
    assert parts_of(text)["label"].reason == '"Vulkan" in A, "ROCm" in B'
    (figure,) = reader.parse(line)
    assert (figure.source, figure.n_gen) == ("LM Studio", 640)


def test_a_rate_with_its_phase_in_brackets_is_of_ollama() -> None:
    text = "* Prompt eval rate: 130.5 tokens/s\n* Eval rate (generation): ~46.5 tokens/s\n"
    assert [(each.tps, each.phase) for each in reader.parse(text)] == [
        (130.5, "prefill"),
        (46.5, DECODE),
    ]


PROGRESS = "slot print_timing: id  0 | task 0 | n_decoded = {:>6}, tg = {:>6.2f} t/s, tg_3s = {:>6.2f} t/s\n"
STARTS = [
    "system_info: n_threads = 8 (n_threads_batch = 8) / 16 | CPU : AVX2 = 1 |\n",
    "system info: n_threads = 8, n_threads_batch = 8, total_threads = 16\n",
    "0.00.600.000 I system_info: n_threads = 4 (n_threads_batch = 4) / 8 | CPU : NEON = 1 |\n",
    "0.00.600.000 I device_info:\n",
    "llama-1  | system_info: n_threads = 2 (n_threads_batch = 2) / 2 | CPU : AVX = 1 |\n",
]


@pytest.mark.parametrize("start", STARTS)
def test_the_progress_of_two_processes_is_of_two_answers(start: str) -> None:
    first = start + PROGRESS.format(100, 9, 9) + PROGRESS.format(130, 9.5, 9.6)
    second = start + PROGRESS.format(140, 79, 79) + PROGRESS.format(240, 79.5, 79.6)
    assert [(each.tps, each.n_gen) for each in reader.parse(first + second)] == [
        (9.5, 130),
        (79.5, 240),
    ]
    assert [each.tps for each in reader.parse(first + second.replace(start, ""))] == [79.5]


ONE_STEP = "llama_perf_context_print:        eval time =    {0}.00 ms /     1 runs   ( {0}.00 ms per token,    {1} tokens per second)\n"
LONG_PROMPT = "llama_print_timings: prompt eval time =    {}.00 ms /   500 tokens (    5.00 ms per token,   {} tokens per second)\n"


@pytest.mark.parametrize(
    ("ms", "tps"),
    [(50, "20.00"), (20, "50.00"), (4000, "0.25"), (100, "10.00"), (5, "200.00")],
)
def test_one_step_of_decode_is_no_rate(ms: int, tps: str) -> None:
    (figure,) = reader.parse(ONE_STEP.format(ms, tps))
    assert not figure.is_rate
    assert figure.weakness == "a single step: no decode rate"
    text = (
        f"old:\n{LONG_PROMPT.format(2500, '200.00')}{FAST.splitlines()[2]}\n\n"
        f"new:\n{LONG_PROMPT.format(5000, '100.00')}{ONE_STEP.format(ms, tps)}"
    )
    assert rates(text) == (200, 100)


def test_timings_of_the_old_server_count_tokens() -> None:
    log = "print_timings: prompt eval time =     200.00 ms /    50 tokens (    4.00 ms per token,   250.00 tokens per second)\nprint_timings:        eval time =    4000.00 ms /   200 runs   (   20.00 ms per token,    50.00 tokens per second)\n"
    decode = decodes(log)[0]
    assert (decode.source, decode.n_gen) == ("ik_llama.cpp or old llama-server log", 200)
    (cli,) = decodes(log.replace("print_", "llama_print_"))
    assert (cli.source, cli.n_gen) == ("llama-cli", 201)


SPECULATIVE = """\
encoded   {n_prompt} tokens in    0.100 seconds, speed:  {pp:.3f} t/s
decoded  {n_gen} tokens in   10.000 seconds, speed:   {tg:.3f} t/s

n_draft   = 5
n_predict = {n_gen}
n_drafted = {drafted}
n_accept  = {accepted}
accept    = 50.000%
"""


@pytest.mark.parametrize(
    ("n_prompt", "n_gen", "drafted", "accepted"),
    [
        (14, 600, 700, 500),
        (5, 129, 132, 47),
        (2000, 64, 300, 12),
        (32, 1000, 1200, 900),
        (8, 40, 50, 25),
    ],
)
def test_llama_speculative(n_prompt: int, n_gen: int, drafted: int, accepted: int) -> None:
    text = SPECULATIVE.format(
        n_prompt=n_prompt, n_gen=n_gen, drafted=drafted, accepted=accepted, pp=n_prompt / 0.1, tg=n_gen / 10
    )  # fmt: skip
    command = "./llama-speculative -m x-8B.gguf -md y-1B.gguf -ngl 99\n"
    prefill, decode = reader.parse(f"{command}{text}")
    assert (prefill.tps, prefill.phase, prefill.n_prompt) == (
        n_prompt / 0.1,
        "prefill",
        n_prompt,
    )
    assert (decode.tps, decode.n_gen, decode.depth) == (n_gen / 10, n_gen, n_prompt)
    assert (decode.drafted, decode.accepted) == (drafted, accepted)
    assert (decode.model, decode.is_speculative) == ("x-8B", True)
    with pytest.raises(LabError, match="its tokens and time give"):
        reader.parse(text.replace("10.000 seconds", "20.000 seconds"))


VARIABLES = [
    ("CUDA_VISIBLE_DEVICES=1 ./llama-cli -m x-7B.gguf", "CUDA_VISIBLE_DEVICES", "1"),
    ('CUDA_VISIBLE_DEVICES="0, 1" ./llama-cli -m x-7B.gguf', "CUDA_VISIBLE_DEVICES", "0,1"),
    ("HIP_VISIBLE_DEVICES=0,2 ./llama-cli -m x-7B.gguf", "HIP_VISIBLE_DEVICES", "0,2"),
    ("GGML_VK_VISIBLE_DEVICES=0 ./llama-cli -m x-7B.gguf", "GGML_VK_VISIBLE_DEVICES", "0"),
    (
        "HSA_OVERRIDE_GFX_VERSION=10.3.0 ./llama-cli -m x-7B.gguf",
        "HSA_OVERRIDE_GFX_VERSION",
        "10.3.0",
    ),
]


@pytest.mark.parametrize(
    ("command", "name", "value"), VARIABLES, ids=lambda each: str(each)[:24]
)
def test_variables_that_choose_devices_are_settings(
    command: str, name: str, value: str
) -> None:
    text = f"{command}\n{FAST}\n./llama-cli -m x-7B.gguf\n{SLOW}"
    first, second = decodes(text)
    assert first.facts[name].value == value
    assert name not in second.facts
    assert (
        f"{name} {value} in A, not named in B's command"
        in parts_of(text)["other settings"].reason
    )
    table = BENCH.format(cpu="5.00", gpu="50.00")
    assert (
        decodes(f"{command.replace('llama-cli', 'llama-bench')}\n{table}")[0].facts[name].value
        == value
    )


NAMED = [
    ("On a 7900 XTX:", "device", "RX 7900 XTX"),
    ("My 6800XT does this:", "device", "RX 6800XT"),
    ("Jetson Orin Nano:", "device", "Jetson Orin Nano"),
    ("Adreno(TM) X1-85 with OpenCL:", "device", "Adreno(TM) X1-85"),
    ("3xTesla-P40:", "device", "3xTesla-P40"),
    ("I run qwen3:32b here:", "model", "qwen3:32b"),
    ("Running benchmark with model: llama3.2:3b (34W)", "model", "llama3.2:3b"),
    ("gpt-oss:20b is slow:", "model", "gpt-oss:20b"),
    ("Model: tiny-coder-1.5b-q4_k_m.gguf", "model", "tiny-coder-1.5b-q4_k_m"),
    ("You can do this on a 3060Ti:", "device", None),
    ("Something like a 7800 XT would do:", "device", None),
    ("the 7900 people here", "device", None),
    ("GPU: RTX 3070\nCPU: Ryzen", "device", "RTX 3070"),
    ("Hardware:\nGPU: RTX 3070 Mobile", "device", "RTX 3070 Mobile"),
    ("Hardware:\n\n- one big machine", "device", None),
]  # fmt: skip


@pytest.mark.parametrize(("words", "name", "expected"), NAMED, ids=lambda each: str(each)[:24])
def test_names_in_words(words: str, name: str, expected: str | None) -> None:
    assert getattr(decodes(f"{words}\n\n{FAST}")[0], name) == expected


def test_the_library_and_the_cli_print_the_same_lines() -> None:
    library = f"With llama-cpp-python:\n{FAST}"
    assert decodes(library)[0].source == "llama-cpp-python"
    assert [each.source for each in decodes(f"{library}\nand ./main:\n{SLOW}")] == [
        "llama.cpp"
    ] * 2


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (
            "v1 runs at 24.5 t/s for me\nv2 runs at 13.5 t/s for me",
            "lab why '24.5 t/s' '13.5 t/s'",
        ),
        ("it is 24.5 ± 3.5 t/s today I guess", "lab why '32.4 t/s' B"),
        ("I get 20-25 t/s with it all day", "lab why '25 t/s' B"),
        ("I get 20\u201325 t/s, then 12 t/s later", "lab why '25 t/s' '12 t/s'"),
        ("my card does 12.5 tokens/s, or so", "lab why '12.5 t/s' B"),
    ],
)
def test_the_hint_gives_rates_of_the_text(text: str, command: str) -> None:
    with pytest.raises(LabError) as refused:
        reader.parse(text)
    assert refused.value.hint is not None
    assert command in refused.value.hint


HEADS_OF_BUILDS = [
    ("| model | test | t/s master | t/s pr-9 | Speedup |", ("master", "pr-9")),
    ("| model | test | master t/s | PR t/s | spedup |", ("master", "pr")),
    ("| model | test | t/s (Master) | t/s (PR) | speed-up |", ("master", "pr")),
    ("| model | test | t/s | t/s | speedup |", ("column 3", "column 4")),
    ("| model | test | before   t/s | after   t/s | diff |", ("before", "after")),
]


@pytest.mark.parametrize(("head", "builds"), HEADS_OF_BUILDS, ids=lambda each: str(each)[:44])
def test_a_table_of_two_builds_has_two_sides(head: str, builds: tuple[str, str]) -> None:
    rule = re.sub("[^|]+", " --: ", head)
    row = "| llama 7B Q4_0 | tg 128 | 40.50 \u00b1 0.10 | 50.50 \u00b1 0.10 | 1.247 |"
    text = f"{head}\n{rule}\n{row}\n"
    assert rates(text) == (40.5, 50.5)
    first, second = reader.parse(text)
    assert (first.facts["build"].value, second.facts["build"].value) == builds
    assert (first.source, first.n_gen) == ("llama-bench", 128)
    assert {"diff", "speedup", "spedup", "speed-up"}.isdisjoint(first.facts)


def test_columns_behind_the_test_are_settings() -> None:
    table = (
        "| model | test | th | master t/s | PR t/s |\n"
        "| -- | -- | -- | -- | -- |\n"
        "| llama 7B Q4_0 | tg 64 | 4 | 40.5 | 50.5 |\n"
    )
    assert [figure.facts["threads"].value for figure in reader.parse(table)] == [4, 4]


CLIENT = (
    "| model | test | t/s (total) | t/s (req) | peak t/s | ttfr (ms) |\n"
    "| -- | -- | -- | -- | -- | -- |\n"
    "| x-7B | tg32 (c2) | 80.5 \u00b1 1.0 | 40.5 \u00b1 1.0 | 90.0 | |\n"
)


def test_a_client_of_several_answers_is_no_table_of_builds() -> None:
    with pytest.raises(LabError):
        reader.parse(CLIENT)


@pytest.mark.parametrize("head", ["Prompt", "Generation", "Prefill", "decode", "gen"])
def test_a_column_of_words_is_a_label_whatever_its_head(head: str) -> None:
    table = (
        f"| {head} | Variant | t/s |\n| -- | -- | -- |\n"
        "| story | plain | 12.5 |\n| code | fast | 25.0 |\n"
    )
    assert [(each.tps, each.about) for each in reader.parse(table)] == [
        (12.5, "story, plain"),
        (25, "code, fast"),
    ]


def test_a_heading_above_a_table_without_outer_bars() -> None:
    rows = (
        "model | backend | ngl | test | t/s\n"
        "-- | -- | -- | -- | --\n"
        "llama 7B Q4_0 | {} | {} | tg 128 | {}\n"
    )
    text = (
        f"On the laptop\n\n{rows.format('Metal', 99, '20.5')}\n"
        "On the old server with (ngl) = 0 again\n\n"
        f"{rows.format('CPU', 0, '10.5')}"
    )
    label = parts_of(text)["label"].reason
    assert label == '"On the laptop" in A, "On the old server with (ngl) = 0 again" in B'


def test_a_model_is_no_further_label_of_a_row() -> None:
    text = "| Model | tg128 |\n| -- | -- |\n| x-7B | 20.5 |\n| x-14B | 10.5 |\n"
    assert "label" not in parts_of(text)
    assert parts_of(text)["model"].differs


@pytest.mark.parametrize(
    ("above", "below"),
    [
        ("Koboldcpp 1.66:", "Koboldcpp 1.68:"),
        ("llama-cli", "llama-server"),
        ("# llama-bench today", "# llama-bench in May"),
        ("llama-server on the laptop:", "llama-server on the desktop:"),
        ("ollama run at night:", "ollama run by day:"),
    ],
)
def test_a_program_in_a_heading_is_no_command(above: str, below: str) -> None:
    text = f"{above}\n{FAST}\n{below}\n{SLOW}"
    names = [name.strip("# :") for name in (above, below)]
    assert parts_of(text)["label"].reason == f'"{names[0]}" in A, "{names[1]}" in B'


def test_a_label_is_no_likely_cause() -> None:
    text = (
        f"on:\n./llama-cli -m x-7B.gguf -t 4\n{FAST}\noff:\n"
        f"./llama-cli -m x-7B.gguf -t 8\n{SLOW}"
    )
    sentence = conclude(why(text, budget=0)).sentence
    assert "The likely cause is threads 4 in A, 8 in B: not measured." in sentence


COLUMNS_OF_SQL = "build_commit, build_number, cpu_info, gpu_info, backends, model_filename, model_type, model_size, model_n_params, n_batch, n_ubatch, n_threads, type_k, type_v, n_gpu_layers, flash_attn, n_prompt, n_gen, n_depth, test_time, avg_ns, stddev_ns, avg_ts, stddev_ts"
ROW_OF_SQL = "INSERT INTO test ({}) VALUES ('abc12345', '5100', 'Some (R) CPU', '{gpu}', 'CUDA', 'm/x-7B.gguf', 'llama 7B Q4_0', '3825065984', '6738415616', '2048', '512', '8', 'f16', 'f16', '99', '{fa}', '{n_prompt}', '{n_gen}', '{depth}', '2025-05-01T10:00:00Z', '2560000000', '1000000', '{tps}', '0.1');\n"


@pytest.mark.parametrize(
    ("gpu", "fa", "sizes", "tps"),
    [
        ("RTX 3060", 0, (0, 128, 0), 50.5),
        ("RTX 3060", 1, (512, 0, 0), 950.25),
        ("NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 3090", 1, (0, 64, 4096), 12.5),
        ("It''s a card", 0, (0, 32, 0), 7.75),
        ("", 0, (0, 16, 0), 3.5),
    ],
)
def test_sql_of_llama_bench(
    tmp_path: Path, gpu: str, fa: int, sizes: tuple[int, int, int], tps: float
) -> None:
    n_prompt, n_gen, depth = sizes
    row = ROW_OF_SQL.format(
        COLUMNS_OF_SQL, gpu=gpu, fa=fa, n_prompt=n_prompt, n_gen=n_gen, depth=depth, tps=tps
    )
    text = (
        f"CREATE TABLE IF NOT EXISTS test (\n  build_commit TEXT,\n  avg_ts REAL\n);\n\n{row}"
    )
    (figure,) = reader.parse(f"my numbers:\n\n{text}\nthanks\n")
    assert (figure.tps, figure.n_prompt or 0, figure.n_gen or 0) == (tps, n_prompt, n_gen)
    assert figure.facts["flash_attn"].value == ("on" if fa else "off")
    assert figure.device == (gpu.replace("''", "'").replace(",", "") or None)
    path = tmp_path / "bench.sql"
    path.write_text(text)
    assert llama_bench_rows.is_of_llama_bench(text)
    records, skipped = llama_bench_import.read(str(path))
    assert (len(records), skipped) == (1, [])
    assert records[0].machine.llama_cpp_commit == "abc12345"


def test_two_tables_of_csv_in_one_text() -> None:
    table = (
        "build_commit,n_batch,n_gpu_layers,flash_attn,n_prompt,n_gen,n_depth,avg_ts,stddev_ts,model_type\n"
        '"{}","2048","99","0","0","128","0","{}","0.1","llama 7B Q4_0"\n'
    )
    text = (
        f"before:\n```\n{table.format('aaaa1111', 50.5)}```\n\n"
        f"after:\n```\n{table.format('bbbb2222', 40.5)}```\n"
    )
    assert rates(text) == (50.5, 40.5)
    assert [figure.line for figure in reader.parse(text)] == [4, 10]
    assert parts_of(text)["program and build"].reason == "aaaa1111 in A, bbbb2222 in B"


@pytest.mark.parametrize(
    ("cell", "tps"),
    [
        ("1.250,5", 1250.5),
        ("1,250.5", 1250.5),
        ("12,5", 12.5),
        ("1250.5", 1250.5),
        ("2.001.250,5", 2001250.5),
    ],
)  # fmt: skip
def test_thousands_of_a_cell(cell: str, tps: float) -> None:
    assert decodes(f"| a | tg64 |\n| -- | -- |\n| x | {cell} |\n")[0].tps == tps


@pytest.mark.parametrize(
    "expression",
    [
        r"blk\.(1[0-9]|2[0-9])\.ffn_.*_exps\.=CPU",
        r"\.ffn_(up|down|gate)_exps.=CPU",
        r"exps=CPU",
        r"blk\.[0-9]\.ffn=CUDA0,exps=CPU",
        r"[3-9]\.attn=CPU",
    ],
)
@pytest.mark.parametrize("quote", ['"', "'"])
def test_an_expression_of_tensors_is_kept_as_it_is(expression: str, quote: str) -> None:
    command = f"./llama-server -m C:\\models\\x-7B.gguf -ot {quote}{expression}{quote} -ngl 99"
    figure = decodes(f"{command}\n{FAST}")[0]
    assert figure.facts["override_tensor"].value == expression
    assert (figure.model, figure.settings["n_gpu_layers"]) == ("x-7B", None)
