"""What a text says of a setup is read, and what it does not say is neither equal nor invented."""
# ruff: noqa: E501 (samples are as programs print them)

import textwrap
from typing import Any

import pytest

from lab.errors import LabError
from lab.features.why import facts, pairing
from lab.features.why.answer import WhyAnswer, answer
from lab.features.why.conclusion import asked_by_sides, conclude, questions
from lab.features.why.figure import DECODE, PREFILL, Figure
from lab.features.why.parts import EQUAL, NOT_KNOWN, GapPart
from lab.features.why.readers import commands, text as reader
from lab.features.why.section import section, sentences
from tests.support.command import run_lab
from tests.support.pasted import BY_HAND, PRINTED

CLI = """\
llama_perf_context_print: prompt eval time =    2000.00 ms /  4000 tokens (    0.50 ms per token,  2000.00 tokens per second)
llama_perf_context_print:        eval time =    9950.00 ms /   199 runs   (   50.00 ms per token,    20.00 tokens per second)
"""
SLOWER = """\
llama_perf_context_print: prompt eval time =    4000.00 ms /  4000 tokens (    1.00 ms per token,  1000.00 tokens per second)
llama_perf_context_print:        eval time =   19900.00 ms /   199 runs   (  100.00 ms per token,    10.00 tokens per second)
"""
WINDOW = "INFO 05-05 05:05:{} [loggers.py:9] Engine 000: Avg prompt throughput: {} tokens/s, Avg generation throughput: {} tokens/s, Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%\n"
BENCH = "| model | size | params | backend | ngl | {} | test | t/s |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n| tiny 2B Q4_0 | 1.10 GiB | 2.00 B | CUDA | 99 | {} | tg64 | {} \u00b1 0.10 |\n\nbuild: {} ({})\n"


def decode_of(text: str) -> Figure:
    """The first decode figure of a text."""
    return next(figure for figure in reader.parse(text) if figure.phase == DECODE)


def values(figure: Figure) -> dict[str, Any]:
    return {name: fact.value for name, fact in figure.facts.items()}


def why_of(a: str, b: str, prefill: bool = False) -> WhyAnswer:
    """The answer on two texts."""
    return answer(*pairing.nearest(reader.parse(a), reader.parse(b), prefill))


def part(explained: WhyAnswer, name: str) -> GapPart:
    return next(each for each in explained.parts if each.name == name)


