"""Tables out of posts and terminals: what is read of them, and what is said of each line that is not."""

import html
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import lab
from lab.analysis import comparison, llama_bench_format, pasted_tables, table
from lab.core import phases, results
from lab.core.record import UNKNOWN_THREADS, Record
from lab.errors import LabError
from lab.runner import machine
from lab.show import board_page
from lab.why import candidates
from tests.conftest import run_lab

LLAMA_BENCH = """\
I tried both caches, this is a 12 GB card:

```
$ ./llama-bench -m models/llama-2-7b.Q4_0.gguf -fa 0,1 -d 0,4096
ggml_cuda_init: found 1 CUDA devices:
  Device 0: NVIDIA GeForce RTX 1234, compute capability 8.6, VMM: yes
| model                          |       size |     params | backend    | ngl | fa |            test |         t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | -: | --------------: | ----------: |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  0 |           pp512 | 2345.67 ± 8.90 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  0 |           tg128 |   78.90 ± 0.12 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  1 |   pp512 @ d4096 | 1234.56 ± 7.89 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  1 |   tg128 @ d4096 |   61.20 ± 0.34 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  1 |     pp512+tg128 |  320.00 ± 1.00 |

build: 0abc123 (5678)
```
Not bad?
"""
CUDA_SCOREBOARD = """\
Model: llama-2-7b.Q4_0.gguf

## Scoreboard (with Flash Attention)
| Chip | Memory | pp512 t/s | tg128 t/s | Commit | Thanks to |
|:--|--:|--:|--:|:--|:--|
| **RTX 1234** | 12GB GDDR9 | 14,073.41 ± 115.16 | 290.02 ± 1.1 | [8cf6b42](https://example.org/c/8cf6b42) | @someone |
| RTX 1235, Laptop | 8GB | OOM | 77.5 | 8cf6b42 | @other |
"""
APPLE_SCOREBOARD = """\
| | BW [GB/s] | GPU Cores | F16 PP [t/s] | F16 TG [t/s] | Q8_0 PP [t/s] | Q8_0 TG [t/s] |
| -- | -- | -- | -- | -- | -- | -- |
| ✅ M9 <sup>1</sup> | 68 | 7 | | | 107.81 | 14.19 |
| ✅ M9 <sup>1</sup> | 68 | 8 | 118.5 | 7.91 | 117.96 | — |
"""
LOCALSCORE = """\
+----------------------------------------------------------------------------------------------------------+
|                                   NVIDIA GeForce RTX 1234 - 11.6 GiB                                     |
|                                Llama 3.2 1B Instruct - Q4_K - Medium                                     |
+----------------------------------------------------------------------------------------------------------+
|          test | run number |   avg time | tokens processed |     pp t/s |     tg t/s |       ttft |
| ------------- | ---------- | ---------- | ---------------- | ---------- | ---------- | ---------- |
| pp1024+tg16   |        0/1 |    0.00 ms |       512 / 1040 |    4000.00 |       0.00 |    0.00 ms |
| pp1024+tg16   |        1/1 |  320.12 ms |      1040 / 1040 |    5000.00 |     160.00 |  205.10 ms |
+----------------------------------------------------------------------------------------------------------+
"""
BATCHED = """\
main: n_kv_max = 4096, n_batch = 1024, n_ubatch = 256, flash_attn = 1, n_gpu_layers = 99, n_threads = 8

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     64 |    1 |    192 |    0.108 |  1186.64 |    1.539 |    41.57 |    1.647 |   116.57 |
|   128 |     64 |    4 |    768 |    0.373 |  1373.96 |    3.439 |    74.44 |    3.812 |   201.46 |
"""


def read(tmp_path: Path, text: str | bytes, **names: str) -> tuple[list[Record], list[str]]:
    path = tmp_path / "post.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return llama_bench_format.read_llama_bench(path, **names)


