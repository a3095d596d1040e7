"""Figures in texts of other programs: every sample exact, and mutilated ones refused or right."""
# ruff: noqa: E501 (samples are as programs print them)

import random
import re

import pytest

from lab.errors import LabError
from lab.features.why import pasted
from lab.features.why.pasted import DECODE, MIXED, PREFILL, UNKNOWN, WHOLE, WINDOW

SAMPLES: dict[str, tuple[str, list[tuple[str, float]]]] = {
    "ollama": (
        "total duration:       4.3363202s\nload duration:        67.7549ms\nprompt eval count:    32 token(s)\n"
        "prompt eval duration: 535.0053ms\nprompt eval rate:     59.81 tokens/s\n"
        "eval count:           61 token(s)\neval duration:        3.7321777s\neval rate:            16.34 tokens/s\n",
        [(DECODE, 16.34), (PREFILL, 59.81)],
    ),
    "ollama in one line": (
        "total duration: 3m24.6020313s load duration: 15.0067ms prompt eval count: 7 token(s) prompt eval duration: "
        "999ms prompt eval rate: 7.01 tokens/s eval count: 356 token(s) eval duration: 3m23.587s eval rate: 1.75 "
        "tokens/s\n",
        [(DECODE, 1.75), (PREFILL, 7.01)],
    ),
    "ollama api": (
        '"total_duration":5043500667,"load_duration":5025959,"prompt_eval_count":26,"prompt_eval_duration":325953000,'
        '"eval_count":290,"eval_duration":4709213000\n',
        [(DECODE, 61.5814), (PREFILL, 79.766)],
    ),
    "server, old": (
        "slot print_timing: id  0 | task 0 | \n"
        "prompt eval time = 1302678.24 ms / 31293 tokens (   41.63 ms per token,    24.02 tokens per second)\n"
        "       eval time =   89470.04 ms /   615 tokens (  145.48 ms per token,     6.87 tokens per second)\n"
        "      total time = 1392148.28 ms / 31908 tokens\n",
        [(PREFILL, 24.022), (DECODE, 6.87381)],
    ),
    "server, new": (
        "1.00.958.295 I slot print_timing: id  0 | task 0 | prompt eval time =   13556.62 ms /  2342 tokens (    5.79 "
        "ms per token,   172.76 tokens per second)\n"
        "1.00.958.301 I slot print_timing: id  0 | task 0 |        eval time =   41133.71 ms /   861 tokens (   47.83 "
        "ms per token,    20.91 tokens per second)\n"
        "1.00.958.302 I slot print_timing: id  0 | task 0 |       total time =   54690.33 ms /  3203 tokens\n",
        [(PREFILL, 172.757), (DECODE, 20.9074)],
    ),
    "ik_llama.cpp": (
        "INFO [           print_timings] prompt eval time     =  152804.51 ms / 35736 tokens (    4.28 ms per token,   "
        '233.87 tokens per second) | tid="139666309812224" timestamp=1752894767 id_slot=0 id_task=0 '
        "t_prompt_processing=152804.508 n_prompt_tokens_processed=35736 t_token=4.275926460711887\n"
        "INFO [           print_timings] generation eval time =  189234.22 ms /   905 runs   (  209.10 ms per toke...\n",
        [(PREFILL, 233.867), (DECODE, 4.78243)],
    ),
    "timings, rates alone": (
        '"prompt_n": 9825,"prompt_per_second": 91.88938979076052,"predicted_n": 407,"predicted_per_second": '
        "7.717271190351537\n",
        [(DECODE, 7.717271), (PREFILL, 91.88939)],
    ),
    "timings, old": (
        '"cache_n":0,"prompt_n":34,"prompt_ms":110.645,"prompt_per_token_ms":3.254,"prompt_per_second":307.289,'
        '"predicted_n":64,"predicted_ms":1302.927,"predicted_per_token_ms":20.358,"predicted_per_second":49.120}\n',
        [(DECODE, 49.12), (PREFILL, 307.289)],
    ),
    "timings, new": (
        '"cache_n":0,"prompt_n":39,"prompt_ms":19.041,"prompt_per_second":2048.21,"predicted_n":32,"predicted_ms":'
        '200.184,"predicted_per_token_ms":6.457548387096774,"predicted_per_second":154.8575310714143}\n',
        [(DECODE, 154.8575), (PREFILL, 2048.21)],
    ),
    "llama-cli without decode": (
        "llama\\_perf\\_context\\_print:        load time =   63917.91 ms\n"
        "llama_perf_context_print: prompt eval time =  735270.12 ms / 36352 tokens (   20.23 ms per token,    49.44 "
        "tokens per second)\n"
        "llama_perf_context_print:        eval time =       0.00 ms /     1 runs   (    0.00 ms per token,      inf "
        "tokens per second)\nllama_perf_context_print:       total time =  736433.40 ms / 36353 tokens\n",
        [(PREFILL, 49.4403)],
    ),
    "llama-cli": (
        "llama_perf_context_print: prompt eval time =   81388.87 ms / 32163 tokens (    2.53 ms per token,   395.18 "
        "tokens per second)\nllama_perf_context_print:        eval time =   24015.13 ms /   802 runs   (   29.94 ms per "
        "token,    33.40 tokens per second)\n",
        [(PREFILL, 395.177), (DECODE, 33.3956)],
    ),
    "lm studio api": (
        '"usage":{"prompt_tokens":24,"completion_tokens":53,"total_tokens":77},"stats":{"tokens_per_second":'
        '51.43709529007664,"time_to_first_token":0.111,"generation_time":0.954,"stop_reason":"eosFound"},"model_info":'
        '{"arch":"granite","quant":"Q4_K_M","format":"gguf","context_length":4096}\n',
        [(DECODE, 51.4371)],
    ),
    "lm studio": (
        "28.92 tok/sec\n\u2022\n877 tokens \u2022 0.06s to first token \u2022 Stop reason: EOS Token Found\n",
        [(DECODE, 28.92)],
    ),
    "koboldcpp": (
        "CtxLimit:48/8152, Amt:31/512, Init:0.00s, Process:0.23s (13.8ms/T = 72.65T/s), Generate:1.05s (33.9ms/T = "
        "29.47T/s), Total:1.29s (24.11T/s)\n",
        [(DECODE, 29.47), (PREFILL, 72.65), (WHOLE, 24.11)],
    ),
    "vllm": (
        "INFO 08-01 07:18:24 [loggers.py:122] Engine 000: Avg prompt throughput: 22639.7 tokens/s, Avg generation "
        "throughput: 34.2 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 67.5%\n",
        [(WINDOW, 34.2)],
    ),
    "mlx_lm": (
        "Prompt: 15777 tokens, 69.450 tokens-per-sec\nGeneration: 480 tokens, 5.792 tokens-per-sec\n"
        "Peak memory: 464.764 GB\n",
        [(DECODE, 5.792), (PREFILL, 69.45)],
    ),
    "mlx_lm.benchmark": (
        "Timing with prompt_tokens=512, generation_tokens=1000, batch_size=1.\n"
        "Trial 1:  prompt_tps=1518.240, generation_tps=101.587, peak_memory=21.408, total_time=10.267\n",
        [(DECODE, 101.587), (PREFILL, 1518.24)],
    ),
    "text-generation-webui": (
        "18:52:50-790912 INFO     Output generated in 51.24 seconds (6.67 tokens/s, 342 tokens, context 7323, seed "
        "1221920105)\n",
        [(WHOLE, 6.67)],
    ),
    "llama-bench": (
        "| model                          |       size |     params | backend    | ngl | n_ubatch | fa | mmap | dio |"
        "            test |                  t/s |\n| --- | ---: | ---: | --- | --: | --: | -: | -: | -: | --: | --: |\n"
        "| gpt-oss 20B MXFP4 MoE          |  11.27 GiB |    20.91 B | CUDA       |  99 |     2048 |  1 |    0 |   1 | "
        "pp2048 @ d32768 |      2689.42 \u00b1 18.89 |\nbuild: 11fb327bf (7941)\n",
        [(PREFILL, 2689.42)],
    ),
    "llama-bench, both": ("| test | t/s |\n| pp4096+tg128 | 900.10 +/- 3.10 |\n", [(MIXED, 900.1)]),
    "llama-bench json": (
        '[{"model_type": "llama 1B Q4_0", "n_batch": 2048, "n_ubatch": 512, "n_threads": 8, "type_k": "f16", "type_v": '
        '"f16", "n_gpu_layers": 0, "flash_attn": 0, "n_prompt": 0, "n_gen": 128, "n_depth": 0, "avg_ts": 289.1, '
        '"stddev_ts": 2.5}]\n',
        [(DECODE, 289.1)],
    ),
    "batched": (
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |\n"
        "|  4096 |     32 |    1 |   4128 |    0.907 |  4513.91 |    0.407 |    78.54 |    1.315 |  3139.56 |\n",
        [(DECODE, 78.54), (PREFILL, 4513.91)],
    ),
    "sweep": (
        "|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |\n"
        "|   512 |    128 |  32256 |    0.715 |   715.85 |    4.090 |    31.30 |\n",
        [(DECODE, 31.3), (PREFILL, 715.85)],
    ),
    "localscore": (
        '{"avg_prompt_tps": 1200.5, "avg_gen_tps": 44.1}\n',
        [(MIXED, 44.1), (MIXED, 1200.5)],
    ),
    "bare": ("35 tokens/s\n", [(UNKNOWN, 35)]),
    "bare with a comma": ("~ 28,9 tok/s", [(UNKNOWN, 28.9)]),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_has_its_figures_and_their_meaning(name: str) -> None:
    text, figures = SAMPLES[name]
    for pasted_text in (
        text,
        f"Why is this so slow?\n\n{text}\nThanks, on my laptop\n" if "\n" in text[:-1] else text,
    ):
        found = pasted.parse(pasted_text)
        read, true = (
            sorted(pairs) for pairs in ([(one.counts, one.tps) for one in found], figures)
        )
        assert [counts for counts, _ in read] == [counts for counts, _ in true]
        assert [tps for _, tps in read] == pytest.approx([tps for _, tps in true], rel=1e-4)


def test_what_a_sample_says_of_its_setup() -> None:
    old, new, cli, mlx = (
        next(one for one in pasted.parse(SAMPLES[name][0]) if one.counts == DECODE)
        for name in ("server, old", "server, new", "llama-cli", "mlx_lm")
    )
    assert (old.n_gen, old.n_steps, new.n_gen, new.n_steps) == (615, 614, 861, 860)
    assert (cli.n_gen, cli.n_steps, cli.n_prompt, mlx.n_steps) == (803, 802, 32163, 479)
    (bench,) = pasted.parse(SAMPLES["llama-bench"][0])
    assert (bench.n_prompt, bench.n_depth, bench.quantization) == (2048, 32768, "MXFP4")
    assert bench.settings == {"ubatch": 2048, "flash_attn": "on", "n_gpu_layers": 99}
    assert bench.spread == pytest.approx(18.89 / 2689.42)
    kobold = pasted.parse(SAMPLES["koboldcpp"][0])[0]
    assert (kobold.n_prompt, kobold.n_gen, kobold.n_depth) == (17, 31, 0)
    (webui,) = pasted.parse(SAMPLES["text-generation-webui"][0])
    assert (webui.total_s, webui.n_gen, webui.n_prompt) == (51.24, 342, 7323)


def mutilated(text: str, chance: random.Random) -> str:
    """The text with a line or a piece lost, cut off, doubled, or with foreign letters between its lines."""
    lines = text.splitlines(keepends=True)
    kind = chance.randrange(6)
    at = chance.randrange(len(text))
    if kind == 0:
        return text[:at]
    if kind == 1:
        del lines[chance.randrange(len(lines))]
        return "".join(lines)
    if kind == 2:
        return "".join(chance.choice(["", "\x1b[31m", "\u202e> "]) + line for line in lines)
    if kind == 3:
        return re.sub(r" +", lambda match: chance.choice([" ", match[0]]), text)
    if kind == 4:
        return text + "\n".join("\x00\xff{[|" for _ in range(3)) + text[:at]
    word = chance.choice(re.findall(r"[A-Za-z_]{3,}", text) or ["x"])
    return text.replace(word, word[::-1])


@pytest.mark.parametrize("name", SAMPLES)
def test_a_mutilated_sample_is_refused_or_right(name: str) -> None:
    """300 and more in all: what remains has one of the true figures."""
    text, figures = SAMPLES[name]
    chance = random.Random(name)
    for _ in range(12):
        broken = mutilated(text, chance)
        try:
            found = pasted.parse(broken)
        except LabError as refused:
            assert "Known formats: llama-bench" in str(refused)
            continue
        for one in found:
            assert min(abs(one.tps / tps - 1) for _, tps in figures) < 0.02, (broken, one)


@pytest.mark.parametrize("name", ["ollama", "server, old", "llama-cli", "text-generation-webui"])
def test_a_digit_that_contradicts_the_others_is_refused(name: str) -> None:
    text, _ = SAMPLES[name]
    rate = {
        "ollama": "16.34",
        "server, old": "6.87 ",
        "llama-cli": "33.40",
        "text-generation-webui": "6.67",
    }[name]
    with pytest.raises(LabError, match="its tokens and time give"):
        pasted.parse(text.replace(rate, "9" + rate))


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
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(LabError) as refused:
        pasted.parse(text)
    assert "looks like" not in str(refused.value) or text != "hello world"