COMMAND_LINES = [
    (
        "./llama-cli -m /m/tiny-2B-Q4_0.gguf -ngl 12 -t 6 -fa",
        {"model": "tiny-2B-Q4_0", "n_gpu_layers": 12, "threads": 6, "flash_attn": "on"},
    ),
    (
        "$ llama-server -hf someone/Tiny-2B-GGUF:Q8_0 -ctk q8_0 -ub 256",
        {
            "model": "Tiny-2B-GGUF",
            "quantization": "Q8_0",
            "cache_type_k": "q8_0",
            "cache_type_v": "f16",
            "ubatch": 256,
        },
    ),
    (
        "> > user@host:~$ llama-server --model x-7B-Q5_K_M.gguf --n-gpu-layers=20 \\\n> >   --flash-attn off --no-mmap",
        {"model": "x-7B-Q5_K_M", "n_gpu_layers": 20, "flash_attn": "off", "mmap": False},
    ),
    (
        "PS C:\\ai> .\\llama-bench.exe -m C:\\models\\x-7B-Q5_K_M.gguf -t 4 -p 64,128",
        {"model": "x-7B-Q5_K_M", "threads": 4},
    ),
    (
        'services:\n  llm:\n    image: ghcr.io/ggml-org/llama.cpp:server-cuda\n    command:\n      - "-m"\n      - "/models/x-7B-Q5_K_M.gguf"\n      - "-ngl"\n      - "7"\n      - --flash-attn\n      - "on"\n',
        {"model": "x-7B-Q5_K_M", "n_gpu_layers": 7, "flash_attn": "on"},
    ),
    (
        '    command: ["--model", "/models/x-7B.gguf", "-t", "3"]',
        {"model": "x-7B", "threads": 3},
    ),
    (
        "    command: >\n      --model /models/x-7B.gguf\n      -t 3",
        {"model": "x-7B", "threads": 3},
    ),
    (
        "docker run --gpus all -v /m:/m ghcr.io/ggml-org/llama.cpp:server-cuda -m /m/x-7B.gguf -ngl 8",
        {"model": "x-7B", "n_gpu_layers": 8},
    ),
    ("I run it with -ngl 30 -fa off here:", {"n_gpu_layers": 30, "flash_attn": "off"}),
    (
        "ExecStart=/opt/llama.cpp/llama-server -m /m/x-7B.gguf -c 4096 -np 2",
        {"model": "x-7B", "n_ctx": 4096, "parallel": 2},
    ),
    (
        "vllm serve org/X-7B-AWQ --tensor-parallel-size 2 --max-model-len 4096",
        {"model": "X-7B-AWQ", "quantization": "AWQ", "tensor-parallel-size": 2, "n_ctx": 4096},
    ),
    (
        "python3 -m sglang.launch_server --model-path org/X-7B --tp 2",
        {"model": "X-7B", "tensor-parallel-size": 2},
    ),
    (
        "ollama run llama9:7b-q4_0 --verbose",
        {"model": "llama9:7b-q4_0", "quantization": "q4_0"},
    ),
    (
        "python koboldcpp.py --model x-7B.gguf --gpulayers 9 --flashattention --quantkv 1",
        {"model": "x-7B", "n_gpu_layers": 9, "flash_attn": "on", "cache_type_k": "q8_0"},
    ),
    (
        "mlx_lm.generate --model org/X-7B-4bit --temp 0.5",
        {"model": "X-7B-4bit", "sampling": "temp 0.5"},
    ),
    (
        "OLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve",
        {"flash_attn": "on", "cache_type_k": "q8_0"},
    ),
    ("      - LLAMA_ARG_N_GPU_LAYERS=5", {"n_gpu_layers": 5}),
    (
        "llama-server -m x-7B.gguf -md y-1B.gguf --draft-max 8",
        {"model": "x-7B", "speculation": "drafts"},
    ),
    (
        'llama-server -m x-7B.gguf -ot "exps=CPU" --n-cpu-moe 3',
        {"override_tensor": "exps=CPU", "n_cpu_moe": 3},
    ),
]


@pytest.mark.parametrize(("text", "expected"), COMMAND_LINES)
def test_a_command_gives_model_and_settings(text: str, expected: dict[str, Any]) -> None:
    read: dict[str, Any] = {}
    for command in commands.commands(text):
        read |= {name: fact.value for name, fact in command.facts.items()}
    assert {name: read.get(name) for name in expected} == expected


ORDINARY = [
    "Is this normal for my card?",
    "the llama-server log is below",
    "- prompt: 512 tokens",
    "I use ollama run daily",
    "| model | size | params |",
    "--- snip ---",
    "slot print_timing: id  0 | task 0 |",
    "koboldcpp is slow",
    "https://github.com/ggml-org/llama.cpp/issues/1",
    "vllm serve is what I use",
    "temperature 0.7, top_k 40",
    "-- ",
    "* one",
    "- two",
    "2 - 3 = -1",
    'INFO:     127.0.0.1 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    "GPU: RTX 3090",
    "Thanks!",
    "> quoted",
    "command not found",
    "args: none",
    "image: a cat",
    "srv  update_slots: all slots are idle",
    "eval time = 100 ms",
    "model: qwen",
    "main: server is listening",
]


def test_a_hundred_ordinary_lines_are_no_commands() -> None:
    lines = [
        f"{before}{line}" for line in ORDINARY for before in ("", "  ", "> ", "llm-1  | ")
    ]
    assert len(lines) >= 100
    for line in lines:
        assert list(commands.commands(line)) == [], line


def test_the_nearest_command_before_a_figure_is_its_command() -> None:
    text = f"./llama-cli -m a-7B.gguf -ngl 5\n{CLI}\n./llama-cli -m b-7B.gguf -ngl 6\n{SLOWER}"
    decodes = [figure for figure in reader.parse(text) if figure.phase == DECODE]
    assert [figure.model for figure in decodes] == ["a-7B", "b-7B"]
    below = decode_of(f"{CLI}\nthe command: ./llama-cli -m c-7B.gguf -ngl 7")
    assert below.model == "c-7B"