def figures_of(records: list[Record]) -> list[tuple[int, int, float]]:
    """Of each record the prompt, the decoded tokens, and tokens per second."""
    made = []
    for record in records:
        run, prefill = record.run, phases.prefill_ns(record.run)
        rate = 1e9 * run.n_prompt / prefill if prefill else 1e9 / (phases.decode_compute_mean_ns(run) or 0)
        made.append((run.n_prompt, run.n_gen - 1, round(rate, 2)))
    return made


def test_llama_bench_in_a_post(tmp_path: Path) -> None:
    records, skipped = read(tmp_path, LLAMA_BENCH)
    assert figures_of(records) == [(512, 0, 2345.67), (1, 128, 78.9), (4096, 128, 61.2)]
    assert [sentence.split(":")[0] for sentence in skipped] == ["line 11 skipped", "line 13 skipped"]
    one = records[0]
    assert (one.model.name, one.model.quantization, one.model.n_params) == ("llama 7B", "Q4_0", 6_740_000_000)
    assert [device.description for device in one.machine.devices] == ["NVIDIA GeForce RTX 1234"]
    assert one.machine.llama_cpp_commit == "0abc123"
    assert [record.settings.flash_attn for record in records] == ["off", "off", "on"]
    assert (one.settings.n_gpu_layers, one.settings.n_batch, one.settings.n_threads) == (99, 2048, UNKNOWN_THREADS)


def test_rows_without_a_head_are_read_from_their_end(tmp_path: Path) -> None:
    rows = "\n".join(line for line in LLAMA_BENCH.splitlines() if line.startswith("| llama"))
    records, skipped = read(tmp_path, rows)
    assert len(records) == 3 and records[0].model.name == "llama 7B"
    assert any("line 1: the text does not name the device" in sentence for sentence in skipped)
    (one,), skipped = read(tmp_path, "pp512 | 99.5 ± 0.1", device="RTX 1234", model="llama 7B Q8_0")
    assert not skipped and figures_of([one]) == [(512, 0, 99.5)]
    assert (one.model.name, one.model.quantization) == ("llama 7B", "Q8_0")
    assert one.machine.devices[0].description == "RTX 1234"


def test_other_settings_keep_results_apart(tmp_path: Path) -> None:
    text = "| model | backend | threads | mmap | test | t/s |\n| - | - | - | - | - | - |\n" + "".join(
        f"| llama 7B all F32 | CPU | 4 | {mmap} | tg128 | 5.{mmap} ± 0.0 |\n" for mmap in (0, 1)
    )
    records, skipped = read(tmp_path, text, device="Test CPU")
    assert not skipped and [record.run.variant for record in records] == ["mmap 0", "mmap 1"]
    assert (records[0].machine.cpu, records[0].machine.devices) == ("Test CPU", ())
    assert (records[0].settings.n_threads, records[0].settings.n_gpu_layers) == (4, 0)
    assert len(table.summary(table.runs(records))) == 2
    assert comparison.differences(comparison.groups(records)) == {"variant": ["mmap 0", "mmap 1"]}


def test_several_builds_and_devices_in_one_paste(tmp_path: Path) -> None:
    other = LLAMA_BENCH.replace("0abc123", "9def456").replace("RTX 1234", "RTX 9999")
    records, _ = read(tmp_path, LLAMA_BENCH + other)
    assert [record.machine.llama_cpp_commit for record in records] == ["0abc123"] * 3 + ["9def456"] * 3
    names = [record.machine.devices[0].description for record in records]
    assert names == ["NVIDIA GeForce RTX 1234"] * 3 + ["NVIDIA GeForce RTX 9999"] * 3


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("  Device 0: AMD Radeon RX 1, gfx1100 (0x1100), VMM: no\n  Device 1: AMD Radeon RX 1, gfx1100", 2),
        ("ggml_vulkan: 0 = AMD Radeon RX 1 (RADV NAVI31) (radv) | uma: 0 | fp16: 1 | warp size: 64", 1),
        ("ggml_metal_init: found device: AMD Radeon RX 1\nggml_metal_init: picking default device: AMD Radeon RX 1", 1),
        ("ggml_metal_device_init: GPU name:   AMD Radeon RX 1", 1),
    ],
)
def test_the_lines_of_llama_cpp_name_the_devices(tmp_path: Path, line: str, names: int) -> None:
    (record,), skipped = read(tmp_path, f"{line}\n| llama 7B Q4_0 | pp512 | 10.00 ± 0.00 |")
    assert [device.description for device in record.machine.devices] == ["AMD Radeon RX 1"] * names and not skipped