def test_settings_of_two_commands_are_compared() -> None:
    a = f"./llama-cli -m x-7B.gguf -ngl 99 -t 4\n{CLI}"
    b = f"./llama-cli -m x-7B.gguf -ngl 20 -ctk q8_0 -fa -t 4\n{SLOWER}"
    explained = why_of(a, b)
    assert part(explained, "model").how.startswith(EQUAL)
    assert part(explained, "GPU layers").reason.startswith("n_gpu_layers 99 in A, 20 in B")
    cache = part(explained, "cache type").reason
    assert cache.startswith("cache_type_k f16 by default in A, q8_0 in B")
    flash = part(explained, "flash attention").reason
    assert flash == "flash_attn on in B, not named in A's command"
    assert all("threads" not in each.reason for each in explained.parts)
    sentence = conclude(explained).sentence
    assert "The likely causes are n_gpu_layers 99 in A, 20 in B; cache_type_k f16" in sentence
    assert sentence.endswith("flash_attn on in B, not named in A's command: not measured.")


def test_unknown_on_both_sides_is_not_equal() -> None:
    explained = why_of(CLI, SLOWER)
    for name in ("model", "machine", "program and build", "speculation", "more settings"):
        assert part(explained, name).how == NOT_KNOWN
        assert "not given for A and B" in part(explained, name).reason
    asked = questions(asked_by_sides(explained))
    assert asked.startswith("Ask about A and B: Which model file")


def test_one_side_that_gives_a_fact_is_named() -> None:
    explained = why_of("30 t/s", BENCH.format("fa", "1", "90.00", "abcdef01", "7000"))
    assert part(explained, "model").reason == "tiny 2B Q4_0 in B, not given for A"
    lines = " ".join(sentences(explained, details=False))
    assert "not given for both" not in lines
    assert "model" in lines[lines.index("Ask about") :]


def test_columns_and_builds_of_llama_bench_are_differences() -> None:
    a = BENCH.format("dev", "CUDA0", "90.00", "abcdef01", "7000")
    b = BENCH.format("dev", "CUDA0/CUDA1", "30.00", "abcdef02", "7100")
    explained = why_of(a, b)
    assert part(explained, "other settings").reason == "device CUDA0 in A, CUDA0/CUDA1 in B"
    assert part(explained, "program and build").reason == "7000 in A, 7100 in B"
    assert conclude(explained).command == ""
    for head, name in (
        ("ts", "tensor_split"),
        ("ncmoe", "n_cpu_moe"),
        ("ot", "override_tensor"),
    ):
        assert name in values(decode_of(BENCH.format(head, "1", "9.00", "abcdef01", "1")))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "  Device 0: NVIDIA GeForce RTX 3080, compute capability 8.6, VMM: yes\n",
            {"hardware": "NVIDIA GeForce RTX 3080"},
        ),
        (
            "using device CUDA0 (NVIDIA GeForce RTX 3080) (0000:01:00.0) - 9000 MiB free\n",
            {"hardware": "NVIDIA GeForce RTX 3080"},
        ),
        ("print: |   - CUDA0 (RTX 3080)   | 10000 = 1 |\n", {"hardware": "RTX 3080"}),
        (
            "  - CUDA0   : NVIDIA GeForce RTX 3080 (10239 MiB, 9000 MiB free)\n",
            {"hardware": "NVIDIA GeForce RTX 3080"},
        ),
        ("GPU: RTX 3080\n", {"hardware": "RTX 3080"}),
        ("build: 4321 (abcdef01) with gcc\n", {"build": "4321"}),
        ("version: 4321 (abcdef01)\n", {"build": "4321"}),
        ("build_info: b4321-abcdef01\n", {"build": "4321"}),
        ("load_tensors: offloaded 10/33 layers to GPU\n", {"n_gpu_layers": 10}),
        ("llama_context: flash_attn    = disabled\n", {"flash_attn": "off"}),
    ],
)
def test_a_log_gives_device_build_and_settings(line: str, expected: dict[str, Any]) -> None:
    assert expected.items() <= values(decode_of(line + CLI)).items()


@pytest.mark.parametrize(
    ("image", "build"),
    [
        ("vllm/vllm-openai:v0.12.3", "0.12.3"),
        ("vllm/vllm-openai:0.9.0.1", "0.9.0.1"),
        ("vllm/vllm-openai:latest", None),
        ("docker.io/vllm/vllm-openai:v0.12.3-aarch64", "0.12.3-aarch64"),
        ("vllm/vllm-openai", None),
    ],
)
def test_the_image_of_a_server_says_its_build(image: str, build: str | None) -> None:
    text = f"    image: {image}\n    command: --model acme/Tiny-9B\n"
    figure = decode_of(text + WINDOW.format(10, "0.0", "50.0", 1))
    assert values(figure).get("build") == build
    assert figure.model == "Tiny-9B"


def test_a_build_below_a_table_is_of_that_table() -> None:
    first = BENCH.format("fa", "1", "90.00", "abcdef01", "7000")
    second = BENCH.format("fa", "1", "30.00", "abcdef02", "7100")
    read = reader.parse(f"{first}\n{second}")
    assert [values(figure)["build"] for figure in read] == ["7000", "7100"]


def test_an_answer_in_json_names_its_model() -> None:
    figure = decode_of(
        '{"model":"x-7B-Q4_0.gguf","timings":{"predicted_n":9,"predicted_ms":80.0}}'
    )
    assert figure.model == "x-7B-Q4_0"


def test_devices_of_one_name_are_counted() -> None:
    line = "  Device {}: Some GPU 9, compute capability 8.6, VMM: yes\n"
    figure = decode_of(line.format(0) + line.format(1) + CLI)
    assert figure.device == "2x Some GPU 9"


def test_ollama_ps_gives_model_id_and_placement() -> None:
    rate = "eval count: 200 token(s)\neval duration: {}s\neval rate: {} tokens/s\n"
    row = "NAME  ID  SIZE  PROCESSOR  UNTIL\nsome:7b    0123456789ab    9.9 GB   {}    4 minutes from now\n"
    a = rate.format(10, "20.00") + row.format("30%/70% CPU/GPU")
    b = rate.format(4, "50.00") + row.format("100% GPU")
    explained = why_of(a, b)
    assert part(explained, "model").how == "equal by ID"
    assert "placement 30%/70% CPU/GPU in A, 100% GPU in B" in (
        part(explained, "other settings").reason
    )


def test_windows_of_decode_alone_count_as_their_mean() -> None:
    log = "".join(
        WINDOW.format(second, *rest)
        for second, rest in (
            (10, ("300.0", "7.0", 1)),
            (20, ("0.0", "50.0", 1)),
            (30, ("0.0", "52.0", 1)),
            (40, ("0.0", "11.0", 0)),
        )
    )
    (figure,) = reader.parse(log)
    assert figure.tps == 51
    assert (figure.about, figure.n_streams, figure.weakness) == ("2 windows", 1, "")
    (mixed,) = reader.parse(WINDOW.format(10, "300.0", "7.0", 1))
    assert mixed.weakness == "with prefill in it"
    explained = answer(figure, mixed)
    assert conclude(explained).sentence.startswith("No conclusion: B is the average")


def test_a_sum_is_compared_by_the_answer() -> None:
    explained = why_of(
        WINDOW.format(10, "0.0", "120.0", 4), WINDOW.format(10, "0.0", "40.0", 1)
    )
    assert explained.pair.letters == ("B", "A")
    assert explained.ratio == pytest.approx(40 / 30)
    assert explained.notes[0] == "A sums up 4 answers, 30.0 tokens/s each (120 together)"