def test_a_scoreboard(tmp_path: Path) -> None:
    records, skipped = read(tmp_path, CUDA_SCOREBOARD)
    assert figures_of(records) == [(512, 0, 14073.41), (1, 128, 290.02), (1, 128, 77.5)]
    assert skipped == ["line 7, column pp512 t/s: 'OOM' is not a rate in tokens/s"]
    names = [[device.description for device in record.machine.devices] for record in records]
    assert names == [["RTX 1234"], ["RTX 1234"], ["RTX 1235 Laptop"]]
    assert {record.machine.llama_cpp_commit for record in records} == {"8cf6b42"}
    assert {(record.model.name, record.model.quantization) for record in records} == {("llama-2-7b", "Q4_0")}
    assert {record.settings.flash_attn for record in records} == {"on"}


def test_a_heading_on_flash_attention_is_of_one_table(tmp_path: Path) -> None:
    head, _, body = CUDA_SCOREBOARD.partition("## ")
    text = head + f"## {body}" + f"## {body}".replace("with Flash", "without Flash") + body.partition("\n")[2]
    found = [record.settings.flash_attn for record in read(tmp_path, text)[0]]
    assert found == ["on"] * 3 + ["off"] * 3 + ["unknown"] * 3


def test_apples_scoreboard(tmp_path: Path) -> None:
    records, skipped = read(tmp_path, APPLE_SCOREBOARD, model="LLaMA 7B")
    assert len(skipped) == 1 and "read as llama-bench's defaults, pp512 and tg128" in skipped[0]
    found = [(record.machine.devices[0].description, record.model.quantization) for record in records]
    assert found == [("M9 7 GPU cores", "Q8_0")] * 2 + [("M9 8 GPU cores", "F16")] * 2 + [("M9 8 GPU cores", "Q8_0")]
    assert len(llama_bench_format.llama_bench_rows(records)) == 5
    assert figures_of(records)[2:] == [(512, 0, 118.5), (1, 128, 7.91), (512, 0, 117.96)]


def test_localscore(tmp_path: Path) -> None:
    records, skipped = read(tmp_path, LOCALSCORE + "\n" + LLAMA_BENCH)
    assert {record.machine.llama_cpp_commit for record in records[:2]} == {None}
    records, skipped = read(tmp_path, LOCALSCORE)
    assert not skipped and figures_of(records) == [(1024, 0, 5000.0), (1024, 16, 160.0)]
    one = records[0]
    assert (one.model.name, one.model.quantization) == ("Llama 3.2 1B Instruct", "Q4_K_M")
    assert one.machine.devices[0].description == "NVIDIA GeForce RTX 1234" and "llamafile" in str(one.run.variant)


def test_llama_batched_bench(tmp_path: Path) -> None:
    records, skipped = read(tmp_path, BATCHED, device="RTX 1234", model="llama 7B Q4_0")
    assert figures_of(records) == [(128, 0, 1186.64), (128, 64, 41.57)]
    assert len(skipped) == 1 and "line 6 skipped: 4 sequences" in skipped[0]
    settings = records[0].settings
    assert (settings.n_batch, settings.n_ubatch, settings.n_threads, settings.flash_attn) == (1024, 256, 8, "on")
    sweep = "| PP | TG | N_KV | S_PP t/s | S_TG t/s |\n|-|-|-|-|-|\n| 512 | 128 | 1024 | 512 | 32 |"
    records, skipped = read(tmp_path, sweep, device="RTX 1234", model="llama 7B Q4_0")
    assert figures_of(records) == [(1024, 128, 32.0)] and "does not begin at position 0" in skipped[0]