def test_tokens_of_a_step_are_a_factor() -> None:
    log = (
        "slot print_timing: id  0 | task 1 | eval time =   {}.00 ms /   100 tokens (   {} ms per token,    {} tokens per second)\n"
        "slot print_timing: id  0 | task 1 | draft acceptance = 0.5 ( {} accepted / 100 generated), mean len = {}\n"
    )
    a = log.format(1980, "20.00", "50.00", 60, "2.50")
    b = log.format(3960, "40.00", "25.00", 20, "1.25")
    explained = why_of(a, b)
    # prefill gave the first of 100 tokens: 99 in 39 steps, and 99 in 79
    assert part(explained, "speculation").factor == pytest.approx(79 / 39)
    assert explained.rest.factor == pytest.approx(1, abs=0.02)
    assert explained.causes[0].name == "speculation"
    spec = "INFO 05-05 05:05:10 [metrics.py:9] SpecDecoding metrics: Mean acceptance length: 2.40, Accepted throughput: 35.00 tokens/s, Drafted throughput: 50.00 tokens/s, Accepted: 350 tokens, Drafted: 500 tokens, Avg Draft acceptance rate: 70.0%\n"
    (figure,) = reader.parse(WINDOW.format(10, "0.0", "60.0", 1) + spec)
    assert (figure.tokens_per_step, figure.accepted, figure.drafted) == (2.4, 350, 500)


def test_prefill_has_sizes_and_no_drafts() -> None:
    line = "slot print_timing: id  0 | task 1 | prompt eval time =   {}.00 ms /   {} tokens (   1.00 ms per token,    {} tokens per second)\n"
    end = "slot      release: id  0 | task 1 | stop processing: n_tokens = {}, truncated = 0\n"
    a = line.format(3000, 300, "100.00") + end.format(9000)
    b = line.format(3000, 3000, "1000.00") + end.format(9000)
    explained = why_of(a, b, prefill=True)
    names = [each.name for each in explained.parts]
    assert "speculation" not in names
    assert "sampling" not in names
    assert "A 300 new tokens" in part(explained, "length").reason
    assert "B 3,000 new tokens" in part(explained, "length").reason


FORMATS: list[tuple[str, list[tuple[str, float, int | None, int | None]]]] = [
    (
        "slot print_timing: id  0 | task 7 | n_decoded =    100, tg =  20.00 t/s, tg_3s =  20.00 t/s\nslot print_timing: id  0 | task 7 | n_decoded =    160, tg =  17.00 t/s, tg_3s =  9.00 t/s\n",
        [(DECODE, 17, 160, None)],
    ),
    (
        "CtxLimit:500/4096, Init:0.10s, Processed:300 in 1.00s (300.00T/s), Generated:200/512 in 8.00s (25.00T/s), Total:9.10s\n",
        [(PREFILL, 300, 200, 0), (DECODE, 25, 200, 300)],
    ),
    (
        "INFO:  Metrics: 100 tokens generated in 6.0 seconds (Queue: 0.0 s, Process: 500.0 T/s, Generate: 25.0 T/s, Context: 1000 tokens)\n",
        [(PREFILL, 500, 100, 0), (DECODE, 25, 100, 1000)],
    ),
    (
        "[2026-02-01 10:00:00] Decode batch, #running-req: 2, #token: 3000, token usage: 0.05, cuda graph: True, gen throughput (token/s): 90.00, #queue-req: 0, \n",
        [(DECODE, 90, None, 1500)],
    ),
    (
        "Time | Cached | Prompt | Generated | Prompt Speed | Gen Speed | Duration\n-- | -- | -- | -- | -- | -- | --\nnow | 2,000 | 500 | 80 | 250.00 t/s | 16.00 t/s | 7.00s |\n",
        [(PREFILL, 250, 80, 2000), (DECODE, 16, 80, 2500)],
    ),
    (
        "| model | test | t/s | peak t/s | ttfr (ms) | est_ppt (ms) | e2e_ttft (ms) |\n|:--|--:|--:|--:|--:|--:|--:|\n| m | pp400 @ d600 | 500.00 ± 5.00 | | 2010.00 ± 2.00 | 2000.00 ± 2.00 | 2010.00 ± 2.00 |\n| m | tg32 @ d600 | 33.00 ± 1.00 | 34.00 ± 1.00 | | | |\n",
        [(PREFILL, 500, None, 0), (DECODE, 33, 32, 1000)],
    ),
]


@pytest.mark.parametrize(("text", "expected"), FORMATS)
def test_newer_formats(
    text: str, expected: list[tuple[str, float, int | None, int | None]]
) -> None:
    read = [(each.phase, each.tps, each.n_gen, each.depth) for each in reader.parse(text)]
    assert read == expected


def test_a_cached_prompt_and_a_single_token_have_no_rate() -> None:
    cached, decode = reader.parse(
        "Metrics: 200 tokens generated in 8.01 seconds (Queue: 0.0 s, Process: 90000.0 T/s, Generate: 25.0 T/s, Context: 1000 tokens)\n"
    )
    assert not cached.is_rate
    assert decode.is_rate
    one = "Metrics (ID: 0a): 1 tokens generated in 2.05 seconds (Queue: 0.0 s, Process: 0 cached tokens and 1000 new tokens at 500.0 T/s, Generate: 20.0 T/s)\n"
    with pytest.raises(LabError, match="a single token: no decode rate"):
        why_of("22 t/s", one)
    explained = why_of("400 t/s", one, prefill=True)
    assert explained.pair.fast.n_prompt == 1000


def test_a_depth_that_is_only_a_bound_chooses_the_row() -> None:
    log = "prompt eval time = 1000.00 ms / 2000 tokens ( 0.50 ms per token, 2000.00 tokens per second)\neval time = 9950.00 ms / 200 tokens ( 49.75 ms per token, 20.10 tokens per second)\n"
    table = "| PP | TG | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s |\n|--|--|--|--|--|--|--|\n| 1024 | 256 | 0 | 1.000 | 1024.00 | 5.120 | 50.00 |\n| 1024 | 256 | 2048 | 1.100 | 930.91 | 12.800 | 20.00 |\n"
    assert why_of(log, table).pair.slow.depth == 2048


def test_slow_samplers_are_told_beside_the_rate() -> None:
    sampled = "llama_print_timings:      sample time =    2000.00 ms /   200 runs   (   10.00 ms per token,   100.00 tokens per second)\n"
    (note,) = why_of(CLI, sampled + CLI).notes
    assert note.startswith("B spent 10.0 ms more on choosing each token")


def test_a_refusal_quotes_what_looks_like_a_rate() -> None:
    cut = "| model | size | test | t/s |\n| --- | --- | --- | --- |\n| tiny | 1 GiB\n"
    with pytest.raises(LabError, match="Line 3 is cut: it has 3 columns"):
        reader.parse(cut)
    with pytest.raises(LabError, match=r"Line 2 is not in a known layout.*150-160 tok/sec"):
        reader.parse("I get\nspeed: 150-160 tok/sec\n")
    with pytest.raises(LabError, match=r"Line 2 has a rate in a sentence") as refused:
        reader.parse("I get\nabout 150-160 tok/sec here\n")
    assert "lab why '160 t/s' B" in (refused.value.hint or "")