def as_html(text: str) -> str:
    rows = [line.strip("| ").split("|") for line in text.splitlines() if line.startswith("|") and "--" not in line]
    cells = "".join(
        "<tr>\n" + "".join(f"<td align=right><b>{html.escape(c)}</b></td>" for c in row) + "</tr>\n" for row in rows
    )
    return f"{text.partition('|')[0]}<table>{cells}</table>\n\nbuild: 0abc123 (5678)"


AS_PASTED: dict[str, Callable[[str], str | bytes]] = {
    "windows": lambda text: text.replace("\n", "\r\n"),
    "powershell": lambda text: text.encode("utf-16"),
    "mojibake": lambda text: text.replace("±", "Â±"),
    "dashes": lambda text: text.replace("| --", "| ––").replace("@ d", "@ d"),
    "html": as_html,
    "tabs": lambda text: "\n".join(
        line.strip("| ").replace("|", "\t") for line in text.splitlines() if "--" not in line
    ),
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    "thousands": lambda text: text.replace("2345.67", "2,345.67"),
    "decimal comma": lambda text: text.replace("2345.67", "2.345,67").replace("78.90", "78,90"),
    "units": lambda text: text.replace("78.90 ± 0.12", "78.90 ± 0.12 tok/s").replace("61.20 ± 0.34", "61.20 t/s"),
    "colours": lambda text: text.replace("78.90", "\x1b[32m78.90\x1b[0m"),
}


@pytest.mark.parametrize("how", AS_PASTED)
def test_however_it_was_pasted(tmp_path: Path, how: str) -> None:
    records, _ = read(tmp_path, AS_PASTED[how](LLAMA_BENCH))
    assert figures_of(records) == [(512, 0, 2345.67), (1, 128, 78.9), (4096, 128, 61.2)]
    assert {record.machine.llama_cpp_commit for record in records} == {"0abc123"}
    assert {record.machine.devices[0].description for record in records} == {"NVIDIA GeForce RTX 1234"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("What is the fastest card? a | b, or c?", "no result that the lab can read"),
        (
            "| name | price |\n| --- | --- |\n| RTX 1234 | 500 |",
            "Line 1: an unknown kind of table (columns: name, price)",
        ),
        (
            "| model | test | t/s |\n| - | - | - |\n| llama 7B Q4_0 | pp512 | fast |",
            "Line 3 skipped: 'fast' is not a rate",
        ),
        (
            "| model | test | t/s |\n| - | - | - |\n| llama 7B Q4_0 | reads | 12.0 |",
            "Line 3 skipped: 'reads' is not a test",
        ),
        (
            "| model | test | t/s |\n| - | - | - |\n| llama 7B Q4_0 | pp512 | 0.00 |",
            "Line 3 skipped: '0.00' is not a rate above",
        ),
        ("| model | test | t/s |\n| - | - | - |\n| llama 7B Q4_0 | 12.0 |", "Line 3 skipped: it has 2 columns"),
    ],
)
def test_bad_input_gets_its_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LabError, match=r"post\.txt") as problem:
        read(tmp_path, text)
    assert said in str(problem.value)


def test_a_pipe_in_the_text_is_not_a_row(tmp_path: Path) -> None:
    _, skipped = read(tmp_path, LLAMA_BENCH + "\nRun as ./llama-bench -fa 1 | tee log.txt, or ask | me.\n")
    assert [sentence.split(":")[0] for sentence in skipped] == ["line 11 skipped", "line 13 skipped"]