def test_what_was_read_is_printed_without_a_second_side() -> None:
    code, out, err = run_lab("why", "docs/pasted-llama-server.txt", "--read")
    assert code == 0, err
    assert "SmolLM2-135M-Instruct.Q4_1 (line 1)" in " ".join(out.split())
    code, _, err = run_lab("why", "--url", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 is one side, and lab why compares two" in err
    assert "lab measure --url http://127.0.0.1:9" in err


@pytest.mark.parametrize(
    "names", [("http://127.0.0.1:9", "30 t/s"), ("30 t/s", "http://127.0.0.1:9")]
)
def test_a_server_is_named_on_either_side(names: tuple[str, str]) -> None:
    code, _, err = run_lab("why", *names, "--yes")
    assert code
    assert "No server answers at http://127.0.0.1:9" in err
    code, _, err = run_lab("why", *names, "--read")
    assert code
    assert "a server is measured" in err


PYTHON_SETTINGS = [
    (
        "INFO 01-02 03:04:05 [utils.py:2] non-default args: {'model_tag': 'x', 'model': 'acme/Tiny-9B-AWQ', 'max_model_len': 9000, 'tensor_parallel_size': 2, 'enforce_eager': True}",
        {
            "model": "Tiny-9B-AWQ",
            "quantization": "AWQ",
            "n_ctx": 9000,
            "tensor-parallel-size": 2,
            "enforce-eager": "on",
        },
    ),
    (
        "non-default args: {'model': 'acme/Tiny-9B', 'kv_cache_dtype': 'fp8', 'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 3}}",
        {"model": "Tiny-9B", "kv-cache-dtype": "fp8", "speculation": "drafts"},
    ),
    (
        "INFO 01-02 03:04:05 api_server.py:9] args: Namespace(host=None, port=8000, model='/m/tiny-9b/', tokenizer=None, dtype='bfloat16', max_num_seqs=64, swap_space=4, quantization=None, enable_prefix_caching=False)",
        {
            "model": "tiny-9b",
            "dtype": "bfloat16",
            "parallel": 64,
            "quantization": None,
            "speculation": "no drafts",
        },
    ),
    (
        "[2026-01-02] server_args=ServerArgs(model_path='acme/Tiny-9B', tp_size=4, dtype='auto', disable_cuda_graph=True)",
        {
            "model": "Tiny-9B",
            "tensor-parallel-size": 4,
            "dtype": None,
            "disable-cuda-graph": "on",
        },
    ),
    (
        "INFO args: Namespace(model='acme/Tiny-9B-GPTQ', served_model_name='mine', pipeline_parallel_size=2, speculative_model=None)",
        {"model": "Tiny-9B-GPTQ", "pipeline-parallel-size": 2, "speculation": "no drafts"},
    ),
]


@pytest.mark.parametrize(("line", "expected"), PYTHON_SETTINGS)
def test_settings_as_python_writes_them(line: str, expected: dict[str, Any]) -> None:
    (command,) = commands.commands(line)
    assert {name: facts.value_of(command.facts, name) for name in expected} == expected


CSV = "Timestamp,Backend,Layers,Model,MaxCtx,GenAmount,ProcessingTime,ProcessingSpeed,GenerationTime,GenerationSpeed,TotalTime,Output,Flags\n"


@pytest.mark.parametrize(
    ("row", "depth"),
    [
        (
            "2026-01-02 03:04:05.6+00:00,koboldcpp_cublas.dll,33,tiny-9b.q6_k,4096,100,20.00,199.80,5.00,20.00,25.00,11111,NoAVX2=False Threads=6 KvCache=1\n",
            3996,
        ),
        (
            "2026-01-02 03:04:05.6+00:00,koboldcpp_cublas.dll,33,tiny-9b.q6_k,4096,100,20.00,199.80,5.00,20.00,25.00\n",
            None,
        ),
        (
            "2026-01-02 03:04:05.6+00:00,koboldcpp_default.so,33,tiny-9b.q6_k,4096,100,20.00,199.80,5.00,20.00,25.00,1 1 1 1\n",
            3996,
        ),
        (
            "2026-01-02 03:04:05.6+00:00,koboldcpp_vulkan.dll,33,tiny-9b.q6_k,4096,100,20.00,199.80,5.00,20.00,25.00,Once upon\n",
            None,
        ),
    ],
)
def test_the_file_of_koboldcpps_benchmark(row: str, depth: int | None) -> None:
    for text in (CSV + row, row):
        prefill, decode = reader.parse(text)
        assert (prefill.tps, decode.tps, decode.n_gen, decode.depth) == (199.8, 20, 100, depth)
        assert (decode.model, values(decode)["n_gpu_layers"]) == ("tiny-9b.q6_k", 33)
    if "Threads" in row:
        assert (values(decode)["threads"], values(decode)["cache_type_v"]) == (6, "q8_0")


def test_the_time_per_token_of_old_koboldcpp_says_how_many_there_were() -> None:
    text = (
        "Processing Prompt [BLAS] (1200 / 1200 tokens)\nGenerating (1020 / 1024 tokens)\n"
        "ContextLimit: 1260/16384, Processing:48.00s (40.0ms/T)\nGeneration:18.00s (300.0ms/T), Total:66.00s (0.91T/s)\n"
    )
    prefill, decode, _ = reader.parse(text)
    assert prefill.tps == 25
    assert decode.tps == pytest.approx(1 / 0.3)
    assert (decode.n_gen, decode.depth) == (60, 1200)


MODEL_AT_DEPTH = "llama-server -m /m/Llama-3.1-8B-Instruct-Q4_K_M.gguf -ngl 99\n"
PROCESSED = "prompt eval time = {:.2f} ms / {} tokens\neval time = 3737.50 ms / 300 tokens ( 12.46 ms per token, 80.00 tokens per second)\n"
EMPTY = "| model | test | t/s |\n| --- | --- | --- |\n| llama 8B Q4_K - Medium | tg128 | 110.00 |\n"


def test_a_bounded_depth_is_used_as_a_bound() -> None:
    factors = list[float]()
    for n_prompt in (4000, 32000):
        bounded = MODEL_AT_DEPTH + PROCESSED.format(n_prompt / 3, n_prompt)
        of_depth = part(why_of(EMPTY, bounded), "depth")
        low, high = of_depth.range or (0.0, 0.0)
        assert 1 < low < of_depth.factor < high
        assert f"B at least {n_prompt:,}" in of_depth.reason
        factors.append(low)
    assert factors[0] == pytest.approx(1.06, abs=0.01)
    assert factors[1] > 1.3


def test_a_bound_says_nothing_where_the_other_side_is_deeper() -> None:
    bounded = MODEL_AT_DEPTH + PROCESSED.format(100, 300)
    deep = EMPTY.replace("tg128", "tg128 @ d9000")
    assert part(why_of(deep, bounded), "depth").how == NOT_KNOWN
    of_nobody = PROCESSED.format(1000, 3000)  # no model is named
    assert part(why_of(EMPTY.replace("llama 8B", "foo 8B"), of_nobody), "depth").how == (
        NOT_KNOWN
    )


def test_a_kind_of_model_is_no_other_model() -> None:
    of_model = part(why_of(EMPTY, MODEL_AT_DEPTH + PROCESSED.format(1000, 3000)), "model")
    assert (of_model.differs, of_model.lacking) == (False, ["A"])
    other = MODEL_AT_DEPTH.replace("8B", "3B") + PROCESSED.format(1000, 3000)
    assert part(why_of(EMPTY, other), "model").differs


def test_a_model_of_one_name_may_be_quantized_differently() -> None:
    words = EMPTY.replace("llama 8B Q4_K - Medium", "tiny-8b")
    explained = why_of(words, words.replace("tiny-8b", "tiny-8b Q4_K - Medium"))
    quantization = part(explained, "quantization")
    assert (quantization.how, quantization.lacking) == (NOT_KNOWN, ["A"])
    assert "Ask about A: Which quantization?" in " ".join(sentences(explained, details=True))


def test_a_backend_is_not_called_missing_in_a_command() -> None:
    on_cuda = "| model | backend | test | t/s |\n| --- | --- | --- | --- |\n| llama 8B Q4_K - Medium | CUDA | tg128 | 110.00 |\n"
    explained = why_of(on_cuda, MODEL_AT_DEPTH + PROCESSED.format(1000, 3000))
    assert not any("backend" in each.reason for each in explained.different)


def n_lines(explained: WhyAnswer, width: int = 80) -> int:
    """The lines that an answer takes in a terminal."""
    printed = section(explained)
    lines = [*printed.words, *printed.sentences]
    n_rows = len(printed.rows) + 1 if printed.rows else 0
    return n_rows + sum(len(textwrap.wrap(line, width)) for line in lines)


OTHER_SIDES = (
    "30 t/s",
    "2x RTX 3090\n./llama-server -m /m/tiny-2B-Q4_0.gguf -ngl 12 -t 6 -fa -ctk q8_0 -ctv q8_0\n"
    + CLI,
    BENCH.format("fa", "1", "90.00", "abcdef01", "7000")
    + "Device 0: Some GPU 9, compute capability 8.6\n",
    WINDOW.format(10, "0.0", "120.0", 4),
)


@pytest.mark.parametrize("other", OTHER_SIDES, ids=["words", "log", "table", "windows"])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_an_answer_has_at_most_fourteen_lines(other: str, prefill: bool) -> None:
    n_answers = 0
    for sample in (*PRINTED, *BY_HAND):
        try:
            explained = why_of(sample.text, other, prefill)
        except LabError:  # no phase is of both
            continue
        n_answers += 1
        assert n_lines(explained) <= 14, sample.name
    assert n_answers > 4 or prefill