def test_a_table_of_another_tool_does_not_hide_the_others(tmp_path: Path) -> None:
    prices = "| name | price | shop | x | y | z | a | b |\n|-|-|-|-|-|-|-|-|\n| RTX | 5 | 1 | 1 | 1 | 1 | 1 | 1 |\n\n"
    records, skipped = read(tmp_path, LLAMA_BENCH + "\n" + prices + LLAMA_BENCH)
    assert len(records) == 6 and sum("an unknown kind of table" in sentence for sentence in skipped) == 1


WORDS = {"n_batch": (256, 2048), "n_ubatch": (128, 512), "fa": (0, 1), "sm": ("row", "layer"), "mmap": (0, 1)}


@pytest.mark.parametrize("seed", range(40))
def test_printed_figures_are_read_again(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    wanted: list[tuple[int, int, float]] = []
    options = draw.sample(sorted(WORDS), draw.randint(0, len(WORDS)))
    lines = []

    def number(value: float) -> str:
        words = draw.choice((f"{value:.2f}", f"{value:,.2f}"))
        return words + draw.choice(("", " ± 0.25", " ± 12.00", " t/s", " ± 1.50 t/s"))

    def add(*cells: object) -> None:
        pad = " " * draw.randint(0, 3)
        lines.append("|" + "|".join(f"{pad} {cell} " for cell in cells) + "|")
        if len(lines) == 1:
            add(*["---"] * len(cells))

    kind = draw.choice(("llama-bench", "scoreboard", "localscore", "batched"))
    rates = [(round(draw.uniform(0.5, 20_000), 2), round(draw.uniform(0.5, 900), 2)) for _ in range(draw.randint(1, 6))]
    n_prompt, n_gen, depth = draw.randint(1, 9999), draw.randint(1, 999), draw.choice((0, draw.randint(1, 9999)))
    if kind == "llama-bench":
        add("model", "size", "params", "backend", "ngl", *options, "test", "t/s")
        for prefill, decode in rates:
            facts = ["llama 8B Q4_K - Medium", "4.58 GiB", "8.03 B", "Vulkan", 99]
            facts += [draw.choice(WORDS[name]) for name in options]
            add(*facts, f"pp{n_prompt}", number(prefill))
            add(*facts, f"tg{n_gen}{f' @ d{depth}' if depth else ''}", number(decode))
            wanted += [(n_prompt, 0, prefill), (depth or 1, n_gen, decode)]
    elif kind == "scoreboard":
        others = draw.sample(["Memory", "Commit", "Thanks to"], draw.randint(0, 3))
        add("Chip", *others, f"pp{n_prompt} t/s", f"tg{n_gen} t/s")
        for prefill, decode in rates:
            add("Chip 7", *others, number(prefill), number(decode))
            wanted += [(n_prompt, 0, prefill), (1, n_gen, decode)]
    elif kind == "localscore":
        add("test", "run number", "pp t/s", "tg t/s", *draw.sample(["ttft", "power"], draw.randint(0, 2)))
        for prefill, decode in rates:
            add(
                f"pp{n_prompt}+tg{n_gen}", "1/1", number(prefill), number(decode), *["5 ms"] * (lines[0].count("|") - 5)
            )
            wanted += [(n_prompt, 0, prefill), (n_prompt, n_gen, decode)]
    else:
        add("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s")
        for prefill, decode in rates:
            add(n_prompt, n_gen, 1, n_prompt + n_gen, 1, f"{prefill:.2f}", 1, f"{decode:.2f}")
            wanted += [(n_prompt, 0, prefill), (n_prompt, n_gen, decode)]
    text = "\n".join(["Look at this:", "", *lines, "", "Fine."])
    records, skipped = read(tmp_path, text, device="RTX 1234", model="llama 8B Q4_0")
    assert skipped == [] and [found[:2] for found in figures_of(records)] == [one[:2] for one in wanted]
    for (*_, found), (*_, rate) in zip(figures_of(records), wanted, strict=True):
        assert found == pytest.approx(rate, rel=1e-4, abs=0.006)


def test_no_text_ends_in_anything_but_a_sentence(tmp_path: Path) -> None:
    draw = random.Random(7)
    texts = [LLAMA_BENCH, CUDA_SCOREBOARD, APPLE_SCOREBOARD, LOCALSCORE, BATCHED]
    for _ in range(300):
        letters = list(draw.choice(texts))
        for _ in range(draw.randint(1, 30)):
            letters[draw.randrange(len(letters))] = draw.choice("| \t\n-0,.±<>&ab[](){}\x00\u2014")
        try:
            records, _ = read(tmp_path, "".join(letters))
        except LabError:
            continue
        assert records and all(rate > 0 for *_, rate in figures_of(records))


@pytest.mark.parametrize("piece", ["<tr", "<tr>", "<sup>", "[", "| <", "Device 0: ", "|", "\t", "a", "1,"])
def test_a_hostile_text_takes_no_longer_than_a_long_one(piece: str) -> None:
    assert pasted_tables.read(piece * 30_000)[0] == []  # a pattern that tries every start would take minutes


def test_the_command_reads_stdin_and_every_table_says_whose_times_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(LLAMA_BENCH.encode())))
    code, out, err = run_lab("import", "-", "-o", tmp_path)
    assert code == 0 and "imported-pasted.jsonl  3 samples" in out and "line 11 skipped" in err
    scoreboard = tmp_path / "board.md"
    scoreboard.write_text(CUDA_SCOREBOARD)
    assert run_lab("import", scoreboard, "-o", tmp_path)[0] == 0
    for command in ("show", "compare"):
        code, out, err = run_lab(command, tmp_path)
        words = " ".join(out.split())
        assert code == 0 and "All results were imported: measured by" in words, err
        if command == "show":
            assert "only prefill;" in words and "128 tokens decoded per run;" in words and "generated" not in words
    code, _, err = run_lab("plot", tmp_path)
    assert code == 0 and "All results were imported" in err
    assert run_lab("report", tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "unknown date" in page and "99 layers on GPUs" in page and not re.search(r"-1 (threads|layers)", page)
    rows = lab.runs(lab.read([tmp_path]).records)
    assert rows.n_threads.isna().all() and set(rows.n_gpu_layers.dropna()) == {99} and rows.n_gpu_layers.isna().any()
    assert run_lab("export", tmp_path, "--as", "md")[0] == 0


def test_equal_results_of_two_devices_are_two_results(tmp_path: Path) -> None:
    records, _ = read(
        tmp_path, "| Chip | pp512 t/s |\n|-|-|\n| A 1 | 100.00 |\n| A 2 | 100.00 |\n", model="llama 7B Q4_0"
    )
    results.append(tmp_path / "both.jsonl", *records)
    assert len(results.read([tmp_path / "both.jsonl"]).records) == 2


def test_imported_results_are_published_rows_of_a_board_and_never_this_machine(tmp_path: Path) -> None:
    records, _ = read(tmp_path, LLAMA_BENCH)
    (off, _), (on, _) = board_page.measured_rows(records)
    assert (off.kind, off.device, on.prefill) == (board_page.PUBLISHED, "NVIDIA GeForce RTX 1234 (imported)", None)
    assert off.prefill is not None and off.prefill.value == pytest.approx(2345.67)
    assert off.decode is not None and off.decode.value == pytest.approx(78.9)
    one = records[0]
    assert candidates._measured(records, one.model, machine.label(one.machine, one.settings), 512) is None


def test_numbers() -> None:
    written = {"1,234.5": 1234.5, "1 234": 1234, "12,5": 12.5, "1.234,5": 1234.5, "12": 12, "1,234,567": 1234567}
    assert {words: pasted_tables._number(words) for words in written} == written
    for words in ("", "-5", "1.2.3", "1e3", "about 12", "12,", "nan"):
        with pytest.raises(ValueError, match="is not a number"):
            pasted_tables._number(words)
